"""Time budgets: an answer in any case, sound, and one that says whether it was cut short; sizes refused in advance."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import gaussian_delta

import dpmf
from dpmf import BallsInBins, Mechanism, budget, strategies
from dpmf.accountants import Chain, Gaussian, Renyi
from dpmf.allocation import gram_matrix, truncate
from dpmf.lag_products import toeplitz_lags
from dpmf.search import least_noise

SMALL = Mechanism(strategies.bsr(3), BallsInBins(2, 8))
NAMES = ["best", "auto", "chain", "renyi", "conditional", "gaussian"]
NONE_LEFT = 1e-9


def test_deadlines_nest_and_remember():
    with budget.time_limit(1000) as outer:
        with budget.time_limit(0.0) as inner, pytest.raises(budget.OutOfTime):
            budget.check()
        assert inner.passed
        assert not outer.passed
        with budget.time_limit(5000) as inner:
            assert inner.ends == outer.ends
        budget.check()
        with budget.unlimited():
            assert budget.seconds_left() == np.inf
    with budget.time_limit(0.0) as outer, budget.time_limit(None) as inner:
        with pytest.raises(budget.OutOfTime):
            budget.check()
        assert outer.passed
        assert inner.passed
    assert budget.current() is None


@pytest.mark.parametrize("name", NAMES)
def test_without_time_closed_forms_answer(name):
    closed = dpmf.calibrate(SMALL, target_epsilon=1.0, target_delta=1e-5, accountant="gaussian")
    found = dpmf.calibrate(SMALL, target_epsilon=1.0, target_delta=1e-5, accountant=name, time_budget=NONE_LEFT)
    assert found.noise_multiplier == pytest.approx(closed.noise_multiplier, rel=1e-3)
    assert found.delta <= 1e-5
    assert found.accountant == name
    assert all(how["budget_exhausted"] for how in found.details.values())
    at = {"noise_multiplier": 2.0, "accountant": name, "time_budget": NONE_LEFT}
    expected = {"noise_multiplier": 2.0, "accountant": "gaussian"}
    if name != "gaussian":  # that one takes no time at all
        assert dpmf.epsilon(SMALL, delta=1e-5, **at).epsilon == pytest.approx(
            dpmf.epsilon(SMALL, delta=1e-5, **expected).epsilon, rel=1e-3
        )
    profile = dpmf.profile(SMALL, epsilons=[0.0, 1.0, 3.0], with_lower=True, **at)
    full = dpmf.profile(SMALL, epsilons=[0.0, 1.0, 3.0], **expected)
    assert profile.budget_exhausted
    assert np.all(profile.deltas <= full.deltas * (1 + 1e-9))
    assert np.all(profile.lower <= profile.deltas)


def test_closed_forms_without_the_gram_matrix():
    mechanism = Mechanism(strategies.bsr(4), BallsInBins(3, 12, 31))
    gram = gram_matrix(mechanism.strategy, mechanism.allocation)
    found = Gaussian().prepare(mechanism)
    assert "gram" not in mechanism.__dict__
    for epsilon in (0.0, 1.0):
        value = found.delta_one_way(2.0, epsilon, "remove").value
        assert value == pytest.approx(gaussian_delta(gram.max() / 4.0, epsilon), rel=1e-9)
    sums = mechanism.gram_sums
    np.testing.assert_allclose(sums.diagonal, np.diagonal(gram), rtol=1e-12)
    assert sums.total == pytest.approx(gram.sum(), rel=1e-12)
    dense = Mechanism(strategies.matrix(mechanism.strategy.matrix(31)), mechanism.allocation)
    np.testing.assert_allclose(dense.gram_sums.diagonal, np.diagonal(gram), rtol=1e-12)
    assert dense.gram_sums.total == pytest.approx(gram.sum(), rel=1e-12)


class _Clock:
    """A clock that an evaluation moves on."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(budget.time, "monotonic", lambda: self.now)


def test_search_keeps_what_it_found(monkeypatch):
    clock = _Clock(monkeypatch)

    class Bound:
        def __init__(self, value: float) -> None:
            self.value = value

    def evaluate(sigma: float) -> Bound:
        clock.now += 1.0
        return Bound(1 / sigma)

    exact = least_noise(evaluate, 1e-3, 1.0, 1e-6)
    assert exact is not None
    assert exact[0] == pytest.approx(1000.0, rel=1e-5)
    seen = []
    for seconds in (5.5, 6.5, 8.5):
        with budget.time_limit(seconds) as deadline:
            try:
                found = least_noise(evaluate, 1e-3, 1.0, 1e-6)
            except budget.OutOfTime:
                continue
            assert deadline.passed or found[0] == pytest.approx(1000.0, rel=1e-5)
            assert found is not None
            assert found[0] >= 1000.0
            assert found[1].value <= 1e-3
            seen.append(found[0])
    assert seen == sorted(seen, reverse=True)
    assert seen


@pytest.mark.parametrize("steps", [3, 30, 100])
def test_chain_cut_short_is_sound(steps, monkeypatch):
    """The clock moves with every look at it, so that the work ends in the middle, the same way on every machine."""
    full = dpmf.calibrate(SMALL, target_epsilon=1.0, target_delta=1e-5, accountant=Chain())
    ticks = iter(range(10**9))
    monkeypatch.setattr(budget.time, "monotonic", lambda: float(next(ticks)))
    found = dpmf.calibrate(SMALL, target_epsilon=1.0, target_delta=1e-5, accountant=Chain(), time_budget=float(steps))
    assert found.noise_multiplier >= full.noise_multiplier * (1 - 2e-4)
    assert found.delta <= 1e-5
    assert any(how.get("budget_exhausted") for how in found.details.values())


def test_orders_follow_the_time_left():
    with budget.time_limit(0.05):
        short = Renyi().prepare(Mechanism(strategies.bsr(4), BallsInBins(4, 60)))
    long = Renyi().prepare(Mechanism(strategies.bsr(4), BallsInBins(4, 60)))
    assert all(a._most < b._most for a, b in zip(short.members()[:2], long.members()[:2], strict=True))


def test_sizes_are_refused_in_advance():
    with pytest.raises(ValueError, match=r"batches_per_epoch must be smaller: .*30000 × 30000.* 6.71 GiB"):
        _ = Mechanism(strategies.bsr(4), BallsInBins(1, 30_000)).gram
    with pytest.raises(ValueError, match=r"batches_per_epoch or epochs must be smaller: lag products of 90000000 "):
        toeplitz_lags(strategies.bsr(4), BallsInBins(1, 90_000_000))
    with pytest.raises(ValueError, match=r"batches_per_epoch must be smaller: the bands of the 20000 × 20000 "):
        truncate(np.broadcast_to(np.float64(1.0), (20_000, 20_000)), 3)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_bad_budgets(value):
    with pytest.raises(ValueError, match="time_budget must"):
        dpmf.delta(SMALL, noise_multiplier=1.0, epsilon=1.0, time_budget=value)
