"""Gram matrices of Toeplitz strategies by lag products."""

from __future__ import annotations

import numpy as np
from numba import njit


# Only the order of summation is left to the compiler: the error bound of a sum does not depend on it.
@njit(cache=True, fastmath={"reassoc", "contract"})
def toeplitz_gram(folded: np.ndarray, first: int, last: int, gram: np.ndarray) -> None:
    """G[i, i+d] = Σ_{s < N−i−d} folded[s]·folded[s+d], for all i ≥ 0 and first ≤ d < last with i + d < b.

    `folded` is the first mixture mean; mean i is the same sequence moved down by i and cut off at N, so that entries on
    one diagonal are partial sums of one sequence of products. O(bN) time for all d.
    """
    n = len(folded)
    b = len(gram)
    for d in range(first, last):
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
