"""Every Rényi bound is at least the exact δ(ε), by quadrature, on random small mechanisms; and it is monotone."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_mechanisms import DIRECTIONS, log_uniform, mechanisms, random_settings, signal_to_noise

import dpmf
from dpmf import strategies
from dpmf.accountants import Renyi
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism

RENYI = Renyi(work_budget=3e6)


def bound(mechanism: Mechanism, sigma: float, epsilon: float, direction: str, accountant: Renyi = RENYI) -> float:
    return dpmf.delta(
        mechanism, noise_multiplier=sigma, epsilon=epsilon, direction=direction, accountant=accountant
    ).delta


# --- the oracle ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("s", [1e-4, 0.3, 1.0, 25.0, 400.0])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_equal_means_are_the_gaussian_mechanism(b, s, direction):
    for epsilon in (0.0, 0.02, 1.0, 6.0):
        expected = oracles.gaussian_delta(s, epsilon)
        if expected > 1e-12:
            assert oracles.delta(np.full((b, b), s), epsilon, direction) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("b", [2, 3])
def test_put_call_parity_of_the_quadrature(b, epsilon):
    """δ_add(γ) = 1 − γ + γ·δ_remove(1/γ): two different thresholds, two different integrands."""
    rng = np.random.default_rng(b)
    for scale in (0.01, 1.0, 40.0):
        root = np.tril(rng.random((b, b)))
        s = scale * root.T @ root
        gamma = math.exp(epsilon)
        add = 1 - gamma + gamma * oracles.delta(s, -epsilon, "remove")
        assert oracles.delta(s, epsilon, "add") == pytest.approx(max(add, 0.0), rel=1e-9, abs=1e-12 * gamma)


def test_quadrature_against_sampling():
    rng = np.random.default_rng(7)
    s = np.array([[1.5, 0.6, 0.1], [0.6, 1.2, 0.7], [0.1, 0.7, 0.9]])
    u = rng.multivariate_normal(np.zeros(3), s, 400_000)
    ratio = np.exp(u - np.diag(s) / 2).mean(axis=1)
    for epsilon in (0.0, 0.5, 1.5):
        gamma = math.exp(epsilon)
        for direction, gains in (("remove", ratio - gamma), ("add", 1 - gamma * ratio)):
            sample = np.maximum(gains, 0)
            error = 5 * sample.std() / math.sqrt(len(sample)) + 1e-9
            assert abs(oracles.delta(s, epsilon, direction) - sample.mean()) < error


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_quadrature_of_bins_that_never_matter(direction):
    """A zero column: that bin's output is the null's. Against a one-dimensional integral."""
    s = np.array([[2.0, 0.0], [0.0, 0.0]])
    z = np.linspace(-14, 16, 2_000_001)
    ratio = 0.5 + 0.5 * np.exp(math.sqrt(2) * z - 1)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    for epsilon in (0.0, 0.3, 0.6, 0.8):
        gamma = math.exp(epsilon)
        gains = ratio - gamma if direction == "remove" else 1 - gamma * ratio
        expected = np.trapezoid(np.maximum(gains, 0) * density, z)
        assert oracles.delta(s, epsilon, direction) == pytest.approx(expected, rel=1e-6, abs=1e-12)


# --- soundness -----------------------------------------------------------------------------------------------------

TOLERANCE = 1e-9  # of the quadrature


def check_sound(mechanism: Mechanism, sigma: float, epsilon: float, accountant: Renyi = RENYI) -> None:
    s = signal_to_noise(mechanism, sigma)
    for direction in DIRECTIONS:
        claimed = bound(mechanism, sigma, epsilon, direction, accountant)
        # Beyond S ≈ 300 the oracle is slow, and by Kahane's inequality less noise has a larger δ anyway.
        exact = oracles.delta(s * min(1.0, 300 / s.max()), epsilon, direction)
        assert claimed >= exact * (1 - TOLERANCE), (direction, claimed, exact)


@random_settings(120)
@given(mechanisms(most_bins=2), log_uniform(0.05, 50), log_uniform(0.01, 20))
@example(Mechanism(strategies.dpsgd(), BallsInBins(1, 1)), 1.0, 1.0)
@example(Mechanism(strategies.bsr(2), BallsInBins(3, 2)), 0.05, 20.0)
@example(Mechanism(strategies.bisr(2), BallsInBins(2, 2)), 50.0, 0.01)
def test_bounds_are_above_the_truth_up_to_two_bins(mechanism, sigma, epsilon):
    check_sound(mechanism, sigma, epsilon)


@random_settings(40)
@given(mechanisms(), log_uniform(0.1, 50), log_uniform(0.01, 20))
@example(Mechanism(strategies.dpsgd(), BallsInBins(1, 3)), 0.7, 1.0)
@example(Mechanism(strategies.bsr(2), BallsInBins(3, 3)), 1.5, 3.0)
@example(Mechanism(strategies.bsr(9), BallsInBins(3, 3)), 6.0, 0.5)
@example(Mechanism(strategies.bisr(2), BallsInBins(2, 3, 5)), 2.0, 1.0)
def test_bounds_are_above_the_truth_up_to_three_bins(mechanism, sigma, epsilon):
    check_sound(mechanism, sigma, epsilon)


@random_settings(25)
@given(mechanisms(), log_uniform(0.3, 5), log_uniform(0.05, 5), st.integers(2, 12), st.integers(1, 2))
def test_any_options_are_sound(mechanism, sigma, epsilon, max_order, bandwidth):
    """Fewer orders or a narrower truncation loosen the bound, they never break it."""
    check_sound(mechanism, sigma, epsilon, Renyi(max_order=max_order, bandwidth=bandwidth, work_budget=1e6))


@random_settings(40)
@given(mechanisms(), log_uniform(0.3, 20), log_uniform(1e-9, 0.3), st.sampled_from(DIRECTIONS))
def test_epsilon_is_sound(mechanism, sigma, delta, direction):
    found = dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=delta, direction=direction, accountant=RENYI).epsilon
    assert oracles.delta(signal_to_noise(mechanism, sigma), found, direction) <= delta * (1 + TOLERANCE)


@random_settings(10)
@given(mechanisms(), log_uniform(0.5, 10), log_uniform(1e-8, 0.1))
def test_calibrated_noise_is_enough(mechanism, epsilon, delta):
    accountant = Renyi(work_budget=3e5)
    found = dpmf.calibrate(
        mechanism, target_epsilon=epsilon, target_delta=delta, accountant=accountant, relative_tolerance=1e-3
    )
    s = signal_to_noise(mechanism, found.noise_multiplier)
    for direction in DIRECTIONS:
        assert oracles.delta(s, epsilon, direction) <= delta * (1 + TOLERANCE)


# --- monotonicity --------------------------------------------------------------------------------------------------

SLACK = 1 + 1e-7
FIXED_ORDERS = Renyi(max_order=20)


@random_settings(40)
@given(mechanisms(), log_uniform(0.1, 20), log_uniform(0.01, 20), st.floats(1.001, 3), st.sampled_from(DIRECTIONS))
def test_more_noise_or_more_epsilon_mean_less_delta(mechanism, sigma, epsilon, factor, direction):
    base = bound(mechanism, sigma, epsilon, direction, FIXED_ORDERS)
    assert bound(mechanism, sigma * factor, epsilon, direction, FIXED_ORDERS) <= base * SLACK
    assert bound(mechanism, sigma, epsilon * factor, direction, FIXED_ORDERS) <= base * SLACK


@random_settings(40)
@given(mechanisms(), log_uniform(0.1, 20), log_uniform(1e-9, 0.3), st.floats(1.001, 3), st.sampled_from(DIRECTIONS))
def test_more_noise_or_more_delta_mean_less_epsilon(mechanism, sigma, delta, factor, direction):
    def epsilon(noise_multiplier: float, delta: float) -> float:
        return dpmf.epsilon(
            mechanism, noise_multiplier=noise_multiplier, delta=delta, direction=direction, accountant=FIXED_ORDERS
        ).epsilon

    base = epsilon(sigma, delta)
    assert epsilon(sigma * factor, delta) <= base * SLACK + 1e-12
    assert epsilon(sigma, delta * factor) <= base * SLACK + 1e-12


@random_settings(40)
@given(
    mechanisms(), log_uniform(0.1, 20), log_uniform(0.01, 20), st.sampled_from(DIRECTIONS), st.integers(0, 2**32 - 1)
)
def test_a_larger_strategy_needs_more(mechanism, sigma, epsilon, direction, seed):
    """Entrywise larger C, entrywise larger G (Kahane): a larger δ."""
    bins = mechanism.batching
    full = mechanism.strategy.matrix(bins.iterations)
    growth = 1 + np.random.default_rng(seed).random(full.shape) * 0.5
    larger = Mechanism(strategies.matrix(full * growth), bins)
    same = Mechanism(strategies.matrix(full), bins)
    base = bound(same, sigma, epsilon, direction, FIXED_ORDERS)
    assert bound(larger, sigma, epsilon, direction, FIXED_ORDERS) * SLACK >= base


@random_settings(40)
@given(mechanisms(), log_uniform(0.1, 20), log_uniform(0.01, 20), log_uniform(1e-3, 1e3), st.sampled_from(DIRECTIONS))
def test_only_the_ratio_of_strategy_and_noise_counts(mechanism, sigma, epsilon, scale, direction):
    bins = mechanism.batching
    scaled = Mechanism(strategies.matrix(mechanism.strategy.matrix(bins.iterations) * scale), bins)
    expected = bound(mechanism, sigma, epsilon, direction, FIXED_ORDERS)
    assert bound(scaled, sigma * scale, epsilon, direction, FIXED_ORDERS) == pytest.approx(expected, rel=1e-7)
