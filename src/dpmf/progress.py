"""What is being worked on, for whoever wants to show it: silent unless somebody listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("dpmf_listener", default=None)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Tell `listener` what runs inside is doing."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def heard() -> bool:
    """Whether somebody listens."""
    return _listener.get() is not None


def say(what: str) -> None:
    """Tell the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(what)
