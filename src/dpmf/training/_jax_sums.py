"""Clip the gradients of records and add them up in JAX: no contribution is longer than the clip, and sums are exact.

A clipped gradient is truncated towards zero to multiples of a grid. Integers are added in two words, so that sums have
the same bits in any order and on any number of devices. The noise is rounded to the same grid: that is to round the sum
of both, so that what is computed from it afterwards, in whatever precision, is a function of the mechanism's output.
No product of matrices is used here, so that JAX's settings of their precision have no effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dpmf import validation
from dpmf.errors import ArgumentError
from dpmf.run import Run

_BLOCK = 1024  # elements whose squares are added in single precision
_LESS = 2.0**-14  # taken off the factors: twice what rounding can make of a norm
_UNDERFLOW = 2.0**-126  # by so much the square of a number may be too small
_BITS, _MOST_BITS = 20, 26  # of a clipped gradient in units of the grid
_CHANGE = 0.01  # of the noise, which the grid may change at most
_WORD = 13  # bits in the lower word
_MOST_ROWS, _MOST_BLOCKS, _MOST_NOISE = 2**17, 2**18, 2.0**16  # for which sums fit into the words


@dataclass(frozen=True)
class Grid:
    """What sums are multiples of: `unit`, a power of two.

    Attributes:
      clip: the clipping norm in units of a power of two, more than 1/2 and at most 1.
      power: that power of two.
      bits: it is 2^bits units.

    **Formal guarantees.** The grid depends on public numbers only. An element of a sum changes by less than a unit for
    each record, at most 1 % of the standard deviation of the noise in it.
    """

    clip: float
    power: float
    bits: int

    @classmethod
    def of(cls, run: Run) -> Grid:
        """The grid of a run; an error where integers of two words are not fine enough, or not large enough."""
        rows, clip = run.max_batch_size or 1, run.clip_norm
        if not 2.0**-60 <= clip <= 2.0**60:
            raise validation.wrong("clip_norm", "between 1e-18 and 1e18", clip)
        if rows > _MOST_ROWS:
            raise validation.wrong("max_batch_size", f"at most {_MOST_ROWS} in JAX, where sums are exact", rows)
        change = 2 * rows / (_CHANGE * run.noise_multiplier)
        if change > 2.0**_MOST_BITS or run.noise_multiplier > _MOST_NOISE:
            least = 2 * rows / (_CHANGE * 2.0**_MOST_BITS)
            raise validation.wrong(
                "noise_multiplier",
                f"between {least:.2g} and {_MOST_NOISE:g} for batches of {rows} rows",
                run.noise_multiplier,
            )
        mantissa, exponent = math.frexp(clip)
        exponent -= mantissa == 0.5
        needed = max(_BITS, math.ceil(math.log2(change)))
        return cls(clip / 2.0**exponent, 2.0**exponent, needed)

    @property
    def unit(self) -> float:
        """What sums are multiples of."""
        return self.power / 2.0**self.bits


def parts(rows: int) -> int:
    """Into how many parts the rows of a batch are split, to clip one after the other."""
    return 1 << min(max(rows.bit_length() - 4, 1), 4)


def exact_sums(gradients: Any, real: Any, grid: Grid) -> Any:
    """The sum of clipped gradients, as integers of two words: the higher and the lower one of every element.

    Args:
      gradients: a tree of the gradients of all rows of a batch, whose number is a multiple of `parts`.
      real: which rows count.
      grid: what the sums are multiples of.

    **Formal guarantees.** Every row that counts contributes an integer vector whose length, times `grid.unit`, is at
    most the clipping norm: the product of `_factors` has that, and to truncate towards zero makes no element larger.
    Norms and products are of the same numbers, although XLA may compute a number once for each use, and otherwise
    rounded: a loop that cannot be unrolled, because data decide how often it runs, takes gradients from memory.
    Elements are at most 2²⁶, in words of less than 2¹³, and in absolute value at most 2¹³, so that sums of 2¹⁷ of them
    do not overflow.
    """
    import jax
    import jax.numpy as jnp

    # Row r·parts + j is at place (r, j): each part takes some of every device's rows.
    mask = real.reshape(-1, parts(len(real)))
    values = jax.tree.map(lambda g: g.astype(jnp.float32).reshape(*mask.shape, *g.shape[1:]), gradients)
    begun = jax.tree.map(lambda g: (jnp.zeros_like(g[:, 0], dtype=jnp.int32),) * 2, values)

    def part(j: Any, sums: Any) -> Any:
        some = jax.tree.map(lambda g: jax.lax.dynamic_index_in_dim(g, j, 1, keepdims=False), values)
        factors = jnp.where(mask[:, j], _factors(jax.tree.leaves(some), grid), 0)

        def add(g: Any, words: Any) -> Any:
            each = factors.reshape(-1, *(1,) * (g.ndim - 1))
            whole = jnp.where(each > 0, jnp.trunc(g * each), 0).astype(jnp.int32)  # 0 · NaN is NaN
            return tuple(map(jnp.add, words, _words(whole)))

        return jax.tree.map(add, some, sums)

    last = jnp.max(jnp.where(mask.any(0), jnp.arange(1, mask.shape[1] + 1), 0))
    sums = jax.lax.fori_loop(0, last, part, begun)
    return jax.tree.map(lambda _, words: jnp.stack([word.sum(0, dtype=jnp.int32) for word in words]), gradients, sums)


def _words(whole: Any) -> tuple[Any, Any]:
    return whole >> _WORD, whole & (2**_WORD - 1)


def _factors(gradients: list[Any], grid: Grid) -> Any:
    """By what the gradient of every row is multiplied, to be clipped and in units of the grid.

    **Formal guarantees.** With u = 2⁻²⁴: 1,024 squares are added, in whatever order, with a relative error below
    1,026u, and 2⁻¹¹⁶ is added for squares that underflow. Blocks are rounded up to multiples of 2⁻²³ times the power of
    two below the largest one and added as integers, without error. The root halves the error, and 2⁻¹⁴ is more than
    that, what the root and the quotient may add (2⁻²⁰), and the rounding of the product. Where a block is not a finite
    number below 2¹²⁰, the factor is 0.
    """
    import jax
    import jax.numpy as jnp

    blocks = []
    for gradient in gradients:
        flat = gradient.reshape(len(gradient), math.prod(gradient.shape[1:])) * jnp.float32(1 / grid.power)
        count = flat.shape[1] // _BLOCK
        whole = count * _BLOCK
        for part in (flat[:, :whole].reshape(len(flat), count, _BLOCK), flat[:, None, whole:]):
            blocks.append(jnp.square(part).sum(2) + jnp.float32(_BLOCK * _UNDERFLOW))
    sums = jnp.concatenate(blocks, axis=1)
    if sums.shape[1] > _MOST_BLOCKS:
        raise ArgumentError("parameters", f"must have at most {_MOST_BLOCKS * _BLOCK} elements, got more")
    fine = (jnp.isfinite(sums) & (sums < 2.0**120)).all(1)
    exponent = jax.lax.bitcast_convert_type(jnp.where(fine, sums.max(1), 1.0), jnp.int32) >> 23  # biased by 127
    power, inverse = (jax.lax.bitcast_convert_type(e << 23, jnp.float32) for e in (exponent, 254 - exponent))
    units = jnp.floor(jnp.where(fine[:, None], sums, 0) * inverse[:, None] * 2.0**23).astype(jnp.int32) + 1
    high, low = (word.sum(1, dtype=jnp.int32).astype(jnp.float32) for word in _words(units))
    norms = jnp.sqrt((high * 2.0 ** (_WORD - 23) + low * 2.0**-23) * power)
    factors = jnp.minimum(jnp.float32(grid.clip * (1 - _LESS)) / norms, 1.0)
    return jnp.where(fine, factors * jnp.float32(1 / grid.unit), 0.0)


def with_noise(sums: Any, noise: Any, grid: Grid, divisor: float) -> Any:
    """Sums with their noise, divided by a public number, in the precision of the noise.

    Args:
      sums: an array that `exact_sums` returned.
      noise: that of its elements, in units of the grid.
      grid: what sums are multiples of.
      divisor: the public number.

    **Formal guarantees.** The noise is rounded to an integer and added without error. What is returned is a function of
    that sum; it is NaN where the noise is 2⁴² units or more.
    """
    import jax.numpy as jnp

    whole = jnp.round(noise)
    high = jnp.floor(whole * 2.0**-_WORD)
    low = whole - high * 2.0**_WORD
    fits = jnp.abs(high) < 2.0**29
    lower = sums[1] + low.astype(jnp.int32)
    higher = sums[0] + jnp.where(fits, high, 0).astype(jnp.int32) + (lower >> _WORD)
    value = higher.astype(noise.dtype) * 2.0**_WORD + (lower & (2**_WORD - 1)).astype(noise.dtype)
    return jnp.where(fits, value * (grid.unit / divisor), jnp.nan)
