"""CIFAR-10 with DP-SGD, BSR, BISR: a small ConvNet, 10 epochs of 97 balls-in-bins batches, clipping norm 8, δ = 1e-5.

    python examples/cifar10.py sigma  --output docs/data/cifar10-sigma.csv      # noise multipliers, minutes
    python examples/cifar10.py train  --data cifar10.tar.xz --strategy bsr4 --epsilon 4 --learning-rate 0.14
    python examples/cifar10.py report --results docs/data/cifar10-results.csv --sigma docs/data/cifar10-sigma.csv

`train` is one run through Opacus, as one would write it; `cifar10_grid.py` is the whole experiment, made for a GPU.
`report` prints the table and draws the picture of docs/training.md. The data is a path: see `cifar10_data.py`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import dpmf
from dpmf.formatting import upper

EPOCHS, BATCHES, CLIP, DELTA = 10, 97, 8.0, 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
STRATEGIES = {"dpsgd": dpmf.strategies.dpsgd(), "bsr4": dpmf.strategies.bsr(4), "bisr4": dpmf.strategies.bisr(4)}
NAMES = {"dpsgd": "DP-SGD", "bsr4": "BSR(p=4)", "bisr4": "BISR(p=4)"}
ACCOUNTANTS = {
    "best": dpmf.accountants.Best(),
    "renyi": dpmf.accountants.Renyi(),
    "conditional": dpmf.accountants.Conditional(),
    "monte-carlo": dpmf.accountants.MonteCarlo(samples=200_000),
}
SHOWN = {"best": "`best` (proved)", "renyi": "`renyi` (proved)", "monte-carlo": "Monte Carlo (estimate)"}


def mechanism(strategy: str) -> dpmf.Mechanism:
    return dpmf.Mechanism(STRATEGIES[strategy], dpmf.BallsInBins(EPOCHS, BATCHES))


def sigma(arguments: argparse.Namespace) -> None:
    """Noise multipliers of every strategy, accountant and ε; lines already in the file are kept."""
    path: Path = arguments.output
    known: set[tuple[str, ...]] = set()
    if path.exists():
        known = {tuple(line.split(",")[:3]) for line in path.read_text().splitlines()[1:]}
    else:
        path.write_text("strategy,accountant,epsilon,sigma\n")
    for name in arguments.accountants.split(","):
        for strategy in STRATEGIES:
            prepared = ACCOUNTANTS[name].prepare(found := mechanism(strategy))
            for epsilon in reversed(EPSILONS):
                if (strategy, name, str(epsilon)) in known:
                    continue
                answer = dpmf.calibrate(found, target_epsilon=epsilon, target_delta=DELTA, accountant=prepared)
                line = f"{strategy},{name},{epsilon},{upper(answer.noise_multiplier)}"
                with path.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)


def network():
    """The ConvNet of the paper: 292,138 parameters."""
    from torch import nn

    layers: list[nn.Module] = []
    for cin, cout in ((3, 32), (32, 64), (64, 128)):
        for channels in (cin, cout):
            layers += [nn.Conv2d(channels, cout, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def train(arguments: argparse.Namespace) -> None:
    import cifar10_data
    import torch
    from torch.utils.data import TensorDataset

    from dpmf.training import make_private

    data = cifar10_data.load(arguments.data)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (cifar10_data.MEAN, cifar10_data.STD))
    x, test = ((torch.from_numpy(a).float() / 255 - mean) / std for a in (data.train_images, data.test_images))
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    model = network().to(device)
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=arguments.learning_rate),
        TensorDataset(x, torch.from_numpy(data.train_labels)),
        mechanism(arguments.strategy),
        target_epsilon=arguments.epsilon,
        target_delta=DELTA,
        max_grad_norm=CLIP,
        seed=arguments.seed,
    )
    print(f"{private.mechanism}: noise multiplier {upper(private.noise_multiplier)}", flush=True)
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        private.load(arguments.checkpoint)
        print(f"going on from iteration {private.steps_made}", flush=True)
    steps = min(private.steps_left, arguments.iterations)
    end = private.steps_made + steps
    while private.steps_made < end:
        for images, labels in private.in_parts(arguments.physical_batch):
            private.optimizer.zero_grad()
            output = private.model(images.to(device))
            torch.nn.functional.cross_entropy(output, labels.to(device)).backward()
            private.optimizer.step()
            if private.steps_made == end:
                break
        if arguments.checkpoint is not None:
            private.save(arguments.checkpoint)
        print(f"iteration {private.steps_made}", flush=True)
    with torch.no_grad():
        right = sum(
            int((private.model(part.to(device)).argmax(1).cpu() == truth).sum())
            for part, truth in zip(test.split(500), torch.from_numpy(data.test_labels).split(500), strict=True)
        )
    print(f"test accuracy {right / len(test):.4f}")


def table(results: Path, sigmas: Path) -> str:
    """The table of the page: σ and mean ± standard deviation of the test accuracy, by strategy, accountant and ε."""
    accuracy: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    with results.open() as file:
        for row in csv.DictReader(file):
            accuracy[row["strategy"], row["accountant"], float(row["epsilon"])].append(100 * float(row["accuracy"]))
    with sigmas.open() as file:
        sigma_of = {
            (r["strategy"], r["accountant"], float(r["epsilon"])): float(r["sigma"]) for r in csv.DictReader(file)
        }
    lines = [
        "| strategy | σ from | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |",
        "|---|---" + "|---" * 4 + "|",
    ]
    for strategy in STRATEGIES:
        for name, shown in SHOWN.items():
            cells = []
            for e in EPSILONS:
                scores = accuracy[strategy, name, e]
                mean, spread = statistics.mean(scores), statistics.stdev(scores)
                cells.append(f"{mean:.1f} ± {spread:.1f} % (σ = {upper(sigma_of[strategy, name, e], 4)})")
            lines.append(f"| {NAMES[strategy]} | {shown} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(results: Path) -> dict[str, float]:
    """What the page says in words, in percentage points of mean accuracy."""
    scores: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    with results.open() as file:
        for row in csv.DictReader(file):
            scores[row["strategy"], row["accountant"], float(row["epsilon"])].append(100 * float(row["accuracy"]))
    # Of means as the table shows them.
    mean = {key: round(statistics.mean(values), 1) for key, values in scores.items()}
    places = [(s, e) for s in STRATEGIES for e in EPSILONS]
    gains = sorted(round(mean[s, "best", e] - mean[s, "renyi", e], 1) for s, e in places)
    bisr = [round(mean["bisr4", "best", e] - mean["dpsgd", "best", e], 1) for e in EPSILONS]
    return {
        "largest gain of best over renyi": gains[-1],
        "second largest": gains[-2],
        "least": gains[0],
        "largest distance of best and Monte Carlo": round(
            max(abs(mean[s, "best", e] - mean[s, "monte-carlo", e]) for s, e in places), 1
        ),
        "least gain of BISR over DP-SGD": min(bisr),
        "largest gain of BISR over DP-SGD": max(bisr),
    }


def report(arguments: argparse.Namespace) -> None:
    print(table(arguments.results, arguments.sigma))
    for words, points in summary(arguments.results).items():
        print(f"{words}: {points:.1f} points")
    if arguments.picture is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    accuracy: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    with arguments.results.open() as file:
        for row in csv.DictReader(file):
            accuracy[row["strategy"], row["accountant"]][float(row["epsilon"])].append(100 * float(row["accuracy"]))
    for panels, size, ending in (((1, 3), (9, 3.2), ""), ((3, 1), (4.3, 8.5), "-phone")):
        figure, axes = plt.subplots(*panels, figsize=size, sharey=True, layout="constrained")
        _draw(axes, accuracy)
        figure.savefig(arguments.picture.with_name(f"{arguments.picture.stem}{ending}.png"), dpi=110)


def _draw(axes: Any, accuracy: Any) -> None:
    """One panel for each strategy: accuracy against ε, with the noise of each accountant."""
    styles = {"best": ("C0", "o-"), "renyi": ("C3", "s--"), "monte-carlo": ("C2", "^:")}
    for ax, strategy in zip(axes, STRATEGIES, strict=True):
        for shift, (name, (colour, style)) in enumerate(styles.items()):
            points = accuracy[strategy, name]
            x = [e * 1.03 ** (shift - 1) for e in sorted(points)]
            y = [statistics.mean(points[e]) for e in sorted(points)]
            bars = [statistics.stdev(points[e]) for e in sorted(points)]
            label = SHOWN[name].replace("`", "")
            ax.errorbar(x, y, bars, fmt=style, color=colour, label=label, capsize=2, markersize=4)
        ax.set(xscale="log", xticks=EPSILONS, title=NAMES[strategy], xlabel="ε")
        ax.set_xticklabels([f"{e:g}" for e in EPSILONS])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy in %")
    axes[-1].legend(fontsize=8, title="σ from", title_fontsize=8, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("sigma", help="compute the noise multipliers")
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--accountants", default=",".join(ACCOUNTANTS))
    two = commands.add_parser("train", help="one run through Opacus")
    two.add_argument("--data", required=True)
    two.add_argument("--strategy", choices=STRATEGIES, default="bsr4")
    two.add_argument("--epsilon", type=float, default=4.0)
    two.add_argument("--learning-rate", type=float, default=0.1)
    two.add_argument("--seed", type=int, default=0)
    two.add_argument("--device", default="cpu")
    two.add_argument("--physical-batch", type=int, default=128)
    two.add_argument("--iterations", type=int, default=EPOCHS * BATCHES, help="stop after so many, for a try")
    two.add_argument("--checkpoint", type=Path)
    three = commands.add_parser("report", help="the table and the picture")
    three.add_argument("--results", type=Path, required=True)
    three.add_argument("--sigma", type=Path, required=True)
    three.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    try:
        {"sigma": sigma, "train": train, "report": report}[arguments.command](arguments)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
