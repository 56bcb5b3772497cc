"""Reading numbers from .npy, .csv and .txt files, with one clear line for whatever is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpmf.errors import ArgumentError
from dpmf.numerics import Array
from dpmf.strategies.base import MAX_DENSE_BYTES

_SEPARATOR = re.compile(r"\s*,\s*|\s+")


def bad(complaint: str) -> ArgumentError:
    """Return the error that says what is wrong with the argument `file`."""
    return ArgumentError("file", f"must {complaint}")


def checked_path(source: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    """Return the path of a regular file with one of these endings, or refuse it."""
    path = Path(source)
    allowed = ", ".join(suffixes)
    if not str(source) or "\0" in str(source):
        raise bad(f"be the path of a file ({allowed}), got {str(source)!r}")
    try:
        if path.is_dir():
            raise bad(f"be a file, got the directory {path}")
        if not path.exists():
            raise bad(f"exist, got {path}")
        if not path.is_file():
            raise bad(f"be a regular file, got {path}")
    except OSError as error:
        raise _unreadable(path, error) from None
    if path.suffix.lower() not in suffixes:
        raise bad(f"end in {allowed}, got {path.name}")
    return path


def open_npy(path: Path) -> np.ndarray[Any, Any]:
    """Map the array of a .npy file into memory. Nothing in the file is ever executed."""
    try:
        with path.open("rb") as stream:
            start = stream.read(6)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not start:
        raise bad(f"not be empty, got {path.name}")
    if start != b"\x93NUMPY":
        raise bad(f"be in NumPy's .npy format, got {path.name}")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy fails on a damaged header in more ways than it documents
        if "objects" in str(error).lower():
            raise bad(f"hold real numbers, got pickled Python objects in {path.name}") from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise bad(f"be a complete .npy file, got {path.name} ({reason})") from None
    if array.dtype.kind not in "iuf":
        raise bad(f"hold real numbers, got dtype {array.dtype} in {path.name}")
    return np.asarray(array)


def text_rows(path: Path) -> Iterator[tuple[int, Array]]:
    """Iterate over (line number, numbers of the line) for the lines that are neither blank nor # comments."""
    found = False
    try:
        if path.stat().st_size > MAX_DENSE_BYTES:
            raise bad(f"be at most {MAX_DENSE_BYTES} bytes of text, got {path.name}; save it as .npy")
        with path.open(encoding="utf-8-sig") as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.strip()
                if line and not line.startswith("#"):
                    found = True
                    words = _SEPARATOR.split(line.removesuffix(",").rstrip())
                    yield number, np.array([_number(word, f"line {number} of {path.name}") for word in words])
    except UnicodeDecodeError:
        raise bad(f"be text, got {path.name}, which is not") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not found:
        raise bad(f"not be empty, got {path.name}")


def _number(word: str, place: str) -> float:
    try:
        if "_" not in word:  # Python reads 1_0 as ten
            return float(word)
    except ValueError:
        pass
    shown = word if len(word) <= 40 else word[:37] + "..."
    raise bad(f"hold numbers separated by commas or blanks, got {shown!r} in {place}")


def _unreadable(path: Path, error: OSError) -> ArgumentError:
    return bad(f"be readable, got {path} ({error.strerror or type(error).__name__})")
