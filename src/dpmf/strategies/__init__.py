"""Strategies: what the matrix C of the mechanism C·x + Z is.

| name | C |
|---|---|
| `dpsgd` | the identity |
| `lcgd`, `power` | the power series 1/(1 − λx) and (1 − λx)^(−a) |
| `bsr`, `bisr` | square root of the prefix-sum matrix, banded, or with banded inverse |
| `bandmf`, `bandinvmf`, `blt` | optimised: banded, with banded inverse, buffered |
| `optimised` | optimised for the noise multiplier that amplification leaves; needs a batching, workload and target |
| `coefficients`, `matrix` | given by the user, as an array or a file |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dpmf import validation
from dpmf.errors import ArgumentError
from dpmf.strategies.amplified import optimised
from dpmf.strategies.base import Strategy, ToeplitzStrategy
from dpmf.strategies.closed_form import bisr, bsr, dpsgd
from dpmf.strategies.explicit import coefficients, matrix
from dpmf.strategies.power import lcgd, power
from dpmf.strategies.unamplified import bandinvmf, bandmf, blt


class StrategyInfo(NamedTuple):
    """An entry of the catalogue.

    Attributes:
      make: the function that returns the strategy.
      description: what the strategy is, in one line.
      options: which of bandwidth, buffers, decay, exponent and file it takes.
      optional: which of these may be left out.
    """

    make: Callable[..., Strategy]
    description: str
    options: tuple[str, ...]
    optional: tuple[str, ...] = ()


NAMES: dict[str, StrategyInfo] = {
    "dpsgd": StrategyInfo(dpsgd, "independent noise, C = I", ()),
    "bsr": StrategyInfo(bsr, "banded square root: the first p coefficients of (1−x)^(−1/2)", ("bandwidth",)),
    "bisr": StrategyInfo(
        bisr, "banded inverse square root: C⁻¹ has the first p coefficients of (1−x)^(1/2)", ("bandwidth",)
    ),
    "lcgd": StrategyInfo(lcgd, "λCGD: C⁻¹ = 1 − λx, which takes back a part λ of the noise before", ("decay",)),
    "power": StrategyInfo(
        power,
        "the series (1 − λx)^(−a), all of it or its first p coefficients",
        ("exponent", "decay", "bandwidth"),
        ("decay", "bandwidth"),
    ),
    "bandmf": StrategyInfo(bandmf, "optimised banded Toeplitz matrix (needs jax-privacy)", ("bandwidth",)),
    "bandinvmf": StrategyInfo(bandinvmf, "optimised Toeplitz matrix with banded inverse", ("bandwidth",)),
    "blt": StrategyInfo(
        blt, "optimised buffered linear Toeplitz matrix (needs jax-privacy)", ("buffers",), ("buffers",)
    ),
    "coefficients": StrategyInfo(coefficients, "Toeplitz matrix from its first column (.npy, .csv, .txt)", ("file",)),
    "matrix": StrategyInfo(matrix, "any lower-triangular non-negative matrix (.npy, .csv)", ("file",)),
}


def build(name: str, *, normalized: bool = False, **options: Any) -> Strategy:
    """Return the strategy with this name in the catalogue `NAMES`.

    Args:
      name: the name of the strategy.
      normalized: divide C by its largest column norm.
      options: bandwidth, buffers, decay, exponent and file (a path, or an array in its place), as far as the strategy
        takes them. None counts as not given.
    """
    entry = NAMES[validation.choice("strategy", name, NAMES)]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in entry.options:
            raise ArgumentError(option, f"does not apply to strategy {name}")
    for option in entry.options:
        if option not in given and option not in entry.optional:
            raise ArgumentError(option, f"must be given for strategy {name}")
    made = entry.make(*(given.get(option) for option in entry.options))
    return made.normalized() if normalized else made


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
    "build",
    "coefficients",
    "dpsgd",
    "lcgd",
    "matrix",
    "optimised",
    "power",
]
