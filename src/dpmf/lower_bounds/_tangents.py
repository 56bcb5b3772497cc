"""Lower bounds on δ(ε) from planes that touch the logarithm of the likelihood ratio from below.

Seen through statistics y of windows that are made independent (`_windows`), log A is a convex function of y, so every
tangent plane lies below it. For every component i, δ(ε) = mean of E_i(1 − γ/A)_+ is bounded by cutting the space into
boxes and replacing log A in each box by a plane: closed forms (docs/theory/lower_bounds.md, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpmf import budget
from dpmf.kernels import announce_compilation
from dpmf.kernels.tangents import aims, by_tangents
from dpmf.lower_bounds._windows import Windows, cells_of, quantiles
from dpmf.numerics import UNIT

# A proof constant: the relative error of P_i and of E_i[1/L] of a box (docs/theory/floating-point.md, "Lower bounds").
_BOX_ERROR = 1e-9
_FAR = 40.0  # where the outermost cells end: what is beyond is left out of the event


@dataclass(frozen=True)
class _Tuning:
    """How fine the boxes are. Any positive values give sound bounds.

    Attributes:
      work: boxes × (components)², about.
      rough_work: the same where windows are compared.
      most_boxes: the number of boxes of a component, at most.
      most_axes: the number of statistics that are cut into cells, at most.
      aim: planes touch where the log-likelihood ratio is this much above ε.
      reach: how far cells reach, as a part of what is best for many cells of a normal law.
      least: boxes with a smaller probability are left out.
    """

    work: float = 1e7
    rough_work: float = 1e6
    most_boxes: float = 600.0
    most_axes: int = 6
    aim: float = 0.1
    reach: float = 1.2
    least: float = 1e-10


_TUNING = _Tuning()


def tangent_delta(windows: Windows, noise_multiplier: float, epsilon: float, *, fine: bool = True) -> float:
    """A lower bound on δ(ε) of the remove direction; 0 where the statistics are out of range.

    **Formal guarantees.** With a_j the likelihood ratio of component j and A their mean, δ(ε) = E(A − γ)_+ is the mean
    over i of E_i(1 − γ/A)_+ ≥ Σ_B E_i[(1 − γ/A)φ_B] for disjoint boxes B and events φ_B within them. By the inequality
    of the means A ≥ L = Π (a_j/(b·w_j))^(w_j) for all weights w of sum 1. Under component i, a box of orthonormal
    statistics and {log L > t} are independent events, and E_i[1/L] over both is in closed form. Planes, boxes and
    thresholds are free, so how they are found does not matter. Rounding errors are subtracted.
    """
    b = windows.shifts.shape[1]
    work = _TUNING.work if fine else _TUNING.rough_work
    if not windows.in_range(noise_multiplier, epsilon):
        return 0.0
    shifts = np.ascontiguousarray(windows.shifts / noise_multiplier)
    budget.claim(8.0 * b * (len(shifts) ** 2 + b))
    announce_compilation(by_tangents)
    goal = epsilon + _TUNING.aim
    points, shares = aims(shifts, goal)
    # The covariance of the gradients of the terms, given how much each term counts, across the main gradient: these
    # are the directions in which log A is curved.
    normals = shares @ shifts.T
    spread = np.einsum("kj,ij,lj->ikl", shifts, shares, shifts, optimize=True) - normals[:, :, None] * normals[:, None]
    main = normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-300)
    across = np.eye(len(shifts)) - main[:, :, None] * main[:, None]
    values, vectors = np.linalg.eigh(across @ spread @ across)
    curvature = np.sqrt(np.maximum(values.mean(axis=0)[::-1][: _TUNING.most_axes], 0.0))
    numbers = [n for n in cells_of(curvature, min(_TUNING.most_boxes, work / b**2)) if n > 1]
    axes = np.ascontiguousarray(vectors[:, :, ::-1][:, :, : len(numbers)].transpose(0, 2, 1))
    edges = np.full((len(numbers), max(numbers, default=1) + 1), _FAR)
    for row, n in zip(edges, numbers, strict=True):
        row[0], row[1:n] = -_FAR, quantiles(n, _TUNING.reach)
    budget.check()
    cells = np.array(numbers, dtype=np.int64)
    value = by_tangents(shifts, axes, points, cells, edges, epsilon, goal, _TUNING.least, _BOX_ERROR)
    gamma = math.exp(epsilon) * (1 + 4 * UNIT * (1 + epsilon))
    return windows.less_error(value, noise_multiplier, gamma)
