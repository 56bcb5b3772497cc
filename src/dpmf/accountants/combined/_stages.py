"""Accountants one after the other, each prepared when its turn comes: what one has reached stays when a budget ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from dpmf import budget, progress
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, labelled
from dpmf.calibration import calibrate_one_way
from dpmf.errors import CalibrationError
from dpmf.mechanism import Mechanism


def refuse_samples(member: PreparedAccountant) -> None:
    if member.kind != "bound":
        raise ValueError(f"accountants must be deterministic, {member.name} is not")


class Stages:
    """The accountants to try, in order; each is prepared when it is first needed, once.

    One that the memory budget does not allow is left out. `OutOfTime` where there is no time for the next.
    """

    def __init__(self, options: Sequence[Accountant], mechanism: Mechanism) -> None:
        self._options, self._mechanism = tuple(options), mechanism
        self._prepared: dict[int, PreparedAccountant] = {}

    def __iter__(self) -> Iterator[PreparedAccountant]:
        for place, options in enumerate(self._options):
            budget.check()
            if place not in self._prepared:
                progress.say(f"preparing {options.name}")
                try:
                    self._prepared[place] = options.prepare(self._mechanism)
                except budget.OutOfMemory:
                    continue
                refuse_samples(self._prepared[place])
            yield self._prepared[place]


class Staged(PreparedAccountant):
    """The smallest of several bounds, as far as the budget goes.

    **Formal guarantees.** Each accountant bounds the same δ(ε) (or ε(δ)) of the same direction, so the least of those
    that were reached does.
    """

    def __init__(self, name: str, mechanism: Mechanism, options: Sequence[Accountant]) -> None:
        self.name, self.mechanism = name, mechanism
        self._stages = Stages(options, mechanism)

    def _seek(
        self, improve: Callable[[PreparedAccountant, Evaluation | None], Evaluation], enough: float = -math.inf
    ) -> Evaluation:
        """The least value, or the first that is at most `enough`; `Exhausted` where there is none."""
        best: Evaluation | None = None
        ended: Exception = budget.OutOfMemory()
        try:
            for stage in self._stages:
                progress.say(stage.name)
                try:
                    found = improve(stage, best)
                except (CalibrationError, budget.OutOfMemory) as error:
                    ended = error
                    continue
                best = found if best is None or found.value < best.value else best
                if best.value <= enough:
                    break
        except budget.OutOfTime as error:
            ended = error
        if best is None:
            raise ended
        return best

    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        return self._seek(lambda s, _: labelled(s.delta_one_way(noise_multiplier, epsilon, direction), s, self))

    def delta_for_target(
        self, noise_multiplier: float, epsilon: float, target_delta: float, direction: Direction
    ) -> Evaluation:
        """The first bound that meets the target, or the least."""
        return self.first_to_meet(noise_multiplier, epsilon, target_delta, direction)

    def first_to_meet(self, noise_multiplier: float, epsilon: float, delta: float, direction: Direction) -> Evaluation:
        def improve(stage: PreparedAccountant, _: Evaluation | None) -> Evaluation:
            return labelled(stage.first_to_meet(noise_multiplier, epsilon, delta, direction), stage, self)

        return self._seek(improve, delta)

    def epsilon_one_way(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        def improve(stage: PreparedAccountant, best: Evaluation | None) -> Evaluation:
            if best is not None and 0 < best.value < math.inf:
                challenged = best.value * (1 - 1e-4)
                if stage.first_to_meet(noise_multiplier, challenged, delta, direction).value > delta:
                    return best
            return labelled(stage.epsilon_one_way(noise_multiplier, delta, direction), stage, self)

        return self._seek(improve, 0.0)

    def least_noise_one_way(
        self, epsilon: float, delta: float, direction: Direction, start: float, relative_tolerance: float
    ) -> tuple[float, Evaluation]:
        best: list[tuple[float, Evaluation, PreparedAccountant]] = []

        def improve(stage: PreparedAccountant, _: Evaluation | None) -> Evaluation:
            known = best[0] if best else None
            best[:] = [calibrate_one_way(stage.members(), epsilon, delta, direction, start, relative_tolerance, known)]
            return Evaluation(best[0][0])

        self._seek(improve)
        sigma, evaluation, member = best[0]
        return sigma, labelled(evaluation, member, self)

    def deltas_one_way(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        best = [1.0] * len(epsilons)
        try:
            for stage in self._stages:
                try:
                    found = stage.deltas_one_way(noise_multiplier, epsilons, direction)
                except budget.OutOfMemory:
                    continue
                best = [min(pair) for pair in zip(best, found, strict=True)]
        except budget.OutOfTime:
            pass
        return best
