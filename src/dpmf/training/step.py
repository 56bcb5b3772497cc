"""One step of training after the other: the only thing that counts them, and the only way to released gradients.

A step takes one batch of the mechanism, whole and once. Its methods are called in this order, and each refuses what
would not be the step that was accounted for:

| method | what it does |
|---|---|
| `begin` | a part of the batch is delivered; what the model draws from here on comes from the run's key |
| `add` | once for each part that is computed: joins the rows of a user, clips, adds exactly |
| `agree` | any rank may refuse for all |
| `release` | adds the ranks and σ · clip · the next row of C⁻¹Z, divides by the public divisor; the step is made |
| `finish` | lets the framework's optimizer follow the result |

Adapters hold a `Step` and say how their framework hands over the gradients of records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dpmf.errors import TrainingError
from dpmf.kernels import noise as kernels
from dpmf.run import Run
from dpmf.training._clipping import ExactSum
from dpmf.training._draws import Draws
from dpmf.training.journal import Journal
from dpmf.training.noise import NoiseStream
from dpmf.training.sampler import BatchSampler
from dpmf.training.sharding import lost_ranks


class Part(NamedTuple):
    """A batch, or the part of one that fits into memory: its step, first record, number of rows and content."""

    step: int
    first: int
    size: int
    content: Any = None


class Step:
    """The steps of one run.

    Args:
      run: what was accounted for.
      batches: which records take part in which step.
      noise: the rows of C⁻¹Z, of the elements that this rank adds noise to.
      parameters: what is trained.
      rank, world: this process and the number of all, in distributed training.
      stops: whether a gradient that is not finite is a reason to stop, in place of counting as zero.

    **Formal guarantees.** Step t uses every record of batch t exactly once, or `TrainingError` is raised and nothing is
    released. What a record (or user) contributes is at most `run.clip_norm` long, and sums are exact (`ExactSum`), over
    ranks, too. Noise is added in float64: the result is a function of the sum of both in real numbers, with the same
    bits for any number of ranks. Only then is it divided, by a public number, and rounded to the parameters' precision.
    """

    def __init__(
        self,
        run: Run,
        batches: BatchSampler,
        noise: NoiseStream,
        parameters: Sequence[Any],
        *,
        rank: int = 0,
        world: int = 1,
        stops: bool = False,
    ):
        self.run, self.batches, self.noise = run, batches, noise
        self.rank, self.world = rank, world
        self.draws = Draws(batches.key, "the model", parameters[0].device)
        self.journal = Journal(writes=rank == 0)
        self._parameters, self._stops = list(parameters), stops
        self._part: Part | None = None  # what was delivered last
        self._before = self._within = 0  # rows of the batch that were added: of earlier parts, and of this one
        self.summed: ExactSum | None = None  # what has been added of the batch, without noise
        self._sum: ExactSum | None = None  # the memory of it
        self.begun = 0  # iterations over the batches

    @property
    def t(self) -> int:
        """The number of steps made. It is that of the rows of noise that were used, of which none is used twice."""
        return self.noise.step

    @property
    def half_made(self) -> bool:
        """Whether something of a batch was added that has not been released."""
        return self.summed is not None

    @property
    def size(self) -> int:
        """The number of rows that were delivered last."""
        return 0 if self._part is None else self._part.size

    @property
    def part(self) -> tuple[int, int] | None:
        """The step and the first record of what was delivered last."""
        return None if self._part is None else (self._part.step, self._part.first)

    @property
    def complete(self) -> bool:
        """Whether every record of the batch has been added."""
        return self._part is not None and self._before + self._within == len(self.rows)

    @property
    def rows(self) -> Any:
        """The records of the batch in the order in which they come, with −1 for rows that fill it up."""
        return self.batches.batch(self.t) if self.batches.cut is None else self.batches.padded(self.t)

    def restart(self) -> None:
        """Forget a batch of which only a part was used: a new iteration begins with the whole batch."""
        self._part, self._before, self._within, self.summed = None, 0, 0, None
        self.begun += 1

    def begin(self, part: Part) -> None:
        """Take a part that the loader delivers."""
        self._before, self._within = self._before + self._within, 0
        self._part = part._replace(content=None)
        self.draws.restart(part.step, part.first)

    def pieces(self, largest: int) -> list[slice]:
        """How to split what was delivered last into parts of so many records, with all records of a user in one."""
        rows, units = self.rows[self._before : self._before + self.size], self.batches.units
        return split(rows, largest, None if units is None or not len(rows) else units.of_rows(rows))

    def problem(self, gradients: int, *, last: bool = False) -> str | None:
        """What is wrong with adding this many gradients of records; None if it is what was accounted for.

        Args:
          gradients: how many.
          last: whether no more are to come of what was delivered.
        """
        t, part = self.t, self._part
        if t >= self.run.steps:
            return (
                f"all {t} steps that were accounted for have been made: another step would not be covered by "
                "the guarantee"
            )
        rule = "make exactly one step on every batch, empty ones included"
        if part is None:
            return f"step {t} must be made on batch {t} of the data loader, which has delivered none: {rule}"
        if part.step != t:
            again = " again" if part.step < t else ""
            made = f"it was made on batch {part.step}{again}"
            return f"step {t} must be made on batch {t} of the data loader, {made}: {rule}"
        if self._within + gradients > part.size or (last and self._within + gradients < part.size):
            return (
                f"step {t} must have one gradient for each of the {part.size} records of its batch, "
                f"it has {self._within + gradients}: give the model every record once"
            )
        rows, units = self.rows, self.batches.units
        expected = rows[self._before : self._before + part.size]
        if len(expected) != part.size or (part.size and expected[0] != part.first):
            return f"a part of batch {t} was left out or used twice: make one step on every part, in order"
        end = self._before + self._within + gradients
        if units is not None and 0 < end < len(rows):
            last, following = units.of_rows(rows[end - 1 : end + 1])
            if last == following:
                return f"a part of batch {t} ends within a user's records: keep all records of a user together"
        return None

    def add(self, samples: Sequence[Any]) -> None:
        """Clip and add the gradients of some records, which may be overwritten.

        Args:
          samples: for every parameter the gradients of the next records of what was delivered, in any precision.
        """
        count = len(samples[0])
        if (problem := self.problem(count)) is not None:
            self.agree(problem)
        start = self._before + self._within
        rows = self.rows[start : start + count]
        self._begin_sum().add(self._units(samples, rows[rows >= 0]))  # rows that fill up the batch are the last ones
        self._within += count

    def _units(self, samples: Sequence[Any], records: Any) -> list[Any]:
        """The gradients of the units of privacy: of a user, the mean of those of its records."""
        kept = [sample[: len(records)] for sample in samples]
        if self.batches.units is None or not len(records):
            return kept
        _, place, sizes = np.unique(self.batches.units.of[records], return_inverse=True, return_counts=True)
        found = []
        for sample in kept:
            wide = sample.to(torch.promote_types(sample.dtype, torch.float32))
            index = torch.as_tensor(place, device=wide.device)
            count = torch.as_tensor(sizes, device=wide.device, dtype=wide.dtype)
            total = wide.new_zeros((len(sizes), *wide.shape[1:])).index_add_(0, index, wide)
            found.append(total / count.reshape(-1, *(1,) * (wide.dim() - 1)))
        return found

    def _begin_sum(self) -> ExactSum:
        if self.summed is None:
            self._sum = ExactSum(self.run, self._parameters) if self._sum is None else self._sum.restart()
            self.summed = self._sum
        return self.summed

    def agree(self, problem: str | None) -> None:
        """Raise `TrainingError` if this rank or any other has a problem, or if the ranks are at different steps."""
        if self.world > 1:
            told = torch.tensor([problem is not None, self.t, -self.t], device=self._parameters[0].device)
            with lost_ranks():
                torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
            refused, last, first = told.tolist()
            if problem is None and last != -first:
                problem = f"all ranks must be at the same step, they are at steps {-first} to {last}"
            elif problem is None and refused:
                problem = f"another rank refused step {self.t}: its message says why"
        if problem is not None:
            raise TrainingError(problem)

    def release(self) -> list[Any]:
        """The gradient of the batch with its noise, for every parameter, flat and in its precision. The step is made.

        The sum over records (and ranks) is exact, so that what float64 makes of it with the noise is a function of
        their sum in real numbers. That is divided by the public divisor, and rounded to the precision of the parameter.
        """
        self.agree(self._refusal())
        summed = self._begin_sum()  # of an empty batch nothing may have been added
        scale = self.run.noise_multiplier * self.run.clip_norm / summed.grid
        factor = summed.grid / (self.run.divisor or 1.0)
        add = self._add_here if self.world == 1 and summed.totals[0].device.type == "cpu" else self._add_anywhere
        released = add(summed.totals, scale, factor)
        self._before, self._within, self.summed = 0, 0, None
        if self.journal.files:
            self.journal.release(self.t - 1, digest(released))
        return released

    def _add_here(self, totals: Sequence[Any], scale: float, factor: float) -> list[Any]:
        """Sums and noise in one pass, on a CPU."""
        # What is neither float32 nor float64 is rounded from float64.
        kinds = [p.dtype if p.dtype == torch.float32 else torch.float64 for p in self._parameters]
        out = [torch.empty_like(total, dtype=kind) for total, kind in zip(totals, kinds, strict=True)]

        def take(array: int, start: int, piece: Any) -> None:
            here = slice(start, start + len(piece))
            kernels.add_scaled(totals[array].numpy()[here], piece.numpy(), scale, factor, out[array].numpy()[here])

        self.noise.feed(take)
        return [found.to(p.dtype) for found, p in zip(out, self._parameters, strict=True)]

    def _add_anywhere(self, totals: Sequence[Any], scale: float, factor: float) -> list[Any]:
        """The same on other devices, and where every rank adds the noise of its own share of the elements."""
        several = self.world > 1
        noisy = [torch.zeros_like(total) for total in totals] if several else totals
        firsts = [shard.offset[0] if several else 0 for shard in self.noise.shards]

        def take(array: int, start: int, piece: Any) -> None:
            share = slice(firsts[array] + start, firsts[array] + start + len(piece))
            noise = piece.to(totals[array].device).double().mul_(scale)
            noisy[array][share] = totals[array][share] + noise

        self._add_ranks(totals)
        self.noise.feed(take)
        self._add_ranks(noisy)  # every element is that of one rank, and zero on the others
        return [(row * factor).to(p.dtype) for row, p in zip(noisy, self._parameters, strict=True)]

    def _add_ranks(self, arrays: Sequence[Any]) -> None:
        if self.world > 1:
            with lost_ranks():
                for array in arrays:
                    torch.distributed.all_reduce(array)

    def _refusal(self) -> str | None:
        """Why the sum must not be released; None if it may."""
        if (problem := self.problem(0, last=True)) is not None or not self.complete:
            return problem or f"step {self.t} must have every record of its batch, some were left out"
        if self.summed is not None and self.summed.lost and self._stops:
            return (
                f"the gradient of a record is not finite in step {self.t}: the loss diverged (try a smaller learning "
                "rate) or the data has NaN in it; nothing of this step was released"
            )
        return None

    def finish(self, released: Sequence[Any], follow: Callable[[], Any]) -> Any:
        """Give the parameters their gradients and call `follow`, which makes the step of the framework's optimizer.

        Weights that are not finite end the run: they are released anyway, so that to stop on them tells nothing more.
        """
        for p, gradient in zip(self._parameters, released, strict=True):
            p.grad = gradient.view_as(p)
        done = follow()
        device = self._parameters[0].device
        sums = torch.stack([p.detach().sum(dtype=torch.float32).to(device) for p in self._parameters])
        if not sums.isfinite().all() and not all(bool(p.detach().isfinite().all()) for p in self._parameters):
            raise TrainingError(
                f"the weights are not finite after step {self.t - 1}: training has diverged, try a smaller rate"
            )
        return done


def split(rows: Any, largest: int, users: Any = None) -> list[slice]:
    """Slices of a batch with at most so many rows each, or the rows of one user that has more."""
    if users is None:
        return [slice(start, min(start + largest, len(rows))) for start in range(0, len(rows), largest)]
    found, start = [], 0
    ends = [*(np.flatnonzero(np.diff(users)) + 1).tolist(), len(rows)]
    for end, following in zip(ends, [*ends[1:], len(rows) + largest + 1], strict=True):
        if following - start > largest:
            found.append(slice(start, end))
            start = end
    return found


def digest(tensors: Sequence[Any]) -> str:
    """A short digest: it tells different results of one step apart, cheaply and on any device."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [g.detach().contiguous().view(integers[g.element_size()]).sum(dtype=torch.int64) for g in tensors]
    total = torch.stack([s.to(sums[0].device) for s in sums]).tolist()
    return hashlib.sha256(repr(total).encode()).hexdigest()[:16]
