"""The law of a tree's basket T = Σ a_i on geometric grids, from above for every convex cubic-bounded payoff.

Bottom up: a block's T is an independent log-normal of mean 1 times the sum of its parts' T. On a grid {0} ∪ {e^(kh)} a
product of nodes is a node, and where the sum of two nodes lies depends on their distance alone. Nothing is subtracted,
so relative accuracy holds however small the answer is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy.special import log_ndtr, ndtr

from dpmf.accountants.cascade._tree import Tree
from dpmf.kernels import announce_compilation
from dpmf.numerics import UNIT, Array

_WEIGHT_ERROR = 1e-12  # relative, of the quadrature, of `ndtr` and of the exponentials in it
_POINTS, _POINT_WEIGHTS = np.polynomial.legendre.leggauss(12)
_POINTS, _POINT_WEIGHTS = (_POINTS + 1) / 2, _POINT_WEIGHTS / 2
_PANEL = 0.2
_LOWEST = -8.0  # standard deviations below which a log-normal is split between its lowest node and 0
_NARROW = 41.0
_MOST_NODES = 6000
_FEW_LAGS = 2000
_BINOMIALS = ((1,), (1, 1), (1, 2, 1), (1, 3, 3, 1))


class TooManyNodesError(Exception):
    """The grid asked for is too fine to be held."""


@dataclass(frozen=True, eq=False)
class GridLaw:
    """A measure on {0} ∪ {e^(h·first), e^(h·(first + 1)), ...}, and the moments 0..3 of what is not on the grid.

    **Formal guarantees.** It stands for a variable X ≥ 0 if, for every convex f with 0 ≤ f(x) ≤ Σ_j p_j·x^j (j ≤ 3, all
    p_j ≥ 0), E f(X) ≤ zero·f(0) + Σ_k weights_k·f(node_k) + Σ_j p_j·rest_j. Every operation here keeps that:
    * Mean-preserving spreads onto the nodes around a point raise convex functions; weights are rounded up, f ≥ 0.
    * Given one of two independent variables, f is convex with a polynomial bound of the same kind in the other, whose
      coefficients are moments of the first: so sums and products are formed on the grids, and each moment of `rest`
      is a sum of products of moments with at least one factor from a `rest`.
    * What lies on the grid's top may be moved to `rest`, where f counts as Σ_j p_j·x^j.
    """

    step: float
    first: int
    weights: Array
    zero: float
    rest: Array

    @property
    def nodes(self) -> Array:
        return np.asarray(np.exp(self.step * (self.first + np.arange(len(self.weights)))))

    def moments(self) -> Array:
        """Moments 0..3 of the grid part, rounded up."""
        powers = self.nodes[None, :] ** np.arange(4)[:, None]
        found = (powers * self.weights).sum(axis=1)
        found[0] += self.zero
        return np.asarray(found * (1 + 8 * UNIT * (len(self.weights) + 16)))

    def refined(self, factor: int) -> GridLaw:
        """The same measure on a grid `factor` times as fine."""
        if factor == 1:
            return self
        weights = np.zeros((len(self.weights) - 1) * factor + 1)
        weights[::factor] = self.weights
        return GridLaw(self.step / factor, self.first * factor, weights, self.zero, self.rest)

    def plus(self, other: GridLaw) -> GridLaw:
        """X + Y for independent X, Y on grids of the same step."""
        from dpmf.kernels.cascade import add_on_geometric_grid

        announce_compilation(add_on_geometric_grid)
        n, m, ahead = len(self.weights), len(other.weights), other.first - self.first
        apart = self.step * np.arange(max(n + abs(ahead), m + abs(ahead)) + 1)
        # Whether rounding moves a sum that is at a node to its other side does not matter: shares are cut to [0, 1].
        steps = np.floor(np.log1p(np.exp(-apart)) / self.step).astype(np.int64)
        start = self.step * steps
        shares = np.clip((np.exp(-apart) - np.expm1(start)) / (np.exp(start) * math.expm1(self.step)), 0.0, 1.0)
        begin = min(0, ahead)
        out = np.zeros(max(n, m + ahead) + int(steps[0]) + 2 - max(0, ahead))
        add_on_geometric_grid(self.weights, other.weights, ahead, steps, shares, out)
        # Sums with a zero stay where they are, possibly below the sums of two nodes.
        total = np.zeros(len(out) + max(0, ahead) - begin)
        total[max(0, ahead) - begin :] = out
        total[-begin : n - begin] += other.zero * self.weights
        total[ahead - begin : ahead - begin + m] += self.zero * other.weights
        mine, theirs = self.moments(), other.moments()
        rest = np.array(
            [
                sum(
                    c * (theirs[j - i] * self.rest[i] + other.rest[j - i] * (mine[i] + self.rest[i]))
                    for i, c in enumerate(_BINOMIALS[j])
                )
                for j in range(4)
            ]
        )
        return GridLaw(self.step, self.first + begin, total, self.zero * other.zero, rest)

    def times(self, factor: GridLaw) -> GridLaw:
        """X·Y for independent X, Y on grids of the same step."""
        mine, theirs = self.moments(), factor.moments()
        rest = theirs * self.rest + factor.rest * (mine + self.rest)
        zero = self.zero * float(theirs[0]) + float(self.weights.sum()) * factor.zero
        weights = np.convolve(self.weights, factor.weights)
        return GridLaw(self.step, self.first + factor.first, weights, zero, rest)

    def trimmed(self, spare: float, scale: float, waste: float) -> GridLaw:
        """Without its ends: the top goes to `rest`, the bottom is spread onto 0 and the first node kept.

        The top may be worth `spare` in E(X + scale)³, the bottom's spread `waste` in variance.
        """
        x = self.nodes
        worth = np.cumsum((self.weights * (x + scale) ** 3)[::-1])[::-1]
        top = int(np.searchsorted(-worth, -spare))  # the first node that may go
        # Moving all mass below node k to 0 and k costs Σ w·x·(x_k − x).
        first, second = np.cumsum(self.weights * x), np.cumsum(self.weights * x * x)
        cost = x * first - second
        bottom = int(np.searchsorted(cost, waste, side="right")) - 1
        bottom = min(max(bottom, 0), max(top - 1, 0))
        top = max(top, bottom + 1)
        gone = self.weights[top:]
        rest = self.rest + (gone * x[top:] ** np.arange(4)[:, None]).sum(axis=1) * (1 + 8 * UNIT * (len(gone) + 16))
        weights = self.weights[bottom:top].copy()
        share = x[:bottom] / x[bottom]
        weights[0] += float((self.weights[:bottom] * share).sum())
        zero = self.zero + float((self.weights[:bottom] * (1 - share)).sum())
        return GridLaw(self.step, self.first + bottom, weights, zero, rest)


@dataclass(frozen=True, eq=False)
class Measure:
    """Nodes with their weights, the weight at 0, and the moments 0..3 of the rest: what a payoff is integrated over."""

    nodes: Array
    weights: Array
    zero: float
    rest: Array

    @classmethod
    def average(cls, laws: Sequence[GridLaw]) -> Measure:
        """Of several laws: it stands, as they do, for a variable that has one of them at random."""
        n = len(laws)
        return cls(
            np.concatenate([law.nodes for law in laws]),
            np.concatenate([law.weights for law in laws]) / n,
            sum(law.zero for law in laws) / n,
            np.sum([law.rest for law in laws], axis=0) / n,
        )


def one(step: float) -> GridLaw:
    """X = 1."""
    return GridLaw(step, 0, np.ones(1), 0.0, np.zeros(4))


def lognormal(variance: float, step: float, spare: float, most: int) -> GridLaw:
    """e^(rz − r²/2), z standard normal, r² = variance; its top may be worth `spare` in E X³.

    **Formal guarantees.** Hat weights in X between neighbouring nodes, and between 0 and the lowest one, are
    mean-preserving. They are integrals of a positive function times a normal density by 12-point Gauss–Legendre panels
    at most 0.2 wide: the remainder 9·10⁻³⁹·w²⁵·f⁽²⁴⁾ is a relative 10⁻¹⁷ of the densities φ(z), φ(z − r) for |z| ≤ 40
    (|He_n(z)| ≤ (|z| + √n)ⁿ), so below 10⁻¹² of a weight, of which a share of at least 10⁻⁴ is theirs. Rounding of
    exponentials stays below 10⁻¹² as well. Moments beyond the last node are in closed form. If the nodes next to 1 are
    more than 40 deviations away, they and 1 share E(X − 1)_+ = E(1 − X)_+ = erf(r/√8); beyond are less than 10⁻³⁰⁰.
    """
    root = math.sqrt(variance)
    if step > _NARROW * root:
        up, down = (math.erf(root / math.sqrt(8)) / abs(math.expm1(s)) for s in (step, -step))
        around = np.array([down, 1 - up - down, up]) * (1 + _WEIGHT_ERROR)
        return GridLaw(step, -1, around, 0.0, np.zeros(4))
    reach = 3 * root + math.sqrt(2 * max(1.0, 3 * variance - math.log(spare)))
    low = math.floor((root * _LOWEST - variance / 2) / step)
    high = max(low + 1, math.ceil((root * reach - variance / 2) / step))
    if high - low > most:
        raise TooManyNodesError
    panels = max(1, math.ceil(step / root / _PANEL))
    z = (step * np.arange(low, high + 1) + variance / 2) / root
    offset = ((np.arange(panels)[:, None] + _POINTS) * (step / root / panels)).ravel()
    measure = np.tile(_POINT_WEIGHTS, panels) * (step / root / panels / math.sqrt(2 * math.pi))
    upper = np.expm1(root * offset) / math.expm1(step)
    share = np.stack((measure * (1 - upper), measure * upper), axis=1)
    cells = np.empty((high - low, 2))
    rows = max(1, int(2e6 / len(offset)))
    for begin in range(0, high - low, rows):
        part = z[begin : min(begin + rows, high - low), None] + offset
        cells[begin : begin + rows] = (np.exp(-0.5 * part * part)[:, :, None] * share).sum(axis=1)
    weights = np.zeros(high - low + 1)
    weights[:-1] += cells[:, 0]
    weights[1:] += cells[:, 1]
    below = float(ndtr(z[0]))
    risen = min(below, math.exp(float(log_ndtr(z[0] - root)) - step * low))
    weights[0] += risen
    orders = np.arange(4)
    # Of the exponents: relative to numbers of their size.
    rest = np.exp(variance * orders * (orders - 1) / 2 + log_ndtr(orders * root - z[-1]))
    up = 1 + _WEIGHT_ERROR + 64 * UNIT * (1 + variance + z[-1] ** 2)
    return GridLaw(step, low, weights * up, (below - risen) * up + 1e-13 * below, rest * up)


@dataclass(frozen=True)
class Fineness:
    """How fine the grids are.

    Attributes:
      loss: the part of the noise multiplier that the grids may cost, roughly.
      spare: what may be cut off, as a share of E A³ = E (T/b)³.
      most: nodes of one grid at most.
    """

    loss: float
    spare: float
    most: int = _MOST_NODES


def tree_law(tree: Tree, fineness: Fineness) -> GridLaw:
    """The law of T = Σ a_i for the tree's covariance (already divided by σ²), E T = b."""
    if tree.variance == 0:
        return GridLaw(math.log(max(tree.b, 2)), int(tree.b > 1), np.ones(1), 0.0, np.zeros(4))
    while True:
        try:
            law = _TreeLaw(tree, fineness).root()
        except TooManyNodesError:
            if fineness.loss > 10:
                raise
            fineness = Fineness(4 * fineness.loss, fineness.spare, fineness.most)
            continue
        # Every operation keeps mass and mean, but for rounding up: the sum of all errors is below this.
        mass, mean = (law.moments() + law.rest)[:2]
        if not (mass >= 1 - 1e-6 and mean >= tree.b * (1 - 1e-6)):
            raise ArithmeticError(f"the tree's law lost mass: {mass}, {mean / tree.b}")
        return law


