"""Rings and lines of equal blocks: models whose transform is the trace of a power, and the laws that they lead to.

Standard normal separators s_B stand at the borders of blocks of L indices, one more than blocks on a line and as many
on a ring. Only the separators link blocks, so that the covariance ends after adjacent blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dpmf import budget
from dpmf.accountants.chain._lines import Walk, chain_covariance, chain_spacing, in_chunks
from dpmf.accountants.chain._spreads import Band, Option, Resolution, Transition, classes_of, floors
from dpmf.kernels.chain import block_transforms, trace_of_power
from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how tight and how fast laws of blocks are. All positive values give sound bounds.

    Attributes:
      inner_spacing: spacing of the factor inside a block, in units of that of the separators.
      renewal_length: a block of renewal chains is spread as a line of so many times its length.
      separator_frequencies: frequencies that are worked on together, for separators.
      renewal_frequencies: the same for renewal blocks.
      few_blocks: blocks from which the variance of longer rings is extrapolated.
    """

    inner_spacing: float = 1.3
    renewal_length: float = 4.0
    separator_frequencies: int = 16
    renewal_frequencies: int = 24
    few_blocks: int = 8


_TUNING = _Tuning()


def _product_of_blocks(matrices: Array, weights: Array, floor: Array, blocks: int, closed: bool) -> np.ndarray:
    """The transform of all blocks from that of one.

    Args:
      matrices: a block's transform, left separator × right separator × (real, imaginary) × frequency.
      weights: of the separators' nodes.
      floor: what real parts are raised to, by frequency.
      blocks: how many blocks there are.
      closed: whether they form a ring (the trace of a power) or a line (the sum of the entries of the power).
    """
    matrices = matrices * weights[:, None, None]  # of the right separator
    if closed:
        each = zip(matrices.transpose(3, 2, 0, 1), floor.tolist(), strict=True)
        powers = [trace_of_power(np.ascontiguousarray(m), blocks, least) for m, least in each]
        return np.array(powers, dtype=np.complex128)
    steps = np.moveaxis(matrices[:, :, 0] + 1j * matrices[:, :, 1], 2, 0)
    product = np.ones(steps.shape[:2], dtype=np.complex128)
    for _ in range(blocks):
        product = np.einsum("sac,sc->sa", steps, product)
        np.maximum(product.real, floor[:, None], out=product.real)
    return np.asarray(product @ weights)


@dataclass(frozen=True, eq=False)
class SeparatorModel:
    """Index i of block B has u = left_i·s_B + right_i·s_{B+1} + inner_i·z_B + nugget, all s and z independent."""

    left: Array
    right: Array
    inner: Array
    nuggets: Array
    blocks: int
    closed: bool

    @property
    def size(self) -> int:
        return len(self.left) * self.blocks

    def variances(self) -> Array:
        return np.asarray(self.left**2 + self.right**2 + self.inner**2 + self.nuggets)

    def covariance(self) -> Array:
        """The Gram matrix of this model."""
        length, blocks = len(self.left), self.blocks
        loads = np.zeros((blocks, length, 2 * blocks + 1))
        for block in range(blocks):
            loads[block, :, block] += self.left
            loads[block, :, (block + 1) % blocks if self.closed else block + 1] += self.right
            loads[block, :, blocks + 1 + block] = self.inner
        flat = loads.reshape(self.size, -1)
        return np.asarray(flat @ flat.T + np.diag(np.tile(self.nuggets, blocks)))

    def variance_of_sum(self) -> float:
        """About Var Σ a_i: it only says where to look for a tilt. All blocks are alike."""
        few = replace(self, blocks=min(self.blocks, _TUNING.few_blocks))
        return float(np.expm1(np.minimum(few.covariance(), 300.0)).sum()) * self.blocks / few.blocks

    def scaled(self, factor: float) -> SeparatorModel:
        loads = self.left * factor, self.right * factor, self.inner * factor
        return SeparatorModel(*loads, self.nuggets * factor**2, self.blocks, self.closed)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> SeparatorLaw:
        return SeparatorLaw(self, Option(strike, sign, self.size, likely), resolution)


