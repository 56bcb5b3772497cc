"""Lower bounds on δ(ε) of several throws: pairs that are coarser than that of one throw, composed.

Whoever sees less can tell less apart. Of one throw an observer is shown only in which of finitely many cells a
statistic lies; the two probabilities of each cell make a discrete pair whose profile is below that of the throw, and so
is the composition of such pairs (docs/theory/batchings.md, "Lower bounds"). The statistics are
* the sum of all u_i, under which the pair is a mixture of normal distributions of variance one;
* for blocks of neighbours, taken as independent of each other (a smaller Gram matrix has a smaller δ), the sum over
  blocks of what the sum of the u_i of a block says about it, rounded to a grid. Single indices are blocks too.
The hull of the tests of all of them is used. Probabilities that count in favour are rounded down, the others up, and
losses are rounded down to a lattice.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft
from scipy.special import ndtr

from dpmf import budget
from dpmf.accountants.protocol import Direction
from dpmf.batching import BallsInBins, Poisson
from dpmf.gram.throws import lower_gram_of_throws
from dpmf.loss.composition import Atoms, Composition
from dpmf.loss.distribution import power, transform_error
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.recent import Recent

# Proof constants (docs/theory/floating-point.md, "Lower bounds"): relative error of a normal tail probability, and more
# than what can underflow in one.
_TAIL_ERROR, _TINY = 4e-12, 1e-300
_LEAST_GAIN = 1e-40  # cells with less are left out, which only lowers the bound


@dataclass(frozen=True)
class _Tuning:
    """How fine the cells are. Any values give sound bounds.

    Attributes:
      cells: the number of cells of the sum of the u_i.
      shifts: how many different components the mixture keeps.
      step: of the grid of the likelihood ratios of blocks, as a part of the deviation of their sum.
      most_points: the longest transform.
      sizes: of the blocks.
      moved: how far rounding may move the composed loss down, in its deviations.
      least_spacing: the finest lattice of losses, in deviations of the composed loss.
      kept: how many compositions are remembered.
    """

    cells: int = 1000
    shifts: int = 64
    step: float = 0.02
    most_points: int = 2**14
    sizes: tuple[int, ...] = (1, 3, 5, 8, 13, 21)
    moved: float = 0.005
    least_spacing: float = 2e-5
    kept: int = 8


_TUNING = _Tuning()


@dataclass(frozen=True, eq=False)
class Cells:
    """The probabilities of cells: `gain` under the distribution of the loss, rounded down, `cost` under the other."""

    gain: Array
    cost: Array

    def merged(self, interval: float) -> Cells:
        """Cells whose losses differ by less than an interval, put together: that is coarser still."""
        there = self.gain > _LEAST_GAIN
        gain, cost = self.gain[there], self.cost[there]
        places = np.unique(np.floor(np.log(gain / cost) / interval), return_inverse=True)[1]
        crowd = 1 + (len(gain) + 4) * 2 * UNIT
        sums = [np.bincount(places, weights=values).astype(np.float64) for values in (gain, cost)]
        return Cells(sums[0] / crowd, sums[1] * crowd)

    def atoms(self, interval: float) -> Atoms:
        """The loss, rounded down to a lattice."""
        there = self.gain > _LEAST_GAIN
        gain, cost = self.gain[there], self.cost[there]
        losses = np.log(gain / cost)
        losses -= 8 * UNIT * (1 + np.abs(losses))
        return Atoms(interval, np.floor(losses / interval).astype(np.int64), gain, 0.0)


def hull(cells: Sequence[Cells]) -> Cells:
    """The best tests of several coarser pairs: the concave hull of their (cost, gain) curves."""
    if len(cells) == 1:
        return cells[0]
    points = [np.zeros((1, 2))]
    for one in cells:
        order = np.argsort(-one.gain / one.cost)
        slack = 2 * (len(order) + 4) * UNIT
        points.append(
            np.column_stack((np.cumsum(one.cost[order]) * (1 + slack), np.cumsum(one.gain[order]) * (1 - slack)))
        )
    corners: list[tuple[float, float]] = []
    for cost, gain in sorted(map(tuple, np.concatenate(points).tolist())):
        if corners and gain <= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (cost - x1) > (gain - y1) * (x1 - x0):
                break
            corners.pop()
        corners.append((cost, gain))
    steps = np.diff(np.array(corners), axis=0)
    return Cells(steps[:, 1] * (1 - 4 * UNIT), steps[:, 0] * (1 + 4 * UNIT))


def between(edges: Array, shift: float | Array) -> tuple[Array, Array]:
    """Probabilities of N(shift, 1) between edges, from below and from above; shifts may be a column."""
    z = edges - shift
    lower, upper = ndtr(z), ndtr(-z)
    left = z[..., 1:] + z[..., :-1] < 0
    values = np.where(left, lower[..., 1:] - lower[..., :-1], upper[..., :-1] - upper[..., 1:])
    # Rounding of the arguments changes a tail by its own size times the square of its distance.
    nearest = np.minimum(np.where(left, np.abs(z[..., 1:]), np.abs(z[..., :-1])), 40.0)
    tail = np.where(left, lower[..., 1:], upper[..., :-1])
    error = tail * (_TAIL_ERROR + 16 * UNIT * (nearest + 2) ** 2) + _TINY
    return np.maximum(values - error, 0.0), values + error


def mixture_cells(shifts: Array, weights: Array, direction: Direction) -> Cells:
    """Cells of x under a mixture of N(shift, 1) against N(0, 1); both a lower shift and rounding lower the profile."""
    top = float(shifts.max())
    edges = np.concatenate(([-np.inf], np.linspace(-12.0, top + 12.0, _TUNING.cells - 1), [np.inf]))
    alone = between(edges, 0.0)
    low, high = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for shift, weight in zip(shifts.tolist(), weights.tolist(), strict=True):
        below, above = between(edges, shift)
        low, high = low + weight * below, high + weight * above
    slack = (len(weights) + 4) * 2 * UNIT
    low, high = low * (1 - slack), high * (1 + slack)
    return Cells(low, alone[1]) if direction == "remove" else Cells(alone[0], high)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Independent blocks of one kind: how many, and by how much each of their indices shifts the sum of the u_i."""

    count: int
    shifts: Array

    def edges(self, step: float, cells: int) -> Array:
        """Ends of cells of x, about where size × likelihood ratio is 1, 2, ... steps; the last cell has no end."""
        x = np.linspace(-12.0, float(self.shifts.max()) + 12.0, 20_001)
        ratio = np.exp(x[:, None] * self.shifts - 0.5 * self.shifts**2).sum(axis=1)
        inner = np.interp(np.log(step * np.arange(1, cells)), np.log(ratio), x)
        return np.concatenate(([-np.inf], inner, [np.inf]))


