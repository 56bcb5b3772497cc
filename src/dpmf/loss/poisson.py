"""δ(ε) of a Gaussian mechanism on a Poisson sample, in closed form and rounded to the side asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpmf.loss.gaussian import Side, gaussian_delta
from dpmf.numerics import UNIT


@dataclass(frozen=True)
class PoissonSample:
    """P = (1 − q)·N(0, 1) + q·N(μ, 1) against Q = N(0, 1).

    With γ = e^ε and the profile h of the Gaussian mechanism, h(γ) = sup N(μ, 1)(E) − γ·N(0, 1)(E):
        remove: P − γQ = q·(N(μ, 1) − (1 + (γ − 1)/q)·N(0, 1)),    δ = q·h(1 + (γ − 1)/q);
        add:    Q − γP = a·(N(0, 1) − (γq/a)·N(μ, 1)), a = q − (γ − 1)(1 − q),    δ = a·h(γq/a), or 0 where a ≤ 0.

    Attributes:
      sensitivity: μ.
      rate: q, in (0, 1].
    """

    sensitivity: float
    rate: float

    def delta(self, epsilon: float, direction: str, side: Side = "upper") -> float:
        """δ(ε) for any ε ≥ 0.

        **Formal guarantees.** sup E of a·N(0, 1)(E) − γq·N(μ, 1)(E) grows with a, which is moved by its error of less
        than 8u·q first. The ε of the Gaussian mechanism is moved to the side that is asked for by the rounding errors
        of its logarithm, and the closed form is rounded to that side (`gaussian_delta`).
        """
        q = self.rate
        up = 1 if side == "upper" else -1
        rise = math.expm1(min(epsilon, 700.0))
        if direction == "remove":
            inner = math.log1p(rise / q) * (1 - up * 16 * UNIT)
            return min(1.0, q * gaussian_delta(self.sensitivity, inner, side) * (1 + up * 4 * UNIT))
        share = q - rise * (1 - q) + up * 16 * UNIT * q
        if share <= 0:
            return 0.0
        share = min(share, 1.0)
        inner = epsilon + math.log(q / share)
        inner -= up * 16 * UNIT * (1 + abs(epsilon) + abs(inner))
        return min(1.0, share * gaussian_delta(self.sensitivity, inner, side) * (1 + up * 4 * UNIT))
