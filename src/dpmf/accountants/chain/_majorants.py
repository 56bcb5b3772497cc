"""Gram matrices above a given one, entrywise, whose fields are chains: which families are tried, and their fits.

A fit only decides how tight the bound is. Whatever it returns is compared with G entry by entry and raised until it
dominates, so that Kahane's inequality applies. Fits cost tenths of a second to seconds, once per mechanism; laws are
made again for every σ. So candidates are compared by a first-order cost before any law is made: see "Screening" in
docs/theory/majorants.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import minimize

from dpmf import budget
from dpmf.accountants.chain._block_fits import (
    MARGIN,
    block_lengths,
    lags_of,
    renewal_blocks,
    separators,
    separators_of_lags,
)
from dpmf.accountants.chain._blocks import RenewalModel, SeparatorModel
from dpmf.accountants.chain._geometric import exact_chain
from dpmf.accountants.chain._lines import LineModel, StationaryModel
from dpmf.accountants.chain._overlap_fits import overlaps
from dpmf.accountants.chain._overlaps import OverlapModel
from dpmf.gram.bands import cyclic_bandwidth
from dpmf.numerics import Array

Model: TypeAlias = LineModel | SeparatorModel | RenewalModel | OverlapModel
Candidate: TypeAlias = tuple[str, Model]


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide which majorants are tried and how well they fit. All positive values give sound bounds.

    Attributes:
      emphases: exponents t of the weights e^(t·G_ij/max G) that fits minimise: 0 suits small ε, 3 large ε.
      steep_emphasis: an emphasis for which only rings are fitted.
      overlap_emphasis: the one for overlapping separators.
      close: a second candidate is kept if its cost is at most this part above the best one's.
      narrow: the bandwidth up to which renewal blocks are not tried.
      most_raised: a line that has to be raised by a larger factor is raised by a constant instead.
      ring_constants: constants that are tried for a ring, as parts of the way from the least to the largest lag.
      ring_rates: rates −log ρ that are tried for a ring.
      knots: places of the knots of a line's loads, deviations and rates.
      line_starts: loads and rates from which the fits of a line start.
      good_start: a fit whose cost is at most this many times that of G itself needs no other start: others find the
        same line.
      many: from so many batches on, no line is fitted beside a ring where memory is short: its knots are too far apart.
      short_memory: memory is short where the mean of G is a smaller part of its largest entry.
      top_rate: the largest rate of a line: a correlation of e^(−5) a step is none.
      rounds: how often violated pairs are added to the constraints.
      added: how many of them are added.
      stationary_rates: rates −log ρ that are tried for very many batches.
      thresholds: constants, and lags that may be cut off, that are tried for very many batches, in units of the
        variance.
      most_left_out: the part of the indices of a ring that may be left out.
    """

    emphases: tuple[float, ...] = (0.0, 3.0)
    steep_emphasis: float = 6.0
    overlap_emphasis: float = 1.0
    close: float = 0.06
    narrow: int = 3
    most_raised: float = 4.0
    ring_constants: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35)
    ring_rates: tuple[float, ...] = tuple((-np.log1p(-np.geomspace(0.003, 0.95, 160))).tolist())
    knots: tuple[float, ...] = (0.0, 0.08, 0.2, 0.33, 0.46, 0.6, 0.72, 0.82, 0.9, 0.96, 1.0)
    line_starts: tuple[tuple[float, float], ...] = ((0.5, 0.15), (0.7, 0.3))
    good_start: float = 1.25
    many: int = 600
    short_memory: float = 0.1
    top_rate: float = 5.0
    rounds: int = 4
    added: int = 60
    stationary_rates: tuple[float, ...] = tuple((-np.log1p(-np.geomspace(0.003, 0.95, 80))).tolist())
    thresholds: tuple[float, ...] = (1e-26, 1e-9, 1e-4, 0.003, 0.01, 0.03, 0.1, 0.3)
    most_left_out: float = 0.02


_TUNING = _Tuning()


