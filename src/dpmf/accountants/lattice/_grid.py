"""The choice of a lattice, a tilt and a window for one option: heuristics, on which no bound rests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpmf.accountants.lattice._weights import call_from_above
from dpmf.loss.gaussian import Side
from dpmf.numerics import Array

FARTHEST = 38.0
"""Standard deviations beyond which a normal tail is below 10⁻³¹⁵."""


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight a bound is and how long it takes. Any values give sound bounds.

    Attributes:
      window_above: the width of the FFT's window for an upper bound, in standard deviations of the tilted sum.
      window_below: the same for a lower bound.
      within_reach: a term may exceed the strike less the mean of T by this many standard deviations of T.
      negligible: tails are cut where they are worth 1/(negligible·b) of the option.
      few_groups: up to this many different variances, moments are integrated on the finer grid.
      fine_grid: points of the finer grid.
      coarse_grid: points of the coarser grid.
      root_tolerance: relative tolerance of the search for the tilt.
      least_log_value: options whose logarithm is below this are bounded with a gentler tilt. Puts are taken relative
        to their strike, which is tiny at a large ε.
      unimportant: options whose logarithm, taken in the same way, is below this get a coarser lattice.
      coarse_loss: the discretisation loss of that coarser lattice.
      fewest_nodes: the least number of nodes up to the strike.
    """

    window_above: float = 18.0
    window_below: float = 36.0
    within_reach: float = 4.5
    negligible: float = 1e5
    few_groups: int = 4
    fine_grid: int = 1201
    coarse_grid: int = 601
    root_tolerance: float = 0.02
    least_log_value: float = -200.0
    unimportant: float = -100.0
    coarse_loss: float = 0.02
    fewest_nodes: int = 8


_TUNING = _Tuning()


@dataclass(frozen=True)
class Grid:
    """Lattice, tilt and window: each a is one of step·(first..last), and the strike is step·strike_index.

    Attributes:
      sign: +1 for a call, −1 for a put.
      tilt: weights are multiplied by e^(sign·tilt·a).
      step: the distance of the nodes.
      strike_index: the node at the strike.
      first: the lowest node of a term.
      last: the highest node of a term.
      length: the length of the FFT.
    """

    sign: int
    tilt: float
    step: float
    strike_index: int
    first: int
    last: int
    length: int

    @property
    def nodes(self) -> int:
        return self.last - self.first + 1


def window_below(length: int) -> float:
    """The decay per node at which Chernoff bounds on what lies outside of a lower bound's window are tried first."""
    return _TUNING.window_below / length


def choose(
    variances: Array, counts: np.ndarray, strike: float, *, sign: int, side: Side, loss: float, max_points: int
) -> Grid | None:
    """A lattice for an option on the sum of log-normals; None where T reaches the strike only through extreme terms.

    Args:
      variances: the log-variances that occur.
      counts: how many terms have each.
      strike: the strike of the option.
      sign: +1 for a call, −1 for a put.
      side: whether the option is to be bounded from above or from below.
      loss: the relative change of the noise multiplier that the lattice may cost.
      max_points: the largest number of nodes, and half the largest length of an FFT.
    """
    b, s = int(counts.sum()), float(variances.max())
    root, deviation = math.sqrt(s), math.sqrt(b * math.expm1(min(s, 600.0)))
    # A term beyond this takes T over the strike, unless the others fall far below their mean.
    widest = min(strike, strike - b + 1 + _TUNING.within_reach * deviation) if sign > 0 else strike
    cap, log_value = widest, math.inf
    for _ in range(5):
        moments = TiltedMoments(variances, counts, sign, cap)
        tilt, log_bound = moments.saddle(strike)
        if sign > 0:
            above = sum(c * call_from_above(v, cap) for v, c in zip(variances, counts, strict=True))
            log_bound = float(np.logaddexp(log_bound, math.log(above + 1e-300)))
        log_value = min(log_value, log_bound)
        unlikely = math.log(_TUNING.negligible * b) + max(0.0, math.log(strike) - log_value)
        reach = min(FARTHEST, math.sqrt(2 * unlikely))
        previous, cap = cap, min(widest, math.exp(min(s / 2 + root * reach, 600.0)))
        if abs(cap / previous - 1) < 0.05:
            break
    # A term beyond this takes T past a call's strike: it has no part in the density there.
    most = cap if sign < 0 else min(cap, strike - b + 1 + deviation)
    _, mean, deviation, spread = moments.at(tilt, most)
    lowest = math.exp(-min(s / 2 + root * reach, 600.0))
    if (sign > 0 and b * cap <= strike < widest * b) or (sign < 0 and b * lowest >= strike):
        return None
    window = _TUNING.window_above if side == "upper" else _TUNING.window_below
    width = window * deviation + 3 * abs(mean - strike)
    if log_value - log_unit(strike, sign) < _TUNING.unimportant:
        loss = max(loss, _TUNING.coarse_loss)
    # Under the tilt, an additional variance of h²/6 is worth h²/(6 E[a²]) of log-variance.
    step = math.sqrt(12 * loss / b) * spread
    step = max(step, width / (2 * max_points), (cap - lowest) / max_points, 1e-13 * strike)
    strike_index = max(_TUNING.fewest_nodes, math.ceil(strike / step))
    step = strike / strike_index
    first = int(lowest / step)
    last = max(first + 1, min(strike_index, math.ceil(cap / step)))
    length = 1 << max(6, math.ceil(math.log2(width / step + 1)))
    return Grid(sign, tilt, step, strike_index, first, last, length)


