"""How far to tilt a sum of independent log-normals so that it sits at a strike: heuristics, on which no bound rests."""

from __future__ import annotations

import math

import numpy as np

from dpmf.numerics import Array

FARTHEST = 38.0  # standard deviations beyond which a normal tail is below 10⁻³¹⁵
_LEAST_LOG_VALUE = -200.0  # of options


class TiltedMoments:
    """Moments of min(a, M) under an exponential tilt, by a plain quadrature: for choosing parameters only."""

    def __init__(self, variances: Array, counts: np.ndarray, sign: int, cap: float) -> None:
        self._sign = sign
        self._counts, self._s = counts[:, None], variances[:, None]
        z = np.linspace(-FARTHEST, FARTHEST, 601 if len(counts) > 4 else 1201)
        self._cap = cap
        self._a = np.minimum(np.exp(np.minimum(np.sqrt(self._s) * z - self._s / 2, math.log(cap))), cap)
        self._log_weight = -0.5 * z**2 + math.log((z[1] - z[0]) / math.sqrt(2 * math.pi))

    def at(self, theta: float, most: float = math.inf) -> tuple[float, float, float, float]:
        """Σ log-moment, Σ mean, and the square roots of Σ variance and of Σ s·E[a²; a < most]."""
        exponent = self._sign * theta * self._a + self._log_weight
        largest = exponent.max(axis=1, keepdims=True)
        weight = np.exp(exponent - largest)
        norm = weight.sum(axis=1, keepdims=True)
        weight /= norm
        share = self._a / self._cap  # squares of a itself may leave the range of double
        mean = (weight * share).sum(axis=1, keepdims=True)
        variance = (weight * (share - mean) ** 2).sum(axis=1, keepdims=True)
        spread = self._s * (weight * share**2 * (self._a < most)).sum(axis=1, keepdims=True)
        log_moment = largest + np.log(norm)
        total, mean, variance, spread = (float((self._counts * x).sum()) for x in (log_moment, mean, variance, spread))
        return total, self._cap * mean, self._cap * math.sqrt(variance), self._cap * math.sqrt(spread)

    def saddle(self, strike: float) -> tuple[float, float]:
        """The θ that minimises E e^(±θ(T − K))/θ², the size of the option's inverse Laplace transform, and the
        logarithm of E e^(±θ(T−K))/(eθ), which is at least the option (Chernoff)."""

        def slope(theta: float) -> float:  # increases with θ
            return self._sign * (self.at(theta)[1] - strike) - 2 / theta

        low = high = 1 / strike
        if slope(high) < 0:
            while slope(high) < 0 and high * strike < 1e12:
                low, high = high, 4 * high
        else:
            while slope(low) >= 0 and low * strike > 1e-12:
                low, high = low / 4, low
        while high > 1.02 * low:
            middle = math.sqrt(low) * math.sqrt(high)  # their product may overflow
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)

        def log_bound(theta: float) -> float:
            return self.at(theta)[0] - self._sign * theta * strike - 1 - math.log(theta)

        if log_bound(high) < _LEAST_LOG_VALUE:
            # Nobody asks for a δ that small: a gentler tilt says that it is small enough, without extreme numbers.
            low = high
            while log_bound(low) < _LEAST_LOG_VALUE:
                low /= 2
            while high > 1.02 * low:
                middle = math.sqrt(low) * math.sqrt(high)  # their product may overflow
                low, high = (low, middle) if log_bound(middle) < _LEAST_LOG_VALUE else (middle, high)
        return high, log_bound(high)
