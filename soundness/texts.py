"""Numbers as a person reads them: what commands print about random batchings, read back and compared with the truth."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

import dpmf
from dpmf import batching, strategies
from dpmf.accountants.protocol import DIRECTIONS
from soundness import batchings
from soundness.cases import Finding
from soundness.printed import NUMBER, PAIR, cells, drawn, run
from soundness.problems import Problem
from soundness.truth import Truth, true_delta

Rng = np.random.Generator
_SIGMA = re.compile(rf"noise multiplier ({NUMBER}) ")
_STATED = re.compile(rf"is \(({NUMBER}), ({NUMBER})\)-")


def _mechanism(rng: Rng) -> tuple[dpmf.Mechanism, dict[str, str]]:
    """A mechanism, and the options that describe it."""
    while True:
        strategy, width = str(rng.choice(["dpsgd", "bsr", "bisr"])), int(rng.integers(1, 4))
        name = str(rng.choice(batching.NAMES))
        k, b = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        try:
            made = strategies.build(strategy, bandwidth=None if strategy == "dpsgd" else width)
            wide = made.bandwidth(b) if name.startswith("cyclic") else 1
            mechanism = dpmf.Mechanism(made, batching.build(name, k, b, bandwidth=wide))
        except ValueError:
            continue
        if len(batchings.patterns(mechanism)) <= batchings.MOST_PATTERNS:
            options = {"--strategy": strategy, "--batching": name, "--epochs": str(k), "--batches-per-epoch": str(b)}
            return mechanism, options | ({} if strategy == "dpsgd" else {"--bandwidth": str(width)})


def check_text(seed: int, index: int) -> tuple[Problem, list[Finding]]:
    """One command; (ε, δ) must hold at the σ that is printed, and a printed lower bound must be below the truth."""
    rng = np.random.default_rng([seed, index, 15])
    mechanism, options = _mechanism(rng)
    means = batchings.means(mechanism)
    gram = means @ means.T
    largest = math.sqrt(float(gram.max()))
    command = str(rng.choice(["calibrate", "epsilon", "delta"]))
    given = {
        "--epsilon": drawn(rng, 0.05, 8), "--delta": drawn(rng, 1e-10, 0.2),
        "--noise-multiplier": drawn(rng, 0.3 * largest, 8 * largest),
    }  # fmt: skip
    missing = {"calibrate": "--noise-multiplier", "epsilon": "--epsilon", "delta": "--delta"}[command]
    del given[missing]
    poisson = isinstance(mechanism.batching, dpmf.batching.Poisson)
    accountant = "best" if poisson else str(rng.choice(["gaussian", "renyi"]))
    more = {"--accountant": accountant} | ({"--work-budget": "1e4"} if accountant == "renyi" else {})
    asked = Problem(
        index, batchings.kind_of(mechanism.batching), "printed", mechanism, math.nan, (), math.nan, gram
    )  # fmt: skip
    try:
        words = [command, *(word for pair in (options | given | more).items() for word in pair), "--lower"]
        findings = list(_read(gram, words, given, rng))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return asked, [Finding("printed", command, "both", math.nan, math.nan, Truth(0, 1, "none"), said)]
    return asked, [*findings, *_stated(mechanism, gram, given, accountant, rng)]


def _read(gram: np.ndarray, words: list[str], given: dict[str, str], rng: Rng) -> Iterator[Finding]:
    text = run(words)
    if text is None:
        raise ValueError(f"refused: {' '.join(words)}")
    rows, kind = cells(text), words[0]
    sigma = float(given.get("--noise-multiplier") or rows["noise multiplier"])
    pair = PAIR.search(rows["guarantee"])
    if pair is None:
        raise ValueError(f"no (ε, δ) in {rows['guarantee']!r}")
    epsilon, delta = float(pair[1]), float(pair[2])
    yield from _holds("printed", kind, gram, sigma, epsilon, delta, rng)
    if rows["lower bound"] in ("none found", "0"):
        return
    low = float(rows["lower bound"])
    at = {"calibrate": (low, epsilon, delta), "epsilon": (sigma, low, delta), "delta": (sigma, epsilon, low)}[kind]
    ways = [true_delta(gram / at[0] ** 2, at[1], way, rng) for way in DIRECTIONS]
    truth = Truth(max(t.low for t in ways), max(t.high for t in ways), ways[0].method)
    yield Finding("printed, lower", f"lower {kind}", "both", low, at[2], truth)


def _holds(
    name: str, kind: str, gram: np.ndarray, sigma: float, epsilon: float, delta: float, rng: Rng
) -> Iterator[Finding]:
    for way in DIRECTIONS:
        far = not epsilon <= 500
        truth = Truth(0.0, 1.0, "none") if far else true_delta(gram / sigma**2, epsilon, way, rng)
        yield Finding(name, kind, way, epsilon, min(delta, 1.0), truth)


def _stated(
    mechanism: dpmf.Mechanism, gram: np.ndarray, given: dict[str, str], accountant: str, rng: Rng
) -> Iterator[Finding]:
    """The paragraph for a paper, about the same question."""
    from dpmf.paper import statement

    numbers = {name.removeprefix("--").replace("-", "_"): float(text) for name, text in given.items()}
    if "noise_multiplier" not in numbers:
        wanted = {"target_epsilon": numbers["epsilon"], "target_delta": numbers["delta"]}
        bound = dpmf.calibrate(mechanism, **wanted, accountant=accountant, relative_tolerance=1e-2)
    else:
        bound = (dpmf.epsilon if "delta" in numbers else dpmf.delta)(mechanism, **numbers, accountant=accountant)
    text = str(statement(mechanism, bound))
    sigma, pair = _SIGMA.search(text), _STATED.search(text)
    if sigma is None or pair is None:
        problem = f"no numbers in {text!r}"
        yield Finding("printed", "paragraph", "both", math.nan, math.nan, Truth(0, 1, "none"), problem)
        return
    yield from _holds("printed", "paragraph", gram, float(sigma[1]), float(pair[1]), float(pair[2]), rng)
