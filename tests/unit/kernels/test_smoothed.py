"""Polynomials above and below a smoothed option: the payoff in balls, laws worth nearly as much, linear programmes."""

from __future__ import annotations

import math
from itertools import pairwise

import balls
import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import log_uniform, random_settings
from scipy.optimize import linprog

from dpmf.kernels import smoothed
from dpmf.kernels.smoothed import (
    payoff,
    pooled_above,
    smoothed_above,
    smoothed_below,
    smoothed_likely,
    smoothed_polynomial,
)

NO_ERRORS = np.zeros(3)


# --- the payoff ----------------------------------------------------------------------------------------------------


def exact_payoff(y: float, sign: int, strike: float, root: float, mean: float, deviation: float) -> tuple[arb, arb]:
    """g(y) and the probability that the option pays, in balls; sign 2 is minus the call, −2 minus the put."""
    k, r = balls.exact(strike), balls.exact(root)
    a = balls.exact(mean) * (1 + balls.exact(deviation) * balls.exact(y))
    if not a > 0:
        return (arb(0), arb(0)) if sign > 0 else (arb(-1 if sign == -2 else 1), arb(1))
    ratio = k / a if sign > 0 else k * a
    d = r / 2 - ratio.log() / r
    value = balls.cdf(d) - ratio * balls.cdf(d - r)
    return -value if abs(sign) == 2 else value, balls.cdf(d)


