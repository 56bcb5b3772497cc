"""Strategies, sampling and σ of jax-privacy, beside its own matrices, its own accounting and its own noise."""

from __future__ import annotations

import math
import re
import sys
import types
from fractions import Fraction

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flint import fmpq, fmpq_mat
from jax_privacy import batch_selection, matrix_factorization, noise_addition
from jax_privacy.experimental.monte_carlo import sample_generation
from jax_privacy.matrix_factorization import banded, buffered_toeplitz, streaming_matrix, toeplitz

import dpmf
from dpmf import lower_bounds
from dpmf.errors import ArgumentError
from dpmf.integrations import jax_privacy as bridge
from dpmf.strategies import base
from dpmf.training.noise import NoiseStream

try:  # the newest release
    from jax_privacy.experimental import accounting, execution_plan
except ImportError:  # its development head
    from jax_privacy import accounting, execution_plan

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
    bandwidth = max(int(i - j) for i, j in zip(*np.nonzero(expected), strict=True)) + 1
    if noising:  # entries outside the band are tiny, but they are what runs, and nothing is set to zero
        assert found.bandwidth(N) >= bandwidth
    else:
        assert found.bandwidth(N) == bandwidth
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("toeplitz_noising", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_an_inverse_covers_the_exact_one(dtype: type, toeplitz_noising: bool, seed: int) -> None:
    """Against exact rational inversion: no entry is smaller than that of the matrix that runs, or much larger."""
    rng = np.random.default_rng(seed)
    if toeplitz_noising:
        column = np.concatenate(([1.0], -rng.random(N - 1) * rng.choice([0.01, 0.08], N - 1)))
        noising = np.array([[column[i - j] if i >= j else 0.0 for j in range(N)] for i in range(N)]).astype(dtype)
    else:
        noising = np.linalg.inv(np.tril(rng.random((N, N)) + 1e-3) + np.eye(N)).astype(dtype)
        noising = np.tril(noising)
    exact = fmpq_mat(N, N, [fmpq(*float(x).as_integer_ratio()) for x in noising.ravel()]).inv()
    truth = np.array([[abs(Fraction(int(x.p), int(x.q))) for x in row] for row in exact.tolist()])
    strategy = bridge.strategy(noising, noising=True)
    assert isinstance(strategy, dpmf.strategies.ToeplitzStrategy) == toeplitz_noising
    found = strategy.matrix(N)
    for (i, j), value in np.ndenumerate(found):
        assert Fraction(float(value)) >= truth[i, j]
        assert value <= float(truth[i, j]) + 1e-13 * float(truth.max())


SMALL_BUT_REAL = [(400, 1, 4e-5, "gaussian"), (4000, 10, 4.5e-4, "best")]


@pytest.mark.parametrize(("n", "b", "tail", "accountant"), SMALL_BUT_REAL)
def test_small_entries_of_an_inverse_count(n: int, b: int, tail: float, accountant: str) -> None:
    """σ calibrated from a C⁻¹ in single precision holds for the mechanism that runs, whose C has small entries.

    They were set to zero: for the second case the lower bound on δ was 240 times the target.
    """
    column = np.concatenate(([1.0], np.full(n - 1, tail)))
    noising = np.tril(scipy.linalg.toeplitz(base.invert_series(column, n))).astype(np.float32)
    bins = dpmf.BallsInBins.from_iterations(n, b)
    found = bridge.calibrate(noising, bins, noising=True, target_epsilon=1.0, target_delta=1e-5, accountant=accountant)
    runs = np.abs(scipy.linalg.solve_triangular(noising.astype(np.float64), np.eye(n), lower=True))
    assert runs[-1, 0] == pytest.approx(tail, rel=1e-2)
    mechanism = dpmf.Mechanism(dpmf.strategies.matrix(runs), bins)
    for direction in ("remove", "add"):
        assert lower_bounds.lower_delta(mechanism, found.noise_multiplier, 1.0, direction) <= 1e-5


def test_negative_entries_are_refused_unless_rounding_explains_them() -> None:
    noising = np.linalg.inv(np.eye(N) + 0.6 * np.eye(N, k=-1)).astype(np.float32)
    exact = np.linalg.inv(noising.astype(np.float64))
    assert exact.min() < 0  # single precision
    assert np.all(bridge.strategy(noising, noising=True).matrix(N) >= np.abs(exact))
    noising[5, 2] += 1e-3
    with pytest.raises(ArgumentError, match=r"strategy must be non-negative, got -0.001\d* at \[5, 2\] of C") as error:
        bridge.strategy(noising, noising=True)
    assert error.value.argument == "strategy"


def test_an_inverse_that_double_precision_cannot_give_is_refused() -> None:
    for column in ([1.0, -40.0], [1e-8, -1.0, 0.5]):
        noising = np.tril(scipy.linalg.toeplitz(base.pad_or_cut(np.array(column), 40)))
        for given in (noising, noising + np.diag(np.linspace(0, 1e-9, 40))):
            with pytest.raises(ArgumentError, match="well enough conditioned"):
                bridge.strategy(given, noising=True)


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
    with pytest.raises(dpmf.MissingExtraError, match=re.escape("pip install '.[jax]' in a clone of dpmf")):
        bridge.strategy(COEF)


def test_names_that_moved_are_found_or_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = batch_selection.BallsInBinsSampling(iterations=4, cycle_length=2)
    elsewhere = types.ModuleType("jax_privacy.experimental.batch_selection")
    elsewhere.BallsInBinsSampling = batch_selection.BallsInBinsSampling  # type: ignore[attr-defined]
    monkeypatch.delattr(batch_selection, "BallsInBinsSampling")
    with pytest.raises(dpmf.MissingExtraError, match="there is no BallsInBinsSampling in jax_privacy") as error:
        bridge.batching(sampling)
    assert str(error.value).startswith(
        "dpmf.integrations.jax_privacy cannot use the installed version of jax-privacy: "
    )
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, elsewhere.__name__, elsewhere)
    assert bridge.batching(sampling) == dpmf.BallsInBins(2, 2)
    monkeypatch.setitem(sys.modules, "jax_privacy.matrix_factorization.banded", None)  # as if the module were gone
    monkeypatch.delattr(matrix_factorization, "banded")
    with pytest.raises(dpmf.MissingExtraError, match="there is no ColumnNormalizedBanded in "):
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


