"""Balls-in-bins matrix mechanisms as events of dp_accounting: sound, tight, and at home among its other events."""

from __future__ import annotations

import importlib
import math
import pickle
import re

import dp_accounting
import numpy as np
import oracles
import paths
import pytest
from dp_accounting import dp_event, privacy_accountant_test
from hypothesis import given
from hypothesis import strategies as st

import dpmf
from dpmf.accountants import Gaussian, Lattice, Renyi
from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent, BallsInBinsPLDAccountant, loss_distribution
from dpmf.loss.dominating_pair import dominating_pair

ROOT = paths.ROOT
Relation = dp_accounting.NeighboringRelation
DPSGD = dpmf.strategies.dpsgd()
GAUSSIAN = BallsInBinsMatrixDpEvent(DPSGD, 1, 1, 1.0)  # one bin: the Gaussian mechanism, which has a closed form
AMPLIFIED = BallsInBinsMatrixDpEvent(DPSGD, 2, 20, 1.2)
CORRELATED = BallsInBinsMatrixDpEvent(dpmf.strategies.bsr(2), 2, 3, 2.0)
SIZES = (0.0, 0.02, 0.1, 0.3, 1.0, 2.0, 3.5, 6.0)


class TestConformance(privacy_accountant_test.PrivacyAccountantTest):
    """dp_accounting's own suite for accountants."""

    def _make_test_accountants(self):
        return [
            BallsInBinsPLDAccountant(),
            BallsInBinsPLDAccountant(Relation.REPLACE_SPECIAL, accountant="chain"),
            BallsInBinsPLDAccountant(value_discretization_interval=1e-3, relative_tolerance=0.01),
        ]


def gaussian_epsilon(s: float, delta: float) -> float:
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if oracles.gaussian_delta(s, middle) <= delta else (middle, high)
    return high


# --- the dominating pair


def both_directions(truth, epsilon: float) -> list[tuple[str, float, float]]:
    """(direction, ε, δ) at ε and −ε, from a profile at ε ≥ 0."""
    found = []
    for direction, other in (("remove", "add"), ("add", "remove")):
        gamma = math.exp(-epsilon)
        found.append((direction, epsilon, truth(epsilon, direction)))
        found.append((direction, -epsilon, 1 - gamma + gamma * truth(epsilon, other)))
    return found


@given(
    s=st.floats(0.01, 9.0),
    places=st.lists(st.integers(1, 9000), min_size=1, max_size=12, unique=True),
    data=st.data(),
)
def test_pair_dominates_whatever_the_points(s: float, places: list[int], data: st.DataObject) -> None:
    """Few points, many points, points that are too high: never below the truth, at, between and beyond them."""

    def truth(epsilon: float, _: str) -> float:
        return max(oracles.gaussian_delta(s, epsilon), 0.0)

    points = []
    for _ in range(2):
        excess = data.draw(st.lists(st.floats(1.0, 2.0), min_size=len(places) + 1, max_size=len(places) + 1))
        points.append({k: truth(1e-3 * k, "") * e for k, e in zip([0, *places], excess, strict=True)})
    pair = dominating_pair(1e-3, *points)
    assert math.isclose(pair.upper.sum() + pair.upper_only, 1.0, abs_tol=1e-12)
    assert math.isclose(pair.lower.sum() + pair.lower_only, 1.0, abs_tol=1e-12)
    assert np.all(pair.upper >= 0)
    np.testing.assert_allclose(pair.upper, np.exp(1e-3 * pair.losses) * pair.lower, rtol=1e-12, atol=1e-300)
    for epsilon in (*SIZES, *(1e-3 * k for k in places), 12.0):
        for direction, signed, delta in both_directions(truth, epsilon):
            assert pair.delta(signed, direction) >= delta * (1 - 1e-12) - 1e-15, (direction, signed)


