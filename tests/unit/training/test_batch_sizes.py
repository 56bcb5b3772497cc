"""Batches of a public expected size and of a largest size: the cut, what it costs in δ, and padding without effect.

What a cut costs is compared with enumeration in `test_cut.py` and `test_run.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from private_runs import MECHANISM, N, linear, private, train, weights

import dpmf
from dpmf.errors import ArgumentError
from dpmf.training import BatchSampler


def test_a_bin_is_cut_to_its_first_records_and_filled_up() -> None:
    plain = BatchSampler(60, dpmf.reshuffled(2, 5), seed=4)
    cut = BatchSampler(60, dpmf.reshuffled(2, 5), seed=4, max_batch_size=13, expected_batch_size=11.5)
    assert cut.expected_batch_size == 11.5
    assert max(len(plain.batch(t)) for t in range(10)) > 13
    for t in range(10):
        assert list(cut.batch(t)) == list(plain.batch(t)[:13])
        padded = cut.padded(t)
        assert len(padded) == 13
        assert list(padded[padded >= 0]) == list(cut.batch(t))
        shares = [
            BatchSampler(60, dpmf.reshuffled(2, 5), seed=4, max_batch_size=13, rank=r, world_size=2) for r in (0, 1)
        ]
        assert [len(share.padded(t)) for share in shares] == [7, 7]
        assert sorted(i for share in shares for i in share.padded(t) if i >= 0) == list(cut.batch(t))
    with pytest.raises(ArgumentError, match="must be of the same records, expected_batch_size, max_batch_size"):
        plain.load_state_dict(cut.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 11}, "max_batch_size must be at least the average batch size, 12, got 11"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
        (
            {"max_batch_size": 20, "records": 59},
            "records must be at least the number of records, 60, where batches are cut, got 59",
        ),
        ({"records": 0}, "records must be at least 1, got 0"),
        ({"expected_batch_size": 61}, "expected_batch_size must be at most the number of records, 60, got 61"),
        ({"expected_batch_size": -1.0}, "expected_batch_size must be positive"),
    ],
)
def test_wrong_sizes_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        BatchSampler(60, dpmf.reshuffled(2, 5), **options)
    assert "\n" not in str(caught.value)


def test_the_charge_is_taken_from_delta_or_refused() -> None:
    target = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-4, "accountant": "gaussian"}
    with pytest.raises(ArgumentError, match=r"max_batch_size must be at least 11, got 10: .* of δ = 0.0001 at ε = 2"):
        private(max_batch_size=10, **target)
    run = private(max_batch_size=11, model=linear(), **target)
    charge = run.sampler.cut.charge(2.0)
    assert 0 < charge <= 0.5e-4
    proved = dpmf.delta(MECHANISM, noise_multiplier=run.noise_multiplier, epsilon=2.0, accountant="gaussian").delta
    assert proved + charge <= 1e-4
    assert run.noise_multiplier > private(model=linear(), **target).noise_multiplier
    train(run, N)
    assert run.get_epsilon(1e-4) == 2.0
    other = run.get_epsilon(2e-4)
    whole = dpmf.epsilon(MECHANISM, noise_multiplier=run.noise_multiplier, delta=2e-4, accountant="gaussian").epsilon
    assert whole < other <= 2.0
    assert run.get_epsilon(1.0001e-4) == 2.0  # nothing else is left by the charge, but this is proved
    with pytest.raises(ArgumentError, match=r"delta must be larger .* cut batches \(max_batch_size\) cost .* 1e-08"):
        run.get_epsilon(1e-8)


def test_padding_and_a_public_divisor_change_nothing_else() -> None:
    """Rows that fill up a batch have no effect, split into parts or not, with workers' collation or a list."""
    plain, padded, parts = (
        private(model=linear(), expected_batch_size=2.5, **options)
        for options in ({}, *2 * ({"max_batch_size": 18, "records": 25},))
    )
    rows = set()
    train(plain, N)
    for x, y in padded.data_loader:
        rows.add((len(x), len(y)))
    assert rows == {(18, 18)}
    train(padded, N)
    train(parts, N, parts.in_parts(4))
    np.testing.assert_allclose(weights(padded), weights(plain), atol=1e-5)
    np.testing.assert_allclose(weights(parts), weights(plain), atol=1e-5)
    divided = private(model=linear(), expected_batch_size=2 * plain.sampler.expected_batch_size, rate=0.2)
    train(divided, N)
    np.testing.assert_allclose(weights(divided), weights(plain), atol=1e-5)
