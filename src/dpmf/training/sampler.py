"""Batches for every batching: balls in bins, thrown once or anew every few epochs, with strides, and Poisson sampling.

In every draw each record gets a bin, and step t uses those whose bin is t mod b. Balls in bins draw once per throw.
Poisson sampling draws before every step (with period q, before every q-th) and uses only the first bin (the first q
bins), which a record hits with probability 1/b (a record of group r hits bin r with probability q/b).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.batching import BallsInBins, Batching, Poisson, description
from dpmf.cut import checked_cut
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.run import Run
from dpmf.training._schedule import Schedule
from dpmf.training._sources import ALLOCATION, GROUPS, SOURCES, Source, make_source
from dpmf.training._units import Units

IndexArray = np.ndarray[Any, np.dtype[np.int64]]
FORMAT = 3


class BatchSampler:
    """The batches that the accountants assume, as an iterable of one epoch.

    Give it to ``torch.utils.data.DataLoader(dataset, batch_sampler=sampler)``, or take numpy arrays of indices from
    `batches()`. A new iteration begins where the last one stopped and goes to the end of the epoch. After the last
    batch of the last epoch, iterating raises `TrainingError`. The iterations of a gap have no batch: `NoiseStream` adds
    their noise to that of the next batch.

    Args:
      size: the number of records.
      batching: a `BallsInBins`, a `Poisson`, or the `Mechanism` it belongs to.
      seed: an integer that makes an experiment repeatable. By default the batches are drawn from a secret of the
        operating system. Whoever knows the seed knows which record was in which batch, and amplification by sampling is
        lost.
      source: "fast", or "secure" for a cryptographically secure generator.
      rank: the rank of this process in distributed training. Each rank gets its share of every batch; all ranks must
        have the same seed.
      world_size: the number of processes.
      records: a public number in place of the number of records (or users), a rounded one, say. With `max_batch_size`
        it is an upper bound, and more of them are refused.
      expected_batch_size: a public constant by which sums are divided; by default records/b.
      max_batch_size: the largest number of records (or users) in a batch. A bin with more of them is cut to the first
        ones; `cut` says what that costs in δ. `padded` fills batches up to this size.
      unit: for every record the user it belongs to. Users are thrown into bins then, and a batch has all records of
        its users, user by user. By default every record stands for itself.

    **Formal guarantees.** Bins are independent and uniform, up to the quality of the generator, and draws are
    independent of each other. With balls in bins, every record takes part in exactly the steps i, i + b, i + 2b, ... of
    each throw, where i is the bin it has in this throw. With Poisson sampling, every record takes part in each step of
    its group with probability s/b, where s is the number of groups.

    Groups are drawn once: each run of s consecutive records is spread over the s groups by a random permutation, so
    that their sizes differ by at most one. A record's group depends on its index and on the key, and not on what any
    record contains or on which others there are. (As always with groups of equal size, the guarantee therefore compares
    data sets in which the other records have the same indices.)

    Batch sizes vary, and batches may be empty. To leave them out, or to divide by the actual batch size, would not be
    the mechanism accounted for.
    """

    def __init__(
        self,
        size: int,
        batching: Batching | Mechanism,
        *,
        seed: int | bytes | None = None,
        source: str = "fast",
        rank: int = 0,
        world_size: int = 1,
        records: int | None = None,
        expected_batch_size: float | None = None,
        max_batch_size: int | None = None,
        unit: Any = None,
    ):
        given = batching.batching if isinstance(batching, Mechanism) else batching
        if not isinstance(given, BallsInBins | Poisson):
            raise validation.wrong("batching", "a BallsInBins, a Poisson or a Mechanism", given)
        self.batching = given
        self._schedule = Schedule.of(given)
        self.steps = self._schedule.steps
        self.size = validation.integer("size", size, at_least=1)
        self.units = None if unit is None else Units(unit, self.size)
        self.balls = self.size if self.units is None else len(self.units)  # what is thrown: records or users
        b, kind = given.batches_per_epoch, "records" if self.units is None else "users"
        if self.balls < b:
            raise ArgumentError(
                "dataset", f"must have at least as many {kind} as batches_per_epoch = {b}, got {self.balls}"
            )
        self.records = None if records is None else validation.integer("records", records, at_least=1)
        self._divisor = None if self.records is None else self.records / b
        if expected_batch_size is not None:
            self._divisor = validation.positive("expected_batch_size", expected_batch_size)
            if self._divisor > self.balls:
                raise validation.wrong(
                    "expected_batch_size", f"at most the number of {kind}, {self.balls}", self._divisor
                )
        self.cut = checked_cut(given, self.balls, max_batch_size, self.records)
        self.public = self._divisor is not None and (self.cut is None or self.records is not None)
        self.world_size = validation.integer("world_size", world_size, at_least=1)
        self.rank = validation.integer("rank", rank, at_least=0, at_most=self.world_size - 1)
        self._use(make_source(source, seed))
        self._position = 0

    def _use(self, source: Source) -> None:
        self._source = source
        self._groups = _groups(source, self.balls, self._schedule.groups)
        self._known: dict[int, list[IndexArray]] = {}  # the batches of the last draws, about an epoch of them

    def _bins(self, draw: int) -> IndexArray:
        """The bin of every record (or user) in one draw."""
        schedule = self._schedule
        within = self._source.integers(ALLOCATION, schedule.per_epoch // schedule.groups, self.balls, draw)
        return within if schedule.groups == 1 else schedule.groups * within + self._groups

    def _batches(self, draw: int) -> list[IndexArray]:
        """The records (or users) of every bin that is used in a draw."""
        if draw not in self._known:
            b, used = self._schedule.per_epoch, min(self._schedule.per_draw, self._schedule.per_epoch)
            bins = self._bins(draw)
            records = np.flatnonzero(bins < used)  # with balls in bins, all of them
            narrow = bins[records].astype(np.min_scalar_type(b - 1))  # which makes sorting fast
            ends = np.cumsum(np.bincount(narrow, minlength=used))
            while len(self._known) > b // self._schedule.per_draw:
                del self._known[next(iter(self._known))]
            batches = np.split(records[np.argsort(narrow, kind="stable")], ends[:-1])
            # Who is left of a bin that is cut depends on nobody outside of it: the cost in δ relies on that.
            self._known[draw] = batches if self.cut is None else [one[: self.cut.max_batch_size] for one in batches]
        return self._known[draw]

    @property
    def expected_batch_size(self) -> float:
        """What the sum of clipped gradients is divided by: the constant given, or n/b for n records (or users).

        The actual size of a batch depends on the data and must not be used.
        """
        return self._divisor or self.balls / self.batching.batches_per_epoch

    @property
    def key(self) -> bytes:
        """The secret that batches, noise and all other draws of a run are functions of."""
        return self._source.key

    def run(
        self, mechanism: Mechanism, noise_multiplier: float, clip_norm: float, *, divided: bool = True, **more: Any
    ) -> Run:
        """The run of a mechanism on these batches, whose sums are divided by the expected batch size, or not at all."""
        return Run(
            mechanism, noise_multiplier, clip_norm, divisor=self.expected_batch_size if divided else None,
            public=self.public or (not divided and self.cut is None),
            max_batch_size=None if self.cut is None else self.cut.max_batch_size,
            records=self.records if self.cut is None else self.cut.records,
            unit="record" if self.units is None else "user", **more,
        )  # fmt: skip

    @property
    def position(self) -> int:
        """The step whose batch comes next."""
        return self._position

    @property
    def bins(self) -> IndexArray:
        """The bin of every record or user in the current draw, for tests and audits. It is as sensitive as the data."""
        return self._bins(min(self._position, self.steps - 1) // self._schedule.per_draw)

    @property
    def groups(self) -> IndexArray:
        """The group of every record, for tests and audits."""
        return self._groups.copy()

    def batch(self, step: int) -> IndexArray:
        """The records of one step (this rank's share of them), in increasing order, or user by user."""
        chosen = self._batch(step)
        return chosen if self.units is None else self.units.records_of(chosen)

    def padded(self, step: int) -> IndexArray:
        """As `batch`, filled up with −1 to one length for all steps.

        That is `max_batch_size`, or this rank's share of it; with users, times the most records that a user has.
        """
        if self.cut is None:
            raise ArgumentError("max_batch_size", "must be given for batches of one size")
        chosen, most = self.batch(step), 1 if self.units is None else int(self.units.sizes.max())
        out = np.full(-(-self.cut.max_batch_size // self.world_size) * most, -1, dtype=np.int64)
        out[: len(chosen)] = chosen
        return out

    def _batch(self, step: int) -> IndexArray:
        t = validation.integer("step", step, at_least=0, at_most=self.steps - 1)
        draw, place = divmod(t, self._schedule.per_draw)
        return self._batches(draw)[place % self._schedule.per_epoch][self.rank :: self.world_size]

    def epoch_from(self, step: int) -> range:
        """The steps from this one to the end of its epoch.

        Args:
          step: where to begin.

        Returns:
          The numbers of the steps; `TrainingError` is raised when all have been made.
        """
        if step >= self.steps:
            raise TrainingError(
                f"all {self.steps} steps that were accounted for have been made: "
                "another epoch would not be covered by the guarantee"
            )
        b = self.batching.batches_per_epoch
        return range(step, min((step // b + 1) * b, self.steps))

    def batches(self) -> Iterator[IndexArray]:
        """All batches from the current position to the last step, as arrays of indices."""
        while self._position < self.steps:
            self._position += 1
            yield self.batch(self._position - 1)

    def __len__(self) -> int:
        """The number of batches per epoch."""
        return self.batching.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        for t in self.epoch_from(self._position):
            self._position = t + 1
            yield self.batch(t).tolist()

    def seek(self, step: int) -> None:
        """Make `step` the next one."""
        self._position = validation.integer("step", step, at_least=0, at_most=self.steps)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values. It is as secret as the data."""
        return {
            "format": FORMAT,
            "size": self.size,
            "batching": description(self.batching),
            "source": self._source.name,
            "key": self._source.key.hex(),
            "digest": self._digest(),
            "position": self._position,
            "options": self.options,
        }

    @property
    def options(self) -> dict[str, Any] | None:
        """What determines the batches beside batching, size and key, as plain values; None where nothing does."""
        cut = None if self.cut is None else [self.cut.max_batch_size, self.cut.records]
        units = None if self.units is None else self.units.digest
        found = {"expected_batch_size": self._divisor, "cut": cut, "users": units}
        return found if any(value is not None for value in found.values()) else None

    def _digest(self) -> str:
        """A digest of the first draw, which shows whether libraries still draw the batches of a checkpoint."""
        return hashlib.sha256(self._bins(0).astype("<u8").tobytes()).hexdigest()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same batching and number of records. Rank and world size stay.

        Args:
          state: what `state_dict` returned. A state that does not fit is refused, and nothing is changed.
        """
        try:
            format_, size, batching, position = (state[n] for n in ("format", "size", "batching", "position"))
            source, key, digest = state["source"], bytes.fromhex(state["key"]), state["digest"]
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
        if state.get("options") != self.options:
            raise ArgumentError(
                "state", "must be of the same records, expected_batch_size, max_batch_size and unit; it has others"
            )
        at = validation.integer("position", position, at_least=0, at_most=self.steps)
        before = self._source
        self._use(SOURCES[source](key))
        if self._digest() != digest:
            self._use(before)
            raise ArgumentError("state", "must be continued with the generator that made it; this version differs")
        self._position = at


def _groups(source: Source, size: int, groups: int) -> IndexArray:
    """The group of every record: each run of `groups` consecutive records is spread over all groups at random."""
    if groups == 1:
        return np.zeros(size, dtype=np.int64)
    runs = -(-size // groups)
    drawn = source.integers(GROUPS, 2**62, runs * groups).reshape(runs, groups)
    return np.argsort(drawn, axis=1, kind="stable").ravel()[:size].astype(np.int64)
