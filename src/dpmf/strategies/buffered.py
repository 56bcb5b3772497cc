"""Buffered linear Toeplitz matrices (BLT), c_0 = 1 and c_t = Σ_i s_i·r_i^(t−1), whatever their buffers come from.

C⁻¹z is streamed with one array per buffer: y_t = z_t − Σ_i s_i·B_i, and then B_i ← r_i·B_i + y_t.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dpmf.errors import ArgumentError
from dpmf.numerics import UNIT, Array
from dpmf.strategies.base import ToeplitzStrategy, invert_series

_ROUNDING = 1e-12  # coefficients above −1e-12 times the largest one are negative by rounding only


def fault_of(column: Array) -> str | None:
    """Say why accounting cannot use these coefficients of C; None if it can."""
    if not np.all(np.isfinite(column)) or not column[0] > 0:
        return "coefficients that are not finite, or start with 0"
    least = float(column.min())
    return f"a negative coefficient ({least:.3g})" if least < -_ROUNDING * float(column.max()) else None


@np.errstate(over="ignore", invalid="ignore")  # a file may say anything
def fault_in(values: Mapping[str, Array], kept: str, n: int, most: int) -> str | None:
    """Say why accounting cannot use what an optimiser, or a file, gives for n iterations; None if it can.

    Args:
      values: arrays by the names that the store has for them.
      kept: what makes C: "strategy_coef" or "noising_coef", the coefficients of C or of C⁻¹, or "buf_decay", which goes
        with "output_scale". A LookupError or ValueError says that they are not there, or of different lengths.
      n: the number of iterations.
      most: how many coefficients or buffers there may be.
    """
    if len(values[kept]) > most:
        return f"more than {most} numbers"
    if kept == "strategy_coef":
        return fault_of(values[kept])
    if kept == "buf_decay":
        return fault_of(buffered_coef(values[kept], values["output_scale"], n))
    noising = values[kept]  # Theorem 1 of docs/theory/floating-point.md rests on this
    if noising[0] == 1 and np.all(noising[1:] <= 0) and -noising[1:].sum() <= 1 + _ROUNDING:
        return fault_of(invert_series(noising, n))
    return "coefficients of the inverse that are not 1 and then at most 0, with a sum of at least 0"


def buffered_coef(decay: Array, scale: Array, n: int) -> Array:
    """Return the first n coefficients of C, for buffers with these r_i and s_i."""
    column = np.zeros(n)
    column[0] = 1.0
    for rate, weight in zip(decay, scale, strict=True):
        column[1:] += weight * rate ** np.arange(n - 1)
    return column


class BufferedStrategy(ToeplitzStrategy):
    """A Toeplitz C whose inverse is streamed by buffers."""

    @abstractmethod
    def buffers(self, iterations: int) -> tuple[Array, Array]:
        """Return (r, s): how much each buffer keeps per iteration, and its weight in the output."""

    def strategy_coef(self, iterations: int) -> Array:
        decay, scale = self.buffers(iterations)
        column = buffered_coef(decay, scale, iterations)
        if fault := fault_of(column):
            raise ArgumentError("strategy", f"must be non-negative and finite, but {self.name} has {fault}")
        if min(decay.min(initial=0.0), scale.min(initial=0.0)) < 0:
            # Terms may cancel, which makes the relative error of their sum large.
            column = np.abs(column) + self.coef_error(iterations) * buffered_coef(
                np.abs(decay), np.abs(scale), iterations
            )
        return np.abs(column)

    def coef_error(self, iterations: int) -> float:
        """**Formal guarantees.** Theorem 4 of docs/theory/floating-point.md, "The matrix that runs"."""
        count = len(self.buffers(iterations)[0])
        return 2 * (count + 16) * UNIT if count else 0.0

    def noising_coef(self, iterations: int) -> Array:
        # The streaming recursion applied to an impulse takes O(d) per iteration; inverting the series is quadratic.
        decay, scale = self.buffers(iterations)
        state, out = np.ones_like(decay), np.ones(iterations)
        for t in range(1, iterations):
            out[t] = -float(scale @ state)
            state = decay * state + out[t]
        return out


@dataclass(frozen=True)
class GivenBuffers(BufferedStrategy):
    """A BLT by its buffers, for any number of iterations."""

    decay: tuple[float, ...]
    scale: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"BLT({len(self.decay)} buffers)"

    def buffers(self, iterations: int) -> tuple[Array, Array]:
        return np.array(self.decay), np.array(self.scale)
