"""Opacus' DPOptimizer with the noise of a matrix mechanism, and with the checks that keep it the one accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

from dpmf.errors import TrainingError
from dpmf.training._loader import Deliveries
from dpmf.training.noise import NoiseStream
from dpmf.training.sharding import lost_ranks


class _CorrelatedNoise:
    """What both optimisers share. Opacus clips and sums; this class adds the noise and scales the result."""

    params: list[Any]
    max_grad_norm: float
    noise_multiplier: float
    loss_reduction: str
    expected_batch_size: float
    original_optimizer: Any
    reduce_gradients: Callable[[], None]

    def __init__(self, optimizer: Any, *, noise: NoiseStream, deliveries: Deliveries, **options: Any):
        super().__init__(optimizer, **options)  # type: ignore[call-arg]
        self.noise = noise
        self.deliveries = deliveries
        self.on_release: Callable[[int, str], None] | None = None  # called with the step and a digest of its gradient
        self._accounted = self.noise_multiplier
        self._world = int(getattr(self, "world_size", 1))
        self._rank = int(getattr(self, "rank", 0))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on one batch, or, for a part of a batch that was split, the sum of its clipped gradients only."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not self.pre_step():
            return None
        if self._world > 1:
            with lost_ranks():
                self.reduce_gradients()
        if self.on_release is not None:
            self.on_release(self.noise.step - 1, _digest([p.grad for p in self.params]))
        return self.original_optimizer.step()

    def pre_step(self, closure: Any = None) -> Any:
        passes = {len(p.grad_sample) if isinstance(p.grad_sample, list) else 1 for p in self.params}
        if passes == {1}:
            problem = self.deliveries.problem(
                max(0 if p.grad_sample is None else len(p.grad_sample) for p in self.params)
            )
        else:
            problem = (
                f"step {self.noise.step} has the gradients of several backward passes, it must have those of one: "
                "make a step after every batch; to split a large batch use Opacus' BatchMemoryManager, and for larger "
                "batches choose fewer batches_per_epoch"
            )
        if problem is not None:
            self._agree(problem)
        if self.deliveries.summed == 0:
            for p in self.params:
                p.summed_grad = None  # left over from a batch of which only a part was used
        return super().pre_step(closure)  # type: ignore[misc]

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Opacus' BatchMemoryManager says here, ahead of time, which parts end a batch; the records themselves do."""

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return not self.deliveries.use()

    def add_noise(self) -> None:
        """Add noise_multiplier · clipping norm · the next row of C⁻¹Z to the sum of clipped gradients."""
        self._agree(self._problem())
        scale = self.noise_multiplier * self.max_grad_norm
        flat = []
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            # The noise is added in the higher of both precisions; rounding to that of the parameters comes last.
            wide = torch.promote_types(p.summed_grad.dtype, getattr(torch, self.noise.dtype))
            flat.append(p.summed_grad.to(wide).contiguous().view(-1))

        # With several ranks, each adds the noise of its own share of the elements; the sum over ranks has all of it.
        firsts = [shard.offset[0] if self._world > 1 else 0 for shard in self.noise.shards]
        mine = [
            gradient[first : first + shard.size]
            for gradient, first, shard in zip(flat, firsts, self.noise.shards, strict=True)
        ]
        self.noise.add_to(mine, scale)
        for p, gradient in zip(self.params, flat, strict=True):
            p.grad = gradient.to(p.dtype).view_as(p)
            _mark_as_processed(p.summed_grad)

    def scale_grad(self) -> None:
        """Divide by the expected batch size, whatever the size of this batch was."""
        if self.loss_reduction == "mean":
            for p in self.params:
                p.grad /= self.expected_batch_size

    def _problem(self) -> str | None:
        """Why the sum of clipped gradients must not be released; None if it may."""
        if self.noise_multiplier != self._accounted:
            return (
                f"noise_multiplier must stay {self._accounted!r}, which was accounted for, "
                f"got {self.noise_multiplier!r}"
            )
        if [tuple(p.shape) for p in self.params] != self.noise.shapes:
            return "the parameters that are trained must stay those that make_private was given"
        device = self.params[0].device
        if not torch.stack([p.summed_grad.sum().isfinite().to(device) for p in self.params]).all():
            return (
                f"the gradient of step {self.noise.step} is not finite: the loss diverged (try a smaller learning "
                "rate) or the data has NaN in it; nothing of this step was released"
            )
        return None

    def _agree(self, problem: str | None) -> None:
        """Raise `TrainingError` if this rank or any other has a problem, or if the ranks are at different steps."""
        if self._world > 1:
            step = self.noise.step
            told = torch.tensor([problem is not None, step, -step], device=self.params[0].device)
            with lost_ranks():
                torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
            refused, last, first = told.tolist()
            if problem is None and last != -first:
                problem = f"all ranks must be at the same step, they are at steps {-first} to {last}"
            elif problem is None and refused:
                problem = f"another rank refused step {step}: its message says why"
        if problem is not None:
            raise TrainingError(problem)


def _digest(gradients: list[Any]) -> str:
    """A short digest of noisy gradients: it tells different results of one step apart, cheaply and on any device."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [g.detach().contiguous().view(integers[g.element_size()]).sum(dtype=torch.int64) for g in gradients]
    total = torch.stack([s.to(sums[0].device) for s in sums]).tolist()
    return hashlib.sha256(repr(total).encode()).hexdigest()[:16]


class CorrelatedDPOptimizer(_CorrelatedNoise, DPOptimizer):  # type: ignore[misc]
    """For one process."""


class DistributedCorrelatedDPOptimizer(_CorrelatedNoise, DistributedDPOptimizer):  # type: ignore[misc]
    """For several: every process clips its share of the batch, and adds the noise of its share of the elements."""
