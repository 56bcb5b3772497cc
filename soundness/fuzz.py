"""Hostile input, 10⁴ pieces of it: command lines, files, caches, objects.

`python -m soundness fuzz` runs them in a directory of its own, drawn from (seed, target, index) alone, and puts the
counts into docs/soundness.md. A fault is an exception nobody foresaw, more or less than one line of message, an answer
to nonsense, an answer that is no number, a hang, or a file written where none was asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from soundness import summary
from soundness.hostile_cli import command_line
from soundness.hostile_files import cache_file, strategy_file
from soundness.hostile_objects import python_call
from soundness.hostile_state import checkpoint_file, database, event
from soundness.judge import Outcome

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m soundness fuzz", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full number of inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--no-docs", action="store_true")
    options = parser.parse_args(arguments)
    from rich.progress import track

    found: dict[str, Any] = {"seed": options.seed, "targets": {}}
    bad: list[str] = []
    for name, (_, count) in TARGETS.items():
        if options.target not in (None, name):
            continue
        total = max(1, round(count * options.share))
        sums = {"cases": 0, "answered": 0, "refused": 0, "faults": 0}
        blocks = range(0, total, 100)
        for first in track(blocks, name, disable=not sys.stderr.isatty()):
            counts, faults = run(name, min(100, total - first), options.seed, first)
            sums = {key: sums[key] + counts[key] for key in sums}
            bad += faults
        found["targets"][name] = sums
        print(name, sums, flush=True)
    print("\n".join(bad))
    if not options.no_docs and options.target is None:
        summary.store("fuzz", found)
    return 1 if bad else 0
