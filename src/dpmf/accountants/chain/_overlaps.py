"""Lines of equal blocks whose indices load several separators each: the models, and the laws that they lead to.

Standard normal separators s_0, s_1, ... stand at the borders of blocks of L indices. Index i of block B loads
s_B, ..., s_{B+m}: with L = 1 that is a moving average, so that the Gram matrix of a band of m + 1 coefficients has a
model without any excess; longer blocks make wider bands out of few separators. The state along the line is the last m
separators, each of them on few nodes (docs/theory/chain.md, "Overlapping separators").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.special import ndtr

from dpmf import budget
from dpmf.accountants.chain._lines import in_chunks
from dpmf.accountants.chain._spreads import (
    PANEL,
    POINT_WEIGHTS,
    POINTS,
    WEIGHT_ERROR,
    WEIGHT_FLOOR,
    Option,
    Resolution,
    Spread,
    classes_of,
    floors,
)
from dpmf.kernels.chain import block_transforms, overlap_step
from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast these laws are. All positive values give sound bounds.

    Attributes:
      spacings: of nodes at the centre, by depth, for the usual resolution: the work grows like nodes^(depth + 1).
      inner_spacing: the same for the factor inside a block.
      usual: the resolution that `spacings` are for.
      coarse: the power of the resolution by which spacings grow: there are few nodes to begin with.
      usual_load: the largest load of a separator for which they are meant.
      by_load: the power of a larger load by which spacings fall.
      widest: the largest spacing.
      inner_end: distance from 0 at which nodes end on the side where truncation moves mass inward.
      width: deviation, in nodes per unit, of the density of nodes: √3 is the best for a normal variable.
      towards: how far the centre moves towards where the factor is, given that the option pays.
      farthest: the most that the centre moves.
      frequencies: frequencies that are worked on together.
    """

    spacings: tuple[float, ...] = (0.12, 0.2, 0.36, 0.5)
    inner_spacing: float = 0.3
    usual: float = 0.16
    coarse: float = 0.8
    usual_load: float = 0.35
    by_load: float = 0.5
    widest: float = 1.3
    inner_end: float = 3.6
    width: float = 1.7320508
    towards: float = 0.4
    farthest: float = 1.5
    frequencies: int = 16


_TUNING = _Tuning()


