"""Very many batches: what is known of G without making it, and the stationary chains, against their dense twins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
from scipy.stats import gamma

import dpmf
from dpmf import BallsInBins, Mechanism, strategies
from dpmf import lower_bounds as lower
from dpmf.accountants import Chain, chain
from dpmf.accountants.chain._inversion import invert_calls
from dpmf.accountants.chain._lines import LineModel, StationaryModel, power_sum
from dpmf.accountants.chain._majorants import stationary_models
from dpmf.accountants.chain._spreads import Option, Resolution
from dpmf.gram.sums import gram_sums, lower_sums, toeplitz_lags
from dpmf.lower_bounds import _families

STRATEGIES = [strategies.bsr(4), strategies.bisr(3), strategies.bsr(30), strategies.bisr(12)]
ALLOCATIONS = [BallsInBins(3, 40), BallsInBins(1, 40), BallsInBins(3, 40, 97), BallsInBins(6, 7)]


@pytest.mark.parametrize("batching", ALLOCATIONS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("piece", [2**20, 50, 1])
def test_lags_and_sums_against_the_matrix(strategy, batching, piece, monkeypatch):
    monkeypatch.setattr("dpmf.gram.sums._PIECE", piece)
    b, n = batching.batches_per_epoch, batching.iterations
    # Of the matrix that is accounted for, which covers the one that runs.
    gram = oracles.gram(strategy.matrix(n) * (1 + strategy.coef_error(n)), b)
    largest = np.array([np.diagonal(gram, d).max() for d in range(b)])
    lags = toeplitz_lags(strategy, batching)
    assert np.all(lags >= largest)
    assert np.all(lags <= largest + 2e-13 * gram.max())
    assert np.all((lags > 0) == (largest > 0)) or strategy.bandwidth(n) > 4
    both = gram_sums(strategy, batching)
    np.testing.assert_allclose(both.diagonal, np.diagonal(gram), rtol=1e-13)
    assert both.total == pytest.approx(gram.sum(), rel=1e-13)
    sums = lower_sums(strategy, batching)
    assert np.all(sums.row_sums <= gram.sum(axis=1))
    np.testing.assert_allclose(sums.row_sums, gram.sum(axis=1), rtol=1e-9)
    assert sums.least <= gram.min()
    assert sums.least == pytest.approx(gram.min(), abs=1e-11 * gram.max())


def _covariance(model: StationaryModel, size: int) -> np.ndarray:
    d = np.arange(size)
    return model.lags(size)[np.abs(d[:, None] - d)]


@pytest.mark.parametrize("batching", [BallsInBins(4, 200), BallsInBins(1, 200)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_stationary_majorants_dominate(strategy, batching):
    b = batching.batches_per_epoch
    gram = oracles.gram(strategy.matrix(batching.iterations), b)
    models = dict(stationary_models(Mechanism(strategy, batching).lags))
    assert "shared" in models
    assert "stationary 0" in models
    for model in models.values():
        # Every window of so many indices on the ring; a line of all indices is its own window.
        size = model.size
        assert 0.98 * b <= size <= b
        covariance = _covariance(model, size) if isinstance(model, StationaryModel) else model.covariance()
        for start in range(0, b if size < b else 1, 23):
            rows = (start + np.arange(size)) % b
            assert np.all(covariance >= gram[np.ix_(rows, rows)])


def test_powers_by_doubling():
    rng = np.random.default_rng(1)
    matrix, vector = rng.uniform(size=(5, 5)) / 4, rng.uniform(size=5)
    for count in (1, 2, 3, 7, 20):
        expected = sum(np.linalg.matrix_power(matrix, i) @ vector for i in range(count))
        np.testing.assert_allclose(power_sum(matrix, vector, count), expected, rtol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shared", [0.0, 0.05])
def test_stationary_law_is_the_line_law_of_the_same_chain(shared, sign):
    n, correlation = 23, 0.6
    model = StationaryModel(n, shared, 0.5, correlation, 0.1)
    line = LineModel(
        np.full(n, np.sqrt(shared)), np.full(n, np.sqrt(0.5)), np.full(n - 1, correlation), np.full(n, 0.1)
    )
    np.testing.assert_allclose(_covariance(model, n), line.covariance(), rtol=1e-12)
    s = sign * np.array([0.01, 0.05, 0.1 + 0.2j, 0.05 + 1j])
    fine = Resolution(0.08, 0.12, 0.02)
    ours, theirs = (m.law(30.0, sign, fine, 1e-6).transform(s) for m in (model, line))
    np.testing.assert_allclose(ours, theirs, atol=2e-3 * abs(theirs[0]))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("strategy", "epochs", "b"), [(strategies.bsr(2), 2, 3), (strategies.bisr(2), 1, 3)], ids=str)
def test_stationary_chains_are_above_quadrature(strategy, epochs, b, direction, monkeypatch):
    monkeypatch.setattr(chain, "_TUNING", chain._Tuning(dense_batches=0))
    mechanism = Mechanism(strategy, BallsInBins(epochs, b))
    prepared = Chain().prepare(mechanism)
    assert "gram" not in mechanism.__dict__
    gram = oracles.gram(strategy.matrix(epochs * b), b)
    for sigma, epsilon in ((1.5, 0.5), (3.0, 0.2), (1.0, 2.0)):
        truth = oracles.delta(gram / sigma**2, epsilon, direction)
        for member in prepared.bounds():
            assert member.delta(sigma, epsilon, direction).value >= truth * (1 - 1e-5)


def test_large_path_at_a_moderate_size(monkeypatch):
    """Forced on 300 batches: close to the dense path, never below the certified lower bound."""
    mechanism = Mechanism(strategies.bsr(3), BallsInBins(3, 300))
    target = {"target_epsilon": 1.0, "target_delta": 1e-5, "relative_tolerance": 1e-3}
    dense = dpmf.calibrate(mechanism, accountant=Chain(), **target)
    monkeypatch.setattr(chain, "_TUNING", chain._Tuning(dense_batches=0))
    monkeypatch.setattr(_families, "_TUNING", replace(_families._TUNING, dense_batches=0))
    fresh = Mechanism(strategies.bsr(3), BallsInBins(3, 300))
    large = dpmf.calibrate(fresh, accountant=Chain(), with_lower=True, **target)
    assert "gram" not in fresh.__dict__
    assert large.lower <= dense.noise_multiplier
    assert large.lower <= large.noise_multiplier
    assert large.noise_multiplier == pytest.approx(dense.noise_multiplier, rel=0.03)


def test_a_hundred_thousand_batches():
    mechanism = Mechanism(strategies.bsr(2), BallsInBins(2, 100_000))
    found = dpmf.delta(mechanism, noise_multiplier=0.5, epsilon=1.0, accountant=Chain(discretisation_loss=0.05))
    assert "gram" not in mechanism.__dict__
    below = lower.lower_delta(mechanism, 0.5, 1.0)
    assert 0 < below <= found.delta <= 3 * below


@pytest.mark.parametrize("plan", [(0.2, 7.0), (0.2, 4.0), (0.2, 12.0), (1.2, 12.0)])
def test_calls_at_several_strikes_against_a_closed_form(plan):
    """T has a gamma law: its transform is (1 − s)^(−k), and calls are in closed form."""
    shape, top = 6.0, 36.0
    strikes = np.array([18.0, 25.0, 36.0])
    law = gamma(shape)
    expected = shape * gamma(shape + 1).sf(strikes) - strikes * law.sf(strikes)
    option = Option(top, 1, 6, 1e-6)

    def transform(s: np.ndarray) -> np.ndarray:
        return (1 - s) ** -shape * np.exp(-s * top)

    gamma_law = SimpleNamespace(option=option, surplus=0.0, rounding=1e-15, transform=transform)
    found = invert_calls(gamma_law, strikes, loss=1e-3, most=4096, plan=plan)
    values = np.array([one.value for one in found])
    assert np.all(values >= expected * (1 - 1e-12))
    if plan[1] <= 7:  # the others let more of the options at higher strikes in
        np.testing.assert_allclose(values, expected, rtol=0.05)


def test_profiles_in_groups_are_those_one_by_one():
    prepared = Chain(discretisation_loss=0.02).prepare(Mechanism(strategies.bsr(2), BallsInBins(2, 12))).bounds()[0]
    grid = [0.2, 1.2, 1.4, 1.6, 2.5, 2.6, 5.0]
    together = prepared.deltas(1.5, grid, "remove")
    single = [prepared.delta(1.5, epsilon, "remove").value for epsilon in grid]
    np.testing.assert_allclose(together, single, rtol=0.08)
    assert np.all(np.diff(together) <= 0)
