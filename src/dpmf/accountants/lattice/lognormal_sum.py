"""Options on a sum of independent log-normal variables, bounded from above or from below.

T = Σ a_i, a_i = e^(r_i z_i − s_i/2), s_i = r_i², with independent standard normal z_i, so that E T is their number b. A
privacy profile consists of the calls E(T − K)_+ and the puts E(K − T)_+. The a_i are put on a lattice {0, h, 2h, ...},
tilted exponentially so that T is near the strike (small values then keep their relative accuracy), and convolved with
one FFT per distinct variance. See docs/theory/lattice.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.fft import irfft, rfft

from dpmf.accountants.lattice._grid import Grid, choose, window_below
from dpmf.accountants.lattice._weights import call_from_above, cell_weights, hat_weights, position_error
from dpmf.accountants.protocol import Direction
from dpmf.loss.gaussian import Side
from dpmf.numerics import FLOOR, UNIT, Array

Kind = Literal["call", "put"]

_TINY = 1e-300  # weights that underflow are raised to this (docs/theory/floating-point.md, "The lattice")
_FFT_ERROR = 8 * UNIT  # times log₂ n: relative ℓ² error of one transform (floating-point.md, "Assumptions")
_LARGEST_EPSILON = 500.0  # e^ε and its products with b stay far inside the range of double


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide tightness and time, and where the lattice is not worth its time. All values are sound.

    Attributes:
      few_groups: up to this many different variances, each is kept.
      groups_above: otherwise they are rounded up to this many values.
      groups_below: or, for lower bounds, rounded down to this many.
      close: variances whose relative difference is below this share a group (10⁻⁴ of σ).
      least_variance: smaller variances are moved to the sound side.
      least_ratio: so are those below this share of the largest; they would need countless panels within one step.
      largest_variance_above: no upper bound is tried beyond this variance.
      largest_variance_below: larger variances are moved down to this for lower bounds.
      behind: the part of a lower bound's window on the worthless side of the strike.
    """

    few_groups: int = 8
    groups_above: int = 64
    groups_below: int = 32
    close: float = 2e-4
    least_variance: float = 1e-14
    least_ratio: float = 1e-3
    largest_variance_above: float = 1e6
    largest_variance_below: float = 1e3
    behind: float = 0.45


_TUNING = _Tuning()


@dataclass(frozen=True)
class OptionValue:
    """A bound on the value of an option, and the lattice it was computed on."""

    value: float
    step: float = 0.0
    points: int = 0
    tilt: float = 0.0


def grouped(diagonal: Array, side: Side) -> tuple[Array, np.ndarray]:
    """The distinct entries and how often each occurs; where there are many, they are rounded towards `side`."""
    entries, counts = np.unique(diagonal, return_counts=True)
    if len(entries) <= _TUNING.few_groups:
        return entries, counts
    most = _TUNING.groups_above if side == "upper" else _TUNING.groups_below
    low, high = float(entries[0]), float(entries[-1])
    width = max((high - low) / most, _TUNING.close * high)
    place = np.minimum((entries - low) / width, most - 1).astype(np.int64)
    begin = np.flatnonzero(np.diff(place, prepend=-1))
    extreme = np.maximum if side == "upper" else np.minimum
    return extreme.reduceat(entries, begin), np.add.reduceat(counts, begin)


