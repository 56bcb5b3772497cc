"""The table of docs/tightness.md: how many times the true noise each accountant asks for, mechanism by mechanism.

    python docs/make_tightness.py                     every cell (an hour or two on two cores the first time)
    python docs/make_tightness.py --only BSR64        only cells whose name contains this; may be given several times
    python docs/make_tightness.py --only ', chain'    the chain's column
    python docs/make_tightness.py --fresh --only ...  compute these again

Cells are kept in docs/data/tightness.json as they are finished, so an interrupted run goes on where it stopped. The
page is then made from all cells there are. BandMF and BLT need jax-privacy (their cells are left out without it).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from make_pictures import DELTA, calibrated, markdown, mechanism, number, power, with_block

import dpmf
from dpmf.accountants import Best, Cascade, Chain, Conditional, MonteCarlo, Renyi
from dpmf.files import write_atomically
from dpmf.lower_bounds import lower_noise_multiplier

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "tightness.json"
PAGE = HERE / "tightness.md"

EPSILONS = (0.25, 1.0, 4.0, 8.0)
SAMPLER = MonteCarlo(samples=200_000)
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A mechanism, and how close `best` is meant to come to the truth at each ε."""

    name: str
    strategy: Callable[[], dpmf.strategies.Strategy]
    epochs: int
    batches: int
    goals: tuple[float, float, float, float]


_UNCORRELATED = (1.005, 1.005, 1.005, 1.005)
_NARROW = (1.05, 1.03, 1.02, 1.02)
_WIDE = (1.08, 1.07, 1.05, 1.05)
_MEDIUM_EPOCHS = (1.12, 1.08, 1.04, 1.04)
_WIDE_EPOCHS = (1.18, 1.15, 1.09, 1.06)

make = dpmf.strategies
ROWS = (
    Row("DP-SGD, b=100, k=1", make.dpsgd, 1, 100, _UNCORRELATED),
    Row("DP-SGD, b=100, k=10", make.dpsgd, 10, 100, _UNCORRELATED),
    Row("BSR2, b=100, k=10", lambda: make.bsr(2), 10, 100, _NARROW),
    Row("BSR3, b=100, k=10", lambda: make.bsr(3), 10, 100, _NARROW),
    Row("BSR4, b=100, k=10", lambda: make.bsr(4), 10, 100, _NARROW),
    Row("BSR4, b=100, k=1", lambda: make.bsr(4), 1, 100, _NARROW),
    Row("BISR4, b=100, k=10", lambda: make.bisr(4), 10, 100, _NARROW),
    Row("BandInvMF4, b=100, k=10", lambda: make.bandinvmf(4), 10, 100, _NARROW),
    Row("BSR64, b=100, k=1", lambda: make.bsr(64), 1, 100, _WIDE),
    Row("BISR64, b=100, k=1", lambda: make.bisr(64), 1, 100, _WIDE),
    Row("BLT, b=100, k=1", make.blt, 1, 100, _WIDE),
    Row("BandMF64, b=100, k=1", lambda: make.bandmf(64), 1, 100, _WIDE),
    Row("BSR16, b=200, k=5", lambda: make.bsr(16), 5, 200, _MEDIUM_EPOCHS),
    Row("BSR64, b=250, k=4", lambda: make.bsr(64), 4, 250, _WIDE_EPOCHS),
    Row("BISR64, b=250, k=4", lambda: make.bisr(64), 4, 250, _WIDE_EPOCHS),
)

TRUTH = "monte-carlo"
COLUMNS = ("renyi", "conditional", "chain", "cascade", "best", "lower")


# --- computing -------------------------------------------------------------------------------------------------------


@cache
def target_of(row: Row) -> dpmf.Mechanism:
    return mechanism(row.strategy(), row.epochs, row.batches)


def sampled(target: dpmf.Mechanism, epsilon: float) -> dict[str, Any]:
    """The σ at which the estimate of δ is DELTA, and what its standard error is worth in σ."""
    found = dpmf.calibrate(target, target_epsilon=epsilon, target_delta=DELTA, accountant=SAMPLER)
    sigma, way = found.noise_multiplier, found.binding

    def estimate(noise: float) -> Cell:
        return dpmf.delta(
            target, noise_multiplier=noise, epsilon=epsilon, accountant=SAMPLER, direction=way
        ).details[way]  # fmt: skip

    here, beside = estimate(sigma), estimate(1.01 * sigma)
    slope = math.log(here["estimate"] / beside["estimate"]) / math.log(1.01)
    return {"sigma": sigma, "binding": way, "error": here["standard_error"] / here["estimate"] / slope}


def certified(target: dpmf.Mechanism, epsilon: float) -> dict[str, Any]:
    began = time.perf_counter()
    return {"sigma": lower_noise_multiplier(target, epsilon, DELTA), "seconds": time.perf_counter() - began}


def computation(row: Row, column: str, epsilon: float) -> Callable[[], dict[str, Any]]:
    def compute() -> dict[str, Any]:
        target = target_of(row)
        if column == TRUTH:
            return sampled(target, epsilon)
        if column == "lower":
            return certified(target, epsilon)
        if column == "cascade":  # it has nothing of its own for the other direction
            return calibrated(target, Cascade(), epsilon, direction="remove")()
        options = {"renyi": Renyi, "conditional": Conditional, "chain": Chain, "best": Best}
        return calibrated(target, options[column](), epsilon)()

    return compute


def key_of(row: Row, column: str, epsilon: float) -> str:
    return f"{row.name}, ε={epsilon:g}, {column}"


