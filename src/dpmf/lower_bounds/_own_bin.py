"""Lower bounds on δ(ε) from moments around the record's own bin, in the remove direction.

As the accountant own-bin, from below: δ(ε) is the mean over the bins of E_i(1 − e^ε/A)_+, one normal variable that all
bins share is integrated in closed form, and one that says what is seen around the bin is cut into cells. In each cell
four moments of what is left, and a polynomial below the payoff, give a bound. Every bin is asked by itself, so that
nothing of the Gram matrix is replaced but for rounding (docs/theory/lower_bounds.md, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpmf.accountants.moments._given_mean import Shape
from dpmf.accountants.own_bin._given_bin import GivenBin, Shared, raised_part
from dpmf.kernels import announce_compilation
from dpmf.kernels.smoothed import payoff, smoothed_below
from dpmf.lower_bounds._half_spaces import LARGEST_EPSILON
from dpmf.numerics import UNIT, Array

# Proof constants (docs/theory/floating-point.md, "Lower bounds"): by how much the mean of a cell may be off, and the
# relative error of its probability and of sums; the widest cells, and the furthest from 0, for which quadrature does
# that.
_SLIP, _SUM_ERROR = 1e-11, 1e-9
_WIDEST, _FURTHEST = 1.0, 12.0
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide tightness and time. Any positive values give sound bounds.

    Attributes:
      largest_batches: mechanisms with more batches are left to the other families.
      most_terms: the number of terms of A that are kept for each bin, those that overlap most with it.
      spacing: the width of a cell for 100 batches, in standard deviations; it grows with the root of their number.
      knots: how far those τ are apart at which the complete graph of four vertices is bounded.
      sampled_bins: the number of bins that say about what all of them would say.
      ends: where cells begin and end, in deviations from the mean if the record is in the bin.
      negligible: cells are left out where they, and those beyond them, add less than this part.
      largest_variance: above this G/σ² moments say nothing.
      shrunk: by which parts entries off the diagonal are lowered, in turn, until some noise is shared by all bins.
      least_diagonal: an entry of the diagonal below this part of the largest one is too small to be rounded down.
    """

    largest_batches: int = 512
    most_terms: int = 256
    spacing: float = 0.12
    knots: float = 1.5
    sampled_bins: int = 10
    ends: tuple[float, float] = (-2.0, 8.0)
    negligible: float = 2e-3
    largest_variance: float = 12.0
    shrunk: tuple[float, ...] = (0.0, 0.01, 0.05)
    least_diagonal: float = 1e-4


_TUNING = _Tuning()


