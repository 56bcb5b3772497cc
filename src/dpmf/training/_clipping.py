"""Clip the gradients of records and add them up: no record's contribution is longer than the clip, and sums are exact.

A clipped gradient is truncated towards zero to multiples of a grid, the integers below. Sums of a few of them are exact
in float32, and sums of those in float64, so that they have the same bits in any order and for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dpmf.kernels import sums as kernels
from dpmf.run import Run

_BLOCK = 256  # elements whose squares are added in the precision of the gradients; blocks are added in float64
_LESS = 2.0**-16  # taken off the factors: twice what rounding can make of a norm
_UNDERFLOW = 2.0**-126  # by so much the square of a number may be too small; factors below it are not rounded well
_BITS = 20  # of a clipped gradient in units of the grid, unless there are very many records
_SINGLE, _DOUBLE = 24, 53  # bits up to which integers are exact
_CHANGE = 0.01  # of the noise, which the grid may change at most


def clip_factors(samples: Sequence[Any], clip: float) -> Any:
    """The factor of every record, in float64.

    Args:
      samples: for every parameter the gradients of all records, in float32 or float64.
      clip: the clipping norm.

    **Formal guarantees.** A record's factor, rounded to the precision of its gradients, times the record's gradient,
    rounded once more, has a norm of at most `clip`. In float32, with u = 2⁻²⁴, 256 squares are added in whatever order
    with a relative error below 258u, and the root halves that: blocks are too small by less than 130u = 8·10⁻⁶. Squares
    that underflow are too small by less than 2⁻¹²⁶ each, which is added. The rest is computed in float64, and factor
    and product are rounded by u. All of that is less than the 2⁻¹⁶ that are taken off (docs/theory/floating-point.md,
    "Clipping"). Where a gradient has an element or a square that is not a finite number, or where the factor would be
    below 2⁻¹²⁶, it is 0.
    """
    squares = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        flat = sample.reshape(len(sample), math.prod(sample.shape[1:]))
        whole = flat.shape[1] // _BLOCK * _BLOCK
        for blocks in (flat[:, :whole].unflatten(1, (-1, _BLOCK)), flat[:, None, whole:]):
            norms = torch.linalg.vector_norm(blocks, dim=2).double()
            squares = squares.to(norms.device) + norms.square().sum(dim=1)
        squares = squares + _UNDERFLOW * flat.shape[1]
    factors = (clip * (1 - _LESS) / squares.sqrt()).clamp(max=1.0)
    return torch.where(squares.isfinite() & (factors >= _UNDERFLOW), factors, 0.0)


class ExactSum:
    """The sum of clipped gradients of one batch, in units of a grid.

    Attributes:
      grid: what one unit is, a power of two.
      totals: for every parameter its sum in units, flat and in float64.
      lost: whether the gradient of a record was not finite, and counted as zero.

    **Formal guarantees.** Every unit of privacy contributes an integer vector, whose length times `grid` is at most the
    clipping norm: the product of `clip_factors` has that, and to truncate towards zero makes no element larger.
    Elements are at most 2^bits, so that 2^(24 − bits) of them add up in float32 without rounding, in any order; those
    sums add up in float64 without rounding, up to 2^(53 − bits) records. No product of matrices is used, so that
    settings which reduce the precision of those have no effect, and autocast is switched off. The grid depends on
    public numbers only: an element of a sum changes by less than a grid's width for each record, at most 1 % of the
    standard deviation of the noise in it for batches of the expected size.
    """

    def __init__(self, run: Run, parameters: Sequence[Any]):
        self._clip = run.clip_norm
        expected = run.max_batch_size or run.divisor or 1.0
        needed = math.ceil(math.log2(max(2 * expected / (_CHANGE * run.noise_multiplier), 1.0)))
        self._bits = min(max(_BITS, needed), 40)
        mantissa, exponent = math.frexp(self._clip)
        self.grid = math.ldexp(1.0, exponent - (mantissa == 0.5) - self._bits)
        self.totals = [torch.zeros(p.numel(), dtype=torch.float64, device=p.device) for p in parameters]
        self.lost = False

    def restart(self) -> ExactSum:
        """Begin another sum in the same memory."""
        for total in self.totals:
            total.zero_()
        self.lost = False
        return self

    def add(self, samples: Sequence[Any]) -> None:
        """Clip and add the gradients of some records (or users), in any precision."""
        with torch.no_grad(), torch.autocast(samples[0].device.type, enabled=False):
            wide = [s.to(torch.promote_types(s.dtype, torch.float32)) for s in samples]
            factors = clip_factors(wide, self._clip)
            lost = factors == 0
            some = bool(lost.any())
            self.lost |= some
            for total, sample in zip(self.totals, wide, strict=True):
                flat = sample.reshape(len(sample), -1) if len(sample) else sample.new_zeros((0, len(total)))
                if some:  # 0 · NaN is NaN
                    flat = flat.masked_fill(lost.to(flat.device)[:, None], 0.0)
                self._add(total, flat, (factors / self.grid).to(flat.device))

    def _add(self, total: Any, flat: Any, factors: Any) -> None:
        """Add the rows of a matrix, times their factors, truncated."""
        if flat.dtype == torch.float32 and self._bits > _SINGLE:
            flat = flat.double()
        exact = 1 << max((_SINGLE if flat.dtype == torch.float32 else _DOUBLE - 12) - self._bits, 0)
        factors = factors.to(flat.dtype)
        if flat.dtype == torch.float32 and flat.device.type == "cpu":
            kernels.add_truncated(flat.detach().contiguous().numpy(), factors.numpy(), exact, total.numpy())
            return
        units = flat * factors[:, None]
        units -= units.frac()
        even = len(units) // exact * exact
        if even:
            total += units[:even].unflatten(0, (-1, exact)).sum(dim=1).double().sum(dim=0)
        total += units[even:].sum(dim=0)
