"""Log-moments of the likelihood ratio under truncated Gram matrices: which kernel, which scale, what it costs.

Every table bounds log E_Q[A^m], m = 0..order, from above for the Gram matrix it was made for, τ included:
G ≤ G^(p) + τ gives E[A_G^m] ≤ e^(τ·m(m−1)/(2σ²)) · E[A_{G^(p)}^m].
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import gammaln

from dpmf.gram.bands import BandedMajorant
from dpmf.kernels import announce_compilation
from dpmf.numerics import Array

# The scaled states of total m lie between b^(−m/2) and b^(m/2) (times a binomial): keep that inside double range.
_DECADES = 250.0
_MAX_STATES = 5e7


class MomentTable(ABC):
    """Upper bounds on the log-moments for one truncation."""

    def __init__(self, tau: float, width: int, exact: bool) -> None:
        self.tau = tau
        self.details: dict[str, Any] = {"bandwidth": width, "exact": exact}

    largest_order: int = 10**9

    @abstractmethod
    def work(self, order: int) -> float:
        """Elementary updates for all moments up to `order`."""

    @abstractmethod
    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        """The log-moments of the truncated matrix, τ left out, rounding error included."""

    def log_moments(self, noise_multiplier: float, order: int) -> Array:
        m = np.arange(order + 1, dtype=np.float64)
        shared = self.tau / noise_multiplier**2 * m * (m - 1) / 2
        moments = self._log_moments(noise_multiplier, order) + shared * (1 + 1e-15)
        moments[:2] = 0.0  # E[A^0] = E[A] = 1
        return np.maximum(moments, 0.0)  # E[A^m] ≥ 1 by Jensen


class UncorrelatedMoments(MomentTable):
    """p = 1: the a_i are independent, E[A^m] is a coefficient of a product of power series."""

    def __init__(self, majorant: BandedMajorant, b: int) -> None:
        super().__init__(majorant.tau, 1, majorant.exact)
        self._b = b
        self._diagonal, self._counts = np.unique(majorant.band[:, 0], return_counts=True)

    def work(self, order: int) -> float:
        products = len(self._counts) + sum(2 * int(c).bit_length() for c in self._counts)
        return 10.0 * products * order * order  # an exponential is about ten multiplications

    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        from dpmf.kernels.renyi import log_convolve

        announce_compilation(log_convolve)
        m = np.arange(order + 1, dtype=np.float64)
        log_factorial = gammaln(m + 1)
        product: Array | None = None
        depth = 0
        for entry, count in zip(self._diagonal / noise_multiplier**2, self._counts, strict=True):
            square = entry * m * (m - 1) / 2 - log_factorial
            remaining = int(count)
            while remaining:
                if remaining & 1:
                    product = square if product is None else log_convolve(product, square)
                    depth += 1
                remaining >>= 1
                if remaining:
                    square = log_convolve(square, square)
                    depth += 1
        assert product is not None
        # Each product of series loses a few units in the last place of the largest logarithm, and of its sum.
        scale = np.maximum.accumulate(np.abs(product) + np.abs(log_factorial)) + m * math.log(self._b) + order
        return product + log_factorial - m * math.log(self._b) + 8 * (depth + 1) * 2.0**-52 * scale


class _BandedMoments(MomentTable):
    """Shared by line and ring: the state space, its scale and the rounding error."""

    def __init__(self, band: Array, b: int, tau: float, width: int, exact: bool) -> None:
        super().__init__(tau, width, exact)
        self._band = band
        self._b = b
        self._g = float(band.max())
        self.largest_order = max(2, int(_DECADES / math.log10(max(b, 10))))
        while self.largest_order >= 2 and math.comb(self.largest_order + width, width) > _MAX_STATES:
            self.largest_order -= 1

    def _decay(self, noise_multiplier: float, order: int) -> Array:
        missing = (self._g - self._band) / noise_multiplier**2
        return np.asarray(np.exp(-missing[:, :, None] * np.arange(order + 1)))

    def _unscaled(self, sums: Array, g: float, z: float) -> Array:
        order = len(sums) - 1
        m = np.arange(order + 1, dtype=np.float64)
        pairs = g * m * (m - 1) / 2
        # Depth of the computation (sums and products along a path, the sums over all states and all prefixes) and the
        # exponents' own relative error.
        width = self._band.shape[1]
        steps = self._b * (width + 2 * order + 8) + 2 * math.comb(order + width, width) + 64
        slack = 2.0**-52 * (steps + 8 * pairs + 8 * m * math.log(self._b) + 8 * gammaln(m + 1))
        return np.log(sums) + pairs - m * (math.log(z) + math.log(self._b)) + slack


def _chain_work(p: int, order: int, prefix: int) -> float:
    """Elementary updates per index, for all choices of `prefix` counts: inner sums, weights of middles, powers."""
    sums = math.comb(order + p + 1 + prefix, p + 1 + prefix)
    middles = math.comb(order + p - 1 + prefix, p - 1 + prefix) * (4 + 2 * min(p - 2, order))
    powers = math.comb(order + 2 + prefix, 2 + prefix) * p
    return float(sums + middles + powers)


class LineMoments(_BandedMoments):
    """Indices on a line: no wrap (one epoch), or a ring with a few indices left out."""

    def __init__(self, majorant: BandedMajorant, b: int) -> None:
        super().__init__(majorant.band, b, majorant.tau, majorant.p, majorant.exact)

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
            self._decay(noise_multiplier, order), *_state_space(self._band.shape[1], order),
        )  # fmt: skip
        return self._unscaled(sums, g, z)


class RingMoments(_BandedMoments):
    """Indices on a ring: a sum over the counts of the first p − 1 of them, each a line."""

    def __init__(self, majorant: BandedMajorant, b: int) -> None:
        super().__init__(majorant.band, b, majorant.tau, majorant.p, majorant.exact)
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
        from dpmf.kernels.renyi import ring

        announce_compilation(ring)
        p = self._band.shape[1]
        band, to_prefix = self._band / noise_multiplier**2, self._to_prefix / noise_multiplier**2
        g, z = self._g / noise_multiplier**2, self._b**-0.5
        prefixes = _bounded_counts(p - 1, order)
        total = prefixes.sum(axis=1)
        log_weight = gammaln(total + 1.0) - gammaln(prefixes + 1.0).sum(axis=1) + total * math.log(z)
        for i in range(p - 1):
            log_weight -= (g - band[i, 0]) * prefixes[:, i] * (prefixes[:, i] - 1) / 2
            for j in range(i):
                log_weight -= (g - to_prefix[i, j]) * prefixes[:, i] * prefixes[:, j]
        weight = np.maximum(np.exp(log_weight), 1e-290)
        decay = self._decay(noise_multiplier, order)
        states = _state_space(p, order)

        def part(first: int, step: int) -> Array:
            chosen = slice(first, None, step)  # interleaved: the heavy prefixes, small ones, come first
            sums: Array = ring(band, prefixes[chosen], weight[chosen], to_prefix, order, g, z, decay, *states)
            return sums

        threads = min(os.cpu_count() or 1, 8) if self.work(order) > 1e7 else 1
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
