"""docs/mechanisms.md: which mechanism `dpmf design` chooses, and what that gains over what people run otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpmf.files import write_atomically
from dpmf.formatting import upper
from dpmf.report import new_figure
from evidence.pictures import write_png
from evidence.say import table, with_block
from evidence.spec import Cell, accountant

DELTA = 1e-5
SHAPES = ((1, 1000), (10, 100))
EPSILONS = (1.0, 8.0)
MEMORIES = (100.0, None)
SECONDS = 200.0
# What is compared, with the words for it. The first is what most people run.
KINDS = {
    "poisson": "DP-SGD, Poisson sampling",
    "cyclic-poisson": "banded, cyclic Poisson sampling",
    "fixed": "correlated, fixed bins",
    "best": "dpmf's choice",
}
# The picture and the number of the README.
FRONT = {
    "poisson": "DP-SGD with Poisson sampling, what most people run",
    "cyclic-poisson": "correlated noise with cyclic Poisson sampling, the standard",
    "best": "what dpmf chooses",
}
FRONT_MEMORY = 100.0
README = Path("README.md")
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
                copies = f"{found['copies'] or 'no'} {'copy' if found['copies'] == 1 else 'copies'}"
                rows.append([*row, *errors, f"{found['strategy']}, {found['batching']}, {copies}"])
    return table(["run and workload", "ε", *KINDS.values(), "what was chosen"], rows)


def drawn(results: Results, directory: Path) -> list[Path]:
    """Errors relative to DP-SGD with Poisson sampling, for each run."""
    figure, axes = new_figure(len(SHAPES))
    figure.set_size_inches(11, 3.6)
    for ax, shape in zip(axes, SHAPES, strict=True):
        labels: list[str] = []
        there: set[str] = set()
        for place, (memory, epsilon) in enumerate((m, e) for m in MEMORIES for e in EPSILONS):
            sums = "prefix\nsums" if memory is None else f"memory\n{memory:g}"
            labels.append(f"{sums}\nε = {epsilon:g}")
            errors = results.get(cell_of(shape, memory, epsilon), {}).get("errors", {})
            for offset, kind in enumerate(KINDS):
                if kind in errors:
                    words = None if kind in there else KINDS[kind]
                    there.add(kind)
                    height = errors[kind] / errors["poisson"]
                    ax.bar(place + 0.2 * (offset - 1.5), height, 0.2, color=COLOURS[kind], label=words)
        ax.set(
            title=_words(shape, None).rsplit(",", 1)[0], xticks=range(len(labels)), xticklabels=labels, ylim=(0, 1.3)
        )
    axes[0].set_ylabel("error, DP-SGD with Poisson = 1")
    named = {word: bar for ax in axes for bar, word in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=4, frameon=False)
    path, front = directory / "mechanisms.png", directory / "front.png"
    write_png(path, figure)
    write_png(front, front_picture(results))
    if directory == Path("docs/pictures"):
        before = README.read_text(encoding="utf-8")
        write_atomically(README, with_block(before, "front", front_sentence(results)).encode())
    return [path, front]


def _complete(results: Results) -> dict[tuple[int, int], dict[float, Mapping[str, float]]]:
    """The errors of the front kinds for each run, at every ε; runs for which one of them is missing are left out."""
    found = {}
    for shape in SHAPES:
        at = {e: results.get(cell_of(shape, FRONT_MEMORY, e), {}).get("errors", {}) for e in EPSILONS}
        if all(kind in errors for errors in at.values() for kind in FRONT):
            found[shape] = at
    return found


def front_picture(results: Results) -> Any:
    """The picture of the README: the error of a usual run, of the usual correlated noise, and of dpmf's choice."""
    runs = _complete(results)
    figure, axes = new_figure(max(1, len(runs)))
    figure.set_size_inches(4.6 * len(axes) + 0.4, 3.9)
    for ax, (shape, at) in zip(axes, runs.items(), strict=False):
        for place, (kind, words) in enumerate(FRONT.items()):
            heights = [at[e][kind] for e in EPSILONS]
            bars = ax.bar(
                [x + 0.27 * (place - 1) for x in range(len(at))], heights, 0.25, color=COLOURS[kind], label=words
            )
            ax.bar_label(bars, [upper(height, 3) for height in heights], padding=2)
        ax.set_xticks(range(len(at)), [f"ε = {e:g}" for e in EPSILONS])
        ax.set(title=_words(shape, None).rsplit(",", 1)[0], ylabel="error: noise in the model")
        ax.grid(visible=False, axis="x")
        ax.margins(y=0.1)
    shared = axes[0].get_legend_handles_labels()
    figure.legend(*shared, loc="outside lower center", frameon=False, ncols=len(axes))
    return figure


def front_sentence(results: Results) -> str:
    """The number of the README, beside its baseline."""
    runs = _complete(results)
    if not runs:
        return "The errors are not computed yet."
    (shape, at), epsilon = next(iter(runs.items())), EPSILONS[-1]
    best, usual = at[epsilon]["best"], at[epsilon]["poisson"]
    run = _words(shape, None).rsplit(",", 1)[0]
    return (
        f"**{100 * best / usual:.0f} % of the noise of DP-SGD at the same guarantee**: for {run} at ε = {epsilon:g}, "
        f"δ = 10⁻⁵, the noise in the model is {upper(best, 3)} instead of {upper(usual, 3)}."
    )
