"""Conditional composition: outside a bad event, the mechanism is a sequence of independent Gaussian-mixture steps.

Given all earlier outcomes, a step is a Gaussian mixture whose weights are the posterior over the bins. Outside an event
of probability δ_E these weights are dominated by fixed ones (`_reverse_hazard`), and the steps with fixed weights
compose like independent mechanisms (`dpmf.loss.distribution`). What remains is to choose δ_E, here. The accountant is
good at small ε and few epochs. Proofs: docs/theory/conditional.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpmf import budget, validation
from dpmf.accountants.conditional._balance import balance
from dpmf.accountants.conditional._reverse_hazard import Family, ReverseHazards
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.loss.distribution import LossDistribution, compose
from dpmf.loss.gaussian import gaussian_delta, gaussian_epsilon
from dpmf.loss.mixtures import Mixtures
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT
from dpmf.recent import Recent

DEFAULT_TEMPERATURES = (math.inf, 10**-1, 10**-0.5, 1.0, 10**0.5, 10.0)
# The range of means, in units of σ, in which double precision serves; see `_hopeless` and `_effective_noise`.
_LARGEST_MEAN, _SMALLEST_MEAN = 1e5, 1e-9
_GRAMS_HELD = 3  # b × b arrays at a time


@dataclass(frozen=True)
class _Tuning:
    """How the probability δ_E of the bad event is chosen, and for which mechanisms. Any values give sound bounds.

    Attributes:
      shares: δ_E as a share of the target δ, where several are tried.
      factors: multiples of a balanced δ_E that are tried in addition.
      first_event: the δ_E at which balancing begins.
      floor: contributions to δ far below this share of δ_E need no accuracy.
      full_family_work: N·b² up to which the tail bounds take seconds with all temperatures.
      most_work: N·b² up to which they take seconds with the uniform ψ only.
      far: where an estimate of H exceeds the target by this factor, the bound is not worth computing.
      free_event: the δ_E of that estimate where no target is given.
    """

    shares: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9)
    factors: tuple[float, ...] = (0.2, 0.5, 1.5, 1.8)
    first_event: float = 1e-6
    floor: float = 1e-3
    full_family_work: float = 3e7
    most_work: float = 3e8
    far: float = 100.0
    free_event: float = 1e-3


_TUNING = _Tuning()


@dataclass(frozen=True)
class Conditional(Accountant):
    """Options of conditional composition.

    Attributes:
      family: tail bounds: "am-gm" (ψ uniform) or "variational" (the best of several ψ).
      option: the variational family: 1, ψ uniform; 2, softmax of −|ρ_k − μ_j|²/t for R's component ρ_k; 3, softmax of
        −|μ_i − μ_j|²/t.
      temperatures: t > 0 of options 2 and 3; ∞ is the uniform ψ.
      bad_event_share: δ_E as a share of δ, strictly between 0 and 1.
      optimise_bad_event: try several shares as well and keep the best.
    """

    name: ClassVar[str] = "conditional"
    summary: ClassVar[str] = "conditional composition: per-step Gaussian mixtures outside a bad event"
    rests_on: ClassVar[str] = (
        "conditional composition (Choquette-Choo et al. 2023, Thm 3.1) of dominated Gaussian mixtures"
    )

    family: str = "variational"
    option: int = 3
    temperatures: Sequence[float] = DEFAULT_TEMPERATURES
    bad_event_share: float = 0.5
    optimise_bad_event: bool = False

    def __post_init__(self) -> None:
        validation.choice("family", self.family, ("variational", "am-gm"))
        validation.integer("option", self.option, at_least=1, at_most=3)
        validation.probability("bad_event_share", self.bad_event_share)
        validation.flag("optimise_bad_event", self.optimise_bad_event)
        try:
            if isinstance(self.temperatures, str | bytes):  # whose elements would be taken for numbers
                raise TypeError
            values = tuple(
                math.inf if value == math.inf else validation.positive("temperatures", value)
                for value in self.temperatures
            )
        except TypeError:
            raise validation.wrong("temperatures", "positive numbers", self.temperatures) from None
        if not values:
            raise ValueError("temperatures must be at least one positive number, got none")
        object.__setattr__(self, "temperatures", values)

    def prepare(self, mechanism: Mechanism) -> PreparedConditional:
        return PreparedConditional(self, mechanism)

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        work = mechanism.batching.iterations * mechanism.batching.batches_per_epoch**2
        if work > _TUNING.most_work:
            return None
        return self if work <= _TUNING.full_family_work else replace(self, family="am-gm")

    def variational_family(self) -> Family:
        if self.family == "am-gm" or self.option == 1:
            return Family(True, (), False)
        finite = tuple(sorted({t for t in self.temperatures if t < math.inf}))
        return Family(math.inf in self.temperatures, finite, self.option == 2)


class PreparedConditional(PreparedAccountant):
    """Conditional composition of one mechanism.

    The σ-independent terms of the tail bounds are computed once per direction, at its first use, and serve every σ.

    **Formal guarantees.** For each δ_E the bound is δ_E + H, H ≥ δ(ε) of the composed dominating mixtures: the
    conditional composition theorem (Choquette-Choo et al. 2023, Theorem 3.1) with the bad event's probability taken
    under the first distribution of the pair: P for "remove", Q for "add". Which δ_E is used may depend on everything
    but the outcome, so the best of several is sound too. Where no step needs a tail bound (b = 1, identical means)
    there is no bad event and δ_E = 0.
    """

    def __init__(self, options: Conditional, mechanism: Mechanism) -> None:
        self.name = options.name
        self.options = options
        self.mechanism = mechanism
        self._hazards: dict[Direction, ReverseHazards] = {}
        self._recent: Recent[tuple[float, float, Direction], Mixtures] = Recent(8)

    @cached_property
    def _quick(self) -> PreparedConditional:
        """The same with the uniform ψ only."""
        return self if self.options.family == "am-gm" else replace(self.options, family="am-gm").prepare(self.mechanism)

    @cached_property
    def _largest(self) -> float:
        budget.claim(_GRAMS_HELD * 8.0 * self.mechanism.batching.batches_per_epoch**2)
        return math.sqrt(float(self.mechanism.gram.diagonal().max()))

    def reverse_hazards(self, direction: Direction) -> ReverseHazards:
        if direction not in self._hazards:
            self._hazards[direction] = ReverseHazards(self.mechanism, direction, self.options.variational_family())
        return self._hazards[direction]

    def _hopeless(self, noise_multiplier: float) -> bool:
        """Whether there is so little noise that the answer δ = 1 need not be computed."""
        return self._largest > _LARGEST_MEAN * noise_multiplier

    def _effective_noise(self, noise_multiplier: float) -> float:
        """σ, or less where it is out of all proportion: δ falls with σ, so a bound for less noise holds for more."""
        return min(noise_multiplier, self._largest / _SMALLEST_MEAN) if self._largest > 0 else 1.0

    def mixtures(self, noise_multiplier: float, bad_event: float, direction: Direction) -> Mixtures:
        """The dominating steps for δ_E = `bad_event`."""
        return self._recent.get(
            (noise_multiplier, bad_event, direction),
            lambda: self.reverse_hazards(direction).mixtures(self._effective_noise(noise_multiplier), bad_event),
        )

    def _compose(
        self,
        noise_multiplier: float,
        bad_event: float,
        direction: Direction,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
    ) -> LossDistribution:
        steps, sigma = self.mixtures(noise_multiplier, bad_event, direction), self._effective_noise(noise_multiplier)
        return compose(steps, sigma, direction, epsilon=epsilon, delta=delta, floor=_TUNING.floor * bad_event)

    def _gaussian(self, noise_multiplier: float, direction: Direction) -> float | None:
        """The sensitivity, in units of σ, of the Gaussian mechanism that this one is; None if it is not one."""
        if self.reverse_hazards(direction).live_steps:
            return None
        sensitivity = self.mixtures(1.0, 0.5, direction).gaussian
        return None if sensitivity is None else sensitivity / noise_multiplier * (1 + 4 * UNIT)

    def _bad_event(self, wanted: float, direction: Direction) -> float:
        return wanted if self.reverse_hazards(direction).live_steps else 0.0

    def _evaluate(self, noise_multiplier: float, epsilon: float, bad_event: float, direction: Direction) -> Evaluation:
        """The bound δ_E + H(ε) for this δ_E."""
        if self._hopeless(noise_multiplier):
            return Evaluation(1.0, {"bad_event": 0.0})
        sensitivity = self._gaussian(noise_multiplier, direction)
        if sensitivity is not None:
            return Evaluation(gaussian_delta(sensitivity, epsilon), {"bad_event": 0.0})
        loss = self._compose(noise_multiplier, bad_event, direction, epsilon=epsilon)
        spent = self._bad_event(bad_event, direction)
        value = min(1.0, (loss.delta(epsilon) + spent) * (1 + 2 * UNIT))
        return Evaluation(value, {"bad_event": spent, "loss_interval": loss.interval})

    def _shares(self) -> tuple[float, ...]:
        share = self.options.bad_event_share
        more = (s for s in _TUNING.shares if 0 < s < 1 and s != share)
        return (share, *more) if self.options.optimise_bad_event else (share,)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        """A bound on δ(ε).

        With a target, δ_E is a fixed share of it, which is what calibration should ask for. Without one, δ_E is sought
        between 10⁻³⁰ and ½ until it is the share asked for of the bound, to a few percent; all bounds met on the way
        are sound, and the least is returned.
        """
        if target_delta is not None:
            found = (self._evaluate(noise_multiplier, epsilon, s * target_delta, direction) for s in self._shares())
            return min(found, key=lambda evaluation: evaluation.value)
        share = self.options.bad_event_share
        odds = math.log(share / (1 - share))
        best = Evaluation(1.0, {"bad_event": 0.0})

        def excess(log_event: float) -> float:
            """log of H over its share, falling in δ_E."""
            nonlocal best
            event = math.exp(log_event)
            found = self._evaluate(noise_multiplier, epsilon, event, direction)
            if found.value < best.value:
                best = found
            if not found.details["bad_event"]:
                return 0.0  # no bad event, or no hope: nothing to balance
            rest = found.value - event
            return math.log(rest) + odds - log_event if rest > 0 else -math.inf

        balance(excess, math.log(_TUNING.first_event), math.log(1e-30), math.log(0.5))
        if self.options.optimise_bad_event and best.details["bad_event"]:
            event = best.details["bad_event"]
            for factor in _TUNING.factors:
                excess(math.log(min(event * factor, 0.5)))
        return best

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        """The bound 1 where the bound proper is expected to be far above the target; None elsewhere.

        With the weights of the uniform ψ, which take a tenth of the time, every step is about a Gaussian mechanism
        whose sensitivity is the mean of its components. Where even that composition misses the target by far, nobody
        need wait for the better weights and for their composition.

        **Formal guarantees.** δ ≤ 1. The estimate decides what is computed, and is never returned.
        """
        if self._hopeless(noise_multiplier):
            return Evaluation(1.0, {"bad_event": 0.0})
        aim = target_delta or _TUNING.free_event
        event = self.options.bad_event_share * aim
        quick = self if direction in self._hazards else self._quick
        steps = quick.mixtures(noise_multiplier, event, direction)
        means = np.add.reduceat(steps.means * steps.weights, steps.starts[:-1]) if len(steps) else np.zeros(0)
        sensitivity = math.sqrt(float(steps.counts @ means**2)) / noise_multiplier
        likely = gaussian_delta(min(sensitivity, 1e100), epsilon)
        return Evaluation(1.0, {"bad_event": 0.0}) if likely > _TUNING.far * aim else None

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        """The least ε found; each share of δ costs two compositions, the second sharpest at the first one's answer."""
        if self._hopeless(noise_multiplier):
            return Evaluation(math.inf, {"bad_event": 0.0})
        sensitivity = self._gaussian(noise_multiplier, direction)
        if sensitivity is not None:
            return Evaluation(gaussian_epsilon(sensitivity, delta), {"bad_event": 0.0})
        best = Evaluation(math.inf, {"bad_event": 0.0})
        for share in self._shares():
            event = share * delta
            spent = self._bad_event(event, direction)
            rest = (delta - spent) * (1 - 2 * UNIT)
            loss = self._compose(noise_multiplier, event, direction, delta=rest)
            epsilon = loss.epsilon(rest)
            if 0 < epsilon < math.inf:
                loss = self._compose(noise_multiplier, event, direction, epsilon=epsilon)
                epsilon = min(epsilon, loss.epsilon(rest))
            if epsilon < best.value:
                best = Evaluation(epsilon, {"bad_event": spent, "loss_interval": loss.interval})
        return best

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """A whole profile from one composition per half decade of δ_E, per decade below 10⁻¹⁰, down to 10⁻²⁰."""
        if len(epsilons) <= 3 or self._hopeless(noise_multiplier):
            return super().deltas(noise_multiplier, epsilons, direction)
        if self._gaussian(noise_multiplier, direction) is not None:
            return super().deltas(noise_multiplier, epsilons, direction)
        best = [1.0] * len(epsilons)
        odds = (1 - self.options.bad_event_share) / self.options.bad_event_share
        for exponent in (*(0.5 * half for half in range(1, 20)), *range(10, 21)):
            event = 10**-exponent
            loss = self._compose(noise_multiplier, event, direction, delta=min(odds * event, 0.9))
            spent = self._bad_event(event, direction)
            found = ((loss.delta(e) + spent) * (1 + 2 * UNIT) for e in epsilons)
            best = [min(old, value) for old, value in zip(best, found, strict=True)]
            if min(best) > 3 * event:
                break
        return best
