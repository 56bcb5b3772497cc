"""Standard normals as a function of a key and of their position, and the recurrences that correlate them.

The generator is ChaCha, a counter-based stream cipher: 16 words of 32 bits from a 256-bit key and the number of a
block. Its words become pairs of normals by the Box-Muller transform: four words for a pair in double precision, two for
a pair in single precision. Only additions, multiplications, divisions, square roots and explicit fused multiply-adds
are used, which IEEE 754 rounds alike everywhere, and the compiler may not reorder them or fuse others: every machine
with a CPU draws the same bits. `gpu_noise` draws single-precision normals from the same words.

A tile is `LANES` blocks, which the processor computes side by side. With words w₀ ... w₁₅ of lane i in the tile, a tile
in double precision has `TILE` = 8·LANES normals: g·LANES + i and (4 + g)·LANES + i come from w₄g ... w₄g₊₃, for
g = 0 ... 3. One in single precision has `SINGLE_TILE` = 16·LANES: g·LANES + i and (8 + g)·LANES + i come from w₂g and
w₂g₊₁, for g = 0 ... 7. The first word is the uniform variable behind the radius; where it is below 2¹⁶, word g of a
second block (nonce 1 instead of 0) gives it 32 further bits, so that the tail is as fine as the rest, and word 8 + g
gives it 32 more where these 64 are below 2¹⁶, too. In double precision all 64 bits of two words are used where the
first is below 2¹⁶, and word g of a second block likewise. Numbers end at 11.59 standard deviations.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

REACH = 11.59  # the largest normal, rounded down

LANES = 64
TILE, SINGLE_TILE = 8 * LANES, 16 * LANES
# Below this, the word behind a radius is continued by another one.
SMALL = 1 << 16

_U = np.uint32
_PI_4 = math.pi / 4
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")


# log(1 + f) = f − f²/2 + f³·(a polynomial) for 1 + f between √½ and √2, and sine and cosine up to π/4: the coefficients
# of single precision in Moshier's Cephes library, the highest power first.
LOGARITHM = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
# log 2 as a sum whose first part has few bits, so that its multiples are exact.
LOG_2 = (0.693359375, -2.12194440e-4)

_F = np.float32
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (_F(c) for c in LOGARITHM)
_S0, _S1, _S2 = (_F(c) for c in SINE)
_C0, _C1, _C2 = (_F(c) for c in COSINE)
_LOG_2_HIGH, _LOG_2_LOW = (_F(c) for c in LOG_2)


@intrinsic
def _fma(context, a, b, c):  # type: ignore[no-untyped-def]
    """a·b + c, rounded once. Asked for by name, it is the same everywhere; a processor without it takes longer."""
    double = types.float64
    return double(double, double, double), lambda _context, builder, _signature, given: builder.fma(*given)


@intrinsic
def _fmaf(context, a, b, c):  # type: ignore[no-untyped-def]
    """The same in single precision."""
    single = types.float32
    return single(single, single, single), lambda _context, builder, _signature, given: builder.fma(*given)


@intrinsic
def _integer(context, x):  # type: ignore[no-untyped-def]
    """The bits of a number in single precision."""
    integer = types.int32
    return integer(types.float32), lambda _context, builder, _signature, given: builder.bitcast(
        given[0], _context.get_value_type(integer)
    )


@intrinsic
def _single(context, x):  # type: ignore[no-untyped-def]
    """The number in single precision that has these bits."""
    single = types.float32
    return single(types.int32), lambda _context, builder, _signature, given: builder.bitcast(
        given[0], _context.get_value_type(single)
    )


@njit(cache=True, error_model="numpy", inline="always")
def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]
    """A quarter round of ChaCha."""
    a = _U(a + b)
    d = _U(d ^ a)
    d = _U((d << _U(16)) | (d >> _U(16)))
    c = _U(c + d)
    b = _U(b ^ c)
    b = _U((b << _U(12)) | (b >> _U(20)))
    a = _U(a + b)
    d = _U(d ^ a)
    d = _U((d << _U(8)) | (d >> _U(24)))
    c = _U(c + d)
    b = _U(b ^ c)
    b = _U((b << _U(7)) | (b >> _U(25)))
    return a, b, c, d


@njit(cache=True, error_model="numpy")
def _double_round(x: np.ndarray) -> None:
    """A column round and a diagonal round of ChaCha on every lane; word k of lane i is x[k · LANES + i]."""
    for i in range(LANES):
        a, b, c, d = x[i], x[LANES + i], x[2 * LANES + i], x[3 * LANES + i]
        e, f, g, h = x[4 * LANES + i], x[5 * LANES + i], x[6 * LANES + i], x[7 * LANES + i]
        k, m, n, o = x[8 * LANES + i], x[9 * LANES + i], x[10 * LANES + i], x[11 * LANES + i]
        p, q, r, s = x[12 * LANES + i], x[13 * LANES + i], x[14 * LANES + i], x[15 * LANES + i]
        a, e, k, p = _quarter(a, e, k, p)
        b, f, m, q = _quarter(b, f, m, q)
        c, g, n, r = _quarter(c, g, n, r)
        d, h, o, s = _quarter(d, h, o, s)
        a, f, n, s = _quarter(a, f, n, s)
        b, g, o, p = _quarter(b, g, o, p)
        c, h, k, q = _quarter(c, h, k, q)
        d, e, m, r = _quarter(d, e, m, r)
        x[i], x[LANES + i], x[2 * LANES + i], x[3 * LANES + i] = a, b, c, d
        x[4 * LANES + i], x[5 * LANES + i], x[6 * LANES + i], x[7 * LANES + i] = e, f, g, h
        x[8 * LANES + i], x[9 * LANES + i], x[10 * LANES + i], x[11 * LANES + i] = k, m, n, o
        x[12 * LANES + i], x[13 * LANES + i], x[14 * LANES + i], x[15 * LANES + i] = p, q, r, s


@njit(cache=True, error_model="numpy")
def chacha_tile(key: np.ndarray, rounds: int, tile: int, x: np.ndarray, nonce: int = 0) -> None:
    """Write the words of blocks tile · LANES ... (tile + 1) · LANES − 1; word k of lane i goes to x[k · LANES + i]."""
    start = np.empty(16, np.uint32)
    start[0], start[1], start[2], start[3] = 0x61707865, 0x3320646E, 0x79622D32, 0x6B206574
    start[4:12] = key
    start[12], start[13], start[14], start[15] = 0, 0, nonce, 0
    first = np.uint64(tile) * np.uint64(LANES)
    for word in range(16):
        x[word * LANES : (word + 1) * LANES] = start[word]
    for i in range(LANES):  # the lanes of a tile have the same upper word, because a tile is aligned
        x[12 * LANES + i] = _U((first + np.uint64(i)) & np.uint64(0xFFFFFFFF))
        x[13 * LANES + i] = _U(first >> np.uint64(32))
    for _ in range(rounds // 2):
        _double_round(x)
    for word in range(16):
        if word != 12 and word != 13:
            for i in range(LANES):
                x[word * LANES + i] = _U(x[word * LANES + i] + start[word])
    for i in range(LANES):
        low = _U((first + np.uint64(i)) & np.uint64(0xFFFFFFFF))
        x[12 * LANES + i] = _U(x[12 * LANES + i] + low)
        x[13 * LANES + i] = _U(x[13 * LANES + i] + _U(first >> np.uint64(32)))


@njit(cache=True, error_model="numpy")
def _box_muller(words: np.ndarray, u: np.ndarray, bits: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    """Turn the last two of four words of every lane and u into two normals. `bits` is the memory of `u` as integers."""
    c, d = words[2 * LANES : 3 * LANES], words[3 * LANES :]
    exponent = np.empty(LANES, np.int64)
    for i in range(LANES):
        # u = (1 + f)·2^k with 1 + f in [√½, √2); then log(1 + f) by the series of atanh(f/(2 + f)), as in fdlibm.
        shifted = bits[i] + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
        bits[i] = (shifted & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD
        exponent[i] = (shifted >> 52) - 1023
    for i in range(LANES):
        k = np.float64(exponent[i])
        f = u[i] - 1.0
        s = f / (2.0 + f)
        z = s * s
        w = z * z
        even = _fma(w, _fma(w, 1.531383769920937332e-01, 2.222219843214978396e-01), 3.999999999940941908e-01)
        odd = _fma(w, 1.479819860511658591e-01, 1.818357216161805012e-01)
        odd = _fma(w, _fma(w, odd, 2.857142874366239149e-01), 6.666666666666735130e-01)
        half = 0.5 * f * f
        rest = _fma(s, half + _fma(w, even, z * odd), k * _LN2_LOW)
        u[i] = math.sqrt(-2.0 * _fma(k, _LN2_HIGH, f - (half - rest)))
    for i in range(LANES):
        # An angle in (−π/4, π/4), and two bits for a rotation by multiples of π/2.
        word = (np.int64(c[i] & _U(0x3FFFFFFF)) << 23) | (np.int64(d[i]) >> 9)
        angle = ((np.float64(word) + 0.5) * 2.0**-52 - 1.0) * _PI_4
        z = angle * angle
        sine = _fma(z, 1.58969099521155010221e-10, -2.50507602534068634195e-08)
        sine = _fma(z, _fma(z, sine, 2.75573137070700676789e-06), -1.98412698298579493134e-04)
        sine = _fma(z, _fma(z, sine, 8.33333333332248946124e-03), -1.66666666666666324348e-01)
        sine = _fma(angle * z, sine, angle)
        cosine = _fma(z, -1.13596475577881948265e-11, 2.08757232129817482790e-09)
        cosine = _fma(z, _fma(z, cosine, -2.75573143513906633035e-07), 2.48015872894767294178e-05)
        cosine = _fma(z, _fma(z, cosine, -1.38888888888741095749e-03), 4.16666666666666019037e-02)
        cosine = _fma(z, _fma(z, cosine, -0.5), 1.0)
        radius = u[i] if c[i] < _U(0x80000000) else -u[i]
        turned = (c[i] & _U(0x40000000)) != 0
        first[i] = radius * (-sine if turned else cosine)
        second[i] = radius * (cosine if turned else sine)


@njit(cache=True, error_model="numpy")
def _single_pair(a: np.ndarray, b: np.ndarray, t: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    """Turn two words of every lane into two normals. t is the lesser of u and 1 − u, for u behind the radius."""
    one, half = _F(1), _F(0.5)
    for i in range(LANES):
        # u = (1 + f)·2^k with 1 + f in [√½, √2). Above ½ that comes from 1 − u, which is exact where u is near 1.
        shifted = _integer(t[i]) + np.int32(0x3F800000 - 0x3F3504F3)
        exponent = _F((shifted >> np.int32(23)) - np.int32(127))
        fraction = _single((shifted & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3)) - one
        near = t[i] < _F(0.29289322)
        above = a[i] >= _U(0x80000000)
        k = (_F(0) if near else -one) if above else exponent
        f = (-t[i] if near else one - _F(2) * t[i]) if above else fraction
        z = f * f
        y = _fmaf(_fmaf(_fmaf(_L0, f, _L1), f, _L2), f, _L3)
        y = _fmaf(_fmaf(_fmaf(_fmaf(_fmaf(y, f, _L4), f, _L5), f, _L6), f, _L7), f, _L8)
        y = _fmaf(-half, z, _fmaf(k, _LOG_2_LOW, y * f * z))
        t[i] = np.sqrt(_F(-2) * _fmaf(k, _LOG_2_HIGH, f + y))
    for i in range(LANES):
        # An angle in (−π/4, π/4), and two bits for a rotation by multiples of π/2.
        angle = (_F(np.int32(b[i] & _U(0x3FFFFFFF)) - np.int32(1 << 29)) + half) * _F(math.pi / 4 * 2.0**-29)
        z = angle * angle
        sine = _fmaf(_fmaf(_fmaf(_S0, z, _S1), z, _S2), z * angle, angle)
        cosine = _fmaf(_fmaf(_fmaf(_C0, z, _C1), z, _C2), z * z, _fmaf(-half, z, one))
        radius = t[i] if b[i] < _U(0x80000000) else -t[i]
        turned = (b[i] & _U(0x40000000)) != 0
        first[i] = radius * (-sine if turned else cosine)
        second[i] = radius * (cosine if turned else sine)


@njit(cache=True, error_model="numpy")
def _single_tile(key: np.ndarray, rounds: int, tile: int, x: np.ndarray, drawn: np.ndarray) -> None:
    """Write the normals of a tile in single precision; x is room for its words."""
    chacha_tile(key, rounds, tile, x)
    t = np.empty(LANES, np.float32)
    for g in range(8):
        a, b = x[2 * g * LANES : (2 * g + 1) * LANES], x[(2 * g + 1) * LANES : (2 * g + 2) * LANES]
        least = _U(0xFFFFFFFF)
        for i in range(LANES):
            below = np.int32((a[i] if a[i] < _U(0x80000000) else ~a[i]) & _U(0x7FFFFFFF))
            t[i] = (_F(below) + _F(0.5)) * _F(2.0**-32)
            least = min(least, a[i])
        if least < _U(SMALL):  # in one of a hundred tiles
            more = np.empty(16 * LANES, np.uint32)
            chacha_tile(key, rounds, tile, more, 1)
            for i in range(LANES):
                if a[i] < _U(SMALL):
                    whole = (np.int64(a[i]) << 32) | np.int64(more[g * LANES + i])
                    t[i] = _F(2 * whole + 1) * _F(2.0**-65)
                    if whole < SMALL:
                        whole = (whole << 32) | np.int64(more[(8 + g) * LANES + i])
                        t[i] = _F(2 * whole + 1) * _F(2.0**-97)
        _single_pair(a, b, t, drawn[g * LANES : (g + 1) * LANES], drawn[(8 + g) * LANES : (9 + g) * LANES])


@njit(cache=True, error_model="numpy")
def _continued(key: np.ndarray, rounds: int, tile: int, whole: int, word: int, lane: int) -> float:
    """The uniform variable of 64 bits, with 32 more where they are below 2¹⁶: a word of the block with nonce 1."""
    if whole >= SMALL:
        return np.float64(2 * whole + 1) * 2.0**-65
    more = np.empty(16 * LANES, np.uint32)
    chacha_tile(key, rounds, tile, more, 1)
    return np.float64(2 * ((whole << 32) | np.int64(more[word * LANES + lane])) + 1) * 2.0**-97


@njit(cache=True, error_model="numpy")
def _double_tile(key: np.ndarray, rounds: int, tile: int, x: np.ndarray, drawn: np.ndarray) -> None:
    """Write the normals of a tile in double precision; x is room for its words."""
    chacha_tile(key, rounds, tile, x)
    u = np.empty(LANES, np.float64)
    bits = u.view(np.int64)
    for g in range(4):
        a, b = x[4 * g * LANES : (4 * g + 1) * LANES], x[(4 * g + 1) * LANES : (4 * g + 2) * LANES]
        least = _U(0xFFFFFFFF)
        for i in range(LANES):
            word = (np.int64(a[i]) << 21) | (np.int64(b[i]) >> 11)
            u[i] = (np.float64(word) + 0.5) * 2.0**-53
            least = min(least, a[i])
        if least < _U(SMALL):
            for i in range(LANES):
                if a[i] < _U(SMALL):
                    u[i] = _continued(key, rounds, tile, np.int64(a[i]) << 32 | np.int64(b[i]), g, i)
        _box_muller(
            x[4 * g * LANES : 4 * (g + 1) * LANES], u, bits,
            drawn[g * LANES : (g + 1) * LANES], drawn[(4 + g) * LANES : (5 + g) * LANES],
        )  # fmt: skip


def _draw_tile(key: np.ndarray, rounds: int, tile: int, x: np.ndarray, drawn: np.ndarray) -> None:
    """One of the two functions above, by the type of `drawn`."""
    raise NotImplementedError("only compiled code calls this")


@overload(_draw_tile)
def _choose_tile(key, rounds, tile, x, drawn):  # type: ignore[no-untyped-def]
    draw = _single_tile if drawn.dtype == types.float32 else _double_tile
    return lambda key, rounds, tile, x, drawn: draw(key, rounds, tile, x, drawn)


@njit(cache=True, error_model="numpy")
def normals(key: np.ndarray, rounds: int, starts: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` with runs of normals: `counts[0]` of them from number `starts[0]` on, then those of the next run.

    The key has eight words. Normals have the precision of `out`. Runs that follow each other in one tile share it.
    """
    x = np.empty(16 * LANES, np.uint32)
    drawn = np.empty(TILE * 8 // out.itemsize, out.dtype)
    current = -1
    done = 0
    for run in range(len(starts)):
        place = starts[run]
        stop = place + counts[run]
        while place < stop:
            tile = place // len(drawn)
            skipped = place - tile * len(drawn)
            count = min(len(drawn) - skipped, stop - place)
            if tile != current:
                _draw_tile(key, rounds, tile, x, drawn)
                current = tile
            out[done : done + count] = drawn[skipped : skipped + count]
            place += count
            done += count


@njit(cache=True, error_model="numpy")
def combine(z: np.ndarray, kept: np.ndarray, first: int, step: int, weights: np.ndarray, keep_sum: bool) -> None:
    """Replace the normals z by weights[0]·z + Σⱼ weights[j]·(what was kept j steps ago), for j = 1 ... len(kept).

    Row t mod m of `kept` was written in step t, and z belongs to its columns from `first` on. The oldest row is
    replaced by the sum, or else by the normals.
    """
    m = len(kept)
    total = np.empty(TILE, z.dtype)
    for start in range(0, len(z), TILE):
        here = z[start : start + TILE]
        n = len(here)
        for i in range(n):
            total[i] = weights[0] * here[i]
        for j in range(1, m + 1):
            row = kept[(step - j) % m, first + start : first + start + n]
            weight = weights[j]
            for i in range(n):
                total[i] += weight * row[i]
        if m > 0:
            oldest = kept[step % m, first + start : first + start + n]
            for i in range(n):
                oldest[i] = total[i] if keep_sum else here[i]
        for i in range(n):
            here[i] = total[i]


@njit(cache=True, error_model="numpy")
def add_scaled(total: np.ndarray, z: np.ndarray, scale: float, factor: float, out: np.ndarray) -> None:
    """Write (total + scale·z)·factor, computed in double precision, to `out` in its precision."""
    for i in range(len(z)):
        out[i] = (total[i] + np.float64(z[i]) * scale) * factor


@njit(cache=True, error_model="numpy")
def drain(z: np.ndarray, kept: np.ndarray, first: int, decay: np.ndarray, weights: np.ndarray) -> None:
    """Replace the normals z by y = z − Σᵢ weights[i]·Bᵢ, and every buffer Bᵢ by decay[i]·Bᵢ + y.

    Bᵢ is row i of `kept`, and z belongs to its columns from `first` on.
    """
    for start in range(0, len(z), TILE):
        here = z[start : start + TILE]
        n = len(here)
        for b in range(len(kept)):
            row = kept[b, first + start : first + start + n]
            weight = weights[b]
            for i in range(n):
                here[i] -= weight * row[i]
        for b in range(len(kept)):
            row = kept[b, first + start : first + start + n]
            rate = decay[b]
            for i in range(n):
                row[i] = rate * row[i] + here[i]
