"""The bridges: what dp_accounting, Opacus and jax-privacy are told, beside the truth about what runs.

Runs that are composed are independent, so the pattern of a record is a pair of patterns, and S of the whole is the sum
of theirs; a Gaussian mechanism beside them adds 1/σ² to every entry.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

import dpmf
from dpmf.accountants import Accountant, Best, Gaussian, Lattice, Renyi
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.batching import Poisson
from dpmf.run import Run
from soundness import batchings, hostile_bridge
from soundness.cases import Finding, guarded
from soundness.problems import Array, Problem
from soundness.truth import Truth, true_delta

Rng = np.random.Generator
_FAR = 500.0  # truths are not computed at a larger ε


@contextmanager
def own_cache() -> Iterator[None]:
    """A cache directory that begins empty: what an earlier run left there is no answer of this one."""
    from dpmf import store

    with tempfile.TemporaryDirectory() as place, mock.patch.dict(os.environ, {"DPMF_CACHE_DIR": place}):
        store.forget()
        try:
            yield
        finally:
            store.forget()


def both(s: Array, epsilon: float, rng: Rng) -> Truth:
    """The larger δ of the two directions."""
    if not epsilon <= _FAR:
        return Truth(0.0, 1.0, "none")
    ways = [true_delta(s, epsilon, way, rng) for way in DIRECTIONS]
    return Truth(max(t.low for t in ways), max(t.high for t in ways), ways[0].method)


def at_epsilon(name: str, kind: str, s: Array, delta: float, ask: Callable[[], float], rng: Rng) -> Finding:
    """An ε that was claimed for δ: the truth there must not be above δ."""
    found, problem = guarded(ask)
    if problem is None and not found >= 0:
        problem = f"epsilon is {found}"
    truth = both(s, found, rng) if problem is None else Truth(0.0, 1.0, "none")
    return Finding(name, kind, "both", found, delta, truth, problem)


def _accountant(problem: Problem, rng: Rng) -> Accountant:
    if isinstance(problem.mechanism.batching, Poisson):
        return Best()
    cheap: list[Accountant] = [Gaussian(), Renyi(work_budget=1e4)]
    s = problem.mechanism.throw.gram if not problem.mechanism.batching.fixed else problem.mechanism.gram
    return [*cheap, Lattice()][int(rng.integers(3))] if not np.any(s - np.diag(np.diag(s))) else cheap[rng.integers(2)]


def composed(s: Array, runs: int, gaussian: float | None) -> Array:
    """S of several independent runs and a Gaussian mechanism with this σ."""
    whole = np.zeros((1, 1))
    for _ in range(runs):
        n, m = len(whole), len(s)
        whole = np.kron(whole, np.ones((m, m))) + np.kron(np.ones((n, n)), s)
    return whole + (0.0 if gaussian is None else gaussian**-2)


def dp_accounting(problem: Problem, rng: Rng) -> Iterator[Finding]:
    """An event, composed with itself and with a Gaussian mechanism."""
    from dp_accounting import GaussianDpEvent

    from dpmf.integrations.budgets import calibrate_remainder
    from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent, BallsInBinsPLDAccountant

    runs = 2 if len(problem.s) ** 2 <= batchings.MOST_PATTERNS and rng.random() < 0.5 else 1
    gaussian = float(np.exp(rng.uniform(-0.5, 2))) if rng.random() < 0.5 else None
    s = composed(problem.s, runs, gaussian)
    accountant, interval = _accountant(problem, rng), float(rng.choice([1e-4, 1e-3, 1e-2]))
    asked = BallsInBinsPLDAccountant(value_discretization_interval=interval, accountant=accountant)
    try:
        asked.compose(BallsInBinsMatrixDpEvent.of(problem.mechanism, problem.noise_multiplier), runs)
        if gaussian is not None:
            asked.compose(GaussianDpEvent(gaussian))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        yield Finding("dp_accounting", "compose", "both", math.nan, math.nan, Truth(0, 1, "none"), said)
        return
    for epsilon in problem.epsilons:
        claim, trouble = guarded(lambda e=epsilon: asked.get_delta(e))
        yield Finding("dp_accounting", "delta", "both", epsilon, claim, both(s, epsilon, rng), trouble)
    for delta in (problem.delta, math.sqrt(problem.delta)):
        yield at_epsilon("dp_accounting", "epsilon", s, delta, lambda d=delta: asked.get_epsilon(d), rng)
    if rng.random() < 0.1 and gaussian is not None:
        target = max(problem.epsilons[-1], 0.05) * 2
        try:
            found = calibrate_remainder(
                problem.mechanism, GaussianDpEvent(gaussian), target_epsilon=target, target_delta=problem.delta,
                accountant=accountant, value_discretization_interval=1e-3, relative_tolerance=0.05,
            ).noise_multiplier  # fmt: skip
        except ValueError:  # nothing is left of the budget
            return
        at = composed(problem.s * (problem.noise_multiplier / found) ** 2, 1, gaussian)
        yield Finding("dp_accounting", "remainder", "both", found, problem.delta, both(at, target, rng))


def opacus(problem: Problem, rng: Rng) -> Iterator[Finding]:
    """What a training run says of itself, after some of the steps: the truth is about the whole run, stopped or not."""
    from dpmf.training._target import Guarantee

    batching, sigma = problem.mechanism.batching, problem.noise_multiplier
    seen = batchings.means(problem.mechanism) / sigma
    asked = Guarantee(Run(problem.mechanism, sigma), _accountant(problem, rng), None, None)
    made = int(rng.integers(1, batching.steps + 1))
    for delta in (problem.delta, math.sqrt(problem.delta)):
        yield at_epsilon("Opacus", "epsilon", seen @ seen.T, delta, lambda d=delta: asked.epsilon(d, made), rng)


def jax_privacy(problem: Problem, rng: Rng) -> Iterator[Finding]:
    """Objects of jax-privacy, with fixed bins; the matrix that runs is found by means of its own."""
    from dpmf.integrations import jax_privacy as bridge

    b = int(rng.choice([1, 2, 3]))
    n = b * int(rng.integers(1, 12 // b))
    drawn = hostile_bridge.draw(rng, n)
    bins = dpmf.BallsInBins.from_iterations(n, b)
    entries = np.abs(drawn.runs)
    mean = np.stack([entries[:, i::b].sum(axis=1) for i in range(b)], axis=1)
    gram = mean.T @ mean
    sigma = math.sqrt(float(gram.max()) / math.exp(rng.uniform(math.log(1e-2), math.log(10.0))))
    try:
        mechanism = bridge.mechanism(drawn.source, bins, noising=drawn.noising)
    except ValueError:  # refused, as it should be where C has negative entries
        return
    accountant = Gaussian() if b == 1 else Renyi(work_budget=1e4)
    for epsilon in problem.epsilons:
        for way in DIRECTIONS:
            claim, trouble = guarded(
                lambda e=epsilon, w=way: (
                    dpmf.delta(mechanism, noise_multiplier=sigma, epsilon=e, direction=w, accountant=accountant).delta
                )
            )
            if trouble and "must be non-negative" in trouble and drawn.runs.min() < 0:
                return
            truth = true_delta(gram / sigma**2, epsilon, way, rng)
            yield Finding("jax-privacy", "delta", way, epsilon, claim, truth, trouble)


BRIDGES: dict[str, tuple[Callable[[Problem, Rng], Iterator[Finding]], float]] = {
    "dp_accounting": (dp_accounting, 0.6), "opacus": (opacus, 0.2), "jax_privacy": (jax_privacy, 0.2),
}  # fmt: skip


def check_bridge(seed: int, index: int) -> tuple[Problem, list[Finding]]:
    """The problem of this index through one of the bridges that are installed."""
    rng = np.random.default_rng([seed, index, 13])
    name = str(rng.choice(list(BRIDGES), p=[share for _, share in BRIDGES.values()]))
    problem = batchings.problem_of(batchings.draw_mechanism(rng), index, rng)
    if importlib.util.find_spec(name) is None:
        return problem, []
    with own_cache():
        return problem, list(BRIDGES[name][0](problem, rng))
