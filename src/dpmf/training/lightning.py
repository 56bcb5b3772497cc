"""Lightning: a callback that makes `Trainer.fit` train privately.

    callback = Private(mechanism, target_epsilon=8, target_delta=1e-5, max_grad_norm=1.0)
    trainer = Trainer(max_epochs=3, callbacks=[callback])
    trainer.fit(module, data_loader)

The module, its optimizer and schedule, validation and checkpoints stay as they are. The batches come from the mechanism
instead of from the data loader, of which only the dataset and the collating function are used. Gradients are clipped
record by record and get the mechanism's noise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dpmf import errors
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.run import only_mechanism
from dpmf.training.opacus import PrivateTraining, make_private

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins.io import CheckpointIO
except ImportError:
    raise errors.missing_extra("lightning", "trainers", "dpmf.training.lightning") from None

SUFFIX = ".dpmf"  # of the file beside every checkpoint of the trainer


class Private(Callback):  # type: ignore[misc]
    """Private training in Lightning.

    Args:
      mechanism: strategy and batching. `batches_per_epoch` decides how large batches are.
      **options: as for `dpmf.training.make_private`: max_grad_norm, target_epsilon, target_delta or noise_multiplier,
        accountant, seed, and so on.

    Attributes:
      private: the `PrivateTraining`, once fitting has begun. It knows the noise multiplier and the privacy spent.

    **Formal guarantees.** Those of `make_private`. The loss that `training_step` returns must be the mean over the
    records of the batch of losses that do not depend on other records; one that is seen not to be is refused. What the
    module itself logs about training records is not covered.
    """

    def __init__(self, mechanism: Mechanism, **options: Any):
        only_mechanism(mechanism)
        self.mechanism = mechanism
        self.private: PrivateTraining | None = None
        self._options = options

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make everything private, and go on from the trainer's checkpoint if it has one."""
        if self.private is not None:
            raise TrainingError("a callback makes one run private: make a new one, and a new module, for another")
        self._check(trainer)
        source = trainer.fit_loop._data_source
        given = source.dataloader()
        if not hasattr(given, "dataset") or not hasattr(given, "collate_fn"):
            raise ArgumentError("train_dataloaders", "must be one data loader of torch, with a dataset")
        (optimizer,) = trainer.strategy.optimizers
        pl_module.train()
        private = make_private(
            pl_module,
            getattr(optimizer, "_optimizer", optimizer),
            given.dataset,
            self.mechanism,
            collate_fn=given.collate_fn,
            num_workers=given.num_workers,
            **self._options,
        )
        self.private = private
        trainer.strategy.optimizers = [private.optimizer]
        source.instance, source.name = private.data_loader, ""
        trainer.strategy.checkpoint_io = _WithNoise(trainer.strategy.checkpoint_io, private)
        if trainer.ckpt_path is not None:
            path = _beside(trainer.ckpt_path)
            if not path.exists():
                raise TrainingError(
                    f"{trainer.ckpt_path} has no {path.name} beside it: it is not of a private run, or was not "
                    "finished; resume from the one before"
                )
            private.load(path, model=False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Forget evaluations that were made with gradients."""
        assert self.private is not None
        self.private.optimizer.passes.forget(self.private.model)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Refuse a loss that is not a mean over records."""
        from dpmf.training import _guards

        assert self.private is not None
        passes, step = self.private.optimizer.passes, self.private.current
        problem = _guards.loss_problem(loss, passes.reduction, records=step.size)
        if problem is not None:
            raise TrainingError(problem)

    def _check(self, trainer: Any) -> None:
        """Refuse settings under which training would be something else than what is accounted for."""
        batching = self.mechanism.batching
        epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
        steps = batching.epochs * batching.batches_per_epoch
        few = 0 <= epochs <= batching.epochs or 0 <= trainer.max_steps <= steps
        wrong = {
            f"accumulate_grad_batches=1, got {trainer.accumulate_grad_batches}: choose fewer batches_per_epoch for "
            "larger batches": trainer.accumulate_grad_batches != 1,
            f"max_epochs of at most {batching.epochs}, or max_steps of at most {steps}, as the mechanism has": not few,
            "bf16 instead of 16-bit precision, which would need a GradScaler": str(trainer.precision).startswith("16"),
            "one device": trainer.world_size > 1,
            "no gradient_clip_val: gradients are clipped record by record": trainer.gradient_clip_val is not None,
            "one optimizer": len(trainer.strategy.optimizers) != 1,
        }
        for complaint, applies in wrong.items():
            if applies:
                raise ArgumentError("trainer", f"must have {complaint}")


def _beside(path: str | os.PathLike[str]) -> Path:
    """The file with the noise of a checkpoint, also if the trainer has made a link to it."""
    found = Path(path).resolve()
    return found.with_name(found.name + SUFFIX)


class _WithNoise(CheckpointIO):  # type: ignore[misc]
    """Lightning's way to save, with a second file that has noise and batches."""

    def __init__(self, inner: Any, private: PrivateTraining):
        self._inner, self._private = inner, private

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self._inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        if "optimizer_states" in checkpoint:  # not weights only
            self._private.save(_beside(path), model=False)

    def load_checkpoint(self, *arguments: Any, **more: Any) -> Any:
        return self._inner.load_checkpoint(*arguments, **more)

    def remove_checkpoint(self, path: Any) -> None:
        self._inner.remove_checkpoint(path)
        _beside(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        self._inner.teardown()
