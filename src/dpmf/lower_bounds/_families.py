"""The families of lower bounds for one Gram matrix (docs/theory/lower_bounds.md).

With S = G/σ², u ~ N(0, S), a_i = e^(u_i − S_ii/2), T = Σ a_i and γ = e^ε they are:
* half-spaces {w·u > t}, and unions of them over windows of indices: every event is a test (`_half_spaces`);
* events in terms of the sums over windows, made independent of each other (`_windows`), and planes that touch the
  logarithm of their likelihood ratio (`_tangents`);
* polynomials below the payoff, given what is seen around the record's own bin (`_own_bin`);
* single jumps: (T − γb)_+ ≥ Σ_i (a_i − γb)_+, Gaussian mechanisms at ε + log b;
* the uncorrelated pair: S ≥ diag S entrywise, so its δ is smaller (Gram domination), and `lattice` bounds it;
* the same with a shared part, S ≥ τ + diag(S − τ): T is e^(w − τ/2), w ~ N(0, τ), times an independent sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
from scipy.special import ndtr

from dpmf import budget
from dpmf.accountants.lattice import uncorrelated_diagonal
from dpmf.accountants.lattice.lognormal_sum import LognormalSum, grouped
from dpmf.accountants.protocol import Direction
from dpmf.gram.sums import lower_sums
from dpmf.loss.gaussian import gaussian_delta
from dpmf.lower_bounds._half_spaces import LARGEST_EPSILON, HalfSpaces
from dpmf.lower_bounds._own_bin import OwnBins
from dpmf.lower_bounds._tangents import tangent_delta
from dpmf.lower_bounds._windows import Windows, best_of
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.strategies.base import ToeplitzStrategy

_GRAMS_HELD = 4  # b × b arrays that are in memory at a time
# Proof constants (docs/theory/floating-point.md, "Lower bounds"): relative errors of the mean of a cell of the shared
# factor, and of a sum over the cells.
_CELL_ERROR, _SUM_ERROR = 1e-10, 1e-9


@dataclass(frozen=True)
class _Tuning:
    """Which members of the families are tried, and how fine. Any values give sound bounds.

    Attributes:
      loss: the discretisation of the lattice, as a relative change of the noise multiplier.
      max_points: the number of lattice points, at most.
      window_lengths: lengths of the windows of indices whose half-spaces form a union.
      most_windows: the number of windows of a union, at most.
      pair_work: (windows)² × indices, at most.
      overlap_powers: the half-spaces of one window weight an index by e^(power × its share of the overlap).
      windows: numbers of windows that are made independent of each other.
      window_work: (windows)² × indices × indices, at most.
      tangents: numbers of windows for which planes are tried.
      close: a bound that is at least this part of the best one on coarse cells is asked on fine ones too.
      strides: indices that are this far apart may become neighbours.
      clearly: they do so if their covariance exceeds that of neighbours by this factor.
      shared_cells: cells of the shared factor.
      least_shared: a shared part below this share of the largest entry is not tried.
      dense_batches: the number of batches up to which the Gram matrix is formed.
      short: the number of iterations up to which the closed forms include sums of the rows of G.
    """

    loss: float = 0.0005
    max_points: int = 2**17
    window_lengths: tuple[int, ...] = (1, 2, 3, 5, 8, 13, 21, 34, 55)
    most_windows: int = 50
    pair_work: float = 1e6
    overlap_powers: tuple[float, ...] = (0.0, 3.0, 10.0)
    windows: tuple[int, ...] = (3, 4, 5, 6, 8, 12, 17, 24, 34, 50)
    window_work: float = 1e8
    tangents: tuple[int, ...] = (12, 24)
    close: float = 0.85
    strides: int = 8
    clearly: float = 1.2
    shared_cells: int = 24
    least_shared: float = 0.02
    dense_batches: int = 3000
    short: int = 2**20


_TUNING = _Tuning()


@dataclass(frozen=True)
class SlowerBounds:
    """The slower bounds that seem best at some σ and ε.

    Attributes:
      proved: a lower bound on δ(ε) there, which was found by comparing them.
      value: the largest of them, for any σ and ε.
      about: about the same from less work, which proves nothing; None where all of it would be needed.
    """

    proved: float
    value: Callable[[float, float], float]
    about: Callable[[float, float], float] | None


class LowerBounds:
    """The lower bounds of one Gram matrix. What does not depend on σ is computed once.

    Attributes:
      diagonal: the diagonal of G.
      answers: answers to earlier questions of the searches.
    """

    def __init__(
        self, diagonal: Array, error: float, half_spaces: Sequence[HalfSpaces], shared: float, *,
        windows: Sequence[Windows] = (), own_bins: OwnBins | None = None, closed: bool = False,
    ) -> None:  # fmt: skip
        self.diagonal = diagonal
        self.answers: dict[Hashable, float] = {}
        self._error = error
        self._half_spaces = tuple(half_spaces)
        self._shared = shared * (1 - error)
        self._closed = closed
        self._windows = tuple(windows)
        self._own_bins = own_bins

    @classmethod
    def of(cls, target: Mechanism | Array) -> LowerBounds:
        """The bounds of a mechanism, which are stored with it, or of a Gram matrix."""
        if isinstance(target, Mechanism):
            known = target.__dict__.get("_lower_bounds")
            if known is None:
                known = target.__dict__["_lower_bounds"] = cls._of_mechanism(target)
            return known
        gram = _checked_gram(target)
        return cls._of_gram(gram, 4 * UNIT * (len(gram) + 16))

    @classmethod
    def _of_mechanism(cls, mechanism: Mechanism) -> LowerBounds:
        strategy, batching = mechanism.strategy, mechanism.thrown_once()
        diagonal = uncorrelated_diagonal(mechanism)
        if diagonal is not None:
            return cls._of_diagonal(diagonal, mechanism.gram_error)
        if isinstance(strategy, ToeplitzStrategy) and batching.batches_per_epoch > _TUNING.dense_batches:
            return cls._of_sums(mechanism, strategy)
        budget.claim(_GRAMS_HELD * 8.0 * batching.batches_per_epoch**2)
        return cls._of_gram(mechanism.gram, mechanism.gram_error)

    @classmethod
    def closed_forms(cls, mechanism: Mechanism) -> LowerBounds:
        """Only the bounds that cost next to nothing: single jumps, and one half-space."""
        strategy = mechanism.strategy
        if isinstance(strategy, ToeplitzStrategy) and mechanism.batching.iterations <= _TUNING.short:
            return cls._of_sums(mechanism, strategy, closed=True)
        return cls._of_diagonal(mechanism.gram_sums.diagonal, mechanism.gram_error, closed=True)

    @classmethod
    def _of_diagonal(cls, diagonal: Array, error: float, *, closed: bool = False) -> LowerBounds:
        """For uncorrelated noise, or for the diagonal of any Gram matrix, which by Gram domination has a smaller δ."""
        total = float(diagonal.sum())
        half_spaces = [HalfSpaces.from_sums(diagonal, total, error)] if total > 0 else []
        return cls(diagonal, error, half_spaces, 0.0, closed=closed)

    @classmethod
    def _of_sums(cls, mechanism: Mechanism, strategy: ToeplitzStrategy, *, closed: bool = False) -> LowerBounds:
        """From sums of the Gram matrix, which need not be formed."""
        sums, lower = mechanism.gram_sums, lower_sums(strategy, mechanism.thrown_once())
        error = mechanism.gram_error
        half_spaces = [HalfSpaces.from_sums(lower.row_sums, sums.total, error)] if sums.total > 0 else []
        return cls(sums.diagonal, error, half_spaces, lower.least, closed=closed)

    @classmethod
    def _of_gram(cls, gram: Array, error: float) -> LowerBounds:
        diagonal = np.diagonal(gram)
        if not diagonal.any():
            return cls(diagonal, error, (), 0.0)
        gram = _reordered(gram)
        diagonal = np.diagonal(gram)
        b, row_sums = len(gram), gram.sum(axis=1)
        half_spaces = []
        for power in _TUNING.overlap_powers:
            # Indices with more overlap matter more the rarer the event is.
            weights = np.exp(power * (row_sums / row_sums.max() - 1))
            half_spaces.append(HalfSpaces.from_weights(gram, weights[None, :], error))
        correlated = np.count_nonzero(gram) > np.count_nonzero(diagonal)  # otherwise the lattice does better
        for length in _TUNING.window_lengths if correlated and np.all(diagonal > 0) else ():
            number = b // length
            if 2 <= number <= _TUNING.most_windows and number * number * b <= _TUNING.pair_work:
                owner = np.arange(b) * number // b
                weights = (owner == np.arange(number)[:, None]).astype(np.float64)
                half_spaces.append(HalfSpaces.from_weights(gram, weights, error))
        windows = (
            Windows.of(gram, number, error)
            for number in _TUNING.windows
            if correlated and number <= b and (number * b) ** 2 <= _TUNING.window_work
        )
        return cls(
            diagonal, error, half_spaces, float(gram.min()),
            windows=[one for one in windows if one is not None],
            own_bins=OwnBins.of(gram, error) if correlated else None,
        )  # fmt: skip

    def delta(self, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
        """The largest of the lower bounds on δ(ε), for one direction.

        **Formal guarantees.** With P_i the law of u moved by the i-th column of S, P their mean and Q that of u:
        * δ(ε) ≥ P(E) − γQ(E) for every event E (remove), Q(E) − γP(E) (add). For a union E of half-spaces E_k,
          P_i(E) ≥ Σ P_i(E_k) − Σ_{k<l} P_i(E_k ∩ E_l) and Q(E) ≤ Σ Q(E_k), and an intersection lies in the half-space
          of the sum. Thresholds are free.
        * Events in terms of independent statistics have probabilities that are sums of products (`Windows`).
        * Polynomials below the payoff, given what is seen around each bin, have exact expectations (`OwnBins`).
        * T ≥ 0 is a sum of a_i ≥ 0, so T − K ≥ Σ (a_i − K) over the a_i above K.
        * E f(A) grows with every entry of S for convex f; entries are rounded down by their error.
        * With a shared factor X the payoff is convex in X: replacing X by its mean in each of a few cells lowers it.
        """
        quick = max(self._values(noise_multiplier, epsilon, direction))
        slower = self._slower(noise_multiplier, epsilon, direction)
        return quick if slower is None else max(quick, slower.proved, slower.value(noise_multiplier, epsilon))

    def exceeds(self, delta: float, noise_multiplier: float, epsilon: float, direction: Direction) -> bool:
        """Whether one of the quick bounds proves δ(ε) > `delta`."""
        budget.check()
        return any(value > delta for value in self._values(noise_multiplier, epsilon, direction))

    def refined(
        self, delta: float, noise_multiplier: float, epsilon: float, direction: Direction
    ) -> SlowerBounds | None:
        """The slower bounds that are best at this σ and ε; None if they do not seem to exceed `delta` there."""
        slower = self._slower(noise_multiplier, epsilon, direction)
        if slower is None:
            return None
        expected = slower.value if slower.about is None else slower.about
        return slower if max(slower.proved, expected(noise_multiplier, epsilon)) > delta else None

    def _slower(self, noise_multiplier: float, epsilon: float, direction: Direction) -> SlowerBounds | None:
        """The slower bounds that are best on coarse cells, or for a few bins."""
        bounds: list[tuple[float, Callable[[float, float], float]]] = []
        proved = 0.0
        if self._windows:
            windows, proved = best_of(self._windows, noise_multiplier, epsilon, direction)
            bounds.append((proved, lambda s, e: windows.delta(s, e, direction, fine=True)))
        own_bins = self._own_bins if direction == "remove" else None
        about: Callable[[float, float], float] | None = None
        if own_bins is not None:
            about = lru_cache(maxsize=1)(own_bins.about)
            bounds.append((about(noise_multiplier, epsilon), own_bins.delta))
        if direction == "remove" and (not bounds or max(bounds, key=lambda one: one[0]) is bounds[0]):
            # Planes are not tried where moments around the own bin are better than windows: both follow what is curved.
            for one in self._windows:
                if len(one.shifts) in _TUNING.tangents:
                    budget.check()
                    rough = tangent_delta(one, noise_multiplier, epsilon, fine=False)
                    proved = max(proved, rough)
                    bounds.append((rough, partial(tangent_delta, one)))
        if not bounds:
            return None
        value = max(rough for rough, _ in bounds)
        best = [bound for rough, bound in bounds if rough >= min(_TUNING.close, 1.0) * value]

        @lru_cache(maxsize=1)  # a search begins where this was asked for
        def fine(sigma: float, epsilon: float) -> float:
            budget.check()
            return max(bound(sigma, epsilon) for bound in best)

        by_few_bins = own_bins is not None and own_bins.delta in best
        return SlowerBounds(proved, fine, about if by_few_bins else None)

    def _values(self, sigma: float, epsilon: float, direction: Direction) -> Iterator[float]:
        """The quick bounds, the cheapest first."""
        yield 0.0
        b = len(self.diagonal)
        with np.errstate(over="ignore"):
            variances = np.minimum(self.diagonal / sigma / sigma, 1e300) * (1 - self._error - 4 * UNIT)
        entries, counts = grouped(variances, "lower")
        if direction == "remove" or b == 1:
            jump = (epsilon + math.log(b)) * (1 + 4 * UNIT)
            yield sum(c * gaussian_delta(math.sqrt(s), jump, "lower") for s, c in zip(entries, counts, strict=True)) / b
        if b == 1:
            return  # that was exact
        for half_spaces in self._half_spaces:
            yield half_spaces.delta(sigma, epsilon, direction)
        if self._closed:
            return
        yield self._independent(entries, counts, epsilon, direction)
        shared = self._shared / sigma / sigma
        if self._shared > _TUNING.least_shared * float(self.diagonal.max()) and shared < 1e8:
            rest, counts = grouped(np.maximum(variances - shared, 0.0), "lower")
            yield self._with_shared(shared * (1 - 4 * UNIT), rest, counts, epsilon, direction)

    def _independent(self, entries: Array, counts: np.ndarray, epsilon: float, direction: Direction) -> float:
        """δ(ε) of the uncorrelated pair, from below."""
        law = LognormalSum.make(entries, counts, side="lower", loss=_TUNING.loss, max_points=_TUNING.max_points)
        found = None if law is None else law.delta(epsilon, direction)
        return 0.0 if found is None else found.value

    def _with_shared(
        self, shared: float, entries: Array, counts: np.ndarray, epsilon: float, direction: Direction
    ) -> float:
        """E[X·δ°(ε − log X)], X = e^(w − τ/2): every cell of X is an option on the uncorrelated rest."""
        law = LognormalSum.make(entries, counts, side="lower", loss=4 * _TUNING.loss, max_points=_TUNING.max_points)
        if law is None or epsilon > LARGEST_EPSILON:
            return 0.0
        root, b, gamma = math.sqrt(shared), len(self.diagonal), math.exp(epsilon)
        sign = 1 if direction == "remove" else -1
        ends = (-4.0, 9.0) if sign > 0 else (-9.0, 4.0)
        z = [-40.0, *np.linspace(*ends, max(_TUNING.shared_cells - 1, 2)).tolist(), 40.0]
        total = 0.0
        for left, right in pairwise(z):
            # Probabilities under w ~ N(0, τ) and under its shift by τ, from the tails that are small.
            mass, moment = (
                float(ndtr(right - m) - ndtr(left - m) if right <= m else ndtr(m - left) - ndtr(m - right))
                for m in (0.0, root)
            )
            if mass < 1e-30 or moment < 1e-30:
                continue
            # A rounding error of the factor moves the strike.
            factor = moment / mass * (1 - sign * _CELL_ERROR)
            if sign > 0:
                total += mass * factor * law.option("call", b * gamma / factor).value / b
            else:
                total += mass * factor * gamma * law.option("put", b / (gamma * factor)).value / b
        return total * (1 - _SUM_ERROR)


def _reordered(gram: Array) -> Array:
    """The same pair with the indices in another order, if indices some distance apart overlap more than neighbours do.

    Only the order in which windows are cut depends on it.
    """
    b = len(gram)
    if b < 2 * _TUNING.strides:
        return gram
    strides = range(1, _TUNING.strides + 1)
    overlap = [float(np.diagonal(gram, stride).sum()) for stride in strides]
    best = int(np.argmax(overlap))
    if not overlap[best] > _TUNING.clearly * overlap[0]:
        return gram
    order = np.argsort(np.arange(b) % strides[best], kind="stable")
    return np.asarray(gram[np.ix_(order, order)])


def _checked_gram(gram: object) -> Array:
    matrix = np.asarray(gram, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"target must be a dpmf.Mechanism or a square Gram matrix, got shape {matrix.shape}")
    if not (np.all(np.isfinite(matrix)) and np.all(matrix >= 0) and np.allclose(matrix, matrix.T)):
        raise ValueError("target must be a Gram matrix: finite, non-negative and symmetric")
    return matrix
