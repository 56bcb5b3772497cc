"""Tables, files and pictures made from results. This module knows the public API only."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmf import api, validation
from dpmf.accountants.registry import covering
from dpmf.errors import ArgumentError, CalibrationError
from dpmf.files import write_atomically
from dpmf.formatting import given, lower, upper

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpmf.accountants.protocol import Accountant
    from dpmf.mechanism import Mechanism
    from dpmf.results import Estimate, PrivacyBound, PrivacyProfile

# Every line has its own dash pattern and marker, so that lines can be told apart without colour.
LOOKS: list[dict[str, Any]] = [
    {"color": "#0072b2", "linestyle": "-", "marker": "o"},
    {"color": "#d55e00", "linestyle": "--", "marker": "s"},
    {"color": "#009e73", "linestyle": "-.", "marker": "^"},
    {"color": "#cc79a7", "linestyle": ":", "marker": "D"},
    {"color": "#56b4e9", "linestyle": (0, (5, 1)), "marker": "v"},
    {"color": "#e69f00", "linestyle": (0, (3, 1, 1, 1)), "marker": "P"},
    {"color": "#000000", "linestyle": (0, (1, 1)), "marker": "x"},
]
_PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Cell:
    """One entry of a comparison: a noise multiplier, or the reason why there is none.

    `kind` is "bound" for a guarantee; otherwise it says what the number is instead.
    """

    accountant: str
    epsilon: float
    noise_multiplier: float | None
    seconds: float
    kind: str = "bound"
    problem: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Noise multipliers by accountant and ε. `complete` is False if the run was interrupted."""

    mechanism: str
    delta: float
    direction: str
    epsilons: tuple[float, ...]
    accountants: tuple[str, ...]
    cells: tuple[Cell, ...]
    complete: bool

    def cell(self, accountant: str, epsilon: float) -> Cell | None:
        return next((c for c in self.cells if c.accountant == accountant and c.epsilon == epsilon), None)

    def label(self, accountant: str) -> str:
        """Return the accountant's name, followed by what its numbers are if they are not guarantees."""
        kinds = {cell.kind for cell in self.cells if cell.accountant == accountant} - {"bound"}
        return accountant + "".join(f"\n({kind})" for kind in sorted(kinds))

    def to_dict(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "delta": self.delta,
            "direction": self.direction,
            "complete": self.complete,
            "cells": [vars(cell) for cell in self.cells],
        }


def compare(
    mechanism: Mechanism,
    accountants: Sequence[Accountant],
    epsilons: Sequence[float],
    delta: float,
    direction: str = "both",
    progress: bool = False,
) -> Comparison:
    """Calibrate every accountant at every ε. An interrupt (Ctrl-C) keeps the cells that are finished.

    Args:
      mechanism: what is calibrated.
      accountants: one column of the table each.
      epsilons: the target values of ε, one row of the table each.
      delta: the target δ.
      direction: the neighbouring relation: "both", "remove" or "add".
      progress: whether to show a progress bar on stderr.

    Returns:
      All finished cells.

    **Formal guarantees.** Every cell has those of `dpmf.calibrate`.
    """
    grid = tuple(validation.positive("epsilon", e) for e in epsilons)
    delta = validation.probability("delta", delta)
    cells: list[Cell] = []
    complete = True
    # Each accountant is prepared once, because what does not depend on σ is shared by all ε.
    ready = [covering(accountant, mechanism).prepare(mechanism) for accountant in accountants]
    todo = [(prepared, epsilon) for prepared in ready for epsilon in grid]
    from rich.console import Console
    from rich.progress import track

    try:
        for accountant, epsilon in track(
            todo, "calibrating", console=Console(stderr=True), disable=not progress, transient=True
        ):
            began = time.perf_counter()
            sigma, kind, problem = None, "bound", None
            try:
                found = api.calibrate(
                    mechanism, target_epsilon=epsilon, target_delta=delta, accountant=accountant, direction=direction
                )
                sigma, kind = found.noise_multiplier, getattr(found, "kind", "bound")
            except CalibrationError as error:
                problem = str(error)
            cells.append(
                Cell(
                    accountant=accountant.name, epsilon=epsilon, noise_multiplier=sigma,
                    seconds=time.perf_counter() - began, kind=kind, problem=problem,
                )
            )  # fmt: skip
    except KeyboardInterrupt:
        complete = False
    return Comparison(
        mechanism=mechanism.name,
        delta=delta,
        direction=direction,
        epsilons=grid,
        accountants=tuple(dict.fromkeys(a.name for a in accountants)),
        cells=tuple(cells),
        complete=complete,
    )


