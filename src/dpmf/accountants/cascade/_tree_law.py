"""The law of T = Σ a_i for a tree, from above: its moments, and itself on a geometric grid.

Bottom up: the T of a block is an independent log-normal of mean 1 times the sum of its parts' T. On a grid
{0} ∪ {e^(kh)} a product of nodes is a node, and where the sum of two nodes lies depends on their distance alone.
Nothing is subtracted, so relative accuracy holds however small the answer is. See docs/theory/cascade.md, "The tree's
law on a geometric grid"; rounding errors are in docs/theory/floating-point.md, "The cascade".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from scipy.special import log_ndtr, ndtr

from dpmf.accountants.cascade._tree import Tree
from dpmf.accountants.renyi.orders import LogSeries, MomentTable
from dpmf.kernels import announce_compilation
from dpmf.numerics import UNIT, Array

# Twelve-point Gauss–Legendre on [0, 1] in panels of at most this width, and the relative error of a weight that results
# from it, from `ndtr` and from exponentials (cascade.md, "Weights of a log-normal").
_POINTS, _POINT_WEIGHTS = np.polynomial.legendre.leggauss(12)
_POINTS, _POINT_WEIGHTS = (_POINTS + 1) / 2, _POINT_WEIGHTS / 2
_PANEL = 0.2
_WEIGHT_ERROR = 1e-12
_HIGHEST = 37.0  # standard deviations: densities beyond would underflow, and have closed forms (floating-point.md)
_NARROW = 41.0  # standard deviations: what is farther is below 10⁻³⁰⁰ (cascade.md, "Weights of a log-normal")
_UNDERFLOW = 2.0**-1070  # more than a product loses that is too small for double (floating-point.md, "The cascade")
_BINOMIALS = ((1,), (1, 1), (1, 2, 1), (1, 3, 3, 1))


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how fine grids are. Any values give sound bounds.

    Attributes:
      lowest: standard deviations below which a log-normal is split between its lowest node and 0.
      most_nodes: the largest grid.
      few_lags: how many lags are looked at to estimate the variance of T.
      waste: the variance that trimming the bottom of a grid may cost, in units of that of its step.
      coarser: the factor on the loss when a grid is too large.
      coarsest: the loss at which that is given up.
    """

    lowest: float = -8.0
    most_nodes: int = 6000
    few_lags: int = 2000
    waste: float = 0.02
    coarser: float = 4.0
    coarsest: float = 10.0


_TUNING = _Tuning()


class TooManyNodesError(Exception):
    """The grid asked for is too fine to be held."""


