"""The commands that answer questions about one mechanism, and the lists of what there is.

(No ``from __future__ import annotations`` here: typer reads the annotations as objects.)
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmf.cli.options import (
    Delta,
    DirectionName,
    Epsilon,
    Json,
    Lower,
    MaxOrder,
    MemoryBudget,
    NoiseMultiplier,
    Samples,
    Seed,
    TimeBudget,
    WorkBudget,
    accountant_from,
    mechanism_from,
    numbers,
    print_json,
    takes,
    working,
)

if TYPE_CHECKING:
    from dpmf.accountants.protocol import Accountant
    from dpmf.mechanism import Mechanism
    from dpmf.results import Estimate, PrivacyBound

# Enough for a table to three digits: `compare` samples anew for every noise multiplier it tries.
_QUICK_SAMPLES = 100_000


def _print_answer(mechanism: "Mechanism", found: "PrivacyBound | Estimate", asked: str, as_json: bool) -> None:
    from dpmf import report

    if as_json:
        return print_json({"mechanism": mechanism.name, **found.to_dict()})
    return report.print_answer(mechanism, found, asked)


@takes(mechanism_from, accountant_from)
def calibrate(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    epsilon: Epsilon,
    delta: Delta,
    direction: DirectionName = "both",
    lower: Lower = True,
    time_budget: TimeBudget = None,
    memory_budget: MemoryBudget = None,
    as_json: Json = False,
) -> None:
    """The smallest noise multiplier that is guaranteed to give (ε, δ)."""
    import dpmf

    with working(f"calibrating by {accountant.name}"):
        found = dpmf.calibrate(
            mechanism,
            target_epsilon=epsilon,
            target_delta=delta,
            accountant=accountant,
            direction=direction,
            with_lower=lower,
            time_budget=time_budget,
            memory_budget=memory_budget,
        )
    _print_answer(mechanism, found, "noise_multiplier", as_json)


@takes(mechanism_from, accountant_from)
def epsilon(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    noise_multiplier: NoiseMultiplier,
    delta: Delta,
    direction: DirectionName = "both",
    lower: Lower = True,
    time_budget: TimeBudget = None,
    memory_budget: MemoryBudget = None,
    as_json: Json = False,
) -> None:
    """The ε guaranteed by a noise multiplier at δ."""
    import dpmf

    with working(f"bounding ε by {accountant.name}"):
        found = dpmf.epsilon(
            mechanism,
            noise_multiplier=noise_multiplier,
            delta=delta,
            accountant=accountant,
            direction=direction,
            with_lower=lower,
            time_budget=time_budget,
            memory_budget=memory_budget,
        )
    _print_answer(mechanism, found, "epsilon", as_json)


@takes(mechanism_from, accountant_from)
def delta(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    noise_multiplier: NoiseMultiplier,
    epsilon: Epsilon,
    direction: DirectionName = "both",
    lower: Lower = True,
    time_budget: TimeBudget = None,
    memory_budget: MemoryBudget = None,
    as_json: Json = False,
) -> None:
    """The δ guaranteed by a noise multiplier at ε."""
    import dpmf

    with working(f"bounding δ by {accountant.name}"):
        found = dpmf.delta(
            mechanism,
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            accountant=accountant,
            direction=direction,
            with_lower=lower,
            time_budget=time_budget,
            memory_budget=memory_budget,
        )
    _print_answer(mechanism, found, "delta", as_json)


@takes(mechanism_from, accountant_from)
def profile(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    noise_multiplier: NoiseMultiplier,
    epsilon: Annotated[str | None, typer.Option(help="Values of ε, separated by commas. [default: 21 of them]")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .csv, .json or .png file. [default: print]")
    ] = None,
    direction: DirectionName = "both",
    lower: Annotated[
        bool, typer.Option("--lower", help="Also certified lower bounds, in a column of their own.")
    ] = False,
    time_budget: TimeBudget = None,
    memory_budget: MemoryBudget = None,
    as_json: Json = False,
) -> None:
    """δ(ε) over a range of ε."""
    import dpmf
    from dpmf import report

    writer = None if output is None else report.profile_writer(output)
    grid = None if epsilon is None else numbers("--epsilon", epsilon)
    with working(f"bounding δ over a range of ε by {accountant.name}"):
        found = dpmf.profile(
            mechanism,
            noise_multiplier=noise_multiplier,
            epsilons=grid,
            accountant=accountant,
            direction=direction,
            with_lower=lower,
            time_budget=time_budget,
            memory_budget=memory_budget,
        )
    if writer is not None:
        writer(mechanism, found)
        if not as_json:
            print(f"wrote {output}")
    if as_json:
        return print_json({"mechanism": mechanism.name, **found.to_dict()})
    if writer is None:
        print(report.profile_csv(found), end="")
    return None


@takes(mechanism_from)
def compare(
    mechanism: "Mechanism",
    *,
    delta: Delta,
    epsilon: Annotated[str, typer.Option(help="Values of ε, separated by commas.")] = "0.25,0.5,1,2,4,8",
    accountant: Annotated[
        str | None, typer.Option(help="Accountants, separated by commas. [default: all that apply]")
    ] = None,
    max_order: MaxOrder = None,
    work_budget: WorkBudget = None,
    samples: Samples = None,
    seed: Seed = None,
    direction: DirectionName = "both",
    plot: Annotated[Path | None, typer.Option(help="Draw the table as a picture (.png, .pdf, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """The noise multiplier each accountant asks for, at several ε."""
    from dpmf import report
    from dpmf.accountants.registry import suitable

    renyi = {"max_order": max_order, "work_budget": work_budget}
    sampling = {"samples": _QUICK_SAMPLES if samples is None else samples, "seed": seed}
    # Wrong values are refused whether or not an accountant that uses them is asked.
    accountant_from("renyi", max_order, work_budget)
    accountant_from("monte-carlo", **sampling)
    options: dict[str, dict[str, Any]] = {"renyi": renyi, "best": renyi, "monte-carlo": sampling}
    names = (
        [*(a.name for a in suitable(mechanism, "bound", "estimate", "baseline")), "best"]
        if accountant is None
        else accountant.split(",")
    )
    accountants = [accountant_from(name, **options.get(name, {})) for name in map(str.strip, names)]
    grid = numbers("--epsilon", epsilon)
    draw = None if plot is None else report.comparison_plotter(plot)
    comparison = report.compare(mechanism, accountants, grid, delta, direction, progress=sys.stderr.isatty())
    if draw is not None and comparison.complete:
        draw(comparison)
    if as_json:
        print_json(comparison.to_dict())
    else:
        report.print_comparison(comparison)
        if draw is not None and comparison.complete:
            print(f"wrote {plot}")
    if not comparison.complete:
        raise KeyboardInterrupt


def accountants(as_json: Json = False) -> None:
    """The accountants known, and what each is."""
    from dpmf.accountants.registry import ACCOUNTANTS

    if as_json:
        rows = [{"accountant": name, "description": cls.summary} for name, cls in ACCOUNTANTS.items()]
        return print_json({"accountants": rows})
    from rich.console import Console
    from rich.table import Table

    table = Table("--accountant", "what it is")
    for name, cls in ACCOUNTANTS.items():
        table.add_row(name, cls.summary)
    Console().print(table)
    return None


def strategies(as_json: Json = False) -> None:
    """The strategies known, and the options each takes."""
    from dpmf import strategies as known

    rows = [
        {
            "strategy": name,
            "description": entry.description,
            "options": [f"--{o}" for o in entry.options],
            "optional": [f"--{o}" for o in entry.optional],
        }
        for name, entry in known.NAMES.items()
    ]
    if as_json:
        return print_json({"strategies": rows})
    from rich.console import Console
    from rich.table import Table

    table = Table("--strategy", "what C is", "options")
    for row in rows:
        optional = row["optional"]
        table.add_row(
            str(row["strategy"]),
            str(row["description"]),
            " ".join(f"[{o}]" if o in optional else o for o in row["options"]).replace("[", "\\["),
        )
    Console().print(table)
    return None
