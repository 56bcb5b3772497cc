"""Fits of overlapping separators (`_overlaps`) to a Gram matrix that does not wrap around.

A fit only decides how tight the bound is. Whatever it returns is compared with the largest entry of every diagonal of G
and raised until it dominates them, so that Kahane's inequality applies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from dpmf import budget
from dpmf.accountants.chain._block_fits import MARGIN
from dpmf.accountants.chain._overlaps import OverlapModel
from dpmf.numerics import Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast fits are. All positive values give sound bounds.

    Attributes:
      widest: the bandwidth up to which overlapping separators are tried.
      depths: numbers of separators that the state holds, of which each is tried.
      most_blocks: the number of blocks up to which they are tried: the work is that of all blocks.
      starts: how many starts of the search there are.
      steps: iterations of a search.
      accuracy: the relative change of the cost at which it ends.
      most_raised: a fit that has to be raised by a larger factor is not used.
    """

    widest: int = 25
    depths: tuple[int, ...] = (2,)
    most_blocks: float = 400.0
    starts: int = 3
    steps: int = 300
    accuracy: float = 1e-7
    most_raised: float = 1.1


_TUNING = _Tuning()


def overlaps(gram: Array, emphasis: float) -> list[OverlapModel]:
    """The fits for some depths; none where G wraps around or its band is too wide.

    **Formal guarantees.** The covariance of every model, computed from the numbers returned, is at least the Toeplitz
    matrix of the largest entry of every diagonal of G.
    """
    lags = np.array([np.diagonal(gram, d).max() for d in range(len(gram))])
    width = int(np.flatnonzero(lags > 0)[-1]) + 1
    if not 2 <= width <= _TUNING.widest or 2 * width > len(gram):
        return []
    found = []
    for depth in sorted({max(1, min(int(depth), width - 1)) for depth in _TUNING.depths}):
        length = -(-(width - 1) // depth)  # with a length of 1 the model is a moving average, without any excess
        if len(gram) / length > _TUNING.most_blocks:
            continue
        fit = _Fit(lags / lags[0], length, depth, emphasis)
        model = fit.solve(float(lags[0]), len(gram))
        raised = None if model is None else _above(model, lags)
        if raised is not None:
            found.append(raised)
    return found


class _Fit:
    """Loads that minimise Σ_j e^(emphasis·g_ij)·cov_ij over models whose covariance is at least g, by SLSQP."""

    def __init__(self, lags: Array, length: int, depth: int, emphasis: float) -> None:
        self._length, self._depth = length, depth
        self._lags = lags
        self._inner = length > 1
        i = np.arange(length)
        padded = np.concatenate((lags, np.zeros((depth + 2) * length)))
        self._targets = padded[np.array([np.abs(k * length + i - i[:, None]) for k in range(depth + 1)])]
        self._weights = np.exp(emphasis * self._targets) * np.where(np.arange(depth + 1) > 0, 2.0, 1.0)[:, None, None]
        needed = self._targets > 0
        needed[0] &= i[:, None] < i
        self._pairs = np.nonzero(needed)

    def _covariances(self, p: Array) -> tuple[Array, Array, Array]:
        """Separators' loads, the inner factor's, and covariances by offset of the block."""
        loads = p[: self._length * (self._depth + 1)].reshape(self._length, -1)
        inner = p[loads.size :] if self._inner else np.zeros(self._length)
        found = np.array([loads[:, k:] @ loads[:, : self._depth + 1 - k].T for k in range(self._depth + 1)])
        found[0] += np.outer(inner, inner)
        return loads, inner, found

    def cost(self, p: Array) -> tuple[float, Array]:
        """The cost per index, where a diagonal below that of g costs nothing, and its gradient."""
        budget.check()
        loads, inner, found = self._covariances(p)
        weights = self._weights.copy()
        own = np.diagonal(weights[0]).copy()
        over = np.diagonal(found[0]) - self._lags[0]
        root = np.sqrt(over**2 + 1e-6)
        np.fill_diagonal(weights[0], 0.0)
        total = float((weights * found).sum() + own @ (self._lags[0] + 0.5 * (over + root)))
        np.fill_diagonal(weights[0], own * 0.5 * (1 + over / root))
        slope = np.zeros_like(loads)
        for k in range(self._depth + 1):
            slope[:, k:] += weights[k] @ loads[:, : self._depth + 1 - k]
            slope[:, : self._depth + 1 - k] += weights[k].T @ loads[:, k:]
        parts = [slope.ravel(), 2 * weights[0] @ inner] if self._inner else [slope.ravel()]
        return total / self._length, np.concatenate(parts) / self._length

    def slack(self, p: Array) -> Array:
        """How far covariances are above g."""
        return np.asarray((self._covariances(p)[2] - self._targets)[self._pairs])

    def slack_slope(self, p: Array) -> Array:
        loads, inner, _ = self._covariances(p)
        offsets, i, j = self._pairs
        rows = np.arange(len(i))
        found = np.zeros((len(i), len(p)))
        by_load = found[:, : loads.size].reshape(len(i), self._length, -1)
        for d in range(self._depth + 1):
            there = offsets + d <= self._depth
            row, k = rows[there], offsets[there]
            by_load[row, i[there], k + d] += loads[j[there], d]
            by_load[row, j[there], d] += loads[i[there], k + d]
        if self._inner:
            same = offsets == 0
            found[rows[same], loads.size + i[same]] += inner[j[same]]
            found[rows[same], loads.size + j[same]] += inner[i[same]]
        return found

    def solve(self, scale: float, size: int) -> OverlapModel | None:
        """The best of searches from several starts, in units of `scale`; None where none meets its constraints."""
        count = self._length * (self._depth + 1 + self._inner)
        constraint: Any = {"type": "ineq", "fun": self.slack, "jac": self.slack_slope}
        best: tuple[float, Array] | None = None
        rng = np.random.default_rng(0)
        level = math.sqrt(float(self._lags[1]) / (self._depth + 1))
        for _ in range(int(_TUNING.starts)):
            found = minimize(
                self.cost, level * rng.uniform(0.3, 1.3, count), jac=True, method="SLSQP", bounds=[(0.0, None)] * count,
                constraints=[constraint], options={"maxiter": int(_TUNING.steps), "ftol": _TUNING.accuracy},
            )  # fmt: skip
            p = np.maximum(np.asarray(found.x), 0.0)
            if not np.all(np.isfinite(p)) or float(self.slack(p).min(initial=0.0)) < -0.05:
                continue
            value = self.cost(p)[0]
            if best is None or value < best[0]:
                best = value, p
        if best is None:
            return None
        loads, inner, _ = self._covariances(best[1])
        root = math.sqrt(scale)
        return OverlapModel(loads * root, inner * root, np.zeros(self._length), size)


def _pairs_of(model: OverlapModel, lags: Array) -> list[tuple[Array, Array]]:
    """Covariances within a block and of each with the blocks after it, and the lags that they must exceed."""
    i = np.arange(model.length)
    padded = np.concatenate((lags, np.zeros((model.depth + 2) * model.length)))
    offsets = range(model.depth + 1)
    return [(model.block_covariance(k), padded[np.abs(k * model.length + i - i[:, None])]) for k in offsets]


def _above(model: OverlapModel, lags: Array) -> OverlapModel | None:
    """The model raised until it dominates the Toeplitz matrix of these lags; None where that takes too much.

    Two indices of blocks that are more than `depth` apart are at least depth·L + 1 apart, where lags are zero.
    """
    if np.any(lags[model.depth * model.length + 1 :] > 0):
        return None
    factor = 1.0
    for offset, (covariance, target) in enumerate(_pairs_of(model, lags)):
        needed = target > 0
        if offset == 0:
            np.fill_diagonal(needed, False)
        if not np.all(covariance[needed] > 0):
            return None
        factor = max(factor, float((target[needed] / covariance[needed]).max(initial=0.0)))
    if not factor < _TUNING.most_raised:
        return None
    model = model.scaled(math.sqrt(factor * (1 + 2 * MARGIN)))
    top = float(lags[0]) * (1 + MARGIN)
    nuggets = np.maximum(top - model.variances()[: model.length], 0.0) * (1 + MARGIN) + MARGIN * top
    model = OverlapModel(model.loads, model.inner, nuggets, model.size)
    dominates = all(np.all(found >= target * (1 + 0.5 * MARGIN)) for found, target in _pairs_of(model, lags))
    return model if dominates else None
