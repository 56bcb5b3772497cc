"""Options on a sum of independent log-normals, bounded from above or from below.

T = Σ a_i, a_i = e^(r_i z_i − s_i/2), s_i = r_i², z_i independent standard normals; E T is their number b. A privacy
profile is made of the calls E(T − K)_+ and the puts E(K − T)_+. The a_i are put on a lattice {0, h, 2h, ...}, tilted
exponentially so that T sits at the strike (so that small values keep their relative accuracy), and convolved by one FFT
per distinct variance. The choice of h, window and tilt decides how tight a bound is, never whether it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.fft import irfft, rfft
from scipy.special import logsumexp

from dpmf.accountants.lattice._tilt import FARTHEST, TiltedMoments
from dpmf.accountants.lattice._weights import call_from_above, cell_weights, hat_weights, position_error
from dpmf.loss.gaussian import Side
from dpmf.numerics import FLOOR, UNIT, Array

Kind = Literal["call", "put"]

_WINDOW = {"upper": 18.0, "lower": 36.0}  # width of the FFT's window, in standard deviations of the tilted sum
_TINY = 1e-300
_LEAST_RATIO = 1e-3  # of variances on one lattice
_LEAST_VARIANCE, _LARGEST_VARIANCE = 1e-14, {"upper": 1e6, "lower": 1e3}


@dataclass(frozen=True)
class OptionValue:
    """A bound on the value of an option, and how it was computed."""

    value: float
    step: float = 0.0
    points: int = 0
    tilt: float = 0.0


@dataclass(frozen=True, eq=False)
class LognormalSum:
    """T: `fixed` ones and, for every g, `counts[g]` independent log-normals of mean 1 and log-variance `variances[g]`.

    Attributes:
      side: whether options are bounded from above ("upper") or from below ("lower").
      loss: the discretisation aimed at, as a relative change of the r_i (that is, of the noise multiplier).
      max_points: nodes of a lattice, and half the length of an FFT, at most; h grows where they do not suffice.
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
        """Variances outside of what the lattice can do are moved to the sound side; None where they cannot be.

        **Formal guarantees.** Options increase with every variance (Gram domination), and a variance of 0 is a 1.
        """
        # A term that hardly varies beside the others would take countless panels within one step of their lattice.
        least = max(_LEAST_VARIANCE, _LEAST_RATIO * float(variances.max()))
        if side == "lower":
            kept = variances >= least
            moved = np.minimum(variances[kept], _LARGEST_VARIANCE[side])
            return cls(moved, counts[kept], int(counts[~kept].sum()), side, loss, max_points)
        if variances.max() > _LARGEST_VARIANCE[side]:
            return None
        return cls(np.maximum(variances, least), counts, 0, side, loss, max_points)

    @property
    def total(self) -> int:
        """The number of random terms."""
        return int(self.counts.sum())

    def option(self, kind: Kind, strike: float) -> OptionValue:
        """A bound on E(T − K)_+ or E(K − T)_+.

        In the money, it is the intrinsic value plus the opposite option (put–call parity, adding positive numbers).

        **Formal guarantees**, from above:
        * Both payoffs are convex, so mean-preserving ("hat") weights on the two nodes around each a only raise them.
          Every weight is raised by its own rounding error; an error in the position of a is a relative change of T,
          for which the strike is moved.
        * The lattice is finite. Raising a to its lowest node can only help a call; for a put, K times the probability
          that some a lies below is added. Lowering a to its highest node M can only help a put; for a call,
          (Σ a − K)_+ ≤ (Σ min(a, M) − K)_+ + Σ (a − M)_+, an equality for M ≥ K, and the last sum is in closed form.
        * The FFT folds T modulo its length. Each residue is charged the largest payoff of all T that fold there.
        * FFT and powers: the ℓ² norm of their rounding error (8u·log₂ n relative for a transform of length n) times
          the ℓ² norm of the payoffs is added.

        From below: the value is E[±(T − K)·1_E], E the event that the sum of the cell numbers of the a_i lies beyond a
        threshold. No event gives more than the option, so cells and threshold are free. What folds into the window is
        bounded by Chernoff's inequality and subtracted, and so are the errors of the weights and the transforms.
        """
        strike -= self.fixed
        intrinsic = 0.0
        if kind == "call" and strike < self.total:
            intrinsic, kind = self.total - strike, "put"
        elif kind == "put" and strike > self.total:
            intrinsic, kind = strike - self.total, "call"
        if strike <= 0 or self.total == 0:
            return OptionValue(intrinsic)
        lattice = _Lattice.choose(self, kind, strike)
        if lattice is None:  # a value that is not worth a lattice (it is below 10⁻³⁰⁰, or nearly so)
            return OptionValue(math.inf if self.side == "upper" else intrinsic)
        value = lattice.from_above() if self.side == "upper" else lattice.from_below()
        return OptionValue(intrinsic + value, lattice.step, lattice.points, lattice.tilt)


