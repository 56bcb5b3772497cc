"""The cheapest accountant whose bound is certified to be close to the truth; else the tightest there is time for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dpmf import budget, validation
from dpmf import lower_bounds as lower
from dpmf.accountants.cascade import Cascade
from dpmf.accountants.combined._stages import Stages
from dpmf.accountants.combined.best import suited
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.lattice import Lattice
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, labelled
from dpmf.accountants.renyi import Renyi
from dpmf.calibration import calibrate_one_way
from dpmf.errors import CalibrationError
from dpmf.mechanism import Mechanism
from dpmf.search import least_noise

_PROBES = 5  # points of a profile at which the gap is measured
_CHEAP = (Gaussian.name, Cascade.name, Lattice.name)  # searched to the end, whatever is close enough
_COARSE = 0.125  # of the tolerance: how closely the others are searched where they are close enough
_LOWER_SHARE = 0.2  # of the time left


@dataclass(frozen=True)
class Auto(Accountant):
    """Options of the automatic choice.

    Attributes:
      tolerance: the gap, in the noise multiplier or in ε, between a bound and the certified lower bound that is good
        enough.
      time_budget: seconds for one question, None for no limit.
      renyi: the options of its Rényi accountant.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the cheapest accountant within a tolerance of the certified lower bound"
    rests_on: ClassVar[str] = "that of the accountant it chose; which one it is does not matter for soundness"

    tolerance: float = 0.02
    time_budget: float | None = None
    renyi: Renyi = field(default_factory=Renyi)

    def __post_init__(self) -> None:
        validation.positive("tolerance", self.tolerance)
        if self.time_budget is not None:
            validation.positive("time_budget", self.time_budget)
        if not isinstance(self.renyi, Renyi):
            raise validation.wrong("renyi", "a Renyi accountant", self.renyi)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """**Formal guarantees.** What is returned is the bound of a deterministic accountant, for the direction asked
        for, whatever made the search end. The gap is between that bound and a certified lower bound."""
        return PreparedAuto(self, mechanism)


