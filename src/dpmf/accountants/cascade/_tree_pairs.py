"""Averages over two trees: block lengths of one lie between the other's, so that lags are dominated more closely.

Blocks of one tree are halved from level to level. Where lags fall smoothly, as they do with long memory, the averages
of a single tree's rotations have corners at its block lengths, and overshoot between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from dpmf.accountants.cascade._tree import MARGIN, Tree, in_groups, levels_of, merged
from dpmf.numerics import Array

_LIKENESS = 0.3  # what a difference between the two trees costs, in units of an overshoot
_LAGS_OF_LIKENESS = 100
_FEW_LAGS = 300
_MOST_RAISED = 1.2


@dataclass(frozen=True, eq=False)
class _Program:
    """Minimise the average's overshoot and the trees' difference over their weights, on some of the lags."""

    tables: tuple[Array, Array]  # of each tree: lags × levels
    importance: Array
    target: Array
    shared: float

    def solve(self) -> tuple[Array, Array] | None:
        first, second = self.tables
        few = np.unique(np.geomspace(1, len(self.target), _LAGS_OF_LIKENESS).astype(np.int64) - 1)
        chosen = np.unique(np.concatenate((np.arange(min(64, len(self.target))), few)))
        both = np.hstack(self.tables) / 2
        share = np.add.reduceat(self.importance, few)
        cost = np.concatenate((self.importance @ both, _LIKENESS * share))
        # |c − c'|/2 at the few lags is at most one more variable each.
        apart = np.hstack((first[few], -second[few])) / 2
        alike = np.vstack((np.hstack((apart, -np.eye(len(few)))), np.hstack((-apart, -np.eye(len(few))))))
        # The same variance, and the same weight of the whole ring: the payoff, which depends on it, is one for both.
        equal = np.zeros((2, len(cost)))
        width = first.shape[1]
        equal[0, :width], equal[0, width : width + second.shape[1]] = 1.0, -1.0
        equal[1, 0], equal[1, width] = 1.0, -1.0
        bounds = [(0.0, None)] * len(cost)
        bounds[0] = bounds[width] = (self.shared, None)
        for _ in range(8):
            above = np.hstack((-both[chosen], np.zeros((len(chosen), len(few)))))
            found = linprog(
                cost / cost.max(), A_ub=np.vstack((above, alike)), A_eq=equal, b_eq=np.zeros(2),
                b_ub=np.concatenate((-self.target[chosen], np.zeros(2 * len(few)))), bounds=bounds, method="highs",
            )  # fmt: skip
            if found.status != 0:
                return None
            weights = np.maximum(np.asarray(found.x)[: both.shape[1]], 0.0)
            missing = self.target - both @ weights
            worst = np.argsort(-missing)[:_FEW_LAGS]
            worst = worst[missing[worst] > 1e-6]
            if len(worst) == 0:
                break
            chosen = np.union1d(chosen, worst)
        return weights[:width], weights[width:]


def dominating_pair(
    lags: Array, b: int, firsts: tuple[int, int], emphasis: float, shared: float
) -> tuple[Tree, Tree] | None:
    """Two trees such that the average over both and over all rotations is at least `lags`; None where that fails.

    Both have the same variance and the same weight on the whole ring, at least the share `shared` of lags[0].

    **Formal guarantees.** The weights are raised until (c_d + c'_d)/2 ≥ lags_d·(1 + 10⁻¹²) at every lag (at the far end
    of a group for its largest lag), computed from the very numbers that are returned.
    """
    d, largest, number = in_groups(lags, b)
    target = largest / lags[0] * (1 + MARGIN)
    levels = [tuple(levels_of(b, first)) for first in firsts]
    tables = [np.stack([level.together(d, b) for level in each], axis=1) for each in levels]
    importance = number * np.exp(emphasis * (target - 1))
    found = _Program((tables[0], tables[1]), importance / float(importance @ target), target, shared).solve()
    if found is None:
        return None
    weights = [merged(each) for each in found]
    whole = max(float(each[0]) for each in weights)
    for each in weights:
        each[0] = whole
    average = sum(table @ each for table, each in zip(tables, weights, strict=True)) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = float(np.where(target > 0, target / average, 1.0).max())
    if not factor < _MOST_RAISED:
        return None
    raised = [each * max(1.0, factor) * (1 + 2 * MARGIN) for each in weights]
    trees = [Tree(b, first, each, w) for first, each, w in zip(firsts, levels, raised, strict=True)]
    assert np.all((trees[0].lags(d) + trees[1].lags(d)) / 2 >= target * (1 - 0.5 * MARGIN))
    scaled = [tree.scaled(float(lags[0])) for tree in trees]
    return scaled[0], scaled[1]
