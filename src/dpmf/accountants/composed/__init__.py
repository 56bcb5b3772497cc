"""Several independent throws: the loss distribution of one throw, composed with itself.

Where bins are thrown anew, a run is an adaptive composition of throws (docs/theory/batchings.md). Each throw is
dominated by its own pair of distributions, and dominating pairs compose. The pair of one throw is made from bounds on
δ(ε) by any accountant, and composed by FFT. Where means of different throws have rows in common, one Gaussian mechanism
that all throws share is composed with it. Poisson samples of a Gaussian mechanism are composed the same way.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from dpmf.accountants.composed.pair import pair_of
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.least import Least, Part
from dpmf.accountants.protocol import DIRECTIONS, Accountant, Direction, Evaluation, PreparedAccountant, Role
from dpmf.batching import BallsInBins, Poisson
from dpmf.loss.composition import Atoms, Composition
from dpmf.loss.dominating_pair import DominatingPair
from dpmf.loss.gaussian import gaussian_delta, gaussian_epsilon, least_epsilon
from dpmf.loss.poisson import PoissonSample
from dpmf.loss.profile_points import Profile, ProfilePoints
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT


@dataclass(frozen=True)
class _Tuning:
    """Knobs: any values give sound bounds.

    Attributes:
      spacing: the lattice of losses, as a part of the deviation of the composed loss.
      fine, rough: the relative loss of ε that replacing the bounds by a polygon may cost.
      closed: the same where the bounds are closed forms.
      tail: closed forms are followed up to the ε where δ of one throw falls below this.
      roughness: how many times larger rough bounds are, about.
      kept: how many composed distributions are remembered.
    """

    spacing: float = 2e-4
    fine: float = 0.002
    rough: float = 0.03
    closed: float = 0.0005
    tail: float = 1e-20
    roughness: float = 1.2
    kept: int = 8


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
        self._known: OrderedDict[tuple[float, bool], dict[Direction, Composition]] = OrderedDict()

    def _compose(self, noise_multiplier: float, rough: bool) -> dict[Direction, Composition]:
        """The composed loss by direction."""
        raise NotImplementedError

    def _losses(self, noise_multiplier: float, rough: bool = False) -> dict[Direction, Composition]:
        key = noise_multiplier, rough
        if key not in self._known:
            self._known[key] = self._compose(noise_multiplier, rough)
            if len(self._known) > _TUNING.kept:
                self._known.popitem(last=False)
        return self._known[key]

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        value = self._losses(noise_multiplier)[direction].delta(epsilon)
        return Evaluation(value, {"throws": self.mechanism.batching.throws})

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        if self.roughness == 1:
            return None
        return Evaluation(self._losses(noise_multiplier, rough=True)[direction].delta(epsilon))

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        losses = self._losses(noise_multiplier)[direction]
        return [losses.delta(epsilon) for epsilon in epsilons]


class _Throws(_FromDistribution):
    """Throws of balls into bins."""

    roughness = _TUNING.roughness

    def __init__(self, name: str, mechanism: Mechanism, accountant: Accountant) -> None:
        super().__init__(name, mechanism)
        self._accountant = accountant
        self._throws = mechanism.batching.throws

    @cached_property
    def _one_throw(self) -> Least:
        return Least.of(self._accountant.prepare(self.mechanism.throw))

    def _compose(self, noise_multiplier: float, rough: bool) -> dict[Direction, Composition]:
        throw, throws = self.mechanism.throw, self._throws
        between = throws * (throws - 1) * self.mechanism.product_between_throws
        shared = math.sqrt(between) / noise_multiplier * (1 + 8 * UNIT)
        variance = throw.gram_sums.total / throw.batching.batches_per_epoch**2 / noise_multiplier**2
        interval = _lattice(throws * variance + shared**2)
        share = _TUNING.rough if rough else _TUNING.fine
        pair = pair_of(self._one_throw, noise_multiplier, interval, share, rough=rough)
        parts = [(pair, throws)]
        if shared > 0:
            parts.append((_gaussian_pair(shared, interval), 1))
        return _by_direction(parts)


def _by_direction(parts: Sequence[tuple[DominatingPair, int]]) -> dict[Direction, Composition]:
    return {way: Composition([(Atoms.of(pair, way), count) for pair, count in parts]) for way in DIRECTIONS}


def _lattice(variance: float) -> float:
    """A spacing of losses: a power of two near a part of the deviation of the composed loss.

    `variance` is about that of the composed loss.
    """
    return 2.0 ** round(math.log2(_TUNING.spacing * min(max(math.sqrt(variance), 1e-3), 1e3)))


def _gaussian_pair(sensitivity: float, interval: float) -> DominatingPair:
    """A pair that dominates the Gaussian mechanism, for σ = 1."""

    def deltas(epsilons: Sequence[float], _: bool) -> list[float]:
        return [gaussian_delta(sensitivity, epsilon) for epsilon in epsilons]

    largest = gaussian_epsilon(sensitivity, _TUNING.tail)
    return _closed_pair(interval, dict.fromkeys(DIRECTIONS, deltas), dict.fromkeys(DIRECTIONS, largest))


def _closed_pair(interval: float, profiles: Mapping[str, Profile], largest: Mapping[str, float]) -> DominatingPair:
    return ProfilePoints(interval, profiles, largest).refine(_TUNING.closed)


class _PoissonSamples(_FromDistribution):
    """Iterations of a Gaussian mechanism on Poisson samples: the profile of one of them has a closed form."""

    cheap = True

    def _compose(self, noise_multiplier: float, rough: bool) -> dict[Direction, Composition]:
        batching = self.mechanism.batching
        assert isinstance(batching, Poisson)
        norm = self.mechanism.sensitivity / math.sqrt(batching.throws) * (1 + self.mechanism.gram_error)
        scale, rate = norm / noise_multiplier * (1 + 8 * UNIT), batching.sampling_rate
        variance = batching.throws * rate**2 * math.expm1(min(scale**2, 100.0))
        sampled = PoissonSample(scale, rate)
        ways: dict[str, Callable[[float], float]] = {way: partial(sampled.delta, direction=way) for way in DIRECTIONS}
        profiles: dict[str, Profile] = {way: partial(_asked, delta) for way, delta in ways.items()}
        largest = {way: least_epsilon(delta, _TUNING.tail) for way, delta in ways.items()}
        return _by_direction([(_closed_pair(_lattice(variance), profiles, largest), batching.throws)])


def _asked(delta: Callable[[float], float], epsilons: Sequence[float], _: bool) -> list[float]:
    return [delta(epsilon) for epsilon in epsilons]
