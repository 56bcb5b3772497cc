"""Certified lower bounds of several throws: below the truth about whole runs, and close to the upper bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import whole_mechanisms

import dpmf
from dpmf.batching import BallsInBins, Poisson, reshuffled
from dpmf.lower_bounds import _composed as composed
from dpmf.lower_bounds import lower_delta, lower_epsilon, lower_noise_multiplier
from dpmf.strategies import bisr, bsr, coefficients, dpsgd

WAYS = ("remove", "add")
SLOW = coefficients([(j + 1) ** -0.5 for j in range(40)])


@pytest.mark.parametrize(
    ("strategy", "batching", "sigma", "epsilon", "share"),
    [
        (coefficients([1.0, 0.9]), reshuffled(2, 2), 1.0, 3.0, 0.7),
        (coefficients([1.0, 0.9]), reshuffled(2, 2, gap=0), 1.0, 3.0, 0.4),
        (dpsgd(), reshuffled(2, 3), 1.0, 1.0, 0.95),
        (coefficients([1.0, 0.5]), BallsInBins(4, 2, rethrow_every=2), 2.0, 1.0, 0.9),
        (coefficients([1.0, 0.7, 0.3]), BallsInBins(2, 4, rethrow_every=1, stride=2), 1.0, 1.0, 0.9),
        (SLOW, reshuffled(2, 2, gap=1), 1.5, 2.0, 0.1),
        (SLOW, BallsInBins(2, 4, 7, stride=2), 2.0, 1.0, 0.7),
        (coefficients([1.0, 0.9]), Poisson(2, 4, 2), 1.0, 1.0, 0.97),
    ],
)
def test_whole_runs_are_above(strategy, batching, sigma, epsilon, share):
    mechanism = dpmf.Mechanism(strategy, batching)
    for way in WAYS:
        truth = whole_mechanisms.exact_delta(mechanism, sigma, epsilon, way)
        assert share * truth <= lower_delta(mechanism, sigma, epsilon, way) <= truth * (1 + 1e-9)


@pytest.mark.parametrize("batching", [reshuffled(10, 97), Poisson(10, 97)], ids=["reshuffled", "poisson"])
def test_uncorrelated_noise_is_known_within_a_percent(batching):
    mechanism = dpmf.Mechanism(dpsgd(), batching)
    found = dpmf.calibrate(mechanism, target_epsilon=4.0, target_delta=1e-5, direction="remove", with_lower=True)
    assert 0.99 * found.noise_multiplier <= found.lower <= found.noise_multiplier
    profile = dpmf.profile(mechanism, noise_multiplier=1.4, epsilons=[0.0, 1.0], with_lower=True)
    assert (profile.lower <= profile.deltas).all()
    assert (profile.lower >= 0.9 * profile.deltas).all()
    answer = dpmf.epsilon(mechanism, noise_multiplier=1.4, delta=1e-5, direction="remove", with_lower=True)
    assert 0.97 * answer.epsilon <= answer.lower <= answer.epsilon


def test_correlated_noise_is_known_within_a_few_percent():
    """Against the truth by sampling (10 epochs of 97 batches, δ = 1e−5): σ = 2.689 at ε = 1."""
    mechanism = dpmf.Mechanism(bsr(4), reshuffled(10, 97))
    found = lower_noise_multiplier(mechanism, 1.0, 1e-5, "remove", 1e-3)
    assert 0.96 * 2.689 <= found <= 2.689
    assert lower_delta(mechanism, found, 1.0, "remove") > 1e-5
    assert lower_epsilon(mechanism, 2.689, 1e-5, "remove") <= 1.0


def test_the_hull_of_tests_is_above_each_and_below_the_truth():
    """Two coarse pairs of the same normal mechanism: more cells in either place help."""
    coarse = [composed.mixture_cells(np.array([1.0]), np.ones(1), "remove").merged(width) for width in (0.5, 0.8)]
    both = composed.hull(coarse)

    def delta(cells, epsilon):
        return float(np.maximum(cells.gain - math.exp(epsilon) * cells.cost, 0.0).sum())

    from dpmf.loss.gaussian import gaussian_delta

    for epsilon in (-1.0, 0.0, 0.3, 1.0, 2.0, 4.0):
        assert max(delta(one, epsilon) for one in coarse) <= delta(both, epsilon) * (1 + 1e-9)
        assert delta(both, epsilon) <= gaussian_delta(1.0, epsilon)


def test_computed_coefficients_are_taken_back():
    """Coefficients of BISR are raised by their error for upper bounds; a lower bound must not keep that."""
    mechanism = dpmf.Mechanism(bisr(3), reshuffled(2, 4))
    bounds = composed.ComposedLowerBounds(mechanism)
    assert bounds._error >= 4 * mechanism.strategy.coef_error(mechanism.batching.iterations)
    assert (
        lower_delta(mechanism, 3.0, 1.0)
        <= dpmf.delta(mechanism, noise_multiplier=3.0, epsilon=1.0, accountant="gaussian").delta
    )


def test_hardly_any_noise_and_very_much():
    for batching in (reshuffled(2, 4), Poisson(2, 4, 2)):
        mechanism = dpmf.Mechanism(coefficients([1.0, 0.5]), batching)
        assert lower_delta(mechanism, 1e-4, 1.0) <= 1.0
        assert lower_delta(mechanism, 1e5, 1.0) <= 1e-9
