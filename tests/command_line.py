"""The command line inside the test process: a process of its own costs seconds of imports, and is tested by itself."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

import dpmf.cli


def run(*arguments: str, cwd: Path | None = None, main: Callable[[], object] = dpmf.cli.main) -> CompletedProcess[str]:
    """`dpmf arguments...`, or another command by its `main`: its exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    status: object = None
    with (
        mock.patch.object(sys, "argv", ["dpmf", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or Path.cwd()),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code
    return CompletedProcess(arguments, status if isinstance(status, int) else 0, out.getvalue(), err.getvalue())
