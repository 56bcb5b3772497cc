"""One-dimensional search that ends on the sound side, for noise multipliers and for ε alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol, TypeVar

from dpmf import budget


class Valued(Protocol):
    """Anything that carries the value of a bound."""

    @property
    def value(self) -> float: ...

    @property
    def excess(self) -> float | None: ...


Answer = TypeVar("Answer", bound=Valued)

LARGEST_RATIO = 2.0**60
_LEAST_LOG = -800.0
_NEAR = 0.1  # within this distance in log σ, the slope is taken to be the one at the root
_FAR = 0.5  # the largest step in log σ towards less noise, where the first was smaller
_STEPS = 12  # along a line that is nearly straight, before another search takes over
_ROUGHLY = 4e-3  # the relative tolerance of a search with rough bounds
_NEARLY = 3.0  # a rough excess up to which log δ is taken to be nearly straight
_FORETOLD = 0.03  # a last step in log σ of at most this much need not be evaluated roughly
_FEW = 3  # steps along a line whose slope rough bounds have shown


def least_noise(
    evaluate: Callable[[float], Answer],
    target_delta: float,
    start: float,
    relative_tolerance: float,
    step: float = 0.5,
    rough: Callable[[float], Answer | None] | None = None,
    roughness: float = 1.0,
    rough_holds: bool = True,
    seen_slope: float | None = None,
) -> tuple[float, Answer] | None:
    """The least σ (or ε) found with evaluate(σ).value ≤ target_delta.

    Args:
      evaluate: the bound at σ.
      target_delta: what the bound must not exceed.
      start: where to look first.
      relative_tolerance: how close to the root the search ends.
      step: how far from the start, in log σ, the first step may go.
      rough: cheap bounds that are about `roughness` times larger; they lead to where the search begins.
      roughness: see `rough`.
      rough_holds: whether `rough` gives bounds; estimates may lead the search, but are no answers.
      seen_slope: about −d log δ/d log σ near the root, where it is known.

    Returns:
      σ and its evaluation, or None where no σ up to 2⁶⁰·start meets the target. Where the time budget ends the
      search, the least σ found until then; `OutOfTime` is raised where none was found.

    **Formal guarantees.** The σ returned was evaluated and met the target; it is the smallest evaluated one that did.
    If the bound is monotone in σ and its slope (in logarithms) does not change by a factor of four over the last tenth,
    it is within `relative_tolerance` of the smallest of all.
    """
    met: dict[float, Answer] = {}
    straight = False
    first = math.log(start)

    def over(log_sigma: float, ask: Callable[[float], Answer | None]) -> float:
        budget.check()
        sigma = start if log_sigma == first else math.exp(log_sigma)
        evaluation = ask(sigma)
        if evaluation is None:
            raise _NotRoughly
        if evaluation.value <= target_delta and (rough_holds or ask is evaluate):
            met[sigma] = evaluation
        if evaluation.excess is not None:
            nonlocal straight
            straight = True
            return evaluation.excess
        return (math.log(evaluation.value) if evaluation.value > 0 else _LEAST_LOG) - math.log(target_delta)

    @cache
    def excess(log_sigma: float) -> float:
        return over(log_sigma, evaluate)

    near, slope = first, seen_slope or usual_slope(target_delta)

    def seek() -> None:
        nonlocal near, step, slope
        steps = _FEW if seen_slope and relative_tolerance < _ROUGHLY else _STEPS
        if rough is not None and relative_tolerance < _ROUGHLY:
            roughly = cache(lambda at: over(at, rough))
            surplus = math.log(roughness)
            with suppress(_NotRoughly):
                away = roughly(first) - surplus
                if straight:
                    near, slope = _along_line(roughly, near, step, _ROUGHLY, slope, enough=0.1)
                elif seen_slope and abs(away) <= _FORETOLD * slope:
                    near, step = first + away / slope, min(step, 10 * _ROUGHLY)
                elif seen_slope and abs(away) < _NEARLY:
                    near, slope = _along_line(
                        lambda at: roughly(at) - surplus, near, step, _ROUGHLY, slope, enough=_FORETOLD, aim=0.0
                    )  # fmt: skip
                    step = min(step, 10 * _ROUGHLY)
                else:
                    found = _near_root(roughly, surplus, first, step, slope)
                    near, step, slope = found or (near, step, slope)
                    steps = _FEW if found else steps
        excess(near)
        if straight or steps == _FEW:
            near, slope = _along_line(excess, near, step, relative_tolerance, slope, steps=steps)
            if -slope * relative_tolerance <= excess(near) <= 0:
                return
            step = 4 * relative_tolerance
        bracket = _bracket(excess, near, step, relative_tolerance, slope)
        if bracket is not None:
            _close_in(excess, *bracket, relative_tolerance)

    in_time = budget.finished(seek)
    if not met:
        if not in_time:
            raise budget.OutOfTime
        return None
    sigma = min(met)
    return sigma, met[sigma]


def usual_slope(target_delta: float) -> float:
    """What −d excess/d log σ is taken to be before two evaluations show it."""
    return 2 * math.log(1 / target_delta)


def _along_line(
    excess: Callable[[float], float], start: float, most: float, tolerance: float, slope: float, enough: float = 0.0,
    steps: int = _STEPS, aim: float = 0.5,
) -> tuple[float, float]:  # fmt: skip
    """Where an excess that is nearly straight should be just below zero, and its slope.

    Each step leads to where the line through the last two points, or one with the slope given, meets the target.

    Args:
      excess: what is followed.
      start: where to begin.
      most: the largest step.
      tolerance: how close to the root to end.
      slope: −d excess/dx, about.
      enough: once two points are there, a last step of at most this much need not be evaluated.
      steps: the largest number of steps.
      aim: how far beyond the root to aim, in units of the tolerance.
    """
    here = start
    for number in range(steps):
        if -slope * tolerance <= excess(here) <= 0:
            break
        step = excess(here) / slope + aim * tolerance
        step = math.copysign(min(abs(step), most), step)
        if number and abs(step) <= enough:
            return here + step, slope
        there = here + step
        seen = (excess(here) - excess(there)) / step
        if abs(step) > 2 * tolerance and slope / 4 < seen < 4 * slope:
            slope = seen
        here = there
    return here, slope


class _NotRoughly(Exception):
    """Raised where the accountant has no rough bound."""


def _near_root(
    excess: Callable[[float], float], surplus: float, start: float, most: float, slope: float
) -> tuple[float, float, float] | None:
    """The likely root of an excess that is smaller by `surplus`, a first step from there, and the slope."""
    try:
        bracket = _bracket(excess, start, most, _ROUGHLY, slope)
        if bracket is None or bracket[0] == bracket[1]:
            return None
        low, high = _close_in(excess, *bracket, _ROUGHLY)
    except _NotRoughly:
        return None
    slope = max((excess(low) - excess(high)) / (high - low), slope / 100)
    return high - (surplus - excess(high)) / slope, min(most, 10 * _ROUGHLY), slope


def _bracket(
    excess: Callable[[float], float], start: float, most: float, tolerance: float, slope: float
) -> tuple[float, float] | None:
    """A point above the target and, right of it, one that meets it; None where none does.

    Steps are those that a slope, first guessed and then seen, would need, and a third more.
    """
    sign = 1 if excess(start) > 0 else -1  # the way to go
    here, step = start, most
    while True:
        step = min(step, max(4 * abs(excess(here)) / (3 * slope), 4 * tolerance))
        there = here + sign * step
        if (excess(there) > 0) != (sign > 0):
            return (here, there) if sign > 0 else (there, here)
        if abs(there - start) > math.log(LARGEST_RATIO):
            return None if sign > 0 else (there, there)
        seen = (excess(here) - excess(there)) / (there - here)
        here, step = there, max(2 * step, most)
        if sign < 0:  # bounds at far too little noise cost more than a few steps
            step = min(step, max(2 * most, _FAR))
        slope = seen if seen > 0 else slope / 2


def _close_in(excess: Callable[[float], float], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """Evaluate `excess` towards its root between one end where it is positive and one where it is not: new ends."""
    points = [low, high]
    slow = 0
    while high - low > tolerance:
        width, slope = high - low, (excess(low) - excess(high)) / (high - low)
        if width <= _NEAR and -excess(high) <= slope * tolerance / 4:
            break
        # Aimed at a little below the target: the end that is returned must meet it.
        guess = 0.5 * (low + high)
        if slow < 2:
            guess = _interpolated(excess, points[-3:], low, high, -slope * tolerance / 8)
        guess = min(max(guess, low + tolerance / 4), high - tolerance / 4)
        low, high = (guess, high) if excess(guess) > 0 else (low, guess)
        points.append(guess)
        slow = slow + 1 if high - low > width / 2 else 0
    return low, high


def _interpolated(excess: Callable[[float], float], last: list[float], low: float, high: float, level: float) -> float:
    """Where the excess should be at `level`: on a parabola (x over the excess) through three points, or on a line."""
    points = list(dict.fromkeys((*last, low, high)))[-3:]
    values = [excess(x) - level for x in points]
    if len(set(values)) == 3:
        (a, b, c), (fa, fb, fc) = points, values
        guess = (
            a * fb * fc / ((fa - fb) * (fa - fc))
            + b * fa * fc / ((fb - fa) * (fb - fc))
            + c * fa * fb / ((fc - fa) * (fc - fb))
        )
        if low < guess < high:
            return guess
    return low + (high - low) * (excess(low) - level) / (excess(low) - excess(high))
