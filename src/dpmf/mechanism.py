"""A mechanism: a strategy run on batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dpmf import validation
from dpmf.batching import AnyBatching, BallsInBins, OneThrow, Poisson, description
from dpmf.errors import ArgumentError
from dpmf.gram.means import (
    folded_column,
    gram_matrix,
    mean_rows,
    raised_column,
)
from dpmf.gram.sums import GramSums, gram_sums, toeplitz_lags
from dpmf.gram.throws import first_mean_of_throw, largest_product_between_throws
from dpmf.numerics import UNIT, Array, sum_of_squares
from dpmf.strategies.base import Strategy, ToeplitzStrategy, block_rows
from dpmf.strategies.explicit import coefficients
from dpmf.strategies.settling import Settling, settle
from dpmf.strategies.streaming import how_to_stream


@dataclass(frozen=True)
class Mechanism:
    """A strategy and a batching, which is all an accountant needs to know apart from the noise multiplier.

    Attributes:
      strategy: the matrix C. Optimised strategies are filled in with what they optimise for.
      batching: how records are assigned to batches. A gap that was left open is filled in.
    """

    strategy: Strategy
    batching: AnyBatching

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise validation.wrong("strategy", "a dpmf strategy", self.strategy)
        if not isinstance(self.batching, BallsInBins | Poisson | OneThrow):
            raise validation.wrong("batching", "a BallsInBins or a Poisson", self.batching)
        strategy = self.strategy.for_batching(self.batching)
        strategy.check_iterations(self.batching.iterations)
        if not self.batching.fixed:
            strategy = self._check_composed(strategy)
        object.__setattr__(self, "strategy", strategy)

    def _check_composed(self, strategy: Strategy) -> Strategy:
        """Refuse what the composition of throws does not cover, and fill in the gap between throws.

        The gap adds iterations, so the strategy is made anew for as many as there are then.
        """
        batching = self.batching
        if not isinstance(strategy, ToeplitzStrategy):
            raise ArgumentError("strategy", f"must be a Toeplitz strategy for {batching.name}, got {strategy.name}")
        width = strategy.bandwidth(batching.iterations)
        if isinstance(batching, Poisson):
            if width > batching.period:
                raise ArgumentError(
                    "batching",
                    f"must be balls in bins, or cyclic Poisson of a period of at least {width}, for {strategy.name}: "
                    "Poisson samples of iterations that share noise are not covered",
                )
        elif isinstance(batching, BallsInBins):
            # A strategy whose memory lasts longer than an epoch has no useful gap.
            filled = batching.with_gap(max(width - batching.stride, 0) if width <= batching.batches_per_epoch else 0)
            strategy = self.strategy.for_batching(filled)
            strategy.check_iterations(filled.iterations)
            object.__setattr__(self, "batching", filled)
        return strategy

    @cached_property
    def throw(self) -> Mechanism:
        """One of the independent throws that the mechanism is composed of, as a mechanism of its own.

        Its Gram matrix is at least that of every throw, in every entry (docs/theory/batchings.md).
        """
        if self.batching.fixed:
            return self
        assert isinstance(self.batching, BallsInBins) and isinstance(self.strategy, ToeplitzStrategy)  # noqa: PT018
        bins = self.batching.batches_per_epoch // self.batching.stride
        mean = first_mean_of_throw(self.strategy, self.batching)
        return Mechanism(coefficients(mean), OneThrow(bins, len(mean) + bins))

    @cached_property
    def product_between_throws(self) -> float:
        """An upper bound on the inner products of means of different throws; 0 where throws are independent."""
        if not isinstance(self.batching, BallsInBins) or not isinstance(self.strategy, ToeplitzStrategy):
            return 0.0
        return largest_product_between_throws(self.strategy, self.batching)

    @cached_property
    def settling(self) -> Settling | None:
        """How the noise of a throw is settled before the next one; None where there is no gap that is long enough.

        It decides what is added to the model, and no bound depends on it.
        """
        batching, strategy = self.batching, self.strategy
        if not isinstance(batching, BallsInBins) or not isinstance(strategy, ToeplitzStrategy) or not batching.gap:
            return None
        n = batching.iterations
        if batching.gap < strategy.bandwidth(n) - 1:
            return None
        steps = batching.steps // batching.throws
        return settle(strategy.noising_coef(n), steps, batching.gap)

    @property
    def shared_sensitivity(self) -> float:
        """An upper bound on √(T(T − 1)·S): that of the Gaussian mechanism which all T throws have in common."""
        throws = self.batching.throws
        return math.sqrt(throws * (throws - 1) * self.product_between_throws) * (1 + 4 * UNIT)

    @property
    def sampled_sensitivity(self) -> float:
        """An upper bound on the norm of one column: the sensitivity of one iteration on a Poisson sample."""
        return self.sensitivity / math.sqrt(self.batching.throws) * (1 + self.gram_error)

    def thrown_once(self) -> BallsInBins | OneThrow:
        """The batching, where the Gram matrix describes the whole mechanism."""
        if isinstance(self.batching, Poisson) or not self.batching.fixed:
            raise ArgumentError(
                "mechanism", f"must have fixed bins for this accountant by itself, got {self.name}; use dpmf.delta, "
                "dpmf.epsilon or dpmf.calibrate, which compose its throws",
            )  # fmt: skip
        return self.batching

    @property
    def name(self) -> str:
        """How the mechanism prints, e.g. ``BSR(p=4), k=10, b=100``."""
        return f"{self.strategy.name}, {self.batching.name}"

    @cached_property
    def description(self) -> dict[str, Any]:
        """What the mechanism is, as plain values: names, a digest of the entries of C, and the batching."""
        return {
            "mechanism": self.name,
            "matrix": strategy_digest(self.strategy, self.batching.iterations),
            "batching": description(self.batching),
        }

    @cached_property
    def noise_copies(self) -> int:
        """How many arrays of the size of the model training keeps between steps to add C⁻¹Z.

        0 is independent noise, or a C without any band or buffers: row t is then computed from t + 1 normals that are
        drawn again (`dpmf.strategies.streaming.how_to_stream` tells them apart). Each copy has the precision of the
        noise, four bytes per parameter by default.
        """
        return how_to_stream(self.strategy, self.batching.iterations).copies

    @cached_property
    def gram(self) -> Array:
        """The Gram matrix of the mixture means (read-only)."""
        gram = gram_matrix(self.strategy, self.thrown_once())
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
        return gram_sums(self.strategy, self.thrown_once())

    @cached_property
    def lags(self) -> Array:
        """For each d < b an upper bound on all entries G[i, i+d]; for Toeplitz strategies G is not formed for it."""
        if isinstance(self.strategy, ToeplitzStrategy):
            return toeplitz_lags(self.strategy, self.thrown_once())
        upper = self.gram_upper()
        return np.array([np.diagonal(upper, d).max() for d in range(len(upper))])

    @cached_property
    def sensitivity(self) -> float:
        """The largest norm of a mixture mean, √max G_ii: the sensitivity without amplification.

        Of all throws together, where there are several.
        """
        if isinstance(self.batching, Poisson):
            assert isinstance(self.strategy, ToeplitzStrategy)
            column = raised_column(self.strategy, self.batching.iterations)
            return math.sqrt(self._ordinary(self.batching.throws * sum_of_squares(column)))
        if not self.batching.fixed:
            throws, between = self.batching.throws, self.product_between_throws
            return math.sqrt(throws * self.throw.sensitivity**2 + throws * (throws - 1) * between)
        if isinstance(self.strategy, ToeplitzStrategy):  # the first mean has the largest norm
            return math.sqrt(self._ordinary(sum_of_squares(folded_column(self.strategy, self.thrown_once()))))
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
        return mean_rows(self.strategy, self.thrown_once())

    def __str__(self) -> str:
        return self.name


def strategy_digest(strategy: Strategy, iterations: int) -> str:
    """A digest of the entries of C, whatever the strategy is called."""
    digest = hashlib.sha256(f"{iterations}:".encode())
    if isinstance(strategy, ToeplitzStrategy):
        digest.update(np.ascontiguousarray(strategy.strategy_coef(iterations), dtype="<f8").tobytes())
    else:
        for _, block in strategy.rows(iterations, block_rows(iterations)):
            digest.update(np.ascontiguousarray(block, dtype="<f8").tobytes())
    return digest.hexdigest()
