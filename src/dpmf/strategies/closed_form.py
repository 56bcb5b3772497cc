"""Strategies with a formula: DP-SGD, BSR, BISR."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmf import validation
from dpmf.numerics import Array
from dpmf.strategies.base import ToeplitzStrategy, invert_series, pad_or_cut


def inverse_square_root_series(n: int) -> Array:
    """The first n coefficients of (1−x)^(−1/2): 1, 1/2, 3/8, 5/16, ..."""
    j = np.arange(1, n, dtype=np.float64)
    return np.concatenate(([1.0], np.cumprod((2 * j - 1) / (2 * j))))


def square_root_series(n: int) -> Array:
    """The first n coefficients of (1−x)^(1/2): 1, −1/2, −1/8, −1/16, ..."""
    j = np.arange(1, n, dtype=np.float64)
    return np.concatenate(([1.0], np.cumprod((2 * j - 3) / (2 * j))))


@dataclass(frozen=True)
class Identity(ToeplitzStrategy):
    """DP-SGD: independent noise, C = I."""

    @property
    def name(self) -> str:
        return "DP-SGD"

    def strategy_coef(self, iterations: int) -> Array:
        return pad_or_cut(np.ones(1), iterations)

    def noising_coef(self, iterations: int) -> Array:
        return self.strategy_coef(iterations)


@dataclass(frozen=True)
class BandedSquareRoot(ToeplitzStrategy):
    """BSR: the first p coefficients of (1−x)^(−1/2), the rest zero (Kalinin & Lampert 2024)."""

    p: int

    @property
    def name(self) -> str:
        return f"BSR(p={self.p})"

    def strategy_coef(self, iterations: int) -> Array:
        return pad_or_cut(inverse_square_root_series(min(self.p, iterations)), iterations)


@dataclass(frozen=True)
class BandedInverseSquareRoot(ToeplitzStrategy):
    """BISR: C⁻¹ has the first p coefficients of (1−x)^(1/2), the rest zero (Kalinin et al. 2025)."""

    p: int

    @property
    def name(self) -> str:
        return f"BISR(p={self.p})"

    def strategy_coef(self, iterations: int) -> Array:
        # All terms of this recursion are non-negative (the noising coefficients after the first are negative).
        return invert_series(self.noising_coef(iterations), iterations)

    def noising_coef(self, iterations: int) -> Array:
        return pad_or_cut(square_root_series(min(self.p, iterations)), iterations)


def dpsgd() -> Identity:
    """DP-SGD: C is the identity."""
    return Identity()


def bsr(bandwidth: int) -> BandedSquareRoot:
    """Banded square root of bandwidth p."""
    return BandedSquareRoot(validation.integer("bandwidth", bandwidth, at_least=1))


def bisr(bandwidth: int) -> BandedInverseSquareRoot:
    """Banded inverse square root: C⁻¹ has bandwidth p."""
    return BandedInverseSquareRoot(validation.integer("bandwidth", bandwidth, at_least=1))
