"""Batches of a public expected size and of a largest size: the cut, what it costs in δ, and padding without effect.

The cost is compared with enumeration: the tail with exact fractions, and the whole mechanism with integrals over the
densities of all assignments of a few records to two bins.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from private_runs import MECHANISM, N, linear, private, train, weights

import dpmf
from dpmf.cut import Cut, binomial_tail
from dpmf.errors import ArgumentError
from dpmf.training import BatchSampler


def exact_tail(trials: int, rate: Fraction, least: int) -> Fraction:
    return sum(
        (math.comb(trials, c) * rate**c * (1 - rate) ** (trials - c) for c in range(max(least, 0), trials + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize(("groups", "bins"), [(1, 2), (1, 7), (3, 4), (2, 2), (1, 100)])
def test_the_tail_is_bounded_from_above_and_closely(groups: int, bins: int) -> None:
    rate = Fraction(groups, bins)
    for trials in (1, 2, 3, 10, 40):
        for least in range(trials + 3):
            exact, bound = exact_tail(trials, rate, least), binomial_tail(trials, groups, bins, least)
            assert bound >= exact
            if least > trials * rate and least - trials * rate > 2 * math.sqrt(trials * rate * (1 - rate)):
                assert bound <= Fraction(3, 2) * exact + Fraction(1, 10**200)


@pytest.mark.parametrize(("trials", "bins", "least"), [(10**6, 10**3, 1250), (10**9, 10**4, 103_000)])
def test_the_tail_of_many_trials(trials: int, bins: int, least: int) -> None:
    from scipy import stats

    found = float(stats.binom.sf(least - 1, trials, 1 / bins))
    assert found * (1 - 1e-6) <= binomial_tail(trials, 1, bins, least) <= found * 1.1


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (dpmf.BallsInBins(3, 2), exact_tail(6, Fraction(1, 2), 5)),  # fixed bins: one throw
        (dpmf.reshuffled(3, 2), 3 * exact_tail(6, Fraction(1, 2), 5)),
        (dpmf.reshuffled(2, 4, stride=2), 2 * exact_tail(3, Fraction(1, 2), 5)),  # a group of half of the records
        (dpmf.Poisson(4, 2), 4 * exact_tail(6, Fraction(1, 2), 5)),
    ],
    ids=str,
)
def test_the_probability_counts_how_often_a_record_is_thrown(batching: Any, expected: Fraction) -> None:
    assert expected <= Cut(batching, 6, 5).probability <= Fraction(5, 4) * expected


@pytest.mark.parametrize(("bins", "smallest"), [(100, 647), (10, 5428)])
def test_the_smallest_size_of_the_documentation(bins: int, smallest: int) -> None:
    some = Cut(dpmf.reshuffled(10, bins), 50_000, 50_000)
    assert some.smallest(8.0, 1e-5) == smallest
    charges = [Cut(some.batching, 50_000, size).charge(8.0) for size in (smallest - 1, smallest)]
    assert charges[0] > 0.5e-5 >= charges[1]


POINTS = np.linspace(-9.0, 9.0, 181)


def _density(others: tuple[float, ...], own: bool, largest: int, first: bool) -> np.ndarray:
    """The density of two bins' noisy sums, averaged over all assignments; the differing record contributes +1.

    `first` says whether the differing record is the first of its bin, so that it pushes another one out, or the last.
    """
    width = POINTS[1] - POINTS[0]
    total = np.zeros((len(POINTS), len(POINTS)))
    for bins in itertools.product((0, 1), repeat=len(others) + own):
        sums = []
        for one in (0, 1):
            inside = [x for x, bin_ in zip(others, bins, strict=False) if bin_ == one]
            if own and bins[-1] == one:
                inside = [1.0, *inside] if first else [*inside, 1.0]
            sums.append(sum(inside[:largest]))
        each = [np.exp(-((POINTS - s) ** 2) / 2) / math.sqrt(2 * math.pi) for s in sums]
        total += np.outer(*each) / 2 ** len(bins)
    return total * width**2


def _delta(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def test_the_charge_covers_the_cut_and_is_needed() -> None:
    """One epoch of DP-SGD with two bins, σ = 1: δ of the cut mechanism by enumeration, both directions."""
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 2))
    exceeded = 0
    for others, largest, first in itertools.product(((-1.0,) * 3, (1.0,) * 3, (-1.0, 1.0)), (1, 2), (True, False)):
        with_it, without = (_density(others, own, largest, first) for own in (True, False))
        eta = float(exact_tail(len(others), Fraction(1, 2), largest))
        for epsilon in (0.0, 0.5, 1.5):
            ways = {"remove": _delta(with_it, without, epsilon), "add": _delta(without, with_it, epsilon)}
            for direction, cut in ways.items():
                uncut = dpmf.delta(
                    mechanism, noise_multiplier=1.0, epsilon=epsilon, accountant="lattice", direction=direction
                ).delta
                charge = eta if direction == "remove" else math.exp(epsilon) * eta
                assert cut <= uncut + charge + 1e-6
                exceeded += cut > uncut + 1e-3
    assert exceeded  # without a charge, the bound would not hold


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