def blocks_of(gram: Array, size: int) -> list[Blocks]:
    """Blocks of neighbours, of one size but for the last: at most three kinds, each at most its members' matrices."""
    whole = [gram[i : i + size, i : i + size] for i in range(0, len(gram) - size + 1, size)]
    alike = [block for block in whole if np.abs(block - whole[0]).max() <= 1e-9 * whole[0][0, 0]]
    kinds = [alike, whole[len(alike) :], [gram[len(whole) * size :, len(whole) * size :]]]
    found = []
    for kind in kinds:
        if kind and len(kind[0]):
            least = np.min(kind, axis=0)
            found.append(Blocks(len(kind), least.sum(axis=1) / math.sqrt(max(float(least.sum()), 1e-300))))
    return found


def sum_cells(blocks: Sequence[Blocks], direction: Direction) -> Cells | None:
    """Cells of the sum over independent blocks of what each of them says, rounded to a grid."""
    b = sum(block.count * len(block.shifts) for block in blocks)
    largest = max(float(block.shifts.max()) for block in blocks)
    if largest > 5.5 or min(float(block.shifts.min()) for block in blocks) < 1e-4:
        return None
    deviation = math.sqrt(
        sum(block.count * float(np.expm1(np.outer(block.shifts, block.shifts)).sum()) for block in blocks)
    )
    reach = max(len(block.shifts) for block in blocks) * math.exp(7 * largest + largest**2 / 2)
    step = _TUNING.step * deviation
    length = min((b + 10 * deviation + reach) / step + b, _TUNING.most_points)
    step = max(step, (b + 10 * deviation) / (0.5 * length))
    length = int(fft.next_fast_len(int(length) + 64, real=True))
    cells = max(int(length - (b + 10 * deviation) / step) - 1, 2)
    counts = np.array([float(block.count) for block in blocks])
    edges = [block.edges(step, cells) for block in blocks]
    sides = []
    for side in (0, 1):
        plain = [between(ends, 0.0)[side] for ends in edges]
        biased = [
            np.mean([between(ends, shift)[side] for shift in block.shifts.tolist()], axis=0)
            for ends, block in zip(edges, blocks, strict=True)
        ]
        norms = np.array(
            [max(np.linalg.norm(row), np.linalg.norm(other)) for row, other in zip(plain, biased, strict=True)]
        )
        totals = np.array([max(row.sum(), other.sum()) for row, other in zip(plain, biased, strict=True)])
        spectra = [fft.rfft(row, length) for row in plain]
        product = np.ones_like(spectra[0])
        for spectrum, block in zip(spectra, blocks, strict=True):
            product = product * (power(spectrum, block.count - 1) if block.count > 1 else 1.0)
        mixed = np.zeros_like(product)
        for g, block in enumerate(blocks):
            others = np.prod([spectrum for h, spectrum in enumerate(spectra) if h != g], axis=0)
            mixed = mixed + (block.count * len(block.shifts) / b) * fft.rfft(biased[g], length) * others
        q, p = fft.irfft(product * np.prod(spectra, axis=0), length), fft.irfft(product * mixed, length)
        # The record is in one block, whose factor is another one; the rest are products and sums of a few spectra.
        error = 2 * transform_error(counts, totals, norms, length, float(np.linalg.norm(q) + np.linalg.norm(p)))
        error += 16 * UNIT * (max(len(block.shifts) for block in blocks) + len(blocks) + 2) * float(norms.max())
        sides.append((p, q, error))
    (p_low, q_low, below), (p_high, q_high, above) = sides
    gain, cost = (p_low, q_high) if direction == "remove" else (q_low, p_high)
    # Where rounding would show, everything on that side goes into one cell.
    seen = np.flatnonzero((gain > 100 * below) & (cost > 100 * above))
    if not len(seen):
        return None
    first, end = int(seen[0]), int(seen[-1]) + 1
    gains, costs = gain[first:end] - below, cost[first:end] + above
    for part in (slice(0, first), slice(end, length)):
        size = part.stop - part.start
        if size:
            gains = np.append(gains, gain[part].sum() - size * below)
            costs = np.append(costs, cost[part].sum() + size * above)
    slack = 4 * UNIT * (length + 8)
    good = (gains > 0) & (costs > 0)
    return Cells(gains[good] * (1 - slack), costs[good] * (1 + slack))


