"""Moments of A given the geometric mean of its terms, as sums over small graphs (docs/theory/moments.md).

Let u ~ N(0, S), a_i = e^(u_i − S_ii/2), A the mean of the a_i. The mean of the u_i is √v·z with z standard normal, and
u_i = λ_i·z + R_i with R independent of z. Given z, A = Σ α_i·ξ_i with α_i = e^(λ_i·z − λ_i²/2)/b and
ξ_i = e^(R_i − C_ii/2), C the covariance of R. With f_ij = e^(C_ij) − 1, the moments of A around its mean are sums of
products of f over graphs without isolated vertices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpmf import budget
from dpmf.kernels.moments import diamond_sum, graph_sums
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array


def scaled(mechanism: Mechanism, gram: Array, noise_multiplier: float) -> Array:
    """G'/σ², positive semidefinite and at least G/σ² in every entry, for the upper Gram matrix of a mechanism.

    **Formal guarantees.** Entries of `gram` are above those of G by less than `error`, relatively, so that what they
    were raised by has eigenvalues above −error·(largest sum of a row). The diagonal is raised by that much.
    """
    error = 2.1 * mechanism.gram_error + 32 * UNIT
    s = gram / noise_multiplier / noise_multiplier * (1 + 8 * UNIT)
    s[np.diag_indices(len(s))] += error * float(s.sum(axis=1).max())
    return s


@dataclass(frozen=True)
class Shape:
    """The law of A given z, as far as it is known. All of it is about y = (A/mean − 1)/deviation.

    Attributes:
      mean: E[A | z].
      deviation: about the standard deviation of A/mean.
      lowest: no y is smaller.
      skewness: E y³.
      kurtosis: an upper bound on E y⁴.
      errors: bounds on |E y|, |E y² − 1| and on the error of the skewness.
      error: a bound on the relative error of `mean`, and on that of A, weight for weight.
    """

    mean: float
    deviation: float
    lowest: float
    skewness: float
    kurtosis: float
    errors: Array
    error: float

    @property
    def known(self) -> tuple[float, float, float, Array]:
        """What is known of y, in the order in which the kernels take it."""
        return self.lowest, self.skewness, self.kurtosis, self.errors


@dataclass(frozen=True)
class Graphs:
    """Sums over graphs of two, three and four vertices, without the complete graph of four, for given weights."""

    two: float
    three: float
    four: float

    @classmethod
    def of(cls, f: Array, weights: Array, pairs: Array | None = None) -> Graphs:
        """The sums; `pairs` is f·diag(weights)·f, where it is known."""
        return cls(*graph_sums(f, (f * weights) @ f if pairs is None else pairs, weights))


class GivenMean:
    """Moments of A given z, for one matrix S; if sharp, the complete graph of four vertices is bounded at every z anew.

    **Formal guarantees.** S is positive semidefinite, as given, and λ_i = (S·1)_i/(b√v) with v = 1ᵀS1/b², so that
    C = S − λλᵀ is the covariance of what is left of u given the mean of the u_i, and C·1 = 0. Products of ξ have
    E Π ξ = exp(Σ C over pairs); expanding Π(ξ − 1) leaves the graphs in which every vertex has an edge. Sums run over
    all tuples of indices, equal ones included. The complete graph of four vertices is bounded from above
    (`complete_graph`), the others are computed; their errors (of f, and of summation) are at most `_relative` times the
    same sums with |f| + `step` for f, because these are polynomials with non-negative coefficients, hence convex, in
    what is added to |f|. The inequality of arithmetic and geometric means gives A ≥ exp(√v·z − tr S/(2b)).
    """

    def __init__(self, s: Array, sharp: bool = False) -> None:
        b = len(s)
        budget.claim(80.0 * b * b)
        rows = s.sum(axis=1)
        self.variance = float(rows.sum()) / b**2
        self._root = math.sqrt(self.variance)
        self.loads: Array = rows / (b * self._root)
        self._half = float(np.diagonal(s).sum()) / (2 * b)
        self._b = b
        rest = s - np.outer(self.loads, self.loads)
        self._f = np.expm1(rest)
        largest = float(np.abs(self._f).max())
        error = 5 * (b + 8) * UNIT * float(self.loads.max()) ** 2 + 4 * UNIT * float(s.max())
        error = (1 + largest) * error + 4 * UNIT * largest
        self._start = weights = self._weights(0.0)[0]
        size = np.abs(self._f)
        step = max(math.sqrt(float((size * size).mean())), error)
        self._relative = error / step * 1.01 + (8 * b + 128) * UNIT
        self._sizes = Graphs.of(size + step, weights)
        self._largest_f = size + error if sharp else None
        self._complete = complete_graph(size + error, weights)
        self._found: dict[float, Shape] = {}

    def _weights(self, z: float) -> tuple[Array, Array]:
        """The weights of the ξ, which sum up to 1, and the terms α·b that they are proportional to."""
        terms = np.exp(self.loads * z - self.loads**2 / 2)
        return terms / terms.sum(), terms

    def at(self, z: float) -> Shape:
        """What is known of A given z."""
        found = self._found.get(z)
        if found is None:
            budget.check()
            found = self._found[z] = self._at(z)
        return found

    def means(self, nodes: Sequence[float]) -> tuple[Array, Array]:
        """E[A | z] at some z, and bounds on the relative errors."""
        means = [float(self._weights(z)[1].sum()) / self._b for z in nodes]
        return np.array(means), np.array([self._error(z) for z in nodes])

    def _error(self, z: float) -> float:
        """A bound on the relative error of a term, of their sum, and of the geometric mean."""
        largest = float(self.loads.max())
        return (2 * self._b + 32) * UNIT * (1 + largest * (abs(z) + largest))

    def _at(self, z: float) -> Shape:
        b = self._b
        weights, terms = self._weights(z)
        ratio = float((weights / self._start).max()) * (1 + 1e-9)
        graphs = Graphs.of(self._f, weights)
        two, three, four = (
            self._relative * size * ratio**n
            for n, size in zip((2, 3, 4), (self._sizes.two, self._sizes.three, self._sizes.four), strict=True)
        )
        complete = self._complete * ratio**4 * (1 + 1e-9)
        if self._largest_f is not None:
            complete = min(complete, complete_graph(self._largest_f, weights))
        variance = graphs.two + two
        deviation = math.sqrt(max(variance, 1e-300))
        mean, error = float(terms.sum()) / b, self._error(z)
        lowest = math.exp(self._root * z - self._half) * (1 - 4 * error) / mean - 1
        return Shape(
            mean=mean,
            deviation=deviation,
            lowest=lowest / deviation - 1e-12 * abs(lowest / deviation),
            skewness=graphs.three / deviation**3,
            kurtosis=(graphs.four + four + complete) / deviation**4,
            errors=np.array([(b + 8) * UNIT / deviation, 2 * two / variance + 1e-12, three / deviation**3 + 1e-12]),
            error=error,
        )


def complete_graph(size: Array, weights: Array, shared: Array | None = None, enough: float = 0.0) -> float:
    """A bound on the sum over the complete graph of four vertices, with `size` at least |f|.

    **Formal guarantees.** For fixed vertices a and c the other two, k and l, add up to gᵀ|f|g with
    g_k = w_k·|f_ak·f_kc|. On one hand |f_kl| ≤ max|f|. On the other, gᵀ|f|g ≤ ρ·Σ g_k²/w_k, where ρ is the spectral
    radius of √W|f|√W, which is at most the largest entry of |f|w. The smaller of the two bounds is taken.

    Args:
      size: bounds on |f|.
      weights: those of the terms.
      shared: size·diag(weights)·size, where it is known.
      enough: the second bound is not asked where the first is at most this.
    """
    roots = np.sqrt(weights)
    if shared is None:
        halves = size * roots
        shared = halves @ halves.T  # half the work of (size·W)·size
    plain = float(size.max()) * float(diamond_sum(size, shared, weights))
    if plain > enough:
        halves = size * size * roots
        sums = (size * (halves @ halves.T)) @ weights
        plain = min(plain, float((size @ weights).max()) * float(weights @ sums))
    return plain * (1 + 1e-9)
