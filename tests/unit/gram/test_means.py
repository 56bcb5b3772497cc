"""Mixture means and Gram matrices, against the definition."""

from __future__ import annotations

import tracemalloc

import numpy as np
import oracles
import pytest
from random_mechanisms import random_matrix

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.gram.means import folded_column, gram_matrix, mean_rows
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


def collected_means(strategy: Strategy, bins: BallsInBins) -> np.ndarray:
    rows, expected = [], 0
    for start, block in mean_rows(strategy, bins):
        assert start == expected
        expected += len(block)
        rows.append(block)
    assert expected == bins.iterations
    return np.concatenate(rows)


@pytest.mark.parametrize(("b", "n"), SHAPES)
@pytest.mark.parametrize("label", TOEPLITZ)
def test_toeplitz_against_the_definition(label, b, n):
    strategy, matrix = TOEPLITZ[label]
    bins, dense = BallsInBins.from_iterations(n, b), matrix(n)
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
    bins = BallsInBins.from_iterations(n, b)
    np.testing.assert_allclose(collected_means(strategy, bins), oracles.mixture_means(dense, b), rtol=1e-13)
    np.testing.assert_allclose(gram_matrix(strategy, bins), oracles.gram(dense, b), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("b", "n"), [(3, 7), (4, 12), (7, 7)])
def test_one_matrix_two_ways(b, n):
    """The Toeplitz kernel and the streamed dense product agree on the same C."""
    strategy = strategies.bisr(3)
    dense = strategies.matrix(strategy.matrix(n))
    bins = BallsInBins.from_iterations(n, b)
    np.testing.assert_allclose(gram_matrix(strategy, bins), gram_matrix(dense, bins), rtol=1e-13)


def test_means_and_gram_are_streamed_in_blocks(monkeypatch):
    """With blocks of a few rows the answers are the same."""
    bins, dense = BallsInBins.from_iterations(23, 4), random_matrix(23, seed=5)
    for strategy in (strategies.matrix(dense), strategies.bsr(6)):
        whole = collected_means(strategy, bins)
        whole_gram = gram_matrix(strategy, bins)
        monkeypatch.setattr("dpmf.gram.means._CHUNK_BYTES", 8 * 23 * 3)
        assert len(list(mean_rows(strategy, bins))) > 1
        np.testing.assert_array_equal(collected_means(strategy, bins), whole)
        np.testing.assert_allclose(gram_matrix(strategy, bins), whole_gram, rtol=1e-14)
        monkeypatch.undo()


def coefficients_of(strategy, n):
    """The C of a strategy as given: if C is computed from C⁻¹, what is accounted for is a little more."""
    return strategies.coefficients(strategy.strategy_coef(n))


@pytest.mark.parametrize(("b", "n"), SHAPES)
def test_rounding_of_the_gram_matrix_is_as_documented(b, n):
    """Well within (2N + 4)·2⁻⁵², against rational arithmetic: the accountants add that back."""
    for strategy in (coefficients_of(strategies.bisr(3), n), strategies.matrix(random_matrix(n, seed=n))):
        exact = oracles.exact_gram(strategy.matrix(n), b)
        computed = oracles.rational(gram_matrix(strategy, BallsInBins.from_iterations(n, b)))
        for row, reference in zip(computed, exact, strict=True):
            for value, truth in zip(row, reference, strict=True):
                assert abs(value - truth) * 2**52 <= n * truth


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
    bins, strategy = BallsInBins(n // b, b), coefficients_of(strategies.bisr(8), n)
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