@dataclass(frozen=True, eq=False)
class LognormalSum:
    """T: `fixed` ones and, for every g, `counts[g]` independent log-normals of mean 1 and log-variance `variances[g]`.

    Attributes:
      side: whether options are bounded from above ("upper") or from below ("lower").
      loss: the relative change of the r_i (that is, of the noise multiplier) that the lattice may cost.
      max_points: the largest number of nodes, and half the largest length of an FFT; beyond, the step grows.
    """

    variances: Array
    counts: np.ndarray
    fixed: int
    side: Side
    loss: float
    max_points: int

    @classmethod
    def make(
        cls, variances: Array, counts: np.ndarray, *, side: Side, loss: float, max_points: int
    ) -> LognormalSum | None:
        """The sum, with variances that the lattice cannot handle moved to the sound side; None where they cannot be.

        **Formal guarantees.** Options increase with every variance (Gram domination), and a term of variance 0 is 1.
        """
        least = max(_TUNING.least_variance, _TUNING.least_ratio * float(variances.max()))
        if side == "lower":
            kept = variances >= least
            moved = np.minimum(variances[kept], _TUNING.largest_variance_below)
            return cls(moved, counts[kept], int(counts[~kept].sum()), side, loss, max_points)
        if variances.max() > _TUNING.largest_variance_above:
            return None
        return cls(np.maximum(variances, least), counts, 0, side, loss, max_points)

    @property
    def total(self) -> int:
        """The number of random terms."""
        return int(self.counts.sum())

    def delta(self, epsilon: float, direction: Direction) -> OptionValue | None:
        """δ(ε) of the average of all terms, bounded from `side`; None where the lattice cannot say anything.

        **Formal guarantees.** Remove: E(T/b − e^ε)_+ is the call at b·e^ε, divided by b. Add: E(1 − e^ε·T/b)_+ is the
        put at b·e^(−ε), times e^ε/b. The strike is moved by its rounding error towards the larger value for an upper
        bound, towards the smaller one for a lower bound.
        """
        if epsilon > _LARGEST_EPSILON:
            return None
        b, gamma = self.total + self.fixed, math.exp(epsilon)
        margin = 8 * UNIT * (1 + epsilon) * (1 if self.side == "upper" else -1)
        if direction == "remove":
            option, scale = self.option("call", gamma * b * (1 - margin)), (1 + margin) / b
        else:
            option, scale = self.option("put", b / gamma * (1 + margin)), gamma / b * (1 + margin)
        return OptionValue(min(1.0, option.value * scale), option.step, option.points, option.tilt)

    def option(self, kind: Kind, strike: float) -> OptionValue:
        """A bound on E(T − K)_+ or E(K − T)_+.

        In the money it is the intrinsic value plus the opposite option (put–call parity, a sum of positive numbers).

        **Formal guarantees.** From above: mean-preserving spreads onto the lattice raise both payoffs, what lies beyond
        its ends is added, each residue of the FFT's window is charged the largest payoff that folds there, and
        rounding errors are added. From below: E[±(T − K); E] for an event E in terms of cells is at most the option;
        what folds into the window and all errors are subtracted. Proofs: docs/theory/lattice.md.
        """
        strike -= self.fixed
        intrinsic = 0.0
        if kind == "call" and strike < self.total:
            intrinsic, kind = self.total - strike, "put"
        elif kind == "put" and strike > self.total:
            intrinsic, kind = strike - self.total, "call"
        if strike <= 0 or self.total == 0:
            return OptionValue(intrinsic)
        grid = choose(
            self.variances, self.counts, strike, sign=1 if kind == "call" else -1,
            side=self.side, loss=self.loss, max_points=self.max_points,
        )  # fmt: skip
        if grid is None:  # the value is below 10⁻³⁰⁰, or nearly so
            return OptionValue(math.inf if self.side == "upper" else intrinsic)
        value = self._from_above(grid) if self.side == "upper" else self._from_below(grid)
        return OptionValue(intrinsic + value, grid.step, max(grid.length, grid.nodes), grid.tilt)

    def _from_above(self, grid: Grid) -> float:
        sign, tilt = grid.sign, grid.tilt
        slip = position_error(float(self.variances.max()), grid.step, grid.last)
        step = grid.step * (1 - sign * slip)
        strike = grid.strike_index * step
        distance = grid.strike_index - self.total * grid.first  # in steps, from the least T to the strike
        product, error = np.ones(1, dtype=np.complex128), _FourierError(grid.length)
        log_scale, remainder = -sign * tilt * step * distance, 0.0
        exponents = 2 * abs(log_scale)
        for s, count in zip(self.variances.tolist(), self.counts.tolist(), strict=True):
            weight, below = hat_weights(s, step, grid.first, grid.last)
            remainder += count * (call_from_above(s, grid.last * step) if sign > 0 else below * strike)
            pmf, log_norm, relative = _tilted(weight, grid, step)
            pmf = _folded(pmf * (1 + relative), grid.length)
            product = product * _power(rfft(pmf), count)
            log_scale += count * log_norm
            exponents += count * abs(log_norm)
            error.include(pmf, count)
        mass = irfft(product, grid.length)[(distance % grid.length + sign * np.arange(grid.length)) % grid.length]
        # In units of the strike: at a large ε, the squares of payoffs would leave the range of double.
        payoff = _largest_payoff(1 / grid.strike_index, tilt * strike, grid.length)
        value = float((np.maximum(mass, 0) * payoff).sum()) * (1 + 1e-12 + grid.length * UNIT)
        value += (error.of_factors() + error.of_result(_norm(mass))) * _norm(payoff)
        log_scale += 4 * UNIT * (exponents + self.total + 64)
        if log_scale > 50:  # never at a sensible tilt
            return math.inf
        return float((value * strike * math.exp(log_scale) + remainder) * (1 + 4 * slip) + FLOOR)

    def _from_below(self, grid: Grid) -> float:
        sign, tilt, step = grid.sign, grid.tilt, grid.step
        counts = self.counts.tolist()
        cells = [_TiltedCells.of(s, grid) for s in self.variances.tolist()]
        # The sum of the cell numbers, in steps above its least value, when T is at the strike.
        excess = sum(count * cell.excess for count, cell in zip(counts, cells, strict=True))
        centre = grid.strike_index - self.total * grid.first + round(excess / step)
        # Values of T are in units of the strike: at a large ε, their squares would leave the range of double.
        strike = grid.strike_index * step
        mean = sum(count * (cell.mean / strike) for count, cell in zip(counts, cells, strict=True))
        behind = int(min(_TUNING.behind, 0.9) * grid.length)
        outside = _Outside(grid, self.total, centre, behind)
        product, derivative = np.ones(1, dtype=np.complex128), np.zeros(1, dtype=np.complex128)
        log_scale, relative = -sign * tilt * step * centre, (16 + grid.length) * UNIT
        exponents, error = 2 * abs(log_scale), _FourierError(grid.length)
        for count, cell in zip(counts, cells, strict=True):
            outside.include(cell.pmf, cell.biased, count)
            pmf, biased = _folded(cell.pmf, grid.length), _folded(cell.biased, grid.length)
            transform = rfft(pmf)
            others = _power(transform, count - 1)
            # T = Σ a_i: a sum over i of products with one factor E[a; ·] instead of P(·).
            first_moment = count * (cell.mean / strike) * rfft(biased) * others
            derivative = derivative * others * transform + product * first_moment
            product = product * others * transform
            log_scale += count * cell.log_norm
            exponents += (count + 1) * abs(cell.log_norm) + abs(math.log(cell.mean))
            relative += (count + 1) * cell.error
            error.include(pmf, count)
            error.include(biased, 1)
        # x steps past the centre: E[T; there] and K·P(there). Thresholds down to 1/θ before it are tried, so that the
        # factors that undo the tilt stay below e.
        x = np.arange(math.ceil(max(-behind, -1 / (tilt * step))), grid.length - behind)
        above, below = irfft(derivative, grid.length), irfft(product, grid.length)
        rounding = error.of_factors() * (mean + 1) + error.of_result(_norm(above) + _norm(below))
        place = (centre % grid.length + sign * x) % grid.length
        above, below, decay = above[place], below[place], np.exp(-tilt * step * x)
        gross = float(((np.abs(above) + np.abs(below)) * decay).sum())
        net = float(np.cumsum((sign * (above - below) * decay)[::-1]).max())
        net -= math.expm1(min(1.0, relative + 4 * UNIT * (exponents + self.total + 64))) * gross
        net -= rounding * _norm(decay) + math.e * outside.mass() * (mean + 1)
        if net <= 0 or log_scale > 50:
            return 0.0
        return max(0.0, float(net * strike * math.exp(log_scale)) - FLOOR)


