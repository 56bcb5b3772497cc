"""Two or more accountants, the certified lower bound and Monte Carlo on one mechanism: do they agree?

They share the Gram matrix and little else, so that an error in one of them shows as a contradiction. `dpmf verify`
prints the result as a page to attach to a paper.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np

from dpmf import api, validation
from dpmf import lower_bounds as lower
from dpmf._version import __version__
from dpmf.accountants.chain import Chain
from dpmf.accountants.conditional import Conditional
from dpmf.accountants.monte_carlo import MonteCarlo
from dpmf.accountants.protocol import Accountant, Direction, directions_of
from dpmf.accountants.registry import ACCOUNTANTS, resolve
from dpmf.mechanism import Mechanism

# Minima of the others; estimates; what is proved elsewhere (asked only by name).
_NOT_BY_DEFAULT = ("best", "auto", "monte-carlo", "random-allocation", "pld-accounting")
_STANDARD_ERRORS = 5.0
# N·b² up to which conditional composition is asked, and b up to which the chain is: minutes at most.
_CONDITIONAL_WORK, _ALL_TEMPERATURES, _CHAIN_BATCHES = 3e8, 3e7, 2000


@dataclass(frozen=True)
class CheckedBound:
    """One accountant's upper bound on δ(ε) in one direction."""

    accountant: str
    direction: str
    delta: float
    rests_on: str
    seconds: float


@dataclass(frozen=True)
class Sampled:
    """Monte Carlo in one direction: the estimate, and five standard errors around it (more where few samples tell)."""

    direction: str
    estimate: float
    standard_error: float
    low: float
    high: float
    samples: int
    seed: int


