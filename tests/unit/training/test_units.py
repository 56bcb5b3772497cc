"""Users as the unit of privacy: whose records are whose, whole users in every part, one line for bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_runs import MECHANISM, RECORDS, N, linear, private, train, weights

import dpmf
from dpmf.errors import ArgumentError, TrainingError
from dpmf.training import BatchSampler

USERS = ["d", "a", "b", "a", "c", "d", "e", "f", "g", "h", "i", "j", "k", "a", "l", "m", "n", "k", "o", "p"]


def test_a_batch_has_all_records_of_its_users() -> None:
    sampler = BatchSampler(RECORDS, dpmf.reshuffled(2, 4), seed=1, unit=USERS)
    assert sampler.balls == len(set(USERS)) == len(sampler.bins)
    assert sampler.expected_batch_size == len(set(USERS)) / 4
    for epoch in (0, 1):
        batches = [sampler.batch(4 * epoch + t).tolist() for t in range(4)]
        assert sorted(itertools.chain(*batches)) == list(range(RECORDS))
        for batch in batches:
            owners = [USERS[record] for record in batch]
            assert all(owners.count(user) == USERS.count(user) for user in owners)
            assert len(set(owners)) == 1 + sum(a != b for a, b in itertools.pairwise(owners)) or not owners
    by_number = BatchSampler(RECORDS, dpmf.reshuffled(2, 4), seed=1, unit=np.unique(USERS, return_inverse=True)[1])
    assert list(by_number.batch(3)) == list(sampler.batch(3))
    cut = BatchSampler(RECORDS, dpmf.reshuffled(2, 4), seed=1, unit=USERS, max_batch_size=4)
    assert all(len({USERS[record] for record in cut.batch(t)}) <= 4 for t in range(8))


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (USERS[1:], "unit must have one user for each of the 20 records, got 19"),
        ([*USERS[:7], None, *USERS[8:]], "unit must name a user for every record, record 7 has None"),
        ([*range(19), float("nan")], "unit must name a user for every record, record 19 has nan"),
        (["", *USERS[1:]], "unit must name a user for every record, record 0 has ''"),
        ([*USERS[:5], [1], *USERS[6:]], "unit must be .* plain values"),
        ("abc", "unit must be a sequence with the user of every record"),
        (7, "unit must be a sequence with the user of every record"),
        (np.array(3), "unit must have one user for each of the 20 records, got 1"),
        ([0, 1] * 10, "dataset must have at least as many users as batches_per_epoch = 8, got 2"),
    ],
)
def test_wrong_users_are_one_line(unit: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        BatchSampler(RECORDS, MECHANISM, unit=unit)
    assert "\n" not in str(caught.value)


def test_training_on_users_whole_in_parts_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    whole, parts, resumed = (private(model=linear(), unit=USERS) for _ in range(3))
    train(whole, N)
    train(parts, N, parts.in_parts(3))
    np.testing.assert_allclose(weights(parts), weights(whole), atol=1e-5)
    # A user's records are never split between parts, however small these are.
    assert {len(x) for x, _ in resumed.in_parts(1)} == {0, 1, 2, 3}
    train(resumed, 3)
    resumed.save(tmp_path / "c")
    with pytest.raises(ValueError, match=r"checkpoint must have batches = .*'users'"):
        private(model=linear(), unit=USERS[::-1]).load(tmp_path / "c")
    with pytest.raises(ValueError, match="checkpoint must have relation = 'one record is added or removed'"):
        private(model=linear(), expected_batch_size=2.0).load(tmp_path / "c")
    again = private(model=linear(), unit=USERS, seed=5)
    again.load(tmp_path / "c")
    train(again, N - 3)
    assert np.array_equal(weights(again), weights(whole))
    # At most 16 users with at most three records each: rows that fill up a batch have no effect.
    padded = private(model=linear(), unit=USERS, max_batch_size=16)
    assert {len(x) for x, _ in padded.data_loader} == {48}
    train(padded, N, padded.in_parts(20))
    np.testing.assert_allclose(weights(padded), weights(whole), atol=1e-5)


@pytest.mark.parametrize("options", [{"unit": USERS}, {"max_batch_size": 18}, {"unit": USERS, "max_batch_size": 6}])
def test_parts_that_the_loop_itself_makes(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    whole, parts = (private(model=linear(), **options) for _ in range(2))
    train(whole, 8)
    refused = 0
    for x, y in parts.data_loader:
        if len(x) > 1:
            used = 0
            for end in range(1, len(x)):
                loss = torch.nn.functional.cross_entropy(parts.model(x[used:end]), y[used:end])
                loss.backward()
                try:
                    parts.optimizer.sum_part()
                    used = end
                except TrainingError as error:
                    assert "ends within a user's records" in str(error)  # noqa: PT017
                    refused += 1
                    parts.optimizer.zero_grad()
            x, y = x[used:], y[used:]
        torch.nn.functional.cross_entropy(parts.model(x), y).backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    assert refused == (4 if "unit" in options else 0)  # within d once, within a twice, within k once
    np.testing.assert_allclose(weights(parts), weights(whole), atol=1e-5)
