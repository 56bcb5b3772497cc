"""Strategies, sampling and σ of jax-privacy, beside its own matrices, its own accounting and its own noise."""

from __future__ import annotations

import math
import re
import sys

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import batch_selection, noise_addition
from jax_privacy.experimental import accounting, execution_plan
from jax_privacy.experimental.monte_carlo import sample_generation
from jax_privacy.matrix_factorization import banded, buffered_toeplitz, streaming_matrix, toeplitz

import dpmf
from dpmf.errors import ArgumentError
from dpmf.integrations import jax_privacy as bridge
from dpmf.training.noise import NoiseStream

N = 12
COEF = np.array([1.0, 0.6, 0.3], dtype=np.float32)
BANDED = banded.ColumnNormalizedBanded.default(N, 3)
SAMPLING = batch_selection.BallsInBinsSampling(iterations=N, cycle_length=4)
with jax.enable_x64():
    BLT = buffered_toeplitz.BufferedToeplitz.build([0.9, 0.5], [0.3, 0.1])
    TOEPLITZ = np.asarray(toeplitz.materialize_lower_triangular(jnp.asarray(COEF), N), dtype=np.float64)
    BLT_MATRIX = np.asarray(BLT.as_streaming_matrix().materialize(N))
    BANDED_MATRIX = np.asarray(BANDED.materialize())
    BLT_STREAM, BLT_INVERSE = BLT.as_streaming_matrix(), BLT.inverse_as_streaming_matrix()

SOURCES = {
    "coefficients": (COEF, False, TOEPLITZ),
    "coefficients of jax": (jnp.asarray(COEF), False, TOEPLITZ),
    "matrix": (TOEPLITZ.astype(np.float32), False, TOEPLITZ),
    "inverse matrix": (np.linalg.inv(TOEPLITZ), True, TOEPLITZ),
    "inverse matrix, single": (np.linalg.inv(TOEPLITZ).astype(np.float32), True, TOEPLITZ),
    "inverse, streamed": (toeplitz.inverse_as_streaming_matrix(COEF), True, TOEPLITZ),
    "BLT": (BLT, False, BLT_MATRIX),
    "BLT, streamed": (BLT_STREAM, False, BLT_MATRIX),
    "BLT, inverse streamed": (BLT_INVERSE, True, BLT_MATRIX),
    "banded": (BANDED, False, BANDED_MATRIX),
    "banded, inverse streamed": (BANDED.inverse_as_streaming_matrix(), True, BANDED_MATRIX),
    "prefix sums": (streaming_matrix.prefix_sum(), False, np.tril(np.ones((N, N)))),
    "identity": (streaming_matrix.identity() * 2.0, False, 2 * np.eye(N)),
}


@pytest.mark.parametrize(("source", "noising", "expected"), SOURCES.values(), ids=SOURCES)
def test_the_matrix_is_the_same(source, noising: bool, expected: np.ndarray) -> None:
    found = bridge.strategy(source, iterations=N, noising=noising)
    np.testing.assert_allclose(found.matrix(N), expected, atol=2e-6, rtol=0)
    assert found.bandwidth(N) == max(int(i - j) for i, j in zip(*np.nonzero(expected), strict=True)) + 1
    assert bridge.column_norm(found, N) == pytest.approx(np.linalg.norm(expected, axis=0).max(), rel=1e-6)
    # What is Toeplitz is known to be: its Gram matrix takes O(bN), not O(bN²).
    if noising and np.ptp(np.diagonal(expected, -1)) == 0:
        assert isinstance(found, dpmf.strategies.ToeplitzStrategy)


def test_a_blt_serves_any_number_of_iterations() -> None:
    found = bridge.strategy(BLT)
    with jax.enable_x64():
        np.testing.assert_allclose(found.strategy_coef(50), np.asarray(BLT.toeplitz_coefs(50)), rtol=1e-12)
    product = np.convolve(found.strategy_coef(50), found.noising_coef(50))[:50]
    np.testing.assert_allclose(product, np.eye(50)[0], atol=1e-12)
    assert found == bridge.strategy(BLT)


