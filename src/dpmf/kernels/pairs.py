"""The inner loop of tests that add up what neighbouring statistics say together (`lower_bounds._windows`)."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def law_of_sum(laws: np.ndarray, scores: np.ndarray, top: int) -> np.ndarray:
    """The law of Σ_B scores[B, c_B, c_{B+1}], cut at `top`, for independent c_B; averaged over components.

    laws: component × B × cell, the probabilities of the cells; scores: B × cell × cell, integers of at least 0.
    All terms of all sums are non-negative.
    """
    components, places, cells = laws.shape
    found: np.ndarray = np.zeros(top + 1)
    now, then = np.zeros((cells, top + 1)), np.zeros((cells, top + 1))
    tail = np.zeros(top + 1)
    for i in range(components):
        for c in range(cells):
            for t in range(top + 1):
                now[c, t] = 0.0
            now[c, 0] = laws[i, 0, c]
        reach = 0  # the largest sum below `top` so far
        for place in range(places - 1):
            for c in range(cells):
                for t in range(top + 1):
                    then[c, t] = 0.0
            longest = 0
            for c in range(cells):
                tail[top] = now[c, top]
                for t in range(top - 1, -1, -1):
                    tail[t] = tail[t + 1] + now[c, t]
                if tail[0] == 0.0:
                    continue
                for d in range(cells):
                    shift = min(scores[place, c, d], top)
                    end = min(reach + 1, top - shift)
                    row, source = then[d], now[c]
                    for t in range(end):
                        row[t + shift] += source[t]
                    row[top] += tail[top - shift]
                    longest = max(longest, end - 1 + shift)
            for d in range(cells):
                weight = laws[i, place + 1, d]
                for t in range(top + 1):
                    then[d, t] *= weight
            reach = min(longest, top - 1)
            now, then = then, now
        for c in range(cells):
            for t in range(top + 1):
                found[t] += now[c, t]
    for t in range(top + 1):
        found[t] /= components
    return found
