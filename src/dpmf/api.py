"""The public functions: validate once, prepare the accountant, combine the directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dpmf import budget, calibration, lower_bounds, validation
from dpmf.accountants.combined.least import Least
from dpmf.accountants.protocol import (
    RELATIONS,
    Accountant,
    Direction,
    Evaluation,
    PreparedAccountant,
    directions_of,
    suited,
)
from dpmf.accountants.registry import covering, least_of, resolve
from dpmf.cut import Cut, affordable
from dpmf.errors import ArgumentError, CalibrationError
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT
from dpmf.results import Calibration, CalibrationEstimate, Estimate, PrivacyBound, PrivacyProfile
from dpmf.run import Run, asked_about, only_mechanism

DEFAULT_ACCOUNTANT = "best"
T = TypeVar("T")

# A name, an accountant with options, or one prepared for this mechanism already (to share its work between calls).
AnyAccountant: TypeAlias = str | Accountant | PreparedAccountant


def _binding(evaluations: dict[Direction, Evaluation]) -> Direction:
    return max(evaluations, key=lambda one_way: evaluations[one_way].value)


def _for_adding_too(removing: Evaluation) -> Evaluation:
    """A bound of removing a record as one of adding it."""
    return Evaluation(removing.value, {**removing.details, "bounded_by": "remove"})


_LOWER_SHARE = 0.2  # the part of a time budget that certified lower bounds may take


class _Question:
    """A question to an accountant within budgets of time and memory, and what came of it."""

    def __init__(
        self,
        mechanism: Mechanism,
        accountant: AnyAccountant,
        direction: str,
        with_lower: bool,
        time_budget: float | None,
        memory_budget: float | None,
        cut: Cut | None = None,
    ) -> None:
        self.relation = directions_of(validation.choice("direction", direction, RELATIONS))
        self._mechanism, self._relation, self._cut = mechanism, direction, cut
        self._with_lower = validation.flag("with_lower", with_lower)
        self._seconds = None if time_budget is None else validation.positive("time_budget", time_budget)
        self._bytes = None if memory_budget is None else validation.positive("memory_budget", memory_budget)
        asked = accountant if isinstance(accountant, PreparedAccountant) else covering(accountant, mechanism)
        self._accountant = asked
        self.name = accountant.name if isinstance(accountant, PreparedAccountant) else resolve(accountant).name
        self.kind, self.late = "bound", False
        self.notes: dict[str, Any] = {}  # what the details of every direction say
        if isinstance(accountant, PreparedAccountant) and accountant.mechanism is not mechanism:
            given = accountant.mechanism.name
            raise ArgumentError("accountant", f"must be prepared for this mechanism, got one for {given}")

    @contextmanager
    def asked(self) -> Iterator[Least]:
        """The accountant, within the budgets less what lower bounds may take."""
        seconds = self._seconds
        if seconds is not None and self._with_lower:
            seconds *= 1 - _LOWER_SHARE
        with budget.time_limit(seconds) as deadline, budget.memory_limit(self._bytes) as memory:
            if isinstance(self._accountant, PreparedAccountant):
                source = Least.of(self._accountant, self._relation)
            else:
                source = Least.within_budget(self._accountant, self._mechanism, self._relation)
            self.kind = source.kind
            yield source
            self.late = deadline.passed or memory.passed

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions to ask about: removing a record is never better than adding one, so its bounds serve both.

        Estimates are made in each direction.
        """
        return self.relation[:1] if self.kind == "bound" else self.relation

    @property
    def removing_may_answer(self) -> bool:
        """Whether only adding is asked about, by a bound: one for removing holds for it too, and may be the smaller."""
        return self.kind == "bound" and self.relation == ("add",)

    def bounds(self, ask: Callable[[Direction], Evaluation]) -> dict[Direction, Evaluation]:
        """What the accountant says in each direction to answer for."""
        found = {way: ask(way) for way in self.directions}
        if self.removing_may_answer and (removing := ask("remove")).value < found["add"].value:
            found["add"] = _for_adding_too(removing)
        return found

    def charged(self, delta: float, epsilon: float) -> float:
        """A δ with what the cut of batches costs at ε."""
        if self._cut is None:
            return delta
        return min(1.0, (delta + self._cut.charge(epsilon, self._relation)) * (1 + 2 * UNIT))

    def within(self, delta: float, ask: Callable[[float, Direction], Evaluation]) -> dict[Direction, Evaluation]:
        """What the accountant says about ε in each direction, at as much of δ as the cut of batches leaves."""
        found: dict[Direction, Evaluation] = {}

        def uncut(left: float) -> float:
            found.update(self.bounds(partial(ask, left)))
            return found[_binding(found)].value

        if self._cut is None:
            uncut(delta)
        else:
            affordable(delta, uncut, partial(self._cut.charge, direction=self._relation))
        return found

    def least_noise(
        self, ask: Callable[[Direction], tuple[float, Evaluation]], way: Direction
    ) -> tuple[float, Evaluation]:
        """The least noise multiplier whose bound in a direction meets the target, and that bound."""
        if not self.removing_may_answer:
            return ask(way)
        try:
            adding = ask("add")
        except CalibrationError as error:
            refused, adding = error, None
        try:
            sigma, removing = ask("remove")
        except CalibrationError:
            if adding is None:
                raise refused from None
            return adding
        return adding if adding is not None and adding[0] <= sigma else (sigma, _for_adding_too(removing))

    def both(self, found: dict[Direction, Evaluation]) -> dict[Direction, Evaluation]:
        """The answers in all directions that the relation has."""
        bound = found[self.relation[0]]
        decided = Evaluation(bound.value, {"bounded_by": self.relation[0]})
        return {way: found.get(way, decided) for way in self.relation}

    def lower(self, bound: Callable[[], T]) -> T | None:
        """Certified lower bounds, where they were asked for."""
        if not self._with_lower:
            return None
        seconds = None if self._seconds is None else _LOWER_SHARE * self._seconds
        with budget.time_limit(seconds), budget.memory_limit(self._bytes):
            return bound()

    def answer(
        self, found: dict[Direction, Evaluation], binding: Direction, lower: float | None, **numbers: float
    ) -> dict[str, Any]:
        """The fields of a result."""
        notes = self.notes | ({"budget_exhausted": True} if self.late else {})
        if self._cut is not None:
            notes["cut"] = self._cut.charge(numbers["epsilon"], self._relation)
        return {
            "direction": self._relation,
            "binding": binding,
            "accountant": self.name,
            "details": {way: {"value": e.value, **e.details, **notes} for way, e in self.both(found).items()},
            "lower": lower,
            **numbers,
            **({} if self.kind == "bound" else {"kind": self.kind}),
        }


