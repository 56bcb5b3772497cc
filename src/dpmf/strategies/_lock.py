"""An advisory lock on a cache entry, so that two processes do not optimise the same strategy at once.

The operating system holds it and gives it up with the process, however that ends. Where there are no such locks, or the
directory cannot be written, the work goes on without: the cache itself stays whole (files are renamed into place), only
the work may be done twice.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

PATIENCE = 600.0  # seconds that one waits for another process, which might have been stopped
_PAUSE = 0.05


@contextlib.contextmanager
def exclusive(path: Path | None, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of a file meanwhile; says whether that was possible. `on_wait` is called before a wait."""
    held = None if path is None else _acquire(path.with_name(f".{path.name}.lock"), on_wait)
    try:
        yield held is not None
    finally:
        if held is not None:
            descriptor, lock = held
            with contextlib.suppress(OSError):
                os.unlink(lock)  # while it is held: whoever opened it before notices that the name is gone
            os.close(descriptor)


def _system_locks() -> ModuleType | None:
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def _acquire(lock: Path, on_wait: Callable[[], None]) -> tuple[int, Path] | None:
    fcntl = _system_locks()
    if fcntl is None:
        return None
    ends, waited = time.monotonic() + PATIENCE, False
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:  # a directory that cannot be written
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(lock, descriptor):
                return descriptor, lock
            os.close(descriptor)  # whoever had it has let it go, name and all
            continue
        except BlockingIOError:
            os.close(descriptor)
        except OSError:  # a file system without locks
            os.close(descriptor)
            return None
        if time.monotonic() >= ends:
            return None
        if not waited:
            waited = True
            on_wait()
        time.sleep(_PAUSE)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
