"""Rings of renewal blocks: a majorant for bands of medium and large width, whose transform on a ring is a trace.

Blocks of L indices with independent standard normals s_B, the separators, at their borders. Index i of block B has
u = right_i·s_{B+1} + deviation_i·x_i + nugget, x an order-1 chain that starts anew in every block, with correlation ρ_0
to s_B, which it carries into the block. Only the separators link blocks, so the covariance ends after adjacent blocks,
and the state along a block is (s_{B+1}, x): as cheap as a line with a static factor, however many blocks there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from dpmf.accountants.chain._band import Band
from dpmf.accountants.chain._laws import Law, LineLaw, Resolution, chain_covariance, classes_of, in_chunks
from dpmf.accountants.chain._transfer import hat_weights
from dpmf.kernels.chain import multiply_terms, trace_of_power
from dpmf.numerics import UNIT, Array

_STATES = 2**17  # doubles of values that are worked on at a time
_FREQUENCIES = 24


@dataclass(frozen=True, eq=False)
class RenewalModel:
    """The loads of one block, and how many blocks there are, on a ring (`closed`) or on a line."""

    right: Array
    deviations: Array
    correlations: Array  # the first one with the left separator
    nuggets: Array
    blocks: int
    closed: bool

    @property
    def length(self) -> int:
        return len(self.right)

    @property
    def size(self) -> int:
        return self.length * self.blocks

    def carried(self) -> Array:
        """Covariances with the separator at the block's start, which the chain carries."""
        return np.asarray(self.deviations * np.cumprod(self.correlations))

    def variances(self) -> Array:
        return np.tile(self.right**2 + self.deviations**2 + self.nuggets, self.blocks)

    def block_covariance(self, offset: int) -> Array:
        """Covariance of the indices of block 0 with those of block `offset`."""
        found = np.zeros((self.length, self.length))
        ring = self.blocks if self.closed else 0
        link = np.outer(self.right, self.carried())
        if offset == 0:
            found += np.outer(self.right, self.right) + np.diag(self.nuggets)
            found += chain_covariance(self.deviations, self.correlations[1:])
        if offset == 1 or (ring and offset == 1 % ring):
            found += link
        if ring and offset == ring - 1:
            found += link.T
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
        loads = self.right * factor, self.deviations * factor
        return RenewalModel(*loads, self.correlations, self.nuggets * factor**2, self.blocks, self.closed)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> RenewalLaw:
        return RenewalLaw(self, strike, sign, resolution, likely)


