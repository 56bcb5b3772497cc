"""A torch data loader whose batches carry the number of their iteration, so that a step can check which batch it is on.

The number must survive worker processes, which collate batches ahead of time, and Opacus' `BatchMemoryManager`, which
splits lists of indices. It is therefore part of every index (`NumberedBatches`). `NumberedDataset` decodes it where
the records are read and collated, and `Loader` unpacks it when the training loop takes the batch. `Deliveries`
remembers what the loop holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus.utils import batch_memory_manager
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from dpmf.errors import TrainingError
from dpmf.training._draws import Draws
from dpmf.training._units import Units
from dpmf.training.sampler import BatchSampler


class NumberedBatches:
    """A batch sampler for torch: lists of integers t · (size + 1) + record, where t is the iteration.

    A row that only fills up a batch of fixed size stands in the place of record `size`. An empty batch is the list
    [−1 − t]. Every iteration over it begins at the step that training is at and ends with
    the epoch.
    """

    def __init__(self, sampler: BatchSampler, step: Callable[[], int]):
        self._sampler = sampler
        self._step = step

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for t in self._sampler.epoch_from(self._step()):
            size, rows = self._sampler.size, _rows(self._sampler, t)
            yield (t * (size + 1) + np.where(rows < 0, size, rows)).tolist() or [-1 - t]


def _rows(sampler: BatchSampler, step: int) -> Any:
    """The records of a batch in the order in which the model gets them, with −1 for rows that fill it up."""
    return sampler.batch(step) if sampler.cut is None else sampler.padded(step)


class _Part(NamedTuple):
    """A batch, or the part of one that fits into memory: its iteration, first record, number of rows and content."""

    iteration: int
    first: int
    size: int
    content: Any


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

    def _part(self, codes: list[int]) -> _Part:
        if codes[0] < 0:  # an empty batch: one record shows what its tensors look like
            return _Part(-1 - codes[0], -1, 0, _emptied(self._collate([self.dataset[0]])))
        rows = [code % (self._size + 1) for code in codes]
        records = [row for row in rows if row < self._size]
        together = getattr(self.dataset, "__getitems__", None)
        content = together(records) if together and records else [self.dataset[record] for record in records]
        if missing := len(rows) - len(records):  # any record will do: the optimizer discards its gradient
            content = [*content, *[content[0] if records else self.dataset[0]] * missing]
        first = records[0] if records else -1
        return _Part(codes[0] // (self._size + 1), first, len(rows), self._collate(content))


def as_loaded(parcel: Parcel) -> Parcel:
    """What collates, as torch's loader sees it: the dataset has done so."""
    return parcel


