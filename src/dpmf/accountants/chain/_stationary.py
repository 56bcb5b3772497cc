"""Chains for very many batches: stationary majorants known by their lags, transforms by squaring, no b × b matrix.

With G known only through numbers g_d ≥ G[i, i+d] (`Mechanism.lags`), two families apply: the order-1 stationary chain
u_i = w + x_i + v_i, whose transform is one matrix to the power n, and rings of separators for narrow bands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr

from dpmf import budget
from dpmf.accountants.chain._laws import _LOW, Law, Resolution, in_chunks
from dpmf.accountants.chain._majorants import MARGIN
from dpmf.accountants.chain._separators import SeparatorModel, _fit
from dpmf.accountants.chain._transfer import Spread, hat_weights
from dpmf.numerics import Array

_WIDEST = 8  # bandwidth up to which separators are tried
_SMALL_RING = 8  # blocks of the ring on which separators are fitted
_MOST_LEFT_OUT = 0.02  # of the indices of a ring
_RATES = np.concatenate((1 - np.geomspace(0.003, 0.95, 80), [0.0]))
_THRESHOLDS = (1e-26, 1e-9, 1e-4, 0.003, 0.01, 0.03, 0.1, 0.3)
_WIDE_SPREAD = 4.0  # standard deviations between the nodes of a factor that hardly matters
_MOST_NODES = 128  # of the chain: squaring takes the cube of their number
_CHUNK = 2**21  # complex numbers held per batch of frequencies


@dataclass(frozen=True)
class StationaryModel:
    """u_i = w + x_i + v_i: Var w = shared, x stationary of order 1 with Var x = smooth, v the nuggets, iid."""

    size: int
    shared: float
    smooth: float
    correlation: float
    nugget: float

    def variances(self) -> Array:
        return np.array([self.shared + self.smooth + self.nugget])

    def lags(self, count: int) -> Array:
        """The covariances at distances 0..count − 1."""
        found = self.shared + self.smooth * self.correlation ** np.arange(count, dtype=np.float64)
        found[0] += self.nugget
        return found

    def excess(self) -> float:
        """Var Σ a_i, about."""
        lags = np.expm1(np.minimum(self.lags(self.size), 300.0))
        return self.size * float(2 * lags.sum() - lags[0])

    def scaled(self, factor: float) -> StationaryModel:
        square = factor * factor
        return replace(self, shared=self.shared * square, smooth=self.smooth * square, nugget=self.nugget * square)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> StationaryLaw:
        return StationaryLaw(self, strike, sign, resolution, likely)


class StationaryLaw(Law):
    """The law of T for a `StationaryModel`.

    **Formal guarantees.** As for `LineLaw`, with w for its static factor and one transition matrix for all steps. Where
    w is negligible it is left out: with f = e^(w − τ/2), E f = 1, independent of the rest T° and E T° = n,
    (fT° − K)_+ ≤ (T° − K)_+ + (f − 1)_+·T° and (K − fT°)_+ ≤ (K − T°)_+ + (1 − f)_+·T°, and
    E(f − 1)_+ = E(1 − f)_+ = 2Φ(√τ/2) − 1 ≤ √(τ/2π).
    """

    def __init__(self, model: StationaryModel, strike: float, sign: int, resolution: Resolution, likely: float) -> None:
        super().__init__(strike, sign, likely, model.size)
        load, deviation = math.sqrt(model.shared), math.sqrt(model.smooth)
        left_out = model.size * math.sqrt(model.shared / (2 * math.pi)) * (1 + 1e-9)
        negligible = left_out <= 1e-3 * min(max(likely, 1e-18), 0.1) * min(strike, model.size)
        total = float(model.variances()[0])
        # A factor of small variance may be spread widely; a shared one counts n times.
        spacing = min(_WIDE_SPREAD, resolution.static * max(1.0, 0.1 * math.sqrt(total / max(model.shared, 1e-300))))
        self._static = Spread.trivial() if negligible else self._spread(load, spacing, deep=False)
        innovation = 1 - model.correlation**2
        steps = min(0.7, resolution.chain * max(math.sqrt(innovation), 0.02))
        start = self._spread(deviation, max(steps, (self._deep + deviation - _LOW) / _MOST_NODES), deep=True)
        self._nodes, self._start = start.nodes, start.weights
        slope = 0.0 if sign > 0 else deviation
        if len(self._nodes) > 1:
            means = model.correlation * self._nodes
            self._matrix, left = hat_weights(self._nodes, means, math.sqrt(innovation), slope)
        else:
            self._matrix, left = np.ones((1, 1)), np.zeros(1)
        smooth = model.smooth + (0.0 if negligible else model.shared)
        load = 0.0 if negligible else load
        y = load * self._static.nodes[:, None] + deviation * self._nodes - smooth / 2
        self._terms_table = self._table(
            float(y.min()), float(y.max()), math.sqrt(total), resolution.term, np.array([model.nugget])
        )
        self._rows, self._shares = self._terms_table.locate(y)
        self._operations = 2 * len(self._nodes) + len(self._static.nodes)
        if sign < 0:
            lost = self._static.lost + start.lost
            lost += float(self._start @ _power_sum(self._matrix, left, model.size))
            self.surplus = lost * strike
        else:
            self.surplus = self._call_tails(model, y, load, deviation, innovation)
        self.surplus = self.surplus * (1 + 1e-6) + (left_out if negligible else 0.0)

    def _call_tails(self, model: StationaryModel, y: Array, load: float, deviation: float, innovation: float) -> float:
        n, last = model.size, float(self._nodes[-1])
        total, mean = 0.0, float(self._static.mean(np.array([load]))[0])
        if len(self._static.nodes) > 1:
            total += n * float(ndtr(load - self._static.nodes[-1]))
        per_step = self._static.weights @ self._terms_table.excess(y, 0)
        if len(self._nodes) > 1:
            total += n * mean * float(ndtr(deviation - last))
            centre = model.correlation * self._nodes
            tilted = np.exp(deviation * centre + deviation**2 * (innovation - 1) / 2)
            beyond = tilted * ndtr((centre + deviation * innovation - last) / math.sqrt(innovation))
            per_step = per_step + n * mean * beyond
        return total + float(self._start @ _power_sum(self._matrix, per_step, n))

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        return in_chunks(
            self._transform, s, max(1, min(16, int(min(_CHUNK, budget.fitting(64))) // len(self._nodes) ** 2))
        )

    def _transform(self, s: np.ndarray) -> np.ndarray:
        table = self._terms_table.transforms(s)[0]
        table = table[:, 0] + 1j * table[:, 1]
        total = np.zeros(len(s), dtype=np.complex128)
        for weight, rows, shares in zip(self._static.weights, self._rows, self._shares, strict=True):
            terms = ((1 - shares)[:, None] * table[rows] + shares[:, None] * table[rows + 1]).T
            total += weight * ((self._start * terms)[:, None, :] @ self._powered(terms))[:, 0, 0]
        return total

    def _powered(self, terms: np.ndarray) -> np.ndarray:
        """(P·diag(terms))^(n−1)·1 for every frequency, by squaring."""
        exponent = self.terms - 1
        result = np.ones((*terms.shape, 1), dtype=np.complex128)
        square = self._matrix * terms[:, None, :]
        while exponent:
            if exponent & 1:
                result = square @ result
            exponent >>= 1
            if exponent:
                square = square @ square
        return result


def _power_sum(matrix: Array, vector: Array, count: int) -> Array:
    """Σ_{i < count} matrixⁱ·vector, by doubling."""
    total, sums, power = np.zeros_like(vector), vector, matrix
    while count:
        if count & 1:
            total = sums + power @ total
        count >>= 1
        if count:
            sums = sums + power @ sums
            power = power @ power
    return np.asarray(total)


def stationary_models(lags: Array) -> Iterator[tuple[str, StationaryModel | SeparatorModel]]:
    """Majorants of every Gram matrix with G[i, i+d] ≤ lags[d].

    **Formal guarantees.** Lines of b indices dominate `lags` at every distance, entry by entry. Lines of b − m indices
    dominate the ring of `lags`, max(lags[d], lags[b−d]): A is the average of A^(s), the mean over a window of b − m
    indices rotated by s, so E f(A) ≤ E f(A^(s)) for convex f, and every window of the ring's field has the same law.
    So it is for separators, whose ring is that of the b − m indices; see `separators`.
    """
    b = len(lags)
    ring = np.maximum(lags, np.concatenate((lags[:1], lags[:0:-1])))
    chains: list[StationaryModel] = []
    for emphasis in (0.0, 3.0):
        found = _separators(ring, emphasis)
        if found is not None:
            yield f"separators {emphasis:g}", found
        budget.check()
        chain = _fitted(lags, ring, emphasis)
        if chain not in chains:
            yield f"stationary {emphasis:g}", chain
        chains.append(chain)
    off = float(lags[1:].max(initial=0.0))
    yield "shared", _dominating(b, lags, off, 0.0)


def _separators(ring: Array, emphasis: float) -> SeparatorModel | None:
    """The best fit over a few block lengths, made on a short ring: the covariance does not reach beyond two blocks."""
    b = len(ring)
    width = int(np.flatnonzero(ring[: b // 2 + 1] > 0)[-1]) + 1
    best: tuple[float, SeparatorModel] | None = None
    if not 2 <= width <= _WIDEST:
        return None
    for length in range(max(2, width - 1), width + 3):
        left_out = b % length
        short = length * _SMALL_RING
        if b // length < 2 * _SMALL_RING or short // 2 < width:
            continue
        d = np.arange(short)
        near = np.minimum(d, short - d)
        # Where indices are left out, two may be nearer to each other on the shorter ring.
        found = _fit(np.maximum(ring[near], ring[near + left_out]), length, _SMALL_RING, emphasis, True)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], replace(found[1], blocks=b // length))
    return None if best is None else best[1]


def _fitted(lags: Array, ring: Array, emphasis: float) -> StationaryModel:
    """The stationary chain of least cost Σ_d e^(emphasis·g_d/g_0)·g'_d, over correlations, constants and cuts."""
    b = len(lags)
    best: tuple[float, StationaryModel] | None = None
    highest = np.maximum.accumulate(ring[1 : b // 2 + 1][::-1])[::-1]  # from each distance on
    cuts = {(0, float(lags[-1]))}
    for threshold in _THRESHOLDS:
        small = np.flatnonzero(highest <= threshold * ring[0])
        if len(small) and int(small[0]) <= _MOST_LEFT_OUT * b:
            cuts.add((int(small[0]), float(ring[small[0] + 1])))
    for left_out, _ in sorted(cuts):
        size = b - left_out
        target = (ring if left_out else lags)[:size]
        # Distances up to a few thousand one by one, then in groups, each with its largest value at its far end.
        edges = np.unique(np.concatenate((np.arange(1, min(size, 2048)), np.geomspace(1, size, 200).astype(np.int64))))
        edges = edges[(edges >= 1) & (edges < size)]
        tops = np.maximum.reduceat(target, edges)
        ends = np.append(edges[1:] - 1, size - 1).astype(np.float64)
        share = ends - edges + 1
        weight = share * np.exp(emphasis * tops / target[0])
        floor = float(target[-1])
        levels = {floor, *(threshold * float(target[0]) for threshold in _THRESHOLDS)}
        for shared in sorted(level for level in levels if floor <= level <= tops.max(initial=0.0)):
            above = np.maximum(tops - shared, 0.0)
            for rate in _RATES[:-1]:
                with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
                    shape = rate**ends
                    smooth = float(np.max(np.where(above > 0, above / shape, 0.0)))
                if not smooth <= 4 * target[0]:
                    continue
                cost = float(weight @ (shared + smooth * shape)) + max(0.0, shared + smooth - target[0]) / 2
                cost *= b / size
                if best is None or cost < best[0]:
                    best = (cost, _dominating(size, target, shared, float(rate)))
    if best is None:
        return _dominating(b, lags, float(lags[1:].max(initial=0.0)), 0.0)
    return best[1]


def _dominating(size: int, target: Array, shared: float, correlation: float) -> StationaryModel:
    """The least variances for this constant and this correlation, raised beyond their rounding errors.

    **Formal guarantees.** shared + smooth·ρ^d ≥ target[d]·(1 + 10⁻¹⁰) for 1 ≤ d < size, and the variance likewise.
    ρ^d is compared as e^(d·log ρ), whose exponent has an error below 10⁻⁷ where it is above −700.
    """
    shared = shared * (1 + 4 * MARGIN)
    need = target[1:size] * (1 + 2 * MARGIN) - shared
    missing = np.flatnonzero(need > 0)
    smooth = 0.0
    if len(missing):
        if correlation == 0.0:
            shared = float(target[1:size].max()) * (1 + 4 * MARGIN)
        else:
            exponents = np.log(need[missing]) - (missing + 1) * math.log(correlation)
            smooth = math.exp(min(float(exponents.max()), 600.0)) * (1 + 1e-6)
    nugget = max(0.0, float(target[0]) * (1 + 4 * MARGIN) - shared - smooth) + 4 * MARGIN * float(target[0])
    return StationaryModel(size, shared, smooth, correlation, nugget)
