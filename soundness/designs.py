"""What `dpmf.design` answers: its certified noise multipliers and lower bounds, beside the truth about every option."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator

import numpy as np

import dpmf
from dpmf import workloads
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.batching import Poisson
from dpmf.designs import Option
from soundness import batchings
from soundness.bridges import own_cache
from soundness.cases import Finding
from soundness.problems import Problem, log_uniform
from soundness.truth import Truth, true_delta

_MOST_PATTERNS = 256
# Batchings that are considered together, and how often: options that share noise within a throw take seconds each.
_CHOICES: tuple[tuple[tuple[str, ...], float], ...] = (
    (("cyclic", "poisson", "cyclic-poisson"), 0.5),
    (("fixed",), 0.25),
    (("reshuffled", "poisson"), 0.15),
    (("rethrown", "fixed", "cyclic"), 0.1),
)


def check_design(seed: int, index: int) -> tuple[Problem, list[Finding]]:
    """A small design: every certified σ meets the target, and every lower bound is below the σ that would."""
    rng = np.random.default_rng([seed, index, 14])
    names, _ = _CHOICES[int(rng.choice(len(_CHOICES), p=[share for _, share in _CHOICES]))]
    k, b = int(rng.choice([4] if "rethrown" in names else [1, 2, 2, 3])), int(rng.choice([2, 3, 4]))
    if "rethrown" in names:
        b = 2
    epsilon, delta = float(np.exp(rng.uniform(-1, 1.5))), log_uniform(rng, 1e-8, 1e-2)
    chosen = [workloads.prefix(), workloads.damped(float(rng.uniform(2, 20))), workloads.momentum(0.9)]
    widths = [1, *(int(p) for p in rng.permutation([2, 3])[:1])]
    workload = chosen[int(rng.integers(3))]
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(k, b))
    empty = Problem(index, f"design among {', '.join(names)}", "designs", mechanism, 1.0, (epsilon,), delta, np.eye(b))
    with own_cache(), contextlib.redirect_stderr(io.StringIO()):  # strategies look their coefficients up in the cache
        try:
            found = dpmf.design(
                epochs=k, batches_per_epoch=b, target_epsilon=epsilon, target_delta=delta, workload=workload,
                batchings=names, bandwidths=widths, time_budget=None,
            )  # fmt: skip
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return empty, [Finding("design", "design", "both", math.nan, math.nan, Truth(0, 1, "none"), said)]
        certified = [option for option in (found.best, *found.others) if option.certified]
        return empty, [finding for option in certified for finding in _judged(option, epsilon, delta, rng)]


def _judged(option: Option, epsilon: float, delta: float, rng: np.random.Generator) -> Iterator[Finding]:
    batching = option.mechanism.batching
    groups = batching.period if isinstance(batching, Poisson) else batching.stride
    if (batching.batches_per_epoch // groups) ** batching.throws > _MOST_PATTERNS:
        return
    means = batchings.means(option.mechanism, int(rng.integers(groups)))
    for way in DIRECTIONS:
        truth = true_delta(means @ means.T / option.noise_multiplier**2, epsilon, way, rng)
        yield Finding("design", "calibrate", way, option.noise_multiplier, delta, truth)
    if option.lower:  # with less noise than this, one of the directions misses the target
        means = batchings.means(option.mechanism)
        ways = [true_delta(means @ means.T / option.lower**2, epsilon, way, rng) for way in DIRECTIONS]
        truth = Truth(max(t.low for t in ways), max(t.high for t in ways), ways[0].method)
        yield Finding("design, lower", "lower sigma", "both", option.lower, delta, truth)
