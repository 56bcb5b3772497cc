"""A mechanism: a strategy run on balls-in-bins batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpmf import validation
from dpmf.batching import BallsInBins
from dpmf.errors import ArgumentError
from dpmf.gram.means import folded_column, gram_matrix, mean_rows
from dpmf.gram.sums import GramSums, gram_sums, toeplitz_lags
from dpmf.numerics import UNIT, Array, sum_of_squares
from dpmf.strategies.base import Strategy, ToeplitzStrategy


@dataclass(frozen=True)
class Mechanism:
    """A strategy and a batching, which is all an accountant needs to know apart from the noise multiplier.

    Attributes:
      strategy: the matrix C. Optimised strategies are filled in with what they optimise for.
      batching: how records are assigned to batches.
    """

    strategy: Strategy
    batching: BallsInBins

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise validation.wrong("strategy", "a dpmf strategy", self.strategy)
        if not isinstance(self.batching, BallsInBins):
            raise validation.wrong("batching", "a BallsInBins", self.batching)
        strategy = self.strategy.for_batching(self.batching)
        strategy.check_iterations(self.batching.iterations)
        object.__setattr__(self, "strategy", strategy)

    @property
    def name(self) -> str:
        """How the mechanism prints, e.g. ``BSR(p=4), k=10, b=100``."""
        return f"{self.strategy.name}, {self.batching.name}"

    @cached_property
    def gram(self) -> Array:
        """The Gram matrix of the mixture means (read-only)."""
        gram = gram_matrix(self.strategy, self.batching)
        self._ordinary(float(gram.max()))
        gram.setflags(write=False)
        return gram

    @property
    def gram_error(self) -> float:
        """The relative rounding error of every entry of `gram`, of `gram_sums` and of the lag products.

        An entry is a sum of N products of two sums of at most k ≤ N non-negative terms: γ(3N) in all. Sums of rows add
        2b further operations (docs/theory/floating-point.md, section 2). Coefficients of C that are computed are raised
        by their error, which lower bounds take back: at most twice in each of two factors.
        """
        n, b = self.batching.iterations, self.batching.batches_per_epoch
        computed = self.strategy.coef_error(n) if isinstance(self.strategy, ToeplitzStrategy) else 0.0
        return (4 * n + 8 * b + 64) * UNIT + 4 * computed

    def gram_upper(self) -> Array:
        """A symmetric matrix that is at least the Gram matrix of the exact means, in every entry."""
        return np.asarray(np.maximum(self.gram, self.gram.T) * (1 + self.gram_error))

    def gram_lower(self) -> Array:
        """A symmetric matrix that is at most the Gram matrix of the exact means, in every entry."""
        return np.asarray(np.minimum(self.gram, self.gram.T) * (1 - self.gram_error))

    @cached_property
    def gram_sums(self) -> GramSums:
        """The diagonal and the sum of the Gram matrix, which are found without forming it."""
        if "gram" in self.__dict__:
            return GramSums(np.diagonal(self.gram), float(self.gram.sum()))
        return gram_sums(self.strategy, self.batching)

    @cached_property
    def lags(self) -> Array:
        """For each d < b an upper bound on all entries G[i, i+d]; for Toeplitz strategies G is not formed for it."""
        if isinstance(self.strategy, ToeplitzStrategy):
            return toeplitz_lags(self.strategy, self.batching)
        upper = self.gram_upper()
        return np.array([np.diagonal(upper, d).max() for d in range(len(upper))])

    @cached_property
    def sensitivity(self) -> float:
        """The largest norm of a mixture mean, √max G_ii: the sensitivity without amplification."""
        if isinstance(self.strategy, ToeplitzStrategy):  # the first mean has the largest norm
            return math.sqrt(self._ordinary(sum_of_squares(folded_column(self.strategy, self.batching))))
        return math.sqrt(self._ordinary(float(self.gram_sums.diagonal.max())))

    def _ordinary(self, largest: float) -> float:
        """Return the largest entry of G, or refuse a strategy with entries so large or small that squares would not be
        doubles: underflow could hide some of the sensitivity."""
        if not 1e-150 < largest < 1e150:
            size = "large" if largest > 1 else "small"
            raise ArgumentError(
                "strategy", f"must have entries of ordinary size, those of {self.strategy.name} are too {size}"
            )
        return largest

    def checked_noise(self, noise_multiplier: float) -> float:
        """A noise multiplier that double arithmetic can square and divide by; an error for any other."""
        sigma = validation.positive("noise_multiplier", noise_multiplier)
        scale = self.sensitivity
        if not 1e-70 < sigma / scale < 1e70:
            raise validation.wrong("noise_multiplier", f"between {1e-70 * scale:.3g} and {1e70 * scale:.3g}", sigma)
        return sigma

    def mean_rows(self) -> Iterator[tuple[int, Array]]:
        """Iterate over the mixture means, one row per iteration, in blocks of rows (see `gram.means.mean_rows`)."""
        return mean_rows(self.strategy, self.batching)

    def __str__(self) -> str:
        return self.name
