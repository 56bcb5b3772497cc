"""The least of several bounds, within the budget in force: the one place that compares, orders and gives up.

An accountant with several bounds (the majorants of the chain, the truncations of Rényi moments, the members of `best`)
prepares a `Least`. It is made of parts, each a group of bounds that are made together when they are first needed.
Without a budget the quick bounds are compared first, then all others, unless a quick one is nearly the truth. Within a
budget, or where a stop rule says what is good enough, the parts are asked one after the other, the cheapest first, and
what was reached is kept when the budget ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from dpmf import budget, progress
from dpmf.accountants.combined.curves import Group, asked_where
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.calibration import LITTLE_HOPE, LeastNoise, calibrate_one_way
from dpmf.errors import ArgumentError, CalibrationError
from dpmf.mechanism import Mechanism
from dpmf.search import least_noise


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide who is asked and how closely. Any values give sound bounds.

    Attributes:
      improvement: a bound is asked about a target only if it may improve ε or σ by this relative amount.
      probes: points of a profile at which a stop rule is checked.
      coarse: the part of the stop rule's tolerance to which expensive bounds are searched once they are good enough.
      exact: a bound on δ that is about this many times the truth, or less, needs no others beside it.
      usual_delta: bounds that win only at smaller δ or larger ε are not asked about noise multipliers for a target
        with this δ or a larger one, unless the others have no answer.
      usual_epsilon: the same for targets with this ε or a smaller one.
    """

    improvement: float = 1e-4
    probes: int = 5
    coarse: float = 0.125
    exact: float = 1.06
    usual_delta: float = 1e-7
    usual_epsilon: float = 10.0


_TUNING = _Tuning()


class Part:
    """Bounds that are made together, once, when they are first needed.

    What a budget cut short is kept only for questions within the same budget.
    """

    def __init__(self, name: str, make: Callable[[], Sequence[PreparedAccountant]], *, quick: bool = False) -> None:
        self.name, self.quick = name, quick
        self._make = make
        self._made: tuple[PreparedAccountant, ...] | None = None
        self._partly: tuple[tuple[float, float], tuple[PreparedAccountant, ...]] | None = None

    def bounds(self) -> tuple[PreparedAccountant, ...]:
        if self._made is not None:
            return self._made
        with budget.time_limit(None) as deadline, budget.memory_limit(None) as memory:
            limits = (deadline.ends, memory.size)
            if self._partly is not None and self._partly[0] == limits:
                return self._partly[1]
            progress.say(f"preparing {self.name}")
            made = tuple(self._make())
        if deadline.passed or memory.passed:
            self._partly = limits, made
        else:
            self._made = made
        return made


