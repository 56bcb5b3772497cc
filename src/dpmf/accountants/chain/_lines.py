"""Chains along a line: models u_i = load·z + deviation·x_i + nugget, and the laws of T = Σ a_i that they lead to.

A model is a Gram matrix with a Gaussian field that is easy to compute with. A law is made from it for one noise
multiplier, strike and direction. All loads, deviations and correlations are non-negative (docs/theory/chain.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace

import numpy as np

from dpmf import budget
from dpmf.accountants.chain._spreads import (
    Band,
    Option,
    Resolution,
    Spread,
    Transition,
    classes_of,
    floors,
    narrow,
)
from dpmf.accountants.chain._step_classes import step_classes
from dpmf.kernels.chain import multiply_terms
from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast laws are. All positive values give sound bounds.

    Attributes:
      widest_step: the largest spacing of a chain's nodes.
      still: innovation variances up to this are rounded to 0, if all of them together are at most `most_still`.
      most_still: see `still`.
      octave: classes per octave that innovation variances are rounded down to, where there are few.
      few: so many.
      coarsest_use: the factor by which the spacing of a static factor that few indices load may grow at most.
      frequencies: frequencies that are worked on together.
      chunk: doubles that are worked on at a time.
      bytes_per_double: memory per double that is worked on, with copies and on a few threads.
      stationary_step: the least deviation of a step that a stationary chain's nodes resolve.
      stationary_nodes: the largest number of nodes of a stationary chain; squaring takes the cube of it.
      shared_spacing: spacing of a shared factor of small variance, in units of the ratio of deviations.
      widest_shared: the largest spacing of a shared factor.
      stationary_frequencies: frequencies of a stationary chain that are worked on together.
      powers_chunk: complex numbers of matrix powers that are held at a time.
      short_step: the largest number of doubles in a step for which one thread is quicker than two.
    """

    widest_step: float = 0.7
    still: float = 1e-4
    most_still: float = 1e-3
    octave: float = 256.0
    few: int = 64
    coarsest_use: float = 2.5
    frequencies: int = 32
    chunk: int = 2**17
    bytes_per_double: float = 64.0
    stationary_step: float = 0.02
    stationary_nodes: float = 128.0
    shared_spacing: float = 0.1
    widest_shared: float = 4.0
    stationary_frequencies: int = 16
    powers_chunk: int = 2**21
    short_step: float = 1e5


_TUNING = _Tuning()


def in_chunks(
    transform: Callable[[np.ndarray], np.ndarray], s: np.ndarray, width: int, *, together: bool = False
) -> np.ndarray:
    """The transform of all s, a few at a time, on a few threads, or of all `together` on this one.

    Values beyond double range are not finite.
    """

    def quietly(part: np.ndarray) -> np.ndarray:
        budget.check()
        with np.errstate(over="ignore", invalid="ignore"):
            return transform(part)

    # An even number of parts, so that two threads have the same to do.
    parts = np.array_split(s, 1 if together else min(len(s), 2 * math.ceil(len(s) / width / 2)))
    workers = min(len(parts), os.cpu_count() or 1, 8 if budget.fitting(1.0) == math.inf else 2)
    if workers < 2:
        return np.concatenate([quietly(part) for part in parts])
    contexts = [copy_context() for _ in parts]  # threads do not inherit the budgets
    with ThreadPoolExecutor(workers) as pool:
        return np.concatenate(list(pool.map(lambda context, part: context.run(quietly, part), contexts, parts)))


def chain_covariance(deviations: Array, correlations: Array) -> Array:
    """deviations_i·deviations_j·Π ρ over the steps between i and j."""
    n = len(deviations)
    products = np.eye(n)
    for i in range(n - 1):
        products[i, i + 1 :] = np.cumprod(correlations[i:])
    products = np.maximum(products, products.T)
    return np.asarray(np.outer(deviations, deviations) * products)


def _moving(innovations: Array) -> Array:
    """Innovation variances without those that all together hardly matter: 0 raises the correlation to 1.

    Nodes would have to be as dense as the smallest steps, and fits push correlations as close to 1 as they may.
    """
    small = innovations <= _TUNING.still
    few = innovations[small].sum() <= _TUNING.most_still
    return np.where(small, 0.0, innovations) if few else innovations


