"""From bounds on δ(ε) to a pair of discrete distributions that dominates the mechanism.

Write h(γ) = sup_S P(S) − γQ(S), γ ≥ 0, for the privacy profile of (P, Q). It is convex and falling, h(0) = 1, and
    γ = e^ε ≥ 1:  h(γ) = δ_remove(ε),        γ = e^(−ε) ≤ 1:  h(γ) = 1 − γ + γ·δ_add(ε),
so bounds on both directions at ε ≥ 0 bound the whole curve. Bounds at finitely many γ are points above h. Being convex,
h lies below every chord between such points: a convex polygon through some of them bounds h everywhere. A convex
polygon is the profile of a discrete pair whose losses are its corners (Doroshenko et al. 2022), and pairs with larger
profiles compose to larger profiles (Zhu, Dong & Wang 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dpmf.numerics import UNIT, Array

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class DominatingPair:
    """Two discrete distributions, as atoms on a lattice of losses.

    Attributes:
      interval: spacing h of the lattice.
      losses: lattice indices of the losses log(upper/lower), ascending.
      upper, lower: the masses of each loss, upper = e^loss·lower.
      upper_only, lower_only: what one has where the other has nothing: losses +∞ and −∞.
    """

    interval: float
    losses: Indices
    upper: Array
    lower: Array
    upper_only: float
    lower_only: float

    def delta(self, epsilon: float, direction: str) -> float:
        """δ(ε) of the pair, for any real ε."""
        losses, masses, rest = self._one_way(direction)
        return float(np.sum(masses * -np.expm1(np.minimum(epsilon - self.interval * losses, 0.0)))) + rest

    def at(self, place: int, direction: str) -> float:
        """δ(ε) at a lattice point ε = interval·place, where differences of losses have no rounding errors."""
        losses, masses, rest = self._one_way(direction)
        return float(np.sum(masses * -np.expm1(self.interval * np.minimum(place - losses, 0)))) + rest

    def _one_way(self, direction: str) -> tuple[Indices, Array, float]:
        if direction == "add":
            return -self.losses, self.lower, self.lower_only
        return self.losses, self.upper, self.upper_only

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite losses under the upper distribution."""
        total = max(float(self.upper.sum()), 1e-300)
        losses = self.interval * self.losses
        mean = float(self.upper @ losses) / total
        return float(np.sqrt(self.upper @ (losses - mean) ** 2 / total))


def dominating_pair(interval: float, remove: dict[int, float], add: dict[int, float]) -> DominatingPair:
    """The pair with the least profile that the points allow; `remove` and `add` hold bounds on δ(interval·index).

    Indices are ≥ 0; 0 and at least one more must be there, in each direction.

    **Formal guarantees.** If every value is at least the δ of its direction and ε, then so is `delta` of the result, at
    every real ε and in both directions. Points that are not corners of the convex hull are left out, which needs no
    care: any convex polygon through bounds will do. δ does not grow with ε, so beyond the last point its value is the
    mass of infinite loss. The atoms are differences of slopes; what their rounding may have lost at any corner is found
    by evaluating the result there and is added to the masses of infinite loss.
    """
    halves = _monotone(interval, [falling(points) for points in (remove, add)])
    halves = [hull(interval, places, values) for places, values in halves]
    top, middle = _middle(interval, halves)
    while middle < 0:
        # The corner at ε = 0 lies above the chord of its neighbours. It is moved down to the chord, and neighbours that
        # then lie above the chord from there to the next corner are left out.
        chord = top + middle / (1 + sum(1 / np.expm1(interval * float(places[1])) for places, _ in halves))
        before = [len(places) for places, _ in halves]
        halves = [_without_first_dents(interval, places, np.append(chord, values[1:])) for places, values in halves]
        top, middle = _middle(interval, halves)
        if before == [len(places) for places, _ in halves]:
            middle = 0.0  # but for rounding
    (places_remove, bounds_remove), (places_add, bounds_add) = halves
    upper_half, lower_half = (_masses(interval, places, values) for places, values in halves)
    upper = np.concatenate(((np.exp(-interval * places_add[1:]) * lower_half)[::-1], [middle], upper_half))
    lower = np.concatenate((lower_half[::-1], [middle], np.exp(-interval * places_remove[1:]) * upper_half))
    losses = np.concatenate((-places_add[:0:-1], [0], places_remove[1:]))
    pair = DominatingPair(interval, losses, upper, lower, float(bounds_remove[-1]), float(bounds_add[-1]))
    return _topped_up(pair, places_remove, bounds_remove, places_add, bounds_add)


