"""A check of one mechanism by several accountants, the certified lower bound and Monte Carlo: do they agree?

They share the Gram matrix and little else, so an error in one of them shows as a contradiction. `dpmf verify` prints
the result as a page to attach to a paper.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np

from dpmf import api, attacks, paper, progress, validation
from dpmf import lower_bounds as lower
from dpmf._version import __version__
from dpmf.accountants.monte_carlo import MonteCarlo
from dpmf.accountants.protocol import Accountant, Direction, directions_of
from dpmf.accountants.registry import covering, least_of, resolve, suitable
from dpmf.batching import Poisson
from dpmf.errors import ArgumentError
from dpmf.formatting import given, upper
from dpmf.formatting import lower as rounded_down
from dpmf.mechanism import Mechanism
from dpmf.run import Run, asked_about, only_mechanism

_STANDARD_ERRORS = 5.0


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
    """Monte Carlo in one direction: the estimate, and an interval of five standard errors around it.

    If too few samples contribute for a normal approximation, the interval is wider.
    """

    direction: str
    estimate: float
    standard_error: float
    low: float
    high: float
    samples: int
    seed: int


@dataclass(frozen=True)
class Verification:
    """The bounds of several accountants on one mechanism, and the contradictions between them.

    Attributes:
      relation: how two data sets may differ, in words.
      run: how records get into batches, and what is done with them, in sentences.
      bounds: upper bounds on δ(ε), one for each accountant and direction.
      lower: certified lower bounds on δ(ε), by direction.
      sampled: Monte Carlo estimates of δ(ε), one for each direction.
      contradictions: one sentence for each; empty if all numbers agree.
      delta: the smallest upper bound that covers every direction asked for.
      certified: whether `delta` is at most the target δ.
      tradeoff: what any attack can achieve, where it was asked for.
    """

    mechanism: str
    strategy: str
    batching: str
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
    relation: str
    run: str
    bounds: tuple[CheckedBound, ...]
    lower: dict[str, float]
    sampled: tuple[Sampled, ...]
    contradictions: tuple[str, ...]
    delta: float
    certified: bool
    versions: dict[str, str]
    tradeoff: attacks.TradeOff | None = None

    @property
    def consistent(self) -> bool:
        """Whether no two of the numbers contradict each other."""
        return not self.contradictions

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        curve = None if self.tradeoff is None else self.tradeoff.to_dict()
        return asdict(replace(self, tradeoff=None)) | {"consistent": self.consistent, "tradeoff": curve}

    def to_markdown(self) -> str:
        """Return the page that `dpmf verify` prints; its numbers are rounded to the safe side."""
        return _page(self)


def verify(
    mechanism: Mechanism | Run,
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float | None = None,
    direction: str = "both",
    accountants: Sequence[str | Accountant] | None = None,
    samples: int = 200_000,
    seed: int = 0,
    tradeoff: bool = False,
) -> Verification:
    """Ask several accountants for δ(ε) at one noise multiplier, and compare their answers.

    Args:
      mechanism: what is checked: a mechanism, or a `Run`, whose cut of batches is counted in the upper bounds.
      epsilon: the ε of the guarantee.
      delta: the δ of the guarantee.
      noise_multiplier: σ for clipping norm 1 and the strategy as given; it is calibrated if it is None. Runs have one.
      direction: the neighbouring relation: "both", "remove" or "add".
      accountants: two or more deterministic accountants; by default all of dpmf that suit the mechanism.
      samples: the number of Monte Carlo samples for each direction.
      seed: the seed of the samples.
      tradeoff: also report what any attack can achieve (`dpmf.tradeoff`), by the least of the same bounds.

    Returns:
      All bounds, estimates and contradictions.

    **Formal guarantees.** Each bound is its accountant's. A contradiction between an upper and the lower bound proves
    that one of them is wrong. A contradiction with Monte Carlo is a distance of over five standard errors, which is
    rarely chance. The absence of contradictions proves nothing: this is a test, not a theorem.
    """
    one_ways = directions_of(validation.choice("direction", direction, ("both", "remove", "add")))
    epsilon = validation.non_negative("epsilon", epsilon)
    target = validation.probability("delta", delta)
    sampler = MonteCarlo(samples=samples, seed=seed)
    uncut = mechanism.mechanism if isinstance(mechanism, Run) else only_mechanism(mechanism, " or a dpmf.Run")
    asked = [resolve(a) for a in accountants or ()] or suitable(uncut, "bound") or [resolve(api.DEFAULT_ACCOUNTANT)]
    if len({a.name for a in asked}) < 2 and not isinstance(uncut.batching, Poisson):
        raise ArgumentError("accountants", f"must be at least two different ones, got {[a.name for a in asked]}")
    prepared = [(a, covering(a, uncut).prepare(uncut)) for a in asked]
    for _, one in prepared:
        if one.kind != "bound":
            raise ArgumentError("accountants", f"must be deterministic, {one.name} is not")
    calibrated = noise_multiplier is None and uncut is mechanism
    if calibrated:
        progress.say("calibrating")
        noise_multiplier = api.calibrate(
            uncut, target_epsilon=epsilon, target_delta=target, direction=direction
        ).noise_multiplier
    sigma = asked_about(mechanism, noise_multiplier)[1]
    run = paper.as_run(mechanism, sigma)
    bounds: list[CheckedBound] = []
    below: dict[str, float] = {}
    sampled: list[Sampled] = []
    for way in one_ways:
        for accountant, one in prepared:
            progress.say(f"{one.name}, {way}")
            began = time.perf_counter()
            value = api.delta(
                mechanism, noise_multiplier=noise_multiplier, epsilon=epsilon, accountant=one, direction=way
            ).delta
            bounds.append(
                CheckedBound(
                    accountant=one.name, direction=way, delta=value, rests_on=accountant.rests_on,
                    seconds=time.perf_counter() - began,
                )
            )  # fmt: skip
        progress.say(f"lower bound, {way}")
        below[way] = lower.lower_delta(uncut, sigma, epsilon, way)
        if uncut.batching.fixed:  # the losses of several throws are not sampled
            progress.say(f"sampling, {way}")
            sampled.append(_sample(sampler.prepare(uncut), sigma, epsilon, way))
    least = max(min(b.delta for b in bounds if b.direction == way) for way in one_ways)
    batching = uncut.batching
    return Verification(
        mechanism=uncut.name,
        strategy=uncut.strategy.name,
        batching="balls in bins" if batching.fixed else batching.kind,
        epochs=batching.epochs,
        batches_per_epoch=batching.batches_per_epoch,
        iterations=batching.iterations,
        gram_digest=_digest(uncut),
        sensitivity=uncut.sensitivity,
        noise_multiplier=sigma,
        calibrated=calibrated,
        epsilon=epsilon,
        target_delta=target,
        direction=direction,
        relation=paper.relation(run, direction),
        run=paper.described(run),
        bounds=tuple(bounds),
        lower=below,
        sampled=tuple(sampled),
        contradictions=tuple(contradictions(bounds, below, sampled)),
        delta=least,
        certified=least <= target,
        versions=_versions(),
        tradeoff=_tradeoff(mechanism, noise_multiplier, direction, asked) if tradeoff else None,
    )


def _tradeoff(
    mechanism: Mechanism | Run, sigma: float | None, direction: str, accountants: Sequence[Accountant]
) -> attacks.TradeOff:
    progress.say("what any attack can achieve")
    chosen = least_of(accountants)
    fixed = (mechanism.mechanism if isinstance(mechanism, Run) else mechanism).batching.fixed
    with_renyi = fixed and any(accountant.name == "renyi" for accountant in accountants)
    return attacks.tradeoff(mechanism, noise_multiplier=sigma, direction=direction, accountant=chosen, renyi=with_renyi)


def _digest(mechanism: Mechanism) -> str:
    """The SHA-256 of the Gram matrix of one throw; of Poisson samples, which have none, of the sensitivity."""
    poisson = isinstance(mechanism.batching, Poisson)
    described = np.array([mechanism.sensitivity]) if poisson else mechanism.throw.gram
    return hashlib.sha256(np.ascontiguousarray(described, dtype="<f8").tobytes()).hexdigest()


def _sample(sampling: Any, sigma: float, epsilon: float, way: Direction) -> Sampled:
    found = sampling.estimate_delta(sigma, epsilon, way)
    margin = _STANDARD_ERRORS * found.standard_error
    trusted = found.interval[0] > 0  # else too few samples contributed for a normal approximation
    low = max(0.0, found.value - margin) if trusted else 0.0
    high = min(1.0, max(found.value + margin, found.interval[1]))
    return Sampled(
        direction=way, estimate=found.value, standard_error=found.standard_error, low=low, high=high,
        samples=found.samples, seed=found.seed,
    )  # fmt: skip


def contradictions(bounds: Sequence[CheckedBound], below: dict[str, float], sampled: Sequence[Sampled]) -> list[str]:
    """Return one sentence for each pair of numbers that cannot both be right; numbers are printed in full."""
    found = []
    for bound in bounds:
        least, who = below[bound.direction], f"{bound.accountant}, {bound.direction}"
        if not 0 <= bound.delta <= 1:
            found.append(f"{who}: δ = {given(bound.delta)} is no probability")
        elif least > bound.delta:
            below_it = f"is below the certified lower bound {given(least)}"
            found.append(f"{who}: the upper bound {given(bound.delta)} {below_it}")
    for seen in sampled:
        least, interval = below[seen.direction], f"the sampled interval {given(seen.low)} to {given(seen.high)}"
        if least > seen.high:
            found.append(f"lower bound, {seen.direction}: {given(least)} is above {interval}")
        for bound in bounds:
            if bound.direction == seen.direction and bound.delta < seen.low:
                who = f"{bound.accountant}, {bound.direction}"
                found.append(f"{who}: the upper bound {given(bound.delta)} is below {interval}")
    return found


def _versions() -> dict[str, str]:
    found = {"dpmf": __version__, "python": platform.python_version()}
    for package in ("numpy", "scipy", "numba", "dp-accounting"):
        found[package] = metadata.version(package)
    return found


def _page(v: Verification) -> str:
    """Return the report: verdict, inputs, each bound with the theorem it rests on, lower bounds, samples, versions."""
    epsilon, target = given(v.epsilon), given(v.target_delta)
    agree = "No two of the numbers below contradict each other."
    if v.contradictions:
        verdict = f"**CONTRADICTION**: {len(v.contradictions)} pairs of numbers cannot both be right. Do not publish."
    elif v.certified:
        verdict = f"**Certified**: ({epsilon}, {target})-DP where {v.relation}. {agree}"
    else:
        verdict = f"**Not certified**: δ({epsilon}) ≤ {upper(v.delta, 4)} is proved, {target} was asked for. {agree}"
    lines = [
        f"# Verification of {v.mechanism}", "", verdict, "", v.run, "",
        *(f"- {line}" for line in v.contradictions), *([""] if v.contradictions else []),
        "| input | |", "|---|---|",
        f"| strategy | {v.strategy} |",
        f"| batching | {v.batching}: {v.epochs} epoch{'s' * (v.epochs > 1)} of {v.batches_per_epoch} batches, "
        f"{v.iterations} iterations |",
        f"| noise multiplier | {v.noise_multiplier!r}{' (calibrated)' if v.calibrated else ''}, clipping norm 1 |",
        f"| target | ε = {epsilon}, δ = {target} |",
        f"| sensitivity without amplification | {upper(v.sensitivity)} |",
        f"| SHA-256 of the Gram matrix | `{v.gram_digest[:32]}` |",
        "",
    ]  # fmt: skip
    for way in v.lower:
        lines += [f"## δ({epsilon}), {way}", "", "| from | δ | rests on |", "|---|---:|---|"]
        lines += [
            f"| {b.accountant} (upper bound) | {upper(b.delta, 5)} | {b.rests_on} |"
            for b in sorted(v.bounds, key=lambda b: b.delta)
            if b.direction == way
        ]
        lines.append(
            f"| lower bound | {rounded_down(v.lower[way], 5)} | tests of half-spaces, single jumps, Gram domination |"
        )
        lines += [
            f"| Monte Carlo (no guarantee) | {s.estimate:.5g} | {s.samples} samples, seed {s.seed}: "
            f"{rounded_down(s.low, 5)} to {upper(s.high, 5)} |"
            for s in v.sampled
            if s.direction == way
        ]
        lines.append("")
    if v.tradeoff is not None:
        lines += v.tradeoff.markdown()
    gap = _gap(v)
    if gap is not None:
        lines += [f"The smallest certified δ is {upper(gap, 3)} times the largest certified lower bound.", ""]
    lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in v.versions.items()) + ".")
    return "\n".join(lines) + "\n"


def _gap(v: Verification) -> float | None:
    largest = max(v.lower.values())
    return v.delta / largest if largest > 0 and math.isfinite(v.delta) else None