def delta(
    mechanism: Mechanism | Run,
    *,
    noise_multiplier: float | None = None,
    epsilon: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
) -> PrivacyBound | Estimate:
    """An upper bound on δ(ε) of the mechanism run with a noise multiplier.

    Args:
      mechanism: the strategy and the batching, or a `Run`, whose cut of batches is counted.
      noise_multiplier: σ for clipping norm 1 and the strategy as given; left out for a run.
      epsilon: ε ≥ 0.
      accountant: the name of an accountant, an accountant with its options, or one prepared for this mechanism.
      direction: the neighbouring relation: "remove", "add" or "both".
      with_lower: also certify a lower bound on δ(ε).
      time_budget: seconds. After them the best bound reached so far is returned, and `details` say so
        ("budget_exhausted").
      memory_budget: bytes of arrays at a time. Bounds that need more are left out, and `details` say so.

    Returns:
      A `PrivacyBound`, or an `Estimate` from an accountant that samples.

    **Formal guarantees.** The accountant bounds the direction asked for from above. For "both" it bounds that of
    removing a record, which is at least the other one at every ε ≥ 0 (docs/theory/gram-domination.md, "Removing
    decides"). For "add" it bounds either, and the smaller bound is returned; `details` say if it is that of removing.
    An accountant that samples gives an `Estimate` instead, which guarantees nothing.
    Where a run cuts its batches, δ is charged for that, by e^ε·η in general and by η where a record is removed
    (docs/theory/batch-sizes.md). Lower bounds hold with and without a cut: the others may contribute nothing.
    """
    uncut, sigma, cut = asked_about(mechanism, noise_multiplier)
    question = _Question(uncut, accountant, direction, with_lower, time_budget, memory_budget, cut)
    epsilon = validation.non_negative("epsilon", epsilon)
    with question.asked() as source:
        found = question.bounds(lambda one_way: source.delta(sigma, epsilon, one_way))
    found = {way: Evaluation(question.charged(one.value, epsilon), one.details) for way, one in found.items()}
    binding = _binding(found)
    below = question.lower(lambda: lower_bounds.lower_delta(uncut, sigma, epsilon, direction))
    answer = question.answer(found, binding, below, noise_multiplier=sigma, epsilon=epsilon, delta=found[binding].value)
    return PrivacyBound(**answer) if question.kind == "bound" else Estimate(**answer)


