"""Hostile input, 10⁴ pieces of it: command lines, files, caches, objects.

`python -m soundness fuzz` runs them in a directory of its own, drawn from (seed, target, index) alone, on all cores. It
goes on where it was stopped, and puts the counts into docs/data/soundness.json and docs/soundness.md. A fault is an
exception nobody foresaw, more or less than one line of message, an answer to nonsense, an answer that is no number, a
hang, or a file written where none was asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from soundness import provenance, summary
from soundness.hostile_cli import command_line
from soundness.hostile_files import cache_file, strategy_file
from soundness.hostile_objects import python_call
from soundness.hostile_state import checkpoint_file, database, event
from soundness.journal import PLACE, Journal, Row, cores, worked
from soundness.judge import Outcome
from soundness.progress import shown

Target = Callable[[np.random.Generator, int, Path], Outcome]
TARGETS: dict[str, tuple[Target, int]] = {
    "command lines": (command_line, 4000),
    "matrix and coefficient files": (strategy_file, 3000),
    "strategy caches": (cache_file, 1000),
    "Python arguments": (python_call, 2000),
    "figure databases": (database, 300),
    "training checkpoints": (checkpoint_file, 300),
    "dp_accounting events": (event, 300),
}

HARNESS = (
    "soundness/fuzz.py", "soundness/judge.py", "soundness/hostile_cli.py", "soundness/hostile_files.py",
    "soundness/hostile_objects.py", "soundness/hostile_state.py", "evidence",
)  # fmt: skip
_BLOCK = 50


def run(name: str, count: int, seed: int, first: int = 0) -> tuple[dict[str, int], list[str]]:
    """Throw so many inputs at a target: the counts, and the faults with the index that gives each again."""
    target, _ = TARGETS[name]
    counts = {"cases": 0, "answered": 0, "refused": 0, "faults": 0}
    faults: list[str] = []
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for index in range(first, first + count):
                rng = np.random.default_rng([seed, zlib.crc32(name.encode()), index])
                outcome = target(rng, index, Path(place).resolve())
                counts["cases"] += 1
                counts["faults" if outcome.verdict == "fault" else outcome.verdict] += 1
                if outcome.verdict == "fault":
                    faults.append(f"{name} {index}: {outcome.text}")
        finally:
            os.chdir(here)
    return counts, faults


# --- the whole of it -------------------------------------------------------------------------------------------------


def header(seed: int) -> dict[str, Any]:
    code = {"package": provenance.present()["package"], "harness": provenance.harness(*HARNESS)}
    return {"part": "fuzz", "format": 1, "seed": seed, **code}


def blocks(share: float = 1.0, only: str | None = None) -> list[str]:
    """What is run at a time: "target, first index, how many"."""
    chosen = {name: max(1, round(count * share)) for name, (_, count) in TARGETS.items() if only in (None, name)}
    return [
        f"{name}, {first}, {min(_BLOCK, total - first)}"
        for name, total in chosen.items()
        for first in range(0, total, _BLOCK)
    ]


def to_row(seed: int, block: str) -> Row:
    """The block, run, as a line of the journal."""
    name, first, count = block.rsplit(", ", 2)
    counts, faults = run(name, int(count), seed, int(first))
    return {"index": block, "target": name, "counts": counts, "faults": faults}


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    targets: dict[str, dict[str, int]] = {}
    faults: list[str] = []
    for row in rows:
        sums = targets.setdefault(row["target"], dict.fromkeys(row["counts"], 0))
        for key, count in row["counts"].items():
            sums[key] += count
        faults += row["faults"]
    return {"targets": targets, "faults": faults}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m soundness fuzz", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full number of inputs; less is not recorded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(TARGETS), help="only this one; not recorded")
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--journal", type=Path, default=PLACE / "fuzz.jsonl")
    parser.add_argument("--restart", action="store_true", help="forget what the journal holds")
    parser.add_argument("--no-docs", action="store_true", help="print the counts, leave the docs alone")
    options = parser.parse_args(arguments)
    if not 0 < options.share <= 1 or options.jobs < 1:
        parser.error("--share must be above 0 and at most 1, --jobs at least 1")
    asked = blocks(options.share, options.target)
    try:
        journal = Journal(options.journal, header(options.seed), options.restart)
    except ValueError as error:
        parser.error(str(error))
    rows: list[Row] = []
    try:
        with shown("fuzz", sum(int(block.rsplit(", ", 1)[1]) for block in asked), "inputs", "faults") as tell:
            for row in worked(journal, asked, partial(to_row, options.seed), options.jobs):
                rows.append(row)
                tell(sum(one["counts"]["cases"] for one in rows), len(row["faults"]))
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on after {len(journal.rows)} blocks", file=sys.stderr)
        return 130
    finally:
        journal.close()
    found = {**summary.measured_with(HARNESS), "seed": options.seed, **summarise(rows)}
    print(summary.blocks({"fuzz": found})["fuzz"])
    print("\n".join(found["faults"]))
    if not options.no_docs and asked == blocks():
        summary.store("fuzz", found)
    return 1 if found["faults"] else 0
