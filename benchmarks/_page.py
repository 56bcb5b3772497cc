"""docs/benchmarks.md and its picture, made from the numbers of the last run (docs/data/benchmarks.json).

python -m benchmarks._page      writes both again from the numbers
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

from dpmf.report import write_atomically

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE, PICTURE = DOCS / "data" / "benchmarks.json", DOCS / "benchmarks.md", DOCS / "pictures" / "benchmarks.png"


def machine() -> str:
    """The processor and how many cores of it, and how busy they were."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    busy = f", load average {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else ""
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}{busy}"


def keep(name: str, rows: list[dict[str, Any]]) -> None:
    """Put the numbers of one benchmark beside those of the others; write page and picture once all are there."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    data[name] = {"machine": machine(), "rows": rows}
    DATA.parent.mkdir(exist_ok=True)
    write_atomically(DATA, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())
    if {"beside", "growth"} <= set(data):
        write_all(data)


def write_all(data: dict[str, Any]) -> None:
    write_atomically(PAGE, page(data).encode())
    write_atomically(PICTURE, picture(data))


def number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def growth_row(row: dict[str, Any]) -> list[str]:
    x, took = row["x"], row["seconds"]
    exponential = row["accountant"].startswith("renyi") and row["grows"] == "p"
    grown = f"× {row['factor']:.1f} for each band" if exponential else f"{row['grows']}^{row['exponent']:.1f}"
    return [row["accountant"], row["grows"], f"{x[0]:g} to {x[-1]:g}", f"{time(took[0])} to {time(took[-1])}", grown]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def page(data: dict[str, Any]) -> str:
    beside, growth = data["beside"]["rows"], data["growth"]["rows"]
    parts = [
        "# Benchmarks: beside the peers\n",
        "`make benchmark` (or `python -m benchmarks beside growth`) measures all of this in one run and writes this "
        "page; the numbers are in `docs/data/benchmarks.json`. Seconds are those of the processor, on one thread, "
        "which other work on the machine disturbs little; compare them with each other, not with other machines.\n",
        f"Machine: {data['beside']['machine']} (beside the peers); {data['growth']['machine']} (growth).\n",
        "![tightness against seconds, for two mechanisms](pictures/benchmarks.png)\n",
        "## Tightness and seconds\n",
        "Everybody is asked the same: ε at δ = 10⁻⁵ for a noise multiplier, the true one for ε₀. σ/σ_true is how many "
        "times the noise that is really needed an accountant's answer amounts to: 1 is perfect, and below 1 is not a "
        "bound for this mechanism (an estimate that erred, or Poisson sampling, which is another mechanism and here "
        "only a reference). Correlated noise has no deterministic peer.\n",
    ]
    for title in dict.fromkeys(row["mechanism"] for row in beside):
        rows = [row for row in beside if row["mechanism"] == title]
        reference = next(row for row in rows if row["accountant"] in ("lattice", "chain"))
        head = ["accountant", "σ/σ_true, ε₀ = 0.5", "σ/σ_true, ε₀ = 4", "seconds, ε₀ = 0.5", "seconds, ε₀ = 4",
                f"time / {reference['accountant']}'s"]  # fmt: skip
        lines = [
            [
                row["accountant"], *map(number, row["tightness"]), *map(time, row["seconds"]),
                f"{sum(row['seconds']) / sum(reference['seconds']):.2g}",
            ]
            for row in rows
        ]  # fmt: skip
        parts += [f"### {title}\n", _table(head, lines) + "\n"]
    parts += [
        "## Growth\n",
        "One δ(ε) from scratch at one σ (remove), compiled; BSR(p = 4) with b = 100 where N grows, with four epochs "
        "where b grows, one epoch where p grows (DP-SGD for the lattice).\n",
        _table(["accountant", "what grows", "from, to", "seconds from, to", "growth"], [growth_row(r) for r in growth]),
        "",
    ]
    return "\n".join(parts)


def picture(data: dict[str, Any]) -> bytes:
    from dpmf.report import _LOOKS, _new_figure

    rows = [row for row in data["beside"]["rows"] if row["tightness"][0] is not None]
    titles = list(dict.fromkeys(row["mechanism"] for row in rows))
    figure, axes = _new_figure(len(titles))
    names = list(dict.fromkeys(row["accountant"] for row in rows))
    markers = "osDv^Px*h<>"
    for ax, title in zip(axes, titles, strict=True):
        for row in (r for r in rows if r["mechanism"] == title):
            i = names.index(row["accountant"])
            look = {"color": _LOOKS[i % len(_LOOKS)]["color"], "marker": markers[i % len(markers)]}
            label = row["accountant"].replace("jax-privacy Monte Carlo", "jax-privacy MC")
            ax.plot(row["seconds"], row["tightness"], label=label, linewidth=0.8, linestyle=":", markersize=5, **look)
        ax.axhline(1.0, color="0.4", linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlabel="seconds of one core for one ε", title=title)
        ax.set_yticks([0.8, 1, 1.5, 2, 3, 4], ["0.8", "1", "1.5", "2", "3", "4"])
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=6.5)
    axes[0].set_ylabel("σ / σ_true (1 is perfect)")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110, metadata={"Software": None})
    return stream.getvalue()


if __name__ == "__main__":
    write_all(json.loads(DATA.read_text()))
