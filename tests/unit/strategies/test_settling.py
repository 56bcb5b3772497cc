"""Settling the noise of a throw: the least that can be left of it, and the loss that a search for coefficients uses."""

from __future__ import annotations

import numpy as np
import pytest

from dpmf import strategies, workloads
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.strategies import settling
from dpmf.strategies.amplified import _families
from dpmf.workloads import squared_rows
from tests.decoders import merged


@pytest.mark.parametrize(("bandwidth", "steps", "gap"), [(2, 5, 1), (4, 9, 3), (4, 9, 8), (7, 7, 6), (1, 5, 2)])
def test_no_other_weights_leave_less(bandwidth: int, steps: int, gap: int) -> None:
    """The least variance of an unbiased estimate of the sum, by the theorem of Gauss and Markov."""
    strategy = strategies.bsr(bandwidth)
    found = settling.settle(strategy.noising_coef(steps + gap), steps, gap)
    matrix = strategy.matrix(steps + gap)
    left = np.linalg.inv(matrix)[:steps].sum(axis=0) + found.settled_row()
    np.testing.assert_allclose(left @ matrix[:, :steps], np.ones(steps), atol=1e-12)
    least = np.linalg.inv(matrix[:, :steps].T @ matrix[:, :steps]).sum()
    assert left @ left == pytest.approx(least, rel=1e-10)


def test_long_throws_are_settled_by_their_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    column = strategies.bsr(8).noising_coef(407)
    whole = settling.settle(column, 400, 7).settled_row()
    monkeypatch.setattr(settling, "_FAR", 100)
    cut = settling.settle(column, 400, 7).settled_row()
    ones = np.linalg.inv(strategies.bsr(8).matrix(407))[:400].sum(axis=0)
    assert np.linalg.norm(ones + cut) == pytest.approx(np.linalg.norm(ones + whole), rel=1e-3)


@pytest.mark.parametrize("memory", [np.inf, 20.0, 1.0])
def test_the_loss_of_a_search(memory: float) -> None:
    workload = workloads.prefix() if np.isinf(memory) else workloads.damped(memory)
    steps, throws, p = 24, 3, 6
    family = _families.Banded(steps, p)
    loss = settling.settled_loss(workload.loss(steps), workload.kept, steps, throws, p)
    x = family.start + 0.1 * np.arange(len(family.start))
    columns = family.columns(x)
    value, by_strategy, by_noising = loss(*columns)
    mechanism = Mechanism(strategies.coefficients(columns.strategy[:p]), BallsInBins(6, 12, rethrow_every=2))
    assert mechanism.batching.steps == throws * steps
    # Settling is for prefix sums, whatever the workload is. The loss is that of settling for the workload itself.
    exact = float(squared_rows(mechanism, workload).mean())
    assert value <= exact * (1 + 1e-12)
    assert value == pytest.approx(exact, rel=1e-10 if np.isinf(memory) else 1e-2)
    gradient = family.gradient(x, columns, by_strategy, by_noising)
    for place, direction in enumerate(np.eye(len(x))):
        difference = (
            loss(*family.columns(x + 1e-6 * direction))[0] - loss(*family.columns(x - 1e-6 * direction))[0]
        ) / 2e-6
        assert difference == pytest.approx(float(gradient[place]), rel=1e-5, abs=1e-8)


def test_a_gap_that_is_too_short_settles_nothing() -> None:
    for gap, settles in ((2, False), (3, True), (9, True)):
        mechanism = Mechanism(strategies.bsr(4), BallsInBins(4, 6, rethrow_every=1, gap=gap))
        assert (mechanism.settling is not None) == settles
    assert Mechanism(strategies.bsr(4), BallsInBins(4, 6)).settling is None
    assert Mechanism(strategies.bsr(4), BallsInBins(4, 6, rethrow_every=1, stride=2)).settling is None


def _errors(column: np.ndarray, kept: float, settled: bool, steps: int = 100, throws: int = 10) -> float:
    """The error over ten epochs of a hundred batches, by adding up what the model remembers of each normal."""
    strategy = strategies.coefficients(column)
    mechanism = Mechanism(strategy, BallsInBins(throws, steps, rethrow_every=1))
    if settled:
        assert mechanism.settling is not None
        rows = mechanism.settling.decoder(throws)
    else:
        rows = merged(mechanism) @ strategy.inverse(mechanism.batching.iterations)
    total, model = 0.0, np.zeros(rows.shape[1])
    for row in rows:
        model = kept * model + row
        total += float(model @ model)
    return float(np.sqrt(total / len(rows)))


def test_what_the_pages_say_is_gained() -> None:
    """docs/theory/batchings.md: 1, 6 and 12 % of the error of prefix sums, for any memory."""
    for bandwidth, power, decay, gained in ((8, 0.5, 0.9999, 0.01), (32, 0.4, 0.9825, 0.056), (64, 0.41, 0.97, 0.124)):
        column = strategies.power(power, decay).strategy_coef(bandwidth)
        assert _errors(column, 1.0, True) / _errors(column, 1.0, False) == pytest.approx(1 - gained, abs=0.002)
        for kept in (0.95, 0.99):
            workload = workloads.damped(1 / (1 - kept))
            loss = settling.settled_loss(workload.loss(100), workload.kept, 100, 10, bandwidth)
            padded = np.zeros(100)
            padded[:bandwidth] = column
            best = loss(padded, strategies.coefficients(column).noising_coef(100))[0] ** 0.5
            assert best <= _errors(column, kept, True) <= 1.001 * best
