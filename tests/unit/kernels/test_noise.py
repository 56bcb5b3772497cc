"""The compiled normals and recurrences beside slow twins: ChaCha in Python's integers, Box-Muller with numpy's log."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from dpmf.kernels import noise
from dpmf.kernels.noise import (
    LANES,
    REACH,
    SINGLE_TILE,
    SMALL,
    TILE,
    _single_pair,
    chacha_tile,
    combine,
    drain,
    normals,
)

MASK = 0xFFFFFFFF


def slow_block(key: list[int], rounds: int, block: int, nonce: int = 0) -> list[int]:
    """One block of ChaCha with a 64-bit counter and a 64-bit nonce, written from its description."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key, block & MASK, block >> 32, nonce, 0]
    x = list(start)

    def turn(a: int, b: int, d: int, left: int) -> None:
        x[a] = (x[a] + x[b]) & MASK
        x[d] ^= x[a]
        x[d] = (x[d] << left | x[d] >> (32 - left)) & MASK

    columns = [(i, i + 4, i + 8, i + 12) for i in range(4)]
    diagonals = [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
    for _ in range(rounds // 2):
        for a, b, c, d in columns + diagonals:
            turn(a, b, d, 16)
            turn(c, d, b, 12)
            turn(a, b, d, 8)
            turn(c, d, b, 7)
    return [(value + first) & MASK for value, first in zip(x, start, strict=True)]


def words(key: list[int], rounds: int, tile: int, nonce: int = 0) -> np.ndarray:
    out = np.empty(16 * LANES, np.uint32)
    chacha_tile(np.array(key, np.uint32), rounds, tile, out, nonce)
    return out.reshape(16, LANES)


def test_published_blocks_of_chacha() -> None:
    """The first block of a key of zeros, as published with the cipher."""
    for rounds, begin in ((8, "3e00ef2f895f40d67f5bb8e81f09a5a1"), (20, "76b8e0ada0f13d90405d6ae55386bd28")):
        assert words([0] * 8, rounds, 0)[:, 0].astype("<u4").tobytes().hex().startswith(begin)


@pytest.mark.parametrize("tile", [0, 3, 2**26 - 1, 2**26, 2**40])
def test_words_are_those_of_the_slow_cipher(tile: int) -> None:
    key = [int(word) for word in np.random.default_rng(1).integers(0, 2**32, 8)]
    for rounds, nonce in ((8, 0), (8, 1), (20, 0)):
        fast = words(key, rounds, tile, nonce)
        for lane in (0, 1, LANES - 1):
            assert fast[:, lane].tolist() == slow_block(key, rounds, tile * LANES + lane, nonce)


def slow_normals(key: list[int], rounds: int, tile: int) -> np.ndarray:
    """A tile of normals from the words, with numpy's own functions, which are not used by the kernel."""
    w = words(key, rounds, tile).astype(np.uint64)
    out = np.empty((8, LANES))
    for g in range(4):
        a, b, c, d = w[4 * g : 4 * g + 4]
        uniform = (((a << np.uint64(32) | b) >> np.uint64(11)).astype(float) + 0.5) / 2**53
        uniform = np.where(a < SMALL, ((a << np.uint64(32) | b).astype(float) + 0.5) / 2.0**64, uniform)
        turns = ((((c & np.uint64(2**30 - 1)) << np.uint64(32) | d) >> np.uint64(9)).astype(float) + 0.5) / 2**53 - 0.5
        angle = np.pi / 2 * (turns + (c >> np.uint64(30)).astype(float))
        radius = np.sqrt(-2 * np.log(uniform))
        out[g], out[4 + g] = radius * np.cos(angle), radius * np.sin(angle)
    return out.reshape(-1)


def drawn(start: int, count: int, dtype: type = np.float64, rounds: int = 8) -> np.ndarray:
    out = np.empty(count, dtype)
    normals(np.arange(8, dtype=np.uint32), rounds, np.array([start]), np.array([count]), out)
    return out


def test_normals_are_those_of_the_slow_transform() -> None:
    for rounds in (8, 20):
        slow = np.concatenate([slow_normals(list(range(8)), rounds, tile) for tile in range(40)])
        fast = drawn(0, len(slow), rounds=rounds)
        # The twin's angles of up to 2π are rounded, and the radius multiplies that: a few units in 10⁻¹⁵.
        np.testing.assert_allclose(fast, slow, rtol=0, atol=32 * np.finfo(float).eps)


def slow_single(key: list[int], rounds: int, tile: int) -> tuple[np.ndarray, int]:
    """The same in single precision, and how many radii came from 64 bits."""
    w, more = (words(key, rounds, tile, nonce).astype(np.uint64) for nonce in (0, 1))
    out = np.empty((16, LANES))
    for g in range(8):
        a, b = w[2 * g : 2 * g + 2]
        longer = ((a << np.uint64(32) | more[g]).astype(float) + 0.5) / 2.0**64
        uniform = np.where(a < SMALL, longer, (a.astype(float) + 0.5) / 2.0**32)
        angle = np.pi / 2 * (((b & np.uint64(2**30 - 1)).astype(float) + 0.5) / 2**30 - 0.5)
        angle += np.pi / 2 * (b >> np.uint64(30)).astype(float)
        radius = np.sqrt(-2 * np.log(uniform))
        out[g], out[8 + g] = radius * np.cos(angle), radius * np.sin(angle)
    return out.reshape(-1), int(np.sum(w[::2] < SMALL))


# Among these are two for either number of rounds that have a radius from 64 bits.
TILES = (0, 1, 107, 368, 471, 501, 2**40)


def test_single_precision_is_that_of_the_slow_transform() -> None:
    for rounds in (8, 20):
        slow, longer = zip(*(slow_single(list(range(8)), rounds, tile) for tile in TILES), strict=True)
        assert sum(longer) == 2
        fast = np.concatenate([drawn(tile * SINGLE_TILE, SINGLE_TILE, np.float32, rounds) for tile in TILES])
        np.testing.assert_allclose(fast, np.concatenate(slow), rtol=8 * np.finfo(np.float32).eps, atol=0)


def test_every_radius_and_angle_in_single_precision() -> None:
    """The words at which the logarithm changes its formula, and the extremes, where rounding could do harm."""
    edges = [0, 1, SMALL - 1, SMALL, 2**30, 2**31 - 1, 2**31, 3_037_000_500, 2**32 - 2**24, 2**32 - 2, 2**32 - 1]
    a = np.resize(np.array(edges, np.uint64), LANES)
    b = np.sort(np.resize(np.array([0, 1, 2**29, 2**30 - 1, 2**30, 2**31 - 1, 2**31, MASK], np.uint64), LANES))
    uniform = (a.astype(float) + 0.5) / 2.0**32
    lesser = ((np.minimum(a, MASK - a).astype(float) + 0.5) / 2.0**32).astype(np.float32)
    first, second = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    _single_pair(a.astype(np.uint32), b.astype(np.uint32), lesser, first, second)
    radius = np.sqrt(-2 * np.where(a < 2**31, np.log(uniform), np.log1p(-((MASK - a).astype(float) + 0.5) / 2.0**32)))
    angle = (
        np.pi
        / 2
        * (((b & np.uint64(2**30 - 1)).astype(float) + 0.5) / 2**30 - 0.5 + (b >> np.uint64(30)).astype(float))
    )
    np.testing.assert_allclose(np.hypot(first, second, dtype=float), radius, rtol=5e-7)
    np.testing.assert_allclose(first, radius * np.cos(angle), rtol=1e-6)
    np.testing.assert_allclose(second, radius * np.sin(angle), rtol=1e-6)


def test_any_part_can_be_drawn_alone() -> None:
    whole = drawn(0, 3 * TILE)
    for start, count in ((0, 1), (1, TILE), (TILE - 1, 2), (700, 800), (3 * TILE - 1, 1), (5, 0)):
        assert np.array_equal(drawn(start, count), whole[start : start + count])
    starts, counts = np.array([5, 9, 600, 2]), np.array([3, 1, 700, 2])
    out = np.empty(counts.sum())
    normals(np.arange(8, dtype=np.uint32), 8, starts, counts, out)
    parts = [whole[start : start + count] for start, count in zip(starts, counts, strict=True)]
    assert np.array_equal(out, np.concatenate(parts))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keep_sum", [True, False])
@pytest.mark.parametrize("copies", [0, 1, 3])
def test_combine(copies: int, keep_sum: bool, dtype: type) -> None:
    rng = np.random.default_rng(copies)
    size, first, step = TILE + 7, 11, 5
    z, kept = rng.normal(size=size).astype(dtype), rng.normal(size=(copies, size + 20)).astype(dtype)
    weights = rng.normal(size=copies + 1).astype(dtype)
    expected, old = weights[0] * z, kept.copy()
    for j in range(1, copies + 1):
        expected = expected + weights[j] * old[(step - j) % copies, first : first + size]
    given = z.copy()
    combine(z, kept, first, step, weights, keep_sum)
    assert np.array_equal(z, expected)
    if copies:
        old[step % copies, first : first + size] = expected if keep_sum else given
    assert np.array_equal(kept, old)


def test_drain() -> None:
    rng = np.random.default_rng(3)
    size, first = TILE + 7, 11
    z, kept = rng.normal(size=size), rng.normal(size=(2, size + 20))
    decay, weights, old = np.array([0.9, 0.5]), np.array([0.1, 0.3]), kept.copy()
    expected = z - weights[0] * old[0, first : first + size] - weights[1] * old[1, first : first + size]
    drain(z, kept, first, decay, weights)
    assert np.array_equal(z, expected)
    old[:, first : first + size] = decay[:, None] * old[:, first : first + size] + expected
    assert np.array_equal(kept, old)


# Tails: the uniform variable behind the radius has 32 bits, 64 below 2⁻¹⁶, and 96 below 2⁻⁴⁸. Blocks that are that
# extreme cannot be waited for, so the words are given.


def with_words(first: list[int], second: list[int], dtype: type, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The normals of one tile whose first blocks have these words, and whose second ones (nonce 1) have those."""

    def given(key: Any, rounds: int, tile: int, x: np.ndarray, nonce: int = 0) -> None:
        x[:] = np.repeat(np.array(second if nonce else first, np.uint32), LANES)

    monkeypatch.setattr(noise, "chacha_tile", given)
    monkeypatch.setattr(noise, "_continued", getattr(noise._continued, "py_func", noise._continued))
    out = np.empty(SINGLE_TILE if dtype == np.float32 else TILE, dtype)
    draw = noise._single_tile if dtype == np.float32 else noise._double_tile
    draw.py_func(np.zeros(8, np.uint32), 8, 0, np.empty(16 * LANES, np.uint32), out)
    return out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_extremes_of_the_generator(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """All words zero, all ones, and the edges at which more bits are drawn: finite, and those of the normal."""
    zeros, ones = [0] * 16, [MASK] * 16
    largest = np.abs(with_words(zeros, zeros, dtype, monkeypatch)).max()
    assert REACH <= math.sqrt(2 * 97 * math.log(2)) < REACH + 0.01
    assert largest == pytest.approx(math.sqrt(2 * 97 * math.log(2)) * math.cos(math.pi / 4), rel=1e-5)  # at 45 degrees
    assert np.isfinite(with_words(ones, ones, dtype, monkeypatch)).all()
    # The radius, from both normals of a pair, for words at the edges.
    half = SINGLE_TILE // 2 if dtype == np.float32 else TILE // 2
    pairs = 2 if dtype == np.float32 else 4  # words for a pair
    for a, more, deep in (
        (0, 0, 0), (0, 0, 7), (0, SMALL - 1, 5), (0, SMALL, 5), (0, MASK, 1), (1, 3, 0), (SMALL - 1, MASK, 0),
        (SMALL, 0, 0), (MASK, 0, 0),
    ):  # fmt: skip
        first, second = [0] * 16, [0] * 16
        for g in range(16 // pairs):
            first[pairs * g] = a
            if dtype == np.float32:
                second[g], second[8 + g] = more, deep
            else:
                first[pairs * g + 1], second[g] = more, deep
        found = with_words(first, second, dtype, monkeypatch)
        radius = np.hypot(found[:half].astype(float), found[half:].astype(float))
        whole = a << 32 | more
        if a >= SMALL:
            uniform = (a + 0.5) / 2**32 if dtype == np.float32 else ((whole >> 11) + 0.5) / 2**53
        elif whole >= SMALL:
            uniform = (whole + 0.5) / 2**64
        else:
            uniform = ((whole << 32 | deep) + 0.5) / 2**96
        expected = math.sqrt(-2 * math.log(uniform)) if uniform < 0.9 else math.sqrt(-2 * math.log1p(uniform - 1))
        np.testing.assert_allclose(radius, expected, rtol=1e-6 if dtype == np.float32 else 1e-9)


def test_tails_are_those_of_the_normal_given_extreme_bits() -> None:
    """Radii whose first 32 + k bits are zero are Rayleigh given that they are beyond a bound: counted beyond it."""
    rng = np.random.default_rng(5)
    count = 200_000
    for leading, beyond in ((8, 4.0), (16, 5.0), (20, 5.5), (24, 6.0), (28, 6.5), (40, 8.0)):
        bits = 96 - leading
        high = rng.integers(0, 1 << (bits - 53), count) if bits > 53 else np.zeros(count, np.int64)
        low = rng.integers(0, 1 << 53, count)
        uniform = (high.astype(float) * 2.0**53 + low + 0.5) / 2.0**96
        lesser = uniform.astype(np.float32)
        words_ = (uniform * 2.0**32).astype(np.uint32)
        angles = rng.integers(0, 1 << 32, count).astype(np.uint32)
        hits = 0
        for start in range(0, count - LANES, LANES):
            part = slice(start, start + LANES)
            first, second = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
            _single_pair(words_[part], angles[part], lesser[part].copy(), first, second)
            hits += int((np.abs(first) > beyond).sum() + (np.abs(second) > beyond).sum())
        tried = 2 * (count - LANES) // LANES * LANES
        # A number beyond has a radius beyond, and so a uniform variable with at least these leading zeros.
        assert math.exp(-beyond * beyond / 2) < 2.0**-leading
        rate = 2 * float(scipy.stats.norm.sf(beyond)) * 2.0**leading
        assert abs(hits - rate * tried) < 5 * math.sqrt(rate * tried)
