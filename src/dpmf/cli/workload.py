"""Options of the workload on which errors are measured, for every command that shows them.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpmf.errors import ArgumentError

if TYPE_CHECKING:
    from dpmf.workloads import Workload

WorkloadName = Annotated[
    str | None, typer.Option(help="How noise adds up in the model: prefix, damped, momentum, schedule or matrix.")
]
Memory = Annotated[float | None, typer.Option(help="Iterations that the model remembers (damped, schedule).")]
Beta = Annotated[float | None, typer.Option("--momentum", help="Momentum (momentum, schedule).")]
WeightDecay = Annotated[float | None, typer.Option(help="Learning rate × weight decay (momentum).")]
Schedule = Annotated[
    str | None,
    typer.Option(help="constant, cosine, linear, or a file of learning rates (schedule)."),
]
WarmUp = Annotated[float | None, typer.Option(help="Part of the run over which the learning rate rises (schedule).")]
WorkloadFile = Annotated[Path | None, typer.Option(help="File with the lower-triangular matrix (.npy, .csv; matrix).")]


_OPTIONS = {"beta": "momentum", "file": "workload-file"}


def workload_from(
    workload: WorkloadName = None,
    memory: Memory = None,
    momentum: Beta = None,
    weight_decay: WeightDecay = None,
    schedule: Schedule = None,
    warm_up: WarmUp = None,
    workload_file: WorkloadFile = None,
) -> "Workload | None":
    """Build the workload that the options describe; None if none was named."""
    options = {
        "memory": memory, "beta": momentum, "weight_decay": weight_decay, "schedule": schedule, "warm_up": warm_up,
        "file": workload_file,
    }  # fmt: skip
    if workload is None:
        for name, value in options.items():
            if value is not None:
                raise ArgumentError("workload", f"must be given with --{_OPTIONS.get(name, name).replace('_', '-')}")
        return None
    from dpmf import workloads

    return workloads.build(workload, **options)  # type: ignore[arg-type]
