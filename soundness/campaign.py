"""Running the campaign: one line of JSON per problem, appended whole, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from soundness.cases import Finding, check_problem

FORMAT = 1


class Journal:
    """An append-only file of JSON lines. A line cut off by a crash is dropped when the file is opened again."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: dict[int, dict[str, Any]] = {}
        whole = 0
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            lines = content[:whole].splitlines()
            if lines and json.loads(lines[0]) != header:
                raise ValueError(f"--journal must be of the same seed and format, {path.name} starts with {lines[0]!r}")
            self.rows = {row["index"]: row for row in map(json.loads, lines[1:])}
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, 0, os.SEEK_END)
        if not whole:
            self._append(header)

    def _append(self, row: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def add(self, row: dict[str, Any]) -> None:
        self._append(row)
        self.rows[row["index"]] = row

    def close(self) -> None:
        os.close(self._file)


def header(seed: int) -> dict[str, Any]:
    return {"format": FORMAT, "seed": seed}


def to_row(seed: int, index: int) -> dict[str, Any]:
    """The problem of this index, checked, as a line of the journal."""
    problem, findings = check_problem(seed, index)
    return {
        "index": index,
        "family": problem.family,
        "size": problem.size,
        "findings": [_compact(f) for f in findings],
        "violations": [violation(problem.mechanism.name, problem.noise_multiplier, f) for f in findings if not f.sound],
    }


def _compact(f: Finding) -> list[Any]:
    loose = f.looseness
    return [
        f.accountant,
        f.kind,
        f.direction,
        f"{f.truth.low:.3g}",
        f.truth.method,
        None if loose is None else f"{loose:.4g}",
    ]


def violation(mechanism: str, sigma: float, f: Finding) -> dict[str, Any]:
    return {
        "accountant": f.accountant, "kind": f.kind, "direction": f.direction, "mechanism": mechanism,
        "noise_multiplier": sigma, "at": repr(f.at), "claim": repr(f.claim),
        "truth": [f.truth.low, f.truth.high, f.truth.method], "problem": f.problem,
    }  # fmt: skip


def run(journal: Journal, seed: int, cases: int, jobs: int = 1) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Check problems 0, 1, 2, ... until there are so many cases; yields how many there are, and the row just added."""
    done, index = 0, 0
    while done < cases and index in journal.rows:
        done += len(journal.rows[index]["findings"])
        index += 1
    yield min(done, cases), None
    if jobs == 1:
        while done < cases:
            row = journal.rows.get(index) or to_row(seed, index)
            if index not in journal.rows:
                journal.add(row)
            done += len(row["findings"])
            index += 1
            yield min(done, cases), row
        return
    with ProcessPoolExecutor(jobs) as pool:
        waiting: set[Future[dict[str, Any]]] = set()
        try:
            while done < cases:
                while len(waiting) < 2 * jobs:
                    if index not in journal.rows:
                        waiting.add(pool.submit(to_row, seed, index))
                    else:
                        done += len(journal.rows[index]["findings"])
                    index += 1
                ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ready:
                    row = future.result()
                    journal.add(row)
                    done += len(row["findings"])
                    yield min(done, cases), row
        finally:
            pool.shutdown(cancel_futures=True)
