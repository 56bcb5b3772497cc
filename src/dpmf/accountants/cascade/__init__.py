"""The cascade accountant: any bandwidth and any number of batches, remove direction, in a fraction of a second.

E f(A) is convex as a function of the Gram matrix where f'', f''', f'''' ≥ 0 (docs/theory/cascade.md). So a Gram matrix
that lies below an average of rotations of one tree-structured matrix has an E f(A) below that of the tree, whose law
takes log b steps. f(a) = a^α gives Rényi orders; f(a) = 4/27·η⁻²·((a − γ + η)_+)³ ≥ (a − γ)_+ bounds δ(ε) itself, and
where all indices share a factor there are payoffs that lose less (`_smoothed_option`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.optimize import minimize_scalar

from dpmf import budget, validation
from dpmf.accountants.cascade._smoothed_option import Majorant, SmoothedCall
from dpmf.accountants.cascade._tree import Tree, TreeMoments, dominating_tree, lag_majorant
from dpmf.accountants.cascade._tree_law import Fineness, GridLaw, Measure, rounding_of, tree_law
from dpmf.accountants.cascade._tree_pairs import dominating_pair
from dpmf.accountants.least import Least, Part
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.accountants.renyi import AddOrders, MomentOrders, Renyi
from dpmf.loss.gaussian import gaussian_delta, gaussian_loss_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import FLOOR, UNIT, Array

_LARGEST_EPSILON = 100.0
_LEAST_VARIANCE, _LARGEST_VARIANCE = 1e-9, 25.0  # of G/σ²; outside, the closed forms answer
_NEGLIGIBLE = 1e-100
_MOST_DECADES = 120
_USUAL_DELTA = 1e-6  # where no target says which δ matters
_LAWS_KEPT = 4
_LEAST_SHARED = 0.003  # of the variance of A, roughly
_SLIP = 1e-11  # relative error of positions: 4u for each of at most 2·20 operations along a path, and exponents' own
_RENYI_WORK = 1e8
_FIRSTS = (2, 3, 5, 7, 9, 11, 13, 15)
_FITS = ((0.0, 0.0), (3.0, 0.0), (0.0, 0.01), (3.0, 0.1), (3.0, 0.2))  # emphasis, least share of the whole ring
_FEW_TREES = 5000  # batches beyond which a tree takes seconds
_PAIR = (2, 3)  # block lengths b/2, b/4, ... and b/3, b/6, ...
_PAIR_FITS = ((0.0, 0.0), (0.0, 0.01), (3.0, 0.01))
_LEAST_PAIRED = 16


@dataclass(frozen=True)
class Cascade(Accountant):
    """Options of the cascade accountant.

    Attributes:
      discretisation_loss: the part of the noise multiplier that the grids may cost, roughly; steps follow its root.
        More than 1 is as 1.
    """

    name: ClassVar[str] = "cascade"
    summary: ClassVar[str] = "averages of trees that dominate the noise; any bandwidth, any b; remove direction, fast"
    rests_on: ClassVar[str] = "convexity of E f(A) in the Gram matrix, Kahane's inequality: averages of trees dominate"

    discretisation_loss: float = 0.002

    def __post_init__(self) -> None:
        validation.positive("discretisation_loss", self.discretisation_loss)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Fit the trees.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) of the dominating pair. For some
        weights w ≥ 0 and a tree of blocks of the ring, the average over all rotations of the tree's covariance is at
        least G in every entry (`lag_majorant`, `dominating_tree`). Both are Gram matrices, so E f(A) of G is at most
        that of the average for convex f (Kahane's inequality); the latter is at most the average of E f(A) over
        the rotations where f'', f''', f'''' ≥ 0 (E f(A) is convex in the Gram matrix), and a rotation only renames the
        indices, so that is E f(A) of the tree. With two trees (`dominating_pair`) the average is over both, and so is
        E f(A). Laws and moments of a tree are computed from above (`GridLaw`, `TreeMoments`).
        The add direction has closed forms only: (1 − γa)_+ is convex, but has no such third derivative. They are those
        of the average of rotations, which is at least G (Kahane's inequality again).
        """
        return Least(self.name, mechanism, [Part(self.name, lambda: self._bounds(mechanism))])

    def _bounds(self, mechanism: Mechanism) -> list[PreparedAccountant]:
        b = mechanism.batching.batches_per_epoch
        lags = lag_majorant(mechanism)
        trees = _promising_trees(lags, b)
        averages = [*((tree,) for tree in trees), *_promising_pairs(lags, b, trees)]
        members: list[PreparedAccountant] = [_Cubic(mechanism, self, average) for average in averages]
        best = min(trees, key=lambda tree: tree.mean_entry())
        table = TreeMoments(best)
        orders = Renyi().orders_within(table, _RENYI_WORK)
        add = AddOrders(best.variance * (1 + 1e-12), best.mean_entry() * (1 + 1e-12))
        return [*members, _TreeOrders(mechanism, add, None, table, lambda: orders), _ClosedForms(mechanism, best)]


