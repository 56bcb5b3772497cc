"""dpmf's guarantee behind Opacus' accountant interface, registered there as ``"dpmf"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opacus.accountants import IAccountant
from opacus.accountants.registry import register_accountant

from dpmf import api, validation
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.training import _target
from dpmf.training._overflow import Cut
from dpmf.training._schedule import Schedule
from dpmf.training.noise import strategy_digest

NAME = "dpmf"


class MatrixMechanismAccountant(IAccountant):  # type: ignore[misc]
    """Counts the steps and answers with the (ε, δ) of the matrix mechanism under its batches.

    **Formal guarantees.** ε is that of the whole run, all steps of the mechanism, for which dpmf's accountant proves
    it. Whatever is released on the way, and whenever training stops, is a function of what the whole run would release:
    so the answer holds for any rule to stop, also for one that looks at the models. (The ε of the steps made would
    hold only for a number of steps that was chosen in advance.) Where batches are cut to a largest size, ε is that of
    the uncut mechanism at a smaller δ, and the rest of δ pays for the cuts (`Cut`).
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
        self._known: dict[tuple[float, float], float] = {}  # ε by σ and δ

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

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """The ε at which the whole run is (ε, delta)-DP, with the cost of batches that are cut.

        Before the first step it is 0.

        Args:
          delta: δ. One that is below what cut batches cost is refused.
        """
        mechanism = self._configured()
        delta = validation.probability("delta", delta)
        if not self.history:
            return 0.0
        sigma = self.history[0][0]
        if (sigma, delta) not in self._known:
            self._known[sigma, delta] = _target.whole_epsilon(
                mechanism, sigma, delta, self._accountant, self.cut, self.proved
            )
        return self._known[sigma, delta]

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
