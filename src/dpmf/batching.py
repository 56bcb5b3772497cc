"""How records are assigned to batches: balls in bins, thrown once or anew every few epochs, and Poisson sampling.

Every batching is a value. A `Mechanism` combines it with a strategy and says what an accountant has to know: how many
independent throws there are, and the Gram matrix of one of them (docs/theory/batchings.md).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from dpmf import validation
from dpmf.errors import ArgumentError

MAX_ITERATIONS = 10**8  # accounting holds a handful of arrays of N doubles


def _shape(epochs: int, batches_per_epoch: int) -> tuple[int, int]:
    k = validation.integer("epochs", epochs, at_least=1, at_most=MAX_ITERATIONS)
    b = validation.integer("batches_per_epoch", batches_per_epoch, at_least=1, at_most=MAX_ITERATIONS)
    if k * b > MAX_ITERATIONS:
        raise validation.wrong("epochs", f"at most {MAX_ITERATIONS // b} at {b} batches (N ≤ {MAX_ITERATIONS})", k)
    return k, b


@dataclass(frozen=True, init=False, repr=False)
class BallsInBins:
    """Balls-in-bins ("random allocation") batching.

    Each record is assigned to one of b bins, independently and uniformly. Bin i is the batch of the iterations i,
    i + b, i + 2b, ... By default a record keeps its bin over all epochs. With `rethrow_every=m` every record draws a
    new bin after m epochs, and between two such throws there are `gap` iterations that add noise and use no record.
    With `stride=s` the records are split into s groups, and those of group r use only the bins r, r + s, r + 2s, ...

    Attributes:
      epochs: k, how often every bin is used.
      batches_per_epoch: b, the number of bins.
      iterations: N, by default k·b plus the gaps. With fixed bins a smaller N with (k−1)·b < N and b ≤ N cuts off the
        last epoch.
      rethrow_every: m, the number of epochs for which a record keeps its bin; it divides k. None keeps it for all.
      stride: s, the distance between the bins that one record may be assigned to; it divides b.
      gap: the number of iterations without records between two throws. None lets the mechanism choose the least number
        that makes throws independent, for a banded strategy, or 0.
    """

    epochs: int
    batches_per_epoch: int
    iterations: int
    rethrow_every: int | None
    stride: int
    gap: int | None

    def __init__(
        self,
        epochs: int,
        batches_per_epoch: int,
        iterations: int | None = None,
        *,
        rethrow_every: int | None = None,
        stride: int = 1,
        gap: int | None = None,
    ) -> None:
        k, b = _shape(epochs, batches_per_epoch)
        s = validation.integer("stride", stride, at_least=1, at_most=b)
        if b % s:
            raise validation.wrong("stride", f"a divisor of batches_per_epoch = {b}", s)
        m = k if rethrow_every is None else validation.integer("rethrow_every", rethrow_every, at_least=1)
        if k % m:
            raise validation.wrong("rethrow_every", f"a divisor of epochs = {k}", m)
        throws = k // m
        if gap is not None:
            gap = validation.integer("gap", gap, at_least=0, at_most=MAX_ITERATIONS)
            if throws == 1 and gap:
                raise ArgumentError("gap", f"applies only where bins are thrown anew, got {gap} for fixed bins")
        n = k * b + (throws - 1) * (gap or 0)
        whole = n
        if iterations is not None:
            n = validation.integer("iterations", iterations, at_least=1)
        if n != whole:
            if throws > 1:
                raise validation.wrong("iterations", f"{whole} for {throws} throws", iterations)
            if n < b:
                raise validation.wrong("batches_per_epoch", f"at most iterations = {n}", b)
            if not (k - 1) * b < n <= k * b:
                raise validation.wrong("iterations", f"in {(k - 1) * b + 1}..{k * b} for {k} epochs of {b} batches", n)
        if n > MAX_ITERATIONS:
            raise validation.wrong("gap", f"so small that there are at most {MAX_ITERATIONS} iterations", gap)
        fields = (k, b, n, None if throws == 1 else m, s, gap)
        names = ("epochs", "batches_per_epoch", "iterations", "rethrow_every", "stride", "gap")
        for name, value in zip(names, fields, strict=True):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """The call that makes it, without options that have their usual value."""
        cut = self.throws == 1 and self.iterations != self.epochs * self.batches_per_epoch
        options: dict[str, object] = {"epochs": self.epochs, "batches_per_epoch": self.batches_per_epoch}
        options |= {"iterations": self.iterations} if cut else {}
        options |= {"rethrow_every": self.rethrow_every} if self.throws > 1 else {}
        options |= {"stride": self.stride} if self.stride > 1 else {}
        options |= {"gap": self.gap} if self.gap is not None else {}
        return f"BallsInBins({', '.join(f'{name}={value}' for name, value in options.items())})"

    @classmethod
    def from_iterations(cls, iterations: int, batches_per_epoch: int) -> BallsInBins:
        """Return the batching for N iterations over b fixed bins, with as many epochs as that takes."""
        n = validation.integer("iterations", iterations, at_least=1)
        b = validation.integer("batches_per_epoch", batches_per_epoch, at_least=1)
        return cls(math.ceil(n / b), b, n)

    @property
    def throws(self) -> int:
        """How often every record draws a bin."""
        return 1 if self.rethrow_every is None else self.epochs // self.rethrow_every

    @property
    def steps(self) -> int:
        """The number of iterations that use records: all but those of the gaps."""
        return self.iterations - (self.throws - 1) * (self.gap or 0)

    @property
    def fixed(self) -> bool:
        """Whether every record may use every bin and keeps its bin over all epochs."""
        return self.throws == 1 and self.stride == 1

    def with_gap(self, gap: int) -> BallsInBins:
        """The same batching with a gap that was left open."""
        if self.throws == 1 or self.gap is not None:
            return self
        k, b = self.epochs, self.batches_per_epoch
        return BallsInBins(k, b, rethrow_every=self.rethrow_every, stride=self.stride, gap=gap)

    @property
    def name(self) -> str:
        """How the batching prints, e.g. ``k=10, b=100``."""
        cut = self.throws == 1 and self.iterations != self.epochs * self.batches_per_epoch
        parts = [f"k={self.epochs}, b={self.batches_per_epoch}", f"N={self.iterations}" if cut else "", self.kind]
        return ", ".join(part for part in parts if part)

    @property
    def kind(self) -> str:
        """How bins are thrown, e.g. ``reshuffled, gap 3``; empty for fixed bins without a stride."""
        parts = []
        if self.throws > 1:
            parts.append("reshuffled" if self.rethrow_every == 1 else f"thrown anew every {self.rethrow_every} epochs")
            parts += [f"gap {self.gap}"] if self.gap else []
        if self.stride > 1:
            parts.append(f"stride {self.stride}")
        return ", ".join(parts)


def reshuffled(epochs: int, batches_per_epoch: int, *, stride: int = 1, gap: int | None = None) -> BallsInBins:
    """Balls in bins that are thrown anew in every epoch."""
    return BallsInBins(epochs, batches_per_epoch, rethrow_every=1, stride=stride, gap=gap)


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each record takes part in each iteration with probability 1/b, independently.

    Attributes:
      epochs: k.
      batches_per_epoch: b; there are N = k·b iterations with an expected 1/b of the records each.
      period: with a period q the records are split into q groups, and those of group r take part only in the
        iterations r, r + q, r + 2q, ..., with probability q/b ("cyclic Poisson sampling"). It divides b.
    """

    epochs: int
    batches_per_epoch: int
    period: int = 1

    def __post_init__(self) -> None:
        k, b = _shape(self.epochs, self.batches_per_epoch)
        q = validation.integer("period", self.period, at_least=1, at_most=b)
        if b % q:
            raise validation.wrong("period", f"a divisor of batches_per_epoch = {b}", q)
        for name, value in (("epochs", k), ("batches_per_epoch", b), ("period", q)):
            object.__setattr__(self, name, value)

    @property
    def iterations(self) -> int:
        """N = k·b."""
        return self.epochs * self.batches_per_epoch

    @property
    def steps(self) -> int:
        """The number of iterations, all of which use records."""
        return self.iterations

    @property
    def throws(self) -> int:
        """How many iterations a record may take part in."""
        return self.iterations // self.period

    @property
    def fixed(self) -> bool:
        """Whether records keep one bin over all epochs: never."""
        return False

    @property
    def sampling_rate(self) -> float:
        """The probability with which a record takes part in an iteration of its group, rounded up."""
        return min(1.0, math.nextafter(self.period / self.batches_per_epoch, 2.0))

    @property
    def name(self) -> str:
        """How the batching prints, e.g. ``k=10, b=100, Poisson``."""
        return f"k={self.epochs}, b={self.batches_per_epoch}, {self.kind}"

    @property
    def kind(self) -> str:
        """``Poisson``, or ``cyclic Poisson of period 4``."""
        return "Poisson" if self.period == 1 else f"cyclic Poisson of period {self.period}"


