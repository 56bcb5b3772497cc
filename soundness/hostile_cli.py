"""Hostile command lines, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from soundness.judge import ANSWERED, REFUSED, Hang, Outcome, fault, watched, written

Rng = np.random.Generator

_NUMBERS = [
    "nan", "inf", "-inf", "-1", "0", "-0.0", "1e400", "1e-400", "5e-324", "1e308", "", " ", "0x10", "1,5", "one", "1e",
    "--", "-", "99999999999999999999999", "1e-12", "0.5", "1", "2", "3.7", "1e6", "1e-3", "½", "\u0661", "'; rm", "%s",
    "${HOME}", "1" * 5000, "\ud800", "NaN", "true", "None", "1+1", "-1e-9", "1.0000000000000000000001",
]  # fmt: skip
_WORDS = [
    "", " ", "best", "renyi", "RENYI", "gaussian", "both", "add", "sideways", "dpsgd", "bsr", "matrix", "../x", "nan",
    "/etc/passwd", "\x00", "a" * 3000, "🎲", "--help", "-", "gaussian,", ",", "renyi,renyi", "\n", "[/red]", "x ",
]  # fmt: skip


def _float(text: str, good: Callable[[float], bool]) -> bool:
    try:
        return good(float(text))
    except ValueError:
        return False


def _int(text: str, good: Callable[[int], bool]) -> bool:
    try:
        return good(int(text) if "." not in text else int(text.removesuffix(".0")))  # 2.0 is 2 to typer
    except ValueError:
        return False


# What each option must be, told again from the documentation; None where it depends on others.
RULES: dict[str, Callable[[str], bool]] = {
    "--epsilon": lambda t: _float(t, lambda x: math.isfinite(x) and x >= 0),
    "--delta": lambda t: _float(t, lambda x: 0 < x < 1),
    "--noise-multiplier": lambda t: _float(t, lambda x: math.isfinite(x) and x > 0),
    "--epochs": lambda t: _int(t, lambda x: x >= 1),
    "--batches-per-epoch": lambda t: _int(t, lambda x: x >= 1),
    "--bandwidth": lambda t: _int(t, lambda x: x >= 1),
    "--iterations": lambda t: _int(t, lambda x: x >= 1),
    "--max-order": lambda t: _int(t, lambda x: x >= 2),
    "--work-budget": lambda t: _float(t, lambda x: math.isfinite(x) and x > 0),
    "--time-budget": lambda t: _float(t, lambda x: math.isfinite(x) and x > 0),
    "--memory-budget": lambda t: _float(t, lambda x: math.isfinite(x) and x > 0),
    "--samples": lambda t: _int(t, lambda x: x >= 1),
    "--seed": lambda t: _int(t, lambda x: x >= 0),
    "--failure-probability": lambda t: _float(t, lambda x: 0 < x < 1),
    "--strategy": lambda t: t in ("dpsgd", "bsr", "bisr"),
    "--direction": lambda t: t in ("both", "remove", "add"),
    "--batching": lambda t: t in ("fixed", "reshuffled", "cyclic", "poisson", "cyclic-poisson"),
    "--rethrow-every": lambda t: _int(t, lambda x: x >= 1),
    "--stride": lambda t: _int(t, lambda x: x >= 1),
    "--gap": lambda t: _int(t, lambda x: x >= 0),
}
BATCHINGS: tuple[dict[str, str], ...] = (
    {}, {}, {"--batching": "fixed", "--stride": "3"}, {"--batching": "reshuffled"},
    {"--batching": "reshuffled", "--rethrow-every": "1", "--gap": "2"}, {"--batching": "reshuffled", "--stride": "3"},
    {"--batching": "cyclic"}, {"--batching": "cyclic-poisson"},
)  # fmt: skip
_MECHANISM = {"--strategy": "bsr", "--bandwidth": "2", "--epochs": "2", "--batches-per-epoch": "3"}
_COMMANDS: dict[str, dict[str, str]] = {
    "calibrate": {"--epsilon": "1", "--delta": "1e-3"},
    "epsilon": {"--noise-multiplier": "2", "--delta": "1e-3"},
    "delta": {"--noise-multiplier": "2", "--epsilon": "1"},
    "profile": {"--noise-multiplier": "2", "--epsilon": "1"},
    "compare": {"--epsilon": "1", "--delta": "1e-3"},
    "verify": {"--epsilon": "1", "--delta": "1e-3", "--noise-multiplier": "3"},
}


def command_line(rng: Rng, index: int, directory: Path) -> Outcome:
    """A good command line with up to three options spoilt."""
    command = str(rng.choice(list(_COMMANDS)))
    batching = BATCHINGS[int(rng.integers(len(BATCHINGS)))]
    options: dict[str, str] = {**_MECHANISM, **batching, **_COMMANDS[command]}
    if command in ("compare", "verify"):
        options["--accountant"] = "gaussian,renyi"
        options["--samples"] = "50"
    else:
        options["--accountant"] = str(rng.choice(["gaussian", "renyi", "monte-carlo"]))
        if "poisson" in batching.get("--batching", ""):
            options["--accountant"] = "best"
    if command not in ("compare", "verify") and rng.random() < 0.3:
        options |= {"--time-budget": "100", "--memory-budget": "1e9"}
    if options["--accountant"] == "renyi":
        options |= {"--work-budget": "1e5", "--max-order": "12"}
    if options["--accountant"] == "monte-carlo":
        options |= {"--samples": "50", "--seed": "1"}
    spoilt: list[str] = []
    for _ in range(int(rng.integers(1, 4))):
        option = str(rng.choice(list(options)))
        pool = _WORDS if option in ("--strategy", "--accountant", "--direction", "--batching") else _NUMBERS
        options[option] = pool[int(rng.integers(len(pool)))]
        spoilt.append(option)
    arguments = [command, *(word for pair in options.items() for word in pair), "--json"]
    if rng.random() < 0.2:
        arguments.insert(
            int(rng.integers(len(arguments))), str(rng.choice(["--nonsense", "--", "-x", "surplus", "--json=1"]))
        )
        nonsense = True
    else:
        nonsense = False
    target = None
    if command in ("profile", "verify") and rng.random() < 0.3:
        target = directory / str(rng.choice(["out.json", "out.exe", "no/such/out.json", "out"]))
        arguments += ["--output", str(target)]
    # Several ε are a list of numbers for these commands.
    lists = command in ("profile", "compare")
    invalid = [
        option
        for option in spoilt
        if option in RULES
        and not (
            all(RULES[option](part) for part in options[option].split(","))
            if lists and option == "--epsilon"
            else RULES[option](options[option])
        )
    ]
    return run_command(arguments, bool(invalid), nonsense, directory, target)


def run_command(arguments: list[str], invalid: bool, nonsense: bool, directory: Path, target: Path | None) -> Outcome:
    """Run dpmf here and judge what it printed, its status and what it wrote."""
    from dpmf.cli import main

    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["dpmf", *arguments]
    shown = " ".join(arguments)[:200]
    status: object = 0
    try:
        with watched(), written() as paths, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        status = stop.code if stop.code is not None else 0
    except Hang:
        return fault(f"hang: {shown}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return fault(f"{type(error).__name__}: {error}: {shown}")
    finally:
        sys.argv = before
    messages = [line for line in err.getvalue().splitlines() if "compiling kernels" not in line]
    extra = [
        p for p in paths if target is None or (Path(p) != target and not Path(p).name.startswith(f".{target.name}."))
    ]
    if extra:
        return fault(f"wrote {extra}: {shown}")
    if status == 2:
        if len(messages) != 1 or not messages[0].startswith("dpmf: "):
            return fault(f"message {messages}: {shown}")
        return REFUSED
    if status not in (0, 1) or (status == 1 and arguments[0] != "verify"):
        return fault(f"status {status}: {shown}")
    if "--help" in arguments or "-h" in arguments:
        return ANSWERED
    if invalid or (nonsense and "--" not in arguments):
        return fault(f"accepted: {shown}")
    wrong = _wrong_json(out.getvalue())
    return fault(f"{wrong}: {shown}") if wrong else ANSWERED


def _wrong_json(text: str) -> str | None:
    if text.startswith("wrote "):
        return None
    try:
        answer = json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
    except ValueError as error:
        return f"output is no JSON ({error})"
    deltas = answer.get("deltas") or [answer.get("delta")]
    for value in deltas:
        if value is not None and not 0 <= value <= 1:
            return f"delta = {value}"
    epsilon = answer.get("epsilon")
    return f"epsilon = {epsilon}" if isinstance(epsilon, float) and epsilon < 0 else None