@dataclass(frozen=True, eq=False)
class OwnBins:
    """Bounds for one Gram matrix.

    Attributes:
      gram: at most the true one in every entry; so it is when its diagonal is raised as in `Shared.of`.
    """

    gram: Array

    @classmethod
    def of(cls, gram: Array, gram_error: float) -> OwnBins | None:
        """For a Gram matrix with this relative error of its entries; None where that is not worth while."""
        least, largest = float(np.diagonal(gram).min()), float(gram.max())
        if not 1 < len(gram) <= _TUNING.largest_batches or not least > _TUNING.least_diagonal * largest:
            return None
        lowered = gram_error + 1.1 * raised_part(len(gram)) * largest / least + 64 * UNIT
        return cls(np.minimum(gram, gram.T) * (1 - lowered))

    def delta(self, noise_multiplier: float, epsilon: float) -> float:
        """A lower bound on δ(ε) of the remove direction; 0 where moments say nothing.

        **Formal guarantees.** S, with its diagonal raised, is positive semidefinite and at most the true matrix in
        every entry, so its δ is smaller (Gram domination). δ(ε) is the mean over the bins i of E_i(1 − e^ε/A)_+, which
        is not negative and grows with A: terms of A may be left out. See `_of_bin` for one bin.
        """
        b = len(self.gram)
        return self._sum_over(range(b), noise_multiplier, epsilon) / b * (1 - _SUM_ERROR)

    def about(self, noise_multiplier: float, epsilon: float) -> float:
        """About what `delta` returns, from a few bins: it says where to look, and proves nothing."""
        b = len(self.gram)
        asked = max(1, min(_TUNING.sampled_bins, b))
        bins = [(2 * place + 1) * b // (2 * asked) for place in range(asked)]
        return self._sum_over(bins, noise_multiplier, epsilon) / asked

    def _sum_over(self, bins: Iterable[int], noise_multiplier: float, epsilon: float) -> float:
        """The sum over some bins i of lower bounds on E_i(1 − e^ε/A)_+, without the rounding error of the sum."""
        b = len(self.gram)
        largest = float(self.gram.max()) / noise_multiplier / noise_multiplier
        if epsilon > LARGEST_EPSILON or not largest <= _TUNING.largest_variance:
            return 0.0
        scaled = self.gram / noise_multiplier / noise_multiplier
        shared = next((found for part in _TUNING.shrunk if (found := Shared.of(_shrunk(scaled, part)))), None)
        if shared is None:
            return 0.0
        announce_compilation(smoothed_below)
        strike = math.exp(epsilon) * (1 + 4 * UNIT * (1 + epsilon))
        spacing = _TUNING.spacing * math.sqrt(max(b / 100, 1.0))
        kept = max(1, min(_TUNING.most_terms, b))
        total = 0.0
        for i in bins:
            closeness = shared.s[i].copy()
            closeness[i] = math.inf
            terms = np.sort(np.argpartition(-closeness, kept - 1)[:kept])
            part = Shared(np.ascontiguousarray(shared.s[np.ix_(terms, terms)]), shared.variance, shared.raised)
            given = GivenBin(part, int(np.searchsorted(terms, i)))
            total += _of_bin(given, shared.variance, strike * (b / kept) * (1 + 4 * UNIT), spacing)
        return total


def _shrunk(s: Array, part: float) -> Array:
    """The matrix with its entries off the diagonal lowered by a part, which lowers δ, too."""
    found = s * (1 - min(part, 1.0))
    found[np.diag_indices(len(s))] = np.diagonal(s)
    return found


def _of_bin(given: GivenBin, variance: float, strike: float, spacing: float) -> float:
    """A lower bound on E_i(1 − K/A)_+ for one bin, A the mean of the terms that are given.

    **Formal guarantees.** Let F(τ) = E[a_i·(1 − K/A)_+ | τ] under the law without a tilt. It is convex where all loads
    on τ are between 0 and 2·l_i; in each cell terms are replaced by smaller ones for which that is so
    (`GivenBin.below`). So E[F; cell] is at least the probability of the cell times F at its mean (Jensen), and F is
    e^(l_i·τ − l_i²/2) times the conditional expectation that `smoothed_below` bounds. Its slope is at most 2·l_i times
    the same factor, which covers the error of the mean. Cells that are left out would add something not negative.
    """
    root, own = math.sqrt(variance), given.own

    def value(weight: float, shape: Shape) -> float:
        moved = strike * (1 + 4 * shape.error + 4 * UNIT)
        found = float(smoothed_below(1, moved, root, shape.mean, shape.deviation, *shape.known, 0.0))
        return weight * max(found - 2 * own * _SLIP, 0.0) if math.isfinite(found) else 0.0

    if own == 0:  # A does not depend on τ
        return value(1.0, given.at(0.0))
    edges, centres, weights = _cells(own, spacing)
    if not centres:
        return 0.0
    # Where most comes from, if A were its mean; then cells on both sides, until they add nothing.
    guesses = [w * payoff(0.0, 1, strike, root, m, 1e-3) for w, m in zip(weights, given.means(centres), strict=True)]
    start = int(np.argmax(guesses))
    total = 0.0
    for way in (range(start, len(centres)), range(start - 1, -1, -1)):
        for k in way:
            added = value(weights[k], given.below(edges[k], centres[k], edges[k + 1], _TUNING.knots))
            total += added
            if added < _TUNING.negligible * total:
                break
    return total


def _cells(own: float, spacing: float) -> tuple[list[float], list[float], list[float]]:
    """Ends of cells of τ, the mean in each, and weights: probabilities times e^(l_i·mean − l_i²/2), rounded down."""
    low = max(_TUNING.ends[0], -_FURTHEST)
    high = max(min(_TUNING.ends[1], _FURTHEST - own), low)
    edges = own + np.linspace(low, high, math.ceil((high - low) / min(spacing, _WIDEST)) + 1)
    half, middle = np.diff(edges)[:, None] / 2, (edges[:-1] + edges[1:])[:, None] / 2
    away = half * _ABSCISSAE
    # Relative to the density in the middle, so that neither can underflow.
    density = np.exp(-away * (middle + away / 2)) * _WEIGHTS * half
    mass = density.sum(axis=1)
    shift = (density * away).sum(axis=1) / mass
    centres = middle[:, 0] + shift
    weights = mass * np.exp(own * centres - own * own / 2 - middle[:, 0] ** 2 / 2) / math.sqrt(2 * math.pi)
    return edges.tolist(), centres.tolist(), (weights * (1 - _SUM_ERROR)).tolist()
