"""What a strategy is: an immutable description of the lower-triangular matrix C, materialised for N iterations.

The mechanism releases C·x + Z with Z ~ N(0, σ²), and training adds C⁻¹Z to the gradients. A strategy knows neither σ
nor how batches are drawn. It is used exactly as given: the noise multiplier refers to C as it stands, never to a
column-normalised copy (`normalized()` makes one explicitly).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpmf import validation
from dpmf.errors import ArgumentError
from dpmf.numerics import UNIT, Array

if TYPE_CHECKING:
    from dpmf.batching import AnyBatching

MAX_DENSE_BYTES = 4 * 2**30
MAX_DENSE = int((MAX_DENSE_BYTES / 8) ** 0.5)
"""The most rows that a dense matrix of doubles may have."""
_BLOCK_BYTES = 16 * 2**20


def invert_series(coefficients: Array, n: int) -> Array:
    """Return the first n coefficients of 1/f, for a power series f with non-zero constant term.

    This is one banded solve of the Toeplitz system: O(n · p), with p the number of coefficients of f up to the last
    non-zero one.
    """
    from scipy.signal import lfilter

    impulse = np.zeros(n)
    impulse[0] = 1.0
    # Trailing zeros would make the recursion quadratic in n.
    return np.asarray(lfilter([1.0], np.trim_zeros(coefficients[:n], "b"), impulse), dtype=np.float64)


def toeplitz_product(left: Array, right: Array) -> Array:
    """Return the first column of the product of two lower-triangular Toeplitz matrices of one size."""
    from scipy import fft  # scipy.signal has the same, but takes half a second to import

    n = fft.next_fast_len(len(left) + len(right) - 1, real=True)
    return np.asarray(fft.irfft(fft.rfft(left, n) * fft.rfft(right, n), n)[: len(left)])


def toeplitz_transposed_product(left: Array, right: Array) -> Array:
    """Return Lᵀ·r, for the lower-triangular Toeplitz matrix L with this first column."""
    return toeplitz_product(left, right[::-1])[::-1]


def pad_or_cut(coefficients: Array, n: int) -> Array:
    """Return the first n coefficients, followed by zeros if there are fewer."""
    out = np.zeros(n)
    m = min(n, len(coefficients))
    out[:m] = coefficients[:m]
    return out


def check_dense(n: int) -> None:
    """Refuse an n × n array that is too large, before memory is taken for it."""
    if n > MAX_DENSE:
        raise ArgumentError(
            "iterations", f"must be at most {MAX_DENSE} for a dense matrix, got {n}; the accountants do not need one"
        )


def block_rows(n: int) -> int:
    """Return how many rows of length n to hold in memory at a time."""
    return max(1, _BLOCK_BYTES // (8 * n))


def _toeplitz_view(column: Array) -> Array:
    """Return the lower-triangular Toeplitz matrix as a view that takes O(n) memory."""
    n = len(column)
    padded = np.concatenate((np.zeros(n - 1), column))
    return np.lib.stride_tricks.sliding_window_view(padded, n)[:, ::-1]


def lower_triangular(column: Array) -> Array:
    """Return the lower-triangular Toeplitz matrix with this first column."""
    check_dense(len(column))
    return _toeplitz_view(column).copy()


def _norms(block: Array) -> Array:
    """Return the column norms; squares of very large or very small entries neither overflow nor vanish."""
    scale = np.abs(block).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return np.asarray(scale * np.linalg.norm(block / scale, axis=0), dtype=np.float64)


class Strategy(ABC):
    """A lower-triangular, non-negative strategy matrix C, for any number of iterations it supports."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How the strategy prints, e.g. ``BSR(p=4)``."""

    def for_batching(self, batching: AnyBatching) -> Strategy:
        """Return the strategy as used with this batching: optimised strategies fill in what they optimise for."""
        return self

    def check_iterations(self, iterations: int) -> None:  # noqa: B027 - most strategies exist for every N
        """Raise ValueError if the strategy does not exist for this many iterations."""

    @abstractmethod
    def matrix(self, iterations: int) -> Array:
        """Return C as a dense `iterations` × `iterations` array."""

    @abstractmethod
    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        """Iterate over C from top to bottom, as pairs (index of the first row, block of at most `chunk` rows)."""

    @abstractmethod
    def inverse(self, iterations: int) -> Array:
        """Return C⁻¹ as a dense array."""

    @abstractmethod
    def bandwidth(self, iterations: int) -> int:
        """Return the least p ≥ 1 with C[i, j] = 0 whenever i − j ≥ p."""

    def normalized(self, columns: str = "largest") -> Strategy:
        """Return C rescaled.

        Args:
          columns: "largest" divides C by its largest column norm, which keeps a Toeplitz matrix Toeplitz. "each"
            divides every column by its own norm, which gives a dense matrix.
        """
        validation.choice("columns", columns, ("largest", "each"))
        if columns == "largest" and isinstance(self, ToeplitzStrategy):
            return NormalizedToeplitz(self)
        return NormalizedDense(self, columns)

    def __str__(self) -> str:
        return self.name


