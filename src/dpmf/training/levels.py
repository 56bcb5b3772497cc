"""How much noise each step adds: for corrections of adaptive optimizers, or for choosing a learning rate."""

from __future__ import annotations

import numpy as np

from dpmf import validation
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.run import only_mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.training._schedule import Schedule


def noise_levels(mechanism: Mechanism, noise_multiplier: float = 1.0) -> Array:
    """The standard deviation of the noise in every step, for clipping norm 1.

    Independent noise has the same level in every step. The level of correlated noise grows over the first steps, since
    row t of C⁻¹ has t + 1 entries, and the first step after a gap between throws has the noise of the gap too.

    Args:
      mechanism: strategy and batching.
      noise_multiplier: σ, for clipping norm 1 and the strategy as given.

    Returns:
      For every step σ times the norm of its row of C⁻¹ (after a gap, of the weighted sum of its rows). Multiply it by
      the clipping norm for the noise in the sum of clipped gradients, and divide by the expected batch size for that in
      the mean, which is what an optimizer gets.

    **Formal guarantees.** None are needed: these numbers do not depend on data.
    """
    only_mechanism(mechanism)
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    schedule, n = Schedule.of(mechanism.batching), mechanism.batching.iterations
    if (settling := mechanism.settling) is not None:
        within = np.cumsum(np.square(settling.noising[: settling.steps]))
        squares = np.tile(within, mechanism.batching.throws)
        squares[settling.steps :: settling.steps] += np.sum(settling.settled_row() ** 2)
        return np.asarray(sigma * np.sqrt(squares))
    if isinstance(mechanism.strategy, ToeplitzStrategy):
        column = mechanism.strategy.noising_coef(n)
        norms = np.sqrt(np.cumsum(np.square(column)))
        sums = np.append(0.0, np.cumsum(column))  # sums[i] is that of the first i entries

        def level(rows: range) -> float:
            if len(rows) == 1:
                return float(norms[rows[0]])
            first, stop = rows[0], rows[-1] + 1
            added = sums[stop:0:-1] - np.append(sums[first:0:-1], np.zeros(stop - first))
            return float(np.linalg.norm(added))

    else:
        inverse = mechanism.strategy.inverse(n)

        def level(rows: range) -> float:
            return float(np.linalg.norm(inverse[rows[0] : rows[-1] + 1].sum(axis=0)))

    return sigma * np.array([level(schedule.rows(step)) for step in range(schedule.steps)])
