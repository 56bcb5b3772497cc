"""Pictures of figures: one look for all, told apart in grey by dashes and markers, as pixels or for print."""

from __future__ import annotations

import base64
import io
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dpmf.files import write_atomically
from evidence.pictures import write_png
from evidence.spec import Cell, FigureSpec, Line, Panel

Results = Mapping[Cell, Mapping[str, Any]]

_BLUE, _RED, _GREEN, _PINK, _SKY, _ORANGE = "#0072b2", "#d55e00", "#009e73", "#aa5588", "#56b4e9", "#c98a00"
_DASHED, _DOTTED, _DASHDOT, _LONG, _SHORT = (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (2, 1))
_TWODOT = (0, (6, 1.2, 1, 1.2, 1, 1.2))

# One look for each thing, the same in every figure.
LOOKS: dict[str, dict[str, Any]] = {
    "renyi-paper": {"color": _SKY, "linestyle": _LONG, "marker": "v"},
    "renyi": {"color": _BLUE, "linestyle": "-", "marker": "o"},
    "conditional": {"color": _RED, "linestyle": _DASHED, "marker": "s"},
    "conditional-next": {"color": _ORANGE, "linestyle": _SHORT, "marker": "P"},
    "monte-carlo": {"color": "0.0", "linestyle": "none", "marker": "x"},
    "sampled": {"color": "0.0", "linestyle": _LONG, "marker": "x"},
    "tight": {"color": _GREEN, "linestyle": _DASHDOT, "marker": "^"},
    "tight-remove": {"color": _GREEN, "linestyle": _DASHDOT, "marker": "^"},
    "tight-add": {"color": _PINK, "linestyle": _TWODOT, "marker": "D"},
    "tight-busy": {"color": _PINK, "linestyle": _TWODOT, "marker": "<"},
    "lower": {"color": "0.45", "linestyle": _DOTTED, "marker": ""},
    "peer": {"color": _PINK, "linestyle": _SHORT, "marker": "D"},
    "paper-remove": {"color": _SKY, "linestyle": _LONG, "marker": "v"},
    "paper-add": {"color": _ORANGE, "linestyle": _SHORT, "marker": "P"},
    "own-remove": {"color": _BLUE, "linestyle": "-", "marker": "o"},
    "own-add": {"color": _RED, "linestyle": _DASHED, "marker": "s"},
    "option-1": {"color": _BLUE, "linestyle": "-", "marker": ""},
    "option-2": {"color": _RED, "linestyle": _DASHED, "marker": ""},
    "option-3": {"color": _PINK, "linestyle": _DOTTED, "marker": "", "linewidth": 2.2},
    "temperatures-1": {"color": _RED, "linestyle": _DASHED, "marker": ""},
    "temperatures-2": {"color": _PINK, "linestyle": _SHORT, "marker": "D"},
    "temperatures-3": {"color": _SKY, "linestyle": _LONG, "marker": "v"},
    "temperatures-4": {"color": _BLUE, "linestyle": "-", "marker": "o"},
    "order-4": {"color": _SKY, "linestyle": _LONG, "marker": "v"},
    "order-8": {"color": _BLUE, "linestyle": "-", "marker": "o"},
    "order-16": {"color": _ORANGE, "linestyle": _DASHDOT, "marker": "d"},
    "order-32": {"color": "0.4", "linestyle": _SHORT, "marker": "*"},
    "bsr-4": {"color": _BLUE, "linestyle": "-", "marker": "o"},
    "bsr-16": {"color": _SKY, "linestyle": _LONG, "marker": "v"},
    "bsr-64": {"color": _GREEN, "linestyle": _DASHDOT, "marker": "^"},
    "bisr-4": {"color": _RED, "linestyle": _DASHED, "marker": "s"},
    "bisr-64": {"color": _PINK, "linestyle": _SHORT, "marker": "D"},
    "limit-1": {"color": "0.6", "linestyle": _DASHED, "marker": "d"},
    "limit-2": {"color": "0.35", "linestyle": "-", "marker": "h"},
    "limit-3": {"color": "0.7", "linestyle": _LONG, "marker": "p"},
    "limit-4": {"color": "0.2", "linestyle": _SHORT, "marker": "*"},
}
_STYLE: Any = {
    "font.size": 8.5,
    "axes.titlesize": 8,
    "legend.fontsize": 8,
    "font.family": "DejaVu Sans",
    "pdf.fonttype": 42,
}
_PANEL = (2.55, 2.15)  # inches


def look_of(line: Line) -> dict[str, Any]:
    return {"markersize": 3.6, "linewidth": 1.2, **LOOKS[line.look]}


