"""The command that compares accountants on one mechanism, or several mechanisms by their errors.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpmf.cli.options import (
    Delta,
    DirectionName,
    Json,
    MaxOrder,
    Names,
    Samples,
    Seed,
    WorkBudget,
    accountant_from,
    listed,
    mechanism_from,
    numbers,
    print_json,
    takes,
    working,
    workload_from,
)

if TYPE_CHECKING:
    from dpmf.mechanism import Mechanism
    from dpmf.workloads import Workload

# `compare` draws samples for every noise multiplier it tries, and this many suffice for three digits.
_QUICK_SAMPLES = 100_000


def mechanisms_from(**options: Any) -> "list[Mechanism]":
    """Build a mechanism for each strategy and batching that was named; options go to those that take them."""
    from dpmf import validation
    from dpmf.batching import NAMES as BATCHINGS
    from dpmf.batching import TAKERS
    from dpmf.strategies import NAMES

    names, batchings = listed(options.pop("strategy")) or [], listed(options.pop("batching")) or []
    if len(names) * len(batchings) == 1:
        return [mechanism_from(strategy=names[0], batching=batchings[0], **options)]
    found = []
    for name in names:
        takes_these = NAMES[validation.choice("strategy", name, NAMES)].options
        for batching in batchings:
            validation.choice("batching", batching, BATCHINGS)
            own = {
                option: None
                for option, value in options.items()
                if value is not None
                and (
                    (option in ("bandwidth", "buffers", "file", "decay", "exponent") and option not in takes_these)
                    or batching not in TAKERS.get(option, BATCHINGS)
                )
            }
            try:
                found.append(mechanism_from(strategy=name, batching=batching, **{**options, **own}))
            except ValueError as problem:
                # Poisson samples do not go with every strategy; a combination that does not exist is left out.
                if getattr(problem, "argument", "") != "batching":
                    raise
                print(f"dpmf: left out {name}, {batching}: {problem}", file=sys.stderr)
    return found


mechanisms_from.__signature__ = inspect.signature(mechanism_from)  # type: ignore[attr-defined]


@takes(mechanisms_from, workload_from)
def compare(
    mechanisms: "list[Mechanism]",
    workload: "Workload | None",
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
    """Compare the noise multipliers that accountants ask for at several ε.

    With several strategies or batchings, separated by commas, or with a workload: compare mechanisms by their errors.
    """
    from dpmf import report
    from dpmf.accountants.registry import suitable

    renyi = {"max_order": max_order, "work_budget": work_budget}
    sampling = {"samples": _QUICK_SAMPLES if samples is None else samples, "seed": seed}
    # Wrong values are refused even if no accountant that uses them is asked.
    accountant_from("renyi", max_order, work_budget)
    accountant_from("monte-carlo", **sampling)
    options: dict[str, dict[str, Any]] = {"renyi": renyi, "best": renyi, "monte-carlo": sampling}
    grid = numbers("--epsilon", epsilon)
    if len(mechanisms) != 1 or workload is not None:
        chosen = accountant_from((listed(names) or ["best"])[0], **options.get((listed(names) or ["best"])[0], {}))
        return _compare_errors(mechanisms, workload, chosen, grid, delta, direction, plot, as_json)
    (mechanism,) = mechanisms
    by_default = [*(a.name for a in suitable(mechanism, "bound", "estimate", "baseline")), "best"]
    accountants = [accountant_from(name, **options.get(name, {})) for name in listed(names) or by_default]
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
    return None


def _compare_errors(
    mechanisms: "list[Mechanism]",
    workload: "Workload | None",
    accountant: Any,
    epsilons: list[float],
    delta: float,
    direction: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Calibrate every mechanism at every ε by one accountant, and print errors beside noise multipliers."""
    from dpmf import workloads
    from dpmf.designs import compared

    draw = None if plot is None else compared.errors_plotter(plot)
    with working("calibrating"):
        found = compared.compare_errors(
            mechanisms, epsilons, delta, workload or workloads.prefix(), accountant, direction
        )
    if as_json:
        print_json(found.to_dict())
    else:
        compared.print_errors(found)
    if draw is not None:
        draw(found)
        if not as_json:
            print(f"wrote {plot}")
