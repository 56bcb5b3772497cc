"""Time and memory budgets: a deadline that long work looks at between its pieces, and sizes checked in advance.

`time_limit` sets the deadline of everything called inside it. `check` raises `OutOfTime` once it has passed; whoever
has a sound answer by then catches that and returns it. Nothing is interrupted in the middle of a piece.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

MOST_BYTES = 4 * 2**30  # of one array


def _clock() -> float:
    return time.monotonic()


class OutOfTime(Exception):
    """The time budget ended before there was an answer."""


class Deadline:
    """A moment, and whether anybody was stopped by it."""

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
    """Give what runs inside so many seconds, or what is left of an enclosing limit where that is less."""
    outer = _current.get()
    ends = inf if seconds is None else _clock() + seconds
    deadline = Deadline(min(ends, inf if outer is None else outer.ends), outer)
    token = _current.set(deadline)
    try:
        yield deadline
    finally:
        _current.reset(token)


@contextmanager
def unlimited() -> Iterator[None]:
    """For closed forms that answer when the time is over."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


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


def require(size: float, what: str, argument: str) -> None:
    """Refuse a request that would take more than `MOST_BYTES`, before anything is allocated."""
    if size > MOST_BYTES:
        raise ValueError(
            f"{argument} must be smaller: {what} would take {size / 2**30:.3g} GiB, and at most "
            f"{MOST_BYTES / 2**30:g} GiB are taken"
        )
