"""Payoffs above a call that the cascade's theorem allows: a cubic, or one that follows a call smoothed by a factor.

With A = X·A°, X = e^(rz − r²/2) independent of A°, the call is E(A − γ)_+ = E f(A°), f(a) = E(Xa − γ)_+, the formula of
Black and Scholes. f'' is convex and increasing up to its first inflection point a₁. For any a* ≤ a₁ the theorem allows
the payoff that is f up to a* and has the second derivative f''(a*) + s·(a − a*) beyond, if s ≥ f'''(a*). It is above f
for s large enough. Without a shared factor f is the call itself, and the payoff a cubic. See docs/theory/cascade.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

from dpmf.accountants.cascade._tree_law import Measure
from dpmf.numerics import FLOOR, UNIT, Array

_NORMAL_TAIL = 2e-13  # relative error of `ndtr` (docs/theory/floating-point.md, "Assumptions")
_ROUNDING = 1e-12  # relative error of a sum or product of a few positive numbers, with room (floating-point.md)


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how close payoffs come to a call. Any values give sound bounds.

    Attributes:
      spacing: the relative spacing of the distances from a* at which f is compared with the cubic.
      nearest: the smallest distance, in units of γ − a*.
      farthest: the largest distance, in units of γ.
      closest_cubic: the least γ − κ of a cubic, in units of γ.
      widest_cubic: the largest γ − κ of a cubic, in units of γ.
      least_start: the least a*, in units of γ.
      payoffs: how many payoffs are tried before the search for the best one.
      tolerance: of that search, in the logarithm of the width.
    """

    spacing: float = 0.02
    nearest: float = 1e-3
    farthest: float = 60.0
    closest_cubic: float = 1e-4
    widest_cubic: float = 3.0
    least_start: float = 1e-3
    payoffs: int = 32
    tolerance: float = 1e-3


_TUNING = _Tuning()


@dataclass(frozen=True)
class SmoothedCall:
    """f(a) = E(Xa − γ)_+, X a log-normal of mean 1 and log-variance `variance` > 0."""

    gamma: float
    variance: float

    @property
    def _root(self) -> float:
        return math.sqrt(self.variance)

    def _position(self, a: Array) -> tuple[Array, Array]:
        """d = (log(a/γ) + r²/2)/r and a bound on its error."""
        logarithm = np.log(a / self.gamma)
        d = (logarithm + self.variance / 2) / self._root
        return d, 4 * UNIT * (np.abs(d) + (4 + np.abs(logarithm) + self.variance) / self._root)

    def inflection(self) -> float:
        """a₁: with L = 1 + d/r, d the position of a, f'''' has the sign of L² + L − 1/r²."""
        low = -0.5 * (1 + math.sqrt(1 + 4 / self.variance))
        return self.gamma * math.exp(self.variance * (low - 1.5)) * (1 - 1e-9)

    def value(self, a: Array) -> tuple[Array, Array]:
        """f and a bound on its error."""
        d, slip = self._position(a)
        gain, loss = a * ndtr(d), self.gamma * ndtr(d - self._root)
        error = _NORMAL_TAIL + 4 * (1 + np.abs(d) + self._root) * (slip + 4 * UNIT * self._root)
        return np.maximum(gain - loss, 0.0), gain * np.minimum(error, 1.0)

    def derivatives(self, a: float) -> tuple[Array, Array]:
        """f', f'', f''' and bounds on their errors."""
        position, error = self._position(np.array([a]))
        d, slip, r = float(position[0]), float(error[0]), self._root
        second = math.exp(-0.5 * d * d) / (a * r * math.sqrt(2 * math.pi))
        bend = 1 + d / r
        values = np.array([float(ndtr(d)), second, -second / a * bend])
        relative = min(1.0, _NORMAL_TAIL + (1 + abs(d)) * (2 * slip + 8 * UNIT * (1 + abs(d))))
        bend_error = slip / r + 4 * UNIT * (1 + abs(d) / r)
        return values, np.array(
            [values[0] * relative, second * relative, second / a * (abs(bend) * relative + 2 * bend_error)]
        )


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
        beyond the last cell h ≤ f ≤ a, and a/(a − a*)³ falls. Errors of f are added, those of the polynomial are
        subtracted in h and added in the coefficients: the payoff is above the one of the lemma.
        """
        (first, second, third), errors = call.derivatives(start)
        base, base_error = call.value(np.array([start]))
        gap = call.gamma - start
        span = math.log(_TUNING.farthest * call.gamma / (_TUNING.nearest * gap))
        t = (
            _TUNING.nearest
            * gap
            * (1 + _TUNING.spacing) ** np.arange(math.ceil(span / math.log1p(_TUNING.spacing)) + 1)
        )
        found, error = call.value(np.asarray(start + t))
        slope_below, bend_below = max(0.0, first - errors[0]), max(0.0, second - errors[1])
        below = base - base_error + (slope_below * t + bend_below * t**2 / 2) * (1 - _ROUNDING)
        left = found + error - below + _ROUNDING * found
        right = left[1:] + 0.5 * second * (1 + _ROUNDING) * np.diff(t) ** 2
        slope = (right - left[:-1]) / np.diff(t)
        offset = left[:-1] - slope * t[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            inner = np.where(slope > 0, -1.5 * offset / slope, t[:-1])
        inner = np.clip(inner, t[:-1], t[1:])
        peaks = [(offset + slope * x) / x**3 for x in (t[:-1], inner, t[1:])]
        thirds, third_errors = call.derivatives(min(start + t[0], call.inflection() / (1 - 1e-9)))
        end = start + t[-1]
        cubic = max(
            float(np.max(peaks)),
            max(third + errors[2], thirds[2] + third_errors[2]) / 6,
            float(end / t[-1] ** 3),
        )
        rounded_up = np.array([float((base + base_error)[0]), first + errors[0], (second + errors[1]) / 2, cubic])
        return cls(call, start, rounded_up * (1 + _ROUNDING))

    def __call__(self, a: Array) -> Array:
        """The payoff, rounded up."""
        out = np.zeros(len(a))
        low = (a > 0) & (a <= self.start)
        value, error = self.call.value(a[low])
        out[low] = (value + error) * (1 + 16 * UNIT)
        t = a[a > self.start] - self.start
        c = self.coefficients
        out[a > self.start] = (c[0] + t * (c[1] + t * (c[2] + t * c[3]))) * (1 + 16 * UNIT)
        return out

    @property
    def powers(self) -> Array:
        """p_0..p_3 ≥ 0 with payoff(a) ≤ Σ p_j·a^j: f(a) ≤ a·f'(a*) up to a*, because f is convex and f(0) = 0."""
        c = self.coefficients
        return np.array([0.0, max(c[1], c[0] / self.start), c[2], c[3]])


