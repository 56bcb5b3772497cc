"""Objects of jax-privacy through the bridge: no bound may lie below the truth about the mechanism that runs.

The matrix that runs is found here by means of its own: the entries as given, the formula of a buffered matrix, or the
inverse of C⁻¹ by substitution in extended precision. Small entries are drawn on purpose: they count as others do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from soundness.judge import Outcome, judged
from soundness.truth import true_delta

Rng = np.random.Generator
Array = np.ndarray


@dataclass(frozen=True)
class Drawn:
    """An object, whether it is C⁻¹, and the matrix that runs."""

    kind: str
    source: Any
    noising: bool
    runs: Array


def exact_inverse(noising: Array) -> Array:
    """The inverse of a lower-triangular matrix, by substitution in extended precision."""
    n = len(noising)
    d = noising.astype(np.longdouble)
    out = np.zeros((n, n), dtype=np.longdouble)
    for i in range(n):
        out[i] = -(d[i, :i] @ out[:i])
        out[i, i] += 1
        out[i] /= d[i, i]
    return out.astype(np.float64)


def _toeplitz(column: Array) -> Array:
    n = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def _column(rng: Rng, n: int) -> Array:
    """A first column of C: a band, and often a tail of entries that are small but not zero."""
    column = np.zeros(n)
    band = int(rng.integers(1, min(n, 5) + 1))
    column[:band] = np.concatenate(([1.0], rng.random(band - 1)))
    if rng.random() < 0.7:
        column[band:] = 10.0 ** rng.uniform(-9, -2)
    return column


def draw(rng: Rng, n: int) -> Drawn:
    """An object for n iterations; of those that are C⁻¹ some are of no C that is non-negative."""
    import jax
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    kind = str(rng.choice(["coefficients", "matrix", "inverse", "Toeplitz inverse", "stream", "inverse stream", "BLT"]))
    dtype = np.float32 if rng.random() < 0.5 else np.float64
    column = _column(rng, n).astype(dtype)
    c = _toeplitz(column.astype(np.float64))
    if kind == "coefficients":
        return Drawn(kind, column, False, c)
    if kind == "matrix":
        entries = (c + np.tril(rng.random((n, n)) * 10.0 ** rng.uniform(-9, -1))).astype(dtype)
        return Drawn(kind, entries, False, entries.astype(np.float64))
    if kind.endswith("inverse"):
        if kind == "inverse":
            c = c + np.tril(rng.random((n, n)) * 10.0 ** rng.uniform(-9, -1))
        noising = exact_inverse(c).astype(dtype)
        if rng.random() < 0.15:
            noising = np.tril(np.abs(noising))
        return Drawn(kind, noising, True, exact_inverse(noising))
    if kind == "BLT":
        count = int(rng.integers(1, 4))
        decay, scale = rng.random(count), rng.random(count) * rng.choice([0.05, 0.5])
        if rng.random() < 0.3:
            scale[0] *= -1
        with jax.enable_x64():
            blt = buffered_toeplitz.BufferedToeplitz.build(decay.tolist(), scale.tolist())
        powers = decay.astype(np.longdouble)[None, :] ** np.arange(n - 1)[:, None]
        return Drawn(kind, blt, False, _toeplitz(np.append(1.0, (powers @ scale.astype(np.longdouble)).astype(float))))
    with jax.enable_x64():
        given = jnp.asarray(column.astype(np.float64))
        if kind == "stream":
            stream = toeplitz.inverse_as_streaming_matrix(jnp.asarray(exact_inverse(c)[:, 0]))
            return Drawn(kind, stream, False, np.asarray(stream.materialize(n)))
        stream = toeplitz.inverse_as_streaming_matrix(given)
        return Drawn(kind, stream, True, exact_inverse(np.asarray(stream.materialize(n))))


def bridge_object(rng: Rng, index: int, directory: Path) -> Outcome:
    """A claim about an object, beside the truth and dpmf's own lower bound for the matrix that runs."""
    import dpmf
    from dpmf import lower_bounds
    from dpmf.accountants import Gaussian, Renyi
    from dpmf.integrations import jax_privacy as bridge

    b = int(rng.choice([1, 1, 2, 3]))
    n = b * int(rng.integers(1, 60 // b))
    drawn = draw(rng, n)
    bins = dpmf.BallsInBins.from_iterations(n, b)
    entries = np.abs(drawn.runs)
    means = np.stack([entries[:, i::b].sum(axis=1) for i in range(b)], axis=1)
    gram = means.T @ means
    sigma = math.sqrt(float(gram.max()) / math.exp(rng.uniform(math.log(1e-2), math.log(10.0))))
    epsilon = float(rng.uniform(0.1, 3.0))
    way = "remove" if rng.random() < 0.5 else "add"
    accountant = Gaussian() if b == 1 else Renyi(work_budget=1e4)

    def claim() -> float:
        mechanism = bridge.mechanism(drawn.source, bins, noising=drawn.noising)
        return dpmf.delta(
            mechanism, noise_multiplier=sigma, epsilon=epsilon, direction=way, accountant=accountant
        ).delta

    def accept(answer: Any) -> str | None:
        truth = true_delta(gram / sigma**2, epsilon, way)
        mechanism = dpmf.Mechanism(dpmf.strategies.matrix(entries), bins)
        lower = lower_bounds.lower_delta(mechanism, sigma, epsilon, way)
        if answer < max(truth.low, lower):
            return f"{drawn.kind}, N={n}, b={b}: δ = {answer!r} is claimed, it is at least {truth.low!r} and {lower!r}"
        # A negative entry is taken by its size only where rounding explains it.
        if drawn.runs.min() < -1e-4 * entries.max():
            return f"{drawn.kind}, N={n}: C has the entry {drawn.runs.min()!r}, and was accepted"
        return None

    return judged(claim, (directory,), accept)
