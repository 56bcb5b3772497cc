"""What a workload is, and the five kinds of them, as immutable values."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from dpmf.errors import ArgumentError
from dpmf.numerics import Array
from dpmf.strategies.base import lower_triangular, toeplitz_product, toeplitz_transposed_product

Loss: TypeAlias = Callable[[Array], tuple[float, Array]]

_NEGLIGIBLE = 1e-17  # the part of the sum of the coefficients of C⁻¹ that is left off at their end


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
        return np.cumsum(toeplitz_product(self.coef(len(noising_coef)), noising_coef) ** 2)

    def loss(self, iterations: int) -> Loss:
        coef = self.coef(iterations)
        weights = np.arange(iterations, 0, -1) / iterations

        def evaluate(noising_coef: Array) -> tuple[float, Array]:
            entries = toeplitz_product(coef, noising_coef)
            weighted = weights * entries
            return float(weighted @ entries), 2 * toeplitz_transposed_product(coef, weighted)

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
            needed = f"must be a matrix of N × N with N = {iterations} steps"
            raise ArgumentError("workload", f"{needed}, got {self.size} × {self.size}")

    @cached_property
    def _entries(self) -> Array:
        return np.frombuffer(self.data, dtype=np.float64).reshape(self.size, self.size)

    def matrix(self, iterations: int) -> Array:
        self.check_iterations(iterations)
        return self._entries

    def squared_rows(self, noising_coef: Array) -> Array:
        return squared_norms(self.matrix(len(noising_coef)) @ lower_triangular(noising_coef))

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


def squared_norms(dense: Array) -> Array:
    return np.asarray(np.einsum("ij,ij->i", dense, dense))
