"""Strategies given by the user: Toeplitz coefficients, or any lower-triangular non-negative matrix."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dpmf.errors import ArgumentError
from dpmf.numerics import Array
from dpmf.strategies import _number_files as files
from dpmf.strategies.base import (
    MAX_DENSE,
    MAX_DENSE_BYTES,
    DenseStrategy,
    ToeplitzStrategy,
    block_rows,
    check_dense,
    pad_or_cut,
)

Source: TypeAlias = Any  # a path, or whatever numpy can make an array of

# Larger .npy files stay on disk; smaller ones are copied, which guards against later changes.
_MAPPED_ABOVE = 64 * 2**20


@dataclass(frozen=True, repr=False)
class ToeplitzCoefficients(ToeplitzStrategy):
    """A Toeplitz C given by the start of its first column.

    Missing entries are zero, which makes C banded; surplus entries are not used. The numbers are kept as bytes, so that
    nobody can change them. Strategies are equal if their numbers are.
    """

    data: bytes
    source: str | None = field(default=None, compare=False)

    @property
    def values(self) -> Array:
        """The coefficients given, read-only."""
        return np.frombuffer(self.data, dtype=np.float64)

    @property
    def name(self) -> str:
        count = len(self.values)
        return f"Toeplitz({count} coefficient{'s' if count != 1 else ''}{_from(self.source)})"

    def strategy_coef(self, iterations: int) -> Array:
        return pad_or_cut(self.values, iterations)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _MappedFile:
    """A .npy file left on disk, together with what shows that it has not changed since it was checked."""

    path: str
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> _MappedFile:
        absolute = path.absolute()
        return cls(str(absolute), _stamp(absolute))

    def open(self) -> np.ndarray[Any, Any]:
        path = Path(self.path)
        try:
            unchanged = _stamp(path) == self.stamp
        except OSError:
            unchanged = False
        if not unchanged:
            raise files.bad(f"not change while it is in use, but {path} did; load it again")
        return files.open_npy(path)


@dataclass(frozen=True, repr=False)
class ExplicitMatrix(DenseStrategy):
    """Any lower-triangular non-negative C of one size. Strategies are equal if their entries are."""

    size: int
    digest: str
    data: bytes | _MappedFile = field(compare=False)
    source: str | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return f"Matrix({self.size}×{self.size}{_from(self.source)})"

    def check_iterations(self, iterations: int) -> None:
        if iterations != self.size:
            needed = f"must be N × N with N = iterations = {iterations} (epochs × batches)"
            raise ArgumentError("matrix", f"{needed}, got {self.size} × {self.size}{_in(self.source)}")

    def _entries(self, iterations: int) -> np.ndarray[Any, Any]:
        self.check_iterations(iterations)
        if isinstance(self.data, bytes):
            return np.frombuffer(self.data, dtype=np.float64).reshape(self.size, self.size)
        return self.data.open()

    def matrix(self, iterations: int) -> Array:
        """Return C, read-only; a large .npy file of doubles stays on disk."""
        entries = self._entries(iterations)
        if entries.dtype != np.float64:
            check_dense(iterations)
        return np.asarray(entries, dtype=np.float64)

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        return _row_blocks(self._entries(iterations), chunk)

    def __repr__(self) -> str:
        return self.name


def coefficients(source: Source) -> ToeplitzCoefficients:
    """Return the Toeplitz strategy with this first column of C.

    The number of iterations is never read off the length: fewer than N coefficients make a banded C, and of more than N
    the first N are used.

    Args:
      source: an array, or a .npy, .csv or .txt file. The first number must be positive, the others non-negative.
    """
    label = None
    if isinstance(source, str | os.PathLike):
        path = files.checked_path(source, (".npy", ".csv", ".txt"))
        label = path.name
        if path.suffix.lower() == ".npy":
            array = files.open_npy(path)
        else:
            array = np.concatenate([row for _, row in files.text_rows(path)])
    else:
        array = _real_array("coefficients", source)
    if array.ndim != 1 or array.size == 0:
        raise _bad("coefficients", f"be one-dimensional and not empty, got shape {array.shape}", label)
    if 8 * array.size > MAX_DENSE_BYTES:
        raise _bad("coefficients", f"be at most {MAX_DENSE_BYTES // 8}, got {array.size}", label)
    values = np.asarray(array, dtype=np.float64)
    _check_entries("coefficients", values, 0, label)
    if values[0] == 0:
        raise _bad("coefficients", "start with a positive number, got 0", label)
    return ToeplitzCoefficients((values + 0.0).tobytes(), label)  # adding zero turns −0 into 0


def matrix(source: Source) -> ExplicitMatrix:
    """Return the strategy with this C.

    A large .npy file is not loaded: it is checked, and later used, by blocks of rows, and must not change meanwhile.

    Args:
      source: a lower-triangular non-negative N × N matrix as an array, or a .npy or .csv file. Columns may be zero;
        such a C can be accounted for, but has no inverse to train with.
    """
    if not isinstance(source, str | os.PathLike):
        return _checked_matrix(_real_array("matrix", source), None, None)
    path = files.checked_path(source, (".npy", ".csv"))
    if path.suffix.lower() == ".csv":
        return _checked_matrix(_matrix_from_text(path), path.name, None)
    mapped = _MappedFile.of(path)  # taken before the file is opened, so that every later change is noticed
    array = files.open_npy(path)
    return _checked_matrix(array, path.name, mapped if array.nbytes > _MAPPED_ABOVE else None)


def _checked_matrix(array: np.ndarray[Any, Any], label: str | None, mapped: _MappedFile | None) -> ExplicitMatrix:
    """Check all entries, take the digest and (unless the file stays on disk) copy, in one pass by blocks of rows."""
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        shape = " × ".join(map(str, array.shape)) if array.ndim == 2 else f"shape {array.shape}"
        raise _bad("matrix", f"be square and not empty, got {shape}", label)
    n = len(array)
    if mapped is None and n > MAX_DENSE:
        raise _bad("matrix", f"be at most {MAX_DENSE} × {MAX_DENSE} unless it is a .npy file, got {n} × {n}", label)
    digest = hashlib.sha256()
    copied: list[bytes] = []
    empty = True
    for start, block in _row_blocks(array, block_rows(n)):
        _check_entries("matrix", block, start, label)
        above = np.triu(block, k=start + 1)
        if above.any():
            row, column = (int(i) for i in np.argwhere(above)[0])
            place = f"[{start + row}, {column}]"
            raise _bad("matrix", f"be lower-triangular, got {above[row, column]:.6g} at {place}", label)
        empty = empty and not block.any()
        content = (block + 0.0).tobytes()  # adding zero turns −0 into 0: equal matrices have equal digests
        digest.update(content)
        if mapped is None:
            copied.append(content)
    if empty:
        raise _bad("matrix", f"have an entry that is not zero, got {n} × {n} zeros", label)
    return ExplicitMatrix(n, digest.hexdigest(), mapped or b"".join(copied), label)


def _matrix_from_text(path: Path) -> Array:
    rows: list[Array] = []
    for number, row in files.text_rows(path):
        if not rows and len(row) > MAX_DENSE:
            raise files.bad(f"be .npy for a matrix with {len(row)} columns, got {path.name}")
        if rows and len(row) != len(rows[0]):
            raise files.bad(
                f"have as many numbers in each line, got {len(row)} in line {number} of {path.name} "
                f"after {len(rows[0])}"
            )
        if rows and len(rows) == len(row):
            raise _bad("matrix", f"be square, got more than {len(row)} rows of {len(row)}", path.name)
        rows.append(row)
    return np.array(rows)


def _real_array(name: str, source: Source) -> np.ndarray[Any, Any]:
    needed = "be an array of real numbers or the path of a file"
    try:
        array = np.asarray(source)
    except (ValueError, TypeError, OverflowError):
        raise _bad(name, f"{needed}, got no array, or rows of unequal length") from None
    if array.size and array.dtype.kind not in "iuf":
        raise _bad(name, f"{needed}, got dtype {array.dtype}")
    return array


def _check_entries(name: str, block: Array, start: int, label: str | None) -> None:
    """Refuse the first entry that is not finite, or else the first negative one; `start` is the block's first row."""
    for good, requirement in ((np.isfinite(block), "finite"), (block >= 0, "non-negative")):
        if not good.all():
            index = np.argwhere(~good)[0]
            value = float(block[tuple(index)])
            place = ", ".join(map(str, (start + int(index[0]), *map(int, index[1:]))))
            raise _bad(name, f"be {requirement}, got {value:.6g} at [{place}]", label)


def _row_blocks(array: np.ndarray[Any, Any], chunk: int) -> Iterator[tuple[int, Array]]:
    for start in range(0, len(array), chunk):
        # A long double may be too large for a double; the check for finite entries then says so.
        with np.errstate(over="ignore"):
            yield start, np.ascontiguousarray(array[start : start + chunk], dtype=np.float64)


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _bad(argument: str, complaint: str, label: str | None = None) -> ArgumentError:
    return ArgumentError(argument, f"must {complaint}{_in(label)}")


def _from(source: str | None) -> str:
    return "" if source is None else f", {source}"


def _in(source: str | None) -> str:
    return "" if source is None else f" in {source}"
