"""The means of one of several independent throws, and how much the means of different throws have in common."""

from __future__ import annotations

import numpy as np

from dpmf.batching import BallsInBins
from dpmf.gram.means import raised_column
from dpmf.gram.sums import autocorrelation_upper
from dpmf.numerics import Array
from dpmf.strategies.base import ToeplitzStrategy


def first_mean_of_throw(strategy: ToeplitzStrategy, batching: BallsInBins, bandwidth: int) -> Array:
    """Return the first mean of one throw, in a layout in which mean i is the same sequence moved down by i.

    With a stride s the means of one group are the first one moved down by 0, s, 2s, ... rows. Their inner products are
    sums over the residues of the rows modulo s, so the rows are sorted by residue, and each residue is followed by
    zeros: moving the result down by i < b/s moves every part of it by i, and nothing is cut off.

    Columns of C that end before the next throw begins are taken whole; others up to the last iteration of all.
    """
    b, s = batching.batches_per_epoch, batching.stride
    m, gap = batching.rethrow_every or batching.epochs, batching.gap or 0
    separate = bandwidth <= gap + 1
    rows = m * b + (gap if separate else 0) if batching.throws == 1 or separate else batching.iterations
    column = raised_column(strategy, rows)
    folded = column.copy()
    for epoch in range(1, m):
        folded[epoch * b :] += column[: rows - epoch * b]
    bins = b // s
    parts = []
    for residue in range(min(s, rows)):
        parts += [folded[residue::s], np.zeros(bins)]
    return np.trim_zeros(np.concatenate(parts), "b")


def largest_product_between_throws(strategy: ToeplitzStrategy, batching: BallsInBins, bandwidth: int) -> float:
    """Return an upper bound on the inner products of means of different throws; 0 where they have no row in common."""
    gap = batching.gap or 0
    if batching.throws == 1 or bandwidth <= gap + 1:
        return 0.0
    b, m = batching.batches_per_epoch, batching.rethrow_every or batching.epochs
    column = raised_column(strategy, batching.iterations)
    folded = column.copy()
    for epoch in range(1, m):
        folded[epoch * b :] += column[: len(column) - epoch * b]
    nearest = m * b + gap - (b - batching.stride)
    return float(autocorrelation_upper(folded)[nearest:].max())
