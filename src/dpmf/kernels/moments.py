"""Polynomials of degree four above an option: what four moments and a least value say about its expectation."""

from __future__ import annotations

import math

import numba as nb
import numpy as np

_ROUNDING = 1e-13  # a bound on the relative rounding error of a coefficient, or of a term of an expectation
_GRID = 14  # values of a distance that are tried before the best is refined
_REFINEMENTS = 24  # halvings of the step
_NONE = math.inf


@nb.njit(cache=True, nogil=True)
def graph_sums(f, pairs, weights):  # type: ignore[no-untyped-def]
    """Sums of products of f over graphs of two, three and four vertices, without the complete graph of four.

    `pairs` is f·diag(weights)·f. Rows are summed up by themselves first.
    """
    b = len(weights)
    near, corners = np.empty(b), np.empty(b)
    cycle = diamond = 0.0
    for i in range(b):
        here = corner = squares = chords = 0.0
        for j in range(b):
            weighted = weights[j] * pairs[i, j]
            here += weights[j] * f[i, j]
            corner += weighted * f[i, j]  # triangles by their corner
            squares += weighted * pairs[i, j]
            chords += weighted * pairs[i, j] * f[i, j]
        near[i], corners[i] = here, weights[i] * corner
        cycle += weights[i] * squares
        diamond += weights[i] * chords
    edge = path = star = forks = triangles = tails = 0.0
    for i in range(b):
        beside = 0.0
        for j in range(b):
            beside += f[i, j] * weights[j] * near[j]
        loaded = weights[i] * near[i]
        edge += loaded
        path += loaded * beside
        star += loaded * near[i] * near[i]
        forks += loaded * near[i]
        triangles += corners[i]
        tails += corners[i] * near[i]
    # How many ways there are to label the vertices of each graph.
    four = 3 * edge**2 + 12 * path + 4 * star + 3 * cycle + 12 * tails + 6 * diamond
    return edge, 3 * forks + triangles, four


@nb.njit(cache=True, nogil=True)
def diamond_sum(f, pairs, weights):  # type: ignore[no-untyped-def]
    """The sum over all a, c of the weights times f times the square of `pairs`."""
    total = 0.0
    for i in range(len(weights)):
        row = 0.0
        for j in range(len(weights)):
            row += weights[j] * f[i, j] * pairs[i, j] * pairs[i, j]
        total += weights[i] * row
    return total


