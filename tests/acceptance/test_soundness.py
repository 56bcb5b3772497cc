"""lower ≤ exact δ(ε) ≤ upper for every deterministic accountant, on random small mechanisms, by quadrature."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import DIRECTIONS, log_uniform, mechanisms, random_settings, signal_to_noise

import dpmf
from dpmf import lower_bounds
from dpmf.accountants import (
    ACCOUNTANTS,
    Accountant,
    Auto,
    Best,
    Cascade,
    Chain,
    Conditional,
    Gaussian,
    Lattice,
    Moments,
    OwnBin,
    Renyi,
)
from dpmf.lower_bounds import lower_delta
from dpmf.mechanism import Mechanism

# The oracle is good to 1e-6 relative; below 1e-14 it is left out.
TOLERANCE = 3e-6
DETERMINISTIC: list[Accountant] = [
    Best(renyi=Renyi(work_budget=1e6)),
    Auto(tolerance=0.5),
    Cascade(),
    Chain(),
    Moments(),
    OwnBin(),
    Conditional(),
    Conditional(family="am-gm"),
    Conditional(option=2, optimise_bad_event=True),
    Gaussian(),
    Renyi(work_budget=1e6),
]


@pytest.fixture(scope="module", autouse=True)
def _coarse_search() -> Iterator[None]:
    """`auto` looks for the lower bound on ε in coarse steps: how close it states to be is not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        coarse = dataclasses.replace(lower_bounds._TUNING, epsilon_tolerance=0.1)
        patch.setattr(lower_bounds, "_TUNING", coarse)
        yield


def named(accountant: Accountant) -> str:
    options = [v for k, v in vars(accountant).items() if k in ("family", "option")]
    return "-".join(map(str, [accountant.name, *options]))


def test_every_deterministic_accountant_is_here() -> None:
    tested = {accountant.name for accountant in DETERMINISTIC} | {Lattice.name}
    others = {"monte-carlo", "random-allocation", "pld-accounting"}  # estimates, and what is not ours
    assert tested | others == set(ACCOUNTANTS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("accountant", DETERMINISTIC, ids=named)
@random_settings(15)
@given(mechanisms(), log_uniform(0.1, 30), log_uniform(0.01, 15))
def test_upper_bounds_are_not_below_the_truth(
    accountant: Accountant, direction: str, mechanism: Mechanism, sigma: float, epsilon: float
) -> None:
    truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction)
    if truth < 1e-14:
        return
    bound = dpmf.delta(
        mechanism, noise_multiplier=sigma, epsilon=epsilon, accountant=accountant, direction=direction
    ).delta
    assert bound >= truth * (1 - TOLERANCE)


@pytest.mark.parametrize("direction", DIRECTIONS)
@random_settings(40)
@given(mechanisms(), log_uniform(0.1, 30), log_uniform(0.01, 15))
def test_lower_bounds_are_not_above_the_truth(
    direction: str, mechanism: Mechanism, sigma: float, epsilon: float
) -> None:
    truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction)
    assert lower_delta(mechanism, sigma, epsilon, direction) <= truth * (1 + TOLERANCE) + 1e-14


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "accountant", [Cascade(), Chain(), Conditional(), Gaussian(), Best(renyi=Renyi(work_budget=1e6))], ids=named
)
@random_settings(8)
@given(mechanisms(), log_uniform(0.3, 10), log_uniform(1e-8, 0.1))
def test_epsilon_is_enough(
    accountant: Accountant, direction: str, mechanism: Mechanism, sigma: float, delta: float
) -> None:
    found = dpmf.epsilon(
        mechanism, noise_multiplier=sigma, delta=delta, accountant=accountant, direction=direction
    ).epsilon
    if np.isfinite(found):
        assert oracles.delta(signal_to_noise(mechanism, sigma), found, direction) <= delta * (1 + TOLERANCE)


@pytest.mark.parametrize(
    "accountant", [Cascade(), Conditional(), Gaussian(), Best(renyi=Renyi(work_budget=1e6))], ids=named
)
@random_settings(8)
@given(mechanisms(), st.sampled_from([0.3, 1.0, 4.0]), st.floats(1.05, 3.0), st.sampled_from(DIRECTIONS))
def test_more_noise_or_larger_epsilon_never_cost_delta(
    accountant: Accountant, mechanism: Mechanism, epsilon: float, factor: float, direction: str
) -> None:
    def bound(sigma: float, epsilon: float) -> float:
        return dpmf.delta(
            mechanism, noise_multiplier=sigma, epsilon=epsilon, accountant=accountant, direction=direction
        ).delta

    base = bound(1.0, epsilon)
    slack = 1.05  # the share of the bad event is balanced to a few percent only
    assert bound(factor, epsilon) <= base * slack + 1e-14
    assert bound(1.0, epsilon * factor) <= base * slack + 1e-14
