"""Options on a sum T from its transform M(s) = E e^(s(T − K)): three inversions, all with one-sided errors.

With s_k = θ + ik·h and L = 2π/h, Poisson's formula says that the sum of M(s_k)/s_k² over all integers k, divided by L,
is Σ_m e^(θLm)·c(K ± mL), where c is the call (put) as a function of its strike. Every term is non-negative and that of
m = 0 is the option, so any θ > 0 and h > 0 give an upper bound. Adding an independent N(0, η²) to T can only raise it
(Jensen) and multiplies M(s) by e^(η²s²/2), which makes the sum converge: the frequencies left out are at most their
moduli, |M(s)| ≤ M(θ), summed as a geometric series. The three inversions differ in θ and h, and in which of the other
terms they know and subtract. See "Fourier inversion with a one-sided error" in docs/theory/discretisation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dpmf.accountants.chain._spreads import Option, few_bits
from dpmf.numerics import UNIT, Array

_TINY = 1e-60  # an imaginary argument, times K, whose square vanishes beside 1 (theory: "Mass and mean of the measure")


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast inversions are. All positive values give sound bounds.

    Attributes:
      pilot_points: number of tilts of the first, coarse scan.
      pilot_least: the least of these tilts, in units of 1/(scale + distance).
      pilot_most: the largest of these tilts, in units of 1/scale.
      ratios: tilts that are compared, in units of the pilot's.
      tilts_below: how many of them below the saddle point are considered.
      most_smoothing: ηθ at which the tilted inversion gives up; it costs a factor e^(ηθ)²/2.
      most_excess: log of how much larger M may be on the line of integration than at its saddle point.
      truncation: the part of the value that frequencies left out may add.
      estimates: how often the value is estimated, at most, before frequencies are left out.
      too_smooth: smoothing is reduced where values ask for less than this part of it.
      misjudged: the value, in logarithms, may be this much below the estimate.
      smoothing_step: the factor by which η grows until there are few enough frequencies.
      first_count: the number of frequencies to begin with.
      step: numbers of frequencies are multiples of this.
      noisy: the part of a value from which on rounding errors make more frequencies useless.
      put_period: L = (1 + this)·K for puts.
      put_wrap: θL for puts: aliases are worth e^(−θL) of a smaller option, rounding errors grow with e^(θL).
      call_plans: pairs of L/K − 1 and θL for calls. With a larger θL there is less rounding error, and more of the
        options at strikes K + L, K + 2L, ... in the value.
      improvement: a plan that improves the value by less than this part is the last one, if it is not noisy.
      quiet: the part of a value up to which rounding errors do not ask for another plan.
      aliases: the number of known terms that are subtracted.
      slopes: differences θ' − θ, in units of θ, that are tried in a bound on E|T − K|e^(θ(T−K)).
    """

    pilot_points: int = 28
    pilot_least: float = 0.02
    pilot_most: float = 60.0
    ratios: tuple[float, ...] = (
        0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.1, 2.5, 3.0, 4.0, 6.0,
    )  # fmt: skip
    tilts_below: int = 5
    most_smoothing: float = 6.0
    most_excess: float = 8.0
    truncation: float = 1e-3
    estimates: int = 3
    misjudged: float = 2.0
    too_smooth: float = 0.7
    smoothing_step: float = 0.25
    first_count: int = 16
    step: int = 8
    noisy: float = 0.1
    put_period: float = 0.2
    put_wrap: float = 5.0
    call_plans: tuple[tuple[float, float], ...] = ((0.2, 7.0), (0.2, 4.0), (0.2, 12.0), (1.2, 12.0))
    improvement: float = 0.02
    quiet: float = 0.05
    aliases: int = 59
    slopes: tuple[float, ...] = (0.1, 0.25, 0.5)


_TUNING = _Tuning()


class Law(Protocol):
    """What an inversion needs of a law.

    Attributes:
      option: what it was made for.
      surplus: what truncation costs, to be added to the option's value.
      rounding: the relative error of the transform from rounding, in units of the transform at the real part of s.
    """

    option: Option
    surplus: float
    rounding: float

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        ...


