"""The protocol that every accountant follows.

An `Accountant` is a frozen set of options. `prepare(mechanism)` gives a `PreparedAccountant`, which answers δ(σ, ε) and
ε(σ, δ) one direction at a time. Preparing is cheap and does not depend on budgets: work that every noise multiplier
shares is done when the first question is asked. To add an accountant, write one module with those two classes and add
one line to the registry.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dpmf import budget
from dpmf.mechanism import Mechanism
from dpmf.search import least_noise

Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, ...] = ("remove", "add")
RELATIONS = ("both", "remove", "add")

Role = Literal["bound", "combined", "estimate", "baseline"]
"""What an accountant is: a deterministic bound of dpmf's own; the least of several of those; an estimate by sampling;
a bound that another package proves."""


_ROUGHER = (0.13, 0.1)  # rough bounds exceed others by this power of their roughness: a constant, and one on log 1/δ


def directions_of(relation: str) -> tuple[Direction, ...]:
    """The one-way directions that a neighbouring relation asks for."""
    return DIRECTIONS if relation == "both" else tuple(d for d in DIRECTIONS if d == relation)


@dataclass(frozen=True)
class Evaluation:
    """One bound: `value` is the δ (or ε) asked for, `details` say how it came about.

    `excess` is positive where the value misses the target that was aimed at. Where it is given, a search follows it
    instead of the logarithm of the value over the target, because it is nearly straight in log σ. `slack` is about how
    many times the truth the value is, where an accountant can tell: nobody else is asked where that is nearly 1.
    """

    value: float
    details: Mapping[str, Any] = field(default_factory=dict)
    excess: float | None = None
    slack: float = math.inf


@dataclass(frozen=True)
class Proof:
    """A bound with what it takes to check it without dpmf; docs/certificates.md describes the fields.

    A prepared accountant that has such proofs gives them from a method
    `certificate(noise_multiplier, epsilon, direction)`, which returns None where it has none.

    Attributes:
      delta: the bound on δ(ε).
      kind: which proof it is; the checker has one for each kind.
      fields: plain Python values, ready for JSON.
    """

    delta: float
    kind: str
    fields: Mapping[str, Any]


class PreparedAccountant(ABC):
    """An accountant bound to one mechanism. Its arguments have been validated before they get here.

    Attributes:
      name: the accountant's name.
      mechanism: the mechanism it was prepared for.
      kind: "bound", or what its answers are instead: "estimate" or "high-probability bound".
      roughness: about how many times larger `rough_delta` is than `delta`.
      cheap: whether an evaluation takes milliseconds.
      slow: whether it takes several times as long as that of similar bounds.
      resolution: the relative change of σ below which its answers cannot be told apart: no search goes further.
    """

    name: str
    mechanism: Mechanism
    kind: str = "bound"
    roughness: float = 1.0
    cheap: bool = False
    slow: bool = False
    resolution: float = 0.0

    @abstractmethod
    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        """A bound on δ(ε) in [0, 1] for one direction.

        Args:
          noise_multiplier: σ.
          epsilon: ε ≥ 0.
          direction: "remove" or "add".
          target_delta: the δ that the caller aims at. A bound far from it, on either side, need not be tight.

        Returns:
          The bound; monotone, up to rounding, in σ and in ε.
        """

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        """A bound that costs much less than `delta` and is about `roughness` times larger; None where there is none.

        Searches begin with it, and it tells which of several accountants to ask.
        """
        return None

    def likely(self, rough: float) -> float:
        """About the bound where the rough one is so large: they differ more where δ is small. It proves nothing."""
        power = _ROUGHER[0] - _ROUGHER[1] * math.log(max(rough, 1e-100))
        return rough / math.pow(self.roughness, power)

    def rough_deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """Bounds on δ at many ε, rough ones where there are any."""
        if self.roughness == 1:
            return self.deltas(noise_multiplier, epsilons, direction)
        found = (self.rough_delta(noise_multiplier, epsilon, direction) for epsilon in epsilons)
        return [1.0 if one is None else one.value for one in found]

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """Bounds on δ at many ε. Those that a budget does not reach are 1.

        Accountants that get a whole profile from one computation override this.
        """

        def values() -> Iterator[float]:
            for epsilon in epsilons:
                budget.check()
                yield self.delta(noise_multiplier, epsilon, direction).value

        found = budget.as_far_as_it_goes(values())
        return found + [1.0] * (len(epsilons) - len(found))

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        """The least ε ≥ 0 found with a bound δ(ε) ≤ `delta`, to a relative 10⁻⁴; infinity where none was found.

        **Formal guarantees.** The value returned was itself evaluated and met `delta`: the search ends on the upper,
        sound side of the root. No monotonicity is needed for soundness, only for tightness.
        """
        evaluation = self.delta(noise_multiplier, 0.0, direction, delta)
        if evaluation.value <= delta:
            return Evaluation(0.0, evaluation.details)
        found = least_noise(
            lambda epsilon: self.delta(noise_multiplier, epsilon, direction, delta), delta, 1.0, 1e-4,
            rough=lambda epsilon: self.rough_delta(noise_multiplier, epsilon, direction, delta),
            roughness=self.roughness,
        )  # fmt: skip
        return Evaluation(math.inf) if found is None else Evaluation(found[0], found[1].details)

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        """Why no noise multiplier can meet the target; None where a large enough one can."""
        return None


class Accountant(ABC):
    """Options of an accountant; subclasses are frozen dataclasses.

    Attributes:
      name: what the command line and the results call it.
      summary: one line for tables.
      rests_on: the theorem that its bounds follow from, in one line; `dpmf verify` prints it.
      role: what kind of answer it gives.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    rests_on: ClassVar[str] = "see the Formal guarantees in its documentation"
    role: ClassVar[Role] = "bound"

    @abstractmethod
    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Bind the options to a mechanism; a ValueError where the accountant does not cover it."""

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        """This accountant, with options that suit the size of the mechanism.

        None where it does not cover the mechanism, its package is not installed, or it would take hours.
        """
        return self


def suited(accountants: Iterable[Accountant], mechanism: Mechanism) -> list[Accountant]:
    """Those of the accountants that suit a mechanism, in the same order."""
    found = (accountant.suits(mechanism) for accountant in accountants)
    return [accountant for accountant in found if accountant is not None]
