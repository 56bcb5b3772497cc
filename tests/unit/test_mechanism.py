"""The mechanism: what it accepts, and its Gram matrix, shared and read-only."""

from __future__ import annotations

import numpy as np
import pytest

from dpmf import strategies
from dpmf.batching import BallsInBins, Poisson, reshuffled
from dpmf.gram.means import gram_matrix
from dpmf.mechanism import Mechanism


@pytest.mark.parametrize(
    ("strategy", "bins", "name"),
    [
        (None, BallsInBins(1, 2), "strategy"),
        (np.eye(2), BallsInBins(1, 2), "strategy"),
        ("bsr", BallsInBins(1, 2), "strategy"),
        (strategies.dpsgd(), (1, 2), "batching"),
        (strategies.dpsgd(), None, "batching"),
        (strategies.matrix(np.eye(3)), BallsInBins(1, 2), "matrix"),  # wrong size
    ],
)
def test_bad_mechanism(strategy, bins, name):
    with pytest.raises(ValueError, match=name) as caught:
        Mechanism(strategy, bins)
    assert "\n" not in str(caught.value)


def test_mechanism_gram_is_shared_and_read_only():
    mechanism = Mechanism(strategies.bsr(3), BallsInBins(2, 5))
    assert mechanism.gram is mechanism.gram
    with pytest.raises(ValueError, match="read-only"):
        mechanism.gram[0, 0] = 0.0


def test_too_many_bins_say_so():
    with pytest.raises(ValueError, match="batches_per_epoch must be smaller"):
        gram_matrix(strategies.dpsgd(), BallsInBins(1, 10**6))


# --- bins thrown several times ---------------------------------------------------------------------------------------


def test_an_open_gap_becomes_the_least_that_separates_throws():
    assert Mechanism(strategies.bsr(3), reshuffled(2, 5)).batching == BallsInBins(2, 5, rethrow_every=1, gap=2)
    # A memory longer than an epoch has no useful gap: what throws share is accounted for instead.
    long = Mechanism(strategies.bisr(3), reshuffled(2, 5))
    assert long.batching.gap == 0
    assert long.product_between_throws > 0


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_the_gram_matrix_of_a_throw_is_that_of_its_columns(stride, every):
    """By hand: the columns of C that a record of the first group can take part in, summed over a throw's epochs."""
    strategy, b, k = strategies.coefficients([1.0, 0.7, 0.2, 0.4]), 8, 4
    mechanism = Mechanism(strategy, BallsInBins(k, b, rethrow_every=every, stride=stride))
    n = mechanism.batching.iterations
    columns = strategy.matrix(n)
    means = [sum(columns[:, i + b * e] for e in range(every)) for i in range(0, b, stride)]
    assert mechanism.throw.gram == pytest.approx(np.array(means) @ np.array(means).T)
    assert mechanism.product_between_throws == 0


def test_means_of_different_throws_have_at_most_the_product_that_is_reported():
    strategy, b, k, gap = strategies.coefficients([1.0, 0.7, 0.2, 0.4]), 4, 3, 1
    mechanism = Mechanism(strategy, BallsInBins(k, b, rethrow_every=1, gap=gap))
    columns = strategy.matrix(mechanism.batching.iterations)
    starts = [e * (b + gap) for e in range(k)]
    largest = max(
        columns[:, s + i] @ columns[:, t + j]
        for s in starts for t in starts if s != t for i in range(b) for j in range(b)
    )  # fmt: skip
    assert largest <= mechanism.product_between_throws <= largest * (1 + 1e-9)


@pytest.mark.parametrize(
    ("strategy", "batching", "message"),
    [
        (strategies.bsr(3), Poisson(2, 6), "cyclic Poisson of a period of at least 3"),
        (strategies.bsr(3), Poisson(2, 6, 2), "cyclic Poisson of a period of at least 3"),
        (strategies.bisr(3), Poisson(2, 6), "balls in bins"),
        (strategies.matrix(np.eye(12)), reshuffled(2, 6), "Toeplitz"),
    ],
)
def test_batchings_that_a_strategy_cannot_serve(strategy, batching, message):
    with pytest.raises(ValueError, match=message) as caught:
        Mechanism(strategy, batching)
    assert "\n" not in str(caught.value)


def test_the_gram_matrix_of_several_throws_is_refused():
    with pytest.raises(ValueError, match="compose its throws"):
        _ = Mechanism(strategies.bsr(3), reshuffled(2, 5)).gram
