"""A memory of what bounds said, and the order in which parts are prepared."""

from __future__ import annotations

import pytest

import dpmf
from dpmf.accountants.combined.least import Least, Part
from dpmf.accountants.composed._answers import Answers
from dpmf.accountants.composed.pair import Pairs, _in_turn
from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant
from dpmf.accountants.registry import resolve


class Counting(PreparedAccountant):
    """A bound that counts its answers."""

    name = "counting"

    def __init__(self) -> None:
        self.asked: list[tuple[float, float | None]] = []

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        self.asked.append((epsilon, target_delta))
        return Evaluation(noise_multiplier / (1 + epsilon), {"direction": direction})


def test_nobody_is_asked_the_same_twice() -> None:
    bound, other, answers = Counting(), Counting(), Answers(0.5, "add")
    for _ in range(2):
        assert answers.delta(bound, 1.0).value == 0.25
        assert answers.delta(bound, 1.0).details == {"direction": "add"}
        assert answers.delta(bound, 1.0, 1e-5).value == 0.25
        assert answers.quickly(bound, 4.0, 1e-5) == 0.1
        assert answers.quickly(other, 0.0, 1e-5) == 0.5
    assert bound.asked == [(1.0, None), (1.0, 1e-5), (4.0, 1e-5)]
    assert other.asked == [(0.0, 1e-5)]


def test_parts_are_prepared_in_turn() -> None:
    quick, slow, cascade = (Part(name, tuple, quick=name != "slow") for name in ("quick", "slow", "cascade"))
    assert _in_turn([quick, slow, cascade], many=True) == ([quick], [slow], [cascade])
    assert _in_turn([quick, slow, cascade], many=False) == ([quick, cascade], [slow], [])
    assert _in_turn([slow], many=True) == ([], [slow], [])
    assert _in_turn([cascade], many=True) == ([cascade], [], [])


@pytest.mark.parametrize("accountant", ["best", "chain", "cascade", "moments"])
def test_pairs_dominate_whatever_is_prepared_first(accountant: str) -> None:
    """Every point is at least the truth of DP-SGD, which the lattice accountant knows."""
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 40))
    points = Pairs(Least.of(resolve(accountant).prepare(mechanism))).points(1.5, 1e-3)
    exact = resolve("lattice").prepare(mechanism)
    for direction, known in points.values.items():
        assert direction in ("remove", "add")
        for place, delta in sorted(known.items())[::3]:
            least = exact.delta(1.5, 1e-3 * place, "remove" if direction == "remove" else "add").value
            assert delta >= least * (1 - 0.01) - 1e-9  # the lattice is itself a bound, tight to a small part
