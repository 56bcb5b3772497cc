"""What the Gram matrix of the mixture means says about itself without being made: for b = 10⁵ it would take 80 GB.

For a Toeplitz strategy mean i is the folded column f moved down by i and cut off at N, so G[i, i+d] = Σ f[s]·f[s+d],
s < N − i − d: the largest entry of each diagonal is the first, an autocorrelation of f, and sums of G are correlations
too. All take a few FFTs of length N + b. Other strategies are streamed by rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpmf import budget
from dpmf.allocation import BallsInBins, folded_column, mean_rows
from dpmf.strategies.base import Array, Strategy, ToeplitzStrategy

_UNIT = 2.0**-53
_FFT_ERROR = 8 * _UNIT  # of a transform in ℓ², relative, times log₂ of its length


@dataclass(frozen=True, eq=False)
class GramSums:
    """The diagonal of G and the sum of its entries, to a relative (N + 2b + 8)·2⁻⁵²."""

    diagonal: Array
    total: float


@dataclass(frozen=True, eq=False)
class LowerSums:
    """The sums of the rows of G and its least entry, both from below."""

    row_sums: Array
    least: float


def gram_sums(strategy: Strategy, allocation: BallsInBins) -> GramSums:
    """O(N) for Toeplitz strategies, one pass over the rows for others."""
    n, b = allocation.iterations, allocation.batches_per_epoch
    if isinstance(strategy, ToeplitzStrategy):
        folded = folded_column(strategy, allocation)
        squares = np.cumsum(folded**2)
        return GramSums(np.asarray(squares[n - 1 - np.arange(b)]), float((_sum_of_means(folded, b) ** 2).sum()))
    diagonal, total = np.zeros(b), 0.0
    for _, block in mean_rows(strategy, allocation):
        budget.check()
        diagonal += (block**2).sum(axis=0)
        total += float((block.sum(axis=1) ** 2).sum())
    return GramSums(diagonal, total)


def _sum_of_means(folded: Array, b: int) -> Array:
    """Σ_i m_i: sums of f over windows of b, made of sums of positive numbers only."""
    n = len(folded)
    epochs = -(-n // b)
    rows = np.zeros((epochs, b))
    rows.reshape(-1)[:n] = folded
    sums = np.cumsum(rows, axis=1)
    sums[1:, :-1] += np.cumsum(rows[:-1, :0:-1], axis=1)[:, ::-1]
    return np.asarray(sums.reshape(-1)[:n])


def _correlation(first: Array, second: Array, lags: int) -> tuple[Array, float]:
    """Σ_s first[s]·second[s + d] for d < lags, and a bound on the error of each.

    The transforms are wrong by t = 8u·log₂ n relative to their ℓ² norms; an entry of a product by the product of the
    norms, and one of the inverse transform by its norm.
    """
    from scipy import fft

    # Negative lags, down to 1 − len(first), may fold onto each other, but not onto those asked for.
    n = fft.next_fast_len(max(len(second), len(first) + lags), real=True)
    spectrum = np.conj(fft.rfft(first, n))
    spectrum *= fft.rfft(second, n) if second is not first else np.conj(spectrum)
    values = fft.irfft(spectrum, n)
    norm = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    error = _FFT_ERROR * math.log2(n) * (4 * norm + 2 * math.sqrt(float((values**2).sum())))
    return np.asarray(values[:lags]), error


def toeplitz_lags(strategy: ToeplitzStrategy, allocation: BallsInBins) -> Array:
    """For each d < b a number that no G[i, i+d] exceeds, a relative 10⁻¹³ of G[0, 0] above the largest at most.

    **Formal guarantees.** The first entry of each diagonal is its largest. The error bound of the transforms is added.
    Where that would hide a decay, a second bound is smaller: f ≤ H in every epoch, H its entrywise largest row, and two
    indices at a cyclic distance D are not both below D, so the lag products are at most 2k·max_{j≥D} H_j·Σ H.
    """
    b, k = allocation.batches_per_epoch, allocation.epochs
    folded = folded_column(strategy, allocation)
    values, error = _correlation(folded, folded, b)
    padded = np.zeros(k * b)
    padded[: len(folded)] = folded
    envelope = padded.reshape(k, b).max(axis=0)
    later = np.maximum.accumulate(envelope[::-1])[::-1]
    d = np.arange(b)
    distance = np.minimum(d, b - d) if k > 1 else d
    decay = 2 * k * later[distance] * float(envelope.sum()) * (1 + (b + 8) * 2 * _UNIT)
    lags = np.minimum(np.maximum(values, 0.0) + error, decay)
    lags[0] = max(float(values[0]) + error, float(lags[1:].max(initial=0.0)))
    return lags


def lower_sums(strategy: ToeplitzStrategy, allocation: BallsInBins) -> LowerSums:
    """**Formal guarantees.** Row i of G sums to ⟨m_i, Σ m_j⟩; the least entry of each diagonal is its last. The error
    bound of the transforms is taken off."""
    n, b = allocation.iterations, allocation.batches_per_epoch
    folded = folded_column(strategy, allocation)
    rows, error = _correlation(folded, _sum_of_means(folded, b), b)
    budget.check()
    last, last_error = _correlation(folded[: n - b + 1], folded, b)
    return LowerSums(np.maximum(rows - error, 0.0), max(0.0, float(last.min()) - last_error))
