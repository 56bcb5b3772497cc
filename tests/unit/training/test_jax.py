"""Compiled steps in JAX: the mechanism accounted for, one state that resumes bit for bit, users, bad input.

Record (or user) i pushes coordinate i as hard as clipping allows, so that what was summed shows who took part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import ArgumentError, MissingExtraError, TrainingError
from dpmf.training import checkpoint
from dpmf.training import jax as training

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

RECORDS, BINS, CLIP, EXPECTED, LARGEST = 30, 5, 0.5, 6.5, 17
BSR = dpmf.strategies.bsr(3)
MECHANISMS = {
    "fixed": dpmf.Mechanism(BSR, dpmf.BallsInBins.from_iterations(13, BINS)),
    "reshuffled": dpmf.Mechanism(BSR, dpmf.reshuffled(3, BINS)),
    "cyclic": dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.reshuffled(2, 6, stride=3)),
    "cyclic poisson": dpmf.Mechanism(BSR, dpmf.cyclic_poisson(2, 6, 3)),
    "matrix": dpmf.Mechanism(
        dpmf.strategies.matrix(np.tril(np.full((10, 10), 0.2)) + np.eye(10)), dpmf.BallsInBins(2, 5)
    ),
}


OPTIONS = {"noise_multiplier": 1.5, "expected_batch_size": EXPECTED, "max_batch_size": LARGEST, "seed": 3}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Most of the time of these tests is compilation, of functions that are called a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def begin(name: str = "reshuffled", records: int = RECORDS, **options: Any) -> training.Private:
    given = {**OPTIONS, **options}
    return training.make_private(MECHANISMS[name], records=records, clip_norm=CLIP, **given)


def summed(private: training.Private, sums: Any) -> np.ndarray:
    """What `gradient` returned, in clips."""
    high, low = np.asarray(sums, dtype=np.float64)
    return (high * 2.0**13 + low) * private._grid.unit / private.clip_norm


def nothing(tree: Any) -> Any:
    """The sum of an empty batch."""
    return jax.tree.map(lambda leaf: jnp.zeros((2, *leaf.shape), jnp.int32), tree)


class Run:
    """A compiled step, what it summed and what it released."""

    def __init__(self, private: training.Private, owner: np.ndarray | None = None) -> None:
        owners = np.arange(RECORDS) if owner is None else owner
        self.data = (jnp.asarray(np.eye(RECORDS, dtype=np.float32)[owners]), jnp.arange(3.0, 3.0 + len(owners)))
        self.private = private
        self.optimizer = optax.chain(private.noise, optax.sgd(1.0))
        self.weights = jnp.zeros(RECORDS)
        self.state = self.optimizer.init(self.weights)
        self.sums: list[np.ndarray] = []
        self.released: list[np.ndarray] = []
        gradient = private.gradient(lambda weights, record: -record[1] * (record[0] @ weights))

        @jax.jit
        def step(weights: Any, state: Any) -> Any:
            clipped = gradient(weights, self.data, private.batch(state))
            updates, state = self.optimizer.update(clipped, state, weights)
            return optax.apply_updates(weights, updates), state, clipped

        self.step = step

    def train(self, steps: int | None = None) -> Run:
        for _ in range(self.private.steps if steps is None else steps):
            before = self.weights
            self.weights, self.state, clipped = self.step(self.weights, self.state)
            self.sums.append(summed(self.private, clipped))
            self.released.append(np.asarray(before - self.weights) * EXPECTED / CLIP)  # learning rate 1
        return self


@cache
def whole(name: str) -> Run:
    return Run(begin(name)).train()


@pytest.mark.parametrize("name", ["reshuffled", "cyclic", "cyclic poisson", "matrix"])
def test_training_is_the_mechanism(name: str) -> None:
    run, batching = whole(name), MECHANISMS[name].batching
    sums, b = np.stack(run.sums), batching.batches_per_epoch
    assert len(sums) == run.private.steps
    taken = np.abs(sums) > 0.5
    np.testing.assert_allclose(sums[taken], -1.0, atol=1e-4)  # clipped, and divided by the constant
    assert (sums >= -1).all()  # also where a norm is rounded down
    np.testing.assert_allclose(sums[~taken], 0.0, atol=1e-5)
    if isinstance(batching, dpmf.Poisson):
        assert (taken.reshape(-1, batching.period, RECORDS).any(axis=0).sum(axis=0) <= 1).all()
        assert 0.6 * RECORDS * batching.epochs < taken.sum() < 1.4 * RECORDS * batching.epochs
    else:
        every = (batching.rethrow_every or batching.epochs) * b
        bins = []
        for start in range(0, len(taken), every):
            part = taken[start : start + every]
            first = part[:b].argmax(axis=0)
            for record, bin_ in enumerate(first):
                assert list(np.flatnonzero(part[:, record])) == list(range(bin_, len(part), b))
            bins.append(first)
        assert len(bins) == batching.throws
        assert all((bins[0] % batching.stride == other % batching.stride).all() for other in bins)
        assert np.ptp(np.bincount(bins[0] % batching.stride)) <= 1
        assert len(bins) == 1 or (bins[0] != bins[1]).any()
    assert np.isnan(run.step(run.weights, run.state)[0]).all()  # nothing after the last step


def test_the_noise_has_the_covariance_accounted_for() -> None:
    """Gradients that are zero show the noise alone."""
    private, size = begin("fixed"), 20_000
    state, rows = private.noise.init(jnp.zeros(size)), []
    update = jax.jit(private.noise.update)
    for _ in range(private.steps):
        noisy, state = update(nothing(jnp.zeros(size)), state)
        rows.append(np.asarray(noisy, dtype=np.float64))
    white = MECHANISMS["fixed"].strategy.matrix(13) @ np.stack(rows) * EXPECTED / (1.5 * CLIP)
    covariance = white @ white.T / size
    assert np.abs(np.triu(covariance, 1)).max() < 5 * size**-0.5
    assert np.abs(np.diag(covariance) - 1).max() < 5 * (2 / size) ** 0.5


def test_without_a_record_the_rest_is_the_same() -> None:
    """Also the divisor and the grid: with the number of rows in place of a constant, everything would differ."""
    without = Run(begin(rows=RECORDS - 1), np.arange(RECORDS - 1)).train()
    difference = np.stack(whole("reshuffled").released) - np.stack(without.released)
    assert np.abs(difference[:, :-1]).max() < 1e-4
    assert (np.stack(whole("reshuffled").sums)[:, :-1] == np.stack(without.sums)[:, :-1]).all()
    assert np.abs(difference[:, -1]).sum() == pytest.approx(3, abs=1e-3)
    private = begin(rows=RECORDS - 1, expected_batch_size=None)
    assert private.expected_batch_size == RECORDS / BINS


def test_a_bin_that_overflows_is_cut() -> None:
    run = Run(begin(max_batch_size=6)).train()
    full, cut = (np.abs(np.stack(one.sums)) > 0.5 for one in (whole("reshuffled"), run))
    assert full.sum(axis=1).max() > 6
    for before, after in zip(full, cut, strict=True):
        assert list(np.flatnonzero(after)) == list(np.flatnonzero(before)[:6])


@pytest.mark.parametrize("name", ["reshuffled", "matrix"])  # noise that streams, and noise that is made again
def test_a_resumed_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    first = Run(begin(name)).train(4)
    first.private.save(tmp_path / "c", (first.weights, first.state))
    second = Run(begin(name, seed=None))  # another process, which begins with another secret
    second.weights, second.state = second.private.load(tmp_path / "c", (second.weights, second.state))
    second.train(second.private.steps - 4)
    assert np.array_equal(second.weights, whole(name).weights)
    # The state is plain arrays: any tool can save it.
    leaves, structure = jax.tree.flatten((first.weights, first.state))
    arrays = [np.asarray(leaf) for leaf in leaves]
    third = Run(begin(name, seed=None))
    third.weights, third.state = jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays])
    third.train(third.private.steps - 4)
    assert np.array_equal(third.weights, whole(name).weights)


def test_another_state_or_checkpoint_is_refused(tmp_path: Path) -> None:
    run = Run(begin()).train(2)
    run.private.save(tmp_path / "c", (run.weights, run.state))
    for other in (
        begin("fixed"),
        begin(noise_multiplier=2.0),
        begin(max_batch_size=16),
        begin(expected_batch_size=6.0),
    ):
        fresh = Run(other)
        with pytest.raises(ValueError, match="checkpoint must be of this mechanism, these settings and this generator"):
            other.load(tmp_path / "c", (fresh.weights, fresh.state))
    assert np.isnan(
        jax.jit(begin(noise_multiplier=2.0).noise.update)(nothing(run.weights), run.private.state(run.state))[0]
    ).all()
    with pytest.raises(ValueError, match="other shapes or precisions"):
        run.private.load(tmp_path / "c", (jnp.zeros(3), run.state))
    before = (tmp_path / "c").read_bytes()
    run.train(1)
    run.private.save(tmp_path / "c", (run.weights, run.state))
    (tmp_path / "c").write_bytes(before)
    with pytest.raises(TrainingError, match="this run has saved the model of step 3 since"):
        begin().load(tmp_path / "c", (run.weights, run.state))
    begin().load(tmp_path / "c", (run.weights, run.state), allow_second_continuation=True)
    with pytest.raises(ArgumentError, match="must hold one state of the noise, this tree has 0"):
        run.private.batch(run.weights)


def test_a_checkpoint_is_continued_once(tmp_path: Path) -> None:
    """The attack: two learning rates from one checkpoint release noise whose difference is known to be zero."""
    first = Run(begin()).train(4)
    first.private.save(tmp_path / "c", (first.weights, first.state))
    first.train(1)  # and then this process is lost, which nobody has to be told
    once = Run(begin(seed=None))
    once.weights, once.state = once.private.load(tmp_path / "c", (once.weights, once.state))
    for _ in range(2):  # in this process, or in another one
        with pytest.raises(TrainingError, match="has been continued before, with the same noise") as caught:
            Run(begin(seed=None)).private.load(tmp_path / "c", (first.weights, first.state))
        assert "\n" not in str(caught.value)
    with pytest.raises(TrainingError, match="another process, or another object in this one, has gone on"):
        first.private.save(tmp_path / "c", (first.weights, first.state))
    once.private.save(tmp_path / "same", (once.weights, once.state))
    with pytest.raises(TrainingError, match="has been continued before"):  # its noise is that of the other one
        begin(seed=None).load(tmp_path / "same", (once.weights, once.state))
    once.train(2)
    once.private.save(tmp_path / "later", (once.weights, once.state))
    again = Run(begin(seed=None))
    again.weights, again.state = again.private.load(tmp_path / "later", (again.weights, again.state))
    with pytest.raises(TrainingError, match="has been continued before"):
        begin(seed=None).load(tmp_path / "later", (again.weights, again.state))
    again.train(again.private.steps - 6)
    assert np.array_equal(again.weights, whole("reshuffled").weights)
    # Asked for by name; then that one goes on, and may be resumed.
    wished = Run(begin(seed=None))
    wished.weights, wished.state = wished.private.load(
        tmp_path / "c", (wished.weights, wished.state), allow_second_continuation=True
    )
    wished.train(1)
    wished.private.save(tmp_path / "c", (wished.weights, wished.state))
    begin(seed=None).load(tmp_path / "c", (wished.weights, wished.state))


def test_the_rows_of_other_data_are_refused() -> None:
    """JAX takes the last row for an index beyond: 100 rows in place of 400 made one record count 301 times."""
    private = begin()
    gradient = private.gradient(lambda weights, record: record[0] @ weights)
    batch, weights = private.batch(private.noise.init(jnp.zeros(RECORDS))), jnp.zeros(RECORDS)
    rows = jnp.eye(RECORDS)
    for wrong in (rows[:10], jnp.concatenate([rows, rows[:1]]), jnp.zeros(())):
        shape = tuple(wrong.shape)
        for data in ((wrong, rows), (rows, wrong)):
            for function in (gradient, jax.jit(gradient)):
                with pytest.raises(ArgumentError) as caught:
                    function(weights, data, batch)
                assert (
                    str(caught.value) == f"data must have a row for each of the 30 records in every array, got {shape}"
                )
    owner = np.arange(RECORDS + 5) % RECORDS
    users = begin(records=len(owner), unit=owner)
    batch = users.batch(users.noise.init(weights))
    with pytest.raises(
        ArgumentError, match=r"data must have a row for each of the 35 records in every array, got \(30,"
    ):
        users.gradient(lambda weights, record: record @ weights)(weights, rows, batch)


def draws(private: training.Private, steps: int, owner: np.ndarray) -> np.ndarray:
    """What the loss draws for every record in every step, the mean over those of a user; zero where it is not used."""
    data, shape = jnp.asarray(np.eye(RECORDS)[owner], jnp.float32), (RECORDS, 8)

    def loss(weights: Any, record: Any, key: Any) -> Any:
        return jnp.sum(record @ weights * (1 + jax.random.uniform(key, (8,))))

    gradient, state, sums = jax.jit(private.gradient(loss)), private.noise.init(jnp.zeros(shape)), []
    for _ in range(steps):
        sums.append(summed(private, gradient(jnp.zeros(shape), data, private.batch(state))) * private.clip_norm)
        _, state = private.noise.update(nothing(jnp.zeros(shape)), state)
    return np.stack(sums)


def test_what_the_loss_draws_is_a_record_s_own() -> None:
    """Each record's draw is a function of the secret, the step and its number, and not of who else is there."""
    everybody = np.arange(RECORDS)
    large = {"clip_norm": 100.0}
    private = training.make_private(MECHANISMS["reshuffled"], records=RECORDS, **OPTIONS, **large)
    full = draws(private, 2 * BINS, everybody)
    used = full[full[..., 0] > 0]
    assert len(used) == 2 * RECORDS
    assert ((used >= 1) & (used <= 2)).all()
    assert len(np.unique(used, axis=0)) == len(used)  # in every step and for every record, another key
    # One record less, and the batches in another order: the draws of the others are the same.
    fewer = training.make_private(MECHANISMS["reshuffled"], records=RECORDS, rows=RECORDS - 1, **OPTIONS, **large)
    without = draws(fewer, 2 * BINS, everybody[:-1])
    np.testing.assert_array_equal(without[:, :-1], full[:, :-1])
    batch = private.batch(private.noise.init(jnp.zeros((RECORDS, 8))))
    turned = batch._replace(indices=batch.indices[::-1], real=batch.real[::-1])
    gradient = jax.jit(
        private.gradient(lambda w, record, key: jnp.sum(record @ w * (1 + jax.random.uniform(key, (8,)))))
    )
    found = summed(private, gradient(jnp.zeros((RECORDS, 8)), jnp.eye(RECORDS), turned)) * private.clip_norm
    np.testing.assert_array_equal(found, full[0])
    other = training.make_private(MECHANISMS["reshuffled"], records=RECORDS, **{**OPTIONS, "seed": 4}, **large)
    found = draws(other, 1, everybody)
    assert not {*map(tuple, found[found[..., 0] > 0])} & {*map(tuple, used)}
    assert len(np.unique(private._keys, axis=0)) == 4  # what the loss gets says nothing of noise and bins


