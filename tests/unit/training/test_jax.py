"""Training with JAX, by jax-privacy's clipping and noise addition: the mechanism accounted for, also when resumed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import MissingExtraError, TrainingError
from dpmf.strategies.unamplified import BLT
from dpmf.training import checkpoint
from dpmf.training import jax as training

jax = pytest.importorskip("jax")
pytest.importorskip("jax_privacy")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax_privacy import clipping  # noqa: E402
from jax_privacy.batch_selection import pad_to_multiple_of  # noqa: E402

N = 12


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Most of the time of these tests is compilation, of functions that are called a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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


@cache
def white_rows() -> np.ndarray:
    """The same normals are drawn whatever the matrix."""
    return rows("dpsgd", 50)


@pytest.mark.parametrize("name", STRATEGIES)
def test_rows_are_those_of_the_dense_product(name: str) -> None:
    z = white_rows()
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


RECORDS, CLIP = 30, 0.5
FEATURES = jnp.eye(RECORDS)


def loss(weights: Any, x: Any) -> Any:
    """Every record pushes its own coordinate, so that what was summed shows who took part."""
    return -7.0 * jnp.sum(x @ weights)


def clipped_gradient(accounted: dpmf.Mechanism) -> Any:
    expected = RECORDS / accounted.batching.batches_per_epoch
    return clipping.clipped_grad(loss, l2_clip_norm=CLIP, normalize_by=expected, batch_argnums=1)


def begin(name: str = "bsr", seed: int | None = 5, **options: Any) -> training.PrivateTraining:
    accounted = mechanism(name)
    given = {"noise_multiplier": 1.0, "l2_sensitivity": clipped_gradient(accounted).sensitivity(), **options}
    return training.PrivateTraining(accounted, jnp.zeros(RECORDS), records=RECORDS, seed=seed, **given)


class Trace:
    """A training loop, and what it summed and released."""

    def __init__(self, rate: float = 1.0) -> None:
        self.sums: list[np.ndarray] = []
        self.released: list[np.ndarray] = []
        self.weights = jnp.zeros(RECORDS)
        self.optimizer = optax.sgd(rate, momentum=0.5)
        self.memory = self.optimizer.init(self.weights)

    def train(self, run: training.PrivateTraining, steps: int) -> Trace:
        gradient = clipped_gradient(run.mechanism)
        for batch in run.batches():
            padded = pad_to_multiple_of(np.asarray(batch), 16)  # one shape, compiled once
            total = gradient(self.weights, FEATURES[padded], is_padding_example=jnp.asarray(padded == -1))
            noisy = run.add_noise(total)
            update, self.memory = self.optimizer.update(noisy, self.memory)
            self.weights = optax.apply_updates(self.weights, update)
            self.sums.append(np.asarray(total))
            self.released.append(np.asarray(noisy))
            steps -= 1
            if not steps:
                break
        return self


def audit(trace: Trace, accounted: dpmf.Mechanism) -> list[str]:
    """What a run did otherwise than it was accounted for."""
    wrong = []
    b, matrix = accounted.batching.batches_per_epoch, accounted.strategy.matrix(N)
    sums = np.stack(trace.sums) * (RECORDS / b)
    for record, contribution in enumerate(sums.T):
        taking_part = np.flatnonzero(contribution)
        if not len(taking_part) or list(taking_part) != list(range(taking_part[0] % b, N, b)):
            wrong.append(f"record {record} took part in iterations {taking_part}")
            continue
        np.testing.assert_allclose(contribution[taking_part], -CLIP, rtol=1e-5)
        norm = np.linalg.norm(matrix @ contribution) / CLIP
        assert norm == pytest.approx(accounted.gram[taking_part[0], taking_part[0]] ** 0.5, rel=1e-5)
    return wrong


@pytest.mark.parametrize("stop", [None, 5])
@pytest.mark.parametrize("name", ["bsr", "matrix"])
def test_training_by_jax_privacy_is_the_mechanism(name: str, stop: int | None, tmp_path: Path) -> None:
    """Uninterrupted or resumed: bins, sensitivity and noise are those accounted for."""
    run, trace = begin(name), Trace()
    if stop is not None:
        trace.train(run, stop)
        run.save(tmp_path / "c", (trace.weights, trace.memory))
        run = begin(name, seed=None)  # another process, which begins with another secret
        trace.weights, trace.memory = run.load(tmp_path / "c", (trace.weights, trace.memory))
        assert run.steps_left == N - stop
    trace.train(run, N)
    assert len(trace.sums) == N
    assert audit(trace, run.mechanism) == []
    noise = (np.stack(trace.released) - np.stack(trace.sums)) * run.expected_batch_size / CLIP
    white = begin(name)
    for batch, row in zip(white.batches(), noise, strict=True):
        drawn = white.add_noise(jnp.zeros(RECORDS)) * run.expected_batch_size / CLIP
        np.testing.assert_allclose(row, drawn, atol=1e-4)
        assert list(batch) == list(run.sampler.batch(white.step - 1))


def test_noise_restored_without_its_batches_is_not_the_mechanism(tmp_path: Path) -> None:
    """What the pages used to recommend: save the state of the noise only, and draw the bins again."""
    run, trace = begin(), Trace()
    trace.train(run, 6)
    run.save(tmp_path / "c", trace.weights)
    state = checkpoint.load(tmp_path / "c")
    fresh = begin(seed=6)
    for mixed in (
        {**state, "sampler": {**fresh.sampler.state_dict(), "position": 6}},
        {**state, "noise": {**state["noise"], "step": 5}},
        {**state, "noise": {**state["noise"], "key": "00" * 32}},
    ):
        checkpoint.save(tmp_path / "c", mixed)
        with pytest.raises(ValueError, match="batches and noise of one run at one step"):
            begin(seed=6).load(tmp_path / "c", trace.weights)
    run.sampler = fresh.sampler  # by force
    trace.train(run, 6)
    assert any("took part" in line for line in audit(trace, run.mechanism))


@cache
def uninterrupted(name: str) -> Trace:
    return Trace().train(begin(name), N)


@pytest.mark.parametrize(
    ("name", "stop"), [("dpsgd", 4), ("bsr", 0), ("bsr", 4), ("bsr", N), ("bisr", 4), ("blt", 4), ("matrix", 4)]
)
def test_a_resumed_run_is_the_same_run(name: str, stop: int, tmp_path: Path) -> None:
    whole = uninterrupted(name)
    first = begin(name)
    trace = Trace()
    if stop:
        trace.train(first, stop)
    first.save(tmp_path / "c", (trace.weights, trace.memory))
    again = begin(name, seed=None)
    trace.weights, trace.memory = again.load(tmp_path / "c", (jnp.zeros(RECORDS), trace.memory))
    trace.train(again, N)
    assert again.steps_left == 0
    assert np.array_equal(trace.weights, whole.weights)


def test_trees_and_what_is_saved_with_them(tmp_path: Path) -> None:
    parameters = {"a": jnp.zeros((3,)), "b": [jnp.zeros((2, 2)), jnp.zeros(())]}

    def run() -> training.PrivateTraining:
        return training.PrivateTraining(
            mechanism("bsr"), parameters, records=RECORDS, noise_multiplier=1.0, l2_sensitivity=1.0, seed=1
        )

    def some(one: training.PrivateTraining, steps: int) -> list[Any]:
        return [one.add_noise(parameters) for _, _batch in zip(range(steps), one.batches(), strict=False)]

    whole = some(run(), N)
    first = run()
    some(first, 3)
    extra = {"model": {"a": jnp.ones(3, jnp.bfloat16)}, "key": jax.random.key(3), "count": 7}
    first.save(tmp_path / "c", extra)
    second = run()
    loaded = second.load(tmp_path / "c", extra)
    assert jax.tree.structure(loaded) == jax.tree.structure(extra)
    assert np.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(extra["key"]))
    assert loaded["count"] == 7
    assert loaded["model"]["a"].dtype == jnp.bfloat16
    for new, old in zip(some(second, N), whole[3:], strict=True):
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), new, old))


def test_one_step_on_every_batch() -> None:
    zero = jnp.zeros(RECORDS)
    run = begin()
    with pytest.raises(TrainingError, match="step 0 must be made on batch 0"):
        run.add_noise(zero)
    batches = run.batches()
    next(batches)
    run.add_noise(zero)
    with pytest.raises(TrainingError, match="step 1 must be made on batch 1"):
        run.add_noise(zero)
    next(batches)
    with pytest.raises(TrainingError, match="batch 1 was left out"):
        next(batches)
    batches = run.batches()  # from the batch that was not used
    assert list(next(batches)) == list(run.sampler.batch(1))
    run.add_noise(zero)
    assert run.step == 2


def test_no_checkpoint_between_a_batch_and_its_noise(tmp_path: Path) -> None:
    run = begin()
    next(run.batches())
    with pytest.raises(TrainingError, match="only be written after add_noise"):
        run.save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_with_noise_of_another_generator_is_refused(tmp_path: Path) -> None:
    """As those of dpmf 0.2 are, which drew it by jax.random.normal."""
    begin().save(tmp_path / "c")
    state = checkpoint.load(tmp_path / "c")
    del state["identity"]["generator"]
    checkpoint.save(tmp_path / "c", state)
    with pytest.raises(ValueError, match=r"checkpoint must have generator = .* has None"):
        begin().load(tmp_path / "c")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"name": "bisr"}, "mechanism = 'BISR"),
    "noise": ({"noise_multiplier": 2.0}, "noise_multiplier = 2.0, .* has 1.0"),
    "sensitivity": ({"l2_sensitivity": 1.0}, "l2_sensitivity = 1.0"),
    "precision": ({"dtype": "float64"}, "dtype = 'float64'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_something_else_is_one_message(name: str, tmp_path: Path) -> None:
    options, message = OTHERS[name]
    begin().save(tmp_path / "c")
    with pytest.raises(ValueError, match=message) as caught:
        begin(**options).load(tmp_path / "c")
    assert "\n" not in str(caught.value)


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    run = begin()
    run.save(tmp_path / "c", jnp.zeros(3))
    for other in (jnp.zeros(4), jnp.zeros(3, jnp.int32), (), (jnp.zeros(3), jnp.zeros(3))):
        with pytest.raises(ValueError, match="other shapes or precisions"):
            begin().load(tmp_path / "c", other)


def test_a_second_continuation_is_refused(tmp_path: Path) -> None:
    run, trace = begin(), Trace()
    trace.train(run, 4)
    run.save(tmp_path / "c", (trace.weights, trace.memory))
    trace.train(run, 4)
    again, second = begin(), Trace()
    second.weights, second.memory = again.load(tmp_path / "c", (second.weights, second.memory))
    second.train(again, 4)
    assert np.array_equal(second.weights, trace.weights)  # the same again: nothing new is released
    again.load(tmp_path / "c", (second.weights, second.memory))
    next(again.batches())
    with pytest.raises(TrainingError, match="step 4 was made before from this checkpoint, with another result"):
        again.add_noise(jnp.zeros(RECORDS))
    with pytest.raises(TrainingError, match="another process"):
        trace.train(run, 1)


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
    with pytest.raises(ValueError, match=message):
        training.PrivateTraining(**{**good, "parameters": jnp.zeros(2), "records": 9, **options})


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[jax\]' in a clone"):
        begin()