@dataclass(frozen=True, eq=False)
class OverlapModel:
    """Index i of block B has u = Σ_d loads[i, d]·s_{B+d} + inner_i·z_B + nugget; the last block may be cut short.

    Attributes:
      loads: of separators, index of the block × distance d = 0..m.
      inner: of the factor that a block has for itself.
      nuggets: variances.
      size: the number of indices of the line.
    """

    loads: Array
    inner: Array
    nuggets: Array
    size: int

    @property
    def length(self) -> int:
        return len(self.loads)

    @property
    def depth(self) -> int:
        return self.loads.shape[1] - 1

    @property
    def blocks(self) -> int:
        return -(-self.size // self.length)

    def variances(self) -> Array:
        own = (self.loads**2).sum(axis=1) + self.inner**2 + self.nuggets
        return np.asarray(np.tile(own, self.blocks)[: self.size])

    def block_covariance(self, offset: int) -> Array:
        """The covariance of the indices of a block with those of the block that comes `offset` later."""
        if offset > self.depth:
            return np.zeros((self.length, self.length))
        found = self.loads[:, offset:] @ self.loads[:, : self.depth + 1 - offset].T
        if offset == 0:
            found = found + np.outer(self.inner, self.inner) + np.diag(self.nuggets)
        return np.asarray(found)

    def covariance(self) -> Array:
        """The Gram matrix of this model."""
        length, blocks = self.length, self.blocks
        full = np.zeros((blocks, length, blocks, length))
        for offset in range(min(self.depth, blocks - 1) + 1):
            part = self.block_covariance(offset)
            for block in range(blocks - offset):
                full[block, :, block + offset] = part
                full[block + offset, :, block] = part.T
        return full.reshape(blocks * length, -1)[: self.size, : self.size]

    def variance_of_sum(self) -> float:
        """About Var Σ a_i: it only says where to look for a tilt."""
        parts = [np.expm1(np.minimum(self.block_covariance(k), 300.0)).sum() for k in range(self.depth + 1)]
        return float(2 * sum(parts) - parts[0]) * self.size / self.length

    def scaled(self, factor: float) -> OverlapModel:
        return replace(
            self, loads=self.loads * factor, inner=self.inner * factor, nuggets=self.nuggets * factor * factor
        )

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> OverlapLaw:
        return OverlapLaw(self, Option(strike, sign, self.size, likely), resolution)


class OverlapLaw:
    """The law of T for an `OverlapModel`.

    **Formal guarantees.** As for `SeparatorLaw`: every factor is independent of the others and is spread once. For
    calls, let κ be the least positive load of a factor: T is a sum of powers of e^(κz), each at least 1 or a constant,
    so (T − K)_+ is convex and increasing in e^(κz), and the spread is linear in that (`graded_spread`); for puts κ is
    the largest load, all powers are at most 1, and (K − T)_+ is convex and decreasing. The spread factors stay
    independent, so the transform is a product of the blocks' transforms, given the separators, summed over the nodes of
    all separators: exactly what the recursion over the last m separators does. What is beyond the nodes adds
    E[Σ a_i; beyond] to a call, in closed form but for the means of factors that are already spread; a put is worth at
    most K at a node −∞.
    """

    def __init__(self, model: OverlapModel, option: Option, resolution: Resolution) -> None:
        self.option, self._model = option, model
        nuggets, self._kinds = classes_of(model.nuggets)
        self.nuggets = nuggets[self._kinds]
        finer = (resolution.static / _TUNING.usual) ** _TUNING.coarse
        finer *= min(1.0, (_TUNING.usual_load / max(float(model.loads.max()), 1e-300)) ** _TUNING.by_load)
        spacings = _TUNING.spacings
        spacing = spacings[min(model.depth, len(spacings)) - 1]
        count = model.blocks + model.depth
        self.outer = _graded(option, model.loads, spacing * finer, count)
        self.inner = _graded(option, model.inner, _TUNING.inner_spacing * finer, model.blocks)
        x, z = self.outer.nodes, self.inner.nodes
        depth, length = model.depth, model.length
        self._nodes = len(x)
        budget.claim(48.0 * len(x) ** (depth + 1) * len(z) * length)
        smooth = (model.loads**2).sum(axis=1) + model.inner**2
        y = z[:, None] * model.inner - smooth / 2  # then separator 0 × ... × separator m × inner factor × index
        for d in range(depth, -1, -1):
            y = (x[:, None] * model.loads[:, d]).reshape(len(x), *([1] * (y.ndim - 1)), length) + y
        y = y.reshape(len(x) ** (depth + 1), len(z), length)
        step = resolution.term * math.sqrt(float((smooth + model.nuggets).max()))
        self.table = option.table(float(y.min()), float(y.max()), step, nuggets)
        self._rows, self._shares = self.table.locate(y)
        self.surplus = self._tails(y) * (1 + 1e-9)
        # For an index: the nugget's sum, interpolation and a complex product. For a block: the sum over its inner
        # factor, and a sum over the nodes of complex products.
        per_block = length * (self.table.summands + 16) + len(z) + 4 * len(x) + 16
        self.rounding = 1.05 * UNIT * (model.blocks * per_block + 4 * depth * len(x) + 16)

    def _tails(self, y: Array) -> float:
        model = self._model
        if self.option.sign < 0:
            lost = (model.blocks + model.depth) * self.outer.lost + model.blocks * self.inner.lost
            return lost * self.option.strike
        means, beyond = np.ones(model.length), np.zeros(model.length)
        factors = [(load, self.outer) for load in model.loads.T]
        for load, spread in (*factors, (model.inner, self.inner)):
            means *= np.maximum(spread.mean(load), 1.0)
            beyond += spread.beyond(load) * (load > 0)
        total = float((means * beyond).sum())
        weights = self.outer.weights
        for _ in range(model.depth):
            weights = np.multiply.outer(weights, self.outer.weights).ravel()
        for i in range(model.length):
            budget.check()
            excess = self.table.excess(y[..., i], int(self._kinds[i]))
            total += float(weights @ excess @ self.inner.weights)
        return total * model.blocks

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        return in_chunks(self._transform, s, _TUNING.frequencies)

    def _transform(self, s: np.ndarray) -> np.ndarray:
        model, nodes = self._model, self._nodes
        floor, tables = floors(s), self.table.transforms(s)
        block = np.empty((nodes ** (model.depth + 1), 2, len(s)))
        weights = self.outer.weights
        values = np.zeros((nodes**model.depth, 2, len(s)))
        values[:, 0] = 1.0
        last = model.size - (model.blocks - 1) * model.length
        for number, indices in ((1, last), (model.blocks - 1, model.length)):
            if number == 0:
                continue
            rows = np.ascontiguousarray(self._rows[..., :indices])
            shares = np.ascontiguousarray(self._shares[..., :indices])
            block_transforms(tables, self._kinds, rows, shares, self.inner.weights, floor, block)
            for _ in range(number):
                values = overlap_step(block, values, weights, floor)
        for _ in range(model.depth):
            values = np.tensordot(weights, values.reshape(nodes, -1, 2, len(s)), axes=1)
        total = values.reshape(2, len(s))
        return np.asarray(total[0] + 1j * total[1])


def _graded(option: Option, loads: Array, spacing: float, count: int) -> Spread:
    """The spread of a factor with these loads, one of `count`: nodes are dense where the factor is likely to be."""
    if not loads.any():
        return Spread.trivial()
    largest, least = float(loads.max()), float(loads[loads > 0].min())
    # About where the factor is if all of them together move T to the strike.
    away = (option.strike - option.terms) / (count * float(loads.sum()))
    centre = max(-_TUNING.farthest, min(_TUNING.farthest, _TUNING.towards * away))
    low, high = option.ends(largest, _TUNING.inner_end)
    nodes = np.concatenate((_steps(centre, low, spacing)[:0:-1], _steps(centre, high, spacing)))
    return graded_spread(nodes, least if option.sign > 0 else largest, option.sign)


def _steps(centre: float, end: float, spacing: float) -> Array:
    """Nodes from the centre to the end, farther and farther apart."""
    distance, found = 0.0, [0.0]
    while distance < abs(end - centre):
        distance += min(_TUNING.widest, spacing * math.exp(0.5 * (distance / _TUNING.width) ** 2))
        found.append(distance)
    return centre + math.copysign(1.0, end - centre) * np.array(found)


def graded_spread(nodes: Array, slope: float, sign: int) -> Spread:
    """A standard normal factor on nodes at any distances, linear in e^(slope·z), for calls (sign +1) or puts (−1).

    **Formal guarantees.** As `hat_weights` for a function that is convex and increasing (calls) or decreasing (puts) in
    e^(slope·z). For calls, z below the first node is moved up to it; for puts there is a node at −∞. Each cell is cut
    into panels that are as narrow as there, so that the same error bound holds.
    """
    weights = np.zeros(len(nodes))
    for k, (low, high) in enumerate(pairwise(nodes.tolist())):
        width = high - low
        panels = max(1, math.ceil(width / PANEL))
        offset = ((np.arange(panels)[:, None] + POINTS) * (width / panels)).ravel()
        mass = np.tile(POINT_WEIGHTS, panels) * (width / panels / math.sqrt(2 * math.pi))
        mass = mass * np.exp(-0.5 * (low + offset) ** 2)
        upper = np.expm1(slope * offset) / math.expm1(slope * width) if slope * width > 1e-9 else offset / width
        weights[k] += float(mass @ (1 - upper))
        weights[k + 1] += float(mass @ upper)
    first, last = float(nodes[0]), float(nodes[-1])
    weights[-1] += float(ndtr(-last))
    below = float(ndtr(first))
    if sign > 0:
        weights[0] += below
        below = 0.0
    else:
        gain = min(0.5 * slope**2 - slope * first, 700.0)
        weights[0] += min(math.exp(gain) * float(ndtr(first - slope)), below)
    return Spread(nodes, weights * (1 + WEIGHT_ERROR) + WEIGHT_FLOOR, below * (1 + WEIGHT_ERROR) + WEIGHT_FLOOR)