def execution_plan_of(noise_multiplier: float):
    """jax-privacy's plan for `COEF`, by the name and arguments of its release or of its development head."""
    given = {"iterations": N, "strategy": COEF, "noise_multiplier": noise_multiplier}
    if hasattr(execution_plan, "BandMFExecutionPlanConfig"):
        return execution_plan.BandMFExecutionPlanConfig(**given, epsilon=None, delta=None, noise_seed=0).plan
    config = execution_plan.BandMFConfig(**given, expected_participations=1)
    return config.make(execution_plan.PerformanceFlags(noise_seed=0))


def test_its_execution_plan_adds_the_noise_of_ours() -> None:
    """The same key, dpmf's σ as stddev, the converted σ in the plan: the same numbers."""
    mechanism = bridge.mechanism(COEF, SAMPLING)
    sigma = 2.5
    theirs = execution_plan_of(bridge.unit_column_noise_multiplier(mechanism, sigma)).noise_addition_transform
    ours = noise_addition.matrix_factorization_privatizer(
        toeplitz.inverse_as_streaming_matrix(COEF), stddev=sigma, prng_key=0, dtype=np.float32
    )
    gradient = jnp.zeros(3)
    states = [privatizer.init(gradient) for privatizer in (theirs, ours)]
    for _ in range(3):
        noise = []
        for i, privatizer in enumerate((theirs, ours)):
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
