"""BandMF, BLT and BandInvMF: slow twins, reference values, optimality."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpmf import errors, store, strategies
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.strategies import banded_inverse, base
from dpmf.strategies.base import ToeplitzStrategy


def dense_toeplitz(column: Array) -> Array:
    n = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def slow_loss(c: Array, error: str, min_sep: int, participations: int) -> float:
    """Squared prefix-sum error times squared sensitivity, from dense matrices."""
    n = len(c)
    per_query = np.sum((np.tril(np.ones((n, n))) @ np.linalg.inv(c)) ** 2, axis=1)
    mean = sum(c[:, j * min_sep] for j in range(participations) if j * min_sep < n)
    return float((per_query.mean() if error == "mean" else per_query.max()) * np.sum(mean**2))


BANDED_INVERSE = strategies.bandinvmf(4, iterations=100, min_sep=10)


def test_bandinvmf_gives_the_reference_coefficients() -> None:
    np.testing.assert_allclose(BANDED_INVERSE.noising_coef(100)[:4], [1, -0.587, -0.169, -0.028], atol=1e-3)
    assert not BANDED_INVERSE.noising_coef(100)[4:].any()
    allocated = strategies.bandinvmf(4).for_batching(BallsInBins(10, 10))
    np.testing.assert_array_equal(allocated.noising_coef(100), BANDED_INVERSE.noising_coef(100))


@given(
    n=st.integers(2, 25),
    p=st.integers(2, 6),
    min_sep=st.integers(1, 25),
    participations=st.integers(1, 8),
    error=st.sampled_from(["mean", "max"]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=60)
def test_banded_inverse_loss_and_gradient(
    n: int, p: int, min_sep: int, participations: int, error: str, seed: int
) -> None:
    p = min(p, n)
    u = np.random.default_rng(seed).uniform(0.05, 0.9, p - 1)
    loss = banded_inverse._loss(n, p, min_sep, participations, error)
    value, gradient = loss(u)
    noising = base.pad_or_cut(banded_inverse._noising(u)[1], n)
    dense = np.linalg.inv(dense_toeplitz(noising))
    assert value == pytest.approx(np.log(slow_loss(dense, error, min_sep, participations)), abs=1e-9)
    step = 1e-6
    numeric = [(loss(u + step * e)[0] - loss(u - step * e)[0]) / (2 * step) for e in np.eye(p - 1)]
    np.testing.assert_allclose(gradient, numeric, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(("n", "p", "min_sep", "participations"), [(30, 4, 30, 1), (30, 4, 5, 6), (30, 9, 10, 2)])
def test_bandinvmf_is_a_local_optimum(error: str, n: int, p: int, min_sep: int, participations: int) -> None:
    strategy = strategies.bandinvmf(p, error, iterations=n, min_sep=min_sep, max_participations=participations)
    best = slow_loss(strategy.matrix(n), error, min_sep, participations)
    assert best <= slow_loss(strategies.bisr(p).matrix(n), error, min_sep, participations)
    rng = np.random.default_rng(1)
    noising = strategy.noising_coef(n)
    for scale in (1e-3, 1e-2, 1e-1):
        for _ in range(10):
            near = noising.copy()
            near[1:p] = np.minimum(near[1:p] + scale * rng.normal(size=p - 1), 0)
            c = np.linalg.inv(dense_toeplitz(near))
            assert slow_loss(c, error, min_sep, participations) >= best * (1 - 1e-7)


@pytest.mark.parametrize(("n", "p", "min_sep"), [(1, 3, 1), (2, 9, 1), (3, 3, 1), (50, 60, 7), (1000, 64, 100)])
def test_bandinvmf_edges_give_usable_matrices(n: int, p: int, min_sep: int) -> None:
    column = strategies.bandinvmf(p, "max", iterations=n, min_sep=min_sep).strategy_coef(n)
    assert column[0] == 1
    assert (column >= 0).all()
    assert (column <= 1).all()


def test_bandmf_is_optimal_normed_and_leaves_jax_alone() -> None:
    import jax
    from jax_privacy.matrix_factorization import toeplitz

    strategy, n = strategies.bandmf(3, iterations=20), 20
    before = jax.config.jax_enable_x64
    column = strategy.strategy_coef(n)
    assert jax.config.jax_enable_x64 == before
    assert np.linalg.norm(column) == pytest.approx(1, abs=1e-12)
    assert strategy.bandwidth(n) == 3
    best = slow_loss(strategy.matrix(n), "mean", n, 1)
    assert best < slow_loss(strategies.bsr(3).matrix(n), "mean", n, 1)
    assert best < slow_loss(np.eye(n), "mean", n, 1)
    rng = np.random.default_rng(2)
    for _ in range(20):
        near = column.copy()
        near[:3] += 1e-2 * rng.normal(size=3)
        assert slow_loss(dense_toeplitz(near), "mean", n, 1) >= best * (1 - 1e-9)
    with jax.enable_x64():
        np.testing.assert_allclose(column[:3], toeplitz.optimize_banded_toeplitz(n, 3), rtol=1e-12)
    assert strategies.bandmf(1).strategy_coef(3).tolist() == [1, 0, 0]
    assert strategies.bandmf(5).strategy_coef(1).tolist() == [1]


def test_blt_is_good_and_agrees_with_its_library() -> None:
    import jax
    from jax_privacy.matrix_factorization import buffered_toeplitz

    strategy, n = strategies.blt(2, iterations=20, min_sep=10), 20
    decay, scale = strategy.buffers(n)
    assert decay.shape == scale.shape == (2,)
    with jax.enable_x64():
        theirs = buffered_toeplitz.BufferedToeplitz.build(buf_decay=decay, output_scale=scale)
        np.testing.assert_allclose(strategy.strategy_coef(n), theirs.toeplitz_coefs(n), rtol=1e-12)
        np.testing.assert_allclose(strategy.noising_coef(n), theirs.inverse().toeplitz_coefs(n), atol=1e-10)
    loss = slow_loss(strategy.matrix(n), "max", 10, 2)
    assert loss < 0.9 * slow_loss(np.eye(n), "max", 10, 2)
    # The square root is the best Toeplitz matrix for the largest error of one participation, and good for two.
    assert loss < 1.02 * slow_loss(strategies.bsr(n).matrix(n), "max", 10, 2)
    assert strategies.blt(3).strategy_coef(1).tolist() == [1]


def test_optimised_strategies_fill_in_the_batching() -> None:
    batching = BallsInBins(epochs=3, batches_per_epoch=5, iterations=14)
    for make in (strategies.blt, strategies.bandinvmf):
        filled = make(2).for_batching(batching)
        assert (filled.iterations, filled.min_sep, filled.max_participations) == (14, 5, 3)
        kept = make(2, iterations=30, min_sep=7).for_batching(batching)
        assert (kept.iterations, kept.min_sep, kept.max_participations) == (30, 7, None)
        single = make(2, max_participations=1).for_batching(batching)
        assert (single.iterations, single.min_sep, single.max_participations) == (14, None, 1)
        assert single._problem(14) == make(2)._problem(14) == make(2, min_sep=99)._problem(14) == (14, 14, 1)
        assert make(2, min_sep=5, max_participations=99)._problem(14) == filled._problem(14) == (14, 5, 3)
    assert strategies.bandmf(2).for_batching(batching) == strategies.bandmf(2, iterations=14)
    assert strategies.bandmf(2, iterations=30).for_batching(batching).iterations == 30


@pytest.mark.parametrize("make", [strategies.blt, strategies.bandinvmf, strategies.bandmf])
def test_more_iterations_than_optimised_for(make: Callable[..., ToeplitzStrategy]) -> None:
    strategy = make(2, iterations=10)
    for call in (strategy.check_iterations, strategy.strategy_coef, strategy.noising_coef):
        with pytest.raises(ValueError, match=r"iterations must be at most 10, what B.*2\) is optimised for, got 11"):
            call(11)
    with pytest.raises(ValueError, match="iterations must be at most 10"):
        Mechanism(strategy, BallsInBins(1, 11))


def test_fewer_iterations_use_the_start() -> None:
    np.testing.assert_array_equal(BANDED_INVERSE.strategy_coef(30), BANDED_INVERSE.strategy_coef(100)[:30])


def test_missing_jax_privacy_says_what_to_install(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = strategies.blt(1).strategy_coef(9)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jax", None)
        store.forget()
        np.testing.assert_array_equal(strategies.blt(1).strategy_coef(9), found)  # the store has it
        with pytest.raises(errors.MissingExtraError, match=r"BLT needs jax-privacy: pip install '\.\[jax\]'"):
            strategies.blt(2).strategy_coef(9)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jax_privacy.matrix_factorization", None)
        with pytest.raises(errors.MissingExtraError, match="BandMF cannot use the installed version of jax-privacy"):
            strategies.bandmf(2).strategy_coef(9)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, -1e-6], r"BandMF\(p=2\): it gave a negative coefficient \(-1e-06\)"),
        ([1.0, float("nan")], "not finite, or start with 0"),
        ([0.0, 1.0], "not finite, or start with 0"),
    ],
)
def test_an_optimiser_gone_astray(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, returned: list[float], message: str
) -> None:
    from jax_privacy.matrix_factorization import toeplitz

    monkeypatch.setattr(toeplitz, "optimize_banded_toeplitz", lambda n, bands: np.array(returned))
    with pytest.raises(RuntimeError, match=message):
        strategies.bandmf(2).strategy_coef(9)
    assert list(cache_dir.glob("*.json")) == []


def test_rounding_below_zero_is_cleared(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_privacy.matrix_factorization import toeplitz

    monkeypatch.setattr(toeplitz, "optimize_banded_toeplitz", lambda n, bands: np.array([1.0, -1e-17]))
    assert strategies.bandmf(2).strategy_coef(3).tolist() == [1, 0, 0]


def test_a_failing_blt_gives_one_line(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_privacy.matrix_factorization import buffered_toeplitz

    def fail(**_: object) -> None:
        raise RuntimeError("loss is nan\nlong\nstory")

    monkeypatch.setattr(buffered_toeplitz, "optimize", fail)
    with pytest.raises(RuntimeError, match=r"^BLT\(d=9\) could not be optimised .*: loss is nan; try fewer buffers$"):
        strategies.blt(9).strategy_coef(30)
