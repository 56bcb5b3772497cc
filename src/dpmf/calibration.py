"""The smallest noise multiplier that meets a target, found from the sound side."""

from __future__ import annotations

from collections.abc import Sequence

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
) -> tuple[float, Evaluation, PreparedAccountant]:
    """The least σ over several bounds: a member that does not beat the best so far costs one evaluation."""
    best: tuple[float, Evaluation, PreparedAccountant] | None = None
    reasons = []
    for member in members:
        reason = member.unreachable(epsilon, delta, direction)
        if reason is not None:
            reasons.append(reason)
            continue

        def evaluate(sigma: float, member: PreparedAccountant = member) -> Evaluation:
            return member.delta_for_target(sigma, epsilon, delta, direction)

        if best is not None:
            challenged = best[0] * (1 - relative_tolerance)
            if evaluate(challenged).value > delta:
                continue
            start = challenged
        # A challenger rarely wins by much: look close to the incumbent first.
        step = 0.5 if best is None else 0.05
        found = least_noise(evaluate, delta, start, relative_tolerance, step)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, member)
    if best is None:
        if len(reasons) == len(members):
            raise CalibrationError(reasons[-1])
        raise CalibrationError(
            f"no noise multiplier up to {LARGEST_RATIO * start:.3g} meets epsilon = {epsilon:g}, delta = {delta:g}"
        )
    return best
