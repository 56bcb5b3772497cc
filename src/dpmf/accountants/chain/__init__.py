"""The chain accountant: correlated noise, both directions, every ε, without sampling (docs/tightness.md: how close).

δ(ε) is a call (remove) or a put (add) on a basket of log-normals with covariance G/σ². G is replaced by an entrywise
larger Gram matrix whose Gaussian field is a low-order chain (`_majorants`); the basket's transform is then a product of
small matrices (`_chain_laws`), and the option is read off it by a one-sided inversion (`_transfer`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np

from dpmf import budget, validation
from dpmf.accountants.chain import _families
from dpmf.accountants.chain._calls import PLANS, PlannedInversion, invert_calls
from dpmf.accountants.chain._laws import Law, Resolution
from dpmf.accountants.chain._puts import invert_puts
from dpmf.accountants.chain._separators import SeparatorModel
from dpmf.accountants.chain._stationary import StationaryModel, stationary_models
from dpmf.accountants.chain._transfer import Inversion, invert, pilot
from dpmf.accountants.least import Least, Part
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.loss.gaussian import gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array

Plans: TypeAlias = tuple[tuple[float, float], ...]
Model: TypeAlias = _families.Model | StationaryModel

_LARGEST_EPSILON = 200.0
_LEAST_VARIANCE, _LARGEST_VARIANCE = 1e-9, 300.0  # of G/σ²; outside, the plain Gaussian mechanism answers
_NEGLIGIBLE = 1e-100
_DENSE_BATCHES = 2000  # batches up to which covariances are held as b × b matrices
_FEW_BLOCKS = 8
_GRAMS_HELD = 10  # b × b arrays at a time, while majorants are fitted
_FAR = 30.0  # a coarse bound this many times above or below a target is not refined
_STEEP = 9.0  # θ(K − n) from which a call's transform, tilted, is not dominated by the bulk of T
_MANY = 64  # frequencies of a coarse inversion from which another kind is tried
_SAME_ROUTE = 0.2  # change of log G/σ² over which the same inversion stays the best
_FAR_STRIKE = 3.0  # K/n from which single terms may reach the strike before the bulk does
# Frequencies of a coarse pass for several strikes; strikes that need more differ too much.
_MOST_SHARED = {"tilted": 150, "puts": 600, "calls": 600}
_GROUP = 0.5  # ε that strikes of one pass may differ by
_NOISE = 0.02  # part of a value that the allowance for rounding may be
_LEAST_DELTA = 1e-15  # smaller values need not be close
_PROFILE_FLOOR = 1e-13  # in a profile, what is below this at one ε is not refined at larger ones


@dataclass(frozen=True)
class Route:
    """Which inversion to use: "tilted", "puts" (parity for calls) or "calls", the last with its plan."""

    name: str
    plan: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chain(Accountant):
    """Options of the chain accountant.

    Attributes:
      discretisation_loss: the part of the noise multiplier that the spreads may cost; spacings follow its root. More
        than 1 is as 1.
      max_frequencies: frequencies of one inversion at most; with fewer the bound gets looser, never wrong.
    """

    name: ClassVar[str] = "chain"
    summary: ClassVar[str] = "chains that dominate the noise, by transfer matrices; correlated noise, every ε"
    rests_on: ClassVar[str] = (
        "Kahane's inequality: entrywise larger Gram matrices dominate; transforms of chains inverted from above"
    )

    discretisation_loss: float = 0.005
    max_frequencies: int = 2048

    def __post_init__(self) -> None:
        validation.positive("discretisation_loss", self.discretisation_loss)
        validation.integer("max_frequencies", self.max_frequencies, at_least=64, at_most=2**24)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Fit the majorants, when they are first needed.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) of the dominating pair. G, rounded up
        by its own rounding error, is replaced by Gram matrices that are larger in every entry, and E f(A) increases
        with every entry for convex f (Kahane's inequality), in both directions. The laws of the majorants are
        discretised from above (`LineLaw`, `TermTable`, `hat_weights`), inverted from above (`invert`,
        `invert_puts`, `invert_calls`), and all that is cut off is added. The smallest of several such bounds is
        returned; the Gaussian mechanism of the largest entry (no amplification, the same inequality) is one of them.
        """
        return Least(self.name, mechanism, [Part(self.name, lambda: self._bounds(mechanism))])

    def _bounds(self, mechanism: Mechanism) -> list[PreparedAccountant]:
        b = mechanism.batching.batches_per_epoch
        models: list[tuple[str, Model]]
        if b > _DENSE_BATCHES:
            largest = float(mechanism.lags.max())
            models = budget.as_far_as_it_goes(stationary_models(mechanism.lags))
        else:
            budget.claim(_GRAMS_HELD * 8.0 * b * b)
            gram = mechanism.gram_upper()
            largest = float(gram.max())
            models = list(_families.models(gram))
        bounds: list[PreparedAccountant] = [
            _PreparedChain(mechanism, largest, self, name, model) for name, model in models
        ]
        return [*bounds, _Unamplified(mechanism, largest)]