def test_what_the_loss_draws_with_users() -> None:
    owner = np.concatenate([np.arange(RECORDS), np.arange(0, RECORDS, 2)])
    private = training.make_private(
        MECHANISMS["reshuffled"], records=len(owner), unit=owner, clip_norm=100.0, **OPTIONS
    )
    full, everybody = draws(private, BINS, owner), np.arange(RECORDS)
    fewer = training.make_private(MECHANISMS["reshuffled"], records=RECORDS, unit=everybody, clip_norm=100.0, **OPTIONS)
    alone = draws(fewer, BINS, everybody)
    np.testing.assert_array_equal(full[:, 1::2], alone[:, 1::2])  # the other records of other users change nothing
    assert (full[:, ::2] != alone[:, ::2]).any()


def test_a_record_that_is_not_finite_is_nobody_else_s() -> None:
    """Users with fewer records are filled up: with their own, since 0 times an infinite gradient is not zero."""
    owner = np.concatenate([np.arange(RECORDS), np.arange(0, RECORDS, 2)])
    private = begin(records=len(owner), unit=owner)
    gradient = jax.jit(private.gradient(lambda weights, record: -jnp.sum(record @ weights)))
    state = private.noise.init(jnp.zeros(RECORDS))
    data = np.eye(RECORDS, dtype=np.float32)[owner]
    broken = data.copy()
    broken[0] = np.inf
    for _ in range(BINS):
        one, other = (np.array(gradient(jnp.zeros(RECORDS), x, private.batch(state))) for x in (data, broken))
        np.testing.assert_array_equal(one[:, 1:], other[:, 1:])
        assert not other[:, 0].any()
        _, state = private.noise.update(nothing(jnp.zeros(RECORDS)), state)


