"""dp_accounting: matrix mechanisms under balls-in-bins batching as events, and an accountant that composes them.

event = BallsInBinsMatrixDpEvent(dpmf.strategies.bsr(4), epochs=10, batches_per_epoch=100, noise_multiplier=4.0)
accountant = BallsInBinsPLDAccountant().compose(event).compose(dp_accounting.GaussianDpEvent(20.0))
accountant.get_epsilon(1e-5)
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attr
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import pld_pmf, pld_privacy_accountant, privacy_loss_distribution

from dpmf import validation
from dpmf.accountants.combined.least import Least
from dpmf.accountants.composed.pair import Pairs
from dpmf.accountants.protocol import Accountant
from dpmf.accountants.registry import resolve
from dpmf.api import DEFAULT_ACCOUNTANT
from dpmf.batching import BallsInBins, Poisson
from dpmf.cut import Cut, affordable, raised
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT
from dpmf.run import Run, asked_about, only_mechanism
from dpmf.strategies.base import Strategy

NeighboringRelation = privacy_accountant.NeighboringRelation
_ErrorDetails = privacy_accountant.PrivacyAccountant.CompositionErrorDetails

# Records are assigned to bins independently, so replacing a record by one that contributes nothing removes it.
_RELATIONS = (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL)
_LEAST_FINITE_MASS = 1e-9  # dp_accounting cannot compose a distribution with less mass of finite loss
_CACHED = 64  # how many distributions are kept, a few hundred numbers each


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BallsInBinsMatrixDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """A matrix mechanism run on balls-in-bins batches, or on those of another batching.

    With fixed bins each record is assigned to one of b bins, independently and uniformly, and takes part in the
    iterations i, i + b, i + 2b, ... of its bin i. With x_t the sum of the (clipped) contributions of the records of
    iteration t, the mechanism releases C·x + Z, where C is the strategy and Z has independent entries N(0, σ²) for a
    record whose contributions have norm at most 1. Contributions may depend on what was released before.

    Attributes:
      strategy: C, as given: nothing is column-normalised.
      epochs: k, how often every bin is used.
      batches_per_epoch: b, the number of bins.
      noise_multiplier: σ, for clipping norm 1; 0 is no privacy.
      iterations: N, by default k·b and the gaps. A smaller N with (k−1)·b < N cuts off the last epoch of fixed bins.
      batching: how records get into batches, where bins are not fixed (`dpmf.reshuffled`, `dpmf.Poisson`, ...); it has
        the same epochs and batches.
      cut: how batches are cut (`Run.cut`), which `BallsInBinsPLDAccountant` charges for.
    """

    strategy: Strategy
    epochs: int
    batches_per_epoch: int
    noise_multiplier: float
    iterations: int | None = None
    batching: BallsInBins | Poisson | None = None
    cut: Cut | None = None

    def __attrs_post_init__(self) -> None:
        sigma = validation.non_negative("noise_multiplier", self.noise_multiplier)
        fixed = BallsInBins(self.epochs, self.batches_per_epoch, None if self.batching else self.iterations)
        mechanism = Mechanism(self.strategy, self.batching or fixed)
        batching = mechanism.batching
        if (batching.epochs, batching.batches_per_epoch) != (fixed.epochs, fixed.batches_per_epoch):
            raise validation.wrong("batching", f"of {fixed.name}", batching)
        if self.cut is not None and self.cut.batching != batching:
            raise validation.wrong("cut", f"of {batching.name}", self.cut)
        object.__setattr__(self, "batching", None if batching.fixed else batching)
        # All fields are normalised, so that equal mechanisms are equal events.
        object.__setattr__(self, "strategy", mechanism.strategy)
        for name in ("epochs", "batches_per_epoch", "iterations"):
            object.__setattr__(self, name, getattr(mechanism.batching, name))
        object.__setattr__(self, "noise_multiplier", sigma)

    @classmethod
    def of(cls, mechanism: Mechanism | Run, noise_multiplier: float | None = None) -> BallsInBinsMatrixDpEvent:
        """Return the event of a run, or of running a mechanism with a noise multiplier."""
        if noise_multiplier == 0:  # no privacy, which is an event all the same
            mechanism, sigma, cut = only_mechanism(mechanism), 0.0, None
        else:
            mechanism, sigma, cut = asked_about(mechanism, noise_multiplier)
        bins = mechanism.batching
        other = bins if isinstance(bins, BallsInBins | Poisson) and not bins.fixed else None
        return cls(mechanism.strategy, bins.epochs, bins.batches_per_epoch, sigma, bins.iterations, other, cut)

    @property
    def run(self) -> Run:
        """What the guarantee depends on: mechanism, noise multiplier and cut."""
        run = Run(self.mechanism, self.noise_multiplier)
        cut = self.cut
        return run if cut is None else replace(run, max_batch_size=cut.max_batch_size, records=cut.records)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that is run, which does not include the noise multiplier."""
        fixed = BallsInBins(self.epochs, self.batches_per_epoch, None if self.batching else self.iterations)
        return Mechanism(self.strategy, self.batching or fixed)


