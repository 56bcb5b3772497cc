"""docs/batchings.md: who takes part when, and what each batching costs in noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpmf.report import new_figure
from evidence.pictures import write_png
from evidence.say import bound, table
from evidence.spec import Cell, MechanismSpec, accountant

EPOCHS, BATCHES, DELTA = 10, 96, 1e-5
EPSILONS = (1.0, 4.0, 8.0)
STRATEGIES = (("DP-SGD", "dpsgd", None), ("BSR(4)", "bsr", 4), ("BSR(16)", "bsr", 16))
NAMES = {
    "fixed": "fixed bins",
    "poisson": "Poisson sampling",
    "cyclic-poisson": "cyclic Poisson sampling",
    "cyclic": "cyclic allocation, thrown anew every epoch",
    "reshuffled": "bins thrown anew every epoch",
}
Results = Mapping[Cell, Mapping[str, Any]]


def serves(batching: str, bandwidth: int | None) -> bool:
    """Whether the batching has a row of its own for a strategy: with independent noise, cyclic batchings are plain."""
    return not batching.startswith("cyclic") if bandwidth is None else batching != "poisson"


def cell_of(batching: str, strategy: str, bandwidth: int | None, epsilon: float) -> Cell:
    """The noise multiplier behind one entry of the table."""
    mechanism = MechanismSpec(strategy, EPOCHS, BATCHES, bandwidth, batching)
    return Cell.of("sigma", mechanism=mechanism, accountant=accountant("best"), epsilon=epsilon, delta=DELTA)


def cells() -> list[Cell]:
    """Every cell."""
    return [
        cell_of(batching, strategy, bandwidth, epsilon)
        for batching in NAMES
        for _, strategy, bandwidth in STRATEGIES
        for epsilon in EPSILONS
        if serves(batching, bandwidth)
    ]


def tabulated(results: Results) -> str:
    """σ at the three ε for each batching and strategy, rounded up; "…" for what is not computed yet."""

    def shown(batching: str, strategy: str, bandwidth: int | None) -> str:
        if not serves(batching, bandwidth):
            return ""
        found = [results.get(cell_of(batching, strategy, bandwidth, epsilon)) for epsilon in EPSILONS]
        return " / ".join("…" if cell is None else bound(cell["sigma"]) for cell in found)

    rows = [[words, *(shown(name, *which[1:]) for which in STRATEGIES)] for name, words in NAMES.items()]
    return table(["batching", *(title for title, _, _ in STRATEGIES)], rows)


def drawn(results: Results, directory: Path) -> list[Path]:
    """The picture of who takes part when."""
    path = directory / "batchings.png"
    write_png(path, participation())
    return [path]


def participation() -> Any:
    """Which of 12 records take part in which iteration, for five batchings of 3 epochs of 6 batches."""
    rng = np.random.default_rng(5)
    records, b, k = 12, 6, 3
    group = np.arange(records) % 2

    def bins(stride: int) -> Any:
        return rng.integers(b // stride, size=records) * stride + (group if stride > 1 else 0)

    def epoch(chosen: Any) -> Any:
        return np.arange(b) == chosen[:, None]

    gap = np.full((records, 1), 0.35)
    anew = [epoch(bins(1)), gap, epoch(bins(1)), gap, epoch(bins(1))]
    cyclic = [epoch(bins(2)), gap, epoch(bins(2)), gap, epoch(bins(2))]
    poisson = rng.random((records, b * k)) < 1 / b
    mine = np.arange(b * k) % 2 == group[:, None]
    pictures = {
        "fixed bins": np.tile(epoch(bins(1)), k),
        "thrown anew, gap 1": np.concatenate(anew, axis=1),
        "cyclic, stride 2": np.concatenate(cyclic, axis=1),
        "Poisson": poisson,
        "cyclic Poisson": (rng.random((records, b * k)) < 2 / b) & mine,
    }
    figure, axes = new_figure(5)
    figure.set_size_inches(14, 3.0)
    for ax, (name, picture) in zip(axes, pictures.items(), strict=True):
        ax.grid(visible=False)
        width = picture.shape[1]
        ax.imshow(picture, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", extent=(0.5, width + 0.5, records + 0.5, 0.5))
        for number in range(1, k):
            ax.axvline(number * width / k + 0.5, color="0.4", linewidth=0.8)
        ax.set(title=name, xlabel="iteration", xticks=[1, width], yticks=[1, 6, 12])
    axes[0].set_ylabel("record")
    return figure
