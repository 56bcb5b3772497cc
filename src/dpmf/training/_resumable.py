"""What runs with torch and with JAX share: batches, noise and model are saved and restored together, or not at all."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dpmf.mechanism import Mechanism
from dpmf.training import checkpoint
from dpmf.training._schedule import description
from dpmf.training.journal import Journal
from dpmf.training.noise import strategy_digest
from dpmf.training.sampler import BatchSampler


class Resumable(ABC):
    """A training run with a journal. Its noise state has at least a "key" (as hexadecimal digits) and a "step"."""

    mechanism: Mechanism
    noise_multiplier: float
    sampler: BatchSampler
    journal: Journal

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of steps made so far."""

    @property
    def steps_left(self) -> int:
        """The number of steps that are still covered by the guarantee."""
        return self.sampler.steps - self.step

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this run, beside mechanism, records and noise multiplier."""

    @cached_property
    def _matrix(self) -> str:
        return strategy_digest(self.mechanism.strategy, self.mechanism.batching.iterations)

    def _whole_identity(self) -> dict[str, Any]:
        batching = self.mechanism.batching
        return {
            "mechanism": self.mechanism.name,
            "matrix": self._matrix,
            "batching": description(batching),
            "records": self.sampler.size,
            "batches": self.sampler.options,
            "noise_multiplier": self.noise_multiplier,
            **self._identity(),
        }

    def _write(self, path: str | os.PathLike[str], noise: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        target = Path(path)
        self.sampler.seek(self.step)
        state = {
            "run": self.journal.run,
            "identity": self._whole_identity(),
            "sampler": self.sampler.state_dict(),
            "noise": noise,
            **more,
        }
        self.journal.begin(target, self.step)
        checkpoint.save(target, state)
        self.journal.saved(self.step)

    def _read(
        self, path: str | os.PathLike[str], parts: tuple[str, ...], *, allow: bool, writes: bool
    ) -> tuple[dict[str, Any], Journal]:
        """The content of a checkpoint that fits this run, and the journal to go on with. Nothing is changed yet."""
        state = checkpoint.load(path)
        try:
            run, told, sampler, noise = (state[name] for name in ("run", "identity", "sampler", "noise"))
            step, keys = noise["step"], (sampler["key"], noise["key"])
            for name in parts:
                state[name]
        except (KeyError, TypeError) as error:
            raise ValueError(f"checkpoint must be one that save() wrote, {path} has no {error}") from None
        for name, mine in self._whole_identity().items():
            if told.get(name) != mine:
                if name == "matrix":
                    raise ValueError(f"checkpoint must be of this mechanism, {path} has another matrix C ({mine[:8]}…)")
                raise ValueError(f"checkpoint must have {name} = {mine!r}, {path} has {told.get(name)!r}")
        if keys[0] != keys[1] or sampler["position"] != step:
            raise ValueError(f"checkpoint must hold batches and noise of one run at one step, {path} does not")
        return state, Journal.resume(Path(path), run, step, allow=allow, writes=writes)