@dataclass(frozen=True)
class Verification:
    """What every accountant says about one mechanism, and where they contradict each other.

    Attributes:
      bounds: upper bounds on δ(ε), one for each accountant and direction.
      lower: certified lower bounds on δ(ε), by direction.
      sampled: Monte Carlo, by direction.
      contradictions: in words; empty when all agree.
      delta: the smallest bound that covers every direction asked for.
      certified: whether it is at most the target δ.
    """

    mechanism: str
    strategy: str
    epochs: int
    batches_per_epoch: int
    iterations: int
    gram_digest: str
    sensitivity: float
    noise_multiplier: float
    calibrated: bool
    epsilon: float
    target_delta: float
    direction: str
    bounds: tuple[CheckedBound, ...]
    lower: dict[str, float]
    sampled: tuple[Sampled, ...]
    contradictions: tuple[str, ...]
    delta: float
    certified: bool
    versions: dict[str, str]

    @property
    def consistent(self) -> bool:
        return not self.contradictions

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain Python values, ready for JSON."""
        return asdict(self) | {"consistent": self.consistent}

    def to_markdown(self) -> str:
        return _page(self)


def default_accountants(mechanism: Mechanism) -> list[Accountant]:
    """Every deterministic accountant of dpmf that suits the mechanism and takes minutes at most."""
    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    found: list[Accountant] = []
    for name, cls in ACCOUNTANTS.items():
        accountant: Accountant = cls()
        if (
            name in _NOT_BY_DEFAULT
            or (cls is Chain and b > _CHAIN_BATCHES)
            or (cls is Conditional and n * b**2 > _CONDITIONAL_WORK)
        ):
            continue
        if cls is Conditional and n * b**2 > _ALL_TEMPERATURES:
            accountant = Conditional(family="am-gm")
        try:
            accountant.prepare(mechanism)
        except ValueError:  # it does not cover this mechanism
            continue
        found.append(accountant)
    return found


def verify(
    mechanism: Mechanism,
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float | None = None,
    direction: str = "both",
    accountants: Sequence[str | Accountant] | None = None,
    samples: int = 200_000,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Verification:
    """Ask all accountants for δ(ε) at a noise multiplier (calibrated where none is given), and compare.

    **Formal guarantees.** Each bound is its accountant's. A contradiction between an upper and the lower bound proves
    that one of them is wrong; one that involves Monte Carlo is five standard errors wide and may, rarely, be chance.
    That there is none proves nothing: it is a test, not a theorem.
    """
    one_ways = directions_of(validation.choice("direction", direction, ("both", "remove", "add")))
    epsilon = validation.non_negative("epsilon", epsilon)
    target = validation.probability("delta", delta)
    sampler = MonteCarlo(samples=samples, seed=seed)
    if not isinstance(mechanism, Mechanism):
        raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
    asked = default_accountants(mechanism) if accountants is None else [resolve(a) for a in accountants]
    if len({a.name for a in asked}) < 2:
        raise ValueError(f"accountants must be at least two different ones, got {[a.name for a in asked]}")
    prepared = [(a, a.prepare(mechanism)) for a in asked]
    for _, one in prepared:
        if one.kind != "bound":
            raise ValueError(f"accountants must be deterministic, {one.name} is not")
    calibrated = noise_multiplier is None
    if noise_multiplier is None:
        progress("calibrating")
        noise_multiplier = api.calibrate(
            mechanism, target_epsilon=epsilon, target_delta=target, direction=direction
        ).noise_multiplier
    bounds: list[CheckedBound] = []
    below: dict[str, float] = {}
    sampled: list[Sampled] = []
    sampling = sampler.prepare(mechanism)
    for way in one_ways:
        for accountant, one in prepared:
            progress(f"{one.name}, {way}")
            began = time.perf_counter()
            value = api.delta(
                mechanism, noise_multiplier=noise_multiplier, epsilon=epsilon, accountant=one, direction=way
            ).delta
            bounds.append(CheckedBound(one.name, way, value, accountant.rests_on, time.perf_counter() - began))
        progress(f"lower bound, {way}")
        below[way] = lower.lower_delta(mechanism, noise_multiplier, epsilon, way)
        progress(f"sampling, {way}")
        sampled.append(_sample(sampling, noise_multiplier, epsilon, way))
    least = max(min(b.delta for b in bounds if b.direction == way) for way in one_ways)
    batching = mechanism.batching
    return Verification(
        mechanism=mechanism.name,
        strategy=mechanism.strategy.name,
        epochs=batching.epochs,
        batches_per_epoch=batching.batches_per_epoch,
        iterations=batching.iterations,
        gram_digest=hashlib.sha256(np.ascontiguousarray(mechanism.gram, dtype="<f8").tobytes()).hexdigest(),
        sensitivity=mechanism.sensitivity,
        noise_multiplier=float(noise_multiplier),
        calibrated=calibrated,
        epsilon=epsilon,
        target_delta=target,
        direction=direction,
        bounds=tuple(bounds),
        lower=below,
        sampled=tuple(sampled),
        contradictions=tuple(contradictions(bounds, below, sampled)),
        delta=least,
        certified=least <= target,
        versions=_versions(),
    )


def _sample(sampling: Any, sigma: float, epsilon: float, way: Direction) -> Sampled:
    found = sampling.estimate_delta(sigma, epsilon, way)
    margin = _STANDARD_ERRORS * found.standard_error
    trusted = found.interval[0] > 0  # else too few samples contributed for a normal approximation
    low = max(0.0, found.value - margin) if trusted else 0.0
    high = min(1.0, max(found.value + margin, found.interval[1]))
    return Sampled(way, found.value, found.standard_error, low, high, found.samples, found.seed)


def contradictions(bounds: Sequence[CheckedBound], below: dict[str, float], sampled: Sequence[Sampled]) -> list[str]:
    """What cannot all be true at once, one line each."""
    found = []
    for bound in bounds:
        if not 0 <= bound.delta <= 1:
            found.append(f"{bound.accountant}, {bound.direction}: δ = {bound.delta:g} is no probability")
        elif below[bound.direction] > bound.delta:
            found.append(
                f"{bound.accountant}, {bound.direction}: the upper bound {bound.delta:.6g} is below the certified "
                f"lower bound {below[bound.direction]:.6g}"
            )
    for seen in sampled:
        if below[seen.direction] > seen.high:
            found.append(
                f"lower bound, {seen.direction}: {below[seen.direction]:.6g} is above the sampled interval's "
                f"{seen.high:.6g}"
            )
        found += [
            f"{bound.accountant}, {bound.direction}: the upper bound {bound.delta:.6g} is below the sampled interval's "
            f"{seen.low:.6g}"
            for bound in bounds
            if bound.direction == seen.direction and bound.delta < seen.low
        ]
    return found


def _versions() -> dict[str, str]:
    found = {"dpmf": __version__, "python": platform.python_version()}
    for package in ("numpy", "scipy", "numba", "dp-accounting"):
        found[package] = metadata.version(package)
    return found


def _page(v: Verification) -> str:
    """The report: inputs, verdict, each bound with the theorem it rests on, lower bounds, sampling, versions."""
    agree = "No contradiction between any two of the numbers below."
    if v.contradictions:
        verdict = f"**CONTRADICTION**: {len(v.contradictions)} pairs of numbers cannot both be right. Do not publish."
    elif v.certified:
        verdict = f"**Certified**: ({v.epsilon:g}, {v.target_delta:g})-DP. {agree}"
    else:
        verdict = f"**Not certified**: δ({v.epsilon:g}) ≤ {v.delta:.4g} proved, {v.target_delta:g} asked for. {agree}"
    directions = "add and remove" if v.direction == "both" else v.direction
    lines = [
        f"# Verification of {v.mechanism}", "", verdict, "",
        *(f"- {line}" for line in v.contradictions), *([""] if v.contradictions else []),
        "| input | |", "|---|---|",
        f"| strategy | {v.strategy} |",
        f"| batching | balls in bins: {v.epochs} epochs of {v.batches_per_epoch} batches, {v.iterations} iterations |",
        f"| noise multiplier | {v.noise_multiplier!r}{' (calibrated)' if v.calibrated else ''}, clipping norm 1 |",
        f"| target | ε = {v.epsilon:g}, δ = {v.target_delta:g}, {directions} |",
        f"| sensitivity without amplification | {v.sensitivity:.6g} |",
        f"| SHA-256 of the Gram matrix | `{v.gram_digest[:32]}` |",
        "",
    ]  # fmt: skip
    for way in v.lower:
        lines += [f"## δ({v.epsilon:g}), {way}", "", "| from | δ | rests on |", "|---|---:|---|"]
        lines += [
            f"| {b.accountant} (upper bound) | {b.delta:.4e} | {b.rests_on} |"
            for b in sorted(v.bounds, key=lambda b: b.delta)
            if b.direction == way
        ]
        lines.append(f"| lower bound | {v.lower[way]:.4e} | tests of half-spaces, single jumps, Gram domination |")
        lines += [
            f"| Monte Carlo (no guarantee) | {s.estimate:.4e} | {s.samples} samples, seed {s.seed}: "
            f"{s.low:.4e} to {s.high:.4e} |"
            for s in v.sampled
            if s.direction == way
        ]
        lines.append("")
    gap = _gap(v)
    if gap is not None:
        lines += [f"The smallest certified δ is {gap:.3g} times the largest certified lower bound.", ""]
    lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in v.versions.items()) + ".")
    return "\n".join(lines) + "\n"


def _gap(v: Verification) -> float | None:
    largest = max(v.lower.values())
    return v.delta / largest if largest > 0 and math.isfinite(v.delta) else None
