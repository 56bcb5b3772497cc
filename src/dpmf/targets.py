"""Calibration to what an attack may achieve: to a μ of Gaussian DP, or to a true-positive rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

from scipy.special import ndtri

from dpmf import validation
from dpmf.accountants.protocol import Accountant
from dpmf.api import DEFAULT_ACCOUNTANT
from dpmf.attacks import DELTAS, FALSE_POSITIVE_RATES, SLACK, Curves, TradeOff
from dpmf.errors import ArgumentError, CalibrationError
from dpmf.mechanism import Mechanism
from dpmf.search import least_noise

_TARGET = math.exp(-1)  # values are scaled to this, so that the first guess of a slope of the search is right


@dataclass(frozen=True)
class _Scaled:
    """A trade-off curve and the number that must not exceed `_TARGET`."""

    value: float
    found: TradeOff
    excess: float | None = None


def calibrate_to_mu(
    mechanism: Mechanism,
    *,
    target_mu: float,
    accountant: str | Accountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    slack: float = SLACK,
    relative_tolerance: float = 1e-3,
) -> TradeOff:
    """The smallest noise multiplier with which a mechanism is certified to be μ-Gaussian-DP, up to a slack.

    Args:
      mechanism: the strategy and the batching.
      target_mu: μ > 0.
      accountant: where the bounds on δ(ε) come from; one that samples is refused.
      direction: which attacks: "remove", "add" or "both".
      slack: up to which probability μ holds (see `TradeOff`).
      relative_tolerance: how far above the smallest possible answer the search may end.

    Returns:
      The trade-off curve at that noise multiplier.

    **Formal guarantees.** The curve returned was computed at its own noise multiplier, and its μ is at most the target.
    """
    target = validation.positive("target_mu", target_mu)
    return _least(mechanism, attrgetter("mu"), target, accountant, direction, slack, relative_tolerance)


def calibrate_to_attack(
    mechanism: Mechanism,
    *,
    true_positive_rate: float,
    false_positive_rate: float,
    accountant: str | Accountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    slack: float = SLACK,
    relative_tolerance: float = 1e-3,
) -> TradeOff:
    """The smallest noise multiplier with which no attack exceeds a true-positive rate at a false-positive rate.

    Args:
      mechanism: the strategy and the batching.
      true_positive_rate: what no attack may exceed; larger than the false-positive rate.
      false_positive_rate: of the attacks in question.
      accountant: where the bounds on δ(ε) come from; one that samples is refused.
      direction: which attacks: "remove", "add" or "both".
      slack: of the μ that is reported as well; the target does not depend on it.
      relative_tolerance: how far above the smallest possible answer the search may end.

    Returns:
      The trade-off curve at that noise multiplier.

    **Formal guarantees.** The curve returned was computed at its own noise multiplier, and its bound on the
    true-positive rate is at most the target.
    """
    alpha = validation.probability("false_positive_rate", false_positive_rate)
    target = validation.probability("true_positive_rate", true_positive_rate)
    if target <= alpha:
        raise ArgumentError("true_positive_rate", f"must exceed false_positive_rate = {alpha:g}, got {target:g}")
    # Rates are compared as the μ of the Gaussian mechanism that has them, which is about proportional to 1/σ.
    goal = float(ndtri(target) - ndtri(alpha))

    def distance(found: TradeOff) -> float:
        rate = found.true_positive_rate(alpha)
        seen = float(ndtri(rate) - ndtri(alpha))
        return min(goal, max(seen, 1e-12 * goal)) if rate <= target else max(math.nextafter(goal, math.inf), seen)

    return _least(mechanism, distance, goal, accountant, direction, slack, relative_tolerance, (alpha,))


def _least(
    mechanism: Mechanism,
    number: Callable[[TradeOff], float],
    target: float,
    accountant: str | Accountant,
    direction: str,
    slack: float,
    relative_tolerance: float,
    rates: tuple[float, ...] = (),
) -> TradeOff:
    """The curve at the least noise multiplier found at which a number of it is at most a target."""
    tolerance = validation.probability("relative_tolerance", relative_tolerance)
    curves = Curves(
        mechanism, accountant, direction, slack, DELTAS, tuple(dict.fromkeys((*FALSE_POSITIVE_RATES, *rates)))
    )

    @cache
    def roughly(sigma: float) -> _Scaled:
        return evaluate(sigma, rough=True)

    def evaluate(sigma: float, rough: bool = False) -> _Scaled:
        found = curves.at(mechanism.checked_noise(sigma), rough=rough)
        value = number(found)
        scaled = value / target * _TARGET
        return _Scaled(min(scaled, _TARGET) if value <= target else max(scaled, math.nextafter(_TARGET, 1.0)), found)

    # Without amplification this much noise gives the target, but for rounding.
    start = mechanism.sensitivity / target
    # Unless rough curves tell that this is the answer, they lead to where fine ones, which are reported, are asked.
    lead = curves.roughness > 1 and abs(roughly(start).value / _TARGET - 1) > tolerance
    found = least_noise(
        evaluate, _TARGET, start, tolerance, rough=roughly if lead else None,
        roughness=curves.roughness, rough_holds=False,
    )  # fmt: skip
    if found is None:
        raise CalibrationError(f"no noise multiplier up to {start:.3g} times 2^60 meets the target")
    return found[1].found
