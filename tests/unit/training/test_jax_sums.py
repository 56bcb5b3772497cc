"""Clipping and sums in JAX, in rational arithmetic: no contribution is longer than the clip, and sums are exact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import ArgumentError
from dpmf.run import Run

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from dpmf.training._jax_sums import Grid, exact_sums, parts, with_noise  # noqa: E402

MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(3, 4))


@pytest.fixture(params=[True], ids=["quickly compiled"], autouse=True)
def optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", request.param)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def grid(clip: float = 1.0, sigma: float = 1.0, rows: int = 16) -> Grid:
    return Grid.of(Run(MECHANISM, sigma, clip, max_batch_size=rows, records=10**6))


def units(gradients: Any, on: Grid, real: Any = None, first: int | None = None) -> list[int]:
    """The sum of clipped gradients in units of the grid, or the first elements of every array, as exact integers."""
    count = len(jax.tree.leaves(gradients)[0])
    more = -count % parts(count)
    padded = jax.tree.map(lambda g: jnp.pad(g, ((0, more), *((0, 0),) * (g.ndim - 1))), gradients)
    rows = jnp.pad(jnp.ones(count, bool) if real is None else real, (0, more))
    found = jax.jit(exact_sums, static_argnums=2)(padded, rows, on)
    high, low = (np.concatenate([np.ravel(leaf[i])[:first] for leaf in jax.tree.leaves(found)]) for i in (0, 1))
    return [int(h) * 2**13 + int(x) for h, x in zip(high, low, strict=True)]


def squared(whole: list[int], on: Grid) -> Fraction:
    return sum(Fraction(v) ** 2 for v in whole) * Fraction(on.unit) ** 2


@pytest.mark.parametrize("optimizations", [False, True], ids=["compiled", "quickly compiled"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("clip", [1.0, 0.3, 1e-9, 7e8])
def test_no_contribution_is_longer_than_the_clip(clip: float, dtype: str) -> None:
    rng, on = np.random.default_rng(3), grid(clip)
    for case in range(6):
        spread = rng.normal(size=3000) * 10.0 ** rng.uniform(-3, 3, 3000)
        one = [np.ones(3000), rng.normal(size=3000), spread, np.eye(3000)[5], spread**3 / 1e4, rng.uniform(size=3000)]
        scale = 100.0 if dtype == "float16" else clip * 10.0 ** rng.uniform(-1, 6)
        whole = jnp.asarray(np.clip(one[case] * scale, *((-6e4, 6e4) if dtype == "float16" else (None, None))), dtype)
        record = {"a": whole[None, :2500], "b": whole[None, 2500:].reshape(1, 5, 100), "c": whole[None, 7]}
        length = squared(units(record, on), on)
        assert length <= Fraction(clip) ** 2
        exact = math.sqrt(
            sum(float(v) ** 2 for v in np.concatenate([np.asarray(v, float).ravel() for v in jax.tree.leaves(record)]))
        )
        lost = on.unit * math.sqrt(3001)  # by truncation
        assert math.sqrt(length) >= min(exact, clip) * (1 - 3 * 2.0**-14) - lost


def test_many_small_elements_that_round_down() -> None:
    """Squares of one size, added one after the other in single precision, would lose a tenth of the norm."""
    on, count = grid(), 2**21 + 3
    record = jnp.full((1, count), np.float32(1.0001))
    length = squared(units(record, on, first=1), on) * count
    assert length <= 1


@pytest.mark.parametrize("optimizations", [False, True], ids=["compiled", "quickly compiled"], indirect=True)
def test_squares_that_underflow_and_numbers_that_are_not_finite() -> None:
    on = grid(1e-17)
    assert squared(units(jnp.full((1, 5000), 3e-19, jnp.float32), on), on) <= Fraction(1e-17) ** 2
    broken = jnp.asarray([[np.nan, 1.0], [np.inf, 0.0], [1e30, 1.0], [-0.25, 0.5]], jnp.float32)
    assert units(broken, grid()) == units(broken[3:], grid()) == [-(2**18), 2**19]


@pytest.mark.parametrize("optimizations", [False, True], ids=["compiled", "quickly compiled"], indirect=True)
def test_sums_are_those_of_integers_in_any_order() -> None:
    rng, on, rows = np.random.default_rng(5), grid(rows=300), 300
    gradients = jnp.asarray(rng.normal(size=(rows, 40)), jnp.float32)
    alone = np.array([units(gradients[i : i + 1], on) for i in range(0, rows, 30)])
    assert (alone.sum(axis=0) == units(gradients[::30], on)).all()
    order = rng.permutation(rows)
    assert units(gradients[order], on) == units(gradients, on)
    real = rng.random(rows) < 0.3
    assert units(gradients, on, jnp.asarray(real)) == units(gradients[real], on)
    assert units(gradients, on, jnp.zeros(rows, bool)) == [0] * 40
    with jax.enable_x64():
        assert exact_sums(gradients[:288], jnp.ones(288, bool), on).dtype == jnp.int32
        assert units(gradients.astype("float64"), on) == units(gradients, on)


def test_as_many_records_as_are_allowed_do_not_overflow() -> None:
    on = grid(rows=2**17, sigma=1.0)
    assert on.bits == 25
    one = units(jnp.asarray([[1.0, -1.0]] * 16, jnp.float32), on)
    assert units(jnp.tile(jnp.asarray([[1.0, -1.0]], jnp.float32), (2**17, 1)), on) == [v * 2**13 for v in one]


def test_the_grid_changes_little_of_the_noise_and_comes_from_public_numbers() -> None:
    for sigma in (0.3, 1.0, 4.0, 1e4):
        for rows in (1, 57, 4096, 60_000):
            for clip in (1.0, 0.3, 1.7):
                on = grid(clip, sigma, rows)
                assert rows * on.unit <= 0.01 * sigma * clip
                assert on.clip * on.power == clip
                assert on.power / 2 < clip <= on.power
                assert 20 <= on.bits <= 26
    for options, message in (
        ({"rows": 2**17 + 1}, "max_batch_size must be at most 131072 in JAX"),
        ({"sigma": 1e-5}, "noise_multiplier must be between 4.8e-05 and 65536 for batches of 16 rows"),
        ({"sigma": 1e6}, "noise_multiplier must be between"),
        ({"clip": 1e19}, "clip_norm must be between"),
    ):
        with pytest.raises(ArgumentError, match=message):
            grid(**options)


@pytest.mark.parametrize("noise", [0.4, -0.6, 12345.5, -(2.0**23), 2.0**40, -(2.0**41)])
def test_noise_is_added_to_integers(noise: float) -> None:
    """What is released is a function of the integer sum of both, whatever its parts."""
    on, expected = grid(), None
    for sum_, more in ((0, noise), (2**30 + 5, noise - 2**30 - 5), (-(2**36), noise + 2**36)):
        if float(np.float32(more)) != more:
            continue
        words = jnp.asarray([[sum_ >> 13], [sum_ & 8191]], jnp.int32)
        found = float(with_noise(words, jnp.asarray([more], jnp.float32), on, 2.0)[0])
        expected = found if expected is None else expected
        assert found == expected == np.float32(round(noise) * on.unit / 2)
    assert np.isnan(with_noise(jnp.zeros((2, 1), jnp.int32), jnp.asarray([2.0**43]), on, 2.0))
