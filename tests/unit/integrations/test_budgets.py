"""What is left of a budget, and searches described by dp_accounting's events."""

from __future__ import annotations

import math

import pytest

import dpmf
from dpmf import tuning

dp_accounting = pytest.importorskip("dp_accounting")
budgets = pytest.importorskip("dpmf.integrations.budgets")

ONE_BIN = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(4, 1))  # a Gaussian mechanism of sensitivity 2
TARGET = {"target_epsilon": 2.0, "target_delta": 1e-5}


def test_the_remainder_of_gaussian_mechanisms_adds_up() -> None:
    """Two Gaussian mechanisms are one whose μ² is the sum: what is left is known exactly."""
    whole = dpmf.calibrate(ONE_BIN, **TARGET).noise_multiplier
    spent = dp_accounting.GaussianDpEvent(whole)  # μ = 1/σ, where the mechanism alone may have 2/σ
    found = budgets.calibrate_remainder(ONE_BIN, spent, **TARGET, value_discretization_interval=1e-3)
    exact = 2 / math.sqrt((2 / whole) ** 2 - (1 / whole) ** 2)
    assert exact * (1 - 1e-3) <= found.noise_multiplier <= 1.01 * exact
    assert found.delta <= 1e-5


def test_nothing_spent_and_nothing_left() -> None:
    nothing = budgets.calibrate_remainder(
        ONE_BIN, dp_accounting.NoOpDpEvent(), **TARGET, value_discretization_interval=1e-3
    )
    whole = dpmf.calibrate(ONE_BIN, **TARGET).noise_multiplier
    assert whole * (1 - 1e-3) <= nothing.noise_multiplier <= 1.01 * whole
    with pytest.raises(dpmf.CalibrationError, match="nothing is left: spent alone needs epsilon = "):
        budgets.calibrate_remainder(ONE_BIN, dp_accounting.GaussianDpEvent(0.5), **TARGET)
    with pytest.raises(ValueError, match="spent must be an event of dp_accounting"):
        budgets.calibrate_remainder(ONE_BIN, 1.0, **TARGET)


def test_searches_as_events() -> None:
    from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent

    run = BallsInBinsMatrixDpEvent.of(ONE_BIN, 8.0)
    found = budgets.search_bound(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, 10.0, 0.0), 1e-5)
    curve = dpmf.tradeoff(ONE_BIN, noise_multiplier=8.0)
    assert found == tuning.total_epsilon(curve, delta=1e-5, mean=10.0, shape=0.0)
    # The Rényi accountant of dp_accounting knows the same search over a Gaussian mechanism.
    theirs = dp_accounting.rdp.RdpAccountant().compose(
        dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(4.0), 10.0, 0.0)
    )
    assert 0.3 * theirs.get_epsilon(1e-5) < found.epsilon < 1.5 * theirs.get_epsilon(1e-5)
    with pytest.raises(ValueError, match="event must be a RepeatAndSelectDpEvent"):
        budgets.search_bound(run, 1e-5)
    with pytest.raises(ValueError, match="event must repeat a BallsInBinsMatrixDpEvent, got GaussianDpEvent"):
        budgets.search_bound(
            dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(1.0), 2.0, 1.0), 1e-5
        )


def test_a_search_over_a_run_that_cuts_its_batches() -> None:
    from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent

    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 4))
    run = dpmf.Run(mechanism, 2.0, max_batch_size=30, records=60)
    events = [BallsInBinsMatrixDpEvent.of(*about) for about in ((run,), (mechanism, 2.0))]
    charged, plain = (
        budgets.search_bound(dp_accounting.dp_event.RepeatAndSelectDpEvent(event, 3.0, 0.0), 1e-3) for event in events
    )
    assert charged == tuning.total_epsilon(dpmf.tradeoff(run), delta=1e-3, mean=3.0, shape=0.0)
    assert charged.epsilon > plain.epsilon
