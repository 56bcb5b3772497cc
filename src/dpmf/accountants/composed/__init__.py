"""Several independent throws: the loss distribution of one throw, composed with itself.

Where bins are thrown anew, a run is an adaptive composition of throws (docs/theory/batchings.md). Each throw is
dominated by its own pair of distributions, and dominating pairs compose. The pair of one throw is made from bounds on
δ(ε) by any accountant, and composed by FFT. Where means of different throws have rows in common, one Gaussian mechanism
that all throws share is composed with it. Poisson samples of a Gaussian mechanism are composed the same way.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from dpmf.accountants.composed.pair import Pairs
from dpmf.accountants.least import Least, Part
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, Role
from dpmf.batching import BallsInBins, Poisson
from dpmf.loss.dominating_pair import DominatingPair
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT

K = TypeVar("K")
V = TypeVar("V")

# Proof constant: the relative error of dp_accounting's transforms (docs/theory/floating-point.md, assumptions).
_FFT_ERROR = 8 * UNIT
_LEAST_NOISE = 0.1  # Poisson sampling with less noise than this is answered with δ = 1


@dataclass(frozen=True)
class _Tuning:
    """Knobs: any values give sound bounds.

    Attributes:
      spacing, rough_spacing: of the lattice of losses, as parts of the deviation of the composed loss.
      fine, rough: the relative loss of ε that replacing the bounds by a polygon may cost.
      roughness: how many times larger rough bounds are, about.
      kept: how many composed distributions are remembered.
      tail: the mass of losses that may count as infinite, where no target is known.
      tail_share: the same as a part of the target δ.
      least_tail: it is not made smaller than this.
    """

    spacing: float = 2e-3
    rough_spacing: float = 2e-2
    fine: float = 0.002
    rough: float = 0.05
    roughness: float = 1.2
    kept: int = 8
    tail: float = 1e-12
    tail_share: float = 1e-5
    least_tail: float = 1e-14


_TUNING = _Tuning()


@dataclass(frozen=True)
class Composed(Accountant):
    """An accountant for one throw, whose loss distribution is composed over all throws.

    `accountant` bounds δ(ε) of one throw.
    """

    name: ClassVar[str] = "composed"
    summary: ClassVar[str] = "the loss distribution of one throw, composed over throws"
    rests_on: ClassVar[str] = (
        "dominating pairs compose (Zhu, Dong & Wang 2022); throws with disjoint rows are an adaptive composition"
    )
    role: ClassVar[Role] = "combined"

    accountant: Accountant

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Prepare the composition; the accountant is asked about one throw.

        **Formal guarantees.** Every bound is at least the true δ(ε) of the composed dominating pairs. The pair of one
        throw dominates (`dominating_pair`), its composition dominates the composition (Zhu, Dong & Wang 2022), masses
        that are cut off count as infinite losses, and what the transforms may lose is added.
        """
        name = self.accountant.name
        if isinstance(mechanism.batching, BallsInBins) and mechanism.batching.throws == 1:
            return self.accountant.prepare(mechanism.throw)
        if isinstance(mechanism.batching, Poisson):
            bound: PreparedAccountant = _PoissonSamples(name, mechanism)
        else:
            bound = _Throws(name, mechanism, self.accountant)
        return Least(name, mechanism, [Part(name, lambda: (bound,))])


class _FromDistribution(PreparedAccountant):
    """Answers read off the composed loss distribution at one σ."""

    def __init__(self, name: str, mechanism: Mechanism) -> None:
        self.name, self.mechanism = name, mechanism
        self._known: OrderedDict[tuple[float, Direction, float, bool], Any] = OrderedDict()

    def _compose(self, noise_multiplier: float, direction: Direction, tail: float, rough: bool) -> Any:
        """The composed loss distribution, as dp_accounting holds it; about `tail` of it may count as infinite."""
        raise NotImplementedError

    def _losses(
        self, noise_multiplier: float, direction: Direction, target_delta: float | None, rough: bool = False
    ) -> Any:
        tail = _TUNING.tail if target_delta is None else max(_TUNING.tail_share * target_delta, _TUNING.least_tail)
        return _remembered(
            self._known,
            (noise_multiplier, direction, tail, rough),
            lambda: self._compose(noise_multiplier, direction, tail, rough),
        )

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        return Evaluation(_delta(self._losses(noise_multiplier, direction, target_delta), epsilon), self._details())

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        if self.roughness == 1:
            return None
        return Evaluation(_delta(self._losses(noise_multiplier, direction, target_delta, rough=True), epsilon))

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        losses = self._losses(noise_multiplier, direction, None)
        return [_delta(losses, epsilon) for epsilon in epsilons]

    def _details(self) -> dict[str, Any]:
        return {"throws": self.mechanism.batching.throws}