@dataclass(frozen=True)
class Inversion:
    """An upper bound on an option's value, and how it was found.

    Attributes:
      value: the bound.
      tilt: the tilt θ.
      frequencies: the number of frequencies.
      noise: how much of the value is there for rounding errors.
      sign: +1 if the transform of a call was inverted, −1 for a put.
      period: the period L.
      smoothing: the deviation η of the normal variable that was added to T.
      plan: the plan that was followed, for calls.
    """

    value: float
    tilt: float
    frequencies: int
    noise: float
    sign: int
    period: float
    smoothing: float
    plan: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Contour:
    """The line θ + ik·h; h has so few bits that all k·h are exact."""

    theta: float
    spacing: float

    @classmethod
    def of(cls, theta: float, period: float) -> _Contour:
        return cls(theta, few_bits(2 * math.pi / period))

    @property
    def period(self) -> float:
        return 2 * math.pi / self.spacing

    def points(self, begin: int, end: int) -> np.ndarray:
        return np.asarray(self.theta + 1j * (self.spacing * np.arange(begin, end)))

    def log_remainder(self, eta: float, count: int) -> float:
        """log of h/π·Σ_{k ≥ count} |e^(η²s²/2)/s²|, from above."""
        omega = self.spacing * count
        first = 0.5 * eta**2 * (self.theta**2 - omega**2) - math.log(self.theta**2 + omega**2)
        ratio = -math.expm1(-(eta**2) * omega * self.spacing)
        return math.log(self.spacing / math.pi) + first - math.log(ratio) + 1e-9

    def frequencies(self, eta: float, log_allowed: float) -> int:
        """The least number of frequencies for which those left out are at most this much."""
        low, high = 1, 2
        while self.log_remainder(eta, high) > log_allowed and high < 2**24:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            inside = self.log_remainder(eta, middle) <= log_allowed
            low, high = (low, middle) if inside else (middle, high)
        return high

    def least_smoothing(self, count: int, log_allowed: float) -> float:
        """About the smallest η for which the frequencies from `count` on are at most this much."""
        omega = self.spacing * count
        low, high = 1.0, 40.0
        for _ in range(30):
            middle = 0.5 * (low + high)
            enough = self.log_remainder(middle / omega, count) <= log_allowed
            low, high = (low, middle) if enough else (middle, high)
        return high / omega

    def total(
        self, moments: np.ndarray, sign: int, eta: float, gap: Array, rounding: float, deviation: float
    ) -> tuple[Array, Array]:
        """The smoothed sum over all frequencies at strikes K − gap, and what rounding may have taken from it.

        Args:
          moments: M at the points of the contour, of the law with strike K.
          sign: +1 for calls, −1 for puts, whose transform is at −s.
          eta: the deviation of the smoothing.
          gap: how far each strike is below K.
          rounding: the relative error of a moment, in units of M(θ).
          deviation: a bound on E(|T − K| + 2K)e^(±θ(T−K)).

        Returns:
          A bound on the sum without the rounding errors, and these.
        """
        s = self.points(0, len(moments))
        multiplicity = np.full(len(s), self.spacing / math.pi)
        multiplicity[0] /= 2
        exponent = (0.5 * eta**2 * s**2)[:, None] + sign * s[:, None] * gap
        weight = multiplicity[:, None] * np.exp(exponent) / (s**2)[:, None]
        terms = (moments[:, None] * weight).real
        if not np.all(np.isfinite(terms)) or rounding > 0.01:
            return np.full(len(gap), math.nan), np.full(len(gap), math.nan)
        size = np.abs(s)
        moment = float(moments[0].real) * (1 + 2 * rounding)
        exponents = UNIT * (32 + 8 * (eta * size[:, None]) ** 2 + 8 * size[:, None] * np.abs(gap))
        errors = np.abs(weight) * ((rounding + exponents) * moment + 8 * UNIT * size[:, None] * deviation)
        noise = 1.01 * errors.sum(axis=0)
        with np.errstate(over="ignore"):
            remainder = moment * np.exp(self.log_remainder(eta, len(s)) + sign * self.theta * gap)
        sums = np.array([math.fsum(column) for column in terms.T.tolist()])
        return sums + noise + (1 + 1e-9) * remainder, noise