def test_pair_through_exact_points_is_exact_there() -> None:
    points = {k: oracles.gaussian_delta(1.0, 0.01 * k) for k in range(0, 700, 25)}
    pair = dominating_pair(0.01, points, points)
    assert len(pair.losses) == 2 * len(points) - 1
    for k, delta in points.items():
        assert pair.delta(0.01 * k, "remove") == pytest.approx(delta, rel=1e-9, abs=1e-14)
        assert pair.delta(0.01 * k, "add") == pytest.approx(delta, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("points", [{}, {0: 0.5}, {1: 0.5, 2: 0.1}, {0: math.nan, 1: 0.1}, {0: 0.5, 1: -0.1}])
def test_points_that_are_no_profile_are_refused(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="points must be"):
        dominating_pair(0.01, points, {0: 0.5, 1: 0.4})


# --- the loss distribution


@pytest.mark.parametrize(
    ("strategy", "b", "k", "n", "sigma"),
    [
        (DPSGD, 2, 1, 2, 0.8),
        (DPSGD, 3, 2, 5, 1.5),
        (dpmf.strategies.bsr(2), 3, 2, 6, 2.0),
        (dpmf.strategies.matrix([[1, 0], [0.5, 2]]), 2, 1, 2, 1.5),
    ],
    ids=["DP-SGD", "cut-off", "BSR", "matrix"],
)
def test_never_below_quadrature_and_close(strategy, b: int, k: int, n: int, sigma: float) -> None:
    event = BallsInBinsMatrixDpEvent(strategy, k, b, sigma, n)
    s = np.array(event.mechanism.gram) / sigma**2

    def truth(epsilon: float, direction: str) -> float:
        return oracles.delta(s, epsilon, direction)

    distribution = loss_distribution(event)
    pmfs = {"remove": distribution._pmf_remove, "add": distribution._pmf_add}
    for epsilon in SIZES:
        for direction, signed, delta in both_directions(truth, epsilon):
            bound = pmfs[direction].get_delta_for_epsilon(signed)
            assert bound >= delta * (1 - 1e-8) - 1e-14, (direction, signed)
            if delta > 1e-6:
                looser = truth(max(0.9 * epsilon - 0.05, 0.0), direction) if signed > 0 else delta + 0.02
                assert bound <= 1.05 * looser, (direction, signed)


@pytest.mark.parametrize("event", [AMPLIFIED, CORRELATED], ids=["DP-SGD", "BSR"])
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_half_a_percent_of_epsilon_at_most(event: BallsInBinsMatrixDpEvent, delta: float) -> None:
    direct = dpmf.epsilon(event.mechanism, noise_multiplier=event.noise_multiplier, delta=delta, with_lower=True)
    found = BallsInBinsPLDAccountant().compose(event).get_epsilon(delta)
    # The hull of many bounds may be below the one bound that was asked for directly, but not below the truth.
    assert direct.lower is not None
    assert direct.lower <= found <= direct.epsilon * 1.005


@pytest.mark.parametrize("delta", [1e-3, 1e-6])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_composed_with_itself_against_the_closed_form(count: int, delta: float) -> None:
    truth = gaussian_epsilon(float(count), delta)
    found = BallsInBinsPLDAccountant().compose(GAUSSIAN, count).get_epsilon(delta)
    assert truth * (1 - 1e-9) <= found <= truth * 1.005


OTHERS = {
    "gaussian": dp_accounting.GaussianDpEvent(1.5),
    "poisson": dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(0.8)), 20
    ),
    "laplace": dp_accounting.LaplaceDpEvent(2.0),
    "mixture": dp_event.MixtureOfGaussiansDpEvent(1.0, (0.0, 1.0, 2.0), (0.5, 0.3, 0.2)),
    "nothing": dp_accounting.NoOpDpEvent(),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_composed_with_others_as_their_own_accountant_does(other: dp_accounting.DpEvent) -> None:
    options = {"value_discretization_interval": 1e-3}
    plain = dp_accounting.pld.PLDAccountant(**options).compose(dp_accounting.GaussianDpEvent(1.0)).compose(other)
    mixed = BallsInBinsPLDAccountant(**options).compose(dp_accounting.ComposedDpEvent([GAUSSIAN, other]))
    for delta in (1e-3, 1e-6):
        expected = plain.get_epsilon(delta)
        assert expected * (1 - 1e-4) <= mixed.get_epsilon(delta) <= expected * 1.005
    assert mixed.get_delta(1.0) == pytest.approx(plain.get_delta(1.0), rel=0.02)


def test_randomized_response_under_the_relation_it_needs() -> None:
    event = dp_accounting.ComposedDpEvent([AMPLIFIED, dp_event.RandomizedResponseDpEvent(0.5, 2)])
    alone = BallsInBinsPLDAccountant(Relation.REPLACE_SPECIAL).compose(AMPLIFIED).get_epsilon(1e-5)
    both = BallsInBinsPLDAccountant(Relation.REPLACE_SPECIAL).compose(event).get_epsilon(1e-5)
    assert alone < both <= alone + math.log(3) + 1e-3


