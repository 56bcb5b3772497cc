"""Budgets: an answer in any case, sound, and one that says whether it was cut short; sizes refused in advance."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from oracles import gaussian_delta

import dpmf
from dpmf import BallsInBins, Mechanism, budget, strategies
from dpmf.accountants import ACCOUNTANTS, Auto, Best, Cascade, Chain, Conditional, Gaussian, MonteCarlo, Renyi
from dpmf.accountants.chain._lines import in_chunks
from dpmf.gram.bands import truncate
from dpmf.gram.means import gram_matrix
from dpmf.gram.sums import toeplitz_lags
from dpmf.search import least_noise

# Lower bounds are beside what is asked for here.
pytestmark = pytest.mark.usefixtures("coarse_lower_bounds")

SMALL = Mechanism(strategies.bsr(3), BallsInBins(2, 8))
PLAIN = Mechanism(strategies.dpsgd(), BallsInBins(2, 8))
NAMES = ["best", "auto", "chain", "own-bin", "moments", "cascade", "renyi", "conditional", "lattice", "gaussian"]
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


def test_every_deterministic_accountant_is_here():
    sampled, by_others = {"monte-carlo"}, {"random-allocation", "pld-accounting"}
    assert set(NAMES) == set(ACCOUNTANTS) - sampled - by_others


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [{"time_budget": NONE_LEFT}, {"memory_budget": 1.0}], ids=["time", "memory"])
def test_without_time_or_memory_closed_forms_answer(name, limit):
    if name == "gaussian" and "memory_budget" in limit:
        return  # it takes next to none
    mechanism = PLAIN if name == "lattice" else SMALL
    closed = dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-5, accountant="gaussian")
    found = dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-5, accountant=name, **limit)
    assert found.noise_multiplier == pytest.approx(closed.noise_multiplier, rel=1e-3)
    assert found.delta <= 1e-5
    assert found.accountant == name
    assert all(how["budget_exhausted"] for how in found.details.values())
    at = {"noise_multiplier": 2.0, "accountant": name, **limit}
    expected = {"noise_multiplier": 2.0, "accountant": "gaussian"}
    if name != "gaussian":  # that one takes no time at all
        short = dpmf.epsilon(mechanism, delta=1e-5, **at)
        assert short.epsilon == pytest.approx(dpmf.epsilon(mechanism, delta=1e-5, **expected).epsilon, rel=1e-3)
        assert all(how["budget_exhausted"] for how in short.details.values())
    profile = dpmf.profile(mechanism, epsilons=[0.0, 1.0, 3.0], with_lower=True, **at)
    full = dpmf.profile(mechanism, epsilons=[0.0, 1.0, 3.0], **expected)
    assert profile.budget_exhausted
    assert np.all(profile.deltas <= full.deltas * (1 + 1e-9))
    assert np.all(profile.lower <= profile.deltas)


def test_closed_forms_without_the_gram_matrix():
    mechanism = Mechanism(strategies.bsr(4), BallsInBins(3, 12, 31))
    gram = gram_matrix(mechanism.strategy, mechanism.batching)
    found = Gaussian().prepare(mechanism)
    assert "gram" not in mechanism.__dict__
    for epsilon in (0.0, 1.0):
        value = found.delta(2.0, epsilon, "remove").value
        assert value == pytest.approx(gaussian_delta(gram.max() / 4.0, epsilon), rel=1e-9)
    sums = mechanism.gram_sums
    np.testing.assert_allclose(sums.diagonal, np.diagonal(gram), rtol=1e-12)
    assert sums.total == pytest.approx(gram.sum(), rel=1e-12)
    dense = Mechanism(strategies.matrix(mechanism.strategy.matrix(31)), mechanism.batching)
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
        excess = None

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
    """The same prepared object takes fewer orders within a time limit than without one."""
    bounds = Renyi().prepare(Mechanism(strategies.bsr(4), BallsInBins(4, 60))).bounds()[:2]
    with budget.time_limit(0.05):
        short = [bound.most_orders() for bound in bounds]
    assert all(few < bound.most_orders() for few, bound in zip(short, bounds, strict=True))


def test_sizes_are_refused_in_advance():
    with pytest.raises(ValueError, match=r"batches_per_epoch must be smaller: .*30000 × 30000.* 6.71 GiB"):
        _ = Mechanism(strategies.bsr(4), BallsInBins(1, 30_000)).gram
    with pytest.raises(ValueError, match=r"batches_per_epoch or epochs must be smaller: lag products of 90000000 "):
        toeplitz_lags(strategies.bsr(4), BallsInBins(1, 90_000_000))
    with pytest.raises(ValueError, match=r"batches_per_epoch must be smaller: the bands of the 20000 × 20000 "):
        truncate(np.broadcast_to(np.float64(1.0), (20_000, 20_000)), 3)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["time_budget", "memory_budget"])
def test_bad_budgets(value, name):
    with pytest.raises(ValueError, match=f"{name} must"):
        dpmf.delta(SMALL, noise_multiplier=1.0, epsilon=1.0, **{name: value})


# --- memory --------------------------------------------------------------------------------------------------------


def test_memory_limits_nest_and_remember():
    assert budget.fitting(1.0) == np.inf
    budget.claim(1e300)
    with budget.memory_limit(1000.0) as outer:
        with budget.memory_limit(10.0) as inner:
            budget.claim(10.0)
            with pytest.raises(budget.OutOfMemory):
                budget.claim(11.0)
        assert inner.passed
        assert not outer.passed
        with budget.memory_limit(5000.0) as inner:
            assert budget.fitting(8.0) == 125
            with budget.unlimited():
                budget.claim(1e9)
            with pytest.raises(budget.OutOfMemory):
                budget.require(1001.0, "it", "x")
        assert outer.passed
    with budget.memory_limit(1e20):  # more than is allowed by default
        budget.require(1e12, "it", "x")
    with pytest.raises(ValueError, match="x must be smaller"):
        budget.require(1e12, "it", "x")


@pytest.mark.parametrize("name", NAMES)
def test_enough_memory_changes_nothing(name):
    mechanism = PLAIN if name == "lattice" else SMALL
    accountant = {"renyi": Renyi(work_budget=1e6), "best": Best(renyi=Renyi(work_budget=1e6))}.get(name, name)
    at = {"noise_multiplier": 2.0, "epsilon": 1.0, "accountant": accountant}
    within, without = dpmf.delta(mechanism, memory_budget=1e9, **at), dpmf.delta(mechanism, **at)
    assert within.delta == pytest.approx(without.delta, rel=1e-9)
    assert not any(how.get("budget_exhausted") for how in within.details.values())


LARGE = Mechanism(strategies.bsr(4), BallsInBins(2, 1200))  # a Gram matrix of 12 MB
MEGABYTES = 30e6


@pytest.mark.parametrize(
    "accountant",
    [Renyi(work_budget=1e6), Chain(), Conditional(), Cascade(), Best(), Auto()],
    ids=lambda a: a.name,
)
def test_arrays_stay_within_the_budget(accountant):
    """Twice the budget, and ten megabytes of work space: a Rényi accountant would take a hundred, a chain more."""
    mechanism = Mechanism(LARGE.strategy, LARGE.batching)  # nothing is kept from one accountant to the next
    dpmf.delta(SMALL, noise_multiplier=2.0, epsilon=1.0, accountant=accountant, direction="remove")  # compiles
    tracemalloc.start()
    try:
        found = dpmf.delta(
            mechanism, noise_multiplier=2.0, epsilon=1.0, accountant=accountant, direction="remove",
            memory_budget=MEGABYTES, with_lower=True,
        )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < 2 * MEGABYTES + 1e7
    finally:
        tracemalloc.stop()
    closed = dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0, accountant="gaussian", direction="remove").delta
    assert found.lower <= found.delta <= closed
    assert found.details["remove"].get("budget_exhausted", False) == (accountant.name != "cascade")
    if accountant.name in ("best", "auto"):  # the cascade fits
        assert found.delta < closed / 2


def test_sampling_that_does_not_fit_is_refused():
    """An estimate was asked for: a bound of another accountant would not be one."""
    mechanism = Mechanism(LARGE.strategy, LARGE.batching)
    with pytest.raises(dpmf.CalibrationError, match="memory_budget is too little for monte-carlo"):
        dpmf.delta(
            mechanism, noise_multiplier=2.0, epsilon=1.0, accountant=MonteCarlo(samples=1000), memory_budget=MEGABYTES
        )


def test_a_lattice_takes_as_many_points_as_fit():
    at = {"noise_multiplier": 0.5, "epsilon": 1.0, "accountant": "lattice"}
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, 1000))
    full = dpmf.delta(mechanism, **at)
    few = dpmf.delta(mechanism, memory_budget=1e6, **at)
    assert few.delta >= full.delta * (1 - 1e-6)
    assert few.details["remove"]["budget_exhausted"]
    assert few.details["remove"]["points"] < full.details["remove"]["points"]


def test_threads_know_the_budgets():
    def transform(s):
        budget.check()
        budget.claim(100.0)
        return s

    with ThreadPoolExecutor(1) as pool, budget.memory_limit(10.0):  # a thread of one's own does not
        pool.submit(budget.claim, 100.0).result()
    for limit, ended in ((budget.memory_limit(10.0), budget.OutOfMemory), (budget.time_limit(0.0), budget.OutOfTime)):
        with limit as kept, pytest.raises(ended):
            in_chunks(transform, np.zeros(64, dtype=complex), 4)
        assert kept.passed


# --- what was reached is not lost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [budget.OutOfTime, budget.OutOfMemory])
@pytest.mark.parametrize("question", ["delta", "epsilon", "calibrate", "profile"])
def test_best_keeps_what_its_first_members_reached(monkeypatch, ended, question):
    """The budget ends while the chain is prepared: by then the cascade has answered."""

    def bounds(self, mechanism):
        raise ended

    monkeypatch.setattr(Chain, "_bounds", bounds)
    limit = {"time_budget": 1e6} if ended is budget.OutOfTime else {"memory_budget": 1e12}
    quick = Best(renyi=Renyi(work_budget=1e4))

    def ask(accountant, **more):
        at = {"accountant": accountant, "direction": "remove", **more}
        if question == "calibrate":
            return dpmf.calibrate(SMALL, target_epsilon=1.0, target_delta=1e-5, **at).noise_multiplier
        if question == "epsilon":
            return dpmf.epsilon(SMALL, noise_multiplier=2.0, delta=1e-5, **at).epsilon
        if question == "delta":
            return dpmf.delta(SMALL, noise_multiplier=2.0, epsilon=1.0, **at).delta
        return float(dpmf.profile(SMALL, noise_multiplier=2.0, epsilons=[1.0, 2.0], **at).deltas[0])

    assert ask(quick, **limit) <= ask("cascade") * (1 + 1e-3) < 0.9 * ask("gaussian")


def test_threads_side_by_side_keep_the_budgets_and_the_order():
    with budget.time_limit(1e6):
        left = budget.side_by_side([lambda: budget.seconds_left() < 1e6, lambda: "second"])
    assert left == [True, "second"]
    with budget.time_limit(NONE_LEFT), pytest.raises(budget.OutOfTime):
        budget.side_by_side([budget.check, lambda: None])


def test_where_memory_is_limited_one_piece_runs_after_the_other():
    with budget.memory_limit(1e6):
        found = budget.side_by_side([threading.current_thread] * 2)
    assert found == [threading.current_thread()] * 2


def test_sampling_ends_with_an_error():
    with pytest.raises(dpmf.CalibrationError, match="time_budget is too short for monte-carlo"):
        dpmf.delta(SMALL, noise_multiplier=2.0, epsilon=1.0, accountant="monte-carlo", time_budget=NONE_LEFT)
