"""The chain accountant: correlated noise, both directions, tight to a few percent at every ε, without sampling.

δ(ε) is a call (remove) or a put (add) on a basket of log-normals with covariance G/σ². G is replaced by an entrywise
larger Gram matrix whose Gaussian field is a low-order chain (`_majorants`); the basket's transform is then a product of
small matrices (`_chain_laws`), and the option is read off it by a one-sided inversion (`_transfer`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np

from dpmf import budget, validation
from dpmf.accountants import _families
from dpmf.accountants._calls import PLANS, PlannedInversion, invert_calls
from dpmf.accountants._chain_laws import Law, Resolution
from dpmf.accountants._lattice_weights import gaussian_delta
from dpmf.accountants._separators import SeparatorModel
from dpmf.accountants._stationary import StationaryModel, stationary_models
from dpmf.accountants._transfer import UNIT, Inversion, invert, invert_by_parity, pilot
from dpmf.accountants.base import Accountant, Direction, Evaluation, Portfolio, PreparedAccountant
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Array

Plans: TypeAlias = tuple[tuple[float, float], ...]
Model: TypeAlias = _families.Model | StationaryModel

_LARGEST_EPSILON = 200.0
_LEAST_VARIANCE, _LARGEST_VARIANCE = 1e-9, 300.0  # of G/σ²; outside, the plain Gaussian mechanism answers
_NEGLIGIBLE = 1e-100
_DENSE_BATCHES = 2000  # batches up to which covariances are held as b × b matrices
_FEW_BLOCKS = 8
_FAR = 30.0  # a coarse bound this many times above or below a target is not refined
_STEEP = 9.0  # θ(K − n) from which a call's transform, tilted, is not dominated by the bulk of T
_FAR_STRIKE = 3.0  # K/n from which single terms may reach the strike before the bulk does
_GROUP = 0.5  # ε that strikes of one pass may differ by
_PARITY_STRIKE = 20.0  # K/n up to which parity is tried first
_PARITY_NOISE = 300.0  # rounding error of a call by parity, in units of that of the transform times K
_LEAST_DELTA = 1e-15  # smaller values need not be close


@dataclass(frozen=True)
class Chain(Accountant):
    """Options of the chain accountant.

    Attributes:
      discretisation_loss: the part of the noise multiplier that the spreads may cost; spacings follow its root.
      max_frequencies: frequencies of one inversion at most; with fewer the bound gets looser, never wrong.
    """

    name: ClassVar[str] = "chain"
    summary: ClassVar[str] = "chains that dominate the noise, by transfer matrices; tight at every ε"
    rests_on: ClassVar[str] = (
        "Kahane's inequality: entrywise larger Gram matrices dominate; transforms of chains inverted from above"
    )

    discretisation_loss: float = 0.005
    max_frequencies: int = 2048

    def __post_init__(self) -> None:
        validation.positive("discretisation_loss", self.discretisation_loss)
        validation.integer("max_frequencies", self.max_frequencies, at_least=64)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Fit the majorants.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) of the dominating pair. G, rounded up
        by its own rounding error, is replaced by Gram matrices that are larger in every entry, and E f(A) increases
        with every entry for convex f (Kahane's inequality), in both directions. The laws of the majorants are
        discretised from above (`LineLaw`, `TermTable`, `hat_weights`), inverted from above (`invert`,
        `invert_by_parity`, `invert_calls`), and all that is cut off is added. The smallest of several such bounds is
        returned; the Gaussian mechanism of the largest entry (no amplification, the same inequality) is one of them.
        """
        n, b = mechanism.allocation.iterations, mechanism.allocation.batches_per_epoch
        members: list[PreparedAccountant]
        if b > _DENSE_BATCHES:
            largest = float(mechanism.lags.max())
            members = [
                _PreparedChain(mechanism, largest, self, name, model) for name, model in _in_time(mechanism.lags)
            ]
            return Portfolio(self.name, mechanism, [*members, _Unamplified(mechanism, largest)])
        gram = mechanism.gram * (1 + (2 * n + 4) * 2.0**-52)
        gram = np.maximum(gram, gram.T)
        largest = float(gram.max())
        members = [_PreparedChain(mechanism, largest, self, name, model) for name, model in _families.models(gram)]
        members.append(_Unamplified(mechanism, largest))
        return Portfolio(self.name, mechanism, members)


def _in_time(lags: Array) -> list[tuple[str, Model]]:
    """The stationary majorants that there is time to fit."""
    found: list[tuple[str, Model]] = []
    try:
        for named in stationary_models(lags):
            found.append(named)
    except budget.OutOfTime:
        pass
    return found


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

    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        sensitivity = min(math.sqrt(self._largest) / noise_multiplier * (1 + 4 * UNIT), 1e150)
        return Evaluation(gaussian_delta(sensitivity, epsilon), {"family": "unamplified"})


