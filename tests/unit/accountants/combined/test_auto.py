"""`auto`: whatever it picks is a bound of that accountant, the gap it states is the gap, and the tolerance ends it."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

import dpmf
from dpmf import BallsInBins, Mechanism, report, strategies
from dpmf.accountants import Auto, Best, resolve, with_options
from dpmf.accountants.chain._bound import ChainBound
from dpmf.accountants.conditional import PreparedConditional
from dpmf.accountants.protocol import Evaluation, PreparedAccountant
from dpmf.calibration import calibrate_one_way
from dpmf.cli import app
from dpmf.lower_bounds import lower_epsilon, lower_noise_multiplier

CORRELATED = Mechanism(strategies.bsr(2), BallsInBins(1, 4))
UNCORRELATED = Mechanism(strategies.dpsgd(), BallsInBins(1, 200))
ONE_BIN = Mechanism(strategies.bsr(3), BallsInBins(1, 1))


@pytest.mark.parametrize(
    ("mechanism", "tolerance", "accountant"),
    [
        (ONE_BIN, 0.02, "gaussian"),
        (UNCORRELATED, 0.02, "lattice"),
        (UNCORRELATED, 100.0, "gaussian"),
        (CORRELATED, 100.0, "gaussian"),
        (CORRELATED, 0.1, "cascade"),
        (CORRELATED, 0.05, "own-bin"),
    ],
)
def test_the_cheapest_that_is_close_enough(mechanism, tolerance, accountant):
    options = Auto(tolerance=tolerance)
    found = dpmf.calibrate(mechanism, target_epsilon=2.0, target_delta=1e-5, accountant=options, with_lower=True)
    how = found.details[found.binding]
    assert found.accountant == "auto"
    assert how["accountant"] == accountant
    assert how["gap"] == pytest.approx(found.noise_multiplier / found.lower - 1, abs=1e-9)
    assert how["gap"] <= tolerance
    assert how["budget_exhausted"] is False
    assert found.lower == lower_noise_multiplier(mechanism, 2.0, 1e-5)
    alone = dpmf.calibrate(mechanism, target_epsilon=2.0, target_delta=1e-5, accountant=accountant)
    assert found.noise_multiplier >= alone.noise_multiplier * (1 - 1e-3)


@pytest.mark.parametrize("direction", ["remove", "add", "both"])
def test_epsilon_delta_and_profile(direction):
    at = {"noise_multiplier": 0.9, "accountant": "auto", "direction": direction}
    epsilon = dpmf.epsilon(UNCORRELATED, delta=1e-5, **at)
    how = epsilon.details[epsilon.binding]
    assert how["accountant"] == "lattice"
    below = lower_epsilon(UNCORRELATED, 0.9, 1e-5, direction)
    assert how["gap"] == pytest.approx(epsilon.epsilon / below - 1, rel=1e-3, abs=1e-6)
    assert 0 <= how["gap"] <= 0.02
    delta = dpmf.delta(UNCORRELATED, epsilon=epsilon.epsilon, **at)
    assert delta.delta == pytest.approx(1e-5, rel=0.01)
    profile = dpmf.profile(UNCORRELATED, epsilons=[0.0, epsilon.epsilon], **at)
    assert profile.deltas[1] == pytest.approx(1e-5, rel=0.01)


def test_the_other_direction_need_not_be_close():
    """DP-SGD: the add direction is far below the remove direction, whose bound does for it."""
    found = dpmf.epsilon(UNCORRELATED, noise_multiplier=0.5, delta=1e-5, accountant="auto")
    assert found.details["add"] == {"value": found.epsilon, "bounded_by": "remove"}
    alone = dpmf.epsilon(UNCORRELATED, noise_multiplier=0.5, delta=1e-5, accountant="auto", direction="add")
    assert alone.epsilon < found.epsilon


def test_budget_of_its_own():
    found = dpmf.calibrate(CORRELATED, target_epsilon=1.0, target_delta=1e-5, accountant=Auto(time_budget=1e-9))
    assert found.details[found.binding]["accountant"] == "gaussian"
    assert found.details[found.binding]["budget_exhausted"] is True


@pytest.mark.parametrize("bad", [{"tolerance": 0.0}, {"tolerance": math.nan}, {"time_budget": -1.0}])
def test_bad_options(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
        Auto(**bad)


def test_options_reach_auto_and_its_renyi_accountant():
    found = with_options(resolve("auto"), {"tolerance": 0.1, "max_order": 7, "work_budget": None})
    assert found.tolerance == 0.1
    assert found.renyi.max_order == 7
    with pytest.raises(ValueError, match="samples applies to other accountants"):
        with_options(resolve("auto"), {"samples": 10})


def test_command_line():
    command = ["calibrate", "--strategy", "dpsgd", "--epochs", "1", "--batches-per-epoch", "50", "--epsilon", "1"]
    command += ["--delta", "1e-5", "--accountant", "auto", "--tolerance", "0.05", "--time-budget", "60", "--json"]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["accountant"] == "auto"
    assert found["details"]["remove"]["gap"] <= 0.05


def test_profile_on_the_command_line_carries_lower_bounds():
    command = ["profile", "--strategy", "dpsgd", "--epochs", "1", "--batches-per-epoch", "50"]
    command += ["--noise-multiplier", "1", "--epsilon", "0,1,2", "--lower"]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    head, *rows = answer.stdout.strip().splitlines()
    assert head == "epsilon,delta,delta_remove,delta_add,lower"
    for row in rows:
        _, delta, _, _, below = map(float, row.split(","))
        assert 0 < below <= delta <= 1.05 * below


class _Counted(PreparedAccountant):
    """δ = (scale/σ)²³·10⁻⁵, and a record of where it was asked for."""

    def __init__(self, name: str, scale: float) -> None:
        self.name, self._scale = name, scale
        self.mechanism = CORRELATED
        self.asked: list[float] = []

    def delta(self, noise_multiplier, epsilon, direction, target_delta=None):
        self.asked.append(noise_multiplier)
        return Evaluation(min(1.0, 1e-5 * (self._scale / noise_multiplier) ** 23))


@pytest.mark.parametrize("enough", [0.0, 0.9, 1.02, 1.2])
def test_enough_ends_the_search(enough):
    crude, tight, other = _Counted("crude", 1.3), _Counted("tight", 1.0), _Counted("other", 1.005)
    known = calibrate_one_way([crude], 1.0, 1e-5, "remove", 1.0, 1e-4)
    sigma, found, member = calibrate_one_way([tight, other], 1.0, 1e-5, "remove", 1.0, 1e-4, known, enough, 2.5e-3)
    assert member is tight
    assert found.value <= 1e-5
    if enough > 1:
        assert 1 <= sigma <= min(enough, 1 + 3e-3)
        assert not other.asked
        assert len(tight.asked) <= 3
    else:
        assert 1 <= sigma <= 1 + 1e-4
        assert len(other.asked) <= 3
        assert len(tight.asked) <= 6
    assert len(set(tight.asked)) == len(tight.asked)


def test_auto_asks_little_more_than_best(monkeypatch):
    """Of the chain, and of conditional composition: the rest is cheap.

    `best` compares all bounds roughly and then asks the winner; `auto` asks one after the other. Neither asks them
    where own-bin is so close that they cannot win.
    """
    asked = []
    for cls in (ChainBound, PreparedConditional):
        inner = cls.delta

        def counting(self, *arguments, inner=inner):
            asked.append(arguments[0])
            return inner(self, *arguments)

        monkeypatch.setattr(cls, "delta", counting)
    counts = {}
    for name, tolerance in (("best", None), ("never close enough", 1e-9), ("close enough", 0.1)):
        asked.clear()
        accountant = Best() if tolerance is None else Auto(tolerance=tolerance)
        dpmf.calibrate(CORRELATED, target_epsilon=2.0, target_delta=1e-5, accountant=accountant, direction="remove")
        counts[name] = len(asked)
    assert counts["never close enough"] <= 4 * counts["best"]
    assert counts["close enough"] <= counts["best"]
    assert counts["close enough"] <= 4  # one of them by overlapping separators, which decline at once at this noise


def test_out_of_time_the_lower_bound_is_a_closed_form():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5, "with_lower": True}
    for mechanism in (CORRELATED, UNCORRELATED, Mechanism(strategies.matrix([[1.0, 0], [0.5, 1]]), BallsInBins(1, 2))):
        full = dpmf.calibrate(mechanism, accountant="gaussian", **target)
        fresh = Mechanism(mechanism.strategy, mechanism.batching)  # without what was computed before
        found = dpmf.calibrate(fresh, accountant="auto", time_budget=1e-9, **target)
        assert 0.3 * full.lower <= found.lower <= full.lower * (1 + 1e-4)
        at = {"noise_multiplier": 0.5, "accountant": "auto", "time_budget": 1e-9, "with_lower": True}
        assert dpmf.epsilon(Mechanism(mechanism.strategy, mechanism.batching), delta=1e-5, **at).lower > 0
        assert dpmf.delta(Mechanism(mechanism.strategy, mechanism.batching), epsilon=0.5, **at).lower > 0


def test_nothing_is_said_to_be_impossible_without_a_lower_bound(capsys):
    found = dpmf.epsilon(UNCORRELATED, noise_multiplier=1e4, delta=1e-5, with_lower=True)
    assert found.lower == 0
    report.print_answer(UNCORRELATED, found, "epsilon")
    assert "none found" in capsys.readouterr().out
