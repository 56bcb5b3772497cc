"""The smallest noise multiplier that meets a target, found from the sound side."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpmf import budget
from dpmf.accountants.base import Direction, Evaluation, PreparedAccountant
from dpmf.errors import CalibrationError
from dpmf.search import LARGEST_RATIO, least_noise

_CRUDE = 0.1  # relative tolerance of the σ at which bounds are compared
_STRIDE = 0.5  # first step of log σ
_USUAL_STEEPNESS = 6.0  # −d log δ/d log σ, where nothing is known
_WITHIN_REACH = 4.0  # a bound larger by this factor at a σ close to the root does not have the smallest root


def calibrate_one_way(
    members: Sequence[PreparedAccountant],
    epsilon: float,
    delta: float,
    direction: Direction,
    start: float,
    relative_tolerance: float,
    best: tuple[float, Evaluation, PreparedAccountant] | None = None,
) -> tuple[float, Evaluation, PreparedAccountant]:
    """The least σ over several bounds: all are compared at one σ, and only the smallest are followed to their roots.

    `best` is what other accountants reached already. Where the time budget ends, the best so far is returned;
    `OutOfTime` where there is none.
    """
    reasons = [member.unreachable(epsilon, delta, direction) for member in members]
    able = [member for member, reason in zip(members, reasons, strict=True) if reason is None]
    contest = _Contest(able, epsilon, delta, direction, best)
    try:
        contest.run(start, relative_tolerance)
    except budget.OutOfTime:
        if contest.best is None:
            raise
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
        best: tuple[float, Evaluation, PreparedAccountant] | None,
    ) -> None:
        self._members, self._epsilon, self._delta, self._direction = members, epsilon, delta, direction
        self.best = best
        self._asked: dict[tuple[int, float], Evaluation] = {}

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
        order = sorted(bounds, key=lambda place: bounds[place])
        for place in order:
            if bounds[place] > _WITHIN_REACH * bounds[order[0]]:
                return
            # The winner of the comparison is known at `common` already; the others have to beat it.
            near = common if place == order[0] else self.best[0] * (1 - tolerance)
            value = self._evaluate(place, near).value
            if value <= self._delta:
                ahead = abs(math.log(max(value, 1e-300) / self._delta)) / self._steepness()
                self._search(place, near, tolerance, min(_STRIDE, 1.2 * ahead + 2 * tolerance))

    def _compare(self, crude: float, common: float) -> tuple[float, dict[int, float]]:
        """All bounds at one σ, which is moved until it is close to the root of the smallest."""
        while True:
            bounds = {place: self._evaluate(place, common).value for place in range(len(self._members))}
            least = min(bounds, key=lambda place: bounds[place])
            if bounds[least] * _WITHIN_REACH > self._delta:
                return common, bounds
            self._search(least, common, crude, _STRIDE)
            assert self.best is not None
            if self.best[0] >= common * (1 - crude / 4):
                return common, bounds
            common = self.best[0]

    def _evaluate(self, place: int, sigma: float) -> Evaluation:
        if (place, sigma) not in self._asked:
            budget.check()
            member = self._members[place]
            self._asked[place, sigma] = member.delta_for_target(sigma, self._epsilon, self._delta, self._direction)
        return self._asked[place, sigma]

    def _search(self, place: int, near: float, tolerance: float, step: float) -> None:
        found = least_noise(lambda sigma: self._evaluate(place, sigma), self._delta, near, tolerance, step)
        if found is not None and (self.best is None or found[0] < self.best[0]):
            self.best = (*found, self._members[place])

    def _steepness(self) -> float:
        """−d log δ/d log σ between the two evaluations closest to the target."""
        seen = [(math.log(sigma), math.log(max(one.value, 1e-300))) for (_, sigma), one in self._asked.items()]
        nearest = sorted(seen, key=lambda point: abs(point[1] - math.log(self._delta)))[:2]
        if len(nearest) < 2 or nearest[0][0] == nearest[1][0]:
            return _USUAL_STEEPNESS
        return max(0.5, abs((nearest[0][1] - nearest[1][1]) / (nearest[0][0] - nearest[1][0])))
