"""Where to evaluate δ(ε), so that few evaluations give a pair that is hardly larger than the mechanism's own.

Between two points the profile of the pair is a chord. In terms of ε a chord over a stretch of width Δ costs about
(1 + λ)Δ²/8, λ = −d log δ/dε, wherever δ is curved. Stretches that cost more than a share of ε (of the deviation of the
loss, where ε is smaller than that) are divided; those where both neighbours show that the profile is straight are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from dpmf import budget
from dpmf.loss.dominating_pair import DominatingPair, dominating_pair, falling, hull
from dpmf.numerics import Array

Profile: TypeAlias = Callable[[Sequence[float], bool], Sequence[float]]
"""Bounds on δ at several ε ≥ 0, in one direction. The flag says whether rough bounds, which cost less, will do."""


@dataclass(frozen=True)
class _Tuning:
    """Where δ(ε) is evaluated. Any values give sound pairs.

    Attributes:
      tail: the mass of infinite loss, unless told: the largest ε is about where δ falls below this.
      detail: chords are divided only where they may exceed δ by more than this, in units of the tail.
      largest_epsilon: the largest ε at which δ is evaluated.
      largest_index: the largest lattice index; a pmf of all losses has twice as many entries.
      pilots: the first points, as shares of the largest ε.
      most_pieces: a stretch is divided into at most this many pieces at a time.
      rounds: stretches are divided this many times, at most.
      eager: stretches are divided into pieces that cost this part of what they may.
      tiny: where δ is smaller than this, chords may cost `coarser` times as much.
      coarser: see `tiny`.
      patience: after the first time, only stretches that cost this many times as much as they may are divided: an
        evaluation of few points takes nearly as long as one of many.
    """

    tail: float = 1e-14
    detail: float = 20.0
    largest_epsilon: float = 400.0
    largest_index: int = 2**22
    pilots: tuple[float, ...] = (0.0, 0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
    most_pieces: int = 32
    rounds: int = 2
    eager: float = 1.0
    tiny: float = 1e-9
    coarser: float = 3.0
    patience: float = 3.0


TUNING = _Tuning()


class ProfilePoints:
    """Bounds on δ(ε) at lattice points, in both directions.

    Attributes:
      values: for "remove" and "add", the bounds on δ by lattice index.
    """

    def __init__(
        self,
        interval: float,
        profiles: Mapping[str, Profile],
        largest: Mapping[str, float],
        tail: float = TUNING.tail,
    ) -> None:
        """Evaluate the profiles at the first points.

        Args:
          interval: spacing of the lattice of ε.
          profiles: bounds on δ(ε), for "remove" and for "add".
          largest: for each direction, an ε at which δ is about to fall below what matters, or a larger one.
          tail: the mass of losses, about, that may count as infinite.
        """
        self._interval, self._profiles, self._tail = interval, profiles, tail
        self._detail = TUNING.detail * tail
        self.values: dict[str, dict[int, float]] = {direction: {} for direction in profiles}
        first: dict[str, list[int]] = {}
        for direction, epsilon in largest.items():
            last = math.ceil(min(epsilon, TUNING.largest_epsilon) / interval)
            last = max(2, min(last, TUNING.largest_index))
            first[direction] = sorted({min(round(share * last), last) for share in TUNING.pilots} | {0, 1, last})
        self._evaluate(first, rough=True)
        for direction in first:
            self._forget_tail(direction)

    def refine(self, share: float) -> DominatingPair:
        """The dominating pair, with points added until hardly a chord costs more than the share of ε."""
        pair = self._pair()
        for number in range(TUNING.rounds):
            limit = TUNING.patience * share if number else TUNING.eager * share
            more = {way: self._wanted(way, TUNING.eager * share, limit, pair) for way in self.values}
            done = not any(more.values())
            if number == 0:  # the first points have rough bounds, which are good enough where δ is tiny
                for way, known in self.values.items():
                    more[way] = sorted({place for place, delta in known.items() if delta > self._detail} | {*more[way]})
            self._evaluate(more)
            pair = self._pair()
            if done:
                break
        return pair

    def _forget_tail(self, direction: str) -> None:
        """Keep only the first point whose δ is so small that larger losses count as infinite."""
        places = sorted(self.values[direction])
        beyond = [place for place in places[2:] if self.values[direction][place] <= self._tail]
        for place in beyond[1:]:
            del self.values[direction][place]

    def _pair(self) -> DominatingPair:
        return dominating_pair(self._interval, self.values["remove"], self.values["add"])

    def _evaluate(self, wanted: Mapping[str, Sequence[int]], *, rough: bool = False) -> None:
        """Bound δ at lattice points, both directions at a time, and keep the smaller bound where there was one."""
        asked = {direction: places for direction, places in wanted.items() if places}
        found = budget.side_by_side(
            [
                partial(self._profiles[direction], [self._interval * place for place in places], rough)
                for direction, places in asked.items()
            ]
        )
        for (direction, places), deltas in zip(asked.items(), found, strict=True):
            known = self.values[direction]
            for place, delta in zip(places, deltas, strict=True):
                known[place] = min(delta, known.get(place, 1.0))

    def _wanted(self, direction: str, share: float, limit: float, pair: DominatingPair) -> list[int]:
        """The lattice points at which stretches that cost more than the limit are to be divided."""
        known = self.values[direction]
        places, deltas = hull(self._interval, *falling(known))
        epsilons = self._interval * places
        widths, falls = np.diff(epsilons), -np.diff(deltas)
        logs = np.log(np.maximum(deltas, 1e-3 * self._tail))
        steepness = -np.diff(logs) / widths
        cost = (1 + steepness) * widths**2 / 8 / np.maximum(epsilons[1:], pair.deviation)
        cost = np.where(deltas[:-1] < TUNING.tiny, cost / TUNING.coarser, cost)
        gaps = _gaps(widths, falls)
        seen = share * np.maximum(epsilons[1:], pair.deviation) * falls / widths
        wanted: set[int] = set()
        for i in np.flatnonzero((cost > limit) & (gaps > self._detail) & (gaps > seen)):
            pieces = min(math.ceil(math.sqrt(cost[i] / share)), TUNING.most_pieces)
            wanted.update(int(place) for place in np.round(np.linspace(places[i], places[i + 1], pieces + 1)))
        visible = math.log(self._detail)
        return sorted(place for place in wanted - set(known) if np.interp(place, places, logs) > visible)


def _gaps(widths: Array, falls: Array) -> Array:
    """How far a convex profile can lie below each chord, given the chords beside it: the height of a triangle."""
    lengths = np.expm1(widths)  # each stretch in units of e^ε at its start, and slopes per such unit
    slopes = falls / lengths
    before = np.append(1.0, slopes[:-1] * np.exp(widths[:-1]))  # to the left of ε = 0 the slope is at most 1
    after = np.append(slopes[1:] / np.exp(widths[:-1]), 0.0)
    apart = np.maximum(before - after, 1e-300)
    return np.asarray(np.maximum(before - slopes, 0.0) * np.maximum(slopes - after, 0.0) * lengths / apart)
