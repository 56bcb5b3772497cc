"""Random problems whose records are thrown anew, use strides or are sampled.

Every way in which a record may take part is one of finitely many equally likely patterns. Their Gram matrix, from the
dense C, is that of the whole run, gap rows included, and `truth` takes it from there: no composition is involved.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

import dpmf
from dpmf.batching import BallsInBins, Batching, Poisson
from soundness.problems import DELTA_RANGE, EPSILON_RANGE, Array, Problem, gaussian_epsilon, log_uniform

MOST_PATTERNS = 36
_EPSILONS = 6


def patterns(mechanism: dpmf.Mechanism, group: int = 0) -> list[list[int]]:
    """All ways in which a record of a group may take part, as lists of iterations; they are equally likely."""
    batching = mechanism.batching
    n, b = batching.iterations, batching.batches_per_epoch
    if isinstance(batching, Poisson):
        slots = range(group, n, batching.period)
        choices = itertools.product(range(b // batching.period), repeat=len(slots))
        return [[t for t, choice in zip(slots, chosen, strict=True) if choice == 0] for chosen in choices]
    m = batching.rethrow_every or batching.epochs
    starts = [throw * (m * b + (batching.gap or 0)) for throw in range(batching.throws)]
    bins = itertools.product(range(group, b, batching.stride), repeat=batching.throws)
    return [
        [s + e * b + i for s, i in zip(starts, chosen, strict=True) for e in range(m) if s + e * b + i < n]
        for chosen in bins
    ]


def means(mechanism: dpmf.Mechanism, group: int = 0) -> Array:
    """What a record adds to every output, one row for each pattern."""
    dense = np.abs(np.asarray(mechanism.strategy.matrix(mechanism.batching.iterations), dtype=np.float64))
    return np.array([dense[:, taking].sum(axis=1) for taking in patterns(mechanism, group)])


def kind_of(batching: Batching) -> str:
    """The name under which a batching is counted."""
    if isinstance(batching, Poisson):
        return "Poisson" if batching.period == 1 else "cyclic Poisson"
    parts = ["fixed bins" if batching.throws == 1 else "reshuffled" if batching.rethrow_every == 1 else "thrown anew"]
    return " ".join([*parts, *(["with a stride"] if batching.stride > 1 else [])])


def draw_batching(rng: np.random.Generator) -> Batching:
    """A batching with a few patterns; most of them have more than one."""
    while True:
        b = int(rng.choice([1, 2, 3, 4, 6]))
        stride = int(rng.choice([s for s in range(1, b + 1) if b % s == 0]))
        if stride == b and rng.random() < 0.85:
            continue
        if rng.random() < 0.35:
            batching: Batching = Poisson(int(rng.integers(1, 4)), b, stride)
        else:
            m, throws = int(rng.integers(1, 3)), int(rng.choice([1, 2, 2, 3, 3]))
            gap = None if throws == 1 or rng.random() < 0.5 else int(rng.integers(0, 5))
            cut = int(rng.integers(0, b)) if throws == 1 and m > 1 else 0
            batching = BallsInBins(
                m * throws, b, m * b - cut if cut else None, rethrow_every=m, stride=stride, gap=gap
            )  # fmt: skip
        if (b // stride) ** batching.throws <= MOST_PATTERNS:
            return batching


def draw_mechanism(rng: np.random.Generator) -> dpmf.Mechanism:
    """A batching, and a Toeplitz strategy, banded or with a long memory, that it covers."""
    batching = draw_batching(rng)
    widest = batching.period if isinstance(batching, Poisson) else 4  # of samples that share no noise
    column = np.append(1.0, rng.random(int(rng.integers(widest))) * rng.choice([0.1, 1.0]))
    if not isinstance(batching, Poisson) and rng.random() < 0.2:
        column = (1 + np.arange(60.0)) ** -rng.uniform(0.3, 2)
    strategy = dpmf.strategies.coefficients(column * rng.choice([0.3, 1.0, 4.0]))
    return dpmf.Mechanism(strategy.normalized() if rng.random() < 0.3 else strategy, batching)


def problem_of(mechanism: dpmf.Mechanism, index: int, rng: np.random.Generator) -> Problem:
    """Questions about a mechanism, at a noise that makes them neither trivial nor hopeless.

    The truth is about a record of the first group, whose outputs are the most.
    """
    batching = mechanism.batching
    found = means(mechanism)
    largest = float((found**2).sum(axis=1).max())
    sigma = math.sqrt(largest / log_uniform(rng, 1e-2, 20.0))
    delta = log_uniform(rng, *DELTA_RANGE)
    near = gaussian_epsilon(largest / sigma**2, delta)
    epsilons = [near * f for f in (*rng.uniform(0.05, 0.6, 3), *rng.uniform(0.6, 1.2, 2))]
    epsilons.insert(int(rng.integers(3)), float(rng.choice([0.0, rng.uniform(0, 4)])))
    clipped = tuple(0.0 if e == 0 else min(max(float(e), EPSILON_RANGE[0]), EPSILON_RANGE[1]) for e in epsilons)
    size = "1 pattern" if len(found) == 1 else f"{'2-9' if len(found) < 10 else '10-36'} patterns"
    s = found @ found.T / sigma**2
    return Problem(index, kind_of(batching), size, mechanism, sigma, clipped[:_EPSILONS], delta, s)


def draw_batching_problem(seed: int, index: int) -> Problem:
    """The problem of this index; the same one each time."""
    rng = np.random.default_rng([seed, index, 11])
    return problem_of(draw_mechanism(rng), index, rng)