def models(gram: Array) -> list[Candidate]:
    """The majorants worth evaluating, the likely winner first; always at least one."""
    kept: list[Candidate] = []
    if len(gram) >= 3 and np.any(gram[~np.eye(len(gram), dtype=bool)] > 0):
        kept = budget.as_far_as_it_goes(_worth_keeping(gram))
    unique: list[Candidate] = []
    for name, model in kept:
        if not any(np.array_equal(model.variances(), other.variances()) for _, other in unique):
            unique.append((name, model))
    return [*unique, ("shared", shared_factor(gram))]


def _worth_keeping(gram: Array) -> Iterator[Candidate]:
    """Majorants of every kind, those of overlapping separators last.

    These answer only where there is much noise, so others are kept whatever they cost. And a search that begins with
    a bound which ends at some noise multiplier, or that takes the others to be as bad, misses the best one.
    """
    kept: list[Candidate] = []
    for emphasis in _TUNING.emphases:
        found = _screened(candidates(gram, emphasis), gram, emphasis)
        kept += found
        yield from found
    if np.all(gram > 0) and _wraps(gram):
        # A ring costs next to nothing to fit, and rings for small and for large ε are often the same.
        steep = f"ring {_TUNING.steep_emphasis:g}", ring_chain(gram, _TUNING.steep_emphasis)
        yield from (named for named in _screened([*kept, steep], gram, _TUNING.steep_emphasis)[:1] if named is steep)
    if gram[0, -1] == 0:
        yield from (("overlaps", model) for model in overlaps(gram, _TUNING.overlap_emphasis))


def candidates(gram: Array, emphasis: float) -> list[Candidate]:
    """Every family that applies, fitted; not overlapping separators, whose fits hardly depend on the emphasis."""
    found: list[tuple[str, Model | None]] = [("separators", separators(gram, emphasis))]
    width = cyclic_bandwidth(gram)
    if width > _TUNING.narrow:
        found.append(("renewal", renewal_blocks(gram, emphasis, block_lengths(width, len(gram)))))
    chains = [("ring", ring_chain(gram, emphasis))] if _wraps(gram) else []
    short = len(gram) > _TUNING.many and gram.mean() < _TUNING.short_memory * gram.max()
    if not chains or (np.all(gram > 0) and not short):
        # Over epochs of long memory nothing is zero, and the line need not dominate a whole ring: only G.
        exact = exact_chain(gram, raised) if np.all(gram > 0) else None
        chains.append(("line", exact or line_chain(gram, emphasis)))
    found.append(min(chains, key=lambda named: cost_of(named[1], gram, emphasis)))
    return [(f"{name} {emphasis:g}", model) for name, model in found if model is not None]


def _wraps(gram: Array) -> bool:
    return bool(gram[0, -1] > 0.5 * gram[0, 1])


def cost_of(model: Model, gram: Array, emphasis: float) -> float:
    """Σ_j e^(emphasis·g_ij/g_0)·cov_ij, averaged over the rows; a model of fewer indices counts as if it had all."""
    weight = np.exp(emphasis * gram / gram.max())
    n = model.size
    covariance = model.covariance()
    # Left-out indices: any window of n indices has the same law, so the first will do for the weights.
    return float((weight[:n, :n] * covariance).sum() / n) * len(gram) / n


def _screened(found: list[Candidate], gram: Array, emphasis: float) -> list[Candidate]:
    costs = [cost_of(model, gram, emphasis) for _, model in found]
    order = np.argsort(costs, kind="stable")
    limit = costs[int(order[0])] * (1 + _TUNING.close)
    return [found[k] for k in order[:2].tolist() if costs[k] <= limit]