@dataclass(frozen=True, eq=False)
class GridLaw:
    """A measure on {0} ∪ {e^(h·first), e^(h·(first + 1)), ...}, and the moments 0..3 of what is not on the grid.

    Attributes:
      step: h.
      first: the number of the lowest node.
      weights: of the nodes.
      zero: the weight at 0.
      rest: the moments 0..3 of what is not on the grid.
      error: the relative amount by which weights and moments may be too small, through rounding.
      slip: the relative amount by which positions may be too small, through rounding.

    **Formal guarantees.** It stands for a variable X ≥ 0 if, for every convex increasing f with 0 ≤ f(x) ≤ Σ_j p_j·x^j
    (j ≤ 3, all p_j ≥ 0), with the weights, moments and positions raised by `error` and `slip`,
    E f(X) ≤ zero·f(0) + Σ_k weights_k·f(node_k) + Σ_j p_j·rest_j. Every operation here keeps that:
    * Mean-preserving spreads onto the nodes around a point raise convex functions.
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
    error: float = 0.0
    slip: float = 0.0

    @property
    def nodes(self) -> Array:
        """The positions, without the node at 0; their relative error is below `node_error`."""
        return np.asarray(np.exp(self.step * (self.first + np.arange(len(self.weights)))))

    @property
    def node_error(self) -> float:
        last = self.first + len(self.weights) - 1
        return 2 * UNIT * (2 + self.step * max(abs(self.first), abs(last)))

    def moments(self) -> Array:
        """Moments 0..3 of the grid part, rounded up."""
        found = (self.nodes[None, :] ** np.arange(4)[:, None] * self.weights).sum(axis=1)
        found[0] += self.zero
        return np.asarray(found * (1 + 4 * self.node_error + UNIT * (len(self.weights) + 64)))

    def refined(self, factor: int) -> GridLaw:
        """The same measure on a grid `factor` (a power of two) times as fine."""
        if factor == 1:
            return self
        weights = np.zeros((len(self.weights) - 1) * factor + 1)
        weights[::factor] = self.weights
        return replace(self, step=self.step / factor, first=self.first * factor, weights=weights)

    def plus(self, other: GridLaw) -> GridLaw:
        """X + Y for independent X, Y on grids of the same step."""
        from dpmf.kernels.cascade import add_on_geometric_grid

        announce_compilation(add_on_geometric_grid)
        n, m, ahead = len(self.weights), len(other.weights), other.first - self.first
        apart = self.step * np.arange(max(n + abs(ahead), m + abs(ahead)) + 1)
        # A sum that rounding moves to the other side of a node is within `slip` of it: shares are cut to [0, 1].
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
        rest = [
            sum(
                c * (theirs[j - i] * self.rest[i] + other.rest[j - i] * (mine[i] + self.rest[i]))
                for i, c in enumerate(_BINOMIALS[j])
            )
            for j in range(4)
        ]
        slip = max(self.slip, other.slip) + 16 * UNIT
        return self._joint(other, begin, total, self.zero * other.zero, np.array(rest), slip)

    def times(self, factor: GridLaw) -> GridLaw:
        """X·Y for independent X, Y on grids of the same step."""
        mine, theirs = self.moments(), factor.moments()
        rest = theirs * self.rest + factor.rest * (mine + self.rest)
        zero = self.zero * float(theirs[0]) + float(self.weights.sum()) * factor.zero
        weights = np.convolve(self.weights, factor.weights)
        return self._joint(factor, factor.first, weights, zero, rest, self.slip + factor.slip)

    def _joint(self, other: GridLaw, begin: int, weights: Array, zero: float, rest: Array, slip: float) -> GridLaw:
        """A law formed from this and an independent one, with the errors of sums of products.

        At most 2·min(n, m) products are added up in a weight, and each may lose what is too small for double.
        """
        few = min(len(self.weights), len(other.weights))
        error = self.error + other.error + (2 * few + len(self.weights) + 64) * UNIT
        joint = GridLaw(self.step, self.first + begin, weights, zero, rest, error, slip)
        top = max(1.0, math.exp(min(joint.step * (joint.first + len(weights)), 700.0)))
        lost = 4 * _UNDERFLOW * few * len(weights) * top ** np.arange(4)
        return replace(joint, rest=rest + lost)

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
        gone, node_error = self.weights[top:], self.node_error
        rest = (gone * x[top:] ** np.arange(4)[:, None]).sum(axis=1) * (1 + 4 * node_error + UNIT * (len(gone) + 64))
        weights = self.weights[bottom:top].copy()
        share = x[:bottom] / x[bottom]
        weights[0] += float((self.weights[:bottom] * share).sum())
        zero = self.zero + float((self.weights[:bottom] * (1 - share)).sum())
        error, slip = self.error + (bottom + 8) * UNIT, self.slip + 2 * node_error + 4 * UNIT
        return GridLaw(self.step, self.first + bottom, weights, zero, self.rest + rest, error, slip)


@dataclass(frozen=True, eq=False)
class Measure:
    """What a convex increasing payoff is integrated over: positions and weights, rounded up, and moments of the rest.

    Attributes:
      a: positions of A = T/b.
      weights: of these positions.
      zero: the weight at 0.
      rest: the moments 0..3 of what has no position.
    """

    a: Array
    weights: Array
    zero: float
    rest: Array

    @classmethod
    def average(cls, laws: Sequence[GridLaw], b: int) -> Measure:
        """The measure of T/b for a T that has one of several laws at random."""
        n = len(laws)
        up = 1 + max(law.error for law in laws) + (n + 8) * UNIT
        slips = [law.slip + law.node_error + 4 * UNIT for law in laws]
        rests = [law.rest * (1 + 4 * slip) / float(b) ** np.arange(4) for law, slip in zip(laws, slips, strict=True)]
        return cls(
            np.concatenate([law.nodes / b * (1 + slip) for law, slip in zip(laws, slips, strict=True)]),
            np.concatenate([law.weights for law in laws]) * (up / n),
            sum(law.zero for law in laws) * (up / n),
            np.sum(rests, axis=0) * (up / n),
        )


def one(step: float) -> GridLaw:
    """X = 1."""
    return GridLaw(step, 0, np.ones(1), 0.0, np.zeros(4))


def lognormal(variance: float, step: float, spare: float, most: int) -> GridLaw:
    """e^(rz − r²/2), z standard normal, r² = variance; its top may be worth `spare` in E X³.

    **Formal guarantees.** Weights of hat functions of X between neighbouring nodes, and between 0 and the lowest one,
    are mean-preserving. They are integrals by Gauss–Legendre panels whose error is proved in docs/theory/cascade.md,
    "Weights of a log-normal", and are raised by it. Moments beyond the last node are in closed form.
    """
    root = math.sqrt(variance)
    if step > _NARROW * root:
        # E(X − 1)_+ = E(1 − X)_+ = erf(r/√8), shared between 1 and the nodes beside it.
        up, down = (math.erf(root / math.sqrt(8)) / abs(math.expm1(s)) for s in (step, -step))
        around = np.array([down, 1 - up - down, up]) * (1 + _WEIGHT_ERROR)
        return GridLaw(step, -1, around, 0.0, np.zeros(4), slip=16 * UNIT * (2 + step))
    reach = min(_HIGHEST, 3 * root + math.sqrt(2 * max(1.0, 3 * variance - math.log(spare))))
    low = math.floor((root * _TUNING.lowest - variance / 2) / step)
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
    rest = np.exp(variance * orders * (orders - 1) / 2 + log_ndtr(orders * root - z[-1]))
    # The errors of exponents are relative to numbers of their size.
    up = 1 + _WEIGHT_ERROR + 64 * UNIT * (1 + variance + z[-1] ** 2)
    slip = 16 * UNIT * (4 + variance + step * max(abs(low), abs(high)))
    return GridLaw(step, low, weights * up, (below - risen) * up + 1e-13 * below, rest * up, slip=slip)


@dataclass(frozen=True)
class Fineness:
    """How fine the grids are.

    Attributes:
      loss: the part of the noise multiplier that the grids may cost, roughly.
      spare: what may be cut off, as a share of E A³ = E (T/b)³.
    """

    loss: float
    spare: float


def tree_law(tree: Tree, fineness: Fineness) -> GridLaw:
    """The law of T = Σ a_i for the tree's covariance (already divided by σ²), E T = b."""
    if tree.variance == 0:
        return GridLaw(math.log(max(tree.b, 2)), int(tree.b > 1), np.ones(1), 0.0, np.zeros(4))
    while True:
        try:
            law = _TreeLaw(tree, fineness).root()
        except TooManyNodesError:
            if fineness.loss > _TUNING.coarsest:
                raise
            fineness = Fineness(_TUNING.coarser * fineness.loss, fineness.spare)
            continue
        # Every operation keeps mass and mean, up to rounding.
        mass, mean = (law.moments() + law.rest)[:2] * (1 + law.error)
        if not (mass >= 1 - 1e-6 and mean >= tree.b * (1 - 1e-6)):
            raise ArithmeticError(f"the tree's law lost mass: {mass}, {mean / tree.b}")
        return law


