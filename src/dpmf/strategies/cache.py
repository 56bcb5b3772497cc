"""Disk cache for optimised strategies, and the line that says that one is being optimised.

There is one small JSON file per strategy, named by a digest of everything it depends on. What a file says is a hint:
whoever asks for it checks it (`holds`), and a file that does not pass, is damaged or not ours is written again. A
directory that cannot be written costs one warning, never the result. Processes that want the same strategy at the same
time wait for the first of them (`_lock`).
"""

from __future__ import annotations

import contextlib
import functools
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
from dpmf.strategies._lock import exclusive

Values: TypeAlias = dict[str, Array]
Parameter: TypeAlias = int | str | None

_MEMO_SIZE = 128

_memo: dict[str, Values] = {}
_warned = False


class CacheWarning(UserWarning):
    """The cache could not be written; the next process will optimise again."""


def directory() -> Path:
    """Return ``$DPMF_CACHE_DIR``, else ``$XDG_CACHE_HOME/dpmf``, else ``~/.cache/dpmf``."""
    if own := os.environ.get("DPMF_CACHE_DIR"):
        return Path(own)
    # The XDG specification asks that a relative path be ignored.
    if (shared := os.environ.get("XDG_CACHE_HOME")) and Path(shared).is_absolute():
        return Path(shared) / "dpmf"
    return Path.home() / ".cache" / "dpmf"


@functools.cache
def code() -> str:
    """Return a digest of the code of all strategies, which names the optimisers in it."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()


def remember(
    kind: str, parameters: Mapping[str, Parameter], optimiser: str, label: str | None, compute: Callable[[], Values],
    holds: Callable[[Values], bool],
) -> Values:  # fmt: skip
    """Return the value of `compute()`, from memory or disk if it is there already.

    Args:
      kind: which optimisation this is; the file's name starts with it.
      parameters: everything the result depends on.
      optimiser: the code that does the work; empty where `holds` proves what another code has found.
      label: what to call the work on the progress line; None for no line.
      compute: returns named arrays of numbers.
      holds: whether arrays that were read may be used; the file is removed if not. Arrays of other names and shapes
        than those of `compute` may make it raise a ValueError, LookupError or TypeError.

    Returns:
      The named arrays, read-only.
    """
    key = {"kind": kind, "parameters": dict(parameters), "optimiser": optimiser}
    digest = _digest(key)
    values = _memo.get(digest)
    if values is None:
        path = _file(f"{kind}-{digest[:32]}.json")
        values = _read(path, key, holds)
        if values is None:
            waiting = f"dpmf: waiting for another process that is optimising {label}\n" if label else ""
            with exclusive(path, lambda: _say(waiting)):
                values = _read(path, key, holds)  # another process may have written it meanwhile
                if values is None:
                    with _progress(label) if label else contextlib.nullcontext():
                        values = compute()
                    _write(path, key, values)
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


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file(name: str) -> Path | None:
    try:
        return directory() / name
    except RuntimeError:  # no home directory
        return None


def _read(path: Path | None, key: Mapping[str, Any], holds: Callable[[Values], bool]) -> Values | None:
    if path is None:
        return None
    try:
        record = json.loads(path.read_bytes())
        if record["key"] != key or record["checksum"] != _digest([record["key"], record["values"]]):
            return None
        values = {name: _decode(numbers) for name, numbers in record["values"].items()}
        if holds(values):
            return values
        path.unlink()  # so that it is not checked again
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _decode(numbers: list[str]) -> Array:
    return np.array([float.fromhex(number) for number in numbers], dtype=np.float64)


def _write(path: Path | None, key: Mapping[str, Any], values: Values) -> None:
    # Hexadecimal floats come back bit for bit.
    encoded = {name: [float(number).hex() for number in array] for name, array in values.items()}
    text = json.dumps({"key": key, "values": encoded, "checksum": _digest([key, encoded])}, indent=1)
    try:
        if path is None:
            raise OSError("there is no home directory; set DPMF_CACHE_DIR")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(), private=True)
    except OSError as error:
        _warn(f"optimised strategies are not cached on disk: {error}")


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
