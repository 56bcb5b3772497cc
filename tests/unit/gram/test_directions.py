"""Removing a record is never better than adding one: quadrature, mixtures, and what the API makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dpmf
from dpmf.accountants.combined.least import Least
from dpmf.accountants.registry import covering


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-1.5, 1.0), st.floats(0.0, 5.0))
def test_removing_is_at_least_adding(seed: int, size: float, epsilon: float) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.random((2, 3)) ** rng.uniform(0.3, 4)
    s = loads @ loads.T
    s *= 10**size / s.max()
    assert oracles.delta(s, epsilon, "add") <= oracles.delta(s, epsilon, "remove") * (1 + 1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_mixtures_with_any_weights(seed: int) -> None:
    """On a line, with components that are the reference itself, as in Poisson sampling."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 6))
    means, weights = rng.uniform(-2, 4, count), rng.dirichlet(np.ones(count))
    means[0] = 0.0
    x = np.linspace(-14, 18, 400_001)
    q = stats.norm.pdf(x)
    p = sum(w * stats.norm.pdf(x - m) for w, m in zip(weights, means, strict=True))
    for epsilon in (0.0, 0.1, 0.7, 2.0):
        factor = math.exp(epsilon)
        remove, add = (np.trapezoid(np.maximum(a, 0), x) for a in (p - factor * q, q - factor * p))
        assert add <= remove + 1e-8


def test_one_direction_is_asked_for_both() -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(2, 12))
    both = dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-5)
    alone = dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-5, direction="remove")
    assert both.noise_multiplier == alone.noise_multiplier
    assert (both.direction, both.binding) == ("both", "remove")
    assert both.details["add"] == {"value": both.details["remove"]["value"], "bounded_by": "remove"}
    profile = dpmf.profile(mechanism, noise_multiplier=1.5, epsilons=[0.5, 1.0])
    np.testing.assert_array_equal(profile.by_direction["add"], profile.by_direction["remove"])
    added = dpmf.profile(mechanism, noise_multiplier=1.5, epsilons=[0.5, 1.0], direction="add")
    assert list(added.by_direction) == ["add"]


MECHANISMS = {
    "bsr": dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(2, 6)),
    "dpsgd": dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 100)),
    "poisson": dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.Poisson(2, 10)),
}


@pytest.mark.parametrize(
    ("name", "accountant"),
    [("bsr", "renyi"), ("dpsgd", "renyi"), ("bsr", "cascade"), ("bsr", "best"), ("dpsgd", "best"), ("poisson", "best")],
)
def test_adding_alone_is_never_above_both(name: str, accountant: str) -> None:
    """Also where the bound of adding is the looser one, as that of `renyi` at small ε, or says nothing."""
    mechanism = MECHANISMS[name]

    def asked(question: Callable[..., Any], **arguments: Any) -> tuple[Any, Any]:
        both, add = (question(mechanism, accountant=accountant, direction=way, **arguments) for way in ("both", "add"))
        assert add.direction == "add"
        return add, both

    def bounded_by(add: Any, own: float, removed: float) -> None:
        assert list(add.details) == ["add"]
        assert add.binding == "add"
        assert ("bounded_by" in add.details["add"]) == (removed < own)

    prepared = Least.of(covering(accountant, mechanism).prepare(mechanism), "add")
    for epsilon in (0.25, 2.0):
        add, both = asked(dpmf.delta, noise_multiplier=2.0, epsilon=epsilon)
        assert add.delta <= both.delta
        bounded_by(add, prepared.delta(2.0, epsilon, "add").value, both.delta)
    add, both = asked(dpmf.epsilon, noise_multiplier=2.0, delta=1e-5)
    assert add.epsilon <= both.epsilon
    bounded_by(add, prepared.epsilon(2.0, 1e-5, "add").value, both.epsilon)
    add, both = asked(dpmf.profile, noise_multiplier=2.0, epsilons=[0.0, 0.25, 2.0])
    assert (add.deltas <= both.deltas).all()
    add, both = asked(dpmf.calibrate, target_epsilon=0.25, target_delta=1e-5, relative_tolerance=1e-3)
    assert add.noise_multiplier <= both.noise_multiplier
    assert add.delta <= 1e-5


def test_estimates_are_made_in_each_direction() -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(2, 12))
    found = dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0, accountant="monte-carlo")
    assert found.details["add"]["value"] < found.details["remove"]["value"]
