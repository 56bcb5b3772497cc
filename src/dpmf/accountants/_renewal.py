"""Rings of renewal blocks: a majorant for bands of medium and large width, whose transform on a ring is a trace.

Blocks of L indices with independent standard normals s_B, the separators, at their borders. Index i of block B has
u = left_i·s_B + right_i·s_{B+1} + deviation_i·x_i + nugget, x an order-1 chain that starts anew in every block, with
correlation ρ_0 to s_B. Only the separators link blocks, so the covariance ends after adjacent blocks. Two forms:
* pinned: left = 0, the chain carries s_B into the block. Its state is (s_{B+1}, x): as cheap as a line.
* free: ρ_0 = 0, loads left and right of their own. Its state is (s_B, s_{B+1}, x): tighter for long blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from dpmf.accountants._chain_laws import Law, LineLaw, Resolution, chain_covariance, classes_of, in_chunks
from dpmf.accountants._transfer import UNIT, hat_weights
from dpmf.kernels.chain import multiply_terms, trace_of_power
from dpmf.strategies.base import Array

_STATES = 2**17  # doubles of values that are worked on at a time
_SINGLE_THREADED = 2**18  # multiplications in a matrix product
_COARSER = 1.4  # spacings of the free form, whose separators both stay in the state
_FREQUENCIES = 24


@dataclass(frozen=True, eq=False)
class RenewalModel:
    """The loads of one block, and how many blocks there are, on a ring (`closed`) or on a line."""

    left: Array
    right: Array
    deviations: Array
    correlations: Array  # the first one with the left separator
    nuggets: Array
    blocks: int
    closed: bool

    @property
    def length(self) -> int:
        return len(self.left)

    @property
    def size(self) -> int:
        return self.length * self.blocks

    @property
    def pinned(self) -> bool:
        return bool(self.correlations[0] > 0)

    @property
    def symmetric(self) -> bool:
        """Whether a block read backwards, with its separators exchanged, is the same block."""
        steps, deviations = self.correlations[1:], self.deviations
        mirrored = (self.left, steps, deviations, self.nuggets), (self.right, steps, deviations, self.nuggets)
        return not self.pinned and all(np.array_equal(a, b[::-1]) for a, b in zip(*mirrored, strict=True))

    def from_left(self) -> Array:
        """Covariances with the separator at the block's start."""
        return np.asarray(self.left + self.deviations * np.cumprod(self.correlations))

    def variances(self) -> Array:
        carried = self.deviations * np.cumprod(self.correlations)
        own = self.left**2 + 2 * self.left * carried + self.right**2 + self.deviations**2 + self.nuggets
        return np.tile(own, self.blocks)

    def block_covariance(self, offset: int) -> Array:
        """Covariance of the indices of block 0 with those of block `offset`."""
        shape, before = self.from_left(), self.from_left() - self.left
        ring = self.blocks if self.closed else 0
        found = np.zeros((self.length, self.length))
        if offset == 0:
            found += np.outer(shape, shape) + np.outer(self.right, self.right) + np.diag(self.nuggets)
            found += chain_covariance(self.deviations, self.correlations[1:]) - np.outer(before, before)
        if offset == 1 or (ring and offset == (1 % ring)):
            found += np.outer(self.right, shape)
        if ring and offset == (ring - 1) % ring:
            found += np.outer(shape, self.right)
        return found

    def covariance(self) -> Array:
        """The Gram matrix that this model has."""
        length, full = self.length, np.zeros((self.size, self.size))
        for offset in {0, 1, self.blocks - 1} & set(range(self.blocks)):
            part = self.block_covariance(offset)
            for block in range(self.blocks if self.closed else self.blocks - offset):
                other = (block + offset) % self.blocks
                rows, columns = slice(block * length, (block + 1) * length), slice(other * length, (other + 1) * length)
                full[rows, columns] = part
                full[columns, rows] = part.T
        return full

    def scaled(self, factor: float) -> RenewalModel:
        loads = self.left * factor, self.right * factor, self.deviations * factor
        return RenewalModel(*loads, self.correlations, self.nuggets * factor**2, self.blocks, self.closed)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> RenewalLaw:
        return RenewalLaw(self, strike, sign, resolution, likely)


