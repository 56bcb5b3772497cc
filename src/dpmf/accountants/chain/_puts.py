"""Puts on a sum from its transform, and calls by parity, at several strikes at once: for all that is not very small.

The inversion is hardly tilted, so its rounding error is one of the transform's times the strike: values well above
that come out to any accuracy, whatever the tails of the sum.
"""

from __future__ import annotations

import math

import numpy as np

from dpmf.accountants.chain._transfer import Inversion, Transform, _least_smoothing, _log_remainder
from dpmf.numerics import UNIT, Array

_WRAP = 5.0  # θL: aliases are worth e^(−5) of a smaller option, rounding grows with e^(θL)


def invert_puts(
    transform: Transform,
    strikes: Array,
    sign: int,
    *,
    loss: float,
    tolerance: float,
    most: int,
    strike: float,
    rounding: float,
    extra: float,
) -> list[Inversion | None]:
    """Upper bounds on E(K − T)_+ (sign −1) or, as E(T − K) + E(K − T)_+, on E(T − K)_+ (sign +1), for K ≤ `strike`.

    `strike` is that of the transform E e^(s(T − strike)), which is evaluated once for all K. Smoothing is to cost about
    `loss` of each value, to which `extra` will be added.

    **Formal guarantees.** As for `invert`, with the put's transform E e^(−s(T−K)), which is that of the larger strike
    times e^(−s(strike − K)). With a period L ≥ K the terms with m < 0 are puts at strikes below 0, raised by smoothing
    from zero: they stay. Those with m ≥ 1 are puts of strikes K + mL, at least mL·E1 − E(T − K) each (1 stands for the
    measure's mass): these parts are subtracted. Mass and E(T − K) are those of the same discretised measure, for which
    parity is exact; they are read off the transform at an imaginary argument so small that its square vanishes beside
    1, without cancellation. Paths with T ≤ strike have |T − strike| ≤ strike, the others
    |T − strike|e^(−θ|T − strike|) ≤ 1/(eθ): that bounds what rounded exponents cost. Values for several η are upper
    bounds all, so stopping when they no longer fall is a matter of tightness.
    """
    tiny = 1e-60 / strike
    at_zero = complex(transform(np.array([tiny * 1j]))[0])
    gap = strike - strikes
    mass = at_zero.real
    drift = at_zero.imag / tiny + mass * gap
    period = 1.2 * strike
    theta = _WRAP / period
    aliases = np.arange(1, 60)[:, None]
    known = (np.exp(-theta * period * aliases) * np.maximum(mass * aliases * period - drift, 0.0)).sum(axis=0)
    base = drift if sign > 0 else np.zeros_like(drift)
    fade = np.exp(-theta * gap)
    count, values = 16, np.full(len(strikes), math.inf)
    moments = np.empty(0, dtype=np.complex128)
    while True:
        s = theta + 2j * math.pi / period * np.arange(count)
        moments = np.concatenate((moments, transform(-s[len(moments) :])))
        moment = float(moments[0].real)
        if not (math.isfinite(moment) and moment > 0):
            return [None] * len(strikes)
        log_allowed = math.log(tolerance * max(min(float(values.min()), strike) + extra, 1e-200))
        eta = _least_smoothing(theta, period, math.log(moment), count, log_allowed)
        damping = np.exp(0.5 * eta**2 * s**2) / s**2
        multiplicity = np.full(count, 2.0)
        multiplicity[0] = 1.0
        remainder = math.exp(_log_remainder(theta, eta, period, math.log(moment), count))
        spread = 3 * strike * moment + 1 / (math.e * theta)
        errors = (1.01 * rounding * moment + 8 * UNIT * np.abs(s) * spread) * np.abs(damping)
        noise = fade * float((multiplicity * errors).sum()) / period + 4 * rounding * (strike + np.abs(drift))
        terms = (moments * damping * multiplicity)[:, None] * np.exp(-s[:, None] * gap)
        previous = values
        values = base + terms.real.sum(axis=0) / period - known + fade * remainder + noise
        if not np.all(np.isfinite(values) & (values > 0)):
            return [None] * len(strikes)
        values = np.minimum(values, previous)
        # The cost of smoothing falls with η², η with 1/count.
        total = values + extra
        settled = previous - values < 3 * loss * total
        if np.all(settled | (noise > 0.1 * total)) or 2 * count > most:
            pairs = zip(values.tolist(), noise.tolist(), strict=True)
            return [Inversion(value, theta, count, allowance) for value, allowance in pairs]
        count *= 2
