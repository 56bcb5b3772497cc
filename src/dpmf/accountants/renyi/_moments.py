"""Log-moments of the likelihood ratio under truncated Gram matrices: which kernel, which scale, what it costs.

A Gram matrix is replaced by the entrywise larger G^(p) + τ, whose moments a table computes. The kernels are in
`dpmf.kernels.renyi`, the theory is in docs/theory/renyi.md.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpmf.accountants.renyi.orders import LogSeries, MomentTable, log_factorials
from dpmf.gram.bands import BandedMajorant, circulant_majorant, truncate
from dpmf.kernels import announce_compilation
from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide what a table may cost. Any values give sound bounds.

    Attributes:
      decades: scaled states of total m lie between b^(−m/2) and b^(m/2) (times a binomial); larger orders, for which
        these would leave a range of this many decades, are not tried.
      most_states: the largest number of states of the dynamic program.
      long_ring: a ring of at least so many bandwidths is also cut into a line, which leaves p − 1 indices out.
      threaded_work: with more work than this, threads share it.
      most_threads: at most so many.
    """

    decades: float = 250.0
    most_states: float = 5e7
    long_ring: int = 4
    threaded_work: float = 1e7
    most_threads: int = 8


_TUNING = _Tuning()


def tables_of(gram: Array, p: int) -> list[MomentTable]:
    """The moments of a Gram matrix truncated at bandwidth p; for a ring also those of the line left when it is cut.

    The line affords more orders for the same work. The two are separate tables, with orders of their own: one table
    that changes from ring to line would not be convex in the order, and its answers would depend on where the search
    for the best order starts.
    """
    b = len(gram)
    majorant = truncate(gram, p)
    if majorant.p == 1:
        return [UncorrelatedMoments(majorant, b)]
    if not majorant.wraps:
        return [LineMoments(majorant, b)]
    ring = RingMoments(majorant, b)
    if b < _TUNING.long_ring * majorant.p:
        return [ring]
    return [LineMoments.from_ring(circulant_majorant(gram), majorant.p), ring]


class UncorrelatedMoments(MomentTable):
    """p = 1: the a_i are independent, E[A^m] is a coefficient of a product of power series."""

    def __init__(self, majorant: BandedMajorant, b: int) -> None:
        super().__init__(majorant.tau, {"bandwidth": 1, "exact": majorant.exact})
        self._b = b
        self._diagonal, self._counts = np.unique(majorant.band[:, 0], return_counts=True)

    def work(self, order: int) -> float:
        products = len(self._counts) + sum(2 * int(c).bit_length() for c in self._counts)
        return 10.0 * products * order * order  # an exponential is about ten multiplications

    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        product: LogSeries | None = None
        for entry, count in zip(self._diagonal.tolist(), self._counts.tolist(), strict=True):
            square = LogSeries.exponential(order).weighted(entry / noise_multiplier / noise_multiplier)
            while count:
                if count & 1:
                    product = square if product is None else product.times(square)
                count >>= 1
                if count:
                    square = square.times(square)
        assert product is not None
        return product.log_moments(self._b)


class _BandedMoments(MomentTable):
    """Shared by line and ring: the state space, its scale and the rounding error."""

    def __init__(self, majorant: BandedMajorant, b: int) -> None:
        width = majorant.p
        super().__init__(majorant.tau, {"bandwidth": width, "exact": majorant.exact})
        self._band = majorant.band
        self._b = b
        self._g = float(self._band.max())
        self.largest_order = max(2, int(_TUNING.decades / math.log10(max(b, 10))))
        while self.largest_order > 2 and math.comb(self.largest_order + width, width) > _TUNING.most_states:
            self.largest_order -= 1

    def _decay(self, noise_multiplier: float, order: int) -> Array:
        missing = (self._g - self._band) / noise_multiplier**2
        return np.asarray(np.exp(-missing[:, :, None] * np.arange(order + 1)))

    def _unscaled(self, sums: Array, g: float, z: float) -> Array:
        """Log-moments from the scaled sums of a kernel.

        All terms are positive, so that relative errors add up along a path through the computation: sums and products
        for each index, the sums over all states and prefixes, and those of the exponents (floating-point.md, "Rényi
        moments").
        """
        order = len(sums) - 1
        m = np.arange(order + 1, dtype=np.float64)
        pairs = g * m * (m - 1) / 2
        width = self._band.shape[1]
        steps = self._b * (width + 3 * order + 16) + 2 * math.comb(order + width, width) + 64
        error = 2 * UNIT * (steps + 8 * pairs + 8 * m * math.log(self._b) + 8 * log_factorials(order))
        return np.log(sums) + pairs - m * (math.log(z) + math.log(self._b)) + error