class _PreparedChain(PreparedAccountant):
    """One majorant."""

    name = "chain"

    def __init__(self, mechanism: Mechanism, largest: float, options: Chain, family: str, model: Model) -> None:
        self.mechanism = mechanism
        self._plain = _Unamplified(mechanism, largest)
        self._options, self._family, self._model = options, family, model
        self._largest = float(model.variances().max())
        self._resolution = Resolution().scaled(math.sqrt(options.discretisation_loss / 0.005))

    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        return self._bound(noise_multiplier, epsilon, direction, None)

    def delta_for_target(
        self, noise_multiplier: float, epsilon: float, target_delta: float, direction: Direction
    ) -> Evaluation:
        """As `delta_one_way`; a coarse bound that is far from the target, on either side, is good enough."""
        return self._bound(noise_multiplier, epsilon, direction, target_delta)

    def deltas_one_way(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        """Calls at far strikes in groups, one pass over the frequencies for each; the others one by one.

        **Formal guarantees.** A law made for the largest strike bounds the calls at smaller ones too: what its cuts
        and tails lose is bounded by expectations that do not depend on the strike, because (·)_+ is 1-Lipschitz. δ
        falls with ε, so a bound at a smaller ε is one at a larger ε too.
        """
        if direction == "add" or len(epsilons) < 4:
            return super().deltas_one_way(noise_multiplier, epsilons, direction)
        order = sorted(range(len(epsilons)), key=lambda k: epsilons[k])
        found = [1.0] * len(epsilons)
        above = 1.0
        try:
            while order:
                near = epsilons[order[0]] <= math.log(_FAR_STRIKE)
                group = order[:1] if near else [k for k in order if epsilons[k] <= epsilons[order[0]] + _GROUP]
                order = order[len(group) :]
                for k, value in zip(
                    group, self._together(noise_multiplier, [epsilons[k] for k in group], above), strict=True
                ):
                    found[k] = above = min(above, value)
        except budget.OutOfTime:
            pass
        return found

    def _together(self, noise_multiplier: float, epsilons: list[float], above: float) -> list[float]:
        """δ at a few neighbouring ε, remove direction, where `above` is a bound for a smaller ε."""
        if above <= _LEAST_DELTA:
            return [above] * len(epsilons)
        alone = epsilons[0] <= math.log(_FAR_STRIKE) or epsilons[-1] > _LARGEST_EPSILON
        found = None if alone else self._calls_together(noise_multiplier, epsilons, above)
        # Where many strikes at once are no better than what was known, each gets its own inversion.
        if found is None or found[0] >= above:
            return [self.delta_one_way(noise_multiplier, epsilon, "remove").value for epsilon in epsilons]
        plain = [self._plain.delta_one_way(noise_multiplier, epsilon, "remove").value for epsilon in epsilons]
        return [min(pair) for pair in zip(found, plain, strict=True)]

    def _calls_together(self, noise_multiplier: float, epsilons: list[float], above: float) -> list[float] | None:
        variance = self._largest / noise_multiplier**2
        if not _LEAST_VARIANCE <= variance <= _LARGEST_VARIANCE:
            return None
        model = self._model.scaled(1 / noise_multiplier)
        n, slip = model.size, self._slip(model, epsilons[-1])
        strikes = n * np.exp(np.array(epsilons)) * (1 - slip)
        top, scale = float(strikes[-1]), (1 + 4 * slip) / n
        found = np.full(len(epsilons), above)
        likely = 1e-3 * above
        plans: Plans = PLANS
        for resolution, loss in ((self._resolution.scaled(2.0), 0.1), (self._resolution, 0.01)):
            law = model.law(top, 1, resolution, likely)
            values = invert_calls(
                law.transform, strikes,
                loss=loss, tolerance=1e-3, most=self._options.max_frequencies,
                strike=top, rounding=law.rounding, extra=law.surplus, plans=plans,
            )  # fmt: skip
            usable = [value for value in values if value is not None]
            if len(usable) < len(epsilons):
                return None
            found = np.minimum(found, [(value.value + law.surplus) * scale + 1e-250 for value in usable])
            likely, plans = max(float(found.min()), _LEAST_DELTA), (usable[len(usable) // 2].plan,)
        return [float(value) for value in found]

    @staticmethod
    def _slip(model: Model, epsilon: float) -> float:
        """Relative errors of the a_i and of the strike, which move the strike: errors of exponents, of shares between
        rows and of the means of up to n transitions all amount to a slightly different position of a factor."""
        largest = float(model.variances().max())
        return 64 * UNIT * (8 + largest + epsilon + 40 * math.sqrt(largest)) * (1 + model.size / 16)

    def _bound(self, noise_multiplier: float, epsilon: float, direction: Direction, target: float | None) -> Evaluation:
        plain = self._plain.delta_one_way(noise_multiplier, epsilon, direction)
        variance = self._largest / noise_multiplier**2
        outside = not _LEAST_VARIANCE <= variance <= _LARGEST_VARIANCE
        close_enough = plain.value <= (_NEGLIGIBLE if target else _LEAST_DELTA)
        if close_enough or outside or epsilon > _LARGEST_EPSILON:
            return plain
        model, sign = self._model.scaled(1 / noise_multiplier), 1 if direction == "remove" else -1
        found = self._option(model, epsilon, sign, target)
        if found is None or not found[0] < plain.value:
            return plain
        return Evaluation(found[0], {"family": self._family, "frequencies": found[1], "tilt": found[2]})

    def _option(self, model: Model, epsilon: float, sign: int, target: float | None) -> tuple[float, int, float] | None:
        n = model.size
        slip = self._slip(model, epsilon)
        strike = n * math.exp(sign * epsilon) * (1 - sign * slip)
        scale = (1.0 if sign > 0 else math.exp(epsilon)) / n * (1 + 4 * slip)
        spread = math.sqrt(_variance_of_sum(model))
        coarse = model.law(strike, sign, self._resolution.scaled(2.0), (target or 1e-8) / 10)
        start = pilot(coarse.transform, sign, min(spread, strike), abs(strike - n))
        if start is None:
            return None
        tilt, log_bound = start
        # Chernoff's bound, good enough for what nobody asks about.
        enough = target / _FAR if target else _LEAST_DELTA
        if math.exp(min(log_bound, 600.0)) * scale < enough:
            chernoff = self._chernoff(model, strike, sign, tilt, enough) * scale
            if chernoff <= enough:
                return chernoff + 1e-250, 0, tilt
        paths = self._paths(sign, tilt * (strike - n), strike / n)
        likely = math.exp(min(log_bound - math.log(strike), 0.0)) / 4
        plans: Plans = PLANS
        if target or len(paths) > 1 or paths[0] != "tilted":
            tried = [(path, self._invert(coarse, sign, tilt, path, strike, 0.1, PLANS)) for path in paths]
            found = [(rough.value, path, rough) for path, rough in tried if rough is not None]
            if found:
                _, path, rough = min(found)
                paths = (path,)
                bound = (rough.value + coarse.surplus) * scale
                likely = min(likely, bound / math.exp(max(0.0, -sign * epsilon)))
                if target and not target / _FAR <= bound <= target * _FAR:
                    return min(1.0, bound + 1e-250), rough.frequencies, rough.tilt
                plans = (rough.plan,) if isinstance(rough, PlannedInversion) else PLANS
        law = model.law(strike, sign, self._resolution, likely)
        done = self._invert(law, sign, tilt, paths[0], strike, 0.01, plans)
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

    @staticmethod
    def _paths(sign: int, steepness: float, ratio: float) -> tuple[str, ...]:
        """The inversions worth trying: the tilted one where the strike is far out in a light tail."""
        if sign < 0:
            return ("tilted",)
        if steepness <= _STEEP:
            return ("untilted",)
        return ("tilted", "untilted") if ratio > _FAR_STRIKE else ("tilted",)

    def _invert(
        self, law: Law, sign: int, tilt: float, path: str, strike: float, loss: float, plans: Plans
    ) -> Inversion | None:
        """`loss` is the part of the value that smoothing may cost."""
        most = self._options.max_frequencies
        if path == "tilted":
            smoothing = math.sqrt(2 * loss)
            return invert(
                law.transform, sign, tilt,
                smoothing=smoothing, tolerance=1e-3, most=most, strike=strike, rounding=law.rounding,
            )  # fmt: skip
        noise = _PARITY_NOISE * law.rounding * strike
        found = None
        if strike < _PARITY_STRIKE * law.terms:
            found = self._by_parity(law, strike, loss)
            if found is not None and noise < 0.02 * (found.value + law.surplus):
                return found
        also = invert_calls(
            law.transform, np.array([strike]),
            loss=loss, tolerance=1e-3, most=most, strike=strike, rounding=law.rounding, extra=law.surplus, plans=plans,
        )[0]  # fmt: skip
        if found is None and (also is None or noise < 0.1 * (also.value + law.surplus)):
            found = self._by_parity(law, strike, loss)
        return min((one for one in (found, also) if one is not None), key=lambda one: one.value, default=None)

    def _by_parity(self, law: Law, strike: float, loss: float) -> Inversion | None:
        most = self._options.max_frequencies
        return invert_by_parity(
            law.transform, loss=loss, tolerance=1e-3, most=most, strike=strike, rounding=law.rounding
        )
