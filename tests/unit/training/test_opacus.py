"""make_private: the right noise, batches and ε through Opacus, checkpoints, virtual batches, several processes."""

from __future__ import annotations

import datetime
import math
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_runs import (
    MECHANISM,
    RECORDS,
    SEED,
    N,
    dataset,
    linear,
    network,
    private,
    step,
    train,
    weights,
    with_workers,
)
from waiting import until

import dpmf
from dpmf.errors import ArgumentError, MissingExtraError, TrainingError
from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent
from dpmf.training import NoiseStream, PrivateTraining, _target, checkpoint, make_private

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
from opacus.accountants import create_accountant  # noqa: E402
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402


def test_one_call_trains_with_the_target_met() -> None:
    run = private(noise_multiplier=None, target_epsilon=4.0, target_delta=1e-4, accountant="renyi")
    assert run.get_epsilon(1e-4) == 0.0
    train(run, N)
    assert run.steps_left == 0
    assert run.calibration is not None
    assert run.noise_multiplier == run.calibration.noise_multiplier
    assert run.get_epsilon(1e-4) == run.privacy_engine.get_epsilon(1e-4) == 4.0
    exact = dpmf.epsilon(MECHANISM, noise_multiplier=run.noise_multiplier, delta=1e-6, accountant="renyi").epsilon
    assert run.get_epsilon(1e-6) == exact > 4.0
    with pytest.raises(TrainingError, match="all 24 steps"):
        train(run, 1)
    run.optimizer.zero_grad()


