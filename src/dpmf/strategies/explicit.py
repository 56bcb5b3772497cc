"""Strategies given by the user: Toeplitz coefficients, or any lower-triangular non-negative matrix."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dpmf.numerics import Array
from dpmf.strategies import files
from dpmf.strategies.base import (
    MAX_DENSE_BYTES,
    DenseStrategyMixin,
    ToeplitzStrategy,
    block_rows,
    check_dense,
    pad_or_cut,
)

Source: TypeAlias = Any  # a path, or whatever numpy can make an array of

# Files above this stay on disk; smaller ones are copied, which guards against later changes.
_MAPPED_ABOVE = 64 * 2**20
_ARRAY = "an array of real numbers or the path of a file"


@dataclass(frozen=True, repr=False)
class ToeplitzCoefficients(ToeplitzStrategy):
    """A Toeplitz C by the start of its first column: missing entries are zero (a banded C), surplus ones are not used.

    The numbers are kept as bytes, so that nobody can change them; strategies are equal when the numbers are.
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
            raise ValueError(f"file must not change while it is in use, but {path} did; load it again")
        return files.open_npy(path)


@dataclass(frozen=True, repr=False)
class ExplicitMatrix(DenseStrategyMixin):
    """Any lower-triangular non-negative C of one size. Equal when the entries are."""

    size: int
    digest: str
    data: bytes | _MappedFile = field(compare=False)
    source: str | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return f"Matrix({self.size}×{self.size}{_from(self.source)})"

    def check_iterations(self, iterations: int) -> None:
        if iterations != self.size:
            raise ValueError(
                f"matrix must be N × N with N = iterations = {iterations} (epochs × batches), "
                f"got {self.size} × {self.size}{_in(self.source)}"
            )

    def _entries(self, iterations: int) -> np.ndarray[Any, Any]:
        self.check_iterations(iterations)
        if isinstance(self.data, bytes):
            return np.frombuffer(self.data, dtype=np.float64).reshape(self.size, self.size)
        return self.data.open()

    def matrix(self, iterations: int) -> Array:
        """C, read-only; a large .npy file of doubles stays on disk."""
        entries = self._entries(iterations)
        if entries.dtype != np.float64:
            check_dense(iterations)
        return np.asarray(entries, dtype=np.float64)

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        return _row_blocks(self._entries(iterations), chunk)

    def __repr__(self) -> str:
        return self.name


