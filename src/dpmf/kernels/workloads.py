"""Row norms of a scheduled workload times a Toeplitz matrix."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, fastmath={"reassoc", "contract"})
def scheduled_rows(noising: np.ndarray, rates: np.ndarray, kept: float, rows: np.ndarray) -> None:
    """Add the squared norms of the rows of L·diag(rates)·D to `rows`, with L[t, u] = kept^(t−u) and D Toeplitz.

    `noising` is the first column of D without trailing zeros. After its last entry an entry of the product only decays,
    so that the work is N times the length of `noising`.
    """
    n = len(rates)
    length = len(noising)
    for s in range(n):
        value = 0.0
        stop = min(n, s + length)
        for t in range(s, stop):
            value = kept * value + rates[t] * noising[t - s]
            rows[t] += value * value
        if stop < n:
            # From here on column s contributes a geometric sequence, which starts at row `stop`.
            rows[n + stop] += (kept * value) ** 2
    decaying = 0.0
    for t in range(n):
        decaying = kept * kept * decaying + rows[n + t]
        rows[t] += decaying


@njit(cache=True, fastmath={"reassoc", "contract"})
def scheduled_gradient(noising: np.ndarray, rates: np.ndarray, kept: float, gradient: np.ndarray) -> float:
    """Return ‖L·diag(rates)·D‖², the sum of all squared row norms, and add its gradient by `noising` to `gradient`."""
    n = len(rates)
    values = np.empty(n)
    total = 0.0
    for s in range(n):
        value = 0.0
        for t in range(s, n):
            value = kept * value + rates[t] * noising[t - s]
            values[t] = value
            total += value * value
        back = 0.0
        for t in range(n - 1, s - 1, -1):
            back = kept * back + 2.0 * values[t]
            gradient[t - s] += back * rates[t]
    return total
