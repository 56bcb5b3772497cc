"""Which of several bounds is asked about which points of a curve of δ(ε)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from dpmf import budget
from dpmf.accountants.protocol import Direction, PreparedAccountant

Group: TypeAlias = Callable[[], Sequence[PreparedAccountant]]


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide who is asked. Any values give sound bounds.

    Attributes:
      few_points: up to this many points, every bound is asked about each of them.
      nearly: bounds within this factor of the smallest count as equally good.
      small_delta: where δ is below this at the middle probe, its winner is kept at the last one.
      least_delta: smaller δ are not told apart.
      behind: of an accountant's bounds, those that exceed its best one by this factor at the middle probe are not asked
        at the others. Where it exceeds by as much a bound that is close to the truth, its others are not asked at all.
      close: a bound that is at most about so many times the truth is close to it.
      ahead: a bound that is expected to be ahead of others by this factor at the last probe, too, spares them.
      same: bounds that say nothing about the truth are compared at the middle probe only if δ differs by less than this
        factor at another one.
    """

    few_points: int = 6
    nearly: float = 1.03
    small_delta: float = 1e-8
    least_delta: float = 1e-13
    behind: float = 1.25
    close: float = 1.5
    ahead: float = 1.04
    same: float = 10.0


_TUNING = _Tuning()
_FIRST, _MIDDLE, _LAST = range(3)  # the probes


class _Row(NamedTuple):
    """A bound, and about how large it is at each probe: 1 where that was not asked, since it would not win."""

    bound: PreparedAccountant
    values: list[float]


class _Survey:
    """About how large bounds are at three probes, and how far the least of them is above the truth there."""

    def __init__(self, noise_multiplier: float, probes: Sequence[float], direction: Direction, exact: float) -> None:
        self._sigma, self._probes, self._direction, self._exact = noise_multiplier, probes, direction, exact
        self.table: list[_Row] = []
        self.least = [(1.0, math.inf)] * len(probes)  # the value, and about how many times the truth it is

    def settled(self, place: int) -> bool:
        """Whether the least bound is so close to the truth that no other can gain much."""
        middle, here = self.least[_MIDDLE][1], self.least[place][1]
        return here <= self._exact * (self._exact if middle <= self._exact else 1.0)

    def ask(self, bounds: Sequence[PreparedAccountant]) -> None:
        """Ask bounds where they may win, at the middle probe first."""
        rows = [_Row(bound, [1.0] * len(self._probes)) for bound in bounds]
        before = [value for value, _ in self.least]
        for place in (_MIDDLE, _FIRST, _LAST):
            if self.settled(place):
                continue
            # The best one of the middle probe first: what is close to the truth spares others.
            order = rows if place == _MIDDLE else sorted(rows, key=lambda row: row.values[_MIDDLE])
            for number, row in enumerate(order):
                known = self._foregone(place, row, rows[:number] if place == _MIDDLE else rows, before)
                if known is None:
                    found = budget.attempt(partial(self._likely, row.bound, place), (1.0, math.inf))
                else:
                    found = known, math.inf
                row.values[place] = found[0]
                self.least[place] = min(self.least[place], found)
        self.table += rows

    def _likely(self, bound: PreparedAccountant, place: int) -> tuple[float, float]:
        """About the bound, and about how many times the truth it is."""
        budget.check()
        rough = bound.rough_delta(self._sigma, self._probes[place], self._direction)
        if rough is None:
            found = bound.delta(self._sigma, self._probes[place], self._direction)
            return max(found.value, _TUNING.least_delta), found.slack
        return max(bound.likely(rough.value), _TUNING.least_delta), math.inf

    def _foregone(self, place: int, row: _Row, others: Sequence[_Row], before: Sequence[float]) -> float | None:
        """What to take a bound for without asking it, from what others of its accountant were; None where to ask."""
        kin = [other for other in others if other.bound.name == row.bound.name]
        least, slack = self.least[_MIDDLE]
        if place == _MIDDLE:
            hopeless = slack <= _TUNING.close and any(other.values[_MIDDLE] > _TUNING.behind * least for other in kin)
            return 1.0 if hopeless and row.bound.roughness > 1 else None
        if place == _LAST and least < _TUNING.small_delta:
            return row.values[_MIDDLE]
        lead = min(other.values[_MIDDLE] for other in kin)
        ratio = row.values[_MIDDLE] / lead
        if ratio > _TUNING.behind:
            return 1.0
        # What the accountant loses at the middle probe, it hardly makes up for elsewhere.
        made_up = self.least[place][1] <= math.sqrt(max(lead / least * slack, 1.0)) < math.inf
        if made_up and (row.bound.roughness > 1 or lead > _TUNING.behind * least):
            return 1.0
        if row.bound.roughness == 1:
            return None
        if before[place] < 1 and max(before[place] / before[_MIDDLE], before[_MIDDLE] / before[place]) < _TUNING.same:
            return row.values[_MIDDLE] / before[_MIDDLE] * before[place]
        if place == _LAST and ratio > math.sqrt(_TUNING.ahead):
            first = min(other.values[_FIRST] for other in kin)
            earlier = row.values[_FIRST] / first if first < 1 else 1.0
            if ratio * ratio / earlier > _TUNING.ahead:
                return 1.0
        return None


def asked_where(
    groups: Sequence[Group],
    noise_multiplier: float,
    epsilons: Sequence[float],
    direction: Direction,
    exact: float,
) -> list[tuple[PreparedAccountant, list[int]]]:
    """Which bound to ask at which points of a profile.

    Each point of a long grid is left to the bounds that win, as far as rough bounds can tell, at the probes around it:
    any choice is sound. Later groups are not asked at probes where earlier ones are at most about `exact` times the
    truth, and not even made where all are.
    """
    if len(epsilons) <= _TUNING.few_points or (len(groups) == 1 and len(groups[0]()) == 1):
        return [(bound, list(range(len(epsilons)))) for group in groups for bound in group()]
    order = sorted(range(len(epsilons)), key=lambda k: epsilons[k])
    probes = [0, len(order) // 2, len(order) - 1]
    survey = _Survey(noise_multiplier, [epsilons[order[k]] for k in probes], direction, exact)
    for group in groups:
        survey.ask(group())
        if all(survey.settled(place) for place in range(len(probes))):
            break
    # A bound that is nearly as good as the winner at most probes spares the others.
    overall = min(survey.table, key=lambda row: sum(math.log(value) for value in row.values))
    winners = []
    for place, (value, _) in enumerate(survey.least):
        local = min(survey.table, key=lambda row: row.values[place])
        winners.append((overall if overall.values[place] <= _TUNING.nearly * value else local).bound)
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
