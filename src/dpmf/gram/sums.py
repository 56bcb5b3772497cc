"""Sums of the Gram matrix and bounds on its diagonals, without forming it: for b = 10⁵ it would take 80 GB.

For a Toeplitz strategy, mean i is the folded column f moved down by i and cut off at N, so G[i, i+d] = Σ f[s]·f[s+d]
over s < N − i − d. The largest entry of each diagonal is the first, an autocorrelation of f, and sums of G are
correlations too. All take a few arrays of N numbers, and FFTs of pieces of them. Other strategies are streamed by rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpmf import budget
from dpmf.batching import BallsInBins, OneThrow
from dpmf.gram.means import folded_column, mean_rows
from dpmf.numerics import UNIT, Array, sum_of_squares
from dpmf.strategies.base import Strategy, ToeplitzStrategy

_FFT_ERROR = 8 * UNIT  # relative error of a transform in ℓ², divided by log₂ of its length
_PIECE = 2**20  # how many entries to work on at a time


@dataclass(frozen=True, eq=False)
class GramSums:
    """The diagonal of G and the sum of its entries, with a relative error of at most `Mechanism.gram_error`."""

    diagonal: Array
    total: float


@dataclass(frozen=True, eq=False)
class LowerSums:
    """Lower bounds on the sums of the rows of G and on its least entry."""

    row_sums: Array
    least: float


def gram_sums(strategy: Strategy, batching: BallsInBins | OneThrow) -> GramSums:
    """Return the diagonal and the sum of G, in O(N) for Toeplitz strategies, in one pass over the rows for others."""
    n, b = batching.iterations, batching.batches_per_epoch
    if isinstance(strategy, ToeplitzStrategy):
        folded = folded_column(strategy, batching)
        # Σ_{s < N−i} f[s]²: all means have the first N − b + 1 in common.
        last = np.concatenate(([sum_of_squares(folded[: n - b + 1])], folded[n - b + 1 :] ** 2))
        return GramSums(np.cumsum(last)[::-1].copy(), sum_of_squares(_sum_of_means(folded, b)))
    diagonal, total = np.zeros(b), 0.0
    for _, block in mean_rows(strategy, batching):
        budget.check()
        diagonal += (block**2).sum(axis=0)
        total += float((block.sum(axis=1) ** 2).sum())
    return GramSums(diagonal, total)


def _sum_of_means(folded: Array, b: int) -> Array:
    """Return Σ_i m_i, the sums of f over windows of b. Only non-negative numbers are added."""
    n = len(folded)
    epochs = -(-n // b)
    sums = np.zeros(epochs * b)
    sums[:n] = folded
    rows = sums.reshape(epochs, b)
    few = max(1, _PIECE // b)
    for stop in range(epochs, 0, -few):  # from the end, because each epoch needs the one before it unchanged
        start = max(0, stop - few)
        before = rows[max(0, start - 1) : stop - 1, :0:-1].cumsum(axis=1)[:, ::-1]
        np.cumsum(rows[start:stop], axis=1, out=rows[start:stop])
        rows[stop - len(before) : stop, :-1] += before
    return sums[:n]


def _correlation(first: Array, second: Array, lags: int) -> tuple[Array, float]:
    """Return Σ_s first[s]·second[s + d] for d < lags, and a bound on the error of each entry.

    `first` is transformed in pieces, to save memory. The transforms of a piece and of the part of `second` that it
    meets have an error of t = 8u·log₂ n relative to their ℓ² norms, and their product has an error of 2t relative to
    the product of the norms. These add up to less than 3t·‖first‖·‖second‖ (Cauchy–Schwarz; no entry of `second` is met
    more than twice). An entry of the inverse transform has an error of t relative to its norm. Adding m spectra adds
    2mu·‖first‖·‖second‖.
    """
    from scipy import fft

    piece = min(len(first), max(lags, _PIECE))
    n = fft.next_fast_len(piece + lags - 1, real=True)
    pieces = -(-len(first) // piece)
    budget.require(
        40.0 * n + 24.0 * len(second), f"lag products of {len(second)} iterations", "batches_per_epoch or epochs"
    )
    total = np.zeros(n // 2 + 1, dtype=np.complex128)
    for start in range(0, len(first), piece):
        budget.check()
        spectrum = np.conj(fft.rfft(first[start : start + piece], n))
        spectrum *= fft.rfft(second[start : start + piece + lags - 1], n)
        total += spectrum
    values = fft.irfft(total, n)
    norm = math.sqrt(sum_of_squares(first) * sum_of_squares(second))
    transform = _FFT_ERROR * math.log2(max(n, 2))
    error = (6 * transform + 4 * pieces * UNIT) * norm + 2 * transform * math.sqrt(sum_of_squares(values))
    return np.asarray(values[:lags]), error


def toeplitz_lags(strategy: ToeplitzStrategy, batching: BallsInBins | OneThrow) -> Array:
    """Return for each d < b an upper bound on all G[i, i+d], larger than the largest by about 10⁻¹³·G[0, 0].

    **Formal guarantees.** The first entry of each diagonal is its largest. The error bound of the transforms is added,
    and the relative error of the products of two sums of k numbers. Where these would hide a decay, a second bound is
    smaller. In one epoch, one of two indices at a distance d is at least d, so the lag product is at most
    max_{j≥d} f_j·Σ f. Over k epochs, f ≤ H in every epoch, H its entrywise largest row, and two indices at a cyclic
    distance D are not both below D, so the lag products are at most 2k·max_{j≥D} H_j·Σ H.
    """
    b, k = batching.batches_per_epoch, batching.epochs
    folded = folded_column(strategy, batching)
    values, error = _correlation(folded, folded, b)
    if k == 1:
        later = np.maximum.accumulate(folded[::-1])[::-1][:b]
        decay = later * float(folded.sum()) * (1 + (len(folded) + 8) * 2 * UNIT)
    else:
        decay = _decay_over_epochs(folded, b, k)
    lags = np.minimum(np.maximum(values, 0.0) + error, decay) * (1 + (2 * k + 4) * 2 * UNIT)
    lags[0] = max((float(values[0]) + error) * (1 + (2 * k + 4) * 2 * UNIT), float(lags[1:].max(initial=0.0)))
    return np.asarray(lags)


def _decay_over_epochs(folded: Array, b: int, k: int) -> Array:
    """Return 2k·max_{j≥D} H_j·Σ H for the cyclic distance D of each lag, H the entrywise largest epoch of f."""
    whole = len(folded) // b
    envelope = folded[: whole * b].reshape(whole, b).max(axis=0)
    rest = folded[whole * b :]
    envelope[: len(rest)] = np.maximum(envelope[: len(rest)], rest)
    later = np.maximum.accumulate(envelope[::-1])[::-1]
    d = np.arange(b)
    return np.asarray(2 * k * later[np.minimum(d, b - d)] * float(envelope.sum()) * (1 + (b + 8) * 2 * UNIT))


def autocorrelation_upper(values: Array) -> Array:
    """Return upper bounds on Σ_s v[s]·v[s + d] for every d < len(v), for v ≥ 0."""
    found, error = _correlation(values, values, len(values))
    return np.asarray((np.maximum(found, 0.0) + error) * (1 + (2 * len(values) + 4) * 2 * UNIT))


def lower_sums(strategy: ToeplitzStrategy, batching: BallsInBins | OneThrow) -> LowerSums:
    """Return lower bounds on the sums of the rows of G and on its least entry.

    **Formal guarantees.** Row i of G sums to ⟨m_i, Σ m_j⟩, and the least entry of each diagonal is its last. The error
    bound of the transforms is subtracted. The caller subtracts the relative error (`Mechanism.gram_error`).
    """
    n, b = batching.iterations, batching.batches_per_epoch
    folded = folded_column(strategy, batching)
    rows, error = _correlation(folded, _sum_of_means(folded, b), b)
    last, last_error = _correlation(folded[: n - b + 1], folded, b)
    return LowerSums(np.maximum(rows - error, 0.0), max(0.0, float(last.min()) - last_error))