class Parcel:
    """A collated part on its way from a worker to the training loop. Only `Loader` opens it."""

    def __init__(self, part: _Part):
        self.part = part

    def pin_memory(self) -> Parcel:
        """What torch calls when the loader pins memory."""
        return Parcel(self.part._replace(content=pin_memory(self.part.content)))

    def _refuse(self, *_: object) -> Any:
        raise TrainingError(
            "the data loader of make_private must not be rebuilt by other tools, because dpmf could not check which "
            "batch a step is made on: iterate over it directly, or over the one of Opacus' BatchMemoryManager"
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


class Deliveries:
    """What the training loop has been given, and how much of the current batch it has used.

    The rule is: step t uses every record of batch t exactly once. A loop that breaks it is refused with a sentence that
    says how, before anything is released.
    """

    def __init__(self, sampler: BatchSampler, step: Callable[[], int], draws: Draws):
        self._sampler = sampler
        self._step = step
        self.draws = draws  # of the model
        self._last: _Part | None = None  # without its content
        self._used = False
        self._count = 0  # of deliveries; the tensors of the last one are marked with it
        self.summed = 0  # rows of the current batch whose gradients have been summed
        self.on_restart: Callable[[], None] = lambda: None
        self.parts = 0  # of them, those of the last delivery, if the loop itself splits it into parts

    @property
    def units(self) -> Units | None:
        """The users, where they are the unit of privacy."""
        return self._sampler.units

    def __reduce__(self) -> Any:
        return _Unguarded, ()

    @property
    def size(self) -> int:
        """The number of records of the last delivery."""
        return 0 if self._last is None else self._last.size

    def pieces(self, largest: int) -> list[slice]:
        """How to split the last delivery into parts of at most so many records, with all records of a user in one."""
        units, size = self._sampler.units, self.size
        if units is None or size == 0:
            return [slice(start, min(start + largest, size)) for start in range(0, size, largest)]
        users = units.of_rows(_rows(self._sampler, self._step())[self.summed : self.summed + size])
        found, start = [], 0
        ends = [*(np.flatnonzero(np.diff(users)) + 1).tolist(), size]
        for end, following in zip(ends, [*ends[1:], size + largest + 1], strict=True):
            if following - start > largest:  # a user with more records is a part alone
                found.append(slice(start, end))
                start = end
        return found

    def restart(self) -> None:
        """Forget a batch of which only a part was used: a new iteration begins with the whole batch."""
        self._last, self.summed, self.parts = None, 0, 0
        self.on_restart()

    def deliver(self, parcel: Parcel) -> Any:
        """Open a parcel for the training loop."""
        content = parcel.part.content
        self._count += 1
        self._last, self._used, self.parts = parcel.part._replace(content=None), False, 0
        self.draws.restart(self._last.iteration, self._last.first)
        for tensor in tensors(content):
            tensor._dpmf_delivery = self._count
        return content

    def __call__(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """As a hook before the forward pass: refuse tensors of an earlier batch. Copies of them carry no mark."""
        if not (module.training and torch.is_grad_enabled()):
            return
        for tensor in tensors([arguments, keywords]):
            if getattr(tensor, "_dpmf_delivery", self._count) != self._count:
                raise TrainingError(
                    f"the model was given a batch that is not the last one of the data loader: step {self._step()} "
                    "must be made on the batch that was just delivered (evaluate with torch.no_grad())"
                )

    def problem(self, gradients: int) -> str | None:
        """What is wrong with a step that has this many per-sample gradients; None if it is the step accounted for."""
        step, last = self._step(), self._last
        if step >= self._sampler.steps:
            return (
                f"all {step} steps that were accounted for have been made: another step would not be covered by "
                "the guarantee"
            )
        rule = "make exactly one step on every batch, empty ones included"
        if last is None:
            return f"step {step} must be made on batch {step} of the data loader, which has delivered none: {rule}"
        if last.iteration != step or self._used:
            again = " again" if self._used else ""
            return (
                f"step {step} must be made on batch {step} of the data loader, it was made on batch "
                f"{last.iteration}{again}: {rule}"
            )
        if gradients != last.size:
            return (
                f"step {step} must have one gradient for each of the {last.size} records of its batch, "
                f"it has {gradients}: give the model every record once"
            )
        rows = _rows(self._sampler, step)
        expected = rows[self.summed : self.summed + last.size]
        if len(expected) != last.size or (last.size and expected[0] != last.first):
            return f"a part of batch {step} was left out or used twice: make one step on every part, in order"
        return self._split_user(rows, self.summed + last.size)

    def part_problem(self, gradients: int) -> str | None:
        """The same for a part of the last delivery, after which more of it may come."""
        end = self.summed + self.parts + gradients
        if self._last is not None and 0 <= self.parts + gradients <= self._last.size:
            gradients = self._last.size - self.parts
        problem = self.problem(self.parts + gradients)
        return self._split_user(_rows(self._sampler, self._step()), end) if problem is None else problem

    def _split_user(self, rows: Any, end: int) -> str | None:
        """What is wrong if a part of a batch ends within a user's records."""
        units = self._sampler.units
        if units is None or not 0 < end < len(rows):
            return None
        last, following = units.of_rows(rows[end - 1 : end + 1])
        if last != following:
            return None
        return f"a part of batch {self._step()} ends within a user's records: keep all records of a user together"

    def arrange(self, parameters: list[Any]) -> None:
        """Make per-record gradients those of the units of privacy, before they are clipped.

        Rows that only fill up the batch get zeros. With users, a user's gradient is the mean of those of its records.
        """
        units, start = self._sampler.units, self.summed + self.parts
        rows = _rows(self._sampler, self._step())[start : start + len(parameters[0].grad_sample)]
        real = int((rows >= 0).sum())  # the others are the last ones
        if real < len(rows):
            for p in parameters:
                p.grad_sample[real:] = 0
        if units is not None and len(rows):
            _, place, sizes = np.unique(units.of[rows[:real]], return_inverse=True, return_counts=True)
            for p in parameters:
                samples = p.grad_sample[:real].to(torch.promote_types(p.grad_sample.dtype, torch.float32))
                index = torch.as_tensor(place, device=samples.device)
                means = samples.new_zeros((len(sizes), *samples.shape[1:])).index_add_(0, index, samples)
                count = torch.as_tensor(sizes, device=samples.device, dtype=samples.dtype)
                p.grad_sample = means / count.reshape(-1, *(1,) * (samples.dim() - 1))

    def use(self) -> bool:
        """Count the last delivery as used. Returns whether its batch is complete now."""
        assert self._last is not None
        self._used, self.parts = True, 0
        self.summed += self._last.size
        if self.summed < len(_rows(self._sampler, self._last.iteration)):
            return False
        self.summed = 0
        return True


class _Unguarded:
    """The hook of a copied or pickled model, which is not what is trained: it refuses nothing."""

    def __call__(self, *_: object) -> None:
        pass


class Loader(DataLoader):  # type: ignore[misc]
    """Torch's data loader over `NumberedBatches` and `NumberedDataset`; it reports what it delivers."""

    def __init__(self, deliveries: Deliveries, **options: Any):
        super().__init__(**options)
        self.deliveries = deliveries

    def __iter__(self) -> Any:
        self.deliveries.restart()
        return map(self.deliveries.deliver, super().__iter__())


_wrap_plain = batch_memory_manager.wrap_data_loader


def _wrap_data_loader(*, data_loader: Any, max_batch_size: int, optimizer: Any) -> Any:
    """Opacus' function, which builds a plain torch loader. Here it stays a `Loader` if it was one."""
    wrapped = _wrap_plain(data_loader=data_loader, max_batch_size=max_batch_size, optimizer=optimizer)
    if isinstance(data_loader, Loader):
        wrapped.__class__ = Loader
        wrapped.deliveries = data_loader.deliveries
        if data_loader.deliveries.units is not None:
            wrapped.batch_sampler.__class__ = _WholeUsers
            wrapped.batch_sampler.units = data_loader.deliveries.units
    return wrapped


class _WholeUsers(batch_memory_manager.BatchSplittingSampler):  # type: ignore[misc]
    """Opacus' splitting of batches into parts, except that all records of a user stay in one part."""

    units: Units

    def __iter__(self) -> Iterator[list[int]]:
        for codes in self.sampler:
            part: list[int] = []
            rows = np.asarray(codes) % ((size := len(self.units.of)) + 1)
            users = [-1] if codes[0] < 0 else self.units.of_rows(np.where(rows == size, -1, rows))
            ends = [*(np.flatnonzero(np.diff(users)) + 1), len(codes)]
            for start, end in zip([0, *ends], ends, strict=False):
                if end - start > self.max_batch_size:
                    raise TrainingError(
                        f"a user has {end - start} records, which must be in memory together: raise "
                        f"max_physical_batch_size, which is {self.max_batch_size}"
                    )
                if part and len(part) + end - start > self.max_batch_size:
                    yield part
                    part = []
                part = part + codes[start:end]
            yield part


batch_memory_manager.wrap_data_loader = _wrap_data_loader
