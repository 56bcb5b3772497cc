"""What the commands share: their options, the builders behind them, error messages, output.

(No ``from __future__ import annotations`` here: typer reads the annotations as objects.)
"""

import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from dpmf.accountants.protocol import Accountant
    from dpmf.mechanism import Mechanism

# How the arguments of the Python API are called here, for error messages.
_OPTION_OF = {
    "accountant": "--accountant",
    "accountants": "--accountant",
    "bandwidth": "--bandwidth",
    "batches_per_epoch": "--batches-per-epoch",
    "buffers": "--buffers",
    "coefficients": "--file",
    "delta": "--delta",
    "direction": "--direction",
    "epochs": "--epochs",
    "failure_probability": "--failure-probability",
    "epsilon": "--epsilon",
    "epsilons": "--epsilon",
    "file": "--file",
    "iterations": "--iterations",
    "matrix": "--file: matrix",
    "max_order": "--max-order",
    "memory_budget": "--memory-budget",
    "noise_multiplier": "--noise-multiplier",
    "port": "--port",
    "samples": "--samples",
    "seed": "--seed",
    "strategy": "--strategy",
    "target_delta": "--delta",
    "target_epsilon": "--epsilon",
    "time_budget": "--time-budget",
    "tolerance": "--tolerance",
    "time_limit": "--time-limit",
    "work_budget": "--work-budget",
    "workers": "--workers",
}


def _strategies(start: str) -> list[str]:
    from dpmf.strategies import NAMES

    return [name for name in NAMES if name.startswith(start)]


def _accountants(start: str) -> list[str]:
    from dpmf.accountants.registry import ACCOUNTANTS

    return [name for name in ACCOUNTANTS if name.startswith(start)]


def _directions(start: str) -> list[str]:
    return [name for name in ("both", "remove", "add") if name.startswith(start)]


StrategyName = Annotated[
    str,
    typer.Option(
        help="dpsgd, bsr, bisr, bandmf, bandinvmf, blt, coefficients or matrix (see: dpmf strategies).",
        autocompletion=_strategies,
    ),
]
Epochs = Annotated[int, typer.Option(help="Epochs k.")]
Batches = Annotated[int, typer.Option(help="Batches per epoch b, the number of bins.")]
Iterations = Annotated[int | None, typer.Option(help="Iterations N, where the last epoch is cut off. [default: k·b]")]
Bandwidth = Annotated[
    int | None, typer.Option(help="Bandwidth p of C (bsr, bandmf) or of its inverse (bisr, bandinvmf).")
]
Buffers = Annotated[int | None, typer.Option(help="Buffers of a BLT. [default: chosen by the optimiser]")]
File = Annotated[Path | None, typer.Option(help="Coefficients (.npy, .csv, .txt) or matrix (.npy, .csv).")]
Normalized = Annotated[bool, typer.Option("--normalized", help="Divide C by its largest column norm first.")]
AccountantName = Annotated[
    str,
    typer.Option(
        help="best, auto, renyi, conditional, chain, monte-carlo, ... (see: dpmf accountants).",
        autocompletion=_accountants,
    ),
]
MaxOrder = Annotated[int | None, typer.Option(help="Largest Rényi order tried.")]
WorkBudget = Annotated[float | None, typer.Option(help="Elementary updates per noise multiplier (Rényi).")]
Tolerance = Annotated[float | None, typer.Option(help="Gap to the lower bound that is close enough (auto).")]
TimeBudget = Annotated[
    float | None, typer.Option(help="Seconds after which the best bound reached so far is the answer.")
]
MemoryBudget = Annotated[
    float | None, typer.Option(help="Bytes of arrays at a time: the best bound within them is the answer, e.g. 2e9.")
]
Samples = Annotated[int | None, typer.Option(help="Samples (monte-carlo).")]
Seed = Annotated[int | None, typer.Option(help="Seed (monte-carlo).")]
FailureProbability = Annotated[
    float | None, typer.Option(help="Give a bound that fails with this probability, not an estimate (monte-carlo).")
]
DirectionName = Annotated[
    str, typer.Option(help="Neighbouring relation: both, remove or add.", autocompletion=_directions)
]
Lower = Annotated[bool, typer.Option("--lower/--no-lower", help="Also what is certainly impossible.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Epsilon = Annotated[float, typer.Option(help="ε of the guarantee.")]
Delta = Annotated[float, typer.Option(help="δ of the guarantee.")]
NoiseMultiplier = Annotated[float, typer.Option(help="Noise multiplier σ.")]


def mechanism_from(
    strategy: StrategyName,
    epochs: Epochs,
    batches_per_epoch: Batches,
    iterations: Iterations = None,
    bandwidth: Bandwidth = None,
    buffers: Buffers = None,
    file: File = None,
    normalized: Normalized = False,
) -> "Mechanism":
    from dpmf import BallsInBins, Mechanism, strategies, validation

    validation.choice("strategy", strategy, tuple(strategies.NAMES))
    takes = strategies.NAMES[strategy].options
    given = {"bandwidth": bandwidth, "buffers": buffers, "file": file}
    for option, value in given.items():
        if value is not None and option not in takes:
            raise ValueError(f"--{option} does not apply to --strategy {strategy}")
        if value is None and option in takes and option not in strategies.NAMES[strategy].optional:
            raise ValueError(f"--strategy {strategy} needs --{option}")
    arguments = [value for option, value in given.items() if option in takes]
    chosen = getattr(strategies, strategy)(*arguments)
    if normalized:
        chosen = chosen.normalized()
    return Mechanism(chosen, BallsInBins(epochs, batches_per_epoch, iterations))


def accountant_from(
    accountant: AccountantName = "best",
    max_order: MaxOrder = None,
    work_budget: WorkBudget = None,
    tolerance: Tolerance = None,
    samples: Samples = None,
    seed: Seed = None,
    failure_probability: FailureProbability = None,
) -> "Accountant":
    from dpmf.accountants.registry import resolve, with_options

    sampling = {"samples": samples, "seed": seed, "failure_probability": failure_probability}
    options = {"max_order": max_order, "work_budget": work_budget, "tolerance": tolerance, **sampling}
    return with_options(resolve(accountant), options)


def takes(*builders: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each builder, and hand it what they build as its first arguments.

    One list of mechanism options then serves every command.
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
    """A spinner on stderr while something takes time; silent when piped."""
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
    print(json.dumps(value, allow_nan=False))


def numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {text!r}") from None


def in_options(message: str) -> str:
    """A message of the Python API in the words of the command line."""
    first, _, rest = message.partition(" ")
    return (
        f"{_OPTION_OF[first]} {rest}"
        if first in _OPTION_OF and rest.startswith(("must", "is", "has", "applies"))
        else message
    )


def fail(message: str, status: int = 2) -> NoReturn:
    print("dpmf: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)