class ComposedLowerBounds:
    """The lower bounds of a mechanism whose records are thrown or sampled several times.

    Attributes:
      diagonal: squared norms of the means of one throw.
      answers: answers to earlier questions of the searches.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.answers: dict[Hashable, float] = {}
        self._mechanism = mechanism
        self._known: Recent[tuple[float, Direction], Composition] = Recent(_TUNING.kept)
        self._error = mechanism.gram_error + 4 * UNIT * (mechanism.batching.batches_per_epoch + 16)
        self._grams: list[tuple[Array, int]] = []
        if isinstance(mechanism.batching, BallsInBins):
            self._grams = lower_gram_of_throws(mechanism.strategy, mechanism.batching)  # type: ignore[arg-type]
            self.diagonal = np.diagonal(self._grams[0][0])
        else:
            self.diagonal = np.array([mechanism.sensitivity**2 / mechanism.batching.throws])

    def delta(self, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
        """The lower bound on δ(ε).

        **Formal guarantees.** A throw's Gram matrix is at least the one that is used, and products of means of
        different throws are at least 0 (Gram domination, docs/theory/batchings.md). Cells are post-processing, merging
        them too, and the hull of several curves of tests is reached by choosing one of them. Profiles that are smaller
        compose to smaller profiles (`Composition` with side "lower").
        """
        key = noise_multiplier, direction
        return self._known.get(key, lambda: self._compose(noise_multiplier, direction)).delta(epsilon)

    def exceeds(self, delta: float, noise_multiplier: float, epsilon: float, direction: Direction) -> bool:
        """Whether the bound proves δ(ε) > `delta`."""
        budget.check()
        return self.delta(noise_multiplier, epsilon, direction) > delta

    def refined(self, delta: float, noise_multiplier: float, epsilon: float, direction: Direction) -> None:
        """There are no slower bounds."""

    def _compose(self, sigma: float, direction: Direction) -> Composition:
        pairs = [(self._one_throw(gram, sigma, direction), count) for gram, count in self._grams if count]
        batching = self._mechanism.batching
        if isinstance(batching, Poisson):
            shift = math.sqrt(self.diagonal[0]) / sigma * (1 - self._error)
            rate = math.nextafter(batching.period / batching.batches_per_epoch, 0.0)
            mixture = mixture_cells(np.array([shift, 0.0]), np.array([rate, 1 - rate]), direction)
            pairs = [(mixture, batching.throws)]
        variance, number = 0.0, 0
        for cells, count in pairs:
            there = cells.gain > _LEAST_GAIN
            losses = np.log(cells.gain[there] / cells.cost[there])
            mean = float(cells.gain[there] @ losses)
            variance += count * float(cells.gain[there] @ (losses - mean) ** 2)
            number += count
        deviation = math.sqrt(max(variance, 1e-20))
        spacing = max(2 * _TUNING.moved / number, _TUNING.least_spacing)
        interval = 2.0 ** math.floor(math.log2(spacing * deviation))
        return Composition([(cells.merged(interval).atoms(interval), count) for cells, count in pairs], "lower")

    def _one_throw(self, gram: Array, sigma: float, direction: Direction) -> Cells:
        diagonal = np.diagonal(gram)
        total = float(gram.sum())
        shifts = gram.sum(axis=1) / math.sqrt(total) / sigma * (1 - 1.5 * self._error - 16 * UNIT)
        # Smaller shifts have a smaller profile (Gram domination): the least of a few neighbours stands for all of them.
        ordered = np.sort(shifts)
        begin = np.unique(np.linspace(0, len(ordered), min(_TUNING.shifts, len(ordered)) + 1).astype(np.int64))[:-1]
        counts = np.diff(np.append(begin, len(ordered)))
        found = [mixture_cells(ordered[begin], counts / len(ordered), direction)]
        correlated = np.count_nonzero(gram) > np.count_nonzero(diagonal)
        spread = math.sqrt(total) / len(gram) / sigma
        for size in _TUNING.sizes if correlated else (1,):
            if size > max(len(gram) // 2, 1):
                break
            budget.check()
            blocks = [
                Blocks(kind.count, kind.shifts / sigma * (1 - 1.5 * self._error - 16 * UNIT))
                for kind in blocks_of(gram, size)
            ]
            cells = sum_cells(blocks, direction)
            if cells is not None:
                if not correlated:
                    return cells
                found.append(cells.merged(max(1e-3 * min(spread, 1.0), 1e-9)))
        return hull(found)
