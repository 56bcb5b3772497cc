"""The pictures of docs/concepts.md and docs/explore.md. No numbers of theirs are kept, only which code drew them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import dpmf
from dpmf.files import write_atomically
from dpmf.lower_bounds import lower_delta
from dpmf.report import LOOKS, new_figure
from evidence.fingerprint import code_version
from evidence.pictures import write_png
from evidence.spec import Cell
from evidence.store import Record


def batches() -> Any:
    """Three ways to make batches, for 12 records and 3 epochs of 6 batches."""
    rng = np.random.default_rng(3)
    records, b, epochs = 12, 6, 3
    bins = rng.integers(b, size=records)
    balls = np.tile(np.arange(b) == bins[:, None], epochs)
    poisson = rng.random((records, b * epochs)) < 1 / b
    shuffled = np.concatenate(
        [np.arange(b) == rng.permutation(np.repeat(np.arange(b), records // b))[:, None] for _ in range(epochs)], axis=1
    )
    figure, axes = new_figure(3)
    figure.set_size_inches(11, 3.2)
    for ax, name, table in zip(
        axes, ("balls in bins", "Poisson sampling", "shuffling"), (balls, poisson, shuffled), strict=True
    ):
        ax.grid(visible=False)
        ax.imshow(
            table, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", extent=(0.5, b * epochs + 0.5, records + 0.5, 0.5)
        )
        for epoch in range(1, epochs):
            ax.axvline(epoch * b + 0.5, color="0.4", linewidth=0.8)
        ax.set(title=name, xlabel="iteration", ylabel="record", xticks=[1, 6, 12, 18], yticks=[1, 6, 12])
    return figure


def strategies() -> Any:
    """Coefficients of C and of its inverse, and what the noise does to prefix sums."""
    n = 100
    chosen = (dpmf.strategies.dpsgd(), dpmf.strategies.bsr(bandwidth=4), dpmf.strategies.bisr(bandwidth=4))
    figure, axes = new_figure(3)
    figure.set_size_inches(11, 3.2)
    for look, strategy in zip(LOOKS, chosen, strict=False):
        few = {**look, "markersize": 3.5}
        axes[0].plot(strategy.strategy_coef(n)[:12], label=strategy.name, **few)
        axes[1].plot(strategy.noising_coef(n)[:12], label=strategy.name, **few)
        errors = np.linalg.norm(np.cumsum(strategy.inverse(n), axis=0), axis=1)
        axes[2].plot(np.arange(1, n + 1), errors, label=strategy.name, color=look["color"], linestyle=look["linestyle"])
    axes[0].set(title="first column of C", xlabel="iterations later")
    axes[1].set(title="first column of C⁻¹: noise comes back", xlabel="iterations later")
    axes[2].set(title="error of the sum so far, σ = 1", xlabel="iteration")
    axes[0].legend(frameon=False)
    return figure


def gram() -> Any:
    """Gram matrices for 24 bins."""
    cases = (
        (dpmf.strategies.dpsgd(), 1),
        (dpmf.strategies.bsr(bandwidth=6), 1),
        (dpmf.strategies.bisr(bandwidth=4), 1),
        (dpmf.strategies.bsr(bandwidth=6), 4),
    )
    figure, axes = new_figure(4)
    figure.set_size_inches(12, 3.7)
    for ax, (strategy, epochs) in zip(axes, cases, strict=True):
        matrix = dpmf.Mechanism(strategy, dpmf.BallsInBins(epochs, 24)).gram
        ax.grid(visible=False)
        ax.imshow(matrix / matrix.max(), cmap="viridis", vmin=0, vmax=1)
        ax.set(title=f"{strategy.name}, {epochs} epoch{'s' if epochs > 1 else ''}", xlabel="bin", xticks=[], yticks=[])
    axes[0].set_ylabel("bin")
    return figure


def profile() -> Any:
    """Upper bounds and the certified lower bound at one noise multiplier."""
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(bandwidth=2), dpmf.BallsInBins(epochs=2, batches_per_epoch=30))
    sigma, grid = 2.0, np.linspace(0.0, 3.0, 13)
    below = [lower_delta(mechanism, sigma, e) for e in grid]
    figure, (ax,) = new_figure(1)
    ax.fill_between(grid, 1e-12, below, color="0.85", label="impossible (certified)", linewidth=0)
    for look, name in zip(LOOKS, ("gaussian", "renyi", "chain"), strict=False):
        found = dpmf.profile(mechanism, noise_multiplier=sigma, epsilons=grid, accountant=name)
        ax.plot(grid, found.deltas, label=name, markersize=3.5, **look)
    ax.set(yscale="log", xlabel="ε", ylabel="δ(ε), upper bounds", ylim=(min(below) / 2, 2))
    ax.set_title(f"{mechanism.name}, σ = {sigma:g}", fontsize="medium")
    ax.legend(loc="lower left")
    return figure


def _explore() -> bytes:
    from evidence.screenshot import screenshot

    return screenshot()


# By page and name. A picture comes as a figure or as the bytes of a PNG file.
DRAWINGS: dict[str, dict[str, Callable[[], Any]]] = {
    "concepts": {"batches": batches, "strategies": strategies, "gram": gram, "profile": profile},
    "explore": {"explore": _explore},
}


def drawn(page: str, name: str, directory: Path) -> Record:
    """Draw a picture into the directory, and say which code drew it."""
    began = time.process_time()
    made = DRAWINGS[page][name]()
    path = directory / f"{name}.png"
    if isinstance(made, bytes):
        write_atomically(path, made)
    picture = made if isinstance(made, bytes) else write_png(path, made)
    return record_of(name, picture, time.process_time() - began)


def record_of(name: str, picture: bytes, seconds: float = 0.0, code: str | None = None) -> Record:
    """What is kept of a picture: its code, and a digest that tells whether the file is still the one drawn."""
    cell = Cell.of("picture", name=name)
    return Record(cell, code or code_version(cell), {"sha256": sha256(picture).hexdigest()}, None, seconds)


def drawn_by(records: Iterable[Record]) -> str:
    """The sentence of a page that says which code drew its pictures."""
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(record.code, []).append(record.cell.parameters["name"])
    codes = "; ".join(f"code `{code}` ({', '.join(sorted(some))})" for code, some in sorted(names.items()))
    return f"Drawn by `python -m evidence pictures`: {codes}."