@dataclass(frozen=True, eq=False)
class _Lattice:
    """Lattice, tilt and window for one option: each a is one of h·(first..last), the strike is h·strike_index."""

    law: LognormalSum
    sign: int  # +1 for a call, −1 for a put
    tilt: float
    step: float
    strike_index: int
    first: int
    last: int
    length: int

    @classmethod
    def choose(cls, law: LognormalSum, kind: Kind, strike: float) -> _Lattice | None:
        """A lattice for the option; None where T reaches the strike only through a's that are out of all reach."""
        sign = 1 if kind == "call" else -1
        b, s = law.total, float(law.variances.max())
        root, deviation = math.sqrt(s), math.sqrt(b * math.expm1(min(s, 600.0)))
        # An a so far beyond the strike less b takes T over the strike, unless the others fall far below their mean.
        widest = min(strike, strike - b + 1 + 4.5 * deviation) if sign > 0 else strike
        cap, log_value = widest, math.inf
        for _ in range(5):
            moments = TiltedMoments(law.variances, law.counts, sign, cap)
            tilt, log_bound = moments.saddle(strike)
            if sign > 0:
                above = sum(c * call_from_above(v, cap) for v, c in zip(law.variances, law.counts, strict=True))
                log_bound = float(np.logaddexp(log_bound, math.log(above + _TINY)))
            log_value = min(log_value, log_bound)
            # Tails of z beyond `reach` are negligible beside the value.
            reach = min(FARTHEST, math.sqrt(2 * (math.log(1e5 * b) + max(0.0, math.log(strike) - log_value))))
            previous, cap = cap, min(widest, math.exp(min(s / 2 + root * reach, 600.0)))
            if abs(cap / previous - 1) < 0.05:
                break
        # With an a beyond this, T would be past a call's strike: it has no part in the density there.
        most = cap if sign < 0 else min(cap, strike - b + 1 + deviation)
        _, mean, deviation, spread = moments.at(tilt, most)
        lowest = math.exp(-min(s / 2 + root * reach, 600.0))
        if (sign > 0 and b * cap <= strike < widest * b) or (sign < 0 and b * lowest >= strike):
            return None
        width = _WINDOW[law.side] * deviation + 3 * abs(mean - strike)
        # Under the tilt, a variance h²/6 more is worth h²/(6 E[a²]) of log-variance.
        loss = law.loss if log_value > -100 else max(law.loss, 0.02)  # nobody minds the exact value of such a δ
        step = math.sqrt(12 * loss / b) * spread
        step = max(step, width / (2 * law.max_points), (cap - lowest) / law.max_points, 1e-13 * strike)
        strike_index = max(4, math.ceil(strike / step))
        step = strike / strike_index
        first = int(lowest / step)
        last = max(first + 1, min(strike_index, math.ceil(cap / step)))
        length = 1 << max(6, math.ceil(math.log2(width / step + 1)))
        return cls(law, sign, tilt, step, strike_index, first, last, length)

    @property
    def points(self) -> int:
        return max(self.length, self.last - self.first + 1)

    def from_above(self) -> float:
        law, sign, tilt = self.law, self.sign, self.tilt
        slip = position_error(float(law.variances.max()), self.step, self.last)
        step = self.step * (1 - sign * slip)
        strike = self.strike_index * step
        product = np.ones(1, dtype=np.complex128)
        log_scale, norm, remainder = -sign * tilt * step * self._distance, 0.0, 0.0
        exponents = 2 * abs(log_scale)
        for s, count in zip(law.variances.tolist(), law.counts.tolist(), strict=True):
            weight, below = hat_weights(s, step, self.first, self.last)
            remainder += count * (call_from_above(s, self.last * step) if sign > 0 else below * strike)
            pmf, log_norm, error = self._tilted(weight, step)
            pmf = self._folded(pmf * (1 + error))
            product = product * _power(rfft(pmf), count)
            log_scale += count * log_norm
            exponents += count * abs(log_norm)
            norm += count * _norm(pmf)
        x = np.arange(self.length)
        mass = irfft(product, self.length)[(self._distance % self.length + sign * x) % self.length]
        # In units of the strike: at a large ε, the squares of payoffs would leave the range of double.
        payoff = _largest_payoff(1 / self.strike_index, tilt * strike, self.length)
        value = float((np.maximum(mass, 0) * payoff).sum()) * (1 + 1e-12 + self.length * UNIT)
        value += self._rounding(norm, _norm(mass)) * _norm(payoff)
        log_scale += 4 * UNIT * (exponents + law.total + 64)
        if log_scale > 50:  # never at a sensible tilt
            return math.inf
        return float((value * strike * math.exp(log_scale) + remainder) * (1 + 4 * slip) + FLOOR)

    def from_below(self) -> float:
        law, sign, tilt, step = self.law, self.sign, self.tilt, self.step
        counts = law.counts.tolist()
        cells = [self._tilted_cells(s) for s in law.variances.tolist()]
        # Where the sum of the cell numbers is, steps above its least value, when T is at the strike.
        excess = sum(count * cell.excess for count, cell in zip(counts, cells, strict=True))
        centre = self._distance + round(excess / step)
        # Values of T are in units of the strike: at a large ε, their squares would leave the range of double.
        strike = self.strike_index * step
        mean = sum(count * (cell.mean / strike) for count, cell in zip(counts, cells, strict=True))
        behind = int(0.45 * self.length)  # of the window, on the worthless side of the strike
        outside = _Outside(self, centre, behind)
        product, derivative = np.ones(1, dtype=np.complex128), np.zeros(1, dtype=np.complex128)
        log_scale, norm, relative = -sign * tilt * step * centre, 0.0, (16 + self.length) * UNIT
        exponents = 2 * abs(log_scale)
        for count, cell in zip(counts, cells, strict=True):
            outside.include(cell.pmf, cell.biased, count)
            transform = rfft(self._folded(cell.pmf))
            others = _power(transform, count - 1)
            # T = Σ a_i: a sum over i of products with one factor E[a; ·] instead of P(·).
            first_moment = count * (cell.mean / strike) * rfft(self._folded(cell.biased)) * others
            derivative = derivative * others * transform + product * first_moment
            product = product * others * transform
            log_scale += count * cell.log_norm
            exponents += (count + 1) * abs(cell.log_norm) + abs(math.log(cell.mean))
            relative += (count + 1) * cell.error
            norm += count * _norm(cell.pmf) + _norm(cell.biased)
        # x steps past the centre: E[T; there] and K·P(there). Thresholds down to 1/θ before it are tried, so that the
        # factors that undo the tilt stay below e.
        x = np.arange(math.ceil(max(-behind, -1 / (tilt * step))), self.length - behind)
        above, below = irfft(derivative, self.length), irfft(product, self.length)
        rounding = self._rounding(norm, 0.0) * (mean + 1) + self._rounding(0.0, _norm(above) + _norm(below))
        place = (centre % self.length + sign * x) % self.length
        above, below, decay = above[place], below[place], np.exp(-tilt * step * x)
        gross = float(((np.abs(above) + np.abs(below)) * decay).sum())
        net = float(np.cumsum((sign * (above - below) * decay)[::-1]).max())
        net -= math.expm1(min(1.0, relative + 4 * UNIT * (exponents + law.total + 64))) * gross
        net -= rounding * _norm(decay) + math.e * outside.mass() * (mean + 1)
        if net <= 0 or log_scale > 50:
            return 0.0
        return max(0.0, float(net * strike * math.exp(log_scale)) - FLOOR)

    @property
    def _distance(self) -> int:
        """Steps from the least T there is to the strike."""
        return self.strike_index - self.law.total * self.first

    def _tilted_cells(self, s: float) -> _TiltedCells:
        weight, moment, error = cell_weights(s, self.step, self.first, self.last)
        if self.sign < 0:
            weight[-1] = moment[-1] = 0.0  # the event may as well leave the unbounded cell out
        pmf, log_norm, pmf_error = self._tilted(weight, self.step)
        biased, log_biased, biased_error = self._tilted(moment, self.step)
        error += max(float(pmf_error.max()), float(biased_error.max()))
        mean = math.exp(log_biased - log_norm)
        excess = float((self.step * np.arange(self.first, self.last) * pmf[:-1] - mean * biased[:-1]).sum())
        return _TiltedCells(pmf, biased, log_norm, mean, excess, error)

    def _tilted(self, weight: Array, step: float) -> tuple[Array, float, Array]:
        """The law ∝ weight·e^(±θ(a − lowest)), its log-norm and relative error; underflow is raised to 10⁻³⁰⁰."""
        log_weight = np.log(np.maximum(weight, _TINY))
        exponent = self.tilt * step * np.arange(self.last - self.first + 1)
        tilted = log_weight + self.sign * exponent
        log_norm = float(logsumexp(tilted))
        error = 8 * UNIT * (4 + np.abs(log_weight) + exponent + abs(log_norm))
        return np.maximum(np.exp(tilted - log_norm), _TINY), log_norm, error

    def _folded(self, law: Array) -> Array:
        """The law modulo the length of the FFT."""
        padded = np.pad(law, (0, -len(law) % self.length))
        return np.asarray(padded.reshape(-1, self.length).sum(axis=0))

    def _rounding(self, norm: float, result_norm: float) -> float:
        """The ℓ² error of a product of transforms from the ℓ² norms of its factors, summed, and of the result."""
        transform, b = 8 * UNIT * math.log2(self.length), self.law.total
        amplified = math.exp(min(600.0, b * (transform * math.sqrt(self.length) + 1e-11)))
        return transform * norm * amplified + 4 * (b * UNIT + (len(self.law.counts) + 1) * transform) * result_norm


