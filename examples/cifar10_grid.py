"""The CIFAR-10 experiment as a grid of runs on one GPU: strategies × ε × accountants × seeds, learning rates tuned.

    python examples/cifar10_grid.py tune  --data cifar10.tar.xz --sigma docs/data/cifar10-sigma.csv --output tuning.csv
    python examples/cifar10_grid.py final --data cifar10.tar.xz --sigma docs/data/cifar10-sigma.csv --tuned tuning.csv \
        --output docs/data/cifar10-results.csv

The same mechanism as `cifar10.py`, written for speed: plain torch, one CUDA graph for all runs, no Opacus.
Balls-in-bins batches, gradients clipped one by one, summed, divided by the expected batch size; noise σ·clip·C⁻¹Z with
the strategy as given. Each finished run is a line in the output; a second call does only what is missing. Runs on the
CPU too, slowly.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import cifar10_data

EPOCHS, BATCHES, CLIP = 10, 97, 8.0
CHANNELS = (3, 32, 32, 64, 64, 128, 128)
POOL_AFTER = (0, 1, 0, 1, 0, 2)  # how many 2 × 2 max-pools follow each convolution
LEARNING_RATES = (0.00625, 0.0125, 0.025, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)
SEEDS = 5
TUNING_SEED = 1000
HELD_OUT = 5000
EPSILONS = (1.0, 2.0, 4.0, 8.0)
STRATEGIES = ("dpsgd", "bsr4", "bisr4")
TRAINED_WITH = ("best", "renyi", "monte-carlo")


def strategy_series(name: str) -> tuple[list[float], list[float]]:
    """(c, d): y_t = Σ d_j z_{t−j} − Σ_{j≥1} c_j y_{t−j} is the noise C⁻¹z; one of the two is trivial."""
    trivial = [1.0, 0.0, 0.0, 0.0]
    series = {"dpsgd": (trivial, trivial), "bsr4": ([1.0, 1 / 2, 3 / 8, 5 / 16], trivial)}
    series["bisr4"] = (trivial, [1.0, -1 / 2, -1 / 8, -1 / 16])
    return series[name]


def shapes() -> list[tuple[int, ...]]:
    """Weights and biases; convolutions are stored as (out, row, column, in), the order of the per-sample gradients."""
    out: list[tuple[int, ...]] = []
    for cin, cout in pairwise(CHANNELS):
        out += [(cout, 3, 3, cin), (cout,)]
    return [*out, (10, CHANNELS[-1] * 4), (10,)]


def initial(seed: int) -> torch.Tensor:
    """PyTorch's default initialisation, as one vector."""
    torch.manual_seed(seed)
    parts = []
    for shape in shapes():
        if len(shape) > 1:
            bound = int(np.prod(shape[1:])) ** -0.5
        parts.append((torch.rand(int(np.prod(shape))) * 2 - 1) * bound)
    return torch.cat(parts)


