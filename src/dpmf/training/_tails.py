"""Where the normals of a generator end, and which noise multipliers are too small for that.

An output that the noise alone cannot reach shows that a record is there. docs/theory/floating-point.md ("Where normals
end") bounds the probability of one, which is part of δ; noise multipliers for which it is not negligible are refused.
"""

from __future__ import annotations

import math

import numpy as np

from dpmf.batching import Poisson
from dpmf.errors import ArgumentError
from dpmf.formatting import given, upper
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy

NEGLIGIBLE = 1e-12  # a thousandth of δ = 10⁻⁹
_LARGE = 10**8  # iterations times batches


def beyond(mechanism: Mechanism, noise_multiplier: float, reach: float, parameters: float) -> float:
    """An upper bound on the probability that a record takes an output where normals that end at `reach` cannot.

    Args:
      mechanism, noise_multiplier: what runs.
      reach: the largest normal, in standard deviations.
      parameters: how many are trained, or more.

    **Formal guarantees.** A record moves row t of C·x by a vector of norm at most the largest entry of a mixture mean
    there; divided by σ, that is S. A coordinate that is moved by s < reach leaves the support with probability at most
    h(s) = φ(reach − s)·min(s, 1/(reach − s)). If q coordinates share S, or however else it is spread, the sum is at
    most the largest q·h(S/√q), found on powers of two and doubled. Rows and throws add up. For very large mechanisms
    all rows of a throw are taken as one, with S the sensitivity of the throw.
    """
    batching, n = mechanism.batching, mechanism.batching.iterations
    if isinstance(batching, Poisson):
        assert isinstance(mechanism.strategy, ToeplitzStrategy)
        shifts = np.abs(mechanism.strategy.strategy_coef(n))
    elif n * batching.batches_per_epoch <= _LARGE:
        shifts = np.concatenate([block.max(axis=1) for _, block in mechanism.throw.mean_rows()])
    else:
        shifts, parameters = np.array([mechanism.throw.sensitivity]), parameters * n
    sizes = shifts[shifts > 0] / noise_multiplier * (1 + 1e-9)
    most, q = np.zeros(len(sizes)), 1.0
    while q <= 2 * parameters:
        s = sizes / math.sqrt(q)
        left = np.maximum(reach - s, 1e-3)
        density = np.exp(-left * left / 2) / math.sqrt(2 * math.pi)
        most = np.maximum(most, np.where(s < reach, np.minimum(2 * q * density * np.minimum(s, 1 / left), 1.0), 1.0))
        q *= 2
    return batching.throws * float(most.sum())


def check_reach(mechanism: Mechanism, noise_multiplier: float, reach: float, parameters: float) -> None:
    """Refuse a noise multiplier for which the end of the normals is not negligible."""
    if beyond(mechanism, noise_multiplier, reach, parameters) <= NEGLIGIBLE:
        return
    least = noise_multiplier
    while beyond(mechanism, least, reach, parameters) > NEGLIGIBLE and least < 1e9:
        least *= 1.01
    raise ArgumentError(
        "noise_multiplier", f"must be at least {upper(least, 3)} for this mechanism, because normals end at "
        f"{given(reach)} standard deviations, got {given(noise_multiplier)}",
    )  # fmt: skip
