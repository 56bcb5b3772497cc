"""Privacy losses of one-dimensional Gaussian mixtures, discretised by connecting the dots.

One step is P = Σ_j w_j N(m_j, 1) against Q = N(0, 1) (everything in units of σ, means ascending and ≥ 0). Its loss
ℓ(x) = log Σ_j w_j exp(m_j x − m_j²/2) is convex and increasing, so that a node of the loss lattice is one point of the
x-axis and a cell between two nodes one interval.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

_SQRT2 = math.sqrt(2.0)
_INV_SQRT_PI = 1.0 / math.sqrt(math.pi)
# Proof constants (docs/theory/floating-point.md, "Loss distributions and conditional composition").
_UNIT = 2.0**-53
_ROUND = 2.0**-50
_NEWTON = 1e-8  # relative size of the last step of Newton's iteration, whose square is the error of a node's position
_MOST_NODES = 10_000


class Lattice(NamedTuple):
    """Where a step's mass may go: multiples of `interval`.

    Every point near the bulk of the loss; further out neighbours may be `growth` times their distance from the bulk
    apart: that costs a constant share of the second moment. Above the bulk, where tilting moves the weight, they are no
    more than `widest` apart (or what 10,000 nodes need). The highest loss leaves at most `tail` = Φ(−z_tail) above it,
    the lowest is that of a point z_low standard deviations out.
    """

    interval: float
    growth: float
    widest: float
    tail: float
    z_tail: float
    z_low: float


class RowSums(NamedTuple):
    """What is known about the row of each step.

    Attributes:
      logs: per order, the log of the pmf's sum of mass·e^(order·loss). The first is the scale of the row; the others
        are upper bounds.
      totals: the sum of the row.
      norms: the 2-norm of the row.
      reaches: the largest |lattice index| in use.
      infinities: the mass of infinite loss.
    """

    logs: np.ndarray
    totals: np.ndarray
    norms: np.ndarray
    reaches: np.ndarray
    infinities: np.ndarray


@njit(cache=True)
def _upper_tail(z: float) -> float:
    return 0.5 * math.erfc(z / _SQRT2)


@njit(cache=True)
def _scaled_tail(z: float, shift: float) -> float:
    """exp(shift)·Φ̄(z) for z ≥ 0, where either factor alone may leave the range of a double."""
    if z == math.inf:
        return 0.0
    y = z / _SQRT2
    if y < 25.0:
        value = math.erfc(y) * math.exp(y * y)
    else:
        r = 0.5 / (y * y)
        value = _INV_SQRT_PI / y * (1.0 - r * (1.0 - 3.0 * r * (1.0 - 5.0 * r * (1.0 - 7.0 * r))))
    return 0.5 * value * math.exp(shift - y * y)


@njit(cache=True)
def _boundary(
    x: float, means: np.ndarray, weights: np.ndarray, log_weights: np.ndarray, shift: float, tails: np.ndarray
) -> None:
    """tails[j] = w_j·exp(shift)·Φ̄(|x − m_j|): whichever tail of each component is the smaller one."""
    if abs(shift) < 600.0 and x - means[-1] > -37.0 and x - means[0] < 37.0:
        scale = math.exp(shift) if shift != 0.0 else 1.0
        for j in range(len(means)):
            tails[j] = scale * weights[j] * _upper_tail(abs(x - means[j]))
    else:
        for j in range(len(means)):
            tails[j] = _scaled_tail(abs(x - means[j]), shift + log_weights[j])


@njit(cache=True)
def _between(left: float, right: float, left_tail: float, right_tail: float, whole: float) -> float:
    """Mass between two boundaries at signed distances left ≤ right from a component of mass `whole`."""
    if left >= 0.0:
        return left_tail - right_tail
    if right <= 0.0:
        return right_tail - left_tail
    return whole - left_tail - right_tail


@njit(cache=True)
def loss_and_slope(x: float, means: np.ndarray, log_weights: np.ndarray) -> tuple:
    """ℓ(x) and ℓ'(x)."""
    top = -math.inf
    for j in range(len(means)):
        v = log_weights[j] + means[j] * (x - 0.5 * means[j])
        top = max(top, v)
    total = 0.0
    slope = 0.0
    for j in range(len(means)):
        e = math.exp(log_weights[j] + means[j] * (x - 0.5 * means[j]) - top)
        total += e
        slope += e * means[j]
    return top + math.log(total), slope / total


