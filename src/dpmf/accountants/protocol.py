"""The protocol every accountant follows.

An `Accountant` is a frozen set of options; `prepare(mechanism)` does the work that does not depend on σ and gives a
`PreparedAccountant`, which answers δ(σ, ε) and ε(σ, δ) one direction at a time. Adding an accountant is one file with
those two classes and one line in the registry (`accountants/__init__.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

from dpmf import budget, progress
from dpmf.mechanism import Mechanism
from dpmf.search import least_noise

Direction = Literal["remove", "add"]
_FEW = 6  # points of a profile up to which every member is asked about each
_NEARLY = 1.03  # as good
LITTLE_HOPE = 1.04  # a rough bound this many times above a target, and its roughness, is taken to miss it
_SMALL, _TOO_SMALL = 1e-8, 1e-13  # a δ beyond which accountants are not compared again, and one that never is
DIRECTIONS: tuple[Direction, ...] = ("remove", "add")
RELATIONS = ("both", "remove", "add")


def directions_of(relation: str) -> tuple[Direction, ...]:
    """The one-way directions that a neighbouring relation asks for."""
    return DIRECTIONS if relation == "both" else tuple(d for d in DIRECTIONS if d == relation)


@dataclass(frozen=True)
class Evaluation:
    """One bound: `value` is the δ (or ε) asked for, `details` how it came about."""

    value: float
    details: Mapping[str, Any] = field(default_factory=dict)


class PreparedAccountant(ABC):
    """An accountant bound to one mechanism. Arguments are already validated when they get here."""

    name: str
    mechanism: Mechanism
    kind: str = "bound"  # "estimate" or "high-probability bound" where it is not a guarantee
    roughness: float = 1.0  # how many times larger rough bounds are, about

    @abstractmethod
    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        """A bound on δ(ε) in [0, 1] for one direction, monotone (up to rounding) in both arguments."""

    def delta_for_target(
        self, noise_multiplier: float, epsilon: float, target_delta: float, direction: Direction
    ) -> Evaluation:
        """As `delta_one_way`, for accountants whose bound depends on the δ aimed at."""
        return self.delta_one_way(noise_multiplier, epsilon, direction)

    def rough_for_target(
        self, noise_multiplier: float, epsilon: float, target_delta: float, direction: Direction
    ) -> Evaluation | None:
        """A bound that costs much less than `delta_for_target` and is about `roughness` times larger, if there is one.

        Searches begin with it, and it tells which accountant to ask.
        """
        return None

    def meets(self, noise_multiplier: float, epsilon: float, delta: float, direction: Direction) -> bool:
        """Whether the bound meets the target; it is not asked for where the rough one leaves little hope."""
        rough = self.rough_for_target(noise_multiplier, epsilon, delta, direction)
        if rough is not None and rough.value > LITTLE_HOPE * self.roughness * delta:
            return False
        return self.delta_for_target(noise_multiplier, epsilon, delta, direction).value <= delta

    def rough_deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """Bounds that cost less and may be a few percent larger: they tell which accountant to ask."""
        return self.deltas_one_way(noise_multiplier, epsilons, direction)

    def epsilon_one_way(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        """The least ε ≥ 0 found with a bound δ(ε) ≤ `delta`, to a relative 10⁻⁴; infinity where none was found.

        **Formal guarantees.** The value returned was itself evaluated and met `delta`: the search ends on the upper,
        sound side of the root. No monotonicity is needed for soundness, only for tightness.
        """
        evaluation = self.delta_for_target(noise_multiplier, 0.0, delta, direction)
        if evaluation.value <= delta:
            return Evaluation(0.0, evaluation.details)
        found = least_noise(
            lambda epsilon: self.delta_for_target(noise_multiplier, epsilon, delta, direction), delta, 1.0, 1e-4,
            rough=lambda epsilon: self.rough_for_target(noise_multiplier, epsilon, delta, direction),
            roughness=self.roughness,
        )  # fmt: skip
        return Evaluation(math.inf) if found is None else Evaluation(found[0], found[1].details)

    def deltas_one_way(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """δ bounds over many ε, 1 for those that a budget does not reach.

        Accountants that get a whole profile from one run override this.
        """
        found: list[float] = []
        try:
            for epsilon in epsilons:
                budget.check()
                found.append(self.delta_one_way(noise_multiplier, epsilon, direction).value)
        except budget.Exhausted:
            pass
        return found + [1.0] * (len(epsilons) - len(found))

    def members(self) -> Sequence[PreparedAccountant]:
        """The independent bounds this accountant is the minimum of, the likely winner first.

        Calibration treats each on its own: one that cannot beat the incumbent costs a single evaluation.
        """
        return (self,)

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        """Why no σ can meet the target, or None where a large enough σ can."""
        return None

    def least_noise_one_way(
        self, epsilon: float, delta: float, direction: Direction, start: float, relative_tolerance: float
    ) -> tuple[float, Evaluation]:
        """The least σ found that meets the target, evaluated there; `start` is where to look first."""
        from dpmf.calibration import calibrate_one_way

        members = self.members()
        sigma, found, member = calibrate_one_way(members, epsilon, delta, direction, start, relative_tolerance)
        return sigma, labelled(found, member, self)

    def first_to_meet(self, noise_multiplier: float, epsilon: float, delta: float, direction: Direction) -> Evaluation:
        """The bound of the first member that meets the target, the smallest bound where none does."""
        least: Evaluation | None = None
        ended: budget.Exhausted | None = None
        for member in self.members():
            try:
                found = labelled(member.delta_for_target(noise_multiplier, epsilon, delta, direction), member, self)
            except budget.Exhausted as error:
                ended = error
                continue
            if found.value <= delta:
                return found
            least = found if least is None or found.value < least.value else least
        if least is None and ended is not None:
            raise ended
        assert least is not None
        return least

    def for_relation(self, relation: str) -> PreparedAccountant:
        """The accountant to ask where the directions of this relation are needed together."""
        return self


class Portfolio(PreparedAccountant):
    """The smallest of several bounds.

    **Formal guarantees.** Each member bounds the same δ(ε) (or ε(δ)) of the same direction, so their minimum does.
    """

    def __init__(self, name: str, mechanism: Mechanism, members: Sequence[PreparedAccountant]) -> None:
        self.name = name
        self.mechanism = mechanism
        self._members = tuple(members)

    def members(self) -> Sequence[PreparedAccountant]:
        return tuple(inner for member in self._members for inner in member.members())

    def _least(self, ask: Callable[[PreparedAccountant], Evaluation]) -> Evaluation:
        found: list[Evaluation] = []
        ended: budget.Exhausted | None = None
        for member in self._members:
            try:
                budget.check()
                progress.say(member.name)
                found.append(labelled(ask(member), member, self))
            except budget.Exhausted as error:  # another may need less
                ended = error
        if not found and ended is not None:
            raise ended
        return min(found, key=lambda evaluation: evaluation.value)

    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        return self._least(lambda m: m.delta_one_way(noise_multiplier, epsilon, direction))

    def delta_for_target(
        self, noise_multiplier: float, epsilon: float, target_delta: float, direction: Direction
    ) -> Evaluation:
        return self._least(lambda m: m.delta_for_target(noise_multiplier, epsilon, target_delta, direction))

    def epsilon_one_way(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        best: Evaluation | None = None
        ended: budget.Exhausted | None = None
        for member in self._promising_first(noise_multiplier, delta, direction):
            try:
                budget.check()
                progress.say(f"{member.name}, {direction}")
                if best is not None:
                    # A member that cannot improve on the best so far costs one evaluation.
                    challenged = best.value * (1 - 1e-4)
                    if challenged == 0:
                        break
                    if math.isfinite(challenged) and not member.meets(noise_multiplier, challenged, delta, direction):
                        continue
                found = labelled(member.epsilon_one_way(noise_multiplier, delta, direction), member, self)
            except budget.Exhausted as error:
                ended = error
                continue
            if best is None or found.value < best.value:
                best = found
        if best is None and ended is not None:
            raise ended
        assert best is not None
        return best

    def _promising_first(
        self, noise_multiplier: float, delta: float, direction: Direction
    ) -> Sequence[PreparedAccountant]:
        """The members; those that have rough bounds in the order of these, where the first one's meets the target."""
        members = self.members()
        rough = [member for member in members if member.roughness > 1]
        if len(rough) < 2:
            return members

        def roughly(member: PreparedAccountant, epsilon: float) -> Evaluation:
            return member.rough_for_target(noise_multiplier, epsilon, delta, direction) or Evaluation(1.0)

        try:
            near = least_noise(lambda epsilon: roughly(rough[0], epsilon), delta, 1.0, 0.05)
            if near is None:
                return members
            at = near[0]
            order = iter(sorted(rough, key=lambda member: roughly(member, at).value))
        except budget.Exhausted:
            return members
        return [next(order) if member.roughness > 1 else member for member in members]

    def deltas_one_way(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        members = self.members()
        best = [1.0] * len(epsilons)
        places = range(len(epsilons))
        if len(epsilons) <= _FEW or len(members) == 1:
            asked = [(member, list(places)) for member in members]
        else:
            asked = self._asked(members, noise_multiplier, epsilons, direction)
        for member, near in asked:
            found = member.deltas_one_way(noise_multiplier, [epsilons[k] for k in near], direction)
            for k, value in zip(near, found, strict=True):
                best[k] = min(best[k], value)
        return best

    @staticmethod
    def _asked(
        members: Sequence[PreparedAccountant], noise_multiplier: float, epsilons: Sequence[float], direction: Direction
    ) -> list[tuple[PreparedAccountant, list[int]]]:
        """Each point of a long grid is left to those that win at the probes around it: any choice is valid."""
        order = sorted(range(len(epsilons)), key=lambda k: epsilons[k])
        probes = [0, len(order) // 2, len(order) - 1]
        table: list[tuple[PreparedAccountant, list[float]]] = [(member, []) for member in members]
        best: list[float] = []
        for k in probes:
            for member, row in table:
                # Beyond a δ this small, whoever won before is good enough.
                row.append(
                    row[-1]
                    if best and best[-1] < _SMALL
                    else _rough(member, noise_multiplier, epsilons[order[k]], direction)
                )
            best.append(min(row[-1] for _, row in table))
        # One that is nearly as good at most of them spares the others.
        overall = min(table, key=lambda row: sum(math.log(value) for value in row[1]))
        winners = [
            overall[0] if overall[1][place] <= _NEARLY * least else min(table, key=lambda row, at=place: row[1][at])[0]  # type: ignore[misc]
            for place, least in enumerate(best)
        ]
        asked = []
        for member in {id(winner): winner for winner in winners}.values():
            near = {
                order[k]
                for place, (low, high) in enumerate(pairwise(probes))
                if member in winners[place : place + 2]
                for k in range(low, high + 1)
            }
            asked.append((member, sorted(near)))
        return asked

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        reasons = [member.unreachable(epsilon, delta, direction) for member in self._members]
        return reasons[-1] if reasons and all(reasons) else None


def _rough(member: PreparedAccountant, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
    try:
        return max(member.rough_deltas(noise_multiplier, [epsilon], direction)[0], _TOO_SMALL)
    except budget.Exhausted:
        return 1.0


def labelled(evaluation: Evaluation, member: PreparedAccountant, whole: PreparedAccountant) -> Evaluation:
    """The evaluation, saying which accountant it is from where that is not the one that was asked."""
    if member.name == whole.name or "accountant" in evaluation.details:
        return evaluation
    return Evaluation(evaluation.value, {"accountant": member.name, **evaluation.details})


class Accountant(ABC):
    """Options of an accountant; subclasses are frozen dataclasses."""

    name: ClassVar[str]
    summary: ClassVar[str]
    # The theorem its bounds follow from, in a line; `dpmf verify` prints it.
    rests_on: ClassVar[str] = "see the Formal guarantees in its documentation"

    @abstractmethod
    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Bind to a mechanism, doing everything that does not depend on σ."""
