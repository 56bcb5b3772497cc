"""Polynomials of degree four above or below an option that a normal variable has smoothed, and the proof that they are.

With a = mean·(1 + deviation·y) and z standard normal the payoff g(y) is E(1 − K/(a·e^(√v·z + v/2)))_+ for sign +1 and
E(1 − K·a·e^(√v·z − v/2))_+ for sign −1. Both are Φ(d) − r·Φ(d − √v) with d = √v/2 − log(r)/√v, where r is K/a or K·a.
The first increases from 0 to 1, its derivative by a is K/a²·Φ(d − √v), and its second derivative is at least
−2K/a³·Φ(d − √v). The second decreases from 1 to 0, its derivative is −K·Φ(d − √v), and it is convex.

A polynomial below either is minus one above its negative, which is what the signs 2 and −2 stand for.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

_ROUNDING = 1e-13  # a bound on the relative rounding error of a coefficient, or of a term of an expectation
_LEFT, _RIGHT = 9, 12  # places of the left and of the right contact that are tried before the best is refined
_REFINEMENTS = 30  # halvings of the step
_POINTS, _FAR = 64, 20  # places at which a polynomial is compared with the payoff at first, and those far away
_ROUNDS = 8  # how often a place where it turned out to be too small is added
_ENOUGH = 0.01  # the relative loss by the proof at which no further place is added
_HEAVY = 100.0  # above this fourth moment polynomials of degree two are among those tried
_CELLS = 40  # cells of the proof before any is halved
_DEPTH = 14  # how often a cell may be halved
_MARGIN = 2e-4  # by how much a polynomial is multiplied, so that contacts are not too close to prove anything


@nb.njit(cache=True, nogil=True)
def _normal(x):  # type: ignore[no-untyped-def]
    return 0.5 * math.erfc(-x * 0.7071067811865476)


@nb.njit(cache=True, nogil=True)
def _a(y, mean, deviation, sign):  # type: ignore[no-untyped-def]
    """a, rounded up (sign +1) or down (−1): near the least y little is left of 1 + deviation·y but its error."""
    part = deviation * y
    return mean * ((1 + part) + sign * 1e-15 * (1 + abs(part)))


@nb.njit(cache=True, nogil=True)
def payoff(y, sign, strike, root, mean, deviation):  # type: ignore[no-untyped-def]
    """g(y), rounded up; `root` is √v."""
    a = _a(y, mean, deviation, 1.0 if sign == 1 or sign == -2 else -1.0)
    if a <= 0.0:
        return 0.0 if sign > 0 else (1.0 if sign == -1 else -1.0)
    ratio = strike / a if sign > 0 else strike * a
    logarithm = math.log(ratio)
    d = root / 2 - logarithm / root
    if d < -37.0:
        return 1e-290 if abs(sign) < 2 else 0.0
    inside = _normal(d)
    # The argument d is known up to a few units of its own terms, which is what the last factor is for.
    slack = 1e-14 * (1 + abs(d)) * (4 + (1 + abs(logarithm)) / root)
    if abs(sign) == 2:
        return min(ratio * _normal(d - root) - inside + inside * slack + 1e-290, 0.0)
    return min(inside - ratio * _normal(d - root) + inside * slack + 1e-290, 1.0)


@nb.njit(cache=True, nogil=True)
def _slope(y, sign, strike, root, mean, deviation):  # type: ignore[no-untyped-def]
    a = mean * (1 + deviation * y)
    if a <= 0.0:
        return 0.0
    if sign > 0:
        rise = mean * deviation * strike / (a * a) * _normal(math.log(a / strike) / root - root / 2)
        return rise if sign == 1 else -rise
    fall = mean * deviation * strike * _normal(-math.log(strike * a) / root - root / 2)
    return -fall if sign == -1 else fall


@nb.njit(cache=True, nogil=True)
def _bend(low, high, sign, strike, root, mean, deviation):  # type: ignore[no-untyped-def]
    """At least −g'' on [low, high]."""
    if sign == -1:
        return 0.0
    a = _a(low, mean, deviation, -1.0)
    if a <= 0.0:
        return math.inf
    if sign == -2:  # K/a·φ(d − √v)/√v, d − √v falling with a
        near, far = math.log(strike * a), math.log(strike * _a(high, mean, deviation, 1.0))
        last = -(near - 1e-14 * (1 + abs(near))) / root - root / 2
        first = -(far + 1e-14 * (1 + abs(far))) / root - root / 2
        least = first - 1e-9 if first > 1e-9 else min(last + 1e-9, 0.0)
        density = (math.exp(-0.5 * least * least) * 0.3989422804014327 + 1e-200) / root
        return strike / a * density * (mean * deviation) ** 2 * (1 + 1e-9)
    far = math.log(_a(high, mean, deviation, 1.0) / strike)
    d = (far + 1e-14 * (1 + abs(far))) / root - root / 2
    if sign == 2:  # K/a³·φ(d − √v)/√v, with the largest density on the way
        near = math.log(a / strike)
        first = (near - 1e-14 * (1 + abs(near))) / root - root / 2
        least = first if first > 0 else min(d + 1e-9, 0.0)
        density = (math.exp(-0.5 * least * least) * 0.3989422804014327 + 1e-200) / root
        return strike / (a * a * a) * density * (mean * deviation) ** 2 * (1 + 1e-9)
    return 2 * strike / (a * a * a) * _normal(d + 1e-9) * (mean * deviation) ** 2 * (1 + 1e-9)


@nb.njit(cache=True, nogil=True)
def _through(left, right, at_left, at_right, slope_left, slope_right, third, coefficients):  # type: ignore[no-untyped-def]
    """The quartic with these values and slopes at both contacts, and leading coefficient `third`, by powers of y."""
    width = right - left
    chord = (at_right - at_left) / width
    second = (chord - slope_left) / width  # Newton's divided differences at left, left, right, right
    cubic = (slope_right + slope_left - 2 * chord) / (width * width)
    # at_left + slope_left·u + second·u² + cubic·u²·(y − right) + third·u²·(y − right)², u = y − left
    p0, p1, p2 = second - cubic * right + third * right * right, cubic - 2 * third * right, third
    ll = left * left
    coefficients[0] = at_left - slope_left * left + ll * p0
    coefficients[1] = slope_left - 2 * left * p0 + ll * p1
    coefficients[2] = p0 - 2 * left * p1 + ll * p2
    coefficients[3] = p1 - 2 * left * p2
    coefficients[4] = p2


@nb.njit(cache=True, nogil=True)
def _expectation(coefficients, skewness, kurtosis, errors):  # type: ignore[no-untyped-def]
    """The expectation of a polynomial, rounded up, for E y = 0 and E y² = 1 up to `errors` (see `option_above`)."""
    c0, c1, c2, c3, c4 = coefficients
    value = c0 + c2 + c3 * skewness + c4 * kurtosis
    value += abs(c1) * errors[0] + abs(c2) * errors[1] + abs(c3) * errors[2]
    return value + _ROUNDING * (abs(c0) + abs(c1) + abs(c2) + abs(c3) * (1 + abs(skewness)) + c4 * (1 + kurtosis))


@nb.njit(cache=True, nogil=True)
def _tried(left, right, places, values, law, skewness, kurtosis, errors, coefficients):  # type: ignore[no-untyped-def]
    """The expectation of the least quartic with contacts at `left` and `right` that is above g at all places."""
    at_left, at_right = payoff(left, *law), payoff(right, *law)
    slope_left, slope_right = _slope(left, *law), _slope(right, *law)
    _through(left, right, at_left, at_right, slope_left, slope_right, 0.0, coefficients)
    c0, c1, c2, c3 = coefficients[0], coefficients[1], coefficients[2], coefficients[3]
    # Far away y²·(c2 + c3·y + third·y²) decides: it must not come down again.
    third = max(1e-14, 0.27 * c3 * c3 / c2) if c3 < 0 < c2 else 1e-14
    near = 1e-3 * min(1.0, right - left)
    for k in range(len(places)):
        y = places[k]
        u, w = abs(y - left), abs(y - right)
        if u < near or w < near:
            continue
        missing = values[k] - (c0 + y * (c1 + y * (c2 + y * c3)))
        if missing > third * (u * w) ** 2:
            third = missing / (u * w) ** 2
    _through(left, right, at_left, at_right, slope_left, slope_right, third, coefficients)
    return _expectation(coefficients, skewness, kurtosis, errors)


@nb.njit(cache=True, nogil=True)
def _quadratic(left, furthest, law):  # type: ignore[no-untyped-def]
    """The right contact with which the cubic term vanishes: what is best where higher moments are very large.

    The cubic term changes its sign between `low` and `high`. Where a line through its values at both does not halve the
    stretch, the middle does; an end that stays is given half its value, so that the line leaves it.
    """
    sign, strike, root, mean, deviation = law
    turn = 1.0 if sign == 1 else -1.0
    at_left = payoff(left, sign, strike, root, mean, deviation)
    slope_left = _slope(left, sign, strike, root, mean, deviation)
    low, high = left + 0.05, left + furthest
    at_low, at_high, halve, stayed = 0.0, 0.0, True, 0
    for _ in range(60):
        width = high - low
        if width < 1e-7 * furthest:
            break
        place = (low + high) / 2
        if not halve and at_low > 0.0 > at_high:
            place = min(max(low + width * at_low / (at_low - at_high), low + 1e-3 * width), high - 1e-3 * width)
        chord = (payoff(place, sign, strike, root, mean, deviation) - at_left) / (place - left)
        value = turn * (_slope(place, sign, strike, root, mean, deviation) + slope_left - 2 * chord)
        if value >= 0.0:
            low, at_low = place, value
            at_high *= 0.5 if stayed == 1 else 1.0
            stayed = 1
        else:
            high, at_high = place, value
            at_low *= 0.5 if stayed == -1 else 1.0
            stayed = -1
        halve = high - low > 0.5 * width
    return low


@nb.njit(cache=True, nogil=True)
def _at(coefficients, y):  # type: ignore[no-untyped-def]
    """A polynomial at y, rounded down."""
    c0, c1, c2, c3, c4 = coefficients
    value = c0 + y * (c1 + y * (c2 + y * (c3 + y * c4)))
    q = abs(y)
    return value - 2e-15 * (abs(c0) + q * (abs(c1) + q * (abs(c2) + q * (abs(c3) + q * c4))))


@nb.njit(cache=True, nogil=True)
def _lifted(coefficients, edges, law, little):  # type: ignore[no-untyped-def]
    """What has to be added to a polynomial for it to be at least g from the first to the last edge, and where.

    On a cell of width h, P is at least the smaller of its values at the ends minus h²/8·max P'', and g is at most the
    larger of its values there, or the chord plus h²/8·max(−g''). Cells that lack more than `little` are halved.
    """
    sign, strike, root, mean, deviation = law
    c2, c3, c4 = coefficients[2], coefficients[3], coefficients[4]
    missing, where = 0.0, 0.0
    lows, highs = np.empty(_DEPTH + 2), np.empty(_DEPTH + 2)
    depths = np.empty(_DEPTH + 2, dtype=np.int64)
    for cell in range(len(edges) - 1):
        lows[0], highs[0], depths[0] = edges[cell], edges[cell + 1], 0
        waiting = 1
        while waiting > 0:
            waiting -= 1
            low, high, depth = lows[waiting], highs[waiting], depths[waiting]
            h = high - low
            p_low, p_high = _at(coefficients, low), _at(coefficients, high)
            g_low = payoff(low, sign, strike, root, mean, deviation)
            g_high = payoff(high, sign, strike, root, mean, deviation)
            # P'' is a quadratic with non-negative leading coefficient: it is largest at an end.
            at_low, at_high = 2 * c2 + low * (6 * c3 + 12 * c4 * low), 2 * c2 + high * (6 * c3 + 12 * c4 * high)
            q = max(abs(low), abs(high))
            rounding = 1e-14 * (abs(c2) + q * (abs(c3) + q * c4))
            curve = (max(at_low, at_high, 0.0) + 12 * rounding) * (h * h / 8)
            bend = _bend(low, high, sign, strike, root, mean, deviation) * (h * h / 8)
            by_chord = max(g_low - p_low, g_high - p_high) + bend
            short = min(by_chord, max(g_low, g_high) - min(p_low, p_high)) + curve
            for y, lack in ((low, g_low - p_low), (high, g_high - p_high)):
                if lack > missing:  # no cell can show less
                    missing, where = lack, y
            if not abs(p_low) + abs(p_high) + abs(short) < math.inf:  # powers of y were too large
                return math.inf, low
            if short > max(little, 1.01 * missing) and depth < _DEPTH:
                middle = (low + high) / 2
                lows[waiting], highs[waiting], depths[waiting] = middle, high, depth + 1
                lows[waiting + 1], highs[waiting + 1], depths[waiting + 1] = low, middle, depth + 1
                waiting += 2
            elif short > missing:
                where = (low + high) / 2 if missing == 0.0 else where
                missing = short
    return missing, where


@nb.njit(cache=True, nogil=True)
def _rises(coefficients, y):  # type: ignore[no-untyped-def]
    """Whether the polynomial increases from y ≥ 0 on: all of its derivatives there are non-negative."""
    _, c1, c2, c3, c4 = coefficients
    first, at_first = c1 + y * (2 * c2 + y * (3 * c3 + y * 4 * c4)), abs(c1) + y * (abs(c2) + y * (abs(c3) + y * c4))
    second, at_second = c2 + y * (3 * c3 + y * 6 * c4), abs(c2) + y * (abs(c3) + y * c4)
    return first >= 1e-14 * at_first and second >= 1e-14 * at_second and c3 + 4 * c4 * y >= 0.0 and c4 >= 0.0


@nb.njit(cache=True, nogil=True)
def _edges(lowest, reach, end):  # type: ignore[no-untyped-def]
    """Edges of cells from where A is 0 to `end`, wider away from the mean."""
    edges = np.empty(_CELLS + 160)
    size = 0
    edge = lowest
    while edge < -5.0 and size < 60:
        edges[size] = edge
        size += 1
        edge /= 1.35
    edges[size] = edge
    size += 1
    first = edge
    for k in range(1, _CELLS + 1):
        edges[size] = first + (reach - first) * (k / _CELLS) ** 1.5
        size += 1
    edge = reach
    while edge < end and size < _CELLS + 150:
        edge *= 1.3
        edges[size] = edge
        size += 1
    return edges[:size]


@nb.njit(cache=True, nogil=True)
def _proved(coefficients, law, lowest, reach, about):  # type: ignore[no-untyped-def]
    """By what the polynomial has to be lifted to be above g, and where most is missing.

    It is infinite where nothing can be shown.
    """
    end = lowest_at = reach
    least = math.inf
    for tries in range(82):
        height = _at(coefficients, end)
        if height < least:
            least, lowest_at = height, end
        if height >= (1.0 if law[0] == 1 else 0.0 if law[0] == -2 else payoff(end, *law)) and _rises(coefficients, end):
            break
        if tries > 80 or height < -1.0:
            return math.inf, lowest_at
        end *= 1.3
    return _lifted(coefficients, _edges(lowest, reach, end), law, 1e-4 * about)


@nb.njit(cache=True, nogil=True)
def _refined(left, right, step, lowest, furthest, places, values, law, skewness, kurtosis, errors, coefficients):  # type: ignore[no-untyped-def]
    """Contacts nearby that are better, by steps that are halved where none helps; the last polynomial is kept."""
    best = _tried(left, right, places, values, law, skewness, kurtosis, errors, coefficients)
    for _ in range(_REFINEMENTS):
        moved = False
        for move in range(6 if law[0] > 0 and kurtosis > _HEAVY else 4):
            sign = 1.0 if move % 2 == 0 else -1.0
            x, y = left, right
            if move < 2:
                y = left + (right - left) * math.exp(sign * step)
            else:
                x = max(left + sign * step, lowest)
            if move > 3:
                y = _quadratic(x, furthest, law)
            if x > y - 0.02:
                continue
            value = _tried(x, y, places, values, law, skewness, kurtosis, errors, coefficients)
            if value < best:
                best, left, right, moved = value, x, y, True
        if not moved:
            step /= 2
            if step < 2e-3:
                break
    best = _tried(left, right, places, values, law, skewness, kurtosis, errors, coefficients)
    return best, left, right


@nb.njit(cache=True, nogil=True)
def smoothed_above(sign, strike, root, mean, deviation, lowest, skewness, kurtosis, errors, rare):  # type: ignore[no-untyped-def]
    """A bound on E g(y) with the moments given, at most the largest g, where y is rarely below `lowest`.

    That has a probability of at most `rare`, and no y is below −1/deviation. There the payoff is at most 1, and the
    polynomial at least minus the sum of its terms.

    E y = 0 and E y² = 1 up to errors[0] and errors[1], E y³ is `skewness` up to errors[2], E y⁴ at most `kurtosis`.
    The result is the expectation of a polynomial that has been shown to be at least g for all y ≥ lowest. How it was
    chosen decides tightness only.
    """
    return smoothed_polynomial(
        sign, strike, root, mean, deviation, lowest, skewness, kurtosis, errors, rare, np.empty(5)
    )  # fmt: skip


@nb.njit(cache=True, nogil=True)
def smoothed_polynomial(sign, strike, root, mean, deviation, lowest, skewness, kurtosis, errors, rare, found_one):  # type: ignore[no-untyped-def]
    """What `smoothed_above` returns; `found_one` becomes a polynomial that is at least g for all y ≥ lowest.

    It is the one that the bound is the expectation of, or the largest g.
    """
    trivial = 1.0 if abs(sign) < 2 else 0.0
    found_one[:] = 0.0
    found_one[0] = trivial
    law = (sign, strike, root, mean, deviation)
    lowest *= 1 + 1e-12  # it is negative
    leftmost = lowest * (1 - 1e-3)
    kink = ((strike if sign > 0 else 1 / strike) / mean - 1) / deviation
    width = (kink * deviation + 1) * root / deviation
    reach = max(8.0, kink + max(6.0, 0.8 * kink) + 2 * min(width, 20.0))
    start = max(lowest, min(-7.0, 2 * kink))
    places, values = np.empty(_POINTS + _ROUNDS), np.empty(_POINTS + _ROUNDS)
    near = _POINTS - _FAR
    for k in range(_POINTS):
        if k < 4:
            places[k] = lowest * (1.0, 0.75, 0.5, 0.25)[k]
        elif k < near:
            places[k] = start + (reach - start) * (k / (near - 1)) ** 1.5
        else:
            places[k] = reach * 1.15 ** (k - near + 1)
        values[k] = payoff(places[k], sign, strike, root, mean, deviation)
    coefficients = np.empty(5)
    best, left, right = math.inf, 0.0, 1.0
    furthest = max(2.0, 1.7 * abs(kink) + 3 + width)
    heavy = sign > 0 and kurtosis > _HEAVY
    for i in range(_LEFT):
        for j in range(_RIGHT + 1 if heavy else _RIGHT):
            x = max(-2.4 + 0.5 * i, leftmost)
            away = 0.5 * (furthest / 0.5) ** (min(j, _RIGHT - 1) / (_RIGHT - 1))
            y = x + away if j < _RIGHT else _quadratic(x, furthest, law)
            if sign < 0:
                y = 2.4 - 0.5 * i
                x = max(y - away, leftmost)
                if x > y - 0.02:
                    continue
            value = _tried(x, y, places[:_POINTS], values[:_POINTS], law, skewness, kurtosis, errors, coefficients)
            if value < best:
                best, left, right = value, x, y
    found, step = trivial, 0.25
    for used in range(_POINTS, _POINTS + _ROUNDS):
        best, left, right = _refined(
            left, right, step, leftmost, furthest, places[:used], values[:used],
            law, skewness, kurtosis, errors, coefficients,
        )  # fmt: skip
        if not best < trivial:
            break
        coefficients *= 1 + _MARGIN if abs(sign) < 2 else 1 - _MARGIN
        missing, where = _proved(coefficients, law, lowest, reach, max(abs(best), 1e-300))
        value = _expectation(coefficients, skewness, kurtosis, errors) + missing * (1 + 1e-12)
        q = 1 / deviation
        c0, c1, c2, c3, c4 = coefficients
        size = abs(c0) + q * (abs(c1) + q * (abs(c2) + q * (abs(c3) + q * c4)))
        value += rare * (1 + size) * (1 + 1e-9)
        if value < found:
            found = value
            found_one[:] = coefficients
            found_one[0] += missing * (1 + 1e-12)
        if found <= best + _ENOUGH * abs(best):
            break
        places[used], values[used], step = where, payoff(where, sign, strike, root, mean, deviation), 0.1
    return found


@nb.njit(cache=True, nogil=True)
def pooled_above(pool, means, deviations, skewnesses, kurtoses, errors):  # type: ignore[no-untyped-def]
    """For each of several laws the least expectation of some polynomials, at most 1, with moments as above.

    A row of `pool` is the mean and the deviation that a polynomial is about, and its coefficients. It is a polynomial
    in y = (a/mean − 1)/deviation that is at least the payoff for all a ≥ 0, so that it may be used for every law of a.
    """
    found = np.ones(len(means))
    for k in range(len(means)):
        for row in range(len(pool)):
            c0, c1, c2, c3, c4 = pool[row, 2], pool[row, 3], pool[row, 4], pool[row, 5], pool[row, 6]
            ratio = means[k] / pool[row, 0]
            shift, scale = (ratio - 1) / pool[row, 1], ratio * deviations[k] / pool[row, 1]
            e0 = c0 + shift * (c1 + shift * (c2 + shift * (c3 + shift * c4)))
            e1 = (c1 + shift * (2 * c2 + shift * (3 * c3 + shift * 4 * c4))) * scale
            e2 = (c2 + shift * (3 * c3 + shift * 6 * c4)) * scale**2
            e3 = (c3 + 4 * c4 * shift) * scale**3
            e4 = c4 * scale**4
            value = e0 + e2 + e3 * skewnesses[k] + e4 * kurtoses[k]
            if not value < found[k]:
                continue
            value += abs(e1) * errors[k, 0] + abs(e2) * errors[k, 1] + abs(e3) * errors[k, 2]
            # The shift has an error of some units of what it is the difference of, which is at most `q`.
            q = abs(shift) + (1 + ratio) / pool[row, 1]
            s0 = abs(c0) + q * (abs(c1) + q * (abs(c2) + q * (abs(c3) + q * c4)))
            s1 = scale * (abs(c1) + q * (2 * abs(c2) + q * (3 * abs(c3) + q * 4 * c4)))
            s2 = scale**2 * (abs(c2) + q * (3 * abs(c3) + q * 6 * c4))
            s3, s4 = scale**3 * (abs(c3) + q * 4 * c4), e4
            value += _ROUNDING * (s0 + s1 + s2 + s3 * (1 + abs(skewnesses[k])) + s4 * (1 + kurtoses[k]))
            if value < found[k]:
                found[k] = value
    return found


@nb.njit(cache=True, nogil=True)
def smoothed_below(sign, strike, root, mean, deviation, lowest, skewness, kurtosis, errors, rare):  # type: ignore[no-untyped-def]
    """A lower bound on E g(y), at least 0, with what is known as for `smoothed_above`."""
    found = -smoothed_above(2 * sign, strike, root, mean, deviation, lowest, skewness, kurtosis, errors, rare)
    return found if found > 0.0 else 0.0


_HERMITE, _HERMITE_WEIGHTS = np.polynomial.hermite_e.hermegauss(24)


@nb.njit(cache=True, nogil=True)
def smoothed_likely(sign, strike, root, mean, deviation, skewness):  # type: ignore[no-untyped-def]
    """About E g(y): as if 1 + deviation·y were, up to a shift, log-normal with the same skewness."""
    low, high = 1e-4, 3.0
    for _ in range(40):  # the skewness increases with the deviation of the logarithm
        middle = (low + high) / 2
        e = math.exp(middle * middle)
        if (e + 2) * math.sqrt(e - 1) < skewness:
            low = middle
        else:
            high = middle
    scale = math.sqrt(math.exp(low * low) - 1)
    value = 0.0
    for k in range(len(_HERMITE)):
        y = (math.exp(low * _HERMITE[k] - low * low / 2) - 1) / scale
        value += _HERMITE_WEIGHTS[k] * payoff(y, sign, strike, root, mean, deviation)
    return value / math.sqrt(2 * math.pi)
