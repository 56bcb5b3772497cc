"""The commands that answer questions about one mechanism, and those that list strategies and accountants.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmf.cli.options import (
    Delta,
    Epsilon,
    Json,
    Lower,
    NoiseMultiplier,
    accountant_from,
    limits_from,
    mechanism_from,
    numbers,
    print_json,
    takes,
    working,
    workload_from,
)

if TYPE_CHECKING:
    from dpmf.accountants.protocol import Accountant
    from dpmf.mechanism import Mechanism
    from dpmf.workloads import Workload


def _target(epsilon: Epsilon, delta: Delta) -> dict[str, float]:
    return {"target_epsilon": epsilon, "target_delta": delta}


def _at_delta(noise_multiplier: NoiseMultiplier, delta: Delta) -> dict[str, float]:
    return {"noise_multiplier": noise_multiplier, "delta": delta}


def _at_epsilon(noise_multiplier: NoiseMultiplier, epsilon: Epsilon) -> dict[str, float]:
    return {"noise_multiplier": noise_multiplier, "epsilon": epsilon}


def _calibrate(
    mechanism: "Mechanism",
    accountant: "Accountant",
    question: dict[str, float],
    limits: dict[str, Any],
    workload: "Workload | None",
    *,
    lower: Lower = True,
    as_json: Json = False,
) -> None:
    """Find the smallest noise multiplier that is guaranteed to give (ε, δ), and with a workload the error it causes."""
    import dpmf
    from dpmf import report
    from dpmf.designs.baseline import error_beside

    with working(f"bounding the noise multiplier by {accountant.name}"):
        found = dpmf.calibrate(
            mechanism,
            target_epsilon=question["target_epsilon"],
            target_delta=question["target_delta"],
            accountant=accountant,
            with_lower=lower,
            **limits,
        )
    beside = None
    if workload is not None:
        with working("comparing with independent noise"):
            beside = error_beside(mechanism, found.noise_multiplier, workload, **question)
    if as_json:
        print_json({"mechanism": mechanism.name, **found.to_dict(), **(beside.to_dict() if beside else {})})
        return
    rows = []
    if beside is not None:
        rows.append((f"error, {beside.workload}", f"{beside.error.root_mean_square:.4g} (root mean square)"))
        rows.append(("largest, last", f"{beside.error.largest:.4g}, {beside.error.last:.4g}"))
        rows.append(("relative to DP-SGD", f"{beside.relative:.3f} ({beside.baseline.batching.name})"))
    report.print_answer(mechanism, found, "noise_multiplier", rows)


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


calibrate = takes(mechanism_from, accountant_from, _target, limits_from, workload_from)(_calibrate)
calibrate.__name__ = "calibrate"
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
