"""The means of the dominating pair, and their Gram matrix.

Each record is assigned to one of b bins, once, and takes part in the iterations i, i + b, i + 2b, ... of its bin i. By
Lemma 3.2 of Choquette-Choo et al. (2025) the pair P = 1/b Σ N(m_i, σ²I), Q = N(0, σ²I) with m_i = Σ_j |C|[:, i + jb]
dominates the mechanism (remove: (P, Q); add: (Q, P)). Everything an accountant needs is in the Gram matrix of the m_i.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpmf import budget
from dpmf.batching import BallsInBins, OneThrow
from dpmf.numerics import Array
from dpmf.strategies.base import Strategy, ToeplitzStrategy

_CHUNK_BYTES = 64 * 2**20
_UNDERFLOW = 1e-290  # more than underflow can hide in a coefficient of C that is computed
_PIECE = 2e8  # products between two checks of the time budget


def raised_column(strategy: ToeplitzStrategy, iterations: int) -> Array:
    """Return upper bounds on the absolute values of the first column of the matrix that training runs."""
    column = np.abs(strategy.strategy_coef(iterations))
    if error := strategy.coef_error(iterations):
        column = column * (1 + error) + _UNDERFLOW
    return np.asarray(column)


def folded_column(strategy: ToeplitzStrategy, batching: BallsInBins | OneThrow) -> Array:
    """Return the first mixture mean m_0; m_i is this sequence moved down by i and cut off at N.

    **Formal guarantees.** It is made of |C| raised by `coef_error`, so that it covers the matrix that training runs.
    """
    n, b, k = batching.iterations, batching.batches_per_epoch, batching.epochs
    if k == 1:
        return raised_column(strategy, n)
    padded = np.zeros(k * b)
    padded[:n] = raised_column(strategy, n)
    rows = padded.reshape(k, b)
    return np.cumsum(rows, axis=0, out=rows).reshape(-1)[:n]


def mean_rows(strategy: Strategy, batching: BallsInBins | OneThrow) -> Iterator[tuple[int, Array]]:
    """Iterate over the mixture means, as (first iteration t, block whose row r holds m_0[t+r], ..., m_{b−1}[t+r])."""
    n, b, k = batching.iterations, batching.batches_per_epoch, batching.epochs
    if isinstance(strategy, ToeplitzStrategy):
        folded = np.concatenate((np.zeros(b), folded_column(strategy, batching)))
        chunk = max(1, int(min(_CHUNK_BYTES, budget.fitting(8))) // (8 * b))
        for start in range(0, n, chunk):
            t = np.arange(start, min(start + chunk, n))
            yield start, folded[b + t[:, None] - np.arange(b)[None, :]]
        return
    chunk = max(1, int(min(_CHUNK_BYTES, budget.fitting(8))) // (8 * n))
    for start, block in strategy.rows(n, chunk):
        padded = np.zeros((len(block), k * b))
        padded[:, :n] = np.abs(block)
        yield start, padded.reshape(len(block), k, b).sum(axis=1)


def gram_matrix(strategy: Strategy, batching: BallsInBins | OneThrow) -> Array:
    """Return the b × b matrix G[i, j] = ⟨m_i, m_j⟩.

    Toeplitz strategies take O(bN) time and O(b² + N) memory, others are streamed by rows. `Mechanism.gram_error` bounds
    the rounding error.
    """
    b = batching.batches_per_epoch
    budget.require(8.0 * b * b, f"the {b} × {b} Gram matrix", "batches_per_epoch")
    if isinstance(strategy, ToeplitzStrategy):
        from dpmf.kernels import announce_compilation
        from dpmf.kernels.gram import toeplitz_gram

        announce_compilation(toeplitz_gram)
        folded = folded_column(strategy, batching)
        gram = np.empty((b, b))
        diagonals = max(1, int(_PIECE / len(folded)))
        for first in range(0, b, diagonals):
            budget.check()
            toeplitz_gram(folded, first, min(first + diagonals, b), gram)
        return gram
    total = np.zeros((b, b))
    for _, block in mean_rows(strategy, batching):
        budget.check()
        total += block.T @ block
    return total
