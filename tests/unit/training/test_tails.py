"""Where normals end: the probability that a record leaves the support is bounded, and small noise is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

import dpmf
from dpmf.errors import ArgumentError
from dpmf.kernels.noise import REACH
from dpmf.training._tails import NEGLIGIBLE, beyond, check_reach

MECHANISMS = {
    "DP-SGD": dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.reshuffled(10, 20)),
    "bands": dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.reshuffled(3, 20)),
    "fixed": dpmf.Mechanism(dpmf.strategies.bisr(4), dpmf.BallsInBins(5, 20)),
    "poisson": dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.Poisson(3, 20)),
}


def left(shifts: np.ndarray, reach: float) -> float:
    """The probability that some coordinate leaves, exactly but for the union bound: it would not without the record."""
    return float(np.sum(norm.sf(reach - shifts) - norm.sf(reach)))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_the_bound_is_above_every_way_to_spread_a_record(name: str, sigma: float) -> None:
    mechanism, parameters, reach = MECHANISMS[name], 1000, 6.0
    bound = beyond(mechanism, sigma, reach, parameters)
    rng = np.random.default_rng(1)
    throws = mechanism.batching.throws
    if mechanism.batching.fixed:
        rows = mechanism.strategy.matrix(100)[:, 7::20].sum(axis=1)
    else:
        rows = np.trim_zeros(mechanism.strategy.strategy_coef(20), "b")
    for spread in (1, 3, 30, 1000):
        directions = np.zeros((len(rows), parameters))
        for row in directions:
            row[rng.choice(parameters, spread, replace=False)] = 1 / math.sqrt(spread)
        assert throws * left(rows[:, None] * directions / sigma, reach) <= bound


def test_small_noise_is_refused_with_the_least_that_is_allowed() -> None:
    mechanism = MECHANISMS["DP-SGD"]
    check_reach(mechanism, 0.3, REACH, 1e9)
    with pytest.raises(ArgumentError, match=r"noise_multiplier must be at least 0\.2\d+ .* end at 11.59 .*, got 0.1"):
        check_reach(mechanism, 0.1, REACH, 1e9)
    for mechanism in MECHANISMS.values():
        sigma = 0.01
        while beyond(mechanism, sigma, REACH, 1e9) > NEGLIGIBLE:
            sigma *= 1.05
        size = mechanism.sampled_sensitivity if mechanism is MECHANISMS["poisson"] else mechanism.throw.sensitivity
        assert sigma < 0.3 * size


def test_what_ends_early_is_worst_where_many_coordinates_move_a_little() -> None:
    mechanism = MECHANISMS["DP-SGD"]
    few, many = (beyond(mechanism, 2.0, 5.42, parameters) for parameters in (1, 10**6))
    assert 3 * few < 1e-3 < many