@pytest.mark.parametrize("count", [2, 5])
def test_counts_and_repetitions_are_the_same(count: int) -> None:
    once = BallsInBinsPLDAccountant()
    for _ in range(count):
        once.compose(AMPLIFIED)
    counted = BallsInBinsPLDAccountant().compose(AMPLIFIED, count)
    nested = BallsInBinsPLDAccountant().compose(dp_accounting.SelfComposedDpEvent(AMPLIFIED, count))
    for accountant in (counted, nested):
        assert accountant.get_epsilon(1e-5) == pytest.approx(once.get_epsilon(1e-5), rel=1e-6)
        assert accountant.get_delta(0.5) == pytest.approx(once.get_delta(0.5), rel=1e-6)
    assert counted.ledger == dp_accounting.SelfComposedDpEvent(AMPLIFIED, count)


def test_no_noise_is_no_privacy() -> None:
    accountant = BallsInBinsPLDAccountant().compose(BallsInBinsMatrixDpEvent(DPSGD, 1, 4, 0.0))
    assert accountant.get_epsilon(0.5) == math.inf
    assert accountant.get_delta(100.0) == 1


@pytest.mark.parametrize("sigma", [1e-3, 1e4])
def test_extreme_noise(sigma: float) -> None:
    accountant = BallsInBinsPLDAccountant().compose(BallsInBinsMatrixDpEvent(DPSGD, 1, 10, sigma), 2)
    if sigma < 1:
        assert accountant.get_epsilon(1e-5) > 100
        assert accountant.get_delta(50.0) > 0.999
    else:
        assert 0 <= accountant.get_delta(0.0) < 1e-3
        assert accountant.get_epsilon(1e-3) == 0


@pytest.mark.parametrize(
    ("wrap", "relation", "words"),
    [
        (lambda e: dp_accounting.PoissonSampledDpEvent(0.1, e), Relation.ADD_OR_REMOVE_ONE, "PoissonSampledEvent"),
        (lambda e: dp_event.SampledWithReplacementDpEvent(10, 2, e), Relation.ADD_OR_REMOVE_ONE, "Unsupported event"),
        (lambda e: e, Relation.REPLACE_ONE, "neighboring_relation must be ADD_OR_REMOVE_ONE or REPLACE_SPECIAL"),
        (
            lambda e: dp_accounting.ComposedDpEvent([dp_accounting.NoOpDpEvent(), e]),
            Relation.REPLACE_ONE,
            "got REPLACE_ONE",
        ),
    ],
    ids=["poisson", "replacement", "replace-one", "replace-one, nested"],
)
def test_what_cannot_be_composed_is_refused(wrap, relation, words: str) -> None:
    accountant = BallsInBinsPLDAccountant(relation)
    event = wrap(AMPLIFIED)
    assert not accountant.supports(event)
    with pytest.raises(dp_accounting.UnsupportedEventError, match=re.escape(words)):
        accountant.compose(event)
    assert isinstance(accountant.ledger, dp_accounting.NoOpDpEvent)


def test_other_accountants_refuse_the_event() -> None:
    for accountant in (dp_accounting.pld.PLDAccountant(), dp_accounting.rdp.RdpAccountant()):
        assert not accountant.supports(AMPLIFIED)


def test_calibration_by_dp_accounting() -> None:
    mechanism = AMPLIFIED.mechanism
    found = dp_accounting.calibrate_dp_mechanism(
        BallsInBinsPLDAccountant,
        lambda sigma: BallsInBinsMatrixDpEvent.of(mechanism, sigma),
        target_epsilon=1.0,
        target_delta=1e-5,
        tol=1e-3,
    )
    direct = dpmf.calibrate(mechanism, target_epsilon=1.0, target_delta=1e-5).noise_multiplier
    assert direct * (1 - 1e-3) <= found <= direct * 1.005 + 1e-3
    assert dpmf.epsilon(mechanism, noise_multiplier=found, delta=1e-5).epsilon <= 1.0


# --- the event


