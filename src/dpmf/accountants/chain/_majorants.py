"""Gram matrices above a given one, entrywise, whose Gaussian field is a chain: fits made once per mechanism.

A fit only decides how tight the bound is. Whatever it returns is compared with G entry by entry and raised until it
dominates (`raised`), so that Kahane's inequality applies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import minimize

from dpmf import budget
from dpmf.accountants.chain._laws import LineModel
from dpmf.gram.bands import circulant_majorant
from dpmf.numerics import Array

MARGIN = 1e-10  # relative, beyond the rounding errors of loads, of their products along a chain and of G/σ²
_TOP_RATE = 5.0  # a correlation of e^(−5) a step is none


def raised(model: LineModel, gram: Array) -> LineModel:
    """The model with its covariance raised above G: by a factor on its smooth part or by a constant.

    **Formal guarantees.** covariance ≥ G·(1 + 10⁻¹⁰) entrywise, computed from the very numbers that are returned. A
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
    with np.errstate(divide="ignore"):
        factor = float((target[needed] / covariance[needed]).max()) if needed.any() else 1.0
    if factor < 4:
        choices.append(smooth.scaled(math.sqrt(max(1.0, factor) * (1 + MARGIN))))
    finished = []
    for choice in choices:
        nuggets = np.maximum(np.diagonal(target) - choice.loads**2 - choice.deviations**2, 0.0)
        done = LineModel(choice.loads, choice.deviations, choice.correlations, nuggets * (1 + MARGIN))
        short = float((target - done.covariance()).max())
        if short > 0:  # rounding only
            done = LineModel(np.sqrt(done.loads**2 + 2 * short), done.deviations, done.correlations, done.nuggets)
        if np.all(done.covariance() >= gram):
            finished.append(done)
    return min(finished, key=lambda done: float(done.covariance().sum()))


def shared_factor(gram: Array) -> LineModel:
    """G ≤ diag + τ: one static factor for everything off the diagonal. Always possible."""
    n = len(gram)
    off = gram[~np.eye(n, dtype=bool)]
    tau = float(off.max()) if n > 1 else 0.0
    return raised(LineModel(np.full(n, math.sqrt(tau)), np.zeros(n), np.zeros(n - 1), np.zeros(n)), gram)


def lags_of(gram: Array) -> Array:
    """The least symmetric circulant matrix above G, by lag 0..b−1."""
    g = circulant_majorant(gram)
    return np.maximum(g, g[-np.arange(len(g)) % len(g)])


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
    for tau in (0.0, *np.unique(floor + (nearest - floor) * np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35]))):
        for rho in 1 - np.geomspace(0.003, 0.95, 160):
            shape = (rho**d + rho ** (b - d)) / (1 + rho**b)
            above = g[1:] > tau
            with np.errstate(divide="ignore", over="ignore"):
                variance = float(((g[1:] - tau)[above] / shape[1:][above]).max()) if above.any() else 0.0
            if not 0 < variance < math.inf:
                continue
            lags = tau + variance * shape
            lags[0] = max(g[0], lags[0])
            # Merging τ into the load of x_0 adds this much, on average over a row.
            load = math.sqrt(variance) * shape
            merged = float(np.sqrt(load**2 + tau).sum() ** 2 - load.sum() ** 2) / b - b * tau
            cost = float(weight @ lags) + merged
            if cost < best[0]:
                best = (cost, tau, float(rho), variance)
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


_KNOTS = np.array([0.0, 0.08, 0.2, 0.33, 0.46, 0.6, 0.72, 0.82, 0.9, 0.96, 1.0])


def line_chain(gram: Array, emphasis: float) -> LineModel:
    """An inhomogeneous order-1 chain and a static factor with free loads, for Gram matrices that do not wrap.

    Loads, logarithms of the chain's deviations and the rates −log ρ are piecewise linear in the index. Sequential
    quadratic programming on a sample of pairs, to which the pairs that are violated most are added.
    """
    fit = _LineFit(gram, emphasis)
    found = [fit.solve(load, rate) for load, rate in ((0.5, 0.15), (0.7, 0.3))]
    return raised(min(found, key=fit.cost_of), gram)


class _LineFit:
    def __init__(self, gram: Array, emphasis: float) -> None:
        self._n = n = len(gram)
        self._scale = float(np.diagonal(gram).max())
        self._gram = gram / self._scale
        place = np.linspace(0.0, 1.0, n)
        knots = _KNOTS if n > 2 * len(_KNOTS) else np.linspace(0.0, 1.0, min(n, 4))
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

    def cost_of(self, model: LineModel) -> float:
        done = raised(model, self._gram * self._scale)
        covariance = done.covariance() / self._scale
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
        bounds = [(0.0, 2.0)] * k + [(-12.0, 1.0)] * k + [(1e-5, _TOP_RATE)] * k
        for _ in range(4):
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
            worst = np.argsort(-missing)[:60]
            worst = worst[missing[worst] > 5e-4]
            if len(worst) == 0:
                break
            i, j = np.concatenate((i, upper_i[worst])), np.concatenate((j, upper_j[worst]))
        return self._model(parameters)

    def _model(self, parameters: Array) -> LineModel:
        loads, logs, path = self._parts(parameters)
        root = math.sqrt(self._scale)
        correlations = np.exp(-np.maximum(np.diff(path), 0.0))
        return LineModel(np.maximum(loads, 0.0) * root, np.exp(logs) * root, correlations, np.zeros(self._n))
