"""Calls on a heavy-tailed sum from its transform, at several strikes at once: one-sided, and without losing small ones.

Where the bulk of T lies far below the strike and single terms reach it, the plain inversion has no good tilt. Here the
period of the trapezoid rule is longer than the strike, so that the calls it adds at strikes below 0 are linear, known,
and subtracted. They are weighted by e^(−θL), and so are their rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpmf.accountants.chain._transfer import Inversion, Transform, _least_smoothing, _log_real, _log_remainder
from dpmf.numerics import UNIT, Array

# Periods, in units of the strike, and θ times the period. More of the latter, less rounding error, and more of the
# options at strikes K + L, K + 2L, ... in the value.
PLANS = ((1.2, 7.0), (1.2, 4.0), (1.2, 12.0), (2.2, 12.0))


@dataclass(frozen=True)
class PlannedInversion(Inversion):
    """An inversion and the plan that it followed."""

    plan: tuple[float, float]


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
    plans: Sequence[tuple[float, float]] = PLANS,
) -> list[PlannedInversion | None]:
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
    best: list[PlannedInversion | None] = [None] * len(strikes)
    for plan in plans:
        period = plan[0] * strike
        theta = plan[1] / period
        around = _moments_around(transform, theta)
        if around is None:
            continue
        moment, ahead = around
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
        improved = False
        for place, value in enumerate(values.tolist()):
            held = best[place]
            improved |= held is None or value + extra < 0.98 * (held.value + extra)
            if held is None or value < held.value:
                best[place] = PlannedInversion(value, theta, count, float(noise[place]), plan)
        if not improved and np.all(noise < 0.05 * (values + extra)):
            break
    return best


def _moments_around(transform: Transform, theta: float) -> tuple[float, float] | None:
    """M(θ), and a bound on M'(θ) = E(T − K)e^(θ(T−K)); None where they are out of range."""
    thetas = theta * np.array([1.0, 1.1, 1.25, 1.5])
    logs = _log_real(transform, thetas)
    if not math.isfinite(logs[0]):
        return None
    moment = math.exp(min(float(logs[0]), 600.0))
    with np.errstate(invalid="ignore", over="ignore"):
        slopes = moment * np.expm1(np.minimum(logs[1:] - logs[0], 600.0)) / (thetas[1:] - theta)
    slopes = slopes[np.isfinite(slopes)]
    return (moment, max(0.0, float(slopes.min()))) if len(slopes) else None
