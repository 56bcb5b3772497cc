"""Options on a sum of log-normals from its transform: spreads onto nodes, tables of transforms, one-sided inversion.

T = Σ a_i is a sum of dependent log-normals. A spread replaces a random variable by one on finitely many nodes so that
the expectation of every function of the kind at hand can only rise; all weights are non-negative and rounded up, so
that the measure itself can only grow. Options are then read off M(s) = E e^(±s(T − K)) on one vertical line of the
complex plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import ndtr

from dpmf import budget
from dpmf.numerics import UNIT, Array

_WEIGHT_ERROR = 1e-12  # relative error of the quadrature and of `ndtr`, rounded up
_WEIGHT_FLOOR = 1e-34  # where the quadrature's relative error is not under control, a weight is below this
_POINTS, _POINT_WEIGHTS = np.polynomial.legendre.leggauss(12)
_POINTS, _POINT_WEIGHTS = (_POINTS + 1) / 2, _POINT_WEIGHTS / 2
_PANEL = 0.5
_FARTHEST = 13.0  # deviations: what is beyond has a probability below 10⁻³⁷
_MOST_SMOOTHING = 6.0  # ηθ, which costs a factor e^(18): the plain Gaussian mechanism does better
_MOST_EXCESS = 8.0  # log of how much larger than at its saddle M may be on the line that is integrated along
_NARROWEST = 20  # a standard deviation below spacing/20 is not worth resolving


def hat_weights(nodes: Array, means: Array, deviation: float, slope: float) -> tuple[Array, Array]:
    """Spreads of X ~ N(mean, deviation²), one row per mean, onto equidistant nodes: weights, and what is left at −∞.

    slope = 0: linear interpolation in x, X below the first node is moved up to it, nothing is left.
    slope > 0: linear interpolation in e^(slope·x), with a node at −∞ (e^(slope·x) = 0), whose weight comes apart.
    X above the last node is counted there.

    **Formal guarantees.** Let g be a function of X. If g is convex and increasing, slope = 0 raises E g(min(X, last
    node)): interpolation of a convex function is from above. If g is a convex decreasing function of e^(slope·x), so
    does slope > 0, with g(−∞) at its node, and for X above the last node g(X) ≤ g(last). Weights are integrals of the
    normal density times a positive factor by 12-point Gauss–Legendre panels at most half a deviation wide: for |z| ≤ 12
    the remainder 9·10⁻³⁹·w²⁵·f⁽²⁴⁾ is a relative 10⁻¹³ at most (derivatives of the density are Hermite polynomials
    times the density, |He_n(z)| ≤ (|z| + √n)ⁿ), for larger |z| the weight is below 10⁻³⁴. Both are added.
    """
    spacing = float(nodes[1] - nodes[0])
    panels = max(1, math.ceil(spacing / (_PANEL * deviation)))
    offset = ((np.arange(panels)[:, None] + _POINTS) * (spacing / panels)).ravel()
    measure = np.tile(_POINT_WEIGHTS, panels) * (spacing / panels / deviation / math.sqrt(2 * math.pi))
    upper = np.expm1(slope * offset) / math.expm1(slope * spacing) if slope * spacing > 1e-9 else offset / spacing
    share = np.stack((measure * (1 - upper), measure * upper), axis=1)
    weights = np.zeros((len(means), len(nodes)))
    budget.claim(24.0 * len(means) * len(nodes))
    # Only the cells within _FARTHEST deviations: all others have weights far below the floor.
    cells = min(len(nodes) - 1, math.ceil(2 * _FARTHEST * deviation / spacing) + 2)
    nearest = np.floor((means - _FARTHEST * deviation - nodes[0]) / spacing)
    first = np.clip(nearest, 0, len(nodes) - 1 - cells).astype(np.int64)
    rows = max(1, int(min(4e6, budget.fitting(40)) / (cells * len(offset))))
    for start in range(0, len(means), rows):
        budget.check()
        some = np.arange(start, min(start + rows, len(means)))[:, None]
        columns = first[some] + np.arange(cells)
        z = ((nodes[columns] - means[some])[:, :, None] + offset) / deviation
        cell = np.exp(-0.5 * z * z) @ share
        weights[some, columns] += cell[:, :, 0]
        weights[some, columns + 1] += cell[:, :, 1]
    weights[:, -1] += ndtr((means - nodes[-1]) / deviation)
    start_z = (nodes[0] - means) / deviation
    below = ndtr(start_z)
    if slope == 0.0:
        weights[:, 0] += below
        below = np.zeros_like(below)
    else:
        gain = np.minimum(slope * (means - nodes[0]) + 0.5 * (slope * deviation) ** 2, 700.0)
        weights[:, 0] += np.minimum(np.exp(gain) * ndtr(start_z - slope * deviation), below)
    return weights * (1 + _WEIGHT_ERROR) + _WEIGHT_FLOOR, below * (1 + _WEIGHT_ERROR) + _WEIGHT_FLOOR


@dataclass(frozen=True, eq=False)
class Spread:
    """A standard normal factor on nodes: its weights, the weight left at −∞, and the last node."""

    nodes: Array
    weights: Array
    lost: float

    @classmethod
    def of_standard_normal(cls, spacing: float, low: float, high: float, slope: float) -> Spread:
        nodes: Array = low + spacing * np.arange(math.ceil((high - low) / spacing) + 1.0)
        weights, lost = hat_weights(nodes, np.zeros(1), 1.0, slope)
        return cls(nodes, weights[0], float(lost[0]))

    @classmethod
    def trivial(cls) -> Spread:
        """Of a factor without any load."""
        return cls(np.zeros(1), np.ones(1), 0.0)

    def mean(self, load: Array) -> Array:
        """E e^(load·z − load²/2) under the spread: about 1, slightly more for a slope of 0."""
        return np.asarray(np.exp(load[:, None] * self.nodes - load[:, None] ** 2 / 2) @ self.weights)


class TermTable:
    """Transforms of a = min(e^y·N, K), N a log-normal of mean 1 (the nugget), for y on a grid, by class of nugget.

    **Formal guarantees.** e^y between two rows is interpolated linearly in e^y, below the first row between 0 and
    that row, and N is spread in the same way onto a grid of its own: mean-preserving spreads of a, in which (T − K)_+
    and (K − T)_+ are convex. What lies above the grids is cut: that can only raise a put; for a call
    (T − K)_+ ≤ (T' − K)_+ + (T − T'), and the expectation of the second part is `excess`. A cut at K costs a call
    nothing (once some a_i ≥ K the bound is an equality).
    """

    def __init__(self, low: float, high: float, step: float, nuggets: Array, strike: float, terms: int):
        self._low, self._step, self._shift = low, step, strike / terms
        self._count = max(2, math.ceil((high - low) / step) + 1)
        self._strike = strike
        self.high = low + step * (self._count - 1)
        self._laws = [self._nugget(float(nu)) for nu in nuggets]
        self._excess = [self._surplus(weights, half, tail) for weights, half, _, tail in self._laws]

    def _nugget(self, variance: float) -> tuple[Array, int, float, float]:
        """Weights on the nodes e^(step·m), |m| ≤ half, the weight left at 0, and E(N − last node)_+."""
        if variance == 0.0:
            return np.ones(1), 0, 0.0, 0.0
        root = max(math.sqrt(variance), self._step / _NARROWEST)
        half = math.ceil((8.5 * root + root**2) / self._step) + 1
        nodes: Array = self._step * np.arange(-half, half + 1.0)
        weights, left = hat_weights(nodes, np.array([-(root**2) / 2]), root, 1.0)
        beyond = float(ndtr(root / 2 - nodes[-1] / root)) * (1 + _WEIGHT_ERROR) + _WEIGHT_FLOOR
        return weights[0], half, float(left[0]), beyond

    def _surplus(self, weights: Array, half: int, tail: float) -> Array:
        """Per row (the first one is a = 0): E(a − K)_+ of the spread, and what the nugget's grid leaves out."""
        a = np.exp(self._low + self._step * np.arange(-half, self._count + half))
        over = np.convolve(np.maximum(a - self._strike, 0.0), weights[::-1], mode="valid")
        row = np.exp(self._low + self._step * np.arange(self._count))
        return np.concatenate(([0.0], over + tail * row))

    def locate(self, y: Array) -> tuple[np.ndarray, Array]:
        """Row and share of each y (row 0 is a = 0); y above the table is cut."""
        place = np.clip(np.floor((y - self._low) / self._step), -1, self._count - 2)
        row = place.astype(np.int64) + 1
        with np.errstate(under="ignore"):
            inside = np.expm1(y - self._low - place * self._step) / math.expm1(self._step)
            share = np.where(row == 0, np.exp(np.minimum(y - self._low, 0.0)), inside)
        return row, np.clip(share, 0.0, 1.0)

    def excess(self, y: Array, kind: int) -> Array:
        """What cutting loses in expectation given y (calls only)."""
        row, share = self.locate(y)
        above = math.exp(self.high) * np.expm1(np.maximum(y - self.high, 0.0))
        table = self._excess[kind]
        return np.asarray((1 - share) * table[row] + share * table[row + 1] + above)

    @property
    def summands(self) -> int:
        """Of the longest sum in a transform: the nodes of a nugget."""
        return max(len(weights) for weights, _, _, _ in self._laws) + 1

    def _banded(self, weights: Array) -> Array:
        """The matrix that replaces each row by its mixture over the nugget."""
        budget.claim(48.0 * self._count * (self._count + len(weights)))
        matrix = np.zeros((self._count, self._count + len(weights)))
        matrix[:, : len(weights)] = weights  # then shear: row r starts at column r
        return matrix.ravel()[: -self._count].reshape(self._count, -1)

    def transforms(self, s: np.ndarray) -> Array:
        """E e^(s(a − K/n)), class × row × (real, imaginary) × s."""
        budget.claim(64.0 * (len(self._laws) + 3) * self._count * len(s))
        out = np.empty((len(self._laws), self._count + 1, 2, len(s)))
        zero = np.exp(-s * self._shift)
        for kind, (weights, half, left, _) in enumerate(self._laws):
            a = np.minimum(np.exp(self._low + self._step * np.arange(-half, self._count + half)), self._strike)
            exponent = (a - self._shift)[:, None] * s
            exponent[exponent.real > 600] = np.nan  # out of range: such a tilt is never chosen
            values = np.exp(exponent)
            parts = np.stack((values.real, values.imag), axis=1).reshape(len(a), -1)
            rows = (self._banded(weights) @ parts if half else parts).reshape(self._count, 2, len(s))
            rows[:, 0] += left * zero.real
            rows[:, 1] += left * zero.imag
            out[kind, 1:] = rows
            out[kind, 0, 0], out[kind, 0, 1] = zero.real, zero.imag
        return out


