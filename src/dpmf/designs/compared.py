"""Several mechanisms side by side: noise multipliers, errors, and errors relative to DP-SGD with its best batching."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmf import api, progress, validation
from dpmf.designs.baseline import error_beside
from dpmf.errors import CalibrationError
from dpmf.files import write_atomically
from dpmf.formatting import given, upper
from dpmf.mechanism import Mechanism
from dpmf.report import LOOKS, checked_output, new_figure
from dpmf.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class ErrorCell:
    """One mechanism at one ε. `problem` says why there is no noise multiplier where there is none.

    `kind` is "bound" where the noise multiplier is guaranteed; otherwise it says what it is instead.
    """

    mechanism: str
    epsilon: float
    noise_multiplier: float | None = None
    error: float | None = None
    relative_error: float | None = None
    kind: str = "bound"
    problem: str | None = None


@dataclass(frozen=True)
class ErrorComparison:
    """Errors by mechanism and ε. Errors are root mean squares over iterations, at clipping norm 1."""

    workload: str
    delta: float
    cells: tuple[ErrorCell, ...]

    @property
    def mechanisms(self) -> list[str]:
        return list(dict.fromkeys(cell.mechanism for cell in self.cells))

    @property
    def epsilons(self) -> list[float]:
        return sorted({cell.epsilon for cell in self.cells})

    def cell(self, mechanism: str, epsilon: float) -> ErrorCell:
        return next(c for c in self.cells if c.mechanism == mechanism and c.epsilon == epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        return {"workload": self.workload, "delta": self.delta, "cells": [vars(cell) for cell in self.cells]}


def compare_errors(
    mechanisms: Sequence[Mechanism],
    epsilons: Sequence[float],
    delta: float,
    workload: Workload,
    accountant: Any = api.DEFAULT_ACCOUNTANT,
    direction: str = "both",
) -> ErrorComparison:
    """Calibrate every mechanism at every ε and measure its error.

    **Formal guarantees.** Noise multipliers have those of `dpmf.calibrate`.
    """
    grid = [validation.positive("epsilon", e) for e in epsilons]
    delta = validation.probability("delta", delta)
    cells = []
    for mechanism in mechanisms:
        for epsilon in grid:
            progress.say(f"{mechanism.name}, ε = {given(epsilon)}")
            try:
                found = api.calibrate(
                    mechanism, target_epsilon=epsilon, target_delta=delta, accountant=accountant, direction=direction
                )
            except CalibrationError as error:
                cells.append(ErrorCell(mechanism.name, epsilon, problem=str(error)))
                continue
            sigma = found.noise_multiplier
            beside = error_beside(mechanism, sigma, workload, epsilon, delta)
            kind = getattr(found, "kind", "bound")
            size = beside.error.root_mean_square
            cells.append(ErrorCell(mechanism.name, epsilon, sigma, size, beside.relative, kind))
    return ErrorComparison(workload.name, delta, tuple(cells))


def print_errors(found: ErrorComparison) -> None:
    """Print a table with one row for each mechanism and ε."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for head in ("mechanism", "ε", "noise multiplier", "error", "relative to DP-SGD"):
        table.add_column(head, justify="left" if head == "mechanism" else "right")
    for epsilon in found.epsilons:
        for name in found.mechanisms:
            cell = found.cell(name, epsilon)
            if cell.noise_multiplier is None or cell.error is None or cell.relative_error is None:
                table.add_row(name, given(epsilon), "none", "", "")
                continue
            sign = "" if cell.kind == "bound" else "≈ "
            sigma = sign + upper(cell.noise_multiplier, 5)
            table.add_row(name, given(epsilon), sigma, sign + f"{cell.error:.4g}", f"{cell.relative_error:.3f}")
        table.add_section()
    console = Console()
    title = f"Errors for (ε, {given(found.delta)})-DP, {found.workload}"
    console.print(title, style="bold", highlight=False)
    console.print(table)
    console.print(
        "Relative to DP-SGD with its best batching, at the same guarantee; below 1 is better.", highlight=False
    )


def errors_plotter(path: Path) -> Callable[[ErrorComparison], None]:
    """Return a function that draws a comparison to `path`; refuse a bad path right away."""
    checked_output(path, _PICTURES, "plot")

    def draw(found: ErrorComparison) -> None:
        stream = io.BytesIO()
        errors_figure(found).savefig(stream, format=path.suffix.lower()[1:], dpi=200)
        write_atomically(path, stream.getvalue())

    return draw


def errors_figure(found: ErrorComparison) -> Figure:
    """Draw errors relative to DP-SGD against ε, one line for each mechanism."""
    figure, (ax,) = new_figure(1)
    for look, name in zip(LOOKS * 4, found.mechanisms, strict=False):
        cells = [c for c in found.cells if c.mechanism == name and c.relative_error is not None]
        cells.sort(key=lambda cell: cell.epsilon)
        ax.plot([c.epsilon for c in cells], [c.relative_error for c in cells], label=name, markersize=4, **look)
    ax.axhline(1.0, color="0.5", linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel="ε", ylabel="error relative to DP-SGD with its best batching")
    ax.set_xticks(found.epsilons, list(map(given, found.epsilons)), minor=False)
    shown = [c.relative_error for c in found.cells if c.relative_error] or [1.0]
    ticks = [t for t in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if min(shown) / 1.5 < t < 1.5 * max(shown)]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_title(found.workload, fontsize="medium")
    ax.legend(frameon=False, fontsize="x-small")
    return figure
