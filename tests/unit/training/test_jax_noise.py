"""Normals in JAX: every word gives the number that belongs to it, the tails are followed, low precision is refused."""

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
from dpmf.training import jax as training

jax = pytest.importorskip("jax")
pytest.importorskip("jax_privacy")
import jax.numpy as jnp  # noqa: E402

from dpmf.training._jax_noise import normals, normals_of  # noqa: E402

BSR = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(3, 4))
ONES = 2**32 - 1


@pytest.fixture(params=[False, True], ids=["compiled", "quickly compiled"], autouse=True)
def optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", request.param)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def words(k: Any, sign: Any = 0) -> tuple[np.ndarray, np.ndarray]:
    """The words whose normal has the absolute value number k of 2⁶³, the largest first."""
    numbers = np.asarray(k, dtype=np.uint64)
    return ((numbers >> np.uint64(32)) << np.uint64(1) | np.uint64(sign)).astype(np.uint32), numbers.astype(np.uint32)


def drawn(k: Any, sign: Any = 0, dtype: str = "float32") -> np.ndarray:
    return np.asarray(jax.jit(normals_of, static_argnums=2)(*map(jnp.asarray, words(k, sign)), dtype), dtype=np.float64)


def test_extreme_words() -> None:
    assert drawn([0])[0] == pytest.approx(-ndtri(2.0**-65), abs=3e-6)
    assert drawn([0])[0] > 9.15
    for high in (0, 1, 2, 2**15, 2**16, 2**31 - 1, 2**31, ONES - 1, ONES):
        for low in (0, 1, 2**16, 2**31, ONES):
            z = float(normals_of(jnp.uint32(high), jnp.uint32(low)))
            exact = -ndtri((float((high >> 1) * 2**32 + low) + 0.5) * 2.0**-64) * (-1) ** (high & 1)
            assert z == pytest.approx(exact, abs=3e-6)


def _spread(count: int) -> np.ndarray:
    """Numbers with any count of leading zeros, those around powers of two among them."""
    rng = np.random.default_rng(5)
    near = [2**e + d for e in range(2, 63) for d in (-2, -1, 0, 1)]
    some = rng.integers(0, 2**63, count, dtype=np.uint64) >> rng.integers(0, 63, count).astype(np.uint64)
    return np.sort(np.concatenate([np.arange(4, dtype=np.uint64), np.array(near, dtype=np.uint64), some]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_number_of_every_word(dtype: str) -> None:
    k = _spread(200_000)
    exact = -ndtri((k.astype(np.float64) + 0.5) * 2.0**-64)
    with jax.enable_x64(dtype == "float64"):
        z = drawn(k, 0, dtype)
        np.testing.assert_array_equal(drawn(k, 1, dtype), -z)
    error = np.abs(z - exact)
    allowed = (3e-6, 1e-6) if dtype == "float32" else (2e-14, 1e-14)  # scipy's own error among them
    assert error.max() < allowed[0]
    assert error[exact < 4].max() < allowed[1]
    assert np.diff(z).max() < 2 * allowed[0]


@pytest.mark.parametrize("beyond", [4.0, 5.0, 5.42, 5.5, 6.0, 6.5, 8.0])
def test_the_tail_given_leading_zeros(beyond: float) -> None:
    """Given that the first bits are zero, |z| has the tail of a normal that is known to be large."""
    both = 2 * norm.sf(beyond)
    zeros = int(-math.log2(both)) - 1  # the tail then is a quarter to a half of what is drawn
    rng, count = np.random.default_rng(7), 400_000
    k = rng.integers(0, 2 ** (63 - zeros), count, dtype=np.uint64)
    found = int((np.abs(drawn(k, rng.integers(0, 2, count).astype(np.uint64))) > beyond).sum())
    low, high = binom.ppf([1e-6, 1 - 1e-6], count, both * 2.0**zeros)
    assert low <= found <= high


def test_what_is_added_may_be_far_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.random.normal ends at 5.42 in single precision: an output beyond that would prove that a record is there."""
    private = training.privatizer(BSR, noise_multiplier=1.0, l2_sensitivity=1.0, prng_key=3)
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype, **_: jnp.zeros(shape, dtype))
    zero = jnp.zeros(2)
    noisy, _ = private.update(zero, private.init(zero))
    assert (np.abs(noisy) > 9).all()


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


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn"])
def test_less_than_single_precision_is_refused(name: str) -> None:
    message = f"dtype must be float32 or float64, of parameters, gradients and noise alike, got '{name}'"
    given = {"noise_multiplier": 1.0, "l2_sensitivity": 1.0}
    low, single = {"a": jnp.zeros(3), "b": jnp.zeros(3, name)}, {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    private = training.privatizer(BSR, **given)
    with pytest.raises(ArgumentError, match=message):
        private.init(low)
    with pytest.raises(ArgumentError, match=message):
        private.update(low, private.init(single))
    with pytest.raises(ArgumentError, match=message):
        training.PrivateTraining(BSR, low, records=9, **given)
    with pytest.raises(ArgumentError, match=message):
        training.PrivateTraining(BSR, single, records=9, dtype=name, **given)
    options = {"records": 9, "clip_norm": 1.0, "noise_multiplier": 1.0, "max_batch_size": 9}
    with pytest.raises(ArgumentError, match=message):
        training.make_private(BSR, dtype=name, **options)
    whole = training.make_private(BSR, **options)
    with pytest.raises(ArgumentError, match=message):
        whole.noise.init(low)
    batch, gradient = whole.batch(whole.noise.init(single)), whole.gradient(lambda weights, x: weights["a"] @ x)
    with pytest.raises(ArgumentError, match=message):
        gradient(low, jnp.zeros((9, 3)), batch)


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
    """Asked for, or because the gradients have it; what is kept has one precision in all steps."""
    with jax.enable_x64():
        for dtype, given, fine in ((None, "float64", True), ("float64", "float32", True), (None, "float32", False)):
            private = training.privatizer(mechanism, noise_multiplier=1.0, l2_sensitivity=1.0, prng_key=3, dtype=dtype)
            zero = jnp.zeros((50,), given)
            state = private.init(zero)
            shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
            noisy, state = private.update(zero, state)
            assert noisy.dtype == given
            assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] == shapes
            kept = {str(leaf.dtype) for leaf in jax.tree.leaves(state[1][2])}
            assert kept <= {"float64" if fine else "float32"}
