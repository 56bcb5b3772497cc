"""Tests on windows that are made independent: against quadrature and enumeration."""

from __future__ import annotations

from itertools import product

import knobs
import numpy as np
import oracles
import pytest
from scipy.stats import multivariate_normal

from dpmf.accountants.protocol import DIRECTIONS
from dpmf.kernels.pairs import law_of_sum
from dpmf.lower_bounds import _windows, lower_delta, lower_epsilon, lower_noise_multiplier
from dpmf.lower_bounds._windows import Windows
from dpmf.numerics import UNIT

GRAM = np.array([[1.0, 0.6, 0.2], [0.6, 1.1, 0.5], [0.2, 0.5, 0.9]])


def test_the_law_of_a_sum_of_scores_is_that_of_enumeration() -> None:
    rng = np.random.default_rng(1)
    laws, scores, top = rng.dirichlet(np.ones(3), size=(2, 4)), rng.integers(0, 6, size=(3, 3, 3)), 9
    expected = np.zeros(top + 1)
    for cells in product(range(3), repeat=4):
        total = sum(scores[k, cells[k], cells[k + 1]] for k in range(3))
        expected[min(total, top)] += np.mean([np.prod([law[k, c] for k, c in enumerate(cells)]) for law in laws])
    assert law_of_sum(laws, scores, top) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("few", [0, 6])
def test_below_the_truth_and_close_to_it(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows of one index each lose nothing but what cells lose; neighbours, what is not in pairs as well."""
    for direction, epsilon, sigma in [*product(DIRECTIONS, (0.3, 1.5), (0.7, 2.0)), ("remove", 0.0, 1.0)]:
        truth = oracles.delta(GRAM / sigma**2, epsilon, direction)
        fine = {"ratio": 0.1, "widest": 0.1, "most_cells": 100, "levels": 400, "few": few}
        for change in ({"few": few}, fine):
            monkeypatch.setattr(_windows, "_TUNING", _windows._Tuning(**change))
            windows = Windows.of(GRAM, 3, 1e-15)
            assert windows is not None
            found = windows.delta(sigma, epsilon, direction)
            assert found <= truth
            if change is fine:
                assert found >= (0.8 if few else 0.5) * truth


@pytest.mark.parametrize("few", [0, 6])
def test_any_knobs(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    truths = {direction: oracles.delta(GRAM, 0.5, direction) for direction in DIRECTIONS}
    for change, tuning in knobs.perturbed(_windows._Tuning(few=few)):
        monkeypatch.setattr(_windows, "_TUNING", tuning)
        windows = Windows.of(GRAM, 3, 1e-15)
        for direction in DIRECTIONS:
            assert windows is None or windows.delta(1.0, 0.5, direction) <= truths[direction], change


def test_rounding_errors_are_known() -> None:
    """Entries that are off by as much as allowed move covariance and shifts by no more than is said."""
    rng = np.random.default_rng(3)
    means = rng.random((12, 14))
    gram = means @ means.T
    windows = Windows.of(gram, 4, 20 * UNIT)
    assert windows is not None
    assert max(windows.skew, windows.slip) < 1e-12
    # Entries that are wrong by as much as allowed move both by less than that; a wrong matrix shows in the value.
    loose = Windows.of(gram, 4, 1e-3)
    assert loose is not None
    other = gram * (1 + 1e-3 * np.sign(rng.standard_normal(gram.shape)))
    root = np.linalg.lstsq(np.add.reduceat(gram, [0, 3, 6, 9], axis=0).T, windows.shifts.T, rcond=None)[0].T
    sums = np.add.reduceat(other, [0, 3, 6, 9], axis=0)
    covariance = root @ np.add.reduceat(sums, [0, 3, 6, 9], axis=1) @ root.T
    assert np.linalg.norm(covariance - np.eye(4)) <= loose.skew
    assert np.linalg.norm(root @ sums - loose.shifts, axis=0).max() <= loose.slip
    assert loose.delta(5.0, 1.0, "remove") < windows.delta(5.0, 1.0, "remove")
    assert Windows.of(np.ones((8, 8)), 4, 1e-15) is None


def test_the_distance_of_two_laws() -> None:
    """What is subtracted for a covariance that is not the unit matrix: the probability of an event moves by less."""
    skew = np.array([[0.03, 0.04], [0.04, -0.02]])
    for corner in product((-0.5, 0.5), repeat=2):
        moved = multivariate_normal(cov=np.eye(2) + skew).cdf(corner) - multivariate_normal(cov=np.eye(2)).cdf(corner)
        assert abs(moved) <= 0.5 * np.linalg.norm(skew)


def test_searches_use_them() -> None:
    """A chain whose memory is short of its length: more than quick bounds give, still on the sound side."""
    gram = 0.8 ** np.abs(np.subtract.outer(np.arange(40), np.arange(40)))
    sigma = lower_noise_multiplier(gram, 1.0, 1e-4, "remove")
    epsilon = lower_epsilon(gram, sigma, 1e-4, "remove")
    assert epsilon == pytest.approx(1.0, rel=0.01)
    windows = [Windows.of(gram, number, 1e-13) for number in (6, 8, 12, 17, 24)]
    largest = max(one.delta(0.999 * sigma, 1.0, "remove") for one in windows if one)
    assert 0.9e-4 < largest <= lower_delta(gram, 0.999 * sigma, 1.0, "remove")
