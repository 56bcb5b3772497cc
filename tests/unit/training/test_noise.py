"""Streaming C⁻¹Z: the rows of the dense product for every strategy, their covariance, and states that come back."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.errors import TrainingError
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Strategy
from dpmf.strategies.streaming import how_to_stream
from dpmf.strategies.unamplified import BLT
from dpmf.training import NoiseStream, _backends
from dpmf.training._sources import make_source

N = 24
SHAPES = [(3, 5), (), (7,), (0, 2)]


def random_matrix(bandwidth: int) -> np.ndarray:
    rng = np.random.default_rng(bandwidth)
    full = np.tril(rng.uniform(0.1, 1, (N, N))) * (np.subtract.outer(np.arange(N), np.arange(N)) < bandwidth)
    return full + np.eye(N)


class FixedBLT(BLT):
    """Two buffers that no optimiser has to find."""

    def buffers(self, iterations: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0.9, 0.4]), np.array([0.2, 0.3])


BLT2 = FixedBLT(2, "max")

STRATEGIES: dict[str, tuple[Strategy, str, int]] = {
    "dpsgd": (strategies.dpsgd(), "back-substitution", 0),
    "bsr4": (strategies.bsr(4), "back-substitution", 3),
    "bsr1": (strategies.bsr(1), "back-substitution", 0),
    "bisr4": (strategies.bisr(4), "convolution", 3),
    "bisr2": (strategies.bisr(2), "convolution", 1),
    "bandmf3": (strategies.bandmf(3), "back-substitution", 2),
    "bandinvmf3": (strategies.bandinvmf(3), "convolution", 2),
    "blt2": (BLT2, "buffers", 2),
    "scaled identity": (strategies.coefficients([2.5]), "back-substitution", 0),
    "coefficients": (strategies.coefficients([2.0, 0.0, 0.5]), "back-substitution", 2),
    "bsr4 normalised": (strategies.bsr(4).normalized(), "back-substitution", 3),
    "blt2 normalised": (BLT2.normalized(), "buffers", 2),
    "bsr4, each column": (strategies.bsr(4).normalized("each"), "back-substitution", 3),
    "banded matrix": (strategies.matrix(random_matrix(3)), "back-substitution", 2),
    "full matrix": (strategies.matrix(random_matrix(N)), "regeneration", 0),
    "full Toeplitz": (strategies.coefficients(1 / np.arange(1, N + 1)), "regeneration", 0),
    "full, normalised": (strategies.coefficients(1 / np.arange(1, N + 1)).normalized(), "regeneration", 0),
}


def mechanism(strategy: Strategy) -> Mechanism:
    return Mechanism(strategy, BallsInBins(4, 6))


def stream(strategy: Strategy, **options: Any) -> NoiseStream:
    given = {"shapes": SHAPES, "seed": 7, "max_copies": 8, "dtype": "float64", **options}
    return NoiseStream(mechanism(strategy), **given)


def flat(rows: list[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(row).reshape(-1) for row in rows])


def rows_of(noise: NoiseStream, count: int = N) -> np.ndarray:
    return np.stack([flat(noise.next()) for _ in range(count)])


def normals(**options: Any) -> np.ndarray:
    """Z itself: the noise of the identity."""
    return rows_of(stream(strategies.dpsgd(), **options))


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 3e-5)])
@pytest.mark.parametrize("source", ["fast", "secure"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_rows_are_those_of_the_dense_product(
    name: str, source: str, dtype: str, tolerance: float, backend: str
) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    strategy, method, copies = STRATEGIES[name]
    noise = stream(strategy, dtype=dtype, backend=backend, source=source)
    assert (noise.plan.method, noise.plan.copies) == (method, copies)
    assert how_to_stream(noise.mechanism.strategy, N, 8) == (method, copies)
    bound = noise.mechanism.strategy  # optimised strategies are completed by the mechanism
    dense = np.linalg.solve(bound.matrix(N), normals(dtype=dtype, source=source).astype(np.float64))
    found = rows_of(noise)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, dense, atol=tolerance * np.abs(dense).max(), rtol=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_pieces_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(stream(STRATEGIES[name][0]))
    monkeypatch.setattr(_backends, "CHUNK", 4)
    assert np.array_equal(rows_of(stream(STRATEGIES[name][0])), whole)


@pytest.mark.parametrize("name", ["dpsgd", "bsr4", "bisr4", "blt2", "full matrix"])
@pytest.mark.parametrize("source", ["fast", "secure"])
def test_the_noise_has_the_covariance_accounted_for(name: str, source: str) -> None:
    """C times the noise must be white: mean 0, covariance I over the iterations, normal marginals."""
    draws = 20_000
    noise = stream(STRATEGIES[name][0], shapes=[(draws,)], dtype="float32", source=source)
    white = noise.mechanism.strategy.matrix(N) @ rows_of(noise).astype(np.float64)
    covariance = white @ white.T / draws
    # Entries have standard deviation √(1/n) off the diagonal, √(2/n) on it: 5.5 of those for all N² entries.
    assert np.abs(np.triu(covariance, 1)).max() < 5.5 * draws**-0.5
    assert np.abs(np.diag(covariance) - 1).max() < 5.5 * (2 / draws) ** 0.5
    assert np.abs(white.mean(axis=1)).max() < 5 * draws**-0.5
    assert stats.kstest(white.ravel(), "norm").pvalue > 1e-4
    # Nothing repeats within a row either.
    shifted = white[:, 1:] * white[:, :-1]
    assert abs(shifted.mean()) < 5 * shifted.size**-0.5


@pytest.mark.parametrize("source", ["fast", "secure"])
def test_tails_are_normal(source: str) -> None:
    out = np.empty(2_000_000)
    make_source(source, 5).normals(1, 0, 0, (np.array([0]), np.array([len(out)])), out)
    for threshold in (3.0, 4.0, 4.5):
        expected = len(out) * 2 * stats.norm.sf(threshold)
        assert abs(np.sum(np.abs(out) > threshold) - expected) < 5 * expected**0.5


def test_places_do_not_share_normals() -> None:
    for source in ("fast", "secure"):
        made = []
        keyed = make_source(source, 1)
        for *place, start in itertools.product((1, 2), (0, 1, 2**32), (0, 1), (0, 50, 2**40)):
            out = np.empty(50)
            keyed.normals(*place, (np.array([start]), np.array([50])), out)
            made.append(out)
        values = np.concatenate(made)
        assert len(np.unique(values)) == len(values)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_stream_gives_the_same_bits(name: str, dtype: str, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    strategy = STRATEGIES[name][0]
    whole = rows_of(stream(strategy, dtype=dtype, backend=backend))
    for stop in (0, 1, 2, 5, N):
        first = stream(strategy, dtype=dtype, backend=backend)
        rows_of_first = [flat(first.next()) for _ in range(stop)]
        second = stream(strategy, dtype=dtype, backend=backend, seed=1234)
        second.load_state_dict(first.state_dict())
        rest = [flat(second.next()) for _ in range(N - stop)]
        assert np.array_equal(np.stack(rows_of_first + rest), whole)


def test_memory_is_p_minus_one_models() -> None:
    size = 1000
    for strategy, copies in ((strategies.bsr(4), 3), (strategies.bisr(4), 3), (strategies.dpsgd(), 0)):
        noise = stream(strategy, shapes=[(size,)], dtype="float32")
        noise.next()
        assert noise.state_bytes == copies * size * 4
        assert sum(kept.nbytes for kept in noise._past) == copies * size * 4


@pytest.mark.parametrize("name", STRATEGIES)
def test_mechanisms_know_the_copies_that_training_keeps(name: str) -> None:
    used = mechanism(STRATEGIES[name][0])
    assert used.noise_copies == NoiseStream(used, SHAPES).plan.copies


def test_no_step_past_the_last_iteration() -> None:
    noise = stream(strategies.bsr(2))
    rows_of(noise)
    for _ in range(2):
        with pytest.raises(TrainingError, match="all 24 steps"):
            noise.next()
    restored = stream(strategies.bsr(2))
    restored.load_state_dict(noise.state_dict())
    with pytest.raises(TrainingError, match="all 24 steps"):
        restored.next()


def test_an_interrupted_step_is_not_gone_on_from() -> None:
    noise = stream(strategies.bsr(2))
    saved = noise.state_dict()

    def fail(*_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        noise.feed(fail)
    for use in (noise.next, noise.state_dict):
        with pytest.raises(TrainingError, match="interrupted half-way"):
            use()
    noise.load_state_dict(saved)
    assert np.array_equal(rows_of(noise), rows_of(stream(strategies.bsr(2))))


def test_fresh_streams_differ() -> None:
    assert not np.array_equal(*(flat(stream(strategies.dpsgd(), seed=None).next()) for _ in range(2)))
    assert not np.array_equal(*(flat(stream(strategies.dpsgd(), seed=seed).next()) for seed in (1, 2)))


GOOD = stream(strategies.bsr(3)).state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "0" * 64}, "its matrix C is another"),
        ({"batching": {}}, "its batching is another"),
        ({"shapes": [[1]]}, "its shapes is another"),
        ({"dtype": "float32"}, "its dtype is another"),
        ({"format": 1}, "must have format 5, but its format is 1: another version of dpmf wrote it"),
        ({"probe": "0"}, "generator"),
        ({"generator": "torch cuda"}, "generator"),
        ({"step": N + 1}, "step must be at most 24"),
        ({"past": []}, "past of every parameter"),
        ({"past": [rows[:, :-1] for rows in GOOD["past"]]}, "past of every parameter"),
        ({"source": "dice"}, "source among fast, secure"),
        ({"key": 5}, "state must be one that state_dict"),
    ],
)
def test_states_of_something_else_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(strategies.bsr(3)).load_state_dict({**GOOD, **change})


def test_a_state_of_another_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="its matrix C is another"):
        stream(strategies.bisr(3)).load_state_dict(GOOD)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mechanism": 3}, "mechanism must be a dpmf.Mechanism"),
        ({"dtype": "float16"}, "dtype must be one of float32, float64"),
        ({"backend": "cupy"}, "backend must be one of numpy, torch"),
        ({"device": "cuda"}, "device must be given with backend torch only"),
        ({"shapes": [(-1,)]}, "shapes must be at least 0"),
        ({"max_copies": -1}, "max_copies must be at least 0"),
        ({"source": "dice"}, "source must be one of"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseStream(**{"mechanism": mechanism(strategies.bsr(2)), "shapes": SHAPES, **arguments})


def test_a_matrix_without_inverse_is_refused() -> None:
    singular = np.eye(N)
    singular[3, 3] = 0
    with pytest.raises(ValueError, match="zero on its diagonal"):
        stream(strategies.matrix(singular))
    full = random_matrix(N)
    full[3, 3] = 0
    with pytest.raises(ValueError, match="zero on its diagonal"):
        stream(strategies.matrix(full))
