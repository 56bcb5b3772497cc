"""Training with JAX: jax-privacy's clipping, batches and noise addition, with the mechanism that was accounted for."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import MissingExtraError
from dpmf.strategies.optimised import BLT
from dpmf.training import jax as training

jax = pytest.importorskip("jax")
pytest.importorskip("jax_privacy")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax_privacy import clipping  # noqa: E402
from jax_privacy.batch_selection import pad_to_multiple_of  # noqa: E402

N = 12


class FixedBLT(BLT):
    def buffers(self, iterations: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0.9, 0.4]), np.array([0.2, 0.3])


STRATEGIES = {
    "dpsgd": dpmf.strategies.dpsgd(),
    "scaled": dpmf.strategies.coefficients([2.0]),
    "bsr": dpmf.strategies.bsr(3),
    "bisr": dpmf.strategies.bisr(3),
    "blt": FixedBLT(2, "max"),
    "bsr normalised": dpmf.strategies.bsr(3).normalized(),
    "bisr normalised": dpmf.strategies.bisr(3).normalized(),
    "matrix": dpmf.strategies.matrix(np.tril(np.full((N, N), 0.2)) + np.eye(N)),
}


def mechanism(name: str) -> dpmf.Mechanism:
    return dpmf.Mechanism(STRATEGIES[name], dpmf.BallsInBins(3, 4))


def rows(name: str, size: int, steps: int = N, **options: Any) -> np.ndarray:
    """What is added to gradients that are zero."""
    given = {"noise_multiplier": 2.0, "l2_sensitivity": 0.5, "prng_key": 3, **options}
    privatizer = training.privatizer(mechanism(name), **given)
    zero = {"a": jnp.zeros((size,)), "b": jnp.zeros((2, 3))}
    update = jax.jit(privatizer.update)
    state, out = privatizer.init(zero), []
    for _ in range(steps):
        noisy, state = update(zero, state)
        out.append(np.concatenate([np.ravel(noisy["a"]), np.ravel(noisy["b"])]))
    return np.stack(out).astype(np.float64)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "matrix"])
def test_rows_are_those_of_the_dense_product(name: str) -> None:
    z = rows("dpsgd", 50)  # streamed noise draws the same normals whatever the matrix
    dense = np.linalg.solve(STRATEGIES[name].matrix(N), z)
    np.testing.assert_allclose(rows(name, 50), dense, atol=1e-5)


@pytest.mark.parametrize("name", ["bsr", "matrix"])
def test_the_noise_has_the_covariance_accounted_for(name: str) -> None:
    size = 20_000
    white = STRATEGIES[name].matrix(N) @ rows(name, size) / (2.0 * 0.5)
    covariance = white @ white.T / white.shape[1]
    assert np.abs(np.triu(covariance, 1)).max() < 5 * size**-0.5
    assert np.abs(np.diag(covariance) - 1).max() < 5 * (2 / size) ** 0.5


def test_nothing_is_released_past_the_last_iteration() -> None:
    out = rows("bsr", 4, steps=N + 2)
    assert np.isfinite(out[:N]).all()
    assert np.isnan(out[N:]).all()


def test_keys() -> None:
    assert not np.array_equal(*(rows("dpsgd", 4, steps=1, prng_key=None) for _ in (0, 1)))


def test_training_by_jax_privacy_is_the_mechanism() -> None:
    """Every record pushes its own coordinate, so that what was summed shows who took part."""
    records, clip = 30, 0.5
    accounted = mechanism("bsr")
    b = accounted.batching.batches_per_epoch
    expected = records / b
    features = jnp.eye(records)

    def loss(weights: Any, x: Any) -> Any:
        return -7.0 * jnp.sum(x @ weights)

    gradient = clipping.clipped_grad(loss, l2_clip_norm=clip, normalize_by=expected, batch_argnums=1)
    privatizer = training.privatizer(accounted, noise_multiplier=1.0, l2_sensitivity=gradient.sensitivity(), prng_key=1)
    optimizer = optax.sgd(1.0)
    weights = jnp.zeros(records)
    state, memory = privatizer.init(weights), optimizer.init(weights)
    sums, released = [], []
    batches = list(training.batch_selection(accounted).batch_iterator(records, rng=5))
    assert len(batches) == N
    for t, batch in enumerate(batches):
        padded = pad_to_multiple_of(np.asarray(batch), 16)  # one shape, compiled once
        total = gradient(weights, features[padded], is_padding_example=jnp.asarray(padded == -1))
        if t == 5:  # the state is all there is to save
            leaves, structure = jax.tree.flatten(state)
            state = jax.tree.unflatten(structure, [jnp.copy(leaf) for leaf in leaves])
        noisy, state = privatizer.update(total, state)
        update, memory = optimizer.update(noisy, memory)
        weights = optax.apply_updates(weights, update)
        sums.append(np.asarray(total))
        released.append(np.asarray(noisy))
    matrix = accounted.strategy.matrix(N)
    for record in range(records):
        contribution = np.array([total[record] for total in sums]) * expected
        taking_part = np.flatnonzero(contribution)
        assert len({int(t) % b for t in taking_part}) == 1
        np.testing.assert_allclose(contribution[taking_part], -clip, rtol=1e-5)
        norm = np.linalg.norm(matrix @ contribution) / clip
        assert norm == pytest.approx(accounted.gram[taking_part[0] % b, taking_part[0] % b] ** 0.5, rel=1e-5)
    noise = (np.stack(released) - np.stack(sums)) * expected / clip
    alone = training.privatizer(accounted, noise_multiplier=1.0, l2_sensitivity=1.0, prng_key=1)
    state = alone.init(weights)
    for row in noise:
        drawn, state = alone.update(jnp.zeros(records), state)
        np.testing.assert_allclose(row, drawn, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": 3}, "mechanism must be a dpmf.Mechanism"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
        ({"l2_sensitivity": float("inf")}, "l2_sensitivity must be finite"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    good = {"mechanism": mechanism("bsr"), "noise_multiplier": 1.0, "l2_sensitivity": 1.0}
    with pytest.raises(ValueError, match=message):
        training.privatizer(**{**good, **options})


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dpmf\[jax\]'"):
        training.batch_selection(mechanism("bsr"))