def _remembered(known: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """What was made for a key, of which the last few are kept."""
    if key not in known:
        known[key] = make()
        if len(known) > _TUNING.kept:
            known.popitem(last=False)
    return known[key]


def _delta(losses: Any, epsilon: float) -> float:
    """δ(ε) of a composed distribution, and what its transforms may have lost.

    A transform of n numbers has an error of at most 8u·log₂ n of its norm; the masses have a norm of at most 1, and a
    sum over n of them at most √n times the norm of the error.
    """
    size = max(float(losses.size), 2.0)
    error = _FFT_ERROR * math.log2(size) * math.sqrt(size)
    return min(1.0, float(losses.get_delta_for_epsilon(epsilon)) * (1 + 64 * UNIT) + error)


class _Throws(_FromDistribution):
    """Throws of balls into bins."""

    roughness = _TUNING.roughness

    def __init__(self, name: str, mechanism: Mechanism, accountant: Accountant) -> None:
        super().__init__(name, mechanism)
        self._accountant = accountant
        self._throws = mechanism.batching.throws
        self._pairs: OrderedDict[tuple[float, float, bool], DominatingPair] = OrderedDict()

    @cached_property
    def _one_throw(self) -> Pairs:
        return Pairs(Least.of(self._accountant.prepare(self.mechanism.throw)))

    def _compose(self, noise_multiplier: float, direction: Direction, tail: float, rough: bool) -> Any:
        pair = _remembered(
            self._pairs, (noise_multiplier, tail, rough), lambda: self._pair(noise_multiplier, tail, rough)
        )
        sign, masses, infinite = 1, pair.upper, pair.upper_only
        if direction == "add":
            sign, masses, infinite = -1, pair.lower, pair.lower_only
        atoms = {sign * int(i): float(mass) for i, mass in zip(pair.losses, masses, strict=True)}
        composed = pld_pmf.create_pmf(atoms, pair.interval, infinite, True).self_compose(self._throws)
        shared = self._throws * math.sqrt(self.mechanism.product_between_throws) / noise_multiplier * (1 + 8 * UNIT)
        if shared > 0:
            gaussian = privacy_loss_distribution.from_gaussian_mechanism(
                1.0, sensitivity=shared, value_discretization_interval=pair.interval
            )
            composed = composed.compose(gaussian._pmf_remove)  # it is the same in both directions
        return composed

    def _pair(self, noise_multiplier: float, tail: float, rough: bool) -> DominatingPair:
        throw = self.mechanism.throw
        variance = throw.gram_sums.total / throw.batching.batches_per_epoch**2 / noise_multiplier**2
        share = _TUNING.rough if rough else _TUNING.fine
        spacing = _TUNING.rough_spacing if rough else _TUNING.spacing
        interval = _lattice(spacing, variance, self._throws)
        each = tail / self._throws
        return self._one_throw.at(noise_multiplier, interval, share, rough=rough, tail=each)


def _lattice(spacing: float, variance: float, throws: int) -> float:
    """A spacing of losses: a power of two near a part of the deviation of the composed loss.

    `variance` is about that of the loss of one throw.
    """
    deviation = math.sqrt(throws * variance)
    return 2.0 ** round(math.log2(spacing * min(max(deviation, 1e-3), 1e3)))


class _PoissonSamples(_FromDistribution):
    """Iterations of a Gaussian mechanism on Poisson samples, by dp_accounting."""

    cheap = True

    def _compose(self, noise_multiplier: float, direction: Direction, tail: float, rough: bool) -> Any:
        batching = self.mechanism.batching
        assert isinstance(batching, Poisson)
        norm = self.mechanism.sensitivity / math.sqrt(batching.throws) * (1 + self.mechanism.gram_error)
        sigma, rate = noise_multiplier / norm * (1 - 8 * UNIT), batching.sampling_rate
        if sigma < _LEAST_NOISE:
            return pld_pmf.create_pmf({}, 1.0, 1.0, True)
        interval = _lattice(_TUNING.spacing, rate**2 * math.expm1(sigma**-2), batching.throws)
        one = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=rate, value_discretization_interval=interval
        )
        return (one._pmf_remove if direction == "remove" else one._pmf_add).self_compose(batching.throws)
