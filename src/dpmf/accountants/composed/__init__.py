"""Several independent throws: the loss distribution of one throw, composed with itself.

Where bins are thrown anew, a run is an adaptive composition of throws (docs/theory/batchings.md). Each throw is
dominated by its own pair of distributions, and dominating pairs compose. The pair of one throw is made from bounds on
δ(ε) by any accountant, and composed by FFT. Where means of different throws have rows in common, one Gaussian mechanism
that all throws share is composed with it. Poisson samples of a Gaussian mechanism are composed the same way.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from dpmf.accountants.composed.pair import pair_of
from dpmf.accountants.least import Least, Part
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, Role
from dpmf.batching import BallsInBins, Poisson
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array

# Proof constant: the relative error of dp_accounting's transforms (docs/theory/floating-point.md, assumptions).
_FFT_ERROR = 8 * UNIT
_LEAST_NOISE = 0.1  # Poisson sampling with less noise than this is answered with δ = 1


@dataclass(frozen=True)
class _Tuning:
    """Knobs: any values give sound bounds.

    Attributes:
      spacing: the lattice of losses, as a part of the deviation of the composed loss.
      fine, rough: the relative loss of ε that replacing the bounds by a polygon may cost.
      roughness: how many times larger rough bounds are, about.
      kept: how many composed distributions are remembered.
    """

    spacing: float = 2e-4
    fine: float = 0.002
    rough: float = 0.03
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
        self._known: OrderedDict[tuple[float, bool], dict[Direction, Any]] = OrderedDict()

    def _compose(self, noise_multiplier: float, rough: bool) -> dict[Direction, Any]:
        """The composed loss distribution by direction."""
        raise NotImplementedError

    def _losses(self, noise_multiplier: float, rough: bool = False) -> dict[Direction, Any]:
        key = noise_multiplier, rough
        if key not in self._known:
            self._known[key] = self._compose(noise_multiplier, rough)
            if len(self._known) > _TUNING.kept:
                self._known.popitem(last=False)
        return self._known[key]

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        return Evaluation(_delta(self._losses(noise_multiplier)[direction], epsilon), self._details())

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        if self.roughness == 1:
            return None
        return Evaluation(_delta(self._losses(noise_multiplier, rough=True)[direction], epsilon))

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        losses = self._losses(noise_multiplier)[direction]
        return [_delta(losses, epsilon) for epsilon in epsilons]

    def _details(self) -> dict[str, Any]:
        return {"throws": self.mechanism.batching.throws}


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

    @cached_property
    def _one_throw(self) -> Least:
        return Least.of(self._accountant.prepare(self.mechanism.throw))

    def _compose(self, noise_multiplier: float, rough: bool) -> dict[Direction, Any]:
        throw = self.mechanism.throw
        shared = self._throws * math.sqrt(self.mechanism.product_between_throws) / noise_multiplier * (1 + 8 * UNIT)
        variance = throw.gram_sums.total / throw.batching.batches_per_epoch**2 / noise_multiplier**2
        interval = _lattice(variance, self._throws)
        share = _TUNING.rough if rough else _TUNING.fine
        pair = pair_of(self._one_throw, noise_multiplier, interval, share, rough=rough)
        found: dict[Direction, Any] = {}
        sides: tuple[tuple[Direction, int, Array, float], ...] = (
            ("remove", 1, pair.upper, pair.upper_only),
            ("add", -1, pair.lower, pair.lower_only),
        )
        for direction, sign, masses, infinite in sides:
            atoms = {sign * int(i): float(mass) for i, mass in zip(pair.losses, masses, strict=True)}
            composed = pld_pmf.create_pmf(atoms, interval, infinite, True).self_compose(self._throws)
            if shared > 0:
                gaussian = privacy_loss_distribution.from_gaussian_mechanism(
                    1.0, sensitivity=shared, value_discretization_interval=interval
                )
                composed = composed.compose(gaussian._pmf_remove)  # it is the same in both directions
            found[direction] = composed
        return found


def _lattice(variance: float, throws: int) -> float:
    """A spacing of losses: a power of two near a part of the deviation of the composed loss.

    `variance` is about that of the loss of one throw.
    """
    deviation = math.sqrt(throws * variance)
    return 2.0 ** round(math.log2(_TUNING.spacing * min(max(deviation, 1e-3), 1e3)))


class _PoissonSamples(_FromDistribution):
    """Iterations of a Gaussian mechanism on Poisson samples, by dp_accounting."""

    cheap = True

    def _compose(self, noise_multiplier: float, rough: bool) -> dict[Direction, Any]:
        batching = self.mechanism.batching
        assert isinstance(batching, Poisson)
        norm = self.mechanism.sensitivity / math.sqrt(batching.throws) * (1 + self.mechanism.gram_error)
        sigma, rate = noise_multiplier / norm * (1 - 8 * UNIT), batching.sampling_rate
        if sigma < _LEAST_NOISE:
            everything = pld_pmf.create_pmf({}, 1.0, 1.0, True)
            return {"remove": everything, "add": everything}
        one = privacy_loss_distribution.from_gaussian_mechanism(
            sigma,
            sampling_prob=rate,
            value_discretization_interval=_lattice(rate**2 * math.expm1(sigma**-2), batching.throws),
        )
        return {
            "remove": one._pmf_remove.self_compose(batching.throws),
            "add": one._pmf_add.self_compose(batching.throws),
        }
