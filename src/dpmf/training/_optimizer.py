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
from dpmf.training._clipping import clip_factors
from dpmf.training._guards import Passes
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

    def __init__(
        self,
        optimizer: Any,
        *,
        noise: NoiseStream,
        deliveries: Deliveries,
        passes: Passes | None = None,
        on_nonfinite: str = "zero",
        **options: Any,
    ):
        super().__init__(optimizer, **options)  # type: ignore[call-arg]
        self.noise = noise
        self.deliveries = deliveries
        self.on_release: Callable[[int, str], None] | None = None  # called with the step and a digest of its gradient
        self.passes = passes or Passes([], "mean")
        self._stops, self._nonfinite = on_nonfinite == "stop", False
        self.stepping = False  # whether the original optimizer may make a step now
        self.removable: list[Any] = []  # handles of the hooks on the original optimizer
        self._accounted = self.noise_multiplier
        self._world = int(getattr(self, "world_size", 1))
        self._rank = int(getattr(self, "rank", 0))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on one batch, or, for a part of a batch that was split, the sum of its clipped gradients only."""
        if closure is not None:
            with torch.enable_grad(), self.deliveries.draws.active():
                closure()
        if not self.pre_step():
            return None
        if self._world > 1:
            with lost_ranks():
                self.reduce_gradients()
        if self.on_release is not None:
            self.on_release(self.noise.step - 1, _digest([p.grad for p in self.params]))
        self.stepping = True
        try:
            done = self.original_optimizer.step()
        finally:
            self.stepping = False
        device = self.params[0].device
        if not torch.stack([p.detach().isfinite().all().to(device) for p in self.params]).all():
            raise TrainingError(
                f"the weights are not finite after step {self.noise.step - 1}: training has diverged (try a smaller "
                "learning rate). Weights are released anyway, so that to stop here tells nothing more"
            )
        return done

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before a step."""
        raise TrainingError(
            "a GradScaler must not be used: it leaves out steps depending on gradients without noise, and scaled "
            "gradients would be clipped to nothing but their direction; train in float32, which needs none"
        )

    def sum_part(self) -> None:
        """Clip and sum the gradients of a part of the batch, which are freed then; `step` follows after the last part.

        This is for loops that take a batch in one piece and compute it in several.
        """
        counts = self._counts()
        problem = self._missing(counts) or self.deliveries.part_problem(max(counts))
        if problem is not None:
            raise TrainingError(problem)
        if self.deliveries.summed == 0 and self.deliveries.parts == 0:
            for p in self.params:
                p.summed_grad = None
        self.deliveries.arrange(self.params)
        self.clip_and_accumulate()
        self.deliveries.parts += max(counts)
        self._is_last_step_skipped = True  # zero_grad keeps the sum, and a checkpoint has to wait
        for p in self.params:
            p.grad_sample = p.grad = None

    def clip_and_accumulate(self) -> None:
        """Clip the gradients of records and add them up, in place of Opacus.

        **Formal guarantees.** The factor and the gradient of a record have a product of norm at most `max_grad_norm`
        (`clip_factors`). A gradient that is not finite counts as zero. Products are added up in the precision of the
        parameters, float32 or more, whatever autocast says; what that addition rounds is not bounded here
        (docs/theory/floating-point.md).
        """
        with torch.autocast(self.params[0].device.type, enabled=False):
            factors = clip_factors([p.grad_sample for p in self.params], self.max_grad_norm)
            lost = factors == 0
            some = bool(lost.any())
            self._nonfinite |= some
            for p in self.params:
                _check_processed_flag(p.grad_sample)
                sample = p.grad_sample.to(p.dtype)
                if some:  # 0 · NaN is NaN
                    sample = sample.masked_fill(lost.to(p.device).reshape(-1, *(1,) * (sample.dim() - 1)), 0.0)
                total = torch.einsum("i,i...", factors.to(p.device, p.dtype), sample)
                p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)
                _mark_as_processed(p.grad_sample)

    def _counts(self) -> set[int]:
        """The numbers of records that parameters have gradients of; −1 stands for none, −2 for several passes."""
        found = [getattr(p, "grad_sample", None) for p in self.params]
        return {-1 if g is None else -2 if isinstance(g, list) else len(g) for g in found}

    def _missing(self, counts: set[int]) -> str | None:
        """What is wrong if not all parameters have the gradients of one backward pass."""
        step = self.noise.step
        if -1 in counts and self.passes.unfinished():
            return (
                f"the model has made a pass in training mode that was not followed by a backward pass, so that the "
                f"gradients of step {step} cannot be told apart: evaluate in eval mode or under torch.no_grad(), "
                "between two steps; iterate over the data loader again to go on from this step"
            )
        if counts == {-1}:
            return f"step {step} has no gradients: call backward() on a loss of the model that make_private returned"
        if -2 in counts:
            return (
                f"step {step} has the gradients of several backward passes, it must have those of one: "
                "make a step after every batch; to split a large batch use Opacus' BatchMemoryManager, and for larger "
                "batches choose fewer batches_per_epoch"
            )
        if len(counts) > 1:
            shapes = [tuple(p.shape) for p in self.params if getattr(p, "grad_sample", None) is None]
            if shapes:
                return (
                    f"{len(shapes)} of the trained parameters have no gradient in step {step} (the first has shape "
                    f"{shapes[0]}): freeze those that the loss does not use with requires_grad_(False) before "
                    "make_private, and leave it so"
                )
            return (
                f"step {step} has gradients of {sorted(counts)} records, depending on the parameter: every layer must "
                "be given a first dimension of one entry per record"
            )
        coarse = {g.dtype for p in self.params if (g := p.grad_sample) is not None} - {torch.float32, torch.float64}
        if coarse:
            return (
                f"the gradients of records in step {step} are in {coarse.pop()}: in half precision their norms cannot "
                "be bounded by what was accounted for; train without autocast"
            )
        if torch.get_float32_matmul_precision() != "highest":
            return (
                "gradients must be added up in full precision: set_float32_matmul_precision must be 'highest', it is "
                f"{torch.get_float32_matmul_precision()!r}"
            )
        return None

    def pre_step(self, closure: Any = None) -> Any:
        counts = self._counts()
        if self.deliveries.parts:
            problem = self.deliveries.problem(self.deliveries.parts + (0 if counts == {-1} else max(counts)))
            if problem is None and counts != {-1}:
                problem = self._missing(counts)
        else:
            problem = self._missing(counts) or self.deliveries.problem(max(counts))
        if problem is not None:
            self._agree(problem)
        if self.deliveries.parts and counts == {-1}:
            for p in self.params:
                p.grad_sample = p.new_zeros((0, *p.shape))  # everything is summed already
        elif self.deliveries.summed == 0 and not self.deliveries.parts:
            for p in self.params:
                p.summed_grad = None  # left over from a batch of which only a part was used
        if counts != {-1}:
            self.deliveries.arrange(self.params)
        return super().pre_step(closure)  # type: ignore[misc]

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Opacus' BatchMemoryManager says here, ahead of time, which parts end a batch; the records themselves do."""

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        return not self.deliveries.use()

    def add_noise(self) -> None:
        """Add noise_multiplier · clipping norm · the next row of C⁻¹Z to the sum of clipped gradients."""
        self._agree(self._problem())
        self._nonfinite = False
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

    def parameters_digest(self) -> str:
        """A digest of the trained parameters."""
        return _digest(self.params)

    def _problem(self) -> str | None:
        """Why the sum of clipped gradients must not be released; None if it may."""
        if self.noise_multiplier != self._accounted:
            return (
                f"noise_multiplier must stay {self._accounted!r}, which was accounted for, "
                f"got {self.noise_multiplier!r}"
            )
        if [tuple(p.shape) for p in self.params] != self.noise.shapes:
            return "the parameters that are trained must stay those that make_private was given"
        if self._nonfinite and self._stops:
            return (
                f"the gradient of a record is not finite in step {self.noise.step}: the loss diverged (try a smaller "
                "learning rate) or the data has NaN in it; nothing of this step was released"
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
