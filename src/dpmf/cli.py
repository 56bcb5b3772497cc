"""The command line: the same words as the Python API, tables for people, ``--json`` for programs.

Only typer is imported at start, so that ``dpmf --help`` answers at once; each command imports what it needs. (No
``from __future__ import annotations`` here: typer reads the annotations as objects.)
"""

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dpmf._version import __version__

if TYPE_CHECKING:
    from dpmf.accountants import Accountant
    from dpmf.mechanism import Mechanism
    from dpmf.results import Estimate, PrivacyBound

app = typer.Typer(
    name="dpmf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Guaranteed noise multipliers for differentially private training with correlated noise, under "
    "balls-in-bins batching. Noise multipliers are for clipping norm 1 and the strategy as given.",
)

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
    "noise_multiplier": "--noise-multiplier",
    "samples": "--samples",
    "seed": "--seed",
    "strategy": "--strategy",
    "target_delta": "--delta",
    "target_epsilon": "--epsilon",
    "work_budget": "--work-budget",
}

StrategyName = Annotated[
    str, typer.Option(help="dpsgd, bsr, bisr, bandmf, bandinvmf, blt, coefficients or matrix (see: dpmf strategies).")
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
    str, typer.Option(help="best, renyi, conditional, lattice, monte-carlo, ... (see: dpmf accountants).")
]
MaxOrder = Annotated[int | None, typer.Option(help="Largest Rényi order tried.")]
WorkBudget = Annotated[float | None, typer.Option(help="Elementary updates per noise multiplier (Rényi).")]
Samples = Annotated[int | None, typer.Option(help="Samples (monte-carlo).")]
Seed = Annotated[int | None, typer.Option(help="Seed (monte-carlo).")]
FailureProbability = Annotated[
    float | None, typer.Option(help="Give a bound that fails with this probability, not an estimate (monte-carlo).")
]
DirectionName = Annotated[str, typer.Option(help="Neighbouring relation: both, remove or add.")]
Lower = Annotated[bool, typer.Option("--lower/--no-lower", help="Also what is certainly impossible.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Epsilon = Annotated[float, typer.Option(help="ε of the guarantee.")]
Delta = Annotated[float, typer.Option(help="δ of the guarantee.")]
NoiseMultiplier = Annotated[float, typer.Option(help="Noise multiplier σ.")]


# Enough for a table to three digits: `compare` samples anew for every noise multiplier it tries.
_QUICK_SAMPLES = 100_000


def _mechanism(
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
    return Mechanism(chosen, BallsInBins(epochs, batches_per_epoch, 0 if iterations is None else iterations or -1))


def _accountant(
    accountant: AccountantName = "best",
    max_order: MaxOrder = None,
    work_budget: WorkBudget = None,
    samples: Samples = None,
    seed: Seed = None,
    failure_probability: FailureProbability = None,
) -> "Accountant":
    from dpmf.accountants import resolve, with_options

    sampling = {"samples": samples, "seed": seed, "failure_probability": failure_probability}
    return with_options(resolve(accountant), {"max_order": max_order, "work_budget": work_budget, **sampling})


def _takes(*builders: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each builder, and hand it what they build as its first arguments.

    One list of mechanism options then serves every command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = [inspect.signature(builder).parameters for builder in builders]
        own = list(inspect.signature(command).parameters.values())[len(builders) :]

        @functools.wraps(command)
        def run(**options: Any) -> None:
            with _working():
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
def _working(what: str = "working") -> Iterator[None]:
    """A spinner on stderr while something takes time; silent when piped."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))


def _print_answer(mechanism: "Mechanism", found: "PrivacyBound | Estimate", asked: str, as_json: bool) -> None:
    from dpmf import report

    if as_json:
        return _print_json({"mechanism": mechanism.name, **found.to_dict()})
    return report.print_answer(mechanism, found, asked)


@app.command()
@_takes(_mechanism, _accountant)
def calibrate(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    epsilon: Epsilon,
    delta: Delta,
    direction: DirectionName = "both",
    lower: Lower = True,
    as_json: Json = False,
) -> None:
    """The smallest noise multiplier that is guaranteed to give (ε, δ)."""
    import dpmf

    with _working("calibrating"):
        found = dpmf.calibrate(
            mechanism,
            target_epsilon=epsilon,
            target_delta=delta,
            accountant=accountant,
            direction=direction,
            with_lower=lower,
        )
    _print_answer(mechanism, found, "noise_multiplier", as_json)


@app.command()
@_takes(_mechanism, _accountant)
def epsilon(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    noise_multiplier: NoiseMultiplier,
    delta: Delta,
    direction: DirectionName = "both",
    lower: Lower = True,
    as_json: Json = False,
) -> None:
    """The ε guaranteed by a noise multiplier at δ."""
    import dpmf

    with _working():
        found = dpmf.epsilon(
            mechanism,
            noise_multiplier=noise_multiplier,
            delta=delta,
            accountant=accountant,
            direction=direction,
            with_lower=lower,
        )
    _print_answer(mechanism, found, "epsilon", as_json)


@app.command()
@_takes(_mechanism, _accountant)
def delta(
    mechanism: "Mechanism",
    accountant: "Accountant",
    *,
    noise_multiplier: NoiseMultiplier,
    epsilon: Epsilon,
    direction: DirectionName = "both",
    lower: Lower = True,
    as_json: Json = False,
) -> None:
    """The δ guaranteed by a noise multiplier at ε."""
    import dpmf

    with _working():
        found = dpmf.delta(
            mechanism,
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            accountant=accountant,
            direction=direction,
            with_lower=lower,
        )
    _print_answer(mechanism, found, "delta", as_json)


@app.command()
@_takes(_mechanism, _accountant)
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
    as_json: Json = False,
) -> None:
    """δ(ε) over a range of ε."""
    import dpmf
    from dpmf import report

    writer = None if output is None else report.profile_writer(output)
    grid = None if epsilon is None else _numbers("--epsilon", epsilon)
    with _working():
        found = dpmf.profile(
            mechanism, noise_multiplier=noise_multiplier, epsilons=grid, accountant=accountant, direction=direction
        )
    if writer is not None:
        writer(mechanism, found)
        if not as_json:
            print(f"wrote {output}")
    if as_json:
        return _print_json({"mechanism": mechanism.name, **found.to_dict()})
    if writer is None:
        print(report.profile_csv(found), end="")
    return None


@app.command()
@_takes(_mechanism)
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
    from dpmf.accountants import suitable

    renyi = {"max_order": max_order, "work_budget": work_budget}
    sampling = {"samples": _QUICK_SAMPLES if samples is None else samples, "seed": seed}
    options: dict[str, dict[str, Any]] = {"renyi": renyi, "best": renyi, "monte-carlo": sampling}
    names = [a.name for a in suitable(mechanism)] if accountant is None else accountant.split(",")
    accountants = [_accountant(name, **options.get(name, {})) for name in map(str.strip, names)]
    grid = _numbers("--epsilon", epsilon)
    draw = None if plot is None else report.comparison_plotter(plot)
    comparison = report.compare(mechanism, accountants, grid, delta, direction, progress=sys.stderr.isatty())
    if draw is not None and comparison.complete:
        draw(comparison)
    if as_json:
        _print_json(comparison.to_dict())
    else:
        report.print_comparison(comparison)
        if draw is not None and comparison.complete:
            print(f"wrote {plot}")
    if not comparison.complete:
        raise KeyboardInterrupt


@app.command()
def accountants(as_json: Json = False) -> None:
    """The accountants known, and what each is."""
    from dpmf.accountants import ACCOUNTANTS

    if as_json:
        rows = [{"accountant": name, "description": cls.summary} for name, cls in ACCOUNTANTS.items()]
        return _print_json({"accountants": rows})
    from rich.console import Console
    from rich.table import Table

    table = Table("--accountant", "what it is")
    for name, cls in ACCOUNTANTS.items():
        table.add_row(name, cls.summary)
    Console().print(table)
    return None


@app.command()
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
        return _print_json({"strategies": rows})
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


def _version(value: bool) -> None:
    if value:
        print(f"dpmf {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {text!r}") from None


def _in_options(message: str) -> str:
    """A message of the Python API in the words of the command line."""
    first, _, rest = message.partition(" ")
    return (
        f"{_OPTION_OF[first]} {rest}"
        if first in _OPTION_OF and rest.startswith(("must", "is", "has", "applies"))
        else message
    )


def _fail(message: str, status: int = 2) -> NoReturn:
    print("dpmf: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Entry point: every foreseeable failure is one line on stderr and exit status 2."""
    try:
        status = app(standalone_mode=False)
    except (ValueError, ImportError, MemoryError) as error:
        _fail(_in_options(str(error)) or type(error).__name__)
    except BrokenPipeError:
        # The reader went away; keep the interpreter from complaining while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        # typer's own usage errors; its exception classes moved between versions, their shape did not.
        if hasattr(error, "format_message"):
            _fail(error.format_message())
        if type(error).__name__ == "Abort":
            _fail("interrupted", 130)
        raise
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
