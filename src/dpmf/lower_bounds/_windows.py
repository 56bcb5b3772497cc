"""Lower bounds on δ(ε) from tests on sums over windows of indices, made independent of each other.

Indices are cut into windows, and the sums of the u_i over the windows are multiplied by the root of the inverse of
their covariance: the statistics y are independent and of variance one, and component i moves them by μ_i. Put into
cells, y is a sequence of independent digits. Of few digits, turned so that few of them matter, the two probabilities of
every combination are computed; of many, the laws of a sum of scores of neighbouring digits. Nothing is replaced by
something else (docs/theory/lower_bounds.md, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from dpmf import budget
from dpmf.accountants.protocol import Direction
from dpmf.kernels import announce_compilation
from dpmf.kernels.pairs import law_of_sum
from dpmf.kernels.tangents import aims
from dpmf.lower_bounds._composed import between
from dpmf.lower_bounds._half_spaces import LARGEST_EPSILON
from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Which tests are tried. Any values give sound bounds.

    Attributes:
      few: up to this many windows all combinations of their cells are told apart.
      most_combinations: the number of these combinations, at most.
      aim: their cells are made for a log-likelihood ratio that is this much above ε.
      reach: how far their cells reach, as a part of what is best for many cells of a normal law.
      slab: how many of them are in memory at a time.
      ratio: the logarithm of the likelihood ratio may change by this much within a cell, about.
      widest: the widest cells.
      most_cells: the number of cells of a statistic, at most, in sums of scores.
      below: where cells begin, in deviations below the lowest shift.
      above: where they end, in deviations beyond the largest one.
      levels: the number of values of a sum of scores.
      finer: the factor on levels, on the number of cells and, squared, on that of combinations in a last, finer bound.
      beyond: a sum of scores is cut where the ratio exceeds 1 by this many times e^ε − 1.
      rare: a score is not lower than those of cells whose probability is this part of the largest.
      flattest: the least eigenvalue of the windows' covariance, as a part of the largest, that is tried.
    """

    few: int = 6
    most_combinations: float = 4e6
    aim: float = 0.3
    reach: float = 0.9
    slab: int = 1_000_000
    ratio: float = 0.5
    widest: float = 0.4
    most_cells: int = 40
    below: float = 2.5
    above: float = 5.0
    levels: int = 120
    finer: float = 2.0
    beyond: float = 1.25
    rare: float = 0.03
    flattest: float = 1e-7


_TUNING = _Tuning()


@dataclass(frozen=True, eq=False)
class Windows:
    """Tests on the sums over windows, made independent; shifts are for σ = 1.

    Attributes:
      shifts: window × index, by how much component i moves each statistic.
      skew: a bound on the Frobenius norm of the covariance's distance from the unit matrix.
      slip: a bound on the distance of a component's shift from its true value.
    """

    shifts: Array
    skew: float
    slip: float

    @property
    def few(self) -> bool:
        """Whether all combinations of cells are told apart."""
        return len(self.shifts) <= max(1, _TUNING.few)

    @classmethod
    def of(cls, gram: Array, number: int, gram_error: float) -> Windows | None:
        """For so many windows; None where their sums are nearly dependent.

        **Formal guarantees.** The linear map R is whatever was computed, so that y = Ru holds without any error. Its
        covariance and its shifts are products of R with sums of entries of the Gram matrix, which are non-negative and
        have a relative error of at most `gram_error`: errors are at most the same products of the moduli, times that
        and the number of roundings.
        """
        b = len(gram)
        owner = np.arange(b) * number // b
        starts = np.searchsorted(owner, np.arange(number))
        sums = np.add.reduceat(gram, starts, axis=0)  # window × index
        covariance = np.add.reduceat(sums, starts, axis=1)
        values, vectors = np.linalg.eigh(0.5 * (covariance + covariance.T))
        if not values[0] > _TUNING.flattest * values[-1]:
            return None
        root = (vectors / np.sqrt(values)) @ vectors.T
        size = np.abs(root)
        error = gram_error + (2 * b + 4 * number + 16) * UNIT
        skew = float(np.linalg.norm(root @ covariance @ root.T - np.eye(number)))
        skew += error * float(np.linalg.norm(size @ covariance @ size.T))
        slip = error * float(np.linalg.norm(size @ sums, axis=0).max())
        return cls(root @ sums, skew * (1 + 1e-9), slip * (1 + 1e-9))

    def turned(self, basis: Array) -> Windows:
        """The statistics basisᵀy, for an orthogonal matrix: as independent as these, but for its rounding errors."""
        number = len(basis)
        skew = self.skew * (1 + 1e-9) + float(np.linalg.norm(basis.T @ basis - np.eye(number)))
        size = float(np.linalg.norm(self.shifts, axis=0).max())
        slip = self.slip * (1 + 1e-9) + 4 * number * number * UNIT * size
        return Windows(basis.T @ self.shifts, skew + 8 * number * number * UNIT, slip)

    def less_error(self, value: float, noise_multiplier: float, gamma: float) -> float:
        """A bound P(E) − γQ(E) for statistics that are exactly independent, less what rounding may have changed."""
        return max(0.0, value - (1 + gamma) * (1.5 * self.skew + 0.5 * self.slip / noise_multiplier + 1e-250))

    def delta(self, noise_multiplier: float, epsilon: float, direction: Direction, *, fine: bool = False) -> float:
        """P(E) − γQ(E) for an event E in terms of cells of y, Q(E) − γP(E) for "add"; 0 where y is out of range.

        **Formal guarantees.** For y ~ N(μ_i, I) the probability of a combination of cells is a product; probabilities
        are rounded down where they count in favour and up where they count against, and all sums have terms of one
        sign. y has a slightly different law, by rounding: the probability of any event differs by at most
        (3/2)·skew + slip/2 (docs/theory/floating-point.md, "Lower bounds").
        """
        if not self.in_range(noise_multiplier, epsilon):
            return 0.0
        shifts, gamma = self.shifts / noise_multiplier, math.exp(epsilon) * (1 + 4 * UNIT * (1 + epsilon))
        finer = max(1.0, _TUNING.finer) if fine else 1.0
        if not self.few:
            return self.less_error(_neighbours(shifts, gamma, direction, finer), noise_multiplier, gamma)
        turned, laws = self, None
        most = _TUNING.most_combinations * finer**2
        if direction == "remove":
            announce_compilation(aims)
            _, shares = aims(shifts, epsilon + _TUNING.aim)
            normals = shares @ shifts.T  # component × statistic: gradients of log A where the component reaches γ
            turned = self.turned(np.linalg.eigh(normals.T @ normals)[1][:, ::-1])
            shifts = turned.shifts / noise_multiplier
            laws = _allotted(shifts, epsilon, most)
        return turned.less_error(_all_combinations(shifts, gamma, direction, most, laws), noise_multiplier, gamma)

    def in_range(self, noise_multiplier: float, epsilon: float) -> bool:
        """Whether bounds are computed for this σ and ε."""
        largest = float(np.abs(self.shifts).max()) / noise_multiplier
        return epsilon <= LARGEST_EPSILON and 1e-6 < largest < 30 and self.skew < 0.1


