"""`best` beside its members, each computed in full: never worse, at any target and at the extremes."""

from __future__ import annotations

import numpy as np
import pytest

import dpmf
from dpmf.accountants import ACCOUNTANTS, Best, Conditional, Renyi

CORRELATED = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(2, 6))


@pytest.mark.parametrize("direction", ["remove", "add", "both"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 5.0])
def test_no_member_beats_it(epsilon: float, direction: str) -> None:
    options = {"noise_multiplier": 3.0, "epsilon": epsilon, "direction": direction}
    best = dpmf.delta(CORRELATED, accountant="best", **options)
    members = [
        dpmf.delta(CORRELATED, accountant=name, **options).delta
        for name in ("chain", "moments", "renyi", "conditional")
    ]
    assert best.delta <= min(members) * (1 + 1e-12)
    # Once moments are nearly the truth, nobody is asked after them.
    assert best.delta <= dpmf.delta(CORRELATED, accountant="own-bin", **options).delta * 1.06
    assert best.details[best.binding]["accountant"] in ACCOUNTANTS


def test_calibration_is_the_smallest_of_the_members() -> None:
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    best = dpmf.calibrate(CORRELATED, **target)
    assert best.accountant == "best"
    assert best.details[best.binding]["accountant"] in ("chain", "moments", "own-bin", "renyi", "conditional")
    for name in ("chain", "moments", "own-bin", "renyi", "conditional"):
        assert best.noise_multiplier <= dpmf.calibrate(CORRELATED, accountant=name, **target).noise_multiplier * (
            1 + 2e-4
        )


@pytest.mark.parametrize("sigma", [1e-3, 1e6])
@pytest.mark.parametrize("accountant", [Best(), Conditional(), Renyi()], ids=lambda a: a.name)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1)], ids=str)
def test_extremes(accountant: dpmf.accountants.Accountant, sigma: float, shape: tuple[int, int]) -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(*shape))
    with np.errstate(all="raise", under="ignore"):
        delta = dpmf.delta(mechanism, noise_multiplier=sigma, epsilon=1.0, accountant=accountant).delta
        epsilon = dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=1e-5, accountant=accountant).epsilon
    assert 0 <= delta <= 1
    assert epsilon >= 0
    assert (delta > 0.5) == (sigma < 1)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_a_profile_does_not_depend_on_the_order_of_its_points(direction: str) -> None:
    """Members are compared at the smallest ε first: at large ones all of them may be next to nothing."""
    prepared = Best().prepare(CORRELATED)
    epsilons = [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 12.0]
    upwards = prepared.deltas(1.5, epsilons, direction)
    downwards = prepared.deltas(1.5, epsilons[::-1], direction)
    assert downwards[::-1] == upwards
    assert upwards == sorted(upwards, reverse=True)
