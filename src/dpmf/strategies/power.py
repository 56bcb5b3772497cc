"""Power series with one or two parameters: λCGD and (1 − λx)^(−a)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmf import validation
from dpmf.numerics import Array
from dpmf.strategies.base import InverseToeplitzStrategy, ToeplitzStrategy, pad_or_cut


@dataclass(frozen=True)
class GeometricInverse(InverseToeplitzStrategy):
    """λCGD: C⁻¹ = 1 − λx, so that every iteration takes back a part of the noise of the one before."""

    decay: float

    @property
    def name(self) -> str:
        return f"λCGD(λ={self.decay:g})"

    def noising_coef(self, iterations: int) -> Array:
        return pad_or_cut(np.array([1.0, -self.decay + 0.0]), iterations)


@dataclass(frozen=True)
class PowerSeries(ToeplitzStrategy):
    """The first p coefficients of (1 − λx)^(−a), or all of them."""

    exponent: float
    decay: float
    p: int | None

    @property
    def name(self) -> str:
        cut = "" if self.p is None else f", p={self.p}"
        return f"power(a={self.exponent:g}, λ={self.decay:g}{cut})"

    def strategy_coef(self, iterations: int) -> Array:
        steps = np.arange(1, iterations if self.p is None else min(self.p, iterations), dtype=np.float64)
        factors = (steps - 1 + self.exponent) / steps * self.decay
        return pad_or_cut(np.concatenate(([1.0], np.cumprod(factors))), iterations)


def lcgd(decay: float) -> GeometricInverse:
    """Return λCGD, C⁻¹ = 1 − λx.

    Args:
      decay: λ in [0, 1].
    """
    return GeometricInverse(_decay(decay))


def power(exponent: float, decay: float | None = None, bandwidth: int | None = None) -> PowerSeries:
    """Return the strategy with the coefficients of (1 − λx)^(−a).

    Args:
      exponent: a in [0, 1]; 1/2 with λ = 1 gives the square root of the prefix sums.
      decay: λ in [0, 1]; by default 1.
      bandwidth: the number of coefficients; by default all.
    """
    a = validation.non_negative("exponent", exponent)
    if a > 1:
        raise validation.wrong("exponent", "at most 1", a)
    p = None if bandwidth is None else validation.integer("bandwidth", bandwidth, at_least=1)
    return PowerSeries(a, 1.0 if decay is None else _decay(decay), p)


def _decay(value: float) -> float:
    decay = validation.non_negative("decay", value)
    if decay > 1:
        raise validation.wrong("decay", "at most 1", decay)
    return decay
