"""The discrete dominating pair of one run of a mechanism, from the bounds of any accountant: what compositions need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpmf import budget
from dpmf.accountants.combined.least import Least
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.protocol import DIRECTIONS, Direction, PreparedAccountant
from dpmf.errors import ArgumentError
from dpmf.loss.dominating_pair import DominatingPair
from dpmf.loss.profile_points import TUNING, Profile, ProfilePoints

_QUICK = ("lattice", "renyi", "gaussian")  # bounds that find the ε of a tiny δ at once
_SLOWER = ("conditional", "renyi")  # bounds that are looser and slower than those of a chain


@dataclass(frozen=True)
class _Tuning:
    """Which bounds make a profile. Any values give sound pairs.

    Attributes:
      probes: where bounds are compared, as shares of the largest ε.
      probes_of_slow: how many of them, the smallest ones, slow bounds are asked at.
      worth_while: bounds that are not cheap are asked where δ is larger than this: below it they take longest and
        gain least.
      seen: the same in units of the tail.
      told_apart: they are compared where δ is larger than this.
      reach: the least ε that is tried as the largest one, in deviations of the loss.
      stride: how closely, as a factor, the ε at which δ is small enough is looked for.
      closely: the same for the ε beyond which only cheap bounds are asked.
      beyond: how far beyond the ε at which δ was small enough to go at the next σ.
      same_choice: change of log σ over which the same bounds are expected to stay the best.
      unsure: estimates of bounds that are not cheap are raised by this factor, and a cheap one that is within this
        factor of them is asked as well.
      nearly: a bound within this factor of the least one everywhere spares the others.
    """

    probes: tuple[float, ...] = (0.0, 0.1, 0.25, 0.45, 0.7)
    probes_of_slow: int = 3
    worth_while: float = 5e-9
    seen: float = 10.0
    told_apart: float = 1e-6
    reach: float = 6.0
    stride: float = 1.2
    closely: float = 1.05
    beyond: float = 1.05
    same_choice: float = 0.6
    unsure: float = 1.05
    nearly: float = 1.02


_TUNING = _Tuning()


class _Chosen(NamedTuple):
    """A bound, and from where to where it is asked, in units of the largest ε."""

    bound: PreparedAccountant
    first: float
    last: float


class Pairs:
    """Dominating pairs of one run of a mechanism, at any σ. Which bounds are the best is remembered between σ."""

    def __init__(self, prepared: Least) -> None:
        if prepared.kind != "bound":
            raise ArgumentError("accountant", f"must be one that gives guaranteed bounds, {prepared.name} does not")
        self._prepared = prepared
        self._chosen: dict[Direction, tuple[float, list[_Chosen]]] = {}
        self._reach: dict[Direction, float] = dict.fromkeys(DIRECTIONS, _TUNING.reach)

    def at(
        self, noise_multiplier: float, interval: float, tolerance: float, *, rough: bool = False, tail: float = 1e-14
    ) -> DominatingPair:
        """A pair of discrete distributions that dominates one run of the mechanism.

        Args:
          noise_multiplier: σ.
          interval: spacing of the lattice of losses.
          tolerance: the share of ε (of the deviation of the loss, where ε is smaller) that discretisation should cost.
          rough: whether rough bounds, which cost less, will do.
          tail: the mass of losses, about, that may count as infinite.

        Returns:
          The pair.

        **Formal guarantees.** That of `dominating_pair`: the δ of the result is at least that of the mechanism, at
        every real ε and in both directions, because every value it is made from is an upper bound.
        """
        return self.points(noise_multiplier, interval, rough=rough, tail=tail).refine(tolerance)

    def points(
        self, noise_multiplier: float, interval: float, *, rough: bool = False, tail: float = 1e-14
    ) -> ProfilePoints:
        """Bounds on δ(ε) at first points, in both directions, which can be refined. The arguments are those of `at`.

        **Formal guarantees.** Every value is an upper bound on δ of its direction at its ε.
        """
        prepared = self._prepared
        parts = prepared.parts
        if any(part.name == "chain" for part in parts):
            parts = tuple(part for part in parts if part.name not in _SLOWER)
        quick = Least(prepared.name, prepared.mechanism, [part for part in parts if part.name in _QUICK])
        short = quick if quick.parts else Gaussian().prepare(prepared.mechanism)
        profiles: dict[str, Profile] = {}
        largest: dict[str, float] = {}
        for direction in DIRECTIONS:
            limit = min(short.epsilon(noise_multiplier, tail, direction).value, TUNING.largest_epsilon)
            bounds = Least(prepared.name, prepared.mechanism, parts).bounds()
            largest[direction] = self._where_small(bounds, noise_multiplier, tail, limit, direction)
            chosen = self._best(bounds, noise_multiplier, largest[direction], tail, direction)
            profiles[direction] = _profile(chosen, noise_multiplier, largest[direction], direction, only_rough=rough)
        points = ProfilePoints(interval, profiles, largest, tail)
        for direction in DIRECTIONS:
            self._learn_reach(points.values[direction], interval, tail, noise_multiplier, direction)
        return points

    def _deviation(self, noise_multiplier: float) -> float:
        """About the deviation of the loss."""
        mechanism = self._prepared.mechanism
        return math.sqrt(mechanism.gram_sums.total) / mechanism.batching.batches_per_epoch / noise_multiplier

    def _learn_reach(
        self, deltas: Mapping[int, float], interval: float, tail: float, noise_multiplier: float, direction: Direction
    ) -> None:
        """Where δ fell below the tail at this σ is where to end at the next one."""
        before, last = sorted(deltas)[-2:]
        unit = interval / self._deviation(noise_multiplier)
        high, low = deltas[before], deltas[last]
        if low > tail:
            self._reach[direction] = max(self._reach[direction], _TUNING.stride * last * unit)
        elif high > tail:
            # About where the line between the logarithms of both reaches the tail.
            share = math.log(high / tail) / math.log(high / max(low, 1e-300))
            self._reach[direction] = _TUNING.beyond * (before + share * (last - before)) * unit

    def _known(self, noise_multiplier: float, direction: Direction) -> list[_Chosen]:
        """The best bounds, where they were found at a σ nearby."""
        sigma, chosen = self._chosen.get(direction, (math.inf, []))
        return chosen if abs(math.log(sigma / noise_multiplier)) < _TUNING.same_choice else []

    def _where_small(
        self,
        bounds: Sequence[PreparedAccountant],
        noise_multiplier: float,
        tail: float,
        limit: float,
        direction: Direction,
    ) -> float:
        """About the ε at which a cheap bound falls below the tail; at most the limit, where another bound does."""
        low, high = min(self._reach[direction] * self._deviation(noise_multiplier), limit), limit
        if self._known(noise_multiplier, direction):
            return low
        asked = [bound for bound in bounds if bound.cheap] or [
            next((bound for bound in bounds if bound.roughness > 1 and not bound.slow), bounds[0])
        ]
        return _falls(asked, noise_multiplier, tail, low, high, direction, _TUNING.stride)

    def _best(
        self,
        bounds: Sequence[PreparedAccountant],
        noise_multiplier: float,
        largest: float,
        tail: float,
        direction: Direction,
    ) -> list[_Chosen]:
        """The bounds that are the least at some probe, roughly, and the stretch of ε around these probes.

        One of them is taken wherever it is nearly the least.
        """
        known = self._known(noise_multiplier, direction)
        if known:
            return known
        probes = [share * largest for share in _TUNING.probes]
        cheap = [k for k, bound in enumerate(bounds) if bound.cheap]
        table: dict[int, list[float]] = {k: _roughly(bounds[k], noise_multiplier, probes, direction) for k in cheap}
        known_there = [min(column) for column in zip(*table.values(), strict=True)] or [1.0] * len(probes)
        small, end = max(_TUNING.worth_while, _TUNING.seen * tail), math.inf
        inside = sum(delta > small for delta in known_there)
        if cheap and inside > 0:
            shares = [max(share, 0.01) * largest for share in (*_TUNING.probes, 1.0)]
            quick = [bounds[k] for k in cheap]
            low, high = shares[inside - 1 : inside + 1]
            end = _falls(quick, noise_multiplier, small, low, high, direction, _TUNING.closely) / largest
        for k, bound in enumerate(bounds):
            if k not in table:
                # Where δ is small, a slow bound is not worth its time.
                within = _TUNING.probes_of_slow if bound.slow else inside
                count = max(1, min(within, sum(delta > _TUNING.told_apart for delta in known_there)))
                rough = _roughly(bound, noise_multiplier, probes[:count], direction)
                found = [bound.likely(one) * (_TUNING.unsure if cheap else 1.0) for one in rough]
                further = [
                    found[-1] / max(known_there[count - 1], 1e-300) * delta for delta in known_there[count:within]
                ]
                table[k] = found + further + [1.0] * (len(probes) - count - len(further))
        rows = [table[k] for k in range(len(bounds))]
        least = [max(min(column), tail) for column in zip(*rows, strict=True)]
        # How far each bound is above the least one, by probe, where that can be told apart.
        excess = [[math.log(max(value / low, 1.0)) for value, low in zip(row, least, strict=True)] for row in rows]
        overall = min((bounds[k].slow, sum(row), k) for k, row in enumerate(excess))[2]
        winners = [
            overall
            if excess[overall][probe] <= math.log(_TUNING.nearly)
            else min(range(len(bounds)), key=[row[probe] for row in excess].__getitem__)
            for probe in range(len(probes))
        ]
        # What others are is estimated from rough bounds: a cheap bound that may be less is asked as well.
        others = []
        for probe, winner in enumerate(winners):
            near = min(cheap, key=[row[probe] for row in excess].__getitem__, default=winner)
            others.append(near if excess[near][probe] < math.log(_TUNING.unsure) else winner)
        ends = [0.0, *_TUNING.probes, math.inf]
        chosen = []
        for winner in dict.fromkeys(winners + others):
            where = [probe for probe in range(len(probes)) if winner in (winners[probe], others[probe])]
            # A probe is place + 1 of the ends; the stretch reaches to the probes beside it.
            last = ends[where[-1] + 2] if where[-1] + 1 < len(probes) else math.inf
            chosen.append(_Chosen(bounds[winner], ends[where[0]], last if bounds[winner].cheap else min(last, end)))
        if cheap:  # somebody has to answer beyond, and some bounds have a floor
            far = min((_roughly(bounds[k], noise_multiplier, [largest], direction)[0], k) for k in cheap)[1]
            chosen.append(_Chosen(bounds[far], min(end, _TUNING.probes[-1]), math.inf))
        self._chosen[direction] = noise_multiplier, chosen
        return chosen


def _quickly(
    bound: PreparedAccountant, noise_multiplier: float, epsilon: float, direction: Direction, tail: float
) -> float:
    """A bound, by its rough version where there is one."""

    def ask() -> float:
        rough = bound.rough_delta(noise_multiplier, epsilon, direction, tail)
        return (rough or bound.delta(noise_multiplier, epsilon, direction, tail)).value

    return budget.attempt(ask, 1.0)


def _falls(
    asked: Sequence[PreparedAccountant],
    noise_multiplier: float,
    delta: float,
    low: float,
    high: float,
    direction: Direction,
    stride: float,
) -> float:
    """About the ε at which the least of some bounds falls to δ, between two ε of which the larger is known to do."""
    low = max(low, 1e-9 * high)
    while high > stride * low:
        budget.check()
        epsilon = math.sqrt(low * high)
        found = [_quickly(bound, noise_multiplier, epsilon, direction, delta) for bound in asked]
        low, high = (low, epsilon) if min(found) <= delta else (epsilon, high)
        # Of several bounds of one accountant, the best one at any ε serves to tell.
        best: dict[str, tuple[float, int]] = {}
        for k, value in enumerate(found):
            best[asked[k].name] = min(best.get(asked[k].name, (math.inf, k)), (value, k))
        asked = [asked[k] for _, k in best.values()]
    return high


def _roughly(
    bound: PreparedAccountant, noise_multiplier: float, epsilons: list[float], direction: Direction
) -> list[float]:
    budget.check()
    return budget.attempt(lambda: bound.rough_deltas(noise_multiplier, epsilons, direction), [1.0] * len(epsilons))


def _profile(
    chosen: Sequence[_Chosen], noise_multiplier: float, largest: float, direction: Direction, *, only_rough: bool
) -> Profile:
    """δ as a function of several ε: the least of the bounds that are to be asked there."""

    def deltas(epsilons: Sequence[float], rough: bool) -> list[float]:
        ask = "rough_deltas" if rough or only_rough else "deltas"
        found = [1.0] * len(epsilons)
        for bound, first, last in chosen:
            places = [k for k, epsilon in enumerate(epsilons) if first * largest <= epsilon <= last * largest]
            if places:
                values = getattr(bound, ask)(noise_multiplier, [epsilons[k] for k in places], direction)
                for k, value in zip(places, values, strict=True):
                    found[k] = min(found[k], value)
        return found

    return deltas