EVENTS = {
    "DP-SGD": AMPLIFIED,
    "BSR": CORRELATED,
    "cut-off": BallsInBinsMatrixDpEvent(dpmf.strategies.bisr(3), 3, 5, 2.0, 12),
    "normalised": BallsInBinsMatrixDpEvent(dpmf.strategies.bsr(3).normalized(), 1, 5, 2.0),
    "coefficients": BallsInBinsMatrixDpEvent(dpmf.strategies.coefficients([1.0, 0.5]), 2, 5, 2.0),
    "matrix": BallsInBinsMatrixDpEvent(dpmf.strategies.matrix(np.tril(np.ones((6, 6)))), 2, 3, 2.0),
    "BandInvMF": BallsInBinsMatrixDpEvent(dpmf.strategies.bandinvmf(2), 2, 3, 2.0),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_named_tuple_round_trip(event: BallsInBinsMatrixDpEvent) -> None:
    nested = dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent([event, dp_accounting.GaussianDpEvent(1.0)]), 3
    )
    for original in (event, nested):
        for given_on in (original.to_named_tuple(), pickle.loads(pickle.dumps(original)).to_named_tuple()):
            assert dp_event.DpEvent.from_named_tuple(given_on) == original
    fields = event.to_named_tuple()._fields
    assert set(fields) >= {"strategy", "epochs", "batches_per_epoch", "noise_multiplier", "iterations"}


def test_equal_mechanisms_are_equal_events() -> None:
    same = BallsInBinsMatrixDpEvent(dpmf.strategies.bsr(bandwidth=2), np.int64(2), 3, np.float64(2.0), 6)
    assert same == CORRELATED
    assert hash(same) == hash(CORRELATED)
    assert BallsInBinsMatrixDpEvent.of(same.mechanism, 2.0) == CORRELATED
    assert BallsInBinsMatrixDpEvent.of(same.mechanism, 2.1) != CORRELATED
    with pytest.raises(AttributeError):
        same.epochs = 3


def test_a_distribution_is_made_once() -> None:
    again = BallsInBinsMatrixDpEvent.of(AMPLIFIED.mechanism, AMPLIFIED.noise_multiplier)
    assert loss_distribution(again) is loss_distribution(AMPLIFIED)
    assert loss_distribution(again, accountant=Lattice()) is not loss_distribution(AMPLIFIED)
    assert loss_distribution(again, value_discretization_interval=1e-3) is not loss_distribution(AMPLIFIED)


def test_the_accountant_asked_for_is_asked() -> None:
    loose = BallsInBinsPLDAccountant(accountant=Gaussian()).compose(CORRELATED).get_epsilon(1e-5)
    tight = BallsInBinsPLDAccountant(accountant=Renyi()).compose(CORRELATED).get_epsilon(1e-5)
    expected = dpmf.epsilon(CORRELATED.mechanism, noise_multiplier=2.0, delta=1e-5, accountant="gaussian").epsilon
    assert tight < loose == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BallsInBinsMatrixDpEvent("bsr", 1, 2, 1.0), "strategy must be a dpmf strategy"),
        (lambda: BallsInBinsMatrixDpEvent(DPSGD, 0, 2, 1.0), "epochs must be at least 1"),
        (lambda: BallsInBinsMatrixDpEvent(DPSGD, 1, 2.5, 1.0), "batches_per_epoch must be an integer"),
        (lambda: BallsInBinsMatrixDpEvent(DPSGD, 1, 2, -1.0), "noise_multiplier must be non-negative"),
        (lambda: BallsInBinsMatrixDpEvent(DPSGD, 1, 2, math.nan), "noise_multiplier must be finite"),
        (lambda: BallsInBinsMatrixDpEvent(DPSGD, 2, 2, 1.0, 2), "iterations must be in 3..4"),
        (lambda: BallsInBinsMatrixDpEvent(EVENTS["matrix"].strategy, 1, 3, 1.0), "matrix must be N × N"),
        (lambda: BallsInBinsMatrixDpEvent.of("bsr", 1.0), "mechanism must be a dpmf.Mechanism"),
        (lambda: loss_distribution(dp_accounting.GaussianDpEvent(1.0)), "event must be a BallsInBinsMatrixDpEvent"),
        (lambda: loss_distribution(BallsInBinsMatrixDpEvent(DPSGD, 1, 2, 0.0)), "noise_multiplier must be positive"),
        (
            lambda: loss_distribution(AMPLIFIED, value_discretization_interval=0.0),
            "value_discretization_interval must be positive",
        ),
        (lambda: loss_distribution(AMPLIFIED, relative_tolerance=0.0), "relative_tolerance must be strictly between"),
        (
            lambda: loss_distribution(AMPLIFIED, accountant="monte-carlo"),
            "accountant must be one that gives guaranteed",
        ),
        (lambda: loss_distribution(CORRELATED, accountant="lattice"), "accountant lattice must be given uncorrelated"),
        (lambda: BallsInBinsPLDAccountant(accountant="nonsense"), "accountant must be one of"),
        (lambda: BallsInBinsPLDAccountant(relative_tolerance=2), "relative_tolerance must be strictly between"),
    ],
)
def test_wrong_arguments_are_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        make()
    assert "\n" not in str(error.value)


