"""The peers' DP-SGD accountants behind our protocol."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import dpmf
from dpmf.accountants.baselines import PLDAccounting, RandomAllocation

DPSGD = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 100))


def test_pld_accounting_agrees_with_the_known_value() -> None:
    """DP-SGD, b = 100, σ = 1, δ = 1e−5: the true ε is about 0.621."""
    found = dpmf.epsilon(DPSGD, noise_multiplier=1.0, delta=1e-5, accountant=PLDAccounting())
    assert 0.620 < found.epsilon < 0.64
    assert found.accountant == "pld-accounting"


def test_epochs_of_the_same_bins_are_less_noise() -> None:
    four = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(4, 100))
    one = dpmf.delta(DPSGD, noise_multiplier=1.0, epsilon=1.0, accountant=PLDAccounting()).delta
    assert dpmf.delta(four, noise_multiplier=2.0, epsilon=1.0, accountant=PLDAccounting()).delta == pytest.approx(one)


def test_a_cut_off_epoch_is_bounded_by_a_full_one() -> None:
    cut = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 100, 150))
    full = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 100))
    deltas = [dpmf.delta(m, noise_multiplier=2.0, epsilon=1.0, accountant=PLDAccounting()).delta for m in (cut, full)]
    assert np.ptp(deltas) == 0


@pytest.mark.parametrize("accountant", [PLDAccounting(), RandomAllocation()], ids=lambda a: a.name)
def test_correlated_noise_is_refused(accountant: dpmf.accountants.Accountant) -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(1, 10))
    with pytest.raises(ValueError, match="uncorrelated noise only") as failure:
        dpmf.epsilon(mechanism, noise_multiplier=1.0, delta=1e-5, accountant=accountant)
    assert "\n" not in str(failure.value)


@pytest.mark.skipif(importlib.util.find_spec("random_allocation") is not None, reason="it is installed here")
def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(dpmf.MissingExtraError, match=r"pip install '\.\[random-allocation\]' in a clone"):
        dpmf.epsilon(DPSGD, noise_multiplier=1.0, delta=1e-5, accountant="random-allocation")


@pytest.mark.parametrize("options", [{"max_order": 1}, {"max_order": 1000}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_order must be"):
        RandomAllocation(**options)


def test_bad_discretization() -> None:
    with pytest.raises(ValueError, match="loss_discretization must be"):
        PLDAccounting(loss_discretization=float("nan"))
