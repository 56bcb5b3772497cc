"""Lower bounds repeated in ball arithmetic: in double precision they are never above the exact ones."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import balls
import numpy as np
import pytest
from flint import arb, ctx

from dpmf.batching import BallsInBins
from dpmf.lower_bounds._families import LowerBounds
from dpmf.lower_bounds._half_spaces import HalfSpaces
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT
from dpmf.strategies import coefficients

DIRECTIONS = ("remove", "add")


@pytest.fixture(autouse=True)
def _precision():
    before, ctx.prec = ctx.prec, 160
    yield
    ctx.prec = before


def half_space_value(gram, weights, sigma: float, x: float, epsilon: float, direction: str) -> arb:
    """P(E) − γQ(E), or Q(E) − γP(E), by the formulas of the theory page, from exact numbers."""
    b, gamma, threshold = len(gram), balls.exact(epsilon).exp(), balls.exact(x)
    products = [[sum(w[j] * gram[j][i] for j in range(b)) for i in range(b)] for w in weights]
    covariance = [[sum(u[i] * w[i] for i in range(b)) for w in weights] for u in products]
    scale = [balls.exact(covariance[k][k]).sqrt() for k in range(len(weights))]
    shifts = [[balls.exact(v) / s / balls.exact(sigma) for v in row] for row, s in zip(products, scale, strict=True)]
    if direction == "add":
        moved = sum((balls.upper_tail(shift - threshold) for shift in shifts[0]), arb(0)) / b
        return balls.upper_tail(-threshold) - gamma * moved
    value = sum((balls.upper_tail(threshold - shift) for row in shifts for shift in row), arb(0)) / b
    value -= gamma * len(weights) * balls.upper_tail(threshold)
    for k, other in combinations(range(len(weights)), 2):
        spread = (2 + 2 * balls.exact(covariance[k][other]) / scale[k] / scale[other]).sqrt()
        for i in range(b):
            value -= balls.upper_tail((2 * threshold - shifts[k][i] - shifts[other][i]) / spread) / b
    return value


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
def test_half_spaces(sigma: float, direction: str) -> None:
    gram = np.array([[1.0, 0.6, 0.1, 0.0], [0.6, 1.3, 0.6, 0.1], [0.1, 0.6, 1.7, 0.6], [0.0, 0.1, 0.6, 0.9]])
    exact = [[Fraction(float(v)) for v in row] for row in gram]
    one, pairs = np.array([[1.0, 0.9, 0.7, 0.3]]), np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    for weights in (one, pairs) if direction == "remove" else (one,):
        spaces = HalfSpaces.from_weights(gram, weights, 4 * UNIT * (len(gram) + 16))
        rational = [[Fraction(float(w)) for w in row] for row in weights]
        for x in (-3.0, 0.1, 2.5, 7.3):
            for epsilon in (0.0, 0.5, 4.0):
                found = spaces._value(spaces.shifts / sigma, x, epsilon, direction)
                truth = half_space_value(exact, rational, sigma, x, epsilon, direction)
                assert found <= 0 or balls.exact(found) <= truth.lower()
                if truth > 1e-13:
                    assert found >= float(truth.mid()) * (1 - 1e-4) - 1e-11


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shifts_from_sums_that_lose_every_addition(direction: str) -> None:
    """c = (1, just below 2⁻⁵³, ...): the sums over epochs are too small, and so are the row sums and the total."""
    epochs, b = 3000, 2
    n, small = epochs * b, math.nextafter(2.0**-53, 0.0)
    mechanism = Mechanism(coefficients(np.concatenate(([1.0], np.full(n - 1, small)))), BallsInBins(epochs, b))
    q = Fraction(small)
    # m_0[t] is the sum of c over t, t − 2, t − 4, ... and m_1 the same moved down by one.
    first = [(1 if t % 2 == 0 else 0) + (t // 2 if t % 2 == 0 else t // 2 + 1) * q for t in range(n)]
    second = [Fraction(0), *first[:-1]]
    means = (first, second)
    gram = [[sum((x * y for x, y in zip(u, v, strict=True)), Fraction(0)) for v in means] for u in means]
    bounds = LowerBounds.closed_forms(mechanism)
    [spaces] = bounds._half_spaces
    sigma = 60.0
    for x in (0.5, 3.0):
        found = spaces._value(spaces.shifts / sigma, x, 0.5, direction)
        truth = half_space_value(gram, [[Fraction(1), Fraction(1)]], sigma, x, 0.5, direction)
        assert balls.exact(found) <= truth.lower()
        assert found >= float(truth.mid()) - 1e-9


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 6.0])
def test_one_bin_and_single_jumps(epsilon: float, direction: str) -> None:
    for sigma in (0.2, 1.0, 3.0):
        alone = LowerBounds.of(np.array([[2.0]])).delta(sigma, epsilon, direction)
        truth = balls.gaussian_delta(arb(2).sqrt() / balls.exact(sigma), balls.exact(epsilon))
        assert balls.exact(alone) <= truth.lower()
        assert alone >= float(truth.mid()) * (1 - 1e-9) - 1e-290
        jumps = list(LowerBounds.of(np.eye(5))._values(sigma, epsilon, "remove"))[1]
        exact = balls.gaussian_delta(1 / balls.exact(sigma), balls.exact(epsilon) + arb(5).log())
        assert balls.exact(jumps) <= exact.lower()