def raised(model: LineModel, gram: Array) -> LineModel:
    """The model with its covariance raised above G: by a factor on its smooth part or by a constant.

    **Formal guarantees.** covariance ≥ G·(1 + 10⁻¹⁰/2) entrywise, computed from the very numbers that are returned. A
    constant τ enters through the loads, √(λ_i² + τ), whose products are at least λ_iλ_j + τ (Cauchy–Schwarz).
    """
    smooth = LineModel(model.loads, model.deviations, model.correlations, np.zeros(model.size))
    target = gram * (1 + MARGIN)
    off = ~np.eye(model.size, dtype=bool)
    choices = []
    covariance = smooth.covariance()
    if model.size == 1:
        return LineModel(model.loads * 0, model.deviations * 0, model.correlations, np.diagonal(target).copy())
    missing = np.where(off, target - covariance, 0.0)
    tau = max(0.0, float(missing.max())) * (1 + MARGIN)
    choices.append(LineModel(np.sqrt(model.loads**2 + tau), model.deviations, model.correlations, model.nuggets))
    needed = off & (target > 0)
    with np.errstate(divide="ignore", over="ignore"):
        factor = float((target[needed] / covariance[needed]).max()) if needed.any() else 1.0
    if factor < _TUNING.most_raised:
        choices.append(smooth.scaled(math.sqrt(max(1.0, factor) * (1 + MARGIN))))
    finished = []
    for choice in choices:
        nuggets = np.maximum(np.diagonal(target) - choice.loads**2 - choice.deviations**2, 0.0)
        done = LineModel(choice.loads, choice.deviations, choice.correlations, nuggets * (1 + MARGIN))
        short = float((target - done.covariance()).max())
        if short > 0:  # rounding only
            done = LineModel(np.sqrt(done.loads**2 + 2 * short), done.deviations, done.correlations, done.nuggets)
        if np.all(done.covariance() >= gram * (1 + 0.5 * MARGIN)):
            finished.append(done)
    return min(finished, key=lambda done: float(done.covariance().sum()))


def shared_factor(gram: Array) -> LineModel:
    """G ≤ diag + τ: one static factor for everything off the diagonal. Always possible."""
    n = len(gram)
    off = gram[~np.eye(n, dtype=bool)]
    tau = float(off.max()) if n > 1 else 0.0
    return raised(LineModel(np.full(n, math.sqrt(tau)), np.zeros(n), np.zeros(n - 1), np.zeros(n)), gram)


def ring_chain(gram: Array, emphasis: float) -> LineModel:
    """A stationary order-1 chain on the ring, given its value at index 0 (the static factor), plus a constant.

    Minimises Σ_d e^(emphasis·g_d/g_0)·g'_d over correlation ρ and constant τ; the variance is then the least possible.
    Given x_0 the chain is a bridge: loads Cov(x_i, x_0)/√V, and what is left is Markov along the line 1, 2, ..., b − 1.
    """
    g = lags_of(gram)
    b = len(g)
    d = np.arange(b)
    weight = np.exp(emphasis * g / g[0])
    best = (math.inf, 0.0, 0.0, 0.0)
    floor, nearest = float(g[1:].min()), float(g[1:].max())
    rates = np.exp(-np.array(_TUNING.ring_rates))[:, None]
    shapes = (rates**d + rates ** (b - d)) / (1 + rates**b)
    for tau in (0.0, *np.unique(floor + (nearest - floor) * np.array(_TUNING.ring_constants))):
        above = g[1:] > tau
        if not above.any():
            continue
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            variances = ((g[1:] - tau)[above] / shapes[:, 1:][:, above]).max(axis=1)
            lags = tau + variances[:, None] * shapes
            lags[:, 0] = np.maximum(g[0], lags[:, 0])
            # Merging τ into the load of x_0 adds this much, on average over a row.
            loads = np.sqrt(variances)[:, None] * shapes
            merged = (np.sqrt(loads**2 + tau).sum(axis=1) ** 2 - loads.sum(axis=1) ** 2) / b - b * tau
            costs = np.where((variances > 0) & np.isfinite(variances), lags @ weight + merged, math.inf)
        least = int(np.argmin(np.nan_to_num(costs, nan=math.inf, posinf=math.inf)))
        if costs[least] < best[0]:
            best = (float(costs[least]), tau, float(rates[least, 0]), float(variances[least]))
    _, tau, rho, variance = best
    if variance == 0.0:
        return shared_factor(gram)
    return raised(_bridge(b, tau, rho, variance), gram)