class RenewalLaw(LineLaw):
    """The law of T for a `RenewalModel`.

    **Formal guarantees.** Every factor has non-negative loads. The separators are independent of each other and of all
    innovations, so each is spread once, as the static factor of `LineLaw` is, with a slope that is at least all its
    loads (`right`, and what the chain carries). Given the separators' nodes the blocks are independent, and in each the
    chain is spread as in `LineLaw`, x_0 given its separator's node first. So the transform is the trace of a power of
    the matrix whose entry (s, s') is the block's transform given its separators, times the weight of s' (on a line,
    with the weights of both ends, the sum of its entries); nothing is left out. The rest:
    * call: separators beyond their last node add E[Σ a_i; beyond], in closed form but for the means of factors already
      spread; a chain beyond its last node adds what it adds in `LineLaw`, with the later indices of the same block,
      whose right separator is independent of the chain.
    * put: at a node −∞ the put is worth at most K.
    """

    def __init__(self, model: RenewalModel, strike: float, sign: int, resolution: Resolution, likely: float) -> None:
        Law.__init__(self, strike, sign, likely, model.size)
        self._model = model
        nuggets, self._kinds = classes_of(model.nuggets)
        top_load = float(max(model.right.max(), model.carried().max()))
        self._outer = self._spread(top_load, resolution.static, deep=False)
        top = float(model.deviations.max())
        innovations = np.maximum(1 - model.correlations**2, 0.0)
        # What the spreads of a block add may add up, or be forgotten as fast as the chain forgets.
        later = innovations[1:] if model.length > 1 else innovations
        typical = max(float(np.median(later)), 1 / (model.length + 1))
        spacing = min(0.7, resolution.affordable(4 * model.length).chain * math.sqrt(typical))
        start = self._spread(top, spacing, deep=True)
        self._nodes = start.nodes
        slope = 0.0 if sign > 0 else top
        self._steps(innovations[1:], spacing, slope)
        s, x = self._outer.nodes, self._nodes
        self._first: Array = np.ones((len(s), 1))
        lost: Array = np.zeros(len(s))
        if len(x) > 1:
            root = math.sqrt(float(innovations[0]))
            self._first, lost = hat_weights(x, float(model.correlations[0]) * s, root, slope)
        self._arrival = Band.of(self._first, self._negligible / len(x))
        self._start = self._outer.weights @ self._first
        smooth = model.right**2 + model.deviations**2
        self._static_part = model.right[:, None] * s - smooth[:, None] / 2
        low = float((self._static_part.min(axis=1) + model.deviations * x[0]).min())
        high = float((self._static_part.max(axis=1) + model.deviations * x[-1]).max())
        largest = math.sqrt(float((smooth + model.nuggets).max()))
        self._terms_table = self._table(low, high, largest, resolution.term, nuggets)
        self.surplus = self._block_tails(model, top, float(self._outer.weights @ lost))
        self.surplus = (self.surplus + self._skipped()) * (1 + 1e-9)

    def _skipped(self) -> float:
        arrivals = self._arrival.left_out * self.strike * (self.terms if self.sign > 0 else 1)
        return self._model.blocks * (super()._skipped() + arrivals)

    def _block_tails(self, model: RenewalModel, top: float, lost: float) -> float:
        """What is added to the option's value for spreads that end, tables that end and nodes at −∞."""
        outer, law = self._outer, self._start
        if self.sign < 0:
            total = (1 + 1 / model.blocks) * outer.lost + lost
            for kind in self._step_kinds.tolist():
                total += float(law @ self._left[kind])
                matrix = self._matrices[kind]
                law = law if matrix is None else law @ matrix
            return total * model.blocks * self.strike
        last, total = float(self._nodes[-1]), 0.0
        means = np.maximum(outer.mean(model.right), 1.0)
        later = np.cumsum(means[::-1])[::-1]
        if len(outer.nodes) > 1:
            total += float(ndtr(model.right - outer.nodes[-1]).sum())
            total += float(means @ ndtr(model.carried() - outer.nodes[-1]))
        if top > 0:
            rho = float(model.correlations[0])
            total += float(later[0] * (outer.weights @ _beyond(rho * outer.nodes, 1 - rho**2, top, last)))
        for i in range(model.length):
            y = self._static_part[i][:, None] + model.deviations[i] * self._nodes
            total += float(outer.weights @ self._terms_table.excess(y, int(self._kinds[i])) @ law)
            if i == model.length - 1 or top == 0:
                continue
            kind = int(self._step_kinds[i])
            matrix = self._matrices[kind]
            if matrix is None:
                continue
            variance = 2.0 ** (float(self._classes[kind]) / 256)
            centre = math.sqrt(max(0.0, 1 - variance)) * self._nodes
            total += float(later[i + 1] * (law @ _beyond(centre, variance, top, last)))
            law = law @ matrix
        return total * model.blocks

    @property
    def rounding(self) -> float:
        """The relative error of M from products and sums.

        A sum of n products with weights ≥ 0, whatever its order, is wrong by at most 1.01·n units of Σ w|v|: for an
        index the nugget's sum and the step of the chain, besides interpolation and a complex product (16 units); for a
        block the start and the products of matrices, complex in both factors.
        """
        nodes, separators = len(self._nodes), len(self._outer.nodes)
        per_index, per_block = self._terms_table.summands + 16, nodes + 4 * separators + 16
        return 1.05 * UNIT * (self.terms * per_index + self._model.blocks * (self._summands + per_block))

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        return in_chunks(self._transform, s, max(2, min(_FREQUENCIES, self._together())))

    def _transform(self, s: np.ndarray) -> np.ndarray:
        model, tables = self._model, self._terms_table.transforms(s)
        separators, nodes = len(self._outer.nodes), len(self._nodes)
        matrices = np.empty((separators, separators, 2, len(s)))
        batch = max(1, _STATES // (2 * nodes * len(s)))
        for begin in range(0, separators, batch):
            found = self._arrival.apply(self._block(tables, slice(begin, begin + batch), len(s)))
            matrices[:, begin : begin + batch] = np.moveaxis(found, 0, 1).reshape(separators, -1, 2, len(s))
        matrices *= self._outer.weights[:, None, None]
        if not model.closed:
            product = np.ones((len(s), separators), dtype=np.complex128)
            steps = np.moveaxis(matrices[:, :, 0] + 1j * matrices[:, :, 1], 2, 0)
            for _ in range(model.blocks):
                product = np.einsum("sac,sc->sa", steps, product)
            return np.asarray(product @ self._outer.weights)
        powers = [trace_of_power(np.ascontiguousarray(m), model.blocks) for m in matrices.transpose(3, 2, 0, 1)]
        return np.array(powers, dtype=np.complex128)

    def _block(self, tables: Array, part: slice, width: int) -> Array:
        """The block's transform given x_0 and these nodes of its right separator: node × node × (2·frequencies)."""
        static = self._static_part[:, part]
        count, nodes = static.shape[1], len(self._nodes)
        values = np.zeros((count * nodes, 2, width))
        values[:, 0] = 1.0
        for i in range(self._model.length - 1, -1, -1):
            y = (static[i][:, None] + self._model.deviations[i] * self._nodes).ravel()
            row, share = self._terms_table.locate(y)
            multiply_terms(values, tables[self._kinds[i]], row, share)
            if i > 0 and (band := self._bands[self._step_kinds[i - 1]]) is not None:
                values = band.apply(values.reshape(count, nodes, -1)).reshape(values.shape)
        return values.reshape(count, nodes, -1)


def _beyond(centre: Array, variance: float, top: float, last: float) -> Array:
    """E[e^(top·x − top²/2); x > last] for x ~ N(centre, variance)."""
    tilted = np.exp(top * centre + top**2 * (variance - 1) / 2)
    return np.asarray(tilted * ndtr((centre + top * variance - last) / math.sqrt(variance)))
