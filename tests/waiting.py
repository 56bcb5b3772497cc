"""Waiting for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that is sure to come; the limit is for hangs only."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
