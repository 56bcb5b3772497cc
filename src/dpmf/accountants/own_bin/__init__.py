"""The own-bin accountant: any memory and any ε, in a fraction of a second.

If a record is removed, δ(ε) is the mean of (1 − e^ε/A)_+ where the record is in each bin, A the likelihood ratio. Which
bin it is says where A can become large: around that bin. So one normal variable τ, a weighted sum of what is seen
there, is integrated on nodes, and one that all bins share is integrated in closed form, which smooths the payoff.
Given τ, what is left of A hardly varies, and four moments say nearly all about it. Nothing of the Gram matrix is
replaced where there are few batches; where there are many, it is raised to be circulant (docs/theory/own_bin.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import ClassVar

import numpy as np
from scipy.special import ndtr, ndtri

from dpmf import validation
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.moments._given_mean import Shape, scaled
from dpmf.accountants.own_bin._given_bin import GivenBin, Shared, circulant_above
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.kernels.smoothed import smoothed_above, smoothed_likely
from dpmf.loss.gaussian import gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.recent import Recent


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide tightness and time. Any positive values give sound bounds.

    Attributes:
      largest_batches: mechanisms with more batches are left to others: a node costs b³ operations.
      few_batches: up to so many batches every bin is asked by itself where a circulant matrix would cost too much.
      wider: by how much nodes are farther apart where every bin is asked.
      circulant_cost: by which factor the sum of all entries may grow for the matrix to be made circulant.
      largest_variance: above this G/σ² moments say nothing, and the closed form without amplification answers.
      negligible: it also does below this δ.
      usual_delta: the δ that matters where no target says so.
      bulk: edges of the ranges of τ − l_i that are lumped together, and where nodes begin.
      beyond: the part of δ that may come from beyond the last node.
      lower_strike: how much smaller the logarithm of the strike is in the bound on how often A is large at all: the
        first number, or the second one times ε where that is less.
      depth: how often that bound is asked for one of its own.
      nearby: what is known at another strike serves instead where it is so many times as far away,
      little: and what it adds is at most this part of the whole.
      too_far: where no target is known and the bound is below this part of the δ that was aimed at, it is aimed at.
      kept: how many laws are remembered, with their moments.
    """

    largest_batches: int = 512
    few_batches: int = 8
    wider: float = 2.0
    circulant_cost: float = 1.01
    largest_variance: float = 12.0
    negligible: float = 1e-100
    usual_delta: float = 1e-6
    bulk: tuple[float, ...] = (-7.5, -5.5, -4.2)
    beyond: float = 1e-3
    lower_strike: tuple[float, float] = (0.25, 0.4)
    depth: int = 3
    nearby: tuple[float, float] = (0.5, 2.0)
    little: float = 0.04
    too_far: float = 0.1
    kept: int = 4


