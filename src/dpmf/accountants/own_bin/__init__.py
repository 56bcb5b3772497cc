"""The own-bin accountant: any memory and any ε, in seconds.

If a record is removed, δ(ε) is the mean of (1 − e^ε/A)_+ where the record is in each bin, A the likelihood ratio. Which
bin it is says where A can become large: around that bin. So one normal variable τ, a weighted sum of what is seen
there, is integrated on nodes, and one that all bins share is integrated in closed form, which smooths the payoff.
Given τ, what is left of A hardly varies, and four moments say nearly all about it. Where that costs little, or there
are many batches, the Gram matrix is raised to be circulant, so that one bin answers for all (docs/theory/own_bin.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
from scipy.special import ndtr, ndtri

from dpmf import budget, validation
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.moments._given_mean import Shape, scaled
from dpmf.accountants.own_bin._between_nodes import Curves
from dpmf.accountants.own_bin._extrapolated import extrapolated
from dpmf.accountants.own_bin._given_bin import GivenBin, Shared, circulant_above
from dpmf.accountants.own_bin._given_radius import FAR, GivenRadius, falling_curve
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.kernels.smoothed import pooled_above, smoothed_above, smoothed_below, smoothed_likely, smoothed_polynomial
from dpmf.loss.gaussian import gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.recent import Recent


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide tightness and time. Any positive values give sound bounds.

    Attributes:
      largest_batches: mechanisms with more batches are refused: a node costs b³ operations.
      suitable_batches: `best` asks about so many batches, and about more, up to the second number, if memory is long:
        else others are as close, and quicker.
      long_memory: how many bins overlap with one, weighted by how much, where memory is long.
      many_batches: beyond so many batches a bound takes more than a second, and others are asked first.
      usual_batches: beyond so many batches nodes are farther apart.
      each_batches: up to so many batches every bin is asked by itself where a circulant matrix would cost too much.
      wider: by how much nodes may be farther apart, at the least, where every bin is asked; the first that costs
        little is taken.
      cost: the part of the bound that this may cost.
      pooled: how many bins polynomials are made for; all others use theirs.
      every: which nodes of the grid are looked at to see where the bound comes from.
      circulant_cost: by which factor the sum of all entries may grow for the matrix to be made circulant.
      largest_variance: above this G/σ² moments say nothing, and the closed form without amplification answers.
      negligible: it also does below this δ.
      smaller: how many smaller ε are asked in the add direction, to extrapolate from.
      radii: the distance of nodes of the radius of the slowest wave, up to 3.
      far_radii: the nodes from there on.
      close: where a bound of the add direction is at most so many times what it bounds, nothing else is asked.
      far_below: nor where it is at most this part of the target.
      usual_delta: the δ that matters where no target says so.
      dense_from: where nodes become dense, in deviations of τ.
      widest: the largest distance of nodes.
      beyond: the part of δ that may come from beyond the first and the last node, each.
      too_far: where no target is known and the bound is below this part of the δ that was aimed at, it is aimed at.
      kept: how many laws are remembered, with their moments.
      rows_per_thread: a thread makes so many polynomials, at least.
      most_threads: and there are at most so many threads.
    """

    largest_batches: int = 2000
    suitable_batches: tuple[int, int] = (512, 800)
    long_memory: float = 8.0
    many_batches: int = 300
    usual_batches: int = 512
    each_batches: int = 128
    wider: tuple[float, ...] = (6.0, 5.0, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0)
    cost: float = 0.05
    pooled: int = 8
    every: int = 4
    circulant_cost: float = 1.02
    largest_variance: float = 12.0
    negligible: float = 1e-100
    smaller: int = 20
    radii: float = 0.25
    far_radii: tuple[float, ...] = (3.0, 3.5, 4.2, 5.2, 6.6)
    close: float = 1.05
    far_below: float = 0.02
    usual_delta: float = 1e-6
    dense_from: float = -4.2
    widest: float = 2.5
    beyond: float = 1e-3
    too_far: float = 0.1
    kept: int = 4
    rows_per_thread: int = 16
    most_threads: int = 4


_TUNING = _Tuning()
_RARE = 1e-20  # a probability that is added to bounds of the add direction


