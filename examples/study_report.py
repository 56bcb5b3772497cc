"""What `study.py` found: accuracies beside predicted errors, and how well errors of several memories predict them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import study
import study_runs
from scipy.signal import lfilter

from dpmf import workloads

MEMORIES = (10, 30, 50, 100, 200, 300, 1000, math.inf)
CHOSEN = 100
GOALS = {1.0: 47.5, 4.0: 57.5, 8.0: 60.5}
TITLES = {"main": "CIFAR-10", "second": "CIFAR-10, 5 epochs of 194", "digits": "digits"}
LABELS = {
    "dpsgd-poisson": "DP-SGD, Poisson sampling",
    "dpsgd-reshuffled": "DP-SGD, reshuffled bins",
    "dpsgd-fixed": "DP-SGD, fixed bins",
    "bsr4-fixed": "BSR(4), fixed bins",
    "bisr4-fixed": "BISR(4), fixed bins",
    "bisr16-fixed": "BISR(16), fixed bins",
    "blt4-fixed": "BLT(4), fixed bins",
    "cyclic-poisson-m100": "banded, best p, for memory 100, cyclic Poisson",
    "cyclic-p4-m100": "banded p = 4, for memory 100, cyclic Poisson",
}


def label(name: str) -> str:
    if name in LABELS:
        return LABELS[name]
    _, width, memory = name.split("-")
    target = "prefix sums" if memory == "prefix" else f"memory {memory[1:]}"
    return f"banded p = {width[1:]}, for {target}, reshuffled bins"


def place(name: str) -> tuple[int, int, float]:
    """Where a mechanism stands in a table: bands come last, by width and memory."""
    if name in LABELS:
        return list(LABELS).index(name), 0, 0.0
    _, width, memory = name.split("-")
    return len(LABELS), int(width[1:]), math.inf if memory == "prefix" else float(memory[1:])


def errors(mechanism: dict[str, Any]) -> dict[float, float]:
    """The predicted error for each memory: the deviation of the noise in the model, over all steps."""
    rows = study_runs.noise_rows(mechanism).astype(np.float64)
    found = {}
    for memory in MEMORIES:
        workload = workloads.prefix() if math.isinf(memory) else workloads.damped(memory)
        in_model = lfilter([1.0], [1.0, -workload.kept], rows, axis=0)
        found[memory] = mechanism["sigma"] * math.sqrt(float(np.sum(in_model**2)) / len(rows))
    return found


@dataclass
class Result:
    """Test accuracies of a mechanism in percent, seed by seed, and its predicted errors."""

    name: str
    rate: float
    scores: list[float]
    errors: dict[float, float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.scores)

    @property
    def standard_error(self) -> float:
        return statistics.stdev(self.scores) / math.sqrt(len(self.scores))


def results(
    mechanisms: dict[study.Cell, dict[str, Any]], runs: study.Scores, setting: str, epsilon: float
) -> list[Result]:
    """Every mechanism that was trained, on the seeds that all of them have."""
    found = {}
    for cell, mechanism in mechanisms.items():
        if cell[0] == setting and cell[2] == epsilon and (rate := study.tuned(runs[cell])) is not None:
            found[cell[1]] = rate, runs[cell]["test", rate], mechanism
    seeds = set.intersection(*(set(scores) for _, scores, _ in found.values())) if found else set()
    return [
        Result(name, rate, [100 * scores[s] for s in sorted(seeds)], errors(mechanism))
        for name, (rate, scores, mechanism) in found.items()
    ]


def table(by_epsilon: dict[float, list[Result]]) -> str:
    """Accuracy ± standard error, and the error predicted for the chosen memory, by mechanism and ε."""
    names = sorted({r.name for found in by_epsilon.values() for r in found}, key=place)
    heads = [f"ε = {e:g} ({len(found[0].scores)} seeds)" for e, found in by_epsilon.items()]
    lines = ["| mechanism | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        cells = []
        for found in by_epsilon.values():
            one = next((r for r in found if r.name == name), None)
            best = one is not None and one.mean == max(r.mean for r in found)
            mark = "**" if best else ""
            cells.append(
                f"{mark}{one.mean:.1f} ± {one.standard_error:.1f} %{mark}, error {one.errors[CHOSEN]:.2f}"
                if one
                else ""
            )
        lines.append(f"| {label(name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def correlation(found: Sequence[Result], memory: float) -> float:
    """Of mean accuracy and −log error, over mechanisms."""
    errors = -np.log([r.errors[memory] for r in found])
    return float(np.corrcoef([r.mean for r in found], errors)[0, 1])


def correlations(groups: dict[str, list[Result]]) -> str:
    lines = [
        "| memory | " + " | ".join("prefix sums" if math.isinf(m) else str(m) for m in MEMORIES) + " |",
        "|---" * (len(MEMORIES) + 1) + "|",
    ]
    for name, found in groups.items():
        values = [correlation(found, m) for m in MEMORIES]
        cells = [f"**{v:.3f}**" if v == max(values) else f"{v:.3f}" for v in values]
        lines.append(f"| {name}, {len(found)} mechanisms | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(one: Result, other: Result) -> tuple[float, float]:
    """Mean and standard error of the gain in points, seed by seed."""
    gains = [a - b for a, b in zip(one.scores, other.scores, strict=True)]
    return statistics.mean(gains), statistics.stdev(gains) / math.sqrt(len(gains))


def gains(by_epsilon: dict[float, list[Result]]) -> str:
    """The best mechanism of every ε and what it gains, in points; seeds are compared one by one."""
    compared = (
        (None, "dpsgd-poisson", "over DP-SGD, Poisson"),
        (None, "dpsgd-reshuffled", "over DP-SGD, reshuffled"),
        ("dpsgd-reshuffled", "dpsgd-poisson", "DP-SGD: reshuffled over Poisson"),
        ("bisr4-fixed", "dpsgd-poisson", "BISR(4), fixed, over DP-SGD, Poisson"),
    )
    lines = ["| ε | best | " + " | ".join(words for _, _, words in compared) + " |", "|---" * (len(compared) + 2) + "|"]
    for epsilon, found in by_epsilon.items():
        named = {r.name: r for r in found}
        best = max(found, key=lambda r: r.mean)
        cells = []
        for name, other, _ in compared:
            mean, deviation = difference(named[name or best.name], named[other])
            cells.append(f"{round(mean, 1) + 0.0:+.1f} ± {deviation:.1f}")
        lines.append(f"| {epsilon:g} | {label(best.name)}, rate {best.rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def adaptive(mechanisms: dict[study.Cell, dict[str, Any]], runs: study.Scores) -> str:
    """Accuracy ± standard error, learning rate and number of seeds by optimizer, where two or more were tried."""
    settings = {"main": "SGD", "main/momentum": "momentum 0.9", "main/adamw": "AdamW"}
    settings["main/corrected"] = "corrected Adam"
    lines = ["| ε | mechanism | " + " | ".join(settings.values()) + " |", "|---" * (len(settings) + 2) + "|"]
    for _, name, epsilon in sorted((c for c in mechanisms if c[0] == "main"), key=lambda c: (c[2], place(c[1]))):
        rates = {s: study.tuned(runs[s, name, epsilon]) for s in settings}
        cells = []
        for setting, rate in rates.items():
            scores = {} if rate is None else runs[setting, name, epsilon]["test", rate]
            one = Result(name, rate or 0.0, [100 * accuracy for accuracy in scores.values()], {})
            cells.append(f"{one.mean:.1f} ± {one.standard_error:.1f} % ({rate:g}, {len(scores)})" if scores else "")
        if sum(map(bool, cells)) < 2:
            continue
        lines.append(f"| {epsilon:g} | {label(name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def blocks(mechanisms: dict[study.Cell, dict[str, Any]], runs: study.Scores) -> dict[str, str]:
    """What docs/training.md shows, by the name of its place there."""
    found = everything(mechanisms, runs)
    many = {f"{TITLES[s]}, ε = {e:g}": r for s, by in found.items() for e, r in by.items() if len(r) >= 10}
    out = {f"study {setting}": table(by_epsilon) for setting, by_epsilon in found.items()}
    out |= {"study gains": gains(found["main"]), "study adaptive": adaptive(mechanisms, runs)}
    return {**out, "study correlations": correlations(many)}


def everything(
    mechanisms: dict[study.Cell, dict[str, Any]], runs: study.Scores
) -> dict[str, dict[float, list[Result]]]:
    epsilons = {s: sorted({c[2] for c in mechanisms if c[0] == s}) for s in TITLES}
    return {s: {e: r for e in found if (r := results(mechanisms, runs, s, e))} for s, found in epsilons.items()}


def report(
    mechanisms: dict[study.Cell, dict[str, Any]], runs: study.Scores, picture: Path | None, page: Path | None
) -> None:
    for name, block in blocks(mechanisms, runs).items():
        print(f"{name}\n\n{block}\n")
        if page is not None:
            before, rest = page.read_text().split(f"<!-- {name} -->\n")
            page.write_text(f"{before}<!-- {name} -->\n{block}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}")
    best = {e: max(r.mean for r in found) for e, found in everything(mechanisms, runs)["main"].items()}
    for epsilon, goal in GOALS.items():
        print(f"goal at ε = {epsilon:g}: {goal} %, best mean {best[epsilon]:.1f} %")
    if picture is not None:
        draw(everything(mechanisms, runs)["main"], picture)


def draw(by_epsilon: dict[float, list[Result]], picture: Path) -> None:
    """Draw accuracy against predicted error, and the same below each other for a phone."""
    _draw(by_epsilon, picture, (1, 3), (10, 3.6))
    _draw(by_epsilon, picture.with_name(f"{picture.stem}-phone.png"), (3, 1), (4.3, 9))


def _draw(
    by_epsilon: dict[float, list[Result]], picture: Path, panels: tuple[int, int], size: tuple[float, float]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = (30, CHOSEN, math.inf)
    families = (
        ("dpsgd", "o", "DP-SGD"),
        ("reshuffled", "^", "optimised, reshuffled"),
        ("cyclic", "D", "optimised, cyclic Poisson"),
        ("b", "s", "BSR, BISR, BLT, fixed bins"),
    )
    figure, axes = plt.subplots(*panels, figsize=size, sharey=True, layout="constrained")
    several = {e: found for e, found in by_epsilon.items() if len(found) >= 10}
    for ax, memory in zip(axes, shown, strict=True):
        for number, found in enumerate(several.values()):
            for start, marker, _ in families:
                rows = [r for r in found if r.name.startswith(start)]
                ax.errorbar([r.errors[memory] for r in rows], [r.mean for r in rows], [r.standard_error for r in rows],
                            fmt=marker, color=f"C{number}", markersize=4, capsize=1.5, linewidth=1)  # fmt: skip
        title = "prefix sums" if math.isinf(memory) else f"memory {memory}"
        ax.set(xscale="log", title=title, xlabel="predicted error")
        ax.set_xticks(ticks := (5, 10, 20, 50) if math.isinf(memory) else (1, 2, 5, 10, 20), map(str, ticks))
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy in %")
    for number, e in enumerate(several):
        axes[-1].plot([], [], "-", color=f"C{number}", label=f"ε = {e:g}")
    for _, marker, name in families:
        axes[-1].plot([], [], marker, color="grey", markersize=4, label=name)
    axes[-1].legend(fontsize=7, loc="lower left")
    figure.savefig(picture, dpi=110)