Transform: TypeAlias = Callable[[np.ndarray], np.ndarray]  # s ↦ E e^(s(T − K))


@dataclass(frozen=True)
class Inversion:
    """An option's value from above, and how it was found."""

    value: float
    tilt: float
    frequencies: int
    noise: float  # how much of the value is allowance for rounding


_RATIOS = np.array([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.1, 2.5, 3.0, 4.0, 6.0])


def pilot(
    transform: Transform, sign: int, scale: float, farthest: float, gap: float = 0.0
) -> tuple[float, float] | None:
    """(θ that minimises M(θ)/θ², log of M(θ)/(eθ), which is at least the option), from a coarse scan.

    `gap` is how far the strike is below that of the transform.
    """
    thetas = np.geomspace(0.02 / (scale + farthest), 60 / scale, 28)
    values = _log_real(transform, sign * thetas) + sign * thetas * gap
    score = np.where(np.isfinite(values), values - 2 * np.log(thetas), np.inf)
    best = int(np.argmin(score))
    if not math.isfinite(score[best]):
        return None
    return float(thetas[best]), float(values[best] - 1 - math.log(thetas[best]))


def invert(
    transform: Transform,
    sign: int,
    near: float,
    gap: Array,
    *,
    smoothing: float,
    tolerance: float,
    most: int,
    strike: float,
    rounding: float,
) -> list[Inversion | None]:
    """Upper bounds on E(±(T − K))_+ from M(s) = E e^(±s(T − strike)), for K = strike − gap.

    M is evaluated once for all K, which should be close together; `near` is about a good tilt for them.

    **Formal guarantees.** With s_k = θ + 2πik/L, the sum of M(s_k)/s_k² over all integers k, divided by L, is by
    Poisson's formula exactly Σ_m e^(θLm)·c(K ± mL), c the call (put) as a function of its strike: every term is
    non-negative and that of m = 0 is the option. So any θ > 0 and L > 0 give an upper bound. Adding an independent
    N(0, η²) to T can only raise it (Jensen) and multiplies M(s) by e^(η²s²/2), which makes the sum converge: the
    frequencies left out are at most their moduli, |M(s)| ≤ M(θ), summed as a geometric series. For another K, M is
    multiplied by e^(±s·gap).

    Rounding: sums and products along a path of the transfer matrices have a relative error of at most `rounding`; the
    exponents s(a − K/n) have an error of 4u|s|(a + K/n), that is 4u|s|(T + K) over a path. Errors are averages over the
    paths with weights e^(±θ(T−K)), and E|T − K|e^(±θ(T−K)) ≤ (M(θ') − M(θ))/(θ' − θ) + M(θ")/(e(θ − θ")) for all
    θ" < θ < θ' (M is convex, and x·e^(−θx) ≤ e^(−θ"x)/(e(θ − θ")) for x ≥ 0). Both errors are added at every frequency.
    The choice of θ, L, η from M on the real axis decides how tight the bound is, never whether it holds.
    """
    nothing: list[Inversion | None] = [None] * len(gap)
    thetas = near * _RATIOS
    real = _log_real(transform, sign * thetas)
    good = np.isfinite(real)
    if good.sum() < 5:
        return nothing
    thetas, logs = thetas[good], real[good, None] + sign * thetas[good, None] * gap
    saddles = np.argmin(logs - 2 * np.log(thetas)[:, None], axis=0)
    log_allowed = np.array([_log_value(thetas, logs[:, k], int(i)) for k, i in enumerate(saddles)]) + math.log(
        tolerance
    )
    eta = smoothing / float(thetas[saddles].max())

    def needed(index: int, period: float, eta: float) -> int:
        theta = float(thetas[index])
        return max(
            _frequencies(theta, eta, period, float(log), float(allowed))
            for log, allowed in zip(logs[index], log_allowed, strict=True)
        )

    plans = []
    for index in range(max(1, int(saddles.min()) - 5), min(int(saddles.max()) + 1, len(thetas) - 1)):
        period = max(_period(thetas, logs[:, k], index, float(log_allowed[k])) for k in range(len(gap)))
        # How much larger than at the saddle M is, rounding errors are.
        excess = float((logs[index] - logs[saddles, np.arange(len(gap))]).max())
        plans.append((needed(index, period, eta) * (1 if excess < _MOST_EXCESS else 1000), index, period))
    if not plans:
        return nothing
    _, best, period = min(plans)
    theta, count = float(thetas[best]), needed(best, period, eta)
    while count > most:
        eta *= 1.25
        if eta * theta > _MOST_SMOOTHING:  # frequencies below θ are not damped: no η brings so few of them
            return nothing
        count = needed(best, period, eta)
    s = theta + 1j * (2 * math.pi / period * np.arange(count))
    moments = transform(sign * s)
    multiplicity = np.full(count, 2.0)
    multiplicity[0] = 1.0
    damping = multiplicity * np.exp(0.5 * eta**2 * s**2) / s**2 / period
    shift = np.exp(sign * theta * gap)
    moment = float(moments[0].real) * shift
    with np.errstate(over="ignore"):  # an infinite allowance is one
        ahead = np.expm1(np.minimum(logs[best + 1 :] - logs[best], 600.0)) / (thetas[best + 1 :] - theta)[:, None]
    behind = np.exp(logs[:best] - logs[best]) / (math.e * (theta - thetas[:best]))[:, None]
    spread = 1.01 * moment * (ahead.min(axis=0) + behind.min(axis=0) + 2 * strike)
    weight = np.abs(damping)
    noise = 1.01 * rounding * moment * weight.sum() + 8 * UNIT * float((weight * np.abs(s)).sum()) * spread
    values = ((moments * damping)[:, None] * np.exp(sign * s[:, None] * gap)).real.sum(axis=0) + noise
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values += np.exp(_log_remainder(theta, eta, period, 0.0, count)) * moment
    return [
        Inversion(value, theta, count, allowance) if math.isfinite(value) and value > 0 else None
        for value, allowance in zip(values.tolist(), noise.tolist(), strict=True)
    ]