@dataclass(frozen=True)
class OwnBin(Accountant):
    """Options of the own-bin accountant.

    Attributes:
      spacing: the distance of the nodes of τ, in standard deviations; a bound loses about spacing²/20 of σ by it.
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
        if b > _TUNING.largest_batches:
            raise ValueError(
                f"accountant own-bin must be given at most {_TUNING.largest_batches} batches per epoch, got {b}"
            )
        return _PreparedOwnBin(mechanism, self)

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        b, (usual, most) = mechanism.batching.batches_per_epoch, _TUNING.suitable_batches
        if b <= usual:
            return self
        sums = mechanism.gram_sums
        return self if b <= most and sums.total >= _TUNING.long_memory * float(sums.diagonal.sum()) else None


class _Bin:
    """One bin: what moments say at each node of τ, and what the payoff can be in between."""

    def __init__(self, shared: Shared, curves: Curves, index: int) -> None:
        self.given = GivenBin(shared, index)
        self.curve = curves.least(float(self.given.loads.min()), float(self.given.loads.max()))
        self._known: dict[float, Shape] = {}

    def at(self, x: float) -> Shape:
        """What is known of A where τ is x deviations above its mean if the record is in this bin."""
        if x not in self._known:
            self._known[x] = self.given.at(self.given.own + x)
        return self._known[x]

    def asked(self, nodes: Array) -> list[tuple[float, Shape]]:
        """Weights of nodes, and what is known there."""
        if self.given.own == 0:  # A does not depend on τ
            return [(1.0, self.at(0.0))]
        return list(zip(self.curve.weights(nodes).tolist(), map(self.at, nodes.tolist()), strict=True))


class _Law:
    """What is known of A at one noise multiplier.

    **Formal guarantees.** For each bin, x = τ − l_i is standard normal if the record is there. z is integrated in
    closed form: (1 − K/A)_+ becomes a smooth function Ψ of Σ α_j·ξ_j. Given x, moments of that sum bound the mean of Ψ
    (`smoothed_above`). A polynomial that is above Ψ everywhere is so for all bins and nodes, so that the least
    expectation among those found for some of them is a bound, too (`pooled_above`). Between nodes, values there bound
    the payoff for each ξ (`Curves`), hence its mean. Below the first node and beyond the last one the payoff is at
    most 1.
    """

    def __init__(self, s: Array, circulant: bool, spacing: float) -> None:
        self._shared = Shared.of(s, circulant)
        self._root = 0.0 if self._shared is None else math.sqrt(self._shared.variance)
        self.usable = self._shared is not None and Curves.usable(self._root)
        self._count, self._spacing = (1 if circulant else len(s)), spacing

    @cached_property
    def bins(self) -> list[_Bin]:
        """The bins that are asked: all of them, or one that stands for all."""
        assert self._shared is not None
        budget.claim(8.0 * self._count * len(self._shared.s) ** 2)
        curves = Curves(self._root)
        return [_Bin(self._shared, curves, index) for index in range(self._count)]

    @cached_property
    def _anywhere(self) -> Shape:
        """A without its shared factor and without a record; it is below its least value with probability `_RARE`.

        By the inequality of arithmetic and geometric means it is at least e^(ū − tr C/(2b)), ū the mean of the u_j
        without what they share, a normal variable of variance 1ᵀC1/b².
        """
        assert self._shared is not None
        return self._not_below(GivenBin(self._shared, None).anywhere(self._count == 1))

    def _not_below(self, shape: Shape) -> Shape:
        """The same with the least value that is missed with probability `_RARE`."""
        assert self._shared is not None
        s, v = self._shared.s, self._shared.variance
        variance = max(float(s.mean()) - v, 0.0) + 1e-12 * float(s.max())
        half = (float(np.trace(s)) / len(s) - v) / 2
        lowest = math.exp(float(ndtri(_RARE)) * math.sqrt(variance) - half) * (1 - 1e-9) / shape.mean - 1
        return replace(shape, lowest=max(lowest / shape.deviation * (1 + 1e-9), shape.lowest))

    @cached_property
    def _radii(self) -> tuple[list[tuple[float, Shape]], float]:
        """Weights of nodes of the radius of the slowest wave and what is known there, and what is to be added."""
        given = GivenRadius(self._shared) if self._shared is not None and self._count == 1 else None
        if given is None or not given.usable or self._root >= FAR:
            return [], 1.0
        nodes: Array = np.unique(np.concatenate([np.arange(0.0, 3.0, _TUNING.radii), _TUNING.far_radii]))
        shapes = [self._not_below(given.at(radius)) for radius in nodes.tolist()]
        if any(given.angle_matters(one, shape, _RARE) for one, shape in zip(nodes.tolist(), shapes, strict=True)):
            return [], 1.0
        curve, more = falling_curve(given.wave, self._root)
        weights = curve.weights(nodes, radial=True)
        beyond = math.exp(-(float(nodes[-1]) ** 2) / 2)
        return list(zip(weights.tolist(), shapes, strict=True)), (float(weights.sum()) * more + beyond) * (1 + 1e-9)

    def put(self, strike: float, enough: float = 0.0) -> tuple[float, float]:
        """A bound on E(1 − K·A)_+, and about what it bounds; no effort is made to get below `enough`.

        **Formal guarantees.** The variable that all bins share is integrated in closed form; the payoff is then a
        smooth function of what is left of A, which `smoothed_above` bounds, together with the rare case that what is
        left is below its least value. Bounds from both sides at smaller strikes bound it, too (`extrapolated`). So do
        bounds at nodes of the radius of the slowest wave: between two of them, payoff plus a number is at most a
        solution of an equation (`falling_curve`), whatever the angle and all else, and beyond the last the payoff is at
        most 1. What the angle changes is covered by `_RARE` once more (`GivenRadius.angle_matters`).
        """
        shape = self._anywhere
        value = self._put_above(strike)
        likely = smoothed_likely(-1, strike, self._root, shape.mean, shape.deviation, shape.skewness)
        if strike > 1 and value > max(_TUNING.close * likely, enough):
            smaller = np.exp(np.linspace(0, math.log(strike), _TUNING.smaller + 1)[:-1]).tolist()
            upper, lower = map(self._put_above, smaller), map(self._put_below, smaller)
            value = min(value, extrapolated(strike, smaller, list(upper), list(lower)))
        if strike > 1 and value > max(_TUNING.close * likely, enough):
            asked, more = self._radii
            value = min(value, sum(weight * self._put_above(strike, shape) for weight, shape in asked) + more)
        return value, likely

    def _put_above(self, strike: float, shape: Shape | None = None) -> float:
        """A bound from one polynomial, at most 1, for one law; it allows for `_RARE` twice."""
        shape = self._anywhere if shape is None else shape
        moved = strike * (1 - 4 * shape.error - 4 * UNIT)
        value = smoothed_above(-1, moved, self._root, shape.mean, shape.deviation, *shape.known, 2 * _RARE)
        return min(float(value) * (1 + 1e-9), 1.0) if value < 1 else 1.0

    def _put_below(self, strike: float) -> float:
        """A lower bound from one polynomial, at least 0."""
        shape = self._anywhere
        moved = strike * (1 + 4 * shape.error + 4 * UNIT)
        value = smoothed_below(-1, moved, self._root, shape.mean, shape.deviation, *shape.known, _RARE)
        return float(value) * (1 - 1e-9) if value > 0 else 0.0

    def call(self, strike: float, last: float) -> tuple[float, float]:
        """A bound on E(A − K)_+, and about what it bounds."""
        nodes = self._nodes(strike, last)
        outside = float(ndtr(nodes[0]) + ndtr(-nodes[-1])) * (1 + 1e-9)
        asked = [one.asked(nodes) for one in self.bins]
        worst = max(shape.error for each in asked for _, shape in each)
        law = _Payoff(strike * (1 - 4 * worst - 4 * UNIT), self._root)
        weights = np.array([weight for each in asked for weight, _ in each]) / len(asked)
        shapes = [shape for each in asked for _, shape in each]
        few = np.unique(np.linspace(0, len(asked) - 1, _TUNING.pooled).round().astype(int)).tolist()
        values = law.above(shapes, [shape for k in few for _, shape in asked[k]])
        likely = np.array([law.likely(shape) for shape in shapes])
        return (float(weights @ values) + outside) * (1 + 1e-9), float(weights @ likely)

    def _nodes(self, strike: float, last: float) -> Array:
        """Nodes from −`last` or before to `last` or beyond: equidistant where one bin is asked, few where all are."""
        most = 2.8 / max(1e-9, *(one.curve.frequency for one in self.bins))
        h = min(self._spacing, most / 2, _TUNING.widest)
        widest = min(_TUNING.widest, most - h)  # cells on the grid become wider by up to h
        if self._count == 1:
            low = max(_TUNING.dense_from, -last)
            wide: Array = np.linspace(-last, low, math.ceil((low + last) / widest), endpoint=False, dtype=float)
            return np.append(wide, low + h * np.arange(math.ceil((last - low) / h) + 1, dtype=np.float64))
        # Multiples of h, so that the moments at a node serve all strikes.
        half = math.ceil(last / h)
        grid: Array = h * np.arange(-half, half + 1, dtype=np.float64)
        # A cell of width t where much of the bound, f, comes from costs about f·t³: all should cost the same.
        one = max(self.bins, key=lambda one: one.given.own)
        law, seen = _Payoff(strike, self._root), grid[:: _TUNING.every]
        logarithms = np.interp(grid, seen, [math.log(max(law.likely(one.at(x)), 1e-300)) for x in seen.tolist()])
        height = logarithms - grid**2 / 2
        relative = np.exp((height.max() - height) / 3)
        least = float(one.curve.weights(grid) @ np.exp(logarithms))
        nodes = grid
        for wider in _TUNING.wider:
            passed = np.append(0.0, np.cumsum(1 / np.minimum(wider * relative[1:], widest / h)))
            places = np.searchsorted(passed, np.linspace(0, passed[-1], math.ceil(passed[-1]) + 1)[1:-1])
            chosen = np.unique(np.concatenate([[0], places, [len(grid) - 1]]))
            found = float(one.curve.weights(grid[chosen]) @ np.exp(logarithms[chosen]))
            nodes = grid[chosen]
            if found <= (1 + _TUNING.cost) * least:
                break
        return nodes


@dataclass(frozen=True)
class _Payoff:
    """Ψ, for one strike and one √v."""

    strike: float
    root: float

    def above(self, shapes: Sequence[Shape], pooled: Sequence[Shape]) -> Array:
        """Bounds on the mean of Ψ, at most 1, with the polynomials that suit some of the laws."""
        pool = np.empty((len(pooled), 7))

        def fill(first: int, step: int) -> None:
            for row, shape in zip(pool[first::step], pooled[first::step], strict=True):
                row[:2] = shape.mean, shape.deviation
                smoothed_polynomial(
                    1, self.strike, self.root, shape.mean, shape.deviation, *shape.known, 0.0, row[2:]
                )  # fmt: skip

        threads = min(len(pooled) // _TUNING.rows_per_thread, os.cpu_count() or 1, _TUNING.most_threads)
        if threads < 2:
            fill(0, 1)
        else:  # nearly all of the time is spent in the kernel, which lets other threads run
            with ThreadPoolExecutor(threads) as executor:
                list(executor.map(partial(fill, step=threads), range(threads)))
        moments = np.array([(x.mean, x.deviation, x.skewness, x.kurtosis) for x in shapes]).T
        found: Array = pooled_above(pool, *np.ascontiguousarray(moments), np.array([x.errors for x in shapes]))
        return found

    def likely(self, shape: Shape) -> float:
        """About what they bound."""
        found: float = smoothed_likely(1, self.strike, self.root, shape.mean, shape.deviation, shape.skewness)
        return found


class _PreparedOwnBin(PreparedAccountant):
    name = "own-bin"

    def __init__(self, mechanism: Mechanism, options: OwnBin) -> None:
        self.mechanism = mechanism
        self._b = mechanism.batching.batches_per_epoch
        self._spacing = min(options.spacing * max(1.0, self._b / _TUNING.usual_batches), 1.0)
        self._laws: Recent[tuple[float, bool], _Law] = Recent(_TUNING.kept)
        self._closed = Gaussian().prepare(mechanism)
        self.cheap = self._b <= _TUNING.many_batches

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
        return self._bound(noise_multiplier, epsilon, direction, target_delta, _TUNING.usual_delta)

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """Bounds on δ at many ε; what the two before lead to expect decides where the nodes of τ end.

        **Formal guarantees.** Each value is one of `delta` on other nodes, and any nodes give a bound.
        """
        order = sorted(range(len(epsilons)), key=lambda k: epsilons[k])
        values = [1.0] * len(epsilons)

        def asked() -> Iterator[None]:
            passed: list[tuple[float, float]] = []  # ε and log δ
            for k in order:
                budget.check()
                expected = _TUNING.usual_delta
                if len(passed) == 2:
                    (first, high), (last, low) = passed
                    steps = min((epsilons[k] - last) / (last - first), 3.0)  # close neighbours do not tell the slope
                    # Somewhat less than that: what lies beyond the last node counts fully.
                    expected = min(expected, math.exp(low + (low - high) * steps) / 3)
                values[k] = self._bound(noise_multiplier, epsilons[k], direction, None, expected).value
                if not passed or epsilons[k] > passed[-1][0]:
                    passed = [*passed[-1:], (epsilons[k], math.log(max(values[k], 1e-300)))]
                yield

        budget.as_far_as_it_goes(asked())
        return values

    def _bound(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target: float | None, expected: float
    ) -> Evaluation:
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
            enough = _TUNING.far_below * (target or 0.0)
            found = [law.put(strike, enough) for law in laws if law.usable]
            bins = 0
        else:
            aimed = min(target or expected, plain)
            last = float(-ndtri(max(_TUNING.beyond * aimed, 1e-300)))
            each = costly and self._b <= _TUNING.each_batches
            if each and not self._law(noise_multiplier, False).usable:
                each = False  # some bins share nothing with the others; on the ring of the circulant matrix they do
            law, bins = self._law(noise_multiplier, not each), self._b if each else 1
            found = [law.call(strike, last)] if law.usable else []
            if target is None and found and found[0][0] < _TUNING.too_far * aimed:
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
