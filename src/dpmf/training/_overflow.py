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
from dpmf.mechanism import Mechanism
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

    def charge(self, epsilon: float) -> float:
        """e^ε·η, which is added to δ(ε); rounded up."""
        if not self.probability:
            return 0.0
        exponent = epsilon + math.log(self.probability)
        return math.inf if exponent > 0 else math.exp(exponent + 4 * UNIT * (epsilon + 1000)) * (1 + 4 * UNIT)

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

    def epsilon(self, delta: float, uncut: Callable[[float], float], known: float = math.inf) -> float:
        """An ε at which the cut mechanism is (ε, delta)-DP; an error where the charge leaves too little of δ.

        Args:
          delta: δ.
          uncut: the ε of the uncut mechanism at a given δ.
          known: an ε that is proved already, which is the answer where the charge leaves too little.
        """
        for share in _SHARES:
            epsilon = uncut(_without(delta, share))
            if self.charge(epsilon) <= share * delta:
                return epsilon
        if known < math.inf:
            return known
        raise ArgumentError(
            "delta",
            f"must be larger for this run, in which cut batches (max_batch_size = {self.max_batch_size}) cost "
            f"{upper(self.charge(epsilon), 2)} of it at ε = {upper(epsilon, 3)}, got {given(delta)}",
        )


@dataclass(frozen=True)
class CutMechanism(Mechanism):
    """The mechanism of a run whose batches are cut. What is asked about it alone leaves out what that costs."""

    beside = "batches of this run are cut (max_batch_size), which is not counted here: ask the run's get_epsilon"


def _without(delta: float, share: float) -> float:
    return math.nextafter(delta * (1 - share), 0.0)


def checked_cut(batching: AnyBatching, records: int, max_batch_size: int | None, max_records: int | None) -> Cut | None:
    """The cut that a sampler makes, from the arguments of the same names; None if it makes none."""
    if max_batch_size is None:
        if max_records is not None:
            raise ArgumentError("max_records", "applies only with max_batch_size: without it, no bin is ever cut")
        return None
    size = validation.integer("max_batch_size", max_batch_size, at_least=1)
    most = records if max_records is None else validation.integer("max_records", max_records, at_least=1)
    if most < records:
        raise validation.wrong("max_records", f"at least the number of records, {records}", most)
    if size * batching.batches_per_epoch < records:
        needed = math.ceil(records / batching.batches_per_epoch)
        raise ArgumentError(
            "max_batch_size", f"must be at least the average batch size, {needed}, got {size}: records would be lost"
        )
    return Cut(batching, most, size)
