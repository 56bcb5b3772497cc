"""Where and how finely to compose: the lattice, the tilt and the window of the transforms.

Everything here guides and nothing proves. `compose` gives upper bounds for any window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import fft
from scipy.special import ndtri

from dpmf import budget
from dpmf.loss.mixtures import Mixtures
from dpmf.numerics import Array


@dataclass(frozen=True)
class Tuning:
    """How finely losses are composed. Any values give sound bounds.

    Attributes:
      inflation: discretisation may add this share to the variance of the loss.
      growth: how fast the lattice points in use may spread away from the bulk of a step's loss; 0 uses all.
      cut: what is cut off is e^(−cut) times the δ that is expected.
      low_reach: standard deviations below a step's smallest mean at which its lattice begins.
      largest_window: points of the window of the transforms, at most.
      smallest_window: points of the window, at least, where memory is limited.
      sampled_steps: the number of steps from which cumulants are estimated.
      scales: orders of Chernoff bounds beyond the saddle point, in units of 1/deviation.
      interval: spacing of the lattice; chosen by `inflation` if None.
      tilt: θ; the saddle point if None.
    """

    inflation: float = 2e-4
    growth: float = 0.01
    cut: float = 11.0
    low_reach: float = 8.0
    largest_window: int = 2**21
    smallest_window: int = 2**10
    sampled_steps: int = 48
    scales: tuple[float, ...] = (0.1, 0.3, 1.0, 2.0, 4.0, 6.0, 9.0)
    interval: float | None = None
    tilt: float | None = None


TUNING = Tuning()
_BYTES_PER_POINT = 96  # rows, transforms and spectra, where memory is limited


@dataclass(frozen=True)
class Window:
    """The lattice {h·l} of losses, l = lower .. lower + length − 1, and the exponential tilts.

    Attributes:
      interval: h.
      lower: the first lattice index.
      length: the number of lattice points.
      tilt: θ, by which pmfs are tilted.
      orders: orders of the Chernoff bounds on what lies above the window.
      tail: the mass above a step's highest lattice point, at most.
      widest: the largest distance of neighbouring lattice points in use above the bulk of a step's loss.
    """

    interval: float
    lower: int
    length: int
    tilt: float
    orders: Array
    tail: float
    widest: float


def choose_window(
    mixtures: Mixtures,
    sigma: float,
    add: bool,
    epsilon: float | None,
    delta: float | None,
    floor: float,
    tuning: Tuning,
) -> Window:
    """A window that is sharp near one ε, or near the ε at which δ(ε) = `delta`."""
    steps, log_floor = mixtures.total, math.log(floor)
    tail_reach = -float(ndtri(max(1e-4 * floor / steps, 1e-300)))
    cumulants = _Cumulants(mixtures, sigma, add, tail_reach, tuning.sampled_steps)
    if delta is not None:
        saddle = cumulants.order_for_delta(delta)
        epsilon = (cumulants(saddle)[0] - math.log(delta)) / saddle
    else:
        epsilon = epsilon or 0.0
        saddle = cumulants.order_for_epsilon(epsilon, log_floor - 5.0)
    order = saddle if tuning.tilt is None else tuning.tilt
    log_scale, _, variance = cumulants(order)
    deviation = math.sqrt(max(variance, 1e-300))
    log_size = log_floor
    if tuning.tilt is None:  # the expected δ(ε), by Laplace's method: what is cut off should be small beside it
        log_size = min(log_scale - order * epsilon, 0.0) - math.log1p(2.5 * order * deviation)
        log_size = max(log_size - math.log1p(max(order, 1 / deviation)), log_floor)

    h = tuning.interval
    if h is None:
        # A loss that hardly varies (one bin has a zero column) must not have a lattice finer than its own rounding.
        largest = float(mixtures.means.max()) / sigma
        h = max(math.sqrt(6 * tuning.inflation / steps) * deviation, largest * (largest + 40) * 2.0**-46)
    scales = np.array(tuning.scales)
    rises = np.concatenate((np.array([1.1, 1.3, 1.7, 2.5]) * saddle, saddle + scales / deviation))
    tops = sorted(((cumulants(rise)[0] - log_size + tuning.cut) / rise, rise) for rise in rises if rise > 0)
    top, orders = tops[0][0] + 2 * h, np.array([rise for _, rise in tops[:3]])
    # Mass below the window wraps around to its top: that is pessimistic, but it should be invisible beside δ.
    log_wrap = min(log_size - min(log_scale - order * top, 0.0), 0.0) - tuning.cut
    falls = np.concatenate((np.array([0.25, 0.5, 1.0]) * order, scales / deviation))
    bottom = max((log_wrap + log_scale - cumulants(order - fall)[0]) / fall for fall in falls if fall > 0) - 2 * h
    if order > 0:
        bottom = min(bottom, epsilon)
    if delta is not None and bottom > 0:  # the ε wanted is below that of the Chernoff bound, and profiles go on to 0
        bottom = max(0.0, bottom - 2 * (top - bottom))
    length = (top - bottom) / h + 2
    most = max(tuning.smallest_window, min(tuning.largest_window, budget.fitting(_BYTES_PER_POINT)))
    if length > most:
        if most < tuning.largest_window:
            budget.make_do()
        h *= length / most
        length = most
    return Window(
        interval=h,
        lower=math.floor(bottom / h),
        length=fft.next_fast_len(max(int(length), 16), real=True),
        tilt=order,
        orders=orders,
        tail=min(math.exp(log_size - tuning.cut), 1e-6) / steps,
        widest=max(0.2 / max(order, 1e-300), h),
    )


class _Cumulants:
    """log E e^(θL) of the composition and two derivatives, estimated from a sample of its steps."""

    def __init__(self, mixtures: Mixtures, sigma: float, add: bool, tail_reach: float, sampled: int) -> None:
        # The largest steps by themselves; the others in groups of like size, each represented by its middle step.
        sizes = np.add.reduceat(mixtures.means * mixtures.weights, mixtures.starts[:-1])
        ranked = np.argsort(sizes, kind="stable")
        few, many = ranked[-sampled // 4 :], ranked[: -sampled // 4]
        groups = [few[[i]] for i in range(len(few))]
        groups += [group for group in np.array_split(many, max(3 * sampled // 4, 1)) if len(group)]
        self._weights = [float(mixtures.counts[g].sum()) for g in groups]
        self._losses: list[Array] = []
        self._logs: list[Array] = []
        for n in (g[len(g) // 2] for g in groups):
            part = slice(mixtures.starts[n], mixtures.starts[n + 1])
            means, log_weights = mixtures.means[part] / sigma, np.log(mixtures.weights[part])
            ends = (-tail_reach, 9.0) if add else (means[0] - 9.0, means[-1] + tail_reach)
            size = int(min(max(400, 20 * (ends[1] - ends[0])), 4000))
            x = np.linspace(float(ends[0]), float(ends[1]), size)
            exponents = log_weights + means * (x[:, None] - 0.5 * means)
            top = exponents.max(axis=1)
            loss = top + np.log(np.exp(exponents - top[:, None]).sum(axis=1))
            log_mass = -0.5 * x * x + (0.0 if add else loss)
            log_mass -= log_mass.max() + math.log(np.exp(log_mass - log_mass.max()).sum())
            self._losses.append(-loss if add else loss)
            self._logs.append(log_mass)

    def __call__(self, order: float) -> tuple[float, float, float]:
        total = np.zeros(3)
        for weight, loss, log_mass in zip(self._weights, self._losses, self._logs, strict=True):
            exponent = log_mass + order * loss
            top = exponent.max()
            mass = np.exp(exponent - top)
            norm = mass.sum()
            mean = float(mass @ loss) / norm
            centred = loss - mean
            total += weight * np.array([top + math.log(norm), mean, float(mass @ (centred * centred)) / norm])
        return float(total[0]), float(total[1]), float(total[2])

    def order_for_epsilon(self, epsilon: float, log_floor: float) -> float:
        """The saddle point K'(θ) = ε, θ ≥ 0; less where the Chernoff bound has already sunk below the floor."""

        def beyond(order: float) -> bool:
            value, mean, _ = self(order)
            return mean >= epsilon or value - order * epsilon <= log_floor

        return 0.0 if beyond(0.0) else _switch(beyond)

    def order_for_delta(self, delta: float) -> float:
        """The order whose Chernoff bound reaches δ at the least ε."""

        def beyond(order: float) -> bool:  # sign of the derivative of (K(θ) + log 1/δ)/θ
            value, mean, _ = self(order)
            return mean * order - value >= -math.log(delta)

        return _switch(beyond)


def _switch(beyond: Callable[[float], bool]) -> float:
    """Where a monotone condition on positive numbers becomes true, to 1e-3."""
    low, high = 0.0, 1.0
    while not beyond(high) and high < 1e15:
        low, high = high, 4 * high
    while high - low > 1e-3 * high and high > 1e-15:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high