def falling(points: dict[int, float]) -> tuple[Indices, Array]:
    places = np.array(sorted(points), dtype=np.int64)
    if len(places) < 2 or places[0] != 0:
        raise ValueError(f"points must be at 0 and at one more index at least, got {places.tolist()!r}")
    values = np.array([points[int(place)] for place in places])
    if not np.all(values >= 0):
        raise ValueError("points must be bounds on δ, and none of them negative or not a number")
    return places, np.minimum.accumulate(np.minimum(values, 1.0))


def _monotone(interval: float, halves: list[tuple[Indices, Array]]) -> list[tuple[Indices, Array]]:
    """The same bounds, lowered to what the profile of one direction, which falls, says about the other."""
    reached = []
    for places, values in halves:
        gammas = np.exp(-interval * places)
        reached.append(float(np.min(1 - gammas + gammas * values)))
    least = min(reached)  # both hold at ε = 0: TV(P, Q) has bounds from either side
    return [(places, np.minimum(values, least)) for places, values in halves]


def _middle(interval: float, halves: list[tuple[Indices, Array]]) -> tuple[float, float]:
    """δ(0), and the mass at ε = 0 that makes the total one."""
    top = float(halves[0][1][0])
    falls = sum((top - float(values[1])) / np.expm1(interval * float(places[1])) for places, values in halves)
    return top, float(1 - top - falls)


def _without_first_dents(interval: float, places: Indices, values: Array) -> tuple[Indices, Array]:
    """The corners without those next to the first that are not convex, seen from it."""
    while len(places) > 2:
        step, next_step = interval * np.diff(places[:3])
        if (values[1] - values[0]) / -np.expm1(-step) < (values[2] - values[1]) / np.expm1(next_step):
            break
        places, values = np.delete(places, 1), np.delete(values, 1)
    return places, values


def hull(interval: float, places: Indices, values: Array) -> tuple[Indices, Array]:
    """The corners of the lower convex hull of the points (e^ε, δ); the first and the last point stay."""
    kept: list[int] = []
    for new in range(len(places)):
        while len(kept) > 1:
            before, last = kept[-2], kept[-1]
            rise = (values[new] - values[last]) / np.expm1(interval * (places[new] - places[last]))
            slope = (values[last] - values[before]) / -np.expm1(interval * (places[before] - places[last]))
            if rise > slope:
                break
            kept.pop()
        kept.append(new)
    return places[kept], values[kept]


def _masses(interval: float, places: Indices, values: Array) -> Array:
    """e^ε times the change of slope at each corner but the first; beyond the last one the slope is 0."""
    steps, falls = interval * np.diff(places), -np.diff(values)
    arriving = falls / -np.expm1(-steps)
    leaving = np.append(falls[1:] / np.expm1(steps[1:]), 0.0)
    return np.asarray(np.maximum(arriving - leaving, 0.0))


def _topped_up(
    pair: DominatingPair, places_remove: Indices, remove: Array, places_add: Indices, add: Array
) -> DominatingPair:
    """The pair with as much more infinite loss as its profile falls short of the corners it was made from.

    Between corners both profiles are straight in e^ε, so corners are enough, and e^ε = 0, where a profile is 1.
    """
    # Six roundings of a term, five of what it is compared with, and a pairwise sum of blocks of 128 terms (numpy).
    rounding = UNIT * (32 + np.log2(len(pair.losses)))
    missing = []
    for direction, here, bounds, there, others in (
        ("remove", places_remove, remove, places_add, add),
        ("add", places_add, add, places_remove, remove),
    ):
        gammas = np.exp(-pair.interval * there[1:])
        corners = np.concatenate((-there[:0:-1], here))
        wanted = np.concatenate(((1 - gammas + gammas * others[1:])[::-1], bounds))
        found = np.array([pair.at(int(place), direction) for place in corners])
        _, masses, rest = pair._one_way(direction)
        lost = math.fsum([1.0, -rest, *(-masses).tolist()])  # correctly rounded
        missing.append(max(float(np.max(wanted - found + rounding * wanted)), lost * (1 + 4 * UNIT) + 4 * UNIT * rest))
    return replace(
        pair,
        upper_only=min(1.0, pair.upper_only + max(missing[0], 0.0)),
        lower_only=min(1.0, pair.lower_only + max(missing[1], 0.0)),
    )
