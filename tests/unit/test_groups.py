"""Group privacy: never below the truth, where that is known, nor above the textbook bound; bad input is one line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import ArgumentError
from dpmf.loss.gaussian import gaussian_delta, gaussian_epsilon

GAUSSIAN = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 1))  # one bin: g records are exactly g times one
POISSON = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.Poisson(1, 4))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_without_amplification_it_is_the_sensitivity_of_the_group(size: int) -> None:
    found = dpmf.group_privacy(GAUSSIAN, noise_multiplier=4.0, group_size=size, epsilon=1.0, accountant="gaussian")
    assert found.delta == pytest.approx(gaussian_delta(size / 4.0, 1.0), rel=1e-6)
    assert found.delta >= gaussian_delta(size / 4.0, 1.0, "lower")
    asked = dpmf.group_privacy(GAUSSIAN, noise_multiplier=4.0, group_size=size, delta=1e-5, accountant="gaussian")
    assert asked.epsilon == pytest.approx(gaussian_epsilon(size / 4.0, 1e-5), rel=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_between_the_truth_and_the_textbook_bound(size: int) -> None:
    """One Poisson sample of four: the truth by quadrature, a mixture over how many of the group take part."""
    one = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.Poisson(1, 4))
    sigma, epsilon = 2.0, 1.2
    x = np.linspace(-12, 14, 20_001)
    normal = [
        np.exp(-((x - count) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi)) for count in range(size + 1)
    ]
    with_them = sum(math.comb(size, c) * 0.25**c * 0.75 ** (size - c) * normal[c] for c in range(size + 1))
    # Four iterations: the truth is at least that of one of them.
    truth = max(
        float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0]))
        for p, q in ((with_them, normal[0]), (normal[0], with_them))
    )
    found = dpmf.group_privacy(one, noise_multiplier=sigma, group_size=size, epsilon=epsilon).delta
    single = dpmf.delta(one, noise_multiplier=sigma, epsilon=epsilon / size).delta
    textbook = single * math.expm1(epsilon) / math.expm1(epsilon / size)
    assert truth <= found <= textbook * (1 + 1e-9)


def test_epsilon_and_delta_belong_together() -> None:
    before = 0.0
    for size in (1, 2, 4):
        found = dpmf.group_privacy(POISSON, noise_multiplier=1.5, group_size=size, delta=1e-5)
        assert found.epsilon > before
        again = dpmf.group_privacy(POISSON, noise_multiplier=1.5, group_size=size, epsilon=found.epsilon)
        assert again.delta <= 1e-5 * (1 + 1e-9) or again.details["bound"] == "sensitivity"
        before = found.epsilon
    single = dpmf.epsilon(POISSON, noise_multiplier=1.5, delta=1e-5).epsilon
    assert dpmf.group_privacy(POISSON, noise_multiplier=1.5, group_size=1, delta=1e-5).epsilon <= single * 1.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0, "epsilon": 1.0}, "group_size must be at least 1"),
        ({"group_size": 2}, "epsilon must be given if delta is not"),
        ({"group_size": 2, "epsilon": 1.0, "delta": 1e-5}, "epsilon must be given if delta is not"),
        (
            {"group_size": 2, "epsilon": 1.0, "accountant": "monte-carlo"},
            "accountant must be one that proves its bound",
        ),
        ({"group_size": 2, "delta": 2.0}, "delta must be strictly between 0 and 1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        dpmf.group_privacy(GAUSSIAN, noise_multiplier=1.0, **options)
