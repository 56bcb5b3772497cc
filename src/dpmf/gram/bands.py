"""Banded and circulant matrices above a Gram matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmf import budget
from dpmf.numerics import Array


def cyclic_distance(b: int) -> np.ndarray:
    """Return the b × b matrix of distances between indices on a ring."""
    i = np.arange(b)
    linear = np.abs(i[:, None] - i[None, :])
    return np.asarray(np.minimum(linear, b - linear))


def cyclic_bandwidth(gram: Array) -> int:
    """Return the least p with G[i, j] = 0 whenever the cyclic distance of i and j is at least p (0 if G = 0)."""
    b = len(gram)
    for distance in range(b // 2, -1, -1):
        i = np.arange(b)
        if np.any(gram[i, (i + distance) % b]):
            return distance + 1
    return 0


def circulant_majorant(gram: Array) -> Array:
    """Return g_d = max_i G[i, (i+d) mod b], the first row of the least circulant matrix above G."""
    b = len(gram)
    i = np.arange(b)
    return np.array([gram[i, (i + d) % b].max() for d in range(b)])


@dataclass(frozen=True)
class BandedMajorant:
    """The cyclically p-banded matrix G^(p) and the constant τ with G ≤ G^(p) + τ·1 entrywise.

    Attributes:
      p: the cyclic bandwidth that is kept; 0 keeps nothing, and τ is then the largest entry.
      band: b × max(p, 1), with band[i, d] = G^(p)[i − d, i] for d ≤ i (linear neighbours below i).
      wrap: b × max(p, 1), with wrap[i, d] = G^(p)[i, i + d − b] for i + d ≥ b, if that pair has linear distance ≥ p.
      tau: the constant.
    """

    p: int
    band: Array
    wrap: Array
    tau: float

    @property
    def wraps(self) -> bool:
        """Whether any wrapped entry is non-zero."""
        return bool(np.any(self.wrap))

    @property
    def exact(self) -> bool:
        """Whether nothing was truncated."""
        return self.tau == 0.0


def truncate(gram: Array, p: int) -> BandedMajorant:
    """Split G into its cyclic band of bandwidth p and τ, the largest entry outside the band.

    At p = ⌊b/2⌋ + 1 every pair is inside the band; larger p are treated as this one. Inside, G^(p) = max(G − τ, 0), so
    that G^(p) + τ ≥ G everywhere. A pair is listed once: as a linear neighbour if |i − j| < p, as a wrapped one
    otherwise.
    """
    b = len(gram)
    budget.require(32.0 * b * b, f"the bands of the {b} × {b} Gram matrix", "batches_per_epoch")
    p = min(p, b // 2 + 1)
    outside = cyclic_distance(b) >= p
    tau = float(gram[outside].max()) if outside.any() else 0.0
    reduced = np.maximum(gram - tau, 0.0)
    width = max(p, 1)
    band, wrap = np.zeros((b, width)), np.zeros((b, width))
    i = np.arange(b)
    for d in range(min(p, b)):
        below = i[i >= d]
        band[below, d] = reduced[below - d, below]
        across = i[(i + d >= b) & (d > 0) & (b - d >= p)]
        wrap[across, d] = reduced[across, across + d - b]
    return BandedMajorant(p, band, wrap, tau)
