"""The add direction at large ε from bounds at smaller ε (docs/theory/own_bin.md).

Φ⁻¹(δ(ε)) is a concave function of ε in the add direction, by Ehrhard's inequality. So it is at most the line through
an upper bound at one ε and a lower bound at a smaller one. Four moments say much more there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import ndtr, ndtri

from dpmf.numerics import UNIT

_LARGEST = 0.999  # from here on Φ⁻¹ has too few digits


def extrapolated(strike: float, strikes: Sequence[float], upper: Sequence[float], lower: Sequence[float]) -> float:
    """A bound on E(1 − K·A)_+ for one K from bounds at smaller ones, at most 1.

    **Formal guarantees.** A is the mean of e^(u_j − S_jj/2), u normal, and T another standard normal variable. The
    pairs (u, t) with log K + log A − log Φ(−t) ≤ 0 have probability E(1 − K·A)_+, because Φ(−T) is uniform. The left
    side is convex in (u, t, log K), for log A is and Φ is log-concave. So the set for the mean of two log K contains
    the mean of their sets, which are convex, and Ehrhard's inequality says that H = Φ⁻¹(E(1 − K·A)_+) is concave in
    log K. Hence H at κ is at most H₂ − (κ − κ₂)/(κ₂ − κ₁)·(H₁ − H₂) for κ₁ < κ₂ < κ, which increases in H₂ and
    decreases in H₁. Logarithms are known up to 2u(1 + |κ|), and Φ⁻¹ and Φ, here, to ten digits.

    Args:
      strike: K.
      strikes: smaller K, increasing.
      upper: upper bounds there.
      lower: lower bounds there.
    """
    kappa = math.log(strike)
    kappas = [math.log(one) for one in strikes]
    slip = 4 * UNIT * (1 + max(abs(one) for one in (kappa, *kappas)))
    above = [float(ndtri(one)) if 0 < one < _LARGEST else math.inf for one in upper]
    below = [float(ndtri(one)) if 1e-300 < one < _LARGEST else -math.inf for one in lower]
    found = math.inf
    for j in range(1, len(kappas)):
        for i in range(j):
            if not below[i] > above[j]:
                continue
            ratio = max(kappa - kappas[j] - slip, 0.0) / (kappas[j] - kappas[i] + slip)
            room = 1e-10 * (1 + ratio) * (1 + abs(above[j]) + abs(below[i]))
            found = min(found, above[j] - ratio * (below[i] - above[j]) + room)
    return min(float(ndtr(found)) * (1 + 1e-9), 1.0)
