"""The smallest noise multiplier that meets a target, found from the sound side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scipy.optimize import brentq

from dpmf.accountants.base import Direction, Evaluation, PreparedAccountant
from dpmf.errors import CalibrationError

_LARGEST_RATIO = 2.0**60
_LEAST_LOG = -800.0


def least_noise(
    evaluate: Callable[[float], Evaluation],
    target_delta: float,
    start: float,
    relative_tolerance: float,
    step: float = 0.5,
) -> tuple[float, Evaluation] | None:
    """The least σ found with evaluate(σ).value ≤ target_delta, or None where none up to 2⁶⁰·start is.

    **Formal guarantees.** The σ returned was evaluated and met the target; it is the smallest evaluated one that did,
    and, if the bound is monotone in σ, within `relative_tolerance` of the smallest of all.
    """
    met: dict[float, Evaluation] = {}

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        evaluation = evaluate(sigma)
        if evaluation.value <= target_delta:
            met[sigma] = evaluation
        return (math.log(evaluation.value) if evaluation.value > 0 else _LEAST_LOG) - math.log(target_delta)

    low = high = math.log(start)
    if excess(high) > 0:
        while excess(high := high + step) > 0:
            low, step = high, 2 * step
            if high > math.log(start) + math.log(_LARGEST_RATIO):
                return None
    else:
        while excess(low := low - step) <= 0:
            high, step = low, 2 * step
            if low < math.log(start) - math.log(_LARGEST_RATIO):
                break
    if low < high:
        brentq(excess, low, high, xtol=relative_tolerance / 4, rtol=1e-14, maxiter=200)
    sigma = min(met)
    return sigma, met[sigma]


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
            f"no noise multiplier up to {_LARGEST_RATIO * start:.3g} meets epsilon = {epsilon:g}, delta = {delta:g}"
        )
    return best
