"""Balls-in-bins batches: every record is thrown into one of b bins, once; batch t is bin t mod b, in every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.batching import BallsInBins
from dpmf.errors import TrainingError
from dpmf.mechanism import Mechanism
from dpmf.training._sources import ALLOCATION, SOURCES, make_source

IndexArray = np.ndarray[Any, np.dtype[np.int64]]
FORMAT = 1


class BallsInBinsSampler:
    """The batches that the accountants assume, as an iterable of one epoch.

    Give it to ``torch.utils.data.DataLoader(dataset, batch_sampler=sampler)``, which asks for nothing but iteration and
    a length, or take numpy index arrays from `batches()`. Iterating goes on where the last iteration stopped, to the
    end of the epoch; after N batches in all there are no more.

    Args:
      size: the number of records.
      batching: a `BallsInBins`, or the `Mechanism` it belongs to.
      seed: an integer for experiments that are to be repeated. By default a secret from the operating system: who knows
        the seed knows who was in which batch, and the amplification is gone.
      source: "fast", or "secure" for a cryptographically secure generator.
      rank: which of several processes this is; each takes its share of every batch (same seed in all of them).
      world_size: how many processes there are.

    **Formal guarantees.** Bins are independent and uniform (up to the generator). Every record is in exactly the
    batches i, i + b, i + 2b, ... < N of its bin i. Batch sizes vary, and an empty bin is an empty batch: leaving it
    out, or dividing by the actual size, would not be what was accounted for.
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
        self.size = validation.integer("size", size, at_least=1)
        b = batching.batches_per_epoch
        if self.size < b:
            raise ValueError(f"dataset must have at least as many records as batches_per_epoch = {b}, got {self.size}")
        self.world_size = validation.integer("world_size", world_size, at_least=1)
        self.rank = validation.integer("rank", rank, at_least=0, at_most=self.world_size - 1)
        self._source = make_source(source, seed)
        self._set_bins(self._source.integers(ALLOCATION, b, self.size))
        self._position = 0
        self._follow: Callable[[], int] | None = None

    def _set_bins(self, bins: IndexArray) -> None:
        self._bins = bins.astype(np.min_scalar_type(self.batching.batches_per_epoch - 1))
        order = np.argsort(self._bins, kind="stable")
        ends = np.cumsum(np.bincount(self._bins, minlength=self.batching.batches_per_epoch))
        self._members = np.split(order.astype(np.int64), ends[:-1])

    @property
    def expected_batch_size(self) -> float:
        """n/b: what the sum of clipped gradients is divided by. The actual size of a batch depends on the data."""
        return self.size / self.batching.batches_per_epoch

    @property
    def position(self) -> int:
        """The iteration whose batch comes next."""
        return self._position

    @property
    def bins(self) -> IndexArray:
        """The bin of every record. As sensitive as the data: for tests and audits."""
        return self._bins.astype(np.int64)

    def batch(self, iteration: int) -> IndexArray:
        """The records (this process's share of them) of one iteration."""
        t = validation.integer("iteration", iteration, at_least=0, at_most=self.batching.iterations - 1)
        return self._members[t % self.batching.batches_per_epoch][self.rank :: self.world_size]

    def batches(self) -> Iterator[IndexArray]:
        """All batches still to come, up to iteration N, as index arrays."""
        while self._position < self.batching.iterations:
            t = self._position
            self._position += 1
            yield self.batch(t)

    def __len__(self) -> int:
        """Batches per epoch."""
        return self.batching.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self._follow is not None:
            self._position = self._follow()
        b = self.batching.batches_per_epoch
        end = min((self._position // b + 1) * b, self.batching.iterations)
        if self._position >= self.batching.iterations:
            raise TrainingError(
                f"all {self.batching.iterations} iterations that were accounted for have been made: "
                "another epoch would not be covered by the guarantee"
            )
        while self._position < end:
            t = self._position
            self._position += 1
            yield self.batch(t).tolist()

    def follow(self, step: Callable[[], int]) -> None:
        """Let every new iteration begin at the step training is at, wherever the last one was left."""
        self._follow = step

    def seek(self, iteration: int) -> None:
        """Make `iteration` the next one."""
        self._position = validation.integer("iteration", iteration, at_least=0, at_most=self.batching.iterations)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and one array. Keep it as secret as the data."""
        return {
            "format": FORMAT,
            "size": self.size,
            "allocation": [self.batching.epochs, self.batching.batches_per_epoch, self.batching.iterations],
            "source": self._source.name,
            "key": self._source.key.hex(),
            "bins": self._bins.copy(),
            "digest": self._digest(self._bins),
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same batching over as many records; rank and world size stay as they are."""
        try:
            format_, size, batching = state["format"], state["size"], list(state["allocation"])
            bins, position = np.asarray(state["bins"]), state["position"]
            source, key, digest = state["source"], bytes.fromhex(state["key"]), state["digest"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state must be one that state_dict() gave: {type(error).__name__} {error}") from None
        if format_ != FORMAT or source not in SOURCES:
            raise ValueError(f"state must be of format {FORMAT}, got format {format_!r} with source {source!r}")
        mine = [self.batching.epochs, self.batching.batches_per_epoch, self.batching.iterations]
        if size != self.size or batching != mine:
            raise ValueError(
                f"state must be of {self.size} records with (k, b, N) = {tuple(mine)}, "
                f"got {size} records with {tuple(batching)}"
            )
        whole = bins.shape == (self.size,) and bins.dtype.kind == "u" and bins.max() < mine[1]
        if not whole or self._digest(bins) != digest:
            raise ValueError("state must hold the bins it was saved with, these were changed")
        at = validation.integer("position", position, at_least=0, at_most=mine[2])
        self._source = SOURCES[source](key)
        self._set_bins(bins.astype(np.int64))
        self._position = at

    @staticmethod
    def _digest(bins: np.ndarray[Any, Any]) -> str:
        return hashlib.sha256(bins.astype("<u8").tobytes()).hexdigest()
