"""Printed numbers: what a command prints for people is read back and compared with the bound behind it.

Every text is read by regular expressions here, not by the package. An upper bound or a noise multiplier to use must not
be printed below the number that the JSON of the same command has, a lower bound not above it, and both must be close to
it. What was given must be printed as it was given.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from soundness.judge import ANSWERED, REFUSED, Hang, Outcome, fault, watched

Rng = np.random.Generator
NUMBER = r"(?:[\d.]+(?:e[-+]\d+)?|inf)"
PAIR = re.compile(rf"\(({NUMBER}), ({NUMBER})\)-DP")
_CLOSE = 2e-4  # relative: five digits are the fewest that are printed


def printed(rng: Rng, index: int, directory: Path) -> Outcome:
    """Ask one question twice, for JSON and for people, and compare."""
    command, options, wanted = _question(rng)
    arguments = [command, *(word for pair in options.items() for word in pair)]
    shown = " ".join(arguments)[:200]
    try:
        with watched():
            plain, text = run([*arguments, "--json"]), run(arguments)
    except Hang:
        return fault(f"hang: {shown}")
    if plain is None or text is None:
        return REFUSED if plain is text else fault(f"one of the two was refused: {shown}")
    answer = json.loads(plain)
    for words, problem in wanted(answer, text, options):
        if problem:
            return fault(f"{words}: {problem}: {shown}")
    return ANSWERED


def run(arguments: list[str]) -> str | None:
    """The output of a command, or None where it refused."""
    from dpmf.cli import main

    out, before = io.StringIO(), sys.argv
    sys.argv = ["dpmf", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            main()
    except SystemExit as stop:
        if stop.code == 2:
            return None
    finally:
        sys.argv = before
    return out.getvalue()


def drawn(rng: Rng, low: float, high: float) -> str:
    """A positive number with one to seventeen digits, evenly on the logarithmic scale."""
    value = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    return f"{value:.{int(rng.integers(1, 18))}g}"


def _question(rng: Rng) -> tuple[str, dict[str, str], Any]:
    strategy = str(rng.choice(["dpsgd", "bsr", "bisr"]))
    options = {
        "--strategy": strategy,
        "--epochs": str(rng.integers(1, 4)),
        "--batches-per-epoch": str(rng.integers(1, 7)),
    }
    if strategy != "dpsgd":
        options["--bandwidth"] = str(rng.integers(1, 5))
    command = str(rng.choice(["calibrate", "epsilon", "delta", "compare", "verify"]))
    sigma, epsilon, delta = drawn(rng, 0.5, 100), drawn(rng, 0.05, 20), drawn(rng, 1e-12, 0.5)
    options |= {"--epsilon": epsilon, "--delta": delta, "--noise-multiplier": sigma}
    for unused in {"calibrate": ["--noise-multiplier"], "epsilon": ["--epsilon"], "delta": ["--delta"]}.get(
        command, []
    ):
        del options[unused]
    if command == "compare":
        del options["--noise-multiplier"]
        return command, options | {"--accountant": "gaussian,renyi", "--max-order": "12"}, _comparison
    if command == "verify":
        return command, options | {"--accountant": "gaussian,renyi", "--samples": "20"}, _page
    options |= [{}, {}, {"--batching": "reshuffled"}, {"--batching": "cyclic"}][int(rng.integers(4))]
    if rng.random() < 0.5:
        return command, options | {"--accountant": "gaussian"}, _answer
    return command, options | {"--accountant": "renyi", "--work-budget": "1e5"}, _answer


Found = Iterator[tuple[str, str | None]]


def wrong(text: str, value: float | None, up: bool) -> str | None:
    """What is wrong with the text of an upper bound (`up`) or of a lower bound; None if nothing is."""
    if value is None or text == "inf":
        return None if value is None and text == "inf" else f"{text} for {value!r}"
    read = float(text)
    if read < value if up else read > value:
        return f"{text} is on the wrong side of {value!r}"
    return f"{text} is far from {value!r}" if abs(read - value) > _CLOSE * abs(value) else None


def _given(text: str, option: str) -> str | None:
    return None if float(text) == float(option) else f"{text} was given as {option}"


def cells(text: str) -> dict[str, str]:
    """The rows of a table by their first column; a long cell goes on in lines whose first column is empty."""
    found: dict[str, str] = {}
    name = ""
    for first, cell in re.findall(r"│([^│]+)│([^│]+)│", text):
        name = first.strip() or name
        found[name] = f"{found[name]} {cell.strip()}" if name in found else cell.strip()
    return found


def _answer(answer: dict[str, Any], text: str, options: dict[str, str]) -> Found:
    rows = cells(text)
    asked = {"noise_multiplier": "noise multiplier", "epsilon": "ε", "delta": "δ"}
    field = next(name for name in asked if f"--{name.replace('_', '-')}" not in options)
    yield asked[field], wrong(rows[asked[field]], answer[field], up=True)
    if rows["lower bound"] != "none found":
        yield "lower bound", wrong(rows["lower bound"], answer["lower"], up=False)
    pair = PAIR.search(rows["guarantee"])
    if pair is None:
        yield "guarantee", f"no (ε, δ) in {rows['guarantee']!r}"
        return
    for name, shown in zip(("epsilon", "delta"), pair.groups(), strict=True):
        option = options.get(f"--{name}")
        yield name, wrong(shown, answer[name], up=True) if option is None else _given(shown, option)
    if "--noise-multiplier" in options:
        yield "noise multiplier", _given(rows["noise multiplier"], options["--noise-multiplier"])
    for way, how in answer["details"].items():
        shown = next(cell for name, cell in rows.items() if name.endswith(f", {way}"))
        yield way, wrong(shown.split()[0], how["value"], up=True)


def _comparison(answer: dict[str, Any], text: str, options: dict[str, str]) -> Found:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    columns = {"gaussian": rows[0][1], "renyi": rows[0][2]}
    yield "ε", _given(rows[0][0], options["--epsilon"])
    for cell in answer["cells"]:
        shown = columns[cell["accountant"]]
        if cell["noise_multiplier"] is None:
            yield cell["accountant"], None if shown == "none" else f"{shown} for none"
        else:
            yield cell["accountant"], wrong(shown, cell["noise_multiplier"], up=True)


def _page(answer: dict[str, Any], text: str, options: dict[str, str]) -> Found:
    given = re.search(rf"noise multiplier \| ({NUMBER})", text)
    yield "noise multiplier", "missing" if given is None else _given(given[1], options["--noise-multiplier"])
    for way, part in re.findall(r"## δ\([^)]*\), (\w+)\n(.*?)(?=\n## |\Z)", text, flags=re.DOTALL):
        for bound in answer["bounds"]:
            if bound["direction"] == way:
                shown = re.search(rf"\| {bound['accountant']} \(upper bound\) \| ({NUMBER}) ", part)
                yield f"{bound['accountant']}, {way}", wrong(shown[1] if shown else "nan", bound["delta"], up=True)
        shown = re.search(rf"\| lower bound \| ({NUMBER}) ", part)
        yield f"lower bound, {way}", wrong(shown[1] if shown else "nan", answer["lower"][way], up=False)
