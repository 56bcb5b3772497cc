"""The public functions: validate once, prepare the accountant, combine the directions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from dpmf import budget, validation
from dpmf import lower_bounds as lower
from dpmf.accountants.protocol import (
    RELATIONS,
    Accountant,
    Direction,
    Evaluation,
    PreparedAccountant,
    directions_of,
)
from dpmf.accountants.registry import resolve
from dpmf.errors import CalibrationError
from dpmf.in_time import InTime
from dpmf.mechanism import Mechanism
from dpmf.results import Calibration, CalibrationEstimate, Estimate, PrivacyBound, PrivacyProfile

DEFAULT_ACCOUNTANT = "best"

# A name, an accountant with options, or one prepared for this mechanism already (to share its work between calls).
AnyAccountant: TypeAlias = str | Accountant | PreparedAccountant


def _checked(mechanism: Mechanism, direction: str) -> tuple[Direction, ...]:
    if not isinstance(mechanism, Mechanism):
        raise validation.wrong("mechanism", "a dpmf.Mechanism", mechanism)
    return directions_of(validation.choice("direction", direction, RELATIONS))


def _prepared(accountant: AnyAccountant, mechanism: Mechanism) -> PreparedAccountant:
    if not isinstance(accountant, PreparedAccountant):
        return resolve(accountant).prepare(mechanism)
    if accountant.mechanism is not mechanism:
        raise ValueError(f"accountant must be prepared for this mechanism, got one for {accountant.mechanism.name}")
    return accountant


def _checked_noise(mechanism: Mechanism, noise_multiplier: float) -> float:
    """σ > 0, and within what double arithmetic can square and divide by."""
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    scale = mechanism.sensitivity
    if not 1e-70 < sigma / scale < 1e70:
        raise validation.wrong("noise_multiplier", f"between {1e-70 * scale:.3g} and {1e70 * scale:.3g}", sigma)
    return sigma


def _binding(evaluations: dict[Direction, Evaluation]) -> Direction:
    return max(evaluations, key=lambda one_way: evaluations[one_way].value)


_LOWER_SHARE = 0.2  # of a time budget


def _shares(time_budget: float | None, with_lower: bool) -> tuple[float | None, float | None]:
    """Seconds for the upper and for the lower bound."""
    validation.flag("with_lower", with_lower)
    if time_budget is None:
        return None, None
    seconds = validation.positive("time_budget", time_budget)
    share = _LOWER_SHARE if with_lower else 0.0
    return (1 - share) * seconds, share * seconds


@contextmanager
def _within(
    seconds: float | None, size: float | None, accountant: AnyAccountant, mechanism: Mechanism, direction: str
) -> Iterator[InTime]:
    """The accountant, asked within a budget of seconds and bytes."""
    name = accountant.name if isinstance(accountant, PreparedAccountant) else resolve(accountant).name
    size = None if size is None else validation.positive("memory_budget", size)
    with budget.time_limit(seconds) as deadline, budget.memory_limit(size) as memory:
        prepare = lambda: _prepared(accountant, mechanism).for_relation(direction)  # noqa: E731 - it belongs here
        yield InTime(name, prepare, mechanism, deadline, memory)


def delta(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    epsilon: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
) -> PrivacyBound | Estimate:
    """An upper bound on δ(ε) of the mechanism run with a noise multiplier; `with_lower` certifies a lower one too.

    After `time_budget` seconds, or where arrays of more than `memory_budget` bytes would be needed, the best bound
    reached so far is returned, and `details` say so ("budget_exhausted").

    **Formal guarantees.** The accountant bounds each direction from above; for "both" the larger bound is reported. An
    accountant that samples gives an `Estimate` instead, which guarantees nothing.
    """
    directions = _checked(mechanism, direction)
    sigma = _checked_noise(mechanism, noise_multiplier)
    epsilon = validation.non_negative("epsilon", epsilon)
    above_seconds, below_seconds = _shares(time_budget, with_lower)
    with _within(above_seconds, memory_budget, accountant, mechanism, direction) as source:
        found = {one_way: source.delta(sigma, epsilon, one_way) for one_way in directions}
    binding = _binding(found)
    below = None
    if with_lower:
        with budget.time_limit(below_seconds), budget.memory_limit(memory_budget):
            below = lower.lower_delta(mechanism, sigma, epsilon, direction)
    answer = (sigma, epsilon, found[binding].value, direction, binding, source.name, source.details(found), below)
    return PrivacyBound(*answer) if source.kind == "bound" else Estimate(*answer, kind=source.kind)


def epsilon(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    delta: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
) -> PrivacyBound | Estimate:
    """An upper bound on the ε at which the mechanism is (ε, δ)-DP; infinite where none was found.

    `with_lower` adds the largest ε that is certainly not reached. After `time_budget` seconds, or where arrays of more
    than `memory_budget` bytes would be needed, the best bound reached so far is returned, and `details` say so
    ("budget_exhausted").

    **Formal guarantees.** The accountant bounds each direction from above; for "both" the larger bound is reported. An
    accountant that samples gives an `Estimate` instead, which guarantees nothing.
    """
    directions = _checked(mechanism, direction)
    sigma = _checked_noise(mechanism, noise_multiplier)
    delta = validation.probability("delta", delta)
    above_seconds, below_seconds = _shares(time_budget, with_lower)
    with _within(above_seconds, memory_budget, accountant, mechanism, direction) as source:
        found = {one_way: source.epsilon(sigma, delta, one_way) for one_way in directions}
    binding = _binding(found)
    below = None
    if with_lower:
        with budget.time_limit(below_seconds), budget.memory_limit(memory_budget):
            below = lower.lower_epsilon(mechanism, sigma, delta, direction)
    answer = (sigma, found[binding].value, delta, direction, binding, source.name, source.details(found), below)
    return PrivacyBound(*answer) if source.kind == "bound" else Estimate(*answer, kind=source.kind)


def _grid(epsilons: object) -> np.ndarray:
    try:
        values = [validation.non_negative("epsilons", e) for e in np.ravel(np.asarray(epsilons))]
    except ValueError as error:
        if str(error).startswith("epsilons"):
            raise
        raise validation.wrong("epsilons", "a sequence of numbers", epsilons) from None
    if not values:
        raise validation.wrong("epsilons", "at least one number", epsilons)
    return np.array(values)


def profile(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    epsilons: Sequence[float] | np.ndarray | None = None,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
) -> PrivacyProfile:
    """Upper bounds on δ(ε) over a grid of ε (by default 21 points from 0 to the ε at which δ ≤ 10⁻⁸).

    `with_lower` adds certified lower bounds at the same points. Points that `time_budget` seconds or `memory_budget`
    bytes do not reach get closed forms, and `budget_exhausted` is set.

    **Formal guarantees.** As for `delta`, at every grid point; no interpolation is made.
    """
    directions = _checked(mechanism, direction)
    sigma = _checked_noise(mechanism, noise_multiplier)
    grid = None if epsilons is None else _grid(epsilons)
    above_seconds, below_seconds = _shares(time_budget, with_lower)
    with _within(above_seconds, memory_budget, accountant, mechanism, direction) as source:
        if grid is None:
            top = max(source.epsilon(sigma, 1e-8, one_way).value for one_way in directions)
            grid = np.linspace(0.0, top if math.isfinite(top) else 100.0, 21)
        by_direction: dict[str, np.ndarray] = {
            one_way: np.asarray(source.deltas(sigma, grid.tolist(), one_way)) for one_way in directions
        }
    deltas = np.max(list(by_direction.values()), axis=0)
    below = None
    if with_lower:
        with budget.time_limit(below_seconds), budget.memory_limit(memory_budget):
            below = np.array([lower.lower_delta(mechanism, sigma, float(e), direction) for e in grid])
    return PrivacyProfile(sigma, grid, deltas, by_direction, direction, source.name, source.kind, below, source.late)


def calibrate(
    mechanism: Mechanism,
    *,
    target_epsilon: float,
    target_delta: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    relative_tolerance: float = 1e-4,
    with_lower: bool = False,
    time_budget: float | None = None,
    memory_budget: float | None = None,
) -> Calibration | CalibrationEstimate:
    """The smallest noise multiplier whose bound meets (ε, δ), to within a relative tolerance, never below it.

    `with_lower` adds the noise multiplier below which no accountant could certify the target. After `time_budget`
    seconds, or where arrays of more than `memory_budget` bytes would be needed, the smallest noise multiplier found so
    far is returned, and `details` say so ("budget_exhausted").

    Raises:
      CalibrationError: no noise multiplier can meet the target with this accountant and its options.

    **Formal guarantees.** In every direction asked for, the accountant's bound was evaluated at the noise multiplier
    returned and met the target.
    """
    directions = _checked(mechanism, direction)
    epsilon = validation.positive("target_epsilon", target_epsilon)
    delta = validation.probability("target_delta", target_delta)
    tolerance = validation.probability("relative_tolerance", relative_tolerance)
    above_seconds, below_seconds = _shares(time_budget, with_lower)
    found: dict[Direction, Evaluation] = {}
    sigma = 0.0
    start = mechanism.sensitivity
    binding = directions[0]
    with _within(above_seconds, memory_budget, accountant, mechanism, direction) as source:
        for one_way in directions:
            if sigma:
                # The σ of the direction before often does for this one too: one evaluation tells.
                known = source.first_to_meet(sigma, epsilon, delta, one_way)
                if known.value <= delta:
                    found[one_way] = known
                    continue
            sigma, found[one_way] = source.least_noise(epsilon, delta, one_way, sigma or start, tolerance)
            binding = one_way
        # Directions before the binding one were evaluated at a smaller σ. That bound holds at this one too (more noise,
        # a smaller G/σ²), and stays where there is no time for another.
        for one_way in directions[: directions.index(binding)]:
            if not source.late:
                found[one_way] = source.first_to_meet(sigma, epsilon, delta, one_way)
    worst = _binding(found)
    if found[worst].value > delta:
        raise CalibrationError(f"the bound of {source.name} is not monotone around noise multiplier {sigma:g}")
    below = None
    if with_lower:
        with budget.time_limit(below_seconds), budget.memory_limit(memory_budget):
            below = lower.lower_noise_multiplier(mechanism, epsilon, delta, direction)
    answer = (sigma, epsilon, found[worst].value, direction, binding, source.name, source.details(found), below)
    if source.kind == "bound":
        return Calibration(*answer, target_epsilon=epsilon, target_delta=delta)
    return CalibrationEstimate(*answer, kind=source.kind, target_epsilon=epsilon, target_delta=delta)