def print_comparison(comparison: Comparison) -> None:
    """Print a table with one row for each ε and one column for each accountant; noise multipliers are rounded up.

    If that is too wide, accountants have rows and ε columns: a number that is cut short is no bound.
    """
    from rich.console import Console
    from rich.table import Column, Table

    names = comparison.accountants
    rows = [["ε", *map(comparison.label, names)]]
    for epsilon in comparison.epsilons:
        rows.append([given(epsilon), *(_noise_multiplier(comparison.cell(name, epsilon)) for name in names)])
    times = [sum(c.seconds for c in comparison.cells if c.accountant == name) for name in names]
    rows.append(["seconds", *(f"{t:.1f}" for t in times)])
    table = Table(*(Column(head, justify="right") for head in rows[0]))
    for row in rows[1:]:
        table.add_row(*row, end_section=row is rows[-2])
    console = Console()
    if console.measure(table, options=console.options.update(max_width=10**4)).maximum > console.width:
        turned = [[cell.replace("\n", " ") for cell in column] for column in zip(*rows, strict=True)]
        table = Table(*(Column(head, justify="right", no_wrap=True) for head in turned[0]))
        for row in turned[1:]:
            table.add_row(*row)
    title = f"{comparison.mechanism}: noise multiplier for (ε, {given(comparison.delta)})-DP"
    console.print(title, style="bold", highlight=False)
    console.print(table)
    for problem in dict.fromkeys(f"{c.accountant}: {c.problem}" for c in comparison.cells if c.problem):
        console.print(problem, highlight=False)


