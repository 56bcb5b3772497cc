"""Privacy-loss distributions of Gaussian mixtures, and their composition.

`compose` puts thousands of different steps (`mixtures`) together and gives an upper bound on the δ(ε) of the
composition, at every ε. "remove" is the loss of (P, Q), "add" that of (Q, P).

1. Each step is discretised by connecting the dots (Doroshenko et al. 2022): mass between two points of a lattice of
   losses moves onto these points, keeping its P- and its Q-measure.
2. All pmfs are tilted by e^(θ·loss), so that the losses around the ε of interest carry the mass and rounding errors are
   relative to δ, whatever its size; then they are transformed, multiplied, and transformed back.
3. What could be lost is added: per-step tails, what lies above the window of the transforms (Chernoff), and rounding
   errors (docs/theory/floating-point.md, "Loss distributions and conditional composition").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import fft
from scipy.special import ndtri

from dpmf import budget
from dpmf.kernels import announce_compilation
from dpmf.loss._window import TUNING, Tuning, Window, choose_window
from dpmf.loss.gaussian import least_epsilon
from dpmf.loss.mixtures import Mixtures
from dpmf.numerics import UNIT, Array, fft_error

if TYPE_CHECKING:  # numba takes half a second to import, so it is imported when it is needed
    from dpmf.kernels.pld import Lattice, RowSums

_ROWS_BYTES = 32 * 2**20
_LARGEST_SCALE = 300.0  # a tilt by more than e^300 is not undone


@dataclass(frozen=True)
class LossDistribution:
    """An upper bound on the privacy profile of a composition.

    Attributes:
      interval: spacing h of the lattice of losses.
      lower: lattice index of the first entry of `probs`.
      probs: masses p_l e^(θhl − K): tilted by θ = `tilt`, scaled by e^(−K), K = `log_scale`.
      infinity_mass: mass of infinite loss, with everything that was cut off.
      rounding: bound on the 2-norm of the error of `probs` by the transforms.
      scale_error: bound on the absolute error of `log_scale`.
      loss_error: bound on the sum of the errors of the lattice points of all steps.
      outside: bound on the tilted, scaled mass that wrapped around from outside of the window.

    **Formal guarantees.** `delta(ε)` is at least the hockey-stick divergence of the composition at every real ε, under
    the assumptions of docs/theory/floating-point.md, section 1. `lower_delta` is at most that of the masses as given,
    where `outside` is known and `infinity_mass` is not more than there is.
    """

    interval: float
    lower: int
    probs: Array
    tilt: float
    log_scale: float
    infinity_mass: float
    rounding: float
    scale_error: float
    loss_error: float
    outside: float = math.inf

    def delta(self, epsilon: float) -> float:
        """The upper bound on δ(ε), at most 1."""
        bottom = self.interval * self.lower
        reach = self.interval * max(abs(self.lower), abs(self.lower + len(self.probs) - 1))
        if self.tilt > 0 and epsilon < bottom:
            # Mass below the window has lost its weight; but δ is convex in e^ε, and 1 at e^ε = 0.
            share = math.exp(epsilon - bottom - 8 * UNIT * (1 + abs(epsilon) + abs(bottom)))
            return min(1.0, 1.0 - share * (1.0 - self.delta(bottom)) + 4 * UNIT)
        # An ε that is lower by the errors of the lattice points, and of the differences below, has a larger δ.
        epsilon -= self.loss_error + 4 * UNIT * (abs(epsilon) + reach)
        # Every ε beyond the lattice has the same δ; the quotient of a huge one would leave the range of an integer.
        first = max(math.floor(min(epsilon / self.interval, 2.0**62)) + 1 - self.lower, 0)
        if first >= len(self.probs):
            return min(self.infinity_mass, 1.0)
        losses = self.interval * (self.lower + np.arange(first, len(self.probs)))
        if self.log_scale - self.tilt * losses[0] > _LARGEST_SCALE:
            return 1.0  # so far below where it was meant to be sharp that the tilt cannot be undone
        gain = np.exp(self.log_scale - self.tilt * losses) * -np.expm1(np.minimum(epsilon - losses, 0.0))
        value = float(np.sum(gain * self.probs[first:]))  # summed pairwise: fewer than 64 roundings of each term
        error = self.rounding * float(np.linalg.norm(gain))
        relative = self.scale_error + UNIT * (128 + abs(self.log_scale) + 8 * self.tilt * reach)
        return min(1.0, (value + error) * (1 + 2 * relative) + self.infinity_mass)

    def lower_delta(self, epsilon: float) -> float:
        """A lower bound on δ(ε): what the transforms may have added, and what wrapped around, is subtracted."""
        reach = self.interval * max(abs(self.lower), abs(self.lower + len(self.probs) - 1))
        epsilon += self.loss_error + 4 * UNIT * (abs(epsilon) + reach)
        first = max(math.floor(min(epsilon / self.interval, 2.0**62)) + 1 - self.lower, 0)
        if first >= len(self.probs):
            return max(self.infinity_mass, 0.0)
        losses = self.interval * (self.lower + np.arange(first, len(self.probs)))
        if self.log_scale - self.tilt * losses[0] > _LARGEST_SCALE:
            return max(self.infinity_mass, 0.0)
        gain = np.exp(self.log_scale - self.tilt * losses) * -np.expm1(np.minimum(epsilon - losses, 0.0))
        value = float(np.sum(gain * self.probs[first:]))
        error = self.rounding * float(np.linalg.norm(gain)) + self.outside * float(gain.max())
        relative = self.scale_error + UNIT * (128 + abs(self.log_scale) + 8 * self.tilt * reach)
        return max((value - error * (1 + 2 * relative)) * (1 - 2 * relative), 0.0) + max(self.infinity_mass, 0.0)

    def epsilon(self, delta: float) -> float:
        """The least ε ≥ 0 found with `delta(ε)` ≤ delta, itself evaluated; infinity where there is none."""
        return math.inf if self.infinity_mass > delta else least_epsilon(self.delta, delta)


def compose(
    mixtures: Mixtures,
    sigma: float,
    direction: str,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    floor: float = 1e-16,
    tuning: Tuning = TUNING,
) -> LossDistribution:
    """The composition of all steps, as sharp as can be near one ε, or near the ε at which δ(ε) = `delta`.

    Args:
      mixtures: the steps.
      sigma: standard deviation of every component.
      direction: "remove" for (P, Q), "add" for (Q, P).
      epsilon: where to be sharp, unless `delta` is given.
      delta: where to be sharp, as a value of δ.
      floor: contributions to δ far below this need no accuracy.
      tuning: how finely.

    Returns:
      A distribution of losses whose `delta` is an upper bound at every ε.

    **Formal guarantees.** The result is an upper bound whatever the options: connecting the dots dominates each step,
    masses are rounded up, wrapped-around left tails only add mass, and right tails (of the composition by Chernoff's
    inequality on the very pmfs that are composed, and per step) and FFT rounding are added. Of the product of measures
    of masses T_i, of which I_i is infinite, at most Σ I_i·Π max(T_j, 1) is.
    """
    from dpmf.kernels.pld import Lattice

    mixtures = mixtures.simplified()
    if not mixtures.total:
        return LossDistribution(tuning.interval or 1.0, 0, np.ones(1), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    add = direction == "add"
    window = choose_window(mixtures, sigma, add, epsilon, delta, floor, tuning)
    h, top = window.interval, window.interval * (window.lower + window.length)
    lattice = Lattice(h, tuning.growth, window.widest, window.tail, -float(ndtri(window.tail)), tuning.low_reach)
    spectrum, rows, sums = _spectrum(mixtures, sigma, add, lattice, window)
    counts = mixtures.counts.astype(np.float64)
    if spectrum is None:
        probs, rounding = rows[0].copy(), 0.0
    else:
        probs = fft.irfft(spectrum, window.length)
        rounding = transform_error(counts, sums.totals, sums.norms, window.length, float(np.linalg.norm(probs)))
        probs = np.maximum(probs, 0.0)
    log_scale, scale_error = _exact_sum(counts * sums.logs[:, 0])
    beyond = 0.0
    for order, logs in zip(window.orders.tolist(), sums.logs[:, 1:-1].T, strict=True):
        exponent, error = _exact_sum(counts * logs)
        beyond = min(beyond, exponent - order * top + error + 4 * UNIT * (abs(exponent) + order * abs(top)))
    # Masses are rounded up, so that those of a step may exceed one; the steps beside an infinite one count with them.
    whole = np.maximum((np.exp(sums.logs[:, -1]) + sums.infinities) * (1 + 8 * UNIT), 1.0)
    growth = math.exp(float(counts @ np.log(whole)) * (1 + 1e-9))
    infinity = math.fsum((counts * sums.infinities).tolist()) * growth + math.exp(beyond)
    return LossDistribution(
        interval=h,
        lower=window.lower,
        probs=np.roll(probs, -(window.lower % window.length)),
        tilt=window.tilt,
        log_scale=log_scale,
        infinity_mass=min(infinity * (1 + 16 * UNIT), 1.0),
        rounding=rounding,
        scale_error=scale_error,
        loss_error=2 * UNIT * h * float(counts @ sums.reaches),
    )


def _exact_sum(terms: Array) -> tuple[float, float]:
    """The sum of products that have one rounding each, and a bound on its error: `fsum` adds but one more."""
    return math.fsum(terms.tolist()), 2 * UNIT * float(np.abs(terms).sum())


def transform_error(counts: Array, totals: Array, norms: Array, length: int, result: float) -> float:
    """A bound on the 2-norm of the error of a composition by transforms (the theory page has the proof).

    Args:
      counts: how often each row is composed.
      totals: the sum of each row, whose entries are non-negative.
      norms: its 2-norm.
      length: that of the transforms.
      result: the 2-norm of the result.
    """
    transform = fft_error(length)
    largest = totals * (1 + 1e-9) + transform * math.sqrt(length) * norms  # of each spectrum's entries
    growth = math.exp(min(float(counts @ np.log(np.maximum(largest, 1.0))), 700.0))
    products = 3 * UNIT * float(counts.sum()) * float(norms.min())
    return 1.001 * (growth * (transform * float(counts @ norms) + products) + transform * result)


def _spectrum(
    mixtures: Mixtures, sigma: float, add: bool, lattice: Lattice, window: Window
) -> tuple[np.ndarray | None, Array, RowSums]:
    """The product of the transforms of all tilted pmfs; no transform where there is one step only."""
    from dpmf.kernels.pld import RowSums, fill_rows

    sizes, length = len(mixtures), window.length
    orders = np.array([window.tilt, *window.orders, 0.0])  # the last says what the masses of a step add up to
    sums = RowSums(np.empty((sizes, len(orders))), *(np.empty(sizes) for _ in range(4)))
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
            spectrum *= transform if count == 1 else power(transform, int(count))
    return spectrum, rows, sums


def power(values: np.ndarray, count: int) -> np.ndarray:
    """values**count by squaring, which is as accurate as `count` products."""
    result: np.ndarray | None = None
    while count:
        if count & 1:
            result = values if result is None else result * values
        count >>= 1
        if count:
            values = values * values
    assert result is not None
    return result
