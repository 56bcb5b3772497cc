"""Opacus' DPOptimizer with the noise of a matrix mechanism, and with the checks that keep it the one accounted for."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

from dpmf.errors import TrainingError
from dpmf.training.noise import NoiseStream
from dpmf.training.sampler import BallsInBinsSampler


class _CorrelatedNoise:
    """What both optimisers share. Clipping and summing are Opacus'; the noise, and its scale, are ours."""

    params: list[Any]
    max_grad_norm: float
    noise_multiplier: float
    loss_reduction: str
    expected_batch_size: float
    accumulated_iterations: int

    def __init__(
        self, optimizer: Any, *, noise: NoiseStream, sampler: BallsInBinsSampler, prefetched: int, **options: Any
    ):
        super().__init__(optimizer, **options)  # type: ignore[call-arg]
        self.noise = noise
        self.sampler = sampler
        self._prefetched = prefetched
        self._accounted = self.noise_multiplier
        self._adds_noise = getattr(self, "rank", 0) == 0

    def add_noise(self) -> None:
        """Turn the sum of clipped gradients into a release: + σ · clipping norm · the next row of C⁻¹Z."""
        self._check()
        scale = self.noise_multiplier * self.max_grad_norm
        flat = []
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            # The noise is added in the higher of both precisions; rounding to that of the parameters comes last.
            wide = torch.promote_types(p.summed_grad.dtype, getattr(torch, self.noise.dtype))
            flat.append(p.summed_grad.to(wide).contiguous().view(-1))

        def take(array: int, start: int, piece: Any) -> None:
            gradient = flat[array]
            gradient[start : start + len(piece)].add_(piece.to(gradient.device), alpha=scale)

        if self._adds_noise:
            self.noise.feed(take)
        else:
            self.noise.skip()
        for p, gradient in zip(self.params, flat, strict=True):
            p.grad = gradient.to(p.dtype).view_as(p)
            _mark_as_processed(p.summed_grad)

    def scale_grad(self) -> None:
        """Divide by the expected batch size, whatever the size of this batch was."""
        if self.accumulated_iterations != 1:
            raise TrainingError(
                "gradients of several batches must not be accumulated into one step: use Opacus' BatchMemoryManager"
            )
        if self.loss_reduction == "mean":
            for p in self.params:
                p.grad /= self.expected_batch_size

    def _check(self) -> None:
        step = self.noise.step
        if self.noise_multiplier != self._accounted:
            raise TrainingError(
                f"noise_multiplier must stay {self._accounted!r}, which was accounted for, "
                f"got {self.noise_multiplier!r}"
            )
        ahead = self.sampler.position - (step + 1)
        if step < self.noise.iterations and not 0 <= ahead <= self._prefetched:
            raise TrainingError(
                f"step {step} must be made on batch {step} of the data loader, which is at batch "
                f"{self.sampler.position - 1}: make exactly one step on every batch, empty ones included"
            )
        finite = torch.stack([p.summed_grad.sum().isfinite() for p in self.params]).all()
        if self.world > 1:
            flag = finite.to(torch.uint8)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
            finite = flag.bool()
        if not finite:
            raise TrainingError(
                f"the gradient of step {step} is not finite: the loss diverged (try a smaller learning rate) "
                "or the data has NaN in it; nothing of this step was released"
            )

    @property
    def world(self) -> int:
        return int(getattr(self, "world_size", 1))


class CorrelatedDPOptimizer(_CorrelatedNoise, DPOptimizer):  # type: ignore[misc]
    """For one process."""


class DistributedCorrelatedDPOptimizer(_CorrelatedNoise, DistributedDPOptimizer):  # type: ignore[misc]
    """For several: every process clips its share of the batch, the first one adds the noise, once."""
