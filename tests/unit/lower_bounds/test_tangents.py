"""Tangent planes of the logarithm of the likelihood ratio: against quadrature, and a closed form by another way."""

from __future__ import annotations

import math

import knobs
import numpy as np
import oracles
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from dpmf.kernels.tangents import aims, by_tangents
from dpmf.lower_bounds import _families, _tangents
from dpmf.lower_bounds._tangents import tangent_delta
from dpmf.lower_bounds._windows import Windows, cells_of

GRAM = np.array([[1.0, 0.6, 0.2], [0.6, 1.1, 0.5], [0.2, 0.5, 0.9]])


def windows_of(gram: np.ndarray) -> Windows:
    found = Windows.of(gram, len(gram), 1e-15)
    assert found is not None
    return found


def test_one_box_is_a_plane_and_a_half_line() -> None:
    """Without axes the bound of a component is an integral along the gradient, which quadrature does too."""
    shifts, epsilon, goal = windows_of(GRAM).shifts, 0.8, 1.0
    half = 0.5 * (shifts**2).sum(axis=0)
    points, _ = aims(shifts, goal)
    expected = 0.0
    for i, point in enumerate(points):
        way = point - shifts[:, i]

        def log_terms(place: float, i: int = i, way: np.ndarray = way) -> np.ndarray:
            return (shifts[:, i] + place * way) @ shifts - half

        place = brentq(lambda x: math.log(np.exp(log_terms(x)).mean()) - goal, -3, 40)
        share = np.exp(log_terms(place)) / np.exp(log_terms(place)).sum()
        normal, level = shifts @ share, float(share @ (half + np.log(3 * share)))
        mean, deviation = float(normal @ shifts[:, i]), float(np.linalg.norm(normal))
        integrand = lambda x, m=mean, s=deviation, c=level: norm.pdf(x, m, s) * (1 - math.exp(epsilon + c - x))  # noqa: E731
        expected += quad(integrand, epsilon + level, mean + 12 * deviation)[0] / 3
    nothing = np.empty((3, 0, 3)), points, np.empty(0, dtype=np.int64), np.empty((0, 2))
    assert by_tangents(shifts, *nothing, epsilon, goal, 0.0, 0.0) == pytest.approx(expected, rel=2e-3)


def test_below_the_truth_and_close_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two axes and the gradient are all of three dimensions: fine boxes lose next to nothing."""
    fine = _tangents._Tuning(work=1e9, most_boxes=4000.0)
    for epsilon, sigma in [(0.0, 1.0), (0.3, 2.0), (1.5, 0.7), (3.0, 0.6)]:
        truth = oracles.delta(GRAM / sigma**2, epsilon, "remove")
        for tuning, least in [(_tangents._Tuning(most_boxes=20.0), 0.6), (fine, 0.97)]:
            monkeypatch.setattr(_tangents, "_TUNING", tuning)
            assert least * truth <= tangent_delta(windows_of(GRAM), sigma, epsilon) <= truth


def test_any_knobs_and_any_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    for change, tuning in knobs.perturbed(_tangents._Tuning(most_boxes=30.0)):
        monkeypatch.setattr(_tangents, "_TUNING", tuning)
        means = rng.random((3, 4)) ** 2
        gram, epsilon = means @ means.T / rng.uniform(0.2, 3.0), rng.uniform(0.0, 3.0)
        assert tangent_delta(windows_of(gram), 1.0, epsilon) <= oracles.delta(gram, epsilon, "remove"), change
    assert tangent_delta(windows_of(GRAM), 1e-9, 1.0) == 0.0


def test_cells_are_where_they_matter() -> None:
    assert cells_of(np.array([1.0, 1.0, 0.0]), 36.0) == [6, 6, 1]
    assert cells_of(np.array([2.0, 0.5]), 0.0) == [1, 1]


def test_an_order_in_which_neighbours_overlap() -> None:
    """Every other index is correlated: in the other order windows see it, and the pair is the same."""
    apart = np.abs(np.subtract.outer(np.arange(20), np.arange(20)))
    gram = np.where(apart % 2 == 0, 0.9**apart, 0.1)
    found = _families._reordered(gram)
    assert np.diagonal(found, 1).sum() > 2 * np.diagonal(gram, 1).sum()
    assert sorted(found.ravel()) == sorted(gram.ravel())
    assert np.allclose(found, found.T)
    smooth = 0.9**apart
    assert _families._reordered(smooth) is smooth