class SeparatorLaw:
    """The law of T for a `SeparatorModel`.

    **Formal guarantees.** Every factor is spread once; all are independent, so (T − K)_+ (and (K − T)_+) is, given the
    others, convex in it (in its exponential) as for `LineLaw`, and the spread factors stay independent: the transform
    is the trace of the product of the blocks' matrices (on a line, with the weights of its two ends, the sum of its
    entries), nothing is left out. A factor beyond its last node adds E[Σ a_i; beyond], in closed form but for the means
    of the factors that are already spread; a put is worth at most K at a node −∞.
    """

    def __init__(self, model: SeparatorModel, option: Option, resolution: Resolution) -> None:
        self.option, self._model = option, model
        nuggets, self._kinds = classes_of(model.nuggets)
        self.nuggets = nuggets[self._kinds]
        left, right, inner = model.left, model.right, model.inner
        smooth = left**2 + right**2 + inner**2
        self.outer = option.spread(float(max(left.max(), right.max())), resolution.static)
        self.inner = option.spread(float(inner.max()), _TUNING.inner_spacing * resolution.static)
        x, z = self.outer.nodes, self.inner.nodes
        budget.claim(48.0 * len(x) ** 2 * len(z) * len(left))
        # Left separator × right separator × inner factor × index.
        y = left * x[:, None, None, None] + right * x[:, None, None] + inner * z[:, None] - smooth / 2
        step = resolution.term * math.sqrt(float((smooth + model.nuggets).max()))
        self.table = option.table(float(y.min()), float(y.max()), step, nuggets)
        rows, shares = self.table.locate(y)
        shape = (len(x) ** 2, len(z), len(left))
        self._rows, self._shares = rows.reshape(shape), shares.reshape(shape)
        self.surplus = self._tails(y) * (1 + 1e-9)
        # For an index: the nugget's sum, interpolation and a complex product. For a block: the sum over its inner
        # factor and a product of matrices that are complex.
        per_block = len(left) * (self.table.summands + 16) + len(z) + 4 * len(x) + 16
        self.rounding = 1.05 * UNIT * model.blocks * per_block

    def _tails(self, y: Array) -> float:
        model, blocks = self._model, self._model.blocks
        if self.option.sign < 0:
            return ((blocks + 1) * self.outer.lost + blocks * self.inner.lost) * self.option.strike
        means, beyond = np.ones(len(model.left)), np.zeros(len(model.left))
        for load, spread in ((model.left, self.outer), (model.right, self.outer), (model.inner, self.inner)):
            means *= np.maximum(spread.mean(load), 1.0)
            beyond += spread.beyond(load)
        total = float((means * beyond).sum())
        outer, inner = self.outer.weights, self.inner.weights
        for i in range(len(model.left)):
            excess = self.table.excess(y[..., i], int(self._kinds[i]))
            total += float(np.einsum("a,c,q,acq->", outer, outer, inner, excess, optimize=True))
        return total * blocks

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        return in_chunks(self._transform, s, _TUNING.separator_frequencies)

    def _transform(self, s: np.ndarray) -> np.ndarray:
        nodes = len(self.outer.nodes)
        floor, flat = floors(s), np.empty((nodes * nodes, 2, len(s)))
        tables = self.table.transforms(s)
        block_transforms(tables, self._kinds, self._rows, self._shares, self.inner.weights, floor, flat)
        matrices = flat.reshape(nodes, nodes, 2, len(s))
        return _product_of_blocks(matrices, self.outer.weights, floor, self._model.blocks, self._model.closed)


@dataclass(frozen=True, eq=False)
class RenewalModel:
    """Index i of block B has u = right_i·s_{B+1} + deviation_i·x_i + nugget.

    x is an order-1 chain that starts anew in every block, with the first of its correlations to s_B, which it carries
    into the block.
    """

    right: Array
    deviations: Array
    correlations: Array
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
        """The covariance of the indices of block 0 with those of block `offset`."""
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
        """The Gram matrix of this model."""
        length, full = self.length, np.zeros((self.size, self.size))
        for offset in {0, 1, self.blocks - 1} & set(range(self.blocks)):
            part = self.block_covariance(offset)
            for block in range(self.blocks if self.closed else self.blocks - offset):
                other = (block + offset) % self.blocks
                rows, columns = slice(block * length, (block + 1) * length), slice(other * length, (other + 1) * length)
                full[rows, columns] = part
                full[columns, rows] = part.T
        return full

    def variance_of_sum(self) -> float:
        """About Var Σ a_i: it only says where to look for a tilt."""
        return float(np.expm1(np.minimum(self.covariance(), 300.0)).sum())

    def scaled(self, factor: float) -> RenewalModel:
        loads = self.right * factor, self.deviations * factor
        return RenewalModel(*loads, self.correlations, self.nuggets * factor**2, self.blocks, self.closed)

    def law(self, strike: float, sign: int, resolution: Resolution, likely: float) -> RenewalLaw:
        return RenewalLaw(self, Option(strike, sign, self.size, likely), resolution)


