"""Training runs of `study.py`: the batches and the noise of a mechanism, on CIFAR-10 and on handwritten digits.

A mechanism is a dictionary, as docs/data/cifar10-study-mechanisms.json holds them. Batches follow its batching; noise
is σ · clipping norm · C⁻¹Z with the strategy as given, and is settled in the gaps between throws. Its entry
`optimizer`, if there is one, names what takes the place of plain SGD. On the CPU a seed determines a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cifar10_data
import cifar10_grid
import numpy as np
import torch

from dpmf.strategies.settling import settle

Mechanism = dict[str, Any]
Array = np.ndarray


@dataclass(frozen=True)
class Run:
    """One training run; `held_out` trains without some records and scores on them, to choose the learning rate."""

    mechanism: int
    learning_rate: float
    seed: int
    held_out: bool


def batches(mechanism: Mechanism, records: int, seed: int) -> list[Array]:
    """The records of every batch."""
    rng = np.random.default_rng([seed, 1])
    epochs, b, kind = mechanism["epochs"], mechanism["batches"], mechanism["batching"]
    if kind in ("fixed", "reshuffled"):
        out: list[Array] = []
        while len(out) < epochs * b:
            bins = rng.integers(0, b, records)
            thrown = np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=b))[:-1])
            out += thrown * (epochs if kind == "fixed" else 1)
        return out
    # Poisson sampling: the records of group t mod q take part in iteration t, each with probability q/b.
    q = mechanism.get("period", 1)
    groups = np.array_split(rng.permutation(records), q)
    drawn = ((groups[t % q], rng.binomial(len(groups[t % q]), q / b)) for t in range(epochs * b))
    return [rng.choice(group, size, replace=False, shuffle=False) for group, size in drawn]


def noising_column(mechanism: Mechanism) -> Array:
    """The first column of C⁻¹, as far as a step's noise reaches back."""
    epochs, b, gap = mechanism["epochs"], mechanism["batches"], mechanism.get("gap", 0)
    n = b + gap if gap else epochs * b
    column = np.zeros(n)
    if "inverse" in mechanism:
        given = np.array(mechanism["inverse"][:n])
        column[: len(given)] = given
        return column
    c = np.array(mechanism["coefficients"][:n])
    column[0] = 1.0 / c[0]
    for t in range(1, n):  # back-substitution
        m = min(t, len(c) - 1)
        column[t] = -(c[1 : m + 1] @ column[t - m : t][::-1]) / c[0]
    return column


def noise_rows(mechanism: Mechanism) -> Array:
    """The matrix that maps independent normals to the noise of the batches, for σ and clipping norm 1."""
    column = noising_column(mechanism)
    if gap := mechanism.get("gap", 0):
        return settle(column, mechanism["batches"], gap).decoder(mechanism["epochs"]).astype(np.float32)
    places = np.arange(len(column))[:, None] - np.arange(len(column))[None, :]
    return np.where(places >= 0, column[places.clip(min=0)], 0.0).astype(np.float32)


class Optimizer:
    """How the noisy gradient (the sum divided by the expected batch size) changes a model, other than by plain SGD.

    `momentum` is SGD with momentum 0.9, and `adamw` is AdamW with PyTorch's defaults. `corrected` is Adam without the
    noise's own part in its second moment, as in `adaptive.py`: this part is the average of the squared noise levels,
    which are known, and a quarter of it is the least that is left. A step calls nothing that waits for a GPU, so that
    it can be part of a captured graph.
    """

    NAMES = ("momentum", "adamw", "corrected")
    FIRST, SECOND, SMALL, DECAY, SHARE = 0.9, 0.999, 1e-8, 0.01, 0.25

    def __init__(self, name: str, theta: torch.Tensor, steps: int):
        if name not in self.NAMES:
            raise ValueError(f"optimizer must be one of {', '.join(self.NAMES)}, got {name}")
        self.name = name
        self.first, self.second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.rate = torch.zeros(1, device=theta.device)
        self.table = torch.ones(steps, 3, device=theta.device)

    @classmethod
    def numbers(cls, mechanism: Mechanism, clip: float, expected: float) -> torch.Tensor:
        """Of every step: how much of both moments there is yet, and the noise's own part of the second one."""
        levels = mechanism["sigma"] * clip / expected * np.linalg.norm(noise_rows(mechanism), axis=1)
        out, part = np.empty((len(levels), 3)), 0.0
        for t, level in enumerate(levels):
            part = cls.SECOND * part + (1 - cls.SECOND) * level**2
            whole = 1 - cls.SECOND ** (t + 1)
            out[t] = 1 - cls.FIRST ** (t + 1), whole, part / whole
        return torch.from_numpy(out.astype(np.float32))

    def begin(self, table: torch.Tensor, rate: float) -> None:
        self.first.zero_()
        self.second.zero_()
        self.table[: len(table)].copy_(table, non_blocking=True)
        self.rate.fill_(rate)

    def update(self, theta: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor) -> None:
        """Change the model in place; `step` has the number of the step, from 0, as its one element."""
        if self.name == "momentum":
            self.first.mul_(self.FIRST).add_(gradient)
            theta.sub_(self.rate * self.first)
            return
        one, two, known = self.table.index_select(0, step)[0].unbind()
        self.first.mul_(self.FIRST).add_(gradient, alpha=1 - self.FIRST)
        self.second.mul_(self.SECOND).addcmul_(gradient, gradient, value=1 - self.SECOND)
        if self.name == "adamw":
            theta.mul_(1 - self.rate * self.DECAY)
            size = (self.second / two).sqrt_().add_(self.SMALL)
        else:
            size = torch.maximum(self.second / two - known, self.SHARE * known).sqrt_()
        theta.sub_(self.rate / one * self.first / size)


