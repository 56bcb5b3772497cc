"""Where the normals of a generator end, and which noise multipliers are too small for that.

An output that the noise alone cannot reach shows that a record is there. docs/theory/floating-point.md ("Where normals
end") bounds the probability of one, which is part of δ; noise multipliers for which it is not negligible are refused.
"""

from __future__ import annotations

import math

from dpmf.batching import Poisson
from dpmf.errors import ArgumentError
from dpmf.formatting import given, upper
from dpmf.mechanism import Mechanism

NEGLIGIBLE = 1e-12  # a thousandth of δ = 10⁻⁹


def beyond(mechanism: Mechanism, noise_multiplier: float, reach: float, parameters: float) -> float:
    """An upper bound on the probability that a record takes an output where normals that end at `reach` cannot.

    Args:
      mechanism, noise_multiplier: what runs.
      reach: the largest normal, in standard deviations.
      parameters: how many are trained, or more.

    **Formal guarantees.** In one throw, a record moves the rows of C·x by vectors whose squared norms add up to at most
    S², S its sensitivity in units of σ. A coordinate that is moved by s leaves the support with probability at most
    h(s) = min(Φ̄(reach − s), s·φ(reach − s)). With q coordinates moved by S/√q each, or in any other way, the sum is at
    most the largest q·h(S/√q), found on powers of two and doubled. Throws add up.
    """
    poisson = isinstance(mechanism.batching, Poisson)
    norm = mechanism.sampled_sensitivity if poisson else mechanism.throw.sensitivity
    size = norm / noise_multiplier * (1 + 1e-9)
    most, q = 0.0, 1.0
    while q <= 2 * parameters * mechanism.batching.iterations:
        s = size / math.sqrt(q)
        left = reach - s
        density = math.exp(-left * left / 2) / math.sqrt(2 * math.pi) if left > 0 else 1.0
        most = max(most, 2 * q * min(math.erfc(left / math.sqrt(2)) / 2, s * density, 1.0))
        q *= 2
    return mechanism.batching.throws * most


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
