"""dpmf's guarantee behind Opacus' accountant interface, registered there as ``"dpmf"``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opacus.accountants import IAccountant
from opacus.accountants.registry import register_accountant

from dpmf import api, validation
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.training._curve import Curve, Question
from dpmf.training._overflow import Cut
from dpmf.training._schedule import Schedule, first_part
from dpmf.training._target import saying
from dpmf.training.noise import strategy_digest

NAME = "dpmf"


class MatrixMechanismAccountant(IAccountant):  # type: ignore[misc]
    """Counts the steps and answers with the (ε, δ) of the matrix mechanism under its batches.

    **Formal guarantees.** After t steps the released models are a function of the first outputs of the mechanism, for
    which the bound of dpmf's accountant is reported. With fixed bins these are the first max(t, b) outputs. Where bins
    are thrown anew, they are those of all throws that have begun, each with all of its epochs, and otherwise those of
    all epochs that have begun. A strategy that exists for N iterations only is bounded by the whole of it. A target
    that calibration proved for all steps bounds any part of them too. Where batches are cut to a largest size, ε is
    that of the uncut mechanism at a smaller δ, and the rest of δ pays for the cuts (`Cut`).
    """

    def __init__(
        self,
        matrix_mechanism: Mechanism | None = None,
        accountant: api.AnyAccountant = api.DEFAULT_ACCOUNTANT,
        proved: tuple[float, float] | None = None,
        cut: Cut | None = None,
    ):
        super().__init__()
        self.history: list[tuple[float, float, int]] = []
        self.matrix_mechanism = matrix_mechanism
        self.proved = proved
        self.cut = cut
        self._accountant = accountant
        self._curve = Curve()
        self._asked = 0  # the step of the last question

    def _configured(self) -> Mechanism:
        if self.matrix_mechanism is None:
            raise TrainingError(
                "the accountant 'dpmf' needs a mechanism and its batches: "
                "use dpmf.training.make_private instead of PrivacyEngine.make_private"
            )
        return self.matrix_mechanism

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step; refuses one beyond N, or with another noise multiplier."""
        mechanism = self._configured()
        steps = len(self)
        if steps >= Schedule.of(mechanism.batching).steps:
            raise TrainingError(f"all {steps} steps that were accounted for have been made")
        if self.history and self.history[0][0] != noise_multiplier:
            raise TrainingError(
                f"noise_multiplier must stay {self.history[0][0]!r}, which was accounted for, got {noise_multiplier!r}"
            )
        self.history = [(noise_multiplier, sample_rate, steps + 1)]

    def get_epsilon(self, delta: float, wait: bool = True, **_: Any) -> float:
        """The ε at which what was released so far is (ε, delta)-DP, with the cost of batches that are cut.

        Args:
          delta: δ.
          wait: whether to wait for the bound for exactly the steps made. Otherwise the answer is the least one that is
            known for them or for more steps, which bounds them too: infinity, if there is none.
        """
        mechanism = self._configured()
        delta = validation.probability("delta", delta)
        if not self.history:
            return 0.0
        if not wait:
            return self._known_epsilon(delta)
        if self.cut is None or self._is_proved(delta):
            return self._uncut_epsilon(mechanism, delta)
        found = self.cut.epsilon(delta, lambda left: self._uncut_epsilon(mechanism, left))
        return min(found, self.proved[0]) if self.proved is not None and delta >= self.proved[1] else found

    def _is_proved(self, delta: float) -> bool:
        """Whether all steps have been made, for which calibration has proved the target at this δ."""
        whole = len(self) >= Schedule.of(self._configured().batching).steps
        return whole and self.proved is not None and delta == self.proved[1]

    def _known_epsilon(self, delta: float) -> float:
        steps, schedule = len(self), Schedule.of(self._configured().batching)
        b, least = schedule.per_epoch, math.inf
        if self.proved is not None and delta >= self.proved[1]:
            least = self.proved[0]
        for t in (steps, *range(b * (steps // b + 1), schedule.steps, b)):

            def known(left: float, t: int = t) -> float:
                return self._curve.known(self._question(t, self.history[0][0], left))

            least = min(least, known(delta) if self.cut is None else self.cut.epsilon(delta, known))
        return least

    def _uncut_epsilon(self, mechanism: Mechanism, delta: float) -> float:
        sigma, _rate, steps = self.history[0]
        if self.proved is not None and self._is_proved(delta):
            return self.proved[0]
        often = steps - self._asked if self._asked < steps else steps
        self._asked = steps
        with saying(f"computing ε after {steps} steps, which is kept for the next time,"):
            found = self._curve.ask(
                self._question(steps, sigma, delta),
                lambda: self._questions(
                    range(steps + often, Schedule.of(mechanism.batching).steps, often), sigma, delta
                ),
            )
        return min(found, self.proved[0]) if self.proved is not None and delta >= self.proved[1] else found

    def precompute(self, sigma: float, delta: float, steps: Iterable[int]) -> None:
        """Begin to compute the ε after each of these steps in the background."""
        delta = validation.probability("delta", delta)
        self._curve.ahead(self._questions(steps, sigma, delta if self.cut is None else self.cut.tried_first(delta)))

    def _questions(self, steps: Iterable[int], sigma: float, delta: float) -> Iterator[Question]:
        for t in steps:
            yield self._question(t, sigma, delta)

    def _question(self, steps: int, sigma: float, delta: float) -> Question:
        """The question what the first steps have spent."""
        mechanism, accountant = self._configured(), self._accountant
        if steps < Schedule.of(mechanism.batching).steps:
            mechanism = first_part(mechanism, steps)
        if isinstance(accountant, PreparedAccountant) and accountant.mechanism is not mechanism:
            accountant = api.DEFAULT_ACCOUNTANT  # it was prepared for the whole, this is a part
        return Question(mechanism, sigma, delta, accountant)

    def __len__(self) -> int:
        return self.history[0][2] if self.history else 0

    @classmethod
    def mechanism(cls) -> str:
        return NAME

    def state_dict(self, destination: Any = None) -> Any:
        state = super().state_dict(destination)
        mechanism = self._configured()
        state["history"] = [list(entry) for entry in self.history]
        state["matrix"] = strategy_digest(mechanism.strategy, mechanism.batching.iterations)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        mechanism = self._configured()
        if state_dict and state_dict.get("matrix") != strategy_digest(
            mechanism.strategy, mechanism.batching.iterations
        ):
            raise ArgumentError("state_dict", f"must be of {mechanism.name}, this one is of another mechanism")
        super().load_state_dict(state_dict)
        self.history = [(float(s), float(r), int(n)) for s, r, n in state_dict["history"]]


def register() -> None:
    register_accountant(NAME, MatrixMechanismAccountant, force=True)
