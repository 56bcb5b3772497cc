"""`best`: says whose bound it gives, never samples, hands options on. And how estimates are told apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import dpmf
from dpmf.accountants import Best, Conditional, Lattice, Moments, MonteCarlo, Renyi, suitable
from dpmf.accountants.combined.least import Least, Part
from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant

CORRELATED = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(2, 12))
INDEPENDENT = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 12))


def test_the_winner_can_be_any_member() -> None:
    """One member that is hopeless leaves the field to the other."""
    hopeless = Renyi(max_order=2, bandwidth=1)
    both = dpmf.delta(
        CORRELATED, noise_multiplier=6.0, epsilon=0.2, accountant=Best(accountants=(hopeless, Conditional()))
    )
    assert both.details["remove"]["accountant"] == "conditional"


def test_independent_noise_goes_to_the_lattice() -> None:
    found = dpmf.calibrate(INDEPENDENT, target_epsilon=1.0, target_delta=1e-5)
    assert found.details["remove"]["accountant"] == "lattice"
    renyi = dpmf.calibrate(INDEPENDENT, target_epsilon=1.0, target_delta=1e-5, accountant="renyi")
    assert found.noise_multiplier < renyi.noise_multiplier


def test_monte_carlo_is_never_in_it() -> None:
    with pytest.raises(ValueError, match="accountants must be deterministic"):
        Best(accountants=(Renyi(), MonteCarlo(samples=1000))).prepare(CORRELATED)
    assert all(m.kind == "bound" for m in Best().prepare(CORRELATED).bounds())


def test_what_suits_a_mechanism() -> None:
    names = [a.name for a in suitable(CORRELATED)]
    assert {a.name for a in suitable(CORRELATED, "combined")} == {"best", "auto"}
    assert {"renyi", "conditional", "monte-carlo"} <= set(names)
    assert "lattice" not in names
    assert "lattice" in [a.name for a in suitable(INDEPENDENT)]


def test_estimates_are_not_bounds() -> None:
    accountant = MonteCarlo(samples=20_000)
    found = dpmf.calibrate(CORRELATED, target_epsilon=1.0, target_delta=1e-3, accountant=accountant)
    assert isinstance(found, dpmf.CalibrationEstimate)
    assert not isinstance(found, dpmf.PrivacyBound)
    assert found.kind == "estimate"
    assert str(found).startswith("estimate")
    assert found.to_dict()["kind"] == "estimate"
    epsilon = dpmf.epsilon(CORRELATED, noise_multiplier=3.0, delta=1e-3, accountant=accountant)
    delta = dpmf.delta(CORRELATED, noise_multiplier=3.0, epsilon=1.0, accountant=accountant)
    profile = dpmf.profile(CORRELATED, noise_multiplier=3.0, epsilons=[1.0], accountant=accountant)
    assert isinstance(epsilon, dpmf.Estimate)
    assert isinstance(delta, dpmf.Estimate)
    assert profile.kind == "estimate"
    assert dpmf.profile(CORRELATED, noise_multiplier=3.0, epsilons=[1.0]).kind == "bound"


def test_options_reach_the_renyi_part() -> None:
    with_options = dpmf.accountants.with_options
    assert with_options(Best(), {"max_order": 25, "samples": None}) == Best(renyi=Renyi(max_order=25))
    assert with_options(MonteCarlo(), {"samples": 10, "seed": 3}) == MonteCarlo(samples=10, seed=3)
    for accountant, options in ((Lattice(), {"max_order": 25}), (Renyi(), {"samples": 5}), (Best(), {"samples": 5})):
        with pytest.raises(ValueError, match="applies to other accountants"):
            with_options(accountant, options)


def test_bad_members() -> None:
    with pytest.raises(ValueError, match="accountants must be"):
        Best(accountants=("renyi",))  # type: ignore[arg-type]


def test_a_curve_leaves_out_what_cannot_help() -> None:
    """Others are not even made where quick bounds are nearly the truth at both ends and in the middle."""

    def never() -> list[PreparedAccountant]:
        raise AssertionError("nobody else is needed")

    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(4, 12))
    moments = Moments().prepare(mechanism)
    both = Least("both", mechanism, [Part("moments", lambda: (moments,), quick=True), Part("never", never)])
    epsilons = [0.01 * k for k in range(9)]
    assert both.deltas(40.0, epsilons, "remove") == moments.deltas(40.0, epsilons, "remove")


class _Counted(PreparedAccountant):
    """A bound that is a closed form, which counts how often it is asked."""

    def __init__(self, name: str, factor: float, *, slack: float = math.inf, roughness: float = 1.0) -> None:
        self.name, self.mechanism, self.roughness = name, CORRELATED, roughness
        self.cheap = roughness == 1
        self._factor, self._slack = factor, slack
        self.asked: list[float] = []

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        self.asked.append(epsilon)
        return Evaluation(min(1.0, 0.1 * self._factor * math.exp(-3 * epsilon)), slack=self._slack)

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        if self.roughness == 1:
            return None
        found = self.delta(noise_multiplier, epsilon, direction)
        return replace(found, value=min(1.0, found.value * self.roughness))


def test_bounds_far_behind_are_not_compared_again() -> None:
    """Of an accountant, what is far behind in the middle is asked there only; the winner answers everywhere."""
    quick = _Counted("quick", 4.0)
    first, second = _Counted("others", 1.0, roughness=1.25), _Counted("others", 2.0, roughness=1.25)
    least = Least(
        "least", CORRELATED, [Part("quick", lambda: (quick,), quick=True), Part("others", lambda: (first, second))]
    )
    epsilons = [0.1 * k for k in range(31)]
    found = least.deltas(1.0, epsilons, "remove")
    assert second.asked == [epsilons[15]]
    assert set(epsilons) <= set(first.asked)
    np.testing.assert_allclose(found, 0.1 * np.exp(-3 * np.array(epsilons)))


def test_an_accountant_far_above_the_truth_is_asked_once() -> None:
    """Where a quick bound is close to the truth, others that are far above it in the middle are left out."""
    quick = _Counted("quick", 1.0, slack=1.1)
    others = [_Counted("others", 1.6, roughness=1.25), _Counted("others", 1.7, roughness=1.25)]
    least = Least("least", CORRELATED, [Part("quick", lambda: (quick,), quick=True), Part("others", lambda: others)])
    epsilons = [0.1 * k for k in range(31)]
    assert least.deltas(1.0, epsilons, "remove") == quick.deltas(1.0, epsilons, "remove")
    assert [len(other.asked) for other in others] == [1, 0]
