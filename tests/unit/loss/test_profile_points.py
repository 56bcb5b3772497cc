"""Points of a profile: the pair made from them dominates, whatever the knobs, and is close with few points."""

from __future__ import annotations

from collections.abc import Sequence

import knobs
import numpy as np
import pytest

from dpmf.loss import profile_points
from dpmf.loss.gaussian import gaussian_delta, gaussian_epsilon
from dpmf.loss.profile_points import ProfilePoints

DIRECTIONS = ("remove", "add")


def points(asked: list[float], rough_factor: float = 1.2) -> ProfilePoints:
    """The Gaussian mechanism of sensitivity 1; rough bounds are a little larger."""

    def deltas(epsilons: Sequence[float], rough: bool) -> list[float]:
        asked.extend(() if rough else epsilons)
        return [min(1.0, gaussian_delta(1.0, e) * (rough_factor if rough else 1.0)) for e in epsilons]

    return ProfilePoints(1e-3, dict.fromkeys(DIRECTIONS, deltas), dict.fromkeys(DIRECTIONS, 9.0))


def test_few_points_are_close() -> None:
    asked: list[float] = []
    pair = points(asked).refine(0.003)
    assert len(asked) < 200
    for delta in (1e-3, 1e-5, 1e-8):
        exact = gaussian_epsilon(1.0, delta)
        assert gaussian_delta(1.0, exact, "lower") <= pair.delta(exact, "remove")
        assert pair.delta(1.005 * exact, "remove") <= delta


@pytest.mark.parametrize("share", [0.003, 0.1])
def test_pairs_dominate_for_other_knobs(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for change, tuning in knobs.perturbed(profile_points.TUNING):
        monkeypatch.setattr(profile_points, "TUNING", tuning)
        pair = points([]).refine(share)
        for epsilon in np.linspace(-4.0, 12.0, 41).tolist():
            for direction in DIRECTIONS:
                exact = gaussian_delta(1.0, epsilon, "lower")
                assert pair.delta(epsilon, direction) >= exact, (change, epsilon, direction)
