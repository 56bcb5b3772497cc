"""Log-normals on a lattice {0, h, 2h, ...}: weights with a known rounding error, and the closed forms beside them.

a = e^(rz − s/2), s = r², z standard normal: E a = 1. Nothing here subtracts nearly equal numbers: the weights are
tilted afterwards, by factors that may be large, so each needs its own relative accuracy.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from dpmf.loss.gaussian import gaussian_delta
from dpmf.numerics import UNIT, Array

# Six-point Gauss–Legendre on [0, 1], and how wide its panels are (docs/theory/lattice.md, "Weights").
_POINTS, _POINT_WEIGHTS = np.polynomial.legendre.leggauss(6)
_POINTS, _POINT_WEIGHTS = (_POINTS + 1) / 2, _POINT_WEIGHTS / 2
_PANEL = 0.75


def call_from_above(s: float, strike: float) -> float:
    """At least E(a − K)_+: δ(log K) of a Gaussian mechanism. Its logarithm and √s are moved by their rounding."""
    level = math.log(strike)
    return gaussian_delta(math.sqrt(s) * (1 + 2 * UNIT), level - 4 * UNIT * abs(level))


def hat_weights(s: float, step: float, first: int, last: int) -> tuple[Array, float]:
    """Mean-preserving weights of a on the nodes h·(first..last), and P(a < h·first), both from above.

    a below the first node counts there, and a above the last one there. The first cell of a lattice that begins at 0
    is in closed form, the others are integrals. Positions are exact up to `position_error`.
    """
    root = math.sqrt(s)
    j = np.arange(max(first, 1), last + 1)
    z = (np.log(step * j) + s / 2) / root
    inflation = 1 + _relative_error(z, root)
    below, above = float(ndtr(z[0])), float(ndtr(-z[-1]))
    weight = np.zeros(last - first + 1)
    start = int(j[0]) - first
    if len(j) > 1:
        points, size, cell, begin = _panels(z, root)
        density = size * _density(points)
        # e^(rz) relative to the cell's left end, without the cancellation of a − h·j.
        share = np.clip(j[cell, None] * np.expm1(root * (points - z[cell, None])), 0.0, 1.0)
        weight[start + 1 :] += np.add.reduceat((density * share).sum(axis=1), begin) * inflation[1:]
        weight[start:-1] += np.add.reduceat((density * (1 - share)).sum(axis=1), begin) * inflation[1:]
    weight[-1] += above * inflation[-1]
    below *= float(inflation[0])
    if first > 0:
        weight[0] += below
        return weight, below
    risen = min(below, float(ndtr(z[0] - root)) * float(inflation[0]) / step)
    weight[0] += below * (1 + 1e-12) - risen
    weight[1] += risen * float(inflation[0]) ** 2
    return weight, 0.0


def position_error(s: float, step: float, last: int) -> float:
    """The relative error of the positions a in `hat_weights`: a few units of rounding of log a and of s."""
    return 16 * UNIT * (4 + s + abs(math.log(step)) + math.log(last + 1))


def cell_weights(s: float, step: float, first: int, last: int) -> tuple[Array, Array, float]:
    """P(cell) and E[a; cell] for the cells around h·(first..last), the end ones unbounded, and their relative error.

    Cells are intervals of z whose ends are floating point numbers, so there is no error of position.
    """
    root = math.sqrt(s)
    z = (np.log(step * (np.arange(first, last) + 0.5)) + s / 2) / root
    weight, moment = np.empty(last - first + 1), np.empty(last - first + 1)
    if len(z) > 1:
        points, size, _, begin = _panels(z, root)
        weight[1:-1] = np.add.reduceat((size * _density(points)).sum(axis=1), begin)
        moment[1:-1] = np.add.reduceat((size * _density(points - root)).sum(axis=1), begin)
    weight[0], weight[-1] = ndtr(z[0]), ndtr(-z[-1])
    moment[0], moment[-1] = ndtr(z[0] - root), ndtr(root - z[-1])
    return weight, moment, float(_relative_error(z, root).max())


def _relative_error(z: Array, root: float) -> Array:
    """Of a normal density, tail or panel between the z (that of `ndtr` is in docs/theory/floating-point.md)."""
    return np.asarray(2e-13 + 16 * UNIT * (np.abs(z) + root + 1) ** 2)


def _density(z: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


def _panels(z: Array, root: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Gauss–Legendre panels for the cells between the z: points, weights, each panel's cell, where each cell begins.

    With w the width of a panel and w·(|z| + 4 + r) ≤ 3/4, six points integrate φ(z) times a linear function of e^(rz)
    that vanishes at an end of the cell to a relative 10⁻¹⁵: the remainder is 1.9·10⁻¹⁶·w¹³·f⁽¹²⁾, and the derivatives
    of φ are Hermite polynomials times φ, |He_n(z)| ≤ (|z| + √n)ⁿ.
    """
    width = np.diff(z)
    reach = np.maximum(np.abs(z[:-1]), np.abs(z[1:])) + 4 + root
    number = np.maximum(1, np.ceil(width * reach / _PANEL)).astype(np.int64)
    begin = np.concatenate(([0], np.cumsum(number)[:-1]))
    cell = np.repeat(np.arange(len(number)), number)
    size = (width / number)[cell]
    left = z[cell] + size * (np.arange(len(cell)) - begin[cell])
    return left[:, None] + size[:, None] * _POINTS, size[:, None] * _POINT_WEIGHTS, cell, begin