class StopRule(Protocol):
    """When a bound is good enough: `auto` compares it with certified lower bounds."""

    @property
    def tolerance(self) -> float: ...

    def good_delta(self, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
        """A bound on δ(ε) of at most this much is good enough."""
        ...

    def lower_epsilon(self, noise_multiplier: float, delta: float, direction: Direction, start: float = 1.0) -> float:
        """A certified lower bound on ε."""
        ...

    def lower_noise(self, epsilon: float, delta: float, direction: Direction) -> float:
        """A certified lower bound on the noise multiplier."""
        ...

    def for_relation(self, relation: str) -> StopRule:
        """The rule for directions that are needed together."""
        ...


@dataclass(frozen=True)
class _Answer:
    """The quantity that is made small (δ, ε or σ), and the bound evaluated there."""

    value: float
    evaluation: Evaluation
    bound: PreparedAccountant


class _Lead:
    """The best answer so far."""

    def __init__(self) -> None:
        self.answer: _Answer | None = None

    @property
    def value(self) -> float:
        return math.inf if self.answer is None else self.answer.value

    def offer(self, value: float, evaluation: Evaluation, bound: PreparedAccountant) -> None:
        if self.answer is None or value < self.answer.value:
            self.answer = _Answer(value, evaluation, bound)


class Least(PreparedAccountant):
    """The least of several bounds on the same quantity.

    **Formal guarantees.** Every member bounds the same δ(ε) (or ε(δ)) of the same direction, so the least of those
    that were asked does. Which of them are asked, in which order and how closely, decides tightness and time, never
    soundness. Where a budget ends the search, the closed forms of the `gaussian` accountant, which are bounds at every
    noise multiplier, answer if they are smaller or nothing else was found.
    """

    def __init__(
        self,
        name: str,
        mechanism: Mechanism,
        parts: Sequence[Part],
        *,
        kind: str = "bound",
        stop: StopRule | None = None,
        time_budget: float | None = None,
        seldom: Sequence[str] = (),
    ) -> None:
        self.name, self.mechanism, self.kind = name, mechanism, kind
        self.parts = tuple(parts)
        self._stop, self._time_budget = stop, time_budget
        self._seldom = frozenset(seldom)  # names of parts that win only at very small δ or large ε
        self._met: dict[Direction, PreparedAccountant] = {}  # whose bound met a target last

    @classmethod
    def of(cls, prepared: PreparedAccountant, relation: str = "both") -> Least:
        """A prepared accountant as a `Least`, for directions that are needed together."""
        if not isinstance(prepared, Least):
            return cls(
                prepared.name, prepared.mechanism,
                [Part(prepared.name, lambda: (prepared,), quick=prepared.cheap)], kind=prepared.kind,
            )  # fmt: skip
        if prepared._stop is None:
            return prepared
        return cls(
            prepared.name, prepared.mechanism, prepared.parts, kind=prepared.kind,
            stop=prepared._stop.for_relation(relation), time_budget=prepared._time_budget,
        )  # fmt: skip

    @classmethod
    def within_budget(cls, accountant: Accountant, mechanism: Mechanism, relation: str = "both") -> Least:
        """An accountant prepared; where there is no room even for that, only closed forms."""
        try:
            return cls.of(accountant.prepare(mechanism), relation)
        except budget.Exhausted:
            return cls(accountant.name, mechanism, ())

    def bounds(self) -> tuple[PreparedAccountant, ...]:
        """All bounds, the likely winner first."""
        return _bounds_of(self.parts)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        """The least bound on δ(ε); with a target, the first bound that meets it, or the least where none does."""
        enough = -math.inf if target_delta is None else target_delta
        with budget.time_limit(self._time_budget):
            if self._stop is not None and target_delta is None:
                enough = self._stop.good_delta(noise_multiplier, epsilon, direction)

            def ask(bound: PreparedAccountant, lead: _Lead) -> None:
                found = None
                if target_delta is not None and self.kind == "bound":
                    found = bound.rough_delta(noise_multiplier, epsilon, direction, target_delta)
                    # A rough bound will do where it meets the target, or leaves little hope that the bound does.
                    if found and target_delta < found.value <= LITTLE_HOPE * bound.roughness * target_delta:
                        found = None
                found = found or bound.delta(noise_multiplier, epsilon, direction, target_delta)
                lead.offer(found.value, found, bound)

            def improve(bounds: Sequence[PreparedAccountant], lead: _Lead) -> None:
                last = None if target_delta is None else self._met.get(direction)
                _each(sorted(bounds, key=lambda bound: bound is not last), lead, ask=ask, enough=enough)

            found = self._seek(improve, enough, _usual(epsilon, target_delta))
            evaluation = self._labelled(found)
            if self._stop is None or target_delta is not None:
                return evaluation
            # The gap is one of ε, not of δ; where δ is 0 or 1 no ε would be asked for.
            if epsilon == 0 or not 0 < found.value < 1:
                factor = 1 if not 0 < found.value < 1 else 1 + self._stop.tolerance
                return _with_gap(evaluation, found.value, enough / factor)
            start = epsilon / (1 + self._stop.tolerance)
            return _with_gap(
                evaluation, epsilon, self._stop.lower_epsilon(noise_multiplier, found.value, direction, start)
            )

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        with budget.time_limit(self._time_budget):
            below = 0.0 if self._stop is None else self._stop.lower_epsilon(noise_multiplier, delta, direction)
            tolerance = 0.0 if self._stop is None else self._stop.tolerance
            enough = below * (1 + tolerance)

            def ask(bound: PreparedAccountant, lead: _Lead) -> None:
                def evaluate(epsilon: float) -> Evaluation:
                    return bound.delta(noise_multiplier, epsilon, direction, delta)

                if lead.answer is not None and 0 < lead.value < math.inf:
                    if 0 < enough < lead.value and not bound.cheap and evaluate(enough).value <= delta:
                        near = least_noise(evaluate, delta, enough, _TUNING.coarse * tolerance, 0.05)
                        assert near is not None  # the target was met at the start
                        lead.offer(near[0], near[1], bound)
                        return
                    # A bound that cannot improve on the best so far costs one evaluation.
                    challenged = lead.value * (1 - _TUNING.improvement)
                    if not _meets(bound, noise_multiplier, challenged, delta, direction):
                        return
                found = bound.epsilon(noise_multiplier, delta, direction)
                lead.offer(found.value, found, bound)

            def improve(bounds: Sequence[PreparedAccountant], lead: _Lead) -> None:
                _each(_promising_first(bounds, noise_multiplier, delta, direction), lead, ask=ask, enough=enough)

            found = self._seek(improve, enough)
        evaluation = self._labelled(found, found.value)
        return evaluation if self._stop is None else _with_gap(evaluation, found.value, below)

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        best = [1.0] * len(epsilons)
        last = len(epsilons) - 1
        good: dict[int, float] = {}

        def ask(groups: Sequence[Group], points: Sequence[int] = range(len(epsilons))) -> None:
            some = [epsilons[k] for k in points]
            for bound, places in asked_where(groups, noise_multiplier, some, direction, _TUNING.exact):
                found = bound.deltas(noise_multiplier, [some[place] for place in places], direction)
                for place, value in zip(places, found, strict=True):
                    best[points[place]] = min(best[points[place]], value)

        def improve(bounds: Sequence[PreparedAccountant], _: _Lead) -> None:
            if self._stop is not None and not good:
                for k in {round(probe * last / (_TUNING.probes - 1)) for probe in range(_TUNING.probes)}:
                    good[k] = self._stop.good_delta(noise_multiplier, epsilons[k], direction)
            ask([lambda: bounds])

        with budget.time_limit(self._time_budget):
            if self._stop is None and self.parts and not budget.limited():
                # There is time to compare all of them before any is asked everywhere.
                seldom = [part for part in self.parts if part.name in self._seldom]
                ask(_groups([part for part in self.parts if part not in seldom] or self.parts))
                if seldom and (rare := [k for k, epsilon in enumerate(epsilons) if not _usual(epsilon, best[k])]):
                    ask(_groups(seldom), rare)
            else:
                self._run(improve, _Lead(), lambda: bool(good) and all(best[k] <= good[k] for k in good), self.parts)
        return best

    def least_noise(
        self, epsilon: float, delta: float, direction: Direction, start: float, relative_tolerance: float
    ) -> tuple[float, Evaluation]:
        """The least noise multiplier found that meets a target, and the bound evaluated there.

        Args:
          epsilon: the target ε.
          delta: the target δ.
          direction: "remove" or "add".
          start: the noise multiplier at which to look first.
          relative_tolerance: how close to the root of the bound to end.
        """
        with budget.time_limit(self._time_budget):
            below = 0.0 if self._stop is None else self._stop.lower_noise(epsilon, delta, direction)
            tolerance = 0.0 if self._stop is None else self._stop.tolerance
            enough = below * (1 + tolerance)

            def improve(bounds: Sequence[PreparedAccountant], lead: _Lead) -> None:
                known = None
                goal: tuple[float, ...] = ()
                if lead.answer is not None:
                    known = LeastNoise(lead.value, lead.answer.evaluation, lead.answer.bound)
                    # Once an expensive bound has failed to be good enough, the others can hardly be.
                    if self._stop is not None and lead.answer.bound.cheap:
                        goal = enough, 0.0 if all(b.cheap for b in bounds) else _TUNING.coarse * tolerance
                found = calibrate_one_way(
                    bounds, epsilon, delta, direction, start, relative_tolerance, known, *goal
                )  # fmt: skip
                lead.offer(found.noise_multiplier, found.evaluation, found.bound)

            found = self._seek(improve, enough, _usual(epsilon, delta))
        self._met[direction] = found.bound
        evaluation = self._labelled(found)
        return found.value, evaluation if self._stop is None else _with_gap(evaluation, found.value, below)

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        reasons = [bound.unreachable(epsilon, delta, direction) for bound in self.bounds()]
        return reasons[-1] if reasons and all(reasons) else None

    def _seek(
        self,
        improve: Callable[[Sequence[PreparedAccountant], _Lead], None],
        enough: float,
        usual: bool = False,
    ) -> _Answer:
        """The least answer, or the first that is at most `enough`; `usual` leaves those out that seldom win."""
        lead = _Lead()
        parts = tuple(part for part in self.parts if not (usual and part.name in self._seldom))
        try:
            cut_short = self._run(improve, lead, lambda: lead.value <= enough, parts)
        except CalibrationError:
            if parts == self.parts:
                raise
            cut_short = self._run(improve, lead, lambda: lead.value <= enough, self.parts)
        assert lead.answer is not None
        if self._stop is None and not cut_short:
            return lead.answer
        evaluation = lead.answer.evaluation
        details = {**evaluation.details, "budget_exhausted": cut_short}
        return replace(lead.answer, evaluation=Evaluation(evaluation.value, details))

    def _run(
        self,
        improve: Callable[[Sequence[PreparedAccountant], _Lead], None],
        lead: _Lead,
        done: Callable[[], bool],
        asked: Sequence[Part],
    ) -> bool:
        """Go through the bounds of some parts until `done`, and whether a budget ended that."""
        groups = _groups(asked)
        if self._stop is not None or budget.limited() or not asked:
            closed_forms_first = sorted(asked, key=lambda part: part.name != Gaussian.name)
            groups = [part.bounds for part in closed_forms_first]
        ended: Exception | None = None if groups else budget.OutOfMemory()
        with budget.time_limit(None) as deadline, budget.memory_limit(None) as memory:
            for group in groups:
                try:
                    budget.check()
                    improve(group(), lead)
                except budget.OutOfTime as error:
                    ended = error
                    break
                except (budget.OutOfMemory, CalibrationError) as error:
                    ended = error
                    continue
                if done() or (lead.answer is not None and lead.answer.evaluation.slack <= _TUNING.exact):
                    break
        cut_short = isinstance(ended, budget.Exhausted) or deadline.passed or memory.passed
        if cut_short and self.kind == "bound":
            with budget.unlimited():
                improve((Gaussian().prepare(self.mechanism),), lead)
        elif cut_short and lead.answer is None:
            spent = "time_budget is too short" if deadline.passed else "memory_budget is too little"
            raise CalibrationError(f"{spent} for {self.name}") from None
        elif isinstance(ended, CalibrationError) and lead.answer is None:
            raise ended
        return cut_short

    def _labelled(self, answer: _Answer, value: float | None = None) -> Evaluation:
        """The evaluation, saying which accountant it is from where that is not this one."""
        details = answer.evaluation.details
        if answer.bound.name != self.name:
            details = {"accountant": answer.bound.name, **details}
        return Evaluation(answer.evaluation.value if value is None else value, details)


def _usual(epsilon: float, target_delta: float | None) -> bool:
    """Whether a target is one that seldom winners need not be asked about."""
    return target_delta is not None and target_delta >= _TUNING.usual_delta and epsilon <= _TUNING.usual_epsilon


def _bounds_of(parts: Sequence[Part]) -> tuple[PreparedAccountant, ...]:
    return tuple(bound for part in parts for bound in part.bounds())


def _groups(parts: Sequence[Part]) -> list[Group]:
    """The quick ones of some parts, and all others, as far as there are any."""
    quick = [part for part in parts if part.quick]
    others = [part for part in parts if not part.quick]
    return [partial(_bounds_of, some) for some in (quick, others) if some]


def combined(name: str, mechanism: Mechanism, accountants: Sequence[Accountant], **options: Any) -> Least:
    """The least of the bounds of several accountants; one that samples is refused."""
    parts: list[Part] = []
    for accountant in accountants:
        prepared = Least.of(accountant.prepare(mechanism))
        if prepared.kind != "bound":
            raise ArgumentError("accountants", f"must be deterministic, {prepared.name} is not")
        parts += prepared.parts
    return Least(name, mechanism, parts, **options)


def _with_gap(evaluation: Evaluation, value: float, below: float) -> Evaluation:
    """The evaluation with the relative gap between what was found and its certified lower bound."""
    gap = 0.0 if value == 0 else value / below - 1 if below > 0 else math.inf
    return Evaluation(evaluation.value, {**evaluation.details, "gap": gap})


def _each(
    bounds: Sequence[PreparedAccountant],
    lead: _Lead,
    *,
    ask: Callable[[PreparedAccountant, _Lead], None],
    enough: float,
) -> None:
    """Ask one bound after the other until the best is good enough; those that do not fit into memory are left out."""
    for bound in bounds:
        budget.check()
        progress.say(bound.name)
        budget.attempt(partial(ask, bound, lead), None)
        if lead.value <= max(enough, 0.0):
            return


def _meets(
    bound: PreparedAccountant, noise_multiplier: float, epsilon: float, delta: float, direction: Direction
) -> bool:
    """Whether a bound meets the target; it is not evaluated where its rough bound leaves little hope."""
    rough = bound.rough_delta(noise_multiplier, epsilon, direction, delta)
    if rough is not None and rough.value > LITTLE_HOPE * bound.roughness * delta:
        return False
    return bound.delta(noise_multiplier, epsilon, direction, delta).value <= delta


def _promising_first(
    bounds: Sequence[PreparedAccountant], noise_multiplier: float, delta: float, direction: Direction
) -> Sequence[PreparedAccountant]:
    """The bounds, those that have rough versions in the order of these at the ε where the first one meets δ."""
    rough = [bound for bound in bounds if bound.roughness > 1]
    if len(rough) < 2:
        return bounds

    def roughly(bound: PreparedAccountant, epsilon: float) -> Evaluation:
        return bound.rough_delta(noise_multiplier, epsilon, direction, delta) or Evaluation(1.0)

    def ordered() -> list[PreparedAccountant]:
        near = least_noise(lambda epsilon: roughly(rough[0], epsilon), delta, 1.0, 0.05)
        return rough if near is None else sorted(rough, key=lambda bound: roughly(bound, near[0]).value)

    order = iter(budget.attempt(ordered, rough))
    return [next(order) if bound.roughness > 1 else bound for bound in bounds]
