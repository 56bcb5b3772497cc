"""Balls-in-bins: epochs, batches and iterations, also with a last epoch that is cut short."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from dpmf.batching import BallsInBins


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
