"""Balls-in-bins batches: every record is assigned to one of b bins at random, once; batch t consists of bin t mod b."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.batching import AnyBatching, BallsInBins
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.training._sources import ALLOCATION, SOURCES, make_source

IndexArray = np.ndarray[Any, np.dtype[np.int64]]
FORMAT = 2


def description(batching: AnyBatching) -> dict[str, Any]:
    """A batching as plain values, for checkpoints."""
    return {"kind": type(batching).__name__, **asdict(batching)}


class BallsInBinsSampler:
    """The batches that the accountants assume, as an iterable of one epoch.

    Give it to ``torch.utils.data.DataLoader(dataset, batch_sampler=sampler)``, or take numpy arrays of indices from
    `batches()`. A new iteration begins where the last one stopped and goes to the end of the epoch. After N batches in
    all, iterating raises `TrainingError`.

    Args:
      size: the number of records.
      batching: a `BallsInBins`, or the `Mechanism` it belongs to.
      seed: an integer that makes an experiment repeatable. By default the bins are drawn from a secret of the operating
        system. Whoever knows the seed knows which record was in which batch, and amplification by sampling is lost.
      source: "fast", or "secure" for a cryptographically secure generator.
      rank: the rank of this process in distributed training. Each rank gets its share of every batch; all ranks must
        have the same seed.
      world_size: the number of processes.

    **Formal guarantees.** Bins are independent and uniform, up to the quality of the generator. Every record takes part
    in exactly the iterations i, i + b, i + 2b, ... < N of its bin i. Batch sizes vary, and an empty bin is an empty
    batch. To leave it out, or to divide by the actual batch size, would not be the mechanism accounted for.
    """

    def __init__(
        self,
        size: int,
        batching: BallsInBins | Mechanism,
        *,
        seed: int | bytes | None = None,
        source: str = "fast",
        rank: int = 0,
        world_size: int = 1,
    ):
        given = batching.batching if isinstance(batching, Mechanism) else batching
        if not isinstance(given, BallsInBins):
            raise validation.wrong("batching", "a BallsInBins or a Mechanism", given)
        if not given.fixed:
            raise validation.wrong("batching", "balls in bins that are kept over all epochs", given)
        batching = given
        self.batching = batching
        self.iterations = batching.iterations
        self.size = validation.integer("size", size, at_least=1)
        b = batching.batches_per_epoch
        if self.size < b:
            raise ArgumentError(
                "dataset", f"must have at least as many records as batches_per_epoch = {b}, got {self.size}"
            )
        self.world_size = validation.integer("world_size", world_size, at_least=1)
        self.rank = validation.integer("rank", rank, at_least=0, at_most=self.world_size - 1)
        self._source = make_source(source, seed)
        self._set_bins(self._source.integers(ALLOCATION, b, self.size))
        self._position = 0

    def _set_bins(self, bins: IndexArray) -> None:
        self._bins = bins.astype(np.min_scalar_type(self.batching.batches_per_epoch - 1))
        order = np.argsort(self._bins, kind="stable")
        ends = np.cumsum(np.bincount(self._bins, minlength=self.batching.batches_per_epoch))
        self._members = np.split(order.astype(np.int64), ends[:-1])

    @property
    def expected_batch_size(self) -> float:
        """n/b, by which the sum of clipped gradients is divided. The actual size of a batch depends on the data."""
        return self.size / self.batching.batches_per_epoch

    @property
    def position(self) -> int:
        """The iteration whose batch comes next."""
        return self._position

    @property
    def bins(self) -> IndexArray:
        """The bin of every record, for tests and audits. It is as sensitive as the data."""
        return self._bins.astype(np.int64)

    def batch(self, iteration: int) -> IndexArray:
        """The records of one iteration (this rank's share of them), in increasing order."""
        t = validation.integer("iteration", iteration, at_least=0, at_most=self.iterations - 1)
        return self._members[t % self.batching.batches_per_epoch][self.rank :: self.world_size]

    def epoch_from(self, iteration: int) -> range:
        """The iterations from this one to the end of its epoch.

        Args:
          iteration: where to begin.

        Returns:
          The numbers of the iterations; `TrainingError` is raised when all N iterations have been made.
        """
        if iteration >= self.iterations:
            raise TrainingError(
                f"all {self.iterations} iterations that were accounted for have been made: "
                "another epoch would not be covered by the guarantee"
            )
        b = self.batching.batches_per_epoch
        return range(iteration, min((iteration // b + 1) * b, self.iterations))

    def batches(self) -> Iterator[IndexArray]:
        """All batches from the current position to iteration N, as arrays of indices."""
        while self._position < self.iterations:
            self._position += 1
            yield self.batch(self._position - 1)

    def __len__(self) -> int:
        """The number of batches per epoch."""
        return self.batching.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        for t in self.epoch_from(self._position):
            self._position = t + 1
            yield self.batch(t).tolist()

    def seek(self, iteration: int) -> None:
        """Make `iteration` the next one."""
        self._position = validation.integer("iteration", iteration, at_least=0, at_most=self.iterations)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and one array. It is as secret as the data."""
        return {
            "format": FORMAT,
            "size": self.size,
            "batching": description(self.batching),
            "source": self._source.name,
            "key": self._source.key.hex(),
            "bins": self._bins.copy(),
            "digest": _digest(self._bins),
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same batching and number of records. Rank and world size stay.

        Args:
          state: what `state_dict` returned. A state that does not fit is refused, and nothing is changed.
        """
        try:
            format_, size, batching, position = (state[n] for n in ("format", "size", "batching", "position"))
            bins, source, key, digest = np.asarray(state["bins"]), state["source"], state["key"], state["digest"]
            key = bytes.fromhex(key)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                "state", f"must be one that state_dict() returned: {type(error).__name__} {error}"
            ) from None
        if format_ != FORMAT or source not in SOURCES:
            raise ArgumentError(
                "state", f"must be of format {FORMAT}, got format {format_!r} with source {source!r}"
            )  # fmt: skip
        mine = description(self.batching)
        if size != self.size or batching != mine:
            raise ArgumentError("state", f"must be of {self.size} records and {mine}, got {size} and {batching}")
        b = self.batching.batches_per_epoch
        if bins.shape != (self.size,) or bins.dtype.kind != "u" or bins.max() >= b or _digest(bins) != digest:
            raise ArgumentError("state", "must hold the bins it was saved with, these were changed")
        at = validation.integer("position", position, at_least=0, at_most=self.iterations)
        self._source = SOURCES[source](key)
        self._set_bins(bins.astype(np.int64))
        self._position = at


def _digest(bins: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(bins.astype("<u8").tobytes()).hexdigest()
