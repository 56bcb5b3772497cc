"""An accountant within a budget of time and memory: closed forms answer where it has none by then."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from dpmf import budget, progress
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant
from dpmf.errors import CalibrationError
from dpmf.mechanism import Mechanism

T = TypeVar("T")
_TOO_LITTLE = "memory_budget is too little"


class InTime:
    """Answers of an accountant, or of the closed forms.

    **Formal guarantees.** The closed forms are those of the `gaussian` accountant, bounds for both directions at every
    noise multiplier.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[[], PreparedAccountant],
        mechanism: Mechanism,
        deadline: budget.Deadline,
        memory: budget.MemoryLimit,
    ) -> None:
        self.name, self.kind = name, "bound"
        self._mechanism, self._deadline, self._memory = mechanism, deadline, memory
        self._prepared: PreparedAccountant | None = None
        self._late = False
        try:
            progress.say("preparing")
            self._prepared = prepare()
            self.kind = self._prepared.kind
        except budget.Exhausted:
            self._late = True

    @cached_property
    def _closed(self) -> PreparedAccountant:
        return Gaussian().prepare(self._mechanism)

    @property
    def late(self) -> bool:
        """Whether a budget, the caller's or the accountant's own, ended the search for better answers."""
        return self._late or self._deadline.passed or self._memory.passed

    def _ask(self, question: Callable[[PreparedAccountant], T]) -> tuple[T, PreparedAccountant]:
        if self._prepared is not None:
            try:
                return question(self._prepared), self._prepared
            except budget.Exhausted as error:
                self._late = True
                if self.kind != "bound":
                    spent = "time_budget is too short" if isinstance(error, budget.OutOfTime) else _TOO_LITTLE
                    raise CalibrationError(f"{spent} for {self.name}") from None
            except CalibrationError:
                if not self._memory.passed:
                    raise
        with budget.unlimited():
            return question(self._closed), self._closed

    def _labelled(self, found: Evaluation, by: PreparedAccountant) -> Evaluation:
        if self._prepared is by or by.name == self.name:
            return found
        return Evaluation(found.value, {"accountant": by.name, **found.details})

    def _least(self, question: Callable[[PreparedAccountant], Evaluation]) -> Evaluation:
        """The accountant's answer; where a budget cut it short, the closed forms' if that is smaller."""
        found, by = self._ask(question)
        if self.kind == "bound" and self.late and by is not self._closed:
            with budget.unlimited():
                closed = question(self._closed)
            found, by = (closed, self._closed) if closed.value < found.value else (found, by)
        return self._labelled(found, by)

    def delta(self, sigma: float, epsilon: float, direction: Direction) -> Evaluation:
        return self._least(lambda prepared: prepared.delta_one_way(sigma, epsilon, direction))

    def epsilon(self, sigma: float, delta: float, direction: Direction) -> Evaluation:
        return self._least(lambda prepared: prepared.epsilon_one_way(sigma, delta, direction))

    def first_to_meet(self, sigma: float, epsilon: float, delta: float, direction: Direction) -> Evaluation:
        return self._least(lambda prepared: prepared.first_to_meet(sigma, epsilon, delta, direction))

    def least_noise(
        self, epsilon: float, delta: float, direction: Direction, start: float, tolerance: float
    ) -> tuple[float, Evaluation]:
        def question(prepared: PreparedAccountant) -> tuple[float, Evaluation]:
            return prepared.least_noise_one_way(epsilon, delta, direction, start, tolerance)

        (sigma, found), by = self._ask(question)
        if self.kind == "bound" and self.late and by is not self._closed:
            with budget.unlimited():
                closed = question(self._closed)
            (sigma, found), by = (closed, self._closed) if closed[0] < sigma else ((sigma, found), by)
        return sigma, self._labelled(found, by)

    def deltas(self, sigma: float, epsilons: list[float], direction: Direction) -> list[float]:
        found, by = self._ask(lambda prepared: prepared.deltas_one_way(sigma, epsilons, direction))
        if self.kind == "bound" and self.late and by is not self._closed:
            with budget.unlimited():
                closed = self._closed.deltas_one_way(sigma, epsilons, direction)
            found = [min(pair) for pair in zip(found, closed, strict=True)]
        return found

    def details(self, evaluations: dict[Direction, Evaluation]) -> dict[str, object]:
        """How the answers came about, by direction, and whether a budget ended the search for better ones."""
        late = {"budget_exhausted": True} if self.late else {}
        return {
            one_way: {"value": evaluation.value, **evaluation.details, **late}
            for one_way, evaluation in evaluations.items()
        }
