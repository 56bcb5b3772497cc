"""Certified lower bounds on δ(ε), for any Gram matrix: what no accountant of the dominating pair can go below.

Four families, the best of which is reported (S = G/σ², u ~ N(0, S), a_i = e^(u_i − S_ii/2), T = Σ a_i, γ = e^ε):
* half-spaces {w·u > t}, and unions of them over windows of indices: every event is a test;
* single jumps: (T − γb)_+ ≥ Σ_i (a_i − γb)_+, Gaussian mechanisms at ε + log b;
* the uncorrelated pair: S ≥ diag S entrywise, so its δ is the smaller one (Gram domination), and the lattice bounds it;
* the same with a shared part, S ≥ τ + diag(S − τ): T is e^(w − τ/2), w ~ N(0, τ), times an independent sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

from dpmf import budget, progress, validation
from dpmf.accountants.lattice import grouped, independent_delta, uncorrelated_diagonal
from dpmf.accountants.lattice._lognormal_sum import LognormalSum
from dpmf.accountants.protocol import RELATIONS, Direction, directions_of
from dpmf.gram.sums import LowerSums, lower_sums
from dpmf.loss.gaussian import gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.search import LARGEST_RATIO
from dpmf.strategies.base import ToeplitzStrategy

_LOSS, _MAX_POINTS = 0.0005, 2**17
_MOST_WINDOWS, _PAIR_WORK = 50, 1e6
_WINDOW_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55)
_SHARED_CELLS = 24
_DENSE_BATCHES = 3000  # up to which the Gram matrix is made
_GRAMS_HELD = 4  # b × b arrays at a time
_SHORT = 2**20  # iterations up to which sums of the rows of G take no time
_LEAST_SHARED = 0.02  # of the largest entry: below, a shared part gains nothing


def lower_delta(target: Mechanism | Array, noise_multiplier: float, epsilon: float, direction: str = "both") -> float:
    """A number that δ(ε) of the dominating pair is certainly not below (for "both": the larger direction).

    `target` is a mechanism or the Gram matrix of its mixture means. Where the time budget ends before anything was
    found, closed forms answer; so they do in the searches below.

    **Formal guarantees.** Each family is a lower bound (see `LowerBounds`), so their maximum is. Rounding errors are
    subtracted.
    """
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    epsilon = validation.non_negative("epsilon", epsilon)
    directions = _directions(direction)

    def search(bounds: LowerBounds, note: Note) -> None:
        for one_way in directions:
            budget.check()
            note(bounds.delta(sigma, epsilon, one_way))

    return _largest_in_time(target, search, ("delta", sigma, epsilon, direction))


def lower_epsilon(
    target: Mechanism | Array, noise_multiplier: float, delta: float, direction: str = "both", start: float = 1.0
) -> float:
    """The largest ε found at which δ(ε) certainly exceeds `delta` (0 where none is); `start` is where to look first.

    **Formal guarantees.** The lower bound was evaluated at the ε returned and exceeded `delta`, and δ(ε) falls with ε:
    no ε' ≤ ε can be certified.
    """
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    delta = validation.probability("delta", delta)
    directions = _directions(direction)

    def search(bounds: LowerBounds, note: Note) -> None:
        found = 0.0
        for one_way in directions:
            low, high = found, max(start, 2 * found)
            if not bounds.exceeds(delta, sigma, low, one_way):
                continue
            while bounds.exceeds(delta, sigma, high, one_way):
                low, high = high, 2 * high
                note(low)
            while high - low > 1e-5 * high:
                middle = 0.5 * (low + high)
                low, high = (middle, high) if bounds.exceeds(delta, sigma, middle, one_way) else (low, middle)
                note(low)
            found = low

    return _largest_in_time(target, search, ("epsilon", sigma, delta, direction))


def lower_noise_multiplier(
    target: Mechanism | Array, epsilon: float, delta: float, direction: str = "both", relative_tolerance: float = 1e-4
) -> float:
    """The largest noise multiplier found that certainly misses (ε, δ), so that no accountant could accept it.

    0 where none was found.

    **Formal guarantees.** At the value returned a lower bound on δ(ε) was evaluated and exceeded `delta`; every smaller
    noise multiplier has a larger Gram matrix G/σ², hence a larger δ(ε), and misses the target too.
    """
    epsilon = validation.non_negative("epsilon", epsilon)
    delta = validation.probability("delta", delta)
    tolerance = validation.positive("relative_tolerance", relative_tolerance)
    directions = _directions(direction)

    def search(bounds: LowerBounds, note: Note) -> None:
        found, start = 0.0, math.sqrt(float(bounds.diagonal.max()))
        for one_way in directions:

            def misses(sigma: float, one_way: Direction = one_way) -> bool:
                nonlocal found
                missed = bounds.exceeds(delta, sigma, epsilon, one_way)
                if missed:
                    note(sigma)
                    found = max(found, sigma)
                return missed

            if start > 0:
                _last_miss(misses, found or start, known=found > 0, tolerance=tolerance)

    return _largest_in_time(target, search, ("noise multiplier", epsilon, delta, direction, tolerance))


Note: TypeAlias = Callable[[float], None]


def _largest_in_time(
    target: Mechanism | Array, search: Callable[[LowerBounds, Note], None], question: Hashable
) -> float:
    """The largest number that a search notes in time; by closed forms where it notes none.

    The answer of a search that was not cut short is kept with the mechanism: `auto` asks first, then its caller does.
    """
    noted = [0.0]

    def ask() -> None:
        bounds = LowerBounds.of(target)
        if question not in bounds.answers:
            progress.say("lower bound")
            search(bounds, noted.append)
            bounds.answers[question] = max(noted)
        noted.append(bounds.answers[question])

    finished = budget.attempt(lambda: budget.finished(ask), False)
    if not finished and max(noted) == 0 and isinstance(target, Mechanism):
        with budget.unlimited():
            search(LowerBounds.closed_forms(target), noted.append)
    return max(noted)


def _last_miss(misses: Callable[[float], bool], start: float, *, known: bool, tolerance: float) -> None:
    """Ask for the largest σ with misses(σ); a `known` start need not be gone below."""
    low = high = start
    factor = 1.5
    if misses(start):
        while misses(high := low * factor):
            low, factor = high, factor * factor
            if high > start * LARGEST_RATIO:
                return
    elif known:
        return
    else:
        while not misses(low := high / factor):
            high, factor = low, factor * factor
            if low < start / LARGEST_RATIO:
                return
    while high > low * (1 + tolerance):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (middle, high) if misses(middle) else (low, middle)


def _directions(direction: str) -> tuple[Direction, ...]:
    return directions_of(validation.choice("direction", direction, RELATIONS))


def _checked_gram(gram: object) -> Array:
    matrix = np.asarray(gram, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"target must be a dpmf.Mechanism or a square Gram matrix, got shape {matrix.shape}")
    if not (np.all(np.isfinite(matrix)) and np.all(matrix >= 0) and np.allclose(matrix, matrix.T)):
        raise ValueError("target must be a Gram matrix: finite, non-negative and symmetric")
    return matrix


@dataclass(frozen=True, eq=False)
class _Windows:
    """Half-spaces {w_k·u > x·s_k}, s_k² = w_kᵀSw_k, w_k ≥ 0, as seen from each index.

    Attributes:
      shifts: (Sw_k)_i/s_k for σ = 1, windows × indices: how far index i moves w_k·u, in standard deviations.
      pair_scale: the standard deviation of (w_k·u)/s_k + (w_l·u)/s_l for each pair k < l.
    """

    shifts: Array
    pair_scale: Array

    @classmethod
    def of(cls, gram: Array, weights: Array) -> _Windows:
        products = weights @ gram
        covariance = products @ weights.T
        scale = np.sqrt(np.diagonal(covariance))
        first, second = np.triu_indices(len(weights), 1)
        correlation = (covariance / np.outer(scale, scale))[first, second]
        return cls(products / scale[:, None], np.sqrt(2 + 2 * correlation))


class LowerBounds:
    """The lower bounds of one Gram matrix; what does not depend on σ is done once."""

    def __init__(
        self,
        diagonal: Array,
        gram: Array | None,
        relative_error: float,
        sums: LowerSums | None = None,
        total: float = 0,
    ) -> None:
        self.diagonal = diagonal
        self._error = relative_error
        b, largest = len(diagonal), float(diagonal.max())
        self.answers: dict[Hashable, float] = {}
        self._windows: list[_Windows] = []
        self._shared = 0.0
        self._closed = False
        if largest == 0:
            return
        if sums is not None:
            self._shared = sums.least * (1 - relative_error)
            self._windows.append(_Windows((sums.row_sums / math.sqrt(total))[None, :], np.empty(0)))
            return
        if gram is None:
            self._windows.append(_Windows((diagonal / math.sqrt(diagonal.sum()))[None, :], np.empty(0)))
            return
        self._shared = float(gram.min()) * (1 - relative_error)
        row_sums = gram.sum(axis=1)
        for power in (0.0, 3.0, 10.0):
            # Indices with more overlap matter more the rarer the event is.
            weights = np.exp(power * (row_sums / row_sums.max() - 1))
            self._windows.append(_Windows.of(gram, weights[None, :]))
        if np.count_nonzero(gram) == np.count_nonzero(diagonal):
            return  # the lattice does better than windows
        for length in _WINDOW_LENGTHS:
            number = b // length
            if 2 <= number <= _MOST_WINDOWS and number * number * b <= _PAIR_WORK and np.all(diagonal > 0):
                owner = np.arange(b) * number // b
                self._windows.append(_Windows.of(gram, (owner == np.arange(number)[:, None]).astype(np.float64)))

    @classmethod
    def of(cls, target: Mechanism | Array) -> LowerBounds:
        if isinstance(target, Mechanism):
            known = target.__dict__.get("_lower_bounds")  # kept with the mechanism, like its cached properties
            if known is None:
                known = target.__dict__["_lower_bounds"] = cls._of_mechanism(target)
            return known
        gram = _checked_gram(target)
        return cls(np.diagonal(gram), gram, 4 * UNIT * (len(gram) + 16))

    @classmethod
    def _of_mechanism(cls, mechanism: Mechanism) -> LowerBounds:
        strategy, batching = mechanism.strategy, mechanism.thrown_once()
        error = mechanism.gram_error
        diagonal = uncorrelated_diagonal(mechanism)
        if diagonal is not None:
            return cls(diagonal, None, error)
        if isinstance(strategy, ToeplitzStrategy) and batching.batches_per_epoch > _DENSE_BATCHES:
            sums, lower = mechanism.gram_sums, lower_sums(strategy, batching)
            return cls(sums.diagonal, None, error, lower, sums.total)
        budget.claim(_GRAMS_HELD * 8.0 * batching.batches_per_epoch**2)
        return cls(np.diagonal(mechanism.gram), mechanism.gram, error)

    @classmethod
    def closed_forms(cls, mechanism: Mechanism) -> LowerBounds:
        """Only bounds that cost next to nothing: single jumps, and one half-space."""
        strategy, batching = mechanism.strategy, mechanism.thrown_once()
        error = mechanism.gram_error
        gram, sums = mechanism.gram_sums, None
        if isinstance(strategy, ToeplitzStrategy) and batching.iterations <= _SHORT:
            sums = lower_sums(strategy, batching)
        bounds = cls(gram.diagonal, None, error, sums, gram.total)
        bounds._closed = True
        return bounds

    def delta(self, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
        """The best of the lower bounds on δ(ε), for one direction.

        **Formal guarantees.** With P_i the law of u moved by the i-th column of S, P their mean and Q that of u:
        * δ(ε) ≥ P(E) − γQ(E) for every event E (remove), Q(E) − γP(E) (add). For a union E of half-spaces E_k,
          P_i(E) ≥ Σ P_i(E_k) − Σ_{k<l} P_i(E_k ∩ E_l) and Q(E) ≤ Σ Q(E_k), and an intersection lies in the half-space
          of the sum. Thresholds are free.
        * T ≥ 0 is a sum of a_i ≥ 0, so T − K ≥ Σ (a_i − K) over the a_i above K.
        * E f(A) grows with every entry of S for convex f; entries are rounded down by their error.
        * With a shared factor X the payoff is convex in X: replacing X by its mean in each of a few cells lowers it.
        """
        return max(self._values(noise_multiplier, epsilon, direction))

    def exceeds(self, delta: float, noise_multiplier: float, epsilon: float, direction: Direction) -> bool:
        """Whether some bound certifies δ(ε) > delta."""
        budget.check()
        return any(value > delta for value in self._values(noise_multiplier, epsilon, direction))

    def _values(self, sigma: float, epsilon: float, direction: Direction) -> Iterator[float]:
        """The bounds, cheapest first."""
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
        if epsilon <= 500:
            single = [w for w in self._windows if not len(w.pair_scale)]
            for windows in single if direction == "add" else self._windows:
                yield self._best_threshold(windows, sigma, epsilon, direction)
        if self._closed:
            return
        yield self._independent(entries, counts, epsilon, direction)
        shared = self._shared / sigma / sigma
        if self._shared > _LEAST_SHARED * float(self.diagonal.max()) and shared < 1e8:
            rest, counts = grouped(np.maximum(variances - shared, 0.0), "lower")
            yield self._with_shared(shared * (1 - 4 * UNIT), rest, counts, epsilon, direction)

    def _independent(self, entries: Array, counts: np.ndarray, epsilon: float, direction: Direction) -> float:
        law = LognormalSum.make(entries, counts, side="lower", loss=_LOSS, max_points=_MAX_POINTS)
        found = independent_delta(law, epsilon, direction)
        return 0.0 if found is None else found.value

    def _with_shared(
        self, shared: float, entries: Array, counts: np.ndarray, epsilon: float, direction: Direction
    ) -> float:
        """E[X·δ°(ε − log X)], X = e^(w − τ/2): each strike is an option on the uncorrelated rest."""
        law = LognormalSum.make(entries, counts, side="lower", loss=4 * _LOSS, max_points=_MAX_POINTS)
        if law is None or epsilon > 500:
            return 0.0
        root, b, gamma = math.sqrt(shared), len(self.diagonal), math.exp(epsilon)
        sign = 1 if direction == "remove" else -1
        inner = np.linspace(-4.0, 9.0, _SHARED_CELLS - 1) if sign > 0 else np.linspace(-9.0, 4.0, _SHARED_CELLS - 1)
        z = np.concatenate(([-40.0], inner, [40.0]))
        total = 0.0
        for left, right in pairwise(z.tolist()):
            # On the side of 0 where the two tails are small.
            mass, moment = (
                float(ndtr(right - m) - ndtr(left - m) if right <= m else ndtr(m - left) - ndtr(m - right))
                for m in (0.0, root)
            )
            if mass < 1e-30 or moment < 1e-30:
                continue
            # A rounding error of the factor moves the strike; the masses are good to 10⁻¹¹ of themselves.
            factor = moment / mass * (1 - sign * 1e-10)
            if sign > 0:
                total += mass * factor * law.option("call", b * gamma / factor).value / b
            else:
                total += mass * factor * gamma * law.option("put", b / (gamma * factor)).value / b
        return total * (1 - 1e-9)

    def _best_threshold(self, windows: _Windows, sigma: float, epsilon: float, direction: Direction) -> float:
        shifts = windows.shifts / sigma
        typical, largest = float(np.sqrt((shifts**2).mean())), float(shifts.max())
        if not 1e-12 < typical < 1e12:
            return 0.0
        sign = 1 if direction == "remove" else -1
        # Where the likelihood ratio of one index would cross e^ε, for indices like the average and like the best.
        guesses = [min(sign * epsilon / d + d / 2, 30.0 + largest) for d in (typical, largest)]

        def value(x: float) -> float:
            budget.check()
            return _union_value(windows, shifts, self._error, x, epsilon, direction)

        grid = np.linspace(max(-38.0, min(guesses) - 4), max(-30.0, max(guesses) + 4), 16)
        best = int(np.argmax(values := [value(float(x)) for x in grid]))
        ends = grid[max(best - 1, 0)], grid[min(best + 1, 15)]
        refined = minimize_scalar(lambda x: -value(x), bounds=ends, method="bounded", options={"maxiter": 12})
        return max(values[best], -float(refined.fun))


def _union_value(
    windows: _Windows, shifts: Array, error: float, x: float, epsilon: float, direction: Direction
) -> float:
    """P(E) − γQ(E), or Q(E) − γP(E) for one half-space mirrored, from below."""
    gamma = math.exp(epsilon) * (1 + 4 * UNIT * (1 + epsilon))
    number, b = shifts.shape
    # Of every tail, relative (`ndtr` and the rounding of its argument) and absolute (underflow).
    slack, tiny = 1e-12 + 16 * UNIT * (abs(x) + 1) ** 2, 1e-300
    if direction == "add":
        other = float(ndtr(x - shifts * (1 - error)).mean()) * (1 + slack) + tiny
        return float(ndtr(x)) * (1 - slack) - gamma * other
    gain = float(ndtr(shifts * (1 - error) - x).sum()) / b * (1 - slack)
    gain -= gamma * number * (float(ndtr(-x)) * (1 + slack) + tiny)
    if gain <= 0 or number == 1:
        return gain
    first, second = np.triu_indices(number, 1)
    argument = ((shifts[first] + shifts[second]) * (1 + error) - 2 * x) / windows.pair_scale[:, None]
    argument += 4 * error * np.abs(argument)
    return gain - float(ndtr(argument).sum()) / b * (1 + slack) - number * number * tiny
