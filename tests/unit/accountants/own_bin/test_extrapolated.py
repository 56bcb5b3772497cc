"""Bounds at large ε from bounds at smaller ε: concave by quadrature, never below the truth, close where bounds are."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import log_uniform, random_settings
from scipy.special import ndtri

from dpmf.accountants.own_bin._extrapolated import extrapolated


def covariance(seed: int, b: int, size: float) -> np.ndarray:
    loads = np.random.default_rng(seed).random((b, b + 2)) ** 3
    s = loads @ loads.T
    return size * s / s.max()


def put(s: np.ndarray, epsilon: float) -> float:
    """E(1 − e^ε·A)_+ by quadrature, also for ε below 0."""
    return oracles.delta(s, epsilon, "add")


@pytest.mark.parametrize("size", [0.02, 0.5, 5.0])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_the_quantile_of_delta_is_concave(b: int, size: float) -> None:
    """What Ehrhard's inequality says, by quadrature: second differences are not positive."""
    for seed in range(2 if b == 3 else 5):
        s = covariance(seed, b, size)
        epsilons = np.linspace(0.0, 4 * math.sqrt(size), 9)
        quantiles = ndtri([put(s, epsilon) for epsilon in epsilons.tolist()])
        assert np.all(np.diff(quantiles, 2) <= 1e-7)
        assert np.all(np.diff(quantiles) < 0)


@random_settings(60)
@given(
    st.integers(0, 10**6), st.integers(1, 2), log_uniform(1e-3, 8.0), st.floats(0.1, 5.0), log_uniform(1e-6, 1.0),
    st.integers(2, 7),
)  # fmt: skip
def test_never_below_the_truth(seed: int, b: int, size: float, far: float, loose: float, count: int) -> None:
    """With bounds that are looser or tighter, by quadrature."""
    s, epsilon = covariance(seed, b, size), far * math.sqrt(size)
    rng = np.random.default_rng(seed)
    smaller = np.sort(rng.uniform(0.0, epsilon, count)).tolist()
    exact = [put(s, one) for one in smaller]
    upper = [value * math.exp(loose * rng.random()) for value in exact]
    lower = [value * math.exp(-loose * rng.random()) for value in exact]
    found = extrapolated(math.exp(epsilon), [math.exp(one) for one in smaller], upper, lower)
    assert put(s, epsilon) * (1 - 1e-6) <= found <= 1


def test_exact_values_lose_little() -> None:
    s = covariance(1, 2, 0.3)
    epsilons = [0.3, 0.4, 0.5]
    exact = [put(s, one) for one in epsilons]
    found = extrapolated(math.exp(0.7), [math.exp(one) for one in epsilons], exact, exact)
    assert put(s, 0.7) <= found <= 1.3 * put(s, 0.7)
    looser = extrapolated(math.exp(0.7), [math.exp(one) for one in epsilons], [1.1 * x for x in exact], exact)
    assert found < looser
    looser = extrapolated(math.exp(0.7), [math.exp(one) for one in epsilons], exact, [0.9 * x for x in exact])
    assert found < looser


@pytest.mark.parametrize(
    ("upper", "lower"),
    [([1.0, 1.0], [0.2, 0.1]), ([0.3, 0.2], [0.0, 0.0]), ([0.3, 0.3], [0.2, 0.1]), ([0.0, 0.0], [0.0, 0.0]),
     ([math.nan, math.nan], [0.2, 0.1]), ([0.3, 0.2], [math.nan, math.nan]), ([2.0, 2.0], [0.9995, 0.9995])],
)  # fmt: skip
def test_bounds_that_say_nothing_give_nothing(upper: list[float], lower: list[float]) -> None:
    assert extrapolated(math.exp(1.0), [1.0, math.exp(0.5)], upper, lower) == 1.0


def test_strikes_that_are_the_same_but_for_rounding() -> None:
    """Where logarithms have no digits left, nothing is gained, and nothing is divided by zero."""
    near = np.nextafter(1.0, 2.0)
    assert extrapolated(near, [1.0, near], [0.3, 0.2], [0.29, 0.19]) >= 0.2
    assert extrapolated(1.0, [1.0, 1.0], [0.3, 0.2], [0.29, 0.19]) >= 0.2
