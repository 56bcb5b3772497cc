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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from dpmf import validation
from dpmf.errors import ArgumentError
from dpmf.numerics import Array
from dpmf.strategies import _number_files as files
from dpmf.strategies.base import ToeplitzStrategy, check_dense, lower_triangular
from dpmf.strategies.buffered import BufferedStrategy

if TYPE_CHECKING:
    from dpmf.mechanism import Mechanism

NAMES = ("prefix", "damped", "momentum", "schedule", "matrix")
SCHEDULES = ("constant", "cosine", "linear")

Loss: TypeAlias = Callable[[Array], tuple[float, Array]]

_MOST_PRODUCTS = 10**9  # of back-substitution; a longer one is replaced by Fourier transforms
_NEGLIGIBLE = 1e-17  # the part of the sum of the coefficients of C⁻¹ that is left off at their end


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


class Workload(ABC):
    """A lower-triangular matrix A that maps the noise of single iterations to the model."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How the workload prints, e.g. ``damped sums, memory 100``."""

    @property
    def key(self) -> str:
        """A text that is the same for equal workloads only; optimised strategies are cached under it."""
        return repr(self)

    def check_iterations(self, iterations: int) -> None:  # noqa: B027 - most workloads exist for every N
        """Raise ValueError if the workload does not exist for this many iterations."""

    @abstractmethod
    def matrix(self, iterations: int) -> Array:
        """Return A as a dense array."""

    @abstractmethod
    def squared_rows(self, noising_coef: Array) -> Array:
        """Return the squared norms of the rows of A·D, for the Toeplitz matrix D with this first column."""

    @abstractmethod
    def loss(self, iterations: int) -> Loss:
        """Return the function from the first column of D to (‖A·D‖²/N, its gradient)."""

    def __str__(self) -> str:
        return self.name


class ToeplitzWorkload(Workload):
    """A workload that is the same at every iteration. Row norms of A·D are partial sums of one sequence."""

    @abstractmethod
    def coef(self, iterations: int) -> Array:
        """Return the first column of A."""

    def matrix(self, iterations: int) -> Array:
        return lower_triangular(self.coef(iterations))

    def squared_rows(self, noising_coef: Array) -> Array:
        return np.cumsum(product(self.coef(len(noising_coef)), noising_coef) ** 2)

    def loss(self, iterations: int) -> Loss:
        coef = self.coef(iterations)
        weights = np.arange(iterations, 0, -1) / iterations

        def evaluate(noising_coef: Array) -> tuple[float, Array]:
            entries = product(coef, noising_coef)
            weighted = weights * entries
            return float(weighted @ entries), 2 * transposed_product(coef, weighted)

        return evaluate


@dataclass(frozen=True)
class Damped(ToeplitzWorkload):
    """A[t, s] = β^(t−s) with β = 1 − 1/memory; an infinite memory gives prefix sums."""

    memory: float

    @property
    def name(self) -> str:
        return "prefix sums" if math.isinf(self.memory) else f"damped sums, memory {self.memory:g}"

    @property
    def kept(self) -> float:
        """β, the part of the model that one iteration keeps."""
        return 1.0 - 1.0 / self.memory

    def coef(self, iterations: int) -> Array:
        return np.asarray(self.kept ** np.arange(iterations, dtype=np.float64))


@dataclass(frozen=True)
class Momentum(ToeplitzWorkload):
    """v ← β·v + g and x ← (1 − decay)·x + v, the update of stochastic gradient descent with learning rate 1."""

    beta: float
    decay: float

    @property
    def name(self) -> str:
        return f"momentum {self.beta:g}" + (f", weight decay {self.decay:g}" if self.decay else "")

    def coef(self, iterations: int) -> Array:
        from scipy.signal import lfilter

        velocity = self.beta ** np.arange(iterations, dtype=np.float64)
        return np.asarray(lfilter([1.0], [1.0, self.decay - 1.0], velocity), dtype=np.float64)


