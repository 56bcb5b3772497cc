"""What the commands share: their options, the builders behind them, error messages and output.

(This module has no ``from __future__ import annotations``, because typer reads the annotations as objects.)
"""

import contextlib
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dpmf.errors import ArgumentError

if TYPE_CHECKING:
    from dpmf.accountants.protocol import Accountant
    from dpmf.mechanism import Mechanism
    from dpmf.workloads import Workload

# Arguments of the Python API whose option has another name.
_OPTION_OF = {
    "accountants": "--accountant",
    "coefficients": "--file",
    "batchings": "--batching",
    "beta": "--momentum",
    "epsilons": "--epsilon",
    "matrix": "--file: matrix",
    "mean": "--tuning-runs",
    "shape": "--tuning-shape",
    "target_delta": "--delta",
    "target_epsilon": "--epsilon",
    "target_mu": "--mu",
}
# Arguments that complaints about others mention, and that are no part of what somebody typed.
_OTHERS = re.compile(r"\b(?:batches_per_epoch|dataset_size|batch_size|false_positive_rate)\b")


def _completed(names: Callable[[], Any]) -> Callable[[str], list[str]]:
    """Return the shell completion of an option whose values are the names that `names` returns."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _strategies() -> Any:
    from dpmf.strategies import NAMES

    return NAMES


def _accountants() -> Any:
    from dpmf.accountants.registry import ACCOUNTANTS

    return ACCOUNTANTS


StrategyName = Annotated[
    str,
    typer.Option(
        help="dpsgd, bsr, bisr, lcgd, power, bandmf, bandinvmf, blt, coefficients or matrix (see: dpmf strategies).",
        autocompletion=_completed(_strategies),
    ),
]
Epochs = Annotated[int, typer.Option(help="Number of epochs k.")]
Batches = Annotated[int | None, typer.Option(help="Batches per epoch b, which is the number of bins.")]
Iterations = Annotated[
    int | None, typer.Option(help="Number of iterations N, if the last epoch is cut short. [default: k·b]")
]
BatchingName = Annotated[
    str,
    typer.Option(
        help="How records get into batches: fixed bins, reshuffled, cyclic, poisson or cyclic-poisson.",
        autocompletion=_completed(lambda: ("fixed", "reshuffled", "cyclic", "poisson", "cyclic-poisson")),
    ),
]
RethrowEvery = Annotated[int | None, typer.Option(help="Epochs for which a record keeps its bin. [default: 1]")]
Stride = Annotated[
    int | None, typer.Option(help="Distance between the bins of one record, or the period of cyclic-poisson.")
]
Gap = Annotated[
    int | None,
    typer.Option(help="Iterations without records between two throws. [default: the least that separates them]"),
]
DatasetSize = Annotated[int | None, typer.Option(help="Number of records, in place of --batches-per-epoch.")]
BatchSize = Annotated[int | None, typer.Option(help="Records per batch on average, with --dataset-size.")]
Bandwidth = Annotated[
    int | None, typer.Option(help="Bandwidth p of C (bsr, bandmf) or of its inverse (bisr, bandinvmf).")
]
Buffers = Annotated[int | None, typer.Option(help="Number of buffers of a BLT. [default: chosen by the optimiser]")]
Decay = Annotated[float | None, typer.Option(help="λ of lcgd and power, between 0 and 1.")]
Exponent = Annotated[float | None, typer.Option(help="a of the power series (1 − λx)^(−a), between 0 and 1.")]
File = Annotated[Path | None, typer.Option(help="File of coefficients (.npy, .csv, .txt) or a matrix (.npy, .csv).")]
Normalized = Annotated[bool, typer.Option("--normalized", help="Divide C by its largest column norm first.")]
AccountantName = Annotated[
    str,
    typer.Option(
        help="best, auto, renyi, conditional, chain, monte-carlo, ... (see: dpmf accountants).",
        autocompletion=_completed(_accountants),
    ),
]
MaxOrder = Annotated[int | None, typer.Option(help="Largest Rényi order to try.")]
WorkBudget = Annotated[float | None, typer.Option(help="Elementary updates allowed per noise multiplier (Rényi).")]
Tolerance = Annotated[float | None, typer.Option(help="Gap to the lower bound that is small enough (auto).")]
TimeBudget = Annotated[float | None, typer.Option(help="Seconds after which the best bound found so far is returned.")]
MemoryBudget = Annotated[
    float | None,
    typer.Option(help="Bytes that arrays may take at a time, e.g. 2e9; the best bound within them counts."),
]
Samples = Annotated[int | None, typer.Option(help="Number of samples (monte-carlo).")]
Seed = Annotated[int | None, typer.Option(help="Seed of the samples (monte-carlo).")]
FailureProbability = Annotated[
    float | None,
    typer.Option(help="Give a bound that fails with this probability instead of an estimate (monte-carlo)."),
]
DirectionName = Annotated[
    str,
    typer.Option(
        help="Neighbouring relation: both, remove or add.",
        autocompletion=_completed(lambda: ("both", "remove", "add")),
    ),
]
Names = Annotated[
    str | None,
    typer.Option("--accountant", help="Accountants, separated by commas. [default: those that suit the mechanism]"),
]
Lower = Annotated[bool, typer.Option("--lower/--no-lower", help="Also print a certified lower bound.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Epsilon = Annotated[float, typer.Option(help="ε of the guarantee.")]
Delta = Annotated[float, typer.Option(help="δ of the guarantee.")]
NoiseMultiplier = Annotated[float, typer.Option(help="Noise multiplier σ.")]


def mechanism_from(
    strategy: StrategyName,
    epochs: Epochs,
    batches_per_epoch: Batches = None,
    iterations: Iterations = None,
    bandwidth: Bandwidth = None,
    buffers: Buffers = None,
    file: File = None,
    normalized: Normalized = False,
    batching: BatchingName = "fixed",
    rethrow_every: RethrowEvery = None,
    stride: Stride = None,
    gap: Gap = None,
    dataset_size: DatasetSize = None,
    batch_size: BatchSize = None,
    decay: Decay = None,
    exponent: Exponent = None,
) -> "Mechanism":
    """Build the mechanism that the options describe."""
    from dpmf import Mechanism, strategies, validation
    from dpmf.batching import batches_from_size, build
    from dpmf.errors import ArgumentError

    if batches_per_epoch is None:
        if dataset_size is None or batch_size is None:
            raise ArgumentError("batches_per_epoch", "must be given, or dataset_size and batch_size in its place")
        batches_per_epoch = batches_from_size(dataset_size, batch_size)
        average = dataset_size / batches_per_epoch
        print(
            f"dpmf: {batches_per_epoch} batches per epoch, of {average:.6g} records on average; the number of records "
            "is used, so that the guarantee is for leaving the place of one empty",
            file=sys.stderr,
        )
    elif dataset_size is not None or batch_size is not None:
        raise ArgumentError("batches_per_epoch", "must be left out where dataset_size and batch_size are given")
    chosen = strategies.build(
        strategy, bandwidth=bandwidth, buffers=buffers, file=file, decay=decay, exponent=exponent, normalized=normalized
    )
    b = validation.integer("batches_per_epoch", batches_per_epoch, at_least=1)
    width = chosen.bandwidth(b) if batching.startswith("cyclic") else 1
    batches = build(
        batching, epochs, batches_per_epoch, bandwidth=width, iterations=iterations,
        rethrow_every=rethrow_every, stride=stride, gap=gap,
    )  # fmt: skip
    return Mechanism(chosen, batches)


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
_WORKLOAD_OPTIONS = {"beta": "momentum", "file": "workload-file"}


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
                raise ArgumentError(
                    "workload", f"must be given with --{_WORKLOAD_OPTIONS.get(name, name).replace('_', '-')}"
                )
        return None
    from dpmf import workloads

    return workloads.build(workload, **options)  # type: ignore[arg-type]


def accountant_from(
    accountant: AccountantName = "best",
    max_order: MaxOrder = None,
    work_budget: WorkBudget = None,
    tolerance: Tolerance = None,
    samples: Samples = None,
    seed: Seed = None,
    failure_probability: FailureProbability = None,
) -> "Accountant":
    """Build the accountant that the options describe, and refuse options that it does not have."""
    from dpmf.accountants.registry import resolve, with_options

    sampling = {"samples": samples, "seed": seed, "failure_probability": failure_probability}
    options = {"max_order": max_order, "work_budget": work_budget, "tolerance": tolerance, **sampling}
    return with_options(resolve(accountant), options)


def limits_from(
    direction: DirectionName = "both", time_budget: TimeBudget = None, memory_budget: MemoryBudget = None
) -> dict[str, Any]:
    """Collect the keyword arguments that every function of the Python API takes."""
    return {"direction": direction, "time_budget": time_budget, "memory_budget": memory_budget}


def takes(*builders: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each builder, and pass what they build as its first arguments.

    One list of options then serves every command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = [inspect.signature(builder).parameters for builder in builders]
        own = list(inspect.signature(command).parameters.values())[len(builders) :]

        @functools.wraps(command)
        def run(**options: Any) -> None:
            with working():
                built = [
                    builder(**{n: options.pop(n) for n in names})
                    for builder, names in zip(builders, shared, strict=True)
                ]
            command(*built, **options)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for names in shared for p in names.values()] + own
        parameters.sort(key=lambda p: p.default is not p.empty)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


@contextlib.contextmanager
def working(what: str = "working") -> Iterator[None]:
    """Show a spinner on stderr during work that takes time; show nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    from dpmf import progress

    with (
        Console(stderr=True).status(f"{what} ...") as status,
        progress.listening(lambda stage: status.update(f"{what}: {stage} ...")),
    ):
        yield


def print_json(value: dict[str, Any]) -> None:
    """Print one line of JSON."""
    print(json.dumps(value, allow_nan=False))


def listed(text: str | None) -> list[str] | None:
    """Split a list that was typed with commas, if one was typed."""
    return None if text is None else [part.strip() for part in text.split(",")]


def numbers(option: str, text: str) -> list[float]:
    """Read a list of numbers that was typed with commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {text!r}") from None


def in_options(error: BaseException) -> str:
    """Return the message of an error of the Python API, with the argument replaced by its option."""
    if not isinstance(error, ArgumentError):
        return str(error)
    option = _OPTION_OF.get(error.argument, "--" + error.argument.replace("_", "-"))
    return f"{option} {_OTHERS.sub(lambda name: '--' + name[0].replace('_', '-'), error.complaint)}"


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line on stderr and end the process."""
    print("dpmf: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)