def cells() -> dict[str, Callable[[], dict[str, Any]]]:
    """Every cell by its name, the cheap columns first: an interrupted run leaves a table worth reading."""
    columns = (TRUTH, "lower", "cascade", "renyi", "chain", "best", "conditional")
    return {key_of(r, c, e): computation(r, c, e) for c in columns for r in ROWS for e in EPSILONS}


# --- saying ----------------------------------------------------------------------------------------------------------


def ratio_of(data: Mapping[str, Cell], row: Row, column: str, epsilon: float) -> float | None:
    cell, truth = data.get(key_of(row, column, epsilon)), data.get(key_of(row, TRUTH, epsilon))
    if cell is None or truth is None or cell["sigma"] is None:
        return None
    return float(cell["sigma"] / truth["sigma"])


def table(data: Mapping[str, Cell]) -> str:
    """One line per mechanism and ε; "…" for what is not computed yet, "none" for what cannot be certified."""

    def shown(row: Row, column: str, epsilon: float) -> str:
        if any(key_of(row, name, epsilon) not in data for name in (column, TRUTH)):
            return "…"
        return number(ratio_of(data, row, column, epsilon))

    lines = []
    for row in ROWS:
        for epsilon, goal in zip(EPSILONS, row.goals, strict=True):
            truth = data.get(key_of(row, TRUTH, epsilon))
            sampled_sigma = "…" if truth is None else f"{truth['sigma']:.4g} ± {100 * truth['error']:.1f} %"
            ratios = [shown(row, column, epsilon) for column in COLUMNS]
            lines.append([row.name, f"{epsilon:g}", sampled_sigma, *ratios, f"{goal:g}"])
    return markdown(["mechanism", "ε", "true σ (sampled)", *COLUMNS, "goal for best"], lines)


def verdict(data: Mapping[str, Cell]) -> str:
    """Which goals are met, and by how much the others are missed."""
    met, missed, below, unknown = 0, [], [], 0
    for row in ROWS:
        for epsilon, goal in zip(EPSILONS, row.goals, strict=True):
            ratio = ratio_of(data, row, "best", epsilon)
            if ratio is None:
                unknown += 1
                continue
            error = data[key_of(row, TRUTH, epsilon)]["error"]
            if ratio < 1 - 4 * error:
                below.append(f"{row.name} at ε = {epsilon:g} ({ratio:.3f})")
            # The truth is itself sampled: a goal counts as missed beyond two of its standard errors.
            if ratio <= goal * (1 + 2 * error):
                met += 1
            else:
                missed.append(f"{row.name} at ε = {epsilon:g} ({ratio:.3f} instead of {goal:g})")
    parts = [f"Of {met + len(missed)} goals for `best`, {met} are met."]
    if missed:
        parts.append(f"Missed: {'; '.join(missed)}.")
    if unknown:
        parts.append(f"{unknown} are not computed yet.")
    none_below = "No ratio of `best` is below 1 by more than four standard errors of the sampled truth."
    parts.append(
        f"Below the sampled truth by more than four standard errors: {'; '.join(below)}." if below else none_below
    )
    return " ".join(parts)


def families(data: Mapping[str, Cell]) -> str:
    """Whose bound `best` returned, over the table."""
    winners: dict[str, int] = {}
    for row in ROWS:
        for epsilon in EPSILONS:
            cell = data.get(key_of(row, "best", epsilon))
            if cell is not None and cell.get("winner"):
                winners[cell["winner"]] = winners.get(cell["winner"], 0) + 1
    counts = ", ".join(f"`{name}` ({count})" for name, count in sorted(winners.items(), key=lambda w: -w[1]))
    return f"Whose bound `best` returned, and how often: {counts}." if counts else "No cell of `best` is computed yet."


BLOCKS = {"verdict": verdict, "table": table, "winners": families}


# --- the command -----------------------------------------------------------------------------------------------------


def load() -> dict[str, dict[str, Any]]:
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def save(data: Mapping[str, Cell]) -> None:
    DATA.parent.mkdir(exist_ok=True)
    write_atomically(DATA, (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def fill(data: dict[str, dict[str, Any]], wanted: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Compute what is missing, saving after every cell."""
    from rich.console import Console
    from rich.progress import track

    missing = [key for key in wanted if key not in data]
    console = Console(stderr=True)
    for key in track(missing, description="tightness", console=console, disable=not console.is_terminal):
        print(key, file=sys.stderr, flush=True)
        try:
            data[key] = wanted[key]()
        except dpmf.MissingExtraError as error:
            print(f"  left out: {error}", file=sys.stderr)
            continue
        save(data)


def write_page(data: Mapping[str, Cell]) -> None:
    page = PAGE.read_text()
    for name, block in BLOCKS.items():
        page = with_block(page, name, block(data))
    write_atomically(PAGE, page.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description="The numbers and the table of docs/tightness.md.")
    parser.add_argument("--only", action="append", metavar="TEXT", help="cells whose name contains this")
    parser.add_argument("--fresh", action="store_true", help="compute again what is known already")
    options = parser.parse_args()
    known = cells()
    wanted = {k: compute for k, compute in known.items() if not options.only or any(t in k for t in options.only)}
    if not wanted:
        parser.error(f"--only must be part of a cell's name, such as {next(iter(known))!r}, got {options.only}")
    data = {key: cell for key, cell in load().items() if key in known}
    if options.fresh:
        data = {key: cell for key, cell in data.items() if key not in wanted}
    try:
        fill(data, wanted)
    except KeyboardInterrupt:
        print(f"stopped; {len(data)} of {len(known)} cells are kept", file=sys.stderr)
    write_page(data)
    print(f"δ = {power(DELTA)}. {verdict(data)}\n\n{table(data)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