def _promising_trees(lags: Array, b: int) -> list[Tree]:
    """A few trees, all of them above G on average; block lengths b/(first·2^j) are at most 12 % apart.

    Giving some weight to the whole ring costs variance, but a smoothed option loses less than a cubic one.
    """
    found: list[Tree] = []
    for emphasis, shared in _FITS:
        firsts = [first for first in _FIRSTS if first <= max(b, 2)]
        fitted = budget.as_far_as_it_goes(dominating_tree(lags, b, first, emphasis, shared) for first in firsts)
        if len(fitted) < len(firsts):
            if not (found or fitted):
                raise budget.OutOfTime
            if found:
                break
        kept = 3 if b <= _FEW_TREES and shared == 0.0 else 1
        for tree in sorted(fitted, key=lambda tree: tree.cost(lags, emphasis))[:kept]:
            if not any(t.first == tree.first and np.allclose(t.weights, tree.weights, rtol=1e-3) for t in found):
                found.append(tree)
    return found


def _promising_pairs(lags: Array, b: int, trees: list[Tree]) -> list[tuple[Tree, ...]]:
    """Averages over two trees, where they come closer than one tree does."""
    found: list[tuple[Tree, ...]] = []
    if not _LEAST_PAIRED <= b <= _FEW_TREES:
        return found
    for emphasis, shared in _PAIR_FITS:
        pair = dominating_pair(lags, b, _PAIR, emphasis, shared)
        single = min(tree.cost(lags, emphasis) for tree in trees)
        if pair is not None and sum(tree.cost(lags, emphasis) for tree in pair) / 2 < single:
            found.append(pair)
    return found


class _RemoveOnly(PreparedAccountant):
    name = "cascade"
    cheap = True

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        return "the cascade bounds the remove direction only" if direction == "add" else None