def _log_value(thetas: Array, logs: Array, saddle: int) -> float:
    """log of the option by the saddle point method, about."""
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


def _least_smoothing(theta: float, period: float, log_moment: float, count: int, log_allowed: float) -> float:
    """About the smallest η for which the frequencies from `count` on are worth less than allowed."""
    omega = 2 * math.pi / period * count
    low, high = 1.0, 40.0
    for _ in range(30):
        middle = 0.5 * (low + high)
        enough = _log_remainder(theta, middle / omega, period, log_moment, count) <= log_allowed
        low, high = (low, middle) if enough else (middle, high)
    return high / omega


def _log_real(transform: Transform, s: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(np.log(transform(s.astype(np.complex128)).real))


def _log_remainder(theta: float, eta: float, period: float, log_moment: float, count: int) -> float:
    """log of 2/L·M(θ)·Σ_{k ≥ count} |e^(η²s²/2)/s²|, from above."""
    spacing = 2 * math.pi / period
    omega = spacing * count
    first = 0.5 * eta**2 * (theta**2 - omega**2) - math.log(theta**2 + omega**2)
    ratio = -math.expm1(-(eta**2) * omega * spacing)
    return math.log(2 / period) + log_moment + first - math.log(ratio) + 1e-9


def _frequencies(theta: float, eta: float, period: float, log_moment: float, log_allowed: float) -> int:
    low, high = 1, 2
    while _log_remainder(theta, eta, period, log_moment, high) > log_allowed and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        inside = _log_remainder(theta, eta, period, log_moment, middle) <= log_allowed
        low, high = (low, middle) if inside else (middle, high)
    return high
