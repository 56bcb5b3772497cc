"""Discrete losses on a lattice, composed many times: bounds on δ(ε) from above or from below, at every ε.

The masses are tilted by e^(θ·loss) before they are transformed, so that the losses around ε carry the mass and rounding
errors are relative to δ(ε). θ is the member of a fixed geometric grid nearest to the saddle point of ε; what was
composed for one θ is kept, and questions about nearby ε share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft

from dpmf import budget
from dpmf.loss.distribution import LossDistribution, power, transform_error
from dpmf.loss.dominating_pair import DominatingPair, Indices
from dpmf.loss.gaussian import Side
from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Where losses are composed. Any values give sound bounds.

    Attributes:
      cut: the tilted mass on each side of the window is at most e^(−cut), about.
      scales: orders of the Chernoff bounds on that, in units of 1/deviation.
      first_tilt, ratio, tilts: the grid of tilts, in units of 1/deviation, its ratio and its size.
      largest_window: points of the window, at most; beyond it the lattice is made coarser.
      bytes_per_point: what a point of the window takes while it is transformed.
    """

    cut: float = 40.0
    scales: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 11.0)
    first_tilt: float = 0.2
    ratio: float = 1.3
    tilts: int = 80
    largest_window: int = 2**21
    bytes_per_point: float = 96.0


_TUNING = _Tuning()
_LEAST_MASS = 1e-300  # what stands for the mass of finite losses where there is none