def log_moments(law: Law, thetas: Array) -> Array:
    """log M(±θ), not finite where it is out of range."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(np.log(law.transform((law.option.sign * thetas).astype(np.complex128)).real))


def pilot(law: Law, strike: float, scale: float) -> tuple[float, float] | None:
    """A tilt from a coarse scan, and the logarithm of a bound; None where no tilt is in range.

    Args:
      law: a law with a strike of at least `strike`.
      strike: the strike of the option that is asked for.
      scale: about the deviation of T.

    Returns:
      The θ that minimises M(θ)/θ², and log(M(θ)/(eθ)), about the logarithm of a bound on the option.
    """
    option = law.option
    farthest = abs(strike - option.terms)
    thetas = np.geomspace(_TUNING.pilot_least / (scale + farthest), _TUNING.pilot_most / scale, _TUNING.pilot_points)
    values = log_moments(law, thetas) + option.sign * thetas * (option.strike - strike)
    score = np.where(np.isfinite(values), values - 2 * np.log(thetas), np.inf)
    best = int(np.argmin(score))
    found = float(thetas[best]), float(values[best] - 1 - math.log(thetas[best]))
    return found if math.isfinite(score[best]) else None


def chernoff(law: Law, tilts: Array) -> float:
    """E(±(T − K))_+ ≤ M(θ)/(eθ), the least over some tilts; infinite where none of them is in range.

    **Formal guarantees.** x_+ ≤ e^(θx)/(eθ). The exponents of the computed terms have errors of at most
    3uθ(a + K/n), so that the computed M(θ), but for its relative error, is at least e^(−6uθK)·M(θ') for some θ' within
    3uθ of θ.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        exponents = np.exp(8 * UNIT * tilts * law.option.strike)
        bounds = np.exp(log_moments(law, tilts)) * (1 + 2 * law.rounding + 1e-9) * exponents / (math.e * tilts)
    usable = bounds[np.isfinite(bounds)]
    return float(usable.min()) + law.surplus if len(usable) else math.inf


def invert_tilted(
    law: Law, strikes: Array, near: float, *, loss: float, most: int, expected: Array | None = None
) -> list[Inversion | None]:
    """Upper bounds on E(±(T − K))_+ for strikes far out in a light tail.

    Args:
      law: a law made for a strike of at least the largest of the strikes.
      strikes: the strikes K, which should be close together; one pass over the frequencies serves all of them.
      near: about a good tilt.
      loss: the part of the value that smoothing may cost.
      most: the largest number of frequencies.
      expected: about the values, where they are known.

    Returns:
      One inversion per strike; None where this inversion does not work.

    **Formal guarantees.** See the top of this module: any θ, L and η give an upper bound; for another strike, M is
    multiplied by e^(±s·gap). Their choice, from M on the real axis, decides how tight the bound is, never whether it
    holds. Rounding: docs/theory/floating-point.md, with
    E|x|e^(θx) ≤ (M(θ')/(θ' − θ) + M(θ")/(θ − θ"))/e, x = ±(T − K), for all θ" < θ < θ'.
    """
    sign, strike = law.option.sign, law.option.strike
    gap = strike - strikes
    nothing: list[Inversion | None] = [None] * len(gap)
    thetas = near * np.sort(_TUNING.ratios)
    real = log_moments(law, thetas)
    good = np.isfinite(real)
    if good.sum() < 5:
        return nothing
    thetas, real = thetas[good], real[good]
    logs = real[:, None] + sign * thetas[:, None] * gap
    saddles = np.argmin(logs - 2 * np.log(thetas)[:, None], axis=0)
    estimates = np.array([_log_value(thetas, logs[:, k], int(i)) for k, i in enumerate(saddles)])
    if expected is not None:
        estimates = np.minimum(estimates, np.log(expected))
    eta = math.sqrt(2 * loss) / float(thetas[saddles].max())
    best: list[Inversion | None] = nothing
    for _ in range(_TUNING.estimates):
        found = _tilted_once(law, gap, thetas, real, saddles, estimates + math.log(_TUNING.truncation), eta, most)
        best = [
            one if one and (held is None or one.value < held.value) else held
            for one, held in zip(found, best, strict=True)
        ]
        values = np.array([max(one.value - one.noise, 1e-300) for one in found if one is not None])
        if len(values) < len(found):
            break
        # In a heavy tail the saddle point promises too much, and what was left out for it is most of the value.
        below = np.log(values) < estimates - _TUNING.misjudged
        # Where the values fall more steeply from strike to strike than the tilt, they ask for less smoothing.
        apart = np.abs(np.diff(gap)) > 0
        steep = np.abs(np.diff(np.log(values)))[apart] / np.abs(np.diff(gap))[apart]
        least = math.sqrt(2 * loss) / max(float(steep.max(initial=0.0)), 1e-300)
        if not below.any() and not least < _TUNING.too_smooth * eta:
            break
        eta = min(eta, least) if math.isfinite(least) else eta
        estimates = np.where(below, np.log(values) - _TUNING.misjudged, estimates)
    return best


def _tilted_once(
    law: Law, gap: Array, thetas: Array, real: Array, saddles: np.ndarray, log_allowed: Array, eta: float, most: int
) -> list[Inversion | None]:
    """One pass over the frequencies, where what is left out may be as large as `log_allowed` says, by strike."""
    sign, strike = law.option.sign, law.option.strike
    nothing: list[Inversion | None] = [None] * len(gap)
    logs = real[:, None] + sign * thetas[:, None] * gap
    plans = []
    for index in range(max(1, int(saddles.min()) - _TUNING.tilts_below), min(int(saddles.max()) + 1, len(thetas) - 1)):
        period = max(_period(thetas, logs[:, k], index, float(log_allowed[k])) for k in range(len(gap)))
        contour = _Contour.of(float(thetas[index]), period)
        allowed = float((log_allowed - logs[index]).min())
        # Rounding errors are as much larger than at the saddle point as M is.
        excess = float((logs[index] - logs[saddles, np.arange(len(gap))]).max())
        count = contour.frequencies(eta, allowed) * (1 if excess < _TUNING.most_excess else 1000)
        plans.append((count, index, contour, allowed))
    if not plans:
        return nothing
    _, best, contour, allowed = min(plans, key=lambda plan: plan[:2])
    count = contour.frequencies(eta, allowed)
    while count > most:
        eta *= 1 + _TUNING.smoothing_step
        # Frequencies below θ are not damped: no η brings the number below those.
        if eta * contour.theta > _TUNING.most_smoothing:
            return nothing
        count = contour.frequencies(eta, allowed)
    moments = law.transform(sign * contour.points(0, count))
    with np.errstate(over="ignore"):
        others = np.exp(np.delete(real, best)) / (math.e * np.abs(np.delete(thetas, best) - contour.theta))
    deviation = float(others[:best].min() + others[best:].min()) + 2 * strike * float(moments[0].real)
    values, noise = contour.total(moments, sign, eta, gap, law.rounding, 1.01 * deviation)
    return [
        Inversion(value, contour.theta, count, error, sign, contour.period, eta)
        if math.isfinite(value) and value > 0
        else None
        for value, error in zip(values.tolist(), noise.tolist(), strict=True)
    ]


def _log_value(thetas: Array, logs: Array, saddle: int) -> float:
    """About the logarithm of the option, by the saddle point method."""
    theta = float(thetas[saddle])
    middle = min(max(saddle, 1), len(thetas) - 2)
    step = np.diff(thetas[middle - 1 : middle + 2])
    slopes = np.diff(logs[middle - 1 : middle + 2]) / step
    curvature = max(0.0, float((slopes[1] - slopes[0]) / step.mean())) + 2 / theta**2
    return float(logs[saddle]) - 2 * math.log(theta) - 0.5 * math.log(2 * math.pi * curvature)


def _period(thetas: Array, logs: Array, index: int, log_allowed: float) -> float:
    """The least L for which Chernoff's bound on the options at strikes K ± L, tilted, is as small as allowed."""
    theta, period = float(thetas[index]), 2 / float(thetas[index])
    for side in (slice(0, index), slice(index + 1, None)):
        needed = (logs[side] - 1 - np.log(thetas[side]) - log_allowed) / np.abs(thetas[side] - theta)
        period = max(period, float(needed.min()))
    return period


class _Untilted:
    """What the inversions with a period L ≥ K share: known aliases, and more and more frequencies.

    Mass and E(T − K) are those of the discretised measure itself. They are read off the transform at an imaginary
    argument so small that its square vanishes beside 1, without cancellation.
    """

    def __init__(self, law: Law, strikes: Array, loss: float, most: int) -> None:
        self.law, self._loss, self._most = law, loss, most
        self._gap = law.option.strike - strikes
        tiny = _TINY / law.option.strike
        at_zero = complex(law.transform(np.array([tiny * 1j]))[0])
        self.mass = at_zero.real
        self.drift = at_zero.imag / tiny + self.mass * self._gap  # E(T − K)
        # Its rounding error: that of a sum of terms of both signs, whose moduli add up to E(T + K) ≤ 2K + |E(T − K)|.
        self.unsure = 4 * law.rounding * (law.option.strike + np.abs(self.drift))

    def refine(
        self, contour: _Contour, sign: int, strikes: float, others: float, parity: bool = False
    ) -> list[Inversion] | None:
        """The inversion with more and more frequencies, until it settles; None where a value is out of range.

        Values for several η are upper bounds all, so that when to stop is a matter of tightness.

        Args:
          contour: where to integrate.
          sign: that of the payoff that is inverted; its aliases at strikes −sign·(K − mL), m ≥ 1, are linear, known
            and subtracted.
          strikes: strikes·K·M(θ) + others is a bound on E(|T − K| + 2K)e^(±θ(T−K)), K being the law's strike.
          others: see `strikes`.
          parity: whether to add E(T − K).
        """
        law, gap, theta = self.law, self._gap, contour.theta
        strike, surplus = law.option.strike, law.surplus
        m = np.arange(1, _TUNING.aliases + 1)[:, None]
        period = contour.period
        decay, linear = np.exp(-theta * period * m), self.mass * m * period
        offset = -(decay * np.maximum(linear + sign * self.drift, 0.0)).sum(axis=0)
        unsure = self.unsure * decay.sum() + 4 * law.rounding * float((decay * linear).sum())
        if parity:
            offset, unsure = offset + self.drift, unsure + self.unsure
        before, count, values = 0, _TUNING.first_count, np.full(len(gap), math.inf)
        smoothings = np.zeros(len(gap))  # η of the least values
        moments = np.empty(0, dtype=np.complex128)
        while True:
            moments = np.concatenate((moments, law.transform(sign * contour.points(len(moments), count))))
            moment = float(moments[0].real)
            if not 0 < moment < math.inf:
                return None
            about = max(min(float(values.min()), strike) + surplus, 1e-200)
            largest = math.log(moment) + max(0.0, sign * theta * float(gap.max()))
            eta = contour.least_smoothing(count, math.log(_TUNING.truncation * about) - largest)
            sums, noise = contour.total(
                moments, sign, eta, gap, law.rounding, 1.01 * (strikes * strike * moment + others)
            )
            previous, values, noise = values, sums + offset + unsure, noise + unsure
            if not np.all(np.isfinite(values) & (values > 0)):
                return None
            smoothings = np.where(values < previous, eta, smoothings)
            values = np.minimum(values, previous)
            # The cost of smoothing falls with η², and η with 1/count: two counts show how many are enough.
            cost = (previous - values) / ((count / before) ** 2 - 1) if before else np.full(len(gap), math.inf)
            cost = np.where(noise > _TUNING.noisy * (values + surplus), 0.0, cost / (self._loss * (values + surplus)))
            enough = count * math.sqrt(min(max(float(cost.max()), 0.0), 4.0))
            more = min(max(math.ceil(enough / _TUNING.step) * _TUNING.step, count + _TUNING.step), 2 * count)
            if cost.max() <= 1 or more > self._most:
                found = zip(values.tolist(), noise.tolist(), smoothings.tolist(), strict=True)
                return [Inversion(value, theta, count, error, sign, period, eta) for value, error, eta in found]
            before, count = count, more


def invert_puts(law: Law, strikes: Array, *, loss: float, most: int) -> list[Inversion | None]:
    """Upper bounds on E(K − T)_+ or, by parity, on E(T − K)_+ = E(T − K) + E(K − T)_+.

    The inversion is hardly tilted, so its rounding error is one of the transform's times the strike: values well above
    that come out to any accuracy, whatever the tails of the sum. Arguments and result are those of `invert_tilted`.

    **Formal guarantees.** As for `invert_tilted`, with the put's transform E e^(−s(T−K)). With a period L ≥ K the terms
    with m < 0 are puts at strikes below 0, raised by smoothing from zero: they stay. Those with m ≥ 1 are puts at
    strikes K + mL, at least mL·E1 − E(T − K) each (1 stands for the measure's mass): these parts are subtracted.
    Parity is exact for the discretised measure, with its own mass and mean. Paths with T ≤ K have |T − K| ≤ K, the
    others |T − K|e^(−θ|T − K|) ≤ 1/(eθ).
    """
    untilted = _Untilted(law, strikes, loss, most)
    period = (1 + _TUNING.put_period) * law.option.strike
    contour = _Contour.of(_TUNING.put_wrap / period, period)

    found = untilted.refine(contour, -1, 3.0, untilted.mass / (math.e * contour.theta), parity=law.option.sign > 0)
    return [None] * len(strikes) if found is None else list(found)


def invert_calls(
    law: Law, strikes: Array, *, loss: float, most: int, plan: tuple[float, float] | None = None
) -> list[Inversion | None]:
    """Upper bounds on E(T − K)_+ for heavy tails: strikes that single terms reach before the bulk of T does.

    There the tilted inversion has no good tilt, and parity loses what is smaller than the rounding error of K. Here the
    known aliases are weighted by e^(−θL), and so are their rounding errors. Arguments and result are those of
    `invert_tilted`, but for `plan`: which of the plans in the tuning to follow, instead of trying them in turn.

    **Formal guarantees.** As for `invert_tilted`. With a period L ≥ K the calls at strikes K − mL ≤ 0, m ≥ 1, are
    E(T − K) + mL·E1 (1 stands for the measure's mass) because T ≥ 0; smoothing can only raise them (Jensen), so they
    are subtracted. Terms with m ≥ 1 stay. E|T − K|e^(θ(T−K)) ≤ (M(θ')/(θ' − θ) + E1/θ)/e for θ' > θ. The choice of θ
    and L is a matter of tightness.
    """
    untilted = _Untilted(law, strikes, loss, most)
    best: list[Inversion | None] = [None] * len(strikes)
    for chosen in _TUNING.call_plans if plan is None else (plan,):
        period = (1 + chosen[0]) * law.option.strike
        contour = _Contour.of(chosen[1] / period, period)
        steps = contour.theta * np.array(_TUNING.slopes)
        with np.errstate(over="ignore"):
            ahead = np.exp(log_moments(law, contour.theta + steps)) / steps
        ahead = ahead[np.isfinite(ahead)]
        if len(ahead) == 0:
            continue
        found = untilted.refine(contour, 1, 2.0, (float(ahead.min()) + untilted.mass / contour.theta) / math.e)
        if found is None:
            return best
        improved, quiet = False, True
        for place, one in enumerate(found):
            held, value = best[place], one.value + law.surplus
            improved |= held is None or value < (1 - _TUNING.improvement) * (held.value + law.surplus)
            quiet &= one.noise < _TUNING.quiet * value
            if held is None or one.value < held.value:
                best[place] = replace(one, plan=chosen)
        if quiet and not improved:
            break
    return best
