"""The noise C⁻¹Z, one row per iteration, in bounded memory. `dpmf.strategies.streaming` says how.

The iterations between two throws, which use no record, have rows like all others. Their rows are added to that of the
next step, so that there is one array of noise for every batch (`_schedule`).

Rows have unit scale: multiply them by noise multiplier × clipping norm before adding them to the sum of clipped
gradients. C is the strategy as given, for which the noise multiplier was calibrated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Strategy, ToeplitzStrategy, block_rows
from dpmf.strategies.streaming import MAX_COPIES, make_plan
from dpmf.training import _backends
from dpmf.training._schedule import Schedule, description
from dpmf.training._sources import SOURCES, make_source

FORMAT = 2

# Called with (array, first element, piece of the row). The piece is overwritten later, so it must be used at once.
Consumer = Callable[[int, int, Any], None]


def strategy_digest(strategy: Strategy, iterations: int) -> str:
    """A digest of the entries of C, whatever the strategy is called."""
    digest = hashlib.sha256(f"{iterations}:".encode())
    if isinstance(strategy, ToeplitzStrategy):
        digest.update(np.ascontiguousarray(strategy.strategy_coef(iterations), dtype="<f8").tobytes())
    else:
        for _, block in strategy.rows(iterations, block_rows(iterations)):
            digest.update(np.ascontiguousarray(block, dtype="<f8").tobytes())
    return digest.hexdigest()


class NoiseStream:
    """The rows of C⁻¹Z for arrays of given shapes, one step at a time, never more than there are.

    A step has one row, except for the first one after a gap between throws, which has the sum of its own row and of
    those of the gap.

    Args:
      mechanism: its strategy is C, and its batching says how many iterations there are and which of them are a gap.
      shapes: the shapes of the arrays that need noise, e.g. those of the parameters.
      seed: an integer that makes an experiment repeatable; by default a secret from the operating system.
      source: "fast", or "secure" for a cryptographically secure generator (CPU only, several times slower).
      dtype: the precision of the noise, "float32" or "float64".
      backend: "numpy" or "torch".
      device: with torch, where the noise is made.
      max_copies: strategies that would keep more copies of the model are streamed by regeneration.

    **Formal guarantees.** In exact arithmetic the rows are those of C⁻¹Z, where Z has independent standard normal
    entries and C is the strategy as given; every row, also of a gap, is part of the noise of exactly one step. In
    floating point each row has a relative error of order p·2⁻²⁴ (float32) or p·2⁻⁵³ (float64). A restored stream gives
    the same bits as one that was never interrupted.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        shapes: Sequence[Sequence[int]],
        *,
        seed: int | bytes | None = None,
        source: str = "fast",
        dtype: str = "float32",
        backend: str = "numpy",
        device: Any = None,
        max_copies: int = MAX_COPIES,
    ):
        if not isinstance(mechanism, Mechanism):
            raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
        self.mechanism = mechanism
        self.iterations = mechanism.batching.iterations
        self._schedule = Schedule.of(mechanism.batching)
        self.steps = self._schedule.steps
        self.shapes = [tuple(validation.integer("shapes", n, at_least=0) for n in shape) for shape in shapes]
        self.dtype = validation.choice("dtype", dtype, ("float32", "float64"))
        limit = validation.integer("max_copies", max_copies, at_least=0)
        self.plan = make_plan(mechanism.strategy, self.iterations, limit)
        self._source = make_source(source, seed)
        self._backend = _backends.make(backend, self.dtype, device)
        self._step = 0
        self._broken = False
        self._kept: list[list[Any]] | None = None

    @property
    def _past(self) -> list[list[Any]]:
        """The arrays kept between steps. They are made when first needed: a stream that only counts takes no memory."""
        if self._kept is None:
            sizes = [math.prod(shape) for shape in self.shapes]
            self._kept = [[self._backend.zeros(size) for _ in range(self.plan.copies)] for size in sizes]
        return self._kept

    @property
    def step(self) -> int:
        """The step whose noise comes next, which is also the number of steps made so far."""
        return self._step

    @property
    def state_bytes(self) -> int:
        """The memory kept between steps, in bytes."""
        return sum(math.prod(shape) for shape in self.shapes) * self.plan.copies * np.dtype(self.dtype).itemsize

    def next(self) -> list[Any]:
        """The noise of the next step, as new arrays of the shapes given at the beginning."""
        out = [self._backend.empty(math.prod(shape)) for shape in self.shapes]

        def take(array: int, start: int, piece: Any) -> None:
            out[array][start : start + len(piece)] = piece

        self.feed(take)
        return [row.reshape(shape) for row, shape in zip(out, self.shapes, strict=True)]

    def feed(self, take: Consumer) -> None:
        """Compute the noise of the next step piece by piece, without an array of the model's size in between.

        Args:
          take: called with each piece as `take(array, first element, piece)`.
        """
        if self._broken:
            raise TrainingError("the noise of the last step was interrupted half-way: restore a saved state")
        self._check_not_finished()
        self._broken = True
        rows = self._schedule.rows(self._step)
        for array, shape in enumerate(self.shapes):
            size = math.prod(shape)
            width = self._backend.chunk
            for chunk, start in enumerate(range(0, size, width)):
                stop = min(start + width, size)
                piece = self._piece(rows[0], array, chunk, start, stop)
                if len(rows) > 1:
                    total = self._backend.scratch("rows", stop - start)
                    self._backend.assign(total, piece, 1.0)
                    for t in rows[1:]:
                        self._backend.add(total, self._piece(t, array, chunk, start, stop), 1.0)
                    piece = total
                if self.plan.scale != 1.0:
                    piece = self._backend.scaled(piece, self.plan.scale)
                take(array, start, piece)
        self._step += 1
        self._broken = False

    def skip(self) -> None:
        """Count a step without computing its noise, for the ranks that add no noise in distributed training."""
        self._check_not_finished()
        self._step += 1

    def _check_not_finished(self) -> None:
        if self._step >= self.steps:
            raise TrainingError(
                f"all {self.steps} steps that were accounted for have been made: "
                "another step would not be covered by the guarantee"
            )

    def _piece(self, t: int, array: int, chunk: int, start: int, stop: int) -> Any:
        backend, plan = self._backend, self.plan
        past = [kept[start:stop] for kept in self._past[array]]
        m = len(past)
        if plan.method == "regeneration":
            total = backend.scratch("total", stop - start)
            total[:] = 0.0
            for j, weight in enumerate(plan.weights[t, : t + 1]):
                if weight != 0.0:
                    z = self._draw(j, array, chunk, stop - start)
                    backend.add(total, z, float(weight))
            return total
        if plan.method == "convolution":
            weights = plan.row(t)
            out = backend.scratch("total", stop - start)
            if m == 0:
                z = self._draw(t, array, chunk, stop - start)
                backend.assign(out, z, float(weights[0]))
                return out
            backend.assign(out, past[t % m], float(weights[m]))
            # The oldest normals are not needed any more, and the new ones take their place.
            backend.normals(self._source, t, array, chunk, past[t % m])
            for j in range(m):
                backend.add(out, past[(t - j) % m], float(weights[j]))
            return out
        z = self._draw(t, array, chunk, stop - start)
        if plan.method == "buffers":
            decay, weight = plan.weights
            for kept, w in zip(past, weight, strict=True):
                backend.add(z, kept, -float(w))
            for kept, r in zip(past, decay, strict=True):
                backend.assign(kept, kept, float(r))
                backend.add(kept, z, 1.0)
            return z
        weights = plan.row(t)
        if m == 0:
            if weights[0] != 1.0:
                backend.assign(z, z, 1.0 / float(weights[0]))
            return z
        new = past[t % m]  # it holds row t − m, which is used for the last time here
        backend.assign(new, new, -float(weights[m]) / float(weights[0]))
        for j in range(1, m):
            backend.add(new, past[(t - j) % m], -float(weights[j]) / float(weights[0]))
        backend.add(new, z, 1.0 / float(weights[0]))
        return new

    def _draw(self, t: int, array: int, chunk: int, size: int) -> Any:
        out = self._backend.scratch("z", size)
        self._backend.normals(self._source, t, array, chunk, out)
        return out

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with this stream."""
        return {
            "format": FORMAT,
            "strategy": strategy_digest(self.mechanism.strategy, self.iterations),
            "batching": description(self.mechanism.batching),
            "method": self.plan.method,
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": self.dtype,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and arrays. Whoever has it can remove the noise: it is as secret as the data."""
        if self._broken:
            raise TrainingError("the noise of the last step was interrupted half-way: there is no state to save")
        return {
            **self._identity,
            "generator": self._backend.generator(self._source),
            "source": self._source.name,
            "key": self._source.key.hex(),
            "probe": self._source.probe(),
            "step": self._step,
            "past": [[self._backend.to_numpy(kept) for kept in arrays] for arrays in self._past],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step_only: bool = False) -> None:
        """Continue from a saved state. One that would not continue the same mechanism is refused.

        Args:
          state: what `state_dict` returned.
          step_only: leave the arrays alone, for ranks that add no noise.
        """
        try:
            told = {name: state[name] for name in self._identity}
            source, key, step, past = state["source"], bytes.fromhex(state["key"]), state["step"], state["past"]
            probe, generator = state["probe"], state["generator"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                "state", f"must be one that state_dict() returned: {type(error).__name__} {error}"
            ) from None
        for name, value in self._identity.items():
            if told[name] != value:
                what = "matrix C" if name == "strategy" else name
                raise ArgumentError("state", f"must be of this mechanism and model, but its {what} is another")
        if source not in SOURCES:
            raise ArgumentError("state", f"must have a source among {', '.join(SOURCES)}, got {source!r}")
        at = validation.integer("step", step, at_least=0, at_most=self.steps)
        restored = SOURCES[source](key)
        if restored.probe() != probe or self._backend.generator(restored) != generator:
            raise ArgumentError(
                "state", "must be continued with the generator that made it; this version or device differs"
            )
        if not step_only:
            if [len(arrays) for arrays in past] != [self.plan.copies] * len(self.shapes) or any(
                np.shape(a) != (math.prod(shape),) or str(np.asarray(a).dtype) != self.dtype
                for arrays, shape in zip(past, self.shapes, strict=True) for a in arrays
            ):  # fmt: skip
                raise ArgumentError("state", "must hold the past of every parameter, this one does not")
            self._kept = [[self._backend.from_numpy(np.asarray(a)) for a in arrays] for arrays in past]
        self._source, self._step, self._broken = restored, at, False