def log_unit(strike: float, sign: int) -> float:
    """The logarithm of what values are compared with: a put is worth at most its strike."""
    return math.log(strike) if sign < 0 else 0.0


class TiltedMoments:
    """Moments of min(a, cap) under an exponential tilt, by a plain quadrature."""

    def __init__(self, variances: Array, counts: np.ndarray, sign: int, cap: float) -> None:
        self._sign = sign
        self._counts, self._s = counts[:, None], variances[:, None]
        points = _TUNING.fine_grid if len(counts) <= _TUNING.few_groups else _TUNING.coarse_grid
        z = np.linspace(-FARTHEST, FARTHEST, points)
        self._cap = cap
        self._a = np.minimum(np.exp(np.minimum(np.sqrt(self._s) * z - self._s / 2, math.log(cap))), cap)
        self._log_weight = -0.5 * z**2 + math.log((z[1] - z[0]) / math.sqrt(2 * math.pi))

    def at(self, theta: float, most: float = math.inf) -> tuple[float, float, float, float]:
        """Σ log-moment, Σ mean, and the square roots of Σ variance and of Σ s·E[a²; a < most]."""
        exponent = self._sign * theta * self._a + self._log_weight
        largest = exponent.max(axis=1, keepdims=True)
        weight = np.exp(exponent - largest)
        norm = weight.sum(axis=1, keepdims=True)
        weight /= norm
        share = self._a / self._cap  # squares of a itself may leave the range of double
        mean = (weight * share).sum(axis=1, keepdims=True)
        variance = (weight * (share - mean) ** 2).sum(axis=1, keepdims=True)
        inside = self._a < most * (1 - 1e-9)  # without the terms at the cap, whatever the rounding
        spread = self._s * (weight * share**2 * inside).sum(axis=1, keepdims=True)
        log_moment = largest + np.log(norm)
        total, mean, variance, spread = (float((self._counts * x).sum()) for x in (log_moment, mean, variance, spread))
        return total, self._cap * mean, self._cap * math.sqrt(variance), self._cap * math.sqrt(spread)

    def saddle(self, strike: float) -> tuple[float, float]:
        """The tilt for an option, and the logarithm of a rough bound on its value.

        The tilt θ minimises E e^(±θ(T − K))/θ², the size of the option's inverse Laplace transform. The bound is
        Chernoff's, E e^(±θ(T−K))/(eθ).
        """

        def slope(theta: float) -> float:  # increases with θ
            return self._sign * (self.at(theta)[1] - strike) - 2 / theta

        def log_bound(theta: float) -> float:
            return self.at(theta)[0] - self._sign * theta * strike - 1 - math.log(theta)

        low = high = 1 / strike
        if slope(high) < 0:
            while slope(high) < 0 and high * strike < 1e12:
                low, high = high, 4 * high
        else:
            while slope(low) >= 0 and low * strike > 1e-12:
                low, high = low / 4, low
        low, high = _halved(low, high, lambda theta: slope(theta) < 0)
        least = _TUNING.least_log_value + log_unit(strike, self._sign)
        if log_bound(high) < least:
            # A gentler tilt shows that the value is small enough, without extreme numbers.
            low = high
            while log_bound(low) < least:
                low /= 2
            low, high = _halved(low, high, lambda theta: log_bound(theta) >= least)
        return high, log_bound(high)


def _halved(low: float, high: float, is_low: Callable[[float], bool]) -> tuple[float, float]:
    """An interval that is narrower than the tolerance, with `is_low` true at its lower end only."""
    while high > (1 + _TUNING.root_tolerance) * low:
        middle = math.sqrt(low) * math.sqrt(high)  # their product may overflow
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high
