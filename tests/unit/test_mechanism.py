"""The mechanism: what it accepts, and its Gram matrix, shared and read-only."""

from __future__ import annotations

import numpy as np
import pytest

from dpmf import strategies
from dpmf.batching import BallsInBins
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
