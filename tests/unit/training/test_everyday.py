"""Optimizers, schedules, precisions, frozen layers, LoRA, averages: every step has the noise accounted for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from private_runs import MECHANISM, RECORDS, SEED, N, dataset, linear

import dpmf
from dpmf.training import NoiseStream, make_private, noise_levels

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")

SIGMA, CLIP = 0.7, 0.5


class Adapted(torch.nn.Module):
    """A frozen layer and a product of two small ones beside it, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Linear(36, 3).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(36, 2, bias=False), torch.nn.Linear(2, 3, bias=False)

    def forward(self, x: Any) -> Any:
        flat = x.flatten(1)
        return self.base(flat) + self.up(self.down(flat))


def half_frozen() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model[1].requires_grad_(False)
    return model


def warm_up_and_cosine(optimizer: Any) -> Any:
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N - 4),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [4])


@dataclass
class Way:
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    model: Callable[[], Any] = linear
    schedule: Callable[[Any], Any] | None = None
    largest: int | None = None  # of the parts of a batch
    averaged: bool = False


WAYS = {
    "AdamW": Way(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)),
    "momentum": Way(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)),
    "warm-up and cosine": Way(schedule=warm_up_and_cosine),
    "frozen layers": Way(model=half_frozen),
    "LoRA": Way(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), model=Adapted),
    "virtual batches": Way(largest=2),
    "an average of models": Way(averaged=True),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_step_has_the_noise_accounted_for(name: str) -> None:
    way = WAYS[name]
    torch.set_num_threads(1)
    plain = way.model()
    frozen = [(p, p.detach().clone()) for p in plain.parameters() if not p.requires_grad]
    optimizer = way.optimizer([p for p in plain.parameters() if p.requires_grad])
    run = make_private(
        plain, optimizer, dataset(), MECHANISM, noise_multiplier=SIGMA, max_grad_norm=CLIP, seed=SEED
    )  # fmt: skip
    trained = run.optimizer.params
    noise = NoiseStream(MECHANISM, [tuple(p.shape) for p in trained], seed=SEED, backend="torch")
    schedule = way.schedule(run.optimizer) if way.schedule else None
    average = torch.optim.swa_utils.AveragedModel(run.model) if way.averaged else None
    followed: list[Any] = []
    sums: list[Any] = []
    own_step, release = optimizer.step, run.current.release

    def recorded() -> Any:
        found = run.current.summed
        sums[:] = [(total * found.grid).view_as(p).float() for total, p in zip(found.totals, trained, strict=True)]
        return release()

    def watched() -> Any:  # what the optimizer follows is the sum of clipped gradients with the mechanism's noise
        for p, total, z in zip(trained, sums, noise.next(), strict=True):
            expected = (total + SIGMA * CLIP * z) / (RECORDS / MECHANISM.batching.batches_per_epoch)
            torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-6)
        followed.append(optimizer.param_groups[0]["lr"])
        return own_step()

    optimizer.step, run.current.release = watched, recorded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = run.data_loader
        if way.largest is not None:
            loader = run.in_parts(way.largest)
        while run.steps_left:
            for x, y in loader:
                run.optimizer.zero_grad()
                torch.nn.functional.cross_entropy(run.model(x), y).backward()
                run.optimizer.step()
                if schedule is not None:
                    schedule.step()
                if average is not None:
                    average.update_parameters(run.model)
                    assert average(dataset().tensors[0]).shape == (RECORDS, 3)
    assert len(followed) == N == noise.step
    assert all(torch.equal(p, before) for p, before in frozen)
    if schedule is not None:
        assert followed[0] < followed[4] > followed[-1] > 0
    if average is not None:
        assert not any(torch.equal(p, q) for p, q in zip(average.parameters(), run.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "mechanism",
    [
        MECHANISM,
        dpmf.Mechanism(dpmf.strategies.bisr(3), dpmf.reshuffled(3, 5, gap=3)),
        dpmf.Mechanism(dpmf.strategies.bsr(3).normalized("each"), dpmf.BallsInBins(2, 5)),
        dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.Poisson(2, 5)),
    ],
    ids=["fixed", "gaps", "matrix", "independent"],
)
def test_levels_are_those_of_the_noise(mechanism: dpmf.Mechanism) -> None:
    levels = noise_levels(mechanism, 2.0)
    stream = NoiseStream(mechanism, [(40_000,)], seed=1)
    measured = np.array([2.0 * stream.next()[0].std() for _ in range(stream.steps)])
    assert len(levels) == stream.steps
    np.testing.assert_allclose(measured, levels, rtol=5 * (2 * 40_000) ** -0.5)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = make_private(model, optimizer, dataset(), mechanism, noise_multiplier=2.0, max_grad_norm=3.0)
    np.testing.assert_allclose(run.noise_levels, levels * 3 / (RECORDS / mechanism.batching.batches_per_epoch))