def best_of(windows: Sequence[Windows], sigma: float, epsilon: float, direction: Direction) -> tuple[Windows, float]:
    """About the best of some windows, and its bound: of many windows, a climb from the middle number finds it."""
    values = {k: one.delta(sigma, epsilon, direction) for k, one in enumerate(windows) if one.few}
    many = [k for k, one in enumerate(windows) if not one.few]
    place, known = (len(many) - 1) // 2, -1
    while many and place != known:
        near = range(max(0, place - 1), min(len(many), place + 2))
        known = place
        for k in sorted(near, key=lambda k: k != place):
            if many[k] not in values:
                values[many[k]] = windows[many[k]].delta(sigma, epsilon, direction)
            if values[many[k]] > values[many[place]]:
                place = k
                break
    best = max(values, key=values.__getitem__)
    return windows[best], values[best]


def _edges(shifts: Array, most: float, finer: float = 1.0) -> Array:
    """Ends of cells of a statistic, the same for all statistics whose shifts these are."""
    low, high = min(0.0, float(shifts.min())) - _TUNING.below, max(0.0, float(shifts.max())) + _TUNING.above
    spacing = min(_TUNING.widest, _TUNING.ratio / float(np.abs(shifts).max())) / math.sqrt(finer)
    cells = int(max(3, min(most, math.ceil((high - low) / spacing))))
    return np.concatenate(([-np.inf], np.linspace(low, high, cells - 1), [np.inf]))


def cells_of(importance: Array, most: float) -> list[int]:
    """Numbers of cells that grow with the importance of a statistic, with a product of at most `most`."""
    low, high = 0.0, 1e4 / max(float(importance.max()), 1e-9)
    for _ in range(60):
        middle = 0.5 * (low + high)
        fits = float(np.log(np.floor(1 + middle * importance)).sum()) <= math.log(max(most, 1.0))
        low, high = (middle, high) if fits else (low, middle)
    return [int(n) for n in np.floor(1 + low * importance)]


def quantiles(cells: int, reach: float) -> Array:
    """The ends between some cells of a normal law; density φ^(1/3), which is best for many cells, if `reach` is 1."""
    return np.asarray(reach * math.sqrt(3) * ndtri(np.arange(1, cells) / cells))


