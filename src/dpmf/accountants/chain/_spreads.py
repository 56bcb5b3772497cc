"""Discretisation from above: random variables replaced by spreads on nodes, and transforms of single terms in tables.

A spread replaces a random variable by one on finitely many nodes in such a way that the expectation of every function
of the kind at hand can only rise. All weights are non-negative and rounded up, so that the measure can only grow. The
theory is in docs/theory/discretisation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr, ndtri

from dpmf import budget
from dpmf.numerics import UNIT, Array

# Constants of the proof that weights are rounded up (docs/theory/discretisation.md, "Weights of a spread").
POINTS, POINT_WEIGHTS = np.polynomial.legendre.leggauss(12)
POINTS, POINT_WEIGHTS = (POINTS + 1) / 2, POINT_WEIGHTS / 2
PANEL = 0.5  # largest width of a panel of the quadrature, in deviations
_FARTHEST = 13.0  # deviations from the mean beyond which a weight is below the floor
WEIGHT_ERROR = 1e-12  # relative error of the quadrature and of `ndtr`
WEIGHT_FLOOR = 1e-34  # bound on weights where the quadrature's relative error is not under control
_SMALLEST = 1e-290  # at real tilts, smaller numbers are raised to this (docs/theory/floating-point.md, "The chain")
_NODE_BITS = 24  # significant bits of spacings, so that multiples of them are exact


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast spreads are. All positive values give sound bounds.

    Attributes:
      inner_end: distance from 0 at which a spread ends on the side where truncation moves mass inward.
      tails: the part of the option's likely value that truncated tails may add.
      cut: the part of the option's likely value that jumps cut short in transition matrices may be worth.
      moved: the part of a row whose jumps may be cut short on the side where that raises the option.
      band_rows: rows of one piece of a banded matrix.
      single_thread: number of multiplications up to which a BLAS starts no threads for a product.
      least_value: options worth less than this, in units of n, need not be bounded tightly.
      table_depth_call: how far below log(K/n) a table of terms begins, for calls.
      table_depth_put: the same for puts.
      table_height: how many nugget deviations above log K a table of terms ends.
      nugget_reach: how many deviations of a nugget its nodes cover.
      narrowest: a deviation below 1/narrowest of the spacing is not resolved.
      nugget_classes: number of values that nugget deviations are rounded up to.
      finest: the smallest factor by which spacings are refined for short chains.
      usual_length: the number of indices from which spacings are not refined.
    """

    inner_end: float = 3.2
    tails: float = 1e-3
    cut: float = 1e-3
    moved: float = 1e-4
    band_rows: int = 16
    single_thread: int = 2**18
    least_value: float = 1e-18
    table_depth_call: float = 8.0
    table_depth_put: float = 9.0
    table_height: float = 9.0
    nugget_reach: float = 8.5
    narrowest: float = 20.0
    nugget_classes: int = 40
    finest: float = 0.7
    usual_length: float = 600.0


_TUNING = _Tuning()


@dataclass(frozen=True)
class Resolution:
    """Spacings of nodes, in units of the deviation that they resolve. All positive values give sound bounds.

    Attributes:
      static: of factors that are spread once.
      chain: of the states of a chain, in units of the deviation of one step.
      term: of the table of terms, in units of the largest deviation of log a.
    """

    static: float = 0.16
    chain: float = 0.25
    term: float = 0.04

    def scaled(self, factor: float) -> Resolution:
        return Resolution(self.static * factor, self.chain * factor, self.term * factor)

    def affordable(self, indices: float) -> Resolution:
        """Finer spreads of factors for short chains, whose laws cost little: work grows like indices/factor³."""
        factor = min(1.0, max(_TUNING.finest, (indices / _TUNING.usual_length) ** (1 / 3)))
        return Resolution(self.static * factor, self.chain * factor, self.term)


