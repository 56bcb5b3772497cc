"""The public functions: validate once, prepare the accountant, combine the directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from dpmf import validation
from dpmf.accountants import lower, resolve
from dpmf.accountants.base import (
    RELATIONS,
    Accountant,
    Direction,
    Evaluation,
    PreparedAccountant,
    directions_of,
    labelled,
)
from dpmf.calibration import calibrate_one_way
from dpmf.errors import CalibrationError
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


def _first_to_meet(
    prepared: PreparedAccountant, sigma: float, epsilon: float, delta: float, one_way: Direction
) -> Evaluation:
    """The bound of the first member that meets the target, the smallest bound where none does."""
    least: Evaluation | None = None
    for member in prepared.members():
        found = labelled(member.delta_for_target(sigma, epsilon, delta, one_way), member, prepared)
        if found.value <= delta:
            return found
        least = found if least is None or found.value < least.value else least
    assert least is not None
    return least


def _details(evaluations: dict[Direction, Evaluation]) -> dict[str, object]:
    return {one_way: {"value": evaluation.value, **evaluation.details} for one_way, evaluation in evaluations.items()}


def delta(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    epsilon: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
) -> PrivacyBound | Estimate:
    """An upper bound on δ(ε) of the mechanism run with a noise multiplier; `with_lower` certifies a lower one too.

    **Formal guarantees.** The accountant bounds each direction from above; for "both" the larger bound is reported. An
    accountant that samples gives an `Estimate` instead, which guarantees nothing.
    """
    directions = _checked(mechanism, direction)
    sigma = _checked_noise(mechanism, noise_multiplier)
    epsilon = validation.non_negative("epsilon", epsilon)
    prepared = _prepared(accountant, mechanism)
    found = {one_way: prepared.delta_one_way(sigma, epsilon, one_way) for one_way in directions}
    binding = _binding(found)
    below = lower.lower_delta(mechanism, sigma, epsilon, direction) if with_lower else None
    answer = (sigma, epsilon, found[binding].value, direction, binding, prepared.name, _details(found), below)
    return PrivacyBound(*answer) if prepared.kind == "bound" else Estimate(*answer, kind=prepared.kind)


def epsilon(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    delta: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    with_lower: bool = False,
) -> PrivacyBound | Estimate:
    """An upper bound on the ε at which the mechanism is (ε, δ)-DP; infinite where none was found.

    `with_lower` adds the largest ε that is certainly not reached.

    **Formal guarantees.** The accountant bounds each direction from above; for "both" the larger bound is reported. An
    accountant that samples gives an `Estimate` instead, which guarantees nothing.
    """
    directions = _checked(mechanism, direction)
    sigma = _checked_noise(mechanism, noise_multiplier)
    delta = validation.probability("delta", delta)
    prepared = _prepared(accountant, mechanism)
    found = {one_way: prepared.epsilon_one_way(sigma, delta, one_way) for one_way in directions}
    binding = _binding(found)
    below = lower.lower_epsilon(mechanism, sigma, delta, direction) if with_lower else None
    answer = (sigma, found[binding].value, delta, direction, binding, prepared.name, _details(found), below)
    return PrivacyBound(*answer) if prepared.kind == "bound" else Estimate(*answer, kind=prepared.kind)


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
) -> PrivacyProfile:
    """Upper bounds on δ(ε) over a grid of ε (by default 21 points from 0 to the ε at which δ ≤ 10⁻⁸).

    **Formal guarantees.** As for `delta`, at every grid point; no interpolation is made.
    """
    directions = _checked(mechanism, direction)
    sigma = _checked_noise(mechanism, noise_multiplier)
    prepared = _prepared(accountant, mechanism)
    if epsilons is None:
        top = max(prepared.epsilon_one_way(sigma, 1e-8, one_way).value for one_way in directions)
        grid = np.linspace(0.0, top if math.isfinite(top) else 100.0, 21)
    else:
        grid = _grid(epsilons)
    by_direction: dict[str, np.ndarray] = {
        one_way: np.asarray(prepared.deltas_one_way(sigma, grid.tolist(), one_way)) for one_way in directions
    }
    deltas = np.max(list(by_direction.values()), axis=0)
    return PrivacyProfile(sigma, grid, deltas, by_direction, direction, prepared.name, prepared.kind)


def calibrate(
    mechanism: Mechanism,
    *,
    target_epsilon: float,
    target_delta: float,
    accountant: AnyAccountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    relative_tolerance: float = 1e-4,
    with_lower: bool = False,
) -> Calibration | CalibrationEstimate:
    """The smallest noise multiplier whose bound meets (ε, δ), to within a relative tolerance, never below it.

    `with_lower` adds the noise multiplier below which no accountant could certify the target.

    Raises:
      CalibrationError: no noise multiplier can meet the target with this accountant and its options.

    **Formal guarantees.** In every direction asked for, the accountant's bound was evaluated at the noise multiplier
    returned and met the target.
    """
    directions = _checked(mechanism, direction)
    epsilon = validation.positive("target_epsilon", target_epsilon)
    delta = validation.probability("target_delta", target_delta)
    tolerance = validation.probability("relative_tolerance", relative_tolerance)
    prepared = _prepared(accountant, mechanism)
    members = prepared.members()
    found: dict[Direction, Evaluation] = {}
    sigma = 0.0
    start = mechanism.sensitivity
    binding = directions[0]
    for one_way in directions:
        if sigma:
            # The σ of the direction before often does for this one too: one evaluation tells.
            known = _first_to_meet(prepared, sigma, epsilon, delta, one_way)
            if known.value <= delta:
                found[one_way] = known
                continue
        sigma, evaluation, member = calibrate_one_way(members, epsilon, delta, one_way, sigma or start, tolerance)
        found[one_way] = labelled(evaluation, member, prepared)
        binding = one_way
    # Directions before the binding one were evaluated at a smaller σ.
    for one_way in directions[: directions.index(binding)]:
        found[one_way] = _first_to_meet(prepared, sigma, epsilon, delta, one_way)
    worst = _binding(found)
    if found[worst].value > delta:
        raise CalibrationError(f"the bound of {prepared.name} is not monotone around noise multiplier {sigma:g}")
    below = lower.lower_noise_multiplier(mechanism, epsilon, delta, direction) if with_lower else None
    answer = (sigma, epsilon, found[worst].value, direction, binding, prepared.name, _details(found), below)
    if prepared.kind == "bound":
        return Calibration(*answer, target_epsilon=epsilon, target_delta=delta)
    return CalibrationEstimate(*answer, kind=prepared.kind, target_epsilon=epsilon, target_delta=delta)
