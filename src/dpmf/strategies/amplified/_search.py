"""Find the parameters of a family that make error × σ least, for one batching, workload and target.

With Π held fixed (see `_losses`), σ² is ⟨Π, G⟩ up to a constant, a quadratic form of the coefficients. The search
minimises log error² + log⟨Π, G⟩ by a quasi-Newton method, estimates Π again at the result, and repeats. Where this
stops, the gradient of error × σ is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpmf import budget, progress
from dpmf.numerics import Array
from dpmf.strategies.amplified._families import Banded, Family
from dpmf.strategies.amplified._losses import Sampler
from dpmf.strategies.settling import Loss

_ROUNDS = 12
_STEADY = 0.002  # the search ends when a round gains less than this part of the error
_STEP = 0.6  # the part of a new estimate of Π in the one that is used: whole steps would overshoot
_QUICK = 3 * 10**5  # samples × bins of the first rounds
_FINE = 2 * 10**6  # samples × bins of the last ones
_SHORT = 1.0  # a step in a logarithm that is not too long
_FLAT = 1e-5  # a gradient that is zero
_RESTARTS = 40  # with a box halved as often the search is over; it is still wider than a rounding error


@dataclass(frozen=True)
class Throw:
    """The Gram matrix of one throw of a batching as a function of the first column of C.

    Attributes:
      bins: the number of bins that one record may be thrown into.
      stride: how many iterations they are apart.
      epochs: for how many epochs a record keeps its bin.
      distance: how many iterations lie between two participations of a record.
      rows: the number of iterations after which means are cut off; None if they are not.
      throws: how many throws are composed.
    """

    bins: int
    stride: int
    epochs: int
    distance: int
    rows: int | None
    throws: int

    def fold(self, column: Array) -> Array:
        """The mean of the first bin."""
        rows = self.rows or len(np.trim_zeros(column, "b")) + (self.epochs - 1) * self.distance
        mean = np.zeros(rows)
        for start in range(0, self.epochs * self.distance, self.distance):
            part = column[: max(0, rows - start)]
            mean[start : start + len(part)] += part[: rows - start]
        return mean

    def unfold(self, by_mean: Array, length: int) -> Array:
        """The gradient by the column, from that by the mean."""
        out = np.zeros(length)
        for start in range(0, self.epochs * self.distance, self.distance):
            part = by_mean[start : start + length]
            out[: len(part)] += part
        return out

    def gram(self, column: Array) -> Array:
        """The Gram matrix of the means of all bins."""
        mean = self.fold(column)
        if self.rows is None:
            lags = _correlations(mean, self.stride, self.bins)
            places = np.arange(self.bins)
            return np.asarray(lags[np.abs(places[:, None] - places)])
        means = np.zeros((self.bins, self.rows))
        for i in range(self.bins):
            means[i, i * self.stride :] = mean[: self.rows - i * self.stride]
        return means @ means.T

    def form(self, weights: Array) -> Callable[[Array], tuple[float, Array]]:
        """The function from a mean to (⟨Π, G⟩, its gradient)."""
        if self.rows is None:
            sums = np.array([np.trace(weights, offset=lag) * (1 if lag == 0 else 2) for lag in range(self.bins)])

            def stationary(mean: Array) -> tuple[float, Array]:
                value, gradient = 0.0, np.zeros(len(mean))
                for lag in range(0, min(self.bins, -(-len(mean) // self.stride))):
                    d = lag * self.stride
                    first, second = mean[: len(mean) - d], mean[d:]
                    value += sums[lag] * float(first @ second)
                    gradient[: len(mean) - d] += sums[lag] * second
                    gradient[d:] += sums[lag] * first
                return value, gradient

            return stationary
        matrix = _cut_form(weights, self.stride, self.rows)

        def cut(mean: Array) -> tuple[float, Array]:
            image = matrix @ mean
            return float(image @ mean), 2 * image

        return cut


def _correlations(mean: Array, stride: int, bins: int) -> Array:
    return np.array([float(mean[: max(0, len(mean) - d)] @ mean[d:]) for d in range(0, bins * stride, stride)])


def _cut_form(weights: Array, stride: int, rows: int) -> Array:
    """The matrix Q with meanᵀ·Q·mean = ⟨Π, G⟩ for means that are cut off after some rows.

    Q[a, a+d] sums Π[i, j] over the bins i, j that are d iterations apart and whose common row lies before the cut.
    """
    bins = len(weights)
    matrix = np.zeros((rows, rows))
    places = np.arange(rows)
    for lag in range(bins):
        d = lag * stride
        if d >= rows:
            break
        sums = np.cumsum(np.diagonal(weights, lag))
        # Bin j = i + lag starts at row (i + lag)·stride. The mean's entry a there is the entry a + d in bin i.
        a = places[: rows - d]
        count = np.minimum(bins - lag, (rows - 1 - a) // stride - lag + 1)
        values = np.where(count > 0, sums[np.maximum(count, 1) - 1], 0.0)
        matrix[a, a + d] = values
        matrix[a + d, a] = values
    return matrix


class Found(NamedTuple):
    """The parameters found, an estimate of σ for them, and error × that σ."""

    parameters: Array
    noise_multiplier: float
    error: float


def search(
    family: Family,
    throw: Throw,
    loss: Loss,
    target: tuple[float, float],
    start: Array | None = None,
    *,
    quick: bool = False,
) -> Found:
    """Return the parameters with the least error × σ, from fewer samples if it is to be quick.

    `noise_multiplier` and `error` are NaN where bins are so far apart that the least error × norm is the answer.
    """
    parameters = family.start if start is None else np.asarray(start, dtype=np.float64)
    if _separate(family, throw):
        norm = np.eye(throw.bins) / throw.bins
        # A coefficient that a long step has made tiny stays so, because its logarithm has no slope there: steps are
        # short, and there are two starts.
        starts = [parameters, *([family.square_root] if isinstance(family, Banded) else [])]
        ends = [_minimise(family, throw, loss, norm, start, _SHORT) for start in starts]
        return Found(min(ends, key=lambda end: _size(family, throw, loss, norm, end)), math.nan, math.nan)
    epsilon, delta = target
    samplers = [
        Sampler(throw.bins, throw.throws, epsilon, delta, min(most, max(least, work // throw.bins)))
        for least, most, work in ((4_000, 20_000, _QUICK), (8_000, 60_000, _FINE))
    ][: 1 if quick else 2]
    weights: Array | None = None
    guess = 0.0
    best = Found(parameters, math.nan, math.inf)
    for sampler in samplers:
        before = math.inf
        best = best._replace(error=math.inf)  # errors of different samples are not compared
        for _ in range(_ROUNDS):
            budget.check()
            columns = family.columns(parameters)
            gram = throw.gram(columns.strategy)
            guess = guess or _first_guess(gram, throw.throws, epsilon, delta)
            found = sampler.sensitivities(gram, guess)
            guess = found.noise_multiplier
            error = guess * math.sqrt(loss(*columns)[0])
            progress.say(f"error about {error:.4g}")
            scaled = found.weights / float(np.sum(found.weights * gram))
            moved = abs(before / error - 1)
            before = error
            if error < best.error:
                best = Found(parameters, guess, error)
            if moved < _STEADY:
                break
            weights = scaled if weights is None else weights + _STEP * (scaled - weights)
            parameters = _minimise(family, throw, loss, weights, parameters)
        parameters = best.parameters
    return best


def _first_guess(gram: Array, throws: int, epsilon: float, delta: float) -> float:
    """A noise multiplier of the right size: between no amplification and that of many small contributions."""
    spread = math.sqrt(2 * math.log(1 / delta))
    unamplified = math.sqrt(float(np.diagonal(gram).mean())) * spread / (epsilon + spread)
    averaged = math.sqrt(throws * float(gram.mean())) * spread / epsilon
    return max(unamplified, averaged)


def _separate(family: Family, throw: Throw) -> bool:
    """Whether the means of different bins have no rows in common, whatever the parameters are."""
    width = getattr(family, "p", family.iterations)
    return throw.bins == 1 or (throw.epochs == 1 and throw.stride >= width)


def _size(family: Family, throw: Throw, loss: Loss, weights: Array, parameters: Array) -> float:
    """What `_minimise` makes small: the squared error times ⟨Π, G⟩."""
    columns = family.columns(parameters)
    return loss(*columns)[0] * throw.form(weights)(throw.fold(columns.strategy))[0]


def _minimise(
    family: Family, throw: Throw, loss: Loss, weights: Array, parameters: Array, reach: float = math.inf
) -> Array:
    """Find parameters at which the gradient is zero, but for those that end at their bounds.

    A quasi-Newton method runs in a box that extends by `reach` to each side. A step that is too long can end it at a
    point that is no minimum, and at which one depends on the processor. Where the gradient is not zero at the end, the
    method starts again from there: in a box that has moved along if the last one was in the way, else in a smaller one.
    """
    from scipy.optimize import Bounds, minimize

    form = throw.form(weights)

    def evaluate(x: Array) -> tuple[float, Array]:
        columns = family.columns(x)
        with np.errstate(over="ignore", invalid="ignore"):  # of steps that are far too long, which are taken back
            squared, by_column, by_noising = loss(*columns)
        mean = throw.fold(columns.strategy)
        size, by_mean = form(mean)
        by_strategy = throw.unfold(by_mean, family.iterations) / size
        if not (math.isfinite(squared) and squared > 0 and np.all(np.isfinite(by_noising))):
            return 1e10, np.zeros(len(x))
        gradient = family.gradient(x, columns, by_strategy + by_column / squared, by_noising / squared)
        return math.log(squared) + math.log(size), gradient

    if not len(parameters):
        return parameters
    lows, highs = np.transpose(family.bounds)
    for _ in range(_RESTARTS):
        budget.check()
        found = minimize(
            evaluate, parameters, jac=True, method="L-BFGS-B",
            bounds=Bounds(np.maximum(lows, parameters - reach), np.minimum(highs, parameters + reach)),
            options={"maxiter": 300, "maxfun": 600, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-7},
        )  # fmt: skip
        moved = float(np.max(np.abs(found.x - parameters)))
        parameters = np.asarray(found.x, dtype=np.float64)
        if np.max(np.abs(np.clip(parameters - found.jac, lows, highs) - parameters)) < _FLAT:
            break
        reach = _SHORT if moved > 0.99 * reach else min(reach, _SHORT) / 2
    return parameters
