"""Fields of a certificate, Arb balls and doubles above them, and normal variables spread onto nodes."""

import math
from itertools import pairwise
from typing import Any

from flint import arb, ctx

ctx.prec = 192
ROOT_TWO, DENSITY, UNIT = arb(2).sqrt(), 1 / (2 * arb.pi()).sqrt(), 2.0**-53
TINY = 1e-290  # added where a double may underflow


class Rejected(Exception):
    """Why a certificate does not hold."""


def require(condition: Any, complaint: str) -> None:
    if not condition:
        raise Rejected(complaint)


def only(what: str, value: Any, *names: str) -> list[Any]:
    """The values of exactly these fields."""
    require(isinstance(value, dict) and set(value) == set(names), f"{what} must have the fields {', '.join(names)}")
    return [value[name] for name in names]


def number(what: str, value: Any, low: float = 0.0, high: float = 1e100, whole: bool = False) -> Any:
    good = type(value) in ((int,) if whole else (int, float)) and low <= value <= high
    require(good, f"{what} must be {'an integer' if whole else 'a number'} in [{low:g}, {high:g}]")
    return value


def numbers(what: str, value: Any, count: int, low: float = 0.0) -> list[arb]:
    require(isinstance(value, list) and len(value) == count, f"{what} must be a list of {count} numbers")
    return [arb(number(what, one, low)) for one in value]


def grid(value: Any) -> tuple[float, float, int]:
    """The first of equidistant nodes, their spacing and their number."""
    low, spacing, count = only("a grid", value, "low", "spacing", "count")
    return number("low", low, -1e3, 1e3), number("spacing", spacing, 1e-6, 1e3), number("count", count, 1, 9999, True)


def up(x: arb) -> float:
    """A double that is at least x, and positive."""
    value = float(x.upper())
    require(math.isfinite(value), "a number leaves the range of double precision")
    return math.nextafter(max(value, TINY), math.inf)


def tail(z: arb) -> arb:
    """P(Z > z) for a standard normal Z."""
    far = arb(0, 1e-136)  # what is left beyond 25 deviations
    return far if z > 25 else 1 - far if z < -25 else (z / ROOT_TWO).erfc() / 2


def spread(nodes: list[Any], mean: arb, deviation: arb, slope: arb) -> tuple[list[float], float, arb]:
    """N(mean, deviation²) on nodes: weights, the weight left at −∞, and (for slope > 0) E(Y − last)_+, Y = e^(slope·x).

    Linearly in x (slope 0; what is below the first node is moved up to it) or in Y, with a node at Y = 0. What is above
    the last node counts there. Weights are second differences of E min(Y, node).
    """
    places = [arb(x) if slope == 0 else (slope * x).exp() for x in nodes]
    capped, level = [], (slope * mean + (slope * deviation) ** 2 / 2).exp()
    for x, place in zip(nodes, places, strict=True):
        z = (x - mean) / deviation
        rest = level * tail(slope * deviation - z) if slope > 0 else -deviation * (-z * z / 2).exp() * DENSITY
        capped.append(rest + (place if slope > 0 else deviation * z) * tail(z))
    above = [capped[0] / places[0] if slope > 0 else arb(1)]
    above += [(c - b) / (y - x) for (b, c), (x, y) in zip(pairwise(capped), pairwise(places), strict=True)]
    return [up(x - y) for x, y in pairwise([*above, arb(0)])], up(1 - above[0]), level - capped[-1]
