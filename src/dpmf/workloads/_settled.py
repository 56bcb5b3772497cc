"""The error where there are gaps between throws: the noise in the model after every step of training."""

from __future__ import annotations

import numpy as np

from dpmf.numerics import Array
from dpmf.strategies.base import check_dense, toeplitz_product, toeplitz_transposed_product
from dpmf.strategies.settling import Settling
from dpmf.workloads._kinds import Damped, ToeplitzWorkload, Workload, squared_norms

_SAME = 1e-12  # ratios of neighbouring coefficients that differ by less count as equal


def squared_rows(workload: Workload, settling: Settling, throws: int) -> Array:
    """Return the squared norms of the rows of A·B, B·Z being the noise of all steps.

    The noise of a throw and that of earlier ones are independent. What earlier throws have left is the same function of
    the time since then for each of them, if the workload is the same at every step.
    """
    n, steps = settling.steps, throws * settling.steps
    if not isinstance(workload, ToeplitzWorkload):
        check_dense(throws * settling.rows)
        return squared_norms(workload.matrix(steps) @ settling.decoder(throws))
    coef = workload.coef(steps + n)
    own = np.cumsum(toeplitz_product(coef[:n], settling.noising[:n]) ** 2)
    since = _left(coef, *_steady(workload, coef), settling, (throws - 1) * n)
    before = np.concatenate((np.zeros((1, n)), np.cumsum(since.reshape(throws - 1, n), axis=0)))
    return np.asarray((own + before).ravel())


def _steady(workload: ToeplitzWorkload, coef: Array) -> tuple[int, float]:
    """From which step on every step multiplies the past by the same number, and this number."""
    if isinstance(workload, Damped):
        return 0, workload.kept
    ratios = coef[1:] / np.where(coef[:-1] == 0, np.inf, coef[:-1])
    differ = np.flatnonzero(np.abs(ratios - ratios[-1]) > _SAME)
    return (int(differ[-1]) + 1 if len(differ) else 0), float(ratios[-1])


def _left(coef: Array, steady: int, ratio: float, settling: Settling, count: int) -> Array:
    """The squared norm of what one throw has left in the model, 0, 1, ... steps after the next one began."""
    n = settling.steps
    settled = settling.settled_row()
    out = np.empty(count)
    for time in range(min(steady + 1, count)):
        row = coef[time] * settled
        row[:n] += toeplitz_transposed_product(settling.noising[:n], coef[time + n : time : -1])
        out[time] = row @ row
    if steady + 1 < count:
        out[steady + 1 :] = out[steady] * ratio ** (2.0 * np.arange(1, count - steady))
    return out


def merged(inverse: Array, steps: int, throws: int) -> Array:
    """Return the rows of C⁻¹, with those of every gap added to the one after it."""
    per_throw, gap = steps // throws, (len(inverse) - steps) // (throws - 1)
    starts = (np.arange(throws)[:, None] * (per_throw + gap) + np.arange(per_throw)).ravel()
    starts[per_throw::per_throw] -= gap
    return np.asarray(np.add.reduceat(inverse, starts, axis=0))
