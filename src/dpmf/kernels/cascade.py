"""Inner loop of the cascade accountant: sums of independent variables on a geometric grid."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def add_on_geometric_grid(
    left: np.ndarray, right: np.ndarray, ahead: int, steps: np.ndarray, shares: np.ndarray, out: np.ndarray
) -> None:
    """Add to `out` the law of X + Y: X at node i with weight left[i], Y at node j + ahead with weight right[j].

    The sum of two nodes k apart lies between the nodes steps[k] and steps[k] + 1 above the larger of them, and gets
    the share shares[k] of the upper one. out[0] belongs to node max(0, ahead).
    """
    n, m, first = left.shape[0], right.shape[0], max(0, ahead)
    for apart in range(ahead - (n - 1), ahead + m):  # node of Y less node of X
        step, share = steps[abs(apart)], shares[abs(apart)]
        begin, end = max(0, ahead - apart), min(n, m + ahead - apart)
        mine, theirs = left[begin:end], right[begin + apart - ahead : end + apart - ahead]
        place = begin + step - first + max(apart, 0)
        # One loop that adds to both neighbours would not be vectorised, and takes four times as long.
        lower, upper = out[place : place + end - begin], out[place + 1 : place + 1 + end - begin]
        for i in range(end - begin):
            lower[i] += mine[i] * theirs[i] * (1.0 - share)
        for i in range(end - begin):
            upper[i] += mine[i] * theirs[i] * share
