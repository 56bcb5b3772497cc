"""Running the campaign: problems 0, 1, 2, ... until there are enough cases, one line of the journal each."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from soundness import provenance
from soundness.cases import Finding
from soundness.journal import Journal, Row, worked
from soundness.parts import check, part_of

FORMAT = 3
_SECONDS = 600.0  # for all questions about one problem
HARNESS = tuple(f"soundness/{name}.py" for name in (
    "batchings", "bridges", "campaign", "cases", "designs", "hostile_bridge", "parts", "plans", "printed", "problems",
    "texts", "truth",
))  # fmt: skip


def header(seed: int, light: bool = False, part: str | None = None) -> dict[str, Any]:
    """What all rows of a journal have in common."""
    code = {"package": provenance.present()["package"], "harness": provenance.harness(*HARNESS)}
    return {"part": "campaign", "format": FORMAT, "seed": seed, "light": light, "only": part, **code}


def to_row(seed: int, light: bool, part: str | None, index: int) -> Row:
    """The problem of this index, checked, as a line of the journal."""
    with _at_most(_SECONDS):
        problem, findings = check(seed, index, light, part)
    return {
        "index": index,
        "part": part or part_of(index),
        "family": problem.family,
        "size": problem.size,
        "findings": [_compact(f) for f in findings],
        "violations": [violation(problem.mechanism.name, problem.noise_multiplier, f) for f in findings if not f.sound],
    }


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """What takes longer is interrupted, and counts as a violation: an accountant that hangs gives no answer."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


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


def run(
    journal: Journal, seed: int, cases: int, jobs: int = 1, light: bool = False, part: str | None = None
) -> Iterator[tuple[int, Row]]:
    """Check problems in order until there are so many cases; yields how many there are, and the row they end with.

    With `part` all problems are drawn from that part.

    Which problems that takes does not depend on the number of processes.
    """
    done = 0
    for row in worked(journal, itertools.count(), partial(to_row, seed, light, part), jobs):
        done += len(row["findings"])
        yield min(done, cases), row
        if done >= cases:
            return
