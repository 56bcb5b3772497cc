"""A small private training run with Opacus, for the tests of training."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np

import dpmf
from dpmf.training import PrivateTraining, make_private

MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(3, 8))
RECORDS, SEED = 20, 13  # with two empty bins
N = MECHANISM.batching.iterations


def dataset(records: int = RECORDS, scale: float = 1.0) -> Any:
    import torch

    generator = torch.Generator().manual_seed(5)
    x = scale * torch.randn(records, 1, 6, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (records,), generator=generator))


def network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(27, 3),
    )


def linear() -> Any:
    """A model without dropout: the same in any split of a batch."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))


def private(
    mechanism: dpmf.Mechanism = MECHANISM, model: Any = None, data: Any = None, *, rate: float = 0.1, **options: Any
) -> PrivateTraining:
    import torch

    torch.set_num_threads(1)
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "seed": SEED, **options}
    return make_private(model, optimizer, dataset() if data is None else data, mechanism, **given)


def with_workers(workers: int) -> dict[str, Any]:
    """Options of `private` for a loader with worker processes."""
    if not workers:
        return {}
    # To fork a process in which JAX has started threads, as another test may have done, can hang.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data", "dpmf.training._loader"])
    return {"num_workers": workers, "loader_options": {"multiprocessing_context": context}}


def step(run: PrivateTraining, batch: Any) -> None:
    import torch

    run.optimizer.zero_grad()
    torch.nn.functional.cross_entropy(run.model(batch[0]), batch[1]).backward()
    run.optimizer.step()


def train(run: PrivateTraining, steps: int, loader: Any = None, after: Callable[[], None] | None = None) -> None:
    """So many steps of an ordinary loop, leaving an epoch in the middle where that is."""
    while steps > 0:
        for batch in run.data_loader if loader is None else loader:
            before = run.steps_made
            step(run, batch)
            steps -= run.steps_made - before
            if after is not None:
                after()
            if steps == 0:
                break


def recorded(run: PrivateTraining, sums: list[np.ndarray]) -> None:
    """Keep the sum of clipped gradients of every step as it is before noise is added, in units of the gradients."""
    release = run.current.release

    def release_too() -> Any:
        found = run.current.summed
        sums.append(np.concatenate([total.numpy() * found.grid for total in found.totals]))
        return release()

    run.current.release = release_too


def weights(run: PrivateTraining) -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in run.model.parameters()])
