"""The pictures of docs/concepts.md.

python docs/make_concept_pictures.py         all of them (about a minute)
python docs/make_concept_pictures.py gram    only these
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dpmf
from dpmf.files import write_atomically
from dpmf.lower_bounds import LowerBounds
from dpmf.report import LOOKS, new_figure

PICTURES = Path(__file__).resolve().parent / "pictures"


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
    bounds = LowerBounds.of(mechanism)
    below = [max(bounds.delta(sigma, e, way) for way in ("remove", "add")) for e in grid]
    figure, (ax,) = new_figure(1)
    ax.fill_between(grid, 1e-12, below, color="0.85", label="impossible (certified)", linewidth=0)
    for look, name in zip(LOOKS, ("gaussian", "renyi", "chain"), strict=False):
        found = dpmf.profile(mechanism, noise_multiplier=sigma, epsilons=grid, accountant=name)
        ax.plot(grid, found.deltas, label=name, markersize=3.5, **look)
    ax.set(yscale="log", xlabel="ε", ylabel="δ(ε), upper bounds", ylim=(min(below) / 2, 2))
    ax.set_title(f"{mechanism.name}, σ = {sigma:g}", fontsize="medium")
    ax.legend(loc="lower left")
    return figure


DRAWINGS: dict[str, Callable[[], Any]] = {
    "batches": batches,
    "strategies": strategies,
    "gram": gram,
    "profile": profile,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="The pictures of docs/concepts.md.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(DRAWINGS)} (all if none)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(DRAWINGS):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    for name in options.names or DRAWINGS:
        stream = io.BytesIO()
        DRAWINGS[name]().savefig(stream, format="png", dpi=110)
        write_atomically(PICTURES / f"{name}.png", stream.getvalue())
        print(f"wrote docs/pictures/{name}.png", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
