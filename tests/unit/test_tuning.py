"""The guarantee of a search, against searches over few outcomes that are computed exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dpmf
from dpmf import tuning
from dpmf.attacks import TradeOff

SHAPES = (math.inf, 1.0, 0.0, 0.5, -0.5, 3.0)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0.0)))


def curve_of(p: np.ndarray, q: np.ndarray) -> TradeOff:
    """The exact profile of two distributions, at many points."""
    grid = np.linspace(0.0, 6.0, 31)
    points = {
        "remove": (grid, np.array([hockey_stick(p, q, e) for e in grid])),
        "add": (grid, np.array([hockey_stick(q, p, e) for e in grid])),
    }
    return TradeOff(
        noise_multiplier=1.0, direction="both", accountant="exact", mu=1.0, slack=0.0, largest_mu=1.0, attacks={},
        epsilons={}, renyi={}, points=points, lines={},
    )  # fmt: skip


def generating_function(mean: float, shape: float, x: np.ndarray) -> np.ndarray:
    """E x^K for the distributions of Papernot & Steinke, from their series."""
    if shape == math.inf:
        return np.exp(mean * (x - 1))
    gamma = tuning._stopping(mean, shape)
    if shape == 0:
        return np.log1p(-(1 - gamma) * x) / math.log(gamma)
    return ((1 - (1 - gamma) * x) ** -shape - 1) / (gamma**-shape - 1)


def best_of_many(p: np.ndarray, mean: float, shape: float) -> np.ndarray:
    """The distribution of the best of K outcomes, the last one being the best; and of no outcome at all."""
    steps = generating_function(mean, shape, np.append(0.0, np.cumsum(p)))
    return np.append(np.diff(steps), steps[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 10.0])
def test_no_search_exceeds_the_bound(shape: float, mean: float) -> None:
    rng = np.random.default_rng(3)
    for spread in (0.1, 0.5, 1.5):
        q = rng.dirichlet(np.ones(6))
        p = q * np.exp(spread * rng.normal(size=6))
        p /= p.sum()
        for delta in (0.2, 0.01, 1e-6):
            found = tuning.total_epsilon(curve_of(p, q), delta=delta, mean=mean, shape=shape)
            with_it, without = best_of_many(p, mean, shape), best_of_many(q, mean, shape)
            assert with_it.sum() == pytest.approx(1.0)
            for one, other in ((with_it, without), (without, with_it)):
                assert hockey_stick(one, other, found.epsilon) <= delta * (1 + 1e-9)
            assert found.base_epsilon <= found.epsilon


def test_numbers_of_runs_have_the_mean_that_was_asked_for() -> None:
    for shape in SHAPES[1:]:
        gamma, h = tuning._stopping(7.0, shape), 1e-6
        slope = (
            generating_function(7.0, shape, np.array([1.0])) - generating_function(7.0, shape, np.array([1 - h]))
        ) / h
        assert float(slope[0]) == pytest.approx(7.0, rel=1e-3), (shape, gamma)


def test_a_search_over_a_mechanism() -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 10))
    curve = dpmf.tradeoff(mechanism, noise_multiplier=3.0, accountant="lattice")
    found = tuning.total_epsilon(curve, delta=1e-5, mean=10.0, shape=0.0)
    one = dpmf.epsilon(mechanism, noise_multiplier=3.0, delta=1e-5, accountant="lattice").epsilon
    assert found.base_epsilon == pytest.approx(one, rel=0.01)
    assert one < found.epsilon < 4 * one
    assert "the best of 10 runs on average (logarithmic) is (" in str(found)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mean": 0.0}, "mean must be positive"),
        ({"mean": 1.0, "shape": 1.0}, "mean must be more than 1 for geometric"),
        ({"shape": -1.0}, "shape must be more than"),
        ({"shape": math.nan}, "shape must be more than"),
        ({"delta": 0.0}, "delta must be strictly"),
        ({"tradeoff": 1}, "tradeoff must be a dpmf.TradeOff"),
    ],
)
def test_bad_arguments(options: dict[str, object], complaint: str) -> None:
    half = np.array([0.5, 0.5])
    arguments = {"tradeoff": curve_of(half, half), "delta": 0.1, "mean": 2.0} | options
    with pytest.raises(ValueError, match=complaint):
        tuning.total_epsilon(arguments.pop("tradeoff"), **arguments)  # type: ignore[arg-type]
