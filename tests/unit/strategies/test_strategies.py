"""Strategies as values and matrices, against dense linear algebra and exact fractions."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.strategies import base, closed_form
from dpmf.strategies.base import Strategy, ToeplitzStrategy


def dense_toeplitz(column: Array) -> Array:
    n = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


BANDED_INVERSE = strategies.bandinvmf(4, iterations=100, min_sep=10)
TOEPLITZ: dict[str, ToeplitzStrategy] = {
    "dpsgd": strategies.dpsgd(),
    "bsr1": strategies.bsr(1),
    "bsr4": strategies.bsr(4),
    "bsr99": strategies.bsr(99),
    "bisr1": strategies.bisr(1),
    "bisr4": strategies.bisr(4),
    "bisr99": strategies.bisr(99),
    "bandinvmf": strategies.bandinvmf(3),
    "bandinvmf_bound": strategies.bandinvmf(3, "max", iterations=40, min_sep=5, max_participations=2),
    "coefficients": strategies.coefficients([2.0, 0.0, 0.5]),
    "normalized": strategies.bsr(4).normalized(),
    "bandmf": strategies.bandmf(3, iterations=20),
    "blt": strategies.blt(2, iterations=20, min_sep=10),
}
DENSE: dict[str, Strategy] = {
    "matrix": strategies.matrix(np.tril(np.arange(1, 17).reshape(4, 4))),
    "each": strategies.bisr(3).normalized("each"),
    "largest": strategies.matrix(np.tril(np.full((4, 4), 1e200))).normalized(),
}


def exact_power_series(exponent: Fraction, n: int) -> list[Fraction]:
    """The coefficients of (1−x)^exponent."""
    out = [Fraction(1)]
    for j in range(1, n):
        out.append(out[-1] * (j - 1 - exponent) / j)
    return out


def test_series_match_exact_fractions() -> None:
    n = 200
    up, down = exact_power_series(Fraction(-1, 2), n), exact_power_series(Fraction(1, 2), n)
    np.testing.assert_allclose(closed_form.power_series(-0.5, n), [float(x) for x in up], rtol=1e-13)
    np.testing.assert_allclose(closed_form.power_series(0.5, n), [float(x) for x in down], rtol=1e-13)
    exact = [Fraction(1)]
    for t in range(1, 50):  # BISR with p = 3, exactly
        exact.append(-sum(down[j] * exact[t - j] for j in (1, 2) if j <= t))
    np.testing.assert_allclose(strategies.bisr(3).strategy_coef(50), [float(x) for x in exact], rtol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 3, 17])
@pytest.mark.parametrize("name", TOEPLITZ)
def test_toeplitz_strategies_are_consistent(name: str, n: int) -> None:
    strategy = TOEPLITZ[name]
    column, inverse = strategy.strategy_coef(n), strategy.noising_coef(n)
    assert column.shape == inverse.shape == (n,)
    assert column.dtype == np.float64
    assert column[0] > 0
    assert (column >= 0).all()
    c = dense_toeplitz(column)
    np.testing.assert_array_equal(strategy.matrix(n), c)
    np.testing.assert_array_equal(strategy.inverse(n), dense_toeplitz(inverse))
    np.testing.assert_allclose(strategy.matrix(n) @ strategy.inverse(n), np.eye(n), atol=1e-12)
    for chunk in (1, 5, n, 100):
        blocks = list(strategy.rows(n, chunk))
        assert [start for start, _ in blocks] == list(range(0, n, chunk))
        np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), c)


@pytest.mark.parametrize("name", DENSE)
def test_dense_strategies_are_consistent(name: str) -> None:
    strategy, n = DENSE[name], 4
    c = strategy.matrix(n)
    np.testing.assert_array_equal(c, np.tril(c))
    np.testing.assert_allclose(c @ strategy.inverse(n), np.eye(n), atol=1e-12)
    for chunk in (1, 3, 9):
        np.testing.assert_array_equal(np.concatenate([block for _, block in strategy.rows(n, chunk)]), c)


def test_long_inverses_do_not_take_quadratic_time() -> None:
    n = 10**6
    assert (strategies.bisr(4).strategy_coef(n) >= 0).all()
    assert np.isfinite(strategies.bsr(4).noising_coef(n)).all()


@pytest.mark.parametrize(
    ("strategy", "n", "bandwidth"),
    [
        (strategies.dpsgd(), 9, 1),
        (strategies.bsr(4), 9, 4),
        (strategies.bsr(4), 3, 3),
        (strategies.bisr(2), 9, 9),
        (strategies.bisr(1), 9, 1),
        (strategies.coefficients([1, 0, 0, 2, 0, 0]), 9, 4),
        (strategies.matrix([[1, 0, 0], [0, 0, 0], [0.5, 0, 1]]), 3, 3),
        (strategies.matrix([[0, 0], [0, 1]]), 2, 1),
    ],
)
def test_bandwidth(strategy: Strategy, n: int, bandwidth: int) -> None:
    assert strategy.bandwidth(n) == bandwidth


@pytest.mark.parametrize("name", [*TOEPLITZ, "matrix"])
def test_normalized(name: str) -> None:
    strategy: Strategy = {**TOEPLITZ, **DENSE}[name]
    n = 4 if name == "matrix" else 17
    c = strategy.matrix(n)
    norms = np.linalg.norm(c, axis=0)
    largest = strategy.normalized()
    np.testing.assert_allclose(largest.matrix(n), c / norms.max(), rtol=1e-14)
    assert isinstance(largest, ToeplitzStrategy) == isinstance(strategy, ToeplitzStrategy)
    np.testing.assert_allclose(largest.matrix(n) @ largest.inverse(n), np.eye(n), atol=1e-12)
    each = strategy.normalized("each")
    np.testing.assert_allclose(each.matrix(n), c / norms, rtol=1e-14)
    assert largest.name.startswith(strategy.name)
    assert "each" in each.name
    assert pickle.loads(pickle.dumps(each)) == each
    with pytest.raises(ValueError, match="columns must be one of largest, each, got 'all'"):
        strategy.normalized("all")


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_neither_overflow_nor_vanish(scale: float) -> None:
    for strategy in (strategies.coefficients([scale, scale]), strategies.matrix([[scale, 0], [scale, scale]])):
        np.testing.assert_allclose(strategy.normalized().matrix(2), [[0.5**0.5, 0], [0.5**0.5, 0.5**0.5]])


def test_a_zero_column_cannot_be_normalized_or_inverted() -> None:
    strategy = strategies.matrix([[1, 0], [1, 0]])
    with pytest.raises(ValueError, match="zero column"):
        strategy.normalized("each").matrix(2)
    with pytest.raises(ValueError, match="no inverse"):
        strategy.inverse(2)
    np.testing.assert_allclose(strategy.normalized().matrix(2), np.array([[1, 0], [1, 0]]) / 2**0.5)


def test_normalized_strategies_bind_to_the_allocation() -> None:
    batching = BallsInBins(epochs=2, batches_per_epoch=10)
    plain = strategies.bandinvmf(3)
    bound = Mechanism(plain.normalized(), batching).strategy
    assert bound == plain.for_batching(batching).normalized()
    dense = Mechanism(plain.normalized("each"), batching).strategy
    np.testing.assert_allclose(np.linalg.norm(dense.matrix(20), axis=0), np.ones(20))


def test_dense_matrices_that_would_not_fit_are_refused_before_memory_is_taken() -> None:
    for call in (strategies.bsr(2).matrix, strategies.bsr(2).inverse, strategies.bsr(2).normalized("each").matrix):
        with pytest.raises(ValueError, match="iterations must be at most 23170 for a dense matrix, got 1000000"):
            call(10**6)


@pytest.mark.parametrize("name", [*TOEPLITZ, *DENSE])
def test_strategies_are_values(name: str) -> None:
    strategy = {**TOEPLITZ, **DENSE}[name]
    twin = pickle.loads(pickle.dumps(strategy))
    assert twin == strategy
    assert hash(twin) == hash(strategy)
    assert strategy != strategies.bsr(77)
    assert str(strategy) == strategy.name
    fields = list(strategy.__dataclass_fields__) or ["p"]  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        setattr(strategy, fields[0], 1)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (strategies.dpsgd(), "DP-SGD"),
        (strategies.bsr(4), "BSR(p=4)"),
        (strategies.bisr(4), "BISR(p=4)"),
        (strategies.bandmf(64), "BandMF(p=64)"),
        (strategies.blt(3), "BLT(d=3)"),
        (strategies.blt(), "BLT(d=auto)"),
        (strategies.blt(3, "mean"), "BLT(d=3, mean error)"),
        (strategies.bandinvmf(4), "BandInvMF(p=4)"),
        (strategies.bandinvmf(4, "max"), "BandInvMF(p=4, max error)"),
        (strategies.coefficients([1]), "Toeplitz(1 coefficient)"),
        (strategies.coefficients([1, 0.5]), "Toeplitz(2 coefficients)"),
        (strategies.matrix([[1]]), "Matrix(1×1)"),
        (strategies.bsr(4).normalized(), "BSR(p=4) normalised"),
    ],
)
def test_names(strategy: Strategy, name: str) -> None:
    assert strategy.name == name


def test_given_arrays_are_copied_and_results_do_not_leak() -> None:
    numbers = np.array([1.0, 0.5])
    strategy = strategies.coefficients(numbers)
    numbers[:] = 9
    strategy.strategy_coef(2)[:] = 9
    assert strategy.strategy_coef(3).tolist() == [1, 0.5, 0]
    with pytest.raises(ValueError, match="read-only"):
        strategy.values[0] = 9
    square = np.eye(2)
    dense = strategies.matrix(square)
    square[:] = 9
    with pytest.raises(ValueError, match="read-only"):
        dense.matrix(2)[0, 0] = 9
    assert dense.matrix(2).tolist() == [[1, 0], [0, 1]]
    BANDED_INVERSE.noising_coef(100)[:] = 9
    assert BANDED_INVERSE.noising_coef(100)[0] == 1


def test_equality_is_by_content() -> None:
    assert strategies.coefficients([1, 0.5]) == strategies.coefficients(np.array([1, 0.5], dtype=np.float32))
    assert strategies.coefficients([1, 0.0]) == strategies.coefficients([1, -0.0])
    assert strategies.coefficients([1, 0.5]) != strategies.coefficients([1, 0.25])
    assert strategies.matrix([[1, 0], [1, 1]]) == strategies.matrix(np.array([[1, -0.0], [1, 1]]))
    assert strategies.matrix([[1, 0], [1, 1]]) != strategies.matrix([[1, 0], [1, 2]])


def test_coefficients_shorter_and_longer_than_the_run() -> None:
    strategy = strategies.coefficients([3, 2, 1])
    assert strategy.strategy_coef(2).tolist() == [3, 2]
    assert strategy.strategy_coef(5).tolist() == [3, 2, 1, 0, 0]


def test_catalogue_matches_the_functions() -> None:
    for name, entry in strategies.NAMES.items():
        assert "\n" not in entry.description
        assert set(entry.optional) <= set(entry.options)
        assert entry.make is getattr(strategies, name)
        file = [1.0] if name == "coefficients" else [[1.0]]
        arguments = {"bandwidth": 2, "buffers": 2, "decay": 0.9, "exponent": 0.4, "file": file}
        given = [arguments[option] for option in entry.options]
        made = entry.make(*given)
        assert isinstance(made, Strategy)
        assert made == strategies.build(name, **dict(zip(entry.options, given, strict=True)))


def test_build() -> None:
    assert strategies.build("bsr", bandwidth=3, buffers=None, file=None) == strategies.bsr(3)
    assert strategies.build("blt") == strategies.blt()
    assert strategies.build("matrix", file=[[2.0]]) == strategies.matrix([[2.0]])
    assert strategies.build("dpsgd", normalized=True) == strategies.dpsgd().normalized()


@pytest.mark.parametrize(
    ("name", "options", "argument", "message"),
    [
        ("bsr", {}, "bandwidth", "bandwidth must be given for strategy bsr"),
        ("bsr", {"bandwidth": 2, "buffers": 2}, "buffers", "buffers does not apply to strategy bsr"),
        ("guess", {}, "strategy", "strategy must be one of dpsgd, "),
        ("bisr", {"bandwidth": 0}, "bandwidth", "bandwidth must be at least 1, got 0"),
    ],
)
def test_build_names_the_argument(name: str, options: dict[str, Any], argument: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        strategies.build(name, **options)
    assert caught.value.argument == argument


def test_importing_strategies_does_not_import_jax() -> None:
    code = "import sys, dpmf.strategies; print(sorted({'jax', 'jax_privacy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_products_of_toeplitz_matrices_are_those_of_dense_ones(n: int) -> None:
    left, right = np.random.default_rng(n).normal(size=(2, n))
    dense = base.lower_triangular(left)
    np.testing.assert_allclose(base.toeplitz_product(left, right), dense @ right, atol=1e-12)
    np.testing.assert_allclose(base.toeplitz_transposed_product(left, right), dense.T @ right, atol=1e-12)
