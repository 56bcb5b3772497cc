"""What the tests of the evidence share: a cheap cell, and the command line in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import command_line

import dpmf
import evidence.cli
from evidence.spec import Cell, MechanismSpec

SMALL = MechanismSpec("bsr", 2, 10, 2)


def cell(sigma: float = 1.0, order: int = 2) -> Cell:
    """A cheap one."""
    return Cell.of("divergence", mechanism=SMALL, order=order, sigma=sigma, bandwidth=1)


def in_process(*words: str, cwd: Path) -> CompletedProcess[str]:
    """``python -m evidence words...`` inside this process, in a directory that is not the checkout."""
    return command_line.run(*words, cwd=cwd, main=evidence.cli.main)


def command(*words: str, cwd: Path) -> CompletedProcess[str]:
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "evidence", *words],
        capture_output=True, text=True, timeout=120, env=environment(), cwd=cwd, check=False,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """Processes of their own find the packages where this one does."""
    places = [str(Path(dpmf.__file__).parent.parent), str(Path(evidence.cli.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
