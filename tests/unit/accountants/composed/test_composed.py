"""Throws composed with each other, where closed forms are known."""

import math

import pytest

import dpmf
from dpmf.loss.gaussian import gaussian_delta


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_one_bin_thrown_anew_is_a_gaussian_mechanism(direction):
    """With one bin there is nothing random: k throws are a Gaussian mechanism of sensitivity √k."""
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.reshuffled(4, 1))
    bound = dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0, direction=direction, with_lower=False).delta
    truth = gaussian_delta(math.sqrt(4) / 2.0, 1.0)
    assert truth <= bound <= 1.02 * truth
