"""What was found earlier, kept on disk: coefficients of optimised strategies, and noise multipliers.

There is one directory and one format. A file is a JSON object with a question, which says what was sought and for what,
and a hint, which has named arrays of numbers. A hint is never an answer: whoever asks checks it before it is used
(`holds`), and what does not hold, is damaged or belongs to another question is found anew and written over. So a file
needs no checksum, and no fingerprint of the code that wrote it. Coefficients stay those that were found first, so that
a run that goes on under a newer dpmf finds its matrix again. Whoever wants what a newer optimiser finds removes the
directory.

A directory that cannot be written costs one warning, never the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dpmf import progress
from dpmf.files import write_atomically
from dpmf.numerics import Array

Values: TypeAlias = dict[str, Array]
Parameter: TypeAlias = int | str | None

_MEMO_SIZE = 128
_PATIENCE = 600.0  # seconds to wait for another process, which might be stopped

_memo: dict[str, Values] = {}
_warned = False


class CacheWarning(UserWarning):
    """The store could not be written; the next process will do the work again."""


def directory() -> Path:
    """Return ``$DPMF_CACHE_DIR``, else ``$XDG_CACHE_HOME/dpmf``, else ``~/.cache/dpmf``."""
    if own := os.environ.get("DPMF_CACHE_DIR"):
        return Path(own)
    # The XDG specification asks that a relative path be ignored.
    if (shared := os.environ.get("XDG_CACHE_HOME")) and Path(shared).is_absolute():
        return Path(shared) / "dpmf"
    return Path.home() / ".cache" / "dpmf"


def remember(
    kind: str, parameters: Mapping[str, Parameter], label: str | None, compute: Callable[[], Values],
    holds: Callable[[Values], bool],
) -> Values:  # fmt: skip
    """Return the value of `compute()`, from memory or disk if it is there already.

    Processes that ask for the same at the same time wait for the first of them.

    Args:
      kind: what is sought; the file's name starts with it.
      parameters: everything that it is sought for.
      label: what to call the work on the progress line; None for no line.
      compute: returns named arrays of numbers.
      holds: whether arrays that were read may be used; the file is removed if not. It sees whatever numbers and names
        are in the file, and may raise a ValueError, LookupError, TypeError or ArithmeticError instead of saying no.

    Returns:
      The named arrays, read-only.
    """
    question = {"kind": kind, **parameters}
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    values = _memo.get(digest)
    if values is None:
        path = _file(f"{kind}-{digest[:32]}.json")
        values = _read(path, question, holds)
        if values is None:
            with _alone(path, label):
                values = _read(path, question, holds)  # another process may have written it meanwhile
                if values is None:
                    with _progress(label) if label else contextlib.nullcontext():
                        values = compute()
                    _write(path, question, values)
        for array in values.values():
            array.setflags(write=False)
        while len(_memo) >= _MEMO_SIZE:
            del _memo[next(iter(_memo))]
        _memo[digest] = values
    return values


def forget() -> None:
    """Forget the results that this process remembers. The files stay."""
    global _warned
    _memo.clear()
    _warned = False


def _file(name: str) -> Path | None:
    try:
        return directory() / name
    except RuntimeError:  # no home directory
        return None


def _read(path: Path | None, question: Mapping[str, Any], holds: Callable[[Values], bool]) -> Values | None:
    if path is None:
        return None
    try:
        entry = json.loads(path.read_bytes())
        if entry["question"] != question:
            return None
        values = {name: np.array([*map(float.fromhex, numbers)]) for name, numbers in entry["hint"].items()}
        if holds(values):
            return values
        path.unlink()  # so that it is not checked again
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError):
        pass
    return None


def _write(path: Path | None, question: Mapping[str, Any], values: Values) -> None:
    # Hexadecimal floats come back bit for bit.
    hint = {name: [float(number).hex() for number in array] for name, array in values.items()}
    try:
        if path is None:
            raise OSError("there is no home directory; set DPMF_CACHE_DIR")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"question": question, "hint": hint}, indent=1).encode(), private=True)
    except OSError as error:
        _warn(f"optimised strategies are not cached on disk: {error}")


@contextlib.contextmanager
def _alone(path: Path | None, label: str | None) -> Iterator[None]:
    """Run the block while no other process works on this file, or without a lock where there can be none.

    The operating system releases the lock when the process ends, however it ends. The empty file that it is taken on
    stays: without it, two processes could hold locks of the same name.
    """
    if path is None:
        yield
        return
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"), mode=0o600)
    # Directories that cannot be written and file systems without locks raise an OSError; so does Timeout.
    with contextlib.suppress(OSError, NotImplementedError):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if label:
                _say(f"dpmf: waiting for another process that is optimising {label}\n")
            lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        lock.release()


def _warn(message: str) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    # With an explicit place the warning is one line: there is no source line to quote.
    warnings.warn_explicit(message, CacheWarning, "<dpmf>", 0)


@contextlib.contextmanager
def _progress(label: str) -> Iterator[None]:
    """Tell the listener what takes so long. Without one, show a spinner on a terminal, and leave one line on stderr."""
    if progress.heard():
        progress.say(f"optimising {label}")
        yield
        return
    text = f"dpmf: optimising {label} ..."
    start = time.monotonic()
    outcome = "failed"
    terminal = sys.stderr is not None and sys.stderr.isatty()
    with contextlib.ExitStack() as stack:
        if terminal:
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(text))
        else:
            _say(text + " ")
        try:
            yield
            outcome = _seconds(time.monotonic() - start)
        finally:
            stack.close()
            _say(f"{text} {outcome}\n" if terminal else f"{outcome}\n")


def _say(text: str) -> None:
    # A closed or missing stderr is no reason to lose the result.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _seconds(elapsed: float) -> str:
    return f"{elapsed:.1f} s" if elapsed < 10 else f"{elapsed:.0f} s"
