"""docs/benchmarks.md and its pictures, made from the numbers of the last run (docs/data/benchmarks.json).

python -m benchmarks._page      writes them again from the numbers
"""

from __future__ import annotations

import math
import os
import sys
import time as clock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dpmf.files import write_atomically
from evidence.fingerprint import code_version
from evidence.machine import machine
from evidence.pictures import write_png
from evidence.say import short, table
from evidence.spec import Cell
from evidence.store import Record, export, read_export

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE = DOCS / "data" / "benchmarks.json", DOCS / "benchmarks.md"
PICTURE, GROWTH_PICTURE = DOCS / "pictures" / "benchmarks.png", DOCS / "pictures" / "benchmarks-growth.png"
COMMAND = "python -m benchmarks beside growth batchings goals"
# What a row is about; the rest of it was measured. The page can do without the last two.
KEYS = {
    "beside": ("mechanism", "accountant"),
    "growth": ("accountant", "grows"),
    "batchings": ("batching", "who", "epsilon"),
    "goals": ("what", "mechanism", "epochs", "batches", "epsilon", "seconds"),
}
NEEDED = {"beside", "growth"}

Data = dict[str, Any]


@contextmanager
def measured(name: str) -> Iterator[dict[str, Any]]:
    """What is filled in here ("rows", at least) is kept beside the other benchmark, with what it was measured on."""
    found: dict[str, Any] = {"rows": []}
    began = clock.perf_counter()
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    yield found
    minutes = (clock.perf_counter() - began) / 60
    circumstances = {"machine": machine(), "load": round(load_average, 1), "minutes": round(minutes, 1)}
    keep(records(name, circumstances | found))
    if set(data := load()) >= NEEDED:
        write_all(data)
    else:
        print(f"{PAGE.name} is written once all are measured: {COMMAND}", file=sys.stderr)


def records(name: str, found: dict[str, Any], code: str | None = None) -> list[Record]:
    """A benchmark as records: one for each row, and one for what it was measured on."""
    run = Record(Cell.of(f"{name}-run"), "", {key: v for key, v in found.items() if key not in ("rows", "code")}, None,
                 60.0 * found["minutes"])  # fmt: skip
    made = [run]
    for place, row in enumerate(found["rows"]):
        cell = Cell.of(name, **{key: row[key] for key in KEYS[name]})
        rest = {key: value for key, value in row.items() if key not in KEYS[name]}
        made.append(Record(cell, "", {"place": place, **rest}, None, 0.0))
    return [Record(r.cell, code or code_version(r.cell), r.result, None, r.seconds) for r in made]


def keep(new: list[Record]) -> None:
    """Put the records of a benchmark into the data, in place of its older ones."""
    kinds = {record.cell.quantity for record in new}
    old = read_export(DATA).values() if DATA.exists() else ()
    write_atomically(DATA, export([*(r for r in old if r.cell.quantity not in kinds), *new]).encode())


def load() -> Data:
    """By benchmark: its rows, what they were measured on, and the code."""
    found: Data = {}
    kept = read_export(DATA) if DATA.exists() else {}
    for name in KEYS:
        run = kept.get(Cell.of(f"{name}-run"))
        if run is not None and run.result is not None:
            rows = [(cell.parameters, r.result or {}) for cell, r in kept.items() if cell.quantity == name]
            rows.sort(key=lambda row: row[1]["place"])
            whole = [{**about, **{k: v for k, v in result.items() if k != "place"}} for about, result in rows]
            found[name] = {**run.result, "code": run.code, "rows": whole}
    return found


def write_all(data: Data) -> None:
    write_atomically(PAGE, page(data).encode())
    write_png(PICTURE, picture(data))
    write_png(GROWTH_PICTURE, growth_picture(data))


def number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def time(seconds: float | None) -> str:
    return "" if seconds is None else short(seconds)


def upper_half(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points above the middle of the range on the log scale, three at least."""
    middle = math.sqrt(points[0][0] * points[-1][0])
    above = [point for point in points if point[0] >= middle]
    return above if len(above) >= 3 else points[-3:]


def fitted(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The exponent of a power law, and the factor for each further unit, of the upper half."""
    x, y = (np.array(values) for values in zip(*upper_half(points), strict=True))
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]), float(np.exp(np.polyfit(x, np.log(y), 1)[0]))


def growth_row(row: dict[str, Any]) -> list[str]:
    x, took = row["x"], row["seconds"]
    exponent, factor = fitted(list(zip(x, took, strict=True)))
    exponential = row["accountant"].startswith("renyi") and row["grows"] == "p"
    base = f"({row['grows']})" if "/" in row["grows"] else row["grows"]
    grown = f"× {factor:.1f} for each band" if exponential else f"{base}^{round(exponent, 1) + 0.0:.1f}"
    decades = f"{math.log10(x[-1] / x[0]):.1f}"
    tightness = ""
    if "ratio" in row:
        power = fitted(list(zip(x, row["ratio"], strict=True)))[0]
        tightness = f"{row['ratio'][0]:.3f} to {row['ratio'][-1]:.3f}, {base}^{round(power, 2) + 0.0:.2f}"
    return [
        row["accountant"],
        row["grows"],
        f"{x[0]:g} to {x[-1]:g}",
        decades,
        f"{time(took[0])} to {time(took[-1])}",
        grown,
        tightness,
    ]