def _allotted(shifts: Array, epsilon: float, most: float) -> list[Array]:
    """Ends of the cells of each statistic: more where the likelihood ratio changes more, around where it reaches γ."""
    points, shares = aims(shifts, epsilon + _TUNING.aim)
    normals = shares @ shifts.T
    centre, deviation = points.mean(axis=0), np.sqrt(1 + points.var(axis=0))
    numbers = cells_of(np.sqrt((normals**2).mean(axis=0)) * deviation, most)
    inner = (m + s * quantiles(n, _TUNING.reach) for m, s, n in zip(centre, deviation, numbers, strict=True))
    return [np.concatenate(([-np.inf], ends, [np.inf])) for ends in inner]


def _all_combinations(
    shifts: Array, gamma: float, direction: Direction, most: float, ends: list[Array] | None = None
) -> float:
    """Σ (P(c) − γQ(c))_+ over all combinations c of cells; for "add" the same with P and Q exchanged.

    The mean over the components of products is a product of two matrices: some statistics × components × the others.
    """
    number, b = shifts.shape
    favour, against = (0, 1) if direction == "remove" else (1, 0)
    ends = [_edges(one, most ** (1 / number)) for one in shifts] if ends is None else ends
    sides = [(np.ones((b, 1)), np.ones(1)), (np.ones((b, 1)), np.ones(1))]
    for one, edges in zip(shifts, ends, strict=True):
        if len(edges) == 2:
            continue  # one cell says nothing
        moved, plain = between(edges, one[:, None])[favour], between(edges, 0.0)[against]
        part = int(sides[0][0].shape[1] > sides[1][0].shape[1])
        p, q = sides[part]
        sides[part] = (p[:, :, None] * moved[:, None]).reshape(b, -1), np.multiply.outer(q, plain).ravel()
    (p_left, q_left), (p_right, q_right) = sides
    slack = 2 * UNIT * (b + 2 * number + 8)
    total, rows = 0.0, max(1, _TUNING.slab // len(q_right))
    for begin in range(0, len(q_left), rows):
        budget.check()
        part_of = slice(begin, begin + rows)
        p = p_left[:, part_of].T @ p_right / b
        q = np.multiply.outer(q_left[part_of], q_right)
        gain, cost = (p, q) if direction == "remove" else (q, p)
        total += float(np.maximum(gain * (1 - slack) - (gamma * (1 + slack)) * cost, 0.0).sum())
    return total * (1 - (rows * len(q_right) + len(q_left)) * UNIT)


def _neighbours(shifts: Array, gamma: float, direction: Direction, finer: float) -> float:
    """The largest P(E) − γQ(E) over the thresholds of a sum of scores of neighbours; for "add", Q(E) − γP(E)."""
    number, b = shifts.shape
    favour, against = (0, 1) if direction == "remove" else (1, 0)
    edges, levels = _edges(shifts, _TUNING.most_cells, finer), round(_TUNING.levels * finer)
    moved = np.empty((b, number, len(edges) - 1))
    for k, one in enumerate(shifts):
        moved[:, k] = between(edges, one[:, None])[favour]
    plain = between(edges, 0.0)[against]
    scores = _scores(moved, plain, 1 + _TUNING.beyond * (gamma - 1) if direction == "remove" else 1.0, levels)
    announce_compilation(law_of_sum)
    budget.check()
    p = law_of_sum(moved, scores, levels)
    q = law_of_sum(np.tile(plain, (1, number, 1)), scores, levels)
    gain, cost = (p[::-1], q[::-1]) if direction == "remove" else (q, p)
    # Roundings: for each digit a product and a sum over cells and levels, then sums over cells, components and levels.
    slack = 2 * UNIT * (number * (len(plain) + levels + 8) + b + len(plain) + levels + 16)
    value = np.cumsum(gain) * (1 - slack) - (gamma * (1 + slack)) * np.cumsum(cost)
    return float(value.max())


def _scores(moved: Array, plain: Array, end: float, levels: int) -> np.ndarray:
    """About what pairs of neighbours add to the likelihood ratio, in levels: window × cell × cell.

    Sums are cut where the ratio is about `end`. The ratio given y_1, ..., y_M is about
    Σ_B E[A | y_B, y_{B+1}] − Σ_B E[A | y_B], the second sum without the two ends: exactly so where no component moves
    more than two neighbours.
    """
    b, number, _ = moved.shape
    ratios = np.minimum(moved / plain, 1e100)
    likely = np.multiply.outer(plain, plain) >= min(_TUNING.rare, 1.0) * float(plain.max()) ** 2
    found = []
    for k in range(number - 1):
        score = ratios[:, k].T @ ratios[:, k + 1] / b
        if k > 0:
            score = score - ratios[:, k].mean(axis=0)[:, None]
        found.append(np.maximum(score, score[likely].min()))
    table = np.array(found)
    least = table.min(axis=(1, 2))
    level = (end - float(least.sum())) / levels
    steps = (table - least[:, None, None]) / max(level, 1e-9)
    return np.asarray(np.rint(np.minimum(steps, levels)).astype(np.int64))
