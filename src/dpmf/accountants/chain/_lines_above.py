"""Lines raised above a given Gram matrix, and the chain that needs hardly any of that: of geometric memory.

With coefficients c_0, c·ρ, c·ρ², ... the entries of G off the diagonal are products u_i·v_j for i < j, as are those of
a chain of order 1, and c_0 only adds nuggets. Such a chain is G itself, needs no fit and no static factor, and without
that factor a law takes a small part of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpmf.accountants.chain._block_fits import MARGIN
from dpmf.accountants.chain._lines import LineModel
from dpmf.numerics import Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide which lines are used. All positive values give sound bounds.

    Attributes:
      most_raised: a line that has to be raised by a larger factor is raised by a constant instead.
      exact: the part that a chain read off G may be away from it, over a row and altogether, to be used instead of a
        fit.
    """

    most_raised: float = 4.0
    exact: float = 1e-3


_TUNING = _Tuning()


def raised(model: LineModel, gram: Array) -> LineModel:
    """The model with its covariance raised above G: by a factor on its smooth part or by a constant.

    **Formal guarantees.** covariance ≥ G·(1 + 10⁻¹⁰/2) entrywise, computed from the very numbers that are returned. A
    constant τ enters through the loads, √(λ_i² + τ), whose products are at least λ_iλ_j + τ (Cauchy–Schwarz).
    """
    smooth = LineModel(model.loads, model.deviations, model.correlations, np.zeros(model.size))
    target = gram * (1 + MARGIN)
    off = ~np.eye(model.size, dtype=bool)
    choices = []
    covariance = smooth.covariance()
    if model.size == 1:
        return LineModel(model.loads * 0, model.deviations * 0, model.correlations, np.diagonal(target).copy())
    missing = np.where(off, target - covariance, 0.0)
    tau = max(0.0, float(missing.max())) * (1 + MARGIN)
    choices.append(LineModel(np.sqrt(model.loads**2 + tau), model.deviations, model.correlations, model.nuggets))
    needed = off & (target > 0)
    with np.errstate(divide="ignore", over="ignore"):
        factor = float((target[needed] / covariance[needed]).max()) if needed.any() else 1.0
    if factor < _TUNING.most_raised:
        choices.append(smooth.scaled(math.sqrt(max(1.0, factor) * (1 + MARGIN))))
    finished = []
    for choice in choices:
        nuggets = np.maximum(np.diagonal(target) - choice.loads**2 - choice.deviations**2, 0.0)
        done = LineModel(choice.loads, choice.deviations, choice.correlations, nuggets * (1 + MARGIN))
        short = float((target - done.covariance()).max())
        if short > 0:  # rounding only
            done = LineModel(np.sqrt(done.loads**2 + 2 * short), done.deviations, done.correlations, done.nuggets)
        if np.all(done.covariance() >= gram * (1 + 0.5 * MARGIN)):
            finished.append(done)
    return min(finished, key=lambda done: float(done.covariance().sum()))


def exact_chain(gram: Array) -> LineModel | None:
    """A chain without a static factor that is nearly G itself, and above it; None where there is none."""
    chain = _read_off(gram)
    if chain is None:
        return None
    for i in (0, len(gram) // 2):  # most that are not close are not so in these rows
        ahead = chain.deviations[i] * chain.deviations[i + 1 :] * np.cumprod(chain.correlations[i:])
        if not np.abs(ahead - gram[i, i + 1 :]).sum() <= _TUNING.exact * gram[i, i + 1 :].sum():
            return None
    above = raised(chain, gram)
    return above if above.covariance().sum() <= (1 + _TUNING.exact) * gram.sum() else None


def _read_off(gram: Array) -> LineModel | None:
    """The chain that has the two diagonals next to the main one in common with G; None where there is none."""
    n, own = len(gram), np.diagonal(gram)
    if n < 4 or not np.all(gram > 0):
        return None
    near, next_but_one = np.diagonal(gram, 1), np.diagonal(gram, 2)
    # G_ij = u_i·v_j for i < j: variances are u_i·v_i. At the ends they are not determined: as those next to them,
    # within what G and the correlation of the last step allow.
    inner = near[:-1] * near[1:] / next_but_one
    first = max(inner[0], near[0] ** 2 / inner[0])
    last = max(min(inner[-1], own[-1]), near[-1] ** 2 / inner[-1])
    variances = np.concatenate(([first], inner, [last]))
    if not np.all(variances <= (1 + _TUNING.exact) * own):
        return None
    correlations = near / np.sqrt(variances[:-1] * variances[1:])
    if not np.all(correlations <= 1 + 1e-9):
        return None
    return LineModel(np.zeros(n), np.sqrt(variances), np.minimum(correlations, 1.0), np.zeros(n))
