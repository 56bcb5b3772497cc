"""Memory that decays geometrically: the Gram matrix is that of a chain, which is read off it.

With coefficients c_0, c·ρ, c·ρ², ... the entries of G off the diagonal are products u_i·v_j for i < j, as are those of
a chain of order 1, and c_0 only adds nuggets. Such a chain is G itself, needs no fit and no static factor, and without
that factor a law takes a small part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpmf.accountants.chain._lines import LineModel
from dpmf.numerics import Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide which chains are used. All positive values give sound bounds.

    Attributes:
      exact: the part that a chain read off G may be away from it, over a row and altogether, to be used instead of a
        fit.
    """

    exact: float = 1e-3


_TUNING = _Tuning()


def exact_chain(gram: Array, raised: Callable[[LineModel, Array], LineModel]) -> LineModel | None:
    """A chain without a static factor that is nearly G itself, `raised` above it; None where there is none."""
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