@pytest.mark.parametrize("sign", [1, -1, 2, -2])
@pytest.mark.parametrize("seed", range(3))
def test_the_payoff_is_rounded_up(seed: int, sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where y is near its least value, and 1 + deviation·y has few digits left."""
    monkeypatch.setattr(ctx, "prec", 300)
    rng = np.random.default_rng(seed)
    for _ in range(1500):
        root, mean = float(10 ** rng.uniform(-3, 0.3)), float(10 ** rng.uniform(-2, 4))
        strike, deviation = float(10 ** rng.uniform(-6, 4)), float(10 ** rng.uniform(-4, 1))
        kink = (strike if sign > 0 else 1 / strike) / mean
        part = (
            10 ** rng.uniform(-8, 3)
            if rng.random() < 0.5
            else kink * math.exp(max(min(sign, 1), -1) * rng.uniform(-37, 10) * root)
        )
        y = float((part - 1) / deviation)
        found = payoff(y, sign, strike, root, mean, deviation)
        exact, pays = exact_payoff(y, sign, strike, root, mean, deviation)
        assert arb(found) >= exact
        if part > 1e-2:  # deep in the money, where it is about 1, there are fewer digits
            near = abs(math.log(part / kink)) <= 40 * root
            assert arb(found) <= exact + (1e-8 if near else 1e-5) * pays + 1e-280


def test_the_payoff_ends_well() -> None:
    assert payoff(-10.0, 1, 2.0, 0.3, 1.0, 0.1) < 1e-280
    assert payoff(-10.1, 1, 2.0, 0.3, 1.0, 0.1) == 0.0
    assert payoff(1e300, 1, 2.0, 0.3, 1.0, 0.1) == 1.0
    assert payoff(1e15, 1, 2.0, 0.3, 1.0, 0.1) == pytest.approx(1.0, abs=1e-9)
    assert payoff(-10.1, -1, 2.0, 0.3, 1.0, 0.1) == 1.0
    assert payoff(-9.999999, -1, 2.0, 0.3, 1.0, 0.1) == pytest.approx(1.0, abs=1e-5)
    assert payoff(1e15, -1, 2.0, 0.3, 1.0, 0.1) < 1e-280


@pytest.mark.parametrize("sign", [1, -1, 2, -2])
@pytest.mark.parametrize("seed", range(3))
def test_slope_and_bend(seed: int, sign: int) -> None:
    """The derivative in balls, and second differences, which −g'' is nowhere below."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        root, deviation = float(10 ** rng.uniform(-1.5, 0.3)), float(10 ** rng.uniform(-2, 0))
        law = (sign, float(math.exp(rng.uniform(-1, 3))), root, float(math.exp(rng.uniform(-1, 1))), deviation)
        kink = (law[1] if sign > 0 else 1 / law[1]) / law[3]
        y = float((kink * math.exp(max(min(sign, 1), -1) * rng.uniform(-3, 5) * root) - 1) / deviation)
        h = 1e-3 * root * (1 + deviation * y) / deviation
        left, here, right = (payoff(x, *law) for x in (y - h, y, y + h))
        assert smoothed._slope(y, *law) == pytest.approx((right - left) / (2 * h), rel=1e-4, abs=1e-9 / h)
        assert smoothed._bend(y - h, y + h, *law) >= -(right - 2 * here + left) / h**2 - 1e-11 / h**2


# --- polynomials above it ------------------------------------------------------------------------------------------

LAWS = [
    (2.718, 0.187, 1.997, 0.1204),
    (1.3716, 0.187, 1.034, 0.1216),
    (math.exp(4), 0.55, 20.0, 0.25),
    (1.0, 0.01, 1.0, 0.02),
    (3.0, 1.2, 0.5, 0.9),
    (0.2, 0.1, 5.0, 0.5),
]


@pytest.mark.parametrize("sign", [1, -1, 2, -2])
@pytest.mark.parametrize("numbers", LAWS)
def test_lifted_polynomials_are_above_the_payoff(numbers: tuple[float, float, float, float], sign: int) -> None:
    rng = np.random.default_rng(5)
    law = (sign, *numbers)
    lowest = -1 / numbers[3]
    lifted = 0
    for _ in range(60):
        left = float(rng.uniform(max(lowest, -3), 2.0))
        right = left + float(10 ** rng.uniform(-0.5, 1.3))
        coefficients = np.empty(5)
        at = [payoff(x, *law) for x in (left, right)]
        slopes = [smoothed._slope(x, *law) for x in (left, right)]
        third = float(rng.choice([1e-14, 1e-6, 1e-4, 1e-2]))
        smoothed._through(left, right, *at, *slopes, third, coefficients)
        for x, value, slope in zip((left, right), at, slopes, strict=True):
            assert np.polyval(coefficients[::-1], x) == pytest.approx(value, abs=1e-9)
            assert np.polyval(np.polyder(coefficients[::-1]), x) == pytest.approx(slope, abs=1e-8)
        edges = smoothed._edges(lowest, 8.0, float(rng.uniform(10.0, 200.0)))
        end = float(edges[-1])
        missing, _ = smoothed._lifted(coefficients, edges, law, 1e-6)
        places = np.concatenate([
            rng.uniform(lowest, end, 1000), rng.uniform(max(lowest, -5.0), 8.0, 1000),
            left + rng.normal(size=200) * 1e-2, right + rng.normal(size=200) * 1e-2,
        ])  # fmt: skip
        places = np.append(places[(places >= lowest) & (places <= end)], [lowest, end])
        lack = np.array([payoff(y, *law) for y in places]) - np.polyval(coefficients[::-1], places)
        size = np.polyval(np.abs(coefficients[::-1]), np.abs(places))
        assert np.all(lack <= missing + 1e-14 * size)
        assert missing <= max(1.2 * lack.max(), 0) + 2e-5 * max(1.0, float(np.abs(lack).max()))
        lifted += missing > 0
    assert lifted > 10


def test_powers_that_overflow_prove_nothing() -> None:
    """A deviation so small that y⁴ has no double: the bound is 1, not a number without meaning."""
    for deviation in (1e-60, 1e-90, 1e-150):
        law = (1, 1.0, 1e-3, 1.0, deviation)
        coefficients = np.array([0.5, 0.0, 0.5, 0.0, 1e-3])
        edges = np.array([-1 / deviation, -1.0, 1.0, 8.0])
        missing, _ = smoothed._lifted(coefficients, edges, law, 1e-6)
        assert missing >= 0.0
        if deviation < 1e-80:
            assert missing == math.inf
        value = smoothed_above(1, 1.0, 1e-3, 1.0, deviation, -1 / deviation, 0.5, 4.0, NO_ERRORS, 0.0)
        assert not value < payoff(0.0, *law) * 0.999


@st.composite
def laws(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Values with mean 0 and variance 1, and their probabilities: a few places, some of them rare and far away."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    size = draw(st.integers(2, 6))
    values = rng.normal(size=size) if draw(st.booleans()) else np.exp(rng.normal(size=size))
    weights = rng.dirichlet(np.ones(size) * 0.4 + 0.05) + 1e-9
    if draw(st.booleans()):  # a fourth moment of up to a million
        rare = draw(log_uniform(1e-6, 1e-2))
        values = np.append(values, rare**-0.5 * draw(st.floats(0.3, 3.0)))
        weights = np.append(weights * (1 - rare) / weights.sum(), rare)
    weights = weights / weights.sum()
    values = values - weights @ values
    return values / math.sqrt(float(weights @ values**2)), weights


@random_settings(1000)
@given(
    laws(), st.floats(-8.0, 15.0), log_uniform(1e-3, 2.0), log_uniform(0.1, 50.0), log_uniform(1e-3, 1.0),
    st.sampled_from([1, -1]),
)  # fmt: skip
def test_no_law_with_these_moments_is_worth_more(
    law: tuple[np.ndarray, np.ndarray], place: float, root: float, mean: float, room: float, sign: int
) -> None:
    """`place` is where the strike is among the y; for a smoothed strike, where log(strike/mean)/root is."""
    values, weights = law
    deviation = min(room, 1.0) / -float(values.min())
    across = 1 + deviation * place
    strike = mean * (across if across > 0.02 else math.exp(place * root))
    strike = strike if sign > 0 else 1 / strike
    exact = float(weights @ [payoff(y, sign, strike, root, mean, deviation) for y in values])
    skewness, kurtosis = float(weights @ values**3), float(weights @ values**4)
    errors = 1e-12 * np.array([1.0, 1.0, 1 + abs(skewness)])
    for lowest in (float(values.min()), -1 / deviation):
        bound = smoothed_above(
            sign, strike, root, mean, deviation, lowest, skewness, kurtosis * (1 + 1e-12), errors, 0.0
        )  # fmt: skip
        assert exact * (1 - 1e-9) <= bound <= 1
        below = smoothed_below(
            sign, strike, root, mean, deviation, lowest, skewness, kurtosis * (1 + 1e-12), errors, 0.0
        )  # fmt: skip
        assert 0 <= below <= exact * (1 + 1e-9)
    bound = smoothed_above(sign, strike, root, mean, deviation, lowest, skewness, 2 * kurtosis, errors, 0.0)
    assert bound >= exact * (1 - 1e-9)
    below = smoothed_below(sign, strike, root, mean, deviation, lowest, skewness, 2 * kurtosis, errors, 0.0)
    assert below <= exact * (1 + 1e-9)


def pool_of(cases: list[tuple[float, ...]], strike: float, root: float) -> np.ndarray:
    """Polynomials for laws of some means, deviations, skewnesses and kurtoses."""
    pool = np.empty((len(cases), 7))
    for row, (mean, deviation, skewness, kurtosis) in zip(pool, cases, strict=True):
        row[:2] = mean, deviation
        smoothed_polynomial(
            1, strike, root, mean, deviation, -1 / deviation, skewness, kurtosis, NO_ERRORS, 0.0, row[2:]
        )  # fmt: skip
    return pool


@random_settings(300)
@given(
    laws(), st.floats(-4.0, 12.0), log_uniform(1e-2, 1.5), log_uniform(0.1, 50.0), log_uniform(1e-2, 1.0),
    log_uniform(0.3, 3.0), log_uniform(0.3, 3.0), st.floats(-1.0, 3.0),
)  # fmt: skip
def test_polynomials_for_one_law_bound_another(
    law: tuple[np.ndarray, np.ndarray], place: float, root: float, mean: float, room: float,
    other_mean: float, other_deviation: float, skewness: float,
) -> None:  # fmt: skip
    """`mean` and `deviation` are those of the law; polynomials are made for others."""
    values, weights = law
    deviation = min(room, 1.0) / -float(values.min())
    across = 1 + deviation * place
    strike = mean * (across if across > 0.02 else math.exp(place * root))
    exact = float(weights @ [payoff(y, 1, strike, root, mean, deviation) for y in values])
    moments = [np.array([x]) for x in (mean, deviation, float(weights @ values**3), float(weights @ values**4))]
    errors = 1e-12 * np.array([[1.0, 1.0, 1 + abs(moments[2][0])]])
    cases = [
        (mean * other_mean, deviation * other_deviation, skewness, 2 * skewness**2 + 3),
        (mean, deviation, 1.0, 9.0),
    ]
    found = pooled_above(pool_of(cases, strike, root), *moments, errors)
    assert exact * (1 - 1e-9) <= found[0] <= 1


def test_a_polynomial_for_the_law_itself_gives_its_bound() -> None:
    for strike, root, *case in CASES:
        mean, deviation, skewness, kurtosis = case
        alone = smoothed_above(1, strike, root, mean, deviation, -1 / deviation, skewness, kurtosis, NO_ERRORS, 0.0)
        pool = pool_of([tuple(case)], strike, root)
        found = pooled_above(pool, *(np.array([x]) for x in case), NO_ERRORS[None])
        assert found[0] == pytest.approx(alone, rel=1e-4)


@random_settings(100)
@given(laws(), st.floats(-6.0, 2.0), log_uniform(1e-2, 1.0), log_uniform(1e-6, 1e-2))
def test_rare_values_below_the_least_one_are_paid_for(
    law: tuple[np.ndarray, np.ndarray], place: float, root: float, rare: float
) -> None:
    """A value far below `lowest`, where the polynomial may be negative."""
    values, weights = law
    values, weights = np.append(values, -5.0 - rare**-0.25), np.append(weights * (1 - rare), rare)
    values = values - weights @ values
    values = values / math.sqrt(float(weights @ values**2))
    deviation = 0.99 / -float(values.min())
    strike = math.exp(-place * root)
    exact = float(weights @ [payoff(y, -1, strike, root, 1.0, deviation) for y in values])
    skewness, kurtosis = float(weights @ values**3), float(weights @ values**4)
    errors = 1e-12 * np.array([1.0, 1.0, 1 + abs(skewness)])
    lowest = float(np.sort(values)[1])
    if lowest < -1e-3:
        bound = smoothed_above(-1, strike, root, 1.0, deviation, lowest, skewness, kurtosis, errors, rare * 1.001)
        assert exact * (1 - 1e-9) <= bound <= 1
        below = smoothed_below(-1, strike, root, 1.0, deviation, lowest, skewness, kurtosis, errors, rare * 1.001)
        assert 0 <= below <= exact * (1 + 1e-9)


CASES = [
    (2.718, 0.187, 1.997, 0.1204, 1.88, 12.3),
    (1.3716, 0.187, 1.034, 0.1216, 1.47, 9.08),
    (math.exp(4), 0.55, 20.0, 0.25, 1.8, 11.0),
    (2.718, 0.187, 1.2, 0.12, 1.5, 9.0),
    (2.718, 0.187, 1.0, 0.09, 1.0, 6.0),
    (math.exp(4), 0.55, 5.0, 0.25, 1.8, 11.0),
    (1.6487, 0.1, 1.1, 0.03, 0.4, 3.4),
    (1.284, 0.3, 1.02, 0.2, 1.0, 5.0),
    (2.718, 0.187, 4.0, 0.1204, 1.88, 12.3),
    (2.718, 0.187, 1.997, 0.1204, 4.0, 60.0),
]
# The option that is worth something where A is small, with the least value that A has there.
PUTS = [
    (2.718, 0.3, 1.0, 0.12, -4.0, 1.0, 6.0),
    (1.3, 0.06, 1.0, 0.02, -5.0, 0.4, 3.4),
    (54.6, 0.9, 1.0, 0.5, -1.6, 2.0, 9.0),
    (2.718, 0.2, 1.0, 0.1, -10.0, 1.0, 6.0),
]


@pytest.mark.parametrize(
    "case",
    [(sign, *case[:4], -1 / case[3], *case[4:]) for case in CASES for sign in (1, 2)]
    + [(sign, *put) for put in PUTS for sign in (-1, -2)],
)
def test_it_is_about_the_least_that_four_moments_allow(case: tuple[float, ...]) -> None:
    """A linear programme over polynomials that are above the payoff at many points: a lower bound, and close."""
    sign, strike, root, mean, deviation, lowest, skewness, kurtosis = case
    kink = (strike / mean - 1) / deviation if sign > 0 else 0.0
    reach = max(8.0, 2 * kink)
    grid = np.unique(np.concatenate([np.linspace(lowest, reach, 2500), np.geomspace(reach, 1e4, 500)]))
    values = np.array([payoff(y, sign, strike, root, mean, deviation) for y in grid])
    powers = np.vander(grid / 4, 5, increasing=True)
    size = 1 + np.abs(powers).max(axis=1, keepdims=True)
    cost = np.array([1, 0, 1, skewness, kurtosis]) / 4.0 ** np.arange(5)
    unit = abs(float(values @ np.exp(-(grid**2) / 2)) / float(np.exp(-(grid**2) / 2).sum())) + 1e-9
    # The leading coefficient is not negative: of the fourth moment only an upper bound is known.
    least = linprog(
        cost, A_ub=-powers / size, b_ub=-values / unit / size[:, 0], bounds=[(None, None)] * 4 + [(0, None)],
        method="highs",
    ).fun * unit  # fmt: skip
    found = smoothed_above(*case, NO_ERRORS, 0.0)
    assert least - 1e-6 * abs(least) <= found <= least + 0.1 * abs(least)
    if abs(sign) == 2:
        assert smoothed_below(sign // 2, *case[1:], NO_ERRORS, 0.0) == -found
    if sign == 1:
        assert smoothed_likely(*case[:5], skewness) <= 1.001 * found


def test_bounds_allow_for_errors_of_the_moments() -> None:
    for numbers in CASES:
        case = (1, *numbers[:4], -1 / numbers[3], *numbers[4:])
        values = [smoothed_above(*case, np.full(3, error), 0.0) for error in (0.0, 1e-6, 1e-3)]
        assert all(x <= y * (1 + 2e-2) for x, y in pairwise(values))
        assert values[1] <= values[0] * 1.05 + 1e-5
    assert smoothed_above(1, 2.0, 0.2, 1.0, 0.1, -10.0, math.nan, 9.0, NO_ERRORS, 0.0) == 1.0
    assert smoothed_above(1, 2.0, 0.2, 1.0, 0.1, -10.0, 1.0, math.inf, NO_ERRORS, 0.0) == 1.0
    for sign in (1, -1):
        assert smoothed_below(sign, 2.0, 0.2, 1.0, 0.1, -10.0, math.nan, 9.0, NO_ERRORS, 0.0) == 0.0
        assert smoothed_below(sign, 2.0, 0.2, 1.0, 0.1, -10.0, 1.0, math.inf, NO_ERRORS, 0.0) == 0.0


# --- where the cubic term vanishes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_contact_without_a_cubic_term_is_that_of_bisection(seed: int, sign: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        root, deviation = float(10 ** rng.uniform(-1.5, 0.3)), float(10 ** rng.uniform(-1.5, 0.5))
        strike, left = float(10 ** rng.uniform(-0.5, 2)), float(rng.uniform(-0.9 / deviation, 2.0))
        law = sign, strike, root, 1.0, deviation
        furthest = max(2.0, 1.7 * abs((strike - 1) / deviation) + 3)

        def low_side(y: float, law: tuple[int, float, float, float, float] = law, left: float = left) -> bool:
            slopes = smoothed._slope(y, *law) + smoothed._slope(left, *law)
            chord = (payoff(y, *law) - payoff(left, *law)) / (y - left)
            return bool(slopes >= 2 * chord) == (law[0] == 1)

        low, high = left + 0.05, left + furthest
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if low_side(middle) else (low, middle)
        found = smoothed._quadratic(left, furthest, law)
        # The cubic term changes its sign once, or far from where the payoff is more than its rounding errors.
        assert found == pytest.approx(low, abs=2e-7 * furthest) or payoff(found, *law) * (3 - 2 * sign) < 1e-12
