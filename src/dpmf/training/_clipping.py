"""By what the gradient of a record is multiplied, so that its norm is at most the clipping norm in the numbers used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_BLOCK = 256  # elements whose squares are added in the precision of the gradients; blocks are added in float64
_LESS = 2.0**-16  # taken off the factors: twice what rounding can make of a norm
_UNDERFLOW = 2.0**-126  # by so much the square of a number may be too small; factors below it are not rounded well


def clip_factors(samples: Sequence[Any], clip: float) -> Any:
    """The factor of every record, in float64.

    Args:
      samples: for every parameter the gradients of all records, in float32 or float64.
      clip: the clipping norm.

    **Formal guarantees.** A record's factor, rounded to the precision of its gradients, times the record's exact
    gradient has a norm of at most `clip`. In float32, with u = 2⁻²⁴, 256 squares are added in whatever order with a
    relative error below 258u, and the root halves that: blocks are too small by less than 130u = 8·10⁻⁶. Squares that
    underflow are too small by less than 2⁻¹²⁶ each, which is added. The rest is computed in float64, and the factor is
    rounded once more, by u. All of that is less than the 2⁻¹⁶ that are taken off (docs/theory/floating-point.md,
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
