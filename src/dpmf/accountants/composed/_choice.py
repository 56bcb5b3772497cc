"""Which bounds make the profile of one run, and where each of them is asked. Any choice gives sound pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dpmf import budget
from dpmf.accountants.composed._answers import Answers
from dpmf.accountants.protocol import PreparedAccountant


@dataclass(frozen=True)
class _Tuning:
    """Which bounds are compared where.

    Attributes:
      probes: where bounds are compared, as shares of the largest ε.
      pivot: the probe at which all of them are.
      probes_of_slow: how many of them, the smallest ones, slow bounds are asked at.
      worth_while: bounds that are not cheap are asked where δ is larger than this: below it they take longest and
        gain least.
      seen: the same in units of the tail.
      told_apart: they are compared where δ is larger than this.
      unsure: estimates of bounds that are not cheap are raised by this factor, and a cheap one that is within this
        factor of them is asked as well.
      nearly: a bound within this factor of the least one everywhere spares the others.
      exact: where a cheap bound is at most about so many times the truth, no other can gain anything.
      close: where it is at most about so many times the truth, an accountant that exceeds it by this factor at the
        pivot is not asked.
      behind: the same factor within an accountant: its bounds that are not cheap are not asked anywhere else.
    """

    probes: tuple[float, ...] = (0.0, 0.1, 0.25, 0.45, 0.7)
    pivot: int = 1
    probes_of_slow: int = 3
    worth_while: float = 5e-9
    seen: float = 10.0
    told_apart: float = 1e-6
    unsure: float = 1.05
    nearly: float = 1.02
    exact: float = 1.03
    close: float = 1.4
    behind: float = 1.02


_TUNING = _Tuning()


class Chosen(NamedTuple):
    """A bound, and from where to where it is asked, in units of the largest ε."""

    bound: PreparedAccountant
    first: float
    last: float


class Choice:
    """A comparison of bounds on δ(ε) at one σ and in one direction, from 0 to the largest ε of interest."""

    def __init__(
        self,
        bounds: Sequence[PreparedAccountant],
        answers: Answers,
        largest: float,
        tail: float,
    ) -> None:
        self._bounds, self._answers = bounds, answers
        self._sigma, self._direction = answers.noise_multiplier, answers.direction
        self._probes = [share * largest for share in _TUNING.probes]
        self._cheap = [k for k, bound in enumerate(bounds) if bound.cheap]
        # About how large each bound is at each probe: 1 where it would not win.
        self._table = {k: [1.0] * len(self._probes) for k in range(len(bounds))}
        self._least = [(1.0, math.inf)] * len(self._probes)  # of the cheap ones, and about how many times the truth
        self._compare_cheap()
        small = max(_TUNING.worth_while, _TUNING.seen * tail)
        self._inside = sum(delta > small for delta, _ in self._least)
        self._end = self._where(small) if self._cheap else math.inf
        self._compare_others()

    def chosen(self, far: PreparedAccountant | None) -> list[Chosen]:
        """The bounds that are the least at some probe, and the stretch of ε around these probes.

        One of them is taken wherever it is nearly the least. Beyond all probes `far` is asked, if there is one.
        """
        rows = [self._table[k] for k in range(len(self._bounds))]
        least = [max(min(column), 1e-300) for column in zip(*rows, strict=True)]
        # How far each bound is above the least one, by probe.
        excess = [[math.log(max(value / low, 1.0)) for value, low in zip(row, least, strict=True)] for row in rows]
        overall = min((self._bounds[k].slow, sum(row), k) for k, row in enumerate(excess))[2]
        by_probe = list(zip(*excess, strict=True))
        winners, others = [], []
        for column in by_probe:
            nearly = column[overall] <= math.log(_TUNING.nearly)
            winner = overall if nearly else min(range(len(rows)), key=column.__getitem__)
            # What others are is estimated from rough bounds: a cheap bound that may be less is asked as well.
            near = min(self._cheap, key=column.__getitem__, default=winner)
            winners.append(winner)
            others.append(near if column[near] < math.log(_TUNING.unsure) else winner)
        ends = [0.0, *_TUNING.probes, math.inf]
        chosen = []
        for k in dict.fromkeys(winners + others):
            where = [probe for probe in range(len(winners)) if k in (winners[probe], others[probe])]
            # A probe is place + 1 of the ends; the stretch reaches to the probes beside it.
            last = ends[where[-1] + 2] if where[-1] + 1 < len(winners) else math.inf
            bound = self._bounds[k]
            chosen.append(Chosen(bound, ends[where[0]], last if bound.cheap else min(last, self._end)))
        if far is not None:  # somebody has to answer beyond, and some bounds have a floor
            chosen.append(Chosen(far, min(self._end, _TUNING.probes[-1]), math.inf))
        return chosen

    def _compare_cheap(self) -> None:
        """Ask cheap bounds: all at the pivot, then each accountant where it may win, the best one first."""
        pivot = _TUNING.pivot
        for k in self._cheap:
            self._ask_cheap(k, pivot)
        lead = _leads({k: self._table[k][pivot] for k in self._cheap}, self._bounds)
        order = sorted(self._cheap, key=lambda k: (lead[self._bounds[k].name], self._table[k][pivot]))
        least = self._least[pivot][0]
        for probe in range(len(self._probes)):
            for k in order if probe != pivot else ():
                far = lead[self._bounds[k].name] > _TUNING.close * least
                if self._least[probe][1] > (_TUNING.close if far else _TUNING.exact):
                    self._ask_cheap(k, probe)

    def _ask_cheap(self, k: int, probe: int) -> None:
        def ask() -> tuple[float, float]:
            budget.check()
            found = self._answers.delta(self._bounds[k], self._probes[probe])
            return found.value, found.slack

        found = budget.attempt(ask, (1.0, math.inf))
        self._table[k][probe] = found[0]
        self._least[probe] = min(self._least[probe], found)

    def _where(self, small: float) -> float:
        """About where cheap bounds fall to a small δ, as a share of the largest ε."""
        if self._inside == len(self._probes):
            return math.inf
        if self._inside == 0:
            return 0.0
        logs = [math.log(max(delta, 1e-300)) for delta, _ in self._least]
        high, low = logs[self._inside - 1 : self._inside + 1]
        first, last = _TUNING.probes[self._inside - 1 : self._inside + 1]
        return first + (last - first) * (high - math.log(small)) / (high - low)

    def _compare_others(self) -> None:
        """Ask rough versions of bounds that are not cheap: at the pivot first, elsewhere those that may win."""
        told_apart = sum(delta > _TUNING.told_apart for delta, _ in self._least)
        # Where δ is small, a slow bound is not worth its time.
        within = [_TUNING.probes_of_slow if bound.slow else self._inside for bound in self._bounds]
        count = [max(1, min(some, told_apart)) for some in within]
        asked = [
            k for k in range(len(self._bounds))
            if k not in self._cheap and any(slack > _TUNING.exact for _, slack in self._least[: max(1, within[k])])
        ]  # fmt: skip
        at_pivot = {k: self._roughly(k, [min(_TUNING.pivot, count[k] - 1)])[0] for k in asked}
        # Slow bounds are not asked everywhere, and do not spare others of their accountant.
        quick = _leads({k: value for k, value in at_pivot.items() if not self._bounds[k].slow}, self._bounds)
        lead = _leads(at_pivot, self._bounds)
        for k, value in at_pivot.items():
            pivot = min(_TUNING.pivot, count[k] - 1)
            self._table[k][pivot] = value
            name, slow = self._bounds[k].name, self._bounds[k].slow
            first = lead[name]
            least, slack = self._least[pivot]
            # The profile of adding a record decides little of what is composed: the best at the pivot will do.
            behind = _TUNING.behind if self._direction == "remove" else 1.0
            far = first > _TUNING.close * least and slack <= _TUNING.close
            if value > behind * (first if slow else quick[name]) or far:
                continue
            # What an accountant loses at the pivot it hardly makes up for elsewhere. How far cheap bounds are above the
            # truth is an estimate, which one that is less proves wrong.
            enough = 0.0
            if value >= least:
                made_up = math.sqrt(first / least * slack) if least > 0 and slack < math.inf else 0.0
                enough = max(made_up, _TUNING.exact)
            open_ones = [probe for probe in range(within[k]) if probe != pivot and self._least[probe][1] > enough]
            rest = [probe for probe in open_ones if probe < count[k]]
            beyond = [probe for probe in open_ones if probe >= count[k]]
            if beyond and count[k] - 1 not in (pivot, *rest):
                rest.append(beyond[0])
            for probe, found in zip(rest, self._roughly(k, rest), strict=True):
                self._table[k][probe] = found
            # As far above the cheap ones as at the last probe that was asked.
            last = max((pivot, *rest))
            ratio = self._table[k][last] / max(self._least[last][0], 1e-300)
            for probe in beyond:
                if probe > last:
                    self._table[k][probe] = min(1.0, ratio * self._least[probe][0])

    def _roughly(self, k: int, probes: Sequence[int]) -> list[float]:
        """About how large a bound is, from its rough version; raised where cheap ones, which are known, compete."""
        if not probes:
            return []
        budget.check()
        bound, epsilons = self._bounds[k], [self._probes[probe] for probe in probes]
        ask = partial(bound.rough_deltas, self._sigma, epsilons, self._direction)
        raised = _TUNING.unsure if self._cheap else 1.0
        return [raised * bound.likely(value) for value in budget.attempt(ask, [1.0] * len(epsilons))]


def _leads(values: Mapping[int, float], bounds: Sequence[PreparedAccountant]) -> dict[str, float]:
    """The least value of each accountant."""
    lead: dict[str, float] = {}
    for k, value in values.items():
        lead[bounds[k].name] = min(value, lead.get(bounds[k].name, math.inf))
    return lead
