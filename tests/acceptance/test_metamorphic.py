"""Relations between answers that hold whatever the answers are, for every deterministic accountant."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dpmf
from dpmf import BallsInBins, Mechanism, strategies
from dpmf.accountants import ACCOUNTANTS, Accountant, Best, Chain, Conditional, Gaussian, Lattice, Renyi
from soundness.plans import NOT_OURS
from soundness.truth import gaussian_delta, true_delta

QUICK = Renyi(work_budget=1e5)
DIRECTIONS = ("remove", "add")
OPTIONS: dict[str, Accountant] = {"renyi": QUICK, "best": Best(renyi=QUICK)}
# What `auto` answers is the answer of one of the others.
DETERMINISTIC = [OPTIONS.get(name) or cls() for name, cls in ACCOUNTANTS.items() if name not in (*NOT_OURS, "auto")]
named = pytest.mark.parametrize("accountant", DETERMINISTIC, ids=lambda a: a.name)
ENTRIES = np.tril(np.random.default_rng(4).random((6, 6))) + 0.2 * np.eye(6)


def delta(mechanism: Mechanism, sigma: float, epsilon: float, accountant: Accountant, direction: str) -> float | None:
    """None where the accountant does not take this mechanism."""
    try:
        prepared = accountant.prepare(mechanism)
    except ValueError:
        assert isinstance(accountant, Lattice)
        return None
    return dpmf.delta(
        mechanism, noise_multiplier=sigma, epsilon=epsilon, accountant=prepared, direction=direction
    ).delta


def matrix(entries: np.ndarray, b: int) -> Mechanism:
    return Mechanism(strategies.matrix(entries), BallsInBins.from_iterations(len(entries), b))


@named
@pytest.mark.parametrize("scale", [1e-6, 0.3, 1e5])
def test_scaling_the_strategy_and_the_noise_together_changes_nothing(accountant: Accountant, scale: float) -> None:
    for direction in DIRECTIONS:
        expected = delta(matrix(ENTRIES, 3), 2.0, 1.0, accountant, direction)
        found = delta(matrix(ENTRIES * scale, 3), 2.0 * scale, 1.0, accountant, direction)
        # Conditional composition balances its bad event to a few percent.
        slack = 0.05 if isinstance(accountant, Conditional) else 2e-3
        assert found == (None if expected is None else pytest.approx(expected, rel=slack))


@named
def test_permuting_bins_keeps_every_bound_above_the_truth(accountant: Accountant) -> None:
    """The truth does not change; bounds that use the order of the bins may, but not to below it."""
    rows = np.array([[0.9, 0.1, 0.4, 0.7], [0.2, 0.8, 0.5, 0.1]])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        entries = np.zeros((8, 8))
        entries[-2:, :4] = rows[:, order]
        entries[-1, 4:] = 0
        mechanism = matrix(entries, 4)
        s = rows.T @ rows / 4
        for direction in DIRECTIONS:
            exact = true_delta(s, 0.7, direction)
            found = delta(mechanism, 2.0, 0.7, accountant, direction)
            assert found is None or found >= exact.low


@pytest.mark.parametrize("accountant", [Gaussian(), Renyi(bandwidth=1)], ids=lambda a: a.name)
def test_permuting_bins_changes_nothing_where_order_is_not_used(accountant: Accountant) -> None:
    rows = np.array([[0.9, 0.1, 0.4, 0.7], [0.2, 0.8, 0.5, 0.1]])
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        entries = np.zeros((8, 8))
        entries[-2:, :4] = rows[:, order]
        found.append([delta(matrix(entries, 4), 2.0, 0.7, accountant, direction) for direction in DIRECTIONS])
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    assert found[2] == pytest.approx(found[0], rel=1e-9)


@named
@pytest.mark.parametrize("k", [2, 9])
def test_epochs_of_the_identity_are_one_with_less_noise(accountant: Accountant, k: int) -> None:
    """k epochs of the same bins at σ are one at σ/√k. Conditional composition sees the steps, and may lose by it."""
    for direction in DIRECTIONS:
        several = delta(
            Mechanism(strategies.dpsgd(), BallsInBins(k, 4)), 2.0 * math.sqrt(k), 0.8, accountant, direction
        )
        once = delta(Mechanism(strategies.dpsgd(), BallsInBins(1, 4)), 2.0, 0.8, accountant, direction)
        assert several is not None
        assert once is not None
        if isinstance(accountant, Conditional):
            exact = true_delta(np.eye(4) / 4, 0.8, direction)
            assert several >= exact.low
        else:
            assert several == pytest.approx(once, rel=2e-3)


@named
def test_one_batch_is_the_gaussian_mechanism(accountant: Accountant) -> None:
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(4, 1))
    for direction in DIRECTIONS:
        found = delta(mechanism, 3.0, 1.0, accountant, direction)
        exact = gaussian_delta(4 / 9, 1.0)
        assert found is not None
        assert found >= exact * (1 - 1e-9)
        if not isinstance(accountant, Renyi):  # which converts moments
            assert found <= exact * 1.02


@named
def test_entrywise_larger_gram_matrices_need_more(accountant: Accountant) -> None:
    """Up to a few percent where a bound balances something; the truth is strictly monotone."""
    grown = ENTRIES * (1 + 0.3 * np.tril(np.random.default_rng(5).random((6, 6))))
    for direction in DIRECTIONS:
        small, large = (delta(matrix(e, 3), 3.0, 1.0, accountant, direction) for e in (ENTRIES, grown))
        assert (small is None and large is None) or large >= small * 0.97


@named
def test_splitting_into_a_composition(accountant: Accountant) -> None:
    """A part of the rows of C is a mechanism of its own, and releases less: post-processing."""
    for direction in DIRECTIONS:
        whole = delta(matrix(ENTRIES, 3), 2.0, 1.0, accountant, direction)
        for keep in (slice(0, 3), slice(3, 6)):
            part = np.zeros_like(ENTRIES)
            part[keep] = ENTRIES[keep]
            found = delta(matrix(part, 3), 2.0, 1.0, accountant, direction)
            assert found is None or whole is None or found <= whole * 1.03


def test_splitting_into_independent_blocks_composes() -> None:
    """Rows that share nothing but the bin: Gram matrices add, and so do the squares of one-bin sensitivities."""
    first, second = ENTRIES.copy(), ENTRIES.copy()
    first[3:], second[:3] = 0, 0
    grams = [matrix(e, 3).gram for e in (ENTRIES, first, second)]
    np.testing.assert_allclose(grams[0], grams[1] + grams[2], rtol=1e-12)
    for epsilon in (0.2, 1.0):
        parts = [matrix(e, 1).sensitivity ** 2 for e in (first, second)]
        found = delta(matrix(ENTRIES, 1), 8.0, epsilon, Chain(), "remove")
        assert found == pytest.approx(gaussian_delta(sum(parts) / 64, epsilon), rel=1e-6)


@pytest.mark.parametrize("accountant", [Gaussian(), Chain(), Best(renyi=QUICK), Conditional()], ids=lambda a: a.name)
def test_both_directions_agree_where_both_are_exact(accountant: Accountant) -> None:
    """One batch, or identical means: the pair is symmetric."""
    same = np.zeros((3, 3))
    same[-1] = 1.0
    for mechanism in (Mechanism(strategies.bsr(2), BallsInBins(3, 1)), matrix(same, 3)):
        for epsilon in (0.1, 1.0, 3.0):
            remove, add = (delta(mechanism, 1.5, epsilon, accountant, direction) for direction in DIRECTIONS)
            assert remove == pytest.approx(add, rel=2e-2)


@pytest.mark.parametrize("epsilon", [0.1, 0.7, 2.0])
def test_put_call_parity_of_tight_bounds(epsilon: float) -> None:
    """δ_add(ε) = 1 − e^ε + e^ε·δ_remove(−ε); here by the quadrature, between which and it the lattice must lie."""
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, 3))
    exact = true_delta(np.eye(3) / 2.25, epsilon, "add")
    parity = 1 - math.exp(epsilon) + math.exp(epsilon) * true_delta(np.eye(3) / 2.25, -epsilon, "remove").high
    assert parity == pytest.approx(exact.high, rel=1e-6, abs=1e-7)
    found = delta(mechanism, 1.5, epsilon, Lattice(), "add")
    assert found is not None
    assert exact.low <= found <= exact.high * 1.02
