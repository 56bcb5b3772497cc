"""The inner loop of exact sums: products truncated to integers, added up in single precision a few at a time."""

from __future__ import annotations

import numpy as np
from numba import njit

_BLOCK = 4096  # elements that stay in the processor's nearest memory


@njit(cache=True, error_model="numpy")
def add_truncated(rows: np.ndarray, factors: np.ndarray, exact: int, total: np.ndarray) -> None:
    """Add the rows of a matrix times their factors to `total`, every product truncated towards zero.

    Rows and factors are float32, `total` is float64. Products are below 2³¹, and so small that `exact` integers of
    their size add up in single precision without rounding.
    """
    part = np.empty(_BLOCK, np.float32)
    for first in range(0, rows.shape[1], _BLOCK):
        here = total[first : first + _BLOCK]
        size = len(here)
        for start in range(0, len(rows), exact):
            part[:] = np.float32(0)
            for r in range(start, min(start + exact, len(rows))):
                row, factor = rows[r, first : first + size], factors[r]
                for i in range(size):
                    part[i] += np.float32(np.int32(row[i] * factor))
            for i in range(size):
                here[i] += part[i]