class RenewalLaw(LineLaw):
    """The law of T for a `RenewalModel`.

    **Formal guarantees.** Every factor has non-negative loads. The separators are independent of each other and of all
    innovations, so each is spread once, as the static factor of `LineLaw` is, with a slope that is at least all its
    loads (right, and left plus what the chain carries). Given the separators' nodes the blocks are independent, and in
    each the chain is spread as in `LineLaw`, x_0 given its separator's node first. So the transform is the trace of a
    power of the matrix whose entry (s, s') is the block's transform given its separators, times the weight of s' (on a
    line, with the weights of both ends, the sum of its entries); nothing is left out. A symmetric block has the same
    law given (s, s') and, read backwards, given (s', s): one of the two is computed. The rest:
    * call: separators beyond their last node add E[Σ a_i; beyond], in closed form but for the means of factors already
      spread; a chain beyond its last node adds what it adds in `LineLaw`, with the later indices of the same block.
      The left separator is either not in the state (pinned) or independent of x (free), so means factorise.
    * put: at a node −∞ the put is worth at most K.
    """

    def __init__(self, model: RenewalModel, strike: float, sign: int, resolution: Resolution, likely: float) -> None:
        Law.__init__(self, strike, sign, likely, model.size)
        self._model = model
        self._length, self._blocks, self._closed = model.length, model.blocks, model.closed
        nuggets, self._kinds = classes_of(model.nuggets)
        coarser = 1.0 if model.pinned else _COARSER
        top_load = float(max(model.right.max(), model.from_left().max()))
        self._outer = self._spread(top_load, coarser * resolution.static, deep=False)
        top = float(model.deviations.max())
        innovations = np.maximum(1 - model.correlations**2, 0.0)
        typical = math.sqrt(float(np.median(innovations[1:]))) if self._length > 1 else 1.0
        spacing = min(0.7, coarser * resolution.chain * max(typical, 0.02))
        start = self._spread(top, spacing, deep=True)
        self._nodes = start.nodes
        slope = 0.0 if sign > 0 else top
        self._steps(innovations[1:], spacing, slope)
        s, x = self._outer.nodes, self._nodes
        if model.pinned and len(x) > 1:
            means = float(model.correlations[0]) * s
            self._first, self._first_left = hat_weights(x, means, math.sqrt(float(innovations[0])), slope)
        else:
            self._first = np.broadcast_to(start.weights, (len(s), len(x)))
            self._first_left = np.full(len(s), start.lost)
        self._start = self._outer.weights @ self._first
        # Pairs of separators' nodes for which a block is worked out: all, one of each two, or right ones alone.
        if model.pinned:
            self._before, self._after = np.zeros(len(s), dtype=np.int64), np.arange(len(s))
        elif model.symmetric:
            self._before, self._after = np.triu_indices(len(s))
        else:
            self._before, self._after = (a.ravel() for a in np.indices((len(s), len(s))))
        smooth = model.variances()[: self._length] - model.nuggets
        static = model.left[:, None] * s[self._before] * (not model.pinned) + model.right[:, None] * s[self._after]
        self._static_part = static - smooth[:, None] / 2
        y_low = float((self._static_part.min(axis=1) + model.deviations * x[0]).min())
        y_high = float((self._static_part.max(axis=1) + model.deviations * x[-1]).max())
        root = math.sqrt(float((smooth + model.nuggets).max()))
        self._terms_table = self._table(y_low, y_high, root, resolution.term, nuggets)
        self.surplus = self._block_tails(model, top) * (1 + 1e-9)

    def _block_tails(self, model: RenewalModel, top: float) -> float:
        outer = self._outer
        law = self._start
        if self.sign < 0:
            lost = (self._blocks + 1) * outer.lost + self._blocks * float(outer.weights @ self._first_left)
            for kind in self._step_kinds.tolist():
                lost += self._blocks * float(law @ self._left[kind])
                matrix = self._matrices[kind]
                law = law if matrix is None else law @ matrix
            return lost * self.strike
        last = float(self._nodes[-1])
        means = outer.mean(model.left) * outer.mean(model.right)
        total = 0.0
        if len(outer.nodes) > 1:
            carried = np.maximum(outer.mean(model.from_left()), 1.0) * np.maximum(outer.mean(model.right), 1.0)
            beyond = ndtr(model.from_left() - outer.nodes[-1]) + ndtr(model.right - outer.nodes[-1])
            total += float((carried * beyond).sum())
        later = np.cumsum(means[::-1])[::-1]
        if top > 0:
            variance = 1 - float(model.correlations[0]) ** 2
            centre = float(model.correlations[0]) * outer.nodes
            total += float(later[0] * (outer.weights @ _beyond(centre, variance, top, last)))
        weights = np.zeros(len(self._before))
        if model.pinned:
            weights += outer.weights
        else:
            weights += outer.weights[self._before] * outer.weights[self._after]
            weights[self._before != self._after] *= 2 if model.symmetric else 1
        for i in range(self._length):
            y = self._static_part[i][:, None] + model.deviations[i] * self._nodes
            total += float(weights @ self._terms_table.excess(y, int(self._kinds[i])) @ law)
            if i == self._length - 1 or top == 0:
                continue
            kind = int(self._step_kinds[i])
            matrix = self._matrices[kind]
            if matrix is None:
                continue
            variance = 2.0 ** (float(self._classes[kind]) / 256)
            centre = math.sqrt(max(0.0, 1 - variance)) * self._nodes
            total += float(later[i + 1] * (law @ _beyond(centre, variance, top, last)))
            law = law @ matrix
        return total * self._blocks

    @property
    def rounding(self) -> float:
        """The relative error of M from products and sums.

        A sum of n products with weights ≥ 0, whatever its order, is wrong by at most 1.01·n units of Σ w|v|: for an
        index the nugget's sum and the step of the chain, besides interpolation and a complex product (16 units); for a
        block the start and the products of matrices, complex in both factors.
        """
        nodes, separators = len(self._nodes), len(self._outer.nodes)
        per_index, per_block = nodes + self._terms_table.summands + 16, nodes + 4 * separators + 16
        return 1.05 * UNIT * (self.terms * per_index + self._blocks * per_block)

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        width = max(2, min(_FREQUENCIES, _SINGLE_THREADED // (2 * len(self._nodes) ** 2)))
        return in_chunks(self._transform, s, width)

    def _transform(self, s: np.ndarray) -> np.ndarray:
        tables = self._terms_table.transforms(s)
        separators, nodes = len(self._outer.nodes), len(self._nodes)
        matrices = np.empty((separators, separators, 2, len(s)))
        batch = max(1, _STATES // (2 * nodes * len(s)))
        for begin in range(0, len(self._before), batch):
            part = slice(begin, begin + batch)
            values = self._block(tables, part, len(s))
            before, after = self._before[part], self._after[part]
            if self._model.pinned:
                found = np.matmul(self._first, values)
                matrices[:, after] = np.moveaxis(found, 0, 1).reshape(separators, len(after), 2, len(s))
                continue
            found = np.matmul(self._first[:1], values).reshape(len(after), 2, len(s))
            matrices[before, after] = found
            if self._model.symmetric:
                matrices[after, before] = found
        matrices *= self._outer.weights[:, None, None]
        if not self._closed:
            product = np.ones((len(s), separators), dtype=np.complex128)
            steps = np.moveaxis(matrices[:, :, 0] + 1j * matrices[:, :, 1], 2, 0)
            for _ in range(self._blocks):
                product = np.einsum("sac,sc->sa", steps, product)
            return np.asarray(product @ self._outer.weights)
        powers = [trace_of_power(np.ascontiguousarray(m), self._blocks) for m in matrices.transpose(3, 2, 0, 1)]
        return np.array(powers, dtype=np.complex128)

    def _block(self, tables: Array, part: slice, width: int) -> Array:
        """The block's transform given x_0 and the separators of this part: pair × node × (2·frequencies)."""
        static = self._static_part[:, part]
        pairs, nodes = static.shape[1], len(self._nodes)
        values = np.zeros((pairs * nodes, 2, width))
        values[:, 0] = 1.0
        for i in range(self._length - 1, -1, -1):
            y = (static[i][:, None] + self._model.deviations[i] * self._nodes).ravel()
            row, share = self._terms_table.locate(y)
            multiply_terms(values, tables[self._kinds[i]], row, share)
            if i > 0 and (matrix := self._matrices[self._step_kinds[i - 1]]) is not None:
                values = np.matmul(matrix, values.reshape(pairs, nodes, -1)).reshape(values.shape)
        return values.reshape(pairs, nodes, -1)


def _beyond(centre: Array, variance: float, top: float, last: float) -> Array:
    """E[e^(top·x − top²/2); x > last] for x ~ N(centre, variance)."""
    tilted = np.exp(top * centre + top**2 * (variance - 1) / 2)
    return np.asarray(tilted * ndtr((centre + top * variance - last) / math.sqrt(variance)))
