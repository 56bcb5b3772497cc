"""Losses on a lattice, composed by transforms, against sums over all combinations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dpmf.loss import composition
from dpmf.loss.composition import Atoms, Composition
from dpmf.loss.gaussian import gaussian_delta
from dpmf.loss.poisson import PoissonSample

H = 2.0**-6
SMALL = Atoms(H, np.array([-40, 3, 7, 90]), np.array([0.3, 0.4, 0.2, 0.1]), 0.0)
OTHER = Atoms(H, np.array([-11, 0, 25]), np.array([0.25, 0.5, 0.25]), 0.0)


def exact(parts, epsilon):
    """δ(ε) as a sum over all combinations of atoms."""
    lists = [list(zip(a.indices.tolist(), a.masses.tolist(), strict=True)) for a, count in parts for _ in range(count)]
    terms = []
    for combination in itertools.product(*lists):
        loss = H * sum(index for index, _ in combination)
        if loss > epsilon:
            terms.append(math.prod(mass for _, mass in combination) * -math.expm1(epsilon - loss))
    return math.fsum(terms)


@pytest.mark.parametrize("parts", [[(SMALL, 1)], [(SMALL, 3)], [(SMALL, 4), (OTHER, 3)]])
def test_every_combination_is_counted_from_above_and_from_below(parts):
    upper, lower = Composition(parts), Composition(parts, "lower")
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 5.6):
        truth = exact(parts, epsilon)
        assert truth * (1 - 1e-9) - 1e-15 <= lower.delta(epsilon) <= truth * (1 + 1e-13)
        assert truth * (1 - 1e-13) <= upper.delta(epsilon) <= truth * (1 + 1e-9) + 1e-15


def test_a_coarser_lattice_stays_on_its_side(monkeypatch):
    parts = [(SMALL, 4), (OTHER, 3)]
    monkeypatch.setattr(composition, "_TUNING", composition._Tuning(largest_window=60))
    upper, lower = Composition(parts), Composition(parts, "lower")
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        truth = exact(parts, epsilon)
        assert 0.1 * truth < lower.delta(epsilon) < truth < upper.delta(epsilon) < 5 * truth


@pytest.mark.parametrize("cut", [0.5, 3.0, 40.0])
def test_a_short_window_stays_sound(monkeypatch, cut):
    """Mass wraps around where the window is too short: from below it is taken off, from above it stays."""
    parts = [(SMALL, 4), (OTHER, 3)]
    monkeypatch.setattr(composition, "_TUNING", composition._Tuning(cut=cut))
    upper, lower = Composition(parts), Composition(parts, "lower")
    for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0):
        assert lower.delta(epsilon) <= exact(parts, epsilon) <= upper.delta(epsilon)


def test_beyond_the_largest_sum_only_infinite_losses_count():
    bounded = Atoms(H, np.array([-40, 1]), np.array([0.001, 0.999 - 1e-9]), 1e-9)
    for epsilon in (1000 * H, 1000 * H + 1, 300.0):
        upper = Composition([(bounded, 1000)]).delta(epsilon)
        lower = Composition([(bounded, 1000)], "lower").delta(epsilon)
        assert lower <= -math.expm1(1000 * math.log1p(-1e-9)) <= upper <= lower * (1 + 1e-13)


def test_infinite_losses_stay_infinite():
    atoms = Atoms(H, SMALL.indices, 0.9 * SMALL.masses, 0.1)
    assert Composition([(atoms, 3)]).delta(1e6) == pytest.approx(1 - 0.9**3, rel=1e-12)
    assert Composition([(Atoms(H, SMALL.indices, 0 * SMALL.masses, 1.0), 3)]).delta(1.0) == 1.0


@pytest.mark.parametrize("side", ["upper", "lower"])
@pytest.mark.parametrize("count", [1, 30, 1000])
def test_a_tiny_delta_of_a_gaussian_has_relative_accuracy(side, count):
    """The loss N(μ²/2, μ²) cut into cells: a thousand of them are a Gaussian mechanism of sensitivity √1000·μ."""
    mu = 2.0 / math.sqrt(count)
    h = 2.0 ** math.floor(math.log2(0.04 / count))  # rounding moves the sum by half of that, times the count
    edges = np.arange(math.floor(-9 * mu / h), math.ceil(9 * mu / h) + 1)
    masses = np.diff(norm.cdf(edges * h / mu - mu / 2))
    places = edges[1:] if side == "upper" else edges[:-1]
    found = Composition([(Atoms(h, places, masses, 0.0), count)], side)
    for epsilon in (0.0, 3.0, 8.0, 12.0):
        truth, value = gaussian_delta(2.0, epsilon), found.delta(epsilon)
        assert value == pytest.approx(truth, rel=0.3)
        assert value >= truth * (1 - 1e-9) if side == "upper" else value <= truth


@pytest.mark.parametrize("rate", [1.0, 0.3, 1e-4])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_a_poisson_sample_against_quadrature(rate, direction):
    """sup P(E) − e^ε Q(E) as an integral of the positive part of the difference of the densities."""
    mu = 1.3
    x = np.linspace(-12, 14, 2_000_001)
    q = norm.pdf(x)
    p = (1 - rate) * q + rate * norm.pdf(x - mu)
    sample = PoissonSample(mu, rate)
    for epsilon in (0.0, 0.5 * rate, 0.1, 1.0):
        gap = p - math.exp(epsilon) * q if direction == "remove" else q - math.exp(epsilon) * p
        truth = float(np.maximum(gap, 0.0).sum() * (x[1] - x[0]))
        upper, lower = (sample.delta(epsilon, direction, side) for side in ("upper", "lower"))
        assert lower <= upper <= lower * (1 + 1e-9) + 1e-14
        assert upper == pytest.approx(truth, rel=1e-6, abs=1e-13)