def _bridge(b: int, tau: float, rho: float, variance: float) -> LineModel:
    d = np.arange(b)
    shape = (rho**d + rho ** (b - d)) / (1 + rho**b)
    left = np.maximum(1 - shape**2, 0.0)  # variance of x_i given x_0, in units of V
    left[0] = 0.0
    step = np.zeros(b - 1)
    inner = np.arange(1, b - 1)
    covariance = shape[1] - shape[inner] * shape[inner + 1]
    step[inner] = np.clip(covariance / np.sqrt(left[inner] * left[inner + 1]), 0.0, 1.0)
    loads = np.sqrt(variance * shape**2 + tau)
    return LineModel(loads, np.sqrt(variance * left), step, np.zeros(b))


def line_chain(gram: Array, emphasis: float) -> LineModel:
    """An inhomogeneous order-1 chain and a static factor with free loads, for Gram matrices that do not wrap.

    Loads, logarithms of the chain's deviations and the rates −log ρ are piecewise linear in the index. Sequential
    quadratic programming on a sample of pairs, to which the pairs that are violated most are added.
    """
    fit = _LineFit(gram, emphasis)
    found: list[LineModel] = []
    for load, rate in _TUNING.line_starts:
        found.append(raised(fit.solve(load, rate), gram))
        if fit.cost_of(found[-1]) <= _TUNING.good_start * fit.least:
            break
    return min(found, key=fit.cost_of)