def cyclic_poisson(epochs: int, batches_per_epoch: int, period: int) -> Poisson:
    """Cyclic Poisson sampling, for banded strategies of a bandwidth of at most `period`."""
    return Poisson(epochs, batches_per_epoch, period)


@dataclass(frozen=True)
class OneThrow:
    """The bins of one throw: mean i is the first one moved down by i rows, and none is cut off.

    Accountants see it in place of the batching that it is a part of (`Mechanism.throw`).

    Attributes:
      batches_per_epoch: the number of bins.
      iterations: the number of rows.
    """

    batches_per_epoch: int
    iterations: int
    epochs: int = 1
    throws: int = 1
    fixed: bool = True

    @property
    def steps(self) -> int:
        """The number of rows: there are no gaps."""
        return self.iterations

    @property
    def kind(self) -> str:
        """Nothing that a reader has to be told."""
        return ""

    @property
    def name(self) -> str:
        return f"one throw into {self.batches_per_epoch} bins"


Batching: TypeAlias = BallsInBins | Poisson
AnyBatching: TypeAlias = BallsInBins | Poisson | OneThrow

NAMES = ("fixed", "reshuffled", "cyclic", "poisson", "cyclic-poisson")
TAKERS = {  # which of them take which option
    "iterations": ("fixed",),
    "rethrow_every": ("reshuffled", "cyclic"),
    "stride": ("fixed", "reshuffled", "cyclic", "cyclic-poisson"),
    "gap": ("reshuffled", "cyclic"),
}


