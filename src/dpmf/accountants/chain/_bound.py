"""The bound of one majorant: for every σ and ε a law is made, and one of the inversions reads the option off it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dpmf import budget
from dpmf.accountants.chain._certificate import described
from dpmf.accountants.chain._inversion import (
    Inversion,
    Law,
    chernoff,
    invert_calls,
    invert_puts,
    invert_tilted,
    pilot,
)
from dpmf.accountants.chain._overlaps import OverlapModel
from dpmf.accountants.chain._spreads import Resolution
from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant, Proof
from dpmf.loss.gaussian import gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import FLOOR, UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast bounds are. All positive values give sound bounds.

    Attributes:
      resolution: spacings for a discretisation loss of 0.005.
      coarse: the factor on spacings of coarse laws.
      fine_loss: the part of a value that smoothing may cost.
      coarse_loss: the same for coarse laws.
      coarse_loss_together: the same for several strikes: it is meant for the farthest of them.
      largest_epsilon: beyond this ε, the Gaussian mechanism without amplification answers.
      variances: of G/σ²; outside this range, the Gaussian mechanism without amplification answers.
      overlaps_alone: the same for overlapping separators at one ε, where others are nearly as good and quicker.
      overlaps_together: the same at many ε, of which few are worth their time.
      roughness_of_overlaps: their coarse bounds are larger by about this factor; they have few nodes.
      far: a coarse bound this many times above or below a target is not refined.
      steep: θ(K − n) from which a call's transform, tilted, is not dominated by the bulk of T.
      far_strike: K/n from which single terms may reach the strike before the bulk does.
      many: number of frequencies of a coarse inversion from which another kind is tried.
      few_puts: frequencies up to which puts serve all strikes of a group.
      few_together: frequencies of a coarse pass up to which one tilt serves all strikes of a group.
      same_route: change of log(G/σ²) over which the same inversion is expected to stay the best.
      same_value: change of log(G/σ²) over which the value is known well enough to choose the law by it.
      clearly: another inversion is taken where its value is below this part of that of the one which was tried first.
      noise: the part of a value that rounding errors may be before another inversion is tried.
      group: differences of the ε whose strikes share a pass over the frequencies: always, and where δ falls slowly.
      fall: the part that δ at the end of a longer group is expected to be of the one at its beginning, at the least.
      range_together: the part that δ at the largest ε of a group is expected to be of the one before the group.
      most_shared: frequencies of a coarse pass beyond which strikes do not share it (tilted, others).
      least_delta: smaller δ need not be bounded tightly.
      negligible: smaller δ are not improved on when there is a target.
      profile_floor: where δ is below this at one ε, it is not refined at larger ones.
      chernoff_tilts: tilts that Chernoff's bound tries, in units of the pilot's.
    """

    resolution: Resolution = field(default_factory=Resolution)
    coarse: float = 2.0
    fine_loss: float = 0.01
    coarse_loss: float = 0.1
    coarse_loss_together: float = 0.05
    largest_epsilon: float = 200.0
    variances: tuple[float, float] = (1e-9, 300.0)
    overlaps_alone: float = 0.5
    overlaps_together: float = 2.0
    roughness_of_overlaps: float = 1.35
    far: float = 30.0
    steep: float = 9.0
    far_strike: float = 3.0
    many: int = 64
    few_puts: int = 128
    few_together: int = 300
    same_route: float = 0.2
    same_value: float = 0.03
    clearly: float = 0.98
    noise: float = 0.025
    group: tuple[float, float] = (0.65, 1.0)
    fall: float = 1e-3
    range_together: float = 1e-6
    most_shared: tuple[int, int] = (300, 600)
    least_delta: float = 1e-15
    negligible: float = 1e-100
    profile_floor: float = 1e-13
    chernoff_tilts: tuple[float, ...] = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15)


_TUNING = _Tuning()


class Model(Protocol):
    """A Gram matrix whose Gaussian field is a chain."""

    @property
    def size(self) -> int: ...

    def variances(self) -> Array: ...

    def variance_of_sum(self) -> float: ...

    def scaled(self, factor: float) -> Model: ...

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> Law: ...


