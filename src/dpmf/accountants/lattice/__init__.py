"""The lattice accountant: uncorrelated noise, both directions, within a fraction of a percent, in milliseconds.

With a diagonal Gram matrix the likelihood ratio A = 1/b Σ a_i is an average of independent log-normal variables of mean
1, and δ(ε) is an option on their sum: E(A − e^ε)_+ for remove, E(1 − e^ε·A)_+ for add. `lognormal_sum` bounds such
options on a lattice, by FFT. The theory is in docs/theory/lattice.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpmf import budget, validation
from dpmf.accountants.lattice.lognormal_sum import LognormalSum, grouped
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, Proof
from dpmf.gram.means import folded_column
from dpmf.loss.gaussian import gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.strategies.base import ToeplitzStrategy


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide when a lattice is worth its time and memory. Any values give sound bounds.

    Attributes:
      negligible: below this δ the closed form without amplification answers.
      fewest_points: a lattice with fewer nodes is useless.
      bytes_per_point: how much memory a node takes.
    """

    negligible: float = 1e-100
    fewest_points: int = 64
    bytes_per_point: float = 400.0


_TUNING = _Tuning()


@dataclass(frozen=True)
class Lattice(Accountant):
    """Options of the lattice accountant.

    Attributes:
      discretisation_loss: the part of the noise multiplier that the lattice may cost (its step follows from it).
      max_points: the largest lattice; beyond it (b well above 10⁵) the step grows and the bound gets looser.
    """

    name: ClassVar[str] = "lattice"
    summary: ClassVar[str] = "sums of log-normals by FFT; uncorrelated noise (DP-SGD) only, tight at every ε"
    rests_on: ClassVar[str] = "sums of independent log-normals, discretised in convex order from above"

    discretisation_loss: float = 0.0005
    max_points: int = 2**17

    def __post_init__(self) -> None:
        validation.positive("discretisation_loss", self.discretisation_loss)
        validation.integer("max_points", self.max_points, at_least=64, at_most=2**22)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Collect equal diagonal entries of the Gram matrix; a matrix that is not diagonal is refused.

        **Formal guarantees.** Bounds of the result are at least the true δ(ε) of the dominating pair. Entries are
        rounded up, by their rounding error and, where there are many different ones, to common values: entrywise larger
        Gram matrices have a larger E f(A) for convex f (Kahane's inequality), in both directions. `LognormalSum` bounds
        the rest. The Gaussian mechanism of the largest entry (no amplification, by the same inequality) is a second
        bound, and the smaller of the two is returned; for b = 1 it is exact.
        """
        diagonal = uncorrelated_diagonal(mechanism)
        if diagonal is None:
            raise ValueError(
                f"accountant lattice must be given uncorrelated noise (a diagonal Gram matrix), got {mechanism.name}"
            )
        return _PreparedLattice(mechanism, self, *grouped(diagonal * (1 + mechanism.gram_error), "upper"))

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        return self if uncorrelated_diagonal(mechanism) is not None else None


class _PreparedLattice(PreparedAccountant):
    name = "lattice"
    cheap = True

    def __init__(self, mechanism: Mechanism, options: Lattice, entries: Array, counts: np.ndarray) -> None:
        self.mechanism = mechanism
        self._options, self._entries, self._counts = options, entries, counts

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        with np.errstate(over="ignore"):
            variances = self._entries / noise_multiplier / noise_multiplier * (1 + 8 * UNIT)
        plain = gaussian_delta(math.sqrt(min(float(variances.max()), 1e300)) * (1 + 2 * UNIT), epsilon)
        if self._counts.sum() == 1 or plain <= _TUNING.negligible:
            return Evaluation(plain, {"points": 0})
        affordable = budget.fitting(_TUNING.bytes_per_point)
        points = int(min(self._options.max_points, affordable))
        if points < _TUNING.fewest_points:
            budget.make_do()
            return Evaluation(plain, {"points": 0})
        law = LognormalSum.make(
            variances, self._counts, side="upper", loss=self._options.discretisation_loss, max_points=points
        )
        found = None if law is None else law.delta(epsilon, direction)
        if found is not None and found.points > points / 2 and points < self._options.max_points:
            budget.make_do()
        if found is None or found.value >= plain:
            return Evaluation(plain, {"points": 0})
        return Evaluation(found.value, {"points": found.points, "step": found.step, "tilt": found.tilt})

    def certificate(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Proof:
        """What it takes to check the bound without dpmf: entries above those of G, and the step of the lattice."""
        found = self.delta(noise_multiplier, epsilon, direction)
        if "step" not in found.details:
            return Proof(found.value, "gaussian", {"form": "largest entry"})
        entries = list(map(list, zip(self._entries.tolist(), self._counts.tolist(), strict=True)))
        return Proof(found.value, "lattice", {"entries": entries, "step": found.details["step"]})


def uncorrelated_diagonal(mechanism: Mechanism) -> Array | None:
    """The diagonal of the mechanism's Gram matrix, or None where that matrix is not diagonal.

    Where a Toeplitz strategy only links the batches of one bin, the b × b matrix is not made, so that b may be large.
    """
    strategy, batching = mechanism.strategy, mechanism.thrown_once()
    if isinstance(strategy, ToeplitzStrategy):
        b, n = batching.batches_per_epoch, batching.iterations
        folded = folded_column(strategy, batching)
        if np.diff(np.flatnonzero(folded)).min(initial=b) < b:
            return None
        # Mean i is the first mean moved down by i and cut off at N.
        return np.asarray(np.cumsum(folded**2)[n - 1 - np.arange(b)])
    gram = mechanism.gram
    diagonal = np.diagonal(gram)
    return diagonal.copy() if np.count_nonzero(gram) == np.count_nonzero(diagonal) else None
