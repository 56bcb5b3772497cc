"""The inner loops of tests by tangent planes of the logarithm of the likelihood ratio (`lower_bounds._tangents`)."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def _tail(x: float) -> float:
    """The probability that a standard normal variable is below x."""
    return 0.5 * math.erfc(-x * 0.7071067811865476)


@njit(cache=True, nogil=True)
def _between(low: float, high: float) -> float:
    """The probability that a standard normal variable is between the two, from the tails that are small."""
    chance: float = _tail(-low) - _tail(-high) if low > 0 else _tail(high) - _tail(low)
    return chance


@njit(cache=True, nogil=True)
def _weights(base: np.ndarray, along: np.ndarray, goal: float, start: float, weights: np.ndarray) -> float:
    """Where log mean e^(base + λ·along) is about `goal`: λ by a few Newton steps, and the terms' shares there."""
    place = start
    for step in range(5):
        top = -1e300
        for j in range(len(base)):
            top = max(top, base[j] + place * along[j])
        total, slope = 0.0, 0.0
        for j in range(len(base)):
            weights[j] = math.exp(base[j] + place * along[j] - top)
            total += weights[j]
            slope += weights[j] * along[j]
        for j in range(len(base)):
            weights[j] /= total
        miss = goal - top - math.log(total / len(base))
        if step == 4 or abs(miss) < 0.02:
            break
        place = min(max(place + miss * total / max(slope, 1e-3 * total), -3.0), 40.0)
    return place


@njit(cache=True, nogil=True)
def aims(shifts: np.ndarray, goal: float) -> tuple[np.ndarray, np.ndarray]:
    """For every component about the likeliest way to a log-likelihood ratio of `goal`: a point, and shares there."""
    number, b = shifts.shape
    points: np.ndarray = np.empty((b, number))
    shares: np.ndarray = np.empty((b, b))
    half = 0.5 * (shifts * shifts).sum(axis=0)
    base, along = np.empty(b), np.empty(b)
    for i in range(b):
        normal = shifts[:, i].copy()
        place = 0.0
        for j in range(b):
            base[j] = (shifts[:, i] * shifts[:, j]).sum() - half[j]
        for _ in range(8):
            for j in range(b):
                along[j] = (normal * shifts[:, j]).sum()
            place = _weights(base, along, goal, place, shares[i])
            points[i] = shifts[:, i] + place * normal
            for k in range(number):
                normal[k] = 0.5 * normal[k] + 0.5 * (shares[i] * shifts[k]).sum()
    return points, shares


@njit(cache=True, nogil=True)
def by_tangents(
    shifts: np.ndarray, axes: np.ndarray, points: np.ndarray, cells: np.ndarray, edges: np.ndarray, epsilon: float,
    goal: float, least: float, slack: float,
) -> float:  # fmt: skip
    """The mean over the components of Σ over boxes of (P_i − e^ε·E_i[1/L]) of {in the box, L > a threshold}.

    Args:
      shifts: statistic × component.
      axes: component × axis × statistic, orthonormal for every component.
      points: component × statistic, where the likelihood ratio is reached most easily.
      cells: the number of cells of each axis.
      edges: axis × ends of its cells, relative to the point; the first and the last are far out.
      epsilon: ε.
      goal: the logarithm of the likelihood ratio at which planes touch.
      least: boxes with a smaller probability are left out.
      slack: the relative error of each of the two parts of a value.
    """
    number, b = shifts.shape
    dimension, boxes, most = axes.shape[1], 1, edges.shape[1] - 1
    half = 0.5 * (shifts * shifts).sum(axis=0)
    projected, own = np.empty((dimension, b)), np.empty(b)
    base, along, weights = np.empty(b), np.empty(b), np.empty(b)
    normal, rest = np.empty(number), np.empty(number)
    chances, centres, middles = np.empty((dimension, most)), np.empty((dimension, most)), np.empty(dimension)
    where = np.zeros(dimension, dtype=np.int64)
    for count in cells:
        boxes *= count
    total: float = 0.0
    for i in range(b):
        height = points[i] - shifts[:, i]
        for d in range(dimension):
            for j in range(b):
                projected[d, j] = (axes[i, d] * shifts[:, j]).sum()
            middle = middles[d] = (axes[i, d] * points[i]).sum() - projected[d, i]
            height = height - (axes[i, d] * height).sum() * axes[i, d]
            for c in range(cells[d]):
                low, high = edges[d, c], edges[d, c + 1]
                chances[d, c] = _between(middle + low, middle + high)
                inner = 0.5 * (max(low, edges[d, 1] - 0.8) + min(high, edges[d, cells[d] - 1] + 0.8))
                centres[d, c] = middle + projected[d, i] + (inner if cells[d] > 1 else 0.0)
        for j in range(b):
            along[j] = (height * shifts[:, j]).sum()
            own[j] = (shifts[:, i] * shifts[:, j]).sum() - half[j]
            for d in range(dimension):
                own[j] -= projected[d, i] * projected[d, j]
        place = 1.0
        for box in range(boxes):
            chance, code = 1.0, box
            for d in range(dimension):
                where[d] = code % cells[d]
                code //= cells[d]
                chance *= chances[d, where[d]]
            if chance < least:
                continue
            for j in range(b):
                base[j] = own[j]
                for d in range(dimension):
                    base[j] += centres[d, where[d]] * projected[d, j]
            place = _weights(base, along, goal, place, weights)
            # log A ≥ normal·y − level everywhere, by the inequality of the weighted arithmetic and geometric means.
            level = 0.0
            for j in range(b):
                if weights[j] > 0.0:
                    level += weights[j] * (half[j] + math.log(b * weights[j]))
            square, mean = 0.0, 0.0
            for k in range(number):
                normal[k] = (weights * shifts[k]).sum()
                rest[k] = normal[k]
                square += normal[k] * normal[k]
                mean += normal[k] * shifts[k, i]
            other, threshold = 1.0, epsilon + level
            for d in range(dimension):
                part = (axes[i, d] * normal).sum()
                for k in range(number):
                    rest[k] -= part * axes[i, d, k]
                low = middles[d] + part
                moved = _between(low + edges[d, where[d]], low + edges[d, where[d] + 1])
                other *= moved
                threshold += part * (0.5 * part - projected[d, i])
                threshold += math.log(max(moved, 1e-300) / chances[d, where[d]])
            exponent = epsilon + level - mean + 0.5 * square
            scale = math.sqrt((rest * rest).sum())
            if exponent > 200.0 or scale < 1e-6:
                continue
            z = ((rest * shifts[:, i]).sum() - threshold) / scale
            value = chance * _tail(z) * (1 - slack) - math.exp(exponent) * other * _tail(z - scale) * (1 + slack)
            total += max(value, 0.0)
    average: float = total / b
    return average