@dataclass(frozen=True)
class _Route:
    """Which inversion to use: "tilted", "puts" (parity for calls) or "calls", the last with its plan."""

    name: str
    plan: tuple[float, float] | None = None


class Unamplified(PreparedAccountant):
    """G ≤ max G: the Gaussian mechanism without amplification."""

    name = "chain"

    def __init__(self, mechanism: Mechanism, largest: float) -> None:
        self.mechanism = mechanism
        self._largest = largest * (1 + 1e-14)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        sensitivity = min(math.sqrt(self._largest) / noise_multiplier * (1 + 4 * UNIT), 1e150)
        return Evaluation(gaussian_delta(sensitivity, epsilon), {"family": "unamplified"})

    def certificate(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Proof:
        """What it takes to check the bound without dpmf."""
        return Proof(self.delta(noise_multiplier, epsilon, direction).value, "gaussian", {"form": "largest entry"})


@dataclass(frozen=True)
class _Found:
    """A bound on δ(ε), and how it was found; `law` is that of the inversion, if this is the fine one."""

    value: float
    frequencies: int
    tilt: float
    law: Law | None = None
    inversion: Inversion | None = None


class ChainBound(PreparedAccountant):
    """The bound of one majorant, or that of the Gaussian mechanism without amplification where it is smaller."""

    name = "chain"
    roughness = 1.25

    def __init__(
        self,
        mechanism: Mechanism,
        model: Model,
        *,
        family: str,
        largest: float,
        discretisation_loss: float = 0.005,
        max_frequencies: int = 2048,
    ) -> None:
        self.mechanism, self.family, self.model = mechanism, family, model
        self._plain = Unamplified(mechanism, largest)
        self.slow = isinstance(model, OverlapModel)
        if self.slow:
            self.roughness = _TUNING.roughness_of_overlaps
        self._largest = float(model.variances().max())
        self._resolution = _TUNING.resolution.scaled(math.sqrt(min(discretisation_loss, 1.0) / 0.005))
        self._most = max_frequencies
        # Which inversion won when a target was last aimed at, by sign and ε, and the largest variance of G/σ² then.
        self._routes: dict[tuple[int, float], tuple[_Route, float, float]] = {}

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        return self._bound(noise_multiplier, epsilon, direction, target_delta, rough=False)

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        """A bound on coarse nodes, with more smoothing: a fraction of the work."""
        return self._bound(noise_multiplier, epsilon, direction, target_delta, rough=True)

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """Bounds on δ at many ε: neighbouring strikes share a pass, and what that leaves open is found one by one.

        **Formal guarantees.** A law made for the largest strike bounds the options at smaller ones too: what its cuts
        and tails lose is bounded by expectations that do not depend on the strike, because (·)_+ is 1-Lipschitz, or,
        for puts, by the largest strike. δ falls with ε, so a bound at a smaller ε is one at a larger ε too.
        """
        if len(epsilons) < 4:
            return super().deltas(noise_multiplier, epsilons, direction)
        return self._profile(noise_multiplier, epsilons, direction, rough=False)

    def rough_deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """As `deltas`, on coarse nodes and with more smoothing."""
        return self._profile(noise_multiplier, epsilons, direction, rough=True)

    def _profile(
        self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction, *, rough: bool
    ) -> list[float]:
        order = sorted(range(len(epsilons)), key=lambda k: epsilons[k])
        found = [1.0] * len(epsilons)

        def groups() -> Iterator[None]:
            above, left, width = 1.0, order, _TUNING.group[0]
            while left:
                budget.check()
                group = [k for k in left if epsilons[k] <= epsilons[left[0]] + width]
                left = left[len(group) :]
                values = self._together(noise_multiplier, [epsilons[k] for k in group], direction, above, rough)
                for k, value in zip(group, values, strict=True):
                    found[k] = above = min(above, value)
                passed, fallen = epsilons[group[-1]] - epsilons[group[0]], found[group[0]] / above
                slow = fallen > 1 and passed * math.log(1 / _TUNING.fall) >= _TUNING.group[1] * math.log(fallen)
                width = _TUNING.group[slow]
                yield

        budget.as_far_as_it_goes(groups())
        return found

    def _together(
        self, noise_multiplier: float, epsilons: list[float], direction: Direction, above: float, rough: bool
    ) -> list[float]:
        """δ at a few neighbouring ε, where `above` is a bound for a smaller ε."""
        plain = [self._plain.delta(noise_multiplier, epsilon, direction).value for epsilon in epsilons]
        above = min(above, plain[0])
        if above <= _TUNING.profile_floor:
            return [above] * len(epsilons)
        shared: list[float | None] = [None] * len(epsilons)
        if self._applies(noise_multiplier, epsilons[-1], _TUNING.overlaps_together):
            model = self.model.scaled(1 / noise_multiplier)
            sign = 1 if direction == "remove" else -1
            shared = self._options_together(model, np.array(epsilons), sign, above, rough)
        found = []
        for epsilon, value, least in zip(epsilons, shared, plain, strict=True):
            if value is None and above > _TUNING.profile_floor:
                value = self._bound(noise_multiplier, epsilon, direction, None, rough).value
            above = min(above, least, above if value is None else value)
            found.append(above)
        return found

    def _options_together(
        self, model: Model, epsilons: Array, sign: int, above: float, rough: bool
    ) -> list[float | None]:
        """δ at several ε by few passes; None where these are no better than what was known."""
        found: list[float | None] = [None] * len(epsilons)
        n, slip = model.size, _slip(model, float(epsilons.max()))
        strikes = n * np.exp(sign * epsilons) * (1 - sign * slip)
        scales = np.exp(epsilons * (sign < 0)) / n * (1 + 4 * slip)
        top, centre = float(strikes.max()), float(strikes[len(strikes) // 2])
        likely = _TUNING.range_together * above * float((1 / n / scales).min())
        law = model.law(top, sign, self._resolution.scaled(_TUNING.coarse), likely)
        start = pilot(law, centre, _scale(model, centre))
        if start is None:
            return found
        tilt, least = start[0], math.inf
        passes: dict[str, tuple[_Route, list[int]]] = {}
        scouts = np.ones(len(strikes))
        for place, scouted in enumerate(self._scout(law, tilt, strikes)):
            if scouted is None:
                continue
            inversion, route = scouted
            bound = inversion.value + law.surplus
            scouts[place] = bound
            few = inversion.frequencies <= _TUNING.most_shared[route.name != "tilted"]
            if few and rough:
                found[place] = min(1.0, bound * float(scales[place]) + FLOOR)
            elif few and bound * scales[place] < self.roughness * above:
                passes.setdefault(route.name, (route, []))[1].append(place)
                least = min(least, bound)
        if passes:
            law = model.law(top, sign, self._resolution, max(least / max(top, n), _TUNING.least_delta))
        for route, places in passes.values():
            for place, one in zip(places, self._invert(law, tilt, route, strikes[places], scouts[places]), strict=True):
                if one is not None:
                    found[place] = min(1.0, (one.value + law.surplus) * float(scales[place]) + FLOOR)
        return found

    def _applies(self, noise_multiplier: float, epsilon: float, most_of_overlaps: float) -> bool:
        least, most = _TUNING.variances
        if self.slow:
            most = most_of_overlaps
        return least <= self._largest / noise_multiplier**2 <= most and epsilon <= _TUNING.largest_epsilon

    def _bound(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target: float | None, rough: bool
    ) -> Evaluation:
        plain = self._plain.delta(noise_multiplier, epsilon, direction)
        found = self._found(noise_multiplier, epsilon, direction, target, rough, plain.value)
        if found is None or not found.value < plain.value:
            return plain
        return Evaluation(found.value, {"family": self.family, "frequencies": found.frequencies, "tilt": found.tilt})

    def certificate(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Proof | None:
        """What it takes to check the bound without dpmf: the majorant, the grids of its law, and the inversion."""
        found = self._found(noise_multiplier, epsilon, direction, None, False, 1.0)
        if found is None or found.law is None or found.inversion is None:
            return None
        fields = described(self.model, found.law, found.inversion, noise_multiplier)
        return None if fields is None else Proof(found.value, "chain", fields)

    def _found(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target: float | None, rough: bool,
        plain: float,
    ) -> _Found | None:  # fmt: skip
        """The bound of the majorant, where `plain`, that of the Gaussian mechanism, is not good enough."""
        close_enough = plain <= (_TUNING.negligible if target else _TUNING.least_delta)
        if close_enough or not self._applies(noise_multiplier, epsilon, _TUNING.overlaps_alone):
            return None
        model, sign = self.model.scaled(1 / noise_multiplier), 1 if direction == "remove" else -1
        return budget.attempt(lambda: self._option(model, epsilon, sign, target, rough), None)

    def _option(self, model: Model, epsilon: float, sign: int, target: float | None, rough_only: bool) -> _Found | None:
        """A bound on δ(ε); None where no inversion works."""
        n, slip = model.size, _slip(model, epsilon)
        strike = n * math.exp(sign * epsilon) * (1 - sign * slip)
        scale = (1.0 if sign > 0 else math.exp(epsilon)) / n * (1 + 4 * slip)
        coarse = self._resolution.scaled(_TUNING.coarse)
        largest = float(model.variances().max())
        strikes = np.array([strike])
        # Near a target the route that won before will do again, and needs no pilot.
        known = self._routes.get((sign, epsilon)) if target else None
        route, rough = None, None
        tilt, likely = 0.0, 0.25
        change = abs(math.log(known[1] / largest)) if known and known[0].name != "tilted" else math.inf
        if known and change < _TUNING.same_value and not rough_only:
            found = self._finely(model, strikes, scale, sign, known[0], 0.0, known[2])
            if found is not None:
                return found
        law = model.law(strike, sign, coarse, (target or 1e-8) / 10)
        if known and change < _TUNING.same_route:
            route = known[0]
            rough = self._invert(law, 0.0, route, strikes, coarse=True)[0]
        if rough is None:
            start = pilot(law, strike, _scale(model, strike))
            if start is None:
                return None
            tilt, log_bound = start
            # Chernoff's bound is good enough where δ is far below what was asked for.
            enough = target / _TUNING.far if target else _TUNING.profile_floor if rough_only else _TUNING.least_delta
            if math.exp(min(log_bound, 600.0)) * scale < enough:
                deep = model.law(strike, sign, coarse, enough / 10)  # its tails suit so small a value
                bound = chernoff(deep, tilt * np.array(_TUNING.chernoff_tilts)) * scale
                if bound <= enough:
                    return _Found(bound + FLOOR, 0, tilt)
            likely = math.exp(min(log_bound - math.log(strike), 0.0)) / 4
            rough, route = self._scout(law, tilt, strikes)[0] or (None, None)
        if rough is not None:
            bound = (rough.value + law.surplus) * scale
            likely = min(likely, bound / math.exp(max(0.0, -sign * epsilon)))
            near = target is not None and target / _TUNING.far <= bound <= target * _TUNING.far
            if near and route is not None:
                self._routes[sign, epsilon] = route, largest, likely
            if rough_only or (target and not near):
                return _Found(min(1.0, bound + FLOOR), rough.frequencies, rough.tilt)
        if route is None:
            return None
        return self._finely(model, strikes, scale, sign, route, tilt, likely)

    def _finely(
        self, model: Model, strikes: Array, scale: float, sign: int, route: _Route, tilt: float, likely: float
    ) -> _Found | None:
        law = model.law(float(strikes[0]), sign, self._resolution, likely)
        done = self._invert(law, tilt, route, strikes)[0]
        if done is None:
            return None
        value = min(1.0, (done.value + law.surplus) * scale + FLOOR)
        return _Found(value, done.frequencies, done.tilt, law, done)

    def _scout(self, law: Law, tilt: float, strikes: Array) -> list[tuple[Inversion, _Route] | None]:
        """Per strike the smallest bound of the inversions worth trying, on a coarse law, and how it was found.

        The tilted one is for strikes far out in a light tail, puts and parity for values well above rounding errors,
        calls for the rest: strikes that single terms reach before the bulk does.
        """
        sign, n = law.option.sign, law.option.terms
        centre = float(strikes[len(strikes) // 2])
        steep = sign < 0 or tilt * (centre - n) > _TUNING.steep
        if steep and (sign < 0 or centre <= _TUNING.far_strike * n):
            names: tuple[str, ...] = ("tilted",)
        else:
            names = ("puts", "calls", "tilted") if steep else ("puts", "calls")
        best: list[tuple[Inversion, _Route] | None] = [None] * len(strikes)
        made: dict[str, list[Inversion | None]] = {}
        if len(strikes) > 1 and names[0] != "tilted":
            puts = made["puts"] = self._invert(law, tilt, _Route("puts"), strikes, coarse=True)
            if all(one and _quiet(one, law) and one.frequencies <= _TUNING.few_puts for one in puts):
                return [None if one is None else (one, _Route("puts")) for one in puts]
            # One tilt serves many strikes of a light tail, with far fewer frequencies than the others take; but where
            # the bulk falls more steeply than the tail, it is not one for the bulk.
            together = made["tilted"] = self._invert(law, tilt, _Route("tilted"), strikes, coarse=True)
            if all(one and _quiet(one, law) and one.frequencies <= _TUNING.few_together for one in together):
                for place, (one, put) in enumerate(zip(together, puts, strict=True)):
                    assert one is not None
                    better = put and _quiet(put, law) and put.value < _TUNING.clearly * one.value
                    best[place] = (put, _Route("puts")) if put and better else (one, _Route("tilted"))
                return best
        for name in names:
            found = made.get(name) or self._invert(law, tilt, _Route(name), strikes, coarse=True)
            for place, one in enumerate(found):
                held = best[place]
                if one is not None and (held is None or one.value < held[0].value):
                    best[place] = one, _Route(name, one.plan)
            if all(one is not None and _quiet(one, law) for one in found):
                break
        if not steep and all(one and one[0].frequencies >= _TUNING.many for one in best):
            # Near the mean of a sum that hardly varies, the tilted inversion has a shorter period.
            for place, one in enumerate(self._invert(law, tilt, _Route("tilted"), strikes, coarse=True)):
                held = best[place]
                if one and held and 2 * one.frequencies < held[0].frequencies and one.value < 1.1 * held[0].value:
                    best[place] = one, _Route("tilted")
        return best

    def _invert(
        self, law: Law, tilt: float, route: _Route, strikes: Array, expected: Array | None = None, coarse: bool = False
    ) -> list[Inversion | None]:
        loss = _TUNING.fine_loss
        if coarse:
            loss = _TUNING.coarse_loss if len(strikes) == 1 else _TUNING.coarse_loss_together
        if route.name == "puts":
            return invert_puts(law, strikes, loss=loss, most=self._most)
        if route.name == "calls":
            return invert_calls(law, strikes, loss=loss, most=self._most, plan=route.plan)
        return invert_tilted(law, strikes, tilt, loss=loss, most=self._most, expected=expected)


def _quiet(inversion: Inversion, law: Law) -> bool:
    """Whether rounding errors are a small part of the value."""
    return inversion.noise < _TUNING.noise * (inversion.value + law.surplus)


def _scale(model: Model, strike: float) -> float:
    """About the deviation of T, or the strike where that is smaller."""
    return min(math.sqrt(model.variance_of_sum()), strike)


def _slip(model: Model, epsilon: float) -> float:
    """A bound on the relative errors of the a_i and of the strike, by which the strike is moved.

    See "Positions" in docs/theory/floating-point.md, section "The chain".
    """
    largest = float(model.variances().max())
    return 64 * UNIT * (8 + largest + epsilon + 40 * math.sqrt(largest))
