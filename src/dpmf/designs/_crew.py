"""Whoever does the steps of a search: this process, or several others."""

from __future__ import annotations

import multiprocessing
import queue
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Crew(ABC):
    """Does tasks, as many at a time as there are processes."""

    size = 1
    busy = 0

    @property
    def free(self) -> bool:
        """Whether another task can be started."""
        return self.busy < self.size

    @abstractmethod
    def start(self, function: Callable[[Any], Any], task: Any) -> None:
        """Begin a task."""

    @abstractmethod
    def next(self) -> tuple[Any, Any]:
        """Wait for one of the tasks that were begun, and return it with its result."""


class _Alone(Crew):
    """This process. A task is done when its result is asked for."""

    def start(self, function: Callable[[Any], Any], task: Any) -> None:
        self._work = function, task
        self.busy = 1

    def next(self) -> tuple[Any, Any]:
        function, task = self._work
        self.busy = 0
        return task, function(task)


class _Processes(Crew):
    """Other processes."""

    def __init__(self, pool: Any, size: int) -> None:
        self._pool, self.size = pool, size
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()

    def start(self, function: Callable[[Any], Any], task: Any) -> None:
        self.busy += 1
        self._pool.apply_async(
            function, (task,), callback=lambda found: self._results.put((task, found)),
            error_callback=lambda error: self._results.put((task, error)),
        )  # fmt: skip

    def next(self) -> tuple[Any, Any]:
        task, found = self._results.get()
        self.busy -= 1
        if isinstance(found, BaseException):
            raise found
        return task, found


@contextmanager
def crew(workers: int) -> Iterator[Crew]:
    """A crew of so many processes. An interrupt ends this one, and leaving the block ends the others."""
    if workers == 1:
        yield _Alone()
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        yield _Processes(pool, workers)
