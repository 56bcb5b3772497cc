"""δ(ε) of a Gaussian privacy loss, in closed form and rounded to the side asked for.

For a loss Y ~ N(m, s²), with y = (ε − m)/s and R(t) = Φ(−t)/φ(t) (Mills' ratio, which falls),

    δ(ε) = E(1 − e^(ε−Y))_+ = Φ(−y) − e^(s(y+s/2))·Φ(−y−s) = φ(y)·(R(y) − R(y+s)).

The Gaussian mechanism of sensitivity μ (for σ = 1) has m = μ²/2 and s = μ, so y = ε/μ − μ/2; a call E(a − K)_+ on a
log-normal of mean 1 is the same with ε = log K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from scipy.special import erfcx, ndtr

from dpmf.numerics import UNIT

Side = Literal["upper", "lower"]

# Constants of the proof in docs/theory/floating-point.md, "Gaussian closed forms".
_FUNCTIONS = 1e-14  # relative error of exp, of erfcx, and of ndtr for positive arguments
_FLOOR = 1e-300  # more than everything that underflows
_FARTHEST = 37.0  # standard deviations beyond which δ is below the floor
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_POINTS, _WEIGHTS = (_POINTS + 1) / 2, _WEIGHTS / 2
_HUGE = 1e300  # beyond this |y|, δ is 0 or 1 in double precision

# Limits of the search for ε: any values are sound.
_LARGEST_EPSILON = 1e15
_TOLERANCE = 1e-9


def gaussian_delta(sensitivity: float, epsilon: float, side: Side = "upper") -> float:
    """δ(ε) of N(μ, 1) against N(0, 1), Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ).

    Args:
      sensitivity: μ ≥ 0, taken as exact.
      epsilon: any real number, taken as exact.
      side: whether to bound δ from above ("upper") or from below ("lower").

    Returns:
      The bound, in [0, 1].

    **Formal guarantees.** That of `_bounded`; y = ε/μ − μ/2 is off by at most a unit of rounding of each of its terms.
    """
    if sensitivity == 0:
        return _without_spread(epsilon, side)
    ratio = min(max(epsilon / sensitivity, -_HUGE), _HUGE)
    y = ratio - sensitivity / 2
    return _bounded(y, sensitivity, 2 * UNIT * (abs(ratio) + abs(y)), side)


def gaussian_loss_delta(mean: float, variance: float, epsilon: float, side: Side = "upper") -> float:
    """E(1 − e^(ε−Y))_+ for a privacy loss Y ~ N(mean, variance).

    It grows with the mean, but with the variance only if the mean grows by at least half as much: then Y gains an
    independent W with E e^(−W) ≤ 1, and the expectation is convex in e^(−W).

    Args:
      mean: the mean of the loss, taken as exact.
      variance: its variance, taken as exact.
      epsilon: any real number, taken as exact.
      side: whether to bound δ from above ("upper") or from below ("lower").

    Returns:
      The bound, in [0, 1].

    **Formal guarantees.** That of `_bounded`. The relative error of y = (ε − mean)/s is three units of rounding. That
    of s is one, and changes δ at a fixed y by at most as much (docs/theory/floating-point.md).
    """
    if variance == 0:
        return _without_spread(epsilon - mean, side)
    s = math.sqrt(variance)
    y = min(max((epsilon - mean) / s, -_HUGE), _HUGE)
    return _bounded(y, s, 4 * UNIT * abs(y), side)


def gaussian_epsilon(sensitivity: float, delta: float) -> float:
    """The least ε ≥ 0 found with `gaussian_delta` ≤ delta."""
    return least_epsilon(lambda epsilon: gaussian_delta(sensitivity, epsilon), delta)


def least_epsilon(profile: Callable[[float], float], delta: float) -> float:
    """The least ε ≥ 0 found at which a falling profile, evaluated there, is at most `delta`; infinite if none is."""
    if profile(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while profile(high) > delta:
        low, high = high, 2 * high
        if high > _LARGEST_EPSILON:
            return math.inf
    while high - low > _TOLERANCE * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if profile(middle) <= delta else (middle, high)
    return high


def _without_spread(excess: float, side: Side) -> float:
    """(1 − e^excess)_+, the δ of a loss that is a constant."""
    if excess >= 0:
        return 0.0
    return min(1.0, -math.expm1(excess) * (1 + (4 if side == "upper" else -4) * UNIT))


def _bounded(y: float, s: float, error_of_y: float, side: Side) -> float:
    """φ(y)·(R(y) − R(y+s)), s > 0, bounded from above or from below.

    **Formal guarantees.** δ falls with y, which is moved by its error first. Where s(1 + |y|) > 1 the two terms are
    subtracted, and their rounding errors added to the difference. Otherwise δ is the integral of the positive function
    φ(y)·g(y+t) over 0 < t < s, g(u) = −R'(u) = 1 − u·R(u), which twelve Gauss–Legendre points give to 10⁻¹⁵. Beyond
    y = 37 δ is below Φ(−37) < 10⁻²⁹⁸, and what underflows is below the floor. Proofs are in
    docs/theory/floating-point.md, "Gaussian closed forms".
    """
    y -= error_of_y if side == "upper" else -error_of_y
    if y > _FARTHEST:
        return 100 * _FLOOR if side == "upper" else 0.0
    value, relative = _integral(y, s) if s * (1 + abs(y)) <= 1 else _difference(y, s)
    if side == "upper":
        return min(1.0, value * (1 + relative + 8 * UNIT) + _FLOOR)
    return max(0.0, value * (1 - relative - 8 * UNIT) - _FLOOR)


def _difference(y: float, s: float) -> tuple[float, float]:
    """The difference of the two terms, and its relative error."""
    if y > 0:  # e^(−y²/2) is common to both
        exponent = 0.5 * y * y
        first, second = (0.5 * float(erfcx(x / math.sqrt(2))) for x in (y, y + s))
        scale, common, own = math.exp(-exponent), _FUNCTIONS + 4 * UNIT * exponent, 0.0
    else:
        first, scale, common = float(ndtr(-y)), 1.0, 0.0
        if y + s >= 0:
            exponent, tail = 0.5 * y * y, 0.5 * float(erfcx((y + s) / math.sqrt(2)))
        else:
            exponent, tail = -s * (y + s / 2), float(ndtr(-y - s))
        exponent = min(exponent, 700.0)
        second, own = math.exp(-exponent) * tail, 8 * UNIT * exponent
    difference = first - second
    error = 2 * _FUNCTIONS * (first + second) + own * second
    return scale * difference, common + error / difference


def _integral(y: float, s: float) -> tuple[float, float]:
    """The integral of e^(yt + t²/2)·(φ(y+t) − (y+t)·Φ(−y−t)) over 0 < t < s, and its relative error."""
    t = s * _POINTS
    u = y + t
    if u[-1] <= 0:
        inner = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi) - u * ndtr(-u)
        return float(s * (_WEIGHTS * np.exp(t * (y + t / 2)) * inner).sum()), 8 * _FUNCTIONS
    # 1 − u·R(u) is about 1/u² for large u, and loses that much of its accuracy.
    density = math.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
    g = 1 - u * (math.sqrt(math.pi / 2) * erfcx(u / math.sqrt(2)))
    return float(s * density * (_WEIGHTS * g).sum()), 8 * _FUNCTIONS * (1 + (1 + max(abs(y), abs(y + s))) ** 2)