@dataclass(frozen=True, eq=False)
class _TiltedCells:
    """P(cell) and E[a; cell], tilted and normalised; under the tilt, the mean of a and of a's cell in excess of a."""

    pmf: Array
    biased: Array
    log_norm: float
    mean: float
    excess: float
    error: float


class _Outside:
    """Chernoff bounds on what the tilted sum has outside of the window, with one of its terms size-biased or none."""

    def __init__(self, lattice: _Lattice, centre: int, behind: int) -> None:
        ahead = lattice.length - behind - 1
        left, right = (behind, ahead) if lattice.sign > 0 else (ahead, behind)
        self._nodes = np.arange(lattice.last - lattice.first + 1)
        slopes = np.array([1.0, 2.0, 4.0, 8.0, 16.0]) * _WINDOW["lower"] / lattice.length
        self._sides = []
        if centre > left:
            self._sides.append((-slopes, centre - left))
        if lattice.law.total * int(self._nodes[-1]) > centre + right:
            self._sides.append((slopes, centre + right))
        self._log_moments = [np.zeros(5) for _ in self._sides]
        self._log_bias = [np.zeros(5) for _ in self._sides]

    def include(self, pmf: Array, biased: Array, count: int) -> None:
        for (slopes, _), log_moment, log_bias in zip(self._sides, self._log_moments, self._log_bias, strict=True):
            exponents = slopes[:, None] * self._nodes
            plain = np.asarray(logsumexp(np.log(pmf) + exponents, axis=1))
            log_moment += count * plain
            np.maximum(log_bias, np.asarray(logsumexp(np.log(biased) + exponents, axis=1)) - plain, out=log_bias)

    def mass(self) -> float:
        parts = zip(self._sides, self._log_moments, self._log_bias, strict=True)
        return 1.01 * sum(
            math.exp(min(1.0, float((moment + bias - slopes * end).min()))) for (slopes, end), moment, bias in parts
        )


def _norm(x: np.ndarray) -> float:
    """The ℓ² norm, without the threads a BLAS would start for it."""
    return math.sqrt(float((x * x).sum()))


def _largest_payoff(step: float, tilt: float, length: int) -> Array:
    """max over m ≥ 0 of f(x + m·length), f(x) = hx·e^(−θhx), for 0 ≤ x < length."""
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