@contextlib.contextmanager
def _working(what: str) -> Iterator[None]:
    """Show a spinner if stderr is a terminal: correlated noise takes a while."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"dpmf: {what} ..."):
        yield


@functools.lru_cache(maxsize=_CACHED)
def _cached_distribution(
    event: BallsInBinsMatrixDpEvent, interval: float, accountant: Accountant, tolerance: float
) -> tuple[Any, float]:
    """Return the distribution, and the mass of finite losses in the direction that has less of it."""
    mechanism = event.mechanism
    sigma = mechanism.checked_noise(event.noise_multiplier)
    throws = mechanism.batching.throws
    if isinstance(mechanism.batching, Poisson):
        sampled = privacy_loss_distribution.from_gaussian_mechanism(
            sigma / mechanism.sampled_sensitivity * (1 - 8 * UNIT),
            sampling_prob=mechanism.batching.sampling_rate,
            value_discretization_interval=interval,
        )
        return sampled.self_compose(throws), 1.0
    with _working(f"loss distribution of {mechanism.name}"):
        pair = Pairs(Least.of(accountant.prepare(mechanism.throw))).at(sigma, interval, tolerance)
    remove = {int(index): float(mass) for index, mass in zip(pair.losses, pair.upper, strict=True)}
    add = {-int(index): float(mass) for index, mass in zip(pair.losses, pair.lower, strict=True)}
    distribution = privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.create_pmf(remove, interval, pair.upper_only, True),
        pld_pmf.create_pmf(add, interval, pair.lower_only, True),
    ).self_compose(throws)
    if mechanism.shared_sensitivity > 0:
        gaussian = privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sensitivity=mechanism.shared_sensitivity * (1 + 8 * UNIT), value_discretization_interval=interval
        )
        distribution = distribution.compose(gaussian)
    return distribution, (1 - max(pair.upper_only, pair.lower_only)) ** throws


def loss_distribution(
    event: BallsInBinsMatrixDpEvent,
    *,
    value_discretization_interval: float = 1e-4,
    accountant: str | Accountant = DEFAULT_ACCOUNTANT,
    relative_tolerance: float = 0.003,
) -> Any:
    """Return dp_accounting's `PrivacyLossDistribution` of an event, made from dpmf's bounds on δ(ε).

    The 64 distributions used last are kept.

    Args:
      event: what is run; its noise multiplier must be positive.
      value_discretization_interval: the spacing of the lattice of losses.
      accountant: where the bounds on δ(ε) come from; an accountant that samples is refused.
      relative_tolerance: how much of ε (or of the deviation of the loss, if ε is smaller) the replacement of the bounds
        by a discrete distribution should cost at most. This is a target, not a promise; half of it takes 1.4 times as
        many evaluations of δ.

    **Formal guarantees.** Pessimistic, in both directions: its pair of distributions dominates the mechanism's
    (`dominating_pair`), so every δ(ε) and ε(δ) read from it, or from its composition with other pessimistic
    distributions, is an upper bound, up to the rounding errors of dp_accounting's own arithmetic.
    """
    if not isinstance(event, BallsInBinsMatrixDpEvent):
        raise validation.wrong("event", "a BallsInBinsMatrixDpEvent", event)
    validation.positive("noise_multiplier", event.noise_multiplier)
    if event.cut is not None:
        advice = "BallsInBinsPLDAccountant adds what a cut costs"
        raise ArgumentError("event", f"must be of a run whose batches are not cut: {advice}")
    interval = validation.positive("value_discretization_interval", value_discretization_interval)
    tolerance = validation.probability("relative_tolerance", relative_tolerance)
    return _cached_distribution(event, interval, resolve(accountant), tolerance)[0]


class BallsInBinsPLDAccountant(pld_privacy_accountant.PLDAccountant):  # type: ignore[misc]
    """dp_accounting's `PLDAccountant`, extended by `BallsInBinsMatrixDpEvent`.

    The event may stand alone or inside `ComposedDpEvent` and `SelfComposedDpEvent`, but not inside events that sample.
    If it is composed n times, every run assigns its records to bins anew. Neighbours differ in one record that is added
    or removed, or replaced by one that contributes nothing; `REPLACE_ONE` is not supported.

    Args:
      neighboring_relation: as in `PLDAccountant`.
      value_discretization_interval: the spacing of the lattice of losses.
      accountant: as in `loss_distribution`.
      relative_tolerance: as in `loss_distribution`.

    **Formal guarantees.** The answers are upper bounds, as for `loss_distribution` and `PLDAccountant`. The loss
    distributions of n runs are convolved; ε is not just multiplied by n. Runs that cut their batches are composed as if
    they did not, and δ(ε) of everything is charged e^ε times the sum of their η at the end: on one of two neighbouring
    data sets all outputs together differ from those of uncut runs with no more than that probability
    (docs/theory/batch-sizes.md).
    """

    _pld: Any

    def __init__(
        self,
        neighboring_relation: Any = NeighboringRelation.ADD_OR_REMOVE_ONE,
        value_discretization_interval: float = 1e-4,
        *,
        accountant: str | Accountant = DEFAULT_ACCOUNTANT,
        relative_tolerance: float = 0.003,
    ) -> None:
        interval = validation.positive("value_discretization_interval", value_discretization_interval)
        super().__init__(neighboring_relation, interval)
        self._bounds = resolve(accountant)
        self._cut = 0.0  # the probability that a cut of batches matters
        self._finite = 1.0  # the probability that the losses of all our events are finite
        self._tolerance = validation.probability("relative_tolerance", relative_tolerance)

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if not isinstance(event, BallsInBinsMatrixDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if self.neighboring_relation not in _RELATIONS:
            allowed = " or ".join(relation.name for relation in _RELATIONS)
            message = f"neighboring_relation must be {allowed}, got {self.neighboring_relation.name}"
            return _ErrorDetails(invalid_event=event, error_message=message)
        if not do_compose:
            return None
        if event.noise_multiplier == 0:
            self._contains_non_dp_event = True
            return None
        distribution, finite = _cached_distribution(
            event, self._value_discretization_interval, self._bounds, self._tolerance
        )
        self._cut += 0.0 if event.cut is None else count * event.cut.probability * (1 + 8 * UNIT)
        self._finite *= finite**count
        if self._finite < _LEAST_FINITE_MASS:
            self._contains_non_dp_event = True
        else:
            self._pld = self._pld.compose(distribution.self_compose(count))
        return None

    def get_delta(self, target_epsilon: float) -> float:
        """δ of everything composed, with what cut batches cost."""
        delta = float(super().get_delta(target_epsilon))
        return min(1.0, delta + raised(self._cut, max(target_epsilon, 0.0))) if self._cut else delta

    def get_epsilon(self, target_delta: float) -> float:
        """ε of everything composed, at a δ of which a part pays for cut batches; an error where they cost too much."""
        if not self._cut or self._contains_non_dp_event:
            return float(super().get_epsilon(target_delta))
        return affordable(target_delta, super().get_epsilon, functools.partial(raised, self._cut))