def test_users() -> None:
    owner = np.concatenate([np.arange(RECORDS), np.arange(0, RECORDS, 2), np.arange(0, RECORDS, 3)])
    run = Run(begin(records=len(owner), unit=owner), owner).train()
    sums = np.stack(run.sums)
    taken = np.abs(sums) > 0.5
    np.testing.assert_allclose(sums[taken], -1.0, atol=1e-4)  # the mean of a user's records, clipped once
    assert (taken.reshape(3, BINS, RECORDS).sum(axis=1) == 1).all()
    table = run.private._units.table
    assert sorted(table[table >= 0]) == list(range(len(owner)))
    assert all((owner[row[row >= 0]] == user).all() for user, row in enumerate(table[:-1]))


def test_the_size_of_batches_and_their_cost_in_delta() -> None:
    target = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-4, "accountant": "gaussian"}
    private = begin("fixed", max_batch_size=None, **target)
    assert private.cut.charge(2.0) <= 1e-4 / 1024
    given = {"noise_multiplier": private.noise_multiplier, "epsilon": 2.0, "accountant": "gaussian"}
    assert dpmf.delta(private.mechanism, **given).delta + private.cut.charge(2.0) <= 1e-4
    assert private.get_epsilon(1e-4) == 2.0
    assert 2.0 < private.get_epsilon(1e-5) < 4.0
    assert 1.0 < private.get_epsilon(1e-3) < 2.0
    with pytest.raises(ArgumentError, match="delta must be larger"):
        private.get_epsilon(1e-9)


