"""Trees of nested blocks of a ring: the average over random rotations of one, or of two, dominates a Gram matrix.

The ring of b indices is halved again and again, as evenly as possible, so that the blocks of one level have at most two
sizes, which differ by one. A tree covariance has, for every level, a weight w ≥ 0 shared by all pairs in one block:
S = Σ_l w_l·[same block at level l]. Averaged over the b rotations of the ring it is circulant,
    c_d = Σ_l w_l/b · Σ_{blocks B of level l} (|B| − d)_+ + (|B| − (b − d))_+ .
See docs/theory/cascade.md, "Trees".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from dpmf import budget
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array

MARGIN = 1e-12
"""Relative margin of a domination: more than the rounding errors of c_d and of the weights together
(docs/theory/floating-point.md, "The cascade")."""


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide which trees are fitted, and how closely. Any values give sound bounds.

    Attributes:
      fits: pairs of an emphasis on near lags and a least share of the whole ring; a tree is fitted for each. Weight on
        the whole ring costs variance, but a smoothed option loses less than a cubic one.
      firsts: into how many blocks the ring is cut; block lengths b/(first·2^j) are at most 12 % apart.
      kept: the number of trees kept for a fit without a share of the ring; of the other fits one is kept.
      few_trees: batches per epoch beyond which one tree is kept for each fit, and no pairs are tried.
      pair: into how many blocks the two trees of a pair cut the ring.
      pair_fits: the fits that are made with pairs.
      least_paired: batches per epoch from which pairs are tried.
      likeness: what a difference between the two trees of a pair costs, in units of an overshoot.
      likeness_lags: the number of lags at which that difference is measured.
      pair_excess: pairs whose weights would have to be raised by this factor are given up.
      first_lags: the linear program starts with so many of the nearest lags.
      few_lags: and with so many others; in each round at most so many violated ones are added.
      rounds: the largest number of rounds.
      violation: how far below its target a lag may be before it is added.
      single_lags: distances up to which each is a constraint of its own.
      group: the relative width of the groups of distances beyond.
      small_share: weights below this share of the variance are given to the next larger blocks.
    """

    fits: tuple[tuple[float, float], ...] = ((0.0, 0.0), (3.0, 0.0), (0.0, 0.01), (3.0, 0.1), (3.0, 0.2))
    firsts: tuple[int, ...] = (2, 3, 5, 7, 9, 11, 13, 15)
    kept: int = 3
    few_trees: int = 5000
    pair: tuple[int, int] = (2, 3)
    pair_fits: tuple[tuple[float, float], ...] = ((0.0, 0.0), (0.0, 0.01), (3.0, 0.01))
    least_paired: int = 16
    likeness: float = 0.3
    likeness_lags: int = 100
    pair_excess: float = 1.2
    first_lags: int = 64
    few_lags: int = 400
    rounds: int = 8
    violation: float = 1e-6
    single_lags: int = 2**16
    group: float = 1e-4
    small_share: float = 1e-5


_TUNING = _Tuning()


