"""A mechanism: a strategy run on balls-in-bins batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dpmf.allocation import BallsInBins, gram_matrix, mean_rows
from dpmf.strategies.base import Array, Strategy


@dataclass(frozen=True)
class Mechanism:
    """Strategy × batching: all an accountant needs to know, apart from the noise multiplier."""

    strategy: Strategy
    allocation: BallsInBins

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise ValueError(f"strategy must be a dpmf strategy, got {self.strategy!r}")
        if not isinstance(self.allocation, BallsInBins):
            raise ValueError(f"allocation must be a BallsInBins, got {self.allocation!r}")
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
        if not gram.max() < float("inf"):
            raise ValueError(f"strategy {self.strategy.name} has entries too large: its Gram matrix overflows")
        gram.setflags(write=False)
        return gram

    def mean_rows(self) -> Iterator[tuple[int, Array]]:
        """The mixture means by iteration, in blocks of rows."""
        return mean_rows(self.strategy, self.allocation)

    def __str__(self) -> str:
        return self.name