@nb.njit(cache=True, nogil=True)
def _expectation(a, c, first, second, third, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """E of (y − a)²·(first + second·(y − c) + third·(y − c)²), rounded up, for E y = 0 and E y² = 1 up to `errors`."""
    quartic = third
    cubic = second - 2 * third * (a + c)
    square = third * (a * a + 4 * a * c + c * c) - second * (2 * a + c) + first
    linear = -2 * third * a * c * (a + c) + second * a * (a + 2 * c) - 2 * a * first
    constant = a * a * (third * c * c - second * c + first)
    value = constant + square + cubic * skewness + quartic * kurtosis
    value += abs(linear) * errors[0] + abs(square) * errors[1] + abs(cubic) * errors[2]
    p, q, s = abs(a), abs(c), abs(second)
    size = (1 + p) ** 2 * (first + s * (1 + q) + third * (1 + q) ** 2) * (2 + kurtosis)
    return value + _ROUNDING * size


@nb.njit(cache=True, nogil=True)
def _least_curvature(first, second, room):  # type: ignore[no-untyped-def]
    """The least γ ≥ 0 for which first + second·u + γu² ≥ 0 for all u ≥ −room, rounded up."""
    if second <= 0.0:
        return second * second / (4 * first) * (1 + _ROUNDING)
    reach = second * room
    if reach * (1 + _ROUNDING) <= first:
        return 0.0
    if reach <= 2 * first:
        return (reach - first + _ROUNDING * (reach + first)) / (room * room)
    return second * second / (4 * first) * (1 + _ROUNDING)


@nb.njit(cache=True, nogil=True)
def _two_contacts(below, above, sign, strike, lowest, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """E of a quartic that touches the option's two lines at strike − below and at strike + above."""
    d = below + above
    left, right = strike - below, strike + above
    on_left, on_right, tilt = below / (d * d), above / (d * d), (below - above) / (d * d * d)
    third = max(
        _least_curvature(on_left, tilt, max(left - lowest, 0.0)),
        _least_curvature(on_right, tilt, max(right - lowest, 0.0)),
    )
    if sign < 0:
        return _expectation(right, left, on_left, tilt, third, skewness, kurtosis, errors)
    return _expectation(left, right, on_right, tilt, third, skewness, kurtosis, errors)


@nb.njit(cache=True, nogil=True)
def _two_zeros(one, other, sign, strike, lowest, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """E of c·(y − r)²(y − t)² with r = strike + one, t = strike + other, above a put from `lowest` on."""
    room = strike - lowest
    if room * (2 / (one + room) + 2 / (other + room)) > 1 - _ROUNDING:
        return _NONE  # it would cross the line between `lowest` and the strike
    factor = room / ((one + room) * (other + room)) ** 2 * (1 + _ROUNDING)
    r, t = strike + one, strike + other
    return _expectation(r, t, 0.0, 0.0, factor, skewness, kurtosis, errors)


@nb.njit(cache=True, nogil=True)
def _refined(family, x, y, best, most_x, sign, strike, lowest, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """A smaller value nearby and where it is, by steps in the logarithms of both distances, halved where none helps."""
    step = 0.5
    for _ in range(_REFINEMENTS):
        moved = False
        for move in range(4):
            factor = math.exp(step if move % 2 == 0 else -step)
            u, w = (min(x * factor, most_x), y) if move < 2 else (x, y * factor)
            if family == 0:
                value = _two_contacts(u, w, sign, strike, lowest, skewness, kurtosis, errors)
            else:
                value = _two_zeros(u, w, sign, strike, lowest, skewness, kurtosis, errors)
            if value < best:
                best, x, y, moved = value, u, w, True
        if not moved:
            step /= 2
            if step < 1e-3:
                break
    return best, x, y


@nb.njit(cache=True, nogil=True)
def _least_polynomial(sign, strike, lowest, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """The least expectation found among the polynomials above an option, for strikes above the lowest y.

    Returned with its family (0: two contacts, 1: two zeros) and its two distances from the strike.
    """
    room = strike - lowest
    scale = math.sqrt(1 + strike * strike)
    best, x, y = _NONE, min(room, scale), scale
    for i in range(_GRID):
        below = min(room, 4 * scale) * 2.0 ** (-0.6 * i)
        for j in range(_GRID):
            above = scale * 2.0 ** (0.6 * (j - 9))
            value = _two_contacts(below, above, sign, strike, lowest, skewness, kurtosis, errors)
            if value < best:
                best, x, y = value, below, above
    best, x, y = _refined(0, x, y, best, room, sign, strike, lowest, skewness, kurtosis, errors)
    if sign > 0 or strike >= 0:
        return best, 0, x, y
    found, u, w = _NONE, room, room
    for i in range(_GRID):
        one = room * 2.0 ** (0.7 * i)
        for j in range(i, _GRID):
            other = room * 2.0 ** (0.7 * j)
            value = _two_zeros(one, other, sign, strike, lowest, skewness, kurtosis, errors)
            if value < found:
                found, u, w = value, one, other
    if found < _NONE:
        found, u, w = _refined(1, u, w, found, 1e9 * room, sign, strike, lowest, skewness, kurtosis, errors)
    return (found, 1, u, w) if found < best else (best, 0, x, y)


@nb.njit(cache=True, nogil=True)
def polynomial_above(sign, strike, lowest, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """What `option_above` returns, then the polynomial that it is the expectation of: its family and two distances.

    The family is 0 for a polynomial that touches the put's two lines so far below and above the strike, and 1 for one
    with double zeros so far above it, see `_two_contacts` and `_two_zeros`; for calls, y − strike is added. It is −1
    where no y is below the strike: the put is worth nothing.
    """
    forward = errors[0] - strike * (1 + _ROUNDING)  # at least E(y − strike) for negative strikes
    if strike <= lowest:
        return 0.0 if sign < 0 else forward, -1, 0.0, 0.0
    if sign > 0 and strike < 0:  # (y − K)_+ = (K − y)_+ + y − K, and the put has one kind of polynomial more
        value, family, x, y = _least_polynomial(-1, strike, lowest, skewness, kurtosis, errors)
        return value + forward, family, x, y
    return _least_polynomial(sign, strike, lowest, skewness, kurtosis, errors)


@nb.njit(cache=True, nogil=True)
def option_above(sign, strike, lowest, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """A bound on E(y − strike)_+ (sign +1) or on E(strike − y)_+ (sign −1).

    It is the expectation of a polynomial that is at least the payoff for y ≥ lowest: no y is smaller. E y = 0 and
    E y² = 1 up to errors[0] and errors[1], E y³ is `skewness` up to errors[2], and E y⁴ is at most `kurtosis`.
    """
    return polynomial_above(sign, strike, lowest, skewness, kurtosis, errors)[0]
