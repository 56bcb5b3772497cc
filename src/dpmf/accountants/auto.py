"""The cheapest accountant whose bound is certified to be close to the truth; else the tightest there is time for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dpmf import budget, validation
from dpmf.accountants import lower
from dpmf.accountants.base import Accountant, Direction, Evaluation, PreparedAccountant, labelled
from dpmf.accountants.best import _DENSE_BATCHES, Best
from dpmf.accountants.chain import Chain
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.lattice import Lattice, uncorrelated_diagonal
from dpmf.accountants.renyi import Renyi
from dpmf.calibration import calibrate_one_way
from dpmf.errors import CalibrationError
from dpmf.mechanism import Mechanism

_QUICK_WORK = 1e8  # a tenth of a second
_COARSE = 0.03  # discretisation loss of the chain's first try
_PROBES = 5  # points of a profile at which the gap is measured


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

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """**Formal guarantees.** What is returned is the bound of a deterministic accountant, for the direction asked
        for, whatever made the search end. The gap is between that bound and a certified lower bound."""
        return PreparedAuto(self, mechanism)


class _Stages:
    """The accountants to try, cheapest first; each is prepared when it is first needed, once."""

    def __init__(self, options: Auto, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        if uncorrelated_diagonal(mechanism) is not None:
            self._options: tuple[Accountant, ...] = (Gaussian(), Lattice())
        else:
            quick = Renyi(options.renyi.max_order, min(_QUICK_WORK, options.renyi.work_budget))
            dense = mechanism.allocation.batches_per_epoch <= _DENSE_BATCHES
            self._options = (
                Gaussian(), *((quick,) if dense else ()), Chain(discretisation_loss=_COARSE), Chain(),
                *((Best(options.renyi),) if dense else ()),
            )  # fmt: skip
        self._prepared: list[PreparedAccountant] = []

    def __iter__(self) -> Iterator[PreparedAccountant]:
        for place, options in enumerate(self._options):
            budget.check()
            if place == len(self._prepared):
                self._prepared.append(options.prepare(self._mechanism))
            yield self._prepared[place]


class PreparedAuto(PreparedAccountant):
    """`auto` for one mechanism. Bounds are compared with the lower bound of the whole relation asked for: a direction
    that does not determine the answer need not be known closely."""

    name = "auto"

    def __init__(
        self, options: Auto, mechanism: Mechanism, relation: str | None = None, stages: _Stages | None = None
    ) -> None:
        self.mechanism = mechanism
        self._options, self._relation = options, relation
        self._stages = _Stages(options, mechanism) if stages is None else stages

    def for_relation(self, relation: str) -> PreparedAccountant:
        return PreparedAuto(self._options, self.mechanism, relation, self._stages)

    def _seek(
        self,
        improve: Callable[[PreparedAccountant, Evaluation | None], Evaluation],
        gap_of: Callable[[Evaluation], float],
    ) -> Evaluation:
        """The first bound whose gap is within the tolerance, or the least."""
        best: Evaluation | None = None
        gap, exhausted = math.inf, False
        with budget.time_limit(self._options.time_budget):
            try:
                for stage in self._stages:
                    try:
                        found = improve(stage, best)
                    except CalibrationError:  # orders that do not reach the target
                        continue
                    if best is None or found.value < best.value:
                        best = found
                        gap = math.inf  # should there be no time to measure it
                        gap = gap_of(best)
                    if gap <= self._options.tolerance:
                        break
            except budget.OutOfTime:
                if best is None:
                    raise
                exhausted = True
        assert best is not None  # closed forms always answer
        extra = {"gap": gap, "budget_exhausted": exhausted}
        return Evaluation(best.value, {**best.details, **extra})

    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        relation = self._relation or direction

        def improve(stage: PreparedAccountant, _: Evaluation | None) -> Evaluation:
            return labelled(stage.delta_one_way(noise_multiplier, epsilon, direction), stage, self)

        return self._seek(improve, lambda found: self._gap_at(noise_multiplier, epsilon, found.value, relation))

    def _gap_at(self, sigma: float, epsilon: float, delta: float, relation: str) -> float:
        """By how much ε exceeds what is certainly needed for `delta`."""
        if not 0 < delta < 1:
            return 0.0
        if epsilon == 0:
            below = lower.lower_delta(self.mechanism, sigma, 0.0, relation)
            return delta / below - 1 if below > 0 else math.inf
        below = lower.lower_epsilon(self.mechanism, sigma, delta, relation, epsilon / (1 + self._options.tolerance))
        return epsilon / below - 1 if below > 0 else math.inf

    def delta_for_target(
        self, noise_multiplier: float, epsilon: float, target_delta: float, direction: Direction
    ) -> Evaluation:
        """The first bound that meets the target."""
        return self.first_to_meet(noise_multiplier, epsilon, target_delta, direction)

    def first_to_meet(self, noise_multiplier: float, epsilon: float, delta: float, direction: Direction) -> Evaluation:
        def improve(stage: PreparedAccountant, _: Evaluation | None) -> Evaluation:
            return labelled(stage.first_to_meet(noise_multiplier, epsilon, delta, direction), stage, self)

        found = self._seek(improve, lambda found: -math.inf if found.value <= delta else math.inf)
        return Evaluation(found.value, {key: value for key, value in found.details.items() if key != "gap"})

    def epsilon_one_way(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        below: list[float] = []

        def improve(stage: PreparedAccountant, best: Evaluation | None) -> Evaluation:
            if best is not None and 0 < best.value < math.inf:
                challenged = best.value * (1 - 1e-4)
                if stage.first_to_meet(noise_multiplier, challenged, delta, direction).value > delta:
                    return best
            return labelled(stage.epsilon_one_way(noise_multiplier, delta, direction), stage, self)

        def gap(found: Evaluation) -> float:
            if found.value == 0:
                return 0.0
            if not below:
                relation = self._relation or direction
                below.append(lower.lower_epsilon(self.mechanism, noise_multiplier, delta, relation))
            return found.value / below[0] - 1 if below[0] > 0 else math.inf

        return self._seek(improve, gap)

    def least_noise_one_way(
        self, epsilon: float, delta: float, direction: Direction, start: float, relative_tolerance: float
    ) -> tuple[float, Evaluation]:
        below: list[float] = []
        best: list[tuple[float, Evaluation, PreparedAccountant]] = []

        def improve(stage: PreparedAccountant, _: Evaluation | None) -> Evaluation:
            known = best[0] if best else None
            found = calibrate_one_way(stage.members(), epsilon, delta, direction, start, relative_tolerance, known)
            best[:] = [found]
            return Evaluation(found[0])

        def gap(found: Evaluation) -> float:
            if not below:
                relation = self._relation or direction
                below.append(lower.lower_noise_multiplier(self.mechanism, epsilon, delta, relation))
            return found.value / below[0] - 1 if below[0] > 0 else math.inf

        outcome = self._seek(improve, gap)
        sigma, evaluation, member = best[0]
        found = labelled(evaluation, member, self)
        return sigma, Evaluation(found.value, {**found.details, **outcome.details})

    def deltas_one_way(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        relation = self._relation or direction
        best = [1.0] * len(epsilons)
        probes = sorted({round(k * (len(epsilons) - 1) / (_PROBES - 1)) for k in range(_PROBES)})
        with budget.time_limit(self._options.time_budget):
            try:
                for stage in self._stages:
                    found = stage.deltas_one_way(noise_multiplier, epsilons, direction)
                    best = [min(pair) for pair in zip(best, found, strict=True)]
                    gaps = (self._gap_at(noise_multiplier, epsilons[k], best[k], relation) for k in probes)
                    if all(gap <= self._options.tolerance for gap in gaps):
                        break
            except budget.OutOfTime:
                pass
        return best
