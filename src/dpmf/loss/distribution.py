"""Privacy-loss distributions of Gaussian mixtures, and their composition.

A *step* is a pair P = Σ_j w_j N(m_j, σ²), Q = N(0, σ²) of distributions on the line, m_j ≥ 0. "remove" is the loss of
(P, Q), "add" that of (Q, P). `compose` puts thousands of different steps together and gives an upper bound on the
composition's δ(ε), at every ε:

1. Each step is discretised by connecting the dots (Doroshenko et al. 2022): mass between two points of a lattice of
   losses moves onto these points, keeping its P- and its Q-measure.
2. All pmfs are tilted by e^(θ·loss), so that the losses around the ε of interest carry the mass and rounding errors are
   relative to δ, whatever its size; then they are transformed, multiplied, and transformed back.
3. What could be lost is added: per-step tails, what lies above the transform's window (Chernoff), FFT rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import fft
from scipy.special import ndtri

from dpmf import budget, validation
from dpmf.kernels import announce_compilation
from dpmf.loss.gaussian import least_epsilon
from dpmf.numerics import UNIT, Array

if TYPE_CHECKING:  # numba takes half a second to import: not before it is needed
    from dpmf.kernels.pld import Lattice, RowSums

_LARGEST_WINDOW = 2**21
_SMALLEST_WINDOW, _BYTES_PER_POINT = 2**10, 96  # where memory is limited: rows, transforms, spectra
_ROWS_BYTES = 32 * 2**20
_SAMPLED_STEPS = 48
_SCALES = np.array([0.1, 0.3, 1.0, 2.0, 4.0, 6.0, 9.0])


@dataclass(frozen=True)
class Mixtures:
    """Steps to compose; step n has the components starts[n] .. starts[n+1]−1 and is run counts[n] times.

    Within a step means are ≥ 0 and strictly ascending, weights positive with sum one.
    """

    means: Array
    weights: Array
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def from_steps(cls, steps: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Mixtures:
        """From (means, weights) pairs: sorted, equal means merged, equal steps counted."""
        collected: dict[tuple[bytes, bytes], int] = {}
        for number, (raw_means, raw_weights) in enumerate(steps):
            means = np.asarray(raw_means, dtype=np.float64)
            weights = np.asarray(raw_weights, dtype=np.float64)
            if means.ndim != 1 or means.shape != weights.shape or not means.size:
                raise ValueError(
                    f"steps[{number}] must be means and weights of one length, got {means.shape} and {weights.shape}"
                )
            if not (np.all(np.isfinite(means)) and means.min() >= 0):
                raise ValueError(f"means must be finite and non-negative, got {means.tolist()!r}")
            if not (weights.min() >= 0 and abs(weights.sum() - 1) <= 1e-9):
                raise ValueError(f"weights must be non-negative with sum one, got {weights.tolist()!r}")
            distinct, where = np.unique(means[weights > 0], return_inverse=True)
            merged = np.bincount(where, weights=weights[weights > 0])
            merged[-1] += max(1 - merged.sum(), 0.0)  # what rounding left out may not be lost
            key = (distinct.tobytes(), merged.tobytes())
            collected[key] = collected.get(key, 0) + 1
        return cls.from_unique(collected)

    @classmethod
    def from_unique(cls, collected: dict[tuple[bytes, bytes], int]) -> Mixtures:
        parts = [(np.frombuffer(m), np.frombuffer(w)) for m, w in collected]
        sizes = [len(m) for m, _ in parts]
        empty = np.zeros(0)
        return cls(
            means=np.concatenate([m for m, _ in parts]) if parts else empty,
            weights=np.concatenate([w for _, w in parts]) if parts else empty,
            starts=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64),
            counts=np.array(list(collected.values()), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def total(self) -> int:
        """The number of steps, repetitions included."""
        return int(self.counts.sum())

    def simplified(self) -> Mixtures:
        """The same composition with all single Gaussians in one step: their losses add up to that of √Σ m².

        A step of mean zero has no loss and goes away.
        """
        single = np.diff(self.starts) == 1
        if not single.any():
            return self
        means = self.means[self.starts[:-1][single]]
        # hypot-like: squares of tiny or huge means must not leave the range
        top = float(means.max())
        together = top * math.sqrt(float(self.counts[single] @ (means / top) ** 2)) if top > 0 else 0.0
        kept: dict[tuple[bytes, bytes], int] = {}
        if together > 0:
            kept[np.array([together * (1 + 1e-14)]).tobytes(), np.ones(1).tobytes()] = 1
        for n in np.flatnonzero(~single):
            part = slice(self.starts[n], self.starts[n + 1])
            kept[self.means[part].tobytes(), self.weights[part].tobytes()] = int(self.counts[n])
        return Mixtures.from_unique(kept)

    @property
    def gaussian(self) -> float | None:
        """The mean of the one Gaussian that the composition amounts to, or None where it is not one."""
        simple = self.simplified()
        if not len(simple):
            return 0.0
        return float(simple.means[0]) if len(simple.means) == 1 else None


@dataclass(frozen=True)
class LossDistribution:
    """An upper bound on the privacy profile of a composition.

    Attributes:
      interval: spacing h of the lattice of losses.
      lower: lattice index of the first entry of `probs`.
      probs: masses p_l e^(θhl − K): tilted by θ = `tilt`, scaled by e^(−K), K = `log_scale`.
      infinity_mass: mass of infinite loss, with everything that was cut off.
      rounding: bound on the 2-norm of the error of `probs` by the transforms.
      relative: bound on all other relative rounding errors.

    **Formal guarantees.** `delta(ε)` is at least the hockey-stick divergence of the composition at every real ε,
    provided that a transform of length M has relative 2-norm error at most 7·2⁻⁵³·log₂ M (Higham 2002, Theorem 24.2).
    """

    interval: float
    lower: int
    probs: Array
    tilt: float
    log_scale: float
    infinity_mass: float
    rounding: float
    relative: float

    def delta(self, epsilon: float) -> float:
        """The bound on δ(ε); cut to 1."""
        bottom = self.interval * self.lower
        if self.tilt > 0 and epsilon < bottom:
            # Mass that fell below the window has lost its weight; but δ is convex in e^ε, and 1 at e^ε = 0.
            return 1.0 + math.exp(epsilon - bottom) * (self.delta(bottom) - 1.0)
        # Any ε beyond the lattice is the same; the quotient of a huge one would leave the range of double.
        first = max(math.floor(min(epsilon / self.interval, 2.0**62)) + 1 - self.lower, 0)
        if first >= len(self.probs):
            return min(self.infinity_mass, 1.0)
        losses = self.interval * (self.lower + np.arange(first, len(self.probs)))
        if self.log_scale - self.tilt * losses[0] > 300:
            return 1.0  # so far below where it was meant to be sharp that the tilt cannot be undone
        gain = np.exp(self.log_scale - self.tilt * losses) * -np.expm1(np.minimum(epsilon - losses, 0.0))
        value = float(np.sum(gain * self.probs[first:]))  # pairwise: its error hardly grows with the length
        error = self.rounding * float(np.linalg.norm(gain))
        return min(1.0, (value + error) * (1 + self.relative) + self.infinity_mass)

    def epsilon(self, delta: float) -> float:
        """The least ε ≥ 0 found with `delta(ε)` ≤ delta, itself evaluated; infinity where there is none."""
        return math.inf if self.infinity_mass > delta else least_epsilon(self.delta, delta)

    def with_infinity(self, mass: float) -> LossDistribution:
        """The same with more mass of infinite loss."""
        return replace(self, infinity_mass=min(self.infinity_mass + mass, 1.0))

    def to_pmf(self) -> Any:
        """The same as dp_accounting's `DensePLDPmf`, for compositions made with `tilt=0`."""
        from dp_accounting.pld import pld_pmf

        if self.tilt != 0:
            raise ValueError(f"tilt must be 0 for a pmf of all losses, got {self.tilt}")
        masses = math.exp(self.log_scale) * (1 + self.relative) * self.probs
        infinity = self.infinity_mass + self.rounding * math.exp(self.log_scale) * math.sqrt(len(masses))
        return pld_pmf.DensePLDPmf(self.interval, self.lower, masses, min(infinity, 1.0), True)


