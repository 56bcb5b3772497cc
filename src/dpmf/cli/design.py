"""The command that chooses a mechanism.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpmf.cli.options import (
    Batches,
    BatchSize,
    DatasetSize,
    Delta,
    Epochs,
    Epsilon,
    Json,
    listed,
    print_json,
    takes,
    working,
    workload_from,
)

if TYPE_CHECKING:
    from dpmf.workloads import Workload


@takes(workload_from)
def design(
    workload: "Workload | None",
    *,
    epochs: Epochs,
    epsilon: Epsilon,
    delta: Delta,
    batches_per_epoch: Batches = None,
    dataset_size: DatasetSize = None,
    batch_size: BatchSize = None,
    batching: Annotated[
        str | None,
        typer.Option(help="fixed, rethrown, reshuffled, cyclic, poisson, cyclic-poisson, by commas. [default: all]"),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidths to consider, by commas. [default: 1 to 64, and free coefficients]")
    ] = None,
    copies: Annotated[int | None, typer.Option(help="Copies of the model that the noise may keep.")] = None,
    time_budget: Annotated[float, typer.Option(help="Seconds after which the best answer so far is given.")] = 240.0,
    workers: Annotated[int, typer.Option(help="Processes to use.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Also draw the errors as a picture (.png, .pdf, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Choose the mechanism with the least error at (ε, δ): strategy, bandwidth and batching."""
    import dpmf
    from dpmf.designs import shown

    draw = None if plot is None else shown.design_plotter(plot)
    widths = None if bandwidth is None else [_integer(part) for part in listed(bandwidth) or ()]
    with working("designing"):
        found = dpmf.design(
            epochs=epochs, batches_per_epoch=batches_per_epoch, dataset_size=dataset_size, batch_size=batch_size,
            target_epsilon=epsilon, target_delta=delta, workload=workload, batchings=listed(batching),
            bandwidths=widths, copies=copies, time_budget=time_budget, workers=workers,
        )  # fmt: skip
    if as_json:
        print_json(found.to_dict())
    else:
        shown.print_design(found)
    if draw is not None:
        draw(found)
        if not as_json:
            print(f"wrote {plot}")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--bandwidth must be integers separated by commas, got {text!r}") from None
