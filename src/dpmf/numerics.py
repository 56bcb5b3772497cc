"""Double precision, in one place: the array type, the unit round-off, and the floor that stands for underflow.

Assumptions about the machine are listed once, in docs/theory/floating-point.md: IEEE double precision with rounding to
nearest, and the accuracy of the functions of libm, scipy.special and the FFT that the accountants rely on.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

UNIT = 2.0**-53
"""The unit round-off u: a single operation has a relative error of at most u."""

FLOOR = 1e-250
"""Added to upper bounds and subtracted from lower ones: larger than everything that can underflow in one bound."""


def fft_error(length: int) -> float:
    """The relative error, in the 2-norm, of a Fourier transform: the one assumption that is made about FFTs.

    See docs/theory/floating-point.md, section 1.
    """
    return 8 * UNIT * math.log2(max(length, 2))


def sum_of_squares(values: Array) -> float:
    """Return Σ v², without an array of the squares and without the threads that a BLAS would start."""
    return float(np.einsum("i,i->", values, values))
