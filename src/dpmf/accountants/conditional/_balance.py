"""The probability of the bad event that is a given share of the whole bound, by search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Tuning:
    """How closely to search. Any values give sound bounds: the search only decides which bounds are evaluated.

    Attributes:
      tolerance: the search ends when the function, or the interval, is this small.
      step: the first steps, until the zero is between two points.
      most: evaluations after that, at most.
    """

    tolerance: float = 0.05
    step: float = math.log(1e3)
    most: int = 12


_TUNING = _Tuning()


def balance(excess: Callable[[float], float], start: float, lowest: float, highest: float) -> None:
    """Search for the zero of a falling function; the caller records what it is asked."""
    near, step = _TUNING.tolerance, _TUNING.step
    value = excess(start)
    if abs(value) <= near:
        return
    low = high = start
    f_low = f_high = value
    while value > 0 and high < highest:
        low, f_low = high, value
        high = min(high + step, highest)
        f_high = value = excess(high)
    while f_low < 0 and low > lowest:
        high, f_high = low, f_low
        low = max(low - step, lowest)
        f_low = excess(low)
    for _ in range(_TUNING.most):
        if high - low <= near or not f_low > 0 > f_high:
            return
        share = min(max(f_low / (f_low - f_high), 0.1), 0.9) if math.isfinite(f_high) else 0.5
        middle = low + share * (high - low)
        value = excess(middle)
        if abs(value) <= near:
            return
        if value > 0:
            low, f_low = middle, value
        else:
            high, f_high = middle, value
