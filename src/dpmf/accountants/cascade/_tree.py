"""Trees of nested blocks of a ring: random rotations of one dominate a Gram matrix on average.

The ring of b indices is halved again and again, as evenly as possible, so that the blocks of one level have at most two
sizes, which differ by one. A tree covariance has, for every level, a weight w ≥ 0 shared by all pairs in one block:
S = Σ_l w_l·[same block at level l]. Averaged over the b rotations of the ring it is circulant,
    c_d = Σ_l w_l/b · Σ_{blocks B of level l} (|B| − d)_+ + (|B| − (b − d))_+ .
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy.optimize import linprog
from scipy.special import gammaln

from dpmf import budget
from dpmf.accountants.renyi._moments import MomentTable
from dpmf.kernels import announce_compilation
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array

MARGIN = 1e-12  # relative, beyond the rounding errors of weights, of their sums and of their quotients by σ²
_FEW_LAGS = 400
_ALL_LAGS = 2**16  # distances up to which each is looked at
_GROUP = 1e-4  # of the distance: how wide groups are beyond
_SMALL_SHARE = 1e-5  # of the variance: smaller weights are not worth a level


def lag_majorant(mechanism: Mechanism) -> Array:
    """At least max G over all pairs at cyclic distance d, for d = 0..⌊b/2⌋, not increasing in d.

    **Formal guarantees.** `Mechanism.lags` are at least the maxima of the diagonals of G; at cyclic distance d are the
    diagonals d and b − d. Running maxima from the far end only raise.
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
        """(size, how many)."""
        both = (self.small, self.count_small), (self.small + 1, self.count_large)
        return [(size, count) for size, count in both if count]

    def together(self, lags: np.ndarray, b: int) -> Array:
        """The chance that two indices at these distances are in one block, after a random rotation of the ring."""
        total = np.zeros(len(lags))
        for size, count in self.sizes():
            total += count * (np.maximum(size - lags, 0) + np.maximum(size - (b - lags), 0))
        return np.asarray(total / b)


def split(size: int, parts: int) -> list[int]:
    """Sizes as equal as can be, the larger ones first; none is empty."""
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
    """A tree covariance: its levels from the whole ring down to single indices, and their weights."""

    b: int
    first: int  # into how many blocks the ring is cut; every block into two
    levels: tuple[Level, ...]
    weights: Array

    @property
    def variance(self) -> float:
        return float(self.weights.sum())

    def parts(self, level: int, size: int) -> list[int]:
        """The sizes, one level down, of the parts of a block; single indices are their own."""
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

    def covariance(self) -> Array:
        """The b × b matrix S of one rotation; for tests and small b."""
        owners = [np.zeros(self.b, dtype=np.int64)]
        parts = self.first
        for _ in self.levels[1:]:
            sizes = [part for size in np.bincount(owners[-1]) for part in split(int(size), parts)]
            owners.append(np.repeat(np.arange(len(sizes)), sizes))
            parts = 2
        same = (owner[:, None] == owner[None, :] for owner in owners)
        return sum((w * s for w, s in zip(self.weights, same, strict=True)), np.zeros((self.b, self.b)))

    def scaled(self, factor: float) -> Tree:
        return Tree(self.b, self.first, self.levels, self.weights * factor)

    def mean_entry(self) -> float:
        """The mean of all entries, of any rotation: Σ_l w_l·Σ_B |B|²/b²."""
        squares = (sum(count * size * size for size, count in level.sizes()) for level in self.levels)
        return sum(float(w) * square / self.b**2 for w, square in zip(self.weights, squares, strict=True))

    def without_shared(self) -> tuple[float, Tree]:
        """The weight of the whole ring, and the tree without it."""
        weights = self.weights.copy()
        weights[0] = 0.0
        return float(self.weights[0]), Tree(self.b, self.first, self.levels, weights)


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
    cost /= cost.max()
    few = np.geomspace(1, len(d), _FEW_LAGS).astype(np.int64) - 1
    chosen = np.unique(np.concatenate((np.arange(min(64, len(d))), few)))
    weights = np.eye(len(levels))[0] * target.max()
    bounds = [(shared, None)] + [(0.0, None)] * (len(levels) - 1)
    for _ in range(8):
        budget.check()
        found = linprog(cost, A_ub=-table[chosen], b_ub=-target[chosen], bounds=bounds, method="highs")
        if found.status != 0:
            break
        weights = np.maximum(np.asarray(found.x), 0.0)
        missing = target - table @ weights
        worst = np.argsort(-missing)[:_FEW_LAGS]
        worst = worst[missing[worst] > 1e-6]
        if len(worst) == 0:
            break
        chosen = np.union1d(chosen, worst)
    return _raised(Tree(b, first, tuple(levels), merged(weights)), d, target).scaled(float(lags[0]))


