"""Trade-off curves as tables, files and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpmf import paper
from dpmf.files import write_atomically
from dpmf.formatting import given
from dpmf.report import LOOKS, checked_output, new_figure, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpmf.attacks import TradeOff
    from dpmf.mechanism import Mechanism
    from dpmf.run import Run

SUFFIXES = (".csv", ".json", ".png", ".pdf", ".svg")
_POINTS = 400  # of a picture


def print_tradeoff(run: Mechanism | Run, found: TradeOff) -> None:
    """Print a table of what any attack can achieve; bounds are rounded up."""
    from rich.console import Console
    from rich.table import Table

    whole = paper.as_run(run, found.noise_multiplier)
    table = Table(show_header=False)
    table.add_row("noise multiplier", given(found.noise_multiplier))
    table.add_row("attacks tell whether", paper.relation(whole, found.direction))
    for name, value in found.rows():
        table.add_row(name, value)
    console = Console()
    console.print(whole.mechanism.name, style="bold", highlight=False)
    console.print(table)


def write_tradeoff(path: Path, run: Mechanism | Run, found: TradeOff) -> None:
    """Write the curve to a file, in the format of its suffix.

    A .csv file has one row for each corner of the curve: between two corners, rates are bounded by the straight line.
    """
    suffix = checked_output(path, SUFFIXES).suffix.lower()
    whole = paper.as_run(run, found.noise_multiplier)
    if suffix == ".json":
        words = {"mechanism": whole.mechanism.name, "relation": paper.relation(whole, found.direction)}
        content = (json.dumps({**words, **found.to_dict()}) + "\n").encode()
    elif suffix == ".csv":
        lines = ["direction,false_positive_rate,true_positive_rate"]
        for way, curve in found.lines.items():
            lines += [f"{way},{float(a)!r},{float(t)!r}" for a, t in zip(*curve.corners(), strict=True)]
        content = ("\n".join(lines) + "\n").encode()
    else:
        content = rendered(_figure(whole.mechanism.name, found), suffix)
    write_atomically(path, content)


def _figure(name: str, found: TradeOff) -> Figure:
    figure, (ax,) = new_figure(1)
    alphas = np.linspace(0.0, 1.0, _POINTS)
    for look, (way, lines) in zip(LOOKS, found.lines.items(), strict=False):
        errors = [max(0.0, 1 - lines.least(float(a))) for a in alphas]
        ax.plot(alphas, errors, label=way, color=look["color"], linestyle=look["linestyle"])
    ax.plot([0, 1], [1, 0], color="0.6", linewidth=0.8)
    ax.set(xlabel="type I error (false positives)", ylabel="type II error, lower bound")
    ax.set_title(f"{name}, σ = {given(found.noise_multiplier)} [{found.accountant}]", fontsize="medium")
    ax.legend(frameon=False)
    return figure
