"""Balls-in-bins batches: who takes part when, that bins are uniform and independent, and states that come back."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpmf.batching import BallsInBins
from dpmf.errors import TrainingError
from dpmf.mechanism import Mechanism
from dpmf.strategies.closed_form import bsr
from dpmf.training import BatchSampler

SOURCES = ("fast", "secure")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "batching", [BallsInBins(3, 7), BallsInBins(1, 5), BallsInBins(2, 1), BallsInBins.from_iterations(17, 5)], ids=str
)
def test_every_record_is_in_the_iterations_of_its_bin_and_no_others(batching: BallsInBins, source: str) -> None:
    sampler = BatchSampler(40, batching, seed=3, source=source)
    batches = list(sampler.batches())
    assert len(batches) == batching.iterations
    for record, bin_ in enumerate(sampler.bins):
        iterations = [t for t, batch in enumerate(batches) if record in batch]
        assert iterations == list(range(bin_, batching.iterations, batching.batches_per_epoch))


def test_an_epoch_at_a_time_as_lists() -> None:
    sampler = BatchSampler(30, BallsInBins.from_iterations(8, 3), seed=1)
    assert len(sampler) == 3
    epochs = [list(sampler), list(sampler), list(sampler)]
    assert [len(epoch) for epoch in epochs] == [3, 3, 2]
    assert epochs[0] == epochs[1] == [*epochs[2], epochs[0][2]]
    assert all(type(i) is int for batch in epochs[0] for i in batch)
    with pytest.raises(TrainingError, match="all 8 steps"):
        list(sampler)


def test_empty_bins_are_empty_batches() -> None:
    sampler = BatchSampler(12, BallsInBins(2, 12), seed=0)
    sizes = [len(batch) for batch in sampler]
    assert len(sizes) == 12
    assert min(sizes) == 0
    assert sum(sizes) == 12
    assert sampler.expected_batch_size == 1.0


@pytest.mark.parametrize("source", SOURCES)
def test_bins_are_uniform_and_independent(source: str) -> None:
    """Counts of bins, of pairs of neighbouring records, and batch sizes over many seeds, by χ² at level 10⁻⁴."""
    b, n, seeds = 5, 40, 600
    bins = np.stack([BatchSampler(n, BallsInBins(1, b), seed=s, source=source).bins for s in range(seeds)])
    assert stats.chisquare(np.bincount(bins.ravel(), minlength=b)).pvalue > 1e-4
    pairs = np.bincount((b * bins[:, :-1] + bins[:, 1:]).ravel(), minlength=b * b)
    assert stats.chisquare(pairs).pvalue > 1e-4
    # The size of a batch is binomial: its variance, not only its mean, is that of independent balls.
    sizes = (bins == 0).sum(axis=1)
    expected = seeds * stats.binom.pmf(np.arange(3, 15), n, 1 / b)
    seen = np.bincount(sizes, minlength=n + 1)[3:15]
    rest = seeds - expected.sum(), seeds - seen.sum()
    assert stats.chisquare(np.append(seen, rest[1]), np.append(expected, rest[0])).pvalue > 1e-4
    # The same record under different seeds.
    assert stats.chisquare(np.bincount(bins[:, 0], minlength=b)).pvalue > 1e-4


def test_seeds() -> None:
    def bins(**options: object) -> list[int]:
        return BatchSampler(100, BallsInBins(1, 10), **options).bins.tolist()

    assert bins(seed=1) == bins(seed=1)
    assert bins(seed=1) != bins(seed=2)
    assert bins(seed=1) != bins(seed=1, source="secure")
    assert bins() != bins()


@pytest.mark.parametrize("stop", [0, 1, 4, 7, 20])
def test_a_restored_state_goes_on_mid_epoch(stop: int) -> None:
    batching = BallsInBins.from_iterations(20, 7)
    whole = [batch.tolist() for batch in BatchSampler(50, batching, seed=5).batches()]
    first = BatchSampler(50, batching, seed=5)
    begun = first.batches()
    for _ in range(stop):
        next(begun)
    second = BatchSampler(50, batching, seed=99)
    second.load_state_dict(first.state_dict())
    assert second.position == stop
    assert [batch.tolist() for batch in second.batches()] == whole[stop:]


def test_processes_share_each_batch() -> None:
    batching = BallsInBins(1, 6)
    whole = BatchSampler(50, batching, seed=4)
    shares = [BatchSampler(50, batching, seed=4, rank=rank, world_size=3) for rank in range(3)]
    for t in range(6):
        parts = np.concatenate([share.batch(t) for share in shares])
        assert sorted(parts) == sorted(whole.batch(t))


def test_torch_data_loader() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(40))
    sampler = BatchSampler(40, Mechanism(bsr(2), BallsInBins(2, 4)), seed=2)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    assert len(loader) == 4
    epochs = [[sorted(batch[0].tolist()) for batch in loader] for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert sorted(i for batch in epochs[0] for i in batch) == list(range(40))


GOOD = BatchSampler(20, BallsInBins(2, 5), seed=1).state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 21}, "state must be of 20 records"),
        ({"batching": {**GOOD["batching"], "batches_per_epoch": 6}}, "got 20 and .*'batches_per_epoch': 6"),
        ({"batching": {**GOOD["batching"], "kind": "Poisson"}}, "got 20 and {'kind': 'Poisson'"),
        ({"format": 1}, "format 3, got format 1"),
        ({"source": "dice"}, "source 'dice'"),
        ({"position": 11}, "position must be at most 10"),
        ({"digest": "0" * 64}, "state must be continued with the generator that made it"),
        ({"key": "00" * 32}, "state must be continued with the generator that made it"),
        ({"key": "zz"}, "state must be one that state_dict"),
    ],
)
def test_states_of_something_else_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSampler(20, BallsInBins(2, 5)).load_state_dict({**GOOD, **change})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 4}, "dataset must have at least as many records as batches_per_epoch = 5, got 4"),
        ({"size": 0}, "size must be at least 1"),
        ({"batching": 5}, "batching must be a BallsInBins, a Poisson or a Mechanism"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": b"short"}, "32 bytes"),
        ({"source": "x"}, "source must be one of fast, secure"),
        ({"rank": 2, "world_size": 2}, "rank must be at most 1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSampler(**{"size": 20, "batching": BallsInBins(2, 5), **arguments})
