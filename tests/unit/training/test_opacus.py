"""make_private: the right noise, batches and ε through Opacus, checkpoints, virtual batches, several processes."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import pickle
import sys
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
    recorded,
    step,
    train,
    weights,
    with_workers,
)
from waiting import until

import dpmf
from dpmf.errors import ArgumentError, MissingExtraError, TrainingError
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
    monkeypatch.setattr(_target.Guarantee, "_asked", lambda *_: pytest.fail("searched again"))
    assert run.get_epsilon(1e-5) == whole


def test_a_matrix_is_bounded_by_the_whole_of_it() -> None:
    mechanism = dpmf.Mechanism(dpmf.strategies.matrix(MECHANISM.strategy.matrix(N)), MECHANISM.batching)
    run = private(mechanism, accountant="renyi")
    train(run, 9)
    whole = dpmf.epsilon(mechanism, noise_multiplier=1.0, delta=1e-5, accountant="renyi").epsilon
    assert run.get_epsilon(1e-5) == whole


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
    train(split, N, split.in_parts(largest))
    assert split.steps_made == whole.steps_made == N
    np.testing.assert_allclose(weights(split), weights(whole), atol=1e-6)


def test_opacus_memory_manager_is_refused_by_name() -> None:
    run = private(model=linear())
    with (
        BatchMemoryManager(data_loader=run.data_loader, max_physical_batch_size=2, optimizer=run.optimizer) as loader,
        pytest.raises(TrainingError, match=r"iterate over private.in_parts\(largest\) instead"),
    ):
        train(run, 1, loader)


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


def test_what_was_accounted_for_stays() -> None:
    run = private()
    for change in ("noise_multiplier", "clip_norm", "divisor"):
        with pytest.raises(AttributeError):
            setattr(run.run, change, 0.1)


def test_the_trained_parameters_stay() -> None:
    """A parameter that is thawed later would be followed along a gradient without noise."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].bias.requires_grad_(False)
    run = make_private(model, optimizer, dataset(), MECHANISM, noise_multiplier=1.0, max_grad_norm=1.0)
    train(run, 1)
    x, y = next(iter(run.data_loader))
    torch.nn.functional.cross_entropy(run.model(x), y).backward()
    model[1].bias.requires_grad_(True)
    before = weights(run)
    with pytest.raises(TrainingError, match="must stay those"):
        run.optimizer.step()
    assert run.steps_made == 1
    np.testing.assert_array_equal(weights(run), before)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_gradient_that_is_not_finite_counts_as_zero(value: float) -> None:
    """To abort on it would tell that the record is there; the run is the one in which its place is empty."""
    torch.set_num_threads(1)
    data = dataset()
    data.tensors[0][3] = value
    run, without = private(model=linear(), data=data), private(model=linear())
    add = without.current.add

    def leave_out(samples: list[Any]) -> None:
        rows = without.sampler.batch(without.steps_made)
        for sample in samples:
            sample[torch.as_tensor(rows == 3)] = 0.0
        add(samples)

    without.current.add = leave_out
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


# Precisions: clipping, sums and noise are float32 or more, whatever parameters and gradients are.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_half_precision_are_exact(dtype: str) -> None:
    """One of 500 records more moved a sum in bfloat16 by 2.47 clips."""
    torch.set_num_threads(1)
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 1))
    moved = []
    for records in (500, 501):
        model = torch.nn.Linear(100, 1, bias=False, dtype=getattr(torch, dtype))
        x = torch.ones(records, 100, dtype=model.weight.dtype)
        run = private(mechanism, model, torch.utils.data.TensorDataset(x), max_grad_norm=1.0, expected_batch_size=100.0)
        sums: list[np.ndarray] = []
        recorded(run, sums)
        for (batch,) in run.data_loader:
            run.optimizer.zero_grad()
            run.model(batch).mean().backward()
            run.optimizer.step()
        moved.append(sums[0])
        assert next(model.parameters()).dtype == getattr(torch, dtype)
    difference = moved[1] - moved[0]
    assert 0.99 < np.linalg.norm(difference) <= 1.0


@pytest.mark.parametrize("parts", [False, True])
def test_under_autocast_no_record_contributes_more_than_the_clip(parts: bool) -> None:
    """Norms, factors and gradients were in bfloat16, so that a record contributed 1.005 times the clipping norm."""
    run = private(dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, RECORDS)), linear(), dataset(scale=9.0))
    sums: list[np.ndarray] = []
    recorded(run, sums)
    for x, y in run.data_loader:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(run.model(x), y)
        loss.backward()
        if parts:
            run.optimizer.sum_part()
        with torch.autocast("cpu", torch.bfloat16):
            run.optimizer.step()
    sizes = np.array([len(run.sampler.batch(t)) for t in range(RECORDS)])
    norms = np.array([np.linalg.norm(one) for one in sums])
    assert (norms <= 0.5 * sizes).all()
    assert (norms[sizes == 1] > 0.4999).all()


def test_reduced_precision_of_products_changes_nothing() -> None:
    plain, reduced = private(model=linear()), private(model=linear())
    for run, precision in ((plain, "highest"), (reduced, "medium")):
        for x, y in run.data_loader:
            run.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(run.model(x), y).backward()
            torch.set_float32_matmul_precision(precision)
            try:
                run.optimizer.step()
            finally:
                torch.set_float32_matmul_precision("highest")
    np.testing.assert_array_equal(weights(plain), weights(reduced))


# What the guarantee compares, what is said of a run, and where it may be stopped.


