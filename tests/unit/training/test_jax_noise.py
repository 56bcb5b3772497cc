"""Noise in JAX: every word gives the number that belongs to it, the tails are followed, rows are those of C⁻¹Z."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import binom, kstest, norm

import dpmf
from dpmf.errors import ArgumentError
from dpmf.strategies.unamplified import BLT

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

from dpmf.training._jax_noise import Rows, normals, normals_of, precision  # noqa: E402

BSR = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(3, 4))
ONES, N = 2**32 - 1, 12


@pytest.fixture(params=[False, True], ids=["compiled", "quickly compiled"], autouse=True)
def optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", request.param)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def words(k: Any, sign: Any = 0, deep: Any = 0) -> tuple[np.ndarray, ...]:
    """The words whose normal has the absolute value number k of 2⁶³, the largest first."""
    numbers = np.asarray(k, dtype=np.uint64)
    high = ((numbers >> np.uint64(32)) << np.uint64(1) | np.uint64(sign)).astype(np.uint32)
    return high, numbers.astype(np.uint32), np.broadcast_to(np.asarray(deep, dtype=np.uint32), numbers.shape)


def drawn(k: Any, sign: Any = 0, dtype: str = "float32", deep: Any = 0) -> np.ndarray:
    given = map(jnp.asarray, words(k, sign, deep))
    return np.asarray(jax.jit(normals_of, static_argnums=3)(*given, dtype), dtype=np.float64)


def exactly(high: int, low: int, deep: int) -> float:
    below = (low * 2**32 + deep + 0.5) * 2.0**-96 if high < 2 else ((high >> 1) * 2**32 + low + 0.5) * 2.0**-64
    return float(-ndtri(below)) * (-1) ** (high & 1)


def test_extreme_words() -> None:
    assert drawn([0])[0] == pytest.approx(11.3034, abs=1e-4)
    for high in (0, 1, 2, 3, 2**15, 2**16, 2**31 - 1, 2**31, ONES - 1, ONES):
        for low in (0, 1, 2**16, 2**31, ONES):
            for deep in (0, 1, 2**31, ONES) if high < 2 else (0, ONES):
                z = float(normals_of(*map(jnp.uint32, (high, low, deep))))
                assert z == pytest.approx(exactly(high, low, deep), abs=4e-6)


def test_where_the_first_bits_are_zero_a_third_word_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([jnp.array([1, 7], jnp.uint32), jnp.zeros(2, jnp.uint32), jnp.array([5, 5], jnp.uint32)])
    monkeypatch.setattr(jax.random, "bits", lambda *_, **__: next(answers))
    found = normals(jax.random.key(0), (2,))
    np.testing.assert_allclose(found, [exactly(1, 0, 5), exactly(7, 0, 0)], atol=4e-6)


def _spread(count: int) -> np.ndarray:
    """Numbers with any count of leading zeros, those around powers of two among them."""
    rng = np.random.default_rng(5)
    near = [2**e + d for e in range(2, 63) for d in (-2, -1, 0, 1)]
    some = rng.integers(0, 2**63, count, dtype=np.uint64) >> rng.integers(0, 63, count).astype(np.uint64)
    return np.sort(np.concatenate([np.arange(4, dtype=np.uint64), np.array(near, dtype=np.uint64), some]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_number_of_every_word(dtype: str) -> None:
    k = _spread(200_000)
    k = k[k >= 2**32]  # below, a third word counts
    exact = -ndtri((k.astype(np.float64) + 0.5) * 2.0**-64)
    with jax.enable_x64(dtype == "float64"):
        z = drawn(k, 0, dtype)
        np.testing.assert_array_equal(drawn(k, 1, dtype), -z)
    error = np.abs(z - exact)
    allowed = (3e-6, 1e-6) if dtype == "float32" else (2e-14, 1e-14)  # scipy's own error among them
    assert error.max() < allowed[0]
    assert error[exact < 4].max() < allowed[1]
    assert np.diff(z).max() < 2 * allowed[0]


@pytest.mark.parametrize("beyond", [4.0, 5.0, 5.42, 5.5, 6.0, 6.5, 8.0, 9.0])
def test_the_tail_given_leading_zeros(beyond: float) -> None:
    """Given that the first bits are zero, |z| has the tail of a normal that is known to be large."""
    both = 2 * norm.sf(beyond)
    zeros = int(-math.log2(both)) - 1  # the tail then is a quarter to a half of what is drawn
    rng, count = np.random.default_rng(7), 400_000
    k = rng.integers(0, 2 ** (63 - zeros), count, dtype=np.uint64)
    signs, deep = rng.integers(0, 2, count).astype(np.uint64), rng.integers(0, 2**32, count, dtype=np.uint64)
    found = int((np.abs(drawn(k, signs, deep=deep)) > beyond).sum())
    low, high = binom.ppf([1e-6, 1 - 1e-6], count, both * 2.0**zeros)
    assert low <= found <= high


def rows(mechanism: dpmf.Mechanism, zero: Any, dtype: Any = None, stddev: float = 1.0) -> list[Any]:
    """All rows of noise, each compiled alone, and what is kept after the last one."""
    noise = Rows(mechanism, stddev, dtype)
    zero = noise.zeros(zero)
    kept, found, following = noise.begin(zero), [], jax.jit(noise.next)
    for step in range(mechanism.batching.steps):
        row, kept = following(jax.random.key(3), jnp.int32(step), kept, zero)
        found.append(row)
    return [*found, kept]


def test_what_is_added_may_be_far_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.random.normal ends at 5.42 in single precision: an output beyond that would prove that a record is there."""
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype, **_: jnp.zeros(shape, dtype))
    assert (np.abs(rows(BSR, jnp.zeros(2))[0]) > 11).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ordinary_draws(dtype: str) -> None:
    count = 400_000
    with jax.enable_x64(dtype == "float64"):
        z = jax.jit(normals, static_argnums=(1, 2))(jax.random.key(11), (count,), dtype)
        assert z.dtype == dtype
    z = np.asarray(z, dtype=np.float64)
    assert kstest(z, norm.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(z[::2], z[1::2])[0, 1]) < 5 / (count / 2) ** 0.5
    assert len(np.unique(np.abs(z))) > 0.97 * count


