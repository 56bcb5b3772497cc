"""Laws of T = Σ a_i whose transforms are products of small matrices: a line with a static factor, a ring of separators.

Each law is made for one noise multiplier, one strike and one direction (sign +1: calls, −1: puts). Loads are ≥ 0.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from dpmf import budget
from dpmf.accountants.chain._band import Band
from dpmf.accountants.chain._transfer import Spread, TermTable, Transform, hat_weights
from dpmf.kernels.chain import multiply_terms
from dpmf.numerics import UNIT, Array

_CLASSES = 40  # of nugget variances, and 1/256 of an octave for innovations: both rounded to the larger covariance
_FINEST, _USUAL = 0.7, 600  # spacings of a short line, and the length from which they are the usual ones
_CHUNK = 2**17  # doubles of values that are worked on at a time
_FREQUENCIES = 32
_BYTES_PER_DOUBLE = 64  # with copies, on a few threads, where memory is limited
_LOW, _HIGH = -4.5, 4.5  # where a spread may end on the side on which it only moves mass
_LEAST_VALUE = 1e-18  # smaller values are bounded by about this much
_STILL, _MOST_STILL = 1e-4, 1e-3  # variances of single innovations and of all of them together that are rounded to 0
_LOWEST_LOG = {1: -8.0, -1: -9.0}


@dataclass(frozen=True)
class Resolution:
    """How fine the spreads are: spacings of nodes in units of the deviation they resolve."""

    static: float = 0.16
    chain: float = 0.25
    term: float = 0.04

    def scaled(self, factor: float) -> Resolution:
        return Resolution(self.static * factor, self.chain * factor, self.term * factor)

    def affordable(self, indices: int) -> Resolution:
        """Finer spreads of factors for short lines, whose laws cost little: work grows with indices/factor³."""
        factor = min(1.0, max(_FINEST, (indices / _USUAL) ** (1 / 3)))
        return Resolution(self.static * factor, self.chain * factor, self.term)


@dataclass(frozen=True, eq=False)
class LineModel:
    """u_i = loads_i·z + deviations_i·x_i + v_i: z static, x an order-1 chain of unit variance, v the nuggets."""

    loads: Array
    deviations: Array
    correlations: Array
    nuggets: Array

    @property
    def size(self) -> int:
        return len(self.loads)

    def variances(self) -> Array:
        return np.asarray(self.loads**2 + self.deviations**2 + self.nuggets)

    def covariance(self) -> Array:
        """The Gram matrix that this model has."""
        return (
            np.outer(self.loads, self.loads)
            + chain_covariance(self.deviations, self.correlations)
            + np.diag(self.nuggets)
        )

    def scaled(self, factor: float) -> LineModel:
        return LineModel(
            self.loads * factor, self.deviations * factor, self.correlations, self.nuggets * factor * factor
        )

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> LineLaw:
        return LineLaw(self, strike, sign, resolution, likely)


def chain_covariance(deviations: Array, correlations: Array) -> Array:
    """deviations_i·deviations_j·Π ρ over the steps between i and j."""
    n = len(deviations)
    products = np.eye(n)
    for i in range(n - 1):
        products[i, i + 1 :] = np.cumprod(correlations[i:])
    products = np.maximum(products, products.T)
    return np.asarray(np.outer(deviations, deviations) * products)


def _moving(innovations: Array) -> Array:
    """Innovation variances without those that all together hardly matter: 0 raises the correlation to 1.

    Nodes would have to be as dense as the smallest steps, and fits push correlations as close to 1 as they may.
    """
    small = innovations <= _STILL
    return np.where(small, 0.0, innovations) if innovations[small].sum() <= _MOST_STILL else innovations


def classes_of(variances: Array) -> tuple[Array, np.ndarray]:
    """Variances rounded up to few values: the values and the class of each."""
    roots = np.sqrt(variances)
    top = float(roots.max())
    if top == 0.0:
        return np.zeros(1), np.zeros(len(variances), dtype=np.int64)
    level = np.ceil(roots / top * _CLASSES * (1 - 1e-12))
    values, kinds = np.unique(level, return_inverse=True)
    return np.asarray((values * (top / _CLASSES)) ** 2 * (1 + 1e-12)), kinds.astype(np.int64)


def in_chunks(transform: Transform, s: np.ndarray, width: int) -> np.ndarray:
    """The transform of all s, a few at a time, on a few threads. Beyond double range it is not finite."""

    def quietly(part: np.ndarray) -> np.ndarray:
        budget.check()
        with np.errstate(over="ignore", invalid="ignore"):
            return transform(part)

    # An even number of parts, so that two threads have the same to do.
    parts = np.array_split(s, min(len(s), 2 * math.ceil(len(s) / width / 2)))
    workers = min(len(parts), os.cpu_count() or 1, 8 if budget.fitting(1.0) == math.inf else 2)
    if workers < 2:
        return np.concatenate([quietly(part) for part in parts])
    contexts = [copy_context() for _ in parts]  # threads do not inherit the budgets
    with ThreadPoolExecutor(workers) as pool:
        return np.concatenate(list(pool.map(lambda context, part: context.run(quietly, part), contexts, parts)))


class Law:
    """What both laws share: the ends of spreads and tables, and the rounding error."""

    surplus: float
    _operations: int

    def transform(self, s: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def __init__(self, strike: float, sign: int, likely: float, terms: int) -> None:
        self.strike, self.sign, self.terms = strike, sign, terms
        # Tails that are added rather than moved should be small beside the value, about `likely` times n (or K).
        likely = min(max(likely, _LEAST_VALUE), 0.1)
        # Entries of a step so small that all paths through them are worth less than that, too: on each of them a call
        # is worth less than nK, a put less than K.
        self._negligible = 1e-5 * likely * min(1.0, terms / strike) / terms / (terms if sign > 0 else 1)
        self._reach = -float(ndtri(1e-3 * likely))
        self._deep = -float(ndtri(1e-3 * likely / terms))

    def _spread(self, largest_load: float, spacing: float, deep: bool) -> Spread:
        if largest_load == 0.0:
            return Spread.trivial()
        reach = self._deep if deep else self._reach
        if self.sign > 0:
            return Spread.of_standard_normal(spacing, _LOW, reach + largest_load, 0.0)
        return Spread.of_standard_normal(spacing, -reach - 0.1, _HIGH, largest_load)

    def _table(self, lowest: float, highest: float, root: float, term: float, nuggets: Array) -> TermTable:
        step = term * root
        low = max(lowest, math.log(self.strike / self.terms) + _LOWEST_LOG[self.sign])
        # Above log K + 9·√ν, a nugget hardly ever takes a below K.
        high = min(highest, math.log(self.strike) + 9 * math.sqrt(float(nuggets.max()))) + step
        return TermTable(min(low, high - step), high, step, nuggets, self.strike, self.terms)

    @property
    def rounding(self) -> float:
        """The relative error of M from products and sums: sums of `_operations` terms, a complex product per term."""
        return UNIT * self.terms * (4.0 * self._operations + 64)


class LineLaw(Law):
    """The law of T for a `LineModel`.

    **Formal guarantees.** (T − K)_+ is an increasing convex function of Σ exp(non-negative loads·factors), hence convex
    and increasing in z and in each x_i for given innovations after it; (K − T)_+ is a decreasing convex function of a
    sum of powers ≤ 1 of e^(κz) (κ the largest load), which is concave, hence convex and decreasing in e^(κz), and so
    for x_i. Given everything else, each factor is therefore replaced by its spread (`hat_weights`), first z, then
    x_1, x_2, ... given the node before. The rest:
    * call: a factor beyond the last node adds at most E[Σ_{j ≥ i} a_j; x_i > last], because (·)_+ is 1-Lipschitz. With
      the later innovations exact, E[a_j | x_i] = exp(l·x_i − l²/2), l ≤ c the largest deviation, which increases in l
      for l ≤ c ≤ last node ≤ x_i; so the bound with l = c for every later j is in closed form given the node before,
      and is summed over the discretised law of that node.
    * put: at the node −∞ the put is worth at most K.
    * entries left out of steps (`Band`): every a_i is cut at K (`TermTable`), so a path is worth at most nK to a call
      and K to a put; that, times the mass left out in each step, is added.
    """

    def __init__(self, model: LineModel, strike: float, sign: int, resolution: Resolution, likely: float) -> None:
        super().__init__(strike, sign, likely, model.size)
        resolution = resolution.affordable(model.size)
        loads, deviations = model.loads, model.deviations
        nuggets, self._kinds = classes_of(model.nuggets)
        top_load, top_deviation = float(loads.max()), float(deviations.max())
        # A factor that few indices load may be spread more coarsely.
        use = math.sqrt(float((loads**2).mean())) / top_load if top_load > 0 else 1.0
        self._static = self._spread(top_load, min(resolution.static / use, 2.5 * resolution.static), deep=False)
        innovations = _moving(np.maximum(1 - model.correlations**2, 0.0))
        spacing = 1.0
        if top_deviation > 0:
            inner = innovations[(deviations[1:] > 0) & (deviations[:-1] > 0) & (innovations > 0)]
            typical = math.sqrt(float(np.median(inner))) if len(inner) else 1.0
            # What the spreads of n steps add is forgotten as fast as the chain forgets, or at worst adds up.
            spacing = min(0.7, resolution.chain * max(typical, 1 / math.sqrt(model.size + 1)))
        start = self._spread(top_deviation, spacing, deep=True)
        self._nodes, self._start = start.nodes, start.weights
        slope = 0.0 if sign > 0 else top_deviation
        self._steps(innovations, spacing, slope)
        smooth = loads**2 + deviations**2
        z, x = self._static.nodes, self._nodes
        budget.claim(48.0 * len(loads) * len(z) * len(x))
        y = loads[:, None, None] * z[:, None] + deviations[:, None, None] * x - smooth[:, None, None] / 2
        root = math.sqrt(float((smooth + model.nuggets).max()))
        self._terms_table = self._table(float(y.min()), float(y.max()), root, resolution.term, nuggets)
        self._rows, self._shares = self._terms_table.locate(y)
        self.surplus = (self._tails(model, y, start, top_deviation) + self._skipped()) * (1 + 1e-9)

    def _steps(self, innovations: Array, spacing: float, slope: float) -> None:
        """Transition matrices, one per class of innovation variance (rounded down: that raises correlations)."""
        self._matrices: list[Array | None] = []
        self._bands: list[Band | None] = []
        self._left: list[Array] = []
        if len(self._nodes) == 1:
            self._step_kinds = np.zeros(len(innovations), dtype=np.int64)
            self._matrices, self._left, self._classes = [None], [np.zeros(1)], np.zeros(1)
            self._bands = [None]
            return
        narrow = np.sqrt(innovations) < spacing / 20
        level = np.floor(np.log2(np.where(narrow, 1.0, innovations)) * 256 * (1 + 1e-12))
        level[narrow] = -np.inf
        self._classes, self._step_kinds = np.unique(level, return_inverse=True)
        for value in self._classes:
            if value == -np.inf:
                self._matrices.append(None)
                self._bands.append(None)
                self._left.append(np.zeros(len(self._nodes)))
                continue
            variance = 2.0 ** (value / 256)
            means = math.sqrt(max(0.0, 1 - variance)) * self._nodes
            matrix, left = hat_weights(self._nodes, means, math.sqrt(variance), slope)
            self._matrices.append(matrix)
            self._bands.append(Band.of(matrix, self._negligible / len(self._nodes)))
            self._left.append(left)

    def _skipped(self) -> float:
        """What all paths through entries that were left out are worth: their mass, times nK for calls, K for puts."""
        mass = sum(band.left_out for kind in self._step_kinds.tolist() if (band := self._bands[kind]) is not None)
        return mass * self.strike * (self.terms if self.sign > 0 else 1)

    @property
    def _summands(self) -> int:
        """Of the longest sums in the steps of the chain, all together."""
        return sum(band.summands for kind in self._step_kinds.tolist() if (band := self._bands[kind]) is not None)

    def _together(self) -> int:
        """Frequencies that are worked on together."""
        return min((band.widest() // 2 for band in self._bands if band is not None), default=_FREQUENCIES)

    def _tails(self, model: LineModel, y: Array, start: Spread, top: float) -> float:
        """What is added to the option's value for spreads that end, tables that end and nodes at −∞."""
        n, last = model.size, float(self._nodes[-1])
        law = self._start
        if self.sign < 0:
            lost = self._static.lost + start.lost
            for kind in self._step_kinds.tolist():
                lost += float(law @ self._left[kind])
                matrix = self._matrices[kind]
                law = law if matrix is None else law @ matrix
            return lost * self.strike
        weights = self._static.weights
        total = 0.0
        if len(self._static.nodes) > 1:
            total += float(ndtr(model.loads - self._static.nodes[-1]).sum())
        means = self._static.mean(model.loads)
        later = np.cumsum(means[::-1])[::-1]
        if top > 0:
            total += float(later[0] * ndtr(top - last))
        for i in range(n):
            budget.check()
            total += float(weights @ self._terms_table.excess(y[i], int(self._kinds[i])) @ law)
            if i == n - 1 or top == 0:
                continue
            kind = int(self._step_kinds[i])
            matrix = self._matrices[kind]
            if matrix is None:
                continue
            variance = 2.0 ** (float(self._classes[kind]) / 256)
            centre = math.sqrt(max(0.0, 1 - variance)) * self._nodes
            tilted = np.exp(top * centre + top**2 * (variance - 1) / 2)
            beyond = tilted * ndtr((centre + top * variance - last) / math.sqrt(variance))
            total += float(later[i + 1] * (law @ beyond))
            law = law @ matrix
        return total

    @property
    def rounding(self) -> float:
        """The relative error of M from products and sums.

        A sum of n products with weights ≥ 0, whatever its order, is wrong by at most 1.01·n units of Σ w|v|, v complex,
        because real and imaginary parts are summed apart. For an index: the nugget's sum, the step of the chain, and 16
        units for interpolation and a complex product; at the end the sum over all nodes.
        """
        nodes, factors = len(self._nodes), len(self._static.nodes)
        per_index = self._terms_table.summands + 16
        return 1.05 * UNIT * (self.terms * per_index + self._summands + nodes * factors + 16)

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        held = min(_CHUNK, budget.fitting(_BYTES_PER_DOUBLE)) / (2 * len(self._nodes))
        return in_chunks(self._transform, s, max(2, min(_FREQUENCIES, int(held), self._together())))

    def _transform(self, s: np.ndarray) -> np.ndarray:
        tables = self._terms_table.transforms(s)
        nodes, factors = len(self._nodes), len(self._static.nodes)
        total = np.zeros(2 * len(s))
        some = max(1, _CHUNK // (2 * nodes * len(s)))
        for begin in range(0, factors, some):
            part = slice(begin, min(begin + some, factors))
            values = np.zeros(((part.stop - begin) * nodes, 2, len(s)))
            values[:, 0] = 1.0
            for i in range(self.terms - 1, -1, -1):
                rows, shares = self._rows[i, part].ravel(), self._shares[i, part].ravel()
                multiply_terms(values, tables[self._kinds[i]], rows, shares)
                if i > 0 and (band := self._bands[self._step_kinds[i - 1]]) is not None:
                    values = band.apply(values.reshape(-1, nodes, 2 * len(s))).reshape(values.shape)
            weights = np.outer(self._static.weights[part], self._start).ravel()
            total += weights @ values.reshape(len(weights), -1)
        return np.asarray(total[: len(s)] + 1j * total[len(s) :])
