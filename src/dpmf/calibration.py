"""The smallest noise multiplier that meets a target, found from the sound side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from dpmf import budget, progress
from dpmf.accountants.base import Direction, Evaluation, PreparedAccountant
from dpmf.errors import CalibrationError
from dpmf.search import LARGEST_RATIO, least_noise


def calibrate_one_way(
    members: Sequence[PreparedAccountant],
    epsilon: float,
    delta: float,
    direction: Direction,
    start: float,
    relative_tolerance: float,
    best: tuple[float, Evaluation, PreparedAccountant] | None = None,
    enough: float = 0.0,
    coarse_tolerance: float = 0.0,
) -> tuple[float, Evaluation, PreparedAccountant]:
    """The least σ over several bounds: a member that does not beat the best so far costs one evaluation.

    `best` is what other accountants reached already. A σ of at most `enough` is as good as any: a member that meets the
    target there is searched to `coarse_tolerance` only, and is the last. Where the time budget ends, the best so far is
    returned; `OutOfTime` where there is none.
    """
    reasons = []
    incumbent = best is not None
    for member in members:
        if best is not None and best[0] <= enough:
            break
        progress.say(f"{member.name}, {direction}")
        reason = member.unreachable(epsilon, delta, direction)
        if reason is not None:
            reasons.append(reason)
            continue

        @cache  # the first question of the search is the challenge
        def evaluate(sigma: float, member: PreparedAccountant = member) -> Evaluation:
            return member.delta_for_target(sigma, epsilon, delta, direction)

        try:
            # A challenger rarely wins by much: look close to the incumbent first (unless that was a crude one).
            step, tolerance = 0.5 if best is None or incumbent else 0.05, relative_tolerance
            if best is not None:
                start = best[0] * (1 - relative_tolerance)
                # Where only crude bounds are known, the first question is whether `enough` will do. If not, the answer
                # is not far above it, unless the member is hopeless.
                asked = incumbent and 0 < enough < start
                if asked and evaluate(enough).value <= delta:
                    start, tolerance = enough, max(coarse_tolerance, relative_tolerance)
                elif asked and enough * _estimated_ratio(evaluate(enough).value, delta) < start:
                    start, step = enough, 0.05
                elif evaluate(start).value > delta:
                    continue
            found = least_noise(evaluate, delta, start, tolerance, step)
        except budget.OutOfTime:
            if best is None:
                raise
            break
        if found is not None and (best is None or found[0] < best[0]):
            best, incumbent = (*found, member), False
    if best is None:
        if len(reasons) == len(members):
            raise CalibrationError(reasons[-1])
        raise CalibrationError(
            f"no noise multiplier up to {LARGEST_RATIO * start:.3g} meets epsilon = {epsilon:g}, delta = {delta:g}"
        )
    return best


def _estimated_ratio(value: float, delta: float) -> float:
    """How much more noise may be needed where the bound is `value`: δ falls about as σ^(−2·log 1/δ)."""
    return float((value / delta) ** (0.5 / math.log(1 / delta)))
