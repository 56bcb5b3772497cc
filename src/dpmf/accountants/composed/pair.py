"""The discrete dominating pair of one run of a mechanism, from the bounds of any accountant: what compositions need."""

from __future__ import annotations

from collections.abc import Sequence

from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.least import Least, asked_where
from dpmf.accountants.protocol import DIRECTIONS, Direction, Evaluation, PreparedAccountant
from dpmf.errors import ArgumentError
from dpmf.loss.dominating_pair import DominatingPair
from dpmf.loss.profile_points import TUNING, Profile, ProfilePoints

_QUICK = ("lattice", "renyi", "gaussian")  # bounds that find the ε of a tiny δ at once


def pair_of(
    prepared: Least, noise_multiplier: float, interval: float, tolerance: float, *, rough: bool = False
) -> DominatingPair:
    """A pair of discrete distributions that dominates one run of a mechanism.

    Args:
      prepared: where the bounds on δ(ε) of the mechanism come from.
      noise_multiplier: σ.
      interval: spacing of the lattice of losses.
      tolerance: the share of ε (of the deviation of the loss, where ε is smaller) that discretisation should cost.
      rough: whether rough bounds, which cost less, will do.

    Returns:
      The pair.

    **Formal guarantees.** That of `dominating_pair`: the δ of the result is at least that of the mechanism, at every
    real ε and in both directions, because every value it is made from is an upper bound.
    """
    return profile_points(prepared, noise_multiplier, interval, rough=rough).refine(tolerance)


def profile_points(
    prepared: Least, noise_multiplier: float, interval: float, *, rough: bool = False, tail: float = TUNING.tail
) -> ProfilePoints:
    """Bounds on δ(ε) at first points, in both directions, which can be refined.

    Args:
      prepared: where the bounds on δ(ε) of the mechanism come from.
      noise_multiplier: σ.
      interval: spacing of the lattice of ε.
      rough: whether rough bounds, which cost less, will do.
      tail: points reach to about the ε where δ falls below this.

    **Formal guarantees.** Every value is an upper bound on δ of its direction at its ε, by one of the accountant's
    bounds.
    """
    if prepared.kind != "bound":
        raise ArgumentError("accountant", f"must be one that gives guaranteed bounds, {prepared.name} does not")
    mechanism = prepared.mechanism
    parts = prepared.parts
    if any(part.name == "chain" for part in parts):  # it is tighter than conditional composition, and much faster
        parts = tuple(part for part in parts if part.name != "conditional")
    quick = Least(prepared.name, mechanism, [part for part in parts if part.name in _QUICK])
    bounds = Least(prepared.name, mechanism, parts).bounds()
    profiles: dict[str, Profile] = {}
    largest: dict[str, float] = {}
    for direction in DIRECTIONS:
        short: PreparedAccountant = quick
        if not quick.parts:
            short = Gaussian().prepare(mechanism) if mechanism.batching.fixed else prepared
        largest[direction] = short.epsilon(noise_multiplier, tail, direction).value
        reach = min(largest[direction], TUNING.largest_epsilon)
        profiles[direction] = _profile(bounds, noise_multiplier, reach, direction, only_rough=rough)
    return ProfilePoints(interval, profiles, largest)


def _profile(
    bounds: Sequence[PreparedAccountant],
    noise_multiplier: float,
    largest: float,
    direction: Direction,
    *,
    only_rough: bool,
) -> Profile:
    """δ as a function of several ε, by the bounds that win, roughly, at probes nearby. They are chosen once."""
    grid = [share * largest for share in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)]
    chosen = [
        (bound, grid[min(places)], grid[max(places)])
        for bound, places in asked_where(bounds, noise_multiplier, grid, direction)
    ]

    def deltas(epsilons: Sequence[float], rough: bool) -> list[float]:
        best = [1.0] * len(epsilons)
        for bound, low, high in chosen:
            places = [k for k, epsilon in enumerate(epsilons) if low <= epsilon <= high or epsilon > largest]
            asked = [epsilons[k] for k in places]
            if (rough or only_rough) and bound.roughness > 1:
                found = [(bound.rough_delta(noise_multiplier, e, direction) or Evaluation(1.0)).value for e in asked]
            else:
                found = bound.deltas(noise_multiplier, asked, direction)
            for k, value in zip(places, found, strict=True):
                best[k] = min(best[k], value)
        return best

    return deltas
