"""Inner loops of the chain accountant: products of tabulated transforms, interpolated linearly between table rows.

Real parts below `floor`, which is −∞ for a complex frequency, are raised to it: at a real frequency all numbers are
positive, and those that would underflow become larger instead. A NaN stays one.
"""

from __future__ import annotations

import numpy as np
from numba import njit


# Sums are of two terms: contraction changes their rounding, never its bound.
@njit(cache=True, nogil=True, fastmath={"contract"})
def multiply_terms(
    values: np.ndarray, table: np.ndarray, row: np.ndarray, share: np.ndarray, floor: np.ndarray
) -> None:
    """values[j, :] *= (1 − share[j])·table[row[j], :] + share[j]·table[row[j] + 1, :], complex, in place.

    The middle axis of `values` and `table` holds the real and the imaginary parts; `floor` is by frequency.
    """
    width = values.shape[2]
    for j in range(values.shape[0]):
        i, t = row[j], share[j]
        for k in range(width):
            real = (1.0 - t) * table[i, 0, k] + t * table[i + 1, 0, k]
            imaginary = (1.0 - t) * table[i, 1, k] + t * table[i + 1, 1, k]
            old_real, old_imaginary = values[j, 0, k], values[j, 1, k]
            product = old_real * real - old_imaginary * imaginary
            values[j, 0, k] = floor[k] if product < floor[k] else product
            values[j, 1, k] = old_real * imaginary + old_imaginary * real


@njit(cache=True, nogil=True, fastmath={"contract"})
def block_transforms(
    tables: np.ndarray,
    kinds: np.ndarray,
    rows: np.ndarray,
    shares: np.ndarray,
    weights: np.ndarray,
    floor: np.ndarray,
    out: np.ndarray,
) -> None:
    """out[j, :] = Σ_q weights[q]·Π_i term(i, j, q), where each term is a table row interpolated as above.

    tables: class × row × 2 × frequencies; kinds: the class of each index i of the block; rows and shares: j × q × i.
    """
    width = out.shape[2]
    real, imaginary = np.empty(width), np.empty(width)
    for j in range(out.shape[0]):
        for k in range(width):
            out[j, 0, k] = 0.0
            out[j, 1, k] = 0.0
        for q in range(rows.shape[1]):
            for k in range(width):
                real[k] = weights[q]
                imaginary[k] = 0.0
            for i in range(rows.shape[2]):
                row, t, kind = rows[j, q, i], shares[j, q, i], kinds[i]
                for k in range(width):
                    a = (1.0 - t) * tables[kind, row, 0, k] + t * tables[kind, row + 1, 0, k]
                    c = (1.0 - t) * tables[kind, row, 1, k] + t * tables[kind, row + 1, 1, k]
                    old = real[k]
                    product = old * a - imaginary[k] * c
                    real[k] = floor[k] if product < floor[k] else product
                    imaginary[k] = old * c + imaginary[k] * a
            for k in range(width):
                out[j, 0, k] += real[k]
                out[j, 1, k] += imaginary[k]


@njit(cache=True, nogil=True, fastmath={"contract"})
def overlap_step(block: np.ndarray, values: np.ndarray, weights: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """out[i·r, :] = Σ_k weights[k]·block[i·r·k, :]·values[r·k, :], complex, for nodes i, k and any r between them.

    The middle axis of `block` and `values` holds the real and the imaginary parts; `floor` is by frequency.
    """
    nodes, width = len(weights), values.shape[2]
    between = values.shape[0] // nodes
    out = np.empty((nodes * between, 2, width))
    weighted = np.empty_like(values)
    for j in range(values.shape[0]):
        weight = weights[j % nodes]
        for f in range(width):
            weighted[j, 0, f] = weight * values[j, 0, f]
            weighted[j, 1, f] = weight * values[j, 1, f]
    real, imaginary = np.empty(width), np.empty(width)
    for row in range(nodes * between):
        r = row % between
        real[:] = 0.0
        imaginary[:] = 0.0
        for k in range(nodes):
            i, j = row * nodes + k, r * nodes + k
            for f in range(width):
                real[f] += block[i, 0, f] * weighted[j, 0, f] - block[i, 1, f] * weighted[j, 1, f]
                imaginary[f] += block[i, 0, f] * weighted[j, 1, f] + block[i, 1, f] * weighted[j, 0, f]
        for f in range(width):
            out[row, 0, f] = floor[f] if real[f] < floor[f] else real[f]
            out[row, 1, f] = imaginary[f]
    return out


@njit(cache=True, nogil=True, fastmath={"contract"})
def _product(a: np.ndarray, b: np.ndarray, floor: float, out: np.ndarray) -> None:
    """out = a·b, complex; the first axis holds the real and the imaginary parts."""
    n = a.shape[1]
    for i in range(n):
        for j in range(n):
            out[0, i, j] = 0.0
            out[1, i, j] = 0.0
        for k in range(n):
            real, imaginary = a[0, i, k], a[1, i, k]
            for j in range(n):
                out[0, i, j] += real * b[0, k, j] - imaginary * b[1, k, j]
                out[1, i, j] += real * b[1, k, j] + imaginary * b[0, k, j]
        for j in range(n):
            if out[0, i, j] < floor:
                out[0, i, j] = floor


@njit(cache=True, nogil=True)
def trace_of_power(matrix: np.ndarray, exponent: int, floor: float) -> complex:
    """Tr(matrix^exponent) by squaring; the first axis holds the real and the imaginary parts. Overwrites `matrix`."""
    n = matrix.shape[1]
    square, spare = matrix, np.empty_like(matrix)
    result = np.zeros_like(matrix)
    for i in range(n):
        result[0, i, i] = 1.0
    while exponent > 1:
        if exponent & 1:
            _product(result, square, floor, spare)
            result, spare = spare, result
        _product(square, square, floor, spare)
        square, spare = spare, square
        exponent >>= 1
    real, imaginary = 0.0, 0.0
    for i in range(n):
        for j in range(n):
            real += result[0, i, j] * square[0, j, i] - result[1, i, j] * square[1, j, i]
            imaginary += result[0, i, j] * square[1, j, i] + result[1, i, j] * square[0, j, i]
    return complex(floor if real < floor else real, imaginary)
