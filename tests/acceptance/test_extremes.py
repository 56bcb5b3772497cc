"""Every row of docs/extremes.md, and that no accountant ever answers with something that is no number."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import fields

import numpy as np
import pytest

import dpmf
from dpmf import BallsInBins, Mechanism, strategies
from dpmf import lower_bounds as lower
from dpmf.accountants import ACCOUNTANTS, Best, Renyi
from soundness import extremes
from soundness.plans import NOT_OURS

# Lower bounds are beside what is asked for here.
pytestmark = pytest.mark.usefixtures("coarse_lower_bounds")


@pytest.mark.parametrize("row", extremes.ROWS, ids=lambda row: f"{row.parameter} {row.end}")
def test_what_the_page_says_happens(row: extremes.Row) -> None:
    row.verify()


def test_the_page_is_made_from_the_rows() -> None:
    assert extremes.PAGE.read_text() == extremes.page()


def test_every_parameter_has_a_row() -> None:
    """Options of all accountants of ours, and arguments of the functions that take numbers."""
    named = {field.name for cls in ACCOUNTANTS.values() if cls.name not in BY_OTHERS for field in fields(cls)}
    functions = (dpmf.delta, dpmf.epsilon, dpmf.profile, dpmf.calibrate, dpmf.BallsInBins, strategies.bsr)
    for function in (*functions, strategies.matrix, strategies.coefficients, strategies.blt):
        named |= {name if name != "source" else function.__name__ for name in inspect.signature(function).parameters}
    # A mechanism is made of others; how optimisers are told about iterations is theirs (tests of optimised strategies).
    named -= {"mechanism", "error", "min_sep", "max_participations"}
    assert named - {row.parameter.split()[0] for row in extremes.ROWS} == set()


def test_a_row_that_does_not_hold_is_noticed() -> None:
    with pytest.raises(AssertionError, match="bandwidth"):
        extremes.Row("x", "y", "z", lambda: strategies.bsr(0), "another message").verify()
    with pytest.raises(AssertionError, match="BSR"):
        extremes.Row("x", "y", "z", lambda: strategies.bsr(1), lambda answer: False).verify()
    with pytest.raises(AssertionError, match="was accepted"):
        extremes.Row("x", "y", "z", lambda: 1, "must be refused").verify()


BY_OTHERS = ("random-allocation", "pld-accounting")
MECHANISMS = {
    "uncorrelated": Mechanism(strategies.dpsgd(), BallsInBins(2, 2)),
    "correlated": Mechanism(strategies.bsr(3), BallsInBins(2, 2)),
    "zero column": Mechanism(strategies.matrix(np.array([[1.0, 0], [0.5, 0]])), BallsInBins(1, 2)),
}
SIGMAS = (1e-60, 1e-3, 1.0, 1e60)
EPSILONS = (0.0, 1.0, 700.0, 1e300)


@pytest.mark.parametrize("name", sorted(set(ACCOUNTANTS) - set(NOT_OURS) - {"auto"}))  # which asks these
@pytest.mark.parametrize("kind", MECHANISMS)
def test_no_accountant_leaves_the_unit_interval(name: str, kind: str) -> None:
    mechanism = MECHANISMS[kind]
    quick = Renyi(work_budget=1e5)
    options = {"renyi": quick, "best": Best(renyi=quick)}.get(name) or ACCOUNTANTS[name]()
    try:
        prepared = options.prepare(mechanism)
    except ValueError:
        assert name == "lattice"
        assert kind == "correlated"
        return
    for way in ("remove", "add"):
        table = {}
        for sigma, epsilon in itertools.product(SIGMAS, EPSILONS):
            found = dpmf.delta(
                mechanism, noise_multiplier=sigma, epsilon=epsilon, accountant=prepared, direction=way
            ).delta
            assert 0 <= found <= 1, (sigma, epsilon, way)
            table[sigma, epsilon] = found
        for (sigma, epsilon), found in table.items():
            if (kind, name, way) == ("zero column", "conditional", "add") and epsilon >= 1:
                continue  # A ≥ 1/2, so δ is 0 at every σ: all bounds are sound, and need not be ordered
            for other, delta in table.items():
                if other[0] >= sigma and other[1] >= epsilon:
                    assert delta <= found * 1.05 + 1e-14, (sigma, epsilon, other, way)
        for sigma, delta in itertools.product(SIGMAS, (1e-300, 1e-5, 1 - 1e-12)):
            found = dpmf.epsilon(
                mechanism, noise_multiplier=sigma, delta=delta, accountant=prepared, direction=way
            ).epsilon
            assert found >= 0, (sigma, delta, way)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_lower_bounds_stay_in_the_unit_interval_too(kind: str) -> None:
    for sigma, epsilon in itertools.product(SIGMAS, (0.0, 1e300)):
        assert 0 <= lower.lower_delta(MECHANISMS[kind], sigma, epsilon, "both") <= 1
    for sigma in (1e-60, 1e60):
        found = lower.lower_epsilon(MECHANISMS[kind], sigma, 1e-5, "both")
        assert found >= 0
        assert not math.isnan(found)
