"""Payoffs above a call, smoothed by a shared factor, whose second derivative is convex and increasing.

With A = X·A°, X = e^(rz − r²/2) independent of A°, the call is E(A − γ)_+ = E f(A°), f(a) = E(Xa − γ)_+, the formula of
Black and Scholes. f'' is convex and increasing up to its first inflection point a₁. For any a* ≤ a₁ the payoff that is
f up to a*, and has the second derivative f''(a*) + s·(a − a*) beyond, is one that the cascade's theorem allows, if
s ≥ f'''(a*). It is above f for s large enough. Without a shared factor f is the call itself, and the payoff a cubic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from dpmf.numerics import UNIT, Array

_RATIO = 1.02  # of the distances from a* at which f is compared
_NEAREST, _FARTHEST = 1e-3, 60.0  # of them, in units of γ − a* and of γ
_ERROR = 1e-12


@dataclass(frozen=True)
class SmoothedCall:
    """f(a) = E(Xa − γ)_+, X a log-normal of mean 1 and log-variance `variance` > 0."""

    gamma: float
    variance: float

    @property
    def _root(self) -> float:
        return math.sqrt(self.variance)

    def _position(self, a: Array) -> Array:
        return np.asarray((np.log(a / self.gamma) + self.variance / 2) / self._root)

    def inflection(self) -> float:
        """a₁: with L = 1 + d/r, d the position of a, f'''' has the sign of L² + L − 1/r²."""
        low = -0.5 * (1 + math.sqrt(1 + 4 / self.variance))
        return self.gamma * math.exp(self.variance * (low - 1.5)) * (1 - 1e-9)

    def value(self, a: Array) -> tuple[Array, Array]:
        """f and a bound on its rounding error."""
        d = self._position(a)
        gain, loss = a * ndtr(d), self.gamma * ndtr(d - self._root)
        slip = (4 + np.abs(np.log(a / self.gamma)) + self.variance) / self._root
        error = 2e-13 + 16 * UNIT * (1 + np.abs(d) + self._root) * (np.abs(d) + self._root + slip)
        return np.maximum(gain - loss, 0.0), gain * np.minimum(error, 1.0)

    def derivatives(self, a: float) -> tuple[float, float, float]:
        """f', f'', f''' (rounding: a relative 10⁻¹² is added where they are used)."""
        d = float(self._position(np.array(a)))
        second = math.exp(-0.5 * d * d) / (a * self._root * math.sqrt(2 * math.pi))
        return float(ndtr(d)), second, -second / a * (1 + d / self._root)


@dataclass(frozen=True)
class Majorant:
    """f up to `start`, a cubic with these Taylor coefficients (of degree 0..3, all ≥ 0) beyond."""

    call: SmoothedCall
    start: float
    coefficients: Array

    @classmethod
    def of(cls, call: SmoothedCall, start: float) -> Majorant:
        """The least cubic that keeps the payoff above f.

        **Formal guarantees.** With h = f − (its Taylor polynomial of degree 2 at a*), the cubic coefficient must be at
        least sup h(a* + t)/t³, and f'''(a*)/6. In each cell [t_i, t_(i+1)], f is below its chord and the polynomial
        above its tangent at t_i, so h is below a linear function α + βt, whose quotient by t³ has its maximum at an end
        or where −3α = 2βt. Below the first cell h = f'''(ξ)·t³/6, and f''' is largest at a₁ and increases up to it;
        beyond the last cell h ≤ f ≤ a, and a/(a − a*)³ falls. Rounding errors of f are added, those of the polynomial
        subtracted.
        """
        first, second, third = call.derivatives(start)
        base, base_error = call.value(np.array([start]))
        gap = call.gamma - start
        count = math.ceil(math.log(_FARTHEST * call.gamma / (_NEAREST * gap)) / math.log(_RATIO)) + 1
        t = _NEAREST * gap * _RATIO ** np.arange(count)
        found, error = call.value(np.asarray(start + t))
        below = base - base_error + (first * t + second * t**2 / 2) * (1 - _ERROR)
        left = found + error - below
        right = left[1:] + 0.5 * second * np.diff(t) ** 2
        slope = (right - left[:-1]) / np.diff(t)
        offset = left[:-1] - slope * t[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            inner = np.where(slope > 0, -1.5 * offset / slope, t[:-1])
        inner = np.clip(inner, t[:-1], t[1:])
        peaks = [(offset + slope * x) / x**3 for x in (t[:-1], inner, t[1:])]
        near = min(start + t[0], call.inflection() / (1 - 1e-9))
        end = start + t[-1]
        cubic = max(
            float(np.max(peaks)) * (1 + _ERROR),
            max(third, call.derivatives(near)[2]) / 6 * (1 + _ERROR),
            float(end / t[-1] ** 3) * (1 + _ERROR),
        )
        up = 1 + _ERROR
        return cls(call, start, np.array([float((base + base_error)[0]), first * up, second / 2 * up, cubic]))

    def __call__(self, a: Array) -> Array:
        """The payoff, rounded up."""
        out = np.zeros(len(a))
        low = (a > 0) & (a <= self.start)
        value, error = self.call.value(a[low])
        out[low] = value + error
        t = a[a > self.start] - self.start
        c = self.coefficients
        out[a > self.start] = c[0] + t * (c[1] + t * (c[2] + t * c[3])) * (1 + 16 * UNIT)
        return out

    @property
    def powers(self) -> Array:
        """p_0..p_3 ≥ 0 with payoff(a) ≤ Σ p_j·a^j: f(a) ≤ a·f'(a*) up to a*, because f is convex and f(0) = 0."""
        c = self.coefficients
        return np.array([0.0, max(c[1], c[0] / self.start), c[2], c[3]])