def build(
    name: str,
    epochs: int,
    batches_per_epoch: int,
    *,
    bandwidth: int,
    iterations: int | None = None,
    rethrow_every: int | None = None,
    stride: int | None = None,
    gap: int | None = None,
) -> Batching:
    """Return the batching of a name, for a strategy of some bandwidth.

    Args:
      name: "fixed" keeps bins over all epochs, "reshuffled" throws records into bins anew in every epoch (or every
        `rethrow_every` epochs), "cyclic" does so with a stride that separates the iterations of one record, "poisson"
        and "cyclic-poisson" sample each iteration.
      epochs: k.
      batches_per_epoch: b.
      bandwidth: that of the strategy; cyclic batchings take the least stride or period that reaches it.
      iterations: N, where the last epoch of fixed bins is cut off.
      rethrow_every: the number of epochs for which a record keeps its bin.
      stride: the distance between the bins of one record, or the period of cyclic Poisson sampling.
      gap: the number of iterations without records between two throws.
    """
    validation.choice("batching", name, NAMES)
    k, b = _shape(epochs, batches_per_epoch)
    poisson = name.endswith("poisson")
    given = {"iterations": iterations, "rethrow_every": rethrow_every, "stride": stride, "gap": gap}
    for option, takers in TAKERS.items():
        if given[option] is not None and name not in takers:
            raise ArgumentError(option, f"applies only to batching {' or '.join(takers)}, not to {name}")
    if name.startswith("cyclic") and stride is None:
        stride = next((s for s in range(min(bandwidth, b), b + 1) if b % s == 0), b)
    stride = 1 if stride is None else validation.integer("stride", stride, at_least=1)
    if poisson:
        return Poisson(k, b, stride)
    every = None if name == "fixed" else 1 if rethrow_every is None else rethrow_every
    return BallsInBins(k, b, iterations, rethrow_every=every, stride=stride, gap=gap)


def description(batching: AnyBatching) -> dict[str, Any]:
    """A batching as plain values, for checkpoints and statements."""
    return {"kind": type(batching).__name__, **asdict(batching)}


def batches_from_size(dataset_size: int, batch_size: int) -> int:
    """Return the number of batches per epoch that makes batches of at most a size on average.

    It depends on the number of records, which is not protected then: a guarantee is for leaving a record's place empty.
    With a public constant near the number of records in its place, it is for adding or removing a record.
    """
    n = validation.integer("dataset_size", dataset_size, at_least=1)
    return math.ceil(n / validation.integer("batch_size", batch_size, at_least=1, at_most=n))