def _chain_work(p: int, order: int, prefix: int) -> float:
    """Elementary updates per index, for all choices of `prefix` counts: inner sums, weights of middles, powers."""
    sums = math.comb(order + p + 1 + prefix, p + 1 + prefix)
    middles = math.comb(order + p - 1 + prefix, p - 1 + prefix) * (4 + 2 * min(p - 2, order))
    powers = math.comb(order + 2 + prefix, 2 + prefix) * p
    return float(sums + middles + powers)


class LineMoments(_BandedMoments):
    """Indices on a line: no wrap (one epoch), or a ring with a few indices left out."""

    @classmethod
    def from_ring(cls, circulant: Array, p: int) -> LineMoments:
        """A circulant majorant of the Gram matrix, truncated at p, without p − 1 of its indices.

        A is the average over rotations of the mean over b − p + 1 neighbours on the ring, and x ↦ x^m is convex, so
        E[A^m] is at most the average of their moments. The majorant (which need not be a Gram matrix itself) bounds
        all of those by one number. In it, those neighbours interact along the line only.
        """
        b = len(circulant)
        distance = np.minimum(np.arange(b), b - np.arange(b))
        tau = float(circulant[distance >= p].max()) if np.any(distance >= p) else 0.0
        reduced = np.maximum(circulant - tau, 0.0)
        near = np.maximum(reduced[:p], reduced[(b - np.arange(p)) % b])
        kept = b - p + 1
        band = np.zeros((kept, p))
        for d in range(p):
            band[d:, d] = near[d]
        line = cls(BandedMajorant(p, band, np.zeros_like(band), tau), kept)
        line.details = {"bandwidth": p, "exact": False, "left_out": p - 1}
        return line

    def work(self, order: int) -> float:
        p = self._band.shape[1]
        return self._b * _chain_work(p, order, 0)

    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        from dpmf.kernels.renyi import chain

        announce_compilation(chain)
        g, z = self._g / noise_multiplier**2, self._b**-0.5
        sums = chain(
            self._band / noise_multiplier**2, np.zeros(self._b), 0, order, g, z,
            self._decay(noise_multiplier, order), _state_space(self._band.shape[1], order),
        )  # fmt: skip
        return self._unscaled(sums, g, z)


class RingMoments(_BandedMoments):
    """Indices on a ring: a sum over the counts of the first p − 1 of them, each a line."""

    def __init__(self, majorant: BandedMajorant, b: int) -> None:
        super().__init__(majorant, b)
        p = majorant.p
        self._to_prefix = np.zeros((b, p - 1))
        for k in range(b):
            for d in range(1, p):
                if 0 <= k - d < p - 1:
                    self._to_prefix[k, k - d] = majorant.band[k, d]
                if k + d >= b and majorant.wrap[k, d]:  # on a short ring one d can be both, for two prefix indices
                    self._to_prefix[k, k + d - b] = majorant.wrap[k, d]

    def work(self, order: int) -> float:
        p = self._band.shape[1]
        return self._b * _chain_work(p, order, p - 1)

    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        from dpmf.kernels.renyi import LEAST_STATE, ring

        announce_compilation(ring)
        p = self._band.shape[1]
        band, to_prefix = self._band / noise_multiplier**2, self._to_prefix / noise_multiplier**2
        g, z = self._g / noise_multiplier**2, self._b**-0.5
        prefixes = _bounded_counts(p - 1, order)
        total = prefixes.sum(axis=1)
        factorial = log_factorials(order)
        log_weight = factorial[total] - factorial[prefixes].sum(axis=1) + total * math.log(z)
        for i in range(p - 1):
            log_weight -= (g - band[i, 0]) * prefixes[:, i] * (prefixes[:, i] - 1) / 2
            for j in range(i):
                log_weight -= (g - to_prefix[i, j]) * prefixes[:, i] * prefixes[:, j]
        weight = np.maximum(np.exp(log_weight), LEAST_STATE)
        decay = self._decay(noise_multiplier, order)
        states = _state_space(p, order)

        def part(first: int, step: int) -> Array:
            chosen = slice(first, None, step)  # interleaved: the heavy prefixes, small ones, come first
            sums: Array = ring(band, prefixes[chosen], weight[chosen], to_prefix, order, g, z, decay, states)
            return sums

        many = self.work(order) > _TUNING.threaded_work
        threads = min(os.cpu_count() or 1, _TUNING.most_threads) if many else 1
        with ThreadPoolExecutor(threads) as pool:
            sums = np.sum(list(pool.map(part, range(threads), [threads] * threads)), axis=0)
        return self._unscaled(sums, g, z)


