"""The drawings of a view, as self-contained SVG text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dpmf.formatting import given, upper
from dpmf.report import LOOKS, new_figure
from dpmf.web.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLOOR = 1e-16  # values of δ below this are not shown


def drawn(view: View) -> dict[str, str]:
    """Return the drawings for which the view has data, by name: "curves", "gram" and "tradeoff"."""
    pictures = {}
    if view.curve_noise is not None:
        pictures["curves"] = _curves(view, view.curve_noise)
    if view.gram:
        pictures["gram"] = _gram(view.gram, view.batches)
    if view.tradeoff:
        pictures["tradeoff"] = _tradeoff(view)
    return pictures


def illustrated(grown: Iterable[View]) -> Iterator[tuple[View, dict[str, str]]]:
    """Yield views with their drawings. Nobody waits for these before the first noise multiplier has been shown."""
    waiting = True
    for view in grown:
        if waiting:
            yield view, {}
            waiting = view.best is None and not view.complete
        if not waiting:
            yield view, drawn(view)


def _tradeoff(view: View) -> str:
    """Draw the least type II error of any attack against its type I error."""
    figure, (ax,) = new_figure(1)
    for look, (way, errors) in zip(LOOKS, (view.tradeoff or {}).items(), strict=False):
        ax.plot(np.linspace(0, 1, len(errors)), errors, label=way, color=look["color"], linestyle=look["linestyle"])
    ax.plot([0, 1], [1, 0], color="0.6", linewidth=0.8, label="guessing")
    ax.set(xlabel="type I error (false positives)", ylabel="type II error, lower bound")
    ax.set_title("the best that any attack can do", fontsize="medium")
    ax.legend(frameon=False, fontsize="small")
    return _svg(figure)


def _curves(view: View, sigma: float) -> str:
    """Draw δ(ε) of every accountant at one noise multiplier; the area below the lower bound is shaded."""
    order = {row.accountant: i for i, row in enumerate(view.rows)}
    figure, (ax,) = new_figure(1)
    if view.lower_curve:
        below = np.maximum(view.lower_curve, _FLOOR)
        ax.fill_between(view.epsilons, _FLOOR, below, color="0.85", label="below the lower bound", linewidth=0)
        ax.plot(view.epsilons, below, color="0.45", linewidth=1)
    curves = view.curves or {}
    for name, deltas in sorted(curves.items(), key=lambda item: order[item[0]]):
        look = LOOKS[order[name] % len(LOOKS)]  # an accountant keeps its look while others are still missing
        ax.plot(view.epsilons, np.maximum(deltas, _FLOOR), label=name, markersize=3.5, **look)
    ax.axhline(view.delta, color="black", linewidth=0.6)
    ax.axvline(view.epsilon, color="black", linewidth=0.6)
    ax.set(yscale="log", xlabel="ε", ylabel="δ(ε), upper bounds")
    shown = [d for curve in (view.lower_curve, *curves.values()) for d in curve if d > _FLOOR]
    ax.set_ylim(max(_FLOOR, min([*shown, view.delta]) / 3), 2)
    # A calibrated σ is rounded up, one that the user chose is shown in full.
    calibrated = view.best is not None and sigma == view.best.noise_multiplier
    ax.set_title(f"at noise multiplier σ = {(upper if calibrated else given)(sigma)}", fontsize="medium")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", loc="lower left", framealpha=0.9)
    return _svg(figure)


@lru_cache(maxsize=1)  # it is the same in all views of a request
def _gram(gram: tuple[tuple[float, ...], ...], b: int) -> str:
    """Draw the Gram matrix as a heat map."""
    figure, (ax,) = new_figure(1)
    ax.grid(visible=False)
    image = ax.imshow(np.array(gram), cmap="viridis", vmin=0.0, extent=(-0.5, b - 0.5, b - 0.5, -0.5))
    figure.colorbar(image, ax=ax, shrink=0.85)
    pooled = "" if len(gram) == b else ", largest entry of each block"
    ax.set_title(f"⟨mᵢ, mⱼ⟩ of bins i and j{pooled}", fontsize="medium")
    ax.set(xlabel="bin j", ylabel="bin i")
    ax.locator_params(integer=True)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    import matplotlib

    stream = io.StringIO()
    # Text stays text: files are small, and the numbers can be searched for and read aloud.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpmf"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
