"""Workloads: how the noise of single iterations adds up in the model, and how large it is there.

Training adds C⁻¹Z to the gradients, one row per iteration, and the model after iteration t holds a sum of these rows
with weights A[t, s]. The lower-triangular matrix A is the workload. The error of a mechanism is the deviation of the
noise in the model: σ times the norms of the rows of A·C⁻¹.

| workload | A[t, s] for s ≤ t |
|---|---|
| `prefix` | 1: the model keeps every step |
| `damped` | β^(t−s) with β = 1 − 1/memory: the model forgets a step after about `memory` iterations |
| `momentum` | stochastic gradient descent with momentum and weight decay |
| `schedule` | learning rates that change, times any of the above |
| `matrix` | given by the user |
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpmf import validation
from dpmf.errors import ArgumentError
from dpmf.numerics import Array
from dpmf.strategies import _number_files as files
from dpmf.strategies.base import ToeplitzStrategy, check_dense, toeplitz_product
from dpmf.strategies.buffered import BufferedStrategy
from dpmf.workloads import _settled
from dpmf.workloads._kinds import (
    Damped,
    ExplicitWorkload,
    Momentum,
    Scheduled,
    ToeplitzWorkload,
    Workload,
    squared_norms,
)

if TYPE_CHECKING:
    from dpmf.mechanism import Mechanism

__all__ = [
    "NAMES", "SCHEDULES", "Damped", "ExplicitWorkload", "IterateError", "Momentum", "Scheduled", "ToeplitzWorkload",
    "Workload", "build", "damped", "error", "matrix", "momentum", "prefix", "schedule", "squared_rows",
]  # fmt: skip

NAMES = ("prefix", "damped", "momentum", "schedule", "matrix")
SCHEDULES = ("constant", "cosine", "linear")

_MOST_PRODUCTS = 10**9  # of back-substitution; a longer one is replaced by Fourier transforms


class IterateError(NamedTuple):
    """The deviation of the noise in a coordinate of the model, for clipping norm 1.

    Attributes:
      root_mean_square: over all iterations.
      largest: at the iteration where it is largest.
      last: after the last iteration.
    """

    root_mean_square: float
    largest: float
    last: float


def prefix() -> Damped:
    """Return the workload of prefix sums: the model keeps every step."""
    return Damped(math.inf)


def damped(memory: float) -> Damped:
    """Return the workload of a model that forgets.

    Args:
      memory: τ, how many iterations a step is remembered for; a step counts (1 − 1/τ)^j after j iterations.
    """
    return Damped(_memory(memory))


def momentum(beta: float, weight_decay: float = 0.0) -> Momentum:
    """Return the workload of stochastic gradient descent with momentum.

    Args:
      beta: the part of the velocity that is kept, in [0, 1).
      weight_decay: the part of the model that one iteration takes away (learning rate × weight decay), in [0, 1).
    """
    return Momentum(_fraction("beta", beta), _fraction("weight_decay", weight_decay))


def schedule(
    rates: str | Sequence[float] | Array, *, warm_up: float = 0.0, memory: float | None = None, beta: float = 0.0
) -> Scheduled:
    """Return the workload of learning rates that change.

    Args:
      rates: one learning rate for each iteration, or "constant", "cosine" or "linear" (the latter two fall to 0 at the
        end). Rates by name are scaled to mean square one.
      warm_up: the part of the run over which rates by name rise linearly from 0.
      memory: how many iterations the model remembers a step for; by default for ever.
      beta: momentum.
    """
    warm_up, beta = _fraction("warm_up", warm_up), _fraction("beta", beta)
    tau = math.inf if memory is None else _memory(memory)
    if isinstance(rates, str):
        return Scheduled(validation.choice("schedule", rates, SCHEDULES), warm_up, None, tau, beta)
    try:
        values = np.array(rates, dtype=np.float64)
    except (TypeError, ValueError):
        raise validation.wrong("schedule", "an array of learning rates", rates) from None
    if values.ndim != 1 or not len(values) or not np.all(np.isfinite(values)) or not np.any(values):
        raise validation.wrong("schedule", "a row of finite learning rates that are not all zero", rates)
    if warm_up:
        raise ArgumentError("warm_up", "applies only to schedules by name")
    return Scheduled("given", 0.0, (values + 0.0).tobytes(), tau, beta)


def matrix(source: Any) -> ExplicitWorkload:
    """Return the workload given by a lower-triangular matrix.

    Args:
      source: an array, or a .npy or .csv file.
    """
    if isinstance(source, str | os.PathLike):
        path = files.checked_path(source, (".npy", ".csv"))
        source = files.open_npy(path) if path.suffix.lower() == ".npy" else [row for _, row in files.text_rows(path)]
    try:
        entries = np.array(source, dtype=np.float64)
    except (TypeError, ValueError):
        raise ArgumentError("workload", "must be a square matrix of numbers") from None
    if entries.ndim != 2 or len(entries) != len(entries.T) or not len(entries):
        raise ArgumentError("workload", f"must be a square matrix, got shape {entries.shape}")
    check_dense(len(entries))
    if not np.all(np.isfinite(entries)) or np.any(np.triu(entries, 1)) or not np.any(entries):
        raise ArgumentError("workload", "must be a lower-triangular matrix of finite numbers, not all zero")
    data = (entries + 0.0).tobytes()
    return ExplicitWorkload(len(entries), hashlib.sha256(data).hexdigest(), data)


def build(
    name: str,
    *,
    memory: float | None = None,
    beta: float | None = None,
    weight_decay: float | None = None,
    schedule: Any = None,
    warm_up: float | None = None,
    file: Any = None,
) -> Workload:
    """Return the workload of a name: prefix, damped, momentum, schedule or matrix. None counts as not given."""
    options = {
        "memory": memory, "beta": beta, "weight_decay": weight_decay, "schedule": schedule, "warm_up": warm_up,
        "file": file,
    }  # fmt: skip
    given = {option: value for option, value in options.items() if value is not None}
    make, needed, optional = {
        "prefix": (prefix, (), ()),
        "damped": (damped, ("memory",), ()),
        "momentum": (momentum, ("beta",), ("weight_decay",)),
        "schedule": (_schedule_from, ("schedule",), ("warm_up", "memory", "beta")),
        "matrix": (matrix, ("file",), ()),
    }[validation.choice("workload", name, NAMES)]
    for option in given:
        if option not in (*needed, *optional):
            raise ArgumentError(option, f"does not apply to workload {name}")
    for option in needed:
        if option not in given:
            raise ArgumentError(option, f"must be given for workload {name}")
    values = [given.pop(option) for option in needed]
    return make(*values, **given)  # type: ignore[operator,no-any-return]


def _schedule_from(rates: Any, **options: Any) -> Scheduled:
    """A schedule by name or from a file of learning rates."""
    if isinstance(rates, os.PathLike) or (isinstance(rates, str) and "." in rates):
        path = files.checked_path(rates, (".npy", ".csv", ".txt"))
        if path.suffix.lower() == ".npy":
            rates = files.open_npy(path)
        else:
            rates = np.concatenate([row for _, row in files.text_rows(path)])
    return schedule(rates, **options)


def error(mechanism: Mechanism, noise_multiplier: float, workload: Workload) -> IterateError:
    """Return the deviation of the noise in the model: root mean square over iterations, largest and last.

    Args:
      mechanism: the strategy and the batching. What counts is the model after every step of training; the noise of a
        gap between throws is in the first step after it (docs/theory/batchings.md, "Settling").
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      workload: how the noise of single iterations adds up.

    For Toeplitz strategies this takes O(N log N), and with a learning-rate schedule N times the length of C⁻¹.
    """
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    rows = squared_rows(mechanism, workload)
    return IterateError(*(sigma * math.sqrt(float(value)) for value in (rows.mean(), rows.max(), rows[-1])))


def squared_rows(mechanism: Mechanism, workload: Workload) -> Array:
    """Return the squared norms of the rows of A·C⁻¹, or of A·B where the noise of the steps is B·Z."""
    if not isinstance(workload, Workload):
        raise validation.wrong("workload", "a dpmf workload", workload)
    strategy, n, steps = mechanism.strategy, mechanism.batching.iterations, mechanism.batching.steps
    workload.check_iterations(steps)
    if mechanism.settling is not None:
        return _settled.squared_rows(workload, mechanism.settling, mechanism.batching.throws)
    if steps < n:
        check_dense(n)
        rows = _settled.merged(strategy.inverse(n), steps, mechanism.batching.throws)
        return squared_norms(workload.matrix(steps) @ rows)
    if isinstance(strategy, ToeplitzStrategy):
        return workload.squared_rows(_noising_coef(strategy, n))
    check_dense(n)
    return squared_norms(workload.matrix(n) @ strategy.inverse(n))


def _noising_coef(strategy: ToeplitzStrategy, n: int) -> Array:
    """Return the first column of C⁻¹, in O(N log N) where back-substitution would be quadratic.

    The strategy's own `noising_coef` is what training runs; this one may differ from it by rounding.
    """
    if strategy.given_by_inverse or isinstance(strategy, BufferedStrategy):
        return strategy.noising_coef(n)
    column = strategy.strategy_coef(n)
    if n * np.count_nonzero(column) <= _MOST_PRODUCTS:
        return strategy.noising_coef(n)
    found = np.array([1.0 / column[0]])
    while len(found) < n:  # Newton's iteration doubles the number of coefficients that are right
        size = min(2 * len(found), n)
        padded = np.zeros(size)
        padded[: len(found)] = found
        residual = -toeplitz_product(column[:size], padded)
        residual[0] += 2.0
        found = toeplitz_product(padded, residual)
    return found


def _memory(value: float) -> float:
    memory = validation.real("memory", value)
    if memory < 1:
        raise validation.wrong("memory", "at least 1", memory)
    return memory


def _fraction(name: str, value: float) -> float:
    number = validation.real(name, value)
    if not 0 <= number < 1:
        raise validation.wrong(name, "in [0, 1)", number)
    return number
