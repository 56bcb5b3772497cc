"""Bands of the Gram matrix: cyclic distance, bandwidth, and majorants by truncation."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from random_mechanisms import random_matrix

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.gram.bands import circulant_majorant, cyclic_bandwidth, cyclic_distance, truncate
from dpmf.gram.means import gram_matrix


@pytest.mark.parametrize("b", range(1, 9))
def test_cyclic_distance(b):
    expected = [[oracles.cyclic_distance(i, j, b) for j in range(b)] for i in range(b)]
    np.testing.assert_array_equal(cyclic_distance(b), expected)


@pytest.mark.parametrize(
    ("strategy", "k", "b", "expected"),
    [
        (strategies.dpsgd(), 1, 1, 1),
        (strategies.dpsgd(), 3, 6, 1),
        (strategies.bsr(2), 1, 6, 2),
        (strategies.bsr(2), 3, 6, 2),
        (strategies.bsr(4), 1, 20, 4),
        (strategies.bsr(4), 5, 20, 4),
        (strategies.bsr(4), 2, 5, 3),  # ⌊b/2⌋ + 1
        (strategies.bsr(9), 2, 4, 3),
        (strategies.bisr(2), 1, 7, 4),
    ],
)
def test_cyclic_bandwidth(strategy, k, b, expected):
    gram = gram_matrix(strategy, BallsInBins(k, b))
    assert cyclic_bandwidth(gram) == expected
    assert all(gram[i, j] == 0 for i in range(b) for j in range(b) if oracles.cyclic_distance(i, j, b) >= expected)


def test_cyclic_bandwidth_of_nothing():
    assert cyclic_bandwidth(np.zeros((3, 3))) == 0


def grams() -> dict[str, np.ndarray]:
    found = {}
    for label, strategy in (("bsr3", strategies.bsr(3)), ("bsr9", strategies.bsr(9)), ("bisr2", strategies.bisr(2))):
        for b, n in [(1, 3), (2, 5), (3, 3), (4, 12), (5, 9), (6, 18), (8, 8), (9, 20)]:
            found[f"{label} b={b} N={n}"] = gram_matrix(strategy, BallsInBins.from_iterations(n, b))
    for b in (2, 5, 8):
        found[f"random b={b}"] = oracles.gram(random_matrix(2 * b, seed=b), b)
    found["zero"] = np.zeros((4, 4))
    return found


GRAMS = grams()


@pytest.mark.parametrize("label", GRAMS)
def test_circulant_majorant_is_the_least_one(label):
    gram = GRAMS[label]
    b = len(gram)
    first = circulant_majorant(gram)
    for d in range(b):
        diagonal = [gram[i, (i + d) % b] for i in range(b)]
        assert first[d] == max(diagonal)


@pytest.mark.parametrize("p", range(13))
@pytest.mark.parametrize("label", GRAMS)
def test_truncation(label, p):
    """G ≤ G^(p) + τ, every pair of indices listed exactly once, τ as in the paper and 0 where nothing lies outside."""
    gram = GRAMS[label]
    b = len(gram)
    majorant = truncate(gram, p)
    assert majorant.p == min(p, b // 2 + 1)
    inside, tau = oracles.truncated(gram, p)
    assert majorant.tau == tau
    assert majorant.exact == (tau == 0)
    if p > b // 2:
        assert majorant.tau == 0
    listed = np.zeros((b, b), dtype=int)
    rebuilt = np.zeros((b, b))
    for i in range(b):
        for d in range(majorant.p):
            if d <= i:
                rebuilt[i, i - d] = rebuilt[i - d, i] = majorant.band[i, d]
                listed[i, i - d] += 1
                listed[i - d, i] += d > 0
            elif majorant.band[i, d]:
                pytest.fail("a band entry that stands for no pair")
            if d > 0 and i + d >= b and b - d >= majorant.p:
                j = i + d - b
                rebuilt[i, j] = rebuilt[j, i] = majorant.wrap[i, d]
                listed[i, j] += 1
                listed[j, i] += 1
            elif majorant.wrap[i, d]:
                pytest.fail("a wrapped entry that stands for no pair, or for one that the band has")
    np.testing.assert_array_equal(rebuilt, inside)
    for i in range(b):
        for j in range(b):
            assert listed[i, j] == (1 if oracles.cyclic_distance(i, j, b) < majorant.p else 0)
    assert np.all(rebuilt + tau >= gram * (1 - 2**-52))
    assert majorant.wraps == any(rebuilt[i, j] != 0 for i in range(b) for j in range(b) if abs(i - j) >= majorant.p)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_one_epoch_does_not_wrap(p):
    """k = 1 and a band well below b: no prefix loop is needed."""
    assert not truncate(gram_matrix(strategies.bsr(p), BallsInBins(1, 20)), p).wraps
    assert truncate(gram_matrix(strategies.bsr(p), BallsInBins(2, 20)), p).wraps == (p > 1)
