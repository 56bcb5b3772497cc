"""Overlapping separators: their laws are above quadrature, their fits dominate, their kernels have slow twins."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import oracles
import pytest
from scipy.stats import norm

from dpmf import strategies
from dpmf.accountants.chain import _bound
from dpmf.accountants.chain._bound import ChainBound
from dpmf.accountants.chain._majorants import candidates
from dpmf.accountants.chain._overlap_fits import _Fit, overlaps
from dpmf.accountants.chain._overlaps import OverlapModel, graded_spread
from dpmf.accountants.chain._spreads import Resolution
from dpmf.accountants.monte_carlo import MonteCarlo
from dpmf.batching import BallsInBins
from dpmf.kernels.chain import overlap_step
from dpmf.mechanism import Mechanism

DIRECTIONS = ("remove", "add")


@pytest.fixture(autouse=True)
def _at_any_noise(monkeypatch):
    """The laws are sound, and tested, also where they take so long that others answer in their place."""
    monkeypatch.setattr(_bound, "_TUNING", replace(_bound._TUNING, overlaps_alone=300.0, overlaps_together=300.0))


def example(length: int, depth: int, size: int, inner: float = 0.3) -> OverlapModel:
    loads = np.linspace(0.6, 0.2, length * (depth + 1)).reshape(length, depth + 1)
    return OverlapModel(loads, np.full(length, inner), np.full(length, 0.1), size)


def member_of(model: OverlapModel, loss: float = 0.005) -> ChainBound:
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, model.size))
    largest = float(model.covariance().max())
    return ChainBound(mechanism, model, family="overlaps", largest=largest, discretisation_loss=loss)


@pytest.mark.parametrize(("length", "depth", "size"), [(1, 3, 6), (2, 2, 7), (3, 1, 8), (3, 2, 2)])
def test_covariance_is_that_of_the_factors(length, depth, size):
    """The model, written out: index × separators, inner factors and nuggets."""
    model = example(length, depth, size)
    separators = model.blocks + depth
    loads = np.zeros((size, separators + model.blocks + size))
    for row in range(size):
        block, i = divmod(row, length)
        loads[row, block : block + depth + 1] = model.loads[i]
        loads[row, separators + block] = model.inner[i]
        loads[row, separators + model.blocks + row] = math.sqrt(model.nuggets[i])
    np.testing.assert_allclose(model.covariance(), loads @ loads.T, atol=1e-14)
    np.testing.assert_allclose(model.variances(), np.diagonal(model.covariance()), atol=1e-14)
    np.testing.assert_allclose(model.scaled(0.5).covariance(), model.covariance() / 4, atol=1e-14)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("slope", [0.05, 0.8])
def test_graded_spreads_raise_convex_functions(sign, slope):
    """Calls (puts) on e^(load·z), load at least (at most) the slope; linear ones in e^(slope·z) stay what they are."""
    nodes = np.array([-5.0, -3.5, -2.0, -1.2, -0.5, 0.0, 0.4, 1.0, 2.2, 3.4, 5.0])
    spread = graded_spread(nodes, slope, sign)
    for load, strike in itertools.product([slope, slope * (2 if sign > 0 else 0.5)], [0.3, 0.9, 1.4, 4.0]):
        z = norm.ppf((np.arange(200_000) + 0.5) / 200_000)
        cut = np.exp(load * np.clip(z, None, nodes[-1]))
        exact = np.maximum(sign * (cut - strike), 0.0).mean()
        found = float(spread.weights @ np.maximum(sign * (np.exp(load * nodes) - strike), 0.0)) + spread.lost * strike
        assert found >= exact * (1 - 1e-5)
    inside = float(spread.weights @ np.exp(slope * nodes))
    assert inside == pytest.approx(math.exp(slope**2 / 2), rel=2e-3)


def test_a_step_is_the_sum_over_the_last_separator():
    rng = np.random.default_rng(0)
    nodes, between, width = 4, 3, 2
    block, values = rng.normal(size=(nodes * between * nodes, 2, width)), rng.normal(size=(between * nodes, 2, width))
    weights, floor = rng.uniform(size=nodes), np.full(width, -np.inf)
    joined = (block[:, 0] + 1j * block[:, 1]).reshape(nodes, between, nodes, width)
    later = (values[:, 0] + 1j * values[:, 1]).reshape(between, nodes, width)
    expected = np.einsum("irkf,rkf,k->irf", joined, later, weights).reshape(-1, width)
    found = overlap_step(block, values, weights, floor)
    np.testing.assert_allclose(found[:, 0] + 1j * found[:, 1], expected, atol=1e-13)
    assert overlap_step(block, values, weights, np.full(width, 50.0))[:, 0].min() == 50.0


@pytest.mark.parametrize(("length", "depth", "size"), [(1, 2, 2), (2, 1, 3)])
def test_the_transform_is_the_sum_over_all_nodes(length, depth, size):
    model = example(length, depth, size, inner=0.0 if length == 1 else 0.3)
    law = model.law(size * 1.2, 1, Resolution().scaled(100.0), 1e-1)
    x, z = law.outer.nodes, law.inner.nodes
    s = np.array([0.3 + 0.0j, 0.2 + 0.7j])
    tables = law.table.transforms(s)[0]
    tables = tables[:, 0] + 1j * tables[:, 1]
    separators = model.blocks + depth
    total = np.zeros(2, dtype=complex)
    smooth = (model.loads**2).sum(axis=1) + model.inner**2
    for places in itertools.product(range(len(x)), repeat=separators):
        weight = float(np.prod(law.outer.weights[list(places)]))
        product = np.full(2, weight, dtype=complex)
        for block in range(model.blocks):
            inside = np.zeros(2, dtype=complex)
            for node, share in zip(z, law.inner.weights, strict=True):
                terms = np.full(2, share, dtype=complex)
                for i in range(min(length, size - block * length)):
                    y = model.loads[i] @ x[list(places[block : block + depth + 1])]
                    row, part = law.table.locate(np.array(y + model.inner[i] * node - smooth[i] / 2))
                    terms *= (1 - part) * tables[row] + part * tables[row + 1]
                inside += terms
            product *= inside
        total += product
    np.testing.assert_allclose(law.transform(s), total, rtol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("length", "depth", "size"), [(1, 2, 3), (2, 2, 3), (3, 1, 3)])
def test_against_quadrature(length, depth, size, direction):
    model = example(length, depth, size)
    member = member_of(model)
    for sigma, epsilon in ((2.0, 0.3), (0.8, 1.5)):
        exact = oracles.delta(model.covariance() / sigma**2, epsilon, direction)
        assert exact <= member.delta(sigma, epsilon, direction).value <= exact * 1.1
        assert exact <= member.rough_delta(sigma, epsilon, direction).value <= exact * 1.5
        together = member.deltas(sigma, [epsilon - 0.1, epsilon, epsilon + 0.1, epsilon + 0.2], direction)
        assert exact <= together[1] <= exact * 1.15


@pytest.mark.parametrize("emphasis", [0.0, 3.0])
def test_gradients_of_the_fit(emphasis):
    fit = _Fit(np.array([1.0, 0.6, 0.5, 0.3, 0.1, 0.0]), 2, 2, emphasis)
    p = np.random.default_rng(1).uniform(0.1, 0.9, 8)
    gradient, slope = fit.cost(p)[1], fit.slack_slope(p)
    for k in range(len(p)):
        step = np.zeros(len(p))
        step[k] = 1e-6
        assert gradient[k] == pytest.approx((fit.cost(p + step)[0] - fit.cost(p - step)[0]) / 2e-6, abs=1e-6)
        np.testing.assert_allclose(slope[:, k], (fit.slack(p + step) - fit.slack(p - step)) / 2e-6, atol=1e-7)


@pytest.mark.parametrize("width", [2, 3, 4, 9, 16])
@pytest.mark.parametrize("emphasis", [0.0, 3.0])
def test_fits_dominate(width, emphasis):
    mechanism = Mechanism(strategies.bsr(width), BallsInBins(1, 41))
    gram = mechanism.gram_upper()
    found = overlaps(gram, emphasis)
    assert found
    for model in found:
        assert np.all(model.covariance() >= mechanism.gram)
    if emphasis == 0:
        rows = np.array([np.diagonal(gram, d).max() for d in range(41)])
        full = rows[np.abs(np.arange(41)[:, None] - np.arange(41))]
        excess = min(model.covariance().sum() for model in found) / full.sum()
        assert excess < (1.002 if width <= 3 else 1.12)


def test_no_fit_where_the_matrix_wraps_or_is_wide():
    assert overlaps(Mechanism(strategies.bsr(16), BallsInBins(1, 30)).gram_upper(), 0.0) == []
    ring = Mechanism(strategies.bsr(4), BallsInBins(3, 40)).gram_upper()
    assert not any(name.startswith("overlaps") for name, _ in candidates(ring, 0.0))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_not_below_monte_carlo(direction):
    mechanism = Mechanism(strategies.bsr(4), BallsInBins(1, 30))
    model = overlaps(mechanism.gram_upper(), 0.0)[0]
    bound = ChainBound(mechanism, model, family="overlaps", largest=float(mechanism.gram.max()))
    sampled = MonteCarlo(samples=60_000, seed=3).prepare(mechanism)
    for sigma, epsilon in ((2.0, 0.5), (1.0, 1.0)):
        estimate = sampled.delta(sigma, epsilon, direction)
        assert bound.delta(sigma, epsilon, direction).value >= estimate.value * 0.95
        assert bound.delta(sigma, epsilon, direction).value <= estimate.value * 1.5
