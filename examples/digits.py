"""Private training on scikit-learn's handwritten digits, on the CPU, in about five minutes: three strategies, one ε.

    python examples/digits.py [--epsilon 2] [--epochs 10] [--batches 20] [--seeds 3] [--checkpoint digits.dpmf]

Prints the noise multiplier, the ε spent and the test accuracy of independent and correlated noise, with the learning
rate chosen the same way for each (on records held out of the training set; choosing costs privacy that is not counted
here, as is usual in examples).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import dpmf
from dpmf.formatting import upper
from dpmf.training import PrivateTraining, make_private

DELTA = 1e-4
CLIP = 1.0
LEARNING_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
STRATEGIES = {
    "DP-SGD": dpmf.strategies.dpsgd(),
    "BSR(p=4)": dpmf.strategies.bsr(4),
    "BISR(p=4)": dpmf.strategies.bisr(4),
}


def data() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Training, held-out and test records."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = torch.tensor(digits.data[order] / 16.0 - 0.5, dtype=torch.float32)
    y = torch.tensor(digits.target[order])
    return (
        TensorDataset(x[:1300], y[:1300]),
        TensorDataset(x[1300:1500], y[1300:1500]),
        TensorDataset(x[1500:], y[1500:]),
    )


def accuracy(model: nn.Module, records: TensorDataset) -> float:
    with torch.no_grad():
        x, y = records.tensors
        return float((model(x).argmax(1) == y).float().mean())


def train(
    mechanism: dpmf.Mechanism, sigma: float, records: TensorDataset, rate: float, seed: int, file: Path | None = None
) -> PrivateTraining:
    """One private run; with a file, it is saved after every epoch and goes on from there if it was interrupted."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    private = make_private(
        model, optimizer, records, mechanism, noise_multiplier=sigma, max_grad_norm=CLIP, seed=seed
    )  # fmt: skip
    if file is not None and file.exists():
        private.load(file)
    while private.steps_left:
        for x, y in private.data_loader:
            private.optimizer.zero_grad()
            nn.functional.cross_entropy(private.model(x), y).backward()
            private.optimizer.step()
        if file is not None:
            private.save(file)
    return private


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batches", type=int, default=20, help="batches per epoch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=int, default=len(LEARNING_RATES), help="how many learning rates to try")
    parser.add_argument("--accountant", default="best")
    parser.add_argument("--checkpoint", type=Path, help="save and resume the last run here")
    arguments = parser.parse_args()
    training, held_out, test = data()
    print(f"{len(training)} records, {arguments.epochs} epochs of {arguments.batches} balls-in-bins batches")
    print(f"{'strategy':10} {'σ':>7} {'ε':>6} {'rate':>5}  test accuracy")
    for name, strategy in STRATEGIES.items():
        try:
            mechanism = dpmf.Mechanism(strategy, dpmf.BallsInBins(arguments.epochs, arguments.batches))
            found = dpmf.calibrate(
                mechanism, target_epsilon=arguments.epsilon, target_delta=DELTA, accountant=arguments.accountant
            )
        except ValueError as error:
            parser.error(str(error))
        sigma = found.noise_multiplier
        rates = LEARNING_RATES[: arguments.rates]
        rate = max(rates, key=lambda r: accuracy(train(mechanism, sigma, training, r, 1000).model, held_out))
        runs = [train(mechanism, sigma, training, rate, seed) for seed in range(arguments.seeds - 1)]
        runs.append(train(mechanism, sigma, training, rate, arguments.seeds - 1, arguments.checkpoint))
        if arguments.checkpoint is not None:
            for file in (arguments.checkpoint, *runs[-1].journal.files):
                file.unlink(missing_ok=True)  # this strategy is done, and the next one is another mechanism
        scores = [100 * accuracy(run.model, test) for run in runs]
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        mean = statistics.mean(scores)
        print(f"{name:10} {upper(sigma, 4):>7} {upper(found.epsilon):>6} {rate:5.2f}  {mean:.1f}{spread} %", flush=True)


if __name__ == "__main__":
    main()
