"""An optimizer for loops like those of Opacus: it hands the gradients of records to a `Step`, and follows the result.

Parameters, their groups, states and hooks are those of the optimizer inside, so that schedules and trainers take it for
that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpmf.errors import TrainingError
from dpmf.training.step import Step


class PrivateOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """A `Step` in the place of an optimizer of torch.

    Args:
      optimizer: what follows the released gradients.
      step: the steps.
      passes: the passes of the model, some of which no backward pass may have followed.
    """

    def __init__(self, optimizer: Any, step: Step, parameters: list[Any], passes: Any):
        self.original_optimizer, self.current, self.params, self.passes = optimizer, step, parameters, passes
        self._stepping = False  # whether the original optimizer may make a step now
        self._refusal = optimizer.register_step_pre_hook(self._refuse)

    def _refuse(self, *_: object) -> None:
        """Refuse steps of the original optimizer, which would follow gradients without noise."""
        if not self._stepping:
            raise TrainingError(
                "the optimizer that was given to make_private must not make steps itself, because it would follow "
                "gradients without noise: go on with model, optimizer and data loader that make_private has returned"
            )

    def remove(self) -> None:
        """Give the original optimizer back."""
        self._refusal.remove()

    @property
    def param_groups(self) -> Any:
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> Any:
        return self.original_optimizer.defaults

    def __repr__(self) -> str:
        return f"private {self.original_optimizer!r}"

    def state_dict(self) -> Any:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before a step."""
        raise TrainingError(
            "a GradScaler must not be used: it leaves out steps depending on gradients without noise, and scaled "
            "gradients would be clipped to nothing but their direction; autocast with bfloat16 needs none"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of records. What was added of a batch that comes in parts stays."""
        for p in self.params:
            p.grad_sample = None
        self.original_optimizer.zero_grad(set_to_none)

    def sum_part(self) -> None:
        """Clip and add the gradients of a part of the batch, which are freed then; `step` follows after the last part.

        This is for loops that take a batch in one piece and compute it in several.
        """
        samples = [getattr(p, "grad_sample", None) for p in self.params]
        if (problem := self._missing(samples)) is not None:
            self.current.agree(problem)
        self.current.add(samples)
        for p in self.params:
            p.grad_sample = p.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the gradients of records, and make the step if those of the whole batch are there."""
        step = self.current
        if closure is not None:
            with torch.enable_grad(), step.draws.active():
                closure()
        if not step.half_made or any(p.grad_sample is not None for p in self.params):
            self.sum_part()  # else everything was added before
        if (problem := step.problem(0, last=True)) is not None:
            step.agree(problem)
        if not step.complete:
            return None  # a part of the batch
        return self.release()

    def release(self) -> Any:
        """Release the batch that has been added, and let the original optimizer make a step along the result."""
        trained = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        if trained != {id(p) for p in self.params}:
            self.current.agree("the parameters that are trained must stay those that make_private was given")
        released = self.current.release()
        self._stepping = True
        try:
            return self.current.finish(released, self.original_optimizer.step)
        finally:
            self._stepping = False

    def signal_skip_step(self, *_: Any, **__: Any) -> None:
        """What Opacus' BatchMemoryManager calls for every part of a batch."""
        raise TrainingError(
            "Opacus' BatchMemoryManager rebuilds the data loader, so that dpmf could not check which batch a step is "
            "made on: iterate over private.in_parts(largest) instead, which splits batches that do not fit into memory"
        )

    def _missing(self, samples: list[Any]) -> str | None:
        """What is wrong if not all parameters have the gradients of one backward pass."""
        t = self.current.t
        counts = {-1 if g is None else -2 if isinstance(g, list) else len(g) for g in samples}
        if -1 in counts and self.passes.unfinished():
            return (
                f"the model has made a pass in training mode that was not followed by a backward pass, so that the "
                f"gradients of step {t} cannot be told apart: evaluate in eval mode or under torch.no_grad(), "
                "between two steps; iterate over the data loader again to go on from this step"
            )
        if counts == {-1}:
            return f"step {t} has no gradients: call backward() on a loss of the model that make_private returned"
        if -2 in counts:
            return (
                f"step {t} has the gradients of several backward passes, it must have those of one: make a step after "
                "every batch; to split a large batch use private.in_parts, and for larger batches choose fewer "
                "batches_per_epoch"
            )
        if len(counts) > 1:
            shapes = [tuple(p.shape) for p, g in zip(self.params, samples, strict=True) if g is None]
            if shapes:
                return (
                    f"{len(shapes)} of the trained parameters have no gradient in step {t} (the first has shape "
                    f"{shapes[0]}): freeze those that the loss does not use with requires_grad_(False) before "
                    "make_private, and leave it so"
                )
            return (
                f"step {t} has gradients of {sorted(counts)} records, depending on the parameter: every layer must "
                "be given a first dimension of one entry per record"
            )
        return None
