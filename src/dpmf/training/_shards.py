"""Which elements of an array a process draws noise for and keeps: boxes, as runs of elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Shard:
    """A box of an array. Elements are numbered row by row, those of the whole array and those of the box alike.

    Attributes:
      whole: the shape of the array, or any shape with the same elements in the same order, e.g. the flat one.
      offset: the first index of the box in every dimension.
      shape: the shape of the box.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Shard:
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_inside(self) -> bool:
        """Whether this is a box of that array at all."""
        return len(self.whole) == len(self.offset) == len(self.shape) and all(
            first >= 0 and n >= 0 and first + n <= whole
            for whole, first, n in zip(self.whole, self.offset, self.shape, strict=True)
        )

    @cached_property
    def _cut(self) -> tuple[int, int, int]:
        """The last dimension that is not whole, the length of the runs, and the size of the dimensions after it."""
        cut = max((d for d, n in enumerate(self.shape) if n != self.whole[d]), default=0)
        return cut, math.prod(self.shape[cut:]), math.prod(self.whole[cut + 1 :])

    def runs(self, first: int, count: int) -> tuple[Indices, Indices]:
        """Return where the runs of elements first ... first + count − 1 of the box begin in the array, and their
        lengths."""
        if count == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        cut, run, inner = self._cut
        if cut == 0:  # one run
            start = self.offset[0] * inner if self.whole else 0
            return np.array([start + first]), np.array([count])
        numbers = np.arange(first // run, (first + count - 1) // run + 1)
        place = np.zeros(len(numbers), np.int64)
        for index, offset, whole in zip(
            np.unravel_index(numbers, self.shape[:cut]), self.offset, self.whole, strict=False
        ):
            place = place * whole + index + offset
        starts = (place * self.whole[cut] + self.offset[cut]) * inner
        skipped = np.maximum(first - numbers * run, 0)
        counts = np.minimum(first + count - numbers * run, run) - skipped
        return starts + skipped, counts

    def overlap(self, other: Shard) -> Iterator[tuple[int, int, int]]:
        """The elements that two boxes of one array share, as (first in this box, first in the other one, count)."""
        mine, others = _spans(self), _spans(other)
        here, there = next(mine, None), next(others, None)
        while here is not None and there is not None:
            first, last = max(here[0], there[0]), min(here[1], there[1])
            if first < last:
                yield here[2] + first - here[0], there[2] + first - there[0], last - first
            if here[1] <= there[1]:
                here = next(mine, None)
            else:
                there = next(others, None)


def _spans(shard: Shard) -> Iterator[tuple[int, int, int]]:
    """The runs of a box as (first element in the whole array, the one after the last, first element in the box)."""
    starts, counts = shard.runs(0, shard.size)
    before = itertools.accumulate(counts.tolist(), initial=0)
    return (
        (start, start + count, at) for start, count, at in zip(starts.tolist(), counts.tolist(), before, strict=False)
    )


def even_shares(shapes: Sequence[Sequence[int]], rank: int, world_size: int) -> list[Shard]:
    """Cut all elements of all arrays into equal parts, one after the other, and return the part of one process."""
    sizes = [math.prod(shape) for shape in shapes]
    first, last = (sum(sizes) * r // world_size for r in (rank, rank + 1))
    shares, before = [], 0
    for size in sizes:
        low, high = (min(max(edge - before, 0), size) for edge in (first, last))
        shares.append(Shard((size,), (low,), (high - low,)))
        before += size
    return shares
