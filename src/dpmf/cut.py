"""Batches of a largest size: how likely it is that a bin overflows, and what that costs in δ.

A batch with more records than `max_batch_size` is cut. Whether a record is cut depends on who else is in its bin, so
the mechanism is no longer exactly the one that was accounted for. docs/theory/batch-sizes.md proves that it is
(ε, δ + e^ε·η)-DP where the uncut one is (ε, δ)-DP, and η is the `probability` below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dpmf import validation
from dpmf.batching import AnyBatching, BallsInBins, Poisson
from dpmf.errors import ArgumentError
from dpmf.formatting import given, upper
from dpmf.numerics import FLOOR, UNIT

_SHARES = (2.0**-10, 2.0**-5, 0.5)  # parts of δ that the charge may take when ε is asked for
LARGEST_SHARE = _SHARES[-1]  # beyond it, a larger batch is always the better choice


def binomial_tail(trials: int, groups: int, bins: int, least: int) -> float:
    """An upper bound on P(X ≥ least), where X counts successes in independent trials of probability groups/bins.

    **Formal guarantees.** With m trials, p the probability and B = least between mp and m, the probability of exactly B
    is at most √(m/(2πB(m−B)))·e^(−m·D), D the relative entropy of B/m and p (Stirling's formula with Robbins' bounds).
    Beyond B, each probability is at most r = (m−B)p/((B+1)(1−p)) < 1 times the one before, so that the whole tail is at
    most 1/(1−r) times the first. Every logarithm is of a ratio with a relative error of at most four units of rounding,
    which the exponent is raised by.
    """
    m, b, s, c = trials, bins, groups, least
    if c <= 0 or c * b <= m * s:
        return 1.0
    if c > m:
        return 0.0
    if c == m:  # all trials; p < 1 because the mean is below m
        return min(1.0, math.exp(m * math.log(s / b) * (1 - 8 * UNIT) + 8 * UNIT * m) + FLOOR)
    first = c * math.log(c * b / (m * s))
    second = (m - c) * math.log((m - c) * b / (m * (b - s)))
    exponent = -(first + second) + 16 * UNIT * (m + abs(first) + abs(second))
    ratio = (m - c) * s / ((c + 1) * (b - s)) * (1 + 8 * UNIT)
    one = math.sqrt(m / (2 * math.pi * c * (m - c))) * math.exp(exponent)
    return min(1.0, one / (1 - ratio) * (1 + 64 * UNIT) + FLOOR)


@dataclass(frozen=True)
class Cut:
    """Batches of at most `max_batch_size` records, out of at most `records`.

    Attributes:
      batching: how records are assigned to batches.
      records: an upper bound on the number of records (or of users), which is public.
      max_batch_size: B. A bin with more records is cut to its first B.
    """

    batching: AnyBatching
    records: int
    max_batch_size: int

    @cached_property
    def probability(self) -> float:
        """η: an upper bound on the expected number of times that one record meets a full bin, B others or more.

        **Formal guarantees.** A record takes part in the batches of every throw once (of every epoch, with Poisson
        sampling, on average). Of at most n others, at most ⌊n/s⌋ are in its group, and each is in its bin with
        probability s/b, independently; s is the number of groups.
        """
        batching, b = self.batching, self.batching.batches_per_epoch
        if isinstance(batching, Poisson):
            groups, times = batching.period, batching.epochs
        else:
            assert isinstance(batching, BallsInBins)
            groups, times = batching.stride, batching.throws
        return times * binomial_tail(self.records // groups, groups, b, self.max_batch_size) * (1 + 2 * UNIT)

    def charge(self, epsilon: float, direction: str = "both") -> float:
        """What is added to δ(ε): e^ε·η, or only η where a record is removed; rounded up."""
        if not self.probability or direction == "remove":
            return self.probability
        return raised(self.probability, epsilon)

    def left(self, epsilon: float, delta: float) -> float:
        """What the uncut mechanism may have of a target δ; an error where the charge takes more than half of it.

        Args:
          epsilon: the target ε.
          delta: the target δ.
        """
        if self.charge(epsilon) > LARGEST_SHARE * delta:
            raise ArgumentError(
                "max_batch_size",
                f"must be at least {self.smallest(epsilon, delta)}, got {self.max_batch_size}: a batch overflows too "
                f"often, which would cost {upper(self.charge(epsilon), 2)} of δ = {given(delta)} at "
                f"ε = {given(epsilon)}",
            )
        return math.nextafter(delta - self.charge(epsilon), 0.0)

    def smallest(self, epsilon: float, delta: float, share: float = LARGEST_SHARE) -> int:
        """The smallest batch size whose charge at ε is at most a share of δ."""
        low, high = 0, self.records + 1  # nobody is cut by `high`
        while high - low > 1:
            middle = (low + high) // 2
            enough = Cut(self.batching, self.records, middle).charge(epsilon) <= share * delta
            low, high = (low, middle) if enough else (middle, high)
        return high


def raised(probability: float, epsilon: float) -> float:
    """e^ε times a positive probability; rounded up, and infinite above 1."""
    exponent = epsilon + math.log(probability)
    return math.inf if exponent > 0 else math.exp(exponent + 4 * UNIT * (epsilon + 1000)) * (1 + 4 * UNIT)


def affordable(delta: float, uncut: Callable[[float], float], charge: Callable[[float], float]) -> float:
    """An ε at which something is (ε, delta)-DP in spite of cut batches; an error where they leave too little of δ.

    Args:
      delta: δ.
      uncut: the ε without a cut, at a given δ.
      charge: what the cut adds to δ at a given ε.
    """
    for share in _SHARES:
        epsilon = uncut(math.nextafter(delta * (1 - share), 0.0))
        if charge(epsilon) <= share * delta:
            return epsilon
    cost = f"cut batches (max_batch_size) cost {upper(charge(epsilon), 2)} of it at ε = {upper(epsilon, 3)}"
    raise ArgumentError("delta", f"must be larger for this run, in which {cost}, got {given(delta)}")


def checked_cut(batching: AnyBatching, size: int, max_batch_size: int | None, records: int | None) -> Cut | None:
    """The cut that a run makes; None if it makes none.

    Args:
      batching: how records are assigned to batches.
      size: how many records (or users) there are.
      max_batch_size: B, or None.
      records: a public upper bound on their number; without it the number itself.
    """
    if max_batch_size is None:
        return None
    largest = validation.integer("max_batch_size", max_batch_size, at_least=1)
    if records is not None and records < size:
        raise ArgumentError(
            "records", f"must be at least the number of records, {size}, where batches are cut, got {records}"
        )
    if largest * batching.batches_per_epoch < size:
        needed = math.ceil(size / batching.batches_per_epoch)
        raise ArgumentError(
            "max_batch_size", f"must be at least the average batch size, {needed}, got {largest}: records would be lost"
        )
    return Cut(batching, size if records is None else records, largest)
