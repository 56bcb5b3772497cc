"""An advisory lock on a cache entry, so that two processes do not optimise the same strategy at once.

The operating system releases the lock when the process ends, however it ends. On systems without such locks, and in
directories that cannot be written, the work goes on without one: the cache still holds whole files only, but two
processes may do the same work.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

PATIENCE = 600.0  # seconds to wait for another process, which might be stopped
_PAUSE = 0.05


@contextlib.contextmanager
def exclusive(path: Path | None, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of a file inside the block.

    Args:
      path: the file; None takes no lock.
      on_wait: called once, before the first wait for another process.

    Returns:
      A context manager that gives whether the lock is held.
    """
    held = None if path is None else _acquire(path.with_name(f".{path.name}.lock"), on_wait)
    try:
        yield held is not None
    finally:
        if held is not None:
            descriptor, lock = held
            with contextlib.suppress(OSError):
                os.unlink(lock)  # still locked, so a process that opened it before notices that the name is gone
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
            os.close(descriptor)  # its owner has released and removed it: open a new one
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
