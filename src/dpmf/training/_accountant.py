"""The guarantee of a run behind Opacus' accountant interface, for whoever asks a `PrivacyEngine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.accountants import IAccountant

from dpmf.training.step import Step


class RunAccountant(IAccountant):  # type: ignore[misc]
    """Answers for a whole run. It counts nothing: the `Step` does."""

    def __init__(self, step: Step, epsilon: Callable[[float], float]):
        self._step, self._epsilon = step, epsilon

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """What Opacus' accountants keep: noise multiplier, sampling rate and the number of steps."""
        run = self._step.run
        made = self._step.t
        return [(run.noise_multiplier, 1 / run.mechanism.batching.batches_per_epoch, made)] if made else []

    @history.setter
    def history(self, _: Any) -> None:
        pass

    def step(self, **_: Any) -> None:
        pass

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """The ε at which the whole run is (ε, delta)-DP."""
        return self._epsilon(delta)

    def __len__(self) -> int:
        return self._step.t

    @classmethod
    def mechanism(cls) -> str:
        return "dpmf"
