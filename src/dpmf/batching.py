"""How records are assigned to batches: balls-in-bins, with bins that are kept over all epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpmf import validation

MAX_ITERATIONS = 10**8  # accounting holds a handful of arrays of N doubles


@dataclass(frozen=True, init=False)
class BallsInBins:
    """Balls-in-bins ("random allocation") batching.

    Each record is assigned to one of b bins, once, independently and uniformly. Bin i is the batch of the iterations i,
    i + b, i + 2b, ...

    Attributes:
      epochs: k, how often every bin is used.
      batches_per_epoch: b, the number of bins.
      iterations: N, by default k·b. A smaller N with (k−1)·b < N and b ≤ N cuts off the last epoch.
    """

    epochs: int
    batches_per_epoch: int
    iterations: int

    def __init__(self, epochs: int, batches_per_epoch: int, iterations: int | None = None) -> None:
        k = validation.integer("epochs", epochs, at_least=1, at_most=MAX_ITERATIONS)
        b = validation.integer("batches_per_epoch", batches_per_epoch, at_least=1, at_most=MAX_ITERATIONS)
        n = k * b
        if iterations is not None:
            n = validation.integer("iterations", iterations, at_least=1)
            if n < b:
                raise validation.wrong("batches_per_epoch", f"at most iterations = {n}", b)
            if not (k - 1) * b < n <= k * b:
                raise validation.wrong("iterations", f"in {(k - 1) * b + 1}..{k * b} for {k} epochs of {b} batches", n)
        if n > MAX_ITERATIONS:
            most = MAX_ITERATIONS // b
            raise validation.wrong("epochs", f"at most {most} at {b} batches (N ≤ {MAX_ITERATIONS})", k)
        for name, value in (("epochs", k), ("batches_per_epoch", b), ("iterations", n)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_iterations(cls, iterations: int, batches_per_epoch: int) -> BallsInBins:
        """Return the batching for N iterations over b bins, with as many epochs as that takes."""
        n = validation.integer("iterations", iterations, at_least=1)
        b = validation.integer("batches_per_epoch", batches_per_epoch, at_least=1)
        return cls(math.ceil(n / b), b, n)

    @property
    def name(self) -> str:
        """How the batching prints, e.g. ``k=10, b=100``."""
        cut = "" if self.iterations == self.epochs * self.batches_per_epoch else f", N={self.iterations}"
        return f"k={self.epochs}, b={self.batches_per_epoch}{cut}"