def _variance_of_sum(model: Model) -> float:
    """Var Σ a_i, about: it only says where to look for a tilt."""
    if isinstance(model, StationaryModel):
        return model.excess()
    if isinstance(model, SeparatorModel) and model.blocks > 2 * _FEW_BLOCKS:
        # All blocks are alike.
        few = replace(model, blocks=_FEW_BLOCKS)
        return _variance_of_sum(few) * model.blocks / _FEW_BLOCKS
    return float(np.expm1(np.minimum(model.covariance(), 300.0)).sum())


class _Unamplified(PreparedAccountant):
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


class _PreparedChain(PreparedAccountant):
    """One majorant."""

    name = "chain"
    roughness = 1.25

    def __init__(self, mechanism: Mechanism, largest: float, options: Chain, family: str, model: Model) -> None:
        self.mechanism = mechanism
        self._plain = _Unamplified(mechanism, largest)
        self._options, self._family, self._model = options, family, model
        self._largest = float(model.variances().max())
        self._resolution = Resolution().scaled(math.sqrt(min(options.discretisation_loss, 1.0) / 0.005))
        # What won last time a target was aimed at, and for which largest variance.
        self._routes: dict[tuple[int, float], tuple[Route, float]] = {}

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        return self._bound(noise_multiplier, epsilon, direction, target_delta)

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        """A bound on coarse nodes, with more smoothing: a fraction of the work."""
        return self._bound(noise_multiplier, epsilon, direction, target_delta, rough=True)

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """Neighbouring strikes in groups, one pass over the frequencies for each; one by one what that leaves open.

        **Formal guarantees.** A law made for the largest strike bounds the options at smaller ones too: what its cuts
        and tails lose is bounded by expectations that do not depend on the strike, because (·)_+ is 1-Lipschitz, or,
        for puts, by the largest strike. δ falls with ε, so a bound at a smaller ε is one at a larger ε too.
        """
        if len(epsilons) < 4:
            return super().deltas(noise_multiplier, epsilons, direction)
        order = sorted(range(len(epsilons)), key=lambda k: epsilons[k])
        found = [1.0] * len(epsilons)

        def groups() -> Iterator[None]:
            above, left = 1.0, order
            while left:
                budget.check()
                group = [k for k in left if epsilons[k] <= epsilons[left[0]] + _GROUP]
                left = left[len(group) :]
                values = self._together(noise_multiplier, [epsilons[k] for k in group], direction, above)
                for k, value in zip(group, values, strict=True):
                    found[k] = above = min(above, value)
                yield

        budget.as_far_as_it_goes(groups())
        return found

    def _together(
        self, noise_multiplier: float, epsilons: list[float], direction: Direction, above: float
    ) -> list[float]:
        """δ at a few neighbouring ε, where `above` is a bound for a smaller ε."""
        plain = [self._plain.delta(noise_multiplier, epsilon, direction).value for epsilon in epsilons]
        above = min(above, plain[0])
        if above <= _PROFILE_FLOOR:
            return [above] * len(epsilons)
        shared: list[float | None] = [None] * len(epsilons)
        if self._applies(noise_multiplier, epsilons[-1]):
            model = self._model.scaled(1 / noise_multiplier)
            shared = self._options_together(model, np.array(epsilons), 1 if direction == "remove" else -1, above)
        found = []
        for epsilon, value, least in zip(epsilons, shared, plain, strict=True):
            if value is None and above > _PROFILE_FLOOR:
                value = self.delta(noise_multiplier, epsilon, direction).value
            above = min(above, least, above if value is None else value)
            found.append(above)
        return found

    def _options_together(self, model: Model, epsilons: Array, sign: int, above: float) -> list[float | None]:
        """δ at several ε by few passes; None where these are no better than what was known."""
        found: list[float | None] = [None] * len(epsilons)
        n, slip = model.size, self._slip(model, float(epsilons.max()))
        strikes = n * np.exp(sign * epsilons) * (1 - sign * slip)
        scales = np.exp(epsilons * (sign < 0)) / n * (1 + 4 * slip)
        top, centre = float(strikes.max()), float(strikes[len(strikes) // 2])
        law = model.law(top, sign, self._resolution.scaled(2.0), 1e-3 * above * float((1 / n / scales).min()))
        start = pilot(law.transform, sign, self._scale(model, centre), abs(centre - n), top - centre)
        if start is None:
            return found
        tilt, least = start[0], math.inf
        passes: dict[str, tuple[Route, list[int]]] = {}
        for place, scouted in enumerate(self._scout(law, sign, tilt, strikes)):
            if scouted is None or scouted[0].frequencies > _MOST_SHARED[scouted[1].name]:
                continue
            bound = scouted[0].value + law.surplus
            if bound * scales[place] < above:
                passes.setdefault(scouted[1].name, (scouted[1], []))[1].append(place)
                least = min(least, bound)
        if passes:
            law = model.law(top, sign, self._resolution, max(least / max(top, n), _LEAST_DELTA))
        for route, places in passes.values():
            for place, one in zip(places, self._invert(law, sign, tilt, route, strikes[places], 0.01), strict=True):
                if one is not None:
                    found[place] = min(1.0, (one.value + law.surplus) * float(scales[place]) + 1e-250)
        return found

    @staticmethod
    def _scale(model: Model, strike: float) -> float:
        return min(math.sqrt(_variance_of_sum(model)), strike)

    @staticmethod
    def _slip(model: Model, epsilon: float) -> float:
        """Relative errors of the a_i and of the strike, which move the strike: errors of exponents, of shares between
        rows and of the means of up to n transitions all amount to a slightly different position of a factor."""
        largest = float(model.variances().max())
        return 64 * UNIT * (8 + largest + epsilon + 40 * math.sqrt(largest)) * (1 + model.size / 16)

    def _applies(self, noise_multiplier: float, epsilon: float) -> bool:
        variance = self._largest / noise_multiplier**2
        return _LEAST_VARIANCE <= variance <= _LARGEST_VARIANCE and epsilon <= _LARGEST_EPSILON

    def _bound(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target: float | None, rough: bool = False
    ) -> Evaluation:
        plain = self._plain.delta(noise_multiplier, epsilon, direction)
        close_enough = plain.value <= (_NEGLIGIBLE if target else _LEAST_DELTA)
        if close_enough or not self._applies(noise_multiplier, epsilon):
            return plain
        model, sign = self._model.scaled(1 / noise_multiplier), 1 if direction == "remove" else -1
        found = budget.attempt(lambda: self._option(model, epsilon, sign, target, rough), None)
        if found is None or not found[0] < plain.value:
            return plain
        return Evaluation(found[0], {"family": self._family, "frequencies": found[1], "tilt": found[2]})

    def _option(
        self, model: Model, epsilon: float, sign: int, target: float | None, rough_only: bool
    ) -> tuple[float, int, float] | None:
        n = model.size
        slip = self._slip(model, epsilon)
        strike = n * math.exp(sign * epsilon) * (1 - sign * slip)
        scale = (1.0 if sign > 0 else math.exp(epsilon)) / n * (1 + 4 * slip)
        coarse = model.law(strike, sign, self._resolution.scaled(2.0), (target or 1e-8) / 10)
        # Near a target the route that won before will do again, and needs no pilot.
        largest = float(model.variances().max())
        known = self._routes.get((sign, epsilon)) if target else None
        route, rough = None, None
        tilt, likely = 0.0, 0.25
        if known and known[0].name != "tilted" and abs(math.log(known[1] / largest)) < _SAME_ROUTE:
            route = known[0]
            rough = self._follow(coarse, sign, 0.0, route, strike, 0.1)
        if rough is None:
            start = pilot(coarse.transform, sign, self._scale(model, strike), abs(strike - n))
            if start is None:
                return None
            tilt, log_bound = start
            # Chernoff's bound, good enough for what nobody asks about.
            enough = target / _FAR if target else _PROFILE_FLOOR if rough_only else _LEAST_DELTA
            if math.exp(min(log_bound, 600.0)) * scale < enough:
                chernoff = self._chernoff(model, strike, sign, tilt, enough) * scale
                if chernoff <= enough:
                    return chernoff + 1e-250, 0, tilt
            likely = math.exp(min(log_bound - math.log(strike), 0.0)) / 4
            rough, route = self._scout(coarse, sign, tilt, np.array([strike]))[0] or (None, None)
        if rough is not None:
            bound = (rough.value + coarse.surplus) * scale
            likely = min(likely, bound / math.exp(max(0.0, -sign * epsilon)))
            near = target is not None and target / _FAR <= bound <= target * _FAR
            if near and route is not None:
                self._routes[sign, epsilon] = route, largest
            if rough_only or (target and not near):
                return min(1.0, bound + 1e-250), rough.frequencies, rough.tilt
        if route is None:
            return None
        law = model.law(strike, sign, self._resolution, likely)
        done = self._follow(law, sign, tilt, route, strike, 0.01)
        if done is None:
            return None
        return min(1.0, (done.value + law.surplus) * scale + 1e-250), done.frequencies, done.tilt

    def _chernoff(self, model: Model, strike: float, sign: int, tilt: float, likely: float) -> float:
        """E(T − K)_+ ≤ E e^(θ(T−K))/(eθ), for the law on coarse nodes whose tails suit a value as small as `likely`."""
        law = model.law(strike, sign, self._resolution.scaled(2.0), likely / 10)
        tilts = tilt * np.array([1.0, 0.7, 0.5, 0.35, 0.25, 0.15])
        moments = law.transform((sign * tilts).astype(np.complex128)).real
        with np.errstate(invalid="ignore"):
            bounds = moments * (1 + 2 * law.rounding + 1e-9) / (math.e * tilts)
        usable = bounds[np.isfinite(bounds)]
        return float(usable.min()) + law.surplus if len(usable) else math.inf

    def _scout(self, law: Law, sign: int, tilt: float, strikes: Array) -> list[tuple[Inversion, Route] | None]:
        """Per strike the smallest bound of the inversions worth trying, on a coarse law, and how it was found.

        The tilted one is for strikes far out in a light tail, puts and parity for values well above rounding errors,
        calls for the rest: strikes that single terms reach before the bulk does.
        """
        centre = float(strikes[len(strikes) // 2])
        steep = sign < 0 or tilt * (centre - law.terms) > _STEEP
        if steep and (sign < 0 or centre <= _FAR_STRIKE * law.terms):
            names: tuple[str, ...] = ("tilted",)
        else:
            names = ("puts", "calls", "tilted") if steep else ("puts", "calls")
        best: list[tuple[Inversion, Route] | None] = [None] * len(strikes)
        for name in names:
            found = self._invert(law, sign, tilt, Route(name), strikes, 0.1)
            for place, one in enumerate(found):
                held = best[place]
                if one is not None and (held is None or one.value < held[0].value):
                    best[place] = one, Route(name, one.plan if isinstance(one, PlannedInversion) else None)
            if all(one is not None and one.noise < _NOISE * (one.value + law.surplus) for one in found):
                break
        if not steep and all(one and one[0].frequencies >= _MANY for one in best):
            # Near the mean of a sum that hardly varies: the tilted inversion has a shorter period.
            for place, one in enumerate(self._invert(law, sign, tilt, Route("tilted"), strikes, 0.1)):
                held = best[place]
                if one and held and 2 * one.frequencies < held[0].frequencies and one.value < 1.1 * held[0].value:
                    best[place] = one, Route("tilted")
        return best

    def _follow(self, law: Law, sign: int, tilt: float, route: Route, strike: float, loss: float) -> Inversion | None:
        return self._invert(law, sign, tilt, route, np.array([strike]), loss)[0]

    def _invert(
        self, law: Law, sign: int, tilt: float, route: Route, strikes: Array, loss: float
    ) -> Sequence[Inversion | None]:
        """One pass; `loss` is the part of the values that smoothing may cost."""
        most, strike, rounding, surplus = self._options.max_frequencies, law.strike, law.rounding, law.surplus
        if route.name == "puts":
            return invert_puts(
                law.transform, strikes, sign,
                loss=loss, tolerance=1e-3, most=most, strike=strike, rounding=rounding, extra=surplus,
            )  # fmt: skip
        if route.name == "calls":
            return invert_calls(
                law.transform, strikes,
                loss=loss, tolerance=1e-3, most=most, strike=strike, rounding=rounding, extra=surplus,
                plans=(route.plan,) if route.plan else PLANS,
            )  # fmt: skip
        return invert(
            law.transform, sign, tilt, strike - strikes,
            smoothing=math.sqrt(2 * loss), tolerance=1e-3, most=most, strike=strike, rounding=rounding,
        )  # fmt: skip
