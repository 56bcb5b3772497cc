"""Workloads and the error of a mechanism: dense twins, closed forms, refusals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dpmf import error, strategies, workloads
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.strategies.base import Strategy
from dpmf.workloads import Workload
from tests.decoders import decoder

N = 24
RATES = np.random.default_rng(1).uniform(-0.5, 2.0, N)
MATRIX = np.tril(np.random.default_rng(2).normal(size=(N, N)))
WORKLOADS = [
    workloads.prefix(),
    workloads.damped(1.0),
    workloads.damped(7.5),
    workloads.momentum(0.9),
    workloads.momentum(0.5, weight_decay=0.1),
    workloads.schedule("cosine"),
    workloads.schedule("linear", warm_up=0.3, memory=5),
    workloads.schedule(RATES, memory=9, beta=0.6),
    workloads.matrix(MATRIX),
]


def slow_matrix(workload: Workload, n: int) -> Array:
    """A by running the update on one unit of noise at a time."""
    if isinstance(workload, workloads.ExplicitWorkload):
        return MATRIX
    rates, kept, beta = np.ones(n), 1.0, 0.0
    if isinstance(workload, workloads.Damped):
        kept = 1 - 1 / workload.memory
    elif isinstance(workload, workloads.Momentum):
        kept, beta = 1 - workload.decay, workload.beta
    elif isinstance(workload, workloads.Scheduled):
        rates, kept, beta = workload.rates(n), 1 - 1 / workload.memory, workload.beta
    out = np.zeros((n, n))
    for s in range(n):
        model = velocity = 0.0
        for t in range(n):
            velocity = beta * velocity + (t == s)
            model = kept * model + rates[t] * velocity
            out[t, s] = model
    return out


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
@pytest.mark.parametrize(
    "strategy",
    [
        strategies.dpsgd(),
        strategies.bsr(3),
        strategies.bisr(3),
        strategies.bsr(N),
        strategies.bsr(3).normalized("each"),  # not Toeplitz
    ],
    ids=str,
)
def test_error_is_that_of_the_dense_product(workload: Workload, strategy: Strategy) -> None:
    mechanism = Mechanism(strategy, BallsInBins(4, 6))
    np.testing.assert_allclose(workload.matrix(N), slow_matrix(workload, N), atol=1e-12)
    dense = slow_matrix(workload, N) @ np.linalg.inv(strategy.matrix(N))
    norms = np.linalg.norm(dense, axis=1)
    found = error(mechanism, 1.5, workload)
    assert found.root_mean_square == pytest.approx(1.5 * math.sqrt(np.mean(norms**2)))
    assert found.largest == pytest.approx(1.5 * norms.max())
    assert found.last == pytest.approx(1.5 * norms[-1])


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_the_loss_and_its_gradient(workload: Workload) -> None:
    rng = np.random.default_rng(3)
    noising = rng.normal(size=N)
    loss = workload.loss(N)
    value, gradient = loss(noising)
    assert value == pytest.approx(float(workload.squared_rows(noising).mean()))
    for _ in range(3):
        step = rng.normal(size=N)
        difference = (loss(noising + 1e-5 * step)[0] - loss(noising - 1e-5 * step)[0]) / 2e-5
        assert difference == pytest.approx(float(gradient @ step), rel=1e-6)


def test_a_million_iterations() -> None:
    """Prefix sums with independent noise have the error √t; with the whole square root, a sum of squares."""
    n = 10**6
    found = error(Mechanism(strategies.dpsgd(), BallsInBins(10, n // 10)), 2.0, workloads.prefix())
    assert found.root_mean_square == pytest.approx(2 * math.sqrt((n + 1) / 2))
    assert found.last == found.largest == pytest.approx(2 * math.sqrt(n))
    steps = np.arange(1, n)
    root = np.concatenate(([1.0], np.cumprod((2 * steps - 1) / (2 * steps))))
    found = error(Mechanism(strategies.bsr(n), BallsInBins(10, n // 10)), 1.0, workloads.prefix())
    assert found.last == pytest.approx(float(np.linalg.norm(root)), rel=1e-9)
    rates = workloads.schedule("cosine").rates(n)
    found = error(Mechanism(strategies.bisr(4), BallsInBins(10, n // 10)), 1.0, workloads.schedule("cosine"))
    assert math.isfinite(found.last)
    found = error(Mechanism(strategies.dpsgd(), BallsInBins(10, n // 10)), 1.0, workloads.schedule("cosine"))
    assert found.last == pytest.approx(float(np.linalg.norm(rates)))


def test_named_schedules() -> None:
    rates = workloads.schedule("cosine", warm_up=0.25).rates(1000)
    assert np.mean(rates**2) == pytest.approx(1)
    assert np.argmax(rates) == pytest.approx(250, abs=1)
    assert np.all(np.diff(rates[:250]) > 0)
    assert np.all(np.diff(rates[251:]) < 0)
    assert rates[-1] < 1e-4
    np.testing.assert_array_equal(workloads.schedule("constant").rates(7), np.ones(7))


def test_equal_workloads_have_equal_keys() -> None:
    again = [workloads.prefix(), workloads.schedule(RATES, memory=9, beta=0.6), workloads.matrix(MATRIX.tolist())]
    for workload in again:
        assert workload in WORKLOADS
        assert workload.key == WORKLOADS[WORKLOADS.index(workload)].key
    assert len({workload.key for workload in WORKLOADS}) == len(WORKLOADS)


def test_build_by_name(tmp_path: Path) -> None:
    assert workloads.build("prefix") == workloads.prefix()
    assert workloads.build("damped", memory=30) == workloads.damped(30)
    assert workloads.build("momentum", beta=0.9, weight_decay=0.1) == workloads.momentum(0.9, 0.1)
    assert workloads.build("schedule", schedule="cosine", memory=5) == workloads.schedule("cosine", memory=5)
    np.save(tmp_path / "a.npy", MATRIX)
    (tmp_path / "rates.csv").write_text(",".join(map(repr, RATES.tolist())))
    assert workloads.build("matrix", file=tmp_path / "a.npy") == workloads.matrix(MATRIX)
    assert workloads.build("schedule", schedule=str(tmp_path / "rates.csv")) == workloads.schedule(RATES)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: workloads.damped(0.5), "memory must be at least 1, got 0.5"),
        (lambda: workloads.momentum(1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda: workloads.schedule("sine"), "schedule must be one of constant, cosine, linear, got 'sine'"),
        (lambda: workloads.schedule([1.0, math.nan]), "schedule must be a row of finite learning rates"),
        (lambda: workloads.schedule([1.0], warm_up=0.1), "warm_up applies only to schedules by name"),
        (lambda: workloads.matrix(np.ones((2, 2))), "workload must be a lower-triangular matrix of finite numbers"),
        (lambda: workloads.matrix(np.ones((2, 3))), r"workload must be a square matrix, got shape \(2, 3\)"),
        (lambda: workloads.build("damped"), "memory must be given for workload damped"),
        (lambda: workloads.build("prefix", beta=0.9), "beta does not apply to workload prefix"),
        (
            lambda: error(Mechanism(strategies.dpsgd(), BallsInBins(1, 5)), 1.0, workloads.matrix(MATRIX)),
            "workload must be a matrix of N × N with N = 5",
        ),
        (
            lambda: error(Mechanism(strategies.dpsgd(), BallsInBins(1, 5)), 1.0, workloads.schedule(RATES)),
            "schedule must have one learning rate for each of the 5 iterations, got 24",
        ),
        (lambda: error(Mechanism(strategies.dpsgd(), BallsInBins(1, 5)), 0.0, workloads.prefix()), "noise_multiplier"),
        (lambda: error(Mechanism(strategies.dpsgd(), BallsInBins(1, 5)), 1.0, "prefix"), "workload must be a dpmf"),
    ],
)
def test_refusals(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
@pytest.mark.parametrize(
    ("strategy", "batching"),
    [
        (strategies.bsr(4), BallsInBins(4, 6, rethrow_every=1)),
        (strategies.bsr(3).normalized(), BallsInBins(4, 6, rethrow_every=2, gap=5)),
        (strategies.dpsgd(), BallsInBins(4, 6, rethrow_every=1, gap=2)),
        (strategies.bsr(4), BallsInBins(4, 6, rethrow_every=1, gap=2)),  # too short: nothing is settled
        (strategies.bisr(3), BallsInBins(4, 6, rethrow_every=1, gap=2)),
    ],
    ids=str,
)
def test_the_error_with_gaps_is_that_of_the_steps(
    workload: Workload, strategy: Strategy, batching: BallsInBins
) -> None:
    mechanism = Mechanism(strategy, batching)
    dense = slow_matrix(workload, N) @ decoder(mechanism)
    np.testing.assert_allclose(workloads.squared_rows(mechanism, workload), np.sum(dense**2, axis=1), rtol=1e-9)
