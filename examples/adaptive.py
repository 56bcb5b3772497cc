"""What adaptive optimizers do to correlated noise, on scikit-learn's handwritten digits, on the CPU in some minutes.

    python examples/adaptive.py [--epsilon 4] [--seeds 5]

Prints a table of test accuracies: independent and correlated noise (rows) with plain SGD, momentum, AdamW, and an Adam
whose second moment is corrected for the noise that is known to be in it (columns). Learning rates are chosen the same
way everywhere, on records held out of the training set (which costs privacy that is not counted, as is usual in
examples).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from digits import CLIP, DELTA, accuracy, data
from torch import nn

import dpmf
from dpmf.formatting import upper
from dpmf.training import PrivateTraining, make_private

EPOCHS, BATCHES = 10, 20
MECHANISMS = {
    "DP-SGD, reshuffled bins": dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.reshuffled(EPOCHS, BATCHES)),
    "DP-SGD, fixed bins": dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(EPOCHS, BATCHES)),
    "BSR(4), fixed bins": dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.BallsInBins(EPOCHS, BATCHES)),
    "BISR(4), fixed bins": dpmf.Mechanism(dpmf.strategies.bisr(4), dpmf.BallsInBins(EPOCHS, BATCHES)),
}


class CorrectedAdam(torch.optim.Optimizer):
    """Adam without the noise's own part in its second moment, which is known: the average of the squared noise levels.

    What is left is bounded below by a share of that part, so that directions in which there is nothing but noise are
    not followed ever faster.
    """

    def __init__(self, parameters: Any, lr: float, share: float = 0.25):
        super().__init__(parameters, {"lr": lr, "share": share, "betas": (0.9, 0.999)})
        self.levels: Any = None  # the noise in the gradient, step by step
        self.steps, self.part = 0, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        level, self.steps = float(self.levels[self.steps]), self.steps + 1
        self.part = 0.999 * self.part + 0.001 * level**2
        for group in self.param_groups:
            first, second = group["betas"]
            known = self.part / (1 - second**self.steps)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].lerp_(p.grad.square(), 1 - second)
                size = (state["v"] / (1 - second**self.steps) - known).clamp(min=group["share"] * known).sqrt()
                p.sub_(group["lr"] * state["m"] / (1 - first**self.steps) / size)


OPTIMIZERS: dict[str, tuple[Callable[[Any, float], Any], tuple[float, ...]]] = {
    "SGD": (lambda parameters, lr: torch.optim.SGD(parameters, lr=lr), (0.25, 0.5, 1.0, 2.0, 4.0)),
    "momentum 0.9": (
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        (0.025, 0.05, 0.1, 0.2, 0.4),
    ),
    "AdamW": (lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr), (0.0025, 0.005, 0.01, 0.02, 0.04)),
    "corrected Adam": (CorrectedAdam, (0.00125, 0.0025, 0.005, 0.01, 0.02)),
}


def train(
    mechanism: dpmf.Mechanism, sigma: float, make: Callable[[Any, float], Any], rate: float, records: Any, seed: int
) -> PrivateTraining:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(model.parameters(), rate)
    private = make_private(
        model, optimizer, records, mechanism, noise_multiplier=sigma, max_grad_norm=CLIP, seed=seed
    )  # fmt: skip
    if isinstance(optimizer, CorrectedAdam):
        optimizer.levels = private.noise_levels
    while private.steps_left:
        for x, y in private.data_loader:
            private.optimizer.zero_grad()
            nn.functional.cross_entropy(private.model(x), y).backward()
            private.optimizer.step()
    return private


def cell(mechanism: dpmf.Mechanism, sigma: float, name: str, seeds: int) -> str:
    """Mean test accuracy and its standard error, with the learning rate that is best on held-out records."""
    make, rates = OPTIMIZERS[name]
    training, held_out, test = data()
    scores = {
        rate: statistics.mean(
            accuracy(train(mechanism, sigma, make, rate, training, seed).model, held_out) for seed in (1000, 1001)
        )
        for rate in rates
    }
    rate = max(scores, key=lambda r: scores[r])
    found = [100 * accuracy(train(mechanism, sigma, make, rate, training, seed).model, test) for seed in range(seeds)]
    error = statistics.stdev(found) / math.sqrt(seeds) if seeds > 1 else 0.0
    return f"{statistics.mean(found):.1f} ± {error:.1f} % ({rate:g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mechanisms", type=int, default=len(MECHANISMS), help="how many of the rows")
    parser.add_argument("--optimizers", type=int, default=len(OPTIMIZERS), help="how many of the columns")
    options = parser.parse_args()
    names = list(OPTIMIZERS)[: options.optimizers]
    print(f"| ε = {options.epsilon:g} | σ | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 2) + "|")
    for title, mechanism in list(MECHANISMS.items())[: options.mechanisms]:
        found = dpmf.calibrate(
            mechanism, target_epsilon=options.epsilon, target_delta=DELTA, accountant="auto"
        )  # fmt: skip
        sigma = found.noise_multiplier
        row = [cell(mechanism, sigma, name, options.seeds) for name in names]
        print(f"| {title} | {upper(sigma, 4)} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
