"""How the rows of C⁻¹Z are computed one iteration at a time, and how many copies of the model that keeps.

| method | used for | copies of the model kept | cost per step and parameter |
|---|---|---|---|
| back-substitution | C of bandwidth p | p − 1 past rows | p multiply-adds |
| convolution | Toeplitz C⁻¹ of bandwidth p | p − 1 past normals | p multiply-adds |
| buffers | a BLT with d buffers | d | 2d multiply-adds |
| regeneration | any other C | none | row t draws t + 1 normals again |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dpmf.errors import ArgumentError
from dpmf.numerics import Array
from dpmf.strategies.base import NormalizedToeplitz, Strategy, ToeplitzStrategy, block_rows
from dpmf.strategies.buffered import BufferedStrategy
from dpmf.strategies.inversion import covering_coef, covering_inverse

MAX_COPIES = 64


class Streaming(NamedTuple):
    """The method that streams a strategy, and the copies of the model that it keeps between steps."""

    method: str
    copies: int


@dataclass(frozen=True)
class Plan:
    """How the rows of C⁻¹Z are computed.

    Attributes:
      method: one of "back-substitution", "convolution", "buffers" and "regeneration".
      copies: the number of arrays of the size of the model that are kept between steps.
      weights: for back-substitution, C[t, t−j] at [t, j], with a single row if C is Toeplitz; for convolution, the same
        of C⁻¹; for buffers, their decay and their weight; for regeneration, C⁻¹.
      scale: the factor by which every row is multiplied.
    """

    method: str
    copies: int
    weights: Array
    scale: float = 1.0

    def row(self, t: int) -> Array:
        return np.asarray(self.weights[0 if len(self.weights) == 1 else t])


def how_to_stream(strategy: Strategy, iterations: int, max_copies: int = MAX_COPIES) -> Streaming:
    """Choose the method that keeps the fewest copies of the model, without computing its weights.

    Args:
      strategy: the matrix C.
      iterations: N.
      max_copies: if every other method keeps more copies than this, regeneration is chosen.
    """
    if isinstance(strategy, NormalizedToeplitz):
        # The strategy before normalisation may have a better method than its multiple, such as buffers.
        return how_to_stream(strategy.base, iterations, max_copies)
    found: list[Streaming] = []
    if isinstance(strategy, BufferedStrategy):
        found.append(Streaming("buffers", len(strategy.buffers(iterations)[0])))
    found.append(Streaming("back-substitution", strategy.bandwidth(iterations) - 1))
    if isinstance(strategy, ToeplitzStrategy):
        found.append(Streaming("convolution", len(np.trim_zeros(strategy.noising_coef(iterations), "b")) - 1))
    fitting = [way for way in found if way.copies <= max_copies]
    return min(fitting, key=lambda way: way.copies, default=Streaming("regeneration", 0))


def make_plan(strategy: Strategy, iterations: int, max_copies: int = MAX_COPIES) -> Plan:
    """Return the plan of `how_to_stream`, with its weights.

    Args:
      strategy: the matrix C.
      iterations: N.
      max_copies: if every other method keeps more copies than this, regeneration is chosen.
    """
    if isinstance(strategy, NormalizedToeplitz):
        plan = make_plan(strategy.base, iterations, max_copies)
        ratio = strategy.noising_coef(iterations)[0] / strategy.base.noising_coef(iterations)[0]
        return replace(plan, scale=plan.scale * float(ratio))
    method, copies = how_to_stream(strategy, iterations, max_copies)
    if method == "buffers":
        assert isinstance(strategy, BufferedStrategy)
        return Plan(method, copies, np.stack(strategy.buffers(iterations)))
    if method == "regeneration":
        return Plan(method, copies, covering_inverse(strategy, iterations))
    if method == "convolution":
        assert isinstance(strategy, ToeplitzStrategy)
        return Plan(method, copies, covering_coef(strategy, iterations)[None, :])
    if isinstance(strategy, ToeplitzStrategy):
        return Plan(method, copies, strategy.strategy_coef(iterations)[None, : copies + 1])
    bands = _bands(strategy, iterations, copies + 1)
    if np.any(bands[:, 0] == 0):
        raise ArgumentError(
            "strategy", f"must have an inverse to train with, {strategy.name} has a zero on its diagonal"
        )
    return Plan(method, copies, bands)


def _bands(strategy: Strategy, iterations: int, p: int) -> Array:
    """C[t, t−j] at [t, j]; zero where t < j."""
    bands = np.zeros((iterations, p))
    for start, block in strategy.rows(iterations, block_rows(iterations)):
        for j in range(p):
            t = np.arange(max(start, j), start + len(block))
            bands[t, j] = block[t - start, t - j]
    return bands
