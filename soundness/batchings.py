"""Small mechanisms whose records are thrown anew, use strides or are sampled: bounds against whole runs.

Every way in which a record may take part is one of finitely many equally likely patterns. Their Gram matrix, from the
dense C, is that of the whole run, gap rows included, and `truth` takes it from there: no composition is involved.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import dpmf
from dpmf import lower_bounds
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.batching import BallsInBins, Poisson
from soundness.cases import Finding
from soundness.truth import Truth, true_delta

MOST_PATTERNS = 81


@dataclass(frozen=True)
class Drawn:
    """A mechanism, where to ask about it, and S over all patterns."""

    mechanism: dpmf.Mechanism
    noise_multiplier: float
    epsilon: float
    s: np.ndarray


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


def draw(seed: int, index: int) -> Drawn:
    """The mechanism of this index; the same one each time."""
    rng = np.random.default_rng([seed, index, 11])
    while True:
        width = int(rng.integers(1, 5))
        column = np.append(1.0, rng.random(width - 1) * rng.choice([0.1, 1.0]))
        if rng.random() < 0.2:
            column = (1 + np.arange(40.0)) ** -rng.uniform(0.3, 2)
        strategy = dpmf.strategies.coefficients(column * rng.choice([0.3, 1.0, 4.0]))
        if rng.random() < 0.3:
            strategy = strategy.normalized()
        b = int(rng.choice([1, 2, 3, 4, 6]))
        stride = int(rng.choice([s for s in range(1, b + 1) if b % s == 0]))
        if rng.random() < 0.25:
            batching: dpmf.batching.Batching = Poisson(int(rng.integers(1, 3)), b, stride)
        else:
            m, throws = int(rng.integers(1, 3)), int(rng.integers(1, 4))
            gap = None if throws == 1 or rng.random() < 0.5 else int(rng.integers(0, 5))
            cut = int(rng.integers(0, b)) if throws == 1 and m > 1 else 0
            batching = BallsInBins(
                m * throws, b, m * b - cut if cut else None, rethrow_every=m, stride=stride, gap=gap
            )  # fmt: skip
        try:
            mechanism = dpmf.Mechanism(strategy, batching)
        except ValueError:  # a Poisson sample of a strategy that is too wide for it
            continue
        if (b // stride) ** batching.throws <= MOST_PATTERNS:
            break
    found = patterns(mechanism)
    dense = np.abs(mechanism.strategy.matrix(mechanism.batching.iterations))
    means = np.array([dense[:, taking].sum(axis=1) for taking in found])
    sigma = float(np.sqrt((means**2).sum(axis=1).max()) * np.exp(rng.uniform(math.log(0.3), math.log(4.0))))
    return Drawn(mechanism, sigma, float(rng.choice([0.0, rng.uniform(0, 4)])), means @ means.T / sigma**2)


def check(seed: int, index: int) -> tuple[Drawn, list[Finding]]:
    """Upper and lower bounds of one mechanism, in both directions, beside the truth."""
    drawn = draw(seed, index)
    rng = np.random.default_rng([seed, index, 12])
    names = ["gaussian"] if not isinstance(drawn.mechanism.batching, Poisson) else ["best"]
    if names[0] == "gaussian" and rng.random() < 0.3:
        names.append("renyi")
    if names[0] == "gaussian" and rng.random() < 0.05:
        names.append("chain")
    findings = []
    for way in DIRECTIONS:
        truth = true_delta(drawn.s, drawn.epsilon, way, rng)
        for name in (*names, "lower"):
            claim, problem = math.nan, None
            try:
                if name == "lower":
                    claim = lower_bounds.lower_delta(drawn.mechanism, drawn.noise_multiplier, drawn.epsilon, way)
                else:
                    claim = dpmf.delta(
                        drawn.mechanism,
                        noise_multiplier=drawn.noise_multiplier,
                        epsilon=drawn.epsilon,
                        accountant=name,
                        direction=way,
                    ).delta
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            kind = "lower delta" if name == "lower" else "delta"
            findings.append(Finding(name, kind, way, drawn.epsilon, claim, truth, problem))
    uppers = {f.direction: f.claim for f in findings if f.accountant != "lower" and f.problem is None}
    for finding in [f for f in findings if f.accountant == "lower" and f.problem is None]:
        if finding.claim > uppers.get(finding.direction, 1.0):
            findings.append(Finding("order", "delta", finding.direction, drawn.epsilon, math.nan, Truth(0, 1, "none"),
                                    f"lower bound {finding.claim} above the upper one"))  # fmt: skip
    return drawn, findings


def main(arguments: Sequence[str]) -> int:
    """Check many of them, and print what is on the wrong side."""
    parser = argparse.ArgumentParser(prog="python -m soundness batchings", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    asked = wrong = 0
    for index in range(options.first, options.first + options.cases):
        drawn, findings = check(options.seed, index)
        asked += len(findings)
        for finding in findings:
            if not finding.sound:
                wrong += 1
                print(f"{index}: {drawn.mechanism.name}, σ = {drawn.noise_multiplier!r}: {finding}")
    print(f"{options.cases} mechanisms, {asked} answers, {wrong} on the wrong side")
    return 1 if wrong else 0
