"""The progress bar of all parts: how much is done, how much of it is bad, how long it will take. Silent when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def shown(title: str, total: int, unit: str, bad: str) -> Iterator[Callable[[int, int], None]]:
    """Gives `tell(done, bad)`: what is done in all, and how many bad ones there were since the last time."""
    count = f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}, {{task.fields[bad]}} {bad}"
    bar = Progress(
        TextColumn(title), BarColumn(), TextColumn(count),
        TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty(),
    )  # fmt: skip
    seen = 0
    with bar:
        task = bar.add_task("", total=total, bad=0)

        def tell(done: int, more: int) -> None:
            nonlocal seen
            seen += more
            bar.update(task, completed=done, bad=seen)

        yield tell


__all__ = ["shown"]
