"""The closed forms, against quadrature, a simulation, and the Rényi conversion of the same inequality."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

import dpmf
from dpmf.accountants import Gaussian, Renyi
from dpmf.accountants.lattice._weights import call_from_above
from dpmf.loss.gaussian import gaussian_delta, gaussian_epsilon, gaussian_loss_delta


def exact(mean: mpmath.mpf, variance: mpmath.mpf, epsilon: mpmath.mpf) -> mpmath.mpf:
    """Φ(−y) − e^(s(y+s/2))·Φ(−y−s) with ninety digits; far tails by their asymptotic series."""

    def log_tail(x: mpmath.mpf) -> mpmath.mpf:
        if x < 1e4:
            return mpmath.log(mpmath.erfc(x / mpmath.sqrt(2)) / 2)
        series = 1 - x**-2 + 3 * x**-4 - 15 * x**-6 + 105 * x**-8
        return -x * x / 2 - mpmath.log(x * mpmath.sqrt(2 * mpmath.pi)) + mpmath.log(series)

    s = mpmath.sqrt(variance)
    y = (epsilon - mean) / s
    return mpmath.exp(log_tail(y)) - mpmath.exp(s * (y + s / 2) + log_tail(y + s))


# From where δ is nearly 1 to where it underflows, in standard deviations.
POSITIONS = [-1e6, -300.0, -37.0, -6.0, -1.0, -1e-3, 0.0, 1e-6, 0.3, 1.0, 4.4, 12.0, 30.0, 36.9, 37.1, 50.0]


@pytest.mark.parametrize(
    "sensitivity", [1e-30, 1e-12, 1e-7, 1e-3, 0.026, 0.03, 0.4, 0.6, 1.0, 3.0, 30.0, 1e3, 1e6, 1e9]
)
def test_the_mechanism_between_its_bounds(sensitivity: float) -> None:
    with mpmath.workdps(90):
        for position in POSITIONS:
            epsilon = sensitivity * (position + sensitivity / 2)
            mu = mpmath.mpf(sensitivity)
            truth = exact(mu**2 / 2, mu**2, mpmath.mpf(epsilon))
            low, high = gaussian_delta(sensitivity, epsilon, "lower"), gaussian_delta(sensitivity, epsilon)
            assert low <= truth <= high
            # An ε has a relative rounding error, and δ changes by up to y times its change over μ.
            allowed = 1e-9 + 1e-13 * sensitivity
            assert high - low <= allowed * float(truth) + 2e-298


@pytest.mark.parametrize("deviation", [1e-9, 1e-4, 0.02, 0.5, 5.0, 1e3])
@pytest.mark.parametrize("mean", [0.0, 1e-12, 1e-3, 0.5, 40.0, 1e6])
def test_any_gaussian_loss_between_its_bounds(mean: float, deviation: float) -> None:
    variance = deviation**2
    with mpmath.workdps(90):
        for position in POSITIONS:
            epsilon = mean + deviation * position
            truth = exact(mpmath.mpf(mean), mpmath.mpf(variance), mpmath.mpf(epsilon))
            low, high = (
                gaussian_loss_delta(mean, variance, epsilon, "lower"),
                gaussian_loss_delta(mean, variance, epsilon),
            )
            assert low <= truth <= high
            assert high - low <= 1e-9 * float(truth) + 2e-298


@pytest.mark.parametrize("s", [1e-10, 1e-3, 0.3, 9.0, 200.0])
def test_calls_from_above(s: float) -> None:
    with mpmath.workdps(90):
        for strike in (1e-20, 0.3, 1 - 1e-9, 1.0, 1 + 1e-6, 2.0, 300.0, 1e40):
            truth = exact(mpmath.mpf(s) / 2, mpmath.mpf(s), mpmath.log(mpmath.mpf(strike)))
            assert truth <= call_from_above(s, strike) <= truth * (1 + 1e-9) + 2e-298


def test_ends_of_the_range() -> None:
    assert gaussian_delta(0.0, 0.0) == gaussian_delta(0.0, 1.0) == gaussian_loss_delta(1.0, 0.0, 1.0) == 0.0
    constant = gaussian_loss_delta(2.0, 0.0, 1.0, "lower"), gaussian_loss_delta(2.0, 0.0, 1.0)
    assert constant[0] < 1 - math.exp(-1) < constant[1] < constant[0] * (1 + 1e-14)
    for huge in (1e20, 1e150):
        assert gaussian_delta(huge, 1.0) == 1.0
        assert gaussian_delta(huge, 1.0, "lower") > 1 - 1e-9
        assert gaussian_loss_delta(huge, huge, 1.0) == 1.0
    assert gaussian_delta(1e-6, 1.0, "lower") == 0.0 < gaussian_delta(1e-6, 1.0) < 2e-298
    assert gaussian_delta(1e-300, 1e300) < 2e-298


def test_epsilon_of_the_mechanism() -> None:
    epsilon = gaussian_epsilon(2.0, 1e-5)
    assert gaussian_delta(2.0, epsilon) <= 1e-5 < gaussian_delta(2.0, epsilon * (1 - 1e-6))
    assert gaussian_epsilon(1e-6, 1e-5) == 0.0
    assert gaussian_epsilon(1e3, 1e-5) == pytest.approx(504263.9, rel=1e-6)


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
    """Their own bounds of adding: `dpmf.delta` might answer with that of removing."""
    mechanism = dpmf.Mechanism(strategy, dpmf.BallsInBins(2, 20))
    closed, converted = (one.prepare(mechanism).delta(3.0, epsilon, "add").value for one in (Gaussian(), Renyi()))
    assert closed <= converted


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
