"""What is asked of every accountant about a problem, and whether the answers agree with the truth.

Every question ends in one number: δ claimed. "delta" asks for it at ε; "epsilon" and "calibrate" ask for the ε or σ at
which it is met, and the truth is taken there. "cut short" asks with a budget of time or memory that ends in the middle.
Upper bounds must not be below the truth, lower ones not above it. Who is asked, and how much, is in `plans`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

import dpmf
from dpmf import budget, lower_bounds
from dpmf.accountants import Accountant, Auto
from dpmf.accountants.combined.least import Least
from dpmf.accountants.protocol import DIRECTIONS, PreparedAccountant
from dpmf.accountants.registry import covering
from dpmf.errors import CalibrationError
from soundness.plans import Plan, accountants_for, lower_plan
from soundness.problems import Problem
from soundness.truth import Truth, true_delta


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
        """claim/truth for upper bounds, truth/claim for lower ones.

        None where the truth is not known well, and where a budget cut the search short.
        """
        if self.problem is not None or not self.truth.sharp or self.truth.low < 1e-14 or self.kind == "cut short":
            return None
        middle = math.sqrt(self.truth.low * self.truth.high)
        if self.kind.startswith("lower"):
            return middle / self.claim if self.claim > 0 else math.inf
        return self.claim / middle


# --- questions -----------------------------------------------------------------------------------------------------


@contextmanager
def looks() -> Iterator[None]:
    """A clock that moves on by one with every look at it: a time budget then ends at the same place each time."""
    with mock.patch.object(budget, "_clock", map(float, itertools.count()).__next__):
        yield


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

    def upper(self, accountant: Accountant, plan: Plan, rng: np.random.Generator) -> Iterator[Finding]:
        if isinstance(accountant, Auto) and accountant.time_budget is not None:
            with looks():
                for finding in self._upper(accountant, plan, rng):
                    yield replace(finding, kind="cut short")
        else:
            yield from self._upper(accountant, plan, rng)

    def _upper(self, accountant: Accountant, plan: Plan, rng: np.random.Generator) -> Iterator[Finding]:
        name, epsilons, delta = accountant.name, self.problem.epsilons, self.problem.delta
        try:
            if name == "lattice":  # composed accountants are prepared when they are first asked
                accountant.prepare(self.problem.mechanism.throw)
            prepared = covering(accountant, self.problem.mechanism).prepare(self.problem.mechanism)
        except ValueError as error:
            if name != "lattice":  # which only takes uncorrelated noise
                yield Finding(name, "prepare", "both", math.nan, math.nan, Truth(0, 1, "none"), _said(error))
            return
        if prepared.mechanism is not self.problem.mechanism:  # one throw with a stride is prepared as another mechanism
            prepared = accountant
        for way in DIRECTIONS:
            for epsilon in epsilons[: plan.epsilons]:
                yield self._delta(prepared, epsilon, way, delta if rng.random() < plan.target else None)
            if rng.random() < plan.epsilon:
                yield self._epsilon(prepared, delta, way)
        if rng.random() < plan.calibrate:
            yield from self._calibrate(prepared, max(epsilons[0], 1e-3), delta)
        if rng.random() < plan.profile:
            yield from self._profile(prepared, DIRECTIONS[int(rng.integers(2))])
        if rng.random() < plan.cut_short:
            way = DIRECTIONS[int(rng.integers(2))]
            steps, size = float(np.exp(rng.uniform(0, math.log(300)))), float(np.exp(rng.uniform(0, math.log(1e7))))
            limit = {"time_budget": steps} if rng.random() < 0.6 else {"memory_budget": size}
            yield self._cut_short(accountant, epsilons[0], way, **limit)

    def _delta(
        self, prepared: Accountant | PreparedAccountant, epsilon: float, way: Any, target: float | None
    ) -> Finding:
        def ask() -> float:
            if target is not None and isinstance(prepared, PreparedAccountant):
                place = (self.problem.noise_multiplier, epsilon, way, target)
                rough = (member.rough_delta(*place) for member in Least.of(prepared).bounds())
                return min(prepared.delta(*place).value, *(found.value for found in rough if found), 1.0)
            return self._ask_delta(prepared, epsilon, way)

        claim, problem = guarded(ask)
        return Finding(prepared.name, "delta", way, epsilon, claim, self.truth(epsilon, way), problem)

    def _ask_delta(
        self, accountant: Accountant | PreparedAccountant, epsilon: float, way: str, **limits: float
    ) -> float:
        return dpmf.delta(
            self.problem.mechanism,
            noise_multiplier=self.problem.noise_multiplier,
            epsilon=epsilon,
            accountant=accountant,
            direction=way,
            **limits,
        ).delta

    def _cut_short(self, accountant: Accountant, epsilon: float, way: str, **limits: float) -> Finding:
        """δ by an accountant that prepares itself within a budget: so many looks at the clock, or so many bytes."""
        with looks():
            claim, problem = guarded(lambda: self._ask_delta(accountant, epsilon, way, **limits))
        return Finding(accountant.name, "cut short", way, epsilon, claim, self.truth(epsilon, way), problem)

    def _epsilon(self, prepared: Accountant | PreparedAccountant, delta: float, way: str) -> Finding:
        found, problem = guarded(
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

    def _calibrate(self, prepared: Accountant | PreparedAccountant, epsilon: float, delta: float) -> Iterator[Finding]:
        try:
            found, problem = guarded(
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

    def _profile(self, prepared: Accountant | PreparedAccountant, way: str) -> Iterator[Finding]:
        """On all of the problem's ε, 0 and a few more: accountants have ways of their own for many at once."""
        near = self.problem.epsilons[0]
        epsilons = [0.0, *self.problem.epsilons, near * 0.9]
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

    def lower(self, plan: Plan, rng: np.random.Generator) -> Iterator[Finding]:
        mechanism, sigma, delta = self.problem.mechanism, self.problem.noise_multiplier, self.problem.delta
        for way in DIRECTIONS:
            for epsilon in self.problem.epsilons[: plan.epsilons]:
                claim, problem = guarded(lambda e=epsilon, w=way: lower_bounds.lower_delta(mechanism, sigma, e, w))
                yield Finding("lower", "lower delta", way, epsilon, claim, self.truth(epsilon, way), problem)
        way, epsilon = DIRECTIONS[int(rng.integers(2))], self.problem.epsilons[-1]
        if rng.random() < plan.epsilon:
            found, problem = guarded(lambda: lower_bounds.lower_epsilon(mechanism, sigma, delta, way))
            if problem is None and found > 0:
                at = self.truth(found, way) if found <= 500 else Truth(0.0, 1.0, "none")
                yield Finding("lower", "lower epsilon", way, found, delta, at)
            elif problem is not None:
                yield Finding("lower", "lower epsilon", way, found, math.nan, Truth(0, 1, "none"), problem)
        if rng.random() < plan.calibrate:
            found, problem = guarded(lambda: lower_bounds.lower_noise_multiplier(mechanism, epsilon, delta, way))
            if problem is None and found > 0:
                at = self.truth(epsilon, way, found)
                yield Finding("lower", "lower sigma", way, found, delta, at)
            elif problem is not None:
                yield Finding("lower", "lower sigma", way, found, math.nan, Truth(0, 1, "none"), problem)


def guarded(ask: Callable[[], float]) -> tuple[float, str | None]:
    """The answer, or what went wrong; no exception is expected but that calibration finds nothing."""
    try:
        return float(ask()), None
    except CalibrationError:
        raise
    except Exception as error:
        return math.nan, _said(error)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def check_problem(problem: Problem, seed: int, light: bool = False) -> list[Finding]:
    """Every question about a problem; the same ones each time.

    The light campaign is the one of the tests: what takes long is asked less often.
    """
    index = problem.index
    asker = _Asker(problem, seed)
    findings = [
        finding
        for accountant, plan, rng in accountants_for(problem, seed, light)
        for finding in asker.upper(accountant, plan, rng)
    ]
    below = lower_plan(problem, seed, light)
    if below is not None:
        findings += asker.lower(below, np.random.default_rng([seed, index, 3]))
    return findings


__all__ = ["Finding", "check_problem", "looks"]