def to_dp_accounting(remove: LossDistribution, add: LossDistribution) -> Any:
    """dp_accounting's `PrivacyLossDistribution` with these two directions, made with one `interval`."""
    from dp_accounting.pld import privacy_loss_distribution

    if remove.interval != add.interval:
        raise ValueError(f"add must have the interval of remove, {remove.interval}, got {add.interval}")
    return privacy_loss_distribution.PrivacyLossDistribution(remove.to_pmf(), add.to_pmf())


class _Cumulants:
    """log E e^(θL) of the composition and two derivatives, from a sample of its steps: it guides, it proves nothing."""

    def __init__(self, mixtures: Mixtures, sigma: float, add: bool, z_tail: float) -> None:
        # The largest steps by themselves, the others in groups of like size, each with one spokesman.
        sizes = np.add.reduceat(mixtures.means * mixtures.weights, mixtures.starts[:-1])
        ranked = np.argsort(sizes, kind="stable")
        few, many = ranked[-_SAMPLED_STEPS // 4 :], ranked[: -_SAMPLED_STEPS // 4]
        groups = [few[[i]] for i in range(len(few))]
        groups += [group for group in np.array_split(many, 3 * _SAMPLED_STEPS // 4) if len(group)]
        self._weights = [float(mixtures.counts[g].sum()) for g in groups]
        self._losses: list[Array] = []
        self._logs: list[Array] = []
        for n in (g[len(g) // 2] for g in groups):
            part = slice(mixtures.starts[n], mixtures.starts[n + 1])
            means, log_weights = mixtures.means[part] / sigma, np.log(mixtures.weights[part])
            ends = (-z_tail, 9.0) if add else (means[0] - 9.0, means[-1] + z_tail)
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


def compose(
    mixtures: Mixtures,
    sigma: float,
    direction: str,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    interval: float | None = None,
    tilt: float | None = None,
    floor: float = 1e-16,
    inflation: float = 2e-4,
    growth: float = 0.01,
) -> LossDistribution:
    """The composition of all steps, as sharp as can be near one ε (or the ε at which δ(ε) = `delta`).

    Args:
      mixtures: the steps.
      sigma: standard deviation of every component.
      direction: "remove" for (P, Q), "add" for (Q, P).
      epsilon, delta: where to be sharp; give one of them.
      interval: spacing of the lattice; chosen so that discretisation adds the share `inflation` to the variance of
        the loss, unless given.
      tilt: θ; the saddle point of `epsilon` or `delta` unless given. 0 for a hand-over to dp_accounting.
      floor: contributions to δ far below this need no accuracy.
      growth: how fast lattice points in use may spread away from the bulk of a step's loss; 0 uses all.

    **Formal guarantees.** The result's `delta` is an upper bound at every ε, whatever the options: connecting the dots
    dominates each step, masses are rounded up, wrapped-around left tails only add mass, and right tails (per step and
    of the composition, by Chernoff's inequality on the very pmfs composed) and FFT rounding are added.
    """
    from dpmf.kernels.pld import Lattice

    sigma = validation.positive("sigma", sigma)
    add = validation.choice("direction", direction, ("remove", "add")) == "add"
    epsilon = validation.real("epsilon", 0.0 if epsilon is None else epsilon)
    delta = None if delta is None else validation.probability("delta", delta)
    tilt = None if tilt is None else validation.non_negative("tilt", tilt)
    log_floor = math.log(validation.probability("floor", floor))
    growth, inflation = validation.non_negative("growth", growth), validation.positive("inflation", inflation)
    mixtures = mixtures.simplified()
    steps = mixtures.total
    if not steps:
        return LossDistribution(interval or 1.0, 0, np.ones(1), 0.0, 0.0, 0.0, 0.0, 0.0)

    cumulants = _Cumulants(mixtures, sigma, add, -float(ndtri(max(1e-4 * floor / steps, 1e-300))))
    if delta is not None:
        saddle = cumulants.order_for_delta(delta)
        epsilon = (cumulants(saddle)[0] - math.log(delta)) / saddle
    else:
        saddle = cumulants.order_for_epsilon(epsilon, log_floor - 5.0)
    order = saddle if tilt is None else tilt
    log_scale, _, variance = cumulants(order)
    deviation = math.sqrt(max(variance, 1e-300))
    log_size = log_floor
    if tilt is None:  # a guess at δ(ε), by Laplace's method: what is cut off should be small beside it
        log_size = min(log_scale - order * epsilon, 0.0) - math.log1p(2.5 * order * deviation)
        log_size = max(log_size - math.log1p(max(order, 1 / deviation)), log_floor)

    if interval is None:
        # A loss that hardly varies (one bin has a zero column) must not have a lattice finer than its own rounding.
        largest = float(mixtures.means.max()) / sigma
        h = max(math.sqrt(6 * inflation / steps) * deviation, largest * (largest + 40) * 2.0**-46)
    else:
        h = validation.positive("interval", interval)
    rises = np.concatenate((np.array([1.1, 1.3, 1.7, 2.5]) * saddle, saddle + _SCALES / deviation))
    tops = sorted(((cumulants(rise)[0] - log_size + 11.0) / rise, rise) for rise in rises if rise > 0)
    top, orders = tops[0][0] + 2 * h, np.array([rise for _, rise in tops[:3]])
    # What falls below the window comes back at its top: pessimistic, but it should not be seen beside δ.
    log_wrap = min(log_size - min(log_scale - order * top, 0.0), 0.0) - 11.0
    falls = np.concatenate((np.array([0.25, 0.5, 1.0]) * order, _SCALES / deviation))
    bottom = max((log_wrap + log_scale - cumulants(order - fall)[0]) / fall for fall in falls if fall > 0) - 2 * h
    if order > 0:
        bottom = min(bottom, epsilon)
    if delta is not None and bottom > 0:  # the ε wanted is somewhat below the Chernoff bound's; profiles go on to 0
        bottom = max(0.0, bottom - 2 * (top - bottom))
    length = (top - bottom) / h + 2
    most = max(_SMALLEST_WINDOW, min(_LARGEST_WINDOW, budget.fitting(_BYTES_PER_POINT)))
    if length > most:
        if most < _LARGEST_WINDOW:
            budget.make_do()
        h *= length / most
        length = most
    length = fft.next_fast_len(max(int(length), 16), real=True)
    lower = math.floor(bottom / h)

    tail = min(math.exp(log_size - 11.0), 1e-6) / steps
    lattice = Lattice(h, growth, max(0.2 / max(order, 1e-300), h), tail, -float(ndtri(tail)), 8.0)
    spectrum, rows, sums = _spectrum(mixtures, sigma, add, lattice, np.array([order, *orders]), length)
    counts = mixtures.counts.astype(np.float64)
    if spectrum is None:
        probs, rounding = rows[0], 0.0
    else:
        probs = fft.irfft(spectrum, length)
        level = 7 * UNIT * math.log2(length)
        rounding = 1.1 * (
            level * float(counts @ sums.norms)
            + 4 * UNIT * steps * float(sums.norms.min())
            + level * float(np.linalg.norm(probs))
        )
        probs = np.maximum(probs, 0.0)
    probs = np.roll(probs, -(lower % length))
    beyond = min(float((counts @ sums.logs[:, 1:] - orders * h * (lower + length)).min()), 0.0)
    infinity = float(counts @ sums.infinities) + math.exp(beyond)
    return LossDistribution(
        interval=h,
        lower=lower,
        probs=probs,
        tilt=order,
        log_scale=float(counts @ sums.logs[:, 0]),
        infinity_mass=min(infinity * (1 + 1e-9), 1.0),
        rounding=rounding,
        relative=2 * UNIT * (64 + steps * (128 + order * h * (abs(lower) + length))),
    )


def _spectrum(
    mixtures: Mixtures, sigma: float, add: bool, lattice: Lattice, orders: Array, length: int
) -> tuple[np.ndarray | None, Array, RowSums]:
    """The product of the transforms of all pmfs, tilted by orders[0]; no transform where there is one step only."""
    from dpmf.kernels.pld import RowSums, fill_rows

    sizes = len(mixtures)
    sums = RowSums(np.empty((sizes, len(orders))), np.empty(sizes), np.empty(sizes))
    chunk = max(1, min(sizes, int(min(_ROWS_BYTES, budget.fitting(4)) / (8 * length))))
    rows = np.empty((chunk, length))
    spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
    announce_compilation(fill_rows)
    for start in range(0, sizes, chunk):
        budget.check()
        part = rows[: min(chunk, sizes - start)]
        fill_rows(part, start, mixtures.starts, mixtures.means, mixtures.weights, sigma, add, lattice, orders, sums)
        if mixtures.total == 1:
            return None, rows, sums
        transforms = fft.rfft(part, axis=1, workers=2)
        for transform, count in zip(transforms, mixtures.counts[start : start + len(part)], strict=True):
            spectrum *= transform if count == 1 else _power(transform, int(count))
    return spectrum, rows, sums


def _power(values: np.ndarray, count: int) -> np.ndarray:
    """values**count by squaring: as accurate as `count` products, and never through a logarithm."""
    result: np.ndarray | None = None
    while count:
        if count & 1:
            result = values if result is None else result * values
        count >>= 1
        if count:
            values = values * values
    assert result is not None
    return result
