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

from dpmf.numerics import FLOOR, Array

_FAR = 30.0  # below −x, and beyond the last edge, closed forms bound what is left
_EDGES = np.concatenate([np.linspace(-_FAR, -6.0, 49), np.linspace(-6.0, 6.0, 241)[1:], np.linspace(6.0, 25.0, 77)[1:]])
_PARTS = np.linspace(-0.3, 1.0, 27)  # α is one of these parts of the largest load
_RISE = 2.5  # about P'/P where most comes from: what a larger α costs
_LARGEST_ROOT = 10.0
_LEAST_CHANGE = 1e-8  # the least |β − α²|
_WIDEST = 3.0  # the largest width of a cell, times the frequency; π would be too much
_STEEPEST = 40.0  # by how much the logarithms of a solution may change in a cell, so that nothing overflows
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_CHANGE = 16.0  # about how much the logarithm of an integrand changes in a panel of the quadrature; any is sound
# An integrand is bounded in a disc around each panel, of so many half panels, and 16 points miss at most this part of
# the bound (docs/theory/own_bin.md, "The weights").
_DISC = (4 + 1 / 4) / 2
_MISSED = 4.01 / (1 - 4.0**-2) * 4.0**-32


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
        than π/`frequency`, or so wide that numbers might overflow, nothing can be said, and weights are infinite.

        **Formal guarantees.** Each weight is at least the integral. Panels of cells are integrated by 16 points, and
        what those may miss is added: it is at most 4.01·4^(−32)/(1 − 4^(−2)) times half a panel times the largest
        absolute value of the integrand in a disc around the panel (docs/theory/own_bin.md, "The weights"). Rounding
        errors are below 1e-9 of a weight, and what underflows is below `FLOOR`.
        """
        change = self.beta - self.alpha * self.alpha
        rate = math.sqrt(abs(change))
        wave = np.sin if change > 0 else np.sinh
        left, width = nodes[:-1, None], np.diff(nodes)[:, None]
        widest = float(width.max())
        if not (self.frequency * widest <= _WIDEST and (abs(self.alpha) + rate) * widest <= _STEEPEST):
            return np.full(len(nodes), math.inf)
        far = np.maximum(np.abs(left), np.abs(left + width)) + abs(self.alpha) + rate
        panels = math.ceil(float((width * far).max()) / _CHANGE)
        places, half = np.arange(panels)[:, None] + 0.5, width / (2 * panels)
        weights = np.zeros(len(nodes))
        # The quadrature, and then what it may miss: the same sums over the middles of panels, with bounds in a disc.
        for offsets, masses, radius, size in (
            ((places + _ABSCISSAE / 2).ravel() / panels, np.tile(_WEIGHTS, panels), 0.0, wave),
            (places.ravel() / panels, _MISSED, _DISC * half, np.sinh),
        ):
            after, before = width * offsets, width * offsets[::-1]
            x = left + after
            rise = np.abs(x + self.alpha) * radius + radius**2 / 2
            density = np.exp(rise - x * x / 2 - self.alpha * after) * (masses * half / math.sqrt(2 * math.pi))
            if radial:
                density *= (np.abs(x) + radius) * math.sqrt(2 * math.pi)
            density /= wave(rate * width)
            weights[:-1] += (density * size(rate * (before + radius))).sum(axis=1)
            weights[1:] += (density * size(rate * (after + radius)) * np.exp(self.alpha * width)).sum(axis=1)
        found: Array = weights * (1 + 1e-9) + FLOOR
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
