"""Families of Toeplitz matrices with non-negative coefficients, as functions of a few free parameters.

Every family maps parameters to the first column of C and carries gradients back from C (and C⁻¹) to the parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dpmf.numerics import Array
from dpmf.strategies.base import invert_series, pad_or_cut, toeplitz_product, toeplitz_transposed_product

_FREE = 24  # up to so many coefficients are free; beyond, they are interpolated between about as many knots
_SMALLEST = -23.0  # the logarithm of the least coefficient


class Columns(NamedTuple):
    """The first columns of C and of C⁻¹."""

    strategy: Array
    noising: Array


class Family(ABC):
    """A family for N iterations."""

    iterations: int

    @property
    @abstractmethod
    def start(self) -> Array:
        """Parameters to start the search from."""

    @property
    @abstractmethod
    def bounds(self) -> list[tuple[float, float]]:
        """The least and the largest value of each parameter."""

    @abstractmethod
    def columns(self, parameters: Array) -> Columns:
        """Return C and C⁻¹."""

    @abstractmethod
    def gradient(self, parameters: Array, columns: Columns, by_strategy: Array, by_noising: Array) -> Array:
        """Return the gradient by the parameters of a function with these gradients by the two columns."""


def _by_strategy(columns: Columns, by_strategy: Array, by_noising: Array) -> Array:
    """The gradient by C of a function of C and C⁻¹: a change x of C changes C⁻¹ by −C⁻¹·x·C⁻¹."""
    return by_strategy - toeplitz_transposed_product(toeplitz_product(columns.noising, columns.noising), by_noising)


def _interpolation(last: int) -> tuple[np.ndarray[Any, Any], Array]:
    """Knots in 1, ..., last and the matrix that interpolates between them, linearly in the logarithm of the place."""
    if last == 0:
        return np.zeros(0, dtype=int), np.zeros((0, 0))
    knots = np.arange(1, last + 1) if last <= _FREE else np.unique(np.round(np.geomspace(1, last, _FREE)).astype(int))
    places = np.log(np.arange(1, last + 1))
    return knots, np.stack([np.interp(places, np.log(knots), row) for row in np.eye(len(knots))], axis=1)


@dataclass
class Banded(Family):
    """Free coefficients c_1, ..., c_{p−1}, on knots if there are many; p = N gives any Toeplitz matrix."""

    iterations: int
    p: int

    @cached_property
    def _knots(self) -> tuple[np.ndarray[Any, Any], Array]:
        return _interpolation(self.p - 1)

    @property
    def start(self) -> Array:
        steps = np.arange(1, self.p, dtype=np.float64)
        logs = np.cumsum(np.log((steps - 0.55) / steps)) - steps / self.p
        return np.asarray(logs[self._knots[0] - 1])

    def parameters_of(self, column: Array) -> Array:
        """The parameters whose C is close to the one with this first column."""
        return np.asarray(np.maximum(np.log(np.maximum(column[self._knots[0]], 1e-300)), _SMALLEST))

    @property
    def square_root(self) -> Array:
        """The parameters of the banded square root, whose coefficients are those of (1 − x)^(−1/2)."""
        steps = np.arange(1.0, self.p)
        return self.parameters_of(np.concatenate(([1.0], np.cumprod(1 - 0.5 / steps))))

    @property
    def bounds(self) -> list[tuple[float, float]]:
        return [(_SMALLEST, 3.0)] * len(self._knots[0])

    def columns(self, parameters: Array) -> Columns:
        strategy = pad_or_cut(np.concatenate(([1.0], np.exp(self._knots[1] @ parameters))), self.iterations)
        return Columns(strategy, invert_series(strategy, self.iterations))

    def gradient(self, parameters: Array, columns: Columns, by_strategy: Array, by_noising: Array) -> Array:
        total = _by_strategy(columns, by_strategy, by_noising)[1 : self.p]
        return np.asarray((total * columns.strategy[1 : self.p]) @ self._knots[1])


@dataclass
class Power(Family):
    """(1 − λx)^(−a), cut off after p coefficients; the parameters are a and log(1/(1 − λ))."""

    iterations: int
    p: int

    @property
    def start(self) -> Array:
        return np.array([0.5, np.log(2.0 * self.p)])

    @property
    def bounds(self) -> list[tuple[float, float]]:
        return [(1e-3, 1.5), (0.0, 25.0)]

    def columns(self, parameters: Array) -> Columns:
        a, lam = float(parameters[0]), 1 - np.exp(-parameters[1])
        steps = np.arange(1, self.p, dtype=np.float64)
        strategy = pad_or_cut(np.concatenate(([1.0], np.cumprod((steps - 1 + a) / steps * lam))), self.iterations)
        return Columns(strategy, invert_series(strategy, self.iterations))

    def gradient(self, parameters: Array, columns: Columns, by_strategy: Array, by_noising: Array) -> Array:
        total = (_by_strategy(columns, by_strategy, by_noising) * columns.strategy)[1 : self.p]
        steps = np.arange(1, self.p, dtype=np.float64)
        by_exponent = np.cumsum(1 / (steps - 1 + parameters[0]))
        by_decay = steps * np.exp(-parameters[1]) / max(1 - np.exp(-parameters[1]), 1e-12)
        return np.array([total @ by_exponent, total @ by_decay])


@dataclass
class Buffered(Family):
    """c_t = Σ_i s_i·r_i^(t−1), a BLT; the parameters are log s_i and log(r_i/(1 − r_i)).

    With a bandwidth p the coefficients are cut off after p of them.
    """

    iterations: int
    buffers: int
    p: int = 2**62

    @property
    def start(self) -> Array:
        lives = np.geomspace(2.0, max(4.0, min(self.p, self.iterations) / 2), self.buffers + 1)[:-1]
        decay = np.exp(-1 / lives)
        weights = 0.5 * lives**-0.5
        weights *= 0.5 / weights.sum()
        return np.concatenate((np.log(weights), np.log(decay / (1 - decay))))

    @property
    def bounds(self) -> list[tuple[float, float]]:
        return [(_SMALLEST, 2.0)] * self.buffers + [(-6.0, 14.0)] * self.buffers

    def parts(self, parameters: Array) -> tuple[Array, Array]:
        """Return (r, s)."""
        return 1 / (1 + np.exp(-parameters[self.buffers :])), np.exp(parameters[: self.buffers])

    def _powers(self, decay: Array) -> Array:
        powers = decay[:, None] ** np.arange(self.iterations - 1)
        powers[:, self.p - 1 :] = 0.0
        return np.asarray(powers)

    def columns(self, parameters: Array) -> Columns:
        decay, scale = self.parts(parameters)
        strategy = np.concatenate(([1.0], scale @ self._powers(decay)))
        return Columns(strategy, invert_series(strategy, self.iterations))

    def gradient(self, parameters: Array, columns: Columns, by_strategy: Array, by_noising: Array) -> Array:
        total = _by_strategy(columns, by_strategy, by_noising)[1:]
        decay, scale = self.parts(parameters)
        powers = self._powers(decay)
        by_decay = (powers * np.arange(self.iterations - 1)) @ total * scale * (1 - decay)
        return np.concatenate((scale * (powers @ total), by_decay))


@dataclass
class BandedInverse(Family):
    """C⁻¹ has the coefficients 1, −u_1·B_0, −u_2·B_1, ... with B_t = (1 − u_1)···(1 − u_t) and 0 ≤ u_t < 1.

    Its partial sums are B_t ≥ 0 and its other coefficients are at most 0, so that C is non-negative. The parameters are
    the logarithms of u_t/(1 − u_t), on knots if there are many.
    """

    iterations: int
    p: int

    @cached_property
    def _knots(self) -> tuple[np.ndarray[Any, Any], Array]:
        return _interpolation(self.p - 1)

    @property
    def start(self) -> Array:
        steps = self._knots[0].astype(np.float64)
        return -np.log(2 * steps - 1 + 1e-3)

    @property
    def bounds(self) -> list[tuple[float, float]]:
        return [(_SMALLEST, 12.0)] * len(self._knots[0])

    def _parts(self, parameters: Array) -> tuple[Array, Array]:
        u = 1 / (1 + np.exp(-(self._knots[1] @ parameters)))
        return u, np.concatenate(([1.0], np.cumprod(1.0 - u)))

    def noising(self, parameters: Array) -> Array:
        """Return the coefficients of C⁻¹ up to the last that is not zero."""
        u, partial = self._parts(parameters)
        return np.concatenate(([1.0], -u * partial[:-1] + 0.0))

    def columns(self, parameters: Array) -> Columns:
        noising = self.noising(parameters)
        return Columns(invert_series(noising, self.iterations), pad_or_cut(noising, self.iterations))

    def gradient(self, parameters: Array, columns: Columns, by_strategy: Array, by_noising: Array) -> Array:
        strategy = columns.strategy
        total = (by_noising - toeplitz_transposed_product(toeplitz_product(strategy, strategy), by_strategy))[: self.p]
        u, partial = self._parts(parameters)
        # d_t = B_t − B_{t−1}; a change of u_t multiplies all B from t on.
        by_partial = total.copy()
        by_partial[:-1] -= total[1:]
        suffix = np.cumsum((by_partial * partial)[::-1])[::-1][1:]
        return np.asarray((-suffix * u) @ self._knots[1])
