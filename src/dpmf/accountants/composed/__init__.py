"""Several independent throws: the loss distribution of one throw, composed with itself.

Where bins are thrown anew, a run is an adaptive composition of throws (docs/theory/batchings.md). Each throw is
dominated by its own pair of distributions, and dominating pairs compose. The pair of one throw is made from bounds on
δ(ε) by any accountant, and composed by FFT. Where means of different throws have rows in common, one Gaussian mechanism
that all throws share is composed with it. Poisson samples of a Gaussian mechanism are composed the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from dpmf.accountants.combined.least import Least, Part
from dpmf.accountants.composed.pair import Pairs
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.protocol import DIRECTIONS, Accountant, Direction, Evaluation, PreparedAccountant, Role
from dpmf.batching import BallsInBins, Poisson
from dpmf.loss.composition import Atoms, Composition
from dpmf.loss.dominating_pair import DominatingPair
from dpmf.loss.gaussian import gaussian_delta, least_epsilon
from dpmf.loss.poisson import PoissonSample
from dpmf.loss.profile_points import Profile, ProfilePoints
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT
from dpmf.recent import Recent
from dpmf.search import usual_slope


@dataclass(frozen=True)
class _Tuning:
    """Knobs: any values give sound bounds.

    Attributes:
      spacing, rough_spacing: of the lattice of losses, as parts of the deviation of the composed loss.
      fine, rough: the relative loss of ε that replacing the bounds by a polygon may cost.
      closed: the same where a bound costs next to nothing: closed forms, and throws without correlated noise.
      closed_spacing: their lattice, as a part of the deviation of one loss of many.
      roughness: how many times larger rough bounds are, about.
      kept: how many composed distributions are remembered.
      tail: the mass of losses that may count as infinite, where no target is known.
      tail_share: the same as a part of the target δ.
      least_tail: it is not made smaller than this.
      farthest: the largest factor between the target ε and the one of the target δ that is told apart.
      closeness: how closely that factor is found.
      usual_power: ε is taken to fall with this power of σ.
      resolution: the relative change of σ that the points of a profile, which move with σ, blur.
      closed_resolution: the same where they are close together.
    """

    spacing: float = 2e-3
    rough_spacing: float = 2e-2
    fine: float = 0.002
    rough: float = 0.03
    closed: float = 0.0002
    closed_spacing: float = 0.05
    roughness: float = 1.2
    kept: int = 8
    tail: float = 1e-12
    tail_share: float = 5e-4
    least_tail: float = 1e-14
    farthest: float = 64.0
    closeness: float = 1e-4
    usual_power: float = 1.3
    resolution: float = 7e-4
    closed_resolution: float = 1e-4


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
        that are cut off count as infinite losses, and what the transforms may lose is added. Where means of different
        throws have products of up to S, those are raised to S, which is one Gaussian mechanism of sensitivity
        √(T(T − 1)·S) composed with T independent throws. No amplification at all is a second bound.
        """
        name = self.accountant.name
        if isinstance(mechanism.batching, BallsInBins) and mechanism.batching.throws == 1:
            return self.accountant.prepare(mechanism.throw)
        if isinstance(mechanism.batching, Poisson):
            bound: PreparedAccountant = _PoissonSamples(name, mechanism)
        else:
            bound = _Throws(name, mechanism, self.accountant)
        whole = Gaussian()
        return Least(
            name, mechanism, [Part(name, lambda: (bound,)), Part(whole.name, lambda: (whole.prepare(mechanism),))]
        )


class _FromDistribution(PreparedAccountant):
    """Answers read off the composed loss distribution at one σ."""

    def __init__(self, name: str, mechanism: Mechanism) -> None:
        self.name, self.mechanism = name, mechanism
        self._known: Recent[tuple[float, Direction, float, bool], Composition] = Recent(_TUNING.kept)

    def _compose(self, noise_multiplier: float, direction: Direction, tail: float, rough: bool) -> Composition:
        """The composed loss; about `tail` of it may count as infinite."""
        raise NotImplementedError

    def _losses(
        self, noise_multiplier: float, direction: Direction, target_delta: float | None, rough: bool = False
    ) -> Composition:
        tail = _TUNING.tail if target_delta is None else max(_TUNING.tail_share * target_delta, _TUNING.least_tail)
        return self._known.get(
            (noise_multiplier, direction, tail, rough),
            lambda: self._compose(noise_multiplier, direction, tail, rough),
        )

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        losses = self._losses(noise_multiplier, direction, target_delta)
        value = losses.delta(epsilon)
        details = {"throws": self.mechanism.batching.throws}
        return Evaluation(value, details, _excess(losses, value, epsilon, target_delta))

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        if self.roughness == 1:
            return None
        losses = self._losses(noise_multiplier, direction, target_delta, rough=True)
        value = losses.delta(epsilon)
        return Evaluation(value, excess=_excess(losses, value, epsilon, target_delta))

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        losses = self._losses(noise_multiplier, direction, None)
        return [losses.delta(epsilon) for epsilon in epsilons]