def chain_spacing(innovations: Array, indices: int, resolution: float) -> float:
    """The spacing of a chain's nodes: errors of its spreads are forgotten as it forgets, or at worst add up."""
    typical = math.sqrt(float(np.median(innovations))) if len(innovations) else 1.0
    return min(_TUNING.widest_step, resolution * max(typical, 1 / math.sqrt(indices + 1)))


class Walk:
    """A chain and a static factor along some indices, discretised: what lines and renewal blocks have in common.

    **Formal guarantees.** Given the static factor, the chain's states are spread one after the other, each given the
    node before (`Transition`). For calls, a state beyond the last node adds at most E[Σ_{j ≥ i} a_j; x_i > last],
    because (·)_+ is 1-Lipschitz; with the later innovations exact, E[a_j | x_i] = exp(l·x_i − l²/2) with l at most the
    largest deviation κ, which increases in l for l ≤ κ ≤ last node ≤ x_i, so l = κ bounds it for every later j. For
    puts, the value at a node −∞ is at most K. Jumps cut short (`Transition.trimmed`) add to both. `tails` is the sum.
    """

    def __init__(
        self,
        option: Option,
        static: Spread,
        nodes: Array,
        start: Array,
        *,
        loads: Array,
        deviations: Array,
        innovations: Array,
        nuggets: Array,
        term: float,
    ) -> None:
        self.nodes, self._static, self._option = nodes, static, option
        variances, self._kinds = classes_of(nuggets)
        self.nuggets = variances[self._kinds]
        self._steps(innovations, deviations)
        smooth = loads**2 + deviations**2
        z = static.nodes
        budget.claim(48.0 * len(loads) * len(z) * len(nodes))
        y = loads[:, None, None] * z[:, None] + deviations[:, None, None] * nodes - smooth[:, None, None] / 2
        step = term * math.sqrt(float((smooth + nuggets).max()))
        self.table = option.table(float(y.min()), float(y.max()), step, variances)
        self._rows, self._shares = self.table.locate(y)
        means = np.maximum(static.mean(loads), 1.0)
        self.later = np.cumsum(means[::-1])[::-1]
        self.tails = self._tails(y, start)

    def _steps(self, innovations: Array, deviations: Array) -> None:
        """One per class of innovation variance, rounded down, which raises correlations; None where nothing moves."""
        self._transitions: list[Transition | None] = [None]
        self._bands: list[Band | None] = [None]
        self._correlations = [1.0]
        self._step_kinds = np.zeros(len(innovations), dtype=np.int64)
        if len(self.nodes) == 1:
            return
        spacing, top = float(self.nodes[1] - self.nodes[0]), float(deviations.max())
        moves = ~narrow(np.sqrt(innovations), spacing)
        levels = np.floor(np.log2(innovations[moves]) * _TUNING.octave * (1 + 1e-12)) / _TUNING.octave
        values, kinds = np.unique(2.0**levels, return_inverse=True)
        if len(values) > _TUNING.few:
            values, kinds = step_classes(innovations[moves], (deviations[:-1] * deviations[1:])[moves], spacing)
        self._step_kinds[moves] = kinds + 1
        for value in values.tolist():
            correlation = math.sqrt(max(0.0, 1 - value))
            whole = Transition.of(self.nodes, self.nodes, correlation, top, self._option.sign)
            transition = whole.trimmed(self.nodes, self.nodes, top, self._option)
            self._correlations.append(correlation)
            self._transitions.append(transition)
            self._bands.append(Band.of(transition.matrix))

    def _path(self, of_class: list[Band | None]) -> Iterator[Band | None]:
        return (of_class[kind] for kind in self._step_kinds.tolist())

    @property
    def correlations(self) -> Array:
        """The correlations of the steps, as they were rounded up."""
        return np.array(self._correlations)[self._step_kinds]

    @property
    def operations(self) -> int:
        """The relative error of a path's product from rounding, in units u, see docs/theory/floating-point.md."""
        steps = sum(band.summands for band in self._path(self._bands) if band is not None)
        return len(self._kinds) * (self.table.summands + 16) + steps

    @property
    def width(self) -> int:
        """The number of frequencies to work on together."""
        return min((band.widest() // 2 for band in self._bands if band is not None), default=_TUNING.frequencies)

    def _tails(self, y: Array, law: Array) -> float:
        """What truncated spreads and tables add to the option's value, `law` being that of the first state."""
        total, sign, weights = 0.0, self._option.sign, self._static.weights
        for i in range(len(y)):
            budget.check()
            if sign > 0:
                total += float(weights @ self.table.excess(y[i], int(self._kinds[i])) @ law)
            transition = self._transitions[self._step_kinds[i]] if i < len(y) - 1 else None
            if transition is not None:
                if sign > 0:
                    total += float(self.later[i + 1] * (law @ transition.above))
                else:
                    total += float(law @ transition.lost) * self._option.strike
                law = law @ transition.matrix
        return total

    def parts(self, frequencies: int) -> Iterator[slice]:
        """The static factor's nodes, as many at a time as are worked on together."""
        some = max(1, _TUNING.chunk // (2 * len(self.nodes) * frequencies))
        count = len(self._static.nodes)
        return (slice(begin, min(begin + some, count)) for begin in range(0, count, some))

    def backward(self, tables: Array, floor: Array, part: slice) -> Array:
        """Π of all terms, averaged over the chain given its first state and the static factor.

        Args:
          tables: the table's transforms, for some frequencies.
          floor: what real parts are raised to, by frequency.
          part: nodes of the static factor.

        Returns:
          Node of the static factor × node of the first state × (real parts, imaginary parts).
        """
        count, nodes, width = part.stop - part.start, len(self.nodes), tables.shape[3]
        values = np.zeros((count * nodes, 2, width))
        values[:, 0] = 1.0
        for i in range(len(self._kinds) - 1, -1, -1):
            rows, shares = self._rows[i, part].ravel(), self._shares[i, part].ravel()
            multiply_terms(values, tables[self._kinds[i]], rows, shares, floor)
            if i > 0 and (band := self._bands[self._step_kinds[i - 1]]) is not None:
                values = band.apply(values.reshape(count, nodes, 2 * width)).reshape(values.shape)
        return values.reshape(count, nodes, 2 * width)


@dataclass(frozen=True, eq=False)
class LineModel:
    """u_i = loads_i·z + deviations_i·x_i + v_i: z static, x an order-1 chain of unit variance, v the nuggets."""

    loads: Array
    deviations: Array
    correlations: Array
    nuggets: Array

    @property
    def size(self) -> int:
        return len(self.loads)

    def variances(self) -> Array:
        return np.asarray(self.loads**2 + self.deviations**2 + self.nuggets)

    def covariance(self) -> Array:
        """The Gram matrix of this model."""
        chain = chain_covariance(self.deviations, self.correlations)
        return np.outer(self.loads, self.loads) + chain + np.diag(self.nuggets)

    def variance_of_sum(self) -> float:
        """About Var Σ a_i: it only says where to look for a tilt."""
        return float(np.expm1(np.minimum(self.covariance(), 300.0)).sum())

    def scaled(self, factor: float) -> LineModel:
        loads = self.loads * factor, self.deviations * factor
        return LineModel(*loads, self.correlations, self.nuggets * factor * factor)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> LineLaw:
        return LineLaw(self, Option(strike, sign, self.size, likely), resolution)


class LineLaw:
    """The law of T for a `LineModel`.

    **Formal guarantees.** (T − K)_+ is an increasing convex function of Σ exp(non-negative loads·factors), hence convex
    and increasing in z, and in each x_i for given innovations after it. (K − T)_+ is a decreasing convex function of a
    sum of powers ≤ 1 of e^(κz), κ the largest load, which is concave; hence it is convex and decreasing in e^(κz), and
    so for x_i. Given everything else, each factor is therefore replaced by its spread (`hat_weights`): first z, then
    the chain (`Walk`). What truncation costs is `surplus`.
    """

    def __init__(self, model: LineModel, option: Option, resolution: Resolution) -> None:
        self.option = option
        resolution = resolution.affordable(model.size)
        loads, deviations = model.loads, model.deviations
        top = float(loads.max())
        # A factor that few indices load may be spread more coarsely.
        use = math.sqrt(float((loads**2).mean())) / top if top > 0 else 1.0
        static = option.spread(top, resolution.static * min(1 / use, _TUNING.coarsest_use))
        innovations = _moving(np.maximum(1 - model.correlations**2, 0.0))
        inner = innovations[(deviations[1:] > 0) & (deviations[:-1] > 0) & (innovations > 0)]
        spacing = chain_spacing(inner, model.size, resolution.chain)
        start = option.spread(float(deviations.max()), spacing, model.size)
        self.static, self._start = static, start.weights
        self.walk = walk = Walk(
            option, static, start.nodes, start.weights, loads=loads, deviations=deviations, innovations=innovations,
            nuggets=model.nuggets, term=resolution.term,
        )  # fmt: skip
        if option.sign > 0:
            first = float(walk.later[0] * start.beyond(deviations.max(keepdims=True))[0])
            ends = float(static.beyond(loads).sum()) + first
        else:
            ends = (static.lost + start.lost) * option.strike
        self.surplus = (ends + walk.tails) * (1 + 1e-9)
        operations = walk.operations + len(start.nodes) * len(static.nodes) + 16
        self.rounding = 1.05 * UNIT * operations

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        nodes = len(self.walk.nodes)
        held = min(_TUNING.chunk, budget.fitting(_TUNING.bytes_per_double)) / (2 * nodes)
        width = max(2, min(_TUNING.frequencies, int(held), self.walk.width))
        # Short steps are spent in the interpreter, where a second thread only waits for the first.
        together = 2 * len(s) * nodes * len(self.static.nodes) <= min(_TUNING.short_step, held * 2 * nodes)
        return in_chunks(self._transform, s, width, together=together)

    def _transform(self, s: np.ndarray) -> np.ndarray:
        tables = self.walk.table.transforms(s)
        floor, total = floors(s), np.zeros(2 * len(s))
        for part in self.walk.parts(len(s)):
            weights = np.outer(self.static.weights[part], self._start).ravel()
            total += weights @ self.walk.backward(tables, floor, part).reshape(len(weights), -1)
        return np.asarray(total[: len(s)] + 1j * total[len(s) :])


@dataclass(frozen=True)
class StationaryModel:
    """u_i = w + x_i + v_i: Var w = shared, x stationary of order 1 with Var x = smooth, v the nuggets, iid.

    It is for very many batches: no b × b matrix is made.
    """

    size: int
    shared: float
    smooth: float
    correlation: float
    nugget: float

    def variances(self) -> Array:
        return np.array([self.shared + self.smooth + self.nugget])

    def lags(self, count: int) -> Array:
        """The covariances at distances 0..count − 1."""
        found = self.shared + self.smooth * self.correlation ** np.arange(count, dtype=np.float64)
        found[0] += self.nugget
        return found

    def variance_of_sum(self) -> float:
        """About Var Σ a_i: it only says where to look for a tilt."""
        lags = np.expm1(np.minimum(self.lags(self.size), 300.0))
        return self.size * float(2 * lags.sum() - lags[0])

    def scaled(self, factor: float) -> StationaryModel:
        square = factor * factor
        return replace(self, shared=self.shared * square, smooth=self.smooth * square, nugget=self.nugget * square)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> StationaryLaw:
        return StationaryLaw(self, Option(strike, sign, self.size, likely), resolution)


class StationaryLaw:
    """The law of T for a `StationaryModel`, whose transform is a power of one matrix.

    **Formal guarantees.** As for `LineLaw`, with w for its static factor and one transition matrix for all steps. Where
    w is negligible it is left out: with f = e^(w − τ/2), E f = 1, independent of the rest T° and E T° = n,
    (fT° − K)_+ ≤ (T° − K)_+ + (f − 1)_+·T° and (K − fT°)_+ ≤ (K − T°)_+ + (1 − f)_+·T°, and
    E(f − 1)_+ = E(1 − f)_+ = 2Φ(√τ/2) − 1 ≤ √(τ/2π).
    """

    def __init__(self, model: StationaryModel, option: Option, resolution: Resolution) -> None:
        self.option = option
        n, sign, correlation = model.size, option.sign, model.correlation
        left_out = n * math.sqrt(model.shared / (2 * math.pi)) * (1 + 1e-9)
        if not option.small(left_out):
            left_out = 0.0
        load, deviation = math.sqrt(0.0 if left_out else model.shared), math.sqrt(model.smooth)
        total = float(model.variances()[0])
        # A factor of small variance may be spread widely; a shared one counts n times.
        wide = max(1.0, _TUNING.shared_spacing * math.sqrt(total / max(model.shared, 1e-300)))
        self.static = static = option.spread(load, min(_TUNING.widest_shared, resolution.static * wide))
        step = resolution.chain * max(math.sqrt((1 - correlation) * (1 + correlation)), _TUNING.stationary_step)
        least = option.span(deviation, n) / _TUNING.stationary_nodes
        start = option.spread(deviation, max(min(_TUNING.widest_step, step), least), n)
        self._start, self.nodes = start.weights, start.nodes
        nodes = start.nodes
        chain = Transition.of(nodes, nodes, correlation, deviation, sign) if deviation > 0 else Transition.trivial()
        self._matrix = chain.matrix
        y = load * static.nodes[:, None] + deviation * nodes - (load**2 + model.smooth) / 2
        nuggets = np.array([model.nugget])
        self.table = option.table(float(y.min()), float(y.max()), resolution.term * math.sqrt(total), nuggets)
        self._rows, self._shares = self.table.locate(y)
        if sign > 0:
            mean = float(np.maximum(static.mean(np.array([load])), 1.0)[0])
            ends = n * float(static.beyond(np.array([load]))[0] + mean * start.beyond(np.array([deviation]))[0])
            per_step = static.weights @ self.table.excess(y, 0) + n * mean * chain.above
        else:
            ends, per_step = (static.lost + start.lost) * option.strike, chain.lost * option.strike
        along = float(self._start @ power_sum(self._matrix, per_step, n))
        self.surplus = (ends + along) * (1 + 1e-6) + left_out
        # For an index: the nugget's sum, interpolation and a complex product, and a complex product of matrices.
        per_index = self.table.summands + 16 + 4 * len(nodes)
        self.rounding = 1.05 * UNIT * (n * per_index + 4 * len(nodes) + len(static.nodes) + 16)

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        held = min(_TUNING.powers_chunk, budget.fitting(_TUNING.bytes_per_double)) / len(self._matrix) ** 2
        return in_chunks(self._transform, s, max(1, min(_TUNING.stationary_frequencies, int(held))))

    def _transform(self, s: np.ndarray) -> np.ndarray:
        table = self.table.transforms(s)[0]
        table = table[:, 0] + 1j * table[:, 1]
        floor = floors(s)[:, None, None]
        total = np.zeros(len(s), dtype=np.complex128)
        for weight, rows, shares in zip(self.static.weights, self._rows, self._shares, strict=True):
            terms = ((1 - shares)[:, None] * table[rows] + shares[:, None] * table[rows + 1]).T
            total += weight * ((self._start * terms)[:, None, :] @ self._powered(terms, floor))[:, 0, 0]
        return total

    def _powered(self, terms: np.ndarray, floor: Array) -> np.ndarray:
        """(P·diag(terms))^(n−1)·1 for every frequency, by squaring."""
        exponent = self.option.terms - 1
        result = np.ones((*terms.shape, 1), dtype=np.complex128)
        square = self._matrix * terms[:, None, :]
        while exponent:
            if exponent & 1:
                result = square @ result
                np.maximum(result.real, floor, out=result.real)
            exponent >>= 1
            if exponent:
                square = square @ square
                np.maximum(square.real, floor, out=square.real)
        return result


def power_sum(matrix: Array, vector: Array, count: int) -> Array:
    """Σ_{i < count} matrixⁱ·vector, by doubling."""
    total, sums, power = np.zeros_like(vector), vector, matrix
    while count:
        if count & 1:
            total = sums + power @ total
        count >>= 1
        if count:
            sums = sums + power @ sums
            power = power @ power
    return np.asarray(total)
