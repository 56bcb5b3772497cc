"""The cheapest accountant whose bound is certified to be close to the truth; else the tightest there is time for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dpmf import budget, lower_bounds, validation
from dpmf.accountants.combined.best import members
from dpmf.accountants.combined.least import combined
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.protocol import Accountant, Direction, PreparedAccountant, Role
from dpmf.accountants.renyi import Renyi
from dpmf.mechanism import Mechanism

_LOWER_SHARE = 0.2  # the part of the time left that a lower bound may take


@dataclass(frozen=True)
class Auto(Accountant):
    """Options of the automatic choice.

    Attributes:
      tolerance: a bound is good enough if it is this close, relatively, to the certified lower bound on the noise
        multiplier (or on ε).
      time_budget: seconds for one question, None for no limit.
      renyi: the options of its Rényi accountant.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the cheapest accountant within a tolerance of the certified lower bound"
    rests_on: ClassVar[str] = "that of the accountant it chose; which one it is does not matter for soundness"
    role: ClassVar[Role] = "combined"

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
        """Prepare the members of `best`, closed forms first.

        **Formal guarantees.** What is returned is the bound of a deterministic accountant, for the direction asked
        for, whatever made the search end. The gap is the one between that bound and a certified lower bound.
        """
        chosen = dict.fromkeys((Gaussian(), *members(mechanism, self.renyi)))
        rule = _CloseToLowerBound(mechanism, self.tolerance)
        return combined(self.name, mechanism, tuple(chosen), stop=rule, time_budget=self.time_budget)


@dataclass(frozen=True)
class _CloseToLowerBound:
    """A bound is good enough once it is within a tolerance of the certified lower bound.

    Bounds are compared with the lower bound of the whole neighbouring relation: a direction that does not determine
    the answer need not be known closely.
    """

    mechanism: Mechanism
    tolerance: float
    relation: str | None = None

    def for_relation(self, relation: str) -> _CloseToLowerBound:
        return replace(self, relation=relation)

    def good_delta(self, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
        """A δ that is exceeded at a slightly smaller ε: a bound this small needs an ε close to the least possible."""
        factor, relation = 1 + self.tolerance, self.relation or direction
        below = _in_share_of_time(
            lambda: lower_bounds.lower_delta(self.mechanism, noise_multiplier, epsilon / factor, relation)
        )
        return 1.0 if below * factor >= 1 else below * factor if epsilon == 0 else below

    def lower_epsilon(self, noise_multiplier: float, delta: float, direction: Direction, start: float = 1.0) -> float:
        relation = self.relation or direction
        return _in_share_of_time(
            lambda: lower_bounds.lower_epsilon(self.mechanism, noise_multiplier, delta, relation, start)
        )

    def lower_noise(self, epsilon: float, delta: float, direction: Direction) -> float:
        relation = self.relation or direction
        return _in_share_of_time(lambda: lower_bounds.lower_noise_multiplier(self.mechanism, epsilon, delta, relation))


def _in_share_of_time(ask: Callable[[], float]) -> float:
    left = budget.seconds_left()
    with budget.time_limit(None if math.isinf(left) else _LOWER_SHARE * left):
        return ask()
