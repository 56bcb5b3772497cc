"""What a strategy is: an immutable description of the lower-triangular matrix C, materialised for N iterations.

The mechanism releases C·x + Z with Z ~ N(0, σ²); training adds C⁻¹Z to the gradients. A strategy knows nothing about σ
or about how batches are drawn. It is used exactly as given: the noise multiplier refers to C as it stands, never to a
column-normalised copy (`normalized()` makes one explicitly).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpmf import validation
from dpmf.numerics import Array

if TYPE_CHECKING:
    from dpmf.batching import BallsInBins

MAX_DENSE_BYTES = 4 * 2**30
_BLOCK_BYTES = 16 * 2**20


def invert_series(coefficients: Array, n: int) -> Array:
    """The first n coefficients of 1/f for a power series f with non-zero constant term.

    One banded solve of the Toeplitz system: O(n · p) with p the number of coefficients up to the last non-zero one.
    """
    from scipy.signal import lfilter

    impulse = np.zeros(n)
    impulse[0] = 1.0
    # Padding would make the recursion quadratic in n.
    return np.asarray(lfilter([1.0], np.trim_zeros(coefficients[:n], "b"), impulse), dtype=np.float64)


def pad_or_cut(coefficients: Array, n: int) -> Array:
    """The first n coefficients, followed by zeros where there are fewer."""
    out = np.zeros(n)
    m = min(n, len(coefficients))
    out[:m] = coefficients[:m]
    return out


def check_dense(n: int) -> None:
    """Refuse, before memory is taken, an n × n array that is too big."""
    if 8 * n * n > MAX_DENSE_BYTES:
        raise ValueError(
            f"iterations must be at most {int((MAX_DENSE_BYTES / 8) ** 0.5)} for a dense matrix, got {n}; "
            "the accountants do not need one"
        )


def block_rows(n: int) -> int:
    """How many rows of length n to hold at a time."""
    return max(1, _BLOCK_BYTES // (8 * n))


def _toeplitz_view(column: Array) -> Array:
    """The lower-triangular Toeplitz matrix as a view that takes O(n) memory."""
    n = len(column)
    padded = np.concatenate((np.zeros(n - 1), column))
    return np.lib.stride_tricks.sliding_window_view(padded, n)[:, ::-1]


def _lower_triangular(column: Array) -> Array:
    check_dense(len(column))
    return _toeplitz_view(column).copy()


def _norms(block: Array) -> Array:
    """Column norms; squares of very large or very small entries neither overflow nor vanish."""
    scale = np.abs(block).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return np.asarray(scale * np.linalg.norm(block / scale, axis=0), dtype=np.float64)


class Strategy(ABC):
    """A lower-triangular, non-negative strategy matrix C, for any number of iterations it supports."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How the strategy prints, e.g. ``BSR(p=4)``."""

    def for_batching(self, batching: BallsInBins) -> Strategy:
        """The strategy as used with this batching: optimised strategies fill in what they optimise for."""
        return self

    def check_iterations(self, iterations: int) -> None:  # noqa: B027 - most strategies exist for every N
        """Raise ValueError where the strategy does not exist for this many iterations."""

    @abstractmethod
    def matrix(self, iterations: int) -> Array:
        """C as a dense `iterations` × `iterations` array."""

    @abstractmethod
    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        """C as (first row index, block of at most `chunk` rows), top to bottom."""

    @abstractmethod
    def inverse(self, iterations: int) -> Array:
        """C⁻¹ as a dense array."""

    @abstractmethod
    def bandwidth(self, iterations: int) -> int:
        """The least p with C[i, j] = 0 for i − j ≥ p."""

    @abstractmethod
    def effective_bandwidth(self, iterations: int, tolerance: float = 1e-3) -> int:
        """The least p such that every entry with i − j ≥ p is at most `tolerance` times the largest entry."""

    def normalized(self, columns: str = "largest") -> Strategy:
        """C rescaled: by its largest column norm (``"largest"``), or each column to norm one (``"each"``).

        ``"largest"`` keeps a Toeplitz matrix Toeplitz. ``"each"`` gives a dense matrix.
        """
        if validation.choice("columns", columns, ("largest", "each")) == "largest" and isinstance(
            self, ToeplitzStrategy
        ):
            return NormalizedToeplitz(self)
        return NormalizedDense(self, columns)

    def __str__(self) -> str:
        return self.name


def _check_tolerance(tolerance: float) -> None:
    if not 0 <= validation.real("tolerance", tolerance) < 1:
        raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance!r}")


