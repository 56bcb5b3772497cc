"""The add direction given the radius of the slowest wave: enumeration in balls, quadrature, and samples."""

from __future__ import annotations

import math
from dataclasses import replace

import balls
import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import log_uniform, random_settings
from scipy.integrate import quad
from scipy.special import ndtr

from dpmf import strategies
from dpmf.accountants import own_bin
from dpmf.accountants.own_bin import _Law
from dpmf.accountants.own_bin._given_bin import Shared, circulant_above
from dpmf.accountants.own_bin._given_radius import FAR, GivenRadius, falling_curve
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism


def ring(b: int, size: float, width: int = 3) -> np.ndarray:
    """A circulant Gram matrix of a banded strategy."""
    gram = circulant_above(Mechanism(strategies.bsr(width), BallsInBins(3, b)).gram_upper())
    return size * gram / gram.max()


def shared_of(s: np.ndarray) -> Shared:
    found = Shared.of(s, circulant=True)
    assert found is not None
    return found


def payoff(a: np.ndarray, strike: float, root: float) -> np.ndarray:
    """E(1 − K·a·e^(√v·z − v/2))_+."""
    d = root / 2 - np.log(strike * a) / root
    return ndtr(d) - strike * a * ndtr(d - root)


# --- moments ---------------------------------------------------------------------------------------------------------


def exact_rest(shared: Shared, given: GivenRadius) -> list[list[arb]]:
    """D without rounding."""
    b, v, wave = len(shared.s), balls.exact(shared.variance), balls.exact(given.wave)
    waves = [(2 * arb.pi() * d / b).cos() for d in range(b)]
    return [
        [balls.exact(float(x)) - v - wave * wave * waves[abs(i - j)] for j, x in enumerate(row)]
        for i, row in enumerate(shared.s)
    ]


@pytest.mark.parametrize("radius", [0.0, 0.7, 5.0])
@pytest.mark.parametrize("size", [1e-3, 0.8, 6.0])
def test_moments_contain_those_of_an_enumeration_in_balls(
    size: float, radius: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctx, "prec", 300)
    for b in (4, 5):
        shared = shared_of(ring(b, size))
        given = GivenRadius(shared)
        wave = balls.exact(given.wave)
        terms = [(wave * balls.exact(radius) * (2 * arb.pi() * j / b).cos() - wave * wave / 2).exp() for j in range(b)]
        mean, central = balls.moments_of_sum(exact_rest(shared, given), terms)
        balls.within(given.at(radius), mean, central)


