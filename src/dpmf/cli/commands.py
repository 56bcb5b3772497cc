"""The commands that answer questions about one mechanism, and those that list strategies and accountants.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

import sys
from collections.abc import Callable, Iterable
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
    Names,
    NoiseMultiplier,
    Samples,
    Seed,
    WorkBudget,
    accountant_from,
    limits_from,
    listed,
    mechanism_from,
    numbers,
    print_json,
    takes,
    working,
)

if TYPE_CHECKING:
    from dpmf.accountants.protocol import Accountant
    from dpmf.mechanism import Mechanism

# `compare` draws samples for every noise multiplier it tries, and this many suffice for three digits.
_QUICK_SAMPLES = 100_000


def _target(epsilon: Epsilon, delta: Delta) -> dict[str, float]:
    return {"target_epsilon": epsilon, "target_delta": delta}


def _at_delta(noise_multiplier: NoiseMultiplier, delta: Delta) -> dict[str, float]:
    return {"noise_multiplier": noise_multiplier, "delta": delta}


def _at_epsilon(noise_multiplier: NoiseMultiplier, epsilon: Epsilon) -> dict[str, float]:
    return {"noise_multiplier": noise_multiplier, "epsilon": epsilon}


def _asking(function: str, asked: str, given: Callable[..., dict[str, float]], help_text: str) -> Callable[..., None]:
    """Make the command that asks one function of the Python API and prints its answer.

    Args:
      function: the name of the function and of the command.
      asked: the field of the result that is asked for.
      given: the builder of the arguments that are given.
      help_text: the help of the command.
    """

    def command(
        mechanism: "Mechanism",
        accountant: "Accountant",
        question: dict[str, float],
        limits: dict[str, Any],
        *,
        lower: Lower = True,
        as_json: Json = False,
    ) -> None:
        import dpmf
        from dpmf import report

        with working(f"bounding the {asked.replace('_', ' ')} by {accountant.name}"):
            found = getattr(dpmf, function)(mechanism, accountant=accountant, with_lower=lower, **question, **limits)
        if as_json:
            print_json({"mechanism": mechanism.name, **found.to_dict()})
        else:
            report.print_answer(mechanism, found, asked)

    command.__name__, command.__doc__ = function, help_text
    return takes(mechanism_from, accountant_from, given, limits_from)(command)


calibrate = _asking(
    "calibrate", "noise_multiplier", _target, "Find the smallest noise multiplier that is guaranteed to give (ε, δ)."
)
epsilon = _asking("epsilon", "epsilon", _at_delta, "Find the ε that a noise multiplier guarantees at δ.")
delta = _asking("delta", "delta", _at_epsilon, "Find the δ that a noise multiplier guarantees at ε.")


@takes(mechanism_from, accountant_from, limits_from)
def profile(
    mechanism: "Mechanism",
    accountant: "Accountant",
    limits: dict[str, Any],
    *,
    noise_multiplier: NoiseMultiplier,
    epsilon: Annotated[str | None, typer.Option(help="Values of ε, separated by commas. [default: 21 values]")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .csv, .json or .png file to write. [default: print]")
    ] = None,
    lower: Annotated[bool, typer.Option("--lower", help="Also give certified lower bounds.")] = False,
    as_json: Json = False,
) -> None:
    """Bound δ(ε) over a range of ε."""
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
            with_lower=lower,
            **limits,
        )
    if writer is not None:
        writer(mechanism, found)
    if as_json:
        print_json({"mechanism": mechanism.name, **found.to_dict()})
    else:
        print(report.profile_csv(found) if writer is None else f"wrote {output}\n", end="")


@takes(mechanism_from)
def compare(
    mechanism: "Mechanism",
    *,
    delta: Delta,
    epsilon: Annotated[str, typer.Option(help="Values of ε, separated by commas.")] = "0.25,0.5,1,2,4,8",
    names: Names = None,
    max_order: MaxOrder = None,
    work_budget: WorkBudget = None,
    samples: Samples = None,
    seed: Seed = None,
    direction: DirectionName = "both",
    plot: Annotated[Path | None, typer.Option(help="Also draw the table as a picture (.png, .pdf, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Compare the noise multipliers that accountants ask for at several ε."""
    from dpmf import report
    from dpmf.accountants.registry import suitable

    renyi = {"max_order": max_order, "work_budget": work_budget}
    sampling = {"samples": _QUICK_SAMPLES if samples is None else samples, "seed": seed}
    # Wrong values are refused even if no accountant that uses them is asked.
    accountant_from("renyi", max_order, work_budget)
    accountant_from("monte-carlo", **sampling)
    options: dict[str, dict[str, Any]] = {"renyi": renyi, "best": renyi, "monte-carlo": sampling}
    by_default = [*(a.name for a in suitable(mechanism, "bound", "estimate", "baseline")), "best"]
    accountants = [accountant_from(name, **options.get(name, {})) for name in listed(names) or by_default]
    grid = numbers("--epsilon", epsilon)
    draw = None if plot is None else report.comparison_plotter(plot)
    comparison = report.compare(mechanism, accountants, grid, delta, direction, progress=sys.stderr.isatty())
    if as_json:
        print_json(comparison.to_dict())
    else:
        report.print_comparison(comparison)
    if not comparison.complete:
        raise KeyboardInterrupt
    if draw is not None:
        draw(comparison)
        if not as_json:
            print(f"wrote {plot}")


def _print_list(name: str, head: tuple[str, ...], rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    """Print a list as JSON, or as a table with one column for each entry of `head`."""
    if as_json:
        return print_json({name: list(rows)})
    from rich.console import Console
    from rich.table import Table

    table = Table(*head)
    for row in rows:
        cells = [" ".join(cell) if isinstance(cell, list) else cell for cell in row.values()]
        table.add_row(*(cell.replace("[", "\\[") for cell in cells))
    Console().print(table)
    return None


def accountants(as_json: Json = False) -> None:
    """List the accountants."""
    from dpmf.accountants.registry import ACCOUNTANTS

    rows = [{"accountant": name, "description": cls.summary} for name, cls in ACCOUNTANTS.items()]
    _print_list("accountants", ("--accountant", "what it is"), rows, as_json)


def strategies(as_json: Json = False) -> None:
    """List the strategies and the options that each takes."""
    from dpmf.strategies import NAMES

    rows = []
    for name, entry in NAMES.items():
        row: dict[str, Any] = {"strategy": name, "description": entry.description}
        if as_json:
            optional = [f"--{o}" for o in entry.optional]
            row |= {"options": [f"--{o}" for o in entry.options], "optional": optional}
        else:
            row["options"] = [f"[--{o}]" if o in entry.optional else f"--{o}" for o in entry.options]
        rows.append(row)
    _print_list("strategies", ("--strategy", "what C is", "options"), rows, as_json)
