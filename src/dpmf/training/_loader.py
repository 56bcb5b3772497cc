"""A torch data loader whose batches carry the number of their step, so that a step can check which batch it is on.

The number must survive worker processes, which collate batches ahead of time. It is therefore part of every index
(`NumberedBatches`). `NumberedDataset` decodes it where the records are read and collated, and `Loader` unpacks it when
the training loop takes the batch. `Step` remembers what the loop holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from dpmf.errors import TrainingError
from dpmf.training._draws import Draws
from dpmf.training.step import Part, Step, split


class NumberedBatches:
    """A batch sampler for torch: lists of integers t · (size + 1) + record, where t is the step.

    A row that only fills up a batch of fixed size stands in the place of record `size`. An empty batch is the list
    [−1 − t]. Every iteration over it begins at the step that training is at and ends with the epoch.
    """

    def __init__(self, step: Step, largest: int | None = None):
        self._step, self._largest = step, largest

    def __len__(self) -> int:
        return len(self._step.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._step.batches
        size, units = batches.size, batches.units
        for t in batches.epoch_from(self._step.t):
            rows = batches.batch(t) if batches.cut is None else batches.padded(t)
            codes = t * (size + 1) + np.where(rows < 0, size, rows)
            if not len(codes):
                yield [-1 - t]
            elif self._largest is None:
                yield codes.tolist()
            else:
                users = None if units is None else units.of_rows(rows)
                for part in split(rows, self._largest, users):
                    yield codes[part].tolist()


class NumberedDataset:
    """A dataset that is read by the integers of `NumberedBatches`, and by record as before.

    What it returns is collated already, so that records and what collates them draw from the run's key alike, in the
    main process and in workers. An empty batch becomes tensors of length 0, shaped like those of a record.
    """

    def __init__(self, dataset: Any, size: int, key: bytes, collate: Callable[[list[Any]], Any]):
        self.dataset = dataset
        self._size = size
        self._collate = collate
        self.key = key

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, record: int) -> Any:
        return self.dataset[record]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # copies and pickles ask before there is a dataset
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, codes: list[int]) -> Parcel:
        draws = Draws(self.key, "loading")
        draws.restart(codes[0])
        with draws.active():
            return Parcel(self._part(codes))

    def _part(self, codes: list[int]) -> Part:
        if codes[0] < 0:  # an empty batch: one record shows what its tensors look like
            return Part(-1 - codes[0], -1, 0, _emptied(self._collate([self.dataset[0]])))
        rows = [code % (self._size + 1) for code in codes]
        records = [row for row in rows if row < self._size]
        together = getattr(self.dataset, "__getitems__", None)
        content = together(records) if together and records else [self.dataset[record] for record in records]
        if missing := len(rows) - len(records):  # any record will do: the optimizer discards its gradient
            content = [*content, *[content[0] if records else self.dataset[0]] * missing]
        first = records[0] if records else -1
        return Part(codes[0] // (self._size + 1), first, len(rows), self._collate(content))


def as_loaded(parcel: Parcel) -> Parcel:
    """What collates, as torch's loader sees it: the dataset has done so."""
    return parcel


class Parcel:
    """A collated part on its way from a worker to the training loop. Only `Loader` opens it."""

    def __init__(self, part: Part):
        self.part = part

    def pin_memory(self) -> Parcel:
        """What torch calls when the loader pins memory."""
        return Parcel(self.part._replace(content=pin_memory(self.part.content)))

    def _refuse(self, *_: object) -> Any:
        raise TrainingError(
            "the data loader of make_private must not be rebuilt by other tools, because dpmf could not check which "
            "batch a step is made on: iterate over it directly, or over private.in_parts(largest)"
        )

    __iter__ = __getitem__ = __len__ = _refuse


def _emptied(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_emptied(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise TypeError(f"collate_fn must return tensors, dictionaries, lists or tuples, got {type(batch).__name__}")


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a tensor, or in dictionaries, lists and tuples of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


class Loader(DataLoader):  # type: ignore[misc]
    """Torch's data loader over `NumberedBatches` and `NumberedDataset`; it tells the `Step` what it delivers.

    Args:
      step: whose batches these are.
      largest: the number of records in a part of a batch, at most; a user with more is a part alone.
      **options: as for torch's loader, with a dataset that is a `NumberedDataset`.
    """

    def __init__(self, step: Step, largest: int | None = None, **options: Any):
        super().__init__(batch_sampler=NumberedBatches(step, largest), collate_fn=as_loaded, **options)
        self._step, self._options = step, options

    def in_parts(self, largest: int) -> Loader:
        """The same loader, with batches in parts of at most so many records."""
        return Loader(self._step, largest, **self._options)

    def __iter__(self) -> Any:
        self._step.restart()
        return map(self._open, super().__iter__())

    def _open(self, parcel: Parcel) -> Any:
        part = parcel.part
        self._step.begin(part)
        for tensor in tensors(part.content):
            tensor._dpmf_part = part.step, part.first
        return part.content
