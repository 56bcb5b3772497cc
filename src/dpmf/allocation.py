"""Balls-in-bins batching, the means of the dominating pair, and their Gram matrix.

Each record is thrown into one of b bins, once, and takes part in the iterations i, i + b, i + 2b, ... of its bin i. By
Lemma 3.2 of Choquette-Choo et al. (2025) the pair P = 1/b Σ N(m_i, σ²I), Q = N(0, σ²I) with m_i = Σ_j |C|[:, i + jb]
dominates the mechanism (remove: (P, Q); add: (Q, P)). Everything an accountant needs is in the Gram matrix of the m_i.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpmf import budget, validation
from dpmf.strategies.base import Array, Strategy, ToeplitzStrategy

MAX_ITERATIONS = 10**8  # a handful of arrays of N doubles are held
_CHUNK_BYTES = 64 * 2**20
_PIECE = 2e8  # products between two looks at the clock


@dataclass(frozen=True)
class BallsInBins:
    """Balls-in-bins ("random allocation") batching.

    Attributes:
      epochs: k, how often the bins are gone through.
      batches_per_epoch: b, the number of bins.
      iterations: N; k·b unless the last epoch is cut off, (k−1)·b < N ≤ k·b, and never less than b.
    """

    epochs: int
    batches_per_epoch: int
    iterations: int = 0

    def __post_init__(self) -> None:
        k = validation.integer("epochs", self.epochs, at_least=1, at_most=MAX_ITERATIONS)
        b = validation.integer("batches_per_epoch", self.batches_per_epoch, at_least=1, at_most=MAX_ITERATIONS)
        n = k * b
        if not (type(self.iterations) is int and self.iterations == 0):  # 0 is "not given"
            n = validation.integer("iterations", self.iterations, at_least=1)
            if n < b:
                raise ValueError(f"batches_per_epoch must be at most iterations = {n}, got {b}")
            if not (k - 1) * b < n <= k * b:
                raise ValueError(
                    f"iterations must be in {(k - 1) * b + 1}..{k * b} for {k} epochs of {b} batches, got {n}"
                )
        if n > MAX_ITERATIONS:
            most = MAX_ITERATIONS // b
            raise ValueError(f"epochs must be at most {most} at {b} batches (N ≤ {MAX_ITERATIONS}), got {k}")
        for name, value in (("epochs", k), ("batches_per_epoch", b), ("iterations", n)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_iterations(cls, iterations: int, batches_per_epoch: int) -> BallsInBins:
        """N iterations over b bins, with as many epochs as that takes."""
        n = validation.integer("iterations", iterations, at_least=1)
        b = validation.integer("batches_per_epoch", batches_per_epoch, at_least=1)
        return cls(math.ceil(n / b), b, n)

    @property
    def name(self) -> str:
        cut = "" if self.iterations == self.epochs * self.batches_per_epoch else f", N={self.iterations}"
        return f"k={self.epochs}, b={self.batches_per_epoch}{cut}"


def folded_column(strategy: ToeplitzStrategy, allocation: BallsInBins) -> Array:
    """The first mixture mean m_0; m_i is this sequence moved down by i and cut off at N."""
    n, b, k = allocation.iterations, allocation.batches_per_epoch, allocation.epochs
    padded = np.zeros(k * b)
    np.abs(strategy.strategy_coef(n), out=padded[:n])
    rows = padded.reshape(k, b)
    return np.cumsum(rows, axis=0, out=rows).reshape(-1)[:n]


def mean_rows(strategy: Strategy, allocation: BallsInBins) -> Iterator[tuple[int, Array]]:
    """The mixture means by iteration: (first row t, block whose row r holds m_0[t+r], ..., m_{b−1}[t+r])."""
    n, b, k = allocation.iterations, allocation.batches_per_epoch, allocation.epochs
    if isinstance(strategy, ToeplitzStrategy):
        folded = np.concatenate((np.zeros(b), folded_column(strategy, allocation)))
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


def gram_matrix(strategy: Strategy, allocation: BallsInBins) -> Array:
    """G[i, j] = ⟨m_i, m_j⟩, b × b.

    Toeplitz strategies take O(bN) time and O(b² + N) memory, others are streamed by rows. Every entry is a sum of
    non-negative products of sums of at most k ≤ N terms, so its relative rounding error is at most (2N + 4)·2⁻⁵².
    """
    b = allocation.batches_per_epoch
    budget.require(8.0 * b * b, f"the {b} × {b} Gram matrix", "batches_per_epoch")
    if isinstance(strategy, ToeplitzStrategy):
        from dpmf.kernels import announce_compilation
        from dpmf.kernels.gram import toeplitz_gram

        announce_compilation(toeplitz_gram)
        folded = folded_column(strategy, allocation)
        gram = np.empty((b, b))
        diagonals = max(1, int(_PIECE / len(folded)))
        for first in range(0, b, diagonals):
            budget.check()
            toeplitz_gram(folded, first, min(first + diagonals, b), gram)
        return gram
    total = np.zeros((b, b))
    for _, block in mean_rows(strategy, allocation):
        budget.check()
        total += block.T @ block
    return total


def cyclic_distance(b: int) -> np.ndarray:
    """The b × b matrix of distances between indices on a ring."""
    i = np.arange(b)
    linear = np.abs(i[:, None] - i[None, :])
    return np.asarray(np.minimum(linear, b - linear))


def cyclic_bandwidth(gram: Array) -> int:
    """The least p with G[i, j] = 0 wherever the cyclic distance of i and j is at least p (0 for G = 0)."""
    b = len(gram)
    for distance in range(b // 2, -1, -1):
        i = np.arange(b)
        if np.any(gram[i, (i + distance) % b]):
            return distance + 1
    return 0


def circulant_majorant(gram: Array) -> Array:
    """g_d = max_i G[i, (i+d) mod b]: the first row of the least circulant matrix above G."""
    b = len(gram)
    i = np.arange(b)
    return np.array([gram[i, (i + d) % b].max() for d in range(b)])


@dataclass(frozen=True)
class BandedMajorant:
    """The cyclically p-banded matrix G^(p) and the constant τ with G ≤ G^(p) + τ·1 entrywise.

    Attributes:
      p: the cyclic bandwidth kept; 0 keeps nothing (τ is then the largest entry).
      band: b × max(p, 1); band[i, d] = G^(p)[i − d, i] for d ≤ i (linear neighbours below i).
      wrap: b × max(p, 1); wrap[i, d] = G^(p)[i, i + d − b] for i + d ≥ b where that pair has linear distance ≥ p.
      tau: the constant.
      wraps: whether any wrapped entry is non-zero.
      exact: whether nothing was truncated (τ = 0).
    """

    p: int
    band: Array
    wrap: Array
    tau: float

    @property
    def wraps(self) -> bool:
        return bool(np.any(self.wrap))

    @property
    def exact(self) -> bool:
        return self.tau == 0.0


def truncate(gram: Array, p: int) -> BandedMajorant:
    """Split G into its cyclic band of bandwidth p and τ, the largest entry outside the band.

    p is cut to ⌊b/2⌋ + 1, at which every pair is inside. Inside, G^(p) = max(G − τ, 0), so that G^(p) + τ ≥ G
    everywhere. A pair is listed once: as a linear neighbour if |i − j| < p, as a wrapped one otherwise.
    """
    b = len(gram)
    budget.require(32.0 * b * b, f"the bands of the {b} × {b} Gram matrix", "batches_per_epoch")
    p = min(p, b // 2 + 1)
    outside = cyclic_distance(b) >= p
    tau = float(gram[outside].max()) if outside.any() else 0.0
    reduced = np.maximum(gram - tau, 0.0)
    width = max(p, 1)
    band, wrap = np.zeros((b, width)), np.zeros((b, width))
    i = np.arange(b)
    for d in range(min(p, b)):
        below = i[i >= d]
        band[below, d] = reduced[below - d, below]
        across = i[(i + d >= b) & (d > 0) & (b - d >= p)]
        wrap[across, d] = reduced[across, across + d - b]
    return BandedMajorant(p, band, wrap, tau)
