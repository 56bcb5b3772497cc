"""Certified lower bounds: values that no accountant of the same dominating pair can go below.

Each of the three functions takes a mechanism, or the Gram matrix of its mixture means, and maximises over several
families of lower bounds on δ(ε) (`_families`; docs/theory/lower_bounds.md). Where records are thrown or sampled several
times, coarser pairs of one throw are composed (`_composed`; docs/theory/batchings.md). When the time budget ends first,
the largest bound found so far is returned, and closed forms answer if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from dpmf import budget, progress, validation
from dpmf.accountants.protocol import RELATIONS, Direction, directions_of
from dpmf.lower_bounds._composed import ComposedLowerBounds
from dpmf.lower_bounds._families import LowerBounds
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.search import LARGEST_RATIO


@dataclass(frozen=True)
class _Tuning:
    """How closely roots are searched for. Any values give sound bounds.

    Attributes:
      epsilon_tolerance: the search for ε ends when its interval is this narrow, relative to ε.
      first_step: the search for σ begins with relative steps of this size.
      refined_slope: where the slower bounds go on from where the quick ones end, log δ is expected to fall this much
        for each unit of log σ or log ε, at first.
      refined_tolerance: the least relative tolerance of their search.
      refined_tries: the number of slower bounds that are evaluated for one search, at most.
      guesses: the number of guesses at them that say where to begin, at most.
    """

    epsilon_tolerance: float = 1e-5
    first_step: float = 0.5
    refined_slope: float = 25.0
    refined_tolerance: float = 1e-3
    refined_tries: int = 5
    guesses: int = 4


_TUNING = _Tuning()


def lower_delta(target: Mechanism | Array, noise_multiplier: float, epsilon: float, direction: str = "both") -> float:
    """A lower bound on δ(ε) of the dominating pair.

    Args:
      target: a mechanism, or the Gram matrix of its mixture means.
      noise_multiplier: σ.
      epsilon: ε ≥ 0.
      direction: "remove", "add", or "both" for the larger of the two.

    Returns:
      The largest lower bound found; 0 where none was found.

    **Formal guarantees.** Every family is a lower bound (see `LowerBounds`), so their maximum is. Rounding errors are
    subtracted.
    """
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    epsilon = validation.non_negative("epsilon", epsilon)
    directions = _directions(direction)

    def search(bounds: _Bounds, note: _Note) -> None:
        for one_way in directions:
            budget.check()
            note(bounds.delta(sigma, epsilon, one_way))

    return _largest_in_time(target, search, ("delta", sigma, epsilon, direction))


def lower_epsilon(
    target: Mechanism | Array, noise_multiplier: float, delta: float, direction: str = "both", start: float = 1.0
) -> float:
    """A lower bound on the ε at which the dominating pair reaches δ.

    Args:
      target: a mechanism, or the Gram matrix of its mixture means.
      noise_multiplier: σ.
      delta: δ, strictly between 0 and 1.
      direction: "remove", "add", or "both" for the larger of the two.
      start: the ε at which to look first.

    Returns:
      The largest ε found at which δ(ε) exceeds `delta`; 0 where none was found.

    **Formal guarantees.** A lower bound on δ(ε) was evaluated at the ε returned and exceeded `delta`. Since δ(ε)
    falls with ε, no accountant of this pair can certify that ε or a smaller one.
    """
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    delta = validation.probability("delta", delta)
    directions = _directions(direction)

    def search(bounds: _Bounds, note: _Note) -> None:
        found = 0.0
        for one_way in directions:
            low, high = found, max(start, 2 * found)
            if not bounds.exceeds(delta, sigma, low, one_way):
                continue
            while bounds.exceeds(delta, sigma, high, one_way):
                low, high = high, 2 * high
                note(low)
            while high - low > _TUNING.epsilon_tolerance * high:
                middle = 0.5 * (low + high)
                low, high = (middle, high) if bounds.exceeds(delta, sigma, middle, one_way) else (low, middle)
                note(low)
            found = low
            refined = bounds.refined(delta, sigma, found, one_way) if found > 0 else None
            if refined is not None:
                value = partial(refined.value, sigma)
                about = None if refined.about is None else partial(refined.about, sigma)
                for epsilon in _climbing(value, about, found, delta, _TUNING.epsilon_tolerance):
                    note(epsilon)
                    found = max(found, epsilon)

    return _largest_in_time(target, search, ("epsilon", sigma, delta, direction))


def lower_noise_multiplier(
    target: Mechanism | Array, epsilon: float, delta: float, direction: str = "both", relative_tolerance: float = 1e-4
) -> float:
    """A lower bound on the noise multiplier that an accountant of the dominating pair can certify for (ε, δ).

    Args:
      target: a mechanism, or the Gram matrix of its mixture means.
      epsilon: the target ε ≥ 0.
      delta: the target δ, strictly between 0 and 1.
      direction: "remove", "add", or "both" for the larger of the two.
      relative_tolerance: how close to the largest such noise multiplier to end.

    Returns:
      The largest noise multiplier found that provably misses the target; 0 where none was found.

    **Formal guarantees.** A lower bound on δ(ε) was evaluated at the value returned and exceeded `delta`. Every smaller
    noise multiplier has a larger Gram matrix G/σ², hence a larger δ(ε), and misses the target too.
    """
    epsilon = validation.non_negative("epsilon", epsilon)
    delta = validation.probability("delta", delta)
    tolerance = validation.positive("relative_tolerance", relative_tolerance)
    directions = _directions(direction)

    def search(bounds: _Bounds, note: _Note) -> None:
        found, start = 0.0, math.sqrt(float(bounds.diagonal.max()))
        for one_way in directions:

            def misses(sigma: float, one_way: Direction = one_way) -> bool:
                nonlocal found
                if missed := bounds.exceeds(delta, sigma, epsilon, one_way):
                    note(sigma)
                    found = max(found, sigma)
                return missed

            if start > 0:
                _last_miss(misses, found or start, known=found > 0, tolerance=tolerance)
            refined = bounds.refined(delta, found, epsilon, one_way) if found > 0 else None
            if refined is not None:
                value = partial(_of_noise, refined.value, epsilon)
                about = None if refined.about is None else partial(_of_noise, refined.about, epsilon)
                for sigma in _climbing(value, about, found, delta, tolerance):
                    note(sigma)
                    found = max(found, sigma)

    return _largest_in_time(target, search, ("noise multiplier", epsilon, delta, direction, tolerance))


_Note: TypeAlias = Callable[[float], None]
_Bounds: TypeAlias = LowerBounds | ComposedLowerBounds


def _bounds_of(target: Mechanism | Array) -> _Bounds:
    """The bounds of a target; those of several throws are stored with their mechanism too."""
    if not isinstance(target, Mechanism) or target.batching.fixed:
        return LowerBounds.of(target)
    known = target.__dict__.get("_lower_bounds")
    if known is None:
        known = target.__dict__["_lower_bounds"] = ComposedLowerBounds(target)
    return known


def _largest_in_time(target: Mechanism | Array, search: Callable[[_Bounds, _Note], None], question: Hashable) -> float:
    """The largest value that a search notes within the budget, or that closed forms give where it notes none.

    The answer of a search that was not cut short is stored with the mechanism, because `auto` asks the same questions
    as its caller.
    """
    noted = [0.0]

    def ask() -> None:
        bounds = _bounds_of(target)
        if question not in bounds.answers:
            progress.say("lower bound")
            search(bounds, noted.append)
            bounds.answers[question] = max(noted)
        noted.append(bounds.answers[question])

    finished = budget.attempt(lambda: budget.finished(ask), False)
    if not finished and max(noted) == 0 and isinstance(target, Mechanism) and target.batching.fixed:
        with budget.unlimited():
            search(LowerBounds.closed_forms(target), noted.append)
    return max(noted)


def _last_miss(misses: Callable[[float], bool], start: float, *, known: bool, tolerance: float) -> None:
    """Search for the largest σ with misses(σ), by relative steps that grow; with `known`, only above `start`."""
    low = high = start
    factor = 1 + _TUNING.first_step
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


def _of_noise(bound: Callable[[float, float], float], epsilon: float, sigma: float) -> float:
    """A bound at one ε, as a function of σ."""
    return bound(sigma, epsilon)


def _climbing(
    value: Callable[[float], float], about: Callable[[float], float] | None, start: float, target: float,
    tolerance: float,
) -> Iterator[float]:  # fmt: skip
    """Larger and larger arguments at which a slow function that falls was seen to exceed the target.

    It is nearly a straight line in logarithms, so few evaluations are needed. Where `about` is about the same and
    quicker, it says where to begin.
    """
    tolerance = max(tolerance, _TUNING.refined_tolerance)
    low, above = math.log(start), _excess(about or value, math.log(start), target)
    if about is not None and not above > 0:  # it is of no use there
        about, above = None, _excess(value, low, target)
    high, below, slope = math.inf, 0.0, _TUNING.refined_slope
    expected = None
    if about is not None:
        expected, slope = _expected(about, low, above, target, tolerance)
    for _ in range(_TUNING.refined_tries - 1 if above > 0 else 0):
        if expected is not None:
            step = expected - low
        else:
            step = above / slope if high == math.inf else (high - low) * above / (above - below)
        place = low + max(min(step, 1.0) - 0.3 * tolerance, 0.5 * tolerance)
        if place >= high or high - low < tolerance:
            return
        excess = _excess(value, place, target)
        if expected is not None:  # what was expected of the start is off by as much
            above += excess - slope * (expected - place)
            if excess < 0 and not above > 0:
                return
        if excess > 0:
            yield math.exp(place)
            slope = slope if expected is not None else max((above - excess) / (place - low), 1.0)
            low, above = place, excess
            if high == math.inf and above / slope < 0.5 * tolerance:
                return
        else:
            high, below = place, excess
        expected = None


def _expected(
    about: Callable[[float], float], place: float, excess: float, target: float, tolerance: float
) -> tuple[float, float]:
    """Where a function is expected to reach the target, in logarithms, and how fast it falls there, by secants."""
    slope = _TUNING.refined_slope
    for _ in range(_TUNING.guesses):
        step = max(min(excess / slope, 1.0), -1.0)
        if abs(step) < 0.2 * tolerance:
            break
        before, excess = excess, _excess(about, place + step, target)
        place, slope = place + step, max((before - excess) / step, 1.0)
    return place + excess / slope, slope


def _excess(value: Callable[[float], float], place: float, target: float) -> float:
    """The logarithm of how many times the target a function is, at a place that is given by its logarithm."""
    return math.log(max(value(math.exp(place)), 1e-300) / target)


def _directions(direction: str) -> tuple[Direction, ...]:
    return directions_of(validation.choice("direction", direction, RELATIONS))
