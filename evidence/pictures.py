"""What all pictures are drawn with: lines, axes with chosen ticks, and pixels in few colours."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpmf.files import write_atomically

_LONG_WORDS = 24  # letters of an entry of a legend that needs a line of its own
_WIDEST = 44  # letters of an entry of a legend that fit into one line on a phone
_PHONE = 4.3  # inches: letters of ten points are as large on a phone as the text around them


def png(figure: Any, dpi: int = 110) -> bytes:
    """The figure as pixels, without dates: the same numbers give the same bytes.

    A few dozen colours (more for images with shades) take a third of the bytes, and no difference can be seen.
    """
    from PIL import Image  # matplotlib brings it

    drawn, stream = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
    colours = 256 if any(ax.images for ax in figure.axes) else 64
    few = Image.open(drawn).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    few.save(stream, format="png", optimize=True)
    return stream.getvalue()


def write_png(path: Path, figure: Any, dpi: int = 110) -> bytes:
    """Write a figure, and beside it the same with all panels in one column (``name-phone.png``), for narrow screens.

    Returns the bytes of the first. The figure itself becomes narrow.
    """
    wide = png(figure, dpi)
    write_atomically(path, wide)
    if narrowed(figure):
        write_atomically(path.with_name(f"{path.stem}-phone.png"), png(figure, 150))
    return wide


def narrowed(figure: Any) -> bool:
    """Put the panels of a figure below each other. Return whether there were several beside each other."""
    from matplotlib.gridspec import GridSpec

    panels = [ax for ax in figure.axes if ax.get_subplotspec() is not None]
    rows, columns = panels[0].get_subplotspec().get_gridspec().get_geometry() if panels else (1, 1)
    if columns == 1:
        return False
    width, height = figure.get_size_inches()
    for ax in panels:
        if not ax.get_visible():
            ax.remove()
    panels = [ax for ax in panels if ax.get_visible()]
    grid = GridSpec(len(panels), 1, figure=figure)
    # Panels that shared an axis had its numbers and its name at the first of them only.
    name = next((ax.get_ylabel() for ax in panels if ax.get_ylabel()), "")
    for place, ax in enumerate(panels):
        ax.set_subplotspec(grid[place])
        ax.tick_params(labelleft=ax.yaxis.get_visible(), labelbottom=True)
        if not ax.get_ylabel() and not ax.images:
            ax.set_ylabel(name)
    listed = 0.0
    for legend in list(figure.legends):
        words = ["\n".join(textwrap.wrap(text.get_text(), _WIDEST)) for text in legend.get_texts()]
        size = legend.get_texts()[0].get_fontsize()
        legend.remove()
        beside = 1 if max(map(len, words)) > _LONG_WORDS else 2
        figure.legend(
            legend.legend_handles, words, loc="outside lower center", ncols=beside, frameon=False, fontsize=size
        )
        lines = len(words) + sum(word.count("\n") for word in words)
        listed += 0.2 * -(-lines // beside) + 0.1
    shape = height / rows / (width / columns)
    named = max(len(ax.get_yticks()) for ax in panels)  # rows with names must not run into each other
    tallest = max(3.4, 0.17 * named + 0.6)
    figure.set_size_inches(_PHONE, len(panels) * min(_PHONE * shape, tallest) + listed)
    return True


def plot(
    ax: Any, xs: Sequence[float], ys: Sequence[float | None], label: str, look: Mapping[str, Any], **more: Any
) -> None:
    """A line through the points that have a y."""
    shown = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    ax.plot([x for x, _ in shown], [y for _, y in shown], label=label, **{"markersize": 4.5, **look, **more})


def axis(ax: Any, which: str, ticks: Sequence[float], label: str, log: bool = True, names: Sequence[str] = ()) -> None:
    """A scale with these ticks and no others."""
    getattr(ax, f"set_{which}scale")("log" if log else "linear")
    getattr(ax, f"set_{which}ticks")(ticks, names or [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    getattr(ax, f"set_{which}label")(label)
