"""Hostile training loops: batches skipped, repeated or cut, runs saved and resumed in any order, with loader workers.

Every record pushes its own coordinate as hard as clipping allows, so that a released gradient shows who took part. What
is released at step t must be, bit for bit, what an honest loop releases there, and the same whenever step t is made
again; anything else must have been refused. A loop may change the sign of the gradients, which is an honest loop with
another loss, but not for a step that was released before.
"""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from soundness.judge import ANSWERED, HANG_SECONDS, REFUSED, Hang, Outcome, fault, watched

Rng = np.random.Generator
# What an honest loop releases at every step, with either sign of the gradients.
Honest = dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
RECORDS, EPOCHS, BATCHES = 14, 2, 4


def _private(seed: int, workers: int) -> Any:
    import torch

    import dpmf
    from dpmf.training import make_private

    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(EPOCHS, BATCHES))
    model = torch.nn.Linear(RECORDS, 1, bias=False)
    options: dict[str, Any] = {}
    if workers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.utils.data", "dpmf.training._loader"])
        options = {"num_workers": workers, "loader_options": {"multiprocessing_context": context}}
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.utils.data.TensorDataset(5.0 * torch.eye(RECORDS)),
        mechanism,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loss_reduction="sum",
        seed=seed,
        **options,
    )


class Loop:
    """A training loop that does as it is told, and what it has released."""

    def __init__(self, seed: int, workers: int, directory: Path) -> None:
        self.released: dict[int, np.ndarray[Any, Any]] = {}
        self.faults: list[str] = []
        self.refused = 0
        self.honest: Honest | None = None
        self._directory, self._sign = directory, 1.0
        self._runs: list[Any] = []
        self._use(_private(seed, workers))

    def _use(self, run: Any) -> None:
        if run not in self._runs:
            self._runs.append(run)
            update = run.optimizer.original_optimizer.step

            def recorded(*arguments: Any) -> Any:
                self._record(run.noise.step - 1, run.optimizer.params[0].grad.numpy().ravel().copy())
                return update(*arguments)

            run.optimizer.original_optimizer.step = recorded
        self.run, self._loader, self._batches, self._kept = run, run.data_loader, None, [None]

    def _record(self, step: int, gradient: np.ndarray[Any, Any]) -> None:
        if not np.array_equal(self.released.setdefault(step, gradient), gradient):
            self.faults.append(f"step {step} was released twice, differently")
        if self.honest is not None:
            plus, minus = self.honest[step]
            if not np.all((gradient == plus) | (gradient == minus)):
                self.faults.append(f"step {step} is not a step of the mechanism")

    def _next(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        self._kept.append(next(self._batches)[0])
        return self._kept[-1]

    def _backward(self, x: Any) -> None:
        (-self._sign * self.run.model(x).sum()).backward()

    def _step(self, *inputs: Any) -> None:
        self.run.optimizer.zero_grad()
        for x in inputs:
            self._backward(x)
        self.run.optimizer.step()

    # What can be done, each with a random generator.

    def step(self, rng: Rng) -> None:
        self._step(self._next())

    def skip(self, rng: Rng) -> None:
        self._next()

    def again(self, rng: Rng) -> None:
        if self._kept[-1] is not None:
            self._step(self._kept[-1])

    def an_old_one(self, rng: Rng) -> None:
        self._next()
        kept = self._kept[int(rng.integers(len(self._kept)))]
        if kept is not None:
            self._step(kept)

    def cut(self, rng: Rng) -> None:
        self._step(self._next()[:1])

    def twice(self, rng: Rng) -> None:
        x = self._next()
        self._step(x.repeat(2, 1))

    def accumulate(self, rng: Rng) -> None:
        self._step(self._next(), self._next())

    def restart(self, rng: Rng) -> None:
        self._batches = None

    def split(self, rng: Rng) -> None:
        self._loader = self.run.in_parts(int(rng.integers(1, 4)))
        if rng.random() < 0.5:
            self._batches = None

    def turn(self, rng: Rng) -> None:
        self._sign = -self._sign

    def save(self, rng: Rng) -> None:
        self.run.save(self._directory / f"checkpoint-{int(rng.integers(3))}")

    def load(self, rng: Rng) -> None:
        """Resume in this object or in another one, sometimes with the flag that permits a second continuation."""
        path = self._directory / f"checkpoint-{int(rng.integers(3))}"
        if path.exists():
            run = self.run if rng.random() < 0.5 else _private(99, int(rng.random() < 0.05))
            allow = bool(rng.random() < 0.15)
            run.load(path, allow_second_continuation=allow)
            if allow:  # nothing of the first continuation is shown to anybody
                self.released = {t: bits for t, bits in self.released.items() if t < run.steps_made}
            self._use(run)

    def an_older_object(self, rng: Rng) -> None:
        self._use(self._runs[int(rng.integers(len(self._runs)))])

    def to_the_end(self, rng: Rng) -> None:
        self._batches = None
        for (x,) in self._loader:
            self._step(x)

    def do(self, name: str, rng: Rng) -> None:
        from dpmf.errors import TrainingError

        try:
            getattr(self, name)(rng)
        except StopIteration:
            self._batches = None
        except (TrainingError, ValueError) as error:
            self.refused += 1
            if not str(error) or "\n" in str(error) or len(str(error)) > 600:
                self.faults.append(f"not one line: {error}")
            if rng.random() < 0.5:
                self._batches = None


ACTIONS = {
    "step": 10, "to_the_end": 1, "skip": 1, "again": 1, "an_old_one": 1, "cut": 1, "twice": 1, "accumulate": 1,
    "restart": 1, "split": 2, "turn": 1, "save": 3, "load": 3, "an_older_object": 1,
}  # fmt: skip


@functools.cache
def _honest(seed: int) -> Honest:
    found = []
    for sign in (1.0, -1.0):
        loop = Loop(seed, 0, Path())
        loop._sign = sign
        for _ in range(EPOCHS):
            loop.to_the_end(np.random.default_rng())
        found.append(loop.released)
    return {t: (found[0][t], found[1][t]) for t in range(EPOCHS * BATCHES)}


def training_loop(rng: Rng, index: int, directory: Path) -> Outcome:
    """A random sequence of actions: what was released is the mechanism accounted for, or it was refused."""
    import torch

    torch.set_num_threads(1)
    place = directory / f"loop-{index}"
    place.mkdir()
    seed, workers = index % 5, int(rng.choice([0, 1, 2], p=[0.8, 0.1, 0.1]))  # worker processes take time to start
    names, weights = list(ACTIONS), np.array(list(ACTIONS.values()), dtype=float)
    asked = [
        str(name) for name in rng.choice(names, int(rng.integers(5, 15 if workers else 40)), p=weights / weights.sum())
    ]
    try:
        with warnings.catch_warnings(), watched(HANG_SECONDS):
            warnings.simplefilter("ignore")
            loop = Loop(seed, workers, place)
            loop.honest = _honest(seed)
            for name in asked:
                loop.do(name, rng)
    except Hang:
        return fault(f"no answer within {HANG_SECONDS} s: {asked}")
    except Exception as error:
        return fault(f"{type(error).__name__}: {error}: {asked}")
    if loop.faults:
        return fault(f"{loop.faults[0]}: {workers} workers, {asked}")
    return REFUSED if loop.refused else ANSWERED
