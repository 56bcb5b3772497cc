"""Where to evaluate δ(ε), so that few evaluations give a pair that is hardly larger than the mechanism's own.

Between two points the pair's profile is a chord. In terms of ε a chord over a stretch of width Δ costs about
(1 + λ)Δ²/8, λ = −d log δ/dε, wherever δ is curved. Stretches that cost more than a share of ε (of the deviation of the
loss, where ε is smaller than that) are divided; those where both neighbours show that the profile is straight are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.least import Least
from dpmf.accountants.protocol import Accountant, Direction, PreparedAccountant
from dpmf.loss.dominating_pair import DominatingPair, dominating_pair, falling, hull
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.validation import wrong

TAIL = 1e-14  # mass of infinite loss, in each direction
_LARGEST_EPSILON = 400.0
_LARGEST_INDEX = 2**22  # a pmf of all losses has twice as many entries
_MOST_ROUNDS = 12
_MOST_PIECES = 6
_QUICK = ("lattice", "renyi", "gaussian")
_PILOTS = (0.0, 0.1, 0.3, 1.0)  # of the largest ε


class ProfilePoints:
    """Bounds on δ(ε) of one mechanism and noise multiplier, at lattice points, found when asked for.

    Every member of the accountant is asked at a few pilot points; elsewhere only those that won at the pilots on either
    side are. Any of them bounds δ, so that costs tightness at worst.
    """

    def __init__(self, mechanism: Mechanism, sigma: float, interval: float, accountant: Accountant) -> None:
        self._sigma, self._interval = sigma, interval
        prepared = accountant.prepare(mechanism)
        if prepared.kind != "bound":
            raise wrong("accountant", "one that gives guaranteed bounds", accountant)
        self._members = _worth_asking(prepared)
        self._pilots: dict[Direction, dict[int, PreparedAccountant]] = {"remove": {}, "add": {}}
        self.values: dict[Direction, dict[int, float]] = {"remove": {}, "add": {}}
        for direction in self.values:
            last = self._last_index(mechanism, direction)
            places = sorted({round(share * last) for share in _PILOTS} | {1})
            table = [member.deltas(sigma, self._epsilons(places), direction) for member in self._members]
            for place, column in zip(places, zip(*table, strict=True), strict=True):
                winner = int(np.argmin(column))
                self._pilots[direction][place] = self._members[winner]
                self.values[direction][place] = column[winner]

    def _epsilons(self, places: Sequence[int]) -> list[float]:
        return [self._interval * place for place in places]

    def _last_index(self, mechanism: Mechanism, direction: Direction) -> int:
        """About where δ falls below the tail; from members that answer at once, or without amplification."""
        quick = [member for member in self._members if member.name in _QUICK] or [Gaussian().prepare(mechanism)]
        epsilon = min(member.epsilon(self._sigma, TAIL, direction).value for member in quick)
        return max(2, min(math.ceil(min(epsilon, _LARGEST_EPSILON) / self._interval), _LARGEST_INDEX))

    def evaluate(self, direction: Direction, places: Sequence[int]) -> None:
        """Find δ at more lattice points."""
        pilots = sorted(self._pilots[direction])
        asked: dict[int, tuple[PreparedAccountant, list[int]]] = {}
        for place in places:
            above = min(int(np.searchsorted(pilots, place)), len(pilots) - 1)
            for pilot in {pilots[above], pilots[max(above - 1, 0)]}:
                member = self._pilots[direction][pilot]
                mine = asked.setdefault(id(member), (member, []))[1]
                if place not in mine:
                    mine.append(place)
        for member, mine in asked.values():
            found = member.deltas(self._sigma, self._epsilons(mine), direction)
            for place, delta in zip(mine, found, strict=True):
                self.values[direction][place] = min(delta, self.values[direction].get(place, 1.0))

    def pair(self) -> DominatingPair:
        return dominating_pair(self._interval, self.values["remove"], self.values["add"])

    def refine(self, share: float) -> DominatingPair:
        """The pair, with points added until no chord costs more than the share of ε (or the rounds are over)."""
        pair = self.pair()
        for _ in range(_MOST_ROUNDS):
            more = {way: self._wanted(way, share, pair) for way in self.values}
            if not any(more.values()):
                break
            for way, places in more.items():
                self.evaluate(way, places)
            pair = self.pair()
        return pair

    def _wanted(self, direction: Direction, share: float, pair: DominatingPair) -> list[int]:
        """The lattice points at which stretches that cost too much should be divided."""
        known = self.values[direction]
        places, deltas = hull(self._interval, *falling(known))
        epsilons = self._interval * places
        widths, falls = np.diff(epsilons), -np.diff(deltas)
        steepness = -np.diff(np.log(np.maximum(deltas, 1e-3 * TAIL))) / widths
        cost = (1 + steepness) * widths**2 / 8
        most = share * np.maximum(epsilons[1:], pair.deviation)
        gaps = _gaps(widths, falls)
        wanted: set[int] = set()
        for i in np.flatnonzero((cost > most) & (gaps > TAIL) & (gaps > most * falls / widths)):
            pieces = min(math.ceil(math.sqrt(cost[i] / most[i])), _MOST_PIECES)
            wanted.update(int(place) for place in np.round(np.linspace(places[i], places[i + 1], pieces + 1)))
        return sorted(wanted - set(known))


def _gaps(widths: Array, falls: Array) -> Array:
    """How far a convex profile can lie below each chord, given the chords beside it: the height of a triangle."""
    lengths = np.expm1(widths)  # each stretch in units of e^ε at its start, and slopes per such unit
    slopes = falls / lengths
    before = np.append(1.0, slopes[:-1] * np.exp(widths[:-1]))  # to the left of ε = 0 the slope is at most 1
    after = np.append(slopes[1:] / np.exp(widths[:-1]), 0.0)
    apart = np.maximum(before - after, 1e-300)
    return np.asarray(np.maximum(before - slopes, 0.0) * np.maximum(slopes - after, 0.0) * lengths / apart)


def _worth_asking(prepared: PreparedAccountant) -> list[PreparedAccountant]:
    """The members; without conditional composition where a chain is, which is tighter and much faster."""
    members = list(Least.of(prepared).bounds())
    if any(member.name == "chain" for member in members):
        members = [member for member in members if member.name != "conditional"]
    return members
