"""`dpmf verify`: a page that shows the bounds of several accountants for one mechanism and whether they agree.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpmf.cli.options import (
    Delta,
    DirectionName,
    Epsilon,
    Json,
    Names,
    listed,
    mechanism_from,
    print_json,
    takes,
    working,
    workload_from,
)

if TYPE_CHECKING:
    from dpmf.mechanism import Mechanism
    from dpmf.workloads import Workload


@takes(mechanism_from, workload_from)
def verify(
    mechanism: "Mechanism",
    workload: "Workload | None",
    *,
    epsilon: Epsilon,
    delta: Delta,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise multiplier σ. [default: calibrated]")] = None,
    names: Names = None,
    samples: Annotated[int, typer.Option(help="Number of Monte Carlo samples for each direction.")] = 200_000,
    seed: Annotated[int, typer.Option(help="Seed of the Monte Carlo samples.")] = 0,
    direction: DirectionName = "both",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .md, .txt or .json file to write.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="A .json file for a certificate, which dpmf_check checks without dpmf.")
    ] = None,
    tradeoff: Annotated[
        bool, typer.Option("--tradeoff/--no-tradeoff", help="Also report what any attack can achieve.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Cross-check accountants, lower bound and Monte Carlo, and print a page to attach to a paper.

    The exit status is 1 if they contradict each other or if the noise does not give (ε, δ).
    """
    from dpmf import certificates, report, verification
    from dpmf.files import write_atomically
    from dpmf.formatting import given, upper

    if output is not None:
        report.checked_output(output, (".md", ".txt", ".json"))
    if certificate is not None:
        report.checked_output(certificate, (".json",), "certificate")
    with working("verifying"):
        found = verification.verify(
            mechanism,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            direction=direction,
            accountants=listed(names),
            samples=samples,
            seed=seed,
            tradeoff=tradeoff,
        )
    content_of, page = found.to_dict(), found.to_markdown()
    if workload is not None:
        from dpmf.designs.baseline import error_beside

        with working("comparing with independent noise"):
            beside = error_beside(mechanism, found.noise_multiplier, workload, epsilon, delta)
        content_of |= beside.to_dict()
        page += (
            f"\nError of the noise in the model ({beside.workload}, root mean square, clipping norm 1): "
            f"{beside.error.root_mean_square:.4g}, {beside.relative:.3f} times that of {beside.baseline.name}.\n"
        )
    if certificate is not None:
        with working("writing the certificate"):
            content = certificates.certificate(
                mechanism,
                noise_multiplier=found.noise_multiplier,
                epsilon=epsilon,
                direction=direction,
                accountants=listed(names),
            )
        write_atomically(certificate, json.dumps(content).encode())
        for claim in content["claims"]:
            what = f"{claim['direction']}, δ({given(epsilon)}) ≤ {upper(claim['delta'])} by {claim['kind']}"
            print(f"certificate in {certificate}: {what}", file=sys.stderr)
    if output is not None:
        text = page if output.suffix.lower() != ".json" else json.dumps(content_of, indent=1) + "\n"
        write_atomically(output, text.encode())
    if as_json:
        print_json(content_of)
    else:
        print(page if output is None else f"wrote {output}\n", end="")
    if not (found.consistent and found.certified):
        sys.stdout.flush()
        raise typer.Exit(1)
