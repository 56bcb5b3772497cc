"""Everything that docs/accountants.md shows: its numbers, its tables and its pictures.

    python docs/make_pictures.py                 all of it (about ten minutes on two cores the first time)
    python docs/make_pictures.py baselines       only these claims
    python docs/make_pictures.py --fresh         forget the numbers computed before

Numbers are kept in docs/data/accountants.json as they come, so an interrupted run goes on where it stopped. The tables
are printed, and put into the page between the marks of their claim. Cells of an accountant whose optional package is
not installed are left as they are; random-allocation needs an environment of its own (see pyproject.toml).
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import dpmf
from dpmf.accountants import Accountant, Best, Conditional, Lattice, MonteCarlo, PLDAccounting, RandomAllocation, Renyi
from dpmf.files import write_atomically
from dpmf.report import LOOKS, new_figure

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "accountants.json"
PAGE = HERE / "accountants.md"
PICTURES = HERE / "pictures"

DELTA = 1e-5
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SAMPLER = MonteCarlo(samples=100_000)

Numbers = Mapping[str, Any]  # what one cell holds
Cells = Mapping[str, Numbers]  # what one claim holds, by the cell's name


@dataclass(frozen=True)
class Claim:
    """One claim of the page: the cells it rests on, and how they are said, tabulated and drawn."""

    name: str
    cells: Callable[[], dict[str, Callable[[], dict[str, Any]]]]
    finding: Callable[[Cells], str]
    table: Callable[[Cells], str]
    draw: Callable[[Cells], Any]
    caption: str

    def block(self, cells: Cells) -> str:
        """The part of the page that is made from the numbers."""
        picture = f"![{self.caption}](pictures/{self.name}.png)"
        return f"{self.finding(cells)}\n\n{self.table(cells)}\n\n{picture}"


# --- computing -------------------------------------------------------------------------------------------------------


def mechanism(strategy: dpmf.strategies.Strategy, epochs: int, batches: int) -> dpmf.Mechanism:
    return dpmf.Mechanism(strategy, dpmf.BallsInBins(epochs=epochs, batches_per_epoch=batches))


@cache
def _warm() -> None:
    """Have the kernels compiled before anything is timed."""
    small = mechanism(dpmf.strategies.bsr(bandwidth=2), 2, 8)
    for accountant in (Renyi(), Conditional()):
        dpmf.delta(small, noise_multiplier=2.0, epsilon=1.0, accountant=accountant)
    dpmf.delta(mechanism(dpmf.strategies.dpsgd(), 1, 8), noise_multiplier=2.0, epsilon=1.0, accountant=Lattice())


def calibrated(
    target: dpmf.Mechanism, accountant: Accountant, epsilon: float, direction: str = "both"
) -> Callable[[], dict[str, Any]]:
    """A cell with a noise multiplier; None where the accountant cannot meet the target."""

    def compute() -> dict[str, Any]:
        _warm()
        began = time.perf_counter()
        try:
            found = dpmf.calibrate(
                target, target_epsilon=epsilon, target_delta=DELTA, accountant=accountant, direction=direction,
                relative_tolerance=1e-3 if isinstance(accountant, Conditional) else 1e-4,
            )  # fmt: skip
        except dpmf.CalibrationError as error:
            return {"sigma": None, "problem": str(error)}
        seconds = time.perf_counter() - began
        winner = found.details[found.binding].get("accountant", found.accountant)
        return {"sigma": found.noise_multiplier, "binding": found.binding, "winner": winner, "seconds": seconds}

    return compute


def epsilon_of(target: dpmf.Mechanism, accountant: Accountant, sigma: float) -> Callable[[], dict[str, Any]]:
    def compute() -> dict[str, Any]:
        _warm()
        began = time.perf_counter()
        found = dpmf.epsilon(target, noise_multiplier=sigma, delta=DELTA, accountant=accountant)
        return {"epsilon": found.epsilon, "seconds": time.perf_counter() - began}

    return compute


def delta_of(
    target: dpmf.Mechanism, accountant: Accountant, sigma: float, epsilon: float, direction: str
) -> Callable[[], dict[str, Any]]:
    def compute() -> dict[str, Any]:
        found = dpmf.delta(target, noise_multiplier=sigma, epsilon=epsilon, accountant=accountant, direction=direction)
        how = found.details[direction]
        return {"delta": found.delta, "estimate": how["estimate"], "standard_error": how["standard_error"]}

    return compute


# --- saying ----------------------------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def ratio(value: float | None, truth: float) -> float | None:
    return None if value is None else value / truth


def more(value: float, truth: float) -> str:
    """How much more than the truth, in percent."""
    return f"{100 * (value / truth - 1):.1f} %"


def times(value: float, truth: float) -> str:
    return f"{value / truth:.2f} times"


def short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.1f}"


def power(value: float) -> str:
    """A round number as people write it: 3·10⁹."""
    mantissa, exponent = f"{value:.0e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"


# --- drawing ---------------------------------------------------------------------------------------------------------

LOOKS = {
    "renyi": LOOKS[0],
    "conditional": LOOKS[1],
    "lattice": LOOKS[2],
    "best": LOOKS[3],
    "pld-accounting": LOOKS[4],
    "random-allocation": LOOKS[5],
    "monte-carlo": LOOKS[6],
}


def plot(
    ax: Any, xs: Sequence[float], ys: Sequence[float | None], label: str, look: Mapping[str, Any], **more: Any
) -> None:
    shown = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    ax.plot([x for x, _ in shown], [y for _, y in shown], label=label, **{"markersize": 4.5, **look, **more})


def axis(ax: Any, which: str, ticks: Sequence[float], label: str, log: bool = True, names: Sequence[str] = ()) -> None:
    """A scale with these ticks and no others."""
    getattr(ax, f"set_{which}scale")("log" if log else "linear")
    getattr(ax, f"set_{which}ticks")(ticks, names or [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    getattr(ax, f"set_{which}label")(label)


def png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, metadata={"Software": None})
    return stream.getvalue()


# --- σ against ε: the shape most claims have -------------------------------------------------------------------------


def curve(
    name: str,
    target: Callable[[], dpmf.Mechanism],
    title: str,
    accountants: Mapping[str, Accountant],
    truth: str,
    finding: Callable[[Callable[[str, float], float]], str],
    caption: str,
    ticks: Sequence[float],
    ratios: Sequence[float],
    show_winner: bool = False,
) -> Claim:
    """σ of several accountants over ε, and beside it how many times the σ of `truth` each asks for."""

    def key(label: str, epsilon: float) -> str:
        return f"{label}, ε={epsilon:g}"

    def cells() -> dict[str, Callable[[], dict[str, Any]]]:
        made = target()
        return {key(a, e): calibrated(made, options, e) for a, options in accountants.items() for e in EPSILONS}

    def table(found: Cells) -> str:
        others = [a for a in accountants if a != truth]
        head = ["ε", *(f"{a} σ" for a in accountants), *(f"{a} / {truth}" for a in others)]
        rows = []
        for e in EPSILONS:
            sigmas = {a: found[key(a, e)]["sigma"] for a in accountants}
            row = [f"{e:g}", *(number(s) for s in sigmas.values())]
            row += [number(ratio(sigmas[a], sigmas[truth]), 2) for a in others]
            rows.append([*row, found[key("best", e)]["winner"]] if show_winner else row)
        return markdown([*head, "best is"] if show_winner else head, rows)

    def draw(found: Cells) -> Any:
        figure, (left, right) = new_figure(2)
        for a in accountants:
            sigmas = [found[key(a, e)]["sigma"] for e in EPSILONS]
            # `best` lies on top of others: a ring around their markers.
            ring = (
                {"markersize": 10, "markerfacecolor": "none", "linestyle": "none", "marker": "o"} if a == "best" else {}
            )
            label = f"{a} (estimate)" if a == "monte-carlo" else a
            plot(left, EPSILONS, sigmas, label, LOOKS[a], **ring)
            if a != truth:
                truths = [found[key(truth, e)]["sigma"] for e in EPSILONS]
                plot(right, EPSILONS, [ratio(s, t) for s, t in zip(sigmas, truths, strict=True)], a, LOOKS[a], **ring)
        axis(left, "x", EPSILONS, "ε")
        axis(right, "x", EPSILONS, "ε")
        axis(left, "y", ticks, "noise multiplier σ at δ = 10⁻⁵")
        axis(right, "y", ratios, f"σ / σ of {truth}", log=False)
        right.axhline(1.0, color="0.4", linewidth=0.8)
        left.legend(frameon=False)
        figure.suptitle(title, fontsize="medium")
        return figure

    def said(found: Cells) -> str:
        return finding(lambda a, e: found[key(a, e)]["sigma"])

    return Claim(name, cells, said, table, draw, caption)


small_epsilon = curve(
    "small-epsilon",
    lambda: mechanism(dpmf.strategies.bsr(bandwidth=4), 1, 100),
    "BSR(p=4), one epoch of 100 batches",
    {"renyi": Renyi(), "conditional": Conditional(), "monte-carlo": SAMPLER},
    "monte-carlo",
    lambda s: (
        f"BSR(p=4), one epoch of 100 batches: Rényi asks for {more(s('renyi', 8), s('monte-carlo', 8))} more noise "
        f"than the truth at ε = 8, for {more(s('renyi', 1), s('monte-carlo', 1))} more at ε = 1 and for "
        f"{more(s('renyi', 0.25), s('monte-carlo', 0.25))} more at ε = 0.25. Conditional composition asks for "
        f"{times(s('conditional', 0.25), s('monte-carlo', 0.25))} the true noise at ε = 0.25 and for "
        f"{times(s('conditional', 8), s('monte-carlo', 8))} at ε = 8."
    ),
    "σ against ε of renyi, conditional and monte-carlo for BSR(p=4), and their ratios",
    (0.5, 1, 2, 5),
    (1, 1.5, 2, 2.5, 3, 3.5),
)

uncorrelated = curve(
    "uncorrelated",
    lambda: mechanism(dpmf.strategies.dpsgd(), 1, 1000),
    "DP-SGD, one epoch of 1000 batches",
    {"renyi": Renyi(), "conditional": Conditional(), "lattice": Lattice()},
    "lattice",
    lambda s: (
        "DP-SGD, one epoch of 1000 batches: conditional composition asks for "
        f"{more(s('conditional', 0.25), s('lattice', 0.25))} more noise than the lattice at ε = 0.25, Rényi for "
        f"{more(s('renyi', 0.25), s('lattice', 0.25))} more. At ε = 8 it is the other way round: "
        f"{more(s('conditional', 8), s('lattice', 8))} and {more(s('renyi', 8), s('lattice', 8))}."
    ),
    "σ against ε of renyi, conditional and lattice for DP-SGD, and their ratios",
    (0.4, 0.6, 0.8, 1, 1.6),
    (1, 1.25, 1.5, 1.75, 2),
)

long_memory = curve(
    "best",
    lambda: mechanism(dpmf.strategies.bisr(bandwidth=4), 1, 100),
    "BISR(p=4), one epoch of 100 batches",
    {"renyi": Renyi(), "conditional": Conditional(), "best": Best(), "monte-carlo": SAMPLER},
    "monte-carlo",
    lambda s: (
        "BISR(p=4), one epoch of 100 batches, ε = 0.25: Rényi asks for "
        f"{times(s('renyi', 0.25), s('monte-carlo', 0.25))} the true noise, conditional composition for "
        f"{times(s('conditional', 0.25), s('monte-carlo', 0.25))}, `best` for "
        f"{more(s('best', 0.25), s('monte-carlo', 0.25))} more than the truth. At ε = 1 `best` asks for "
        f"{more(s('best', 1), s('monte-carlo', 1))} more, at ε = 8 for {more(s('best', 8), s('monte-carlo', 8))} more."
    ),
    "σ against ε of renyi, conditional, best and monte-carlo for BISR(p=4)",
    (0.5, 1, 2, 5, 10),
    (1, 1.5, 2, 2.5, 3, 3.5),
    show_winner=True,
)


# --- epochs ----------------------------------------------------------------------------------------------------------

EPOCHS = (1, 2, 4, 10)


def _epoch_lines() -> dict[str, tuple[dpmf.strategies.Strategy, dict[str, Accountant]]]:
    """By title: the strategy, and its accountants, the one that tells the truth last."""
    both: dict[str, Accountant] = {"renyi": Renyi(), "conditional": Conditional()}
    return {
        "DP-SGD": (dpmf.strategies.dpsgd(), {**both, "lattice": Lattice()}),
        "BSR(p=4)": (dpmf.strategies.bsr(bandwidth=4), {**both, "monte-carlo": SAMPLER}),
    }


def _epoch_cells() -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        f"{title}, k={k}, {a}": calibrated(mechanism(strategy, k, 100), options, 1.0)
        for title, (strategy, accountants) in _epoch_lines().items()
        for k in EPOCHS
        for a, options in accountants.items()
    }


def _epoch_ratio(cells: Cells, title: str, k: int, accountant: str) -> float:
    truth = "lattice" if title == "DP-SGD" else "monte-carlo"
    return float(cells[f"{title}, k={k}, {accountant}"]["sigma"] / cells[f"{title}, k={k}, {truth}"]["sigma"])


def _epoch_finding(cells: Cells) -> str:
    def said(title: str, k: int) -> str:
        return f"{_epoch_ratio(cells, title, k, 'conditional'):.2f}"

    return (
        "At ε = 1 and 100 batches an epoch, conditional composition asks for "
        f"{said('DP-SGD', 1)} times the true noise of DP-SGD with one epoch and for {said('DP-SGD', 10)} times with "
        f"ten; of BSR(p=4) for {said('BSR(p=4)', 1)} and {said('BSR(p=4)', 10)} times. Rényi's factor stays at "
        f"{_epoch_ratio(cells, 'DP-SGD', 10, 'renyi'):.2f} and {_epoch_ratio(cells, 'BSR(p=4)', 10, 'renyi'):.2f}."
    )


def _epoch_table(cells: Cells) -> str:
    head, columns = ["epochs"], []
    for title, (_, accountants) in _epoch_lines().items():
        head += [f"{title} {a} σ" for a in accountants] + [f"{title} conditional / {list(accountants)[-1]}"]
        columns.append((title, list(accountants)))
    rows = []
    for k in EPOCHS:
        row = [str(k)]
        for title, accountants in columns:
            row += [number(cells[f"{title}, k={k}, {a}"]["sigma"]) for a in accountants]
            row.append(number(_epoch_ratio(cells, title, k, "conditional"), 2))
        rows.append(row)
    return markdown(head, rows)


def _epoch_draw(cells: Cells) -> Any:
    figure, axes = new_figure(2)
    for ax, title in zip(axes, _epoch_lines(), strict=True):
        for a in ("renyi", "conditional"):
            plot(ax, EPOCHS, [_epoch_ratio(cells, title, k, a) for k in EPOCHS], a, LOOKS[a])
        axis(ax, "x", EPOCHS, "epochs")
        axis(ax, "y", (1, 1.5, 2, 2.5, 3), f"σ / σ of {'lattice' if title == 'DP-SGD' else 'monte-carlo'}", log=False)
        ax.set_ylim(0.9, 3.2)
        ax.axhline(1.0, color="0.4", linewidth=0.8)
        ax.set_title(f"{title}, 100 batches an epoch, ε = 1", fontsize="medium")
    axes[0].legend(frameon=False)
    return figure


epochs = Claim(
    "epochs", _epoch_cells, _epoch_finding, _epoch_table, _epoch_draw,
    "noise asked for over the true noise, against the number of epochs",
)  # fmt: skip


# --- truncation ------------------------------------------------------------------------------------------------------

WIDTHS = (1, 2, 4, 8, 16, 32)
TRUNCATION_EPSILONS = (2.0, 8.0)


def _truncation_targets() -> dict[str, dpmf.Mechanism]:
    return {
        "BISR(p=4), 10 epochs": mechanism(dpmf.strategies.bisr(bandwidth=4), 10, 100),
        "BSR(p=64), 1 epoch": mechanism(dpmf.strategies.bsr(bandwidth=64), 1, 100),
    }


TRUNCATION_TITLES = ("BISR(p=4), 10 epochs", "BSR(p=64), 1 epoch")


def _truncation_cells() -> dict[str, Callable[[], dict[str, Any]]]:
    found = {}
    for title, target in _truncation_targets().items():
        for e in TRUNCATION_EPSILONS:
            for p in WIDTHS:
                found[f"{title}, ε={e:g}, p={p}"] = calibrated(target, Renyi(bandwidth=p, work_budget=1e9), e)
            found[f"{title}, ε={e:g}, monte-carlo"] = calibrated(target, SAMPLER, e)
    return found


def _truncation(cells: Cells, title: str, e: float, p: int) -> float | None:
    return ratio(cells[f"{title}, ε={e:g}, p={p}"]["sigma"], cells[f"{title}, ε={e:g}, monte-carlo"]["sigma"])


def _truncation_finding(cells: Cells) -> str:
    parts = []
    for title in TRUNCATION_TITLES:
        for e in TRUNCATION_EPSILONS:
            best = min((r, p) for p in WIDTHS if (r := _truncation(cells, title, e, p)) is not None)
            first = _truncation(cells, title, e, 1)
            parts.append(f"{title}, ε = {e:g}: from {number(first, 2)} at p = 1 to {best[0]:.2f} at p = {best[1]}")
    return "σ over the true σ, with 100 batches an epoch and a budget of 10⁹. " + "; ".join(parts) + "."


def _truncation_table(cells: Cells) -> str:
    columns = [(title, e) for title in TRUNCATION_TITLES for e in TRUNCATION_EPSILONS]
    head = ["bandwidth kept", *(f"{title}, ε = {e:g}" for title, e in columns)]
    rows = [[str(p), *(number(cells[f"{t}, ε={e:g}, p={p}"]["sigma"]) for t, e in columns)] for p in WIDTHS]
    rows.append(["monte-carlo", *(number(cells[f"{t}, ε={e:g}, monte-carlo"]["sigma"]) for t, e in columns)])
    return markdown(head, rows)


def _truncation_draw(cells: Cells) -> Any:
    figure, axes = new_figure(2)
    for ax, title in zip(axes, TRUNCATION_TITLES, strict=True):
        for look, e in zip(LOOKS, TRUNCATION_EPSILONS, strict=False):
            plot(ax, WIDTHS, [_truncation(cells, title, e, p) for p in WIDTHS], f"ε = {e:g}", look)
        axis(ax, "x", WIDTHS, "bandwidth kept")
        ax.axhline(1.0, color="0.4", linewidth=0.8)
        ax.set_ylim(bottom=0.95)
        ax.set_ylabel("σ of renyi / σ of monte-carlo")
        ax.set_title(title, fontsize="medium")
    axes[0].legend(frameon=False)
    return figure


truncation = Claim(
    "truncation", _truncation_cells, _truncation_finding, _truncation_table, _truncation_draw,
    "Rényi's noise over the true noise, against the bandwidth kept",
)  # fmt: skip


# --- directions ------------------------------------------------------------------------------------------------------


def _direction_cells() -> dict[str, Callable[[], dict[str, Any]]]:
    target = mechanism(dpmf.strategies.dpsgd(), 1, 1000)
    return {
        f"{a.name} {way}, ε={e:g}": calibrated(target, a, e, way)
        for a in (Renyi(), Lattice())
        for way in ("remove", "add")
        for e in EPSILONS
    }


DIRECTION_COLUMNS = ("renyi remove", "renyi add", "lattice remove", "lattice add")


def _direction_finding(cells: Cells) -> str:
    def add_decides(a: str) -> str:
        at = [
            f"{e:g}" for e in EPSILONS if cells[f"{a} add, ε={e:g}"]["sigma"] > cells[f"{a} remove, ε={e:g}"]["sigma"]
        ]
        return f"at ε = {', '.join(at)}" if at else "at no ε shown"

    return (
        f"DP-SGD, one epoch of 1000 batches: the add direction decides Rényi's σ {add_decides('renyi')}. By the "
        f"lattice, which is close to the truth, it decides {add_decides('lattice')}."
    )


def _direction_table(cells: Cells) -> str:
    rows = [[f"{e:g}", *(number(cells[f"{c}, ε={e:g}"]["sigma"]) for c in DIRECTION_COLUMNS)] for e in EPSILONS]
    return markdown(["ε", *(f"{c} σ" for c in DIRECTION_COLUMNS)], rows)


def _direction_draw(cells: Cells) -> Any:
    figure, axes = new_figure(2)
    for ax, a in zip(axes, ("renyi", "lattice"), strict=True):
        for look, way in zip((LOOKS[0], LOOKS[1]), ("remove", "add"), strict=True):
            plot(ax, EPSILONS, [cells[f"{a} {way}, ε={e:g}"]["sigma"] for e in EPSILONS], way, look)
        axis(ax, "x", EPSILONS, "ε")
        axis(ax, "y", (0.2, 0.5, 1, 2), "noise multiplier σ at δ = 10⁻⁵")
        ax.set_ylim(0.15, 2.2)
        ax.set_title(f"{a}, DP-SGD, one epoch of 1000 batches", fontsize="medium")
    axes[0].legend(frameon=False)
    return figure


directions = Claim(
    "directions", _direction_cells, _direction_finding, _direction_table, _direction_draw,
    "σ of the remove and of the add direction, for renyi and for lattice",
)  # fmt: skip


# --- Monte Carlo -----------------------------------------------------------------------------------------------------

SAMPLES = (1_000, 10_000, 100_000, 1_000_000)
SAMPLED_SIGMA, SAMPLED_EPSILON, FAILURE = 2.97, 0.25, 1e-3
PROPOSALS = {"importance": True, "plain": False}


def _sampling_cells() -> dict[str, Callable[[], dict[str, Any]]]:
    target = mechanism(dpmf.strategies.bsr(bandwidth=4), 1, 100)
    return {
        f"{way}, {proposal}, {n}": delta_of(
            target,
            MonteCarlo(samples=n, importance=flag, failure_probability=FAILURE),
            SAMPLED_SIGMA,
            SAMPLED_EPSILON,
            way,
        )
        for way in ("remove", "add")
        for proposal, flag in PROPOSALS.items()
        for n in SAMPLES
    }


def _bound_ratio(cells: Cells, way: str, proposal: str, n: int) -> float:
    """The upper limit over the best estimate there is."""
    return float(cells[f"{way}, {proposal}, {n}"]["delta"] / cells[f"{way}, importance, {SAMPLES[-1]}"]["estimate"])


def _relative_error(cells: Cells, proposal: str, n: int) -> float | None:
    cell = cells[f"remove, {proposal}, {n}"]
    return cell["standard_error"] / cell["estimate"] if cell["estimate"] > 0 else None


def _percent(value: float | None) -> str:
    return "no hit" if value is None else f"{100 * value:.2g} %"


def _sampling_finding(cells: Cells) -> str:
    n, most = 100_000, SAMPLES[-1]
    limits = {(p, m): f"{_bound_ratio(cells, 'remove', p, m):.1f}" for p in PROPOSALS for m in (n, most)}
    truth = cells[f"remove, importance, {most}"]["estimate"]
    return (
        f"BSR(p=4), one epoch of 100 batches, σ = {SAMPLED_SIGMA:g}, ε = {SAMPLED_EPSILON:g}, where δ is about "
        f"{1e6 * truth:.1f}·10⁻⁶. With {n:,} samples the standard error of the estimate (remove) is "
        f"{_percent(_relative_error(cells, 'importance', n))} with importance sampling and "
        f"{_percent(_relative_error(cells, 'plain', n))} without. The limit that fails with probability "
        f"{FAILURE:g} is much further away: {limits['plain', n]} times δ without importance sampling, "
        f"{limits['importance', n]} times with it; at {most:,} samples {limits['plain', most]} and "
        f"{limits['importance', most]} times."
    )


def _sampling_table(cells: Cells) -> str:
    head = ["samples", *(f"standard error, remove, {p}" for p in PROPOSALS)]
    head += [f"limit / δ, {way}, {p}" for way in ("remove", "add") for p in PROPOSALS]
    rows = []
    for n in SAMPLES:
        errors = [_percent(_relative_error(cells, p, n)) for p in PROPOSALS]
        limits = [number(_bound_ratio(cells, way, p, n), 1) for way in ("remove", "add") for p in PROPOSALS]
        rows.append([f"{n:,}", *errors, *limits])
    return markdown(head, rows)


def _sampling_draw(cells: Cells) -> Any:
    figure, (left, right) = new_figure(2)
    for look, p in zip((LOOKS[0], LOOKS[1]), PROPOSALS, strict=True):
        errors = [_relative_error(cells, p, n) for n in SAMPLES]
        plot(left, SAMPLES, [None if e is None else 100 * e for e in errors], f"remove, {p}", look)
    looks = iter((LOOKS[0], LOOKS[1], LOOKS[2], LOOKS[6]))
    for way in ("remove", "add"):
        for p in PROPOSALS:
            plot(right, SAMPLES, [_bound_ratio(cells, way, p, n) for n in SAMPLES], f"{way}, {p}", next(looks))
    names = [power(n) for n in SAMPLES]
    axis(left, "x", SAMPLES, "samples", names=names)
    axis(right, "x", SAMPLES, "samples", names=names)
    axis(left, "y", (0.5, 1, 2, 5, 10, 20, 50), "standard error of the estimate, % of δ")
    axis(right, "y", (1, 10, 100, 1000), f"limit that fails with probability {FAILURE:g}, over δ")
    right.axhline(1.0, color="0.4", linewidth=0.8)
    left.legend(frameon=False)
    right.legend(frameon=False)
    title = f"BSR(p=4), one epoch of 100 batches, σ = {SAMPLED_SIGMA:g}, ε = {SAMPLED_EPSILON:g}"
    figure.suptitle(title, fontsize="medium")
    return figure


sampling = Claim(
    "sampling", _sampling_cells, _sampling_finding, _sampling_table, _sampling_draw,
    "standard error and high-probability limit of Monte Carlo against the number of samples",
)  # fmt: skip


# --- work budget -----------------------------------------------------------------------------------------------------

BUDGETS = (1e5, 1e6, 1e7, 1e8, 1e9, 3e9)
BUDGET_EPSILONS = (0.5, 1.0, 2.0, 8.0)


def _budget_cells() -> dict[str, Callable[[], dict[str, Any]]]:
    target = mechanism(dpmf.strategies.bsr(bandwidth=4), 10, 100)
    return {
        f"ε={e:g}, work={w:g}": calibrated(target, Renyi(work_budget=w), e) for e in BUDGET_EPSILONS for w in BUDGETS
    }


def _budget_finding(cells: Cells) -> str:
    def excess(e: float, w: float) -> float:
        return float(cells[f"ε={e:g}, work={w:g}"]["sigma"] / cells[f"ε={e:g}, work={BUDGETS[-1]:g}"]["sigma"])

    return (
        "BSR(p=4), ten epochs of 100 batches. Against the default budget of 3·10⁹, a budget of 10⁶ costs a factor "
        f"{excess(8, 1e6):.2f} in σ at ε = 8, {excess(2, 1e6):.2f} at ε = 2, {excess(1, 1e6):.2f} at ε = 1 and "
        f"{excess(0.5, 1e6):.2f} at ε = 0.5. A budget of 10⁸ costs no more than a factor "
        f"{max(excess(e, 1e8) for e in BUDGET_EPSILONS):.3f} at any of these."
    )


def _budget_table(cells: Cells) -> str:
    head = ["work budget", *(f"σ at ε = {e:g}" for e in BUDGET_EPSILONS), "seconds, all four"]
    rows = []
    for w in BUDGETS:
        row = [cells[f"ε={e:g}, work={w:g}"] for e in BUDGET_EPSILONS]
        rows.append([power(w), *(number(c["sigma"]) for c in row), short(sum(c.get("seconds", 0.0) for c in row))])
    return markdown(head, rows)


def _budget_draw(cells: Cells) -> Any:
    figure, (ax,) = new_figure(1)
    for look, e in zip(LOOKS, BUDGET_EPSILONS, strict=False):
        plot(ax, BUDGETS, [cells[f"ε={e:g}, work={w:g}"]["sigma"] for w in BUDGETS], f"ε = {e:g}", look)
    axis(ax, "x", BUDGETS[:-1], "work budget", names=[power(w) for w in BUDGETS[:-1]])
    axis(ax, "y", (2, 5, 10, 20, 50), "noise multiplier σ at δ = 10⁻⁵")
    ax.set_title("renyi, BSR(p=4), ten epochs of 100 batches", fontsize="medium")
    ax.legend(frameon=False)
    return figure


budget = Claim(
    "work-budget", _budget_cells, _budget_finding, _budget_table, _budget_draw, "Rényi's σ against the work budget"
)  # fmt: skip


# --- baselines -------------------------------------------------------------------------------------------------------

SIGMAS = (0.5, 0.7, 1.0, 1.4, 2.0)
PEERS: dict[str, Accountant] = {
    "lattice": Lattice(),
    "renyi": Renyi(),
    "pld-accounting": PLDAccounting(),
    "random-allocation": RandomAllocation(),
}


def _baseline_cells() -> dict[str, Callable[[], dict[str, Any]]]:
    target = mechanism(dpmf.strategies.dpsgd(), 1, 100)
    return {f"{a}, σ={s:g}": epsilon_of(target, options, s) for a, options in PEERS.items() for s in SIGMAS}


def _baseline_finding(cells: Cells) -> str:
    def excess(a: str) -> list[float]:
        return [100 * (cells[f"{a}, σ={s:g}"]["epsilon"] / cells[f"lattice, σ={s:g}"]["epsilon"] - 1) for s in SIGMAS]

    def took(a: str) -> float:
        return sum(cells[f"{a}, σ={s:g}"]["seconds"] for s in SIGMAS) / len(SIGMAS)

    peer, older = excess("pld-accounting"), excess("random-allocation")
    return (
        "DP-SGD, one epoch of 100 batches, ε at δ = 10⁻⁵. Above the lattice's ε is pld-accounting's by "
        f"{min(peer):.2f} to {max(peer):.1f} %, random-allocation's by {min(older):.0f} to {max(older):.0f} %. An "
        f"answer took the lattice {took('lattice'):.1f} s on average, pld-accounting {took('pld-accounting'):.0f} s "
        f"and random-allocation {took('random-allocation'):.0f} s."
    )


def _baseline_table(cells: Cells) -> str:
    head = ["σ", *(f"{a} ε" for a in PEERS), *(f"{a} s" for a in PEERS)]
    rows = []
    for s in SIGMAS:
        row = [cells[f"{a}, σ={s:g}"] for a in PEERS]
        rows.append([f"{s:g}", *(number(c["epsilon"], 4) for c in row), *(short(c["seconds"]) for c in row)])
    return markdown(head, rows)


def _baseline_draw(cells: Cells) -> Any:
    figure, (left, right) = new_figure(2)
    for a in PEERS:
        row = [cells[f"{a}, σ={s:g}"] for s in SIGMAS]
        if a != "lattice":
            truths = [cells[f"lattice, σ={s:g}"]["epsilon"] for s in SIGMAS]
            ratios = [c["epsilon"] / t for c, t in zip(row, truths, strict=True)]
            plot(left, SIGMAS, ratios, a, LOOKS[a])
        plot(right, SIGMAS, [c["seconds"] for c in row], a, LOOKS[a])
    for ax in (left, right):
        axis(ax, "x", SIGMAS, "noise multiplier σ")
    left.axhline(1.0, color="0.4", linewidth=0.8)
    left.set_ylabel("ε / ε of lattice, at δ = 10⁻⁵")
    figure.suptitle("DP-SGD, one epoch of 100 batches", fontsize="medium")
    seconds = (0.001, 0.01, 0.1, 1, 10, 100)
    axis(right, "y", seconds, "seconds for one ε (both directions)")
    right.set_ylim(0.0005, 100)
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.14), labelspacing=0.3)
    return figure


baselines = Claim(
    "baselines", _baseline_cells, _baseline_finding, _baseline_table, _baseline_draw,
    "ε of the DP-SGD baselines over the lattice's, and the seconds each takes",
)  # fmt: skip

CLAIMS = {
    claim.name: claim
    for claim in (directions, uncorrelated, baselines, budget, small_epsilon, epochs, sampling, truncation, long_memory)
}


# --- the command -----------------------------------------------------------------------------------------------------


def load() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def save(data: Mapping[str, Cells]) -> None:
    DATA.parent.mkdir(exist_ok=True)
    write_atomically(DATA, (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def fill(claim: Claim, data: dict[str, dict[str, dict[str, Any]]]) -> bool:
    """Compute the cells that are not there yet; whether all are there now."""
    have = data.setdefault(claim.name, {})
    wanted = claim.cells()
    for key in [key for key in have if key not in wanted]:
        del have[key]
    missing = [key for key in wanted if key not in have]
    for i, key in enumerate(missing):
        print(f"{claim.name} [{i + 1}/{len(missing)}] {key}", file=sys.stderr, flush=True)
        try:
            have[key] = wanted[key]()
        except dpmf.MissingExtraError as error:
            print(f"  left out: {error}", file=sys.stderr)
            continue
        save(data)
    return all(key in have for key in wanted)


def with_block(page: str, name: str, block: str) -> str:
    """The page with the block between the marks of a claim replaced."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    return pattern.sub(lambda marks: f"{marks[1]}{block}\n{marks[2]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description="The numbers, tables and pictures of docs/accountants.md.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"claims: {', '.join(CLAIMS)} (all if none)")
    parser.add_argument("--fresh", action="store_true", help="compute again what is known already")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CLAIMS):
        parser.error(f"no such claim: {', '.join(sorted(unknown))}")
    data = load()
    PICTURES.mkdir(exist_ok=True)
    for name in options.names or CLAIMS:
        claim = CLAIMS[name]
        if options.fresh:
            data.pop(name, None)
        if not fill(claim, data):
            print(f"{name}: not all cells are there, its table and picture stay as they are", file=sys.stderr)
            continue
        cells = data[name]
        write_atomically(PICTURES / f"{name}.png", png(claim.draw(cells)))
        print(f"## {name}\n\n{claim.finding(cells)}\n\n{claim.table(cells)}\n", flush=True)
        if PAGE.exists():
            write_atomically(PAGE, with_block(PAGE.read_text(), name, claim.block(cells)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