def _counts_with_sum(length: int, total: int, known: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """All tuples of `length` non-negative integers with sum `total`, in lexicographic order."""
    if (length, total) not in known:
        if length == 0:
            rows = np.zeros((int(total == 0), 0), dtype=np.int16)
        else:
            parts = []
            for first in range(total + 1):
                rest = _counts_with_sum(length - 1, total - first, known)
                parts.append(np.insert(rest, 0, first, axis=1))
            rows = np.concatenate(parts)
        known[length, total] = rows
    return known[length, total]


@lru_cache(maxsize=8)
def _bounded_counts(length: int, most: int) -> np.ndarray:
    """All tuples of `length` non-negative integers with sum ≤ most, by increasing sum, then lexicographic."""
    known: dict[tuple[int, int], np.ndarray] = {}
    return np.concatenate([_counts_with_sum(length, total, known) for total in range(most + 1)]).astype(np.int64)


def _rank(counts: np.ndarray, binomial: np.ndarray) -> np.ndarray:
    """Where each tuple stands in `_bounded_counts`: after smaller sums, then after smaller first counts."""
    length = counts.shape[1]
    left = counts.sum(axis=1)
    rank = np.where(left > 0, binomial[np.maximum(left - 1, 0) + length, length], 0)
    for i in range(length):
        after = length - i - 1
        rank += binomial[left + after, after] - binomial[left - counts[:, i] + after, after]
        left = left - counts[:, i]
    return np.asarray(rank)


@lru_cache(maxsize=16)
def _state_space(p: int, order: int) -> tuple[np.ndarray, ...]:
    """The arguments of the kernels that describe the states (see `chain`), and the binomials.

    Middles are stored by their non-zero counts: there are at most `order` of those, however large p is.
    """
    middles = _bounded_counts(p - 2, order)
    middle_sum = middles.sum(axis=1)
    rest = order - middle_sum
    base = np.concatenate(([0], np.cumsum((rest + 1) * (rest + 2) // 2)))
    second = middles[:, 0].copy() if p > 2 else np.zeros(1, dtype=np.int64)
    row, column = np.nonzero(middles)
    entry = np.searchsorted(row, np.arange(len(middles) + 1))
    distance, amount = p - 2 - column, middles[row, column]
    pascal = np.array(
        [[math.comb(n, k) if n - k <= order else 0 for k in range(p - 1)] for n in range(order + p)], dtype=np.int64
    )
    following = np.zeros((len(middles), order + 1), dtype=np.int64)
    if p > 2:
        for t in range(order + 1):
            fits = rest >= t
            moved = np.column_stack((middles[fits, 1:], np.full(int(fits.sum()), t)))
            following[fits, t] = _rank(moved, pascal)
    # Exact before rounding: the error is then one unit in the last place, whatever the order.
    binomial = np.array([[float(math.comb(n, k)) for k in range(order + 1)] for n in range(order + 1)])
    return middle_sum, second, entry, distance, amount, base, following, binomial
