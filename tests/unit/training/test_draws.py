"""What models and data sets draw: from the run's key alone, and without a trace in the user's generators."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_runs import MECHANISM, RECORDS, N, dataset, private, step, train, weights, with_workers

import dpmf

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
from dpmf.training._draws import Draws  # noqa: E402


def users() -> tuple[Any, ...]:
    """One number of each of the user's generators, which are left as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    drawn = float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    return drawn


class Noisy(torch.utils.data.Dataset):
    """Records that every generator augments."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, record: int) -> Any:
        x, y = dataset()[record]
        return x + random.random() + float(np.random.rand()) + torch.rand(()), y  # noqa: NPY002


def perturbed(batch: list[Any]) -> Any:
    """Collation that draws, as masks of language models are drawn."""
    x, y = torch.utils.data.default_collate(batch)
    return x * (torch.rand_like(x) > 0.2), y


class Dropped(torch.nn.Module):
    """A model that shows its masks: those of the last pass are kept, one row for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(36, 3)
        self.masks: list[Any] = []
        self.interrupt: type[BaseException] | None = None

    def forward(self, x: Any) -> Any:
        if self.interrupt is not None:
            torch.rand(()), random.random()
            raise self.interrupt
        mask = self.drop(torch.ones(len(x), 36))
        self.masks.append(mask.detach())
        return self.last(x.flatten(1) * mask)


def masks_of(run: Any, steps: int = N) -> list[Any]:
    model = run.model._module
    model.masks.clear()
    train(run, steps)
    return list(model.masks)


def test_masks_come_from_the_key_and_not_from_the_seed_of_the_user() -> None:
    """With `torch.manual_seed(0)` everybody knew them, and one record more shifted those of all others by 8 clips."""
    found = []
    for seed, key in ((0, 5), (1, 5), (0, 6)):
        run = private(model=Dropped(), seed=key)
        torch.manual_seed(seed)
        found.append(torch.cat(masks_of(run)))
    assert torch.equal(found[0], found[1])
    assert found[0].shape == found[2].shape
    same = (found[0] == found[2]).double().mean()  # of independent masks half
    assert abs(same - 0.5) < 5 * (0.25 / found[0].numel()) ** 0.5


def test_masks_are_drawn_anew_for_every_record_step_and_part() -> None:
    run = private(model=Dropped(), data=dataset(200))
    rows = torch.cat(masks_of(run)).numpy() / 2
    assert len(rows) == 3 * 200
    agree = (rows[:, None, :] == rows).mean(axis=2)[np.triu_indices(len(rows), 1)]
    assert agree.max() < 0.5 + 7 * (0.25 / 36) ** 0.5
    assert abs(rows.mean() - 0.5) < 5 * (0.25 / rows.size) ** 0.5


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_generators_of_the_user_stay_as_they_were(error: type[BaseException]) -> None:
    run = private(model=Dropped(), data=Noisy(), collate_fn=perturbed)
    before = users()
    loader = iter(run.data_loader)
    step(run, next(loader))
    assert users() == before
    run.model._module.interrupt = error
    with pytest.raises(error):
        step(run, next(loader))
    assert users() == before
    run.model._module.interrupt = None
    masks = masks_of(run, 3)
    assert torch.equal(torch.cat(masks), torch.cat(masks_of(private(model=Dropped()), 4)[1:]))
    run.model.eval()
    assert torch.equal(run.model._module.drop(torch.ones(3)), torch.ones(3))
    with torch.no_grad():
        run.model.train()(dataset().tensors[0])  # not training: drawn by the user's own generator
    assert users() != before


def test_what_loading_draws_is_the_same_in_workers_and_after_resuming(tmp_path: Path) -> None:
    options = {"data": Noisy(), "collate_fn": perturbed}
    whole, workers = private(**options), private(**options, **with_workers(2))
    for seed, run in enumerate((whole, workers)):
        torch.manual_seed(seed)
        random.seed(seed)
        train(run, 8)
    np.testing.assert_array_equal(weights(workers), weights(whole))
    train(whole, N - 8)
    first = private(**options)
    train(first, 10)
    first.save(tmp_path / "c")
    again = private(**options, seed=1)
    again.load(tmp_path / "c")
    torch.manual_seed(9)
    train(again, N - 10)
    np.testing.assert_array_equal(weights(again), weights(whole))


def test_all_of_the_key_matters() -> None:
    """Torch takes 32 bits of a seed on a CPU, few enough to try all of them. The whole state comes from the key."""
    drawn = set()
    for bit in range(0, 256, 8):
        draws = Draws((1 << bit).to_bytes(32, "little"), "the model")
        draws.restart(0, 0)
        with draws.active():
            drawn.add((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
            words = torch.get_rng_state()[24 : 24 + 8 * 624].view(torch.int64)
            torch.rand(1)
            assert len(np.unique(words.numpy())) > 620
    assert len(drawn) == 32
    draws = Draws(bytes(32), "the model")
    draws.restart(3, 1)
    with draws.active():
        words = torch.get_rng_state()[24 : 24 + 8 * 624].view(torch.int64).numpy()
        twin = np.random.RandomState()
        twin.set_state(("MT19937", words.astype(np.uint32), 624))
        ours = torch.randint(0, 2**31, (2000,)).numpy()
    words = twin.randint(0, 2**32, 4000, dtype=np.uint32)  # two for each of torch's numbers
    np.testing.assert_array_equal(ours, words[1::2] % 2**31)


def test_blocks_within_blocks_and_before_the_first_batch_change_nothing() -> None:
    draws = Draws(bytes(32), "the model")
    torch.manual_seed(4)
    with draws.active():
        own = torch.rand(())
    torch.manual_seed(4)
    assert torch.rand(()) == own
    found = []
    for nested in (False, True):
        draws.restart(1, 2)
        with draws.active():
            first = torch.rand(())
            with draws.active() if nested else contextlib.nullcontext():
                second = torch.rand(())
        with draws.active():  # goes on where the block before has stopped
            found.append((first, second, torch.rand(())))
    assert found[0] == found[1]
    assert len(set(map(float, found[0]))) == 3


def test_a_copied_model_draws_as_models_do() -> None:
    run = private(model=Dropped())
    step(run, next(iter(run.data_loader)))
    copied = copy.deepcopy(run.model)
    drawn = []
    for _ in (0, 1):
        torch.manual_seed(0)
        copied(dataset().tensors[0])
        drawn.append(copied.masks[-1])
    assert torch.equal(*drawn)


def test_users_whose_records_come_in_parts() -> None:
    """A batch that is computed in parts has other masks in every part."""
    mechanism = dpmf.Mechanism(MECHANISM.strategy, dpmf.BallsInBins(1, 2))
    run = private(mechanism, Dropped(), dataset(64))
    x, y = next(iter(run.data_loader))
    run.optimizer.zero_grad()
    for part in (slice(0, 20), slice(20, None)):
        torch.nn.functional.cross_entropy(run.model(x[part]), y[part]).backward()
        run.optimizer.sum_part()
    run.optimizer.step()
    first, second = run.model._module.masks
    assert not torch.equal(first[: len(second)], second[: len(first)])
