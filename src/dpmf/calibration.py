"""The smallest noise multiplier that meets a target, found from the sound side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from dpmf import budget
from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant
from dpmf.errors import CalibrationError
from dpmf.search import LARGEST_RATIO, least_noise

LITTLE_HOPE = 1.04  # a rough bound that exceeds its roughness times the target by this factor is taken to miss it
_CRUDE = 0.1  # relative tolerance of the σ at which bounds are compared
_STRIDE = 0.5  # first step of log σ
_USUAL_STEEPNESS = 6.0  # −d log δ/d log σ, where nothing is known
_CLEARLY = 1.3  # an estimate this many times below the target is taken to meet it
_CLOSE = 2.0  # a bound smaller than the target by no more than this says that σ is close to the root


class LeastNoise(NamedTuple):
    """The least noise multiplier found that meets a target, the bound evaluated there, and whose bound it is."""

    noise_multiplier: float
    evaluation: Evaluation
    bound: PreparedAccountant


def calibrate_one_way(
    members: Sequence[PreparedAccountant],
    epsilon: float,
    delta: float,
    direction: Direction,
    start: float,
    relative_tolerance: float,
    best: LeastNoise | None = None,
    enough: float = 0.0,
    coarse_tolerance: float = 0.0,
) -> LeastNoise:
    """The least σ over several bounds: all are compared at one σ, and only the smallest are followed to their roots.

    `best` is what other accountants reached already. A σ of at most `enough` is as good as any: the first member that
    meets the target there is searched to `coarse_tolerance` only. Where the time budget ends, the best so far is
    returned; `OutOfTime` where there is none.
    """
    reasons = [member.unreachable(epsilon, delta, direction) for member in members]
    able = [member for member, reason in zip(members, reasons, strict=True) if reason is None]
    contest = _Contest(able, epsilon, delta, direction, best)

    def run() -> None:
        if best is None or not enough > 0:
            contest.run(start, relative_tolerance)
        elif best[0] > enough:
            contest.run_to(enough, relative_tolerance, coarse_tolerance)

    if not budget.finished(run) and contest.best is None:
        raise budget.OutOfTime
    if contest.best is None:
        if not able:
            raise CalibrationError(str(reasons[-1]))
        raise CalibrationError(
            f"no noise multiplier up to {LARGEST_RATIO * start:.3g} meets epsilon = {epsilon:g}, delta = {delta:g}"
        )
    return contest.best


class _Contest:
    """Which of several bounds meets a target with the least σ: no choice made here decides whether a bound holds."""

    def __init__(
        self,
        members: Sequence[PreparedAccountant],
        epsilon: float,
        delta: float,
        direction: Direction,
        best: LeastNoise | None,
    ) -> None:
        self._members, self._epsilon, self._delta, self._direction = members, epsilon, delta, direction
        self.best = best
        self._asked: dict[tuple[int, float], Evaluation] = {}
        self._rough: dict[tuple[int, float], Evaluation | None] = {}

    def run(self, start: float, tolerance: float) -> None:
        alone = len(self._members) == 1
        crude = tolerance if alone else max(tolerance, _CRUDE)
        outside = self.best is not None
        for place in range(len(self._members)):
            if self.best is None:
                self._search(place, start, crude, _STRIDE)
        if self.best is None or (alone and not outside):
            return
        common, bounds = self._compare(crude, self.best[0] * (1 - tolerance) if outside else self.best[0])
        self._follow(common, bounds, tolerance)

    def run_to(self, enough: float, tolerance: float, coarse: float) -> None:
        """From a known answer towards `enough`."""
        bounds: dict[int, float] = {}
        for place in range(len(self._members)):
            bounds[place] = self._estimate(place, enough)
            if bounds[place] <= self._delta * LITTLE_HOPE:
                bounds[place] = self._evaluate(place, enough).value
            if bounds[place] <= self._delta:
                self._search(place, enough, max(coarse, tolerance), self._stride(place, enough, tolerance))
                return
        if bounds:
            self._follow(enough, bounds, tolerance)

    def _follow(self, common: float, bounds: dict[int, float], tolerance: float) -> None:
        """To the roots of the smallest bounds, the smallest first."""
        assert self.best is not None
        order = sorted(bounds, key=lambda place: bounds[place])
        # A bound that fails at one σ fails at smaller ones; of two that fail, the larger one may have the smaller root,
        # the more so the farther away that is, because slopes differ.
        least = bounds[order[0]]
        reach = self._delta if least <= self._delta else least * math.exp(0.05 + 0.7 * self._excess(least))
        for place in order:
            if bounds[place] > reach:
                return
            # The winner of the comparison is known at `common` already; the others have to beat it.
            near = self.best[0] * (1 - tolerance)
            if place == order[0] and bounds[place] <= self._delta:
                near = common
            elif not self._meets(place, near):
                continue
            self._search(place, near, tolerance, self._stride(place, near, tolerance))

    def _meets(self, place: int, sigma: float) -> bool:
        """Whether a bound meets the target; where its estimate is far from that, this decides."""
        estimate = self._estimate(place, sigma)
        if not self._delta / _CLEARLY <= estimate <= self._delta * LITTLE_HOPE:
            return estimate <= self._delta
        return self._evaluate(place, sigma).value <= self._delta

    def _compare(self, crude: float, common: float) -> tuple[float, dict[int, float]]:
        """All bounds at one σ, which is moved until it is close to the root of the smallest."""
        places = list(range(len(self._members)))
        while True:
            bounds = {place: self._estimate(place, common) for place in places}
            least = min(bounds, key=lambda place: bounds[place])
            if bounds[least] * _CLOSE > self._delta:
                return common, bounds
            self._search(least, common, crude, self._stride(least, common, crude / 4))
            assert self.best is not None
            if self.best[0] >= common * (1 - crude / 4):
                return common, bounds
            common = self.best[0]
            # A bound that fails at one σ fails at smaller ones.
            places = [place for place in places if bounds[place] <= self._delta]

    def _excess(self, value: float) -> float:
        """|log of a bound over the target|."""
        return abs(math.log(max(value, 1e-300) / self._delta))

    def _stride(self, place: int, sigma: float, least: float) -> float:
        """A first step of log σ that should lead just past the root."""
        ahead = self._excess(self._estimate(place, sigma)) / self._steepness()
        return min(_STRIDE, 1.2 * ahead + 2 * least)

    def _evaluate(self, place: int, sigma: float) -> Evaluation:
        if (place, sigma) not in self._asked:
            budget.check()
            ask = partial(self._members[place].delta, sigma, self._epsilon, self._direction, self._delta)
            # Where memory does not suffice, the bound is 1: a bound that needs less may still win.
            self._asked[place, sigma] = budget.attempt(ask, Evaluation(1.0))
        return self._asked[place, sigma]

    def _roughly(self, place: int, sigma: float) -> Evaluation | None:
        if (place, sigma) not in self._rough:
            budget.check()
            ask = partial(self._members[place].rough_delta, sigma, self._epsilon, self._direction, self._delta)
            self._rough[place, sigma] = budget.attempt(ask, None)
        return self._rough[place, sigma]

    def _estimate(self, place: int, sigma: float) -> float:
        """About the bound: from the rough one where there is such, and the bound itself is not known yet."""
        rough = None if (place, sigma) in self._asked else self._roughly(place, sigma)
        if rough is None:
            return self._evaluate(place, sigma).value
        return rough.value / self._members[place].roughness

    def _search(self, place: int, near: float, tolerance: float, step: float) -> None:
        """To the root of a bound; a rough one will do where the tolerance is, and leads there from afar."""
        close = (place, near) in self._asked

        def evaluate(sigma: float) -> Evaluation:
            rough = self._roughly(place, sigma) if tolerance >= _CRUDE else None
            return self._evaluate(place, sigma) if rough is None else rough

        found = least_noise(
            evaluate, self._delta, near, tolerance, step,
            rough=None if close else lambda sigma: self._roughly(place, sigma),
            roughness=self._members[place].roughness,
        )  # fmt: skip
        if found is not None and (self.best is None or found[0] < self.best[0]):
            self.best = LeastNoise(*found, self._members[place])

    def _steepness(self) -> float:
        """−d log δ/d log σ between the two evaluations of one bound, both rough or neither, closest to the target."""
        closest, slope = math.inf, _USUAL_STEEPNESS
        rough = {place: found for place, found in self._rough.items() if found is not None}
        pairs = (pair for known in (self._asked, rough) for pair in product(known.items(), repeat=2))
        for ((place, sigma), one), ((other, farther), two) in pairs:
            away = self._excess(one.value) + self._excess(two.value)
            if place == other and sigma < farther and two.value < one.value and away < closest:
                closest = away
                slope = math.log(one.value / max(two.value, 1e-300)) / math.log(farther / sigma)
        return max(0.5, slope)
