"""Training with every batching: who takes part when, the noise of gaps, resuming, and the privacy spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import dpmf
from dpmf.batching import BallsInBins, Batching, OneThrow, Poisson, cyclic_poisson, reshuffled
from dpmf.errors import TrainingError
from dpmf.strategies.base import Strategy
from dpmf.strategies.unamplified import BLT
from dpmf.training import BatchSampler, NoiseStream, jax, noise_levels
from dpmf.training._schedule import Schedule
from tests import private_runs
from tests.decoders import decoder, merged

SOURCES = ("fast", "secure")
BINS = [
    reshuffled(4, 6),
    BallsInBins(4, 6, rethrow_every=2),
    reshuffled(4, 6, stride=3),
    BallsInBins(4, 6, rethrow_every=2, stride=2),
    BallsInBins(4, 6, stride=6),
]
SAMPLES = [Poisson(4, 6), cyclic_poisson(4, 6, 3), cyclic_poisson(4, 6, 6)]


def name(batching: Batching) -> str:
    return batching.name


def taking_part(size: int, batching: Batching, **options: Any) -> np.ndarray:
    """Whether a record takes part in a step, at [step, record]."""
    sampler = BatchSampler(size, batching, **options)
    taken = np.zeros((sampler.steps, size), dtype=bool)
    for t, batch in enumerate(sampler.batches()):
        assert list(batch) == sorted(set(batch))
        taken[t, batch] = True
    return taken


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("batching", BINS, ids=name)
def test_balls_in_bins(batching: BallsInBins, source: str) -> None:
    """Once in every epoch, in the same bin for a throw, in another one after it, and in the bins of one group only."""
    taken = taking_part(50, batching, seed=3, source=source)
    epochs = taken.reshape(4, 6, 50)
    assert (epochs.sum(axis=1) == 1).all()
    bins = epochs.argmax(axis=1)
    m = batching.rethrow_every or 4
    throws = bins[::m]
    assert (bins == np.repeat(throws, m, axis=0)).all()
    assert all((a != b).any() for a, b in zip(throws[1:], throws, strict=False)) or batching.stride == 6
    groups = bins % batching.stride
    assert (groups == groups[0]).all()
    assert np.ptp(np.bincount(groups[0], minlength=batching.stride)) <= 1


@pytest.mark.parametrize("source", SOURCES)
def test_throws_are_uniform_and_independent(source: str) -> None:
    """Pairs of bins of consecutive throws, over many records, by χ² at level 10⁻⁴; the same within a group."""
    for batching in (reshuffled(3, 4), reshuffled(3, 8, stride=2)):
        s, b = batching.stride, batching.batches_per_epoch
        bins = taking_part(6000, batching, seed=1, source=source).reshape(3, b, -1).argmax(axis=1)
        within = bins // s
        pairs = np.concatenate([4 * within[0] + within[1], 4 * within[1] + within[2]])
        assert stats.chisquare(np.bincount(pairs, minlength=16)).pvalue > 1e-4
        neighbours = np.bincount(4 * within[0, :-1] + within[0, 1:], minlength=16)
        assert stats.chisquare(neighbours).pvalue > 1e-4


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("batching", SAMPLES, ids=name)
def test_poisson_samples(batching: Poisson, source: str) -> None:
    """In the steps of its group only, there with probability q/b, and independently of other steps and records."""
    size, q = 2000, batching.period
    taken = taking_part(size, batching, seed=5, source=source)
    groups = BatchSampler(size, batching, seed=5, source=source).groups
    assert np.ptp(np.bincount(groups, minlength=q)) <= 1
    blocks = taken.reshape(-1, q, size)
    own = np.take_along_axis(blocks, groups[None, None, :], axis=1)[:, 0]  # at [block, record]
    assert taken.sum() == own.sum()
    rate, trials = q / 6, own.size
    assert abs(own.sum() - rate * trials) <= 4.5 * (trials * rate * (1 - rate)) ** 0.5
    for a, b in ((own[1:], own[:-1]), (own[:, 1:], own[:, :-1])):
        both, tried = (a & b).sum(), a.size
        assert abs(both - rate**2 * tried) <= 4.5 * (tried * rate**2 * (1 - rate**2)) ** 0.5 + 1e-9


@pytest.mark.parametrize("batching", [*BINS, *SAMPLES], ids=name)
def test_another_record_changes_nothing_for_the_others(batching: Batching) -> None:
    for source in SOURCES:
        fewer = taking_part(49, batching, seed=3, source=source)
        assert (taking_part(50, batching, seed=3, source=source)[:, :49] == fewer).all()


@pytest.mark.parametrize("batching", [*BINS, *SAMPLES], ids=name)
def test_a_restored_sampler_goes_on_and_ranks_share(batching: Batching) -> None:
    whole = [batch.tolist() for batch in BatchSampler(30, batching, seed=5).batches()]
    assert len(whole) == 24
    for stop in (0, 5, 6, 13, 24):
        first = BatchSampler(30, batching, seed=5)
        first.seek(stop)
        second = BatchSampler(30, batching)
        second.load_state_dict(first.state_dict())
        assert [batch.tolist() for batch in second.batches()] == whole[stop:]
    shares = [BatchSampler(30, batching, seed=5, rank=rank, world_size=3) for rank in range(3)]
    assert [sorted(i for share in shares for i in share.batch(t)) for t in range(24)] == whole
    looked_at = BatchSampler(30, batching, seed=5)  # in any order
    assert [looked_at.batch(t).tolist() for t in reversed(range(24))] == whole[::-1]
    with pytest.raises(ValueError, match="state must be of 30 records"):
        BatchSampler(30, BallsInBins(4, 6)).load_state_dict(looked_at.state_dict())


def test_what_cannot_be_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="batching must be a BallsInBins, a Poisson or a Mechanism"):
        BatchSampler(20, OneThrow(5, 10))  # type: ignore[arg-type]
    part = dpmf.Mechanism(dpmf.strategies.bsr(2), reshuffled(2, 6)).throw
    with pytest.raises(ValueError, match="batching must be a BallsInBins or a Poisson"):
        NoiseStream(part, [(3,)])


class FixedBLT(BLT):
    def buffers(self, iterations: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0.9, 0.4]), np.array([0.2, 0.3])


GAPS: list[tuple[Strategy, BallsInBins]] = [
    (dpmf.strategies.bsr(3), reshuffled(3, 4)),
    (dpmf.strategies.bsr(3), BallsInBins(4, 4, rethrow_every=2)),
    (dpmf.strategies.bsr(3), reshuffled(3, 4, gap=5)),
    (dpmf.strategies.bsr(3).normalized(), reshuffled(3, 4, stride=2)),
    (dpmf.strategies.dpsgd(), reshuffled(3, 4, gap=2)),
    (dpmf.strategies.bisr(3), reshuffled(3, 4, gap=2)),
    (FixedBLT(2, "max"), reshuffled(3, 4, gap=3)),
    (dpmf.strategies.coefficients(1 / np.arange(1, 25)), reshuffled(3, 4, gap=2)),
]


def noise_of(mechanism: dpmf.Mechanism, **options: Any) -> NoiseStream:
    return NoiseStream(mechanism, [(70,)], seed=7, dtype="float64", max_copies=8, **options)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize(("strategy", "batching"), GAPS, ids=str)
def test_the_noise_of_gaps_is_in_the_next_step(
    strategy: Strategy, batching: BallsInBins, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr("dpmf.training._backends.CHUNK", 16)
    mechanism = dpmf.Mechanism(strategy, batching)
    n, decoding = mechanism.batching.iterations, decoder(mechanism)
    white = noise_of(dpmf.Mechanism(dpmf.strategies.dpsgd(), BallsInBins(1, n)), backend=backend)
    z = np.stack([np.asarray(white.next()[0]) for _ in range(n)])
    dense = decoding @ z
    noise = noise_of(mechanism, backend=backend)
    found = np.stack([np.asarray(noise.next()[0]) for _ in range(noise.steps)])
    assert len(found) == 4 * batching.epochs < n
    np.testing.assert_allclose(found, dense, atol=1e-10 * np.abs(dense).max(), rtol=0)
    # What is released is a function of C·x + Z: the decoder gives back what the steps put in.
    columns = [int(np.flatnonzero(row)[-1]) for row in merged(mechanism)]
    np.testing.assert_allclose(
        decoding @ mechanism.strategy.matrix(n)[:, columns], np.eye(noise.steps), atol=1e-10 * n, rtol=0
    )
    np.testing.assert_allclose(noise_levels(mechanism), np.linalg.norm(decoding, axis=1), rtol=1e-10)
    with pytest.raises(TrainingError, match=f"all {noise.steps} steps"):
        noise.next()
    for stop in (3, 4, 5):
        first = noise_of(mechanism, backend=backend)
        for _ in range(stop):
            first.next()
        second = noise_of(mechanism, backend=backend)
        second.load_state_dict(first.state_dict())
        rest = np.stack([np.asarray(second.next()[0]) for _ in range(noise.steps - stop)])
        assert np.array_equal(rest, found[stop:])


def test_settling_with_regeneration() -> None:
    """A bandwidth beyond the copies that may be kept: rows are made from normals that are drawn again."""
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(6), BallsInBins(4, 7, rethrow_every=2))
    kept, drawn_again = noise_of(mechanism), NoiseStream(mechanism, [(70,)], seed=7, dtype="float64", max_copies=2)
    assert (kept.plan.method, drawn_again.plan.method) == ("back-substitution", "regeneration")
    for _ in range(kept.steps):
        np.testing.assert_allclose(drawn_again.next()[0], kept.next()[0], atol=1e-12)


def test_a_state_from_before_settling_is_refused() -> None:
    stream = noise_of(dpmf.Mechanism(*GAPS[0]))
    state = stream.state_dict()
    del state["gaps"]
    with pytest.raises(ValueError, match="state must be one"):
        stream.load_state_dict(state)


def test_a_state_of_another_gap_is_refused() -> None:
    """Both have 12 steps and 16 rows, in another order."""
    state = noise_of(dpmf.Mechanism(dpmf.strategies.dpsgd(), reshuffled(3, 4, gap=2))).state_dict()
    other = noise_of(dpmf.Mechanism(dpmf.strategies.dpsgd(), reshuffled(2, 6, gap=4)))
    assert other.iterations == 16
    with pytest.raises(ValueError, match="its batching is another"):
        other.load_state_dict(state)


# Both C and C⁻¹ are banded, up to the last row, and C⁻¹ has the fewer bands. So the noise is settled and streamed by
# convolution, which takes two throws and a gap of more than half of all iterations.
CONVOLVED: tuple[Strategy, BallsInBins] = (
    dpmf.strategies.coefficients([1.0, 0.0, 0.5, 0.0, 0.25]),
    reshuffled(2, 1, gap=4),
)


def test_settling_with_convolution() -> None:
    mechanism = dpmf.Mechanism(*CONVOLVED)
    noise, white = noise_of(mechanism), noise_of(dpmf.Mechanism(dpmf.strategies.dpsgd(), BallsInBins(1, 6)))
    assert mechanism.settling is not None
    assert (noise.plan.method, noise.plan.copies) == ("convolution", 2)
    z = np.stack([white.next()[0] for _ in range(6)])
    found = np.stack([noise.next()[0] for _ in range(noise.steps)])
    np.testing.assert_allclose(found, decoder(mechanism) @ z, atol=1e-12)


@pytest.mark.parametrize(("strategy", "batching"), [*GAPS[::6], CONVOLVED], ids=str)
def test_the_noise_of_gaps_with_jax(strategy: Strategy, batching: BallsInBins) -> None:
    jnp = pytest.importorskip("jax.numpy")
    pytest.importorskip("optax")
    import jax as jax_itself

    mechanism = dpmf.Mechanism(strategy, batching)
    size, options = 20_000, {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 1.0}
    private = jax.make_private(mechanism, records=100, max_batch_size=100, seed=3, **options)
    update, out = jax_itself.jit(private.noise.update), []
    nothing, state = jnp.zeros((2, size), jnp.int32), private.noise.init(jnp.zeros(size))
    for _ in range(mechanism.batching.steps):
        noisy, state = update(nothing, state)
        out.append(np.asarray(noisy, dtype=np.float64))
    assert np.isnan(update(nothing, state)[0]).all()
    decoding = decoder(mechanism)
    white = np.linalg.solve(np.linalg.cholesky(decoding @ decoding.T), np.stack(out))
    covariance = white @ white.T / size
    assert np.abs(covariance - np.eye(len(covariance))).max() < 5.5 * (2 / size) ** 0.5


@pytest.mark.parametrize("stop", [4, 5])
def test_jax_resumes_before_and_after_a_gap(stop: int, tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    pytest.importorskip("optax")

    def begin(seed: int) -> tuple[jax.Private, Any]:
        mechanism = dpmf.Mechanism(*GAPS[0])
        private = jax.make_private(
            mechanism, records=9, clip_norm=1.0, noise_multiplier=1.0, max_batch_size=9, seed=seed
        )
        return private, private.noise.init(jnp.zeros(5))

    def made(private: jax.Private, state: Any, steps: int) -> tuple[list[Any], Any]:
        found = []
        for _ in range(steps):
            batch = private.batch(state)
            noisy, state = private.noise.update(jnp.zeros((2, 5), jnp.int32), state)
            found.append((batch.indices[batch.real].tolist(), noisy.tolist()))
        return found, state

    whole, _ = made(*begin(1), 12)
    first, state = begin(1)
    _, state = made(first, state, stop)
    first.save(tmp_path / "c", state)
    second, other = begin(2)
    assert made(second, second.load(tmp_path / "c", other), 12 - stop)[0] == whole[stop:]


RUNS = [
    dpmf.Mechanism(dpmf.strategies.bsr(3), reshuffled(3, 8)),
    dpmf.Mechanism(dpmf.strategies.bsr(3), BallsInBins(4, 8, rethrow_every=2, stride=4)),
    dpmf.Mechanism(dpmf.strategies.bsr(3), cyclic_poisson(3, 8, 4)),
    dpmf.Mechanism(dpmf.strategies.dpsgd(), Poisson(3, 8)),
]


@pytest.mark.parametrize("mechanism", RUNS, ids=str)
def test_opacus_resumes_at_any_step(mechanism: dpmf.Mechanism, tmp_path: Path) -> None:
    """Before, in and after a gap; the loader's epochs have b batches."""
    pytest.importorskip("opacus")
    steps = Schedule.of(mechanism.batching).steps
    whole = private_runs.private(mechanism)
    assert len(whole.data_loader) == 8
    private_runs.train(whole, steps)
    assert whole.steps_left == 0
    for stop in (8, 9):
        first = private_runs.private(mechanism)
        private_runs.train(first, stop)
        first.save(tmp_path / f"{stop}")
        second = private_runs.private(mechanism, seed=99)
        second.load(tmp_path / f"{stop}")
        assert second.steps_left == steps - stop
        private_runs.train(second, steps - stop)
        assert np.array_equal(private_runs.weights(second), private_runs.weights(whole))
    with pytest.raises(ValueError, match="checkpoint must have mechanism"):
        private_runs.private().load(tmp_path / "8")
    with pytest.raises(TrainingError, match=f"all {steps} steps"):
        private_runs.train(whole, 1)


def test_workers_across_throws() -> None:
    pytest.importorskip("opacus")
    runs = [
        private_runs.private(RUNS[0], private_runs.linear(), **private_runs.with_workers(workers)) for workers in (0, 1)
    ]
    for run in runs:
        private_runs.train(run, 24)
    assert np.array_equal(private_runs.weights(runs[0]), private_runs.weights(runs[1]))