@njit(cache=True)
def invert_loss(target: float, start: float, means: np.ndarray, log_weights: np.ndarray) -> tuple:
    """The x with ℓ(x) = target and ℓ'(x), or −∞ and 0 where ℓ stays above it; `start` must not lie to the left of it.

    Newton's iteration on a convex increasing function, started on the right, comes down monotonically.
    """
    if means[0] == 0.0 and target <= log_weights[0]:
        return -math.inf, 0.0
    x, slope = start, 0.0
    tolerance = _NEWTON / (1.0 + means[-1])
    for _ in range(200):
        value, slope = loss_and_slope(x, means, log_weights)
        if slope <= 0.0:
            return -math.inf, 0.0
        step = (value - target) / slope
        x -= step
        if abs(step) <= tolerance * (1.0 + abs(x) * 1e-6):
            break
    return x, slope


@njit(cache=True)
def _misplaced(x: float, slope: float, loss: float, last_mean: float, size: int) -> float:
    """What a wrong root costs the profile at its node, relative to the tail beyond it.

    The loss at x is off by r, at most; so is the root, by r/slope. The mass in between counts with weight r.
    """
    if x == -math.inf:
        return _UNIT * (64.0 + size + 8.0 * abs(loss))
    r = _UNIT * (64.0 + size + 8.0 * (abs(loss) + last_mean * (abs(x) + last_mean)))
    return r * min(1.0, 2.0 * r * (abs(x) + last_mean + 1.0) / slope)


@njit(cache=True)
def _right_of_root(target: float, means: np.ndarray, log_weights: np.ndarray) -> float:
    """Each single component keeps ℓ from below, hence each bounds the root from the right."""
    best = math.inf
    for j in range(len(means)):
        if means[j] > 0.0:
            best = min(best, (target - log_weights[j]) / means[j] + 0.5 * means[j])
    return best


@njit(cache=True)
def _mixture_quantile(tail: float, z_tail: float, means: np.ndarray, weights: np.ndarray) -> float:
    """A point x with Σ w_j Φ̄(x − m_j) ≤ tail, the least to about 1e-3."""
    low, high = means[0], means[-1] + z_tail
    for _ in range(60):
        if high - low <= 1e-3:
            break
        middle = 0.5 * (low + high)
        mass = 0.0
        for j in range(len(means)):
            mass += weights[j] * _upper_tail(middle - means[j])
        if mass <= tail:
            high = middle
        else:
            low = middle
    return float(high)


@njit(cache=True)
def loss_nodes(
    means: np.ndarray, weights: np.ndarray, log_weights: np.ndarray, add: bool, lattice: Lattice
) -> np.ndarray:
    """Lattice indices to put mass on, ascending."""
    interval, z_low, z_tail = lattice.interval, lattice.z_low, lattice.z_tail
    if add:
        bottom = -loss_and_slope(z_low, means, log_weights)[0]
        top = -loss_and_slope(-z_tail, means, log_weights)[0]
        centre = -loss_and_slope(0.0, means, log_weights)[0]
    else:
        bottom = loss_and_slope(means[0] - z_low, means, log_weights)[0]
        top = loss_and_slope(_mixture_quantile(lattice.tail, z_tail, means, weights), means, log_weights)[0]
        mean = 0.0
        for j in range(len(means)):
            mean += weights[j] * means[j]
        centre = loss_and_slope(mean, means, log_weights)[0]
    last, first = math.ceil(top / interval), math.floor(bottom / interval)
    if last == first:
        last += 1
    middle = min(max(round(centre / interval), first), last)
    wide = max(lattice.widest / interval, (last - middle) / _MOST_NODES)
    nodes = [middle]
    node = middle
    while node < last:
        node += max(1, int(min(lattice.growth * (node - middle), wide)))
        node = min(node, last)
        nodes.append(node)
    above = len(nodes)
    node = middle
    while node > first:
        node -= max(1, int(lattice.growth * (middle - node)))
        node = max(node, first)
        nodes.append(node)
    out = np.empty(len(nodes), np.int64)
    below = len(nodes) - above
    for k in range(below):
        out[below - 1 - k] = nodes[above + k]
    for k in range(above):
        out[below + k] = nodes[k]
    return out


