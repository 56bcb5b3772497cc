"""The Gram matrix of one throw: never smaller than that of any throw of the run."""

from __future__ import annotations

import numpy as np
import pytest

import dpmf
from dpmf.batching import BallsInBins, Poisson, reshuffled
from dpmf.strategies import bsr, coefficients


def means(mechanism, group=0):
    """The means of every throw of a run, from the dense matrix: throws × bins × iterations."""
    batching = mechanism.batching
    b, m = batching.batches_per_epoch, batching.rethrow_every or batching.epochs
    dense = np.abs(mechanism.strategy.matrix(batching.iterations))
    found = []
    for throw in range(batching.throws):
        start = throw * (m * b + (batching.gap or 0))
        columns = [[start + e * b + i for e in range(m)] for i in range(group, b, batching.stride)]
        found.append([dense[:, [t for t in c if t < batching.iterations]].sum(axis=1) for c in columns])
    return np.array(found)


@pytest.mark.parametrize(
    ("strategy", "batching"),
    [
        (bsr(3), reshuffled(3, 6)),
        (bsr(3), BallsInBins(4, 6, rethrow_every=2, stride=2)),
        (bsr(3), BallsInBins(4, 6, rethrow_every=2, stride=6, gap=1)),
        (bsr(30), BallsInBins(4, 6, rethrow_every=2, stride=3, gap=2)),
        (bsr(30).normalized(), BallsInBins(3, 6, 14, stride=2)),
        (coefficients([1, 0, 0, 0, 0, 10, 10, 10]).normalized(), BallsInBins(2, 4, 5, stride=2)),
        (coefficients([1, 0, 0, 0, 0, 10, 10, 10]).normalized(), reshuffled(2, 4, gap=0)),
    ],
)
def test_the_throw_covers_every_throw_of_every_group(strategy, batching):
    mechanism = dpmf.Mechanism(strategy, batching)
    upper = mechanism.throw.gram_upper()
    for group in range(batching.stride):
        of_throws = means(mechanism, group)
        for one, throw in enumerate(of_throws):
            assert (throw @ throw.T <= upper).all()
            for other in of_throws[one + 1 :]:
                assert (throw @ other.T).max() <= mechanism.product_between_throws
        largest = np.linalg.norm(of_throws.max(axis=1).sum(axis=0))
        assert np.linalg.norm(of_throws.sum(axis=0), axis=1).max() <= mechanism.sensitivity * (1 + 1e-12) <= 2 * largest


def test_normalised_columns_are_those_of_the_whole_run():
    """Norms over fewer or more rows than the run has would be others: with eight rows this column has norm √301."""
    strategy = coefficients([1, 0, 0, 0, 0, 10, 10, 10]).normalized()
    throw = dpmf.Mechanism(strategy, BallsInBins(2, 4, 5, stride=2)).throw
    assert throw.gram[0, 0] == pytest.approx(2.0)


def test_a_gap_makes_an_optimised_strategy_longer(monkeypatch):
    """A strategy that is optimised for a number of iterations has to cover the gap that its bandwidth asks for."""
    from dpmf.strategies import unamplified

    monkeypatch.setattr(
        unamplified.BandMF, "strategy_coef", lambda self, n: np.pad([1.0, 0.5], (0, n - 2)) / self._horizon(n)
    )
    mechanism = dpmf.Mechanism(dpmf.strategies.bandmf(2), reshuffled(3, 4))
    assert mechanism.batching.iterations == 14
    assert mechanism.strategy.iterations == 14


def test_poisson_samples_never_exceed_the_rate():
    for b in range(1, 200):
        assert Poisson(1, b).sampling_rate * b >= 1.0
    assert Poisson(1, 1).sampling_rate == 1.0