class _Cubic(_RemoveOnly):
    """The cubic bound of one tree, or of an average over several that have the same weight on the whole ring."""

    def __init__(self, mechanism: Mechanism, options: Cascade, trees: tuple[Tree, ...]) -> None:
        self.mechanism = mechanism
        self._loss, self._trees = min(options.discretisation_loss, 1.0), trees
        self._b, self._variance = trees[0].b, max(tree.variance for tree in trees)
        shared = float(trees[0].weights[0])
        # A factor shared by all, if it is not negligible, is integrated exactly instead of being part of the law.
        self._shared, self._rest = 0.0, trees
        if shared > _LEAST_SHARED * trees[0].mean_entry():
            self._shared, self._rest = shared, tuple(tree.without_shared()[1] for tree in trees)
        self._laws: OrderedDict[tuple[float, float], Measure] = OrderedDict()

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        """A bound on δ(ε); what is cut off is to be small beside the target, or beside the bound if that is smaller.

        **Formal guarantees.** For every κ < γ, (a − γ)_+ ≤ 4/27·(γ − κ)⁻²·((a − κ)_+)³, which has non-negative second,
        third and fourth derivatives. E of it is bounded by the grid law for κ and by the moments of its rest
        ((t/b − κ)_+ ≤ t/b for κ ≥ 0, t/b + |κ| otherwise). Errors of position move κ, rounding errors are added.
        With a shared factor, S = τ + S°, the rotations are those of S°, and the payoff is a `Majorant` of the call
        smoothed by that factor.
        """
        variance = self._variance / noise_multiplier**2
        inside = _LEAST_VARIANCE <= variance <= _LARGEST_VARIANCE and epsilon <= _LARGEST_EPSILON
        if direction == "add" or not inside:
            return Evaluation(1.0)
        plain = gaussian_delta(math.sqrt(variance) * (1 + 1e-12), epsilon)  # no amplification
        if plain <= _NEGLIGIBLE:
            return Evaluation(plain)
        gamma = math.exp(epsilon)
        # What may be cut off: in decades that many ε and targets share, so that the law does for all of them.
        decades = 4 * math.ceil(
            -0.25 * math.log10(3e-5 * (gamma - 0.95) ** 2 * min(target_delta or _USUAL_DELTA, plain))
        )
        # Nodes may be too large for their cubes: a bound that is not a number is none.
        with np.errstate(over="ignore", invalid="ignore"):
            while True:
                law = self._law(noise_multiplier, 10.0**-decades)
                if self._shared:
                    shared = self._shared / noise_multiplier / noise_multiplier * (1 + 8 * UNIT)
                    value, cut, kappa = _smoothed_bound(law, self._b, SmoothedCall(gamma * (1 - _SLIP), shared))
                else:
                    value, cut, kappa = _cubic_bound(law, self._b, gamma)
                if cut <= 0.02 * value or decades > _MOST_DECADES:
                    break
                decades += max(4, decades // 8 * 4)
        value = value * (1 + rounding_of(self._trees[0])) + FLOOR
        if not value < plain:
            return Evaluation(plain)
        return Evaluation(float(value), {"tree": self._trees[0].first, "trees": len(self._trees), "threshold": kappa})

    def _law(self, noise_multiplier: float, spare: float) -> Measure:
        key = (noise_multiplier, spare)
        if key not in self._laws:
            trees = [tree.scaled(1 / noise_multiplier / noise_multiplier * (1 + 8 * UNIT)) for tree in self._rest]
            self._laws[key] = Measure.average([tree_law(tree, Fineness(self._loss, spare)) for tree in trees])
            if len(self._laws) > _LAWS_KEPT:
                self._laws.popitem(last=False)
        return self._laws[key]


def _cubic_bound(law: GridLaw | Measure, b: int, gamma: float) -> tuple[float, float, float]:
    """The least 4/27·(γ − κ)⁻²·E((A − κ)_+)³ over κ < γ found, how much of it is from the rest, and κ."""
    a = law.nodes / b * (1 + _SLIP)
    gamma = gamma * (1 - _SLIP)
    scaled = law.rest / float(b) ** np.arange(4)

    def parts(kappa: float) -> tuple[float, float]:
        on_grid = float((law.weights * np.maximum(a - kappa, 0.0) ** 3).sum()) + law.zero * max(-kappa, 0.0) ** 3
        shift = max(-kappa, 0.0)
        rest = float(scaled[3] + 3 * shift * scaled[2] + 3 * shift**2 * scaled[1] + shift**3 * scaled[0])
        factor = 4 / 27 / (gamma - kappa) ** 2 * (1 + 1e-12)
        return factor * on_grid, factor * rest

    return _least(parts, gamma, 1e-4 * gamma, 3 * gamma)


def _smoothed_bound(law: GridLaw | Measure, b: int, call: SmoothedCall) -> tuple[float, float, float]:
    """The least E of a majorant of the call found, how much of it is from the rest, and where its cubic starts."""
    a = law.nodes / b * (1 + _SLIP)
    scaled = law.rest / float(b) ** np.arange(4)

    def parts(start: float) -> tuple[float, float]:
        payoff = Majorant.of(call, start)
        return float((law.weights * payoff(a)).sum()) * (1 + 1e-12), float((payoff.powers * scaled).sum()) * (1 + 1e-12)

    nearest, farthest = call.gamma - call.inflection(), 0.999 * call.gamma
    return _least(parts, call.gamma, nearest, farthest) if nearest < farthest else (math.inf, 0.0, 0.0)


def _least(
    parts: Callable[[float], tuple[float, float]], gamma: float, nearest: float, farthest: float
) -> tuple[float, float, float]:
    """The least sum of parts(κ) over γ − κ in a range; its second part; κ."""

    def log_value(log_width: float) -> float:
        return math.log(sum(parts(gamma - math.exp(log_width))) + FLOOR)

    grid = np.linspace(math.log(nearest), math.log(farthest), 32)
    best = int(np.argmin([log_value(x) for x in grid]))
    ends = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = float(minimize_scalar(log_value, bounds=ends, method="bounded", options={"xatol": 1e-3}).x)
    kappa = gamma - math.exp(min((found, float(grid[best])), key=log_value))
    on_grid, rest = parts(kappa)
    return on_grid + rest, rest, kappa


class _TreeOrders(MomentOrders):
    """The Rényi orders of a tree."""

    name = "cascade"
    cheap = True


class _ClosedForms(PreparedAccountant):
    """Of the average of rotations, in both directions: no amplification, and for add the geometric mean."""

    name = "cascade"
    cheap = True

    def __init__(self, mechanism: Mechanism, tree: Tree) -> None:
        self.mechanism = mechanism
        self._largest, self._mean = (v * (1 + 1e-12) for v in (tree.variance, tree.mean_entry()))

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        with np.errstate(over="ignore"):
            largest, mean = (min(v / noise_multiplier / noise_multiplier, 1e300) for v in (self._largest, self._mean))
        plain = gaussian_delta(math.sqrt(largest), epsilon)
        if direction == "add" and plain > _NEGLIGIBLE:
            # The mean of the loss is raised by more than its variance, as it must (see `gaussian_loss_delta`).
            plain = min(plain, gaussian_loss_delta(largest / 2 * (1 + 1e-11), mean, epsilon))
        return Evaluation(plain, {"form": "closed"})
