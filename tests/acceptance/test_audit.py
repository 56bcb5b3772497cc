"""The audit: train, record what was clipped, summed and added, and check that it is the mechanism accounted for.

The model is a vector, and record i pushes coordinate i as hard as it can, always the same way: the worst case that the
accountants assume. So the recorded sums show who took part when, and the other coordinates show nothing but noise.
Every check is also shown to fail on a training loop with the mistake it is there for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.training import PrivateTraining, make_private
from dpmf.training.noise import NoiseStream

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")


RECORDS, WIDTH, CLIP, SIGMA = 40, 8_000, 0.25, 1.5
ALLOCATION = dpmf.BallsInBins.from_iterations(17, 5)
STRATEGIES = {
    "dpsgd": dpmf.strategies.dpsgd(),
    "bsr": dpmf.strategies.bsr(3),
    "bisr": dpmf.strategies.bisr(3),
    "normalised": dpmf.strategies.bsr(3).normalized(),
    "matrix": dpmf.strategies.matrix(np.tril(np.random.default_rng(0).uniform(0, 1, (17, 17))) + np.eye(17)),
}


@dataclass
class Records(torch.utils.data.Dataset):
    size: int = RECORDS

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x = torch.zeros(WIDTH)
        x[index] = 3.0 + index  # any length: clipping makes them all the same
        return x


@dataclass
class Trace:
    """What a training run did, step by step, in units of the clipping norm."""

    gradients: list[np.ndarray] = field(default_factory=list)  # one row per record of the batch, clipped here
    sums: list[np.ndarray] = field(default_factory=list)
    releases: list[np.ndarray] = field(default_factory=list)


def begin(mechanism: dpmf.Mechanism, size: int = RECORDS, seed: int = 3) -> PrivateTraining:
    torch.set_num_threads(1)
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return make_private(
        model, optimizer, Records(size), mechanism, noise_multiplier=SIGMA, max_grad_norm=CLIP, seed=seed
    )


def train(run: PrivateTraining, steps: int, trace: Trace | None = None) -> Trace:
    """An ordinary loop. Only public attributes are looked at, and the model itself says what was released."""
    trace = trace or Trace()
    model, optimizer, loader = run
    (weight,) = model.parameters()
    expected = RECORDS / ALLOCATION.batches_per_epoch
    add_noise = optimizer.add_noise

    def recorded() -> None:
        trace.sums.append(weight.summed_grad.detach().double().numpy().ravel() / CLIP)
        add_noise()

    optimizer.add_noise = recorded
    while steps:
        for x in loader:
            optimizer.zero_grad()
            (-model(x)).sum().div(max(len(x), 1)).backward()
            samples = weight.grad_sample.detach().double().numpy().reshape(len(x), WIDTH)
            norms = np.linalg.norm(samples, axis=1, keepdims=True)
            trace.gradients.append(samples * np.minimum(1.0, CLIP / norms) / CLIP)
            before = weight.detach().double().numpy().ravel().copy()
            optimizer.step()
            moved = before - weight.detach().double().numpy().ravel()  # learning rate 1
            trace.releases.append(moved * expected / CLIP)
            steps -= 1
            if not steps:
                break
    optimizer.add_noise = add_noise
    return trace


def findings(trace: Trace, mechanism: dpmf.Mechanism) -> list[str]:
    """What is not as it was accounted for."""
    wrong = []
    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    c = mechanism.strategy.matrix(n)
    sums, releases = np.stack(trace.sums), np.stack(trace.releases)
    if len(sums) != n:
        return [f"{len(sums)} steps instead of {n}"]
    for t, gradients in enumerate(trace.gradients):
        if not np.allclose(sums[t], gradients.sum(axis=0), atol=1e-4):
            wrong.append(f"the sum of step {t} is not that of the clipped gradients")
    # Participation: each record in the iterations i, i + b, ... of one bin i, and in all of them.
    bins = []
    for record in range(RECORDS):
        took_part = np.flatnonzero(np.abs(sums[:, record]) > 0.5)
        if not len(took_part) or list(took_part) != list(range(took_part[0] % b, n, b)):
            wrong.append(f"record {record} took part in iterations {took_part}")
        else:
            bins.append(int(took_part[0]))
            # Sensitivity: what the record does to C·x has the norm of its mixture mean.
            norm = np.linalg.norm(c @ sums[:, record])
            if not np.isclose(norm**2, mechanism.gram[bins[-1], bins[-1]], rtol=1e-4):
                wrong.append(f"record {record} has sensitivity {norm:.4f}")
    if len(set(bins)) < b:
        wrong.append("bins that nobody is in, of those that were expected to be used")
    # Noise: C times what was added is white, of variance σ².
    white = c @ (releases - sums) / SIGMA
    covariance = white @ white.T / WIDTH
    if np.abs(np.triu(covariance, 1)).max() > 5.5 * WIDTH**-0.5:
        wrong.append("the noise is correlated in another way")
    if np.abs(np.diag(covariance) - 1).max() > 5.5 * (2 / WIDTH) ** 0.5:
        wrong.append(f"the noise has variance {np.diag(covariance).round(3)} times what was accounted for")
    return wrong


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_the_mechanism(name: str) -> None:
    mechanism = dpmf.Mechanism(STRATEGIES[name], ALLOCATION)
    assert findings(train(begin(mechanism), 17), mechanism) == []


def test_a_resumed_training_is_the_mechanism(tmp_path: Any) -> None:
    mechanism = dpmf.Mechanism(STRATEGIES["bsr"], ALLOCATION)
    first = begin(mechanism)
    trace = train(first, 8)
    first.save(tmp_path / "c")
    second = begin(mechanism, seed=55)
    second.load(tmp_path / "c")
    assert findings(train(second, 9, trace), mechanism) == []


def test_without_a_record_the_rest_is_the_same() -> None:
    """The two neighbouring runs differ by one record's own contribution, in its own bin, and by nothing else."""
    mechanism = dpmf.Mechanism(STRATEGIES["bsr"], ALLOCATION)
    with_it, without = begin(mechanism), begin(mechanism, RECORDS - 1)
    assert np.array_equal(with_it.sampler.bins[:-1], without.sampler.bins)
    # The divisor is a constant of the method, not of the data set at hand: the released sums are compared.
    released = np.stack(train(with_it, 17).releases)
    alike = np.stack(train(without, 17).releases) * (RECORDS - 1) / RECORDS
    difference = released - alike
    expected = np.zeros_like(difference)
    expected[with_it.sampler.bins[-1] :: 5, RECORDS - 1] = -1.0
    np.testing.assert_allclose(difference, expected, atol=2e-4)