class _FourierError:
    """A running bound on the ℓ² error of a convolution by FFT (docs/theory/floating-point.md, "The lattice")."""

    def __init__(self, length: int) -> None:
        self._length, self._transform = length, _FFT_ERROR * math.log2(length)
        self._norms = self._log_growth = 0.0
        self._terms = self._groups = 0

    def include(self, law: Array, count: int) -> None:
        """A factor of the product: the transform of a law, `count` times."""
        excess = max(0.0, float(law.sum()) * (1 + self._length * UNIT) - 1)
        self._norms += count * _norm(law)
        self._log_growth += count * math.log1p(excess + self._transform * math.sqrt(self._length))
        self._terms, self._groups = self._terms + count, self._groups + 1

    def of_factors(self) -> float:
        """What the errors of the transforms of the factors amount to in the product."""
        return 1.001 * self._transform * self._norms * math.exp(min(600.0, self._log_growth))

    def of_result(self, norm: float) -> float:
        """What the products and the inverse transform add, from the ℓ² norm of their result."""
        products = 4 * self._terms * UNIT + 4 * (self._groups + 1) * self._transform
        return 1.001 * math.sqrt(self._groups) * products * norm


@dataclass(frozen=True, eq=False)
class _TiltedCells:
    """P(cell) and E[a; cell], tilted and normalised; under the tilt, the mean of a and of a's cell in excess of a."""

    pmf: Array
    biased: Array
    log_norm: float
    mean: float
    excess: float
    error: float

    @classmethod
    def of(cls, s: float, grid: Grid) -> _TiltedCells:
        weight, moment, error = cell_weights(s, grid.step, grid.first, grid.last)
        if grid.sign < 0:
            weight[-1] = moment[-1] = 0.0  # the event may leave the unbounded cell out
        pmf, log_norm, pmf_error = _tilted(weight, grid, grid.step)
        biased, log_biased, biased_error = _tilted(moment, grid, grid.step)
        error += max(float(pmf_error.max()), float(biased_error.max()))
        mean = math.exp(log_biased - log_norm)
        nodes = grid.step * np.arange(grid.first, grid.last)
        excess = float((nodes * pmf[:-1] - mean * biased[:-1]).sum())
        return cls(pmf, biased, log_norm, mean, excess, error)