_TUNING = _Tuning()
_RARE = 1e-20  # a probability that is added to bounds of the add direction
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True)
class OwnBin(Accountant):
    """Options of the own-bin accountant.

    Attributes:
      spacing: the distance of the nodes of τ, in standard deviations; a bound loses about spacing²/12 of σ by it.
    """

    name: ClassVar[str] = "own-bin"
    summary: ClassVar[str] = "four moments given what is seen around the record's own bin; any memory, any ε"
    rests_on: ClassVar[str] = "exact conditional moments, polynomials above a smoothed option, Kahane's inequality"

    spacing: float = 0.12

    def __post_init__(self) -> None:
        validation.positive("spacing", self.spacing)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Nothing is computed before the first question.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) of the dominating pair. G is
        replaced by G' ≥ G, a Gram matrix too (Kahane's inequality). E(A − K)_+ is the mean over i of
        E[a_i·(1 − K/A)_+], see `_Law`. The add direction needs no bin: what all bins share is integrated, and four
        moments of the rest bound the payoff (`_Law.put`).
        """
        b = mechanism.batching.batches_per_epoch
        if self.suits(mechanism) is None:
            raise ValueError(
                f"accountant own-bin must be given at most {_TUNING.largest_batches} batches per epoch, got {b}"
            )
        return _PreparedOwnBin(mechanism, self)

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        return self if mechanism.batching.batches_per_epoch <= _TUNING.largest_batches else None


class _Bin:
    """One bin: its nodes, and what moments say at each of them."""

    def __init__(self, shared: Shared, index: int, spacing: float) -> None:
        self.given = GivenBin(shared, index)
        self.spacing = spacing
        self._known: dict[int, Shape] = {}

    def asked(self, last: float) -> Iterator[tuple[float, Shape]]:
        """Nodes and ranges of τ up to `last` deviations from l_i, with their weights if the record is in this bin."""
        if self.given.own == 0:  # A does not depend on τ
            if 0 not in self._known:
                self._known[0] = self.given.at(0.0)
            return iter([(1.0, self._known[0])])
        return chain(self._ranges(), self._nodes(last))

    def _ranges(self) -> Iterator[tuple[float, Shape]]:
        for k, (low, high) in enumerate(zip(_TUNING.bulk[:-1], _TUNING.bulk[1:], strict=True)):
            if -k - 1 not in self._known:
                self._known[-k - 1] = self.given.between(low + self.given.own, high + self.given.own)
            yield float(ndtr(high) - ndtr(low)) * (1 + 1e-9), self._known[-k - 1]

    def _nodes(self, last: float) -> Iterator[tuple[float, Shape]]:
        count = math.ceil((last - _TUNING.bulk[-1]) / self.spacing) + 1
        weights = _node_weights(_TUNING.bulk[-1], self.spacing, count, self.given.own)
        for k, weight in enumerate(weights.tolist()):
            if k not in self._known:
                self._known[k] = self.given.at(self.given.own + _TUNING.bulk[-1] + self.spacing * k)
            yield weight, self._known[k]


def _node_weights(start: float, spacing: float, count: int, own: float) -> Array:
    """Weights of equidistant nodes for functions of x = τ − l_i that are below their chords, multiplied by a_i.

    The k-th is the integral of the k-th hat function times φ(x)·e^(l_i·(x_k − x)), rounded up.
    """
    left = start + spacing * np.arange(count - 1)[:, None]
    part = (_ABSCISSAE + 1) / 2
    x = left + spacing * part
    density = np.exp(-x * x / 2) * _WEIGHTS * (spacing / 2 / math.sqrt(2 * math.pi))
    weights = np.zeros(count)
    weights[:-1] += (density * (1 - part) * np.exp(own * (left - x))).sum(axis=1)
    weights[1:] += (density * part * np.exp(own * (left + spacing - x))).sum(axis=1)
    return weights * (1 + 1e-9)


class _Law:
    """What is known of A at one noise multiplier.

    **Formal guarantees.** For fixed z and w let F(τ) = a_i·(1 − K/A)_+, with loads l_j of log a_j on τ. Where A ≥ K and
    m, m₂ are the means of l_j and l_j² with weights a_j, F'' = a_i·(l_i²·(1 − K/A) + K/A·(2·l_i·m + m₂ − 2m²)), and
    m₂ ≥ m². So F'' ≥ 0 if 0 ≤ m ≤ 2·l_i, and F'' ≥ −η·a_i·[A ≥ K] always (`GivenBin.bend`). On a cell of width h
    between two nodes F is at most its chord plus h²/8 times the largest −F'' there, and within a cell a_i changes by at
    most e^(l_i·h) and A by e^(L·h), L = max|l_j|. So what the chords may lack is at most
    h²/8·η·e^(l_i·h)·E[A·[A ≥ K₁]] with K₁ = K·e^(−L·h), the mean over the bins being at most the largest. And
    A·[A ≥ K₁] ≤ (A − K₂)_+·K₁/(K₁ − K₂) for every K₂ < K₁: the bound itself answers, at a smaller strike. Below the
    first node and beyond the last one (1 − K/A)_+ is at most 1, or A is replaced by a sum that is larger for all τ in
    a range. z is integrated in closed form: (1 − K/A)_+ becomes a smooth function of Σ α_j·ξ_j, which
    `smoothed_above` bounds.
    """

    def __init__(self, s: Array, circulant: bool, spacing: float) -> None:
        self._shared = Shared.of(s, circulant)
        self.usable = self._shared is not None
        self._count, self._spacing = (1, spacing) if circulant else (len(s), spacing * _TUNING.wider)
        self._root = 0.0 if self._shared is None else math.sqrt(self._shared.variance)
        self._calls: dict[float, float] = {}  # bounds on E(A − K)_+ that were found, by log K

    @cached_property
    def bins(self) -> list[_Bin]:
        """The bins that are asked: all of them, or one that stands for all."""
        assert self._shared is not None
        return [_Bin(self._shared, index, self._spacing) for index in range(self._count)]

    @cached_property
    def _anywhere(self) -> Shape:
        """A without its shared factor and without a record; it is below its least value with probability `_RARE`.

        By the inequality of arithmetic and geometric means it is at least e^(ū − tr C/(2b)), ū the mean of the u_j
        without what they share, a normal variable of variance 1ᵀC1/b².
        """
        assert self._shared is not None
        s, v = self._shared.s, self._shared.variance
        b = len(s)
        shape = GivenBin(self._shared, None).at(0.0)
        variance = max(float(s.mean()) - v, 0.0) + 1e-12 * float(s.max())
        half = (float(np.trace(s)) / b - v) / 2
        lowest = math.exp(float(ndtri(_RARE)) * math.sqrt(variance) - half) * (1 - 1e-9) / shape.mean - 1
        return replace(shape, lowest=max(lowest / shape.deviation * (1 + 1e-9), shape.lowest))

    def put(self, strike: float) -> tuple[float, float]:
        """A bound on E(1 − K·A)_+, and about what it bounds.

        **Formal guarantees.** The variable that all bins share is integrated in closed form; the payoff is then a
        smooth function of what is left of A, which `smoothed_above` bounds, together with the rare case that what is
        left is below its least value.
        """
        shape = self._anywhere
        moved = strike * (1 - 4 * shape.error - 4 * UNIT)
        law = -1, moved, self._root, shape.mean, shape.deviation
        value = smoothed_above(*law, *shape.known, _RARE)
        return (value if value < 1 else 1.0) * (1 + 1e-9), smoothed_likely(*law, shape.skewness)

    def call(self, strike: float, last: float, depth: int = 0) -> tuple[float, float]:
        """A bound on E(A − K)_+, and about what it bounds."""
        value, likely = self._by_chords(strike, last)
        h = self._spacing
        givens = [one.given for one in self.bins]
        lacking = h * h / 8 * max(given.bend * math.exp(given.own * h) for given in givens)
        if lacking > 1e-4 * value:
            nearer = math.log(strike) - max(given.largest for given in givens) * h
            down = min(_TUNING.lower_strike[0], _TUNING.lower_strike[1] * nearer)
            least, most = (part * down for part in _TUNING.nearby)
            known = any(least <= nearer - other <= most for other in self._calls)
            known = known and lacking * self._how_large(nearer) <= _TUNING.little * value
            if depth < _TUNING.depth and down > 0 and not known:
                self.call(math.exp(nearer - down), last, depth + 1)
            lacking *= self._how_large(nearer)
        found = (value + lacking) * (1 + 1e-9)
        if found < 1:
            self._calls[math.log(strike)] = found
        return found, likely

    def _how_large(self, log_strike: float) -> float:
        """A bound on E[A·[A ≥ K]], from bounds on E(A − K')_+ at smaller K' that are known: any of them will do."""
        known = ((log_strike - other, bound) for other, bound in self._calls.items() if other < log_strike - 1e-6)
        return min(1.0, *(bound / -math.expm1(-down) for down, bound in known), 1.0)

    def _by_chords(self, strike: float, last: float) -> tuple[float, float]:
        outside = float(ndtr(_TUNING.bulk[0]) + ndtr(-last)) * (1 + 1e-9)
        total = likely = 0.0
        for one in self.bins:
            for weight, shape in one.asked(last):
                moved = strike * (1 - 4 * shape.error - 4 * UNIT)
                value = smoothed_above(1, moved, self._root, shape.mean, shape.deviation, *shape.known, 0.0)
                total += weight * (value if value < 1 else 1.0)  # what is not a number is 1, too
                likely += weight * smoothed_likely(1, moved, self._root, shape.mean, shape.deviation, shape.skewness)
        return total / len(self.bins) + outside, likely / len(self.bins)


class _PreparedOwnBin(PreparedAccountant):
    name = "own-bin"
    cheap = True

    def __init__(self, mechanism: Mechanism, options: OwnBin) -> None:
        self.mechanism = mechanism
        self._b = mechanism.batching.batches_per_epoch
        self._spacing = min(options.spacing, 1.0)
        self._laws: Recent[tuple[float, bool], _Law] = Recent(_TUNING.kept)
        self._closed = Gaussian().prepare(mechanism)

    @cached_property
    def _grams(self) -> tuple[Array, Array, bool]:
        """The upper Gram matrix, a circulant one above it, and whether that costs too much."""
        gram = self.mechanism.gram_upper()
        circulant = circulant_above(gram)
        costly = float(circulant.sum()) > _TUNING.circulant_cost * float(gram.sum())
        return gram, circulant, costly

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        """A bound on δ(ε), see `_Law`; the closed form where that is smaller."""
        _, circulant, costly = self._grams
        largest = float(circulant.max()) / noise_multiplier / noise_multiplier
        plain = gaussian_delta(math.sqrt(min(largest, 1e300)) * (1 + 1e-9), epsilon)
        closed = Evaluation(self._closed.delta(noise_multiplier, epsilon, direction).value, {"bins": 0})
        if self._b == 1 or largest > _TUNING.largest_variance or not plain > _TUNING.negligible:
            return closed
        strike = math.exp(epsilon) * (1 - 4 * UNIT)
        found: list[tuple[float, float]] = []
        if direction == "add":
            laws = [self._law(noise_multiplier, True)] + ([self._law(noise_multiplier, False)] if costly else [])
            found = [law.put(strike) for law in laws if law.usable]
            bins = 0
        else:
            aimed = min(target_delta or _TUNING.usual_delta, plain)
            last = float(-ndtri(max(_TUNING.beyond * aimed, 1e-300)))
            each = costly and self._b <= _TUNING.few_batches
            law, bins = self._law(noise_multiplier, not each), self._b if each else 1
            found = [law.call(strike, last)] if law.usable else []
            if target_delta is None and found and found[0][0] < _TUNING.too_far * aimed:
                last = float(-ndtri(max(_TUNING.beyond * _TUNING.too_far * min(found[0]), 1e-300)))
                found.append(law.call(strike, last))
        value, likely = min(found, default=(1.0, 1.0))
        if not value < closed.value:
            return closed
        # What a circulant matrix costs is not in the estimate.
        slack = math.inf if costly and bins < self._b else value / max(likely, 1e-300)
        return Evaluation(value, {"bins": bins}, slack=slack)

    def _law(self, noise_multiplier: float, circulant: bool) -> _Law:
        def make() -> _Law:
            gram, above, _ = self._grams
            s = scaled(self.mechanism, above if circulant else gram, noise_multiplier)
            return _Law(s, circulant, self._spacing)

        return self._laws.get((noise_multiplier, circulant), make)