@njit(cache=True)
def connect_the_dots(
    nodes: np.ndarray, interval: float, means: np.ndarray, weights: np.ndarray, log_weights: np.ndarray, add: bool
) -> tuple:
    """Masses on `nodes` and at infinity of a distribution that dominates the step's privacy loss.

    The P-mass and the Q-mass of each cell are kept and moved onto the two nodes around it. Sums over the cells above a
    node telescope, so that the profile at a node has the relative error of single tail probabilities; that share of
    each cell's P-mass, its `slack`, is added to the upper node, and so is what a wrong boundary costs.
    """
    count = len(nodes)
    size = len(means)
    last_mean = means[-1]
    masses = np.zeros(count)
    infinity = 0.0
    # Nodes are visited by falling ℓ: there the tangent at one root is the right start for the next.
    index = 0 if add else count - 1
    sign = -1.0 if add else 1.0
    loss = nodes[index] * interval
    start = _right_of_root(sign * loss, means, log_weights)
    right, slope = invert_loss(sign * loss, start, means, log_weights)
    misplaced = _misplaced(right, slope, loss, last_mean, size)
    # The boundary's tails under the mixture and under N(0, 1); those of Q's role come multiplied by e^loss.
    mixture = np.empty(size)
    mixture_next = np.empty(size)
    _boundary(right, means, weights, log_weights, loss if add else 0.0, mixture)
    single = _scaled_tail(abs(right), 0.0 if add else loss)
    if add:
        masses[0] += _upper_tail(right) * (1.0 + _ROUND * (4.0 + right * right))
    else:
        for j in range(size):
            infinity += weights[j] * _upper_tail(right - means[j])
        infinity *= 1.0 + _ROUND * (4.0 + 0.25 * size + right * right)
    tail = infinity
    for k in range(1, count):
        if right == -math.inf:
            break
        previous, above = index, loss
        index = k if add else count - 1 - k
        loss = nodes[index] * interval
        left, slope = invert_loss(sign * loss, right, means, log_weights)
        left = min(left, right)
        _boundary(left, means, weights, log_weights, loss if add else 0.0, mixture_next)
        single_next = _scaled_tail(abs(left), 0.0 if add else loss)
        width = abs(loss - above)
        fall = math.exp(-width)
        total = 0.0
        if add:  # the left boundary has the higher loss: its tails are brought to the lower node's scale
            for j in range(size):
                whole = 0.0
                if left < means[j] < right:
                    whole = math.exp(above + log_weights[j])
                total += _between(left - means[j], right - means[j], mixture_next[j] * fall, mixture[j], whole)
            upper, lower = _between(left, right, single_next, single, 1.0), total
            reach = max(-right, 0.0) + last_mean
        else:
            for j in range(size):
                total += _between(left - means[j], right - means[j], mixture_next[j], mixture[j], weights[j])
            upper = total
            lower = _between(left, right, single_next, single * fall, math.exp(min(loss, 700.0)))
            reach = max(left, 0.0)
        # The error of the tails beyond the cell's lower boundary. It grows outwards, so sums over cells cover it.
        outward = reach * (reach + 1.0) + max(above if add else loss, 0.0)
        slack = _ROUND * (4.0 + 0.25 * size + outward) * max(upper, 0.0)
        here = _misplaced(left, slope, loss, last_mean, size)
        tail = _upper_tail(-right) if add else tail + upper
        slack += tail * (misplaced if add else here)
        misplaced = here
        climb = -math.expm1(-width)
        up = max((upper - lower) / climb, 0.0)
        low, high = (previous, index) if add else (index, previous)
        masses[high] += up + slack / climb
        masses[low] += max(upper - up, 0.0)
        right, single = left, single_next
        mixture, mixture_next = mixture_next, mixture
    if right > -math.inf:
        if add:
            infinity += _upper_tail(-right) * (1.0 + _ROUND * (4.0 + right * right))
        else:
            below = 0.0
            for j in range(size):
                below += weights[j] * _upper_tail(means[j] - right)
            masses[0] += below * (1.0 + _ROUND * (4.0 + 0.25 * size + right * right))
    return masses, infinity


