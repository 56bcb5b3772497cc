"""docs/mechanisms.md: which mechanism `dpmf design` chooses, and what that gains over what people run otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpmf.files import write_atomically
from dpmf.formatting import upper
from dpmf.report import new_figure
from evidence.pictures import png
from evidence.say import table
from evidence.spec import Cell, accountant

DELTA = 1e-5
SHAPES = ((1, 1000), (10, 100))
EPSILONS = (1.0, 8.0)
MEMORIES = (100.0, None)
SECONDS = 110.0
# What is compared, with the words for it. The first is what most people run.
KINDS = {
    "poisson": "DP-SGD, Poisson sampling",
    "cyclic-poisson": "banded, cyclic Poisson sampling",
    "fixed": "correlated, fixed bins",
    "best": "dpmf's choice",
}
COLOURS = {"poisson": "0.6", "cyclic-poisson": "tab:orange", "fixed": "tab:green", "best": "tab:blue"}
Results = Mapping[Cell, Mapping[str, Any]]


def cell_of(shape: tuple[int, int], memory: float | None, epsilon: float) -> Cell:
    """One design."""
    return Cell.of(
        "design", epochs=shape[0], batches=shape[1], memory=memory, epsilon=epsilon, delta=DELTA, seconds=SECONDS,
        accountant=accountant("best"),
    )  # fmt: skip


def cells() -> list[Cell]:
    """Every design."""
    return [cell_of(shape, memory, epsilon) for shape in SHAPES for memory in MEMORIES for epsilon in EPSILONS]


def _words(shape: tuple[int, int], memory: float | None) -> str:
    epochs = "one epoch" if shape[0] == 1 else f"{shape[0]} epochs"
    return f"{epochs} of {shape[1]} batches, {'prefix sums' if memory is None else f'memory {memory:g}'}"


def tabulated(results: Results) -> str:
    """The error of each kind, and what was chosen; "…" for what is not computed yet."""
    rows = []
    for shape in SHAPES:
        for memory in MEMORIES:
            for epsilon in EPSILONS:
                found = results.get(cell_of(shape, memory, epsilon))
                row = [_words(shape, memory), f"{epsilon:g}"]
                if found is None:
                    rows.append([*row, *("…" for _ in KINDS), ""])
                    continue
                errors = [upper(e, 4) if (e := found["errors"].get(kind)) is not None else "" for kind in KINDS]
                rows.append([*row, *errors, f"{found['strategy']}, {found['batching']}, {found['copies']} copies"])
    return table(["run and workload", "ε", *KINDS.values(), "what was chosen"], rows)


def drawn(results: Results, directory: Path) -> list[Path]:
    """Errors relative to DP-SGD with Poisson sampling, for each run."""
    figure, axes = new_figure(len(SHAPES))
    figure.set_size_inches(11, 3.6)
    for ax, shape in zip(axes, SHAPES, strict=True):
        labels = []
        for place, (memory, epsilon) in enumerate((m, e) for m in MEMORIES for e in EPSILONS):
            labels.append(f"{'prefix' if memory is None else f'memory {memory:g}'}\nε = {epsilon:g}")
            errors = results.get(cell_of(shape, memory, epsilon), {}).get("errors", {})
            for offset, kind in enumerate(KINDS):
                if kind in errors:
                    words = KINDS[kind] if place == 0 else None
                    height = errors[kind] / errors["poisson"]
                    ax.bar(place + 0.2 * (offset - 1.5), height, 0.2, color=COLOURS[kind], label=words)
        ax.set(
            title=_words(shape, None).rsplit(",", 1)[0], xticks=range(len(labels)), xticklabels=labels, ylim=(0, 1.3)
        )
    axes[0].set_ylabel("error, DP-SGD with Poisson = 1")
    axes[-1].legend(frameon=False, fontsize="small")
    path = directory / "mechanisms.png"
    write_atomically(path, png(figure))
    return [path]