def _noise_multiplier(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return "none" if cell.noise_multiplier is None else upper(cell.noise_multiplier, 5)


_ASKED = {"noise_multiplier": "noise multiplier", "epsilon": "ε", "delta": "δ"}


def print_answer(
    mechanism: Mechanism, found: PrivacyBound | Estimate, asked: str, more: Sequence[tuple[str, str]] = ()
) -> None:
    """Print what was asked for, then its lower bound, the guarantee, and how the bound came about.

    Args:
      mechanism: the mechanism that the answer is about; its name is the title.
      found: the answer.
      asked: the field of `found` that was asked for: "noise_multiplier", "epsilon" or "delta".
      more: further rows, such as the error that the noise causes.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_row(_ASKED[asked], upper(getattr(found, asked)))
    if found.lower is not None:
        table.add_row("lower bound", lower(found.lower) if found.lower > 0 else "none found")
    # Numbers that were given are shown in full, those that were computed are rounded up.
    epsilon = (upper if asked == "epsilon" else given)(found.epsilon)
    delta = upper(found.delta) if asked == "delta" else given(getattr(found, "target_delta", found.delta))
    relation = "both directions" if found.direction == "both" else f"{found.direction} direction"
    table.add_row(getattr(found, "kind", "guarantee"), f"({epsilon}, {delta})-DP, {relation}")
    if asked != "noise_multiplier":
        table.add_row("noise multiplier", given(found.noise_multiplier))
    table.add_row("accountant", found.accountant)
    what = f"ε({delta})" if asked == "epsilon" else f"δ({epsilon})"
    for one_way, how in found.details.items():
        table.add_row(f"{what}, {one_way}", _how(how))
    for row in more:
        table.add_row(*row)
    console = Console()
    console.print(mechanism.name, style="bold", highlight=False)
    console.print(table)


def _how(details: Mapping[str, Any]) -> str:
    """Describe a bound and how it came about in one line: ``9.99e-06 (order 12, bandwidth 4, exact)``."""
    parts = []
    for key, value in details.items():
        words = key.replace("_", " ")
        if value is True:
            parts.append(words)
        elif key != "value" and value is not False:
            parts.append(f"{words} {upper(value, 4)}" if isinstance(value, float) else f"{words} {value}")
    return upper(details["value"]) + (f"  ({', '.join(parts)})" if parts else "")


def checked_output(path: Path, suffixes: Sequence[str], argument: str = "output") -> Path:
    """Return the path, or refuse, before any work is done, one that could not be written or whose kind is unknown."""
    for wrong, complaint in (
        (path.suffix.lower() not in suffixes, f"must end in {', '.join(suffixes)}, got"),
        (path.is_dir(), "must be a file, got the directory"),
        (not path.parent.is_dir(), "must be in an existing directory, got"),
        (not os.access(path.parent, os.W_OK), "must be in a writable directory, got"),
    ):
        if wrong:
            raise ArgumentError(argument, f"{complaint} {str(path)!r}")
    return path


def profile_csv(profile: PrivacyProfile) -> str:
    """Return the profile as comma-separated values in full precision, one row for each ε."""
    names = list(profile.by_direction)
    columns = [profile.epsilons, profile.deltas, *(profile.by_direction[name] for name in names)]
    head = ["epsilon", "delta", *(f"delta_{name}" for name in names)]
    if profile.lower is not None:
        columns.append(profile.lower)
        head.append("lower")
    lines = [",".join(head)]
    for values in zip(*columns, strict=True):
        lines.append(",".join(repr(float(value)) for value in values))
    return "\n".join(lines) + "\n"


def profile_writer(path: Path) -> Callable[[Mechanism, PrivacyProfile], None]:
    """Return a function that writes a profile to `path` in the format of its suffix; refuse a bad path right away."""
    checked_output(path, (".csv", ".json", *_PICTURES))
    suffix = path.suffix.lower()

    def write(mechanism: Mechanism, profile: PrivacyProfile) -> None:
        if suffix == ".csv":
            content = profile_csv(profile).encode()
        elif suffix == ".json":
            content = (json.dumps({"mechanism": mechanism.name, **profile.to_dict()}) + "\n").encode()
        else:
            content = rendered(_profile_figure(mechanism, profile), suffix)
        write_atomically(path, content)

    return write


def comparison_plotter(path: Path) -> Callable[[Comparison], None]:
    """Return a function that draws a comparison to `path`; refuse a bad path right away."""
    checked_output(path, _PICTURES, "plot")
    return lambda comparison: write_atomically(path, rendered(comparison_figure([comparison]), path.suffix.lower()))


def rendered(figure: Figure, suffix: str) -> bytes:
    """Return the bytes of a picture file of that suffix."""
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=200)
    return stream.getvalue()


def new_figure(panels: int) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * panels + 0.4, 3.8), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for ax in axes:
        ax.grid(visible=True, which="major", color="0.85", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def comparison_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Draw σ against ε: one panel for each comparison, one line for each accountant."""
    figure, axes = new_figure(len(comparisons))
    for ax, comparison in zip(axes, comparisons, strict=True):
        for look, name in zip(LOOKS * 3, comparison.accountants, strict=False):
            found = [c for c in comparison.cells if c.accountant == name and c.noise_multiplier is not None]
            found.sort(key=lambda cell: cell.epsilon)
            label = comparison.label(name).replace("\n", " ")
            sigmas = [c.noise_multiplier for c in found]
            ax.plot([c.epsilon for c in found], sigmas, label=label, markersize=4, **look)
        ax.set(xscale="log", yscale="log", xlabel="ε", title=comparison.mechanism)
        ax.set_xticks(comparison.epsilons, list(map(given, comparison.epsilons)), minor=False)
        ax.minorticks_off()
        shown = [c.noise_multiplier for c in comparison.cells if c.noise_multiplier]
        if shown:
            ticks = _log_ticks(min(shown), max(shown))
            ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
        ax.set_ylabel(f"noise multiplier σ at δ = {given(comparison.delta)}")
        if comparison.accountants:
            ax.legend(frameon=False)
    return figure


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers (1, 2 and 5 times powers of ten) that cover a range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [t for t in ticks if low / 2 <= t <= high * 2]


def _profile_figure(mechanism: Mechanism, profile: PrivacyProfile) -> Figure:
    figure, (ax,) = new_figure(1)
    for look, (name, deltas) in zip(LOOKS, profile.by_direction.items(), strict=False):
        ax.plot(profile.epsilons, deltas, label=name, color=look["color"], linestyle=look["linestyle"])
    ax.set(yscale="log", xlabel="ε", ylabel="δ(ε), upper bound")
    ax.set_title(f"{mechanism.name}, σ = {given(profile.noise_multiplier)} [{profile.accountant}]", fontsize="medium")
    ax.legend(frameon=False)
    return figure
