"""Calls on a heavy-tailed sum from its transform, at several strikes at once: one-sided, and without losing small ones.

Where the bulk of T lies far below the strike and single terms reach it, the plain inversion has no good tilt. Here the
period of the trapezoid rule is longer than the strike, so that the calls it adds at strikes below 0 are linear, known,
and subtracted. They are weighted by e^(−θL), and so are their rounding errors.
"""

from __future__ import annotations

import math

import numpy as np

from dpmf.accountants._transfer import UNIT, Inversion, Transform, _least_smoothing, _log_real, _log_remainder
from dpmf.strategies.base import Array

_STRETCHES = (1.2, 2.2, 3.2)
_STEEPNESS = np.array([4.0, 5.0, 6.0, 7.0, 8.5, 10.0, 12.0, 14.5, 18.0, 22.0, 27.0, 34.0, 42.0])


def invert_calls(
    transform: Transform,
    strikes: Array,
    *,
    loss: float,
    tolerance: float,
    most: int,
    strike: float,
    rounding: float,
    extra: float,
) -> list[Inversion | None]:
    """Upper bounds on E(T − K)_+ at several strikes K ≤ `strike` (that of the transform), for heavy tails.

    The transform is evaluated once for all strikes; smoothing is to cost about `loss` of each value, to
    which `extra` will be added.

    **Formal guarantees.** With a period L ≥ K the trapezoid sum is Σ_m e^(θLm)·call(K + mL) over all integers m. Calls
    at the strikes K − mL ≤ 0, m ≥ 1, are E(T − K) + mL·E1 (1 stands for the measure's mass) because T ≥ 0; smoothing
    can only raise them (Jensen), so they are subtracted. Mass and E(T − K) are those of the same discretised measure;
    they are read off M at an imaginary argument so small that its square vanishes beside 1, without cancellation, and
    what they may be wrong by is added. Terms with m ≥ 1 stay. The rest is as for `invert`, with
    E|T − K|e^(θ(T−K)) ≤ M'(θ) + 2/(eθ), and M'(θ) ≤ (M(θ') − M(θ))/(θ' − θ) for θ' > θ because M is convex. Values for
    several η are upper bounds all, so stopping when they no longer fall is a matter of tightness; so is the choice of θ
    and L.
    """
    tiny = 1e-60 / strike
    at_zero = complex(transform(np.array([tiny * 1j]))[0])
    mass = at_zero.real
    gap = strike - strikes  # how far each strike is below that of the transform
    drift = at_zero.imag / tiny + mass * gap
    best: list[Inversion | None] = [None] * len(strikes)
    for stretch in _STRETCHES:
        period = stretch * strike
        plan = _call_tilt(transform, period, gap, rounding)
        if plan is None:
            break
        theta, moment, ahead, spilled = plan
        aliases = np.arange(1, 60)[:, None]
        decay = np.exp(-theta * period * aliases)
        linear = drift + mass * aliases * period
        known = (decay * np.maximum(linear, 0.0)).sum(axis=0)
        unsure = 4 * rounding * (decay * (2 * strike + np.abs(drift) + mass * aliases * period)).sum(axis=0)
        shift = np.exp(theta * gap)
        # E|T − K|e^(θ(T−K)), and the 2K of every path.
        spread = 1.01 * shift * (ahead + 2 * mass / (math.e * theta) + (gap + 2 * strike) * moment)
        count, values = 16, np.full(len(strikes), math.inf)
        moments = np.empty(0, dtype=np.complex128)
        while True:
            s = theta + 2j * math.pi / period * np.arange(count)
            moments = np.concatenate((moments, transform(s[len(moments) :])))
            log_allowed = math.log(tolerance * max(min(float(values.min()), strike) + extra, 1e-200))
            log_moment = math.log(float(moments[0].real)) + theta * float(gap.max())
            eta = _least_smoothing(theta, period, log_moment, count, log_allowed)
            damping = np.exp(0.5 * eta**2 * s**2) / s**2
            multiplicity = np.full(count, 2.0)
            multiplicity[0] = 1.0
            remainder = math.exp(_log_remainder(theta, eta, period, log_moment, count))
            weight = multiplicity * np.abs(damping) / period
            noise = 1.01 * rounding * moment * shift * float(weight.sum())
            noise = noise + 8 * UNIT * float((weight * np.abs(s)).sum()) * spread + unsure
            terms = (moments * damping * multiplicity)[:, None] * np.exp(s[:, None] * gap)
            previous, values = values, terms.real.sum(axis=0) / period - known + remainder + noise
            if not np.all(np.isfinite(values)) or np.any(values <= 0):
                return best
            values = np.minimum(values, previous)
            # The cost of smoothing falls with η², η with 1/count.
            total = values + extra
            settled = previous - values < 3 * loss * total
            if np.all(settled | (noise > 0.1 * total)) or 2 * count > most:
                break
            count *= 2
        for place, value in enumerate(values.tolist()):
            held = best[place]
            if held is None or value < held.value:
                best[place] = Inversion(value, theta, count)
        if np.all(spilled + noise < 0.02 * (values + extra)):
            break
    return best


def _call_tilt(
    transform: Transform, period: float, gap: Array, rounding: float
) -> tuple[float, float, float, Array] | None:
    """θ, M(θ), a bound on M'(θ) = E(T − K)e^(θ(T−K)) and estimates of what the strikes K + L, K + 2L, ... add."""
    thetas = _STEEPNESS / period
    logs = _log_real(transform, thetas)
    good = int(np.argmin(np.isfinite(logs))) if not np.all(np.isfinite(logs)) else len(logs)
    if good < 3:
        return None
    thetas, logs = thetas[:good], logs[:good]
    scores, spills = [], []
    for index in range(good - 1):
        later = slice(index + 1, None)
        theta = float(thetas[index])
        # Chernoff: e^(θL)·call(K + L) ≤ e^((θ−θ')L)·M(θ')/(eθ') for every θ' > θ.
        spill = (logs[later] - (thetas[later] - theta) * period - 1 - np.log(thetas[later]))[:, None]
        spill = np.exp(np.minimum((spill + thetas[later][:, None] * gap).min(axis=0), 600.0))
        noise = np.exp(np.minimum(logs[index] + theta * gap, 600.0)) * (4 * rounding / (theta**2 * period))
        noise = noise + 4 * rounding * period * math.exp(-theta * period)
        scores.append(float(np.log(spill + noise).sum()))
        spills.append(spill)
    index = int(np.argmin(scores))
    theta, moment = float(thetas[index]), math.exp(float(logs[index]))
    ahead = moment * np.expm1(np.minimum(logs[index + 1 :] - logs[index], 600.0)) / (thetas[index + 1 :] - theta)
    return theta, moment, max(0.0, float(ahead.min())), spills[index]
