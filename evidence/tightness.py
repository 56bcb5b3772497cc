"""docs/tightness.md: how many times the true noise each accountant asks for, mechanism by mechanism."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dpmf.report import new_figure
from evidence.pictures import axis, write_png
from evidence.say import number, table
from evidence.spec import Cell, MechanismSpec, accountant

DELTA = 1e-5
EPSILONS = (0.25, 1.0, 4.0, 8.0)
SAMPLER = accountant("monte-carlo", samples=200_000)
Results = Mapping[Cell, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """A mechanism, and how close `best` is meant to come to the truth at each ε."""

    name: str
    mechanism: MechanismSpec
    goals: tuple[float, float, float, float]


_UNCORRELATED = (1.005, 1.005, 1.005, 1.005)
_CLOSE = (1.02, 1.02, 1.02, 1.02)
_OTHERS = (1.04, 1.04, 1.04, 1.04)

_IRREGULAR = (1.0, 0.1, 0.6, 0.05, 0.4, 0.02, 0.3)

ROWS = (
    Row("DP-SGD, b=100, k=1", MechanismSpec("dpsgd", 1, 100), _UNCORRELATED),
    Row("DP-SGD, b=100, k=10", MechanismSpec("dpsgd", 10, 100), _UNCORRELATED),
    Row("BSR2, b=100, k=10", MechanismSpec("bsr", 10, 100, 2), _CLOSE),
    Row("BSR3, b=100, k=10", MechanismSpec("bsr", 10, 100, 3), _CLOSE),
    Row("BSR4, b=100, k=10", MechanismSpec("bsr", 10, 100, 4), _CLOSE),
    Row("BSR4, b=100, k=1", MechanismSpec("bsr", 1, 100, 4), _CLOSE),
    Row("BISR4, b=100, k=10", MechanismSpec("bisr", 10, 100, 4), _CLOSE),
    Row("BandInvMF4, b=100, k=10", MechanismSpec("bandinvmf", 10, 100, 4), _CLOSE),
    Row("BSR64, b=100, k=1", MechanismSpec("bsr", 1, 100, 64), _CLOSE),
    Row("BISR64, b=100, k=1", MechanismSpec("bisr", 1, 100, 64), _CLOSE),
    Row("BLT, b=100, k=1", MechanismSpec("blt", 1, 100), _CLOSE),
    Row("BandMF64, b=100, k=1", MechanismSpec("bandmf", 1, 100, 64), _CLOSE),
    Row("BSR16, b=200, k=5", MechanismSpec("bsr", 5, 200, 16), _CLOSE),
    Row("BSR64, b=250, k=4", MechanismSpec("bsr", 4, 250, 64), _CLOSE),
    Row("BISR64, b=250, k=4", MechanismSpec("bisr", 4, 250, 64), _CLOSE),
    Row("BSR8, b=20, k=50", MechanismSpec("bsr", 50, 20, 8), _OTHERS),
    Row("BISR16, b=100, k=10", MechanismSpec("bisr", 10, 100, 16), _OTHERS),
    Row("BSR64, b=100, k=10", MechanismSpec("bsr", 10, 100, 64), _OTHERS),
    Row("(1 − 0.968x)^(−0.4), b=100, k=10", MechanismSpec("power", 10, 100, decay=0.968, exponent=0.4), _OTHERS),
    Row("(1 − 0.99x)^(−0.5), b=100, k=10", MechanismSpec("power", 10, 100, decay=0.99, exponent=0.5), _OTHERS),
    Row("8 equal coefficients, b=128, k=4", MechanismSpec("coefficients", 4, 128, coefficients=(1.0,) * 8), _OTHERS),
    Row("mean of 0.9ⁱ and 0.99ⁱ, b=500, k=2", MechanismSpec("exponentials", 2, 500, decays=(0.9, 0.99)), _OTHERS),
    Row("irregular coefficients, b=100, k=5", MechanismSpec("coefficients", 5, 100, coefficients=_IRREGULAR), _OTHERS),
)


@dataclass(frozen=True)
class Draw:
    """A mechanism that nobody chose, and the ε at which it is asked."""

    row: Row
    epsilon: float


DRAWS = 32


@cache
def draws() -> tuple[Draw, ...]:
    """Mechanisms at random, always the same: six families, 16 to 400 batches, 1 to 50 epochs, ε from 0.25 to 8."""
    rng = random.Random(2026)

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    found = []
    for place in range(DRAWS):
        b = round(between(16, 400))
        k = 1 if rng.random() < 1 / 3 else round(between(2, min(50, 4000 / b)))
        name, spec = _drawn(("bsr", "bisr", "power", "exponentials", "decreasing", "irregular")[place % 6], k, b, rng)
        row = Row(f"{name}, b={b}, k={k}", spec, _OTHERS)
        found.append(Draw(row, float(f"{between(0.25, 8):.2g}")))
    return tuple(found)


def _drawn(family: str, k: int, b: int, rng: random.Random) -> tuple[str, MechanismSpec]:
    if family in ("bsr", "bisr"):
        p = rng.choice([p for p in (2, 3, 5, 8, 12, 24, 48, 96) if p < b])
        return f"{family.upper()}{p}", MechanismSpec(family, k, b, p)
    if family == "power":
        decay, exponent = rng.choice((0.8, 0.9, 0.95, 0.98, 0.995)), rng.choice((0.3, 0.5, 0.7))
        return f"(1 − {decay}x)^(−{exponent})", MechanismSpec("power", k, b, decay=decay, exponent=exponent)
    if family == "exponentials":
        decays = tuple(sorted(rng.sample((0.5, 0.8, 0.9, 0.95, 0.98), 2)))
        return f"mean of {decays[0]}ⁱ and {decays[1]}ⁱ", MechanismSpec("exponentials", k, b, decays=decays)
    others = [round(rng.uniform(0, 1), 2) for _ in range(rng.randint(2, 11))]
    if family == "decreasing":
        others.sort(reverse=True)
    return f"{len(others) + 1} {family} coefficients", MechanismSpec("coefficients", k, b, coefficients=(1.0, *others))


# More batches than `best` usually asks `own-bin` about: bounds from both sides stand in for a sampled truth.
MANY = tuple(
    Row(f"{family.upper()}{p}, b={b}, k=1", MechanismSpec(family, 1, b, p), _OTHERS)
    for b in (600, 1200)
    for family, p in (("bsr", 4), ("bsr", 32), ("bisr", 16))
)

TRUTH = "monte-carlo"
_LOOKS: dict[str, dict[str, Any]] = {
    "conditional": {"marker": "s", "color": "#d55e00", "markersize": 4},
    "renyi": {"marker": "o", "color": "#56b4e9", "markersize": 4.5},
    "moments": {"marker": "^", "color": "#cc79a7", "markersize": 4.5},
    "own-bin": {"marker": "D", "color": "#0072b2", "markersize": 3.5},
    "cascade": {"marker": "v", "color": "#c98a00", "markersize": 4.5},
    "chain": {"marker": "x", "color": "0.2", "markersize": 6},
    "best": {"marker": "o", "color": "#009e73", "markersize": 8, "markerfacecolor": "none"},
}
COLUMNS = ("renyi", "conditional", "chain", "moments", "own-bin", "cascade", "best", "lower")
UNLISTED = (TRUTH, "best", "lower")  # what mechanisms drawn at random are asked for
BOUNDS = ("best", "lower")
_FEW = 12  # `conditional` is asked about so many rows: about the others it takes up to twenty minutes a number


def cell_of(row: Row, column: str, epsilon: float) -> Cell:
    """The number behind one entry of the table."""
    target = {"mechanism": row.mechanism, "epsilon": epsilon, "delta": DELTA}
    if column == TRUTH:
        return Cell.of("sigma-sampled", accountant=SAMPLER, **target)
    if column == "lower":
        return Cell.of("sigma-lower", tolerance=1e-4, **target)
    # The cascade has nothing of its own for the other direction.
    direction = "remove" if column == "cascade" else "both"
    tolerance = 1e-3 if column == "conditional" else 1e-4
    return Cell.of("sigma", accountant=accountant(column), direction=direction, tolerance=tolerance, **target)


def _asked(column: str) -> tuple[Row, ...]:
    return ROWS[:_FEW] if column == "conditional" else ROWS


def cells() -> tuple[Cell, ...]:
    """Every cell, the cheap columns first: an interrupted run leaves a table worth reading."""
    columns = (TRUTH, "lower", "moments", "own-bin", "cascade", "best", "renyi", "chain", "conditional")
    table = tuple(cell_of(row, column, epsilon) for column in columns for row in _asked(column) for epsilon in EPSILONS)
    table += tuple(cell_of(row, column, epsilon) for column in BOUNDS for row in MANY for epsilon in EPSILONS)
    return table + tuple(cell_of(draw.row, column, draw.epsilon) for column in UNLISTED for draw in draws())


def ratio_of(results: Results, row: Row, column: str, epsilon: float) -> float | None:
    cell, truth = results.get(cell_of(row, column, epsilon)), results.get(cell_of(row, TRUTH, epsilon))
    if cell is None or truth is None or cell["sigma"] is None:
        return None
    return float(cell["sigma"] / truth["sigma"])


def tabulated(results: Results) -> str:
    """One line per mechanism and ε; "…" for what is not computed yet, "none" for what cannot be certified."""

    def shown(row: Row, column: str, epsilon: float) -> str:
        if row not in _asked(column):
            return ""
        if any(cell_of(row, name, epsilon) not in results for name in (column, TRUTH)):
            return "…"
        return number(ratio_of(results, row, column, epsilon))

    lines = []
    for row in ROWS:
        for epsilon, goal in zip(EPSILONS, row.goals, strict=True):
            truth = results.get(cell_of(row, TRUTH, epsilon))
            sampled_sigma = "…" if truth is None else f"{truth['sigma']:.4g} ± {100 * truth['error']:.1f} %"
            ratios = [shown(row, column, epsilon) for column in COLUMNS]
            lines.append([row.name, f"{epsilon:g}", sampled_sigma, *ratios, f"{goal:g}"])
    return table(["mechanism", "ε", "true σ (sampled)", *COLUMNS, "goal for best"], lines)


def verdict(results: Results) -> str:
    """Which goals are met, and by how much the others are missed."""
    met, missed, below, unknown = 0, 0, [], 0
    worst: dict[str, tuple[float, float]] = {}  # by mechanism: the ratio farthest above its goal, and its ε
    for row in ROWS:
        for epsilon, goal in zip(EPSILONS, row.goals, strict=True):
            ratio = ratio_of(results, row, "best", epsilon)
            if ratio is None:
                unknown += 1
                continue
            error = results[cell_of(row, TRUTH, epsilon)]["error"]
            if ratio < 1 - 4 * error:
                below.append(f"{row.name} at ε = {epsilon:g} ({ratio:.3f})")
            # The truth is itself sampled: a goal counts as missed beyond two of its standard errors.
            if ratio <= goal * (1 + 2 * error):
                met += 1
            else:
                missed += 1
                worst[row.name] = max(worst.get(row.name, (0.0, 0.0)), (ratio, epsilon))
    parts = [f"Of {met + missed} goals for `best`, {met} are met."]
    if missed:
        listed = (f"{name} ({ratio:.3f} at ε = {epsilon:g})" for name, (ratio, epsilon) in worst.items())
        parts.append(f"{missed} {'is' if missed == 1 else 'are'} missed: {'; '.join(listed)}.")
    if unknown:
        parts.append(f"{unknown} are not computed yet.")
    none_below = "No ratio of `best` is below 1 by more than four standard errors of the sampled truth."
    parts.append(
        f"Below the sampled truth by more than four standard errors: {'; '.join(below)}." if below else none_below
    )
    return " ".join(parts)


def unlisted(results: Results) -> str:
    """The mechanisms drawn at random, and how many of them are within the goal for mechanisms not in the table."""
    lines, known = [], []
    for draw in draws():
        row, epsilon, goal = draw.row, draw.epsilon, draw.row.goals[0]
        truth, found = results.get(cell_of(row, TRUTH, epsilon)), results.get(cell_of(row, "best", epsilon))
        above, below = (ratio_of(results, row, column, epsilon) for column in ("best", "lower"))
        if truth is None or found is None or above is None:
            continue
        known.append((above, above <= goal * (1 + 2 * truth["error"])))
        sampled_sigma = f"{truth['sigma']:.4g} ± {100 * truth['error']:.1f} %"
        whose = str(found.get("accountant") or "")
        lines.append([row.name, f"{epsilon:g}", sampled_sigma, number(above), whose, number(below)])
    if not lines:
        return "No mechanism drawn at random is computed yet."
    met = f"{sum(met for _, met in known)} of {len(known)} are within {100 * (_OTHERS[0] - 1):.0f} % of the truth"
    worst = f"the median is {sorted(above for above, _ in known)[len(known) // 2]:.3f}, the worst {max(known)[0]:.3f}"
    shown = table(["mechanism", "ε", "true σ (sampled)", "best", "whose bound", "lower"], lines)
    return f"{met}; {worst}.\n\n{shown}"


def many(results: Results) -> str:
    """Mechanisms of many batches: σ of `best`, and how many times the lower bound it is."""
    lines = []
    for row in MANY:
        for epsilon in EPSILONS:
            found, lower = (results.get(cell_of(row, column, epsilon)) for column in BOUNDS)
            if found is None or lower is None:
                lines.append([row.name, f"{epsilon:g}", "…", "…", "…"])
                continue
            ratio = f"{found['sigma'] / lower['sigma']:.3f}"
            lines.append([row.name, f"{epsilon:g}", f"{found['sigma']:.4g}", str(found.get("accountant") or ""), ratio])
    return table(["mechanism", "ε", "σ of best", "whose bound", "σ / lower bound"], lines)


def families(results: Results) -> str:
    """Whose bound `best` returned, over the table."""
    winners: dict[str, int] = {}
    for row in ROWS:
        for epsilon in EPSILONS:
            cell = results.get(cell_of(row, "best", epsilon))
            if cell is not None and cell.get("accountant"):
                winners[cell["accountant"]] = winners.get(cell["accountant"], 0) + 1
    counts = ", ".join(f"`{name}` ({count})" for name, count in sorted(winners.items(), key=lambda w: -w[1]))
    return f"Whose bound `best` returned, and how often: {counts}." if counts else "No cell of `best` is computed yet."


def summary(results: Results) -> str:
    """For each accountant, how many entries are within 5 % of the truth, and the range of its ratios at each ε."""
    lines = []
    for column in (name for name in COLUMNS if name != "lower"):
        rows = _asked(column)
        ratios = {e: [x for row in rows if (x := ratio_of(results, row, column, e)) is not None] for e in EPSILONS}
        known = [x for found in ratios.values() for x in found]
        close = f"{sum(x <= 1.05 for x in known)} of {len(known)}"
        ranges = [f"{min(found):.2f} to {max(found):.2f}" if found else "…" for found in ratios.values()]
        lines.append([f"`{column}`", close, *ranges])
    return table(["accountant", "within 5 %", *(f"ε = {e:g}" for e in EPSILONS)], lines)


def picture(results: Results) -> Any:
    """How many times the true noise each accountant asks for: one panel for each ε, one row for each mechanism."""
    figure, axes = new_figure(len(EPSILONS))
    figure.set_size_inches(11.5, 6.0)
    for ax, epsilon in zip(axes, EPSILONS, strict=True):
        for column, look in _LOOKS.items():
            ratios = [ratio_of(results, row, column, epsilon) for row in _asked(column)]
            there = [(ratio, -place) for place, ratio in enumerate(ratios) if ratio is not None]
            ax.plot([x for x, _ in there], [y for _, y in there], linestyle="", label=column, **look)
        ax.axvline(1.0, color="0.4", linewidth=0.8)
        ax.set_yticks([-place for place in range(len(ROWS))], [row.name for row in ROWS])
        ax.tick_params(axis="y", labelleft=ax is axes[0], labelsize="small")
        axis(ax, "x", (1, 1.5, 2, 3, 4), "σ / true σ")
        ax.set_title(f"ε = {epsilon:g}", fontsize="medium")
    shared = axes[0].get_legend_handles_labels()
    figure.legend(*shared, loc="outside lower center", ncols=len(_LOOKS), frameon=False)
    return figure


def drawn(results: Results, directory: Path) -> list[Path]:
    """The picture of the page."""
    path = directory / "tightness.png"
    write_png(path, picture(results))
    return [path]


BLOCKS = {
    "verdict": verdict,
    "summary": summary,
    "table": tabulated,
    "winners": families,
    "unlisted": unlisted,
    "many": many,
}
