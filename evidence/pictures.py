"""What all pictures are drawn with: lines, axes with chosen ticks, and pixels in few colours."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any


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
