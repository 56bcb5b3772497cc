"""Compiled inner loops (numba): no policy, no validation. Each has a slow twin in the tests.

Machine code is cached on disk by numba, so only the first call ever on a machine compiles; that wait is announced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_announced = False


def announce_compilation(kernel: Callable[..., Any]) -> None:
    """Say, once per process and on stderr, that `kernel` is about to be compiled, if its disk cache is empty."""
    global _announced
    if _announced:
        return
    cache_path = getattr(getattr(kernel, "stats", None), "cache_path", None)
    if cache_path is None:
        return
    function = kernel.py_func  # type: ignore[attr-defined]
    module = function.__module__.rsplit(".", 1)[-1]
    if any(Path(cache_path).glob(f"{module}.{function.__qualname__}-*.nbi")):
        return
    _announced = True
    print("dpmf: compiling kernels, once per machine (some seconds)...", file=sys.stderr, flush=True)