class PreparedAuto(PreparedAccountant):
    """`auto` for one mechanism. Bounds are compared with the lower bound of the whole relation asked for: a direction
    that does not determine the answer need not be known closely."""

    name = "auto"

    def __init__(
        self, options: Auto, mechanism: Mechanism, relation: str | None = None, stages: Stages | None = None
    ) -> None:
        self.mechanism = mechanism
        self._options, self._relation = options, relation
        if stages is None:
            stages = Stages(tuple(dict.fromkeys((Gaussian(), *suited(mechanism, options.renyi)))), mechanism)
        self._stages = stages

    def for_relation(self, relation: str) -> PreparedAccountant:
        return PreparedAuto(self._options, self.mechanism, relation, self._stages)

    def _seek(
        self,
        improve: Callable[[PreparedAccountant, Evaluation | None], Evaluation],
        good_enough: Callable[[Evaluation], bool],
    ) -> Evaluation:
        """The first bound that is good enough, or the least."""
        best: Evaluation | None = None
        exhausted = False
        try:
            for stage in self._stages:
                try:
                    found = improve(stage, best)
                except (CalibrationError, budget.OutOfMemory):  # orders that do not reach the target, no room
                    continue
                if best is None or found.value < best.value:
                    best = found
                if good_enough(best):
                    break
        except budget.OutOfTime:
            if best is None:
                raise
            exhausted = True
        assert best is not None  # closed forms always answer
        return Evaluation(best.value, {**best.details, "budget_exhausted": exhausted})

    def _below(self, ask: Callable[[], float]) -> float:
        """A certified lower bound, in a share of the time."""
        left = budget.seconds_left()
        with budget.time_limit(None if math.isinf(left) else _LOWER_SHARE * left):
            return ask()

    def _with_gap(self, found: Evaluation, value: float, below: float) -> Evaluation:
        gap = value / below - 1 if below > 0 else math.inf
        return Evaluation(found.value, {**found.details, "gap": 0.0 if value == 0 else gap})

    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        with budget.time_limit(self._options.time_budget):
            enough = self._enough(noise_multiplier, epsilon, direction)
            found = self._seek(
                lambda stage, _: labelled(stage.delta_one_way(noise_multiplier, epsilon, direction), stage, self),
                lambda found: found.value <= enough,
            )
            if not 0 < found.value < 1:  # no ε is asked for then
                return self._with_gap(found, found.value, enough)
            relation = self._relation or direction
            if epsilon == 0:
                return self._with_gap(found, found.value, enough / (1 + self._options.tolerance))
            # Of ε, not of δ.
            start = epsilon / (1 + self._options.tolerance)
            below = self._below(
                lambda: lower.lower_epsilon(self.mechanism, noise_multiplier, found.value, relation, start)
            )
            return self._with_gap(found, epsilon, below)

    def _enough(self, sigma: float, epsilon: float, direction: Direction) -> float:
        """A δ that is certainly exceeded at an ε a little smaller: with such a bound, ε is close to what is needed.

        1 where that is within the tolerance already.
        """
        relation, factor = self._relation or direction, 1 + self._options.tolerance
        below = self._below(lambda: lower.lower_delta(self.mechanism, sigma, epsilon / factor, relation))
        return 1.0 if below * factor >= 1 else below * factor if epsilon == 0 else below

    def delta_for_target(
        self, noise_multiplier: float, epsilon: float, target_delta: float, direction: Direction
    ) -> Evaluation:
        """The first bound that meets the target."""
        return self.first_to_meet(noise_multiplier, epsilon, target_delta, direction)

    def first_to_meet(self, noise_multiplier: float, epsilon: float, delta: float, direction: Direction) -> Evaluation:
        def improve(stage: PreparedAccountant, _: Evaluation | None) -> Evaluation:
            return labelled(stage.first_to_meet(noise_multiplier, epsilon, delta, direction), stage, self)

        with budget.time_limit(self._options.time_budget):
            return self._seek(improve, lambda found: found.value <= delta)

    def epsilon_one_way(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        with budget.time_limit(self._options.time_budget):
            relation = self._relation or direction
            below = self._below(lambda: lower.lower_epsilon(self.mechanism, noise_multiplier, delta, relation))
            enough = below * (1 + self._options.tolerance)

            def improve(stage: PreparedAccountant, best: Evaluation | None) -> Evaluation:
                def evaluate(epsilon: float) -> Evaluation:
                    return stage.first_to_meet(noise_multiplier, epsilon, delta, direction)

                if best is not None and 0 < best.value < math.inf:
                    if 0 < enough < best.value and stage.name not in _CHEAP and evaluate(enough).value <= delta:
                        near = least_noise(evaluate, delta, enough, _COARSE * self._options.tolerance, 0.05)
                        assert near is not None  # it was met at the start
                        return labelled(Evaluation(near[0], near[1].details), stage, self)
                    if evaluate(best.value * (1 - 1e-4)).value > delta:
                        return best
                return labelled(stage.epsilon_one_way(noise_multiplier, delta, direction), stage, self)

            found = self._seek(improve, lambda found: found.value <= enough)
        return self._with_gap(found, found.value, below)

    def least_noise_one_way(
        self, epsilon: float, delta: float, direction: Direction, start: float, relative_tolerance: float
    ) -> tuple[float, Evaluation]:
        with budget.time_limit(self._options.time_budget):
            relation, tolerance = self._relation or direction, self._options.tolerance
            below = self._below(lambda: lower.lower_noise_multiplier(self.mechanism, epsilon, delta, relation))
            enough = below * (1 + tolerance)
            best: list[tuple[float, Evaluation, PreparedAccountant]] = []

            def improve(stage: PreparedAccountant, _: Evaluation | None) -> Evaluation:
                known = best[0] if best else None
                # What the first that is not cheap cannot do, the others can hardly.
                cheap, first = stage.name in _CHEAP, known is not None and known[2].name in _CHEAP
                goal = (enough, 0.0 if cheap else _COARSE * tolerance) if first else ()
                best[:] = [
                    calibrate_one_way(
                        stage.members(), epsilon, delta, direction, start, relative_tolerance, known, *goal
                    )
                ]
                return Evaluation(best[0][0])

            outcome = self._seek(improve, lambda found: found.value <= enough)
        sigma, evaluation, member = best[0]
        details = {**labelled(evaluation, member, self).details, **outcome.details}
        return sigma, self._with_gap(Evaluation(evaluation.value, details), sigma, below)

    def deltas_one_way(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        best = [1.0] * len(epsilons)
        probes = sorted({round(k * (len(epsilons) - 1) / (_PROBES - 1)) for k in range(_PROBES)})
        with budget.time_limit(self._options.time_budget):
            try:
                enough = {k: self._enough(noise_multiplier, epsilons[k], direction) for k in probes}
                for stage in self._stages:
                    found = stage.deltas_one_way(noise_multiplier, epsilons, direction)
                    best = [min(pair) for pair in zip(best, found, strict=True)]
                    if all(best[k] <= enough[k] for k in probes):
                        break
            except budget.OutOfTime:
                pass
        return best