def coefficients(source: Source) -> ToeplitzCoefficients:
    """Toeplitz strategy from the first column of C: an array, or a .npy, .csv or .txt file.

    Fewer than N coefficients make a banded C, of more than N the first N are used: the number of iterations is never
    read off the length. The first must be positive, the others non-negative.
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
        raise ValueError(f"coefficients must be one-dimensional and not empty, got shape {array.shape}{_in(label)}")
    if 8 * array.size > MAX_DENSE_BYTES:
        raise ValueError(f"coefficients must be at most {MAX_DENSE_BYTES // 8}, got {array.size}{_in(label)}")
    values = np.asarray(array, dtype=np.float64)
    _check_entries("coefficients", values, (), label)
    if values[0] == 0:
        raise ValueError(f"coefficients must start with a positive number, got 0{_in(label)}")
    return ToeplitzCoefficients((values + 0.0).tobytes(), label)  # + 0.0 turns −0 into 0


def matrix(source: Source) -> ExplicitMatrix:
    """Strategy from C itself, a lower-triangular non-negative N × N matrix: an array, or a .npy or .csv file.

    A large .npy file is not loaded: it is checked, and later used, by blocks of rows, and must stay as it is.
    Columns may be zero; then C has no inverse, but can be accounted for.
    """
    if not isinstance(source, str | os.PathLike):
        array = _real_array("matrix", source)
        return _checked_matrix(array, None, None)
    path = files.checked_path(source, (".npy", ".csv"))
    if path.suffix.lower() == ".csv":
        return _checked_matrix(_matrix_from_text(path), path.name, None)
    mapped = _MappedFile.of(path)  # before it is opened: a change from here on is noticed
    array = files.open_npy(path)
    return _checked_matrix(array, path.name, mapped if array.nbytes > _MAPPED_ABOVE else None)


def _checked_matrix(array: np.ndarray[Any, Any], label: str | None, mapped: _MappedFile | None) -> ExplicitMatrix:
    """Check everything in one pass by blocks of rows, taking the digest (and the copy) on the way."""
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        shape = " × ".join(map(str, array.shape)) if array.ndim == 2 else f"shape {array.shape}"
        raise ValueError(f"matrix must be square and not empty, got {shape}{_in(label)}")
    n = len(array)
    if mapped is None and 8 * n * n > MAX_DENSE_BYTES:
        limit = int((MAX_DENSE_BYTES / 8) ** 0.5)
        raise ValueError(
            f"matrix must be at most {limit} × {limit} unless it is a .npy file, got {n} × {n}{_in(label)}"
        )
    digest = hashlib.sha256()
    copy = None if mapped is not None else np.empty((n, n))
    empty = True
    for start, block in _row_blocks(array, block_rows(n)):
        _check_entries("matrix", block, (start, 0), label)
        above = np.triu(block, k=start + 1)
        if above.any():
            row, column = (int(i) for i in np.argwhere(above)[0])
            place = f"[{start + row}, {column}]{_in(label)}"
            raise ValueError(f"matrix must be lower-triangular, got {above[row, column]:.6g} at {place}")
        empty = empty and not block.any()
        clean = block + 0.0  # turns −0 into 0: equal matrices have equal digests
        digest.update(clean.data)
        if copy is not None:
            copy[start : start + len(block)] = clean
    if empty:
        raise ValueError(f"matrix must have an entry that is not zero, got {n} × {n} zeros{_in(label)}")
    data: bytes | _MappedFile = mapped if mapped is not None else b"" if copy is None else copy.tobytes()
    return ExplicitMatrix(n, digest.hexdigest(), data, label)


def _matrix_from_text(path: Path) -> Array:
    rows: list[Array] = []
    for number, row in files.text_rows(path):
        if not rows and 8 * len(row) ** 2 > MAX_DENSE_BYTES:
            raise ValueError(f"file must be .npy for a matrix with {len(row)} columns, got {path.name}")
        if rows and len(row) != len(rows[0]):
            raise ValueError(
                f"file must have as many numbers in each line, got {len(row)} in line {number} of {path.name} "
                f"after {len(rows[0])}"
            )
        if rows and len(rows) == len(row):
            raise ValueError(f"matrix must be square, got more than {len(row)} rows of {len(row)} in {path.name}")
        rows.append(row)
    return np.array(rows)


def _real_array(name: str, source: Source) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(source)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} must be {_ARRAY}, got no array, or rows of unequal length") from None
    if array.size and array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be {_ARRAY}, got dtype {array.dtype}")
    return array


def _check_entries(name: str, block: Array, offset: tuple[int, ...], label: str | None) -> None:
    """Finite and non-negative, or the first entry that is not; `offset` is where the block begins."""
    for good, requirement in ((np.isfinite(block), "finite"), (block >= 0, "non-negative")):
        if good.all():
            continue
        index = np.argwhere(~good)[0]
        value = float(block[tuple(index)])
        place = ", ".join(str(int(i) + o) for i, o in zip(index, offset or (0,), strict=True))
        raise ValueError(f"{name} must be {requirement}, got {value:.6g} at [{place}]{_in(label)}")


def _row_blocks(array: np.ndarray[Any, Any], chunk: int) -> Iterator[tuple[int, Array]]:
    for start in range(0, len(array), chunk):
        # A long double may be too large for a double; the check for finite entries then says so.
        with np.errstate(over="ignore"):
            yield start, np.ascontiguousarray(array[start : start + chunk], dtype=np.float64)


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _from(source: str | None) -> str:
    return "" if source is None else f", {source}"


def _in(source: str | None) -> str:
    return "" if source is None else f" in {source}"
