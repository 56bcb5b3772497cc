"""The drawings of a view, as SVG text that needs nothing but itself."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from dpmf.report import LOOKS, new_figure
from dpmf.web.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLOOR = 1e-16  # below, a logarithmic axis shows nothing of use


def drawn(view: View) -> dict[str, str]:
    """The drawings there is something to show in: "curves", "gram"."""
    pictures = {}
    if view.curve_noise is not None:
        pictures["curves"] = curves_svg(view)
    if view.gram:
        pictures["gram"] = gram_svg(view)
    return pictures


def curves_svg(view: View) -> str:
    """δ(ε) of every accountant at one noise multiplier; what is certainly impossible is shaded."""
    order = {row.accountant: i for i, row in enumerate(view.rows)}
    figure, (ax,) = new_figure(1)
    if view.lower_curve:
        below = np.maximum(view.lower_curve, _FLOOR)
        ax.fill_between(view.epsilons, _FLOOR, below, color="0.85", label="impossible (certified)", linewidth=0)
        ax.plot(view.epsilons, below, color="0.45", linewidth=1)
    for name, deltas in sorted((view.curves or {}).items(), key=lambda item: order[item[0]]):
        look = LOOKS[order[name] % len(LOOKS)]  # the same while others are still missing
        ax.plot(view.epsilons, np.maximum(deltas, _FLOOR), label=name, markersize=3.5, **look)
    ax.axhline(view.delta, color="black", linewidth=0.6)
    ax.axvline(view.epsilon, color="black", linewidth=0.6)
    ax.set(yscale="log", xlabel="ε", ylabel="δ(ε), upper bounds")
    shown = [
        d for d in (*view.lower_curve, *(x for curve in (view.curves or {}).values() for x in curve)) if d > _FLOOR
    ]
    ax.set_ylim(max(_FLOOR, min([*shown, view.delta]) / 3), 2)
    ax.set_title(f"at noise multiplier σ = {view.curve_noise:.5g}", fontsize="medium")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", loc="lower left", framealpha=0.9)
    return _svg(figure)


def gram_svg(view: View) -> str:
    """The Gram matrix as a heat map."""
    figure, (ax,) = new_figure(1)
    ax.grid(visible=False)
    b = view.batches
    image = ax.imshow(np.array(view.gram), cmap="viridis", vmin=0.0, extent=(-0.5, b - 0.5, b - 0.5, -0.5))
    figure.colorbar(image, ax=ax, shrink=0.85)
    pooled = "" if len(view.gram) == b else ", largest entry of each block"
    ax.set_title(f"⟨mᵢ, mⱼ⟩ of bins i and j{pooled}", fontsize="medium")
    ax.set(xlabel="bin j", ylabel="bin i")
    ax.locator_params(integer=True)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    import matplotlib

    stream = io.StringIO()
    # Text stays text: small files, and the numbers can be found and read aloud.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpmf"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