@dataclass
class Task:
    """Records, a model as one vector, its clipped gradients and its accuracy; plain torch, on the CPU."""

    records: int
    held: int
    clip: float
    initial: Callable[[int], torch.Tensor]
    clipped_sum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    accuracy: Callable[[torch.Tensor, torch.Tensor | None], float]

    def split(self, held_out: bool) -> tuple[Array, Array | None]:
        """The records to train on and those to score on; None stands for the test set."""
        if not held_out:
            return np.arange(self.records), None
        order = np.random.default_rng(0).permutation(self.records)
        return order[self.held :], order[: self.held]

    def perform(self, mechanisms: Sequence[Mechanism], runs: Sequence[Run]) -> Iterator[tuple[Run, float]]:
        for run in runs:
            yield run, self.run(mechanisms[run.mechanism], run)

    def run(self, mechanism: Mechanism, run: Run) -> float:
        kept, scored = self.split(run.held_out)
        theta = self.initial(run.seed)
        rows = torch.from_numpy(noise_rows(mechanism))
        normals = torch.randn(rows.shape[1], len(theta), generator=torch.Generator().manual_seed(run.seed + 12345))
        noise = mechanism["sigma"] * self.clip * (rows @ normals)
        expected, optimizer = len(kept) / mechanism["batches"], None
        if name := mechanism.get("optimizer"):
            optimizer = Optimizer(name, theta, len(noise))
            optimizer.begin(Optimizer.numbers(mechanism, self.clip, expected), run.learning_rate)
        for t, (batch, row) in enumerate(zip(batches(mechanism, len(kept), run.seed), noise, strict=True)):
            noisy = self.clipped_sum(theta, torch.from_numpy(kept[batch])) + row
            if optimizer is None:
                theta -= run.learning_rate * mechanism["batches"] / len(kept) * noisy
            else:
                optimizer.update(theta, noisy / expected, torch.tensor([t]))
        return self.accuracy(theta, None if scored is None else torch.from_numpy(scored))


def digits() -> Task:
    """Scikit-learn's digits: 1,500 records and 297 to test on, a network with 64 hidden units, clipping norm 1."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x = torch.tensor(found.data[order] / 16.0 - 0.5, dtype=torch.float32)
    y = torch.tensor(found.target[order])
    sizes = (64 * 64, 64, 10 * 64, 10)

    def layers(theta: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w1, b1, w2, b2 = theta.split(sizes)
        return w1.view(64, 64), b1, w2.view(10, 64), b2

    def initial(seed: int) -> torch.Tensor:
        draw = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed))
        return (draw * 2 - 1) / 8.0  # PyTorch's default for 64 inputs

    def clipped_sum(theta: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        w1, b1, w2, b2 = layers(theta)
        a = x[index]
        hidden = torch.relu(a @ w1.T + b1)
        e2 = torch.softmax(hidden @ w2.T + b2, 1)
        e2[torch.arange(len(index)), y[index]] -= 1.0
        e1 = (e2 @ w2) * (hidden > 0)
        squared = (e1**2).sum(1) * (1 + (a**2).sum(1)) + (e2**2).sum(1) * (1 + (hidden**2).sum(1))
        factor = (1.0 / (squared.sqrt() + 1e-6)).clamp(max=1.0)[:, None]
        e1, e2 = e1 * factor, e2 * factor
        return torch.cat([(e1.T @ a).ravel(), e1.sum(0), (e2.T @ hidden).ravel(), e2.sum(0)])

    def accuracy(theta: torch.Tensor, index: torch.Tensor | None) -> float:
        index = torch.arange(1500, len(y)) if index is None else index
        w1, b1, w2, b2 = layers(theta)
        right = (torch.relu(x[index] @ w1.T + b1) @ w2.T + b2).argmax(1) == y[index]
        return float(right.float().mean())

    return Task(1500, 300, 1.0, initial, clipped_sum, accuracy)


def cifar10(images: Array, labels: Array, test: Array, test_labels: Array, device: str) -> Task:
    """The ConvNet of `cifar10_grid.py`, a tenth of the records held out for tuning, clipping norm 8."""
    if device != "cpu":
        from cifar10_gpu import ManyRuns

        return ManyRuns(images, labels, test, test_labels)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (cifar10_data.MEAN, cifar10_data.STD))
    x, x_test = ((torch.from_numpy(a).float() / 255 - mean) / std for a in (images, test))
    y, y_test = torch.from_numpy(labels), torch.from_numpy(test_labels)

    def clipped_sum(theta: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if not len(index):  # an empty bin, where only few records are used
            return torch.zeros_like(theta)
        return cifar10_grid.clipped_sum(theta, x[index], y[index], torch.ones(len(index)))

    def accuracy(theta: torch.Tensor, index: torch.Tensor | None) -> float:
        a, truth = (x_test, y_test) if index is None else (x[index], y[index])
        with torch.no_grad():
            logits = cifar10_grid.forward(cifar10_grid.split(theta, torch.float32), a)[0]
        return float((logits.argmax(1) == truth).float().mean())

    n = len(labels)
    return Task(n, max(1, n // 10), cifar10_grid.CLIP, cifar10_grid.initial, clipped_sum, accuracy)
