"""PyTorch: one call from model, optimizer, dataset and mechanism to private training."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmf import api, errors, validation
from dpmf.errors import ArgumentError, TrainingError
from dpmf.mechanism import Mechanism
from dpmf.run import Run, checked_stops, only_mechanism
from dpmf.training import checkpoint, sharding
from dpmf.training._sources import new_key
from dpmf.training._tails import check_reach
from dpmf.training._target import Guarantee, noise_for
from dpmf.training.journal import Journal
from dpmf.training.levels import noise_levels
from dpmf.training.noise import NoiseStream
from dpmf.training.sampler import BatchSampler

if TYPE_CHECKING:
    from dpmf.training._loader import Loader
    from dpmf.training.step import Step

_MODEL = ("model", "optimizer", "random")  # what a trainer may keep instead


@dataclass(eq=False)
class PrivateTraining:
    """A private training run, made by `make_private`; unpacks as ``model, optimizer, data_loader = private``.

    Attributes:
      model, optimizer, data_loader: replace your own in an ordinary training loop.
      current: the step that comes next, which is the only way to released weights.
      guarantee: what was proved, and by whom.
      accountant: the guarantee, behind Opacus' interface; also the accountant of `privacy_engine`.
      privacy_engine: Opacus' engine.
    """

    model: Any
    optimizer: Any
    data_loader: Loader
    current: Step
    guarantee: Guarantee
    accountant: Any
    privacy_engine: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.data_loader))

    @property
    def run(self) -> Run:
        """Everything that the guarantee depends on; `dpmf.epsilon`, `dpmf.tradeoff` and so on take it as it is."""
        return self.current.run

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that was accounted for."""
        return self.run.mechanism

    @property
    def noise_multiplier(self) -> float:
        """σ for clipping norm 1 and the strategy as given."""
        return self.run.noise_multiplier

    @property
    def calibration(self) -> Any:
        """How σ was found, if it was calibrated."""
        return self.guarantee.calibration

    @property
    def sampler(self) -> BatchSampler:
        """The batches."""
        return self.current.batches

    @property
    def noise(self) -> NoiseStream:
        """The rows of C⁻¹Z."""
        return self.current.noise

    @property
    def journal(self) -> Journal:
        """What this run has released (see `dpmf.training.journal`)."""
        return self.current.journal

    @property
    def steps_made(self) -> int:
        """The number of steps made so far."""
        return self.current.t

    @property
    def steps_left(self) -> int:
        """The number of steps that are still covered by the guarantee."""
        return self.run.steps - self.steps_made

    def step(self, loss: Any, batch: Any, *, largest: int | None = None) -> None:
        """Make a whole step on the batch that the loader has just delivered.

        Args:
          loss: the loss of one record: a function of (model, record), where `record` is `batch` without its first
            dimension, and `model` is called like the module. It returns one number.
          batch: what the loader has delivered, on the device of the model.
          largest: how many records are computed at a time, at most; by default all that were delivered.

        The gradients of records come from `torch.func`. A batch that the loader delivers in parts (`in_parts`) takes
        one call for each, and the step is made in the last.
        """
        from dpmf.training import _functional

        step = self.current
        _functional.step(self.model, self.optimizer.params, step, loss, batch, largest)
        if step.complete:
            self.optimizer.release()

    def in_parts(self, largest: int) -> Loader:
        """The data loader, with batches that do not fit into memory in parts of at most so many records."""
        return self.data_loader.in_parts(validation.integer("largest", largest, at_least=1))

    def get_epsilon(self, delta: float) -> float:
        """An ε for which the whole run is (ε, delta)-DP, whenever and for whatever reason it is stopped.

        At a stopping point that was named in advance it is that of stopping there (`dpmf.epsilon` with `stop=`).

        Args:
          delta: the δ of the guarantee. At `target_delta` the answer is there at once; at another δ a search takes
            seconds to half a minute, and a line on stderr says so.
        """
        return self.guarantee.epsilon(delta, self.steps_made)

    def statement(self, delta: float | None = None) -> Any:
        """What holds of this run: `str()` is a paragraph, `to_dict()` one JSON object.

        Args:
          delta: at which δ; by default the target's, or 10⁻⁵ without a target.
        """
        return self.guarantee.statement(delta)

    @cached_property
    def noise_levels(self) -> Any:
        """The standard deviation of the noise in the gradient that the optimizer gets, for every step, as an array.

        For corrections of the second moment of Adam and the like, which it is a part of.
        """
        run = self.run
        return noise_levels(run.mechanism, run.noise_multiplier) * run.clip_norm / (run.divisor or 1.0)

    def unwrap(self) -> Any:
        """End the run and take the model out of it.

        Returns:
          The module that `make_private` was given, without Opacus' hooks. The run can make no further steps. Another
          private run with this model is a second mechanism, and on the same records the privacy of both is spent.
        """
        self.optimizer.remove()
        del self.model._module.dpmf_run
        return self.model.to_standard_module()

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this run."""
        told = {name: value for name, value in self.run.to_dict().items() if name != "code"}
        return {**told, "rows": self.sampler.size, "batches": self.sampler.options,
                "shapes": [list(shape) for shape in self.noise.shapes]}  # fmt: skip

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None, *, model: bool = True) -> None:
        """Write a checkpoint: model, optimizer, noise and batches.

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
        keep, step = validation.flag("model", model), self.current
        if step.half_made:
            raise TrainingError("a checkpoint can only be written after a whole batch, not after a part of one")
        self.sampler.seek(step.t)
        state: dict[str, Any] = {
            "run": step.journal.run,
            "identity": self._identity(),
            "sampler": self.sampler.state_dict(),
            "extra": dict(extra or {}),
        }
        if keep:
            state |= {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "random": _random_state(self.model),
            }
        else:
            state["parameters"] = self._parameters_digest()

        def write(noise: Mapping[str, Any], parts: Sequence[str]) -> None:
            step.journal.begin(Path(path), step.t)
            checkpoint.save(path, {**state, "noise": noise})
            step.journal.saved(step.t)
            sharding.remove_old_parts(path, parts)  # of earlier checkpoints, with more ranks or fewer

        if step.world == 1:
            write(self.noise.state_dict(), [])
            return
        with sharding.all_or_none("write its part of the checkpoint"):
            noise = sharding.write_part(path, self.noise, step.rank, step.world)
        with sharding.all_or_none("write the checkpoint"):
            if step.rank == 0:
                write(noise, noise["parts"])

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

        allow, whole = validation.flag("allow_second_continuation", allow_second_continuation), model
        step = self.current
        with sharding.all_or_none("load the checkpoint", distributed=step.world > 1):
            state = self._read(path, _MODEL if validation.flag("model", whole) else ("parameters",))
            journal = Journal.resume(
                Path(path), state["run"], state["noise"]["step"], allow=allow, writes=step.rank == 0
            )
            if not whole and state["parameters"] != self._parameters_digest():
                raise ValueError(f"checkpoint must be of this model at the same step, {path} is of other parameters")
            weights = _guards.plain_names(state["model"]) if whole else {}
            mine = self.model.state_dict() if whole else {}
            for name, value in mine.items():
                if getattr(weights.get(name), "shape", None) != value.shape or len(weights) != len(mine):
                    raise ValueError(
                        f"checkpoint must be of this model, {path} has other parameters or buffers ({name})"
                    )
            restore_noise = self.noise.prepared(sharding.states(path, state["noise"]))
        journal.resumed()
        restore_noise()
        step.journal = journal
        self.sampler.load_state_dict(state["sampler"])
        step.restart()
        step.draws.key = self.data_loader.dataset.key = self.sampler.key
        if whole:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state["optimizer"])
            _set_random_state(self.model, state["random"])
        return dict(state["extra"])

    def _read(self, path: str | os.PathLike[str], parts: tuple[str, ...]) -> dict[str, Any]:
        """The content of a checkpoint that fits this run. Nothing is changed yet."""
        state = checkpoint.load(path)
        try:
            told, sampler, noise = (state[name] for name in ("identity", "sampler", "noise"))
            step, keys = noise["step"], (sampler["key"], noise["key"])
            for name in ("run", "extra", *parts):
                state[name]
        except (KeyError, TypeError) as error:
            raise ValueError(f"checkpoint must be one that save() wrote, {path} has no {error}") from None
        for name, mine in self._identity().items():
            if told.get(name) != mine:
                if name == "matrix":
                    raise ValueError(f"checkpoint must be of this mechanism, {path} has another matrix C ({mine[:8]}…)")
                raise ValueError(f"checkpoint must have {name} = {mine!r}, {path} has {told.get(name)!r}")
        if keys[0] != keys[1] or sampler["position"] != step:
            raise ValueError(f"checkpoint must hold batches and noise of one run at one step, {path} does not")
        return state

    def _parameters_digest(self) -> str:
        from dpmf.training.step import digest

        return digest(self.optimizer.params)


