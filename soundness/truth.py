"""δ(ε) of the dominating pair without the package: closed forms, quadrature, importance sampling.

S is G/σ², b × b, non-negative. With u ~ N(0, S), a_i = e^(u_i − S_ii/2), A their mean and γ = e^ε, remove is E(A − γ)_+
and add E(1 − γA)_+. A truth is an interval: quadrature to 10⁻⁹ of itself, sampling to six standard errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

Array = np.ndarray

RELATIVE_ERROR = 1e-9  # of the quadrature and of the closed form
SIGMAS = 6.0
LEAST_EFFECTIVE = 1000.0  # effective samples below which sampling says nothing
_AGREEMENT = 1e-5  # of one step and half of it; the error of an analytic integrand is squared by halving
_MOST_POINTS = 1_500_000
_REACH = 10.5  # standard deviations of a density that are integrated over
_BEYOND = 1e-22  # more than the mass of the densities outside, in up to three dimensions: 10⁻²³ each
# The largest S_ii by dimension of the outer integral; beyond it the grid would be too large.
_LARGEST = {0: math.inf, 1: 1e4, 2: 100.0, 3: 12.0}
_SAMPLED = 1e4  # the largest S_ii that is sampled: rounding of the exponents stays far below the standard error


@dataclass(frozen=True)
class Truth:
    """low ≤ δ(ε) ≤ high, and how that is known."""

    low: float
    high: float
    method: str

    @property
    def sharp(self) -> bool:
        """Whether the interval is narrow enough to speak of how loose a bound is."""
        return self.low > 0 and self.high <= 1.5 * self.low


def gaussian_delta(s: float, epsilon: float) -> float:
    """δ(ε) of the Gaussian mechanism with (sensitivity/σ)² = s."""
    if s == 0:
        return 0.0
    root = math.sqrt(s)
    x = root / 2 - epsilon / root
    first, second = float(log_ndtr(x)), epsilon + float(log_ndtr(x - root))
    return max(0.0, -math.exp(first) * math.expm1(min(second - first, 0.0)))


def true_delta(
    s: Array, epsilon: float, direction: str, rng: np.random.Generator | None = None, samples: int = 40_000
) -> Truth:
    """The interval δ(ε) is in; without `rng` what needs sampling is [0, 1]."""
    b, largest = len(s), float(s.max())
    if b == 1 or largest == 0:
        value = gaussian_delta(largest, epsilon)
        # log_ndtr is good to 10⁻¹³ of its own size, the difference of two of them to that over itself.
        x = epsilon / math.sqrt(largest) if largest else 0.0
        slip = 1e-14 * (1 + epsilon + largest + x * x) * math.exp(min(0.0, float(log_ndtr(math.sqrt(largest) / 2 - x))))
        return _interval(value, slip, "closed form")
    shape = _Shape.of(s)
    dimension = shape.outer.shape[1]
    if dimension in _LARGEST:
        scale = min(1.0, _LARGEST[dimension] / largest)
        try:
            if scale == 1.0:
                value, slip = _quadrature(shape, epsilon, direction)
                return _interval(value, slip, f"quadrature, {dimension}-d" if dimension else "one factor")
            # Entrywise larger covariances have a larger δ (Kahane): the truth is between these two.
            value, slip = _quadrature(_Shape.of(s * scale), epsilon, direction)
            low, high = max(0.0, value * (1 - RELATIVE_ERROR) - slip), gaussian_delta(largest, epsilon)
            sampling = rng is not None and largest < _SAMPLED
            seen = sampled_delta(s, epsilon, direction, rng, samples) if sampling else Truth(0.0, 1.0, "none")
            return Truth(max(low, seen.low), min(1.0, high * (1 + RELATIVE_ERROR), seen.high), "Kahane and sampling")
        except ArithmeticError:
            pass
    if rng is None or largest >= _SAMPLED:
        return Truth(0.0, min(1.0, gaussian_delta(largest, epsilon) * (1 + RELATIVE_ERROR)), "Kahane")
    return sampled_delta(s, epsilon, direction, rng, samples)


def _interval(value: float, slip: float, method: str) -> Truth:
    low, high = value * (1 - RELATIVE_ERROR) - slip, value * (1 + RELATIVE_ERROR) + slip
    return Truth(min(1.0, max(0.0, low)), min(1.0, max(0.0, high)), method)


# --- quadrature ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """u = inner·z + outer·y with independent standard normals; inner ∝ S·1 ≥ 0, so that A increases in z."""

    diagonal: Array
    inner: Array
    outer: Array

    @classmethod
    def of(cls, s: Array) -> _Shape:
        inner = s.sum(axis=1) / math.sqrt(s.sum())
        values, vectors = np.linalg.eigh(s - np.outer(inner, inner))
        keep = values > 1e-13 * np.trace(s)
        return cls(np.diagonal(s).copy(), inner, vectors[:, keep] * np.sqrt(values[keep]))


def _quadrature(shape: _Shape, epsilon: float, direction: str) -> tuple[float, float]:
    """(δ, an absolute error). Given y the event is a half-line in z; the integral over y is a trapezoidal rule.

    remove  ∫ 1/b Σ_i φ(y − v_i)·Φ(d_i − z*) − γ·φ(y)·Φ(−z*) dy, A(z*, y) = γ
    add     ∫ φ(y)·Φ(z*) − γ/b Σ_i φ(y − v_i)·Φ(z* − d_i) dy,    A(z*, y) = 1/γ
    """
    outer = shape.outer
    sign = 1.0 if direction == "remove" else -1.0
    step = 1.0 / max(1.0, float(np.abs(outer).max(initial=0.0)))
    previous = math.nan
    while True:
        axes = [
            np.arange(math.floor((min(c.min(), 0) - _REACH) / step), math.ceil((max(c.max(), 0) + _REACH) / step) + 1)
            * step
            for c in outer.T
        ]
        if math.prod(len(a) for a in axes) * len(shape.diagonal) > 4 * _MOST_POINTS:
            raise ArithmeticError("the grid is too large")
        value, size = _grid_sum(shape, axes, sign, epsilon)
        value, size = value * step ** len(axes), size * step ** len(axes)
        if not axes or abs(value - previous) <= _AGREEMENT * abs(value) + 1e-24:
            return max(0.0, value), 4e-15 * size + (_BEYOND if axes else 0.0)
        previous, step = value, step / 2


def _grid_sum(shape: _Shape, axes: list[Array], sign: float, epsilon: float) -> tuple[float, float]:
    """Σ of the integrand over the grid, and of the absolute values of its two parts."""
    b, gamma = len(shape.diagonal), math.exp(epsilon)
    target = math.log(b) + sign * epsilon
    total = size = 0.0
    pieces = max(1, math.prod(len(a) for a in axes) // 100_000) if axes else 1
    for first in np.array_split(axes[0], pieces) if axes else [np.zeros(0)]:
        grid = np.zeros((1, 0))
        if axes:
            grid = np.stack(np.meshgrid(first, *axes[1:], indexing="ij"), axis=-1).reshape(-1, len(axes))
            # Away from every centre the densities are below 10⁻²³ of their peaks.
            centres = np.unique(np.round(np.vstack([shape.outer, np.zeros(len(axes))])), axis=0)
            near = np.zeros(len(grid), dtype=bool)
            for centre in centres:
                near |= ((grid - centre) ** 2).sum(axis=1) < (_REACH + 1) ** 2
            grid = grid[near]
            if not len(grid):
                continue
        z = _threshold(grid @ shape.outer.T - shape.diagonal / 2, shape.inner, target)
        norm = (2 * math.pi) ** (-len(axes) / 2)
        own = norm * np.exp(-0.5 * (grid**2).sum(axis=1)) * ndtr(-sign * z)
        mixed = np.zeros(len(grid))
        for d, v in zip(shape.inner, shape.outer, strict=True):
            mixed += norm * np.exp(-0.5 * ((grid - v) ** 2).sum(axis=1)) * ndtr(sign * (d - z)) / b
        plus, minus = (mixed, gamma * own) if sign > 0 else (own, gamma * mixed)
        total += float((plus - minus).sum())
        size += float((plus + minus).sum())
    return total, size


def _threshold(offset: Array, slope: Array, target: float) -> Array:
    """The z with log Σ_i exp(offset_i + slope_i·z) = target; Newton from the right of a convex, increasing function.

    An error of z only enters squared: the integrand is stationary there. −∞ where terms without slope are too large.
    """
    moving = slope > 0
    possible = np.ones(len(offset), dtype=bool)
    if not moving.all():
        possible = np.logaddexp.reduce(offset[:, ~moving], axis=1) < target
    z = np.min((target - offset[:, moving]) / slope[moving], axis=1)
    active = np.flatnonzero(possible)
    for _ in range(60):
        terms = offset[active] + slope * z[active, None]
        top = terms.max(axis=1)
        weights = np.exp(terms - top[:, None])
        norm = weights.sum(axis=1)
        change = (top + np.log(norm) - target) * norm / (weights @ slope)
        z[active] -= change
        active = active[np.abs(change) > 1e-8 * (1 + np.abs(z[active]))]
        if not len(active):
            break
    return np.where(possible, z, -np.inf)


# --- importance sampling -------------------------------------------------------------------------------------------


def sampled_delta(s: Array, epsilon: float, direction: str, rng: np.random.Generator, samples: int = 40_000) -> Truth:
    """δ(ε) to six standard errors: u is drawn from a mixture of shifted laws, one of which is the target itself.

    The weight of a sample, target/mixture, is then bounded. Shifts along one column of S make one term large, a shift
    along S·1 all of them.
    """
    b = len(s)
    diagonal, mean_variance = np.diagonal(s), float(s.sum()) / b**2
    values, vectors = np.linalg.eigh(s)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    largest = float(diagonal.max())
    # How far log A has to move, in units of the shift along S·1/b.
    reach = (epsilon + float(diagonal.mean()) / 2) if direction == "remove" else (epsilon - float(diagonal.mean()) / 2)
    shared = reach / mean_variance if mean_variance > 0 else 0.0
    if direction == "remove":
        single = [1.0, max(1.0, (epsilon + math.log(b)) / largest + 0.5), max(1.0, epsilon / largest + 0.5)]
        along = [max(0.0, shared) * f for f in (0.6, 1.0)]
    else:
        single, along = [], [0.0, *(-max(0.0, shared) * f for f in (0.5, 0.8, 1.0, 1.25))]
    along = [t for t in along if abs(t) * math.sqrt(mean_variance) < 35]
    parts = len(single) + len(along)
    each = max(1, samples // parts)
    contributions = []
    for part in range(parts):
        u = rng.standard_normal((each, b)) @ root.T
        if part < len(single):
            u += single[part] * s[rng.integers(0, b, each)]
        else:
            u += along[part - len(single)] * s.sum(axis=0) / b
        log_a = u - diagonal / 2
        top = log_a.max(axis=1)
        ratio = top + np.log(np.exp(log_a - top[:, None]).mean(axis=1))  # log A
        densities = []
        for t in single:
            exponent = t * u - t * t * diagonal / 2
            peak = exponent.max(axis=1)
            densities.append(peak + np.log(np.exp(exponent - peak[:, None]).mean(axis=1)))
        densities += [t * u.mean(axis=1) - t * t * mean_variance / 2 for t in along]
        mixture = np.logaddexp.reduce(np.array(densities), axis=0) - math.log(parts)
        if direction == "remove":
            payoff = np.where(ratio > epsilon, -np.expm1(np.minimum(epsilon - ratio, 0.0)), 0.0)
            contributions.append(payoff * np.exp(np.where(ratio > epsilon, ratio - mixture, -np.inf)))
        else:
            payoff = np.where(ratio < -epsilon, -np.expm1(np.minimum(ratio + epsilon, 0.0)), 0.0)
            contributions.append(payoff * np.exp(np.where(ratio < -epsilon, -mixture, -np.inf)))
    mean = float(np.mean([c.mean() for c in contributions]))
    error = math.sqrt(sum(float(c.var()) / each for c in contributions)) / parts
    values = np.concatenate(contributions)
    squares = float((values**2).sum())
    effective = float(values.sum()) ** 2 / squares if squares > 0 else 0.0
    if effective < LEAST_EFFECTIVE:
        return Truth(0.0, 1.0, "sampling, too few")
    # Where δ is nearly 1, what is missing may be too rare for the samples to show it.
    margin = SIGMAS * error + RELATIVE_ERROR * mean + (50 / samples if mean > 0.1 else 0.0)
    return Truth(max(0.0, mean - margin), min(1.0, mean + margin), "sampling")
