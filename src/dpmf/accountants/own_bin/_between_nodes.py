"""What the payoff can be between two nodes, from its values there (docs/theory/own_bin.md).

Given all else, the payoff is P(τ) = Ψ(Σ α_j·ξ_j), where each α_j grows like e^(l_j·τ). It satisfies
P'' + 2αP' + βP ≥ 0 for numbers α, β that depend on √v and on the least and the largest load only. So between two nodes
P is at most the solution of P'' + 2αP' + βP = 0 with the same values there: values at nodes bound the integral.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx

from dpmf.numerics import Array

_FAR = 30.0  # below −x, and beyond the last edge, closed forms bound what is left
_EDGES = np.concatenate([np.linspace(-_FAR, -6.0, 49), np.linspace(-6.0, 6.0, 241)[1:], np.linspace(6.0, 25.0, 77)[1:]])
_PARTS = np.linspace(-0.3, 1.0, 27)  # α is one of these parts of the largest load
_RISE = 2.5  # about P'/P where most comes from: what a larger α costs
_LARGEST_ROOT = 10.0
_LEAST_CHANGE = 1e-8  # the least |β − α²|
_WIDEST = 3.0  # the largest width of a cell, times the frequency; π would be too much
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(16)


def _mills(x: Array) -> Array:
    """φ(x)/Φ(x)."""
    found: Array = math.sqrt(2 / math.pi) / erfcx(-x / math.sqrt(2))
    return found


@dataclass(frozen=True)
class Curve:
    """The equation f'' + 2αf' + βf = 0. `frequency` is √(β − α²), and 0 where that is not a number."""

    alpha: float
    beta: float

    @property
    def frequency(self) -> float:
        return math.sqrt(max(self.beta - self.alpha * self.alpha, 0.0))

    def weights(self, nodes: Array, *, radial: bool = False) -> Array:
        """∫ f(x)·φ(x) dx between the first and the last node, as weights of values at the nodes; rounded up.

        If radial, ∫ f(x)·x·e^(−x²/2) dx: x is the radius of a pair of normal variables, at least 0.

        f solves the equation in every cell and has the values given at both ends. Where a cell is not clearly narrower
        than π/`frequency`, nothing can be said, and weights are infinite.
        """
        if not self.frequency * float(np.diff(nodes).max()) <= _WIDEST:
            return np.full(len(nodes), math.inf)
        change = self.beta - self.alpha * self.alpha
        rate = math.sqrt(abs(change))
        wave = np.sin if change > 0 else np.sinh
        left, width = nodes[:-1, None], np.diff(nodes)[:, None]
        after = width * (_ABSCISSAE + 1) / 2
        before = width - after
        x = left + after
        density = np.exp(-x * x / 2) * _WEIGHTS * (width / 2 / math.sqrt(2 * math.pi)) / wave(rate * width)
        if radial:
            density *= x * math.sqrt(2 * math.pi)
        weights = np.zeros(len(nodes))
        weights[:-1] += (density * wave(rate * before) * np.exp(-self.alpha * after)).sum(axis=1)
        weights[1:] += (density * wave(rate * after) * np.exp(self.alpha * before)).sum(axis=1)
        found: Array = weights * (1 + 1e-9)
        return found


class Curves:
    """The equations for one √v.

    **Formal guarantees.** With x = d − √v, λ = φ/Φ at x and q = (K/B)·Φ(x), P' = q·m and
    P'' = q·(m₂ − 2m² + m²·λ/√v), m and m₂ the means of l_j and l_j² with weights α_j·ξ_j. As m₂ ≥ m², it suffices that
    β·Ψ/q is at least N = −2αm − m²·(λ/√v − 1) for all x and all m between the least and the largest load. λ falls and
    Ψ/q = λ(x)/λ(x + √v) − 1 rises with x, so that on a cell N is largest with λ of its right end, and Ψ/q is least at
    its left end. log λ has the slope −(x + λ), and x + λ rises, so Ψ/q ≥ √v·(x + λ), too. Left of all cells, at −t,
    N is at most α²·√v/(t − √v) and q/Ψ at most (t + √(t² + 8))/(2√v) (Sampford's inequality); their product falls
    with t. Right of all cells λ ≥ 0 and the last q/Ψ serve.
    """

    def __init__(self, root: float) -> None:
        mills = _mills(_EDGES)
        worth = mills / _mills(_EDGES + root) * (1 - 1e-12) - 1
        worth = np.maximum(worth, root * (_EDGES + mills) * (1 - 1e-9))  # of the first little is left for small √v
        self._inverse: Array = 1 / worth
        self._bends: Array = np.append(mills[1:] * (1 - 1e-12), 0.0) / root - 1
        self._root = root

    @staticmethod
    def usable(root: float) -> bool:
        """Whether the closed forms far away hold."""
        return root <= _LARGEST_ROOT

    def least(self, low: float, high: float) -> Curve:
        """The equation that loses least, for loads between `low` and `high`."""
        alphas = _PARTS * high
        betas = np.array([self.beta(alpha, low, high) for alpha in alphas.tolist()])
        best = int(np.argmin(2 * alphas * _RISE + betas))
        alpha, beta = float(alphas[best]), float(betas[best])
        if abs(beta - alpha * alpha) < _LEAST_CHANGE:
            beta = alpha * alpha + _LEAST_CHANGE
        return Curve(alpha, beta)

    def beta(self, alpha: float, low: float, high: float) -> float:
        """The least β that has been shown to do for α and loads between `low` and `high`, at least 0."""
        bends = self._bends
        inside = np.clip(-alpha / np.where(bends > 0, bends, 1.0), low, high)
        most = np.zeros(len(bends))
        for m in (low, high, np.where(bends > 0, inside, low)):
            most = np.maximum(most, -m * (2 * alpha + m * bends))
        far = alpha * alpha * (_FAR + math.sqrt(_FAR * _FAR + 8)) / (2 * (_FAR - self._root))
        return max(float((most * self._inverse).max()), far) * (1 + 1e-9)
