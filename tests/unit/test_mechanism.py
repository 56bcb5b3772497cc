"""Balls-in-bins: mixture means, Gram matrices and their truncation, against the definition."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from dataclasses import FrozenInstanceError

import numpy as np
import oracles
import pytest

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.gram.bands import circulant_majorant, cyclic_bandwidth, cyclic_distance, truncate
from dpmf.gram.means import folded_column, gram_matrix, mean_rows
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import NormalizedDense, Strategy

# (b, N): one epoch, several, cut-off last epochs down to a single iteration, one bin, N = b.
SHAPES = [
    (1, 1), (1, 5), (2, 2), (2, 3), (2, 7), (3, 3), (3, 4), (3, 9), (4, 4), (4, 7), (4, 12),
    (5, 6), (5, 14), (7, 7), (7, 13), (7, 21), (8, 17), (10, 10), (10, 29), (13, 40),
]  # fmt: skip

TOEPLITZ = {
    "dpsgd": (strategies.dpsgd(), lambda n: np.eye(n)),
    "bsr2": (strategies.bsr(2), lambda n: oracles.bsr_matrix(2, n)),
    "bsr4": (strategies.bsr(4), lambda n: oracles.bsr_matrix(4, n)),
    "bsr50": (strategies.bsr(50), lambda n: oracles.bsr_matrix(50, n)),  # p > b, p > N
    "bisr2": (strategies.bisr(2), lambda n: oracles.bisr_matrix(2, n)),
    "bisr5": (strategies.bisr(5), lambda n: oracles.bisr_matrix(5, n)),
    "gaps": (strategies.coefficients([2.0, 0.0, 0.5]), lambda n: oracles.toeplitz([2.0, 0.0, 0.5], n)),
    "normalised": (
        strategies.bsr(3).normalized(),
        lambda n: oracles.bsr_matrix(3, n) / np.linalg.norm(oracles.bsr_matrix(3, n)[:, 0]),
    ),
}


def random_matrix(n: int, seed: int, zeros: float = 0.3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    full = np.tril(rng.random((n, n)) * (rng.random((n, n)) > zeros))
    full[0, 0] = 1.0
    return full


def batching(b: int, n: int) -> BallsInBins:
    return BallsInBins.from_iterations(n, b)


def collected_means(strategy: Strategy, bins: BallsInBins) -> np.ndarray:
    rows, expected = [], 0
    for start, block in mean_rows(strategy, bins):
        assert start == expected
        expected += len(block)
        rows.append(block)
    assert expected == bins.iterations
    return np.concatenate(rows)


# --- BallsInBins ---------------------------------------------------------------------------------------------------


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


# --- means and Gram matrices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "n"), SHAPES)
@pytest.mark.parametrize("label", TOEPLITZ)
def test_toeplitz_against_the_definition(label, b, n):
    strategy, matrix = TOEPLITZ[label]
    bins, dense = batching(b, n), matrix(n)
    means = oracles.mixture_means(dense, b)
    np.testing.assert_allclose(folded_column(strategy, bins), means[:, 0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(collected_means(strategy, bins), means, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gram_matrix(strategy, bins), oracles.gram(dense, b), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("b", "n"), SHAPES)
@pytest.mark.parametrize("kind", ["matrix", "each column", "largest column"])
def test_dense_against_the_definition(kind, b, n):
    dense = random_matrix(n, seed=100 * b + n, zeros=0.3 if kind == "matrix" else 0.0)
    strategy: Strategy = strategies.matrix(dense)
    norms = np.linalg.norm(dense, axis=0)
    if kind == "each column":
        strategy, dense = NormalizedDense(strategy, "each"), dense / norms
    elif kind == "largest column":
        strategy, dense = strategy.normalized(), dense / norms.max()
    bins = batching(b, n)
    np.testing.assert_allclose(collected_means(strategy, bins), oracles.mixture_means(dense, b), rtol=1e-13)
    np.testing.assert_allclose(gram_matrix(strategy, bins), oracles.gram(dense, b), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("b", "n"), [(3, 7), (4, 12), (7, 7)])
def test_one_matrix_two_ways(b, n):
    """The Toeplitz kernel and the streamed dense product agree on the same C."""
    strategy = strategies.bisr(3)
    dense = strategies.matrix(strategy.matrix(n))
    bins = batching(b, n)
    np.testing.assert_allclose(gram_matrix(strategy, bins), gram_matrix(dense, bins), rtol=1e-13)


def test_means_and_gram_are_streamed_in_blocks(monkeypatch):
    """With blocks of a few rows the answers are the same."""
    bins, dense = batching(4, 23), random_matrix(23, seed=5)
    for strategy in (strategies.matrix(dense), strategies.bsr(6)):
        whole = collected_means(strategy, bins)
        whole_gram = gram_matrix(strategy, bins)
        monkeypatch.setattr("dpmf.gram.means._CHUNK_BYTES", 8 * 23 * 3)
        assert len(list(mean_rows(strategy, bins))) > 1
        np.testing.assert_array_equal(collected_means(strategy, bins), whole)
        np.testing.assert_allclose(gram_matrix(strategy, bins), whole_gram, rtol=1e-14)
        monkeypatch.undo()


@pytest.mark.parametrize(("b", "n"), SHAPES)
def test_rounding_of_the_gram_matrix_is_as_documented(b, n):
    """Well within (2N + 4)·2⁻⁵², against rational arithmetic: the accountants add that back."""
    for strategy in (strategies.bisr(3), strategies.matrix(random_matrix(n, seed=n))):
        exact = oracles.exact_gram(strategy.matrix(n), b)
        computed = oracles.rational(gram_matrix(strategy, batching(b, n)))
        for row, reference in zip(computed, exact, strict=True):
            for value, truth in zip(row, reference, strict=True):
                assert abs(value - truth) * 2**52 <= n * truth


def test_mechanism_gram_is_shared_and_read_only():
    mechanism = Mechanism(strategies.bsr(3), BallsInBins(2, 5))
    assert mechanism.gram is mechanism.gram
    with pytest.raises(ValueError, match="read-only"):
        mechanism.gram[0, 0] = 0.0


def test_negative_entries_count_by_size():
    """Lemma 3.2 uses |C|; a strategy that is not non-negative must not profit from its signs."""

    class Signed(type(strategies.bsr(3))):  # type: ignore[misc]
        def strategy_coef(self, iterations):
            return super().strategy_coef(iterations) * (-1.0) ** np.arange(iterations)

    bins = BallsInBins(3, 4)
    np.testing.assert_array_equal(gram_matrix(Signed(3), bins), gram_matrix(strategies.bsr(3), bins))


def test_a_million_iterations():
    """N = 10⁶, b = 1000: O(b² + N) memory; a few entries by direct dot products."""
    n, b = 1_000_000, 1000
    bins, strategy = BallsInBins(n // b, b), strategies.bisr(8)
    tracemalloc.start()
    gram = gram_matrix(strategy, bins)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6  # the means themselves would be 8 GB
    column = np.cumsum(strategy.strategy_coef(n).reshape(-1, b), axis=0).reshape(-1)
    for i, j in [(0, 0), (0, 1), (3, 999), (500, 501), (999, 999), (998, 2)]:
        first, second = np.zeros(n), np.zeros(n)
        first[i:], second[j:] = column[: n - i], column[: n - j]
        assert gram[i, j] == pytest.approx(first @ second, rel=1e-11)


def test_too_many_bins_say_so():
    with pytest.raises(ValueError, match="batches_per_epoch must be smaller"):
        gram_matrix(strategies.dpsgd(), BallsInBins(1, 10**6))


# --- cyclic structure ----------------------------------------------------------------------------------------------


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
            found[f"{label} b={b} N={n}"] = gram_matrix(strategy, batching(b, n))
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