def test_a_blt_is_streamed_by_its_buffers() -> None:
    """It takes one array per buffer, and gives C⁻¹Z with the C⁻¹ of jax-privacy."""
    mechanism = bridge.mechanism(BLT, SAMPLING)
    stream = NoiseStream(mechanism, [(3,)], seed=1, dtype="float64")
    assert (stream.plan.method, stream.plan.copies) == ("buffers", 2)
    rows = np.stack([stream.next()[0] for _ in range(N)])
    normals = NoiseStream(dpmf.Mechanism(dpmf.strategies.dpsgd(), mechanism.batching), [(3,)], seed=1, dtype="float64")
    z = np.stack([normals.next()[0] for _ in range(N)])
    with jax.enable_x64():
        np.testing.assert_allclose(rows, np.asarray(BLT_INVERSE.materialize(N)) @ z, atol=1e-12)


def test_single_precision_is_taken_exactly() -> None:
    assert bridge.strategy(COEF).strategy_coef(3).tolist() == [float(x) for x in COEF]


def test_jax_stays_in_single_precision() -> None:
    bridge.strategy(BLT_STREAM, iterations=4)
    assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.parametrize(("n", "b", "epochs"), [(12, 4, 3), (10, 4, 3), (4, 4, 1)])
def test_sampling(n: int, b: int, epochs: int) -> None:
    sampling = batch_selection.BallsInBinsSampling(iterations=n, cycle_length=b)
    found = bridge.batching(sampling)
    assert (found.epochs, found.batches_per_epoch, found.iterations) == (epochs, b, n)
    # A record takes part where dpmf says that its bin does.
    batches = list(sampling.batch_iterator(5, rng=0))
    for record in range(5):
        times = [t for t, batch in enumerate(batches) if record in batch]
        assert times == list(range(times[0], n, b))
        assert times[0] < b


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bridge.strategy(BLT_STREAM), "iterations must be given for a StreamingMatrix"),
        (lambda: bridge.strategy(BLT_STREAM, iterations=0), "iterations must be at least 1"),
        (lambda: bridge.strategy(BLT_STREAM, iterations=10**7), "iterations must be at most"),
        (lambda: bridge.strategy(BLT_INVERSE, iterations=N), "must be non-negative"),
        (lambda: bridge.strategy(COEF, noising=True), "noising must be False for an array of coefficients"),
        (lambda: bridge.strategy(BLT, noising=True), "noising must be False for a BufferedToeplitz"),
        (lambda: bridge.strategy(BANDED, noising=True), "noising must be False for a ColumnNormalizedBanded"),
        (lambda: bridge.strategy([1.0, -0.5]), "coefficients must be non-negative"),
        (lambda: bridge.strategy(np.ones((2, 2, 2))), "strategy must be an array of one or two dimensions"),
        (lambda: bridge.strategy("bsr"), "strategy must be an array of one or two dimensions"),
        (lambda: bridge.strategy(np.ones((2, 2)), noising=True), "lower-triangular inverse"),
        (lambda: bridge.strategy([[math.nan]], noising=True), "strategy must be real and finite"),
        (
            lambda: bridge.batching(batch_selection.CyclicPoissonSampling(sampling_prob=0.5, iterations=4)),
            "sampling must be a jax_privacy BallsInBinsSampling",
        ),
        (
            lambda: bridge.batching(batch_selection.BallsInBinsSampling(iterations=2, cycle_length=4)),
            "batches_per_epoch must be at most iterations = 2",
        ),
        (lambda: bridge.column_norm(COEF, 3), "source must be a dpmf strategy or mechanism"),
        (
            lambda: bridge.unit_column_noise_multiplier(bridge.mechanism(COEF, SAMPLING), 0.0),
            "noise_multiplier must be positive",
        ),
    ],
)
def test_wrong_arguments_are_named(call, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)) as error:
        call()
    assert "\n" not in str(error.value)


def test_negative_blt_is_refused_when_used() -> None:
    with jax.enable_x64():
        bad = buffered_toeplitz.BufferedToeplitz.build([0.9], [-0.3])
    with pytest.raises(ValueError, match="strategy must be non-negative"):
        bridge.strategy(bad).strategy_coef(3)


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    with pytest.raises(dpmf.MissingExtraError, match=re.escape("pip install 'dpmf[jax]'")):
        bridge.strategy(COEF)


