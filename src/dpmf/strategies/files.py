"""Reading numbers from .npy, .csv and .txt files, with one clear line for whatever is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpmf.numerics import Array
from dpmf.strategies.base import MAX_DENSE_BYTES

_SEPARATOR = re.compile(r"\s*,\s*|\s+")


def checked_path(source: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    """The path of a regular file with one of these endings."""
    path = Path(source)
    allowed = ", ".join(suffixes)
    if not str(source) or "\0" in str(source):
        raise ValueError(f"file must be the path of a file ({allowed}), got {str(source)!r}")
    try:
        if path.is_dir():
            raise ValueError(f"file must be a file, got the directory {path}")
        if not path.exists():
            raise ValueError(f"file must exist, got {path}")
        if not path.is_file():
            raise ValueError(f"file must be a regular file, got {path}")
    except OSError as error:
        raise _unreadable(path, error) from None
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"file must end in {allowed}, got {path.name}")
    return path


def open_npy(path: Path) -> np.ndarray[Any, Any]:
    """The array of a .npy file, mapped rather than read. Nothing in the file is ever executed."""
    try:
        if path.stat().st_size == 0:
            raise ValueError(f"file must not be empty, got {path.name}")
        with path.open("rb") as stream:
            if stream.read(6) != b"\x93NUMPY":
                raise ValueError(f"file must be in NumPy's .npy format, got {path.name}")
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy fails on a damaged header in more ways than it documents
        if "objects" in str(error).lower():
            raise ValueError(f"file must hold real numbers, got pickled Python objects in {path.name}") from None
        raise ValueError(f"file must be a complete .npy file, got {path.name} ({_first_line(error)})") from None
    if array.dtype.kind not in "iuf":
        raise ValueError(f"file must hold real numbers, got dtype {array.dtype} in {path.name}")
    return np.asarray(array)


def text_rows(path: Path) -> Iterator[tuple[int, Array]]:
    """(line number, its numbers) for every line that is not blank and not a # comment."""
    found = False
    try:
        if path.stat().st_size > MAX_DENSE_BYTES:
            raise ValueError(f"file must be at most {MAX_DENSE_BYTES} bytes of text, got {path.name}; save it as .npy")
        with path.open(encoding="utf-8-sig") as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.strip()
                if not line or line.startswith("#"):
                    continue
                found = True
                yield number, _numbers(path, number, line)
    except UnicodeDecodeError:
        raise ValueError(f"file must be text, got {path.name}, which is not") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not found:
        raise ValueError(f"file must not be empty, got {path.name}")


def _numbers(path: Path, number: int, line: str) -> Array:
    words = _SEPARATOR.split(line.removesuffix(",").rstrip())
    try:
        if "_" in line:  # Python reads 1_0 as ten
            raise ValueError
        return np.array([float(word) for word in words], dtype=np.float64)
    except ValueError:
        bad = next(word for word in words if not _is_number(word))
        shown = bad if len(bad) <= 40 else bad[:37] + "..."
        raise ValueError(
            f"file must hold numbers separated by commas or blanks, got {shown!r} in line {number} of {path.name}"
        ) from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return "_" not in word


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"file must be readable, got {path} ({error.strerror or type(error).__name__})")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
