"""The noise of training steps where there are gaps between throws, made from its definition with dense matrices."""

from __future__ import annotations

import numpy as np

import dpmf


def decoder(mechanism: dpmf.Mechanism) -> np.ndarray:
    """The matrix that maps the normals of all rows to the noise of all steps, made from its definition.

    Where gaps are long enough, the noise in the sum of the steps so far is the least that a linear function of the rows
    so far can have, if it is to hold every step with weight 1. Otherwise the rows of a gap are added to the next step.
    """
    n = mechanism.batching.iterations
    matrix = mechanism.strategy.matrix(n)
    if not getattr(mechanism.batching, "gap", None):
        return np.linalg.inv(matrix)
    adding = merged(mechanism)
    last = [int(np.flatnonzero(row)[-1]) for row in adding]  # the row of each step itself
    width = mechanism.strategy.bandwidth(n)
    if width - 1 > mechanism.batching.gap:
        return adding @ np.linalg.inv(matrix)
    sums = np.zeros((len(last), n))
    for step, row in enumerate(last):
        released = matrix[: row + 1, last[: step + 1]]
        sums[step, : row + 1] = np.linalg.pinv(released).sum(axis=0)
    return np.diff(sums, axis=0, prepend=0)


def merged(mechanism: dpmf.Mechanism) -> np.ndarray:
    """The matrix that adds the rows of each gap to the step after it, made from the definition of the batching."""
    batching = mechanism.batching
    rows: list[np.ndarray] = []
    row, pending = 0, np.zeros(batching.iterations)
    for epoch in range(batching.epochs):
        if epoch and epoch % batching.rethrow_every == 0:
            pending[row : row + batching.gap] = 1.0
            row += batching.gap
        for _ in range(batching.batches_per_epoch):
            pending[row] = 1.0
            rows.append(pending)
            row, pending = row + 1, np.zeros(batching.iterations)
    assert row == batching.iterations
    return np.stack(rows)
