"""A mechanism: a strategy run on balls-in-bins batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dpmf import validation
from dpmf.allocation import BallsInBins, gram_matrix, mean_rows
from dpmf.strategies.base import Array, Strategy


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
        largest = float(gram.max())
        # Outside this range squares overflow, or lose digits to underflow, which could hide some of the sensitivity.
        if not 1e-150 < largest < 1e150:
            size = "large" if largest > 1 else "small"
            raise ValueError(
                f"strategy must have entries of ordinary size, those of {self.strategy.name} are too {size}"
            )
        gram.setflags(write=False)
        return gram

    def mean_rows(self) -> Iterator[tuple[int, Array]]:
        """The mixture means by iteration, in blocks of rows."""
        return mean_rows(self.strategy, self.allocation)

    def __str__(self) -> str:
        return self.name
