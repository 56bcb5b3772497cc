"""Settling the noise between throws: what is best done with the rows of a gap (docs/theory/batchings.md).

The iterations of a gap use no record. If the gap is at least as long as the memory of C, nothing of a throw reaches
beyond it. The rows of the gap then are all that is still to be learned about the noise of the throw, and any weighted
sum of them may be added to the model: it is a function of what is released anyway. The weights are chosen so that as
little as possible is left of the throw's noise, and the next throw begins anew, with noise of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpmf.numerics import Array
from dpmf.strategies.base import toeplitz_transposed_product

_FAR = 4096  # of long throws, only so many of the last rows decide about the weights


@dataclass(frozen=True, eq=False)
class Settling:
    """How the rows of the gap after a throw are used.

    Attributes:
      steps: the number of iterations of a throw that use records.
      gap: the number of iterations after them that use none.
      weights: of the rows of the gap in the first step of the next throw.
      noising: the first column of C⁻¹, for the rows of one throw and its gap.
    """

    steps: int
    gap: int
    weights: Array
    noising: Array

    @property
    def rows(self) -> int:
        """The number of rows of a throw and its gap; the next throw begins with fresh noise after them."""
        return self.steps + self.gap

    def settled_row(self) -> Array:
        """The sum of the weighted rows of the gap, as factors of the normals of the throw and its gap."""
        padded = np.zeros(self.rows)
        padded[self.steps :] = self.weights
        return toeplitz_transposed_product(self.noising, padded)

    def decoder(self, throws: int) -> Array:
        """The dense matrix that maps the normals of all rows to the noise of all steps."""
        n, rows = self.steps, self.rows
        own = np.zeros((n, rows))
        for i in range(n):
            own[i, : i + 1] = self.noising[i::-1]
        out = np.zeros((throws * n, throws * rows - self.gap))
        for throw in range(throws):
            out[throw * n : (throw + 1) * n, throw * rows : throw * rows + n] = own[:, :n]
            if throw:
                out[throw * n, (throw - 1) * rows : throw * rows] += self.settled_row()
        return out


def settle(noising: Array, steps: int, gap: int) -> Settling:
    """Return the weights that leave the least noise of a throw in the sum of all its steps.

    Args:
      noising: the first column of C⁻¹, with at least `steps` + `gap` entries; C has a bandwidth of at most gap + 1.
      steps: the number of iterations of a throw.
      gap: the number of iterations after it that use no record.

    **Formal guarantees.** None are needed: with any weights the noise of a step is a function of the rows of
    C·x + Z, because C⁻¹ turns those of a gap into noise alone.
    """
    noising = np.asarray(noising[: steps + gap])
    begin = max(0, steps - _FAR)
    n = steps - begin
    left = np.zeros(n + gap)
    left[:n] = toeplitz_transposed_product(noising[:steps], np.ones(steps))[begin:]
    rows = np.zeros((n + gap, gap))
    for q in range(gap):
        rows[: n + q + 1, q] = noising[n + q :: -1]
    weights = np.asarray(-np.linalg.lstsq(rows, left, rcond=None)[0], dtype=np.float64)
    return Settling(steps, gap, weights, noising)


Loss = Callable[[Array, Array], tuple[float, Array, Array]]


def loss_of_noising(loss: Callable[[Array], tuple[float, Array]]) -> Loss:
    """The same error as a function of both columns, of which it depends on C⁻¹ only."""

    def evaluate(column: Array, noising: Array) -> tuple[float, Array, Array]:
        squared, by_noising = loss(noising)
        return squared, np.zeros(len(column)), by_noising

    return evaluate


def settled_loss(
    local: Callable[[Array], tuple[float, Array]], kept: float, steps: int, throws: int, bandwidth: int
) -> Loss:
    """Return the mean squared error over all steps as a function of the first columns of C and of C⁻¹.

    What settling leaves of a throw's noise is fᵀ(CᵀC)⁻¹f, for the columns of C that belong to its steps and the weights
    f with which the first step of the next throw remembers them.

    Args:
      local: the mean squared error over the steps of one throw, as a function of the first column of C⁻¹, with its
        gradient.
      kept: β, the part of the model that one step keeps.
      steps: the number of steps of a throw.
      throws: how many throws there are.
      bandwidth: of C.

    Returns:
      A function of (column of C, column of C⁻¹) with values (error, gradient by the one, gradient by the other).
    """
    from scipy.linalg import solveh_banded

    remembered = kept ** np.arange(steps, 0, -1.0)
    # How much of what is left of one throw is in the model, as a mean over all steps: squares of β^(steps since then).
    times = np.arange(throws * steps).reshape(throws, steps)
    since = np.sum(kept ** (2.0 * times), axis=1)
    share = float(np.sum(np.arange(throws - 1, -1, -1) * since)) / (throws * steps)
    p = min(bandwidth, steps)

    def evaluate(column: Array, noising: Array) -> tuple[float, Array, Array]:
        squared, by_noising = local(noising[:steps])
        c = column[:p]
        lags = np.array([c[: p - d] @ c[d:] for d in range(p)])
        bands = np.repeat(lags[:, None], steps, axis=1)
        x = solveh_banded(bands, remembered, lower=True)
        by_lag = np.array([-(x[: steps - d] @ x[d:]) * (1 if d == 0 else 2) for d in range(p)])
        by_column = np.zeros(len(column))
        for d in range(p):
            by_column[: p - d] += by_lag[d] * c[d:]
            by_column[d:p] += by_lag[d] * c[: p - d]
        by_all = np.zeros(len(noising))
        by_all[:steps] = by_noising
        return squared + share * float(remembered @ x), share * by_column, by_all

    return evaluate
