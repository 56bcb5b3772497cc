"""`auto`: whatever it picks is a bound of that accountant, the gap it states is the gap, and the tolerance ends it."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

import dpmf
from dpmf import BallsInBins, Mechanism, strategies
from dpmf.accountants import Auto, resolve, with_options
from dpmf.accountants.lower import lower_epsilon, lower_noise_multiplier
from dpmf.cli import app

CORRELATED = Mechanism(strategies.bsr(2), BallsInBins(1, 8))
UNCORRELATED = Mechanism(strategies.dpsgd(), BallsInBins(1, 200))
ONE_BIN = Mechanism(strategies.bsr(3), BallsInBins(1, 1))


@pytest.mark.parametrize(
    ("mechanism", "tolerance", "accountant"),
    [
        (ONE_BIN, 0.02, "gaussian"),
        (UNCORRELATED, 0.02, "lattice"),
        (UNCORRELATED, 100.0, "gaussian"),
        (CORRELATED, 100.0, "gaussian"),
        (CORRELATED, 0.1, "chain"),
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
    """DP-SGD: the add direction is far below the remove direction, so closed forms do for it."""
    found = dpmf.epsilon(UNCORRELATED, noise_multiplier=0.5, delta=1e-5, accountant="auto")
    assert found.details["add"]["accountant"] == "gaussian"
    assert found.details["add"]["value"] < found.epsilon


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
