"""Throws composed with each other, where closed forms are known."""

import math

import pytest

import dpmf
from dpmf import lower_bounds
from dpmf.accountants.combined.least import Least
from dpmf.accountants.composed.pair import Pairs
from dpmf.loss.gaussian import gaussian_delta


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_one_bin_thrown_anew_is_a_gaussian_mechanism(direction):
    """With one bin there is nothing random: k throws are a Gaussian mechanism of sensitivity √k."""
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.reshuffled(4, 1))
    bound = dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0, direction=direction, with_lower=False).delta
    truth = gaussian_delta(math.sqrt(4) / 2.0, 1.0)
    assert truth <= bound <= 1.02 * truth


@pytest.mark.parametrize(
    "batching", [dpmf.reshuffled(3, 4), dpmf.Poisson(3, 4, 2), dpmf.BallsInBins(3, 4, stride=2)], ids=str
)
def test_closed_forms_answer_where_there_is_no_time(batching):
    mechanism = dpmf.Mechanism(dpmf.strategies.coefficients([1.0, 0.5]), batching)
    bound = dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0, time_budget=1e-9)
    assert bound.delta <= gaussian_delta(mechanism.sensitivity / 2.0, 1.0) * (1 + 1e-9)


@pytest.mark.parametrize("batching", [dpmf.reshuffled(2, 2), dpmf.reshuffled(2, 2, gap=0), dpmf.Poisson(2, 2, 2)])
@pytest.mark.parametrize("sigma", [1e-6, 1e-2, 1e5])
def test_hardly_any_noise_and_very_much(batching, sigma):
    mechanism = dpmf.Mechanism(dpmf.strategies.coefficients([1.0, 0.9]), batching)
    accountant = "best" if isinstance(batching, dpmf.Poisson) else "gaussian"
    bound = dpmf.delta(mechanism, noise_multiplier=sigma, epsilon=3.0, accountant=accountant).delta
    assert bound == 1.0 if sigma < 1 else bound < 1e-9


def test_no_bound_is_above_that_without_amplification():
    """Throws that have nearly everything in common: one Gaussian mechanism of all of it is the better bound."""
    mechanism = dpmf.Mechanism(dpmf.strategies.coefficients([1.0] * 40), dpmf.reshuffled(3, 2, gap=0))
    bound = dpmf.delta(mechanism, noise_multiplier=5.0, epsilon=1.0, accountant="gaussian").delta
    assert bound <= gaussian_delta(mechanism.sensitivity / 5.0, 1.0) * (1 + 1e-9)


@pytest.mark.parametrize("strategy", [dpmf.strategies.bsr(4), dpmf.strategies.power(0.4, 0.968)], ids=str)
def test_cheap_bounds_answer_where_others_are_not_asked(strategy):
    """A pair reaches to the tail in both directions, and is above certified lower bounds at all ε."""
    mechanism = dpmf.Mechanism(strategy, dpmf.BallsInBins(2, 12))
    pair = Pairs(Least.of(dpmf.accountants.Best().prepare(mechanism))).at(1.5, 2.0**-10, 0.01, tail=1e-13)
    assert max(pair.upper_only, pair.lower_only) < 1e-12
    for direction in ("remove", "add"):
        for epsilon in (0.0, 1.0, 4.0):
            assert pair.delta(epsilon, direction) >= lower_bounds.lower_delta(mechanism, 1.5, epsilon, direction)
