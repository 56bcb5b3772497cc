"""`dpmf verify`: a page that says what every accountant makes of a mechanism, and whether they agree.

(No ``from __future__ import annotations`` here: typer reads the annotations as objects.)
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpmf.cli.options import Delta, DirectionName, Epsilon, Json, mechanism_from, print_json, takes, working

if TYPE_CHECKING:
    from dpmf.mechanism import Mechanism


@takes(mechanism_from)
def verify(
    mechanism: "Mechanism",
    *,
    epsilon: Epsilon,
    delta: Delta,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise multiplier σ. [default: calibrated]")] = None,
    accountant: Annotated[
        str | None, typer.Option(help="Accountants, separated by commas. [default: all deterministic ones]")
    ] = None,
    samples: Annotated[int, typer.Option(help="Monte Carlo samples for each direction.")] = 200_000,
    seed: Annotated[int, typer.Option(help="Seed of the Monte Carlo samples.")] = 0,
    direction: DirectionName = "both",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .md, .txt or .json file.")] = None,
    as_json: Json = False,
) -> None:
    """Cross-check accountants, lower bound and Monte Carlo; a page to attach to a paper.

    The exit status is 1 where they contradict each other, or where the noise does not give (ε, δ).
    """
    import json

    from dpmf import report, verification
    from dpmf.files import write_atomically

    if output is not None:
        report.checked_output(output, (".md", ".txt", ".json"))
    names = None if accountant is None else [name.strip() for name in accountant.split(",")]
    with working("verifying"):
        found = verification.verify(
            mechanism,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            direction=direction,
            accountants=names,
            samples=samples,
            seed=seed,
        )
    if output is not None:
        text = found.to_markdown() if output.suffix.lower() != ".json" else json.dumps(found.to_dict(), indent=1) + "\n"
        write_atomically(output, text.encode())
    if as_json:
        print_json(found.to_dict())
    elif output is not None:
        print(f"wrote {output}")
    else:
        print(found.to_markdown(), end="")
    if not (found.consistent and found.certified):
        sys.stdout.flush()
        raise typer.Exit(1)
