"""Which of several bounds is asked about which points of a curve of δ(ε)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from dpmf import budget
from dpmf.accountants.protocol import Direction, PreparedAccountant

Group: TypeAlias = Callable[[], Sequence[PreparedAccountant]]


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide who is asked. Any values give sound bounds.

    Attributes:
      few_points: up to this many points, every bound is asked about each of them.
      nearly: bounds within this factor of the smallest count as equally good.
      small_delta: below this δ the winner at the previous probe is kept.
      least_delta: smaller δ are not told apart.
    """

    few_points: int = 6
    nearly: float = 1.03
    small_delta: float = 1e-8
    least_delta: float = 1e-13


_TUNING = _Tuning()


def asked_where(
    groups: Sequence[Group], noise_multiplier: float, epsilons: Sequence[float], direction: Direction, exact: float
) -> list[tuple[PreparedAccountant, list[int]]]:
    """Which bound to ask at which points of a profile.

    Each point of a long grid is left to the bounds that win, as far as rough bounds can tell, at the probes around it:
    any choice is sound. Later groups are not asked at probes where earlier ones are at most about `exact` times the
    truth, and not even made where all are.
    """
    if len(epsilons) <= _TUNING.few_points or (len(groups) == 1 and len(groups[0]()) == 1):
        return [(bound, list(range(len(epsilons)))) for group in groups for bound in group()]

    def likely(bound: PreparedAccountant, epsilon: float) -> tuple[float, float]:
        """About the bound, and about how many times the truth it is."""
        budget.check()
        rough = bound.rough_delta(noise_multiplier, epsilon, direction)
        if rough is None:
            found = bound.delta(noise_multiplier, epsilon, direction)
            return max(found.value, _TUNING.least_delta), found.slack
        return max(bound.likely(rough.value), _TUNING.least_delta), math.inf

    order = sorted(range(len(epsilons)), key=lambda k: epsilons[k])
    probes = [0, len(order) // 2, len(order) - 1]
    table: list[tuple[PreparedAccountant, list[float]]] = []
    least = [(1.0, math.inf)] * len(probes)
    for group in groups:
        rows: list[tuple[PreparedAccountant, list[float]]] = [(bound, []) for bound in group()]
        for place, k in enumerate(probes):
            settled = least[place][1] <= exact
            for bound, row in rows:
                if settled:
                    found = (1.0, math.inf)  # nothing can be gained here
                elif place and least[place - 1][0] < _TUNING.small_delta:
                    found = row[-1], least[place - 1][1]
                else:
                    found = budget.attempt(partial(likely, bound, epsilons[order[k]]), (1.0, math.inf))
                row.append(found[0])
                least[place] = min(least[place], found)
        table += rows
        if all(slack <= exact for _, slack in least):
            break
    # A bound that is nearly as good as the winner at most probes spares the others.
    overall = min(table, key=lambda row: sum(math.log(value) for value in row[1]))
    winners = []
    for place, (value, _) in enumerate(least):
        local = min(table, key=lambda row: row[1][place])
        winners.append((overall if overall[1][place] <= _TUNING.nearly * value else local)[0])
    asked = []
    for winner in {id(winner): winner for winner in winners}.values():
        near = {
            order[k]
            for place, (low, high) in enumerate(pairwise(probes))
            if winner in winners[place : place + 2]
            for k in range(low, high + 1)
        }
        asked.append((winner, sorted(near)))
    return asked