@pytest.mark.parametrize("size", [1e-3, 0.8, 11.0])
@pytest.mark.parametrize("b", [3, 6, 9])
def test_what_is_left_is_a_covariance(b: int, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussian elimination in balls has positive pivots."""
    monkeypatch.setattr(ctx, "prec", 300)
    shared = shared_of(ring(b, size))
    given = GivenRadius(shared)
    assert given.wave > 0
    left = exact_rest(shared, given)
    for k, row in enumerate(left):
        assert row[k] > 0
        for below in left[k + 1 :]:
            factor = below[k] / row[k]
            below[k:] = [x - factor * y for x, y in zip(below[k:], row[k:], strict=True)]


@pytest.mark.parametrize("radius", [0.5, 3.0, 6.0])
def test_angles_do_not_matter_on_long_rings(radius: float) -> None:
    """Where it says so, the first two moments are the same at any angle but for rounding."""
    shared = shared_of(ring(128, 2.0, 12))
    given = GivenRadius(shared)
    assert not given.angle_matters(radius, given.at(radius), 1e-20)
    places = 2 * math.pi / 128 * np.arange(128)
    rest = np.expm1(shared.s - shared.variance - given.wave**2 * np.cos(places[:, None] - places))
    moments = []
    for angle in (0.0, 0.013, math.pi / 128, 0.07):
        terms = np.exp(given.wave * radius * np.cos(places + angle))
        moments.append((terms.mean(), terms @ (1 + rest) @ terms))
    np.testing.assert_allclose(moments, [moments[0]] * 4, rtol=1e-12)
    # On a short one they matter.
    short = GivenRadius(shared_of(ring(5, 4.0)))
    assert short.angle_matters(radius, short.at(radius), 1e-20)
    assert not short.usable


# --- between nodes ---------------------------------------------------------------------------------------------------


@random_settings(200)
@given(st.integers(0, 10**6), log_uniform(0.02, 3.0), log_uniform(0.02, 2.0), st.floats(-5.0, 14.0))
def test_the_payoff_satisfies_the_inequality(seed: int, root: float, wave: float, place: float) -> None:
    """P'' + β(P + η) ≥ 0 for sums of exponentials with loads of any sign; derivatives by the formulas of the proof."""
    rng = np.random.default_rng(seed)
    loads = wave * np.cos(rng.uniform(0, 2 * math.pi, 6))
    weights = rng.dirichlet(np.full(6, 0.5))
    curve, more = falling_curve(wave, root)
    first, second = float(weights @ loads), float(weights @ loads**2)
    a = math.exp(root * (root / 2 + place))  # K·B, so that d = −place
    density = math.exp(-((-place - root) ** 2) / 2) / math.sqrt(2 * math.pi)
    slope, bend = -float(ndtr(-place - root)), density / (a * root)  # of Φ(d) − a·Φ(d − √v) by a
    value = float(payoff(np.array(a), 1.0, root))
    change = bend * (a * first) ** 2 + slope * a * second
    assert change + curve.beta * (value + more) >= -1e-12 * curve.beta
    # The formulas are right: central differences.
    h = 1e-4 / max(wave, 1.0) * min(root, 1.0)
    around = [float(payoff(np.array(a * (weights @ np.exp(loads * x))), 1.0, root)) for x in (-h, 0.0, h)]
    assert change == pytest.approx((around[0] - 2 * around[1] + around[2]) / h**2, rel=1e-2, abs=1e-15 / h**2)


@random_settings(40)
@given(st.floats(0.05, 4.0), st.floats(0.0, 1.0))
def test_radial_weights_bound_the_integral(beta: float, phase: float) -> None:
    """Of a solution the integral itself, rounded up."""
    curve, _ = falling_curve(1.0, 1.0)
    curve = replace(curve, beta=beta)
    nodes = np.array([0.0, 0.3, 0.5, 1.2, 2.0, 2.9])
    rate = math.sqrt(beta)

    def solution(x: float) -> float:
        return math.sin(rate * x + phase) + 2

    # Where f is a solution plus 2, f + nothing is above: 2·β > 0.
    values = [math.sin(rate * x + phase) for x in nodes]
    exact = quad(lambda x: math.sin(rate * x + phase) * x * math.exp(-x * x / 2), 0, 2.9, epsabs=1e-13)[0]
    assert float(curve.weights(nodes, radial=True) @ values) == pytest.approx(exact, abs=1e-8)
    above = quad(lambda x: solution(x) * x * math.exp(-x * x / 2), 0, 2.9)[0]
    assert float(curve.weights(nodes, radial=True) @ [solution(x) for x in nodes]) >= above * (1 - 1e-9)


# --- the bound -------------------------------------------------------------------------------------------------------


def by_radius(law: _Law, strike: float) -> float:
    asked, more = law._radii
    return sum(weight * law._put_above(strike, shape) for weight, shape in asked) + more


def one_wave(b: int, shared: float, wave: float) -> np.ndarray:
    """A matrix with nothing but a shared part, one wave and a little of its own for each bin."""
    places = np.arange(b)
    lags = shared + wave**2 * np.cos(2 * math.pi / b * np.minimum(places, b - places))
    lags[0] += 1e-6
    return lags[(places[:, None] - places) % b]


def one_wave_truth(b: int, root: float, wave: float, strike: float) -> float:
    """E(1 − K·A)_+ without what the bins have of their own, which only adds to it: one integral over the radius."""
    waves = np.cos(2 * math.pi / b * np.arange(b))

    def given_radius(x: float) -> float:
        a = np.exp(wave * x * waves - wave**2 / 2).mean()
        return float(payoff(a, strike, root)) * x * math.exp(-x * x / 2)

    return quad(given_radius, 0, 12, epsabs=0, epsrel=1e-10, limit=400)[0]


@random_settings(40)
@given(st.integers(100, 140), log_uniform(0.02, 2.0), log_uniform(0.05, 1.0), st.floats(0.0, 5.0))
def test_never_below_an_integral_over_the_radius(b: int, root: float, part: float, far: float) -> None:
    wave = root * part
    strike = math.exp(far * root)
    law = _Law(one_wave(b, root**2, wave), True, 0.12)
    truth = one_wave_truth(b, root * (1 - 1e-5), wave, strike)
    assert by_radius(law, strike) >= truth * (1 - 1e-4)
    assert law.put(strike)[0] >= truth * (1 - 1e-4)


def test_close_to_an_integral_over_the_radius() -> None:
    """Given the radius hardly anything is left to vary."""
    law = _Law(one_wave(128, 0.7, 0.6), True, 0.12)
    strike = math.exp(3.5)
    truth = one_wave_truth(128, math.sqrt(0.7), 0.6, strike)
    assert truth < by_radius(law, strike) < 1.1 * truth


@pytest.mark.parametrize("radii", [0.1, 0.6, 1.5, 5.0])
@pytest.mark.parametrize("stretched", [0.5, 1.0, 2.0])
def test_any_nodes_are_sound(radii: float, stretched: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = own_bin._TUNING
    far = tuple(stretched * one for one in tuning.far_radii)
    monkeypatch.setattr(own_bin, "_TUNING", replace(tuning, radii=radii, far_radii=far))
    for epsilon in (0.5, 2.0, 3.5):
        truth = one_wave_truth(128, math.sqrt(0.7), 0.6, math.exp(epsilon))
        assert by_radius(_Law(one_wave(128, 0.7, 0.6), True, 0.12), math.exp(epsilon)) >= truth


@pytest.mark.parametrize(("size", "width", "epsilon"), [(2.0, 12, 2.5), (2.5, 30, 4.0), (0.5, 24, 1.0)])
def test_not_below_samples(size: float, width: int, epsilon: float) -> None:
    """Of a ring of 128 bins; what they share is integrated, which leaves little to chance."""
    s = ring(128, size, width)
    law = _Law(s, True, 0.12)
    values, vectors = np.linalg.eigh(s - law._root**2)
    normal = np.random.default_rng(1).normal(size=(40_000, 128))
    w = normal @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    pays = payoff(np.exp(w - (s[0, 0] - law._root**2) / 2).mean(axis=1), math.exp(epsilon), law._root)
    truth, error = float(pays.mean()), float(pays.std()) / 200
    assert law._radii[0]
    assert error < 0.1 * truth
    assert by_radius(law, math.exp(epsilon)) >= truth - 4 * error
    assert law.put(math.exp(epsilon))[0] >= truth - 4 * error


def test_rings_that_are_too_short_or_too_loud_say_nothing() -> None:
    assert by_radius(_Law(ring(20, 0.5), True, 0.12), 2.0) == 1.0
    assert by_radius(_Law(ring(40, 0.5), False, 0.12), 2.0) == 1.0
    assert by_radius(_Law(one_wave(33, 9.0, 2.5), True, 0.12), 2.0) == 1.0
    assert FAR > 3.5  # the largest √v that own-bin asks for, of a variance of 12
