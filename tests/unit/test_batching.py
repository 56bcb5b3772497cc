"""Balls-in-bins: epochs, batches and iterations, also with a last epoch that is cut short."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from dpmf.batching import BallsInBins, Poisson, batches_from_size, build


def test_iterations_default_to_whole_epochs():
    bins = BallsInBins(epochs=3, batches_per_epoch=4)
    assert (bins.epochs, bins.batches_per_epoch, bins.iterations) == (3, 4, 12)
    assert bins == BallsInBins(3, 4, 12)
    assert hash(bins) == hash(BallsInBins(3, 4, 12))


@pytest.mark.parametrize("n", [9, 10, 11, 12])
def test_a_last_epoch_may_be_cut_off(n):
    bins = BallsInBins(3, 4, n)
    assert bins == BallsInBins.from_iterations(n, 4)
    assert bins.epochs == 3
    assert (f"N={n}" in bins.name) == (n != 12)


def test_numpy_integers_become_plain_ones():
    bins = BallsInBins(np.int64(2), np.int32(5), np.int16(7))
    assert [type(x) for x in (bins.epochs, bins.batches_per_epoch, bins.iterations)] == [int] * 3


def test_balls_in_bins_is_frozen_and_pickles():
    bins = BallsInBins(2, 3, 5)
    with pytest.raises(FrozenInstanceError):
        bins.epochs = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(bins)) == bins


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 4), "epochs"),
        ((-1, 4), "epochs"),
        ((2.0, 4), "epochs"),
        ((math.nan, 4), "epochs"),
        ((math.inf, 4), "epochs"),
        ((True, 4), "epochs"),
        (("2", 4), "epochs"),
        ((None, 4), "epochs"),
        (([2], 4), "epochs"),
        ((2, 0), "batches_per_epoch"),
        ((2, -3), "batches_per_epoch"),
        ((2, 4.0), "batches_per_epoch"),
        ((2, math.nan), "batches_per_epoch"),
        ((2, True), "batches_per_epoch"),
        ((2, "4"), "batches_per_epoch"),
        ((2, np.arange(2)), "batches_per_epoch"),
        ((2, 4, 4), "iterations"),  # one epoch would do
        ((2, 4, 9), "iterations"),  # needs a third
        ((2, 4, -1), "iterations"),
        ((2, 4, 8.0), "iterations"),
        ((2, 4, math.nan), "iterations"),
        ((2, 4, True), "iterations"),
        ((2, 4, False), "iterations"),
        ((1, 4, 3), "batches_per_epoch"),  # b > N
    ],
)
def test_bad_balls_in_bins(arguments, name):
    with pytest.raises(ValueError, match=name) as caught:
        BallsInBins(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("n", "b", "name"),
    [
        (3, 4, "batches_per_epoch"),
        (0, 4, "iterations"),
        (4.0, 4, "iterations"),
        (math.nan, 4, "iterations"),
        (True, 1, "iterations"),
        (4, 0, "batches_per_epoch"),
        (4, False, "batches_per_epoch"),
    ],
)
def test_bad_from_iterations(n, b, name):
    with pytest.raises(ValueError, match=name):
        BallsInBins.from_iterations(n, b)


# --- bins thrown anew, strides, Poisson samples ----------------------------------------------------------------------


def test_a_batching_prints_the_call_that_makes_it():
    for text in (
        "BallsInBins(epochs=3, batches_per_epoch=4, iterations=10)",
        "BallsInBins(epochs=4, batches_per_epoch=6, rethrow_every=2, stride=3, gap=1)",
        "Poisson(epochs=2, batches_per_epoch=6, period=3)",
    ):
        assert repr(eval(text, {"BallsInBins": BallsInBins, "Poisson": Poisson})) == text


def test_gaps_are_iterations_and_fixed_bins_have_none():
    bins = BallsInBins(6, 4, rethrow_every=2, gap=3)
    assert (bins.throws, bins.iterations, bins.fixed) == (3, 24 + 2 * 3, False)
    once = BallsInBins(6, 4, rethrow_every=6)
    assert once == BallsInBins(6, 4)
    assert once.fixed


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: BallsInBins(2, 4, stride=3), "stride must be a divisor of batches_per_epoch = 4"),
        (lambda: BallsInBins(2, 4, stride=8), "stride"),
        (lambda: BallsInBins(2, 4, gap=1), "gap applies only where bins are thrown anew"),
        (lambda: BallsInBins(2, 4, rethrow_every=1, gap=-1), "gap"),
        (lambda: BallsInBins(4, 4, rethrow_every=3), "rethrow_every must be a divisor of epochs = 4"),
        (lambda: BallsInBins(4, 4, 15, rethrow_every=1), "iterations must be 16 for 4 throws"),
        (lambda: Poisson(2, 6, 4), "period must be a divisor of batches_per_epoch = 6"),
        (lambda: build("shuffled", 2, 4, bandwidth=1), "batching must be one of"),
        (lambda: build("fixed", 2, 4, bandwidth=1, gap=1), "gap applies only to batching reshuffled or cyclic"),
        (lambda: build("poisson", 2, 4, bandwidth=1, stride=2), "stride applies only to"),
        (lambda: build("reshuffled", 2, 4, bandwidth=1, iterations=7), "iterations applies only to batching fixed"),
        (lambda: batches_from_size(10, 11), "batch_size"),
    ],
)
def test_bad_batchings_name_the_argument_and_what_is_valid(make, name):
    with pytest.raises(ValueError, match=name) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("bandwidth", "stride"), [(1, 1), (4, 4), (5, 6), (7, 8), (13, 24), (100, 24)])
def test_cyclic_batchings_take_the_least_stride_that_separates(bandwidth, stride):
    assert build("cyclic", 2, 24, bandwidth=bandwidth) == BallsInBins(2, 24, rethrow_every=1, stride=stride)
    assert build("cyclic-poisson", 2, 24, bandwidth=bandwidth) == Poisson(2, 24, stride)


def test_batches_from_sizes():
    assert batches_from_size(1000, 100) == 10
    assert batches_from_size(1001, 100) == 11  # batches of at most a hundred, on average
