"""The discrete dominating pair of one run of a mechanism, from the bounds of any accountant: what compositions need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dpmf import budget
from dpmf.accountants.combined.least import Least, Part
from dpmf.accountants.composed._answers import Answers
from dpmf.accountants.composed._choice import Choice, Chosen
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.protocol import DIRECTIONS, Direction, PreparedAccountant
from dpmf.errors import ArgumentError
from dpmf.loss.dominating_pair import DominatingPair
from dpmf.loss.profile_points import TUNING, Profile, ProfilePoints

_QUICK = ("lattice", "renyi", "gaussian")  # bounds that find the ε of a tiny δ at once
_SLOWER = ("conditional", "renyi")  # bounds that are looser and slower than those of a chain


@dataclass(frozen=True)
class _Tuning:
    """How far a profile reaches. Any values give sound pairs.

    Attributes:
      reach: the least ε that is tried as the largest one, in deviations of the loss.
      stride: how closely, as a factor, the ε at which δ is small enough is looked for.
      beyond: how far beyond the ε at which δ was small enough to go at the next σ.
      same_choice: change of log σ over which the same bounds are expected to stay the best.
      decides: where δ of adding a record is smaller than this, rough bounds on it will do.
      many_batches: cascades take a while from so many batches on.
      judged_at: where cheap bounds are judged, as shares of the largest ε.
      close: cascades are spared where other cheap bounds are at most about so many times the truth there.
    """

    reach: float = 6.0
    stride: float = 1.2
    beyond: float = 1.05
    same_choice: float = 0.6
    decides: float = 1e-2
    many_batches: int = 32
    judged_at: tuple[float, ...] = (0.1, 0.45)
    close: float = 1.4


_TUNING = _Tuning()


class _End(NamedTuple):
    """The largest ε of interest, and the cheap bound to ask there, if there is one."""

    largest: float
    far: PreparedAccountant | None


class Pairs:
    """Dominating pairs of one run of a mechanism, at any σ. Which bounds are the best is remembered between σ."""

    def __init__(self, prepared: Least) -> None:
        if prepared.kind != "bound":
            raise ArgumentError("accountant", f"must be one that gives guaranteed bounds, {prepared.name} does not")
        self._prepared = prepared
        self._chosen: dict[Direction, tuple[float, list[Chosen]]] = {}
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
        new = [way for way in DIRECTIONS if not self._known(noise_multiplier, way)]
        largest: dict[str, float] = {
            way: self._reach[way] * self._deviation(noise_multiplier) for way in DIRECTIONS if way not in new
        }
        if new:
            largest.update(self._choose(noise_multiplier, tail, new))
        profiles: dict[str, Profile] = {
            way: _profile(self._chosen[way][1], noise_multiplier, largest[way], way, only_rough=rough)
            for way in DIRECTIONS
        }
        points = ProfilePoints(interval, profiles, largest, tail)
        for direction in DIRECTIONS:
            self._learn_reach(points.values[direction], interval, tail, noise_multiplier, direction)
        return points

    def _choose(self, noise_multiplier: float, tail: float, new: Sequence[Direction]) -> dict[str, float]:
        """Remember which bounds to ask in some directions; the largest ε of interest in each of them is returned."""
        prepared, mechanism = self._prepared, self._prepared.mechanism
        parts = prepared.parts
        if any(part.name == "chain" for part in parts):
            parts = tuple(part for part in parts if part.name not in _SLOWER)

        def bounds(some: Iterable[Part]) -> tuple[PreparedAccountant, ...]:
            return Least(prepared.name, mechanism, list(some)).bounds()

        first, rest, late = _in_turn(parts, mechanism.batching.batches_per_epoch >= _TUNING.many_batches)
        short = Least(prepared.name, mechanism, [part for part in parts if part.name in _QUICK])
        shorter: PreparedAccountant = short if short.parts else Gaussian().prepare(mechanism)
        early = bounds(first)
        if not any(bound.cheap for bound in early):
            early = bounds((*first, *rest))
        answers = {way: Answers(noise_multiplier, way) for way in new}

        limits: dict[Direction, float] = {}
        ends: dict[Direction, _End] = {}
        spared: dict[Direction, bool] = {}

        def begin(direction: Direction) -> None:
            limit = min(shorter.epsilon(noise_multiplier, tail, direction).value, TUNING.largest_epsilon)
            limits[direction], end = limit, self._where_small(early, answers[direction], tail, limit)
            ends[direction], spared[direction] = end, _spared(early, answers[direction], end.largest)

        def prepare() -> None:
            bounds(rest)

        # What takes long to prepare is prepared while others look for the largest ε.
        pieces: list[Callable[[], None]] = [partial(begin, way) for way in new]
        budget.side_by_side([*pieces, prepare])
        usual = bounds(part for part in parts if part not in late)
        every = usual if not late or all(spared.values()) else bounds(parts)

        def choose(direction: Direction) -> float:
            end = ends[direction]
            asked = usual if spared[direction] else every
            if len(asked) > len(usual):
                end = self._where_small(asked, answers[direction], tail, limits[direction])
            chosen = Choice(asked, answers[direction], end.largest, tail).chosen(end.far)
            self._chosen[direction] = noise_multiplier, chosen
            return end.largest

        found = budget.side_by_side([partial(choose, direction) for direction in new])
        return dict(zip(new, found, strict=True))

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

    def _known(self, noise_multiplier: float, direction: Direction) -> list[Chosen]:
        """The best bounds, where they were found at a σ nearby."""
        sigma, chosen = self._chosen.get(direction, (math.inf, []))
        return chosen if abs(math.log(sigma / noise_multiplier)) < _TUNING.same_choice else []

    def _where_small(self, bounds: Sequence[PreparedAccountant], answers: Answers, tail: float, limit: float) -> _End:
        """About the ε at which a cheap bound falls below the tail, at most the limit, where another bound does."""
        sigma, direction = answers.noise_multiplier, answers.direction
        low = min(self._reach[direction] * self._deviation(sigma), limit)
        cheap = [bound for bound in bounds if bound.cheap]
        asked = cheap or [next((bound for bound in bounds if bound.roughness > 1 and not bound.slow), bounds[0])]
        epsilon, left = _falls(asked, answers, tail, low, limit)
        if not cheap:
            return _End(epsilon, None)
        # Without a target some of them do not fall below a floor.
        return _End(epsilon, min(left, key=lambda bound: bound.rough_deltas(sigma, [epsilon], direction)[0]))


def _in_turn(parts: Sequence[Part], many: bool) -> tuple[list[Part], list[Part], list[Part]]:
    """The parts whose bounds are asked first, those that are prepared meanwhile, and cascades that may be spared."""
    late = [part for part in parts if many and part.name == "cascade"]
    others = [part for part in parts if part not in late]
    if not others:
        return late, [], []
    first = [part for part in others if part.quick]
    return first, [part for part in others if part not in first], late


def _falls(
    asked: Sequence[PreparedAccountant], answers: Answers, delta: float, low: float, high: float
) -> tuple[float, Sequence[PreparedAccountant]]:
    """About the ε at which the least of some bounds falls to δ, and the best bound of each accountant there.

    It lies between two ε of which the larger is known to do.
    """
    low, epsilon = max(low, 1e-9 * high), high
    while True:
        budget.check()
        found = [answers.quickly(bound, epsilon, delta) for bound in asked]
        if epsilon == high or min(found) <= delta:
            high = epsilon
        else:
            low = epsilon
        # Of several bounds of one accountant, the best one at any ε serves to tell; some bounds never fall so low.
        leads: dict[str, tuple[float, int]] = {}
        for k, value in enumerate(found):
            if epsilon == high and value > delta >= min(found):
                continue
            leads[asked[k].name] = min(leads.get(asked[k].name, (math.inf, k)), (value, k))
        asked = [asked[k] for _, k in leads.values()]
        if high <= _TUNING.stride * low:
            return high, asked
        epsilon = math.sqrt(low * high)


def _spared(bounds: Sequence[PreparedAccountant], answers: Answers, largest: float) -> bool:
    """Whether cascades, which take longest of all, would gain nothing.

    That is so where a cheap bound is about the truth. Of adding a record cascades have closed forms only.
    """
    cheap = [bound for bound in bounds if bound.cheap]
    if answers.direction == "add" and any(bound.name != "gaussian" for bound in cheap):
        return True

    def slack(bound: PreparedAccountant, epsilon: float) -> float:
        return budget.attempt(lambda: answers.delta(bound, epsilon).slack, math.inf)

    epsilons = [share * largest for share in _TUNING.judged_at]
    return all(any(slack(bound, epsilon) <= _TUNING.close for bound in cheap) for epsilon in epsilons)


def _profile(
    chosen: Sequence[Chosen], noise_multiplier: float, largest: float, direction: Direction, *, only_rough: bool
) -> Profile:
    """δ as a function of several ε: the least of the bounds that are to be asked there."""

    seen: dict[tuple[int, float], float] = {}  # rough bounds

    def roughly(bound: PreparedAccountant, epsilons: list[float]) -> list[float]:
        new = [epsilon for epsilon in epsilons if (id(bound), epsilon) not in seen]
        for epsilon, value in zip(
            new, bound.rough_deltas(noise_multiplier, new, direction) if new else (), strict=True
        ):
            seen[id(bound), epsilon] = value
        return [seen[id(bound), epsilon] for epsilon in epsilons]

    def ask(bound: PreparedAccountant, epsilons: list[float], rough: bool) -> list[float]:
        if rough or only_rough or bound.roughness == 1:
            return roughly(bound, epsilons)
        if direction == "remove":
            return bound.deltas(noise_multiplier, epsilons, direction)
        # Where adding a record has a small δ, it decides little of what is composed: a rough bound will do. It is not
        # asked where it is known to be large at a larger ε.
        large = max(
            (at for (one, at), value in seen.items() if one == id(bound) and value > _TUNING.decides), default=0.0
        )
        found = [1.0] * len(epsilons)
        beyond = [k for k, epsilon in enumerate(epsilons) if epsilon > large]
        for k, value in zip(beyond, roughly(bound, [epsilons[k] for k in beyond]), strict=True):
            found[k] = value
        places = [k for k, value in enumerate(found) if value > _TUNING.decides]
        fine = bound.deltas(noise_multiplier, [epsilons[k] for k in places], direction) if places else []
        for k, value in zip(places, fine, strict=True):
            found[k] = min(found[k], value)
        return found

    def deltas(epsilons: Sequence[float], rough: bool) -> list[float]:
        found = [1.0] * len(epsilons)
        for bound, first, last in chosen:
            places = [k for k, epsilon in enumerate(epsilons) if first * largest <= epsilon <= last * largest]
            if places:
                for k, value in zip(places, ask(bound, [epsilons[k] for k in places], rough), strict=True):
                    found[k] = min(found[k], value)
        return found

    return deltas
