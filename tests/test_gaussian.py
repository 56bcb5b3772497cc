"""The closed forms, against quadrature, a simulation, and the Rényi conversion of the same inequality."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

import dpmf
from dpmf.accountants.gaussian import gaussian_loss_delta


@pytest.mark.parametrize("mean", [0.01, 0.5, 3.0])
@pytest.mark.parametrize("variance", [0.005, 0.5, 4.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0])
def test_closed_form_against_quadrature(mean: float, variance: float, epsilon: float) -> None:
    law = norm(mean, math.sqrt(variance))
    top = mean + 40 * math.sqrt(variance)
    truth = quad(lambda y: -math.expm1(epsilon - y) * law.pdf(y), epsilon, max(top, epsilon), epsabs=0, limit=500)[0]
    found = gaussian_loss_delta(mean, variance, epsilon)
    assert truth * (1 - 1e-9) <= found <= truth * (1 + 1e-6) + 1e-13


def test_one_bin_is_the_gaussian_mechanism() -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(4, 1))
    s = mechanism.sensitivity / 3.0
    truth = norm.cdf(s / 2 - 1 / s) - math.e * norm.cdf(-s / 2 - 1 / s)
    for direction in ("remove", "add"):
        found = dpmf.delta(mechanism, noise_multiplier=3.0, epsilon=1.0, accountant="gaussian", direction=direction)
        assert truth <= found.delta <= truth * (1 + 1e-9)


@pytest.mark.parametrize(
    "strategy", [dpmf.strategies.dpsgd(), dpmf.strategies.bsr(3), dpmf.strategies.bisr(3)], ids=str
)
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_add_is_never_looser_than_its_renyi_conversion(strategy: dpmf.strategies.Strategy, epsilon: float) -> None:
    mechanism = dpmf.Mechanism(strategy, dpmf.BallsInBins(2, 20))
    options = {"noise_multiplier": 3.0, "epsilon": epsilon, "direction": "add"}
    closed = dpmf.delta(mechanism, accountant="gaussian", **options).delta
    assert closed <= dpmf.delta(mechanism, accountant="renyi", **options).delta


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_never_below_a_simulation(direction: str) -> None:
    """Twenty bins, plain Monte Carlo of the definition with a six-sigma margin."""
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(2, 20))
    covariance = mechanism.gram / 4.0**2
    u = np.random.default_rng(1).multivariate_normal(np.zeros(20), covariance, size=200_000)
    ratio = np.exp(u - np.diag(covariance) / 2).mean(axis=1)
    for epsilon in (0.05, 0.2, 0.5):
        gain = (
            np.maximum(ratio - math.exp(epsilon), 0)
            if direction == "remove"
            else np.maximum(1 - math.exp(epsilon) * ratio, 0)
        )
        bound = dpmf.delta(
            mechanism, noise_multiplier=4.0, epsilon=epsilon, accountant="gaussian", direction=direction
        ).delta
        assert bound >= gain.mean() - 6 * gain.std() / math.sqrt(len(gain))
