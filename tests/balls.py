"""Privacy profiles in ball arithmetic (Arb): every result is an interval that contains the exact number."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product

from flint import arb, fmpq

from dpmf.accountants.moments._given_mean import Shape


def exact(value: float | Fraction | int) -> arb:
    """A number that double precision or a fraction has exactly."""
    ratio = Fraction(value)
    return arb(fmpq(ratio.numerator, ratio.denominator))


def moments_of_sum(covariance: list[list[arb]], terms: list[arb]) -> tuple[arb, list[arb]]:
    """The sum S of log-normal variables with these means and this covariance of their exponents.

    Returned are E S / len(terms), and the moments of S/E S around 1 up to order four, by enumeration of all tuples.
    """
    total = sum(terms, arb(0))
    raw = [arb(1)]
    for order in range(1, 5):
        value = arb(0)
        for chosen in product(range(len(terms)), repeat=order):
            weight = arb(1)
            for i in chosen:
                weight *= terms[i] / total
            value += weight * sum((covariance[i][j] for i, j in combinations(chosen, 2)), arb(0)).exp()
        raw.append(value)
    central = [sum((math.comb(n, k) * raw[k] * (-1) ** (n - k) for k in range(n + 1)), arb(0)) for n in range(5)]
    return total / len(terms), central


def within(shape: Shape, mean: arb, central: list[arb]) -> arb:
    """Check that what is known of a sum contains its moments, as `moments_of_sum` gives them; the fourth, scaled."""
    assert abs(mean / shape.mean - 1) <= shape.error
    second, third, fourth = (central[n] / exact(shape.deviation) ** n for n in (2, 3, 4))
    assert abs(second - 1) <= shape.errors[1]
    assert abs(third - shape.skewness) <= shape.errors[2]
    assert fourth <= shape.kurtosis
    return fourth


def upper_tail(z: arb) -> arb:
    """1 − Φ(z)."""
    return (z / arb(2).sqrt()).erfc() / 2


def cdf(z: arb) -> arb:
    """Φ(z)."""
    return upper_tail(-z)


def density(z: arb) -> arb:
    """φ(z)."""
    return (-z * z / 2).exp() / (2 * arb.pi()).sqrt()


def gaussian_delta(sensitivity: arb, epsilon: arb) -> arb:
    """δ(ε) of N(μ, 1) against N(0, 1)."""
    ratio, half = epsilon / sensitivity, sensitivity / 2
    return upper_tail(ratio - half) - epsilon.exp() * upper_tail(ratio + half)
