"""Time and memory budgets: a deadline that long work checks between its pieces, and array sizes checked in advance.

`time_limit` sets the deadline of everything called inside it. `check` raises `OutOfTime` once the deadline has passed,
and the caller that has a sound answer by then returns it. Nothing is interrupted in the middle of a piece.

`memory_limit` says how many bytes of arrays the code called inside it may hold at a time. Code that needs large arrays
claims them first: `claim` raises `OutOfMemory` where they do not fit, and `fitting` says how many pieces do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from math import inf
from typing import TypeVar

from dpmf import blas

MOST_BYTES = 4 * 2**30  # the largest single array where no budget is in force


def _clock() -> float:
    return time.monotonic()


class Exhausted(Exception):
    """A budget ended before there was an answer."""


class OutOfTime(Exhausted):
    """Raised when the time budget is exhausted."""


class OutOfMemory(Exhausted):
    """Raised when the memory budget is exhausted."""


class Deadline:
    """A moment in time, and whether any work was stopped by it."""

    def __init__(self, ends: float, outer: Deadline | None) -> None:
        self.ends, self._outer = ends, outer
        self.passed = False

    def check(self) -> None:
        if _clock() >= self.ends:
            self._pass()
            raise OutOfTime

    def _pass(self) -> None:
        self.passed = True
        if self._outer is not None and self._outer.ends <= self.ends:
            self._outer._pass()


_current: ContextVar[Deadline | None] = ContextVar("dpmf_deadline", default=None)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Deadline]:
    """Give what runs inside so many seconds, or what is left of an enclosing limit where that is less.

    All long work runs inside one, limited or not, and linear algebra has one thread there (`blas`).
    """
    outer = _current.get()
    ends = inf if seconds is None else _clock() + seconds
    deadline = Deadline(min(ends, inf if outer is None else outer.ends), outer)
    token = _current.set(deadline)
    try:
        with blas.one_thread() if outer is None else nullcontext():
            yield deadline
    finally:
        _current.reset(token)


@contextmanager
def unlimited() -> Iterator[None]:
    """Lift all limits, for closed forms that answer when a budget is exhausted."""
    token, memory_token = _current.set(None), _memory.set(None)
    try:
        yield
    finally:
        _current.reset(token)
        _memory.reset(memory_token)


def current() -> Deadline | None:
    """The deadline in force, for threads, which do not inherit it."""
    return _current.get()


def check() -> None:
    """Raise `OutOfTime` where the deadline in force has passed."""
    deadline = _current.get()
    if deadline is not None:
        deadline.check()


def seconds_left() -> float:
    """Until the deadline in force; infinite where there is none, never negative."""
    deadline = _current.get()
    return inf if deadline is None else max(0.0, deadline.ends - _clock())


class MemoryLimit:
    """A number of bytes, and whether any request for memory was refused."""

    def __init__(self, size: float, outer: MemoryLimit | None) -> None:
        self.size, self._outer = size, outer
        self.passed = False

    def refuse(self) -> None:
        self.passed = True
        if self._outer is not None and self._outer.size <= self.size:
            self._outer.refuse()


_memory: ContextVar[MemoryLimit | None] = ContextVar("dpmf_memory", default=None)


@contextmanager
def memory_limit(size: float | None) -> Iterator[MemoryLimit]:
    """Give what runs inside so many bytes of arrays at a time, or those of an enclosing limit where they are fewer."""
    outer = _memory.get()
    limit = MemoryLimit(min(inf if size is None else size, inf if outer is None else outer.size), outer)
    token = _memory.set(limit)
    try:
        yield limit
    finally:
        _memory.reset(token)


T = TypeVar("T")


def as_far_as_it_goes(items: Iterable[T]) -> list[T]:
    """The items that are made before a budget ends."""
    found: list[T] = []
    try:
        for item in items:
            found.append(item)
    except Exhausted:
        pass
    return found


def attempt(work: Callable[[], T], otherwise: T) -> T:
    """The result of some work; `otherwise` where the memory budget does not allow it."""
    try:
        return work()
    except OutOfMemory:
        return otherwise


def side_by_side(pieces: Sequence[Callable[[], T]]) -> list[T]:
    """The results of pieces of work that do not depend on each other, each on a thread, within the budgets in force.

    They run one after the other on a machine with one core, and where memory is limited, all of which each may take.
    """
    if len(pieces) < 2 or os.cpu_count() == 1 or fitting(1.0) < inf:
        return [piece() for piece in pieces]
    contexts = [copy_context() for _ in pieces]  # threads do not inherit the budgets
    with ThreadPoolExecutor(len(pieces)) as pool:
        return list(pool.map(lambda context, piece: context.run(piece), contexts, pieces))


def finished(work: Callable[[], None]) -> bool:
    """Do some work, and say whether it came to its end before the time budget did."""
    try:
        work()
    except OutOfTime:
        return False
    return True


def limited() -> bool:
    """Whether any budget is in force."""
    return seconds_left() < inf or fitting(1.0) < inf


def claim(size: float) -> None:
    """Raise `OutOfMemory` where the memory budget in force does not hold so many bytes at a time."""
    limit = _memory.get()
    if limit is not None and size > limit.size:
        limit.refuse()
        raise OutOfMemory


def make_do() -> None:
    """Note that more memory would have given a better answer."""
    limit = _memory.get()
    if limit is not None:
        limit.refuse()


def fitting(size: float) -> float:
    """How many pieces of so many bytes fit into the memory budget in force; infinitely many where there is none."""
    limit = _memory.get()
    return inf if limit is None else limit.size / size


def require(size: float, what: str, argument: str) -> None:
    """Refuse a request that would take more than the memory budget, or than `MOST_BYTES` where there is none."""
    if fitting(1.0) < inf:
        claim(size)
    elif size > MOST_BYTES:
        raise ValueError(
            f"{argument} must be smaller: {what} would take {size / 2**30:.3g} GiB, and at most "
            f"{MOST_BYTES / 2**30:g} GiB are taken"
        )
