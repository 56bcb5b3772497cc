"""The means of one of several independent throws, and how much the means of different throws have in common."""

from __future__ import annotations

import numpy as np

from dpmf import budget
from dpmf.batching import BallsInBins
from dpmf.gram.means import raised_column
from dpmf.gram.sums import autocorrelation_upper
from dpmf.numerics import Array
from dpmf.strategies.base import ToeplitzStrategy


def rows_are_disjoint(strategy: ToeplitzStrategy, batching: BallsInBins) -> bool:
    """Whether no row of C belongs to columns of a record in two throws.

    A record keeps its group over all throws, so that the last bin of one throw and the first of the next are the gap
    and the stride apart, at least.
    """
    return batching.throws == 1 or strategy.bandwidth(batching.iterations) <= (batching.gap or 0) + batching.stride


def _folded(strategy: ToeplitzStrategy, batching: BallsInBins, rows: int) -> Array:
    """Return the first mean of the first throw, in its first rows.

    C is the matrix for all iterations: strategies may depend on their number, and normalised ones do.
    """
    b, m = batching.batches_per_epoch, batching.rethrow_every or batching.epochs
    column = raised_column(strategy, batching.iterations)[:rows]
    folded = column.copy()
    for epoch in range(1, m):
        folded[epoch * b :] += column[: rows - epoch * b]
    return folded


def first_mean_of_throw(strategy: ToeplitzStrategy, batching: BallsInBins) -> Array:
    """Return the first mean of one throw, in a layout in which mean i is the same sequence moved down by i.

    With a stride s the means of one group are the first one moved down by 0, s, 2s, ... rows. Their inner products are
    sums over the residues of the rows modulo s, so the rows are sorted by residue, and each residue is followed by
    zeros: moving the result down by i < b/s moves every part of it by i, and nothing is cut off.

    Columns of C that end before the next throw begins are taken whole; others up to the last iteration of all.
    """
    b, s = batching.batches_per_epoch, batching.stride
    m, gap = batching.rethrow_every or batching.epochs, batching.gap or 0
    rows = min(m * b + gap if rows_are_disjoint(strategy, batching) else batching.iterations, batching.iterations)
    folded = _folded(strategy, batching, rows)
    parts = []
    for residue in range(min(s, rows)):
        parts += [folded[residue::s], np.zeros(b // s)]
    return np.trim_zeros(np.concatenate(parts), "b")


def largest_product_between_throws(strategy: ToeplitzStrategy, batching: BallsInBins) -> float:
    """Return an upper bound on the inner products of means of different throws; 0 where they have no row in common."""
    if rows_are_disjoint(strategy, batching):
        return 0.0
    b, m = batching.batches_per_epoch, batching.rethrow_every or batching.epochs
    folded = _folded(strategy, batching, batching.iterations)
    nearest = m * b + (batching.gap or 0) - (b - batching.stride)
    return float(autocorrelation_upper(folded)[nearest:].max())


def lower_gram_of_throws(strategy: ToeplitzStrategy, batching: BallsInBins) -> list[tuple[Array, int]]:
    """Return Gram matrices that are at most those of the throws, in every entry, and of how many throws each.

    A throw that another one follows has its own rows and those of the gap, at least; the last throw has no gap. Bins
    are those of the first group. `Mechanism.gram_error` bounds the relative error of the entries, with what computed
    coefficients were raised by.
    """
    from dpmf.kernels import announce_compilation
    from dpmf.kernels.gram import toeplitz_gram

    b, s = batching.batches_per_epoch, batching.stride
    m, gap = batching.rethrow_every or batching.epochs, batching.gap or 0
    budget.require(8.0 * b * b, f"the {b} × {b} Gram matrix", "batches_per_epoch")
    announce_compilation(toeplitz_gram)
    found = []
    for rows, count in ((m * b + gap, batching.throws - 1), (m * b, 1)):
        gram = np.empty((b, b))
        folded = _folded(strategy, batching, min(rows, batching.iterations))
        toeplitz_gram(folded, 0, b, gram)
        found.append((np.ascontiguousarray(gram[::s, ::s]), count))
    return found
