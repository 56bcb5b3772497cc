"""A mechanism: a strategy run on balls-in-bins batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpmf import validation
from dpmf.allocation import BallsInBins, folded_column, gram_matrix, mean_rows
from dpmf.lag_products import GramSums, gram_sums, sum_of_squares, toeplitz_lags
from dpmf.strategies.base import Array, Strategy, ToeplitzStrategy


@dataclass(frozen=True)
class Mechanism:
    """Strategy × batching: all an accountant needs to know, apart from the noise multiplier."""

    strategy: Strategy
    allocation: BallsInBins

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise validation.wrong("strategy", "a dpmf strategy", self.strategy)
        if not isinstance(self.allocation, BallsInBins):
            raise validation.wrong("allocation", "a BallsInBins", self.allocation)
        strategy = self.strategy.for_allocation(self.allocation)
        strategy.check_iterations(self.allocation.iterations)
        object.__setattr__(self, "strategy", strategy)

    @property
    def name(self) -> str:
        return f"{self.strategy.name}, {self.allocation.name}"

    @cached_property
    def gram(self) -> Array:
        """The Gram matrix of the mixture means (read-only)."""
        gram = gram_matrix(self.strategy, self.allocation)
        self._ordinary(float(gram.max()))
        gram.setflags(write=False)
        return gram

    @cached_property
    def gram_sums(self) -> GramSums:
        """The diagonal and the sum of the Gram matrix, which need not be made for them."""
        if "gram" in self.__dict__:
            return GramSums(np.diagonal(self.gram), float(self.gram.sum()))
        return gram_sums(self.strategy, self.allocation)

    @cached_property
    def lags(self) -> Array:
        """For each d < b a number that no entry G[i, i+d] exceeds; for Toeplitz strategies without making G."""
        if isinstance(self.strategy, ToeplitzStrategy):
            return toeplitz_lags(self.strategy, self.allocation)
        up = 1 + (2 * self.allocation.iterations + 4) * 2.0**-52
        return np.array([np.diagonal(self.gram, d).max() for d in range(len(self.gram))]) * up

    @cached_property
    def sensitivity(self) -> float:
        """The largest norm of a mixture mean, √max G_ii: the sensitivity without amplification."""
        if isinstance(self.strategy, ToeplitzStrategy):  # the first mean is the longest; no b × b matrix is needed
            return math.sqrt(self._ordinary(sum_of_squares(folded_column(self.strategy, self.allocation))))
        return math.sqrt(self._ordinary(float(self.gram_sums.diagonal.max())))

    def _ordinary(self, largest: float) -> float:
        """The largest entry of G, where it is neither so large nor so small that squares leave the range of double."""
        # Underflow could hide some of the sensitivity.
        if not 1e-150 < largest < 1e150:
            size = "large" if largest > 1 else "small"
            raise ValueError(
                f"strategy must have entries of ordinary size, those of {self.strategy.name} are too {size}"
            )
        return largest

    def mean_rows(self) -> Iterator[tuple[int, Array]]:
        """The mixture means by iteration, in blocks of rows."""
        return mean_rows(self.strategy, self.allocation)

    def __str__(self) -> str:
        return self.name
