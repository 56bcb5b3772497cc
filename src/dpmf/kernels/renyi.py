"""Moments E[A^m] of the likelihood ratio for cyclically banded Gram matrices.

With counts r_1..r_b the moment is b^−m Σ m!/(Πr_i!) exp(Σ_i S_ii r_i(r_i−1)/2 + Σ_{i<j} S_ij r_i r_j), S = G/σ².
The sum runs over one index after the other; the state is the counts of the last p − 1 indices and the total before.

Arithmetic is linear, not logarithmic, in a scale where nothing overflows: a state of total m carries the factor
e^(−g·m(m−1)/2)·z^m with g = max S, so that every pairwise factor is at most 1. What would underflow is raised to a tiny
positive number instead, which can only increase the result.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Sums that underflow are raised to the first, weighted states to the second. Both are far below all that matters in the
# scale above, and far enough above 2⁻¹⁰²² for what is summed to be accurate (floating-point.md, "Rényi moments").
LEAST_SUM = 1e-280
LEAST_STATE = 1e-290


@njit(cache=True)
def log_convolve(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out[m] = log Σ_t exp(left[t] + right[m−t]), and the largest exponent in each sum."""
    n = len(left)
    out, most = np.empty(n), np.empty(n)
    for m in range(n):
        largest = -np.inf
        for t in range(m + 1):
            largest = max(largest, left[t] + right[m - t])
        total = 0.0
        for t in range(m + 1):
            total += np.exp(left[t] + right[m - t] - largest)
        out[m], most[m] = largest + np.log(total), largest
    return out, most


@njit(cache=True, nogil=True)
def chain(
    band: np.ndarray,
    field: np.ndarray,
    first: int,
    most: int,
    g: float,
    z: float,
    decay: np.ndarray,
    states: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Scaled sums over the counts of indices first..b−1, by total 0..most.

    `states` describes the states (`accountants/renyi/_moments.py` makes it). A state is (middle, s, oldest): `oldest`
    is the count p − 1 indices back, `middle` the p − 2 counts since, s the total of all other indices, `oldest`
    included. It lies at base[middle] + s(s+1)/2 + oldest. `field[k]` is an energy per unit count at index k, from
    indices outside the chain; decay[k, d, t] = e^(−(g − S[k, k−d])·t). The non-zero
    counts of a middle are amount[e] at distance[e], entry[middle] ≤ e < entry[middle + 1], second[middle] its oldest.
    """
    middle_sum, second, entry, distance, amount, base, following, binomial = states
    b, p = band.shape
    size = base[-1]
    old = np.zeros(size)
    new = np.zeros(size)
    old[0] = 1.0
    count = len(middle_sum)
    far = np.empty(most + 1)  # e^(−g·t·j): pairs that do not interact, relative to the scale
    power = np.empty((p, most + 1))  # power[d, j]: the new count t with a count j at distance d
    for k in range(first, b):
        for t in range(most + 1):
            rest = most - t
            weight = np.exp(-(g - band[k, 0]) * (0.5 * t * (t - 1)) - field[k] * t) * z**t
            ratio = np.exp(-g * t)
            far[0] = 1.0
            for j in range(1, rest + 1):
                far[j] = far[j - 1] * ratio
            for d in range(1, p):
                ratio = decay[k, d, t]
                power[d, 0] = 1.0
                for j in range(1, rest + 1):
                    power[d, j] = power[d, j - 1] * ratio
            for middle in range(count):
                inside = middle_sum[middle]
                if inside > rest:
                    break
                factor = weight
                for e in range(entry[middle], entry[middle + 1]):
                    factor *= power[distance[e], amount[e]]
                target = base[following[middle, t]]
                oldest = t if p == 2 else second[middle]
                start = base[middle]
                for s in range(rest - inside + 1):
                    row = start + s * (s + 1) // 2
                    total = 0.0
                    for r in range(s + 1):
                        total += old[row + r] * far[s - r] * power[p - 1, r]
                    value = max(total, LEAST_SUM) * factor * binomial[inside + s + t, t]
                    moved = s + oldest
                    new[target + moved * (moved + 1) // 2 + oldest] = max(value, LEAST_STATE)
        old, new = new, old
    out = np.zeros(most + 1)
    for middle in range(count):
        inside = middle_sum[middle]
        for s in range(most - inside + 1):
            row = base[middle] + s * (s + 1) // 2
            for r in range(s + 1):
                out[inside + s] += old[row + r]
    return out


@njit(cache=True, nogil=True)
def ring(
    band: np.ndarray,
    prefixes: np.ndarray,
    prefix_weight: np.ndarray,
    to_prefix: np.ndarray,
    order: int,
    g: float,
    z: float,
    decay: np.ndarray,
    states: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Scaled sums over all counts on a ring, by total 0..order: one chain for each choice of the first p − 1 counts.

    Releases the GIL, so that threads can take a share of the choices each (numba's own threads busy-wait, which is slow
    on a machine that has other work).

    to_prefix[k, i] is the interaction of index k with prefix index i, linear or wrapped; 0 where there is none.
    """
    b, p = band.shape
    binomial = states[-1]
    number = len(prefixes)
    totals = np.zeros(order + 1)
    for choice in range(number):
        inside = 0
        for i in range(p - 1):
            inside += prefixes[choice, i]
        field = np.zeros(b)
        for k in range(p - 1, b):
            for i in range(p - 1):
                field[k] += (g - to_prefix[k, i]) * prefixes[choice, i]
        most = order - inside
        sums = chain(band, field, p - 1, most, g, z, decay, states)
        for m in range(order - inside + 1):
            totals[inside + m] += prefix_weight[choice] * sums[m] * binomial[inside + m, m]
    return totals
