"""Fits of renewal blocks to the circulant majorant of a Gram matrix (`_renewal` says what the blocks are)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import minimize

from dpmf.accountants._majorants import MARGIN, lags_of
from dpmf.accountants._renewal import RenewalModel
from dpmf.strategies.base import Array

_LEAST_RATE, _TOP_RATE = 1e-5, 5.0
_FEWEST = 24  # indices in a block up to which every pair is a constraint from the start
_LONGEST, _LENGTHS = 300, 2  # of blocks, and how many lengths are tried
_MOST_RAISED = 1.3  # a fit that has to be raised by more is no fit


class _BlockFit:
    """Loads, logarithms of the chain's deviations and rates −log ρ, all piecewise linear in the index.

    Pinned: right loads, logarithms, rates, the rate from the separator to the first index.
    Free: left loads (the right ones are their mirror image), and symmetric logarithms and rates.
    """

    def __init__(self, lags: Array, length: int, emphasis: float, pinned: bool) -> None:
        self._pinned, n = pinned, length
        self._n, self._scale = n, float(lags[0])
        # Of two blocks on a ring, each pair is linked twice: once within half the ring.
        reach = len(lags) if len(lags) > 2 * n else len(lags) // 2 + 1
        g = np.concatenate((lags[:reach] / lags[0], np.zeros(2 * n)))
        i = np.arange(n)
        self._within, self._across = g[np.abs(i[:, None] - i)], g[n + i - i[:, None]]
        self._weight_within = np.exp(emphasis * self._within)
        self._weight_across = np.exp(emphasis * self._across)
        self._low, self._high = np.minimum.outer(i, i).ravel(), np.maximum.outer(i, i).ravel()
        self._upper = np.triu_indices(n, 1)
        self._linked = np.nonzero(self._across > 0)
        place = i / max(1, n - 1)
        self._basis = _hats(place, _knots(n, both=True))
        self._k = self._basis.shape[1]
        steps = (np.arange(n - 1) + 0.5) / max(1, n - 1)
        if pinned:
            self._logs, rates = self._basis, _hats(steps, _knots(n, both=True))
        else:
            self._logs = _hats(2 * np.minimum(place, 1 - place), _knots(n // 2 + 1, both=False))
            rates = _hats(2 * np.minimum(steps, 1 - steps), _knots(n // 2 + 1, both=False))
        self._path = np.concatenate((np.zeros((1, rates.shape[1])), np.cumsum(rates, axis=0)))

    def _split(self, p: Array) -> tuple[Array, Array, Array, float]:
        k, logs = self._k, self._logs.shape[1]
        first = float(p[-1]) if self._pinned else 0.0
        return p[:k], p[k : k + logs], p[k + logs : k + logs + self._path.shape[1]], first

    def _parts(self, p: Array) -> tuple[Array, Array, Array, Array]:
        """Left and right loads (the left ones as carried by a pinned chain), A and B with chain covariance e^(A+B)."""
        loads, logs, rates, first = self._split(p)
        levels, path = self._logs @ logs, self._path @ rates
        load = self._basis @ loads
        left = np.exp(levels - path - first) if self._pinned else load
        return left, load if self._pinned else load[::-1], levels + path, levels - path

    def covariances(self, p: Array) -> tuple[Array, Array]:
        """Inside a block (without nuggets), and of a block with the next one."""
        left, right, a, b = self._parts(p)
        chain = np.exp(np.clip(a[self._low] + b[self._high], -60.0, 4.0)).reshape(self._n, self._n)
        inside = chain + np.outer(right, right)
        if not self._pinned:
            inside += np.outer(left, left)
        return inside, np.outer(right, left)

    def cost(self, p: Array) -> tuple[float, Array]:
        left, right, a, b = self._parts(p)
        chain = np.exp(np.clip(a[self._low] + b[self._high], -60.0, 4.0)).reshape(self._n, self._n)
        inside, between = self.covariances(p)
        weight = self._weight_within.copy()
        own = np.diagonal(weight).copy()
        over = np.diagonal(inside) - 1
        root = np.sqrt(over**2 + 1e-6)
        np.fill_diagonal(weight, 0.0)
        total = float((weight * inside).sum() + 2 * (self._weight_across * between).sum())
        total += float(own @ (1 + 0.5 * (over + root)))
        np.fill_diagonal(weight, own * 0.5 * (1 + over / root))
        slope = (weight * chain).ravel()
        by_a = np.bincount(self._low, slope, self._n)
        by_b = np.bincount(self._high, slope, self._n)
        by_right = 2 * weight @ right + 2 * self._weight_across @ left
        by_left = 2 * self._weight_across.T @ right
        if self._pinned:
            by_b = by_b + by_left * left
            parts = [self._basis.T @ by_right, self._logs.T @ (by_a + by_b), self._path.T @ (by_a - by_b)]
            parts.append(np.array([-float(by_left @ left)]))
        else:
            by_left = by_left + 2 * weight @ left
            parts = [self._basis.T @ (by_left + by_right[::-1]), self._logs.T @ (by_a + by_b)]
            parts.append(self._path.T @ (by_a - by_b))
        return total / self._n, np.concatenate(parts) / self._n

    def _slack(self, p: Array, pairs: tuple[Any, Any], links: tuple[Any, Any]) -> Array:
        inside, between = self.covariances(p)
        return 10 * np.concatenate(((inside - self._within)[pairs], (between - self._across)[links]))

    def _slack_slope(self, p: Array, pairs: tuple[Any, Any], links: tuple[Any, Any]) -> Array:
        left, right, a, b = self._parts(p)
        basis, logs, path = self._basis, self._logs, self._path
        i, j = pairs
        chain = np.exp(np.clip(a[i] + b[j], -60.0, 4.0))[:, None]
        mirror = basis[::-1]
        if self._pinned:
            loads = basis[i] * right[j, None] + basis[j] * right[i, None]
        else:
            loads = basis[i] * left[j, None] + basis[j] * left[i, None]
            loads = loads + mirror[i] * right[j, None] + mirror[j] * right[i, None]
        inside = [loads, chain * (logs[i] + logs[j]), chain * (path[i] - path[j])]
        k, m = links
        if self._pinned:
            value = (right[k] * left[m])[:, None]
            between = [basis[k] * left[m, None], value * logs[m], -value * path[m], -value]
            inside.append(np.zeros((len(i), 1)))
        else:
            rest = np.zeros((len(k), logs.shape[1] + path.shape[1]))
            between = [mirror[k] * left[m, None] + basis[m] * right[k, None], rest]
        return 10 * np.concatenate((np.concatenate(inside, axis=1), np.concatenate(between, axis=1)))

    def _start(self) -> Array:
        n = self._n
        middle = n // 2
        rate = -math.log(float(self._within[0, middle]) + 0.02) / max(1, middle)
        i = np.arange(n)
        falling = 0.8 * np.exp(-2.0 * i / n)
        load = np.maximum(np.linalg.lstsq(self._basis, falling[::-1] if self._pinned else falling, rcond=None)[0], 0.05)
        count, rates = self._logs.shape[1], self._path.shape[1]
        if self._pinned:
            levels = 0.5 * math.log(0.5) + np.zeros(count)
            return np.concatenate((load, levels, np.full(rates, rate), [0.1]))
        return np.concatenate((load, np.full(count, 0.5 * math.log(0.45)), np.full(rates, max(rate, 0.05))))

    def solve(self) -> Array | None:
        """Sequential quadratic programming on a sample of pairs, to which those violated most are added."""
        n, p = self._n, self._start()
        rates, first = self._path.shape[1], [(1e-3, _TOP_RATE)] if self._pinned else []
        bounds = [(0.0, 2.0)] * self._k + [(-12.0, 1.0)] * self._logs.shape[1]
        bounds += [(_LEAST_RATE, _TOP_RATE)] * rates + first
        i, j = self._upper
        k, m = self._linked
        used, linked = np.ones(len(i), dtype=bool), np.ones(len(k), dtype=bool)
        if n > _FEWEST:
            lags = np.unique(np.round(np.geomspace(1, n - 1, 14)).astype(np.int64))
            used = np.isin(j - i, lags) & ((i % (n // 16) == 0) | (i < 2) | (j > n - 3))
            linked = ((k + 3 * m) % (n // 3) == 0) | (m == 0) | (k == n - 1)
        for _ in range(6):
            pairs, links = (i[used], j[used]), (k[linked], m[linked])
            constraint: Any = {
                "type": "ineq",
                "fun": lambda q, pairs=pairs, links=links: self._slack(q, pairs, links),
                "jac": lambda q, pairs=pairs, links=links: self._slack_slope(q, pairs, links),
            }
            found = minimize(
                self.cost, p, jac=True, bounds=bounds, method="SLSQP",
                constraints=[constraint], options={"maxiter": 100, "ftol": 1e-6},
            )  # fmt: skip
            if not np.all(np.isfinite(found.x)):
                return None
            p = np.clip(np.asarray(found.x), [b[0] for b in bounds], [b[1] for b in bounds])
            inside, between = self.covariances(p)
            short, parted = (self._within - inside)[self._upper], (self._across - between)[self._linked]
            worst, farthest = np.argsort(-short)[:60], np.argsort(-parted)[:60]
            worst, farthest = worst[short[worst] > 5e-4], farthest[parted[farthest] > 5e-4]
            if len(worst) + len(farthest) == 0:
                break
            used[worst] = True
            linked[farthest] = True
        return p

    def model(self, p: Array, blocks: int, closed: bool) -> RenewalModel:
        loads, logs, rates, first = self._split(p)
        root, n = math.sqrt(self._scale), self._n
        load = self._basis @ loads * root
        deviations = np.exp(self._logs @ logs) * root
        correlations = np.concatenate(
            ([math.exp(-first) if self._pinned else 0.0], np.exp(-np.diff(self._path @ rates)))
        )
        left = np.zeros(n) if self._pinned else load
        if not self._pinned:  # mirror images to the last bit, so that the law may use it
            deviations = np.maximum(deviations, deviations[::-1])
            correlations[1:] = np.maximum(correlations[1:], correlations[:0:-1])
        right = load if self._pinned else load[::-1].copy()
        return RenewalModel(left, right, deviations, correlations, np.zeros(n), blocks, closed)


def _knots(n: int, both: bool) -> Array:
    """Places in [0, 1] of knots, dense at the borders of a block of n indices: all of them where they are few."""
    if n <= 14:
        return np.arange(n) / max(1, n - 1)
    fixed = np.array([0.0, 0.02, 0.06, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0])
    places = [fixed, [1 / (n - 1)]]
    if both:
        places += [[0.94, 0.98, 1 - 1 / (n - 1)]]
    return np.unique(np.round(np.concatenate(places) * (n - 1))) / (n - 1)


def _hats(place: Array, knots: Array) -> Array:
    return np.stack([np.interp(place, knots, row) for row in np.eye(len(knots))], axis=1)


def block_lengths(width: int, b: int) -> list[int]:
    """Lengths worth trying for a ring (or line) of b indices whose covariance ends before lag `width`.

    Two indices of blocks that are not adjacent are at least L + 1 apart, so L ≥ width − 1 covers all pairs.
    """
    least = max(3, width - 1)
    found = {b // blocks for blocks in range(3, b // least + 1)} if least <= _LONGEST else set()
    near = sorted((x for x in found if x <= 2 * least), key=lambda x: abs(x / least - 1.2) + 2 * (b % x) / b)
    return near[:_LENGTHS]


def renewal_blocks(gram: Array, emphasis: float, pinned: bool, lengths: list[int]) -> RenewalModel | None:
    """The best fit over some block lengths; None where no fit is good enough.

    **Formal guarantees.** As for `separators`: the covariance, computed from the numbers returned, is at least the
    circulant majorant of G in every entry, on the ring of whole blocks that is left after at most L − 1 indices are
    dropped (the Toeplitz majorant of a G that does not wrap, on a line, where none has to be dropped).
    """
    g = lags_of(gram)
    b = len(g)
    linear = np.array([np.diagonal(gram, d).max() for d in range(b)])
    wraps = bool(np.any(linear[b // 2 + 1 :] > 0))
    best: tuple[float, RenewalModel] | None = None
    for length in lengths:
        blocks = b // length
        kept = length * blocks
        d = np.arange(kept)
        near = np.minimum(d, kept - d)
        lags = np.maximum(g[near], g[np.minimum(near + b - kept, kept - near)])
        lags[0] = g[0]
        closed = wraps or kept < b
        lags = lags if closed else linear
        fit = _BlockFit(lags, length, emphasis, pinned)
        solution = fit.solve()
        model = None if solution is None else _dominating(fit.model(solution, blocks, closed), lags)
        if model is not None:
            cost = cost_of(model, lags, emphasis) * b / kept
            if best is None or cost < best[0]:
                best = (cost, model)
    return None if best is None else best[1]


def cost_of(model: RenewalModel, lags: Array, emphasis: float) -> float:
    """Σ_j e^(emphasis·g_ij/g_0)·cov_ij, averaged over the rows i."""
    total = 0.0
    for offset, target in _targets(model, lags):
        total += float((np.exp(emphasis * target / lags[0]) * model.block_covariance(offset)).sum())
    return total / model.length


def _targets(model: RenewalModel, lags: Array) -> list[tuple[int, Array]]:
    i = np.arange(model.length)
    return [(o, lags[np.abs(o * model.length + i - i[:, None])]) for o in range(model.blocks)]


def _dominating(model: RenewalModel, lags: Array) -> RenewalModel | None:
    """The model raised until it dominates the circulant matrix of these lags; None where that takes too much."""
    factor = 1.0
    for offset, target in _targets(model, lags):
        needed = target > 0
        if offset == 0:
            np.fill_diagonal(needed, False)
        covariance = model.block_covariance(offset)
        if not np.all(covariance[needed] > 0):
            return None
        if needed.any():
            factor = max(factor, float((target[needed] / covariance[needed]).max()))
    if not factor < _MOST_RAISED:
        return None
    model = model.scaled(math.sqrt(factor * (1 + 2 * MARGIN)))
    own, top = model.variances()[: model.length], float(lags[0]) * (1 + MARGIN)
    nuggets = np.maximum(top - own, 0.0) * (1 + MARGIN) + MARGIN * top
    loads = model.left, model.right, model.deviations, model.correlations
    model = RenewalModel(*loads, nuggets, model.blocks, model.closed)
    for offset, target in _targets(model, lags):
        if not np.all(model.block_covariance(offset) >= target * (1 + 0.5 * MARGIN)):
            return None
    return model