def epsilon(
    mechanism: Mechanism | Run,
    *,
    noise_multiplier: float | None = None,
    delta: float,
    stop: int | None = None,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
) -> PrivacyBound | Estimate:
    """An upper bound on the ε at which the mechanism is (ε, δ)-DP; infinite where none was found.

    Of a run with cut batches it is never infinite: where they cost too much of δ, an error says so.

    Args:
      mechanism: the strategy and the batching, or a `Run`, whose cut of batches is counted.
      noise_multiplier: σ for clipping norm 1 and the strategy as given; left out for a run.
      delta: δ, strictly between 0 and 1.
      stop: one of the stopping points that the run named in advance: ε is that of its first steps, for those who stop
        there. δ is divided by the number of these points, of which the end is one, also where `stop` is left out.
      accountant: the name of an accountant, an accountant with its options, or one prepared for this mechanism.
      direction: the neighbouring relation: "remove", "add" or "both".
      with_lower: also certify a lower bound on ε.
      time_budget: seconds. After them the best bound reached so far is returned, and `details` say so
        ("budget_exhausted").
      memory_budget: bytes of arrays at a time. Bounds that need more are left out, and `details` say so.

    Returns:
      A `PrivacyBound`, or an `Estimate` from an accountant that samples.

    **Formal guarantees.** The accountant bounds the direction asked for from above. For "both" it bounds that of
    removing a record, which is at least the other one at every ε ≥ 0 (docs/theory/gram-domination.md, "Removing
    decides"). For "add" it bounds either, and the smaller bound is returned; `details` say if it is that of removing.
    An accountant that samples gives an `Estimate` instead, which guarantees nothing.
    Where a run cuts its batches, ε is that of the uncut mechanism at a smaller δ, and the rest pays for the cut
    (`affordable`). Where stopping points are named, all answers together are an ex-post guarantee: whoever stops at
    one of them, judging by what was released, may state its ε (docs/theory/batch-sizes.md, "Stopping early").
    """
    delta = share = validation.probability("delta", delta)
    if isinstance(mechanism, Run):
        mechanism, share = mechanism.stopped(stop, delta)
    elif stop is not None:
        raise ArgumentError("stop", f"applies only to a dpmf.Run in which it was named (stops=), got {stop!r}")
    uncut, sigma, cut = asked_about(mechanism, noise_multiplier)
    question = _Question(uncut, accountant, direction, with_lower, time_budget, memory_budget, cut)
    question.notes |= {} if stop is None else {"ex_post": stop}
    with question.asked() as source:
        found = question.within(share, lambda left, one_way: source.epsilon(sigma, left, one_way))
    binding = _binding(found)
    below = question.lower(lambda: lower_bounds.lower_epsilon(uncut, sigma, share, direction))
    answer = question.answer(found, binding, below, noise_multiplier=sigma, epsilon=found[binding].value, delta=delta)
    return PrivacyBound(**answer) if question.kind == "bound" else Estimate(**answer)


def _grid(epsilons: object) -> np.ndarray:
    try:
        values = [validation.non_negative("epsilons", e) for e in np.ravel(np.asarray(epsilons))]
    except ValueError as error:
        if str(error).startswith("epsilons"):
            raise
        raise validation.wrong("epsilons", "a sequence of numbers", epsilons) from None
    if not values:
        raise validation.wrong("epsilons", "at least one number", epsilons)
    return np.array(values)