class ToeplitzStrategy(Strategy):
    """A strategy given by the first column of C."""

    @abstractmethod
    def strategy_coef(self, iterations: int) -> Array:
        """The first column of C."""

    def noising_coef(self, iterations: int) -> Array:
        """The first column of C⁻¹."""
        return invert_series(self.strategy_coef(iterations), iterations)

    def matrix(self, iterations: int) -> Array:
        return _lower_triangular(self.strategy_coef(iterations))

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        view = _toeplitz_view(self.strategy_coef(iterations))
        for start in range(0, iterations, chunk):
            yield start, view[start : start + chunk].copy()

    def inverse(self, iterations: int) -> Array:
        return _lower_triangular(self.noising_coef(iterations))

    def bandwidth(self, iterations: int) -> int:
        return int(np.flatnonzero(self.strategy_coef(iterations))[-1]) + 1

    def effective_bandwidth(self, iterations: int, tolerance: float = 1e-3) -> int:
        _check_tolerance(tolerance)
        column = np.abs(self.strategy_coef(iterations))
        return int(np.flatnonzero(column > tolerance * column.max())[-1]) + 1


class DenseStrategyMixin(Strategy):
    """Shared answers of strategies that only have a full matrix."""

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        full = self.matrix(iterations)
        for start in range(0, iterations, chunk):
            yield start, np.asarray(full[start : start + chunk], dtype=np.float64)

    def inverse(self, iterations: int) -> Array:
        from scipy.linalg import solve_triangular

        check_dense(iterations)
        full = self.matrix(iterations)
        if np.any(np.diag(full) == 0):
            raise ValueError(f"{self.name} has a zero on its diagonal: it has no inverse")
        return np.asarray(solve_triangular(full, np.eye(iterations), lower=True), dtype=np.float64)

    def _bandwidth_above(self, iterations: int, threshold: float) -> int:
        width = 1
        for start, block in self.rows(iterations, block_rows(iterations)):
            row, column = np.nonzero(np.abs(block) > threshold)
            if len(row):
                width = max(width, int((start + row - column).max()) + 1)
        return width

    def bandwidth(self, iterations: int) -> int:
        return self._bandwidth_above(iterations, 0.0)

    def effective_bandwidth(self, iterations: int, tolerance: float = 1e-3) -> int:
        _check_tolerance(tolerance)
        blocks = self.rows(iterations, block_rows(iterations))
        largest = max(float(np.abs(block).max()) for _, block in blocks)
        return self._bandwidth_above(iterations, tolerance * largest)


@dataclass(frozen=True)
class NormalizedToeplitz(ToeplitzStrategy):
    """A Toeplitz strategy divided by the norm of its first, largest, column."""

    base: ToeplitzStrategy

    @property
    def name(self) -> str:
        return f"{self.base.name} normalised"

    def for_batching(self, batching: BallsInBins) -> Strategy:
        return self.base.for_batching(batching).normalized()

    def check_iterations(self, iterations: int) -> None:
        self.base.check_iterations(iterations)

    def strategy_coef(self, iterations: int) -> Array:
        column = self.base.strategy_coef(iterations)
        return column / float(_norms(column))

    def noising_coef(self, iterations: int) -> Array:
        norm = float(_norms(self.base.strategy_coef(iterations)))
        return norm * self.base.noising_coef(iterations)


@dataclass(frozen=True)
class NormalizedDense(DenseStrategyMixin):
    """Any strategy divided by its largest column norm, or column by column."""

    base: Strategy
    columns: str

    @property
    def name(self) -> str:
        return f"{self.base.name} normalised" + (" (each column)" if self.columns == "each" else "")

    def for_batching(self, batching: BallsInBins) -> Strategy:
        return self.base.for_batching(batching).normalized(self.columns)

    def check_iterations(self, iterations: int) -> None:
        self.base.check_iterations(iterations)

    def matrix(self, iterations: int) -> Array:
        check_dense(iterations)
        return np.concatenate([block for _, block in self.rows(iterations, block_rows(iterations))])

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        divisor = self._divisor(iterations)
        for start, block in self.base.rows(iterations, chunk):
            yield start, block / divisor

    def _divisor(self, iterations: int) -> Array:
        """What each column is divided by, gathered in one pass over the rows."""
        norms = np.zeros(iterations)
        for _, block in self.base.rows(iterations, block_rows(iterations)):
            norms = np.hypot(norms, _norms(block))
        if self.columns == "largest":
            return np.full(iterations, norms.max())
        if np.any(norms == 0):
            raise ValueError(f"{self.base.name} has a zero column: it cannot be scaled to norm one")
        return norms
