"""PyTorch: one call from model, optimizer, dataset and mechanism to private training with Opacus."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dpmf import api, errors, validation
from dpmf.mechanism import Mechanism
from dpmf.results import Calibration
from dpmf.training import checkpoint
from dpmf.training._sources import KEY_BYTES, new_key
from dpmf.training.noise import NoiseStream
from dpmf.training.sampler import BallsInBinsSampler


@dataclass(eq=False)
class PrivateTraining:
    """What `make_private` gives back; unpacks as ``model, optimizer, data_loader = private``.

    Attributes:
      model, optimizer, data_loader: to be used in place of one's own, in an ordinary training loop.
      mechanism: what the training is.
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      max_grad_norm: the clipping norm.
      accountant: Opacus' interface to the true guarantee, also that of `privacy_engine`.
      calibration: how σ came about, where it was calibrated.
      sampler, noise: the balls-in-bins batches and the rows of C⁻¹Z.
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
    sampler: BallsInBinsSampler
    noise: NoiseStream

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.data_loader))

    @property
    def steps_left(self) -> int:
        return self.noise.iterations - self.noise.step

    def get_epsilon(self, delta: float) -> float:
        """The ε spent so far."""
        return float(self.accountant.get_epsilon(delta))

    def _identity(self) -> dict[str, Any]:
        batching = self.mechanism.batching
        return {
            "mechanism": self.mechanism.name,
            "matrix": self.noise.strategy_digest(),
            "allocation": [batching.epochs, batching.batches_per_epoch, batching.iterations],
            "records": self.sampler.size,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "shapes": [list(shape) for shape in self.noise.shapes],
        }

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write everything a resumed run needs to be the same, bit for bit: model, optimizer, noise, batches, ε so far.

        `extra` may hold more (a scheduler's state, say). In distributed training the first process writes. The file is
        as secret as the data.
        """
        import torch

        if self.optimizer._is_last_step_skipped:
            raise errors.TrainingError("a checkpoint can only be written after a whole batch, not within a virtual one")
        if not self.optimizer._adds_noise:
            return
        checkpoint.save(
            path,
            {
                "identity": self._identity(),
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "noise": self.noise.state_dict(),
                "sampler": self.sampler.state_dict(),
                "accountant": dict(self.accountant.state_dict()),
                "torch_rng": torch.get_rng_state(),
                "extra": dict(extra or {}),
            },
        )

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a checkpoint of the same mechanism, data and model; gives `extra` back.

        Nothing is changed where the checkpoint is damaged or of something else: ValueError says which.
        """
        import torch

        state = checkpoint.load(path)
        try:
            told, parts = (
                state["identity"],
                [state[n] for n in ("model", "optimizer", "noise", "sampler", "accountant")],
            )
            rng, extra = state["torch_rng"], state["extra"]
        except KeyError as error:
            raise ValueError(f"checkpoint must be one that save() wrote, {path} has no {error}") from None
        for name, mine in self._identity().items():
            if told.get(name) != mine:
                if name == "matrix":
                    raise ValueError(f"checkpoint must be of this mechanism, {path} has another matrix C ({mine[:8]}…)")
                raise ValueError(f"checkpoint must have {name} = {mine!r}, {path} has {told.get(name)!r}")
        model, optimizer, noise, sampler, accountant = parts
        for name, value in self.model.state_dict().items():
            if getattr(model.get(name), "shape", None) != value.shape or len(model) != len(self.model.state_dict()):
                raise ValueError(f"checkpoint must be of this model, {path} has other parameters or buffers ({name})")
        self.noise.load_state_dict(noise, step_only=not self.optimizer._adds_noise)
        self.sampler.load_state_dict(sampler)
        self.sampler.seek(self.noise.step)
        self.accountant.load_state_dict(accountant)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer._step_skip_queue.clear()
        torch.set_rng_state(rng)
        return dict(extra)


class _CollateWithEmpty:
    """Collate that turns an empty batch into tensors of length 0, shaped like those of the first record."""

    def __init__(self, collate: Any, dataset: Any):
        self._collate = collate
        self._dataset = dataset

    def __call__(self, batch: list[Any]) -> Any:
        if batch:
            return self._collate(batch)
        return _emptied(self._collate([self._dataset[0]]))


def _emptied(batch: Any) -> Any:
    import torch

    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_emptied(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise TypeError(f"collate_fn must give tensors, dictionaries, lists or tuples, got {type(batch).__name__}")


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
) -> PrivateTraining:
    """Make training differentially private with the noise and the batches of a mechanism.

    Args:
      model: a module Opacus supports, or one in its `DifferentiallyPrivateDistributedDataParallel`.
      optimizer: any torch optimizer over (some of) the model's parameters.
      dataset: has a length and gives a record by index; one record is what is protected.
      mechanism: strategy, epochs and batches per epoch.
      max_grad_norm: every record's gradient is clipped to this norm.
      target_epsilon: what the noise is calibrated for, with
      target_delta: the δ of the target; or
      noise_multiplier: the noise itself, for clipping norm 1 and the strategy as given.
      accountant: the dpmf accountant that calibrates and reports; one that only estimates is refused.
      seed: for experiments that are repeated. By default batches and noise come from a secret of the operating system.
      source: "secure" for a cryptographically secure generator.
      noise_dtype: "float64" makes, keeps and adds the noise in double precision.
      loss_reduction: "mean" or "sum", what the loss does over a batch.
      grad_sample_mode: how Opacus finds per-sample gradients: "hooks", "functorch" or "ew".
      batch_first: whether the first dimension of the inputs is that of the records.
      collate_fn: for the `DataLoader`; empty batches are taken care of.
      num_workers: for the `DataLoader`.
      loader_options: more of those.

    **Formal guarantees.** The models produced by at most N steps of the training loop, one on every batch of the data
    loader, are a post-processing of the mechanism with this noise multiplier, which was proved (ε, δ)-DP for adding or
    removing a record. Per-sample clipping and its rounding are Opacus'. What floating-point noise leaves open is said
    in the documentation on training.
    """
    try:
        import torch
        from opacus import PrivacyEngine
        from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
        from torch.utils.data import DataLoader, default_collate

        from dpmf.training import _accountant, _optimizer
    except ImportError:
        raise errors.missing_extra("torch and opacus", "torch", "make_private") from None

    if not isinstance(mechanism, Mechanism):
        raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise validation.wrong("dataset", "a dataset with a length and records by index", dataset)
    norm = validation.positive("max_grad_norm", max_grad_norm)
    validation.choice("grad_sample_mode", grad_sample_mode, ("hooks", "functorch", "ew"))
    validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    workers = validation.integer("num_workers", num_workers, at_least=0)
    known = {id(p) for p in model.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or any(id(p) not in known for p in trained):
        raise ValueError("optimizer must be over parameters of the model, this one has none or others")

    distributed = isinstance(model, DPDDP)
    if not distributed and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError("model must be wrapped in Opacus' DifferentiallyPrivateDistributedDataParallel, not torch's")
    rank, world, key = 0, 1, new_key(seed)
    if distributed:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        shared = torch.tensor(list(key), dtype=torch.uint8, device=trained[0].device)
        torch.distributed.broadcast(shared, 0)  # all processes must throw the same balls
        key = bytes(shared.cpu().tolist())
        assert len(key) == KEY_BYTES
    sampler = BallsInBinsSampler(len(dataset), mechanism, seed=key, source=source, rank=rank, world_size=world)

    sigma, calibration, proved = _noise(mechanism, target_epsilon, target_delta, noise_multiplier, accountant)
    device = trained[0].device
    noise = NoiseStream(
        mechanism,
        [tuple(p.shape) for p in trained],
        seed=key,
        source=source,
        dtype=noise_dtype,
        backend="torch",
        device=device,
    )
    if source == "secure" and device.type != "cpu":
        raise ValueError(f"source must be fast with a model on {device.type}: the secure generator runs on the CPU")
    sampler.follow(lambda: noise.step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the noise is not from torchcsprng, which is not used
        _accountant.register()
        engine = PrivacyEngine(accountant=_accountant.NAME)
    tracker = _accountant.MatrixMechanismAccountant(mechanism, accountant, proved)
    engine.accountant = tracker
    # The loader draws a seed whenever it is iterated over: from the global generator, that would set a resumed run
    # apart from one that was not interrupted.
    own = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:4], "little"))
    options = {"generator": own, **(loader_options or {})}
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_CollateWithEmpty(collate_fn or default_collate, dataset),
        num_workers=workers,
        **options,
    )
    module = engine._prepare_model(
        model, batch_first=batch_first, loss_reduction=loss_reduction, grad_sample_mode=grad_sample_mode
    )
    module.forbid_grad_accumulation()
    make = _optimizer.DistributedCorrelatedDPOptimizer if distributed else _optimizer.CorrelatedDPOptimizer
    private = make(
        optimizer,
        noise=noise,
        sampler=sampler,
        prefetched=workers * (loader.prefetch_factor or 0),
        noise_multiplier=sigma,
        max_grad_norm=norm,
        # Opacus averages over the processes: each divides by its share.
        expected_batch_size=sampler.expected_batch_size / world,
        loss_reduction=loss_reduction,
    )
    private.attach_step_hook(tracker.get_optimizer_hook_fn(sample_rate=1 / mechanism.batching.batches_per_epoch))
    return PrivateTraining(
        module, private, loader, mechanism, sigma, norm, tracker, engine, calibration, sampler, noise
    )  # fmt: skip


def _noise(
    mechanism: Mechanism,
    target_epsilon: float | None,
    target_delta: float | None,
    noise_multiplier: float | None,
    accountant: api.AnyAccountant,
) -> tuple[float, Calibration | None, tuple[float, float] | None]:
    """σ, how it was calibrated, and the (ε, δ) that was proved for it."""
    if (noise_multiplier is None) == (target_epsilon is None):
        raise ValueError("either target_epsilon with target_delta, or noise_multiplier must be given")
    if noise_multiplier is not None:
        if target_delta is not None:
            raise ValueError("target_delta must be given with target_epsilon only, not with noise_multiplier")
        return validation.positive("noise_multiplier", noise_multiplier), None, None
    if target_delta is None:
        raise ValueError("target_delta must be given with target_epsilon")
    found = api.calibrate(
        mechanism, target_epsilon=float(target_epsilon or 0), target_delta=target_delta, accountant=accountant
    )
    if not isinstance(found, Calibration):
        raise ValueError(f"accountant must be one that proves its bound to train with, {found.accountant} estimates it")
    return found.noise_multiplier, found, (found.target_epsilon, found.target_delta)
