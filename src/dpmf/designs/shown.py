"""A design for people: its table, and a picture of errors."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dpmf.batching import BallsInBins, Poisson
from dpmf.designs import Design, Option
from dpmf.files import write_atomically
from dpmf.formatting import given, lower, upper
from dpmf.report import LOOKS, checked_output, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = (".png", ".pdf", ".svg")
_ROWS = 10


def print_design(design: Design, rows: int = _ROWS) -> None:
    """Print the options from the least error on, what the best one gains, and the lines that train with it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("strategy", "needs", "error", "/ best", "σ", "σ ≥", "copies"):
        justify: Literal["left", "right"] = "left" if head in ("strategy", "needs") else "right"
        table.add_column(head, justify=justify, no_wrap=head != "needs")
    shown = [design.best, *design.others][:rows]
    if design.baseline is not None and design.baseline not in shown:
        shown.append(design.baseline)
    for option in shown:
        table.add_row(*_row(option, design))
    console = Console()
    guarantee = f"({given(design.target_epsilon)}, {given(design.target_delta)})-DP"
    console.print(f"Least error for {guarantee}, {design.workload.name}", style="bold", highlight=False)
    console.print(table)
    hidden = 1 + len(design.others) - len(shown)
    for line in _remarks(design, hidden):
        console.print(line, highlight=False)
    print("\n" + design.code(), end="")


def _row(option: Option, design: Design) -> tuple[str, ...]:
    sign = "" if option.certified else "≈ "
    return (
        option.mechanism.strategy.name.removeprefix("optimised "),
        _needs(option),
        sign + upper(option.error, 4),
        f"{option.error / design.best.error:.3f}",
        sign + upper(option.noise_multiplier, 4),
        "" if option.lower is None else lower(option.lower, 4),
        str(option.copies),
    )


def _needs(option: Option) -> str:
    """What training has to do, in few words."""
    batching = option.mechanism.batching
    if isinstance(batching, Poisson):
        words = "Poisson" if batching.period == 1 else f"Poisson, {batching.period} groups"
    elif batching.fixed or not isinstance(batching, BallsInBins):
        words = "fixed bins"
    else:
        words = "new bins" + (f" every {m} epochs" if (m := batching.rethrow_every or 1) > 1 else "")
        words += f", gap {batching.gap}" if batching.gap else ""
        words += f", {batching.stride} groups" if batching.stride > 1 else ""
    return words + (", noise drawn again" if option.method == "regeneration" else "")


def _remarks(design: Design, hidden: int) -> list[str]:
    options = (design.best, *design.others)
    lines = [
        "Error: root mean square over all steps, at clipping norm 1. σ: the noise multiplier; σ ≥: "
        "no accountant can go below. Copies: those of the model that the noise keeps between steps."
    ]
    if any(not option.certified for option in options):
        lines.append("≈ marks sampled estimates, which guarantee nothing; all other numbers are guaranteed.")
    if any(_needs(option) != "fixed bins" for option in options):
        lines.append("New bins are drawn every epoch unless said otherwise; a gap is so many rows of noise between.")
    if hidden > 0:
        lines.append(f"{hidden} more mechanisms were considered and have larger errors (--json lists all).")
    if design.baseline is not None and design.gain is not None and design.baseline is not design.best:
        gain = f"{design.gain:.3f} times that of independent noise with its best batching here"
        lines.append(f"The best error is {gain} ({design.baseline.mechanism.name}).")
    lines.append(_how_far(design))
    if not design.complete:
        lines.append("Time ran out before every promising mechanism was certified: run it again to go on from here.")
    return lines


def _how_far(design: Design) -> str:
    """How far from optimal the best option can be, among those that were considered."""
    options = (design.best, *design.others)
    known = sum(option.lower is not None for option in options)
    if not known:
        line = "No mechanism here has a certified lower bound."
    else:
        have, them = ("has", "it") if known == 1 else ("have", "one of them")
        most = design.at_most_above_optimal
        by = f" by more than a factor of {upper(most, 4)}" if most > 1 else ""
        line = (
            f"Of the {len(options)} mechanisms, {known} {have} a certified lower bound: no accountant can make {them} "
            f"better than the best{by}."
        )
    sampled = [option.error for option in options if not option.certified and option.error < design.best.error]
    if sampled:
        factor = f"{design.best.error / min(sampled):.3f}"
        line += f" Sampling suggests that one without a guarantee may be better by a factor of {factor}."
    return line


def design_plotter(path: Path) -> Callable[[Design], None]:
    """Return a function that draws a design to `path`; refuse a bad path right away."""
    checked_output(path, _PICTURES, "plot")

    def draw(design: Design) -> None:
        stream = io.BytesIO()
        design_figure(design).savefig(stream, format=path.suffix.lower()[1:], dpi=200)
        write_atomically(path, stream.getvalue())

    return draw


def design_figure(design: Design) -> Figure:
    """Draw the error against the copies of the model that the noise keeps: one marker for each kind of batching."""
    figure, (ax,) = new_figure(1)
    kinds: dict[str, list[Option]] = {}
    for option in (design.best, *design.others):
        kinds.setdefault(_kind(option), []).append(option)
    for look, (kind, options) in zip(LOOKS * 2, kinds.items(), strict=False):
        options.sort(key=lambda option: option.copies)
        for certified, fill in ((True, look["color"]), (False, "none")):
            some = [option for option in options if option.certified is certified]
            places, errors = [o.copies for o in some], [o.error for o in some]
            label = kind if certified or not any(o.certified for o in options) else None
            ax.plot(
                places, errors, linestyle="", marker=look["marker"], color=look["color"], markerfacecolor=fill,
                label=label if some else None,
            )  # fmt: skip
    ax.set_xscale("symlog", linthresh=1)
    ax.set(yscale="log", xlabel="copies of the model that the noise keeps", ylabel=f"error, {design.workload.name}")
    ticks = [0, 1, 3, 7, 15, 31, 63]
    ax.set_xticks(ticks, list(map(str, ticks)))
    ax.minorticks_off()
    errors = [option.error for option in (design.best, *design.others)]
    marks = [
        m * 10.0**p
        for p in range(-6, 9)
        for m in (1, 1.5, 2, 2.5, 3, 4, 5, 7)
        if min(errors) / 1.3 < m * 10.0**p < 1.3 * max(errors)
    ]
    ax.set_yticks(marks, [f"{mark:g}" for mark in marks])
    ax.plot([design.best.copies], [design.best.error], marker="o", markersize=14, markerfacecolor="none", color="black")
    if design.baseline is not None and design.gain is not None and design.baseline is not design.best:
        ax.axhline(design.baseline.error, color="0.4", linestyle="--", linewidth=1, label="independent noise, best")
        right = design.best.copies > 0
        ax.annotate(
            f"{design.gain:.2f} × independent noise", (design.best.copies, design.best.error),
            xytext=(-12 if right else 12, -4), textcoords="offset points", ha="right" if right else "left",
        )  # fmt: skip
    guarantee = f"({given(design.target_epsilon)}, {given(design.target_delta)})-DP"
    ax.set_title(f"{guarantee}; hollow: sampled, ring: best", fontsize="medium")
    ax.legend(frameon=False, fontsize="small")
    return figure


def _kind(option: Option) -> str:
    batching = option.mechanism.batching
    if isinstance(batching, Poisson):
        return "Poisson" if batching.period == 1 else "cyclic Poisson"
    if batching.fixed or not isinstance(batching, BallsInBins):
        return "fixed bins"
    if batching.stride > 1:
        return "cyclic bins"
    return "new bins every epoch" if batching.rethrow_every == 1 else "new bins now and then"