def in_groups(lags: Array, b: int) -> tuple[np.ndarray, Array, Array]:
    """Groups of distances: the far end of each, its largest lag (at the near end), how many pairs of an index it has.

    Every distance is a group up to some thousands; beyond, groups are narrow beside the distance. On a ring all
    distances but 0 and b/2 occur twice.
    """
    d = np.arange(len(lags))
    number = np.where((d == 0) | (2 * d == b), 1.0, 2.0)
    if len(lags) <= _ALL_LAGS:
        return d, lags, number
    far = np.geomspace(_ALL_LAGS, len(lags), math.ceil(math.log(len(lags) / _ALL_LAGS) / _GROUP) + 2)[:-1]
    begin = np.unique(np.concatenate((d[:_ALL_LAGS], far.astype(np.int64))))
    return np.append(begin[1:] - 1, d[-1]), lags[begin], np.add.reduceat(number, begin)


def merged(weights: Array) -> Array:
    """Small weights go to the next larger blocks: that only raises covariances."""
    out = weights.copy()
    for level in range(len(out) - 1, 0, -1):
        if out[level] < _SMALL_SHARE * weights.sum():
            out[level - 1] += out[level]
            out[level] = 0.0
    return out


def _raised(tree: Tree, d: np.ndarray, target: Array) -> Tree:
    have = tree.lags(d)
    constant = tree.weights.copy()
    constant[0] += max(0.0, float((target - have).max())) * (1 + MARGIN)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = float(np.where(target > 0, target / have, 1.0).max())
    options = [constant] if not factor < 2 else [constant, tree.weights * max(1.0, factor) * (1 + MARGIN)]
    best = min(options, key=lambda w: float(Tree(tree.b, tree.first, tree.levels, w).lags(d).sum()))
    tree = Tree(tree.b, tree.first, tree.levels, best)
    if np.any(tree.lags(d) < target):  # rounding only
        tree = tree.scaled(1 + MARGIN)
    assert np.all(tree.lags(d) >= target * (1 - 0.5 * MARGIN))
    return tree


class TreeMoments(MomentTable):
    """E[A^m] of a tree for all m up to an order at once, whatever the bandwidth: O(order²·log b).

    **Formal guarantees.** S ↦ E[A_S^m] is convex for m ≥ 2 (docs/theory/cascade.md), so the moments of G/σ², which is
    at most an average of rotations of the tree, are at most the tree's. A block's sum is an independent log-normal
    times the sum of its independent parts: exponential generating functions multiply over the parts, and the
    coefficient of x^m/m! is multiplied by e^(w·m(m−1)/2). All terms are positive; rounding error is added.
    """

    def __init__(self, tree: Tree) -> None:
        super().__init__(0.0, 0, False)
        self.details = {"tree": tree.first}
        self._tree = tree

    def work(self, order: int) -> float:
        return 20.0 * (len(self._tree.levels) + self._tree.first) * order * order

    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        from dpmf.kernels.renyi import log_convolve

        announce_compilation(log_convolve)
        tree, m = self._tree, np.arange(order + 1, dtype=np.float64)
        log_factorial = gammaln(m + 1)
        pairs = m * (m - 1) / 2
        weights = tree.weights / noise_multiplier**2 * (1 + 4 * 2.0**-53)
        below = {1: -log_factorial}
        for number, level in reversed(list(enumerate(tree.levels))):
            parts = {size: tree.parts(number, size) for size, _ in level.sizes()}
            product = {size: reduce(log_convolve, (below[part] for part in sizes)) for size, sizes in parts.items()}
            below = {size: series + weights[number] * pairs for size, series in product.items()}
        depth = 2 * len(tree.levels) + tree.first
        series = below[tree.b]
        # As for products of power series: a few units in the last place of the largest logarithm each time.
        scale = np.maximum.accumulate(np.abs(series) + np.abs(log_factorial)) + m * math.log(tree.b) + order
        return np.asarray(series + log_factorial - m * math.log(tree.b) + 8 * (depth + 1) * 2.0**-52 * scale)
