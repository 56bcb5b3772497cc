"""Which mechanisms a design considers: families of strategies, bandwidths and batchings, within a memory limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpmf import strategies, validation
from dpmf.batching import BallsInBins, Batching, Poisson
from dpmf.errors import ArgumentError
from dpmf.strategies.base import Strategy
from dpmf.workloads import Workload

BATCHINGS = ("fixed", "rethrown", "reshuffled", "cyclic", "poisson", "cyclic-poisson")
_BANDWIDTHS = (1, 2, 4, 8, 16, 32, 64)
_BUFFERS = (1, 2, 4)  # one buffer has bounds that are much tighter at small ε
_GEOMETRIC = (8, 16, 32)
_WHOLE = 128  # up to so many batches, memory over a whole epoch is considered where bins are thrown anew
_LONGEST_FREE = 4000  # free coefficients are not sought for longer runs: their inverse series is quadratic
_FAR = 2  # cyclic batchings whose period is more than this many times the bandwidth waste amplification


@dataclass(frozen=True)
class Candidate:
    """A mechanism to consider, before its coefficients are known.

    Attributes:
      batching: with its gap.
      family: "dpsgd", or a family of `strategies.optimised`.
      size: the bandwidth or the number of buffers; None for all coefficients.
    """

    batching: Batching
    family: str
    size: int | None

    @property
    def exact(self) -> bool:
        """Whether no two iterations of a record share noise, so that σ is quick to find and nearly exact."""
        if self.family == "dpsgd" or isinstance(self.batching, Poisson):
            return True
        return self.batching.throws > 1 and self.batching.stride >= (self.size or 10**9)

    @property
    def promising(self) -> bool:
        """Whether the candidate is of a kind that is usually the best or nearly so, and quick to certify."""
        if self.batching.throws == 1:
            return self.family == "toeplitz" or (self.family == "blt" and self.size in (1, 2))
        return self.batching.throws == self.batching.epochs and self.size in _GEOMETRIC and self.family == "geometric"

    def at_least_as_loose_as(self, other: Candidate) -> bool:
        """Whether bounds on this candidate are expected to be about as loose as those on the other one, or looser.

        In fixed bins they are the looser the more buffers or coefficients there are: nothing is concluded about few
        from many.
        """
        if (self.family, self.batching.throws) != (other.family, other.batching.throws):
            return False
        return self.batching.throws > 1 or (self.size or math.inf) >= (other.size or math.inf)

    def strategy(self, workload: Workload, target: tuple[float, float]) -> Strategy:
        """The strategy, optimised unless it is that of DP-SGD."""
        if self.family == "dpsgd":
            return strategies.dpsgd()
        sizes = {} if self.size is None else {"buffers" if self.family == "blt" else "bandwidth": self.size}
        return strategies.optimised(self.batching, workload, target, family=self.family, **sizes)


def candidates(
    epochs: int,
    batches_per_epoch: int,
    *,
    batchings: Sequence[str] | None = None,
    bandwidths: Sequence[int] | None = None,
    copies: int | None = None,
) -> list[Candidate]:
    """Return all mechanisms to consider, the most promising first."""
    k, b = epochs, batches_per_epoch
    names = BATCHINGS if batchings is None else [validation.choice("batching", n, BATCHINGS) for n in batchings]
    widths = [validation.integer("bandwidth", p, at_least=1) for p in bandwidths or _BANDWIDTHS]
    if copies is not None:
        validation.integer("copies", copies, at_least=0)
    widths = sorted({min(p, k * b) for p in widths if copies is None or p <= copies + 1})
    if not widths:
        raise ArgumentError("bandwidth", f"must be at most copies + 1 = {(copies or 0) + 1} somewhere")
    found: list[Candidate] = []
    if "reshuffled" in names and k > 1:
        # The gap costs no error, and what is drawn again in place of copies of the model goes back to its start only.
        whole = [b] if bandwidths is None and copies is None and widths[-1] < b <= _WHOLE else []
        found += _banded(k, b, 1, widths + whole)
    if "fixed" in names:
        found += _fixed(k, b, widths, copies, bandwidths is not None)
    if "rethrown" in names:
        for m in (m for m in range(2, k) if k % m == 0):
            found += _banded(k, b, m, [p for p in widths if p > 1])
    for p in widths:
        period = next((s for s in range(p, b + 1) if b % s == 0), b)
        if p > b or period > _FAR * p:
            continue
        if "cyclic" in names and p > 1 and k > 1:
            found.append(Candidate(BallsInBins(k, b, rethrow_every=1, stride=period, gap=0), "banded", p))
        if ("poisson" if p == 1 else "cyclic-poisson") in names:
            # A band as wide as the period costs no more noise.
            wide = period if bandwidths is None and copies is None else p
            found.append(Candidate(Poisson(k, b, period), "dpsgd" if p == 1 else "banded", wide))
    if not found:
        raise ArgumentError("batching", f"must leave a mechanism to consider for {k} epochs of {b} batches")
    return found


def _banded(k: int, b: int, m: int, widths: Sequence[int]) -> Iterator[Candidate]:
    """Bins thrown anew every m epochs, with the gaps that make throws independent. Middle bandwidths come first."""
    for p in sorted((p for p in widths if p <= b), key=lambda p: (p not in (4, 16), p)):
        batching = BallsInBins(k, b, rethrow_every=m, gap=p - 1)
        yield Candidate(batching, "dpsgd" if p == 1 else "banded", p)
        if p in _GEOMETRIC:
            yield Candidate(batching, "geometric", p)  # its bounds are tighter at small ε


def _fixed(k: int, b: int, widths: Sequence[int], copies: int | None, only: bool) -> Iterator[Candidate]:
    """Fixed bins: all coefficients free (unless bandwidths were asked for), banded inverses, BLTs, DP-SGD."""
    batching = BallsInBins(k, b)
    if not only and k * b <= _LONGEST_FREE:
        yield Candidate(batching, "toeplitz", None)
    for p in widths:
        if p in (4, 16) or (only and p > 1):
            yield Candidate(batching, "inverse", p)
    if only:
        for p in widths:
            if p > 1:
                yield Candidate(batching, "banded", p)
    else:
        for d in _BUFFERS:
            if copies is None or d <= copies:
                yield Candidate(batching, "blt", d)
    if 1 in widths:
        yield Candidate(batching, "dpsgd", 1)
