"""Hugging Face: a `Trainer` that trains privately, after one call.

    trainer = Trainer(model, args, train_dataset=dataset, ...)
    make_trainer_private(trainer, mechanism, target_epsilon=8, target_delta=1e-5, max_grad_norm=1.0)
    trainer.train()

The trainer keeps its own loop, its optimizer and schedule, its evaluation and its checkpoints. What changes are the
batches, which come from the mechanism; the loss, which is taken record by record; and the gradients, which are clipped
and get the mechanism's noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpmf import errors, validation
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.run import only_mechanism
from dpmf.training.opacus import PrivateTraining, make_private

FILE = "dpmf.state"  # in every checkpoint of the trainer
_LOSSES = ("loss", "grad_norm", "train_loss")  # what a trainer reports about training records, without noise

RecordLosses = Callable[[Any, Mapping[str, Any]], Any]


def make_trainer_private(
    trainer: Any,
    mechanism: Mechanism,
    *,
    record_losses: RecordLosses | None = None,
    report_training_loss: bool = False,
    **options: Any,
) -> PrivateTraining:
    """Make a Hugging Face `Trainer` train with differential privacy.

    `per_device_train_batch_size` says how many records are computed at a time; a batch of the mechanism that is larger
    is computed in parts. `trainer.private` is what this function returns.

    Args:
      trainer: a `Trainer` with a model and a training dataset. It is changed in place. Parameters that shall not be
        trained must be frozen already, as for LoRA with peft.
      mechanism: strategy and batching. `batches_per_epoch` decides how large batches are.
      record_losses: called with the outputs of the model and the inputs (with labels), returns one loss per record,
        which must not depend on other records. By default, `default_losses`.
      report_training_loss: whether the trainer may report the loss on training records, which the guarantee does
        not cover.
      **options: as for `dpmf.training.make_private`: max_grad_norm, target_epsilon, target_delta or noise_multiplier,
        accountant, seed, and so on.

    Returns:
      The `PrivateTraining`, which knows the noise multiplier and the privacy spent.

    **Formal guarantees.** Those of `make_private`. A loss that is averaged over the tokens of a batch, as transformers
    does by default, would give a record a weight that depends on the others; the losses of records are therefore
    computed one by one and averaged.
    """
    try:
        import torch
        from transformers import Trainer
    except ImportError:
        raise errors.missing_extra("torch and transformers", "trainers", "make_trainer_private") from None
    if not isinstance(trainer, Trainer):
        raise validation.wrong("trainer", "a transformers.Trainer", trainer)
    if hasattr(trainer, "private"):
        raise ArgumentError("trainer", "must not be private already")
    report = validation.flag("report_training_loss", report_training_loss)
    _check(trainer, mechanism, record_losses, type(trainer).compute_loss is not Trainer.compute_loss)
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if type(dataset).__module__.startswith("datasets."):
        dataset = trainer._remove_unused_columns(dataset, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    args = trainer.args
    loader = {"pin_memory": args.dataloader_pin_memory and torch.cuda.is_available()}
    if args.dataloader_num_workers:
        loader["persistent_workers"] = args.dataloader_persistent_workers
    trainer.model.train()
    private = make_private(
        trainer.model,
        trainer.create_optimizer(),
        dataset,
        mechanism,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        loader_options=loader,
        **options,
    )
    args.ignore_data_skip = True  # the data loader itself knows where to go on
    trainer.optimizer = private.optimizer
    trainer.private = private
    _Ways(trainer, record_losses or default_losses(trainer), report).install()
    return private


def _check(trainer: Any, mechanism: Any, record_losses: RecordLosses | None, own_loss: bool) -> None:
    """Refuse settings under which training would be something else than what is accounted for."""
    args = trainer.args
    only_mechanism(mechanism)
    batching = mechanism.batching
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ArgumentError("trainer", "must have a training dataset with a length and records by index")
    wanted = args.max_steps
    if wanted <= 0:
        wanted = math.ceil(args.num_train_epochs * batching.batches_per_epoch)
    steps = batching.epochs * batching.batches_per_epoch
    wrong = {
        f"gradient_accumulation_steps=1, got {args.gradient_accumulation_steps}: the mechanism says how large a batch "
        "is, and per_device_train_batch_size how much of it is computed at once": args.gradient_accumulation_steps != 1,
        f"at most {steps} steps ({batching.epochs} epochs), as the mechanism does, got {wanted}": wanted > steps,
        "bf16 instead of fp16, which would need a GradScaler": args.fp16,
        "one process and one device": args.world_size > 1 or args.n_gpu > 1 or trainer.is_deepspeed_enabled,
        "auto_find_batch_size=False: a run that begins again would add the same noise twice": args.auto_find_batch_size,
        "torch_compile=False, because Opacus takes the gradients of records in hooks": args.torch_compile,
        "gradient_checkpointing=False, because Opacus would see every pass twice": args.gradient_checkpointing,
        "a model instead of model_init": trainer.model_init is not None,
        'hub_strategy="end" or "every_save": checkpoints hold the noise and are as secret as the data': (
            args.push_to_hub and "checkpoint" in str(args.hub_strategy.value)
        ),
    }
    for complaint, applies in wrong.items():
        if applies:
            raise ArgumentError("trainer", f"must have {complaint}")
    if record_losses is None and (own_loss or trainer.compute_loss_func is not None):
        raise ArgumentError(
            "record_losses",
            "must be given with a trainer that computes a loss of its own: one loss per record is needed",
        )


def default_losses(trainer: Any) -> RecordLosses:
    """The usual losses, taken for each record by itself: classification, regression, labels of tokens, language models.

    A record with several labels has the mean of their losses, leaving out those that are −100. For models whose name
    ends in CausalLM (or LMHeadModel), labels are shifted by one position.
    """
    import torch
    from torch.nn import functional

    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    causal = type(base).__name__.endswith(("CausalLM", "LMHeadModel"))
    smoothing = trainer.args.label_smoothing_factor

    def losses(outputs: Any, inputs: Mapping[str, Any]) -> Any:
        logits, labels = getattr(outputs, "logits", None), inputs.get("labels")
        if logits is None or labels is None:
            raise TrainingError(
                "the loss of each record cannot be computed, because the model has no logits or the data no labels: "
                "give make_trainer_private record_losses"
            )
        logits = logits.float()
        if labels.is_floating_point():
            if labels.shape == logits.shape and logits.ndim == 2 and logits.shape[1] > 1:
                each = functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
            else:
                each = (logits.reshape(len(labels), -1) - labels.float().reshape(len(labels), -1)).square()
            return each.mean(dim=1)
        if labels.ndim == 1:
            return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        if causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", ignore_index=-100, label_smoothing=smoothing
        )
        counted = (labels != -100).sum(dim=1)
        return torch.where(labels != -100, each, 0.0).sum(dim=1) / counted.clamp(min=1)

    return losses


class _Ways:
    """What a private trainer does otherwise: its own methods, with these in front."""

    def __init__(self, trainer: Any, record_losses: RecordLosses, reports: bool):
        self._trainer, self._private, self._losses, self._reports = trainer, trainer.private, record_losses, reports
        self._own: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Put these methods in front of those of the trainer."""
        for name in (
            "get_train_dataloader", "_get_num_items_in_batch", "training_step", "_get_grad_norm", "_clip_grad_norm",
            "_maybe_log_save_evaluate", "log", "_save_rng_state", "_load_optimizer_and_scheduler",
        ):  # fmt: skip
            self._own[name] = getattr(self._trainer, name, lambda *_, **__: None)
            setattr(self._trainer, name, getattr(self, name))

    def get_train_dataloader(self) -> Any:
        if self._private.steps_made:
            raise TrainingError(
                f"this trainer has made {self._private.steps_made} steps already: to go on, make a new one and call "
                "train(resume_from_checkpoint=True)"
            )
        return self._private.data_loader

    def _get_num_items_in_batch(self, *_: Any) -> None:
        return None  # the number of tokens in a batch must play no part

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One batch: in parts, whose clipped gradients are added up."""
        import torch

        trainer, optimizer, step = self._trainer, self._private.optimizer, self._private.current
        model.train()
        size = step.size
        inputs = trainer._prepare_inputs(inputs)
        total = torch.zeros((), device=trainer.args.device)
        optimizer.zero_grad()
        for piece in step.pieces(trainer._train_batch_size):
            part = {n: value[piece] if isinstance(value, torch.Tensor) else value for n, value in inputs.items()}
            with trainer.compute_loss_context_manager():
                outputs = self._private.model(**{name: value for name, value in part.items() if name != "labels"})
                losses = self._losses(outputs, part)
                count = piece.stop - piece.start
                if losses.shape != (count,):
                    raise TrainingError(
                        f"record_losses must return one loss for each of the {count} records, got {tuple(losses.shape)}"
                    )
                loss = losses.mean()
            trainer.accelerator.backward(loss)
            optimizer.sum_part()
            total += loss.detach() * count / size
        if size == 0:
            for p in optimizer.params:
                p.grad_sample = p.new_zeros((0, *p.shape))  # an empty batch: the step adds noise alone
        return total if self._reports else torch.zeros_like(total)

    def _get_grad_norm(self, *_: Any, **__: Any) -> None:
        return None  # it would be that of gradients without noise

    def _clip_grad_norm(self, *_: Any) -> None:
        return None  # gradients are clipped record by record

    def _maybe_log_save_evaluate(self, *arguments: Any, **more: Any) -> Any:
        state = self._trainer.state
        state.epoch = state.global_step / self._private.mechanism.batching.batches_per_epoch
        return self._own["_maybe_log_save_evaluate"](*arguments, **more)

    def log(self, logs: dict[str, float], *arguments: Any, **more: Any) -> None:
        kept = logs if self._reports else {name: value for name, value in logs.items() if name not in _LOSSES}
        self._own["log"](kept, *arguments, **more)

    def _save_rng_state(self, output_dir: str) -> None:
        """The last thing that the trainer saves before its own state: noise and batches follow once all is there."""
        self._own["_save_rng_state"](output_dir)
        self._trainer.state.save_to_json(os.path.join(output_dir, "trainer_state.json"))
        self._private.save(Path(output_dir) / FILE, model=False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._own["_load_optimizer_and_scheduler"](checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / FILE
        if not path.exists():
            raise TrainingError(
                f"{checkpoint} has no {FILE}: it is not of a private run, or was not finished; remove it and resume "
                "from the one before"
            )
        self._private.load(path, model=False)
