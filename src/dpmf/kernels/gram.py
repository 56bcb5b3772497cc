"""Gram matrices of Toeplitz strategies by lag products."""

from __future__ import annotations

import numpy as np
from numba import njit


# Only the order of summation is left to the compiler: the error bound of a sum does not depend on it.
@njit(cache=True, fastmath={"reassoc", "contract"})
def toeplitz_gram(folded: np.ndarray, b: int) -> np.ndarray:
    """G[i, i+d] = Σ_{s < N−i−d} folded[s]·folded[s+d], for all i, d ≥ 0 with i + d < b.

    `folded` is the first mixture mean; mean i is the same sequence moved down by i and cut off at N, so that entries on
    one diagonal are partial sums of one sequence of products. O(bN) time, O(b²) memory.
    """
    n = len(folded)
    gram = np.empty((b, b))
    for d in range(b):
        total = 0.0
        done = 0
        for j in range(b - 1, d - 1, -1):
            # Each extension is summed apart first: long sums then lose less to rounding.
            part = 0.0
            stop = n - j
            for s in range(done, stop):
                part += folded[s] * folded[s + d]
            total += part
            done = stop
            gram[j - d, j] = total
            gram[j, j - d] = total
    return gram