GROWTH_HEAD = ["accountant", "what grows", "from, to", "decades", "seconds from, to", "growth in the upper half",
               "σ/lower from, to, and growth"]  # fmt: skip
GOALS_HEAD = ["what", "mechanism", "k", "b", "ε", "goal", "seconds", "processor seconds", "met"]


def goal_row(row: dict[str, Any]) -> list[str]:
    names = (row["what"], row["mechanism"], str(row["epochs"]), str(row["batches"]), f"{row['epsilon']:g}")
    met = "yes" if row["clock"] <= row["seconds"] else "no"
    return [*names, f"{row['seconds']:g}", time(row["clock"]), time(row["processor"]), met]


def _goals(rows: list[dict[str, Any]]) -> list[str]:
    met = sum(row["clock"] <= row["seconds"] for row in rows)
    return [
        "## Seconds beside their goals\n",
        f"Seconds of the clock on all cores, after compilation, for δ = 10⁻⁵; calibrations and profiles by `best`. "
        f"{met} of {len(rows)} goals are met. Processor seconds are those of all threads together. "
        "`python -m benchmarks goals` prints this table.\n",
        table(GOALS_HEAD, [goal_row(row) for row in rows]) + "\n",
    ]


def _made_by(data: Data) -> str:
    """What was run, on what, with which code and which peers."""

    def circumstances(found: dict[str, Any]) -> str:
        said = (("load", "load average {:g} when it began"), ("minutes", "{:g} minutes"), ("code", "code `{}`"))
        return ", ".join([found["machine"], *(words.format(found[key]) for key, words in said if key in found)])

    titles = {"beside": "peers", "growth": "growth", "batchings": "batchings", "goals": "goals"}
    parts = [f"{title}: {circumstances(data[name])}" for name, title in titles.items() if name in data]
    versions = {**data["beside"].get("peers", {}), **data.get("batchings", {}).get("peers", {})}
    peers = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"Made by `{COMMAND}` ({'; '.join(parts)}).{f' Peers: {peers}.' if peers else ''}\n"


