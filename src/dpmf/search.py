"""One-dimensional search that ends on the sound side, for noise multipliers and for ε alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Protocol, TypeVar

from scipy.optimize import brentq

from dpmf import budget


class Valued(Protocol):
    """Anything with a bound in it."""

    @property
    def value(self) -> float: ...


Answer = TypeVar("Answer", bound=Valued)

LARGEST_RATIO = 2.0**60
_LEAST_LOG = -800.0


def least_noise(
    evaluate: Callable[[float], Answer],
    target_delta: float,
    start: float,
    relative_tolerance: float,
    step: float = 0.5,
) -> tuple[float, Answer] | None:
    """The least σ (or ε) found with evaluate(σ).value ≤ target_delta, or None where none up to 2⁶⁰·start is.

    Where the time budget ends the search, it is the least found until then; `OutOfTime` where none was.

    **Formal guarantees.** The σ returned was evaluated and met the target; it is the smallest evaluated one that did,
    and, if the bound is monotone in σ, within `relative_tolerance` of the smallest of all.
    """
    met: dict[float, Answer] = {}

    @cache  # the root finder asks again for the ends of its bracket
    def excess(log_sigma: float) -> float:
        budget.check()
        sigma = math.exp(log_sigma)
        evaluation = evaluate(sigma)
        if evaluation.value <= target_delta:
            met[sigma] = evaluation
        return (math.log(evaluation.value) if evaluation.value > 0 else _LEAST_LOG) - math.log(target_delta)

    try:
        root = _close_in(excess, math.log(start), step, relative_tolerance)
        if root is None:
            return None
        if math.log(min(met)) > root + relative_tolerance:  # the root was hit, just on the wrong side
            excess(root + relative_tolerance / 2)
    except budget.OutOfTime:
        if not met:
            raise
    sigma = min(met)
    return sigma, met[sigma]


def _close_in(excess: Callable[[float], float], start: float, step: float, tolerance: float) -> float | None:
    """Evaluate `excess` towards its root, from both sides; None where there is none above."""
    low = high = start
    if excess(high) > 0:
        while excess(high := high + step) > 0:
            low, step = high, 2 * step
            if high > start + math.log(LARGEST_RATIO):
                return None
    else:
        while excess(low := low - step) <= 0:
            high, step = low, 2 * step
            if low < start - math.log(LARGEST_RATIO):
                break
    if low >= high:
        return high
    return float(brentq(excess, low, high, xtol=tolerance / 4, rtol=1e-14, maxiter=200))