def grid_steps(tree: Tree, fineness: Fineness) -> list[float]:
    """The steps of the grids by level, from the whole ring down; each is a power of two times the one before."""
    return _TreeLaw(tree, fineness).steps


class _TreeLaw:
    def __init__(self, tree: Tree, fineness: Fineness) -> None:
        self._tree, self._fineness = tree, fineness
        # The variance of A is about that of the average of rotations: the part near the money where ε is small.
        lags = np.arange(tree.b // 2 + 1)
        if len(lags) > _TUNING.few_lags:
            lags = np.unique(np.append(0, np.geomspace(1, tree.b // 2, _TUNING.few_lags).astype(np.int64)))
        average = np.expm1(np.minimum(tree.lags(lags), 30.0))
        ends = float(average[0] + average[-1]) / 2
        total = float(((average[1:] + average[:-1]) / 2 * np.diff(lags)).sum()) + ends
        spread = (2 * total - float(average[0])) / tree.b
        number = len(tree.levels)
        # Where one block dominates, its own logarithm must be resolved at every level; near the mean, the spreads of a
        # level average out over its blocks.
        coarsest = math.sqrt(6 * fineness.loss * tree.variance / number)
        finest = min(coarsest, math.sqrt(1.7 * fineness.loss * spread))
        self.steps = []
        for level in tree.levels:
            wanted = min(coarsest, finest * level.blocks**0.25)
            self.steps.append(finest * 2 ** math.floor(math.log2(wanted / finest) + 1e-9))

    def root(self) -> GridLaw:
        tree = self._tree
        law = {1: one(self.steps[-1])}
        for number in range(len(tree.levels) - 1, -1, -1):
            law = {size: self._block(number, size, law) for size, _ in tree.levels[number].sizes()}
        return law[tree.b]

    def _block(self, number: int, size: int, below: dict[int, GridLaw]) -> GridLaw:
        tree, step, blocks = self._tree, self.steps[number], self._tree.levels[number].blocks
        weight = float(tree.weights[number])
        parts = [below[part] for part in tree.parts(number, size)]
        if len(parts) > 1:
            parts = [part.refined(round(part.step / step)) for part in parts]
        # The top of one of `blocks` blocks, beside T = b from the others, out of E T³.
        spare = self._fineness.spare * tree.b**3 / (4 * blocks * len(tree.levels))
        waste = _TUNING.waste * step**2 * size**2
        law = parts[0] if len(parts) == 1 else reduce(lambda x, y: self._kept(x.plus(y), spare, waste), parts)
        if weight > 0:
            law = law.refined(round(law.step / step))
            factor = lognormal(weight, step, min(0.1, spare / tree.b**3), _TUNING.most_nodes)
            law = self._kept(law.times(factor), spare, waste)
        return law

    def _kept(self, law: GridLaw, spare: float, waste: float) -> GridLaw:
        law = law.trimmed(spare, float(self._tree.b), waste)
        if len(law.weights) > _TUNING.most_nodes:
            raise TooManyNodesError
        return law


class TreeMoments(MomentTable):
    """E[A^m] of a tree for all m up to an order at once, whatever the bandwidth: O(order²·log b).

    **Formal guarantees.** S ↦ E[A_S^m] is convex for m ≥ 2 (docs/theory/cascade.md), so the moments of G/σ², which is
    at most an average of rotations of the tree, are at most the tree's. A block's sum is an independent log-normal
    times the sum of its independent parts, so that series multiply over the parts. All terms are positive; rounding
    errors are added.
    """

    def __init__(self, tree: Tree) -> None:
        super().__init__(0.0, {"tree": tree.first})
        self._tree = tree

    def work(self, order: int) -> float:
        return 20.0 * (len(self._tree.levels) + self._tree.first) * order * order

    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        tree = self._tree
        weights = tree.weights / noise_multiplier / noise_multiplier
        below = {1: LogSeries.exponential(order)}
        for number, level in reversed(list(enumerate(tree.levels))):
            parts = {size: tree.parts(number, size) for size, _ in level.sizes()}
            product = {size: reduce(LogSeries.times, (below[part] for part in sizes)) for size, sizes in parts.items()}
            below = {size: series.weighted(float(weights[number])) for size, series in product.items()}
        return below[tree.b].log_moments(tree.b)
