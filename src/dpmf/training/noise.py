"""The noise C⁻¹Z, one row per iteration, in bounded memory. `dpmf.strategies.streaming` says how.

The iterations between two throws, which use no record, have rows like all others. A weighted sum of them is added to
that of the next step, so that there is one array of noise for every batch (`_schedule`, `dpmf.strategies.settling`).

Rows have unit scale: multiply them by noise multiplier × clipping norm before adding them to the sum of clipped
gradients. C is the strategy as given, for which the noise multiplier was calibrated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.run import only_mechanism
from dpmf.strategies.streaming import MAX_COPIES, make_plan
from dpmf.training import _backends
from dpmf.training._schedule import Schedule
from dpmf.training._shards import Shard
from dpmf.training._sources import SOURCES, make_source

# What a state holds, and the noise of a key. Formats 1 and 2 drew normals from numpy's SFC64. Format 3 drew from ChaCha
# in double precision; in format 4 single-precision normals got a transform of their own, in format 5 longer tails.
FORMAT = 5

# Called with (array, first element, piece of the row). The piece is overwritten later, so it must be used at once.
Consumer = Callable[[int, int, Any], None]


class NoiseStream:
    """The rows of C⁻¹Z for arrays of given shapes, one step at a time, never more than there are.

    A step has one row, except for the first one after a gap between throws, which has its own row and a weighted sum of
    those of the gap. If the gap is as long as the memory of C, the noise of a throw is settled by that: the weights
    leave the least of it in the model, and the rows of the next throw are C⁻¹ applied to new normals only. With a
    shorter gap the weights are 1, and C⁻¹ goes on.

    Args:
      mechanism: its strategy is C, and its batching says how many iterations there are and which of them are a gap.
      shapes: the shapes of the arrays that need noise, e.g. those of the parameters.
      shards: for every array the part of it that this process draws and keeps, if not all of it
        (`dpmf.training.sharding`). All processes need the same `seed`.
      seed: an integer that makes an experiment repeatable; by default a secret from the operating system.
      source: "fast" (ChaCha with 8 rounds), or "secure" (ChaCha20; on a CPU, or with Triton on a GPU).
      dtype: the precision of the noise, "float32" or "float64".
      backend: "numpy" or "torch".
      device: with torch, where the noise is made.
      max_copies: strategies that would keep more copies of the model are streamed by regeneration.

    **Formal guarantees.** In exact arithmetic the rows are those of C⁻¹Z, where Z has independent standard normal
    entries and C is the strategy as given; every row, also of a gap, is part of the noise of exactly one step, with
    some weight. So what training releases is a function of C·x + Z (docs/theory/batchings.md, "Settling"). In floating
    point each row has a relative error of order p·2⁻²⁴ (float32) or p·2⁻⁵³ (float64). A restored stream gives
    the same bits as one that was never interrupted, and the shards of an array have the bits of the whole array.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        shapes: Sequence[Sequence[int]],
        *,
        shards: Sequence[Shard] | None = None,
        seed: int | bytes | None = None,
        source: str = "fast",
        dtype: str = "float32",
        backend: str = "numpy",
        device: Any = None,
        max_copies: int = MAX_COPIES,
    ):
        only_mechanism(mechanism)
        self.mechanism = mechanism
        self.iterations = mechanism.batching.iterations
        self._schedule = Schedule.of(mechanism.batching)
        self.steps = self._schedule.steps
        self.shapes = [tuple(validation.integer("shapes", n, at_least=0) for n in shape) for shape in shapes]
        self.shards = [Shard.all_of(shape) for shape in self.shapes] if shards is None else list(shards)
        if len(self.shards) != len(self.shapes) or any(
            not shard.is_inside or math.prod(shard.whole) != math.prod(shape)
            for shard, shape in zip(self.shards, self.shapes, strict=False)
        ):
            raise ArgumentError("shards", "must be a part of every array, these are of other arrays")
        self.dtype = validation.choice("dtype", dtype, ("float32", "float64"))
        limit = validation.integer("max_copies", max_copies, at_least=0)
        self.plan = make_plan(mechanism.strategy, self.iterations, limit)
        self._source = make_source(source, seed)
        self._backend: Any = _backends.make(backend, self.dtype, device)
        self._step = 0
        self._broken = False
        self._kept: list[Any] | None = None
        self._row_weights: tuple[int, Any] | None = None
        self.complete = shards is None  # whether the shards of all ranks are known to make up the arrays

    @property
    def _past(self) -> list[Any]:
        """What is kept of every array between steps, one row per copy. It is made when it is first needed."""
        if self._kept is None:
            self._kept = [self._backend.kept(self.plan.copies, shard.size) for shard in self.shards]
        return self._kept

    @property
    def step(self) -> int:
        """The step whose noise comes next, which is also the number of steps made so far."""
        return self._step

    @property
    def reach(self) -> float:
        """Where the normals end that rows are made from, in standard deviations."""
        return float(self._backend.reach)

    @property
    def state_bytes(self) -> int:
        """The memory that this process keeps between steps, in bytes."""
        return sum(shard.size for shard in self.shards) * self.plan.copies * np.dtype(self.dtype).itemsize

    def next(self) -> list[Any]:
        """The noise of the next step, as new arrays of the shapes given at the beginning, or of their shards."""
        out = [self._backend.empty(shard.size) for shard in self.shards]

        def take(array: int, start: int, piece: Any) -> None:
            out[array][start : start + len(piece)] = piece

        self.feed(take)
        return [row.reshape(shard.shape) for row, shard in zip(out, self.shards, strict=True)]

    def feed(self, take: Consumer) -> None:
        """Compute the noise of the next step piece by piece, without an array of the model's size in between.

        Args:
          take: called with each piece as `take(array, first element, piece)`. If there are shards, elements are those
            of the shard.
        """
        with self._one_step() as rows:
            for array, shard in enumerate(self.shards):
                if self._backend.fused:
                    whole = self._backend.kept(1, shard.size)[0]
                    self._add_rows(rows, array, whole, self.plan.scale)
                    take(array, 0, whole)
                    continue
                for start in range(0, shard.size, self._backend.chunk):
                    count = min(self._backend.chunk, shard.size - start)
                    take(array, start, self._backend.handed_over(self._sum(rows, array, start, count)))

    def add_to(self, targets: Sequence[Any], scale: float) -> None:
        """Add `scale` times the noise of the next step to flat torch tensors, one for every shard, in place."""

        def take(array: int, start: int, piece: Any) -> None:
            target = targets[array]
            target[start : start + len(piece)].add_(piece.to(target.device), alpha=scale)

        if not all(self._backend.fused and self._backend.can_add_to(target) for target in targets):
            self.feed(take)
            return
        with self._one_step() as rows:
            for array, target in enumerate(targets):
                self._add_rows(rows, array, target, scale * self.plan.scale)

    @contextlib.contextmanager
    def _one_step(self) -> Iterator[list[tuple[int, float]]]:
        """The rows of the next step and their weights; the step is made at the end of the block."""
        if self._broken:
            raise TrainingError("the noise of the last step was interrupted half-way: restore a saved state")
        if self._step >= self.steps:
            raise TrainingError(
                f"all {self.steps} steps that were accounted for have been made: "
                "another step would not be covered by the guarantee"
            )
        self._broken = True
        rows = self._schedule.rows(self._step)
        settling = self.mechanism.settling
        gap = np.ones(len(rows) - 1) if settling is None else settling.weights[: len(rows) - 1]
        yield list(zip(rows, [*gap.tolist(), 1.0], strict=True))
        self._step += 1
        self._broken = False

    def _place(self, t: int) -> tuple[int, int]:
        """The row at which the noise that row t is made from begins, and the place of row t after it."""
        settling = self.mechanism.settling
        place = t if settling is None else t % settling.rows
        return t - place, place

    def _add_rows(self, rows: list[tuple[int, float]], array: int, target: Any, factor: float) -> None:
        """Add rows of the noise of an array to a tensor on the device, by a kernel that does everything."""
        last = self.iterations - 1
        for t, weight in rows:
            first, place = self._place(t)
            if place == 0 < first:
                self._past[array][:] = 0
            self._backend.add_row(
                target, weight * factor, self._source, self.plan, lambda at: self._weights(min(at, last)), first,
                place, array, self.shards[array], self._past[array],
            )  # fmt: skip

    def _sum(self, rows: list[tuple[int, float]], array: int, start: int, count: int) -> Any:
        """The weighted sum of some elements of several rows; a single row has weight 1."""
        piece = self._piece(rows[0][0], array, start, count)
        if len(rows) > 1:
            total = self._backend.kept(1, count)[0]
            self._backend.add(total, piece, rows[0][1])
            for t, weight in rows[1:]:
                self._backend.add(total, self._piece(t, array, start, count), weight)
            piece = total
        return piece if self.plan.scale == 1.0 else self._backend.scaled(piece, self.plan.scale)

    def _piece(self, t: int, array: int, start: int, count: int) -> Any:
        """Elements start ... of this process's part of row t of C⁻¹Z, unscaled. The next call overwrites them."""
        backend, plan = self._backend, self.plan
        shard = self.shards[array]
        runs, whole = shard.runs(start, count), math.prod(shard.whole)
        first, place = self._place(t)
        if plan.method == "regeneration":
            weights = plan.weights[place, : place + 1]
            total = backend.kept(1, count)[0]
            for j in np.flatnonzero(weights):
                backend.add(total, backend.draw(self._source, first + int(j), array, whole, runs), float(weights[j]))
            return total
        z = backend.draw(self._source, t, array, whole, runs)
        kept = self._past[array]
        if place == 0 < first:  # the noise of the throw before has been settled
            kept[:, start : start + count] = 0
        if plan.method == "buffers":
            backend.drain(z, kept, start, *plan.weights.astype(self.dtype))
            return z
        if plan.copies or self._weights(place)[0] != 1.0:
            return backend.combine(z, kept, start, place, self._weights(place), plan.method == "back-substitution")
        return z

    def _weights(self, t: int) -> Any:
        """The factors of the normals of row t, and of what was kept 1, 2, ... steps before."""
        if self._row_weights is None or self._row_weights[0] != t:
            weights = self.plan.row(t)
            if self.plan.method == "back-substitution":
                weights = np.append(1.0, -weights[1:]) / weights[0]
            self._row_weights = t, weights.astype(self.dtype)
        return self._row_weights[1]

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with this stream."""
        settled = {} if self.mechanism.settling is None else {"gaps": "settled"}
        return {
            **settled,
            "strategy": self.mechanism.description["matrix"],
            "batching": self.mechanism.description["batching"],
            "method": self.plan.method,
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": self.dtype,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and arrays. Whoever has it can remove the noise: it is as secret as the data."""
        if self._broken:
            raise TrainingError("the noise of the last step was interrupted half-way: there is no state to save")
        return {
            "format": FORMAT,
            **self._identity,
            "generator": self._backend.generator(self._source),
            "source": self._source.name,
            "key": self._source.key.hex(),
            "probe": self._source.probe(),
            "step": self._step,
            "shards": [[list(part) for part in (shard.whole, shard.offset, shard.shape)] for shard in self.shards],
            "past": [self._backend.to_numpy(kept) for kept in self._past],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. One that would not continue the same mechanism is refused.

        Args:
          state: what `state_dict` returned. It may be that of other shards if they contain the ones of this stream.
        """
        self.prepared([state])()

    def prepared(self, states: Iterable[Mapping[str, Any]]) -> Callable[[], None]:
        """Read the states of several processes that together hold everything this stream keeps.

        Args:
          states: what `state_dict` returned in each of them, in any order. They are used one after the other, so that
            an iterator that reads files needs the memory of one.

        Returns:
          A function that makes this stream continue from there. Until it is called, nothing is changed.
        """
        first: dict[str, Any] | None = None
        found = [0] * len(self.shards)
        seen: set[tuple[int, Shard]] = set()  # ranks may hold the same shard
        kept = [np.empty((self.plan.copies, shard.size), self.dtype) for shard in self.shards]
        for state in states:
            told = self._checked(state)
            if first is None:
                first = told
            elif any(told[name] != first[name] for name in ("key", "source", "step")):
                raise ArgumentError("state", "must be that of one run at one step on every rank, these are of several")
            for array, (mine, theirs) in enumerate(zip(self.shards, told["shards"], strict=True)):
                for to, start, count in () if (array, theirs) in seen else mine.overlap(theirs):
                    kept[array][:, to : to + count] = told["past"][array][:, start : start + count]
                    found[array] += count
                seen.add((array, theirs))
        if first is None or any(n != shard.size for n, shard in zip(found, self.shards, strict=True)):
            raise ArgumentError(
                "state", "must hold the past of every parameter, this one is of other shards or of too few ranks"
            )
        rows, source, step = [self._backend.from_numpy(rows) for rows in kept], first["source"], first["step"]
        key = first["key"]

        def commit() -> None:
            self._kept, self._source, self._step, self._broken = rows, SOURCES[source](key), step, False

        return commit

    def _checked(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a state that this stream can go on from; otherwise ArgumentError."""
        try:
            if state["format"] != FORMAT:
                raise ArgumentError(
                    "state", f"must have format {FORMAT}, but its format is {state['format']}: another version of dpmf "
                    "wrote it, which draws other noise; finish the run with that version",
                )  # fmt: skip
            told = {name: state[name] for name in self._identity}
            source, key, past = state["source"], bytes.fromhex(state["key"]), state["past"]
            probe, generator, step = state["probe"], state["generator"], state["step"]
            shards = [Shard(*(tuple(map(int, part)) for part in parts)) for parts in state["shards"]]
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
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
        if len(shards) != len(self.shapes) or len(past) != len(shards) or any(
            not shard.is_inside
            or math.prod(shard.whole) != math.prod(shape)
            or np.shape(rows) != (self.plan.copies, shard.size)
            or str(np.asarray(rows).dtype) != self.dtype
            for shard, shape, rows in zip(shards, self.shapes, past, strict=True)
        ):  # fmt: skip
            raise ArgumentError("state", "must hold the past of every parameter, this one does not")
        return {"source": source, "key": key, "step": at, "shards": shards, "past": past}
