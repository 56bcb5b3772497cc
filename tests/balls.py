"""Privacy profiles in ball arithmetic (Arb): every result is an interval that contains the exact number."""

from __future__ import annotations

from fractions import Fraction

from flint import arb, fmpq


def exact(value: float | Fraction | int) -> arb:
    """A number that double precision or a fraction has exactly."""
    ratio = Fraction(value)
    return arb(fmpq(ratio.numerator, ratio.denominator))


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
