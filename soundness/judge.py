"""How a call on hostile input is judged: answered, refused in one line, or a fault (hangs, stray writes included)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANG_SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    """What became of one input: "answered", "refused", or "fault" with what was wrong."""

    verdict: str
    text: str = ""


def fault(text: str) -> Outcome:
    return Outcome("fault", " ".join(text.split())[:300])


ANSWERED, REFUSED = Outcome("answered"), Outcome("refused")


class Hang(BaseException):
    """Raised by the alarm; no handler for ordinary errors catches it."""


@contextlib.contextmanager
def watched(seconds: int = HANG_SECONDS) -> Iterator[None]:
    """An alarm after so many seconds of computing, or ten times as many of waiting (the machine may be busy).

    None where there are no such signals or this is not the main thread.
    """

    def ring(*_: object) -> None:
        raise Hang

    try:
        before = [(number, signal.signal(number, ring)) for number in (signal.SIGALRM, signal.SIGPROF)]
    except (AttributeError, ValueError):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before:
            signal.signal(number, handler)


# --- writes --------------------------------------------------------------------------------------------------------

_writes: list[str] | None = None
_hooked = False
_CREATES = {
    "os.mkdir": 0,
    "os.rename": 1,
    "os.link": 1,
    "os.symlink": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.truncate": 0,
}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _writes is None:
        return
    if event == "open" and isinstance(arguments[0], str | bytes):
        flags = arguments[2] or 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            _writes.append(os.fsdecode(arguments[0]))
    elif event in _CREATES and isinstance(arguments[_CREATES[event]], str | bytes | os.PathLike):
        _writes.append(os.fsdecode(arguments[_CREATES[event]]))


@contextlib.contextmanager
def written() -> Iterator[list[str]]:
    """The paths that are opened for writing, made, moved to or removed meanwhile. Compiled code is left out."""
    global _writes, _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    found: list[str] = []
    _writes = []
    try:
        yield found
    finally:
        found += [os.path.abspath(p) for p in _writes if "__pycache__" not in p and p not in (os.devnull, "")]
        _writes = None


def judged(call: Callable[[], object], allowed: tuple[Path, ...], accept: Callable[[object], str | None]) -> Outcome:
    """The verdict on a call that may answer, or refuse with one line. `accept` says what is wrong with an answer."""
    try:
        with watched(HANG_SECONDS), written() as paths:
            answer = call()
    except Hang:
        return fault(f"no answer within {HANG_SECONDS} s")
    except (ValueError, ImportError) as error:
        message = str(error)
        if not message or "\n" in message or len(message) > 600:
            return fault(f"not one line: {message!r}")
        return _outside(paths, allowed) or REFUSED
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return fault(f"{type(error).__name__}: {error}")
    wrong = accept(answer)
    return fault(wrong) if wrong else _outside(paths, allowed) or ANSWERED


def _outside(paths: list[str], allowed: tuple[Path, ...]) -> Outcome | None:
    for path in paths:
        if not any(Path(path) == a or a in Path(path).parents for a in allowed):
            return fault(f"wrote {path}")
    return None
