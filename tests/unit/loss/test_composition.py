"""Losses on a lattice, composed by transforms, against sums over all combinations."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import balls
import numpy as np
import pytest
from flint import arb
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
        assert lower <= -math.expm1(1000 * math.log1p(-1e-9)) <= upper <= lower * (1 + 1e-11)


def test_infinite_losses_stay_infinite():
    atoms = Atoms(H, SMALL.indices, 0.9 * SMALL.masses, 0.1)
    assert Composition([(atoms, 3)]).delta(1e6) == pytest.approx(1 - 0.9**3, rel=1e-12)
    assert Composition([(Atoms(H, SMALL.indices, 0 * SMALL.masses, 1.0), 3)]).delta(1.0) == 1.0


def in_fractions(parts, epsilons):
    """δ(ε) of the product of the very masses given: sums of fractions, and exponentials in balls."""
    sums, whole = {0: Fraction(1)}, Fraction(1)
    for atoms, count in parts:
        masses = {i: Fraction(m) for i, m in zip(atoms.indices.tolist(), atoms.masses.tolist(), strict=True)}
        whole *= (sum(masses.values()) + Fraction(atoms.infinite)) ** count
        for _ in range(count):
            longer = {}
            for place, mass in sums.items():
                for step, more in masses.items():
                    longer[place + step] = longer.get(place + step, 0) + mass * more
            sums = longer
    infinite = balls.exact(whole - sum(sums.values()))
    return [
        sum(
            (
                balls.exact(mass) * (1 - (balls.exact(epsilon) - balls.exact(H * place)).exp())
                for place, mass in sums.items()
                if H * place > epsilon
            ),
            infinite,
        )
        for epsilon in epsilons
    ]


@pytest.mark.parametrize("excess", [5e-15, 1e-3, -1e-3, 0.0])
@pytest.mark.parametrize("infinite", [0.0, 1e-300, 1e-12, 1e-3, 0.2, 1.0])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_masses_that_do_not_add_up_to_one_are_composed_as_they_are(excess, infinite, count):
    finite = np.array([0.7, 0.3]) * max(1 - infinite, 1e-3) * (1 + excess)
    parts = [(Atoms(H, np.array([-20, 31]), finite, infinite), count), (OTHER, 1)]
    epsilons = [0.0, 0.5, 2.0, 31 * H * count, 1e3]
    upper, lower = Composition(parts), Composition(parts, "lower")
    for epsilon, truth in zip(epsilons, in_fractions(parts, epsilons), strict=True):
        assert lower.delta(epsilon) <= truth
        assert upper.delta(epsilon) >= min(truth, arb(1))
        assert upper.delta(epsilon) <= truth * (1 + 1e-8) + 1e-14


@pytest.mark.parametrize("excess", [5e-15, 1e-3])
def test_infinite_losses_of_many_masses_above_one(excess):
    """The mass of infinite loss alone, with so many losses that their excess can be seen."""
    masses = np.array([0.7, 0.3 - 1e-9]) * (1 + excess)
    atoms = Atoms(H, np.array([-1, 1]), masses, 1e-9)
    finite = Fraction(masses[0]) + Fraction(masses[1])
    count = 2000
    truth = float((finite + Fraction(1e-9)) ** count - finite**count)
    upper, lower = (Composition([(atoms, count)], side).delta(1e9) for side in ("upper", "lower"))
    assert lower <= truth <= upper <= lower * (1 + 1e-10)


def test_a_part_without_finite_losses():
    nothing = Atoms(H, np.array([3]), np.zeros(1), 0.3)
    assert Composition([(nothing, 2), (SMALL, 1)]).delta(0.0) == 1.0
    assert Composition([(nothing, 2), (SMALL, 1)], "lower").delta(0.0) == pytest.approx(0.09, rel=1e-9)
    assert Composition([(Atoms(H, np.array([3]), np.zeros(1), 0.0), 2)], "lower").delta(0.0) == 0.0


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