# --- what the documentation says


def documented() -> list[list[str]]:
    page = (ROOT / "docs" / "ecosystem.md").read_text()
    table = re.search(r"<!-- loss -->\n(.*?)<!-- end -->", page, flags=re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group(1).splitlines()[2:]]


def losses(row: list[str]) -> list[float]:
    return [float(cell.removesuffix(" %")) for cell in row[4:]]


def test_the_documented_losses_meet_the_goal_and_are_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    command = importlib.import_module("benchmarks.loss_distribution")
    rows = {tuple(row[:4]): losses(row) for row in documented()}
    assert len(rows) == len(command.ROWS)
    assert max(max(row) for row in rows.values()) < 0.5
    command.main(["gaussian", "gaussian-10", "dpsgd-1000"])
    for line in capsys.readouterr().out.splitlines()[2:]:
        row = [cell.strip() for cell in line.strip("|").split("|")]
        assert rows[tuple(row[:4])] == pytest.approx(losses(row), abs=0.02)


# --- runs whose batches are cut


def test_the_cut_of_composed_runs_is_paid_for_at_the_end() -> None:
    """δ is that of the uncut runs, with e^ε·η for each; ε is where that is small enough, or an error."""
    run = dpmf.Run(AMPLIFIED.mechanism, AMPLIFIED.noise_multiplier, max_batch_size=100, records=1000)
    event = BallsInBinsMatrixDpEvent.of(run)
    assert event.run == run
    assert event != AMPLIFIED
    assert pickle.loads(pickle.dumps(event)) == event
    cut = run.cut
    assert cut is not None
    assert 0 < cut.probability < 1e-6
    other = dp_event.GaussianDpEvent(3.0)
    plain, charged = (
        BallsInBinsPLDAccountant(value_discretization_interval=1e-2).compose(one, 2).compose(other)
        for one in (AMPLIFIED, event)
    )
    for epsilon in (0.0, 1.0, 3.0):
        wanted = plain.get_delta(epsilon) + 2 * cut.charge(epsilon)
        assert wanted <= charged.get_delta(epsilon) <= wanted * (1 + 1e-9)
    assert charged.get_delta(-1.0) >= plain.get_delta(-1.0) + 2 * cut.probability
    assert charged.get_delta(100.0) == 1.0
    found = charged.get_epsilon(1e-5)
    assert found > plain.get_epsilon(1e-5)
    assert charged.get_delta(found) <= 1e-5
    with pytest.raises(ValueError, match="delta must be larger for this run, in which cut batches") as caught:
        charged.get_epsilon(1e-12)
    assert "\n" not in str(caught.value)
    assert BallsInBinsPLDAccountant().compose(event).compose(dp_event.NonPrivateDpEvent()).get_epsilon(1e-5) == math.inf


def test_cuts_that_cannot_be_followed_are_refused() -> None:
    run = dpmf.Run(AMPLIFIED.mechanism, 1.2, max_batch_size=100, records=1000)
    with pytest.raises(ValueError, match="event must be of a run whose batches are not cut"):
        loss_distribution(BallsInBinsMatrixDpEvent.of(run))
    with pytest.raises(ValueError, match="cut must be of k=1, b=1"):
        BallsInBinsMatrixDpEvent(DPSGD, 1, 1, 1.0, cut=run.cut)
    with pytest.raises(ValueError, match="noise_multiplier must be left out for a run"):
        BallsInBinsMatrixDpEvent.of(run, 1.0)
    plain = dpmf.Run(AMPLIFIED.mechanism, 1.2, max_batch_size=1001, records=1000)
    assert BallsInBinsMatrixDpEvent.of(plain) == AMPLIFIED