class RenewalLaw:
    """The law of T for a `RenewalModel`.

    **Formal guarantees.** Every factor has non-negative loads. The separators are independent of each other and of all
    innovations, so each is spread once, as the static factor of `LineLaw` is, with a slope that is at least all its
    loads (`right`, and what the chain carries). Given the separators' nodes the blocks are independent, and in each the
    chain is spread as in `LineLaw` (`Walk`), its first state given its separator's node first. So the transform is the
    trace of a power of the matrix whose entry (s, s') is the block's transform given its separators, times the weight
    of s' (on a line, with the weights of both ends, the sum of its entries). The rest is added:
    * call: separators beyond their last node add E[Σ a_i; beyond], in closed form but for the means of factors already
      spread; a chain beyond its last node adds what it adds on a line, with the later indices of the same block,
      whose right separator is independent of the chain.
    * put: at a node −∞ the put is worth at most K.
    * jumps cut short, as on a line.
    """

    def __init__(self, model: RenewalModel, option: Option, resolution: Resolution) -> None:
        self.option, self._model = option, model
        self.outer = outer = option.spread(float(max(model.right.max(), model.carried().max())), resolution.static)
        top, first = float(model.deviations.max()), float(model.correlations[0])
        innovations = np.maximum(1 - model.correlations**2, 0.0)
        fine = resolution.affordable(_TUNING.renewal_length * model.length).chain
        later = innovations[1:] if model.length > 1 else innovations
        nodes = option.spread(top, chain_spacing(later, model.length, fine), model.size).nodes
        chained = top > 0
        arrival = Transition.of(outer.nodes, nodes, first, top, option.sign) if chained else None
        arrival = arrival and arrival.trimmed(outer.nodes, nodes, top, option)
        matrix = np.ones((len(outer.nodes), 1)) if arrival is None else arrival.matrix
        self._arrival = Band.of(matrix)
        self.walk = walk = Walk(
            option, outer, nodes, outer.weights @ matrix, loads=model.right, deviations=model.deviations,
            innovations=innovations[1:], nuggets=model.nuggets, term=resolution.term,
        )  # fmt: skip
        if option.sign > 0:
            means = np.maximum(outer.mean(model.right), 1.0)
            ends = float(outer.beyond(model.right).sum() + means @ outer.beyond(model.carried()))
            ends += float(walk.later[0] * (outer.weights @ arrival.above)) if arrival is not None else 0.0
        else:
            lost = float(outer.weights @ arrival.lost) if arrival is not None else 0.0
            ends = ((1 + 1 / model.blocks) * outer.lost + lost) * option.strike
        ends += walk.tails
        self.surplus = ends * model.blocks * (1 + 1e-9)
        # For a block, besides its indices: the start and a product of matrices that are complex.
        self.rounding = 1.05 * UNIT * model.blocks * (walk.operations + len(nodes) + 4 * len(outer.nodes) + 16)

    def transform(self, s: np.ndarray) -> np.ndarray:
        """E e^(s(T − K)) of the discretised law."""
        return in_chunks(self._transform, s, max(2, min(_TUNING.renewal_frequencies, self.walk.width)))

    def _transform(self, s: np.ndarray) -> np.ndarray:
        separators = len(self.outer.nodes)
        tables, floor = self.walk.table.transforms(s), floors(s)
        matrices = np.empty((separators, separators, 2, len(s)))
        for part in self.walk.parts(len(s)):
            found = self._arrival.apply(self.walk.backward(tables, floor, part))
            matrices[:, part] = np.moveaxis(found, 0, 1).reshape(separators, -1, 2, len(s))
        return _product_of_blocks(matrices, self.outer.weights, floor, self._model.blocks, self._model.closed)
