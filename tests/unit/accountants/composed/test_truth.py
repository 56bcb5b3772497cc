"""Composed bounds against the truth about whole runs: every iteration, gap rows included, and no composition."""

from __future__ import annotations

import pytest
import whole_mechanisms

import dpmf
from dpmf.batching import BallsInBins, Poisson, reshuffled
from dpmf.strategies import coefficients, dpsgd

WAYS = ("remove", "add")
NARROW, DENSE = coefficients([1.0, 0.9]), coefficients([0.5**j for j in range(40)])
SLOW = coefficients([(j + 1) ** -0.5 for j in range(40)])


def _quick(mechanism):
    if isinstance(mechanism.batching, Poisson):
        return "best"
    return "lattice" if mechanism.strategy == dpsgd() else "chain"


def bounds(mechanism, sigma, epsilon):
    """Upper bounds in each direction."""
    asked = {"noise_multiplier": sigma, "epsilon": epsilon, "accountant": _quick(mechanism)}
    return {way: dpmf.delta(mechanism, direction=way, **asked).delta for way in WAYS}


# The rows that the last throw's columns lack are added in the third column: then the composition is all there is.
@pytest.mark.parametrize(
    ("strategy", "batching", "extra", "sigma", "epsilon", "close"),
    [
        (NARROW, reshuffled(2, 2), 1, 1.0, 3.0, 1.03),
        (coefficients([1.0, 0.5]), reshuffled(2, 3), 1, 1.0, 1.0, 1.08),
        (coefficients([1.0, 0.5]), BallsInBins(4, 2, rethrow_every=2), 1, 2.0, 1.0, 1.03),
        (coefficients([1.0, 0.7, 0.3]), BallsInBins(2, 4, rethrow_every=1, stride=2), 1, 1.0, 1.0, 1.03),
        (NARROW, BallsInBins(2, 4, rethrow_every=1, stride=2), 0, 1.0, 1.0, 1.01),
        (dpsgd(), reshuffled(2, 3), 0, 1.0, 1.0, 1.01),
        (NARROW, Poisson(2, 4, 2), 1, 1.0, 1.0, 1.01),
    ],
    ids=["gap", "three bins", "thrown every second epoch", "stride", "stride of the bandwidth", "dpsgd", "poisson"],
)
def test_throws_with_a_gap_compose_exactly(strategy, batching, extra, sigma, epsilon, close):
    mechanism = dpmf.Mechanism(strategy, batching)
    found = bounds(mechanism, sigma, epsilon)
    for way in WAYS:
        truth = whole_mechanisms.exact_delta(mechanism, sigma, epsilon, way, extra=extra)
        assert truth * (1 - 1e-7) <= found[way] <= close * truth
        run = truth if not extra else whole_mechanisms.exact_delta(mechanism, sigma, epsilon, way)
        assert run <= truth * (1 + 1e-7)
        sampled, margin = whole_mechanisms.sampled_delta(mechanism, sigma, epsilon, way, samples=50_000)
        assert sampled - margin <= run <= sampled + margin


def test_a_gap_that_is_too_short_is_not_ignored():
    """A record in the last bin of one epoch and the first of the next has columns with a row in common.

    Composing the two throws as if they had none gives less than the truth.
    """
    apart = bounds(dpmf.Mechanism(NARROW, reshuffled(2, 2)), 1.0, 3.0)
    mechanism = dpmf.Mechanism(NARROW, reshuffled(2, 2, gap=0))
    found = bounds(mechanism, 1.0, 3.0)
    for way in WAYS:
        truth = whole_mechanisms.exact_delta(mechanism, 1.0, 3.0, way, extra=1)
        assert apart[way] < 0.9 * truth
        assert found[way] >= truth


@pytest.mark.parametrize(
    ("strategy", "batching", "loose"),
    [(DENSE, reshuffled(2, 2, gap=2), 1.8), (SLOW, reshuffled(2, 2, gap=4), 2.5), (SLOW, reshuffled(3, 2, gap=1), 2.5)],
    ids=["fast decay", "slow decay", "three throws"],
)
def test_one_gaussian_covers_what_throws_have_in_common(strategy, batching, loose):
    """Columns that reach into later throws: one Gaussian mechanism that all throws share is composed with them."""
    mechanism = dpmf.Mechanism(strategy, batching)
    assert mechanism.product_between_throws > 0
    found = bounds(mechanism, 1.5, 2.0)
    for way in WAYS:
        truth = whole_mechanisms.exact_delta(mechanism, 1.5, 2.0, way)
        assert truth <= found[way] <= loose * truth


def test_every_group_of_a_stride_is_covered():
    """The last group has columns that are cut off earlier, so its δ is smaller than that of the first."""
    mechanism = dpmf.Mechanism(SLOW, BallsInBins(2, 4, 7, stride=2))
    found = dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0, accountant="chain")
    for way in WAYS:
        for group in range(2):
            run = whole_mechanisms.whole(mechanism, 2.0, group)
            gram = run.means @ run.means.T
            assert (mechanism.throw.gram_upper() / 4.0 >= gram * (1 - 1e-12)).all()
        assert found.details[way]["value"] >= whole_mechanisms.exact_delta(mechanism, 2.0, 1.0, way)
