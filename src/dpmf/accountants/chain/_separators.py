"""Rings of iid separators: a majorant for narrow bands, whose transform on a ring is exactly a trace.

Blocks of L indices; index i of block B has u = left_i·s_B + right_i·s_{B+1} + inner_i·z_B + nugget, with all s, z
independent standard normals, on a ring of blocks (or on a line, with one more separator than blocks). The covariance
ends after adjacent blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import ndtr

from dpmf import budget
from dpmf.accountants.chain._laws import Law, Resolution, classes_of, in_chunks
from dpmf.accountants.chain._majorants import MARGIN, lags_of
from dpmf.gram.bands import cyclic_bandwidth
from dpmf.kernels.chain import block_transforms, trace_of_power
from dpmf.numerics import UNIT, Array

_WIDEST = 8  # bandwidth up to which separators are tried


@dataclass(frozen=True, eq=False)
class SeparatorModel:
    """The loads and nuggets of one block, and how many blocks there are."""

    left: Array
    right: Array
    inner: Array
    nuggets: Array
    blocks: int
    closed: bool

    @property
    def size(self) -> int:
        return len(self.left) * self.blocks

    def variances(self) -> Array:
        return np.asarray(self.left**2 + self.right**2 + self.inner**2 + self.nuggets)

    def covariance(self) -> Array:
        """The Gram matrix that this model has."""
        length, blocks = len(self.left), self.blocks
        loads = np.zeros((blocks, length, 2 * blocks + 1))
        for block in range(blocks):
            loads[block, :, block] += self.left
            loads[block, :, (block + 1) % blocks if self.closed else block + 1] += self.right
            loads[block, :, blocks + 1 + block] = self.inner
        flat = loads.reshape(self.size, -1)
        return np.asarray(flat @ flat.T + np.diag(np.tile(self.nuggets, blocks)))

    def scaled(self, factor: float) -> SeparatorModel:
        loads = self.left * factor, self.right * factor, self.inner * factor
        return SeparatorModel(*loads, self.nuggets * factor**2, self.blocks, self.closed)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> SeparatorLaw:
        return SeparatorLaw(self, strike, sign, resolution, likely)


class SeparatorLaw(Law):
    """The law of T for a `SeparatorModel`.

    **Formal guarantees.** Every factor is spread once; all are independent, so (T − K)_+ (and (K − T)_+) is, given the
    others, convex in it (in its exponential) as for `LineLaw`, and the spread factors stay independent: the transform
    is the trace of the product of the blocks' matrices (on a line, with the weights of its two ends, the sum of its
    entries), nothing is left out. A factor beyond its last node adds E[Σ a_i; beyond], in closed form but for the means
    of the factors that are already spread; a put is worth at most K at a node −∞.
    """

    def __init__(self, model: SeparatorModel, strike: float, sign: int, resolution: Resolution, likely: float) -> None:
        super().__init__(strike, sign, likely, model.size)
        self._blocks, self._closed = model.blocks, model.closed
        nuggets, self._kinds = classes_of(model.nuggets)
        left, right, inner = model.left, model.right, model.inner
        smooth = left**2 + right**2 + inner**2
        self._outer = self._spread(float(max(left.max(), right.max())), resolution.static, deep=False)
        self._inner = self._spread(float(inner.max()), 1.3 * resolution.static, deep=False)
        x, z = self._outer.nodes, self._inner.nodes
        budget.claim(48.0 * len(x) ** 2 * len(z) * len(left))
        y = (
            left * x[:, None, None, None] + right * x[:, None, None] + inner * z[:, None] - smooth / 2
        )  # left separator × right separator × inner factor × index
        root = math.sqrt(float((smooth + model.nuggets).max()))
        self._terms_table = self._table(float(y.min()), float(y.max()), root, resolution.term, nuggets)
        rows, shares = self._terms_table.locate(y)
        shape = (len(x) ** 2, len(z), len(left))
        self._rows, self._shares = rows.reshape(shape), shares.reshape(shape)
        self.surplus = self._tails(model, y) * (1 + 1e-9)

    def _tails(self, model: SeparatorModel, y: Array) -> float:
        if self.sign < 0:
            return ((self._blocks + 1) * self._outer.lost + self._blocks * self._inner.lost) * self.strike
        factors = ((model.left, self._outer), (model.right, self._outer), (model.inner, self._inner))
        means = np.ones(len(model.left))
        beyond = np.zeros(len(model.left))
        for load, spread in factors:
            means *= np.maximum(spread.mean(load), 1.0)
            if len(spread.nodes) > 1:
                beyond += ndtr(load - spread.nodes[-1])
        total = float((means * beyond).sum())
        outer, inner = self._outer.weights, self._inner.weights
        for i in range(len(model.left)):
            excess = self._terms_table.excess(y[..., i], int(self._kinds[i]))
            total += float(np.einsum("a,c,q,acq->", outer, outer, inner, excess, optimize=True))
        return total * self._blocks

    @property
    def rounding(self) -> float:
        """The relative error of M from products and sums, counted as for `LineLaw`: for an index the nugget's sum,
        interpolation and a complex product, for a block the sum over its inner factor and a product of matrices,
        complex in both factors."""
        outer, inner = len(self._outer.nodes), len(self._inner.nodes)
        per_index, per_block = self._terms_table.summands + 16, inner + 4 * outer + 16
        return 1.05 * UNIT * (self.terms * per_index + self._blocks * per_block)

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        return in_chunks(self._transform, s, 16)

    def _transform(self, s: np.ndarray) -> np.ndarray:
        nodes = len(self._outer.nodes)
        parts = np.empty((nodes * nodes, 2, len(s)))
        tables = self._terms_table.transforms(s)
        block_transforms(tables, self._kinds, self._rows, self._shares, self._inner.weights, parts)
        matrices = parts.reshape(nodes, nodes, 2, len(s)) * self._outer.weights[:, None, None]
        if not self._closed:
            product = np.ones((len(s), nodes), dtype=np.complex128)
            steps = np.moveaxis(matrices[:, :, 0] + 1j * matrices[:, :, 1], 2, 0)
            for _ in range(self._blocks):
                product = np.einsum("sac,sc->sa", steps, product)
            return np.asarray(product @ self._outer.weights)
        powers = [trace_of_power(np.ascontiguousarray(m), self._blocks) for m in matrices.transpose(3, 2, 0, 1)]
        return np.array(powers, dtype=np.complex128)


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
    majorant of G in every entry (the Toeplitz majorant of a G that does not wrap, on a line). Where the block length
    does not divide b, the m indices too many are left out: A is the average of A^(s), the mean of the a_i over a window
    of b − m indices rotated by s, so E f(A) ≤ E f(A^(s)) for convex f, and every window of the circulant field has the
    same law. On the ring of b − m indices two indices are no farther apart than on that of b; each lag gets the larger
    of the two values it can have.
    """
    g = lags_of(gram)
    b = len(g)
    width = cyclic_bandwidth(gram)
    best: tuple[float, SeparatorModel] | None = None
    if not 2 <= width <= _WIDEST:
        return None
    linear = np.array([np.diagonal(gram, d).max() for d in range(b)])
    wraps = bool(np.any(linear[b // 2 + 1 :] > 0))
    for length in range(max(2, width - 1), width + 3):
        blocks = b // length
        if blocks < 4:
            continue
        kept = length * blocks
        lags = ring_of_fewer(g, b, kept)
        closed = wraps or kept < b
        found = _fit(lags if closed else linear, length, blocks, emphasis, closed)
        if found is not None:
            cost = found[0] * b / kept
            if best is None or cost < best[0]:
                best = (cost, found[1])
    return None if best is None else best[1]


def _fit(lags: Array, length: int, blocks: int, emphasis: float, closed: bool) -> tuple[float, SeparatorModel] | None:
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
    for level in (0.3, 0.6):
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
    return _dominating(left, inner, lags, blocks, emphasis, closed)


def _dominating(
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
    if factor > 1.5:
        return None
    model = model.scaled(math.sqrt(max(1.0, factor) * (1 + MARGIN)))
    nuggets = np.maximum(float(target[0, 0]) - model.variances(), 0.0) * (1 + MARGIN) + MARGIN * float(target[0, 0])
    model = SeparatorModel(model.left, model.right, model.inner, nuggets, blocks, closed)
    covariance = model.covariance()
    if not np.all(covariance >= target * (1 - 0.5 * MARGIN)):
        return None
    return float((np.exp(emphasis * target / lags[0]) * covariance).sum() / len(lags)), model
