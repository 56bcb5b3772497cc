"""What is asked of every accountant about a problem, and whether the answers agree with the truth.

Every question ends in one number: δ claimed. "delta" asks for it at ε; "epsilon" and "calibrate" ask for the ε or σ at
which it is met, and the truth is taken there. Upper bounds must not be below the truth, lower ones not above it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import dpmf
from dpmf.accountants import (
    ACCOUNTANTS,
    DIRECTIONS,
    Accountant,
    Auto,
    Best,
    Cascade,
    Chain,
    Conditional,
    Lattice,
    PreparedAccountant,
)
from dpmf.accountants import Renyi as RenyiAccountant
from dpmf.accountants import lower as lower_bounds
from dpmf.errors import CalibrationError
from soundness.problems import Problem, draw_problem
from soundness.truth import Truth, true_delta

# Estimates, and bounds that others prove.
_LOWER = 0.08  # the part of the problems that are asked for a lower bound, which costs most
# How often the ε at δ is asked for as well.
_EPSILONS = {"gaussian": 1.0, "renyi": 1.0, "conditional": 0.15}
NOT_OURS = ("monte-carlo", "random-allocation", "pld-accounting")


@dataclass(frozen=True)
class Finding:
    """One answer beside the truth. `at` is the ε (or σ) that the claim is about, `problem` an unexpected exception."""

    accountant: str
    kind: str
    direction: str
    at: float
    claim: float
    truth: Truth
    problem: str | None = None

    @property
    def sound(self) -> bool:
        if self.problem is not None or not 0 <= self.claim <= 1:
            return False
        return self.claim <= self.truth.high if self.kind.startswith("lower") else self.claim >= self.truth.low

    @property
    def looseness(self) -> float | None:
        """claim/truth for upper bounds, truth/claim for lower ones; None where the truth is not known well."""
        if self.problem is not None or not self.truth.sharp or self.truth.low < 1e-14:
            return None
        middle = math.sqrt(self.truth.low * self.truth.high)
        if self.kind.startswith("lower"):
            return middle / self.claim if self.claim > 0 else math.inf
        return self.claim / middle


# --- options -------------------------------------------------------------------------------------------------------


def _renyi(rng: np.random.Generator) -> RenyiAccountant:
    return RenyiAccountant(
        max_order=None if rng.random() < 0.6 else int(rng.integers(2, 64)),
        work_budget=float(rng.choice([1e4, 1e5, 5e5])),
        bandwidth=None if rng.random() < 0.6 else int(rng.integers(1, 4)),
    )


def _conditional(rng: np.random.Generator) -> Conditional:
    return Conditional(
        family=str(rng.choice(["variational", "variational", "am-gm"])),
        option=int(rng.integers(1, 4)),
        temperatures=(math.inf, 0.1, 1.0, 10.0) if rng.random() < 0.7 else (float(rng.choice([0.01, 0.5, 30.0])),),
        bad_event_share=float(rng.choice([0.5, 0.5, 0.01, 0.9])),
        optimise_bad_event=bool(rng.random() < 0.1),
    )


def _chain(rng: np.random.Generator) -> Chain:
    return Chain(
        discretisation_loss=float(rng.choice([0.005, 0.02, 0.1])), max_frequencies=int(rng.choice([64, 256, 2048]))
    )


def _lattice(rng: np.random.Generator) -> Lattice:
    return Lattice(
        discretisation_loss=float(rng.choice([0.0005, 0.005, 0.1])), max_points=int(rng.choice([64, 2**10, 2**17]))
    )


def _cascade(rng: np.random.Generator) -> Cascade:
    return Cascade(discretisation_loss=float(rng.choice([0.002, 0.02, 0.2])))


def _best(rng: np.random.Generator) -> Best:
    return Best(renyi=RenyiAccountant(work_budget=1e5))


def _auto(rng: np.random.Generator) -> Auto:
    return Auto(tolerance=float(rng.choice([0.02, 0.5])), renyi=RenyiAccountant(work_budget=1e5))


# Drawers of options; an accountant that is not here is asked with its defaults.
OPTIONS: dict[str, Callable[[np.random.Generator], Accountant]] = {
    "renyi": _renyi, "conditional": _conditional, "chain": _chain, "lattice": _lattice, "best": _best,
    "cascade": _cascade, "auto": _auto,
}  # fmt: skip


def _share(name: str, bins: int) -> float:
    """The part of the problems with so many bins that this accountant is asked about: what takes longer, less often."""
    if name in ("gaussian", "renyi", "lattice"):
        return 1.0
    if name == "conditional":
        return 0.7 if bins <= 4 else 0.4
    if name == "cascade":
        return 0.3
    if bins > 4:
        return 0.01 if name == "chain" else 0.002 if bins <= 10 else 0.0
    return {"chain": {1: 0.2, 2: 0.3, 3: 0.15, 4: 0.05}[bins], "best": 0.02, "auto": 0.01}.get(name, 0.05)


def accountants_for(problem: Problem, seed: int) -> Iterator[tuple[Accountant, np.random.Generator]]:
    """The accountants asked about a problem, with options drawn for it, and what each draws further choices from.

    Each has a stream of its own, so that a new accountant does not change what the others are asked.
    """
    bins = problem.mechanism.allocation.batches_per_epoch
    for name, cls in ACCOUNTANTS.items():
        rng = np.random.default_rng([seed, problem.index, 1, zlib.crc32(name.encode())])
        if name in NOT_OURS or rng.random() >= _share(name, bins):
            continue
        for _ in range(2 if name == "renyi" else 1):
            accountant = OPTIONS[name](rng) if name in OPTIONS else cls()
            if isinstance(accountant, Chain) and bins > 4:  # else minutes
                accountant = Chain(discretisation_loss=0.2, max_frequencies=min(256, accountant.max_frequencies))
            yield accountant, rng


# --- questions -----------------------------------------------------------------------------------------------------


class _Asker:
    """The questions about one problem; truths are looked up once for all accountants."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self._rng = np.random.default_rng([seed, problem.index, 2])
        self._known: dict[tuple[float, float, str], Truth] = {}

    def truth(self, epsilon: float, direction: str, sigma: float | None = None) -> Truth:
        scale = 1.0 if sigma is None else self.problem.noise_multiplier / sigma
        key = (epsilon, scale, direction)
        if key not in self._known:
            self._known[key] = true_delta(self.problem.s * scale * scale, epsilon, direction, self._rng)
        return self._known[key]

    def upper(self, accountant: Accountant, rng: np.random.Generator) -> Iterator[Finding]:
        mechanism, delta = self.problem.mechanism, self.problem.delta
        name = accountant.name
        try:
            prepared = accountant.prepare(mechanism)
        except ValueError as error:
            if name != "lattice":  # which only takes uncorrelated noise
                yield Finding(name, "prepare", "both", math.nan, math.nan, Truth(0, 1, "none"), _said(error))
            return
        cheap = name in ("gaussian", "renyi")
        ways = DIRECTIONS if cheap or name == "conditional" else (DIRECTIONS[int(rng.integers(2))],)
        for way in ways:
            for epsilon in self.problem.epsilons if cheap else self.problem.epsilons[:1]:
                # The bound calibration asks for is one composition, the other several.
                for_target = name == "conditional" and rng.random() < 0.95
                yield self._delta(prepared, epsilon, way, delta if for_target else None)
            if rng.random() < _EPSILONS.get(name, 0.2):
                yield self._epsilon(prepared, delta, way)
        if rng.random() < (0.05 if cheap else 0.004):
            yield from self._calibrate(prepared, self.problem.epsilons[0], delta)
        if rng.random() < 0.03 and name in ("gaussian", "renyi", "conditional"):
            yield from self._profile(prepared, DIRECTIONS[int(rng.integers(2))])

    def _delta(self, prepared: PreparedAccountant, epsilon: float, way: Any, target: float | None) -> Finding:
        def ask() -> float:
            if target is not None:
                return prepared.delta_for_target(self.problem.noise_multiplier, epsilon, target, way).value
            return dpmf.delta(
                self.problem.mechanism,
                noise_multiplier=self.problem.noise_multiplier,
                epsilon=epsilon,
                accountant=prepared,
                direction=way,
            ).delta

        claim, problem = _guarded(ask)
        return Finding(prepared.name, "delta", way, epsilon, claim, self.truth(epsilon, way), problem)

    def _epsilon(self, prepared: PreparedAccountant, delta: float, way: str) -> Finding:
        found, problem = _guarded(
            lambda: (
                dpmf.epsilon(
                    self.problem.mechanism,
                    noise_multiplier=self.problem.noise_multiplier,
                    delta=delta,
                    accountant=prepared,
                    direction=way,
                ).epsilon
            )
        )
        if problem is None and not found >= 0:
            problem = f"epsilon is {found}"
        at = self.truth(found, way) if problem is None and found <= 500 else Truth(0.0, 1.0, "none")
        return Finding(prepared.name, "epsilon", way, found, delta, at, problem)

    def _calibrate(self, prepared: PreparedAccountant, epsilon: float, delta: float) -> Iterator[Finding]:
        try:
            found, problem = _guarded(
                lambda: (
                    dpmf.calibrate(
                        self.problem.mechanism,
                        target_epsilon=epsilon,
                        target_delta=delta,
                        accountant=prepared,
                        relative_tolerance=1e-3,
                    ).noise_multiplier
                )
            )
        except CalibrationError:
            return
        for way in DIRECTIONS:
            at = self.truth(epsilon, way, found) if problem is None else Truth(0.0, 1.0, "none")
            yield Finding(prepared.name, "calibrate", way, found, delta, at, problem)

    def _profile(self, prepared: PreparedAccountant, way: str) -> Iterator[Finding]:
        epsilons = [self.problem.epsilons[0] * f for f in (0.5, 1.0, 1.5)]
        try:
            found = dpmf.profile(
                self.problem.mechanism,
                noise_multiplier=self.problem.noise_multiplier,
                epsilons=epsilons,
                accountant=prepared,
                direction=way,
            ).deltas
        except Exception as error:
            yield Finding(prepared.name, "profile", way, math.nan, math.nan, Truth(0, 1, "none"), _said(error))
            return
        for epsilon, claim in zip(epsilons, found, strict=True):
            yield Finding(prepared.name, "profile", way, epsilon, float(claim), self.truth(epsilon, way))

    def lower(self, rng: np.random.Generator) -> Iterator[Finding]:
        mechanism, sigma, delta = self.problem.mechanism, self.problem.noise_multiplier, self.problem.delta
        if rng.random() >= _LOWER:
            return
        way, epsilon = DIRECTIONS[int(rng.integers(2))], self.problem.epsilons[-1]
        claim, problem = _guarded(lambda: lower_bounds.lower_delta(mechanism, sigma, epsilon, way))
        yield Finding("lower", "lower delta", way, epsilon, claim, self.truth(epsilon, way), problem)
        if rng.random() < 0.1:
            found, problem = _guarded(lambda: lower_bounds.lower_epsilon(mechanism, sigma, delta, way))
            if problem is None and found > 0:
                at = self.truth(found, way) if found <= 500 else Truth(0.0, 1.0, "none")
                yield Finding("lower", "lower epsilon", way, found, delta, at)
            elif problem is not None:
                yield Finding("lower", "lower epsilon", way, found, math.nan, Truth(0, 1, "none"), problem)
        if rng.random() < 0.05:
            found, problem = _guarded(lambda: lower_bounds.lower_noise_multiplier(mechanism, epsilon, delta, way))
            if problem is None and found > 0:
                at = self.truth(epsilon, way, found)
                yield Finding("lower", "lower sigma", way, found, delta, at)
            elif problem is not None:
                yield Finding("lower", "lower sigma", way, found, math.nan, Truth(0, 1, "none"), problem)


def _guarded(ask: Callable[[], float]) -> tuple[float, str | None]:
    """The answer, or what went wrong; no exception is expected but that calibration finds nothing."""
    try:
        return float(ask()), None
    except CalibrationError:
        raise
    except Exception as error:
        return math.nan, _said(error)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def check_problem(seed: int, index: int) -> tuple[Problem, list[Finding]]:
    """Every question about the problem of this index; the same ones each time."""
    problem = draw_problem(seed, index)
    asker = _Asker(problem, seed)
    findings = [f for accountant, rng in accountants_for(problem, seed) for f in asker.upper(accountant, rng)]
    return problem, [*findings, *asker.lower(np.random.default_rng([seed, index, 3]))]


__all__ = ["NOT_OURS", "OPTIONS", "Finding", "accountants_for", "check_problem"]
