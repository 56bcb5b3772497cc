"""The noise of a step on a GPU, by one Triton kernel: normals are drawn in registers and correlated in place.

The words of ChaCha and the transform are those of single precision in `noise`, which says which words make which
normal. Fused multiply-adds are asked for by name and the compiler may make no others, so that a kind of device always
gives the same bits. They may differ from a CPU's in the last places, because sums are added up in another order.

With back-substitution a launch computes the rows of `ahead` steps at once and keeps them: what is kept of the past is
then read once for all of them, and the steps in between only add a row that is there already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dpmf.kernels import noise

LANES, SMALL = tl.constexpr(noise.LANES), tl.constexpr(noise.SMALL)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in noise.LOGARITHM)
_S0, _S1, _S2 = (tl.constexpr(c) for c in noise.SINE)
_C0, _C1, _C2 = (tl.constexpr(c) for c in noise.COSINE)
_LOG_2_HIGH, _LOG_2_LOW = (tl.constexpr(c) for c in noise.LOG_2)
_ANGLE = tl.constexpr(0.78539816339744830961 * 2.0**-29)
_ROOT_HALF = tl.constexpr(0x3F3504F3)  # the bits of √½
_TO_ONE = tl.constexpr(0x3F800000 - 0x3F3504F3)

WIDTH = 128  # blocks of ChaCha that one program computes, a thread for each
MAX_AHEAD = 4  # steps of one launch; the words of all of them stay in registers


@triton.jit
def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]
    """A quarter round of ChaCha."""
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _block(key, low, high, nonce: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 words of the blocks whose numbers have these lower and upper halves."""
    zero = low ^ low
    k0 = zero + tl.load(key).to(tl.uint32, bitcast=True)
    k1 = zero + tl.load(key + 1).to(tl.uint32, bitcast=True)
    k2 = zero + tl.load(key + 2).to(tl.uint32, bitcast=True)
    k3 = zero + tl.load(key + 3).to(tl.uint32, bitcast=True)
    k4 = zero + tl.load(key + 4).to(tl.uint32, bitcast=True)
    k5 = zero + tl.load(key + 5).to(tl.uint32, bitcast=True)
    k6 = zero + tl.load(key + 6).to(tl.uint32, bitcast=True)
    k7 = zero + tl.load(key + 7).to(tl.uint32, bitcast=True)
    a, b, c, d = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    e, f, g, h, i, j, k, m = k0, k1, k2, k3, k4, k5, k6, k7
    n, o, p, q = low, high, zero + nonce, zero
    for _ in tl.static_range(ROUNDS // 2):
        a, e, i, n = _quarter(a, e, i, n)
        b, f, j, o = _quarter(b, f, j, o)
        c, g, k, p = _quarter(c, g, k, p)
        d, h, m, q = _quarter(d, h, m, q)
        a, f, k, q = _quarter(a, f, k, q)
        b, g, m, n = _quarter(b, g, m, n)
        c, h, i, o = _quarter(c, h, i, o)
        d, e, j, p = _quarter(d, e, j, p)
    a, b, c, d = a + 0x61707865, b + 0x3320646E, c + 0x79622D32, d + 0x6B206574
    e, f, g, h, i, j, k, m = e + k0, f + k1, g + k2, h + k3, i + k4, j + k5, k + k6, m + k7
    return a, b, c, d, e, f, g, h, i, j, k, m, n + low, o + high, p + nonce, q


@triton.jit
def _lesser(a):  # type: ignore[no-untyped-def]
    """The lesser of u and 1 − u, for the uniform variable u of a word."""
    below = tl.where((a >> 31) == 0, a, a ^ 0xFFFFFFFF) & 0x7FFFFFFF
    return (below.to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2⁻³²


@triton.jit
def _pair(a, b, t):  # type: ignore[no-untyped-def]
    """Two normals from two words, where t is the lesser of u and 1 − u."""
    shifted = t.to(tl.int32, bitcast=True) + _TO_ONE
    exponent = ((shifted >> 23) - 127).to(tl.float32)
    fraction = ((shifted & 0x007FFFFF) + _ROOT_HALF).to(tl.float32, bitcast=True) - 1.0
    near = t < 0.29289322
    above = (a >> 31) != 0
    k = tl.where(above, tl.where(near, 0.0, -1.0), exponent)
    f = tl.where(above, tl.where(near, -t, 1.0 - 2.0 * t), fraction)
    y = tl.fma(tl.fma(tl.fma(f * 0.0 + _L0, f, _L1), f, _L2), f, _L3)
    y = tl.fma(tl.fma(tl.fma(tl.fma(tl.fma(y, f, _L4), f, _L5), f, _L6), f, _L7), f, _L8)
    z = f * f
    y = tl.fma(z, -0.5, tl.fma(k, _LOG_2_LOW, y * f * z))
    radius = tl.sqrt_rn(-2.0 * tl.fma(k, _LOG_2_HIGH, f + y))
    angle = (((b & 0x3FFFFFFF).to(tl.int32) - 536870912).to(tl.float32) + 0.5) * _ANGLE
    z = angle * angle
    sine = tl.fma(tl.fma(tl.fma(z, _S0, _S1), z, _S2), z * angle, angle)
    cosine = tl.fma(tl.fma(tl.fma(z, _C0, _C1), z, _C2), z * z, tl.fma(z, -0.5, 1.0))
    radius = tl.where((b >> 31) == 0, radius, -radius)
    turned = ((b >> 30) & 1) != 0
    return radius * tl.where(turned, -sine, cosine), radius * tl.where(turned, cosine, sine)


@triton.jit
def _columns(x0, x1, x2, x3, x4, x5, x6, x7, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight vectors as the columns of a matrix, of which a thread has a row."""
    even, odd = tl.join(tl.join(x0, x4), tl.join(x2, x6)), tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (ROWS, 8))


@triton.jit
def _normals(key, low, high, ROUNDS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 normals of every block: those of the cosines, and those of the sines, eight columns each."""
    w = _block(key, low, high, 0, ROUNDS)
    a = _columns(w[0], w[2], w[4], w[6], w[8], w[10], w[12], w[14], ROWS)
    b = _columns(w[1], w[3], w[5], w[7], w[9], w[11], w[13], w[15], ROWS)
    t = _lesser(a)
    if tl.min(tl.min((a >> 1).to(tl.int32), axis=1), axis=0) < SMALL // 2:  # in one of sixty programs
        m = _block(key, low, high, 1, ROUNDS)
        more = _columns(m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], ROWS)
        whole = (a.to(tl.int64) << 32) | more.to(tl.int64)
        longer = (2 * whole + 1).to(tl.float32) * 2.710505431213761e-20  # 2⁻⁶⁵
        last = _columns(m[8], m[9], m[10], m[11], m[12], m[13], m[14], m[15], ROWS)
        deep = (whole << 32) | last.to(tl.int64)
        longer = tl.where(whole < SMALL, (2 * deep + 1).to(tl.float32) * 6.310887241768095e-30, longer)  # 2⁻⁹⁷
        t = tl.where(a < SMALL, longer, t)
    return _pair(a, b, t)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    target, kept, place, valid, z0, z1, z2, z3, weights, factor, slot, size,
    METHOD: tl.constexpr, COPIES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Correlate the normals of some elements, keep what the next steps need, and add the row of this step.

    Row i of `weights` has the factors of step i of this launch: that of its normal, then those of what was kept 1, 2,
    ... steps before, then AHEAD − 1 zeros, so that the loop over what was kept needs no conditions. For buffers row 0
    has their decay and row 1 their weight.
    """
    STRIDE: tl.constexpr = COPIES + AHEAD
    if METHOD == "buffers":
        y0 = z0
        for i in tl.static_range(COPIES):
            row = tl.load(kept + i * size + place, mask=valid, other=0.0)
            y0 = tl.fma(row, -tl.load(weights + COPIES + i), y0)
        for i in tl.static_range(COPIES):
            row = tl.load(kept + i * size + place, mask=valid, other=0.0)
            tl.store(kept + i * size + place, tl.fma(row, tl.load(weights + i), y0), mask=valid)
    else:
        a0, a1, a2, a3 = z0 * 0.0, z0 * 0.0, z0 * 0.0, z0 * 0.0
        # Unrolled completely, many copies would take minutes to compile and run more slowly.
        for j in tl.range(1, COPIES + 1, loop_unroll_factor=2 if COPIES < 8 else 8):
            at = tl.where(slot >= j, slot - j, slot - j + COPIES).to(tl.int64)
            row = tl.load(kept + at * size + place, mask=valid, other=0.0)
            a0 = tl.fma(row, tl.load(weights + j), a0)
            if AHEAD > 1:
                a1 = tl.fma(row, tl.load(weights + STRIDE + j + 1), a1)
            if AHEAD > 2:
                a2 = tl.fma(row, tl.load(weights + 2 * STRIDE + j + 2), a2)
            if AHEAD > 3:
                a3 = tl.fma(row, tl.load(weights + 3 * STRIDE + j + 3), a3)
        y0 = tl.fma(z0, tl.load(weights), a0)
        if COPIES > 0:
            tl.store(kept + slot.to(tl.int64) * size + place, y0 if METHOD == "back-substitution" else z0, mask=valid)
        if AHEAD > 1:
            w1 = weights + STRIDE
            y1 = tl.fma(z1, tl.load(w1), tl.fma(y0, tl.load(w1 + 1), a1))
            tl.store(kept + ((slot + 1) % COPIES).to(tl.int64) * size + place, y1, mask=valid)
        if AHEAD > 2:
            w2 = weights + 2 * STRIDE
            y2 = tl.fma(z2, tl.load(w2), tl.fma(y0, tl.load(w2 + 2), tl.fma(y1, tl.load(w2 + 1), a2)))
            tl.store(kept + ((slot + 2) % COPIES).to(tl.int64) * size + place, y2, mask=valid)
        if AHEAD > 3:
            w3 = weights + 3 * STRIDE
            y3 = tl.fma(y0, tl.load(w3 + 3), tl.fma(y1, tl.load(w3 + 2), tl.fma(y2, tl.load(w3 + 1), a3)))
            tl.store(kept + ((slot + 3) % COPIES).to(tl.int64) * size + place, tl.fma(z3, tl.load(w3), y3), mask=valid)
    old = tl.load(target + place, mask=valid, other=0.0)
    tl.store(target + place, tl.fma(y0, factor, old), mask=valid)


@triton.jit(do_not_specialize=["factor", "slot", "size", "tiles"])
def add_noise(  # type: ignore[no-untyped-def]
    target, kept, starts, counts, before, keys, weights, factor, slot, size, tiles,
    METHOD: tl.constexpr, COPIES: tl.constexpr, AHEAD: tl.constexpr, ROUNDS: tl.constexpr, PROGRAM: tl.constexpr,
):  # fmt: skip
    """Add `factor` times a row of noise to the elements of `target`, and keep what later rows need.

    Args:
      target: the elements of this process, in float32.
      kept: COPIES rows of `size` elements; step t has row t mod COPIES, which is `slot` for the first step here.
      starts, counts, before: for every run of elements that this process has, its first element in the whole array, its
        length, and the number of elements in earlier runs.
      keys: eight words for every step of this launch.
      weights: as `_update` takes them.
      tiles: programs for each run; there are as many programs as runs times this.
    """
    run = tl.program_id(0) // tiles
    start, count, at = tl.load(starts + run), tl.load(counts + run), tl.load(before + run)
    lane = tl.arange(0, PROGRAM)
    number = (tl.program_id(0) % tiles) * (PROGRAM // LANES) + lane // LANES
    tile = start // (16 * LANES) + number
    block = tile * LANES + lane % LANES
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    x0, y0 = _normals(keys, low, high, ROUNDS, PROGRAM)
    x1, y1, x2, y2, x3, y3 = x0, y0, x0, y0, x0, y0
    if AHEAD > 1:
        x1, y1 = _normals(keys + 8, low, high, ROUNDS, PROGRAM)
    if AHEAD > 2:
        x2, y2 = _normals(keys + 16, low, high, ROUNDS, PROGRAM)
    if AHEAD > 3:
        x3, y3 = _normals(keys + 24, low, high, ROUNDS, PROGRAM)
    first = (tile * (16 * LANES) + lane % LANES - start)[:, None] + tl.arange(0, 8)[None, :] * LANES
    second = first + 8 * LANES
    _update(
        target, kept, at + first, (first >= 0) & (first < count), x0, x1, x2, x3, weights, factor, slot, size,
        METHOD, COPIES, AHEAD,
    )  # fmt: skip
    _update(
        target, kept, at + second, (second >= 0) & (second < count), y0, y1, y2, y3, weights, factor, slot, size,
        METHOD, COPIES, AHEAD,
    )  # fmt: skip