def split(theta: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    sizes = [int(np.prod(shape)) for shape in shapes()]
    return [part.view(shape).to(dtype) for part, shape in zip(theta.split(sizes), shapes(), strict=True)]


def forward(
    weights: list[torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Logits, the input of every layer, the output of every layer before its activation."""
    inputs, outputs = [], []
    for layer, pools in enumerate(POOL_AFTER):
        inputs.append(x)
        w, b = weights[2 * layer], weights[2 * layer + 1]
        x = F.conv2d(x, w.permute(0, 3, 1, 2), b, padding=1)
        if layer == 0 and torch.is_grad_enabled():
            x.requires_grad_()
        outputs.append(x)
        x = F.relu(x)
        for _ in range(pools):
            x = F.max_pool2d(x, 2)
    x = x.flatten(1)
    inputs.append(x)
    x = F.linear(x, weights[-2], weights[-1])
    outputs.append(x)
    return x, inputs, outputs


def clipped_sum(theta: torch.Tensor, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Σ_i mask_i · clip(gradient of record i), as one vector; a record with mask 0 contributes nothing."""
    with torch.enable_grad():
        logits, inputs, outputs = forward(split(theta, x.dtype), x)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        errors = torch.autograd.grad(loss, outputs)
    n = len(x)
    gradients = []
    for a, e in zip(inputs[:-1], errors[:-1], strict=True):
        windows = F.pad(a.detach().permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
        patches = windows.permute(0, 1, 2, 4, 5, 3).reshape(n, -1, 9 * a.shape[1])
        e = e.permute(0, 2, 3, 1).reshape(n, -1, e.shape[1])
        gradients += [torch.bmm(e.transpose(1, 2), patches).view(n, -1), e.float().sum(1)]
    e, a = errors[-1], inputs[-1].detach()
    gradients += [(e[:, :, None] * a[:, None, :]).view(n, -1), e]
    squared = sum(torch.linalg.vector_norm(g, dim=1, dtype=torch.float32) ** 2 for g in gradients)
    factor = mask * (CLIP / (squared.sqrt() + 1e-6)).clamp(max=1.0)
    # The clipped gradients are summed in single precision whatever the layers compute in.
    return torch.cat([factor @ g.float() for g in gradients])


@dataclass
class Run:
    strategy: str
    epsilon: float
    accountant: str
    sigma: float
    learning_rate: float
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(v) for v in (self.strategy, self.epsilon, self.accountant, self.learning_rate, self.seed))


class Trainer:
    """Everything that stays the same between runs: the data on the device, the buffers, the captured step."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        test: np.ndarray,
        test_labels: np.ndarray,
        *,
        seeds: Iterable[int],
        device: str,
    ):
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.images, self.test = (torch.from_numpy(a).to(self.device) for a in (images, test))
        self.labels, self.test_labels = (torch.from_numpy(a).to(self.device) for a in (labels, test_labels))
        self.mean = torch.tensor(cifar10_data.MEAN, device=self.device).view(1, 3, 1, 1)
        self.std = torch.tensor(cifar10_data.STD, device=self.device).view(1, 3, 1, 1)
        self.expected = len(images) / BATCHES
        # Bins are padded to one size, so that one captured step serves all batches of all runs.
        self.bins = {seed: np.random.default_rng([seed, 1]).integers(0, BATCHES, len(images)) for seed in seeds}
        self.width = 8 * -(-max(int(np.bincount(bins).max()) for bins in self.bins.values()) // 8)
        p = sum(int(np.prod(shape)) for shape in shapes())
        zeros = {"device": self.device, "dtype": torch.float32}
        self.theta, self.past_y, self.past_z = (
            torch.zeros(p, **zeros),
            torch.zeros(3, p, **zeros),
            torch.zeros(3, p, **zeros),
        )
        self.c, self.d = torch.zeros(4, **zeros), torch.zeros(4, **zeros)
        self.noise_scale, self.rate = torch.zeros((), **zeros), torch.zeros((), **zeros)
        self.index = torch.zeros(self.width, dtype=torch.long, device=self.device)
        self.mask = torch.zeros(self.width, **zeros)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            self._capture()

    def _prepared(self, images: torch.Tensor) -> torch.Tensor:
        x = (images.float() / 255 - self.mean) / self.std
        return x.to(self.dtype).contiguous(memory_format=torch.channels_last)

    def _step(self) -> None:
        gradient = clipped_sum(self.theta, self._prepared(self.images[self.index]), self.labels[self.index], self.mask)
        z = torch.randn_like(self.theta)
        y = self.d[0] * z + self.d[1:] @ self.past_z - self.c[1:] @ self.past_y
        for past, new in ((self.past_z, z), (self.past_y, y)):
            past.copy_(torch.cat((new[None], past[:-1])))
        self.theta.sub_(self.rate * (gradient + self.noise_scale * y) / self.expected)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def batches(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The padded balls-in-bins batches: indices and masks, one row per bin."""
        index, mask = np.zeros((BATCHES, self.width), dtype=np.int64), np.zeros((BATCHES, self.width), dtype=np.float32)
        for bin_ in range(BATCHES):
            members = np.flatnonzero(self.bins[seed] == bin_)
            index[bin_, : len(members)], mask[bin_, : len(members)] = members, 1.0
        return torch.from_numpy(index).to(self.device), torch.from_numpy(mask).to(self.device)

    def run(self, run: Run, iterations: int = EPOCHS * BATCHES) -> float:
        """Test accuracy at the end."""
        c, d = strategy_series(run.strategy)
        self.c.copy_(torch.tensor(c))
        self.d.copy_(torch.tensor(d))
        self.theta.copy_(initial(run.seed))
        self.past_y.zero_()
        self.past_z.zero_()
        self.noise_scale.fill_(run.sigma * CLIP)
        self.rate.fill_(run.learning_rate)
        index, mask = self.batches(run.seed)
        torch.manual_seed(run.seed + 12345)
        for t in range(iterations):
            self.index.copy_(index[t % BATCHES])
            self.mask.copy_(mask[t % BATCHES])
            if self.graph is None:
                with torch.no_grad():
                    self._step()
            else:
                self.graph.replay()
        return self.accuracy()

    @torch.no_grad()
    def accuracy(self) -> float:
        weights = split(self.theta, self.dtype)
        right = torch.zeros((), device=self.device)
        for start in range(0, len(self.test), 2000):
            logits = forward(weights, self._prepared(self.test[start : start + 2000]))[0]
            right += (logits.argmax(1) == self.test_labels[start : start + 2000]).sum()
        return float(right) / len(self.test)


def read_sigma(path: Path) -> dict[tuple[str, str, float], float]:
    with path.open() as file:
        return {
            (row["strategy"], row["accountant"], float(row["epsilon"])): float(row["sigma"])
            for row in csv.DictReader(file)
        }


def tuning_runs(sigma: dict[tuple[str, str, float], float]) -> list[Run]:
    """At the σ of the accountant to be shown, on one seed, with part of the training set held out."""
    return [
        Run(s, e, "best", sigma[s, "best", e], rate, TUNING_SEED)
        for e in EPSILONS for s in STRATEGIES for rate in LEARNING_RATES
    ]  # fmt: skip


def final_runs(sigma: dict[tuple[str, str, float], float], rates: dict[tuple[str, float], float]) -> list[Run]:
    return [
        Run(s, e, a, sigma[s, a, e], rates[s, e], seed)
        for seed in range(SEEDS) for e in EPSILONS for s in STRATEGIES for a in TRAINED_WITH
        if (s, a, e) in sigma
    ]  # fmt: skip


def best_rates(path: Path) -> dict[tuple[str, float], float]:
    best: dict[tuple[str, float], tuple[float, float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            key = row["strategy"], float(row["epsilon"])
            best[key] = max(best.get(key, (-1.0, 0.0)), (float(row["accuracy"]), float(row["learning_rate"])))
    return {key: rate for key, (_, rate) in best.items()}


COLUMNS = ("strategy", "epsilon", "accountant", "learning_rate", "seed", "sigma", "accuracy", "seconds")


def perform(trainer: Trainer, runs: list[Run], output: Path, until: float, iterations: int) -> None:
    done: set[tuple[str, ...]] = set()
    if output.exists():
        with output.open() as file:
            done = {tuple(row[c] for c in COLUMNS[:5]) for row in csv.DictReader(file)}
    missing = [run for run in runs if run.key not in done]
    with output.open("a") as file:
        if file.tell() == 0:
            file.write(",".join(COLUMNS) + "\n")
        for number, run in enumerate(missing):
            start = time.monotonic()
            if start > until:
                print(f"time is up, {len(missing) - number} runs left", flush=True)
                return
            accuracy = trainer.run(run, iterations)
            file.write(f"{','.join(run.key)},{run.sigma!r},{accuracy:.4f},{time.monotonic() - start:.2f}\n")
            file.flush()
            if number % 10 == 0:
                print(number, "of", len(missing), run, accuracy, round(time.monotonic() - start, 2), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("tune", "final"))
    for name in ("--data", "--sigma", "--output"):
        parser.add_argument(name, required=True, type=Path)
    parser.add_argument("--tuned", type=Path, help="what tune wrote")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this long")
    parser.add_argument("--records", type=int, help="only so many training and test images, to try it out")
    parser.add_argument("--iterations", type=int, default=EPOCHS * BATCHES)
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    data = cifar10_data.load(arguments.data)
    print(f"{len(data.train_labels)} + {len(data.test_labels)} images read", flush=True)
    if arguments.records:
        chosen = np.random.default_rng(0).permutation(len(data.train_labels))[: arguments.records]
        data = cifar10_data.Cifar10(
            data.train_images[chosen], data.train_labels[chosen], data.test_images[:500], data.test_labels[:500]
        )
    sigma = read_sigma(arguments.sigma)
    if arguments.command == "tune":
        order = np.random.default_rng(0).permutation(len(data.train_labels))
        held = max(1, len(order) * HELD_OUT // 50_000)
        out, kept = order[:held], order[held:]
        images, labels = data.train_images, data.train_labels
        trainer = Trainer(
            images[kept], labels[kept], images[out], labels[out], seeds=[TUNING_SEED], device=arguments.device
        )
        runs = tuning_runs(sigma)
    else:
        if arguments.tuned is None:
            parser.error("final needs --tuned")
        trainer = Trainer(*data, seeds=range(SEEDS), device=arguments.device)
        runs = final_runs(sigma, best_rates(arguments.tuned))
    perform(trainer, runs, arguments.output, until, arguments.iterations)


if __name__ == "__main__":
    main()
