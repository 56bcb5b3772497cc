"""Bins that overflow: how likely that is, against exact fractions, and what it costs in δ.

That the charge covers what a cut does is tested in `test_run.py`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

import dpmf
from dpmf.cut import Cut, affordable, binomial_tail, raised
from dpmf.errors import ArgumentError


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


def test_the_charge_is_of_the_direction_and_rounded_up() -> None:
    cut = Cut(dpmf.reshuffled(10, 100), 50_000, 647)
    assert cut.charge(8.0, "remove") == cut.probability
    assert cut.charge(8.0) == cut.charge(8.0, "add") >= math.exp(8.0) * cut.probability
    assert cut.charge(8.0) <= math.exp(8.0) * cut.probability * (1 + 1e-9)
    assert raised(1e-300, 800.0) == math.inf
    assert Cut(dpmf.reshuffled(10, 100), 50_000, 50_001).charge(8.0) == 0.0


def test_what_a_cut_leaves_of_delta() -> None:
    """ε is that of what is left, and the rest is enough for the charge there; it is never infinite."""
    asked: list[float] = []

    def uncut(delta: float) -> float:
        asked.append(delta)
        return -math.log(delta)

    for eta, tries in ((1e-14, 1), (1e-9 / 2**7, 2), (2e-9, 3)):
        asked.clear()
        found = affordable(1e-2, uncut, lambda epsilon: raised(eta * 1e2, epsilon))  # noqa: B023
        assert found == -math.log(asked[-1])
        assert len(asked) <= tries
        assert asked[-1] + raised(eta * 1e2, found) <= 1e-2
    for some in (uncut, lambda delta: math.inf):
        with pytest.raises(ArgumentError, match="delta must be larger for this run, in which cut batches") as caught:
            affordable(1e-2, some, lambda epsilon: raised(0.1, epsilon))
        assert "\n" not in str(caught.value)