class ToeplitzStrategy(Strategy):
    """A strategy given by the first column of C."""

    @abstractmethod
    def strategy_coef(self, iterations: int) -> Array:
        """Return the first column of C."""

    def noising_coef(self, iterations: int) -> Array:
        """Return the first column of C⁻¹."""
        return invert_series(self.strategy_coef(iterations), iterations)

    @property
    def given_by_inverse(self) -> bool:
        """Whether C⁻¹ is given, and C computed from it."""
        return False

    def coef_error(self, iterations: int) -> float:
        """Return a bound on the relative error of `strategy_coef`, compared with the matrix that training runs.

        It is 0 if the doubles that `strategy_coef` returns are those that training uses.
        """
        return 0.0

    def matrix(self, iterations: int) -> Array:
        return lower_triangular(self.strategy_coef(iterations))

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        view = _toeplitz_view(self.strategy_coef(iterations))
        for start in range(0, iterations, chunk):
            yield start, view[start : start + chunk].copy()

    def inverse(self, iterations: int) -> Array:
        return lower_triangular(self.noising_coef(iterations))

    def bandwidth(self, iterations: int) -> int:
        return int(np.flatnonzero(self.strategy_coef(iterations))[-1]) + 1


class InverseToeplitzStrategy(ToeplitzStrategy):
    """A strategy given by the first column of C⁻¹, 1, d_1, ..., d_{p−1} with no d_j above 0."""

    @abstractmethod
    def noising_coef(self, iterations: int) -> Array: ...

    @property
    def given_by_inverse(self) -> bool:
        return True

    def strategy_coef(self, iterations: int) -> Array:
        return invert_series(self.noising_coef(iterations), iterations)

    def coef_error(self, iterations: int) -> float:
        """**Formal guarantees.** Theorem 1 of docs/theory/floating-point.md, "The matrix that runs"."""
        p = len(np.trim_zeros(self.noising_coef(iterations), "b"))
        return 0.0 if p == 1 else 2 * (p + 2) * iterations * UNIT


class DenseStrategy(Strategy):
    """A strategy that only has a full matrix."""

    def inverse(self, iterations: int) -> Array:
        from scipy.linalg import solve_triangular

        check_dense(iterations)
        full = self.matrix(iterations)
        if np.any(np.diag(full) == 0):
            raise ArgumentError("strategy", f"has no inverse: {self.name} has a zero on its diagonal")
        return np.asarray(solve_triangular(full, np.eye(iterations), lower=True), dtype=np.float64)

    def bandwidth(self, iterations: int) -> int:
        width = 1
        for start, block in self.rows(iterations, block_rows(iterations)):
            row, column = np.nonzero(block)
            width = max(width, int((start + row - column).max(initial=0)) + 1)
        return width


class _Normalized(Strategy):
    """What normalised strategies share: they follow the strategy that they rescale."""

    base: Strategy
    columns = "largest"

    @property
    def name(self) -> str:
        return f"{self.base.name} normalised" + (" (each column)" if self.columns == "each" else "")

    def for_batching(self, batching: AnyBatching) -> Strategy:
        return self.base.for_batching(batching).normalized(self.columns)

    def check_iterations(self, iterations: int) -> None:
        self.base.check_iterations(iterations)


@dataclass(frozen=True)
class NormalizedToeplitz(_Normalized, ToeplitzStrategy):
    """A Toeplitz strategy divided by the norm of its first column, which is the largest."""

    base: ToeplitzStrategy

    def strategy_coef(self, iterations: int) -> Array:
        column = self.base.strategy_coef(iterations)
        return column / float(_norms(column))

    def noising_coef(self, iterations: int) -> Array:
        norm = float(_norms(self.base.strategy_coef(iterations)))
        return norm * self.base.noising_coef(iterations)

    @property
    def given_by_inverse(self) -> bool:
        return self.base.given_by_inverse

    def coef_error(self, iterations: int) -> float:
        return self.base.coef_error(iterations)


@dataclass(frozen=True)
class NormalizedDense(_Normalized, DenseStrategy):
    """Any strategy divided by its largest column norm, or column by column."""

    base: Strategy
    columns: str

    def matrix(self, iterations: int) -> Array:
        check_dense(iterations)
        return np.concatenate([block for _, block in self.rows(iterations, block_rows(iterations))])

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, Array]]:
        norms = np.zeros(iterations)
        for _, block in self.base.rows(iterations, block_rows(iterations)):
            norms = np.hypot(norms, _norms(block))
        if self.columns == "largest":
            norms = norms.max()
        elif np.any(norms == 0):
            raise ArgumentError("strategy", f"must have no zero column to scale, but {self.base.name} has one")
        for start, block in self.base.rows(iterations, chunk):
            yield start, block / norms
