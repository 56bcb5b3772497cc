"""Steps of a composition: each is a Gaussian mixture P = Σ_j w_j N(m_j, σ²), m_j ≥ 0, against Q = N(0, σ²)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class Mixtures:
    """Steps to compose; step n has the components starts[n] .. starts[n+1]−1 and is run counts[n] times.

    Within a step means are ≥ 0 and strictly ascending, and weights are positive; a single component has the weight 1.
    Several weights sum to one but for rounding, which whoever makes them moves to the safe side: the sum is at least 1
    where the loss of (P, Q) is to be bounded ("remove") and at most 1 for that of (Q, P) ("add").
    """

    means: Array
    weights: Array
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def from_unique(cls, collected: dict[tuple[bytes, bytes], int]) -> Mixtures:
        """From the bytes of the means and weights of each different step, and how often it is run."""
        parts = [(np.frombuffer(m), np.frombuffer(w)) for m, w in collected]
        sizes = [len(m) for m, _ in parts]
        empty = np.zeros(0)
        return cls(
            means=np.concatenate([m for m, _ in parts]) if parts else empty,
            weights=np.concatenate([w for _, w in parts]) if parts else empty,
            starts=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64),
            counts=np.array(list(collected.values()), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def total(self) -> int:
        """The number of steps, repetitions included."""
        return int(self.counts.sum())

    def simplified(self) -> Mixtures:
        """The same composition with all single Gaussians in one step, whose mean is √Σ m².

        A step of mean zero has no loss and is left out.

        **Formal guarantees.** `fsum` adds without rounding errors of its own, so the mean has a few rounding errors,
        however many steps there are; it is raised by more than them.
        """
        single = np.diff(self.starts) == 1
        if not single.any():
            return self
        means, counts = self.means[self.starts[:-1][single]], self.counts[single]
        top = float(means.max())
        kept: dict[tuple[bytes, bytes], int] = {}
        if top > 0:  # relative to the largest mean: squares must not leave the range of double precision
            squares = math.fsum((counts * (means / top) ** 2).tolist())
            mean = top * math.sqrt(squares) * (1 + 8 * UNIT)
            kept[np.array([mean]).tobytes(), np.ones(1).tobytes()] = 1
        for n in np.flatnonzero(~single):
            part = slice(self.starts[n], self.starts[n + 1])
            kept[self.means[part].tobytes(), self.weights[part].tobytes()] = int(self.counts[n])
        return Mixtures.from_unique(kept)

    @property
    def gaussian(self) -> float | None:
        """The mean of the one Gaussian that the composition amounts to, or None where it is not one."""
        simple = self.simplified()
        if not len(simple):
            return 0.0
        return float(simple.means[0]) if len(simple.means) == 1 else None
