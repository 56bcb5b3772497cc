"""Numerical inverses with proved error bounds: what is accounted for must cover the matrix that runs.

Training adds D·Z to the gradients, with D a matrix of doubles; the mechanism that runs is that of the exact inverse of
D. The proofs are in docs/theory/floating-point.md, section "The matrix that runs".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dpmf.errors import ArgumentError
from dpmf.numerics import UNIT, Array
from dpmf.strategies.base import Strategy, ToeplitzStrategy, block_rows, invert_series, lower_triangular, pad_or_cut

_UP = 1 + 64 * UNIT  # covers the rounding of the few operations that follow a sum whose error is bounded apart


class Inverse(NamedTuple):
    """An inverse, and for every entry a bound on its distance from the exact one."""

    values: Array
    error: Array


def inverse_series(noising: Array) -> Inverse:
    """Return the first column of the inverse of a lower-triangular Toeplitz matrix, from its first column.

    **Formal guarantees.** The error is a bound for the exact inverse of the doubles given (Theorem 2).
    """
    column = invert_series(noising, len(noising))
    terms = len(np.trim_zeros(noising, "b")) + 2
    with np.errstate(over="ignore", invalid="ignore"):  # of an inverse that overflows, which is refused
        residual = _gamma(terms) * _sum(np.abs(noising)) * _sum(np.abs(column))
    return Inverse(column, _amplified(residual) * np.maximum.accumulate(np.abs(column)) * _UP)


def inverse_matrix(noising: Array) -> Inverse:
    """Return the inverse of a lower-triangular matrix without zeros on its diagonal.

    **Formal guarantees.** The error is a bound for the exact inverse of the doubles given (Theorem 2).
    """
    from scipy.linalg import solve_triangular

    n = len(noising)
    # Solved by rows, X·D = I, so that the residual X·D − I is small.
    entries = np.tril(solve_triangular(noising, np.eye(n), lower=True, trans="T").T)
    with np.errstate(over="ignore", invalid="ignore"):  # of an inverse that overflows, which is refused
        by_row, _ = _residual_sums(entries, noising)
    error = np.tril(_amplified(float(by_row.max())) * np.maximum.accumulate(np.abs(entries), axis=0) * _UP)
    return Inverse(entries, error)


def covering_coef(strategy: ToeplitzStrategy, iterations: int) -> Array:
    """Return the first column of the C⁻¹ to train with, up to its last non-zero entry.

    **Formal guarantees.** Noise made with these doubles is at least as private as the C accounted for (Theorem 3). If
    C⁻¹ is given it is returned as it is, because the C accounted for is raised instead.
    """
    noising = np.trim_zeros(strategy.noising_coef(iterations), "b")
    if strategy.given_by_inverse:
        return noising
    column = strategy.strategy_coef(iterations)
    product = np.convolve(column, noising)[:iterations]
    product[0] -= 1.0
    allowance = _gamma(min(len(column), len(noising)) + 4) * _sum(np.abs(column)) * _sum(np.abs(noising))
    return noising * _enlarged(_sum(np.abs(product)) + allowance)


def covering_inverse(strategy: Strategy, iterations: int) -> Array:
    """Return the C⁻¹ to train with, as a dense matrix.

    **Formal guarantees.** As for `covering_coef`.
    """
    if isinstance(strategy, ToeplitzStrategy):
        return lower_triangular(pad_or_cut(covering_coef(strategy, iterations), iterations))
    inverse = strategy.inverse(iterations)
    by_row, by_column = _residual_sums(strategy.matrix(iterations), inverse)
    return inverse * _enlarged(math.sqrt(float(by_row.max()) * float(by_column.max())))


def _residual_sums(left: Array, right: Array) -> tuple[Array, Array]:
    """Return upper bounds on the sums of |L·R − I| by row and by column, for lower-triangular L and R.

    An entry of the product is computed with an error of at most γ_n times that of |L|·|R|, whose sums take O(n²).
    """
    n = len(left)
    by_row, by_column = np.zeros(n), np.zeros(n)
    heights, widths = np.abs(right).sum(axis=1), np.zeros(n)
    for start in range(0, n, block_rows(n)):
        stop = min(start + block_rows(n), n)
        rows = left[start:stop, :stop]
        product = rows @ right[:stop, :stop]
        product[np.arange(stop - start), np.arange(start, stop)] -= 1.0
        size = np.abs(rows)
        by_row[start:stop] = np.abs(product).sum(axis=1) + _gamma(n + 4) * (size @ heights[:stop])
        by_column[:stop] += np.abs(product).sum(axis=0)
        widths[:stop] += size.sum(axis=0)
    by_column += _gamma(n + 4) * (widths @ np.abs(right))
    return by_row * (1 + 4 * n * UNIT) * _UP, by_column * (1 + 4 * n * UNIT) * _UP


def _gamma(terms: int) -> float:
    """Return an upper bound on γ_m = mu/(1 − mu), the relative error of a sum of m products."""
    return terms * UNIT * (1 + 2 * terms * UNIT)


def _sum(values: Array) -> float:
    """Return an upper bound on a sum of non-negative numbers."""
    return float(values.sum()) * (1 + 2 * len(values) * UNIT)


def _amplified(residual: float) -> float:
    """Return an upper bound on ρ/(1 − ρ), the relative distance of an inverse with residual ρ from the exact one."""
    if not residual < 0.5:
        raise ArgumentError("strategy", "must be well enough conditioned to be inverted in double precision, it is not")
    return residual / (1 - residual) * _UP


def _enlarged(residual: float) -> float:
    return (1 + _amplified(residual)) * (1 + 4 * UNIT)
