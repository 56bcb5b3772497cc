"""Fits of separators and of renewal blocks to the circulant majorant of a Gram matrix (`_blocks` has the models).

A fit only decides how tight the bound is. Whatever it returns is compared with the lags entry by entry and raised until
it dominates them, so that Kahane's inequality applies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import minimize

from dpmf import budget
from dpmf.accountants.chain._blocks import RenewalModel, SeparatorModel
from dpmf.gram.bands import circulant_majorant, cyclic_bandwidth
from dpmf.numerics import Array

MARGIN = 1e-10
"""Relative margin by which majorants exceed G: more than all rounding errors of a model's covariance and of G/σ²
(docs/theory/floating-point.md, "The chain")."""


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast fits of blocks are. All positive values give sound bounds.

    Attributes:
      widest: the bandwidth up to which separators are tried.
      lengths_tried: the number of block lengths that are tried, for separators.
      fewest_blocks: the number of blocks from which separators are tried.
      short_ring: blocks of the ring on which separators for very many batches are fitted.
      most_raised: a fit that has to be raised by a larger factor is not used (separators, renewal blocks).
      separator_levels: loads of the inner factor from which the fits of separators start.
      least_rate: the least rate −log ρ of a chain in a block.
      top_rate: the largest rate.
      all_pairs: the number of indices in a block up to which every pair is a constraint from the start.
      longest: the longest block of renewal chains.
      renewal_lengths: the number of block lengths that are tried, for renewal blocks.
      all_knots: the number of indices in a block up to which each of them is a knot.
      knots: places of the knots in a longer block.
      rounds: how often violated pairs are added to the constraints.
      added: how many of them are added.
    """

    widest: int = 8
    lengths_tried: int = 4
    fewest_blocks: int = 4
    short_ring: int = 8
    most_raised: tuple[float, float] = (1.5, 1.3)
    separator_levels: tuple[float, ...] = (0.3, 0.6)
    least_rate: float = 1e-5
    top_rate: float = 5.0
    all_pairs: int = 24
    longest: int = 300
    renewal_lengths: int = 2
    all_knots: int = 14
    knots: tuple[float, ...] = (
        0.0, 0.02, 0.06, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.94, 0.98, 1.0,
    )  # fmt: skip
    rounds: int = 6
    added: int = 60


_TUNING = _Tuning()

ModelT = TypeVar("ModelT", SeparatorModel, RenewalModel)


def lags_of(gram: Array) -> Array:
    """The least symmetric circulant matrix above G, by lag 0..b−1."""
    g = circulant_majorant(gram)
    return np.maximum(g, g[-np.arange(len(g)) % len(g)])


def ring_of_fewer(g: Array, b: int, kept: int) -> Array:
    """Lags of a ring of `kept` indices that are at least those of any `kept` neighbours on a ring of b, lags g."""
    d = np.arange(kept)
    near = np.minimum(d, kept - d)
    lags = np.maximum(g[near], g[np.minimum(near + b - kept, kept - near)])
    lags[0] = g[0]
    return np.asarray(lags)


def separators(gram: Array, emphasis: float) -> SeparatorModel | None:
    """The best fit over a few block lengths; None where the band is too wide, or the ring too short.

    **Formal guarantees.** The model's covariance, computed from the numbers returned, is at least the circulant
    majorant of G in every entry (on a line, the Toeplitz majorant of a G that does not wrap around). Where the block
    length does not divide b, the m indices too many are left out (docs/theory/gram-domination.md, "Leaving indices
    out"): on the ring of b − m indices two indices are no farther apart than on that of b, and each lag gets the larger
    of the two values that it can have.
    """
    g = lags_of(gram)
    b = len(g)
    linear, wraps = _linear(gram)
    fits = []
    for length in _separator_lengths(cyclic_bandwidth(gram)):
        blocks = b // length
        if blocks < max(1, _TUNING.fewest_blocks):
            continue
        kept = length * blocks
        closed = wraps or kept < b
        lags = ring_of_fewer(g, b, kept) if closed else linear
        fits.append((b / kept, _separator_fit(lags, length, blocks, emphasis, closed)))
    return _least(fits)


