"""The loader of private training: batches know their number, and only one whole step on each of them is accepted."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from private_runs import RECORDS, N, dataset, linear, private, step, train, weights, with_workers

import dpmf
from dpmf.errors import TrainingError
from dpmf.training import BatchSampler, PrivateTraining

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402

from dpmf.training._loader import NumberedBatches, NumberedDataset  # noqa: E402


@contextmanager
def split(run: PrivateTraining, largest: int = 2) -> Iterator[Any]:
    yield run.in_parts(largest)


def begin(workers: int, **options: Any) -> PrivateTraining:
    return private(model=linear(), **with_workers(workers), **options)


def skip_the_second(run: PrivateTraining, loader: Any) -> None:
    batches = iter(loader)
    step(run, next(batches))
    next(batches)
    step(run, next(batches))


def skip_in_the_tail(run: PrivateTraining, loader: Any) -> None:
    """Where the worker processes have nothing left to prefetch."""
    batches = iter(loader)
    for _ in range(6):
        step(run, next(batches))
    next(batches)
    step(run, next(batches))


def two_steps_on_one(run: PrivateTraining, loader: Any) -> None:
    batch = next(iter(loader))
    step(run, batch)
    step(run, batch)


def an_old_one_again(run: PrivateTraining, loader: Any) -> None:
    batches = iter(loader)
    first = next(batches)
    step(run, first)
    next(batches)
    step(run, first)


def one_ahead(run: PrivateTraining, loader: Any) -> None:
    for batch, _ in itertools.pairwise(loader):
        step(run, batch)


def a_part_of_it(run: PrivateTraining, loader: Any) -> None:
    x, y = next(batch for batch in loader if len(batch[0]) > 1)
    step(run, (x[:1], y[:1]))


def twice_the_records(run: PrivateTraining, loader: Any) -> None:
    for x, y in loader:
        step(run, (torch.cat([x, x]), torch.cat([y, y])))


MISUSES = [skip_the_second, skip_in_the_tail, two_steps_on_one, an_old_one_again, one_ahead, a_part_of_it,
           twice_the_records]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_loop_that_is_not_the_mechanism_is_refused(misuse: Callable[..., None], workers: int) -> None:
    run = begin(workers)
    with pytest.raises(TrainingError, match=r"^(step \d|the model was given)"):
        misuse(run, run.data_loader)
    assert run.noise.step <= 6


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("misuse", MISUSES)
def test_parts_of_batches_are_checked_too(misuse: Callable[..., None], workers: int) -> None:
    """Skipping or repeating a part of a batch that comes in parts."""
    run = begin(workers, data=dataset(100))
    with split(run, 4) as loader, pytest.raises(TrainingError, match=r"part of batch|must be made on|must have|given"):
        misuse(run, loader)
    assert run.noise.step <= 6


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_bins_used_are_those_accounted_for(workers: int) -> None:
    """Batch 2 of 4 is left out: without the check, bins 0, 1, 3, 3, 0, 1, 2, 3 would be used with one worker."""
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 4))
    run = begin(workers, mechanism=mechanism)

    def loop() -> None:
        for number, batch in enumerate(itertools.chain(run.data_loader, run.data_loader)):
            if number != 2:
                step(run, batch)

    with pytest.raises(TrainingError, match=r"step 2 must be made on batch 2 of the data loader, .* batch 3"):
        loop()
    assert run.noise.step == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_refusal_training_goes_on_with_the_right_batch(workers: int) -> None:
    whole, run = begin(0), begin(workers)
    train(whole, N)
    with pytest.raises(TrainingError):
        skip_the_second(run, run.data_loader)
    train(run, N - run.noise.step)
    assert np.array_equal(weights(run), weights(whole))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_given_up_half_way_is_begun_again(workers: int) -> None:
    whole, run = begin(0, data=dataset(100)), begin(workers, data=dataset(100))
    train(whole, N)
    with split(run, 4) as loader:
        for batch in itertools.islice(loader, 4):
            step(run, batch)
        train(run, N - run.noise.step, loader)
    np.testing.assert_allclose(weights(run), weights(whole), atol=1e-5)
    assert run.accountant.history == whole.accountant.history


def test_two_iterations_at_once() -> None:
    """Evaluating on the training data between two steps does no harm; mixing the parts of two splits is refused."""
    whole, run = begin(0), begin(0)
    train(whole, N)
    for _ in range(3):
        next(iter(run.data_loader))
        list(run.data_loader)
        train(run, 8)
    assert np.array_equal(weights(run), weights(whole))
    run = begin(0, data=dataset(100))
    with split(run, 1) as ones, split(run, 2) as twos:
        first, second = iter(ones), iter(twos)
        step(run, next(first))
        with pytest.raises(TrainingError, match="a part of batch 0 was left out or used twice"):
            step(run, next(second))


def test_a_new_iteration_begins_where_training_is() -> None:
    sampler = BatchSampler(30, dpmf.BallsInBins(2, 5), seed=1)
    step = SimpleNamespace(t=0, batches=sampler)
    batches = NumberedBatches(step)
    records = NumberedDataset(list(range(30)), 30, b"", torch.tensor)

    def seen() -> list[tuple[int, list[int]]]:
        parts = [records.__getitems__(codes).part for codes in batches]
        return [(part.step, part.content.tolist()) for part in parts]

    looked_at = seen()  # an evaluation, say
    assert looked_at == [(t, sampler.batch(t).tolist()) for t in range(5)]
    step.t = 2
    assert seen() == looked_at[2:]
    step.t = 5
    assert seen() == [(t + 5, content) for t, content in looked_at]
    step.t = 10
    with pytest.raises(TrainingError, match="all 10 steps"):
        seen()


class Noisy(torch.utils.data.Dataset):
    """Random augmentation, with every generator that people use."""

    name = "noisy"

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.random()])  # noqa: NPY002


def test_augmentation_in_workers_is_a_function_of_the_batch() -> None:
    def drawn(workers: int, start: int = 0) -> list[Any]:
        run = private(model=torch.nn.Linear(4, 1), data=Noisy(), **with_workers(workers))
        for _ in range(start):
            run.noise.next()
        return [batch.tolist() for batch in run.data_loader]

    one = drawn(1)
    assert one == drawn(2)
    assert one[3:] == drawn(1, start=3)
    values = [value for batch in one for record in batch for value in record[1:]]
    assert len(set(values)) == 3 * RECORDS


def test_the_dataset_is_still_there() -> None:
    run = private(model=torch.nn.Linear(4, 1), data=Noisy())
    assert len(run.data_loader.dataset) == RECORDS
    assert run.data_loader.dataset.name == "noisy"
    assert run.data_loader.dataset[3][0] == 3
    with pytest.raises(AttributeError):
        run.data_loader.dataset.nothing  # noqa: B018


def test_a_loader_built_around_it_is_refused() -> None:
    run = begin(0)
    own = run.data_loader
    rebuilt = torch.utils.data.DataLoader(own.dataset, batch_sampler=own.batch_sampler, collate_fn=own.collate_fn)
    with pytest.raises(TrainingError, match="must not be rebuilt"):
        for _x, _y in rebuilt:
            pass


def test_a_model_can_be_copied_and_pickled() -> None:
    run = begin(0)
    train(run, 2)
    batch = next(iter(run.data_loader))
    clone = copy.deepcopy(run.model)
    list(run.data_loader)
    clone.eval()
    assert clone(batch[0]).shape == (len(batch[0]), 3)
    assert isinstance(pickle.loads(pickle.dumps(run.model)), torch.nn.Module)


def test_only_batches_for_a_step_are_checked() -> None:
    run = begin(0)
    kept = next(iter(run.data_loader))
    list(run.data_loader)
    with torch.no_grad():
        run.model(kept[0])
    run.model.eval()
    run.model(kept[0])
    run.model.train()
    with pytest.raises(TrainingError, match="not the last one of the data loader"):
        run.model(kept[0])


def test_opacus_own_loaders_are_left_alone() -> None:
    plain = torch.utils.data.DataLoader(dataset(), batch_size=10)
    manager = BatchMemoryManager(data_loader=plain, max_physical_batch_size=5, optimizer=begin(0).optimizer)
    with manager as loader:
        assert type(loader) is torch.utils.data.DataLoader