def test_the_statement() -> None:
    target = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-4, "accountant": "gaussian"}
    private = begin("fixed", max_batch_size=None, rows=RECORDS - 2, expected_batch_size=None, **target)
    assert private.relation == "one record is added or removed"
    said, told = str(private.statement()), private.statement().to_dict()
    assert "(2, 0.0001)-differentially private where one record is added or removed" in said
    assert f"cut to {private.max_batch_size} of at most 30 records" in said
    assert str(RECORDS - 2) not in said
    given = {"epsilon": 2.0, "delta": 1e-4, "divisor": 6.0, "records": 30, "unit": "record", "precision": "float32"}
    assert {name: told[name] for name in given} == given
    assert private.statement(1e-3).to_dict()["epsilon"] == private.get_epsilon(1e-3) < 2.0
    assert begin("cyclic", 30).relation == "the place of one record is left empty"  # a group depends on the index
    stopping = begin("reshuffled", stopping_points=[5], accountant="gaussian", max_batch_size=RECORDS)
    assert stopping.get_epsilon(1e-3, 5) < stopping.get_epsilon(1e-3)
    assert "after step 5" in str(stopping.statement(1e-3))


def test_the_public_number_and_the_rows() -> None:
    """What is released has the public number in it, and the length of the arrays nowhere."""
    one, other = begin(expected_batch_size=None), begin(rows=RECORDS - 5, expected_batch_size=None)
    assert one.run == other.run
    assert (one.expected_batch_size, one.run.records) == (6.0, 30)
    with pytest.raises(ArgumentError, match=r"records must be at least the number of records, 31, .* got 30"):
        begin(rows=RECORDS + 1)
    gradient, batch = other.gradient(lambda w, record: record @ w), other.batch(other.noise.init(jnp.zeros(RECORDS)))
    with pytest.raises(ArgumentError, match="data must have a row for each of the 25 records in every array"):
        gradient(jnp.zeros(RECORDS), jnp.eye(RECORDS), batch)
    owner = np.arange(RECORDS + 5) % RECORDS
    users = begin(records=40, unit=owner)  # a bound on the number of users; the rows are those of `unit`
    assert (users.run.records, users.run.unit, users._records) == (40, "user", 35)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_parameters_in_half_precision(name: str) -> None:
    """Compiled as a scan: sums and noise do not know the precision; what is released is rounded to it at the end."""
    private = begin()
    gradient = private.gradient(lambda weights, record: -record[1] * jnp.sum(record[0] @ weights.astype(jnp.float32)))
    optimizer = optax.chain(private.noise, optax.sgd(0.1, momentum=0.5))
    rows = jnp.eye(RECORDS), jnp.arange(3.0, 3.0 + RECORDS)

    def step(carry: Any, _: Any) -> Any:
        weights, state = carry
        sums = gradient(weights, rows, private.batch(state))
        released, _ = private.noise.update(sums, private.state(state), weights)
        updates, state = optimizer.update(sums, state, weights)
        return (optax.apply_updates(weights, updates), state), (sums, released)

    weights = jnp.zeros(RECORDS, name)
    (weights, state), (sums, released) = jax.jit(lambda *both: jax.lax.scan(step, both, None, length=private.steps))(
        weights, optimizer.init(weights)
    )
    assert weights.dtype == released.dtype == name
    assert np.isfinite(np.asarray(weights, np.float32)).all()
    assert int(private.state(state).step) == private.steps
    np.testing.assert_array_equal([summed(private, one) for one in sums], whole("reshuffled").sums)
    exact = np.stack(whole("reshuffled").released) * CLIP / EXPECTED
    np.testing.assert_allclose(np.asarray(released, np.float32), exact, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("at_once", [1, RECORDS, 100, 250])
def test_large_batches_take_several_rounds(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are public, and sums are exact, so that the bits are the same."""
    monkeypatch.setattr(training, "_AT_ONCE", at_once)
    for step, sums in enumerate(Run(begin()).train(2).sums):
        np.testing.assert_array_equal(sums, whole("reshuffled").sums[step])


def test_no_gradient_is_computed_twice() -> None:
    """Norms and products would be of different numbers, where one of two fused operations is rounded otherwise."""
    private, weights = begin(), jnp.ones((8, 3))
    gradient = private.gradient(lambda weights, record: -jnp.sum(jnp.tanh(record @ weights)))
    state, rows = private.noise.init(weights), jnp.ones((RECORDS, 8))
    jax.config.update("jax_disable_most_optimizations", False)
    compiled = jax.jit(gradient).lower(weights, rows, private.batch(state)).compile().as_text()
    jax.config.update("jax_disable_most_optimizations", True)
    parts = {
        found[1]: found[0] for found in re.finditer(r"^(?:ENTRY )?%(\S+) .*?^}", compiled, re.MULTILINE | re.DOTALL)
    }
    bodies = re.findall(r" while\(.*body=%([\w.-]+)", compiled)
    assert bodies
    loop, more = set(), set(bodies)
    while more:
        loop |= more
        more = {name for one in more for name in re.findall(r"(?:calls|to_apply)=%([\w.-]+)", parts[one])} - loop
    assert any("jvp" in text for name, text in parts.items() if name not in loop)
    assert not any("jvp" in parts[name] for name in loop)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stopping_points": [13]}, "stops must be at most 12"),
        ({"clip_norm": 1e-30}, "clip_norm must be between"),
        ({"noise_multiplier": 1e-6}, "noise_multiplier must be between .* for batches of 17 rows"),
        ({"dtype": "bfloat16"}, "dtype must be float32 or float64"),
        ({"mechanism": 3}, "mechanism must be a dpmf.Mechanism"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"max_batch_size": None}, "max_batch_size must be given with noise_multiplier"),
        ({"max_batch_size": 3}, "max_batch_size must be at least the average batch size, 6"),
        ({"records": 4}, "dataset must have at least as many records as batches_per_epoch = 5"),
        ({"unit": [1, 2], "rows": RECORDS}, "unit must have one user for each of the 30 records"),
        ({"target_epsilon": 1.0}, "noise_multiplier must not be given with target_epsilon"),
        ({"accountant": "monte-carlo"}, "accountant must be one that proves its bound"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    good = {"mechanism": MECHANISMS["fixed"], "records": RECORDS, "clip_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ArgumentError, match=message) as caught:
        training.make_private(**{**good, "max_batch_size": LARGEST, **options})
    assert "\n" not in str(caught.value)


def test_what_the_noise_is_added_to() -> None:
    private = begin()
    state = private.noise.init(jnp.zeros(RECORDS))
    for wrong in (jnp.zeros(RECORDS), jnp.zeros(RECORDS, jnp.int32)):
        with pytest.raises(ArgumentError, match=r"updates must be what gradient\(\) returned"):
            private.noise.update(wrong, state)


def test_trees_and_what_is_saved_with_them(tmp_path: Path) -> None:
    private, parameters = begin(), {"a": jnp.zeros((3,)), "b": [jnp.zeros((2, 2)), jnp.zeros(())]}
    state = private.noise.init(parameters)
    extra = {"model": {"a": jnp.ones(3, jnp.bfloat16)}, "key": jax.random.key(3), "count": 7, "state": state}
    private.save(tmp_path / "c", extra)
    again = begin(seed=None)
    loaded = again.load(tmp_path / "c", {**extra, "state": again.noise.init(parameters)})
    assert jax.tree.structure(loaded) == jax.tree.structure(extra)
    assert np.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(extra["key"]))
    assert loaded["count"] == 7
    assert loaded["model"]["a"].dtype == jnp.bfloat16
    for one, other in zip(jax.tree.leaves(loaded["state"]), jax.tree.leaves(state), strict=True):
        assert np.array_equal(one, other)
    kept = checkpoint.load(tmp_path / "c")
    checkpoint.save(tmp_path / "c", {**kept, "step": 5})
    with pytest.raises(ValueError, match="batches and noise of one run at one step"):
        begin().load(tmp_path / "c", extra)


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[jax\]' in a clone"):
        begin()