def _excess(losses: Composition, value: float, epsilon: float, target_delta: float | None) -> float | None:
    """How far the ε of the target δ is above the one asked for, in logarithms: about linear in log σ."""
    if target_delta is None or epsilon == 0:
        return None
    low, high = 1 / _TUNING.farthest, _TUNING.farthest
    if value > target_delta:
        low = 1.0
    else:
        high = 1.0
    while high / low > 1 + _TUNING.closeness:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if losses.delta(epsilon * middle) > target_delta else (low, middle)
    found = math.log(math.sqrt(low * high)) * usual_slope(target_delta) / _TUNING.usual_power
    return max(found, 1e-9) if value > target_delta else min(found, 0.0)


class _Throws(_FromDistribution):
    """Throws of balls into bins."""

    roughness = _TUNING.roughness

    def __init__(self, name: str, mechanism: Mechanism, accountant: Accountant) -> None:
        super().__init__(name, mechanism)
        correlated = bool(mechanism.throw.lags[1:].any())
        self._fine = _TUNING.fine if correlated else _TUNING.closed
        self.resolution = _TUNING.resolution if correlated else _TUNING.closed_resolution
        self._accountant = accountant
        self._throws = mechanism.batching.throws
        self._pairs: Recent[tuple[float, float, bool], tuple[DominatingPair, ...]] = Recent(_TUNING.kept)

    @cached_property
    def _one_throw(self) -> Pairs:
        return Pairs(Least.of(self._accountant.prepare(self.mechanism.throw)))

    def _compose(self, noise_multiplier: float, direction: Direction, tail: float, rough: bool) -> Composition:
        pairs = self._pairs.get((noise_multiplier, tail, rough), lambda: self._pair(noise_multiplier, tail, rough))
        counts = (self._throws, 1)
        return Composition([(Atoms.of(pair, direction), n) for pair, n in zip(pairs, counts, strict=False)])

    def _pair(self, noise_multiplier: float, tail: float, rough: bool) -> tuple[DominatingPair, ...]:
        """The pair of one throw, and that of what all throws have in common, if there is anything."""
        throw, throws = self.mechanism.throw, self._throws
        variance = throws * throw.gram_sums.total / throw.batching.batches_per_epoch**2 / noise_multiplier**2
        shared = self.mechanism.shared_sensitivity / noise_multiplier * (1 + 8 * UNIT)
        share = _TUNING.rough if rough else self._fine
        spacing = _TUNING.rough_spacing if rough else _TUNING.spacing
        interval = _lattice(spacing * math.sqrt(variance + shared**2))
        pair = self._one_throw.at(noise_multiplier, interval, share, rough=rough, tail=tail / throws)
        if shared == 0:
            return (pair,)
        gaussian = partial(gaussian_delta, shared)
        return pair, _closed_pair(interval, {"remove": gaussian, "add": gaussian}, share, tail)


def _lattice(spacing: float) -> float:
    """A spacing of losses, as a power of two and within reason."""
    return 2.0 ** round(math.log2(min(max(spacing, 1e-7), 1.0)))


def _closed_pair(
    interval: float, deltas: Mapping[str, Callable[[float], float]], share: float, tail: float
) -> DominatingPair:
    """The pair of profiles that have closed forms, which are upper bounds."""
    profiles: dict[str, Profile] = {way: partial(_asked, delta) for way, delta in deltas.items()}
    largest = {way: least_epsilon(delta, tail) for way, delta in deltas.items()}
    return ProfilePoints(interval, profiles, largest, tail).refine(share)


def _asked(delta: Callable[[float], float], epsilons: Sequence[float], _: bool) -> list[float]:
    return [delta(epsilon) for epsilon in epsilons]


class _PoissonSamples(_FromDistribution):
    """Iterations of a Gaussian mechanism on Poisson samples: the profile of one of them has a closed form."""

    cheap = True

    def _compose(self, noise_multiplier: float, direction: Direction, tail: float, rough: bool) -> Composition:
        batching = self.mechanism.batching
        assert isinstance(batching, Poisson)
        norm = self.mechanism.sampled_sensitivity
        sampled = PoissonSample(norm / noise_multiplier * (1 + 8 * UNIT), batching.sampling_rate)
        deviation = sampled.rate * math.sqrt(math.expm1(min(sampled.sensitivity**2, 100.0)))
        spacing = min(_TUNING.spacing * math.sqrt(batching.throws), _TUNING.closed_spacing)
        ways: dict[str, Callable[[float], float]] = {way: partial(sampled.delta, direction=way) for way in DIRECTIONS}
        pair = _closed_pair(_lattice(spacing * deviation), ways, _TUNING.closed, tail / batching.throws)
        return Composition([(Atoms.of(pair, direction), batching.throws)])
