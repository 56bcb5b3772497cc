"""The smallest noise multiplier that meets a target, found from the sound side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from dpmf import budget
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
) -> tuple[float, Evaluation, PreparedAccountant]:
    """The least σ over several bounds: a member that does not beat the best so far costs one evaluation.

    `best` is what other accountants reached already. Where the time budget ends, the best so far is returned;
    `OutOfTime` where there is none.
    """
    reasons = []
    incumbent = best is not None
    for member in members:
        reason = member.unreachable(epsilon, delta, direction)
        if reason is not None:
            reasons.append(reason)
            continue

        @cache  # the first question of the search is the challenge
        def evaluate(sigma: float, member: PreparedAccountant = member) -> Evaluation:
            return member.delta_for_target(sigma, epsilon, delta, direction)

        try:
            if best is not None:
                challenged = best[0] * (1 - relative_tolerance)
                if evaluate(challenged).value > delta:
                    continue
                start = challenged
            # A challenger rarely wins by much: look close to the incumbent first (unless that was a crude one).
            step = 0.5 if best is None or incumbent else 0.05
            found = least_noise(evaluate, delta, start, relative_tolerance, step)
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
