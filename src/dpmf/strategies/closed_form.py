"""Strategies with a formula: DP-SGD, BSR, BISR."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmf import validation
from dpmf.numerics import Array
from dpmf.strategies.base import InverseToeplitzStrategy, ToeplitzStrategy, pad_or_cut


def power_series(exponent: float, n: int) -> Array:
    """Return the first n coefficients of (1−x)^exponent: 1, −exponent, ..."""
    j = np.arange(1, n, dtype=np.float64)
    return np.concatenate(([1.0], np.cumprod((j - 1 - exponent) / j)))


@dataclass(frozen=True)
class Identity(ToeplitzStrategy):
    """DP-SGD: independent noise, C = I."""

    @property
    def name(self) -> str:
        return "DP-SGD"

    def strategy_coef(self, iterations: int) -> Array:
        return pad_or_cut(np.ones(1), iterations)

    noising_coef = strategy_coef


@dataclass(frozen=True)
class BandedSquareRoot(ToeplitzStrategy):
    """BSR: C has the first p coefficients of (1−x)^(−1/2), the rest zero (Kalinin & Lampert 2024)."""

    p: int

    @property
    def name(self) -> str:
        return f"BSR(p={self.p})"

    def strategy_coef(self, iterations: int) -> Array:
        return pad_or_cut(power_series(-0.5, min(self.p, iterations)), iterations)


@dataclass(frozen=True)
class BandedInverseSquareRoot(InverseToeplitzStrategy):
    """BISR: C⁻¹ has the first p coefficients of (1−x)^(1/2), the rest zero (Kalinin et al. 2025)."""

    p: int

    @property
    def name(self) -> str:
        return f"BISR(p={self.p})"

    def noising_coef(self, iterations: int) -> Array:
        return pad_or_cut(power_series(0.5, min(self.p, iterations)), iterations)


def dpsgd() -> Identity:
    """Return the strategy of DP-SGD, C = I."""
    return Identity()


def bsr(bandwidth: int) -> BandedSquareRoot:
    """Return the banded square root.

    Args:
      bandwidth: the bandwidth p of C.
    """
    return BandedSquareRoot(validation.integer("bandwidth", bandwidth, at_least=1))


def bisr(bandwidth: int) -> BandedInverseSquareRoot:
    """Return the banded inverse square root.

    Args:
      bandwidth: the bandwidth p of C⁻¹.
    """
    return BandedInverseSquareRoot(validation.integer("bandwidth", bandwidth, at_least=1))