def test_the_same_bits_in_all_modes() -> None:
    key = jax.random.key(2)
    one = np.asarray(normals(key, (6,)))
    assert one.dtype == np.float32
    with jax.enable_x64():
        np.testing.assert_allclose(np.asarray(normals(key, (6,))), one, atol=1e-6)
        assert normals(key, (6,)).dtype == np.float32
    keys = jax.random.split(key, 3)
    together = jax.vmap(lambda one: normals(one, (6,)))(keys)
    np.testing.assert_allclose(together, [normals(one, (6,)) for one in keys], atol=1e-6)


@pytest.mark.parametrize("name", ["int32", "float8_e4m3fn"])
def test_what_is_no_floating_point_number_is_refused(name: str) -> None:
    for given in (name, "bfloat16", "float16"):
        with pytest.raises(
            ArgumentError, match=f"dtype must be float32 or float64, in which noise is drawn, got '{given}'"
        ):
            precision(jnp.zeros(3), given)
    with pytest.raises(ArgumentError, match=f"parameters must be float64, float32, bfloat16 or float16, got '{name}'"):
        precision(jnp.zeros(3, name))
    assert precision(jnp.zeros(3, "bfloat16")) == "float32"


@pytest.mark.parametrize("optimizations", [True], ids=["quickly compiled"], indirect=True)
@pytest.mark.parametrize(
    "mechanism",
    [
        BSR,
        dpmf.Mechanism(dpmf.strategies.matrix(np.tri(12)), BSR.batching),
        dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.reshuffled(3, 4, gap=5)),
    ],
    ids=str,
)
def test_double_precision(mechanism: dpmf.Mechanism) -> None:
    """Asked for, or because the parameters have it; what is kept has one precision in all steps."""
    with jax.enable_x64():
        for dtype, given, fine in ((None, "float64", True), ("float64", "bfloat16", True), (None, "float32", False)):
            found = {str(leaf.dtype) for leaf in jax.tree.leaves(rows(mechanism, jnp.zeros((50,), given), dtype))}
            assert found == {"float64" if fine else "float32"}


class FixedBLT(BLT):
    def buffers(self, iterations: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0.9, 0.4]), np.array([0.2, 0.3])


STRATEGIES = {
    "dpsgd": dpmf.strategies.dpsgd(),
    "scaled": dpmf.strategies.coefficients([2.0]),
    "bsr": dpmf.strategies.bsr(3),
    "bisr": dpmf.strategies.bisr(3),
    "blt": FixedBLT(2, "max"),
    "bsr normalised": dpmf.strategies.bsr(3).normalized(),
    "bisr normalised": dpmf.strategies.bisr(3).normalized(),
    "matrix": dpmf.strategies.matrix(np.tril(np.full((N, N), 0.2)) + np.eye(N)),
}


@pytest.mark.parametrize("optimizations", [True], ids=["quickly compiled"], indirect=True)
@pytest.mark.parametrize("name", STRATEGIES)
def test_rows_are_those_of_the_dense_product(name: str) -> None:
    """The same normals are drawn whatever the matrix."""
    zero, batching = {"a": jnp.zeros((50,)), "b": jnp.zeros((2, 3))}, dpmf.BallsInBins(3, 4)
    found = []
    for strategy in (STRATEGIES["dpsgd"], STRATEGIES[name]):
        made = rows(dpmf.Mechanism(strategy, batching), zero)[:-1]
        found.append(np.stack([np.concatenate([np.ravel(row["a"]), np.ravel(row["b"])]) for row in made]))
    np.testing.assert_allclose(found[1], np.linalg.solve(STRATEGIES[name].matrix(N), found[0]), atol=1e-5)