@dataclass(frozen=True)
class PayoffBound:
    """A bound on an option.

    Attributes:
      value: the bound.
      cut: the part of it that is from the moments of the rest.
      start: where the cubic starts.
    """

    value: float
    cut: float
    start: float


def cubic_bound(law: Measure, gamma: float) -> PayoffBound:
    """The least 4/27·(γ − κ)⁻²·E((A − κ)_+)³ over κ < γ found.

    **Formal guarantees.** For every κ < γ, (a − γ)_+ ≤ 4/27·(γ − κ)⁻²·((a − κ)_+)³. For the rest, (a − κ)_+ is at most
    a for κ ≥ 0, and a + |κ| otherwise.
    """

    def parts(kappa: float) -> tuple[float, float]:
        shift = max(-kappa, 0.0)
        on_grid = float((law.weights * np.maximum(law.a - kappa, 0.0) ** 3).sum()) + law.zero * shift**3
        rest = float(law.rest[3] + 3 * shift * law.rest[2] + 3 * shift**2 * law.rest[1] + shift**3 * law.rest[0])
        factor = 4 / 27 / (gamma - kappa) ** 2
        return factor * on_grid, factor * rest

    return _least(law, parts, gamma, _TUNING.closest_cubic * gamma, _TUNING.widest_cubic * gamma)


def smoothed_bound(law: Measure, call: SmoothedCall) -> PayoffBound:
    """The least E of a majorant of the call found, where A° has the law; infinite where there is no majorant."""

    def parts(start: float) -> tuple[float, float]:
        payoff = Majorant.of(call, start)
        return float((law.weights * payoff(law.a)).sum()), float((payoff.powers * law.rest).sum())

    nearest, farthest = call.gamma - call.inflection(), (1 - _TUNING.least_start) * call.gamma
    return _least(law, parts, call.gamma, nearest, farthest) if nearest < farthest else PayoffBound(math.inf, 0.0, 0.0)


def _least(
    law: Measure, parts: Callable[[float], tuple[float, float]], gamma: float, nearest: float, farthest: float
) -> PayoffBound:
    """The least sum of parts(κ) over γ − κ in a range, rounded up."""

    def log_value(log_width: float) -> float:
        return math.log(sum(parts(gamma - math.exp(log_width))) + FLOOR)

    grid = np.linspace(math.log(nearest), math.log(farthest), _TUNING.payoffs)
    best = int(np.argmin([log_value(x) for x in grid]))
    ends = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = float(minimize_scalar(log_value, bounds=ends, method="bounded", options={"xatol": _TUNING.tolerance}).x)
    kappa = gamma - math.exp(min((found, float(grid[best])), key=log_value))
    on_grid, rest = parts(kappa)
    up = 1 + _ROUNDING + len(law.a) * UNIT
    return PayoffBound((on_grid + rest) * up + FLOOR, rest * up, kappa)
