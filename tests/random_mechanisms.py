"""Random small mechanisms for hypothesis, and the settings under which they are drawn."""

from __future__ import annotations

import math

import numpy as np
import oracles
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism

DIRECTIONS = ("remove", "add")


def random_settings(examples: int) -> settings:
    return settings(
        deadline=None, max_examples=examples, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


ENTRIES = st.one_of(st.just(0.0), st.floats(0.01, 1.5), st.sampled_from([0.5, 1.0]))


@st.composite
def mechanisms(draw: st.DrawFn, most_bins: int = 3) -> Mechanism:
    b = draw(st.integers(1, most_bins))
    n = draw(st.integers(b, 3 * b))
    if draw(st.booleans()):
        strategy: strategies.Strategy = strategies.coefficients(
            [draw(st.floats(0.1, 1.5)), *draw(st.lists(ENTRIES, max_size=n))]
        )
    else:
        full = np.zeros((n, n))
        full[np.tril_indices(n)] = draw(st.lists(ENTRIES, min_size=n * (n + 1) // 2, max_size=n * (n + 1) // 2))
        full[0, 0] = draw(st.floats(0.1, 1.5))
        strategy = strategies.matrix(full)
    return Mechanism(strategy, BallsInBins.from_iterations(n, b))


def random_matrix(n: int, seed: int, zeros: float = 0.3) -> np.ndarray:
    """A random lower-triangular matrix with so large a share of zeros."""
    rng = np.random.default_rng(seed)
    full = np.tril(rng.random((n, n)) * (rng.random((n, n)) > zeros))
    full[0, 0] = 1.0
    return full


def signal_to_noise(mechanism: Mechanism, sigma: float) -> np.ndarray:
    """S from the definition: the package's own Gram matrix is not trusted here."""
    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    return oracles.gram(mechanism.strategy.matrix(n), b) / sigma**2


# δ(0.2) of random_matrix(8, 0) in two epochs of four batches, at σ² = max G/0.6, when a record is removed. Quadrature
# in three dimensions (oracles.delta, tolerance 1e-6) takes thirteen seconds to say so; test_own_bin.py compares it with
# samples.
FOUR_BINS_DELTA = 0.13618775313913