def separators_of_lags(ring: Array, emphasis: float) -> SeparatorModel | None:
    """As `separators`, for very many batches on a ring with these lags.

    The fit is made on a short ring, because the covariance does not reach beyond two blocks.
    """
    b = len(ring)
    width = int(np.flatnonzero(ring[: b // 2 + 1] > 0)[-1]) + 1
    fits = []
    for length in _separator_lengths(width):
        short = length * _TUNING.short_ring
        if b // length < 2 * _TUNING.short_ring or short // 2 < width:
            continue
        d = np.arange(short)
        near = np.minimum(d, short - d)
        # Where indices are left out, two may be nearer to each other on the shorter ring.
        lags = np.maximum(ring[near], ring[near + b % length])
        found = _separator_fit(lags, length, _TUNING.short_ring, emphasis, True)
        fits.append((1.0, found and (found[0], replace(found[1], blocks=b // length))))
    return _least(fits)


def _linear(gram: Array) -> tuple[Array, bool]:
    """The least Toeplitz matrix above G, by lag, and whether G wraps around."""
    linear = np.array([np.diagonal(gram, d).max() for d in range(len(gram))])
    return linear, bool(np.any(linear[len(gram) // 2 + 1 :] > 0))


def _separator_lengths(width: int) -> range:
    if not 2 <= width <= _TUNING.widest:
        return range(0)
    return range(max(2, width - 1), max(2, width - 1) + _TUNING.lengths_tried)


def _least(fits: Sequence[tuple[float, tuple[float, ModelT] | None]]) -> ModelT | None:
    """The model of least cost, of those that were found; each comes with a factor on its cost."""
    found = [(factor * fit[0], fit[1]) for factor, fit in fits if fit is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _separator_fit(
    lags: Array, length: int, blocks: int, emphasis: float, closed: bool
) -> tuple[float, SeparatorModel] | None:
    """The cost of a fit and the model, by sequential quadratic programming; None where none is good enough."""
    g = np.concatenate((lags[: min(len(lags) // 2, 2 * length) + 1] / lags[0], np.zeros(2 * length)))
    i = np.arange(length)
    within, across = np.abs(i[:, None] - i), length + i - i[:, None]
    weight_within, weight_across = np.exp(emphasis * g[within]), np.exp(emphasis * g[across])
    off = within > 0
    upper = np.triu_indices(length, 1)
    linked = np.nonzero(g[across] > 0)

    def covariances(parameters: Array) -> tuple[Array, Array]:
        left, inner = parameters[:length], parameters[length:]
        right = left[::-1]
        return np.outer(left, left) + np.outer(right, right) + np.outer(inner, inner), np.outer(right, left)

    def cost(parameters: Array) -> float:
        budget.check()
        inside, between = covariances(parameters)
        over = np.diagonal(inside) - 1
        diagonal = 1 + 0.5 * (over + np.sqrt(over**2 + 1e-6))
        total = (weight_within * inside)[off].sum() + 2 * (weight_across * between).sum()
        return float(total + math.exp(emphasis) * diagonal.sum()) / length

    def slack(parameters: Array) -> Array:
        inside, between = covariances(parameters)
        return np.concatenate(((inside - g[within])[upper], (between - g[across])[linked]))

    constraint: Any = {"type": "ineq", "fun": slack}
    best: tuple[float, Array] | None = None
    for level in _TUNING.separator_levels:
        slope = np.linspace(1.0, 0.25, length)
        start = math.sqrt(g[1]) * np.concatenate((slope, np.full(length, level)))
        found = minimize(
            cost, start, method="SLSQP", bounds=[(0.0, None)] * (2 * length),
            constraints=[constraint], options={"maxiter": 200, "ftol": 1e-7},
        )  # fmt: skip
        if np.all(np.isfinite(found.x)) and (best is None or found.fun < best[0]):
            best = (float(found.fun), np.asarray(found.x))
    if best is None:
        return None
    scale = math.sqrt(lags[0])
    left, inner = best[1][:length] * scale, best[1][length:] * scale
    return _separators_above(left, inner, lags, blocks, emphasis, closed)


def _separators_above(
    left: Array, inner: Array, lags: Array, blocks: int, emphasis: float, closed: bool
) -> tuple[float, SeparatorModel] | None:
    """The model with its loads raised until it dominates the matrix of these lags, and its cost."""
    d = np.arange(len(lags))
    target = lags[np.abs(d[:, None] - d)] * (1 + MARGIN)
    off = ~np.eye(len(lags), dtype=bool)
    model = SeparatorModel(left, left[::-1].copy(), inner, np.zeros(len(left)), blocks, closed)
    needed = off & (target > 0)
    covariance = model.covariance()
    if not np.all(covariance[needed] > 0):
        return None
    factor = float((target[needed] / covariance[needed]).max()) if needed.any() else 1.0
    if factor > _TUNING.most_raised[0]:
        return None
    model = model.scaled(math.sqrt(max(1.0, factor) * (1 + MARGIN)))
    nuggets = np.maximum(float(target[0, 0]) - model.variances(), 0.0) * (1 + MARGIN) + MARGIN * float(target[0, 0])
    model = SeparatorModel(model.left, model.right, model.inner, nuggets, blocks, closed)
    covariance = model.covariance()
    if not np.all(covariance >= target * (1 - 0.5 * MARGIN)):
        return None
    return float((np.exp(emphasis * target / lags[0]) * covariance).sum() / len(lags)), model


class _BlockFit:
    """Right loads, logarithms of the chain's deviations and rates −log ρ, all piecewise linear in the index.

    The last parameter is the rate from the separator to the first index.
    """

    def __init__(self, lags: Array, length: int, emphasis: float) -> None:
        self._n, self._scale = length, float(lags[0])
        n = length
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
        knots = _knots(n)
        self._k = len(knots)
        self._basis = _hats(i / (n - 1), knots)
        rates = _hats((np.arange(n - 1) + 0.5) / (n - 1), knots)
        self._path = np.concatenate((np.zeros((1, self._k)), np.cumsum(rates, axis=0)))

    def _parts(self, p: Array) -> tuple[Array, Array, Array, Array]:
        """What the chain carries of the left separator, right loads, A and B with chain covariance e^(A_i + B_j)."""
        loads, logs, rates = p[:-1].reshape(3, self._k)
        levels, path = self._basis @ logs, self._path @ rates
        return np.exp(levels - path - p[-1]), self._basis @ loads, levels + path, levels - path

    def covariances(self, p: Array) -> tuple[Array, Array]:
        """Inside a block (without nuggets), and of a block with the next one."""
        carried, right, a, b = self._parts(p)
        return self._chain(a, b) + np.outer(right, right), np.outer(right, carried)

    def _chain(self, a: Array, b: Array) -> Array:
        return np.exp(np.clip(a[self._low] + b[self._high], -60.0, 4.0)).reshape(self._n, self._n)

    def cost(self, p: Array) -> tuple[float, Array]:
        """Weighted sum of covariances, where a diagonal below that of G costs nothing, and its gradient."""
        budget.check()
        carried, right, a, b = self._parts(p)
        chain = self._chain(a, b)
        inside, between = chain + np.outer(right, right), np.outer(right, carried)
        weight = self._weight_within.copy()
        own = np.diagonal(weight).copy()
        over = np.diagonal(inside) - 1
        root = np.sqrt(over**2 + 1e-6)
        np.fill_diagonal(weight, 0.0)
        total = float((weight * inside).sum() + 2 * (self._weight_across * between).sum())
        total += float(own @ (1 + 0.5 * (over + root)))
        np.fill_diagonal(weight, own * 0.5 * (1 + over / root))
        slope = (weight * chain).ravel()
        by_carried = 2 * (self._weight_across.T @ right) * carried
        by_a = np.bincount(self._low, slope, self._n)
        by_b = np.bincount(self._high, slope, self._n) + by_carried
        by_right = 2 * weight @ right + 2 * self._weight_across @ carried
        parts = self._basis.T @ by_right, self._basis.T @ (by_a + by_b), self._path.T @ (by_a - by_b)
        return total / self._n, np.concatenate((*parts, [-by_carried.sum()])) / self._n

    def _slack(self, p: Array, pairs: tuple[Any, Any], links: tuple[Any, Any]) -> Array:
        inside, between = self.covariances(p)
        return 10 * np.concatenate(((inside - self._within)[pairs], (between - self._across)[links]))

    def _slack_slope(self, p: Array, pairs: tuple[Any, Any], links: tuple[Any, Any]) -> Array:
        carried, right, a, b = self._parts(p)
        basis, path = self._basis, self._path
        i, j = pairs
        chain = np.exp(np.clip(a[i] + b[j], -60.0, 4.0))[:, None]
        loads = basis[i] * right[j, None] + basis[j] * right[i, None]
        inside = loads, chain * (basis[i] + basis[j]), chain * (path[i] - path[j]), np.zeros((len(i), 1))
        k, m = links
        value = (right[k] * carried[m])[:, None]
        between = basis[k] * carried[m, None], value * basis[m], -value * path[m], -value
        return 10 * np.concatenate((np.concatenate(inside, axis=1), np.concatenate(between, axis=1)))

    def start(self) -> Array:
        n, middle = self._n, self._n // 2
        rate = -math.log(float(self._within[0, middle]) + 0.02) / middle
        rising = 0.8 * np.exp(-2.0 * np.arange(n)[::-1] / n)
        load = np.maximum(np.linalg.lstsq(self._basis, rising, rcond=None)[0], 0.05)
        return np.concatenate((load, np.full(self._k, 0.5 * math.log(0.5)), np.full(self._k, rate), [0.1]))

    def solve(self, start: Array) -> Array | None:
        """Sequential quadratic programming on a sample of pairs, to which those violated most are added."""
        n, p = self._n, start
        bounds = [(0.0, 2.0)] * self._k + [(-12.0, 1.0)] * self._k
        bounds += [(_TUNING.least_rate, _TUNING.top_rate)] * self._k + [(1e-3, _TUNING.top_rate)]
        i, j = self._upper
        k, m = self._linked
        used, linked = np.ones(len(i), dtype=bool), np.ones(len(k), dtype=bool)
        if n > _TUNING.all_pairs:
            lags = np.unique(np.round(np.geomspace(1, n - 1, 14)).astype(np.int64))
            used = np.isin(j - i, lags) & ((i % (n // 16) == 0) | (i < 2) | (j > n - 3))
            linked = ((k + 3 * m) % (n // 3) == 0) | (m == 0) | (k == n - 1)
        for _ in range(_TUNING.rounds):
            pairs, links = (i[used], j[used]), (k[linked], m[linked])
            constraint: Any = {
                "type": "ineq",
                "fun": lambda q, pairs=pairs, links=links: self._slack(q, pairs, links),
                "jac": lambda q, pairs=pairs, links=links: self._slack_slope(q, pairs, links),
            }
            found = minimize(
                self.cost, p, jac=True, bounds=bounds, method="SLSQP",
                constraints=[constraint], options={"maxiter": 100, "ftol": 1e-5},
            )  # fmt: skip
            if not np.all(np.isfinite(found.x)):
                return None
            p = np.clip(np.asarray(found.x), [b[0] for b in bounds], [b[1] for b in bounds])
            inside, between = self.covariances(p)
            short = ((self._within - inside) / (self._within + 0.02))[self._upper]
            parted = ((self._across - between) / (self._across + 0.02))[self._linked]
            worst, farthest = np.argsort(-short)[: _TUNING.added], np.argsort(-parted)[: _TUNING.added]
            worst, farthest = worst[short[worst] > 1e-3], farthest[parted[farthest] > 1e-3]
            if len(worst) + len(farthest) == 0:
                break
            used[worst] = True
            linked[farthest] = True
        return p

    def model(self, p: Array, blocks: int, closed: bool) -> RenewalModel:
        loads, logs, rates = p[:-1].reshape(3, self._k)
        root = math.sqrt(self._scale)
        correlations = np.exp(-np.concatenate((p[-1:], np.diff(self._path @ rates))))
        deviations = np.exp(self._basis @ logs) * root
        return RenewalModel(self._basis @ loads * root, deviations, correlations, np.zeros(self._n), blocks, closed)


def _knots(n: int) -> Array:
    """Places in [0, 1] of knots, dense at the borders of a block of n indices: all of them where they are few."""
    if n <= _TUNING.all_knots:
        return np.asarray(np.arange(n) / (n - 1))
    places = np.concatenate((_TUNING.knots, [0.0, 1.0, 1 / (n - 1), 1 - 1 / (n - 1)]))
    return np.unique(np.round(np.minimum(places, 1.0) * (n - 1))) / (n - 1)


def _hats(place: Array, knots: Array) -> Array:
    return np.stack([np.interp(place, knots, row) for row in np.eye(len(knots))], axis=1)


def block_lengths(width: int, b: int) -> list[int]:
    """Lengths worth trying for a ring (or line) of b indices whose covariance ends before lag `width`.

    Two indices of blocks that are not adjacent are at least L + 1 apart, so L ≥ width − 1 covers all pairs.
    """
    least = max(3, width - 1)
    found = {b // blocks for blocks in range(3, b // least + 1)} if least <= _TUNING.longest else set()
    near = sorted((x for x in found if x <= 2 * least), key=lambda x: abs(x / least - 1.2) + 2 * (b % x) / b)
    return near[: _TUNING.renewal_lengths]


def renewal_blocks(gram: Array, emphasis: float, lengths: list[int]) -> RenewalModel | None:
    """The best fit over some block lengths; None where no fit is good enough.

    **Formal guarantees.** As for `separators`: the covariance, computed from the numbers returned, is at least the
    circulant majorant of G in every entry, on the ring of whole blocks that is left after at most L − 1 indices are
    dropped (the Toeplitz majorant of a G that does not wrap, on a line, where none has to be dropped).
    """
    g = lags_of(gram)
    b = len(g)
    linear, wraps = _linear(gram)
    fits = []
    for length in lengths:
        blocks = b // length
        kept = length * blocks
        closed = wraps or kept < b
        lags = ring_of_fewer(g, b, kept) if closed else linear
        for model in _fits(lags, length, emphasis, blocks, closed):
            fits.append((b / kept, (_cost_of(model, lags, emphasis), model)))
    return _least(fits)


def _fits(lags: Array, length: int, emphasis: float, blocks: int, closed: bool) -> list[RenewalModel]:
    """The solution without an emphasis, and the one with it that the solver reaches from there."""
    plain = _BlockFit(lags, length, 0.0)
    found = [_plain_solution(lags.tobytes(), length)]
    if emphasis > 0:
        fit = _BlockFit(lags, length, emphasis)
        found.append(fit.solve(fit.start() if found[0] is None else found[0]))
    models = [_renewal_above(plain.model(p, blocks, closed), lags) for p in found if p is not None]
    return [model for model in models if model is not None]


@lru_cache(maxsize=8)
def _plain_solution(lags: bytes, length: int) -> Array | None:
    """The solution without an emphasis, which every emphasis begins with."""
    fit = _BlockFit(np.frombuffer(lags), length, 0.0)
    return fit.solve(fit.start())


def _cost_of(model: RenewalModel, lags: Array, emphasis: float) -> float:
    """Σ_j e^(emphasis·g_ij/g_0)·cov_ij, averaged over the rows i."""
    total = 0.0
    for offset, target in _targets(model, lags):
        total += float((np.exp(emphasis * target / lags[0]) * model.block_covariance(offset)).sum())
    return total / model.length


def _targets(model: RenewalModel, lags: Array) -> list[tuple[int, Array]]:
    i = np.arange(model.length)
    return [(o, lags[np.abs(o * model.length + i - i[:, None])]) for o in range(model.blocks)]


def _renewal_above(model: RenewalModel, lags: Array) -> RenewalModel | None:
    """The model raised until it dominates the circulant matrix of these lags; None where that takes too much."""
    for offsets in (range(1, model.blocks), (0,)):  # first the links, through the right loads alone, then the rest
        factor = 1.0
        for offset, target in _targets(model, lags):
            if offset not in offsets:
                continue
            needed = target > 0
            if offset == 0:
                np.fill_diagonal(needed, False)
            covariance = model.block_covariance(offset)
            if not np.all(covariance[needed] > 0):
                return None
            if needed.any():
                factor = max(factor, float((target[needed] / covariance[needed]).max()))
        if not factor < _TUNING.most_raised[1]:
            return None
        if offsets == (0,):
            model = model.scaled(math.sqrt(factor * (1 + 2 * MARGIN)))
        elif factor > 1:
            model = replace(model, right=model.right * factor * (1 + 2 * MARGIN))
    own, top = model.variances()[: model.length], float(lags[0]) * (1 + MARGIN)
    nuggets = np.maximum(top - own, 0.0) * (1 + MARGIN) + MARGIN * top
    model = replace(model, nuggets=nuggets)
    for offset, target in _targets(model, lags):
        if not np.all(model.block_covariance(offset) >= target * (1 + 0.5 * MARGIN)):
            return None
    return model
