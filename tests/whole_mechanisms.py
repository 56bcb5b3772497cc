"""The truth about small mechanisms whose records are thrown anew or sampled: whole runs, without any composition.

Every pattern of taking part has a mean, one entry per iteration, gap rows included: the sum of its columns of the dense
C. The pair is the mixture of N(mean, σ²) over all patterns against N(0, σ²).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import ndtr

import dpmf
from dpmf.batching import BallsInBins, Poisson


@dataclass(frozen=True)
class Whole:
    """The patterns of one group of records: their probabilities, and their means divided by σ."""

    weights: np.ndarray
    means: np.ndarray

    def log_ratio(self, x: np.ndarray) -> np.ndarray:
        """log dP/dQ at points x, a row each."""
        exponents = x @ self.means.T - 0.5 * (self.means**2).sum(axis=1) + np.log(self.weights)
        top = exponents.max(axis=1)
        return top + np.log(np.exp(exponents - top[:, None]).sum(axis=1))


def whole(mechanism: dpmf.Mechanism, sigma: float, group: int = 0, extra: int = 0) -> Whole:
    """All patterns in which a record may take part in a run; extra rows follow the last iteration."""
    batching = mechanism.batching
    n = batching.iterations
    dense = np.abs(mechanism.strategy.matrix(n + extra))
    patterns: dict[tuple[int, ...], float] = {}
    if isinstance(batching, Poisson):
        slots = range(group, n, batching.period)
        rate = batching.period / batching.batches_per_epoch
        for chosen in itertools.product((False, True), repeat=len(slots)):
            taking = tuple(t for t, takes in zip(slots, chosen, strict=True) if takes)
            patterns[taking] = rate ** len(taking) * (1 - rate) ** (len(slots) - len(taking))
    else:
        assert isinstance(batching, BallsInBins)
        b, m = batching.batches_per_epoch, batching.rethrow_every or batching.epochs
        starts = [throw * (m * b + (batching.gap or 0)) for throw in range(batching.throws)]
        for bins in itertools.product(range(group, b, batching.stride), repeat=batching.throws):
            taking = tuple(s + e * b + i for s, i in zip(starts, bins, strict=True) for e in range(m))
            taking = tuple(t for t in taking if t < n)
            patterns[taking] = patterns.get(taking, 0.0) + (batching.stride / b) ** batching.throws
    means = np.array([dense[:, list(taking)].sum(axis=1) for taking in patterns]) / sigma
    return Whole(np.array(list(patterns.values())), means)


def sampled_delta(
    mechanism: dpmf.Mechanism, sigma: float, epsilon: float, direction: str, samples: int = 200_000, seed: int = 0
) -> tuple[float, float]:
    """δ(ε) by importance sampling, and the half-width of a confidence interval of four standard errors.

    Points are drawn from (P + Q)/2, so that the weight of a point is at most 2 in either direction.
    """
    run = whole(mechanism, sigma)
    rng = np.random.default_rng(seed)
    from_p = rng.random(samples) < 0.5
    pattern = rng.choice(len(run.weights), size=samples, p=run.weights / run.weights.sum())
    x = rng.standard_normal((samples, run.means.shape[1])) + from_p[:, None] * run.means[pattern]
    ratio = np.exp(np.minimum(run.log_ratio(x), 700.0))
    gamma = math.exp(epsilon)
    gain = np.maximum(ratio - gamma if direction == "remove" else 1 - gamma * ratio, 0.0) / (0.5 * ratio + 0.5)
    return float(gain.mean()), 4 * float(gain.std()) / math.sqrt(samples)


def exact_delta(mechanism: dpmf.Mechanism, sigma: float, epsilon: float, direction: str, extra: int = 0) -> float:
    """δ(ε) by quadrature over the span of the means; the innermost variable is integrated in closed form.

    The last direction is that of the mean of all means. Along it the ratio grows, because no mean has a negative
    product with another, so that the ratio exceeds e^ε beyond a point, which is found by bisection.
    """
    run = whole(mechanism, sigma, extra=extra)
    _, singular, basis = np.linalg.svd(run.means, full_matrices=False)
    basis = basis[singular > 1e-12 * singular[0]]
    means = run.means @ basis.T
    last = run.weights @ means
    last = last / np.linalg.norm(last)
    rest = np.linalg.svd(last[None, :])[2][1:]
    means = means @ np.vstack([rest, last]).T
    points, weights = hermegauss({1: 1, 2: 200, 3: 60, 4: 24, 5: 10}[means.shape[1]])
    weights = weights / weights.sum()
    outer = np.array(list(itertools.product(points, repeat=means.shape[1] - 1))).reshape(-1, means.shape[1] - 1)
    mass = np.array([math.prod(w) for w in itertools.product(weights, repeat=means.shape[1] - 1)])
    keep = mass > 1e-18
    outer, mass = outer[keep], mass[keep]
    fixed = outer @ means[:, :-1].T - 0.5 * (means**2).sum(axis=1) + np.log(run.weights)
    slopes = means[:, -1]
    assert np.all(slopes > -1e-12)
    target = epsilon if direction == "remove" else -epsilon
    low, high = np.full(len(outer), -60.0), np.full(len(outer), 60.0)
    for _ in range(60):
        middle = 0.5 * (low + high)
        exponents = fixed + middle[:, None] * slopes
        top = exponents.max(axis=1)
        above = top + np.log(np.exp(exponents - top[:, None]).sum(axis=1)) > target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    gamma, sign = math.exp(epsilon), 1 if direction == "remove" else -1
    # E[e^(s z) 1(z > t)] = e^(s²/2)·Φ(s − t), and the other way round below t.
    p = (np.exp(fixed + 0.5 * slopes**2) * ndtr(sign * (slopes - low[:, None]))).sum(axis=1)
    q = ndtr(-sign * low)
    return float(mass @ (p - gamma * q if direction == "remove" else q - gamma * p))