def picture(spec: FigureSpec, results: Results) -> Figure:
    """The figure, drawn from the results there are."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        rows, columns = spec.shape
        figure = Figure(figsize=(_PANEL[0] * columns + 0.3, _PANEL[1] * rows + 0.75), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=spec.share_y).ravel()
        for ax, panel in zip(axes, spec.panels, strict=True):
            _DRAWERS[panel.kind](ax, panel, results)
            ax.set_title(panel.title)
            ax.set_xlabel(panel.x_label)
            if panel is spec.panels[0] or not spec.share_y:
                ax.set_ylabel(panel.y_label)
        _legend(figure, axes)
        return figure


def _legend(figure: Figure, axes: np.ndarray) -> None:
    """One legend below, if the panels share their lines; otherwise one in each panel."""
    sets = [dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True)) for ax in axes]
    everything: dict[str, Any] = {}
    for found in sets:
        everything |= found
    if not everything:
        return
    if len(everything) <= 13 and sum(len(found) for found in sets) > 1.5 * len(everything):
        # The tight accountant is called after the mechanism: lattice or chain. They share a look and an entry.
        for name in [name for name in everything if name.startswith("lattice (dpmf)")]:
            if everything.pop(twin := name.replace("lattice", "chain", 1), None) is not None:
                everything[f"lattice or {twin}"] = everything.pop(name)
        widest = 0.6 + 0.075 * max(map(len, everything))  # inches: the handle, and the text in this size
        columns = min(len(everything), max(2, int(figure.get_figwidth() / widest)))
        figure.legend(
            list(everything.values()), list(everything), loc="outside lower center", ncols=columns,
            frameon=False,
        )  # fmt: skip
        return
    for ax, found in zip(axes, sets, strict=True):
        ax.legend(list(found.values()), list(found), frameon=False, fontsize=6.8)


def _lines(ax: Any, panel: Panel, results: Results) -> None:
    ax.grid(visible=True, which="major", color="0.88", linewidth=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    shown: list[float] = []
    for line in panel.lines:
        points = line.points(results)
        if not points:
            continue
        look = look_of(line)
        if len(points) > 100:
            look["marker"] = ""
        ax.plot([x for x, _ in points], [y for _, y in points], label=line.label, **look)
        shown += [y for _, y in points]
    if "x" in panel.log:
        ax.set_xscale("log")
    if "y" in panel.log and shown:
        ax.set_yscale("log")
        if min(shown) > 0 and max(shown) / min(shown) < 300:
            ticks = _round_numbers(min(shown), max(shown))
            ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
            ax.minorticks_off()
    if panel.y_range is not None:
        ax.set_ylim(*panel.y_range)
    if panel.x_ticks:
        ax.set_xticks(panel.x_ticks, [f"{t:g}" for t in panel.x_ticks])
        ax.minorticks_off()


def _round_numbers(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if high / low > 4 else (1, 1.2, 1.5, 2, 3, 4, 5, 7)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [t for t in (step * 10.0**p for p in powers for step in steps) if low / 1.3 <= t <= high * 1.3]


def _image(ax: Any, panel: Panel, results: Results) -> None:
    [cell] = panel.lines[0].cells
    ax.set_xticks([])
    ax.set_yticks([])
    if cell in results:
        found = results[cell]
        shades = np.frombuffer(zlib.decompress(base64.b64decode(found["image"])), dtype=np.uint8)
        shades = shades.reshape(found["size"], found["size"])
        image = ax.imshow(-found["decades"] * (1 - shades / 255.0), cmap="Greys", vmin=-found["decades"], vmax=0)
        bar = ax.figure.colorbar(image, ax=ax, shrink=0.55, ticks=[-found["decades"], -found["decades"] / 2, 0])
        bar.ax.set_yticklabels([f"$10^{{{-found['decades']:g}}}$", f"$10^{{{-found['decades'] / 2:g}}}$", "max"])


def _histogram(ax: Any, panel: Panel, results: Results) -> None:
    [cell] = panel.lines[0].cells
    ax.spines[["top", "right"]].set_visible(False)
    if cell in results:
        found = results[cell]
        ax.stairs(found["density"], found["edges"], fill=True, color="0.75")
        ax.stairs(found["density"], found["edges"], color="0.2", linewidth=0.8)
        ax.axvline(found["tail"], color=_RED, linestyle=_DASHED, linewidth=1, label="0.1 % quantile")
        ax.text(0.97, 0.93, f"sd {found['deviation']:.2f}", transform=ax.transAxes, ha="right", va="top")


_DRAWERS = {"lines": _lines, "image": _image, "histogram": _histogram}


def write(figure: Figure, directory: Path, name: str, kind: str = "png") -> Path:
    """As pixels ("png") or for print ("pdf"), without dates: the same numbers give the same file."""
    path = directory / f"{name}.{kind}"
    if kind == "png":
        write_png(path, figure, dpi=200)
    else:
        stream = io.BytesIO()
        figure.savefig(stream, format=kind, metadata={"CreationDate": None})
        write_atomically(path, stream.getvalue())
    return path