def lag_majorant(mechanism: Mechanism) -> Array:
    """At least max G over all pairs at cyclic distance d, for d = 0..⌊b/2⌋, not increasing in d.

    **Formal guarantees.** `Mechanism.lags` are at least the maxima of the diagonals of G; the pairs at cyclic distance
    d are on the diagonals d and b − d. Running maxima from the far end only raise.
    """
    b, line = mechanism.batching.batches_per_epoch, mechanism.lags
    wrapped = np.concatenate((line[:1], line[:0:-1]))
    lags = np.maximum(line, wrapped)[: b // 2 + 1]
    return np.asarray(np.maximum.accumulate(lags[::-1])[::-1])


@dataclass(frozen=True)
class Level:
    """The blocks of one level: how many there are of size `small`, and of size `small` + 1."""

    small: int
    count_small: int
    count_large: int

    @property
    def blocks(self) -> int:
        return self.count_small + self.count_large

    def sizes(self) -> list[tuple[int, int]]:
        """The sizes that occur, each with the number of blocks that have it."""
        both = (self.small, self.count_small), (self.small + 1, self.count_large)
        return [(size, count) for size, count in both if count]

    def together(self, lags: np.ndarray, b: int) -> Array:
        """The chance that two indices at these distances are in one block, after a random rotation of the ring."""
        total = np.zeros(len(lags))
        for size, count in self.sizes():
            total += count * (np.maximum(size - lags, 0) + np.maximum(size - (b - lags), 0))
        return np.asarray(total / b)


def split(size: int, parts: int) -> list[int]:
    """Sizes as equal as possible, the larger ones first; none is empty."""
    return [q for q in (size // parts + (i < size % parts) for i in range(parts)) if q > 0]


def levels_of(b: int, first: int) -> list[Level]:
    """The whole ring, `first` blocks of it, and then halves down to single indices."""
    level = Level(b, 1, 0)
    found = [level]
    parts = first
    while level.small > 1 or level.count_large:
        counts: dict[int, int] = {}
        for size, count in level.sizes():
            for part in split(size, parts):
                counts[part] = counts.get(part, 0) + count
        small = min(counts)
        level = Level(small, counts[small], counts.get(small + 1, 0))
        found.append(level)
        parts = 2
    return found


@dataclass(frozen=True, eq=False)
class Tree:
    """A tree covariance: its levels from the whole ring down to single indices, and their weights.

    Attributes:
      b: the number of indices.
      first: into how many blocks the ring is cut; every block is then cut into two.
      levels: the levels, the whole ring first.
      weights: the weight of each level.
    """

    b: int
    first: int
    levels: tuple[Level, ...]
    weights: Array

    @property
    def variance(self) -> float:
        """The diagonal entry of the covariance."""
        return float(self.weights.sum())

    def parts(self, level: int, size: int) -> list[int]:
        """The sizes, one level down, of the parts of a block; a single index is its own part."""
        if level == len(self.levels) - 1:
            return [1]
        return split(size, self.first if level == 0 else 2)

    def lags(self, distances: np.ndarray) -> Array:
        """c_d: the covariance at these distances, averaged over rotations."""
        return sum(
            (w * level.together(distances, self.b) for w, level in zip(self.weights, self.levels, strict=True)),
            np.zeros(len(distances)),
        )

    def cost(self, lags: Array, emphasis: float) -> float:
        """Σ over the ring of e^(emphasis·g_d/g_0)·c_d, g = lags, relative to that of g itself."""
        d, largest, number = in_groups(lags, self.b)
        weight = number * np.exp(emphasis * (largest / lags[0] - 1))
        return float(weight @ self.lags(d)) / float(weight @ largest)

    def with_weights(self, weights: Array) -> Tree:
        return replace(self, weights=weights)

    def scaled(self, factor: float) -> Tree:
        return self.with_weights(self.weights * factor)

    def mean_entry(self) -> float:
        """The mean of all entries, of any rotation: Σ_l w_l·Σ_B |B|²/b²."""
        squares = (sum(count * size * size for size, count in level.sizes()) for level in self.levels)
        return sum(float(w) * square / self.b**2 for w, square in zip(self.weights, squares, strict=True))

    def without_shared(self) -> Tree:
        """The tree without the weight of the whole ring."""
        return self.with_weights(np.append(0.0, self.weights[1:]))


def candidates(lags: Array, b: int) -> tuple[list[Tree], list[tuple[Tree, Tree]]]:
    """A few trees, and a few pairs of trees, each of them above G on average.

    Args:
      lags: what the average must dominate, for each cyclic distance.
      b: the number of indices.

    Returns:
      The trees, and those pairs that come closer than every single tree does.
    """
    trees: list[Tree] = []
    for emphasis, shared in _TUNING.fits:
        firsts = [first for first in _TUNING.firsts if first <= b] or list(_TUNING.firsts[:1])
        fitted = budget.as_far_as_it_goes(dominating_tree(lags, b, first, emphasis, shared) for first in firsts)
        if len(fitted) < len(firsts):
            if not (trees or fitted):
                raise budget.OutOfTime
            if trees:
                break
        kept = _TUNING.kept if b <= _TUNING.few_trees and shared == 0.0 else 1
        for tree in sorted(fitted, key=lambda tree: tree.cost(lags, emphasis))[:kept]:
            if not any(t.first == tree.first and np.allclose(t.weights, tree.weights, rtol=1e-3) for t in trees):
                trees.append(tree)
    pairs: list[tuple[Tree, Tree]] = []
    if _TUNING.least_paired <= b <= _TUNING.few_trees:
        for emphasis, shared in _TUNING.pair_fits:
            pair = dominating_pair(lags, b, _TUNING.pair, emphasis, shared)
            single = min(tree.cost(lags, emphasis) for tree in trees)
            if pair is not None and sum(tree.cost(lags, emphasis) for tree in pair) / 2 < single:
                pairs.append(pair)
    return trees, pairs


def dominating_tree(lags: Array, b: int, first: int, emphasis: float, shared: float = 0.0) -> Tree:
    """The tree whose rotations' average is at least `lags`, with the least Σ_d e^(emphasis·g_d/g_0)·c_d.

    At least the share `shared` of g_0 is given to the whole ring.

    **Formal guarantees.** A linear program on some of the lags, to which those that it violates are added; the weights
    are then raised until c_d ≥ lags_d·(1 + 10⁻¹²) at every lag, computed from the very numbers that are returned. Where
    distances are in groups, c at the far end of each is at least the lag at its near end; neither increases with d.
    """
    levels = levels_of(b, first)
    d, largest, number = in_groups(lags, b)
    budget.claim(32.0 * len(d) * len(levels))
    target = largest / lags[0] * (1 + MARGIN)
    table = np.stack([level.together(d, b) for level in levels], axis=1)
    cost = (number * np.exp(emphasis * (target - 1))) @ table
    bounds = [(shared, None)] + [(0.0, None)] * (len(levels) - 1)
    weights = _least_cover(cost, table, target, bounds)
    if weights is None:
        weights = np.eye(len(levels))[0] * target.max()
    tree = Tree(b, first, tuple(levels), _merged(weights))
    have = tree.lags(d)
    # Raise the whole ring or all weights, whichever costs less.
    raised = tree.weights.copy()
    raised[0] += max(0.0, float((target - have).max())) * (1 + MARGIN)
    choices = [tree.with_weights(raised)]
    if (factor := _shortfall(target, have)) < 2:
        choices.append(tree.scaled(factor * (1 + MARGIN)))
    tree = min(choices, key=lambda t: float(t.lags(d).sum()))
    if np.any(tree.lags(d) < target):  # by rounding only
        tree = tree.scaled(1 + MARGIN)
    _check(tree.lags(d), target)
    return tree.scaled(float(lags[0]))


def dominating_pair(
    lags: Array, b: int, firsts: tuple[int, int], emphasis: float, shared: float
) -> tuple[Tree, Tree] | None:
    """Two trees such that the average over both and over all rotations is at least `lags`; None where that fails.

    Block lengths of one lie between those of the other, so that smooth lags are dominated more closely. Both trees
    have the same variance and the same weight on the whole ring, at least the share `shared` of lags[0], because the
    payoff depends on it; and they should not differ much, because that costs some of what convexity gains.

    **Formal guarantees.** The weights are raised until (c_d + c'_d)/2 ≥ lags_d·(1 + 10⁻¹²) at every lag (at the far end
    of a group for its largest lag), computed from the very numbers that are returned.
    """
    d, largest, number = in_groups(lags, b)
    target = largest / lags[0] * (1 + MARGIN)
    levels = [tuple(levels_of(b, first)) for first in firsts]
    tables = [np.stack([level.together(d, b) for level in each], axis=1) for each in levels]
    importance = number * np.exp(emphasis * (target - 1))
    importance /= float(importance @ target)
    width, count = tables[0].shape[1], tables[0].shape[1] + tables[1].shape[1]
    # The variables are the weights of both trees and, at a few lags, a bound on |c − c'|/2.
    few = np.unique(np.geomspace(1, len(target), _TUNING.likeness_lags).astype(np.int64) - 1)
    both = np.hstack((*tables, np.zeros((len(d), len(few))))) / 2
    cost = importance @ both
    cost[count:] = _TUNING.likeness * np.add.reduceat(importance, few)
    apart = np.hstack((tables[0][few], -tables[1][few])) / 2
    alike = np.vstack((np.hstack((apart, -np.eye(len(few)))), np.hstack((-apart, -np.eye(len(few))))))
    # The same variance, and the same weight of the whole ring.
    equal = np.zeros((2, len(cost)))
    equal[0, :width], equal[0, width:count] = 1.0, -1.0
    equal[1, 0], equal[1, width] = 1.0, -1.0
    bounds: list[tuple[float, float | None]] = [(0.0, None)] * len(cost)
    bounds[0] = bounds[width] = (shared, None)
    found = _least_cover(cost, both, target, bounds, alike, equal)
    if found is None:
        return None
    weights = [_merged(each) for each in (found[:width], found[width:count])]
    weights[0][0] = weights[1][0] = max(weights[0][0], weights[1][0])
    factor = _shortfall(target, (tables[0] @ weights[0] + tables[1] @ weights[1]) / 2)
    if not factor < _TUNING.pair_excess:
        return None
    trees = [Tree(b, first, each, w) for first, each, w in zip(firsts, levels, weights, strict=True)]
    one, other = (tree.scaled(factor * (1 + 2 * MARGIN)) for tree in trees)
    _check((one.lags(d) + other.lags(d)) / 2, target)
    return one.scaled(float(lags[0])), other.scaled(float(lags[0]))


def _least_cover(
    cost: Array,
    table: Array,
    target: Array,
    bounds: Sequence[tuple[float, float | None]],
    at_most_zero: Array | None = None,
    zero: Array | None = None,
) -> Array | None:
    """The weights w with table·w ≥ target that cost least, nearly; None where the linear program fails.

    Args:
      cost: the cost of each weight.
      table: one row for each lag.
      target: what each row must reach. The program has some of the rows, to which those that it violates are added.
      bounds: the bounds of each weight.
      at_most_zero: further rows that must not be positive.
      zero: further rows that must be zero.
    """
    spread = np.geomspace(1, len(target), _TUNING.few_lags).astype(np.int64) - 1
    chosen = np.union1d(np.arange(min(_TUNING.first_lags, len(target))), spread)
    more = np.zeros((0, len(cost))) if at_most_zero is None else at_most_zero
    weights: Array | None = None
    for _ in range(_TUNING.rounds):
        budget.check()
        found = linprog(
            cost / cost.max(), A_ub=np.vstack((-table[chosen], more)),
            b_ub=np.append(-target[chosen], np.zeros(len(more))),
            A_eq=zero, b_eq=None if zero is None else np.zeros(len(zero)), bounds=bounds, method="highs",
        )  # fmt: skip
        if found.status != 0:
            break
        weights = np.maximum(np.asarray(found.x), 0.0)
        missing = target - table @ weights
        worst = np.argsort(-missing)[: _TUNING.few_lags]
        worst = worst[missing[worst] > _TUNING.violation]
        if len(worst) == 0:
            break
        chosen = np.union1d(chosen, worst)
    return weights


def _shortfall(target: Array, have: Array) -> float:
    """The factor, at least 1, by which weights must be raised to reach the target."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return max(1.0, float(np.where(target > 0, target / have, 1.0).max()))


def _check(have: Array, target: Array) -> None:
    """Refuse weights that do not dominate; half of the margin is left for what follows."""
    if not np.all(have >= target * (1 - 0.5 * MARGIN)):
        raise ArithmeticError("the fitted tree does not dominate the Gram matrix")


def in_groups(lags: Array, b: int) -> tuple[np.ndarray, Array, Array]:
    """Groups of distances: the far end of each, its largest lag (at the near end), how many pairs of an index it has.

    Every distance is a group up to some thousands; beyond, groups are narrow beside the distance. On a ring all
    distances but 0 and b/2 occur twice.
    """
    d = np.arange(len(lags))
    number = np.where((d == 0) | (2 * d == b), 1.0, 2.0)
    if len(lags) <= _TUNING.single_lags:
        return d, lags, number
    groups = math.ceil(math.log(len(lags) / _TUNING.single_lags) / _TUNING.group) + 2
    far = np.geomspace(_TUNING.single_lags, len(lags), groups)[:-1]
    begin = np.unique(np.concatenate((d[: _TUNING.single_lags], far.astype(np.int64))))
    return np.append(begin[1:] - 1, d[-1]), lags[begin], np.add.reduceat(number, begin)


def _merged(weights: Array) -> Array:
    """Give small weights to the next larger blocks, which only raises covariances."""
    out = weights.copy()
    for level in range(len(out) - 1, 0, -1):
        if out[level] < _TUNING.small_share * weights.sum():
            out[level - 1] += out[level]
            out[level] = 0.0
    return out
