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
      reach: the largest ε that is tried first, in deviations of the loss.
      stride: the factor by which it grows until δ is small enough.
      beyond: how far beyond the ε at which δ was small enough to go at the next σ.
      same_choice: change of log σ over which the same bounds are expected to stay the best.
      seen: smaller δ are not told apart, in units of the tail.
      nearly: a bound within this factor of the least one everywhere spares the others.
    """

    probes: tuple[float, ...] = (0.0, 0.1, 0.25, 0.45, 0.7)
    probes_of_slow: int = 3
    reach: float = 6.0
    stride: float = 1.2
    beyond: float = 1.05
    same_choice: float = 0.6
    seen: float = 1000.0
    nearly: float = 1.01


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
        """About the ε at which a bound, roughly, falls below the tail; at most the limit, where another bound does."""
        deviation = self._deviation(noise_multiplier)
        bound = next((bound for bound in bounds if bound.roughness > 1 and not bound.slow), bounds[0])
        while True:
            epsilon = self._reach[direction] * deviation
            if epsilon >= limit or self._known(noise_multiplier, direction):
                return min(epsilon, limit)
            budget.check()
            found = bound.rough_delta(noise_multiplier, epsilon, direction, tail)
            if found is not None and found.value <= tail:
                return epsilon
            self._reach[direction] *= _TUNING.stride

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
        table = []
        for bound in bounds:
            # Where δ is small, a slow bound is not worth its time.
            asked = probes[: _TUNING.probes_of_slow] if bound.slow else probes
            found = _roughly(bound, noise_multiplier, asked, direction)
            table.append([value / bound.roughness for value in found] + [1.0] * (len(probes) - len(asked)))
        least = [max(min(column), _TUNING.seen * tail) for column in zip(*table, strict=True)]
        # How far each bound is above the least one, by probe, where that can be told apart.
        excess = [[math.log(max(value / low, 1.0)) for value, low in zip(row, least, strict=True)] for row in table]
        overall = min((bounds[k].slow, sum(row), k) for k, row in enumerate(excess))[2]
        winners = [
            overall
            if excess[overall][probe] <= math.log(_TUNING.nearly)
            else min(range(len(bounds)), key=[row[probe] for row in excess].__getitem__)
            for probe in range(len(probes))
        ]
        ends = [0.0, *_TUNING.probes, math.inf]
        chosen = []
        for winner in dict.fromkeys(winners):
            where = [probe for probe, one in enumerate(winners) if one == winner]
            # A probe is place + 1 of the ends; the stretch reaches to the probes beside it.
            last = ends[where[-1] + 2] if where[-1] + 1 < len(probes) else math.inf
            chosen.append(_Chosen(bounds[winner], ends[where[0]], last))
        self._chosen[direction] = noise_multiplier, chosen
        return chosen


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