class _Outside:
    """Chernoff bounds on what the tilted sum has outside of the window, with one of its terms size-biased or none."""

    def __init__(self, grid: Grid, total: int, centre: int, behind: int) -> None:
        ahead = grid.length - behind - 1
        left, right = (behind, ahead) if grid.sign > 0 else (ahead, behind)
        self._nodes = np.arange(grid.nodes)
        slopes = np.array([1.0, 2.0, 4.0, 8.0, 16.0]) * window_below(grid.length)
        self._sides = []
        if centre > left:
            self._sides.append((-slopes, centre - left))
        if total * int(self._nodes[-1]) > centre + right:
            self._sides.append((slopes, centre + right))
        self._log_moments = [np.zeros(5) for _ in self._sides]
        self._log_bias = [np.zeros(5) for _ in self._sides]

    def include(self, pmf: Array, biased: Array, count: int) -> None:
        for (slopes, _), log_moment, log_bias in zip(self._sides, self._log_moments, self._log_bias, strict=True):
            exponents = slopes[:, None] * self._nodes
            plain = _log_sum_exp(np.log(pmf) + exponents)
            log_moment += count * plain
            np.maximum(log_bias, _log_sum_exp(np.log(biased) + exponents) - plain, out=log_bias)

    def mass(self) -> float:
        parts = zip(self._sides, self._log_moments, self._log_bias, strict=True)
        return 1.01 * sum(
            math.exp(min(1.0, float((moment + bias - slopes * end).min()))) for (slopes, end), moment, bias in parts
        )


def _log_sum_exp(x: Array) -> Array:
    """log Σ e^x along the last axis, for finite x: scipy's function takes several times as long for cases beyond."""
    top = x.max(axis=-1, keepdims=True)
    return np.asarray(np.log(np.exp(x - top).sum(axis=-1)) + top[..., 0])


def _tilted(weight: Array, grid: Grid, step: float) -> tuple[Array, float, Array]:
    """The law ∝ weight·e^(±θ(a − lowest)), its log-norm and relative error; underflow is raised to 10⁻³⁰⁰."""
    log_weight = np.log(np.maximum(weight, _TINY))
    exponent = grid.tilt * step * np.arange(grid.nodes)
    tilted = log_weight + grid.sign * exponent
    log_norm = float(_log_sum_exp(tilted))
    error = 8 * UNIT * (4 + np.abs(log_weight) + exponent + abs(log_norm))
    return np.maximum(np.exp(tilted - log_norm), _TINY), log_norm, error


def _folded(law: Array, length: int) -> Array:
    """The law modulo the length of the FFT."""
    padded = np.pad(law, (0, -len(law) % length))
    return np.asarray(padded.reshape(-1, length).sum(axis=0))


def _norm(x: np.ndarray) -> float:
    """The ℓ² norm, without the threads that a BLAS would start for it."""
    return math.sqrt(float((x * x).sum()))


def _largest_payoff(step: float, tilt: float, length: int) -> Array:
    """The maximum over m ≥ 0 of f(x + m·length), f(x) = hx·e^(−θhx), for 0 ≤ x < length."""
    if tilt * step * length < 1:
        return np.full(length, 1 / (math.e * tilt))
    # f falls beyond 1/θ: only an x before that can be exceeded, and then by the next one.
    x = step * np.arange(2 * length)
    values = (x * np.exp(-tilt * x)).reshape(2, length)
    return np.asarray(values.max(axis=0))


def _power(base: np.ndarray, exponent: int) -> np.ndarray:
    """base^exponent by squaring; each product has a relative error below 4u, so the power has 4u·exponent."""
    result = np.ones(1, dtype=np.complex128)
    while exponent:
        if exponent & 1:
            result = result * base
        exponent >>= 1
        if exponent:
            base = base * base
    return result