def _fresh_noise(run: PrivateTraining) -> None:
    run.noise._kept = None
    run.noise._source = type(run.noise._source)(bytes(32))


def _more_bins(run: PrivateTraining) -> None:
    run.sampler._set_bins(np.random.default_rng(1).integers(0, 5, RECORDS))


MISTAKES: dict[str, tuple[str, Callable[[PrivateTraining], None], Callable[[PrivateTraining], None] | None]] = {
    "half the noise": ("variance", lambda run: setattr(run.optimizer, "_problem", lambda: None), None),
    "clipped twice as long": ("sum of step", lambda run: setattr(run.optimizer, "max_grad_norm", 2 * CLIP), None),
    "independent noise": ("correlated", lambda run: setattr(run.noise, "plan", IDENTITY), None),
    "fresh noise on resuming": ("correlated|variance", lambda run: None, _fresh_noise),
    "new bins every epoch": ("took part", lambda run: None, _more_bins),
    "divided by the actual batch size": ("correlated|variance", lambda run: _divide_by_actual(run), None),
}
IDENTITY = NoiseStream(dpmf.Mechanism(STRATEGIES["dpsgd"], ALLOCATION), []).plan


def _divide_by_actual(run: PrivateTraining) -> None:
    def scale() -> None:
        (weight,) = run.model.parameters()
        weight.grad /= max(len(weight.grad_sample), 1)

    run.optimizer.scale_grad = scale


@pytest.mark.parametrize("name", MISTAKES)
def test_the_audit_notices(name: str) -> None:
    found, before, between = MISTAKES[name]
    mechanism = dpmf.Mechanism(STRATEGIES["bsr"], ALLOCATION)
    run = begin(mechanism)
    before(run)
    if name == "half the noise":
        run.optimizer.noise_multiplier = SIGMA / 2
        run.accountant.step = lambda **_: None
    trace = train(run, 10)
    if between is not None:
        between(run)
    trace = train(run, 7, trace)
    noticed = findings(trace, mechanism)
    assert any(part in line for line in noticed for part in found.split("|")), noticed