class _LineFit:
    def __init__(self, gram: Array, emphasis: float) -> None:
        self._n = n = len(gram)
        self._scale = float(np.diagonal(gram).max())
        self._gram = gram / self._scale
        place = np.linspace(0.0, 1.0, n)
        knots = np.array(_TUNING.knots)
        knots = knots if n > 2 * len(knots) else np.linspace(0.0, 1.0, min(n, 4))
        self._k = len(knots)
        self._basis = np.stack([np.interp(place, knots, row) for row in np.eye(self._k)], axis=1)
        # Cumulated rates: R_j − R_i is the sum over the steps between.
        self._summed = np.concatenate((np.zeros((1, self._k)), np.cumsum(self._basis[:-1], axis=0)))
        rows = np.unique(np.round(np.linspace(0, n - 1, min(n, 64))).astype(np.int64))
        lags = np.unique(np.round(np.geomspace(1, n - 1, min(n - 1, 48))).astype(np.int64))
        i, d = (a.ravel() for a in np.meshgrid(rows, lags, indexing="ij"))
        share = np.gradient(lags.astype(float)) if len(lags) > 1 else np.ones(1)
        weight = np.broadcast_to(share, (len(rows), len(lags))).ravel()
        inside = i + d < n
        self._i, self._j = i[inside], (i + d)[inside]
        self._weight = weight[inside] * np.exp(emphasis * self._gram[self._i, self._j])
        self._diagonal = np.diagonal(self._gram)[rows]
        self._rows = rows
        self._diagonal_weight = 0.5 * np.exp(emphasis * self._diagonal)
        between = float(self._weight @ self._gram[self._i, self._j])
        self.least = between + float(self._diagonal_weight @ self._diagonal)  # what G itself would cost

    def cost_of(self, model: LineModel) -> float:
        covariance = model.covariance() / self._scale
        return float((self._weight * covariance[self._i, self._j]).sum()) + float(
            (self._diagonal_weight * np.diagonal(covariance)[self._rows]).sum()
        )

    def _parts(self, parameters: Array) -> tuple[Array, Array, Array]:
        loads, logs, rates = parameters.reshape(3, self._k)
        return self._basis @ loads, self._basis @ logs, self._summed @ rates

    def _pairs(self, parameters: Array, i: np.ndarray, j: np.ndarray) -> tuple[Array, Array]:
        """Covariances of pairs i ≤ j and their gradients."""
        loads, logs, path = self._parts(parameters)
        chain = np.exp(np.clip(logs[i] + logs[j] - (path[j] - path[i]), -60.0, 3.0))
        gradient = np.concatenate(
            (
                self._basis[i] * loads[j, None] + self._basis[j] * loads[i, None],
                chain[:, None] * (self._basis[i] + self._basis[j]),
                -chain[:, None] * (self._summed[j] - self._summed[i]),
            ),
            axis=1,
        )
        return loads[i] * loads[j] + chain, gradient

    def _cost(self, parameters: Array) -> tuple[float, Array]:
        budget.check()
        value, gradient = self._pairs(parameters, self._i, self._j)
        own, own_gradient = self._pairs(parameters, self._rows, self._rows)
        over = own - self._diagonal
        root = np.sqrt(over**2 + 1e-6)
        total = float(self._weight @ value) + float(self._diagonal_weight @ (0.5 * (over + root)))
        slope = self._weight @ gradient + (self._diagonal_weight * 0.5 * (1 + over / root)) @ own_gradient
        norm = float(self._weight @ self._gram[self._i, self._j]) + 1e-3
        return total / norm, slope / norm

    def solve(self, load: float, rate: float) -> LineModel:
        n, k = self._n, self._k
        diagonal = np.interp(np.linspace(0, 1, k), np.linspace(0, 1, n), np.diagonal(self._gram))
        level = load * np.sqrt(np.maximum(self._gram.mean(axis=1), 1e-6))
        loads = np.interp(np.linspace(0, 1, k), np.linspace(0, 1, n), level)
        logs = 0.5 * np.log(np.maximum(0.9 * diagonal - loads**2, 0.05))
        parameters = np.concatenate((loads, logs, np.full(k, rate)))
        sparse = np.arange(0, len(self._i), max(1, len(self._i) // 250))
        i, j = self._i[sparse], self._j[sparse]
        upper_i, upper_j = np.triu_indices(n, 1)
        bounds = [(0.0, 2.0)] * k + [(-12.0, 1.0)] * k + [(1e-5, _TUNING.top_rate)] * k
        for _ in range(_TUNING.rounds):
            constraint: Any = {
                "type": "ineq",
                "fun": lambda p, i=i, j=j: 10 * (self._pairs(p, i, j)[0] - self._gram[i, j]),
                "jac": lambda p, i=i, j=j: 10 * self._pairs(p, i, j)[1],
            }
            found = minimize(
                self._cost, parameters, jac=True, bounds=bounds, method="SLSQP",
                constraints=[constraint],
                options={"maxiter": 80, "ftol": 1e-6},
            )  # fmt: skip
            if not np.all(np.isfinite(found.x)):
                break
            parameters = np.asarray(found.x)
            covariance = self._model(parameters).covariance() / self._scale
            missing = (self._gram - covariance)[upper_i, upper_j]
            worst = np.flatnonzero(missing > 5e-4)
            worst = worst[np.argsort(-missing[worst])[: _TUNING.added]]
            if len(worst) == 0:
                break
            i, j = np.concatenate((i, upper_i[worst])), np.concatenate((j, upper_j[worst]))
        return self._model(parameters)

    def _model(self, parameters: Array) -> LineModel:
        loads, logs, path = self._parts(parameters)
        root = math.sqrt(self._scale)
        correlations = np.exp(-np.maximum(np.diff(path), 0.0))
        return LineModel(np.maximum(loads, 0.0) * root, np.exp(logs) * root, correlations, np.zeros(self._n))


def stationary_models(lags: Array) -> Iterator[tuple[str, StationaryModel | SeparatorModel]]:
    """Majorants of every Gram matrix with G[i, i+d] ≤ lags[d].

    **Formal guarantees.** Lines of b indices dominate `lags` at every distance, entry by entry. Lines of b − m indices
    dominate the ring of `lags`, max(lags[d], lags[b−d]): A is the average of A^(s), the mean over a window of b − m
    indices rotated by s, so E f(A) ≤ E f(A^(s)) for convex f, and every window of the ring's field has the same law.
    So it is for separators, whose ring is that of the b − m indices; see `separators`.
    """
    b = len(lags)
    ring = np.maximum(lags, np.concatenate((lags[:1], lags[:0:-1])))
    chains: list[StationaryModel] = []
    for emphasis in _TUNING.emphases:
        found = separators_of_lags(ring, emphasis)
        if found is not None:
            yield f"separators {emphasis:g}", found
        budget.check()
        chain = _stationary_chain(lags, ring, emphasis)
        if chain not in chains:
            yield f"stationary {emphasis:g}", chain
        chains.append(chain)
    off = float(lags[1:].max(initial=0.0))
    yield "shared", _stationary_above(b, lags, off, 0.0)


def _stationary_chain(lags: Array, ring: Array, emphasis: float) -> StationaryModel:
    """The stationary chain of least cost Σ_d e^(emphasis·g_d/g_0)·g'_d, over correlations, constants and cuts."""
    b = len(lags)
    best: tuple[float, StationaryModel] | None = None
    highest = np.maximum.accumulate(ring[1 : b // 2 + 1][::-1])[::-1]  # from each distance on
    cuts = {(0, float(lags[-1]))}
    for threshold in _TUNING.thresholds:
        small = np.flatnonzero(highest <= threshold * ring[0])
        if len(small) and int(small[0]) <= _TUNING.most_left_out * b:
            cuts.add((int(small[0]), float(ring[small[0] + 1])))
    for left_out, _ in sorted(cuts):
        size = b - left_out
        target = (ring if left_out else lags)[:size]
        # Distances up to a few thousand one by one, then in groups, each with its largest value at its far end.
        edges = np.unique(np.concatenate((np.arange(1, min(size, 2048)), np.geomspace(1, size, 200).astype(np.int64))))
        edges = edges[(edges >= 1) & (edges < size)]
        tops = np.maximum.reduceat(target, edges)
        ends = np.append(edges[1:] - 1, size - 1).astype(np.float64)
        share = ends - edges + 1
        weight = share * np.exp(emphasis * tops / target[0])
        floor = float(target[-1])
        levels = {floor, *(threshold * float(target[0]) for threshold in _TUNING.thresholds)}
        for shared in sorted(level for level in levels if floor <= level <= tops.max(initial=0.0)):
            above = np.maximum(tops - shared, 0.0)
            for rho in np.exp(-np.array(_TUNING.stationary_rates)):
                with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
                    shape = rho**ends
                    smooth = float(np.max(np.where(above > 0, above / shape, 0.0)))
                if not smooth <= 4 * target[0]:
                    continue
                cost = float(weight @ (shared + smooth * shape)) + max(0.0, shared + smooth - target[0]) / 2
                cost *= b / size
                if best is None or cost < best[0]:
                    best = (cost, _stationary_above(size, target, shared, float(rho)))
    if best is None:
        return _stationary_above(b, lags, float(lags[1:].max(initial=0.0)), 0.0)
    return best[1]


def _stationary_above(size: int, target: Array, shared: float, correlation: float) -> StationaryModel:
    """The least variances for this constant and this correlation, raised beyond their rounding errors.

    **Formal guarantees.** shared + smooth·ρ^d ≥ target[d]·(1 + 10⁻¹⁰) for 1 ≤ d < size, and the variance likewise.
    ρ^d is compared as e^(d·log ρ), whose exponent has an error below 10⁻⁷ where it is above −700.
    """
    shared = shared * (1 + 4 * MARGIN)
    need = target[1:size] * (1 + 2 * MARGIN) - shared
    missing = np.flatnonzero(need > 0)
    smooth = 0.0
    if len(missing):
        if correlation == 0.0:
            shared = float(target[1:size].max()) * (1 + 4 * MARGIN)
        else:
            exponents = np.log(need[missing]) - (missing + 1) * math.log(correlation)
            smooth = math.exp(min(float(exponents.max()), 600.0)) * (1 + 1e-6)
    nugget = max(0.0, float(target[0]) * (1 + 4 * MARGIN) - shared - smooth) + 4 * MARGIN * float(target[0])
    return StationaryModel(size, shared, smooth, correlation, nugget)
