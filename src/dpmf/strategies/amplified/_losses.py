"""A quick estimate of the noise multiplier under amplification, and of how it changes with the Gram matrix.

Losses of one throw are drawn by importance sampling with the same random numbers at every call, and composed over
throws by Fourier transforms. The estimate guides the search for coefficients and is never reported as a guarantee.

**How σ changes with G.** Let ℓ be the loss log((1/b)·Σ_i X_i), X_i = exp(u_i − G_ii/(2σ²)) with u ~ N(0, G/σ²), and
let p_i = X_i/Σ_j X_j be the chance of bin i given the output. For a smooth f the heat equation gives
∂E f(e^ℓ)/∂G_ij = E[f''(e^ℓ)·X_i·X_j]/(2b²σ²). For δ(ε) the second derivative of f sits at the one loss ε (or −ε, in the
add direction), and so ∂δ/∂G_ij is proportional to Π_ij = E[p_i·p_j | ℓ = ε]. As δ depends on G/σ² only, the σ that
keeps δ in place obeys d log σ² = ⟨Π, dG⟩/⟨Π, G⟩. With several throws Π is that of one throw, given that the losses of
all of them add up to ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dpmf.numerics import Array

_SHIFTS = 4.5  # about how many deviations lie between the typical losses and those that decide about δ
_GRID = 2**13
_SEED = 20
_ROOT_STEPS = 7


class Sensitivities(NamedTuple):
    """An estimate of σ, and the matrix Π in which log σ² changes like log ⟨Π, G⟩."""

    noise_multiplier: float
    weights: Array


class _Losses(NamedTuple):
    """Samples of u − G_ii/(2σ²), of the loss, and their weights under the distribution without the record."""

    exponents: Array
    losses: Array
    weights: Array


@dataclass
class Sampler:
    """Losses of mechanisms with a number of bins, thrown several times.

    Attributes:
      bins: the number of bins of one throw.
      throws: how many throws are composed.
      epsilon, delta: the target.
      samples: how many losses are drawn.
    """

    bins: int
    throws: int
    epsilon: float
    delta: float
    samples: int
    _normal: Array = field(init=False, repr=False)
    _places: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(_SEED)
        self._normal = generator.standard_normal((self.samples, self.bins), dtype=np.float32)  # type: ignore[assignment]
        self._places = generator.integers(self.bins, size=self.samples)  # type: ignore[assignment]

    def sensitivities(self, gram: Array, guess: float) -> Sensitivities:
        """Estimate σ for a Gram matrix of one throw, starting from a guess, and how it changes."""
        b = len(gram)
        factor = np.linalg.cholesky(gram + 1e-9 * np.trace(gram) / b * np.eye(b)).astype(np.float32)
        noise = self._normal @ factor.T
        found: dict[float, tuple[_Losses, tuple[float, float]]] = {}

        def excess(log_sigma: float) -> float:
            """log δ − log of the target, of the worse direction."""
            drawn = self._draw(gram, noise, math.exp(log_sigma))
            deltas = self._deltas(drawn)
            found[log_sigma] = drawn, deltas
            return math.log(max(*deltas, 1e-30) / self.delta)

        low = high = math.log(guess)
        value = excess(low)
        step = 0.05
        ends = {low: value}
        while value > 0:
            low, high = high, high + step
            value = ends[high] = excess(high)
            step *= 1.6
        while ends[low] <= 0:
            low, high = low - step, low
            ends[low] = excess(low)
            step *= 1.6
        for _ in range(_ROOT_STEPS):
            # Regula falsi on log δ, kept away from the ends, which are further than the root is in its middle.
            part = min(max(ends[low] / (ends[low] - ends[high]), 0.1), 0.9)
            middle = low + part * (high - low)
            ends[middle] = excess(middle)
            low, high = (middle, high) if ends[middle] > 0 else (low, middle)
            if high - low < 1e-3 or abs(ends[middle]) < 5e-3:
                break
        root = min((low, high), key=lambda end: abs(ends[end]))
        slope = (ends[high] - ends[low]) / (high - low)
        drawn, deltas = found[root]
        return Sensitivities(math.exp(root - ends[root] / slope), self._posterior(drawn, deltas))

    def _draw(self, gram: Array, noise: Array, sigma: float) -> _Losses:
        """Draw from a mixture of proposals: some bin's mean, enlarged, and a shift of all of them."""
        scaled = (gram / sigma**2).astype(np.float32)
        halves, means, mean = np.diagonal(scaled) / 2, scaled.mean(axis=1), float(scaled.mean())
        shift = _SHIFTS / math.sqrt(mean)
        proposals = [
            (1.0, 0.0), (1.4, 0.0), (2.0, 0.0), (1.0, 0.5 * shift), (1.0, shift),
            (0.0, 0.0), (0.0, -0.5 * shift), (0.0, -shift),
        ]  # fmt: skip
        u = noise / np.float32(sigma)
        parts = np.array_split(np.arange(len(u)), len(proposals))
        for rows, (tilt, move) in zip(parts, proposals, strict=True):
            if tilt:
                u[rows] += np.float32(tilt) * scaled[self._places[rows]]
            if move:
                u[rows] += np.float32(move) * means
        average = u.mean(axis=1).astype(np.float64)
        exponents = u - halves
        losses = _log_mean_exp(exponents)
        densities = []
        for tilt, move in proposals:
            if tilt == 1.0 and move == 0.0:
                bins = losses
            elif tilt:
                bins = _log_mean_exp(
                    np.float32(tilt) * u - np.float32(tilt) * (np.float32(tilt) * halves + np.float32(move) * means)
                )
            else:
                bins = np.zeros(len(u))
            densities.append(bins + move * average - move**2 * mean / 2)
        stacked = np.stack(densities)
        top = stacked.max(axis=0)
        mixture = top + np.log(np.exp(stacked - top).mean(axis=0))
        return _Losses(exponents, losses, np.exp(-mixture) / len(u))

    def _grid(self, losses: Array) -> tuple[float, float, int]:
        """A lattice of losses that holds the composed ones: spacing, its largest loss, its size."""
        largest = 3 * self.epsilon + 10
        return 2 * largest / _GRID, largest, _GRID

    def _histogram(self, losses: Array, weights: Array) -> Array:
        """Masses on the lattice, with the loss 0 in the first place; each loss goes to its two neighbours."""
        spacing, largest, size = self._grid(losses)
        place = np.clip(losses, -largest * 0.999, largest * 0.999) / spacing
        below = np.floor(place).astype(np.int64)
        part = place - below
        masses = np.bincount(below % size, weights * (1 - part), size)
        masses += np.bincount((below + 1) % size, weights * part, size)
        return np.asarray(masses / masses.sum())

    def _deltas(self, drawn: _Losses) -> tuple[float, float]:
        """Estimates of δ(ε), remove and add."""
        with_record = drawn.weights * np.exp(drawn.losses)
        if self.throws == 1:
            remove = float(with_record @ np.maximum(-np.expm1(self.epsilon - drawn.losses), 0.0))
            add = float(drawn.weights @ np.maximum(-np.expm1(self.epsilon + drawn.losses), 0.0))
            return remove, add
        size = _GRID
        spacing, _, _ = self._grid(drawn.losses)
        places = np.fft.fftfreq(size, 1 / size) * spacing
        deltas = []
        for sign, weights in ((1, with_record), (-1, drawn.weights)):
            masses = self._composed(drawn.losses, weights, self.throws)
            deltas.append(float(masses @ np.maximum(-np.expm1(np.minimum(self.epsilon - sign * places, 0.0)), 0.0)))
        return deltas[0], deltas[1]

    def _composed(self, losses: Array, weights: Array, times: int) -> Array:
        spectrum = np.fft.rfft(self._histogram(losses, weights)) ** times
        return np.maximum(np.fft.irfft(spectrum, _GRID), 0.0)

    def _posterior(self, drawn: _Losses, deltas: tuple[float, float]) -> Array:
        """Π of the worse direction."""
        removing = deltas[0] >= deltas[1]
        weights = drawn.weights * np.exp(drawn.losses) if removing else drawn.weights
        level = self.epsilon if removing else -self.epsilon
        if self.throws == 1:
            # The losses near the level count, with a width that is a part of their own spread beyond it.
            beyond = weights * (drawn.losses > level if removing else drawn.losses < level)
            spread = math.sqrt(float(beyond @ (drawn.losses - level) ** 2) / max(float(beyond.sum()), 1e-300))
            near = weights * np.exp(-(((drawn.losses - level) / max(0.5 * spread, 1e-3)) ** 2) / 2)
        else:
            others = self._composed(drawn.losses, weights, self.throws - 1)
            spacing, largest, size = self._grid(drawn.losses)
            needed = level - drawn.losses
            inside = np.abs(needed) < largest
            near = weights * inside * others[np.round(needed / spacing).astype(np.int64) % size]
        total = float(near.sum())
        if not total > 0:
            return np.eye(drawn.exponents.shape[1])
        chosen = np.flatnonzero(near > 1e-6 * near.max())
        exponents = drawn.exponents[chosen]
        bins = np.exp(exponents - exponents.max(axis=1, keepdims=True))
        bins *= (np.sqrt(near[chosen] / total) / bins.sum(axis=1))[:, None].astype(np.float32)
        return np.asarray(bins.T @ bins, dtype=np.float64)


def _log_mean_exp(values: Array) -> Array:
    top = values.max(axis=1)
    sums = np.exp(values - top[:, None]).sum(axis=1)
    return np.asarray(top + np.log(sums / values.shape[1]), dtype=np.float64)
