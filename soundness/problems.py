"""Random problems: a mechanism, a noise multiplier, some ε and a δ, drawn from (seed, index) alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from dpmf import BallsInBins, Mechanism, strategies
from soundness.truth import gaussian_delta

Array = np.ndarray

SIGMA_RANGE = 1e-3, 1e6
EPSILON_RANGE = 1e-3, 50.0
DELTA_RANGE = 1e-12, 0.5
# How often each size is drawn. Four bins at full rank and sampled truths cost most.
SIZES = {"b=1": 7, "b=2": 30, "b=3": 18, "b=4": 3, "low rank": 30, "sampled": 12}


@dataclass(frozen=True)
class Problem:
    """One mechanism at one σ, asked about several ε and one δ. `s` is G/σ² from the definition, not the package's."""

    index: int
    family: str
    size: str
    mechanism: Mechanism
    noise_multiplier: float
    epsilons: tuple[float, ...]
    delta: float
    s: Array


def generator(seed: int, index: int) -> np.random.Generator:
    return np.random.default_rng([seed, index])


def signal_to_noise(strategy: strategies.Strategy, n: int, b: int, sigma: float) -> Array:
    """G/σ² as the definition has it: means m_i = Σ_j |C|[:, i + jb], G their inner products."""
    entries = np.abs(np.asarray(strategy.matrix(n), dtype=np.float64))
    means = np.stack([entries[:, i::b].sum(axis=1) for i in range(b)], axis=1) / sigma
    return means.T @ means


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


# --- families ------------------------------------------------------------------------------------------------------

Family = Callable[[np.random.Generator, int, int], Array]


def _toeplitz(column: Array, n: int) -> Array:
    return np.array([[column[i - j] if 0 <= i - j < len(column) else 0.0 for j in range(n)] for i in range(n)])


def _banded(rng: np.random.Generator, n: int, b: int) -> Array:
    p = int(rng.integers(1, min(n, 6) + 1))
    return np.concatenate(([1.0], rng.random(p - 1)))


def _banded_inverse(rng: np.random.Generator, n: int, b: int) -> Array:
    """1/(1 − Σ a_j x^j) with a_j ≥ 0, Σ a_j ≤ 1: non-negative coefficients that need not decay."""
    a = rng.random(int(rng.integers(1, 4)))
    a *= rng.choice([0.5, 0.9, 1.0]) / a.sum()
    column = [1.0]
    for t in range(1, n):
        column.append(sum(a[j] * column[t - 1 - j] for j in range(min(len(a), t))))
    return np.array(column)


def _dense(rng: np.random.Generator, n: int, b: int) -> Array:
    return np.tril(rng.random((n, n)) * (rng.random((n, n)) < rng.uniform(0.3, 1.0))) + 0.05 * np.eye(n)


def _ill_conditioned(rng: np.random.Generator, n: int, b: int) -> Array:
    return np.tril(np.exp(rng.normal(0, rng.choice([2.0, 5.0]), (n, n))))


def _nearly_identical(rng: np.random.Generator, n: int, b: int) -> Array:
    """All weight in the last row: the columns differ by 10⁻² to 10⁻⁹ of it."""
    entries = np.tril(rng.random((n, n)) * 10.0 ** rng.uniform(-9, -2))
    entries[-1] += 1
    return entries


def _zero_columns(rng: np.random.Generator, n: int, b: int) -> Array:
    entries = _dense(rng, n, b)
    for i in rng.permutation(b)[: int(rng.integers(1, b))] if b > 1 else []:
        entries[:, i::b] = 0
    return entries


def _diagonal(rng: np.random.Generator, n: int, b: int) -> Array:
    return np.diag(rng.choice([0.0, 0.5, 1.0, 1.0], n) + np.eye(n)[0]) if rng.random() < 0.5 else np.array([1.0])


FAMILIES: dict[str, Family] = {
    "banded": _banded,
    "banded inverse": _banded_inverse,
    "dense": _dense,
    "ill-conditioned": _ill_conditioned,
    "nearly identical": _nearly_identical,
    "zero columns": _zero_columns,
    "uncorrelated": _diagonal,
}


def _low_rank(rng: np.random.Generator, b: int) -> Array:
    """Up to three rows with entries: the Gram matrix has at most that rank, whatever b is, and quadrature serves."""
    entries = np.zeros((b, b))
    rank = int(rng.choice([1, 2, 3], p=[0.3, 0.6, 0.1]))
    entries[-rank:] = rng.random((rank, b)) ** rng.choice([0.2, 1.0, 4.0])
    if rng.random() < 0.3:
        entries[:, rng.random(b) < 0.4] = 0
    entries[-1, 0] += 0.1
    return np.tril(entries)


# --- problems ------------------------------------------------------------------------------------------------------


def draw_problem(seed: int, index: int) -> Problem:
    """The problem of this index: always the same one."""
    rng = generator(seed, index)
    sizes = np.array(list(SIZES.values()), dtype=float)
    size = str(rng.choice(list(SIZES), p=sizes / sizes.sum()))
    # Of more than four, half the problems have few: accountants that take long there are asked about those.
    b = {"b=1": 1, "b=2": 2, "b=3": 3, "b=4": 4}.get(size) or int(rng.integers(5, rng.choice([9, 41])))
    if size == "low rank":
        family, n = "low rank", b
        made = _low_rank(rng, b)
    else:
        family = str(rng.choice(list(FAMILIES)))
        epochs = int(rng.integers(1, 4 if b <= 4 else 3))
        n = epochs * b - (int(rng.integers(0, b)) if epochs > 1 and rng.random() < 0.4 else 0)
        made = FAMILIES[family](rng, n, b)
    scale = log_uniform(rng, 1e-3, 1e3) if rng.random() < 0.6 else 1.0
    strategy = strategies.coefficients(made * scale) if made.ndim == 1 else strategies.matrix(made * scale)
    mechanism = Mechanism(strategy, BallsInBins.from_iterations(n, b))
    largest = float(signal_to_noise(strategy, n, b, 1.0).max())
    delta = log_uniform(rng, *DELTA_RANGE)
    if rng.random() < 0.25:  # blind: mostly far too much noise, or far too little
        sigma = log_uniform(rng, *SIGMA_RANGE)
        epsilons = [log_uniform(rng, *EPSILON_RANGE) for _ in range(6)]
    else:
        sigma = min(max(math.sqrt(largest / log_uniform(rng, 1e-4, 60.0)), SIGMA_RANGE[0]), SIGMA_RANGE[1])
        # Where no amplification would give δ; with it, somewhat below.
        near = gaussian_epsilon(largest / sigma**2, delta)
        epsilons = [near * f for f in (*rng.uniform(0.1, 0.7, 3), *rng.uniform(0.7, 1.2, 3))]
    rng.shuffle(epsilons)
    if size in ("b=4", "sampled"):
        epsilons = epsilons[:2]
    clipped = tuple(min(max(float(e), EPSILON_RANGE[0]), EPSILON_RANGE[1]) for e in epsilons)
    return Problem(index, family, size, mechanism, sigma, clipped, delta, signal_to_noise(strategy, n, b, sigma))


def gaussian_epsilon(s: float, delta: float) -> float:
    if gaussian_delta(s, EPSILON_RANGE[0]) <= delta:
        return EPSILON_RANGE[0]
    if gaussian_delta(s, EPSILON_RANGE[1]) >= delta:
        return EPSILON_RANGE[1]
    return float(brentq(lambda e: gaussian_delta(s, e) - delta, *EPSILON_RANGE, rtol=1e-4))