def profile(
    mechanism: Mechanism | Run,
    *,
    noise_multiplier: float | None = None,
    epsilons: Sequence[float] | np.ndarray | None = None,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
) -> PrivacyProfile:
    """Upper bounds on δ(ε) over a grid of ε.

    Args:
      mechanism: the strategy and the batching, or a `Run`, whose cut of batches is counted.
      noise_multiplier: σ for clipping norm 1 and the strategy as given; left out for a run.
      epsilons: the grid; by default 21 points from 0 to the ε at which δ ≤ 10⁻⁸.
      accountant: the name of an accountant, an accountant with its options, or one prepared for this mechanism.
      direction: the neighbouring relation: "remove", "add" or "both".
      with_lower: also certify lower bounds at the same points.
      time_budget: seconds. Points that they do not reach get closed forms, and `budget_exhausted` is set.
      memory_budget: bytes of arrays at a time. Bounds that need more are left out, and `budget_exhausted` is set.

    Returns:
      A `PrivacyProfile`; its `kind` says whether it holds bounds or estimates.

    **Formal guarantees.** As for `delta`, at every grid point; no interpolation is made.
    """
    uncut, sigma, cut = asked_about(mechanism, noise_multiplier)
    question = _Question(uncut, accountant, direction, with_lower, time_budget, memory_budget, cut)
    grid = None if epsilons is None else _grid(epsilons)
    with question.asked() as source:
        if grid is None:
            tops = question.bounds(lambda one_way: source.epsilon(sigma, 1e-8, one_way))
            top = max(evaluation.value for evaluation in tops.values())
            grid = np.linspace(0.0, top if math.isfinite(top) else 100.0, 21)
        found = {way: np.asarray(source.deltas(sigma, grid.tolist(), way)) for way in question.directions}
        if question.removing_may_answer:
            found["add"] = np.minimum(found["add"], source.deltas(sigma, grid.tolist(), "remove"))
    charged = [[question.charged(d, e) for e, d in zip(grid, deltas, strict=True)] for deltas in found.values()]
    found = dict(zip(found, map(np.array, charged), strict=True))
    first = found[question.directions[0]]
    by_direction: dict[str, np.ndarray] = {way: found.get(way, first) for way in question.relation}
    deltas = np.max(list(by_direction.values()), axis=0)
    points = grid.tolist()
    below = question.lower(lambda: np.array([lower_bounds.lower_delta(uncut, sigma, e, direction) for e in points]))
    return PrivacyProfile(
        noise_multiplier=sigma,
        epsilons=grid,
        deltas=deltas,
        by_direction=by_direction,
        direction=direction,
        accountant=question.name,
        kind=question.kind,
        lower=below,
        budget_exhausted=question.late,
    )


def calibrate(
    mechanism: Mechanism,
    *,
    target_epsilon: float,
    target_delta: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    relative_tolerance: float = 1e-4,
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
    near: float | None = None,
) -> Calibration | CalibrationEstimate:
    """The smallest noise multiplier whose bound meets (ε, δ), to within a relative tolerance, never below it.

    Args:
      mechanism: the strategy and the batching; a `Run` has its noise multiplier already.
      target_epsilon: ε > 0.
      target_delta: δ, strictly between 0 and 1.
      accountant: the name of an accountant, an accountant with its options, or one prepared for this mechanism.
      direction: the neighbouring relation: "remove", "add" or "both".
      relative_tolerance: how far above the smallest possible answer of the accountant the search may end. Where
        throws are composed, it ends 7·10⁻⁴ above it or closer: the points of their profiles move with σ.
      with_lower: also certify a noise multiplier below which no accountant could prove the target.
      time_budget: seconds. After them the best bound reached so far is returned, and `details` say so
        ("budget_exhausted").
      memory_budget: bytes of arrays at a time. Bounds that need more are left out, and `details` say so.
      near: a noise multiplier to begin the search at, such as an estimate. It changes only how long the search takes.

    Returns:
      A `Calibration`, or a `CalibrationEstimate` from an accountant that samples.

    Raises:
      CalibrationError: no noise multiplier can meet the target with this accountant and its options.

    **Formal guarantees.** The accountant's bound was evaluated at the noise multiplier returned and met the target, in
    the direction asked for; for "both", when a record is removed, which bounds the other direction, too. For "add" the
    smaller noise multiplier of the two directions is returned, and `details` say if it is that of removing.
    """
    only_mechanism(mechanism)
    question = _Question(mechanism, accountant, direction, with_lower, time_budget, memory_budget)
    epsilon = validation.positive("target_epsilon", target_epsilon)
    delta = validation.probability("target_delta", target_delta)
    tolerance = validation.probability("relative_tolerance", relative_tolerance)
    found: dict[Direction, Evaluation] = {}
    sigma = 0.0
    start = mechanism.sensitivity if near is None else mechanism.checked_noise(near)
    binding = question.directions[0]
    with question.asked() as source:
        if near is None:
            with suppress(budget.Exhausted):
                start = calibration.likely_noise(mechanism, epsilon, delta)
        for one_way in question.directions:
            if sigma:
                # The σ of the direction before often does for this one too: one evaluation tells.
                known = source.delta(sigma, epsilon, one_way, delta)
                if known.value <= delta:
                    found[one_way] = known
                    continue
            sigma, found[one_way] = question.least_noise(
                partial(source.least_noise, epsilon, delta, start=sigma or start, relative_tolerance=tolerance), one_way
            )
            binding = one_way
        # Directions before the binding one were evaluated at a smaller σ. That bound holds at this one too (more noise,
        # a smaller G/σ²), and stays where there is no time for another.
        for one_way in question.directions[: question.directions.index(binding)]:
            if not found[binding].details.get("budget_exhausted"):
                found[one_way] = source.delta(sigma, epsilon, one_way, delta)
    worst = _binding(found)
    if found[worst].value > delta:
        raise CalibrationError(f"the bound of {source.name} is not monotone around noise multiplier {sigma:g}")
    below = question.lower(lambda: lower_bounds.lower_noise_multiplier(mechanism, epsilon, delta, direction))
    answer = question.answer(
        found, binding, below, noise_multiplier=sigma, epsilon=epsilon, delta=found[worst].value,
        target_epsilon=epsilon, target_delta=delta,
    )  # fmt: skip
    return Calibration(**answer) if question.kind == "bound" else CalibrationEstimate(**answer)