class _TreeLaw:
    def __init__(self, tree: Tree, fineness: Fineness) -> None:
        self._tree, self._fineness = tree, fineness
        # The variance of A is about that of the average of rotations: the part near the money where ε is small.
        lags = np.arange(tree.b // 2 + 1)
        if len(lags) > _FEW_LAGS:
            lags = np.unique(np.concatenate(([0], np.geomspace(1, tree.b // 2, _FEW_LAGS).astype(np.int64))))
        average = np.expm1(np.minimum(tree.lags(lags), 30.0))
        ends = float(average[0] + average[-1]) / 2
        total = float(((average[1:] + average[:-1]) / 2 * np.diff(lags)).sum()) + ends
        spread = (2 * total - float(average[0])) / tree.b
        number = len(tree.levels)
        # Where one block takes all, its own logarithm must be resolved at every level; near the mean, the spreads of a
        # level average out over its blocks.
        coarsest = math.sqrt(6 * fineness.loss * tree.variance / number)
        finest = min(coarsest, math.sqrt(1.7 * fineness.loss * spread))
        self._steps = []
        for level in tree.levels:
            wanted = min(coarsest, finest * level.blocks**0.25)
            self._steps.append(finest * 2 ** math.floor(math.log2(wanted / finest) + 1e-9))

    def root(self) -> GridLaw:
        tree = self._tree
        law = {1: one(self._steps[-1])}
        last = len(tree.levels) - 1
        for number in range(last, -1, -1):
            law = {size: self._block(number, size, law) for size, _ in tree.levels[number].sizes()}
        return law[tree.b]

    def _block(self, number: int, size: int, below: dict[int, GridLaw]) -> GridLaw:
        tree, step, blocks = self._tree, self._steps[number], self._tree.levels[number].blocks
        weight = float(tree.weights[number])
        parts = [below[part] for part in tree.parts(number, size)]
        if len(parts) > 1:
            parts = [part.refined(round(part.step / step)) for part in parts]
        # The top of one of `blocks` blocks, beside T = b from the others, out of E T³.
        spare = self._fineness.spare * tree.b**3 / (4 * blocks * len(tree.levels))
        waste = 0.02 * self._steps[number] ** 2 * size**2
        law = parts[0] if len(parts) == 1 else reduce(lambda x, y: self._kept(x.plus(y), spare, waste), parts)
        if weight > 0:
            law = law.refined(round(law.step / step))
            factor = lognormal(weight, step, min(0.1, spare / tree.b**3), self._fineness.most)
            law = self._kept(law.times(factor), spare, waste)
        return law

    def _kept(self, law: GridLaw, spare: float, waste: float) -> GridLaw:
        law = law.trimmed(spare, float(self._tree.b), waste)
        if len(law.weights) > self._fineness.most:
            raise TooManyNodesError
        return law


def rounding_of(tree: Tree) -> float:
    """The relative error of the weights: sums of at most 6000 terms, twice for each of at most 2b blocks."""
    return 8 * tree.b * ((_MOST_NODES + 64) * UNIT + _WEIGHT_ERROR)