def page(data: Data) -> str:
    beside, growth = data["beside"]["rows"], data["growth"]["rows"]
    parts = [
        "# Benchmarks: beside the peers\n",
        f"`make benchmark` sets itself up, measures all of this in one run (`{COMMAND}`) and writes this page; the "
        "numbers are in `docs/data/benchmarks.json`. Seconds are those of the processor, on one thread, which other "
        "work on the machine disturbs little; compare them with each other, not with other machines.\n",
        _made_by(data),
        "![tightness against seconds](pictures/benchmarks.png)\n",
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
        parts += [f"### {title}\n", table(head, lines) + "\n"]
    if "batchings" in data:
        parts += _batchings(data["batchings"]["rows"])
    if "goals" in data:
        parts += _goals(data["goals"]["rows"])
    parts += [
        "## Growth\n",
        "One δ(ε) from scratch at one σ (remove), compiled, Gram matrix included; BSR(p = 4) with b = 100 where N "
        "grows, with four epochs where b grows, one epoch where p grows; against 1/δ one ε(δ), except for Monte Carlo, "
        'which then draws as many samples as δ takes. "best, calibration" is a calibration to ε = 4 from scratch, with '
        "its noise multiplier over the certified lower bound; τ is the time of decay of (1 − e^(−1/τ)x)^(−½). "
        "The exponent is fitted to the upper half of the range on the log scale, so that fixed costs count little. "
        "Where the range is below a decade and a half, cost grows too fast for more.\n",
        "![seconds against what grows](pictures/benchmarks-growth.png)\n",
        table(GROWTH_HEAD, [growth_row(r) for r in growth]),
        "",
    ]
    return "\n".join(parts)


def _batchings(rows: list[dict[str, Any]]) -> list[str]:
    """The least noise and the error in the model for several ways to make batches, one table for each ε."""
    machines = " and ".join(dict.fromkeys(row["machine"] for row in rows if "machine" in row))
    kept = f" Its answers do not depend on our code and are kept; they were measured on {machines}." if machines else ""
    said = [
        "## Noise and error beside opake, for four batchings\n",
        "The least σ at (ε, 10⁻⁵) for k = 10 and b = 100. The error is σ times the root mean square of the row norms "
        "of A·C⁻¹ for prefix sums A and everybody's own C; σ alone cannot be compared between different C. A bound by "
        "sampling fails with the probability given. b-min-sep sampling has no proved bound anywhere, so what dpmf "
        "proves for the mechanism that it designs stands beside it. BandMF has the bandwidth with the least error "
        "under cyclic Poisson sampling. opake stops at an ε at most half a percent below the one asked for, "
        "and looks within a tenth of dpmf's σ (for b-min-sep sampling within a factor of 1.6 of its σ for cyclic "
        f"Poisson sampling), which spares it time.{kept} "
        "`python -m benchmarks batchings` prints this table.\n",
    ]
    for epsilon in dict.fromkeys(row["epsilon"] for row in rows):
        lines = [
            [row["batching"], row["who"] + (f" ({row['note']})" if "note" in row else ""), *_four_digits(row),
             row["guarantee"], time(row.get("seconds"))]
            for row in rows
            if row["epsilon"] == epsilon
        ]  # fmt: skip
        said += [
            f"### ε = {epsilon:g}\n",
            table(["batching", "who", "σ", "error", "guarantee", "seconds"], lines) + "\n",
        ]
    return said


def _four_digits(row: dict[str, Any]) -> list[str]:
    """σ and the error of a row; nothing where there was no answer."""
    return [f"{row[key]:.4g}" if key in row else "" for key in ("sigma", "error")]


_MARKERS = "osDv^Px*h<>pd8"


def _looks(names: list[str]) -> dict[str, dict[str, Any]]:
    """A colour, a marker and dashes for each name; markers alone tell them apart in grey."""
    from dpmf.report import LOOKS

    return {
        name: {**LOOKS[i % len(LOOKS)], "marker": _MARKERS[i % len(_MARKERS)], "markersize": 5}
        for i, name in enumerate(names)
    }


def _axes(rows: int, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.8 + 0.4, 3.0 * rows + 1.1), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for ax in axes:
        ax.grid(visible=True, which="major", color="0.85", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _with_legend(figure: Any, labels: dict[str, Any]) -> Any:
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=3, frameon=False, fontsize=7.5)
    return figure


def _short(accountant: str) -> str:
    """Without the number of samples, which differs between mechanisms."""
    return accountant.split(", ")[0] if "onte" in accountant and "samples" in accountant else accountant


def picture(data: Data) -> Any:
    rows = [row for row in data["beside"]["rows"] if row["tightness"][0] is not None]
    titles = list(dict.fromkeys(row["mechanism"] for row in rows))
    figure, axes = _axes(math.ceil(len(titles) / 2), 2)
    looks = _looks(list(dict.fromkeys(_short(row["accountant"]) for row in rows)))
    labels: dict[str, Any] = {}
    for ax, title in zip(axes, titles, strict=False):
        for row in (r for r in rows if r["mechanism"] == title):
            name = _short(row["accountant"])
            look = {**looks[name], "linestyle": ":", "linewidth": 0.8}
            [labels[name]] = ax.plot(row["seconds"], row["tightness"], **look)
        ax.axhline(1.0, color="0.4", linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlabel="seconds of one core for one ε", title=title)
        ax.set_yticks([0.9, 1, 1.2, 1.5, 2, 3, 4, 6], ["0.9", "1", "1.2", "1.5", "2", "3", "4", "6"])
        ax.minorticks_off()
        ax.set_ylabel("σ / σ_true (1 is perfect)")
    return _with_legend(figure, labels)


def growth_picture(data: Data) -> Any:
    rows = data["growth"]["rows"]
    kinds = list(dict.fromkeys(row["grows"] for row in rows))
    figure, axes = _axes(math.ceil(len(kinds) / 3), 3)
    looks = _looks(list(dict.fromkeys(row["accountant"] for row in rows)))
    looks |= {"best, calibration": {"color": "black", "marker": "o", "markersize": 7, "markerfacecolor": "none"}}
    labels: dict[str, Any] = {}
    for ax, grows in zip(axes, kinds, strict=False):
        for row in (r for r in rows if r["grows"] == grows):
            [labels[row["accountant"]]] = ax.plot(row["x"], row["seconds"], **looks[row["accountant"]], linewidth=1)
        ax.set(xscale="log", yscale="log", xlabel=grows, ylabel="seconds of one core")
        low, high = ax.get_ylim()
        if high < 30 * low:  # little growth should look like little
            middle = math.sqrt(low * high)
            ax.set_ylim(middle / 10, middle * 10)
        widest = max((r["x"] for r in rows if r["grows"] == grows), key=lambda x: x[-1] / x[0])
        if widest[-1] < 100 * widest[0]:  # the logarithmic axis would write the numbers between the decades, too
            ax.set_xticks(widest, [f"{x:g}" for x in widest])
            ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    for ax in axes[len(kinds) :]:
        ax.set_visible(False)
    return _with_legend(figure, labels)


if __name__ == "__main__":
    write_all(load())