def noise_near(
    mechanism: Mechanism,
    near: float,
    *,
    target_epsilon: float,
    target_delta: float,
    relative_tolerance: float,
    quick: bool = False,
    time_budget: float | None = None,
) -> tuple[float, int, bool]:
    """A noise multiplier near an estimate that guarantees (ε, δ), with few questions; `calibrate` finds the least one.

    Args:
      mechanism: the strategy and the batching.
      near: an estimate of the noise multiplier.
      target_epsilon: ε > 0.
      target_delta: δ, strictly between 0 and 1.
      relative_tolerance: how much smaller than the answer the root of the bounds that were asked might be.
      quick: ask rough bounds only, which cost about a percent of σ and take a fraction of the time.
      time_budget: seconds.

    Returns:
      The noise multiplier, which of the bounds met the target there, for `meets`, and whether the search came to its
      end before the time budget did.

    Raises:
      CalibrationError: no noise multiplier was found in time.

    **Formal guarantees.** When a record is removed, which bounds the other direction too, a bound of the cascade, the
    moments, the own-bin or the chain accountant was evaluated at the noise multiplier returned and met the target;
    where there are several throws, one composed of those.
    """
    with budget.time_limit(time_budget):
        try:
            members = _bounds_near(mechanism)
        except budget.OutOfTime:
            raise CalibrationError("there was no time to certify it") from None
        return calibration.noise_near(
            members, target_epsilon, target_delta, near, relative_tolerance, quick=quick
        )  # fmt: skip


def _bounds_near(mechanism: Mechanism) -> Sequence[PreparedAccountant]:
    names = ("cascade", "moments", "own-bin", "chain")[0 if mechanism.batching.fixed else 1 :]
    asked = least_of(suited(map(resolve, names), mechanism.throw))
    return Least.of(covering(asked, mechanism).prepare(mechanism)).bounds()


def meets(
    mechanism: Mechanism, noise_multiplier: float, epsilon: float, delta: float, place: int | None = None, *,
    quick: bool = False,
) -> bool:  # fmt: skip
    """Whether a noise multiplier found earlier, maybe by other code, gives (ε, δ): its bound is evaluated there.

    Args:
      mechanism: the strategy and the batching.
      noise_multiplier: σ.
      epsilon: ε ≥ 0.
      delta: δ, strictly between 0 and 1.
      place: which of the bounds of `noise_near` to ask; by default those of `best`, one after the other.
      quick: ask its rough version, if there is one.

    Raises:
      OutOfTime: the time limit in force did not suffice to tell.

    **Formal guarantees.** Where it says yes, a bound on removing a record, which bounds the other direction too, was
    evaluated at this noise multiplier and met the target.
    """
    sigma = mechanism.checked_noise(noise_multiplier)
    with budget.time_limit(None):
        if place is None:
            asked = Least.of(covering(DEFAULT_ACCOUNTANT, mechanism).prepare(mechanism)).bounds()
        else:
            asked = (_bounds_near(mechanism)[place],)
        for bound in asked:
            rough = bound.rough_delta(sigma, epsilon, "remove", delta) if quick else None
            if (rough or bound.delta(sigma, epsilon, "remove", delta)).value <= delta:
                return True
        budget.check()
    return False