@dataclass(frozen=True, repr=False)
class Scheduled(Workload):
    """v ← β·v + g and x ← kept·x + rate_t·v: A = L·diag(rates)·R with Toeplitz matrices L and R.

    Rates that are given by name are made for the number of iterations, and have mean square one.
    """

    shape: str
    warm_up: float
    data: bytes | None
    memory: float
    beta: float

    @property
    def name(self) -> str:
        rates = self.shape if self.data is None else f"of {len(self.data) // 8} learning rates"
        parts = [f"schedule {rates}"]
        parts += [f"warm-up {self.warm_up:g}"] if self.warm_up else []
        parts += [f"memory {self.memory:g}"] if math.isfinite(self.memory) else []
        parts += [f"momentum {self.beta:g}"] if self.beta else []
        return ", ".join(parts)

    @property
    def key(self) -> str:
        digest = hashlib.sha256(self.data or b"").hexdigest()[:32]
        return f"Scheduled({self.shape}, {self.warm_up!r}, {digest}, {self.memory!r}, {self.beta!r})"

    def __repr__(self) -> str:
        return self.key

    def check_iterations(self, iterations: int) -> None:
        if self.data is not None and len(self.data) // 8 != iterations:
            raise ArgumentError(
                "schedule", f"must have one learning rate for each of the {iterations} iterations, got "
                f"{len(self.data) // 8}; a schedule by name fits every length",
            )  # fmt: skip

    @property
    def _kept(self) -> float:
        return 1.0 - 1.0 / self.memory

    def rates(self, iterations: int) -> Array:
        """Return the learning rates."""
        self.check_iterations(iterations)
        if self.data is not None:
            return np.frombuffer(self.data, dtype=np.float64)
        place = (np.arange(iterations) + 0.5) / iterations
        after = np.clip((place - self.warm_up) / (1 - self.warm_up), 0.0, 1.0)
        shapes = {"constant": np.ones(iterations), "cosine": (1 + np.cos(np.pi * after)) / 2, "linear": 1 - after}
        rates = shapes[self.shape]
        if self.warm_up:
            rates = rates * np.minimum(place / self.warm_up, 1.0)
        return np.asarray(rates / math.sqrt(float(np.mean(rates**2))))

    def matrix(self, iterations: int) -> Array:
        places = np.arange(iterations, dtype=np.float64)
        left, right = lower_triangular(self._kept**places), lower_triangular(self.beta**places)
        return np.asarray((left * self.rates(iterations)) @ right)

    def _filtered(self, noising_coef: Array) -> Array:
        """The first column of R·D."""
        from scipy.signal import lfilter

        return np.asarray(lfilter([1.0], [1.0, -self.beta], noising_coef)) if self.beta else noising_coef

    def squared_rows(self, noising_coef: Array) -> Array:
        from dpmf.kernels.workloads import scheduled_rows

        n = len(noising_coef)
        column = self._filtered(noising_coef)
        ends = np.cumsum(np.abs(column)[::-1])[::-1]
        column = column[: max(1, int(np.count_nonzero(ends > _NEGLIGIBLE * ends[0])))]
        rows = np.zeros(2 * n)
        scheduled_rows(np.ascontiguousarray(column), self.rates(n), self._kept, rows)
        return rows[:n]

    def loss(self, iterations: int) -> Loss:
        from scipy.signal import lfilter

        from dpmf.kernels.workloads import scheduled_gradient

        rates = self.rates(iterations)

        def evaluate(noising_coef: Array) -> tuple[float, Array]:
            gradient = np.zeros(iterations)
            column = np.ascontiguousarray(self._filtered(noising_coef))
            total = scheduled_gradient(column, rates, self._kept, gradient)
            back = lfilter([1.0], [1.0, -self.beta], gradient[::-1])[::-1] if self.beta else gradient
            return total / iterations, np.asarray(back) / iterations

        return evaluate


@dataclass(frozen=True, repr=False)
class ExplicitWorkload(Workload):
    """Any lower-triangular matrix of one size. Workloads are equal if their entries are."""

    size: int
    digest: str
    data: bytes = field(compare=False)

    @property
    def name(self) -> str:
        return f"workload matrix {self.size}×{self.size}"

    def __repr__(self) -> str:
        return f"ExplicitWorkload({self.size}, {self.digest})"

    def check_iterations(self, iterations: int) -> None:
        if iterations != self.size:
            needed = f"must be a matrix of N × N with N = {iterations} iterations (gaps included)"
            raise ArgumentError("workload", f"{needed}, got {self.size} × {self.size}")

    @cached_property
    def _entries(self) -> Array:
        return np.frombuffer(self.data, dtype=np.float64).reshape(self.size, self.size)

    def matrix(self, iterations: int) -> Array:
        self.check_iterations(iterations)
        return self._entries

    def squared_rows(self, noising_coef: Array) -> Array:
        return _squared_rows(self.matrix(len(noising_coef)) @ lower_triangular(noising_coef))

    def loss(self, iterations: int) -> Loss:
        """The loss is a quadratic form: its entry (j, l) sums (AᵀA)[s+j, s+l] over s, along a diagonal."""
        entries = self.matrix(iterations)
        form = entries.T @ entries / iterations
        for s in range(iterations - 2, -1, -1):
            form[s, : iterations - 1] += form[s + 1, 1:]

        def evaluate(noising_coef: Array) -> tuple[float, Array]:
            image = form @ noising_coef
            return float(image @ noising_coef), 2 * image

        return evaluate


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
      mechanism: the strategy and the batching; iterations of gaps count like all others.
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      workload: how the noise of single iterations adds up.

    For Toeplitz strategies this takes O(N log N), and with a learning-rate schedule N times the length of C⁻¹.
    """
    sigma = validation.positive("noise_multiplier", noise_multiplier)
    rows = squared_rows(mechanism, workload)
    return IterateError(*(sigma * math.sqrt(float(value)) for value in (rows.mean(), rows.max(), rows[-1])))


def squared_rows(mechanism: Mechanism, workload: Workload) -> Array:
    """Return the squared norms of the rows of A·C⁻¹."""
    if not isinstance(workload, Workload):
        raise validation.wrong("workload", "a dpmf workload", workload)
    strategy, n = mechanism.strategy, mechanism.batching.iterations
    workload.check_iterations(n)
    if isinstance(strategy, ToeplitzStrategy):
        return workload.squared_rows(_noising_coef(strategy, n))
    check_dense(n)
    return _squared_rows(workload.matrix(n) @ strategy.inverse(n))


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
        residual = -product(column[:size], padded)
        residual[0] += 2.0
        found = product(padded, residual)
    return found


def product(left: Array, right: Array) -> Array:
    """Return the first column of the product of two lower-triangular Toeplitz matrices of one size."""
    from scipy.signal import fftconvolve

    return np.asarray(fftconvolve(left, right)[: len(left)])


def transposed_product(left: Array, right: Array) -> Array:
    """Return Lᵀ·r, for the lower-triangular Toeplitz matrix L with this first column."""
    return product(left, right[::-1])[::-1]


def _squared_rows(dense: Array) -> Array:
    return np.asarray(np.einsum("ij,ij->i", dense, dense))


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
