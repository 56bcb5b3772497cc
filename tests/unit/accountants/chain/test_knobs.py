"""Any tuning gives sound bounds: all tuning numbers of the chain are changed at random, and bounds are compared with
quadrature of the majorant itself, fits with the Gram matrix that they have to dominate."""

from __future__ import annotations

import knobs
import numpy as np
import oracles
import pytest

from dpmf import strategies
from dpmf.accountants.chain import Chain
from dpmf.accountants.chain._blocks import RenewalModel, SeparatorModel
from dpmf.accountants.chain._bound import ChainBound
from dpmf.accountants.chain._lines import LineModel, StationaryModel
from dpmf.accountants.chain._majorants import models, stationary_models
from dpmf.accountants.chain._overlaps import OverlapModel
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism

PACKAGE = "dpmf.accountants.chain"
SEEDS = range(6)
MECHANISM = Mechanism(strategies.dpsgd(), BallsInBins(1, 3))

MODELS = {
    "line": LineModel(np.array([0.4, 0.2, 0.3]), np.array([0.5, 0.8, 0.6]), np.array([0.9, 0.4]), np.full(3, 0.1)),
    "separators": SeparatorModel(np.array([0.6]), np.array([0.4]), np.array([0.3]), np.array([0.2]), 3, True),
    "renewal": RenewalModel(np.array([0.4]), np.array([0.7]), np.array([0.8]), np.array([0.1]), 3, True),
    "open renewal": RenewalModel(
        np.array([0.1, 0.3, 0.6]), np.array([0.7, 0.6, 0.4]), np.array([0.9, 0.8, 0.7]), np.full(3, 0.1), 1, False
    ),
    "overlaps": OverlapModel(np.array([[0.3, 0.5, 0.4], [0.2, 0.0, 0.6]]), np.full(2, 0.2), np.full(2, 0.1), 3),
    "stationary": StationaryModel(3, 0.05, 0.5, 0.7, 0.15),
}
POINTS = [(2.0, 0.3), (0.8, 1.5), (1.5, 2.5)]


def covariance(model) -> np.ndarray:
    if isinstance(model, StationaryModel):
        d = np.arange(model.size)
        return model.lags(model.size)[np.abs(d[:, None] - d)]
    return model.covariance()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_bounds_are_above_quadrature_for_any_tuning(name, direction):
    model = MODELS[name]
    exact = [oracles.delta(covariance(model) / sigma**2, epsilon, direction) for sigma, epsilon in POINTS]
    for seed in SEEDS if name not in ("stationary", "overlaps") else SEEDS[:2]:
        with knobs.changed(PACKAGE, seed):
            bound = ChainBound(MECHANISM, model, family=name, largest=3.0, discretisation_loss=0.05)
            for (sigma, epsilon), truth in zip(POINTS, exact, strict=True):
                for target in (None, 1e-5):
                    assert bound.delta(sigma, epsilon, direction, target).value >= truth * (1 - 1e-9), seed
                    assert bound.rough_delta(sigma, epsilon, direction, target).value >= truth * (1 - 1e-9), seed
            grid = [0.2, 0.3, 0.4, 0.9, 2.0]
            for value, epsilon in zip(bound.deltas(2.0, grid, direction), grid, strict=True):
                if epsilon == 0.3:
                    assert value >= exact[0] * (1 - 1e-9), seed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", [strategies.bsr(5), strategies.bisr(3)], ids=str)
def test_fits_dominate_for_any_tuning(strategy, seed):
    batching = BallsInBins(3, 24)
    mechanism = Mechanism(strategy, batching)
    gram = mechanism.gram
    with knobs.changed(PACKAGE, seed):
        found = [model for _, model in (*models(mechanism.gram_upper()), *stationary_models(mechanism.lags))]
    for model in found:
        ours, size = covariance(model), model.size
        for start in range(len(gram)) if size < len(gram) else (0,):
            window = (start + np.arange(size)) % len(gram)
            assert np.all(ours >= gram[np.ix_(window, window)])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_accountant_is_above_quadrature_for_any_tuning(seed):
    mechanism = Mechanism(strategies.bsr(2), BallsInBins(2, 3))
    gram = oracles.gram(mechanism.strategy.matrix(6), 3)
    for direction in ("remove", "add"):
        truth = oracles.delta(gram / 1.5**2, 0.5, direction)
        with knobs.changed(PACKAGE, seed):
            for bound in Chain().prepare(mechanism).bounds():
                assert bound.delta(1.5, 0.5, direction).value >= truth * (1 - 1e-9)


def test_every_number_is_changed():
    names = {module.__name__.removeprefix(f"{PACKAGE}.") for module in knobs.tuned_modules(PACKAGE)}
    assert names >= {"_spreads", "_lines", "_blocks", "_inversion", "_bound", "_majorants", "_block_fits"}
    for module in knobs.tuned_modules(PACKAGE):
        before = vars(module._TUNING)
        after = [vars(knobs.another(module._TUNING, np.random.default_rng(seed), 2.0)) for seed in SEEDS]
        for name, value in before.items():
            assert value in (0, 0.0) or any(one[name] != value for one in after), name
