"""Lower bounds on δ(ε) from events: half-spaces and unions of half-spaces (docs/theory/lower_bounds.md, section 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

from dpmf import budget
from dpmf.accountants.protocol import Direction
from dpmf.numerics import UNIT, Array

# Proof constants (docs/theory/floating-point.md, "Lower bounds").
_TAIL_ERROR = 1e-12  # relative error of `ndtr` and of sums of its values
_TINY = 1e-300  # larger than what can underflow in one tail probability
LARGEST_EPSILON = 500.0  # e^ε stays far within the range of double precision


@dataclass(frozen=True)
class _Tuning:
    """Where thresholds are looked for. Any values give sound bounds.

    Attributes:
      margin: the grid of thresholds reaches this many standard deviations beyond the two guesses.
      grid: the number of thresholds on the grid.
      refinements: the number of further evaluations around the best of them.
    """

    margin: float = 4.0
    grid: int = 16
    refinements: int = 12


_TUNING = _Tuning()


@dataclass(frozen=True, eq=False)
class HalfSpaces:
    """Half-spaces E_k = {w_k·u > x·s_k} with s_k² = w_kᵀSw_k and w_k ≥ 0, for a threshold x that is still free.

    Attributes:
      shifts: (Sw_k)_i/s_k for σ = 1, half-spaces × indices: component i moves w_k·u by this many standard deviations.
      pair_scale: the standard deviation of (w_k·u)/s_k + (w_l·u)/s_l for each pair k < l.
      error: a bound on the relative error of every shift, and of the squares of `pair_scale`.
    """

    shifts: Array
    pair_scale: Array
    error: float

    @classmethod
    def from_sums(cls, row_sums: Array, total: float, gram_error: float) -> HalfSpaces:
        """The one half-space with w = 1, from the sums of the rows of G and of all its entries.

        Both sums have a relative error of at most `gram_error`, so the quotient row_sums/√total has 1.5 times that, and
        two further roundings.
        """
        return cls((row_sums / math.sqrt(total))[None, :], np.empty(0), 1.5 * gram_error + 8 * UNIT)

    @classmethod
    def from_weights(cls, gram: Array, weights: Array, gram_error: float) -> HalfSpaces:
        """Half-spaces with the weights w_k given as rows.

        With n indices, the sums Sw have the error of the entries and n further roundings, the quadratic forms 2n: the
        quotient of one by the root of the other has 1.5 times the error of the entries and 2n + 4 roundings.
        """
        products = weights @ gram
        covariance = products @ weights.T
        scale = np.sqrt(np.diagonal(covariance))
        first, second = np.triu_indices(len(weights), 1)
        correlation = (covariance / np.outer(scale, scale))[first, second]
        error = 1.5 * gram_error + (2 * len(gram) + 8) * UNIT
        return cls(products / scale[:, None], np.sqrt(2 + 2 * correlation), error)

    def delta(self, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
        """The largest bound over the thresholds that are tried; a union of half-spaces serves "remove" only."""
        if epsilon > LARGEST_EPSILON or (direction == "add" and len(self.pair_scale)):
            return 0.0
        shifts = self.shifts / noise_multiplier
        typical, largest = float(np.sqrt((shifts**2).mean())), float(shifts.max())
        if not 1e-12 < typical < 1e12:
            return 0.0
        sign = 1 if direction == "remove" else -1
        # Where the likelihood ratio of one component crosses e^ε, for the average component and for the largest.
        guesses = [min(sign * epsilon / d + d / 2, 30.0 + largest) for d in (typical, largest)]

        def value(x: float) -> float:
            budget.check()
            return self._value(shifts, x, epsilon, direction)

        ends = max(-38.0, min(guesses) - _TUNING.margin), max(-30.0, max(guesses) + _TUNING.margin)
        grid = np.linspace(*ends, max(_TUNING.grid, 2)).tolist()
        values = [value(x) for x in grid]
        best = int(np.argmax(values))
        bounds = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        refined = minimize_scalar(
            lambda x: -value(x), bounds=bounds, method="bounded", options={"maxiter": _TUNING.refinements}
        )
        return max(values[best], -float(refined.fun))

    def _value(self, shifts: Array, x: float, epsilon: float, direction: Direction) -> float:
        """P(E) − γQ(E) for the union E of the half-spaces; Q(E) − γP(E) for the mirror image of one of them."""
        gamma = math.exp(epsilon) * (1 + 4 * UNIT * (1 + epsilon))
        number, b = shifts.shape
        # The relative error of a tail probability: its own, and that of its argument.
        slack = _TAIL_ERROR + 16 * UNIT * (abs(x) + 1) ** 2
        least = shifts * (1 - self.error)
        if direction == "add":
            other = float(ndtr(x - least).mean()) * (1 + slack) + _TINY
            return float(ndtr(x)) * (1 - slack) - gamma * other
        gain = float(ndtr(least - x).sum()) / b * (1 - slack)
        gain -= gamma * number * (float(ndtr(-x)) * (1 + slack) + _TINY)
        if gain <= 0 or number == 1:
            return gain
        first, second = np.triu_indices(number, 1)
        argument = ((shifts[first] + shifts[second]) * (1 + self.error) - 2 * x) / self.pair_scale[:, None]
        argument += 4 * self.error * np.abs(argument)
        return gain - float(ndtr(argument).sum()) / b * (1 + slack) - number * number * _TINY
