"""Strategies: what the matrix C of the mechanism C·x + Z is.

| name | C |
|---|---|
| `dpsgd` | the identity |
| `bsr`, `bisr` | square root of the prefix-sum matrix, banded, or with banded inverse |
| `bandmf`, `bandinvmf`, `blt` | optimised: banded, with banded inverse, buffered |
| `coefficients`, `matrix` | given by the user, as an array or a file |
"""

from __future__ import annotations

from typing import NamedTuple

from dpmf.strategies.base import Strategy, ToeplitzStrategy
from dpmf.strategies.closed_form import bisr, bsr, dpsgd
from dpmf.strategies.explicit import coefficients, matrix
from dpmf.strategies.optimised import bandinvmf, bandmf, blt


class StrategyInfo(NamedTuple):
    """A line of the catalogue: what the strategy is, and which of bandwidth, buffers, file it takes."""

    description: str
    options: tuple[str, ...]
    optional: tuple[str, ...] = ()


NAMES: dict[str, StrategyInfo] = {
    "dpsgd": StrategyInfo("independent noise, C = I", ()),
    "bsr": StrategyInfo("banded square root: the first p coefficients of (1−x)^(−1/2)", ("bandwidth",)),
    "bisr": StrategyInfo("banded inverse square root: C⁻¹ has the first p coefficients of (1−x)^(1/2)", ("bandwidth",)),
    "bandmf": StrategyInfo("optimised banded Toeplitz matrix (needs jax-privacy)", ("bandwidth",)),
    "bandinvmf": StrategyInfo("optimised Toeplitz matrix with banded inverse", ("bandwidth",)),
    "blt": StrategyInfo("optimised buffered linear Toeplitz matrix (needs jax-privacy)", ("buffers",), ("buffers",)),
    "coefficients": StrategyInfo("Toeplitz matrix from its first column (.npy, .csv, .txt)", ("file",)),
    "matrix": StrategyInfo("any lower-triangular non-negative matrix (.npy, .csv)", ("file",)),
}

__all__ = [
    "NAMES",
    "Strategy",
    "StrategyInfo",
    "ToeplitzStrategy",
    "bandinvmf",
    "bandmf",
    "bisr",
    "blt",
    "bsr",
    "coefficients",
    "dpsgd",
    "matrix",
]