@dataclass(frozen=True, eq=False)
class Atoms:
    """The distribution of one loss: masses on a lattice, and the mass of an infinite loss.

    Attributes:
      interval: spacing of the lattice, a power of two, so that every loss is a double.
      indices: lattice indices of the losses.
      masses: their masses.
      infinite: the mass of an infinite loss.
    """

    interval: float
    indices: Indices
    masses: Array
    infinite: float

    @classmethod
    def of(cls, pair: DominatingPair, direction: str) -> Atoms:
        """The loss of a pair in one direction."""
        if direction == "add":
            return cls(pair.interval, -pair.losses, pair.lower, pair.lower_only)
        return cls(pair.interval, pair.losses, pair.upper, pair.upper_only)

    def coarser(self, factor: int, side: Side) -> Atoms:
        """The same on a lattice that is coarser; losses are rounded to the side that is asked for."""
        up = -(-self.indices // factor) if side == "upper" else self.indices // factor
        return Atoms(self.interval * factor, up, self.masses, self.infinite)


class Composition:
    """Independent losses added up, each a number of times.

    **Formal guarantees.** With side "upper", `delta` is at least the δ(ε) of the sum of the losses given, and with side
    "lower" at most that. What is composed is the product of the very masses given, which need not add up to one: those
    of a dominating pair may exceed it by 1e-14. With T_i the mass of a part, F_i that of its finite losses, and n_i
    its count, the mass of infinite loss is Π T_i^(n_i) − Π F_i^(n_i), computed as the first product times
    1 − Π (1 + (T_i − F_i)/F_i)^(−n_i), in which nothing cancels. T_i and F_i are correct to two units of rounding, and
    both logarithms are moved by more than that, and than the units of their own sums.
    Masses outside the window of the transforms wrap around into it, which only adds: from above that is kept, and what
    lies above the window counts as infinite once more (Chernoff's inequality on the very masses that are composed);
    from below a bound on all of it is subtracted. Errors of the transforms are those of docs/theory/floating-point.md,
    "Transforms"; they are added or subtracted too.
    """

    def __init__(self, parts: Sequence[tuple[Atoms, int]], side: Side = "upper") -> None:
        """Add up losses.

        Args:
          parts: each distribution, and how often it is added. All have the same interval.
          side: whether to bound δ from above or from below.
        """
        self._side = side
        self._parts: list[tuple[Atoms, int]] = []
        rounding = (16 + 2 * len(parts)) * (UNIT if side == "upper" else -UNIT)
        whole = infinite = 0.0  # the logarithms of Π T_i^(n_i) and of Π (T_i/F_i)^(n_i)
        for atoms, count in parts:
            there = atoms.masses > 0
            self._parts.append(
                (Atoms(atoms.interval, atoms.indices[there], atoms.masses[there], atoms.infinite), count)
            )
            finite = max(math.fsum(atoms.masses[there].tolist()), _LEAST_MASS)
            total = math.log(finite + atoms.infinite)
            whole += count * (total + rounding * (1 + abs(total)))
            infinite += count * math.log1p(atoms.infinite / finite)
        self._infinite = math.exp(whole) * -math.expm1(-infinite * (1 + rounding))
        self._empty = any(not len(atoms.masses) for atoms, _ in self._parts)
        # Exact: sums of products of integers, times a power of two.
        self._largest = sum(n * float(atoms.interval * atoms.indices.max(initial=0)) for atoms, n in self._parts)
        self._logs = [np.log(atoms.masses) for atoms, _ in self._parts]
        self._kept: dict[int, LossDistribution] = {}
        self._known: dict[float, tuple[float, float, float]] = {}
        self._deviation = 1.0 if self._empty else math.sqrt(max(self._cumulants(0.0)[2], 1e-300))

    def delta(self, epsilon: float) -> float:
        """The bound on δ(ε)."""
        if self._empty:
            return 1.0 if self._side == "upper" else self._infinite * (1 - 16 * UNIT)
        if epsilon >= self._largest:  # no finite loss exceeds ε
            return min(self._infinite * (1 + (16 if self._side == "upper" else -16) * UNIT), 1.0)
        place = self._place(epsilon)
        if place not in self._kept:
            self._kept[place] = self._composed(self._tilt(place))
        found = self._kept[place]
        return found.delta(epsilon) if self._side == "upper" else found.lower_delta(epsilon)

    def _tilt(self, place: int) -> float:
        return 0.0 if place == 0 else _TUNING.first_tilt * _TUNING.ratio ** (place - 1) / self._deviation

    def _place(self, epsilon: float) -> int:
        """The tilt under which the mean of the loss is about ε."""
        low, high = 0, _TUNING.tilts
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._cumulants(self._tilt(middle))[1] <= epsilon else (low, middle)
        return low

    def _cumulants(self, order: float) -> tuple[float, float, float]:
        """log E e^(θL), the mean and the variance of L under the tilt θ, for the finite losses."""
        if order not in self._known:
            total = np.zeros(3)
            for (atoms, count), logs in zip(self._parts, self._logs, strict=True):
                losses = atoms.interval * atoms.indices
                exponents = logs + order * losses
                top = float(exponents.max())
                masses = np.exp(exponents - top)
                norm = float(masses.sum())
                mean = float(masses @ losses) / norm
                total += count * np.array([top + math.log(norm), mean, float(masses @ (losses - mean) ** 2) / norm])
            self._known[order] = float(total[0]), float(total[1]), float(total[2])
        return self._known[order]

    def _log_moment(self, order: float) -> tuple[float, float]:
        """log E e^(θL) of the finite losses, and a bound on its error."""
        error = 0.0
        for (atoms, count), logs in zip(self._parts, self._logs, strict=True):
            largest = abs(order) * atoms.interval * float(np.abs(atoms.indices).max()) + float(np.abs(logs).max())
            error += count * UNIT * (64 + 8 * largest + 2 * math.log2(len(logs) + 1))
        return self._cumulants(order)[0], error

    def _composed(self, tilt: float) -> LossDistribution:
        """The composition under one tilt."""
        value, _, variance = self._cumulants(tilt)
        deviation = math.sqrt(max(variance, 1e-300))
        steps = [scale / deviation for scale in _TUNING.scales]
        interval = self._parts[0][0].interval
        top = min((self._cumulants(tilt + step)[0] - value + _TUNING.cut) / step for step in steps) + 2 * interval
        bottom = max((value - self._cumulants(tilt - step)[0] - _TUNING.cut) / step for step in steps) - 2 * interval
        ends = {
            s: sum(c * float(end(a.indices)) * interval for a, c in self._parts)
            for s, end in ((-1, np.min), (1, np.max))
        }
        bottom, top = max(bottom, ends[-1]), min(top, ends[1])
        most = min(float(_TUNING.largest_window), max(budget.fitting(_TUNING.bytes_per_point), 1024.0))
        factor = 1
        while (top - bottom) / (interval * factor) + 4 > most:
            factor *= 2
        h, side = interval * factor, self._side
        parts = [(atoms.coarser(factor, side) if factor > 1 else atoms, count) for atoms, count in self._parts]
        # A coarser lattice moves each loss by less than its spacing.
        slack = sum(count for _, count in parts) if factor > 1 else 0
        first = math.floor(bottom / h) - (slack if side == "lower" else 0)
        last = math.ceil(top / h) + (slack if side == "upper" else 0)
        length = fft.next_fast_len(max(last - first + 1, 16), real=True)
        probs, rounding, log_scale, scale_error = self._convolved(parts, tilt, length)
        # What lies outside of the window, under the tilt, and above it without a tilt.
        moment, error = self._log_moment(tilt)
        outside, beyond = 0.0, 0.0
        for sign, end in ((1, h * (first + length - (slack if side == "upper" else 0))), (-1, h * (first + slack))):
            if end > ends[1] if sign > 0 else end <= ends[-1]:
                beyond = -math.inf if sign > 0 else beyond
                continue  # there is nothing
            logs = []
            for step in steps:
                other, other_error = self._log_moment(tilt + sign * step)
                spread = 8 * UNIT * (abs(other) + abs(moment) + step * abs(end) + tilt * abs(end))
                logs.append(other - moment - sign * step * end + error + other_error + spread)
                if sign > 0:
                    beyond = min(beyond, other - (tilt + step) * end + other_error + spread)
            outside += math.exp(min(*logs, 0.0))
        infinite = self._infinite + math.exp(beyond) if side == "upper" else self._infinite
        return LossDistribution(
            interval=h,
            lower=first,
            probs=np.roll(probs, -(first % length)),
            tilt=tilt,
            log_scale=log_scale,
            infinity_mass=min(infinite * (1 + (16 if side == "upper" else -16) * UNIT), 1.0),
            rounding=rounding,
            scale_error=scale_error,
            loss_error=0.0,
            outside=outside * math.exp(min(abs(moment - log_scale) + error + scale_error, 700.0)),
        )

    def _convolved(
        self, parts: Sequence[tuple[Atoms, int]], tilt: float, length: int
    ) -> tuple[Array, float, float, float]:
        """The tilted masses of the sum modulo the length, the error of the transforms, and log scale with its error."""
        spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
        counts, totals, norms = (np.empty(len(parts)) for _ in range(3))
        log_scale = scale_error = 0.0
        rows: list[Array] = []
        for r, ((atoms, count), logs) in enumerate(zip(parts, self._logs, strict=True)):
            budget.check()
            losses = tilt * (atoms.interval * atoms.indices)
            exponents = logs + losses
            top = float(exponents.max())
            scale = top + math.log(float(np.exp(exponents - top).sum()))
            places = atoms.indices % length
            row: Array = np.bincount(places, weights=np.exp(exponents - scale), minlength=length).astype(np.float64)
            crowd = int(np.bincount(places).max())
            rows.append(row)
            counts[r], totals[r], norms[r] = count, float(row.sum()), float(np.linalg.norm(row))
            log_scale += count * scale
            largest = float(np.abs(losses).max()) + float(np.abs(logs).max()) + abs(scale)
            scale_error += count * UNIT * (16 + 4 * largest + crowd)  # the exponents, exp, and sums in one place
        if counts.sum() == 1:
            return rows[0], 0.0, log_scale, scale_error
        for row, (_, count) in zip(rows, parts, strict=True):
            spectrum *= power(fft.rfft(row), count)
        probs = fft.irfft(spectrum, length)
        rounding = transform_error(counts, totals, norms, length, float(np.linalg.norm(probs)))
        return np.maximum(probs, 0.0), rounding, log_scale, scale_error
