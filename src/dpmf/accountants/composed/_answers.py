"""What bounds say at one σ and in one direction: who is asked twice about the same ε answers once."""

from __future__ import annotations

from typing import NamedTuple

from dpmf import budget
from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant


class _Question(NamedTuple):
    """A bound is known by its `id`, which lasts as long as the bound is kept beside the answer."""

    bound: int
    epsilon: float
    target: float | None


class Answers:
    """A memory of evaluations.

    Attributes:
      noise_multiplier: σ.
      direction: "remove" or "add".
    """

    def __init__(self, noise_multiplier: float, direction: Direction) -> None:
        self.noise_multiplier, self.direction = noise_multiplier, direction
        self._known: dict[_Question, tuple[Evaluation, PreparedAccountant]] = {}
        self._known_quickly: dict[_Question, tuple[float, PreparedAccountant]] = {}

    def delta(self, bound: PreparedAccountant, epsilon: float, target: float | None = None) -> Evaluation:
        """What a bound says of δ(ε)."""
        question = _Question(id(bound), epsilon, target)
        if question not in self._known:
            self._known[question] = bound.delta(self.noise_multiplier, epsilon, self.direction, target), bound
        return self._known[question][0]

    def quickly(self, bound: PreparedAccountant, epsilon: float, target: float) -> float:
        """A bound on δ(ε), by its rough version where there is one; 1 where memory does not allow it."""
        question = _Question(id(bound), epsilon, target)

        def ask() -> float:
            rough = bound.rough_delta(self.noise_multiplier, epsilon, self.direction, target)
            return (rough or self.delta(bound, epsilon, target)).value

        if question not in self._known_quickly:
            self._known_quickly[question] = budget.attempt(ask, 1.0), bound
        return self._known_quickly[question][0]