# --- σ


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_conversion_factor_against_its_bandmf_event(scale: float) -> None:
    """With sampling probability one both say the same of one mechanism, and only after the conversion.

    Each record takes part in every fourth iteration, C has three bands: a Gaussian mechanism of sensitivity √3·‖c‖. The
    Gaussian accountant of dpmf does not amplify either.
    """
    mechanism = bridge.mechanism(scale * COEF, SAMPLING)
    sigma, delta = 2.0 * scale, 1e-5
    ours = dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=delta, accountant="gaussian", direction="remove")

    def theirs(noise_multiplier: float) -> float:
        event = accounting.amplified_bandmf_event(noise_multiplier, N, num_bands=4, sampling_prob=1.0)
        return dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(delta)

    factor = scale * float(np.linalg.norm(COEF.astype(np.float64)))
    assert bridge.unit_column_noise_multiplier(mechanism, sigma) == pytest.approx(sigma / factor, rel=1e-12)
    assert theirs(sigma / factor) == pytest.approx(ours.epsilon, rel=1e-3)
    assert theirs(sigma) < 0.9 * ours.epsilon  # what forgetting the conversion would claim


def test_its_execution_plan_adds_the_noise_of_ours() -> None:
    """The same key, dpmf's σ as stddev, the converted σ in the plan: the same numbers."""
    mechanism = bridge.mechanism(COEF, SAMPLING)
    sigma = 2.5
    config = execution_plan.BandMFExecutionPlanConfig(
        iterations=N,
        strategy=COEF,
        epsilon=None,
        delta=None,
        noise_multiplier=bridge.unit_column_noise_multiplier(mechanism, sigma),
        noise_seed=0,
    )
    ours = noise_addition.matrix_factorization_privatizer(
        toeplitz.inverse_as_streaming_matrix(COEF), stddev=sigma, prng_key=0, dtype=np.float32
    )
    gradient = jnp.zeros(3)
    states = [privatizer.init(gradient) for privatizer in (config.plan.noise_addition_transform, ours)]
    for _ in range(3):
        noise = []
        for i, privatizer in enumerate((config.plan.noise_addition_transform, ours)):
            noisy, states[i] = privatizer.update(gradient, states[i])
            noise.append(np.asarray(noisy))
        assert np.all(noise[0] != 0)
        np.testing.assert_allclose(noise[0], noise[1], rtol=1e-5)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_its_monte_carlo_takes_the_strategy_as_given(direction: str) -> None:
    """Its estimate at dpmf's σ is dpmf's δ; at the σ of columns of norm one it is not."""
    coef = np.array([1.0, 0.9, 0.8])
    mechanism = bridge.mechanism(coef, SAMPLING)
    sigma, epsilon, samples = 3.0, 0.5, 3000
    bound = dpmf.delta(
        mechanism, noise_multiplier=sigma, epsilon=epsilon, direction=direction, accountant="chain", with_lower=True
    )

    def theirs(noise_multiplier: float) -> tuple[float, float]:
        losses, _ = sample_generation.get_privacy_loss_sample(
            SAMPLING, noise_multiplier, coef, seed=1, positive_sample=direction == "remove", num_samples=samples
        )
        values = -np.expm1(np.minimum(epsilon - losses, 0.0))
        return float(values.mean()), 5 * float(values.std()) / math.sqrt(samples)

    estimate, margin = theirs(sigma)
    assert bound.lower <= estimate + margin
    assert estimate - margin <= bound.delta <= (estimate + margin) * 1.05
    other, margin = theirs(bridge.unit_column_noise_multiplier(mechanism, sigma))
    assert other - margin > 1.3 * bound.delta


def test_the_recipe() -> None:
    """One line from jax-privacy's objects to the stddev of its privatizer, and what it promises is dpmf's."""
    found = bridge.calibrate(COEF, SAMPLING, target_epsilon=2.0, target_delta=1e-5, accountant="renyi")
    direct = dpmf.calibrate(
        dpmf.Mechanism(dpmf.strategies.coefficients(COEF), dpmf.BallsInBins(3, 4)),
        target_epsilon=2.0,
        target_delta=1e-5,
        accountant="renyi",
    )
    assert found == direct
    inverse = toeplitz.inverse_as_streaming_matrix(COEF)
    streamed = bridge.calibrate(
        inverse, SAMPLING, noising=True, target_epsilon=2.0, target_delta=1e-5, accountant="renyi"
    )
    assert streamed.noise_multiplier == pytest.approx(found.noise_multiplier, rel=2e-4)
