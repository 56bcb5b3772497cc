"""What is left of a budget after other releases, and searches, in dp_accounting's words."""

from __future__ import annotations

from typing import Any

from dp_accounting import dp_event

from dpmf import api, attacks, tuning, validation
from dpmf.accountants.protocol import Accountant, Evaluation
from dpmf.errors import ArgumentError, CalibrationError
from dpmf.formatting import given, upper
from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent, BallsInBinsPLDAccountant
from dpmf.mechanism import Mechanism
from dpmf.results import Calibration
from dpmf.search import least_noise


def calibrate_remainder(
    mechanism: Mechanism,
    spent: Any,
    *,
    target_epsilon: float,
    target_delta: float,
    accountant: str | Accountant = api.DEFAULT_ACCOUNTANT,
    value_discretization_interval: float = 1e-4,
    relative_tolerance: float = 1e-3,
) -> Calibration:
    """The smallest noise multiplier found with which a mechanism and what was released before meet (ε, δ) together.

    Args:
      mechanism: the strategy and the batching.
      spent: the dp_accounting event of all other releases on the same records (compose several in a `ComposedDpEvent`).
      target_epsilon: ε > 0 of everything together.
      target_delta: δ of everything together.
      accountant: where the bounds on δ(ε) of the mechanism come from.
      value_discretization_interval: the spacing of the lattice of losses.
      relative_tolerance: how far above the smallest possible answer the search may end.

    Returns:
      The noise multiplier of the mechanism, with the bound on δ of everything together.

    **Formal guarantees.** Those of `BallsInBinsPLDAccountant`: the loss distributions are composed, and the noise
    multiplier returned was itself evaluated and met the target, in both directions.
    """
    epsilon = validation.positive("target_epsilon", target_epsilon)
    delta = validation.probability("target_delta", target_delta)
    if not isinstance(spent, dp_event.DpEvent):
        raise validation.wrong("spent", "an event of dp_accounting", spent)

    def accounting() -> BallsInBinsPLDAccountant:
        found = BallsInBinsPLDAccountant(
            value_discretization_interval=value_discretization_interval, accountant=accountant
        )
        found.compose(spent)
        return found

    before = accounting()
    if before.get_delta(epsilon) > delta:
        used = upper(before.get_epsilon(delta), 4)
        raise CalibrationError(f"nothing is left: spent alone needs epsilon = {used} at delta = {given(delta)}")
    # Alone the mechanism needs at least this much noise.
    start = api.calibrate(
        mechanism, target_epsilon=epsilon, target_delta=delta, accountant=accountant, relative_tolerance=0.01
    ).noise_multiplier

    def evaluate(sigma: float) -> Evaluation:
        return Evaluation(float(accounting().compose(BallsInBinsMatrixDpEvent.of(mechanism, sigma)).get_delta(epsilon)))

    tolerance = validation.probability("relative_tolerance", relative_tolerance)
    found = least_noise(evaluate, delta, start, tolerance, 0.1)
    if found is None:
        raise CalibrationError(f"no noise multiplier meets epsilon = {given(epsilon)} together with what was spent")
    sigma, reached = found
    return Calibration(
        noise_multiplier=sigma, epsilon=epsilon, delta=reached.value, direction="both", binding="remove",
        accountant=BallsInBinsPLDAccountant.__name__, target_epsilon=epsilon, target_delta=delta,
    )  # fmt: skip


def search_bound(
    event: Any, delta: float, *, accountant: str | Accountant = api.DEFAULT_ACCOUNTANT
) -> tuning.TunedBound:
    """ε of a search that dp_accounting describes as a `RepeatAndSelectDpEvent` of one of our mechanisms.

    Args:
      event: the event; its own event must be a `BallsInBinsMatrixDpEvent`.
      delta: δ of the whole search.
      accountant: where the bounds on δ(ε) of one run come from.

    **Formal guarantees.** Those of `dpmf.tuning.total_epsilon`.
    """
    if not isinstance(event, dp_event.RepeatAndSelectDpEvent):
        raise validation.wrong("event", "a RepeatAndSelectDpEvent", event)
    if not isinstance(event.event, BallsInBinsMatrixDpEvent):
        raise ArgumentError("event", f"must repeat a BallsInBinsMatrixDpEvent, got {type(event.event).__name__}")
    curve = attacks.tradeoff(event.event.run, accountant=accountant)
    return tuning.total_epsilon(curve, delta=delta, mean=event.mean, shape=event.shape)