def test_the_privacy_spent_is_that_of_the_whole_run_whenever_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ε of the steps made does not hold for a rule to stop that looks at the models."""
    run = private(accountant="renyi")
    assert run.get_epsilon(1e-5) == 0.0
    train(run, 1)
    whole = dpmf.epsilon(MECHANISM, noise_multiplier=1.0, delta=1e-5, accountant="renyi").epsilon
    assert run.get_epsilon(1e-5) == whole
    train(run, 8)
    monkeypatch.setattr(_target, "whole_epsilon", lambda *_: pytest.fail("searched again"))
    assert run.get_epsilon(1e-5) == whole


def test_a_matrix_is_bounded_by_the_whole_of_it() -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.matrix(MECHANISM.strategy.matrix(N)), MECHANISM.batching)
    run = private(mechanism, accountant="renyi")
    train(run, 9)
    whole = dpmf.epsilon(mechanism, noise_multiplier=1.0, delta=1e-5, accountant="renyi").epsilon
    assert run.get_epsilon(1e-5) == whole


def test_the_accountant_is_registered_with_opacus() -> None:
    run = private()
    accountant = create_accountant("dpmf")
    assert type(accountant) is type(run.accountant)
    for use in (
        lambda: accountant.get_epsilon(1e-5),
        lambda: accountant.step(noise_multiplier=1.0, sample_rate=0.1),
    ):
        with pytest.raises(TrainingError, match=r"use dpmf\.training\.make_private"):
            use()


def test_it_is_not_the_poisson_guarantee() -> None:
    run = private(accountant="renyi")
    train(run, N)
    poisson = create_accountant("rdp")
    for _ in range(N):
        poisson.step(noise_multiplier=1.0, sample_rate=1 / 8)
    # Correlated noise at the same multiplier has a larger sensitivity: Opacus' own number would be too small.
    assert run.get_epsilon(1e-5) > poisson.get_epsilon(1e-5)


@pytest.mark.parametrize("largest", [1, 2, 100])
def test_virtual_batches_make_the_same_model(largest: int) -> None:
    whole, split = private(model=linear()), private(model=linear())
    train(whole, N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = BatchMemoryManager(
            data_loader=split.data_loader, max_physical_batch_size=largest, optimizer=split.optimizer
        )
        with manager as loader:
            train(split, N, loader)
    assert split.accountant.history == whole.accountant.history
    np.testing.assert_allclose(weights(split), weights(whole), atol=1e-5)


def test_empty_batches_are_steps_with_noise() -> None:
    run = private()
    sizes, moved = [], []
    for x, y in run.data_loader:
        before = weights(run)
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
        sizes.append(len(x))
        moved.append(np.abs(weights(run) - before).max())
    assert sizes.count(0) == 2
    assert len(sizes) == 8
    assert min(moved) > 0


def test_workers_give_the_same_batches() -> None:
    alone, helped = private(), private(**with_workers(1))
    for run in (alone, helped):
        torch.manual_seed(1)  # dropout
        batches = iter(run.data_loader)
        for _ in range(4):
            step(run, next(batches))
    assert np.array_equal(weights(alone), weights(helped))
    next(batches)
    with pytest.raises(TrainingError, match="step 4 must be made on batch 4"):
        step(helped, next(batches))


def test_structured_batches() -> None:
    class Dictionaries(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.ones(4), "more": (torch.tensor(index), [1.0])}

    run = private(data=Dictionaries(), model=torch.nn.Linear(4, 1))
    batches = list(run.data_loader)
    empty = next(batch for batch in batches if len(batch["x"]) == 0)
    assert empty["x"].shape == (0, 4)
    assert empty["more"][0].shape == (0,)


@pytest.mark.parametrize("noise_dtype", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_precisions(dtype: str, noise_dtype: str) -> None:
    kind = getattr(torch, dtype)
    x, y = torch.randn(RECORDS, 4).to(kind), torch.randn(RECORDS, 1).to(kind)
    run = private(
        model=torch.nn.Linear(4, 1).to(kind), data=torch.utils.data.TensorDataset(x, y), noise_dtype=noise_dtype
    )
    for a, b in run.data_loader:
        run.optimizer.zero_grad()
        torch.nn.functional.mse_loss(run.model(a), b).backward()
        run.optimizer.step()
    assert all(p.dtype == kind and p.isfinite().all() for p in run.model.parameters())


# What a training loop must not do.


def test_a_batch_left_out_is_refused() -> None:
    run = private()
    batches = iter(run.data_loader)
    step(run, next(batches))
    next(batches)
    with pytest.raises(TrainingError, match="step 1 must be made on batch 1"):
        step(run, next(batches))


def test_two_steps_on_one_batch_are_refused() -> None:
    run = private()
    batch = next(iter(run.data_loader))
    step(run, batch)
    with pytest.raises(TrainingError, match="exactly one step on every batch"):
        step(run, batch)


def test_two_batches_in_one_step_are_refused() -> None:
    def loss(batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(run.model(batch[0]), batch[1])

    run = private()
    batches = iter(run.data_loader)
    loss(next(batches)).backward()
    second = loss(next(batches))
    second.backward()
    with pytest.raises(TrainingError, match="step 0 has the gradients of several backward passes"):
        run.optimizer.step()

    run = private()
    batches = iter(run.data_loader)
    losses = [loss(next(batches)), loss(next(batches))]
    for one in reversed(losses):  # Opacus takes these for one batch
        one.backward()
    with pytest.raises(TrainingError, match="step 0 must be made on batch 0"):
        run.optimizer.step()


def test_the_noise_multiplier_stays() -> None:
    run = private()
    train(run, 1)
    run.optimizer.noise_multiplier = 0.5
    with pytest.raises(TrainingError, match=r"noise_multiplier must stay 1\.0"):
        train(run, 1)


def test_the_trained_parameters_stay() -> None:
    run = private()
    train(run, 1)
    run.optimizer.param_groups[0]["params"].reverse()
    with pytest.raises(TrainingError, match="must stay those"):
        train(run, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_gradient_that_is_not_finite_counts_as_zero(value: float) -> None:
    """To abort on it would tell that the record is there; the run is the one in which its place is empty."""
    torch.set_num_threads(1)
    data = dataset()
    data.tensors[0][3] = value
    run, without = private(model=linear(), data=data), private(model=linear())
    clip = without.optimizer.clip_and_accumulate

    def leave_out() -> None:
        rows = without.sampler.batch(without.step)
        for p in without.optimizer.params:
            p.grad_sample[torch.as_tensor(rows == 3)] = 0.0
        clip()

    without.optimizer.clip_and_accumulate = leave_out
    for one in (run, without):
        train(one, N)
    np.testing.assert_array_equal(weights(run), weights(without))


def test_a_run_is_stopped_where_asked_to_and_where_weights_diverge() -> None:
    data = dataset()
    data.tensors[0][3] = math.nan
    run = private(data=data, on_nonfinite="stop")
    start = int(run.sampler.bins[3])
    train(run, start)
    before = weights(run)
    with pytest.raises(TrainingError, match=f"the gradient of a record is not finite in step {start}"):
        train(run, 1)
    assert np.array_equal(weights(run), before)
    with pytest.raises(TrainingError, match=r"the weights are not finite after step \d"):
        train(private(rate=3e38), N)
    with pytest.raises(ArgumentError, match="on_nonfinite must be one of zero, stop"):
        private(on_nonfinite="ignore")


# Precisions in which nothing bounds what a record does.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_in_half_precision_are_refused(dtype: str) -> None:
    """One of 500 records more moved a sum in bfloat16 by 2.47 clips."""
    with pytest.raises(ArgumentError, match=rf"model must have parameters in float32 or float64, got torch\.{dtype}"):
        private(model=linear().to(getattr(torch, dtype)))


@pytest.mark.parametrize("parts", [False, True])
def test_autocast_is_refused_before_anything_is_released(parts: bool) -> None:
    """Norms, factors and gradients were in bfloat16, so that a record contributed 1.005 times the clipping norm."""
    run = private(model=linear())
    before = weights(run)
    x, y = next(iter(run.data_loader))
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(run.model(x), y)
    loss.backward()
    with pytest.raises(TrainingError, match=r"records in step 0 are in torch\.bfloat16: .* train without autocast"):
        run.optimizer.sum_part() if parts else run.optimizer.step()
    assert run.step == 0
    np.testing.assert_array_equal(weights(run), before)


def test_clipping_is_not_done_in_the_precision_of_autocast() -> None:
    plain, cast = private(model=linear()), private(model=linear())
    for run, casts in ((plain, False), (cast, True)):
        for x, y in run.data_loader:
            run.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(run.model(x), y).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                run.optimizer.step()
    np.testing.assert_array_equal(weights(plain), weights(cast))


def test_products_of_reduced_precision_are_refused() -> None:
    run = private(model=linear())
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(TrainingError, match="set_float32_matmul_precision must be 'highest', it is 'medium'"):
            train(run, 1)
    finally:
        torch.set_float32_matmul_precision("highest")


# What the guarantee compares, and what functions do not know of a run.


def test_the_relation_says_whether_the_number_of_records_is_used() -> None:
    public = {"expected_batch_size": 2.0}
    assert private().relation == "the place of one record is left empty"
    assert private(**public).relation == "one record is added or removed"
    assert private(**public, max_batch_size=15).relation == "the place of one record is left empty"
    assert private(**public, max_batch_size=15, max_records=25).relation == "one record is added or removed"
    assert private(**public, unit=[i // 2 for i in range(RECORDS)]).relation == "one user is added or removed"
    cyclic = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.reshuffled(2, 8, stride=4))
    assert private(cyclic, **public).relation == "the place of one record is left empty"


def test_functions_say_that_they_do_not_know_what_cut_batches_cost() -> None:
    run = private(max_batch_size=15)
    sigma, asked = run.noise_multiplier, {"accountant": "gaussian"}
    with pytest.warns(UserWarning, match=r"batches of this run are cut \(max_batch_size\), which is not counted here"):
        dpmf.delta(run.mechanism, noise_multiplier=sigma, epsilon=1.0, **asked)
    with pytest.warns(UserWarning, match="which is not counted here"):
        dpmf.group_privacy(run.mechanism, noise_multiplier=sigma, group_size=2, epsilon=1.0)
    with pytest.warns(UserWarning, match="which is not counted here"):
        BallsInBinsMatrixDpEvent.of(run.mechanism, sigma)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "batches of this run")
        train(run, 1)
        run.get_epsilon(1e-3)
        dpmf.delta(private().mechanism, noise_multiplier=sigma, epsilon=1.0, **asked)


# Checkpoints.


@pytest.mark.parametrize(("stop", "source"), [(0, "fast"), (3, "secure"), (8, "fast"), (13, "secure")])
def test_a_resumed_run_is_the_same_run(stop: int, source: str, tmp_path: Path) -> None:
    whole = private(source=source)
    train(whole, N)
    first = private(source=source)
    train(first, stop)
    first.save(tmp_path / "run.dpmf", {"note": "half-way"})
    again = private(source=source, seed=77)  # what the process that goes on happens to begin with
    torch.manual_seed(99)
    assert again.load(tmp_path / "run.dpmf") == {"note": "half-way"}
    assert again.steps_left == N - stop
    train(again, N - stop)
    assert np.array_equal(weights(again), weights(whole))
    assert again.accountant.history == whole.accountant.history


def test_adam_and_its_state(tmp_path: Path) -> None:
    def run() -> PrivateTraining:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return make_private(model, optimizer, dataset(), MECHANISM, noise_multiplier=1.0, max_grad_norm=0.5, seed=1)

    whole = run()
    train(whole, 12)
    first = run()
    train(first, 6)
    first.save(tmp_path / "c")
    second = run()
    second.load(tmp_path / "c")
    train(second, 6)
    assert np.array_equal(weights(second), weights(whole))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"mechanism": dpmf.Mechanism(dpmf.strategies.bisr(3), MECHANISM.batching)}, "mechanism = 'BISR"),
    "N": ({"mechanism": dpmf.Mechanism(MECHANISM.strategy, dpmf.BallsInBins(4, 8))}, "mechanism = .*k=4"),
    "coefficients": (
        {"mechanism": dpmf.Mechanism(dpmf.strategies.coefficients([1, 0.5, 0.375]), MECHANISM.batching)},
        "mechanism = 'Toeplitz",
    ),
    "noise": ({"noise_multiplier": 1.5}, "noise_multiplier = 1.5, .* has 1.0"),
    "clipping": ({"max_grad_norm": 1.0}, "max_grad_norm = 1.0, .* has 0.5"),
    "records": ({"data": dataset(21)}, "records = 21, .* has 20"),
    "model": ({"model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))}, "shapes = "),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_something_else_is_one_message(name: str, tmp_path: Path) -> None:
    options, message = OTHERS[name]
    first = private()
    train(first, 2)
    first.save(tmp_path / "run.dpmf")
    other = private(**options)
    before = weights(other)
    with pytest.raises(ValueError, match=message) as caught:
        other.load(tmp_path / "run.dpmf")
    assert "\n" not in str(caught.value)
    assert np.array_equal(weights(other), before)
    assert other.noise.step == 0


def test_a_checkpoint_of_a_model_with_other_buffers_is_refused(tmp_path: Path) -> None:
    def linear(buffer: int) -> Any:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        model.register_buffer("constant", torch.zeros(buffer))
        return private(model=model)

    linear(2).save(tmp_path / "c")
    other = linear(3)
    with pytest.raises(ValueError, match=r"other parameters or buffers \(.*constant\)"):
        other.load(tmp_path / "c")


def test_no_checkpoint_within_a_virtual_batch(tmp_path: Path) -> None:
    run = private(data=dataset(200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with BatchMemoryManager(
            data_loader=run.data_loader, max_physical_batch_size=2, optimizer=run.optimizer
        ) as loader:
            step(run, next(iter(loader)))
    with pytest.raises(TrainingError, match="after a whole batch"):
        run.save(tmp_path / "run.dpmf")
    assert not list(tmp_path.iterdir())


def test_a_pickle_is_not_a_checkpoint(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(ran),)

    (tmp_path / "c").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ValueError, match="must be a file written by dpmf"):
        private().load(tmp_path / "c")
    checkpoint.save(tmp_path / "c", {"something": 1})
    with pytest.raises(ValueError, match="has no 'run'"):
        private().load(tmp_path / "c")
    assert not ran.exists()


# Several processes.


LONGEST = datetime.timedelta(minutes=2)  # for hangs only


def _process(rank: int, world: int, directory: str) -> None:
    # The ranks meet in a file, because a free port may be taken by somebody else before rank 0 listens on it. And none
    # of them waits for ever for another.
    store = torch.distributed.FileStore(f"{directory}/meeting", world)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LONGEST)
    torch.manual_seed(rank)  # processes that begin differently must end the same
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    if rank == 0:
        with torch.no_grad():
            model[1].weight.fill_(0.1)
            model[1].bias.zero_()
    run = private(model=DPDDP(model), seed=SEED if rank == 0 else 2)
    train(run, 3)

    # What one rank does wrong, all refuse; and all can go on with the right batch afterwards.
    batches = iter(run.data_loader)
    if rank == 1:
        next(batches)
    said = ("another rank refused step 3", "step 3 must be made on batch 3 .* it was made on batch 4")[rank]
    with pytest.raises(TrainingError, match=said):
        step(run, next(batches))
    run.noise._step += rank
    with pytest.raises(TrainingError, match="all ranks must be at the same step, they are at steps 3 to 4"):
        step(run, next(iter(run.data_loader)))
    run.noise._step -= rank

    train(run, 7)
    run.save(Path(directory) / "checkpoint")
    torch.distributed.barrier()
    run.load(Path(directory) / "checkpoint")
    train(run, 4)
    torch.distributed.barrier()
    run.load(Path(directory) / "checkpoint")  # and those four steps again, with the same results
    train(run, 4)
    with BatchMemoryManager(
        data_loader=run.data_loader, max_physical_batch_size=1, optimizer=run.optimizer
    ) as loader:  # each rank has its own number of parts
        train(run, N - 14, loader)
    np.save(Path(directory) / f"{rank}.npy", weights(run))
    torch.distributed.destroy_process_group()
    if rank > 0:
        return
    # One rank alone goes on from what two have saved, with the same batches and the same noise.
    assert len(list(Path(directory).glob("checkpoint.*.part"))) == 2
    store = torch.distributed.FileStore(str(Path(directory) / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    alone = private(model=DPDDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))), seed=99)
    alone.load(Path(directory) / "checkpoint", allow_second_continuation=True)
    train(alone, N - 10)
    np.testing.assert_allclose(weights(alone), weights(run), atol=1e-5)
    alone.save(Path(directory) / "checkpoint")
    assert not list(Path(directory).glob("checkpoint.*.part"))
    torch.distributed.destroy_process_group()


def test_two_processes_add_the_noise_once(tmp_path: Path) -> None:
    ranks = torch.multiprocessing.start_processes(
        _process, (2, str(tmp_path)), nprocs=2, start_method="spawn", join=False
    )
    try:
        until(lambda: ranks.join(timeout=1.0), 2 * LONGEST.total_seconds())  # raises what a rank has raised
    finally:
        for process in ranks.processes:
            process.kill()
    first, second = (np.load(tmp_path / f"{rank}.npy") for rank in (0, 1))
    assert np.array_equal(first, second)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    with torch.no_grad():
        model[1].weight.fill_(0.1)
        model[1].bias.zero_()
    alone = private(model=model)
    train(alone, N)
    # The same records, the same noise: only the order of the sums differs.
    np.testing.assert_allclose(first, weights(alone), atol=1e-5)


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": dataset(7)}, "dataset must have at least as many records as batches_per_epoch = 8, got 7"),
        ({"data": iter([])}, "dataset must be a dataset with a length"),
        ({"mechanism": "bsr"}, "mechanism must be a dpmf.Mechanism"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be finite"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be positive"),
        ({"noise_multiplier": None}, "target_epsilon must be given with target_delta, or noise_multiplier"),
        ({"target_epsilon": 1.0, "target_delta": 1e-5}, "noise_multiplier must not be given with target_epsilon"),
        ({"target_delta": 1e-5}, "noise_multiplier must not be given with target_epsilon or target_delta"),
        ({"noise_multiplier": None, "target_epsilon": 1.0}, "target_delta must be given"),
        ({"noise_multiplier": None, "target_epsilon": 0.0, "target_delta": 0.1}, "target_epsilon must be positive"),
        ({"source": "x"}, "source must be one of"),
        ({"noise_dtype": "half"}, "dtype must be one of"),
        ({"grad_sample_mode": "ghost"}, "grad_sample_mode must be one of"),
        ({"loss_reduction": "none"}, "loss_reduction must be one of"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        private(**options)
    assert "\n" not in str(caught.value)


def test_a_prepared_accountant_that_only_estimates_is_refused() -> None:
    sampling = dpmf.accountants.MonteCarlo(samples=1000).prepare(MECHANISM)
    with pytest.raises(ValueError, match="accountant must be one that proves its bound"):
        private(noise_multiplier=None, target_epsilon=4.0, target_delta=0.1, accountant=sampling)


def test_an_estimate_is_not_reported_as_a_guarantee() -> None:
    run = private(accountant=dpmf.accountants.MonteCarlo(samples=1000).prepare(MECHANISM))
    train(run, N)
    with pytest.raises(ValueError, match="accountant must be one that proves its bound"):
        run.get_epsilon(0.1)


def test_a_prepared_accountant() -> None:
    prepared = dpmf.accountants.Renyi().prepare(MECHANISM)
    run = private(noise_multiplier=None, target_epsilon=4.0, target_delta=1e-4, accountant=prepared)
    train(run, 9)
    assert run.get_epsilon(1e-4) == 4.0
    assert run.get_epsilon(1e-3) < 4.0


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer must be over parameters of the model"):
        make_private(network(), other, dataset(), MECHANISM, noise_multiplier=1.0, max_grad_norm=1.0)


@pytest.mark.parametrize("missing", ["torch", "opacus"])
def test_missing_extras(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = network()
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[torch\]' in a clone"):
        make_private(run, optimizer, [], MECHANISM, noise_multiplier=1.0, max_grad_norm=1.0)
    if missing == "torch":
        with pytest.raises(MissingExtraError, match="backend torch needs torch"):
            NoiseStream(MECHANISM, [(3,)], backend="torch")