@njit(cache=True)
def fill_rows(
    rows: np.ndarray,
    first: int,
    starts: np.ndarray,
    means: np.ndarray,
    weights: np.ndarray,
    sigma: float,
    add: bool,
    lattice: Lattice,
    orders: np.ndarray,
    sums: RowSums,
) -> None:
    """The pmfs of steps first, first + 1, ..., tilted by e^(orders[0]·loss), one per row, at (node mod row length).

    Each row is scaled by e^(−scale), where the scale, `sums.logs[n, 0]`, is taken as exact; a row then has a sum near
    one. Entries are rounded up by their relative error, so that a row is nowhere less than the exact one.
    """
    length = rows.shape[1]
    interval = lattice.interval
    for r in range(rows.shape[0]):
        n = first + r
        row = rows[r]
        row[:] = 0.0
        step_means = means[starts[n] : starts[n + 1]] / sigma * (1.0 + 4.0 * _UNIT)
        step_weights = weights[starts[n] : starts[n + 1]].copy()
        log_weights = np.log(step_weights)
        nodes = loss_nodes(step_means, step_weights, log_weights, add, lattice)
        count = len(nodes)
        masses, sums.infinities[n] = connect_the_dots(nodes, interval, step_means, step_weights, log_weights, add)
        log_masses = np.empty(count)
        for k in range(count):
            log_masses[k] = math.log(masses[k]) if masses[k] > 0.0 else -math.inf
        sums.reaches[n] = max(abs(nodes[0]), abs(nodes[-1]))
        for o in range(len(orders)):
            top = -math.inf
            error = 0.0
            for k in range(count):
                if masses[k] > 0.0:
                    exponent = orders[o] * interval * nodes[k]
                    top = max(top, log_masses[k] + exponent)
                    error = max(error, abs(log_masses[k]) + abs(exponent))
            total = 0.0
            for k in range(count):
                total += math.exp(log_masses[k] + orders[o] * interval * nodes[k] - top)
            value = top + math.log(total)
            if o > 0:
                value += _UNIT * (8.0 * (error + abs(top) + abs(value)) + 2.0 * count + 16.0)
            sums.logs[n, o] = value
        scale = sums.logs[n, 0]
        roundings = 16.0 + 2.0 * (count // length)
        total = 0.0
        for k in range(count):
            if masses[k] > 0.0:
                exponent = orders[0] * interval * nodes[k]
                error = _UNIT * (roundings + 8.0 * (abs(log_masses[k]) + abs(exponent) + abs(scale)))
                entry = math.exp(log_masses[k] + exponent - scale) * (1.0 + error)
                row[nodes[k] % length] += entry
                total += entry
        square = 0.0
        for k in range(count):
            square += row[nodes[k] % length] ** 2
        sums.totals[n] = total
        sums.norms[n] = math.sqrt(square)