def few_bits(value: float) -> float:
    """A positive number rounded down to so few significant bits that its small multiples are exact."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(math.ldexp(mantissa, _NODE_BITS)), exponent - _NODE_BITS)


def floors(s: np.ndarray) -> Array:
    """For each frequency the number that real parts are raised to: at real frequencies all terms are positive."""
    return np.where(s.imag == 0, _SMALLEST, -np.inf)


def narrow(deviations: Array, spacing: float) -> np.ndarray:
    """Which deviations are too small to be resolved by nodes at this spacing."""
    return np.asarray(deviations < spacing / _TUNING.narrowest)


def hat_weights(nodes: Array, means: Array, deviation: float, slope: float) -> tuple[Array, Array]:
    """Spreads of X ~ N(mean, deviation²), one row per mean, onto equidistant nodes.

    Args:
      nodes: the nodes, multiples of their spacing.
      means: one mean per row.
      deviation: the standard deviation, the same for all rows.
      slope: 0 for linear interpolation in x, with X below the first node moved up to it. If positive, interpolation is
        linear in e^(slope·x), with a node at −∞, where e^(slope·x) = 0. X above the last node is counted there.

    Returns:
      The weights (mean × node), and the weights of the node at −∞.

    **Formal guarantees.** Let g be a function of X. If g is convex and increasing, slope = 0 raises E g(min(X, last
    node)), because interpolation of a convex function lies above it. If g is a convex decreasing function of
    e^(slope·x), slope > 0 raises E g(X), with g(−∞) at its node; for X above the last node g(X) ≤ g(last). Weights are
    rounded up: see "Weights of a spread" in docs/theory/discretisation.md for the error of the quadrature.
    """
    spacing = float(nodes[1] - nodes[0])
    panels = max(1, math.ceil(spacing / (PANEL * deviation)))
    offset = ((np.arange(panels)[:, None] + POINTS) * (spacing / panels)).ravel()
    measure = np.tile(POINT_WEIGHTS, panels) * (spacing / panels / deviation / math.sqrt(2 * math.pi))
    upper = np.expm1(slope * offset) / math.expm1(slope * spacing) if slope * spacing > 1e-9 else offset / spacing
    share = np.stack((measure * (1 - upper), measure * upper), axis=1)
    budget.claim(24.0 * len(means) * len(nodes))
    weights = np.zeros((len(means), len(nodes)))
    # Only the cells within _FARTHEST deviations of the mean: all others have weights far below the floor.
    cells = min(len(nodes) - 1, math.ceil(2 * _FARTHEST * deviation / spacing) + 2)
    nearest = np.floor((means - _FARTHEST * deviation - nodes[0]) / spacing)
    first = np.clip(nearest, 0, len(nodes) - 1 - cells).astype(np.int64)
    rows = max(1, int(min(4e6, budget.fitting(40)) / (cells * len(offset))))
    for start in range(0, len(means), rows):
        budget.check()
        some = np.arange(start, min(start + rows, len(means)))[:, None]
        columns = first[some] + np.arange(cells)
        z = ((nodes[columns] - means[some])[:, :, None] + offset) / deviation
        cell = np.exp(-0.5 * z * z) @ share
        weights[some, columns] += cell[:, :, 0]
        weights[some, columns + 1] += cell[:, :, 1]
    weights[:, -1] += ndtr((means - nodes[-1]) / deviation)
    start_z = (nodes[0] - means) / deviation
    below = ndtr(start_z)
    if slope == 0.0:
        weights[:, 0] += below
        below = np.zeros_like(below)
    else:
        gain = np.minimum(slope * (means - nodes[0]) + 0.5 * (slope * deviation) ** 2, 700.0)
        weights[:, 0] += np.minimum(np.exp(gain) * ndtr(start_z - slope * deviation), below)
    return weights * (1 + WEIGHT_ERROR) + WEIGHT_FLOOR, below * (1 + WEIGHT_ERROR) + WEIGHT_FLOOR


@dataclass(frozen=True, eq=False)
class Spread:
    """A standard normal factor on nodes: its weights, and the weight of the node at −∞."""

    nodes: Array
    weights: Array
    lost: float

    @classmethod
    def of_standard_normal(cls, spacing: float, low: float, high: float, slope: float) -> Spread:
        """Nodes are multiples of the spacing, rounded to few bits, that cover at least [low, high]."""
        spacing = few_bits(spacing)
        nodes: Array = spacing * np.arange(math.floor(low / spacing), math.ceil(high / spacing) + 1.0)
        weights, lost = hat_weights(nodes, np.zeros(1), 1.0, slope)
        return cls(nodes, weights[0], float(lost[0]))

    @classmethod
    def trivial(cls) -> Spread:
        """Of a factor without any load."""
        return cls(np.zeros(1), np.ones(1), 0.0)

    def mean(self, loads: Array) -> Array:
        """E e^(load·z − load²/2) under the spread: about 1, slightly more for a slope of 0."""
        return np.asarray(np.exp(loads[:, None] * self.nodes - loads[:, None] ** 2 / 2) @ self.weights)

    def beyond(self, loads: Array) -> Array:
        """E[e^(load·z − load²/2); z > last node]."""
        return np.asarray(ndtr(loads - self.nodes[-1]) if len(self.nodes) > 1 else np.zeros(len(loads)))


@dataclass(frozen=True, eq=False)
class Transition:
    """A step x' = ρx + √(1−ρ²)·ξ of a chain, given x on nodes, spread onto nodes.

    Attributes:
      matrix: weights, node of x × node of x'.
      lost: weights of x' = −∞, by node of x.
      above: E[e^(κx' − κ²/2); x' > last node], by node of x, with κ the largest deviation of the chain.
    """

    matrix: Array
    lost: Array
    above: Array

    @classmethod
    def of(cls, source: Array, nodes: Array, correlation: float, top: float, sign: int) -> Transition:
        """The step for calls (sign +1) or puts (−1); `top` is κ.

        **Formal guarantees.** As `hat_weights`. The payoff increases (calls) or decreases (puts) in x', so the means
        are rounded up (down). The deviation is rounded up: for calls that adds independent noise to a variable in which
        the payoff is convex; for puts the payoff is convex and decreasing in e^(κx'), and lowering the mean by κ/2
        times the change of the variance makes it a mean-preserving spread of that.
        """
        variance = (1 - correlation) * (1 + correlation)
        deviation = math.sqrt(variance) * (1 + 4 * UNIT)
        means = correlation * source
        if sign > 0:
            means = means + 2 * UNIT * np.abs(means)
        else:
            means = means - 2 * UNIT * np.abs(means) - 16 * UNIT * top * variance
        matrix, lost = hat_weights(nodes, means, deviation, 0.0 if sign > 0 else top)
        tilted = np.exp(top * means + top**2 * (variance - 1) / 2)
        above = tilted * ndtr((means + top * variance - nodes[-1]) / deviation)
        return cls(matrix, lost, above)

    @classmethod
    def trivial(cls) -> Transition:
        """Of a chain without any load."""
        return cls(np.ones((1, 1)), np.zeros(1), np.zeros(1))

    def trimmed(self, source: Array, nodes: Array, top: float, option: Option) -> Transition:
        """The same step without very long jumps, so that few entries of the matrix are not 0.

        **Formal guarantees.** A call increases in x', a put decreases. Weights on the side where the option is worth
        less are moved to the nearest node that is kept: that raises it. On the other side
        * a call loses by moving x' from a node x down to the last one kept: at most E[Σ_{j ≥ i} a_j | x' = x], whose
          terms are e^(lx − l²/2) with 0 ≤ l ≤ κ, but for the means of static factors. `above` grows by that much;
        * a put is worth at most K, so weights are moved to the node −∞ (`lost`).
        Which nodes are kept is a matter of tightness.
        """
        if len(nodes) == 1:
            return self
        call, places = option.sign > 0, np.arange(len(nodes))
        seen = np.maximum(np.exp(-(source**2) / 2) * (nodes[1] - nodes[0]), 1e-300)  # how likely each x is, roughly
        allowed = (_TUNING.cut * option.value / option.terms / len(source) / seen)[:, None]
        load = np.clip(nodes, 0.0, top) if call else 0.0
        worth = self.matrix * np.exp(load * nodes - load**2 / 2)
        up, down = (self.matrix, worth) if call else (worth, self.matrix)
        kept = np.cumsum(up, axis=1) > (_TUNING.moved if call else allowed)
        kept &= np.cumsum(down[:, ::-1], axis=1)[:, ::-1] > (allowed if call else _TUNING.moved)
        kept[~kept.any(axis=1)] = True
        first, last = np.argmax(kept, axis=1), len(nodes) - 1 - np.argmax(kept[:, ::-1], axis=1)
        below, beyond = places < first[:, None], places > last[:, None]
        short, far = (((self.matrix * side).sum(axis=1) * (1 + 1e-12)) for side in (below, beyond))
        rows, matrix = np.arange(len(source)), np.where(kept, self.matrix, 0.0)
        matrix[rows, last] += far
        if not call:
            return Transition(matrix, self.lost + short, self.above)
        matrix[rows, first] += short
        return Transition(matrix, self.lost, self.above + (worth * beyond).sum(axis=1) * (1 + 1e-9))


@dataclass(frozen=True, eq=False)
class Band:
    """The entries of a matrix that are not 0, in pieces of a few rows each.

    Attributes:
      pieces: rows, columns and entries of each piece.
      summands: the number of entries of the longest row.
    """

    pieces: tuple[tuple[slice, slice, Array], ...]
    summands: int

    @classmethod
    def of(cls, matrix: Array) -> Band:
        n = len(matrix)
        pieces, summands = [], 0
        for begin in range(0, n, _TUNING.band_rows):
            rows = slice(begin, min(begin + _TUNING.band_rows, n))
            kept = np.flatnonzero((matrix[rows] > 0).any(axis=0))
            columns = slice(int(kept[0]), int(kept[-1]) + 1)
            summands = max(summands, columns.stop - columns.start)
            pieces.append((rows, columns, np.ascontiguousarray(matrix[rows, columns])))
        return cls(tuple(pieces), summands)

    def apply(self, values: Array) -> Array:
        """The product with each of several arrays, node × anything."""
        found = np.empty((len(values), self.pieces[-1][0].stop, values.shape[2]))
        for rows, columns, piece in self.pieces:
            np.matmul(piece, values[:, columns], out=found[:, rows])
        return found

    def widest(self) -> int:
        """The number of columns that values may have without a BLAS starting threads for one product."""
        return max(2, _TUNING.single_thread // max(piece.size for _, _, piece in self.pieces))


def classes_of(variances: Array) -> tuple[Array, np.ndarray]:
    """Variances rounded up to few values: the values, and the class of each variance."""
    roots = np.sqrt(variances)
    top = float(roots.max())
    if top == 0.0:
        return np.zeros(1), np.zeros(len(variances), dtype=np.int64)
    level = np.ceil(roots / top * _TUNING.nugget_classes * (1 - 1e-12))
    values, kinds = np.unique(level, return_inverse=True)
    return np.asarray((values * (top / _TUNING.nugget_classes)) ** 2 * (1 + 1e-12)), kinds.astype(np.int64)


class TermTable:
    """Transforms of a = min(e^y·N, K) for y on a grid, by class of nugget; N is a log-normal of mean 1, the nugget.

    **Formal guarantees.** Between two rows, e^y is interpolated linearly; below the first row, between 0 and that row.
    N is spread in the same way onto a grid of its own. Both are mean-preserving spreads of a, in which (T − K)_+ and
    (K − T)_+ are convex. What lies above the grids is cut: that can only raise a put; for a call
    (T − K)_+ ≤ (T' − K)_+ + (T − T'), and the expectation of the second part is `excess`. A cut at K costs a call
    nothing, since the bound is an equality once some a_i ≥ K.
    """

    def __init__(self, low: float, high: float, step: float, nuggets: Array, strike: float, terms: int) -> None:
        self._step = few_bits(step)
        self._first = math.floor(low / self._step)
        self._count = max(2, math.ceil(high / self._step) - self._first + 1)
        self._low = self._step * self._first
        self._strike, self._shift = strike, strike / terms
        self.high = self._step * (self._first + self._count - 1)
        self._laws = [self._nugget(float(nu)) for nu in nuggets]
        self._excess = [self._surplus(weights, half, tail) for weights, half, _, tail in self._laws]

    @property
    def rows(self) -> Array:
        """The values of y of the rows."""
        return self._step * (self._first + np.arange(float(self._count)))

    def _nugget(self, variance: float) -> tuple[Array, int, float, float]:
        """Weights on the nodes e^(step·m), |m| ≤ half, then half, the weight left at 0, and E(N − last node)_+."""
        if variance == 0.0:
            return np.ones(1), 0, 0.0, 0.0
        root = max(math.sqrt(variance), self._step / _TUNING.narrowest)
        half = math.ceil((_TUNING.nugget_reach * root + root**2) / self._step) + 1
        nodes: Array = self._step * np.arange(-half, half + 1.0)
        weights, left = hat_weights(nodes, np.array([-(root**2) / 2]), root, 1.0)
        beyond = float(ndtr(root / 2 - nodes[-1] / root)) * (1 + WEIGHT_ERROR) + WEIGHT_FLOOR
        return weights[0], half, float(left[0]), beyond

    def _values(self, half: int) -> Array:
        """e^y on the rows, and `half` of them more at either end."""
        return np.asarray(np.exp(self._step * (self._first + np.arange(-half, self._count + half))))

    def _surplus(self, weights: Array, half: int, tail: float) -> Array:
        """Per row (the first one is a = 0): E(a − K)_+ of the spread, and what the nugget's grid leaves out."""
        over = np.convolve(np.maximum(self._values(half) - self._strike, 0.0), weights[::-1], mode="valid")
        return np.concatenate(([0.0], over + tail * self._values(0)))

    def locate(self, y: Array) -> tuple[np.ndarray, Array]:
        """The row below each y and the share of the next one (row 0 is a = 0); y above the table is cut."""
        place = np.clip(np.floor((y - self._low) / self._step), -1, self._count - 2)
        row = place.astype(np.int64) + 1
        with np.errstate(under="ignore"):
            inside = np.expm1(y - (self._low + place * self._step)) / math.expm1(self._step)
            share = np.where(row == 0, np.exp(np.minimum(y - self._low, 0.0)), inside)
        return row, np.clip(share, 0.0, 1.0)

    def excess(self, y: Array, kind: int) -> Array:
        """What cutting loses in expectation given y, for calls."""
        row, share = self.locate(y)
        above = math.exp(self.high) * np.expm1(np.maximum(y - self.high, 0.0))
        table = self._excess[kind]
        return np.asarray((1 - share) * table[row] + share * table[row + 1] + above)

    @property
    def summands(self) -> int:
        """The length of the longest sum in a transform: the nodes of a nugget, and its weight at 0."""
        return max(len(weights) for weights, _, _, _ in self._laws) + 1

    def _banded(self, weights: Array) -> Array:
        """The matrix that replaces each row by its mixture over the nugget."""
        budget.claim(48.0 * self._count * (self._count + len(weights)))
        matrix = np.zeros((self._count, self._count + len(weights)))
        matrix[:, : len(weights)] = weights  # then shear: row r starts at column r
        return matrix.ravel()[: -self._count].reshape(self._count, -1)

    def transforms(self, s: np.ndarray) -> Array:
        """E e^(s(a − K/n)), class × row × (real, imaginary) × s. Values out of range are NaN."""
        budget.claim(64.0 * (len(self._laws) + 3) * self._count * len(s))
        out = np.empty((len(self._laws), self._count + 1, 2, len(s)))
        zero = np.exp(-s * self._shift)
        for kind, (weights, half, left, _) in enumerate(self._laws):
            a = np.minimum(self._values(half), self._strike)
            exponent = (a - self._shift)[:, None] * s
            exponent[exponent.real > 600] = np.nan  # such a tilt is never chosen
            values = np.exp(exponent)
            parts = np.stack((values.real, values.imag), axis=1).reshape(len(a), -1)
            rows = (self._banded(weights) @ parts if half else parts).reshape(self._count, 2, len(s))
            rows[:, 0] += left * zero.real
            rows[:, 1] += left * zero.imag
            out[kind, 1:] = rows
            out[kind, 0, 0], out[kind, 0, 1] = zero.real, zero.imag
        np.maximum(out[:, :, 0], floors(s), out=out[:, :, 0])
        return out


@dataclass(frozen=True)
class Option:
    """What a law is made for: a call (sign +1) or a put (−1) with strike K on a sum of n terms.

    Attributes:
      strike: K.
      sign: +1 or −1.
      terms: n.
      likely: about the option's value, in units of n for calls and of K for puts; it decides where tails are truncated.
    """

    strike: float
    sign: int
    terms: int
    likely: float

    @cached_property
    def value(self) -> float:
        """`likely`, within reason."""
        return min(max(self.likely, _TUNING.least_value), 0.1)

    def small(self, value: float) -> bool:
        """Whether this much may be added to the option's value."""
        return value <= _TUNING.tails * self.value * min(self.strike, self.terms)

    def _reach(self, factors: int) -> float:
        """Where to truncate normal factors of which there are so many."""
        return max(0.0, -float(ndtri(min(0.5, _TUNING.tails * self.value / factors))))

    def span(self, largest_load: float, factors: int) -> float:
        """About the length of the interval that the nodes of a spread cover."""
        return self._reach(factors) + largest_load + _TUNING.inner_end

    def ends(self, largest_load: float, inner_end: float) -> tuple[float, float]:
        """Where the nodes of a spread begin and end; `inner_end` is on the side where truncation moves mass inward."""
        reach = self._reach(1)
        return (-inner_end, reach + largest_load) if self.sign > 0 else (-reach - 0.1, inner_end)

    def spread(self, largest_load: float, spacing: float, factors: int = 1) -> Spread:
        """A spread of a standard normal factor that is one of several; for calls its last node is at least the load."""
        if largest_load == 0.0:
            return Spread.trivial()
        reach = self._reach(factors)
        if self.sign > 0:
            return Spread.of_standard_normal(spacing, -_TUNING.inner_end, reach + largest_load, 0.0)
        return Spread.of_standard_normal(spacing, -reach - 0.1, _TUNING.inner_end, largest_load)

    def table(self, lowest: float, highest: float, step: float, nuggets: Array) -> TermTable:
        """A table for all y between the lowest and the highest, or for those of them that matter."""
        depth = _TUNING.table_depth_call if self.sign > 0 else _TUNING.table_depth_put
        low = max(lowest, math.log(self.strike / self.terms) - depth)
        height = _TUNING.table_height * math.sqrt(float(nuggets.max()))
        high = min(highest, math.log(self.strike) + height) + step
        return TermTable(min(low, high - step), high, step, nuggets, self.strike, self.terms)
