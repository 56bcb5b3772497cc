"""PyTorch: one call from model, optimizer, dataset and mechanism to private training with Opacus."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from dpmf import api, errors, validation
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.results import Calibration
from dpmf.training import _target, sharding
from dpmf.training._overflow import CutMechanism
from dpmf.training._resumable import Resumable
from dpmf.training._sources import new_key
from dpmf.training.journal import Journal
from dpmf.training.levels import noise_levels
from dpmf.training.noise import NoiseStream
from dpmf.training.sampler import BatchSampler

COARSE = "in half precision the norm of a record's gradient cannot be bounded, nor the sum be added up well enough"
_MODEL = ("model", "optimizer", "random")  # what a trainer may keep instead


@dataclass(eq=False)
class PrivateTraining(Resumable):
    """A private training run, made by `make_private`; unpacks as ``model, optimizer, data_loader = private``.

    Attributes:
      model, optimizer, data_loader: replace your own in an ordinary training loop.
      mechanism: the mechanism that was accounted for.
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      max_grad_norm: the clipping norm.
      accountant: the guarantee, behind Opacus' interface; also the accountant of `privacy_engine`.
      privacy_engine: Opacus' engine.
      calibration: how σ was found, if it was calibrated.
      sampler, noise: the batches and the rows of C⁻¹Z.
      journal: what this run has released (see `dpmf.training.journal`).
    """

    model: Any
    optimizer: Any
    data_loader: Any
    mechanism: Mechanism
    noise_multiplier: float
    max_grad_norm: float
    accountant: Any
    privacy_engine: Any
    calibration: Calibration | None
    sampler: BatchSampler
    noise: NoiseStream
    journal: Journal

    def __post_init__(self) -> None:
        self.optimizer.on_release = lambda step, digest: self.journal.release(step, digest)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.data_loader))

    @property
    def step(self) -> int:
        """The number of steps made so far."""
        return self.noise.step

    def get_epsilon(self, delta: float) -> float:
        """An ε for which the whole run is (ε, delta)-DP, whenever and for whatever reason it is stopped.

        Args:
          delta: the δ of the guarantee. At `target_delta` the answer is there at once; at another δ a search takes
            seconds to half a minute, and a line on stderr says so.
        """
        return float(self.accountant.get_epsilon(delta))

    @property
    def relation(self) -> str:
        """How two data sets may differ that the guarantee compares, in words (`BatchSampler.relation`)."""
        return self.sampler.relation

    @cached_property
    def noise_levels(self) -> Any:
        """The standard deviation of the noise in the gradient that the optimizer gets, for every step, as an array.

        For corrections of the second moment of Adam and the like, which it is a part of.
        """
        divisor = self.sampler.expected_batch_size if self.optimizer.loss_reduction == "mean" else 1.0
        return noise_levels(self.mechanism, self.noise_multiplier) * self.max_grad_norm / divisor

    def unwrap(self) -> Any:
        """End the run and take the model out of it.

        Returns:
          The module that `make_private` was given, without Opacus' hooks. The run can make no further steps. Another
          private run with this model is a second mechanism, and on the same records the privacy of both is spent.
        """
        for handle in self.optimizer.removable:
            handle.remove()
        return self.model.to_standard_module()

    def _identity(self) -> dict[str, Any]:
        return {"max_grad_norm": self.max_grad_norm, "shapes": [list(shape) for shape in self.noise.shapes]}

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None, *, model: bool = True) -> None:
        """Write a checkpoint: model, optimizer, noise, batches and the privacy spent.

        A run that is resumed from it gives the same bits as one that was never interrupted. The journal of the run is
        kept in the same directory. The file is as secret as the data. In distributed training every rank must call
        this: each writes the noise that it keeps into a part beside the file, and rank 0 everything else.

        Args:
          path: the file, which is replaced atomically.
          extra: more plain values or arrays to keep, such as the state of a scheduler.
          model: whether to keep model, optimizer and the state of torch's generators too. Without them, somebody else
            must save and restore them at the same step, as the adapters for trainers do; only a digest of the trained
            parameters is kept, which `load` checks.
        """
        keep = validation.flag("model", model)
        if self.optimizer._is_last_step_skipped:
            raise TrainingError("a checkpoint can only be written after a whole batch, not after a part of one")
        more = {"accountant": dict(self.accountant.state_dict()), "extra": dict(extra or {})}
        if keep:
            more |= {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "random": _random_state(self.model),
            }
        else:
            more["parameters"] = self.optimizer.parameters_digest()
        rank, world = self.optimizer._rank, self.optimizer._world
        if world == 1:
            self._write(path, self.noise.state_dict(), more)
            sharding.remove_old_parts(path, [])  # of a run that several ranks began
            return
        with sharding.all_or_none("write its part of the checkpoint"):
            noise = sharding.write_part(path, self.noise, rank, world)
        with sharding.all_or_none("write the checkpoint"):
            if rank == 0:
                self._write(path, noise, more)
                sharding.remove_old_parts(path, noise["parts"])

    def load(
        self, path: str | os.PathLike[str], *, allow_second_continuation: bool = False, model: bool = True
    ) -> dict[str, Any]:
        """Continue from a checkpoint of the same mechanism, data and model.

        Steps that were made after the checkpoint, before a crash, say, are made again. They must give the same bits as
        before, or `TrainingError` is raised: a second continuation with other results has the same noise as the first
        one, and the difference of both shows gradients without noise. For the same reason a checkpoint is refused if
        the run has saved a later one, or if the run's journal is not beside it.

        Args:
          path: the checkpoint.
          allow_second_continuation: continue nevertheless. Only set this if nothing that was computed after the
            checkpoint (models, metrics, checkpoints) has been or will be shown to anybody: the guarantee does not
            cover both continuations.
          model: whether the checkpoint has the model, as for `save`. If it has not, restore the model first.

        Returns:
          What `save` was given as `extra`. ValueError or TrainingError says why a checkpoint is refused; nothing is
          changed then.
        """
        from dpmf.training import _guards

        allow = validation.flag("allow_second_continuation", allow_second_continuation)
        with sharding.all_or_none("load the checkpoint", distributed=self.optimizer._world > 1):
            parts = ("accountant", "extra", *(_MODEL if validation.flag("model", model) else ("parameters",)))
            state, journal = self._read(path, parts, allow=allow, writes=self.optimizer._rank == 0)
            if not model and state["parameters"] != self.optimizer.parameters_digest():
                raise ValueError(f"checkpoint must be of this model at the same step, {path} is of other parameters")
            weights = _guards.plain_names(state["model"]) if model else {}
            mine = self.model.state_dict() if model else {}
            for name, value in mine.items():
                if getattr(weights.get(name), "shape", None) != value.shape or len(weights) != len(mine):
                    raise ValueError(
                        f"checkpoint must be of this model, {path} has other parameters or buffers ({name})"
                    )
            restore_noise = self.noise.prepared(sharding.states(path, state["noise"]))
        journal.resumed()
        restore_noise()
        self.journal = journal
        self.sampler.load_state_dict(state["sampler"])
        self.accountant.load_state_dict(state["accountant"])
        if model:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state["optimizer"])
        deliveries = self.optimizer.deliveries
        deliveries.restart()
        deliveries.draws.key = self.data_loader.dataset.key = self.sampler.key
        self.optimizer._is_last_step_skipped = False
        if model:
            _set_random_state(self.model, state["random"])
        return dict(state["extra"])


def _random_state(model: Any) -> dict[str, Any]:
    """The state of torch's generators that the model may use: on the CPU, and on its own device."""
    import torch

    device = next(model.parameters()).device
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_state(model: Any, states: Mapping[str, Any]) -> None:
    import torch

    torch.set_rng_state(states["cpu"])
    device = next(model.parameters()).device
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def make_private(
    model: Any,
    optimizer: Any,
    dataset: Any,
    mechanism: Mechanism,
    *,
    max_grad_norm: float,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    noise_multiplier: float | None = None,
    accountant: api.AnyAccountant = api.DEFAULT_ACCOUNTANT,
    seed: int | None = None,
    source: str = "fast",
    noise_dtype: str = "float32",
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    batch_first: bool = True,
    collate_fn: Any = None,
    num_workers: int = 0,
    loader_options: Mapping[str, Any] | None = None,
    expected_batch_size: float | None = None,
    max_batch_size: int | None = None,
    max_records: int | None = None,
    unit: Any = None,
    on_nonfinite: str = "zero",
) -> PrivateTraining:
    """Make training differentially private with the noise and the batches of a mechanism.

    Args:
      model: a module that Opacus supports, or one in its `DifferentiallyPrivateDistributedDataParallel`.
      optimizer: any torch optimizer over the model's parameters or some of them.
      dataset: an object with a length that returns a record by its index. One record is the unit of privacy, unless
        `unit` is given.
      mechanism: strategy and batching.
      max_grad_norm: the norm to which every record's gradient is clipped.
      target_epsilon: the ε for which the noise is calibrated; `target_delta` must be given with it.
      target_delta: the δ for which the noise is calibrated.
      noise_multiplier: the noise itself, for clipping norm 1 and the strategy as given, instead of a target.
      accountant: the accountant that calibrates and reports. One that only estimates is refused.
      seed: an integer that makes an experiment repeatable. By default batches and noise are drawn from a secret of the
        operating system.
      source: "fast", or "secure" for a cryptographically secure generator.
      noise_dtype: the precision in which noise is drawn, kept and added, "float32" or "float64".
      loss_reduction: whether the loss takes the "mean" or the "sum" over a batch.
      grad_sample_mode: how Opacus computes per-sample gradients: "hooks", "functorch" or "ew".
      batch_first: whether the first dimension of the inputs is that of the records.
      collate_fn: as for torch's `DataLoader`. It is never called with an empty batch.
      num_workers: as for torch's `DataLoader`.
      loader_options: further arguments of torch's `DataLoader`.
      expected_batch_size: a public constant by which sums are divided, in place of n/b. Then not even the number of
        records n is used. With `unit` it counts users.
      max_batch_size: gives all batches this many rows. Rows that fill up a batch have no effect on the model. A bin
        with more records is cut, and the probability of that is charged to δ. With `unit` it counts users, and every
        batch has this many rows for each record of the user with most of them.
      max_records: with `max_batch_size`, a public upper bound on n, for which the charge is computed. By default it is
        n, which is public then.
      unit: for every record the user it belongs to. Users are thrown into bins then, the mean of the gradients of a
        user's records is clipped to `max_grad_norm`, and a user takes the place of a record in the guarantee.
      on_nonfinite: what a gradient of a record that is not finite does: it counts as "zero", or is a reason to "stop".
        To stop on it tells that it was there, which the guarantee does not cover.

    Returns:
      A `PrivateTraining`, whose model, optimizer and data loader replace your own.

    **Formal guarantees.** The models produced by the training loop are a post-processing of the mechanism with this
    noise multiplier, which was proved (ε, δ)-DP. Whatever is released of the run, and whenever it is stopped, is
    covered by the ε of the whole run. Two data sets are compared that differ by one record (or user, with `unit`):
    `relation` of the result says how. The guarantee rests on the following.

    * Step t uses every record of batch t exactly once, or `TrainingError` is raised and nothing is released; this
      holds for any number of loader workers, with Opacus' `BatchMemoryManager`, and on every rank. (A batch that was
      copied, to another device say, and used again later in place of another one of the same size is not noticed.) The
      first step after a gap between throws adds the noise of the gap too.
    * What a record contributes has a norm of at most `max_grad_norm` (`clip_factors`), or is zero.
    * What the model draws in its forward pass, and what loading draws, comes from the run's key
      (docs/theory/randomness.md). What a loop draws outside of these must not depend on how many records there are.
    * With `max_batch_size` the cost of cut batches is part of δ (docs/theory/batch-sizes.md). `dpmf.delta` and other
      functions that are asked about `mechanism` and `noise_multiplier` do not know that cost.
    * The number of batches in an epoch is a public constant, not computed from the number of records.

    The documentation on training says what floating-point noise leaves open.
    """
    try:
        import torch
        from opacus import PrivacyEngine
        from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
        from torch.utils.data import default_collate

        from dpmf.training import _accountant, _draws, _guards, _loader, _optimizer
    except ImportError:
        raise errors.missing_extra("torch and opacus", "torch", "make_private") from None

    if not isinstance(mechanism, Mechanism):
        raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise validation.wrong("dataset", "a dataset with a length and records by index", dataset)
    norm = validation.positive("max_grad_norm", max_grad_norm)
    validation.choice("grad_sample_mode", grad_sample_mode, ("hooks", "functorch", "ew"))
    validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    validation.choice("on_nonfinite", on_nonfinite, ("zero", "stop"))
    workers = validation.integer("num_workers", num_workers, at_least=0)
    _guards.check_new(model, optimizer)
    known = {id(p) for p in model.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or any(id(p) not in known for p in trained):
        raise ArgumentError("optimizer", "must be over parameters of the model, this one has none or others")
    coarse = {p.dtype for p in trained} - {torch.float32, torch.float64}
    if coarse:
        raise ArgumentError(
            "model", f"must have parameters in float32 or float64, got {coarse.pop()}: {COARSE} (model.float())"
        )

    distributed = isinstance(model, DPDDP)
    if not distributed and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ArgumentError(
            "model", "must be wrapped in Opacus' DifferentiallyPrivateDistributedDataParallel, not torch's"
        )
    device = trained[0].device
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError("model", f"must be on a CPU or a GPU with CUDA, not on {device.type}, which is not tested")
    if source == "secure" and device.type != "cpu":
        raise ArgumentError("source", f"must be fast with a model on {device.type}: secure noise is made on the CPU")
    rank, world, key = 0, 1, new_key(seed)
    if distributed:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # All ranks must draw the same assignment of records to batches.
        shared = torch.tensor(list(key), dtype=torch.uint8, device=device)
        torch.distributed.broadcast(shared, 0)
        key = bytes(shared.cpu().tolist())
    sampler = BatchSampler(
        len(dataset), mechanism, seed=key, source=source, rank=rank, world_size=world, unit=unit,
        expected_batch_size=expected_batch_size, max_batch_size=max_batch_size, max_records=max_records,
    )  # fmt: skip

    sigma, calibration, proved = _target.noise_for(
        mechanism, target_epsilon, target_delta, noise_multiplier, accountant, cut=sampler.cut, says=rank == 0
    )
    shapes = [tuple(p.shape) for p in trained]
    noise = NoiseStream(
        mechanism,
        shapes,
        shards=sharding.even_shares(shapes, rank, world) if distributed else None,
        seed=key,
        source=source,
        dtype=noise_dtype,
        backend="torch",
        device=device,
    )
    if distributed:
        sharding.check_ranks(noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that its own noise, which is not used, is not secure
        _accountant.register()
        engine = PrivacyEngine(accountant=_accountant.NAME)
    # Torch warns in every backward pass that the first layer's inputs have no gradients. Opacus' hooks do not use them.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    tracker = _accountant.MatrixMechanismAccountant(mechanism, accountant, proved, sampler.cut)
    engine.accountant = tracker

    draws = _draws.Draws(key, "the model", device)
    deliveries = _loader.Deliveries(sampler, lambda: noise.step, draws)
    # A loader draws a seed whenever an iteration begins. From the global generator, that would change the random
    # numbers of a resumed run.
    own = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:4], "little"))
    loader = _loader.Loader(
        deliveries,
        dataset=_loader.NumberedDataset(dataset, len(dataset), key, collate_fn or default_collate),
        batch_sampler=_loader.NumberedBatches(sampler, lambda: noise.step),
        collate_fn=_loader.as_loaded,
        num_workers=workers,
        **{"generator": own, **(loader_options or {})},
    )
    module = engine._prepare_model(
        model, batch_first=batch_first, loss_reduction=loss_reduction, grad_sample_mode=grad_sample_mode
    )
    module.forward = partial(draws.forward, module.forward)
    passes = _guards.Passes(trained, loss_reduction)
    module.register_forward_pre_hook(passes.before)
    module.register_forward_pre_hook(deliveries, with_kwargs=True)
    module.register_forward_hook(passes.after)
    deliveries.on_restart = lambda: passes.forget(module)
    _guards.keep_names(module)
    make = _optimizer.DistributedCorrelatedDPOptimizer if distributed else _optimizer.CorrelatedDPOptimizer
    private = make(
        optimizer,
        noise=noise,
        deliveries=deliveries,
        passes=passes,
        noise_multiplier=sigma,
        max_grad_norm=norm,
        # Opacus averages over the ranks, so that each divides by its share.
        expected_batch_size=sampler.expected_batch_size / world,
        loss_reduction=loss_reduction,
        on_nonfinite=on_nonfinite,
    )
    _guards.refuse_direct_steps(optimizer, private)
    private.attach_step_hook(tracker.get_optimizer_hook_fn(sample_rate=1 / mechanism.batching.batches_per_epoch))
    return PrivateTraining(
        model=module,
        optimizer=private,
        data_loader=loader,
        mechanism=mechanism if sampler.cut is None else CutMechanism(mechanism.strategy, mechanism.batching),
        noise_multiplier=sigma,
        max_grad_norm=norm,
        accountant=tracker,
        privacy_engine=engine,
        calibration=calibration,
        sampler=sampler,
        noise=noise,
        journal=Journal(writes=rank == 0),
    )