def test_the_relation_says_whether_the_number_of_records_is_used() -> None:
    public = {"expected_batch_size": 2.0}
    left, added = "the place of one record is left empty", "one record is added or removed"
    assert private().run.relation == left
    assert private(**public).run.relation == private(records=24).run.relation == added
    assert private(**public, max_batch_size=15).run.relation == left
    assert private(records=25, max_batch_size=15).run.relation == added
    assert private(**public, unit=[i // 2 for i in range(RECORDS)]).run.relation == "one user is added or removed"
    cyclic = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.reshuffled(2, 8, stride=4))
    assert private(cyclic, **public).run.relation == left
    assert private(records=24).run.divisor == 3.0
    with pytest.raises(
        ArgumentError, match="records must be at least the number of records, 20, where batches are cut"
    ):
        private(records=19, max_batch_size=15)


def test_a_run_is_asked_with_what_cut_batches_cost() -> None:
    run = private(max_batch_size=11, model=linear(), accountant="gaussian")
    plain = dpmf.delta(run.mechanism, noise_multiplier=run.noise_multiplier, epsilon=1.0, accountant="gaussian").delta
    charged = dpmf.delta(run.run, epsilon=1.0, accountant="gaussian").delta
    assert charged == pytest.approx(plain + run.run.cut.charge(1.0), rel=1e-12)
    train(run, 1)
    assert run.get_epsilon(0.1) == dpmf.epsilon(run.run, delta=0.1, accountant="gaussian").epsilon


def test_stopping_points_that_are_named_in_advance() -> None:
    run = private(accountant="renyi", stopping_points=(8, 16))
    found = []
    for steps in (8, 4, 4, 8):
        train(run, steps)
        found.append(run.get_epsilon(1e-4))
    at_8, between, at_16, whole = found
    assert at_8 < at_16 < whole == between
    assert at_8 == dpmf.epsilon(run.run, delta=1e-4, stop=8, accountant="renyi").epsilon
    assert whole > private_epsilon_without_stops(run)
    with pytest.raises(ArgumentError, match="stops must be at most 23, got 24"):
        private(stopping_points=(24,))


def private_epsilon_without_stops(run: PrivateTraining) -> float:
    plain = dpmf.epsilon(run.mechanism, noise_multiplier=run.noise_multiplier, delta=1e-4, accountant="renyi")
    return float(plain.epsilon)


def test_epsilon_is_never_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    run = private(accountant="renyi")
    train(run, 1)
    found = dpmf.epsilon(run.run, delta=1e-5, accountant="renyi")
    monkeypatch.setattr(dpmf.api, "epsilon", lambda *_, **__: dataclasses.replace(found, epsilon=math.inf))
    with pytest.raises(ArgumentError, match="delta must be larger: no finite ε was found at 1e-09"):
        run.get_epsilon(1e-9)


def test_the_statement_says_what_holds() -> None:
    run = private(noise_multiplier=None, target_epsilon=4.0, target_delta=1e-4, accountant="renyi", records=24)
    said = run.statement()
    for words in ("BSR(p=3)", "clipped to norm 0.5", "divided by 3", "(4, 0.0001)", "added or removed", "float32"):
        assert words in str(said)
    told = said.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert (told["epsilon"], told["delta"]) == (4.0, told["delta"])
    assert told["delta"] <= 1e-4
    assert private(accountant="gaussian").statement().to_dict()["delta"] <= 1e-5


# What a whole step in one call is.


def record_loss(model: Any, record: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(record[0][None]), record[1][None])


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 15}, {"unit": [i // 2 for i in range(RECORDS)]}])
@pytest.mark.parametrize("largest", [None, 2])
def test_a_step_in_one_call_makes_the_same_model(largest: int | None, options: dict[str, Any]) -> None:
    loop, called = private(model=linear(), **options), private(model=linear(), **options)
    train(loop, N)
    while called.steps_left:
        for batch in called.data_loader:
            called.step(record_loss, batch, largest=largest)
    np.testing.assert_allclose(weights(called), weights(loop), atol=2e-6)
    parts = private(model=linear(), **options)
    while parts.steps_left:
        for batch in parts.in_parts(3):
            parts.step(record_loss, batch)
    np.testing.assert_allclose(weights(parts), weights(loop), atol=2e-6)


def test_a_step_in_one_call_refuses_what_is_not_the_batch() -> None:
    run = private(model=linear())
    loader = iter(run.data_loader)
    first = next(batch for batch in loader if len(batch[0]) > 1)
    run = private(model=linear())
    with pytest.raises(TrainingError, match="which has delivered none"):
        run.step(record_loss, first)
    loader = iter(run.data_loader)
    batch = next(loader)
    with pytest.raises(ArgumentError, match="batch must have one row for each of the"):
        run.step(record_loss, (torch.randn(19, 1, 6, 6), torch.zeros(19, dtype=torch.long)))
    with pytest.raises(ArgumentError, match="loss must return one number for a record"):
        run.step(lambda model, record: model(record[0][None]), batch)
    with pytest.raises(ArgumentError, match="loss must be a function of"):
        run.step(None, batch)
    run.step(record_loss, batch)
    with pytest.raises(TrainingError, match="exactly one step on every batch"):
        run.step(record_loss, batch)
    assert run.steps_made == 1
    second = next(loader)
    next(loader)
    with pytest.raises(TrainingError, match="made on batch 2"):
        run.step(record_loss, second)
    again = run.model._module  # the same model, by a second door
    with pytest.raises(ArgumentError, match="must not belong to a private run already"):
        private(model=again)


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
    "clipping": ({"max_grad_norm": 1.0}, "clip_norm = 1.0, .* has 0.5"),
    "records": ({"data": dataset(21)}, "divisor = 2.625, .* has 2.5"),
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
    step(run, next(iter(run.in_parts(2))))
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
    with pytest.raises(ValueError, match="has no 'identity'"):
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
    train(run, N - 14, run.in_parts(1))  # each rank has its own number of parts
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