def _random_state(model: Any) -> dict[str, Any]:
    """The state of torch's generators, which the loop may use: on the CPU, and on the model's device."""
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
    records: int | None = None,
    expected_batch_size: float | None = None,
    max_batch_size: int | None = None,
    unit: Any = None,
    stopping_points: Sequence[int] = (),
    on_nonfinite: str = "zero",
) -> PrivateTraining:
    """Make training differentially private with the noise and the batches of a mechanism.

    Args:
      model: a module that Opacus supports, or one in its `DifferentiallyPrivateDistributedDataParallel`. Its parameters
        may have any precision; what is clipped, added up and drawn is float32 or more.
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
      records: a public number in place of the number of records n, so that n is not used: a rounded one, or, with
        `max_batch_size`, an upper bound. With `unit` it counts users.
      expected_batch_size: a public constant by which sums are divided; by default records/b.
      max_batch_size: gives all batches this many rows. Rows that fill up a batch have no effect on the model. A bin
        with more records is cut, and the probability of that is charged to δ. With `unit` it counts users, and every
        batch has this many rows for each record of the user with most of them.
      unit: for every record the user it belongs to. Users are thrown into bins then, the mean of the gradients of a
        user's records is clipped to `max_grad_norm`, and a user takes the place of a record in the guarantee.
      stopping_points: the numbers of steps, named in advance, at which you may stop and look at less than the ε of the
        whole run. δ is divided over them and the end.
      on_nonfinite: what a gradient of a record that is not finite does: it counts as "zero", or is a reason to "stop".
        To stop on it tells that it was there, which the guarantee does not cover.

    Returns:
      A `PrivateTraining`, whose model, optimizer and data loader replace your own.

    **Formal guarantees.** The models produced by the training loop are a post-processing of the mechanism with this
    noise multiplier, which was proved (ε, δ)-DP. Whatever is released of the run, and whenever it is stopped, is
    covered by the ε of the whole run. `run.relation` of the result says which data sets are compared, and `statement()`
    everything that holds. It rests on the following.

    * Steps are those of `dpmf.training.step.Step`: each on its whole batch, once, with clipped contributions, exact
      sums and the noise of its row, or `TrainingError` is raised and nothing is released. This holds for any number of
      loader workers, for batches in parts, and on every rank. (A batch that was copied, to another device say, and used
      again later in place of another one of the same size is not noticed.)
    * What the model draws in its forward pass, and what loading draws, comes from the run's key
      (docs/theory/randomness.md). What a loop draws outside of these must not depend on how many records there are.
    * The gradient of a record is a function of the record, the weights and its own draws. `PrivateTraining.step` takes
      the loss of one record; in a loop of your own, losses that are seen to combine records in another way than
      `loss_reduction` says are refused. Kernels may round the gradients of others in another way in a batch of another
      shape (docs/theory/floating-point.md).
    * With `max_batch_size` the cost of cut batches is part of δ (docs/theory/batch-sizes.md).
    * The number of batches in an epoch is a public constant, not computed from the number of records.
    """
    try:
        import torch
        from opacus import PrivacyEngine
        from torch.utils.data import default_collate

        from dpmf.training import _accountant, _guards, _loader
        from dpmf.training._optimizer import PrivateOptimizer
        from dpmf.training.step import Step
    except ImportError:
        raise errors.missing_extra("torch and opacus", "torch", "make_private") from None

    norm = validation.positive("max_grad_norm", max_grad_norm)
    validation.choice("grad_sample_mode", grad_sample_mode, ("hooks", "functorch", "ew"))
    reduction = validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    validation.choice("on_nonfinite", on_nonfinite, ("zero", "stop"))
    workers = validation.integer("num_workers", num_workers, at_least=0)
    trained = _checked(model, optimizer, dataset, mechanism, source)
    rank, world, key = _ranks(model, new_key(seed), trained[0].device)
    sampler = BatchSampler(
        len(dataset), mechanism, seed=key, source=source, rank=rank, world_size=world, unit=unit, records=records,
        expected_batch_size=expected_batch_size, max_batch_size=max_batch_size,
    )  # fmt: skip
    stops = checked_stops(stopping_points, sampler.steps)
    sigma, calibration, proved = noise_for(
        mechanism, target_epsilon, target_delta, noise_multiplier, accountant, cut=sampler.cut, ways=len(stops) + 1,
        says=rank == 0,
    )  # fmt: skip
    run = sampler.run(mechanism, sigma, norm, divided=reduction == "mean", precision=noise_dtype, stops=stops)
    guarantee = Guarantee(run, accountant, calibration, proved)
    shapes = [tuple(p.shape) for p in trained]
    noise = NoiseStream(
        mechanism, shapes, shards=sharding.even_shares(shapes, rank, world) if world > 1 else None, seed=key,
        source=source, dtype=noise_dtype, backend="torch", device=trained[0].device,
    )  # fmt: skip
    check_reach(mechanism, sigma, noise.reach, sum(p.numel() for p in trained))
    if world > 1:
        sharding.check_ranks(noise)
    step = Step(run, sampler, noise, trained, rank=rank, world=world, stops=on_nonfinite == "stop")
    # A loader draws a seed whenever an iteration begins. From the global generator, that would change the random
    # numbers of a resumed run.
    own = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:4], "little"))
    loader = _loader.Loader(
        step,
        dataset=_loader.NumberedDataset(dataset, len(dataset), key, collate_fn or default_collate),
        num_workers=workers,
        **{"generator": own, **(loader_options or {})},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that its own noise, which is not used, is not secure
        engine = PrivacyEngine(accountant="rdp")
    module = engine._prepare_model(
        model, batch_first=batch_first, loss_reduction=reduction, grad_sample_mode=grad_sample_mode
    )
    passes = _guards.Passes(step, trained, reduction)
    module.register_forward_pre_hook(passes.before, with_kwargs=True)
    module.register_forward_hook(passes.after)
    module.forward = partial(step.draws.forward, module.forward)
    _guards.keep_names(module)
    model.dpmf_run = True  # one model belongs to one run
    engine.accountant = _accountant.RunAccountant(step, lambda delta: guarantee.epsilon(delta, step.t))
    private = PrivateOptimizer(optimizer, step, trained, passes)
    return PrivateTraining(module, private, loader, step, guarantee, engine.accountant, engine)


def _checked(model: Any, optimizer: Any, dataset: Any, mechanism: Any, source: str) -> list[Any]:
    """The parameters that are trained, if everything is what it must be."""
    from dpmf.training import _guards

    only_mechanism(mechanism)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise validation.wrong("dataset", "a dataset with a length and records by index", dataset)
    _guards.check_new(model, optimizer)
    known = {id(p) for p in model.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or any(id(p) not in known for p in trained):
        raise ArgumentError("optimizer", "must be over parameters of the model, this one has none or others")
    device = trained[0].device
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError("model", f"must be on a CPU or a GPU with CUDA, not on {device.type}, which is not tested")
    if source == "secure" and device.type != "cpu":
        raise ArgumentError("source", f"must be fast with a model on {device.type}: secure noise is made on the CPU")
    return trained


def _ranks(model: Any, key: bytes, device: Any) -> tuple[int, int, bytes]:
    """This process's rank, the number of processes, and the key, which all of them share."""
    import torch
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP

    if not isinstance(model, DPDDP):
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ArgumentError(
                "model", "must be wrapped in Opacus' DifferentiallyPrivateDistributedDataParallel, not torch's"
            )
        return 0, 1, key
    shared = torch.tensor(list(key), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(shared, 0)
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), bytes(shared.cpu().tolist())
