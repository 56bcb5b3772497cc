"""The lattice accountant: uncorrelated noise, both directions, tight to a fraction of a percent in milliseconds.

With a diagonal Gram matrix the likelihood ratio A = 1/b Σ a_i is an average of independent log-normals of mean 1, and
    remove: δ(ε) = E(A − e^ε)_+ = call(b·e^ε)/b,      add: δ(ε) = E(1 − e^ε·A)_+ = e^ε·put(b·e^(−ε))/b
are options on their sum, computed on a lattice by FFT (`_lognormal_sum`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpmf import budget, validation
from dpmf.accountants.lattice._lognormal_sum import LognormalSum, OptionValue
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.gram.means import folded_column
from dpmf.loss.gaussian import Side, gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.strategies.base import ToeplitzStrategy

_FEW_GROUPS = 8
_MOST_GROUPS = {"upper": 64, "lower": 32}
_CLOSE = 2e-4  # relative differences of variances below this are not worth a group (10⁻⁴ of σ)
_LARGEST_EPSILON = 500.0
_NEGLIGIBLE = 1e-100
_FEWEST_POINTS, _BYTES_PER_POINT = 64, 400


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
        validation.integer("max_points", self.max_points, at_least=_FEWEST_POINTS, at_most=2**22)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Collect equal diagonal entries of the Gram matrix; a matrix that is not diagonal is refused.

        **Formal guarantees.** Bounds of the result are at least the true δ(ε) of the dominating pair. Entries are
        rounded up, by their rounding error and, where there are many different ones, to common values: entrywise larger
        Gram matrices have a larger E f(A) for convex f (Kahane's inequality), in both directions. The
        lattice bounds the rest (`LognormalSum.option`). The Gaussian mechanism of the largest entry (no amplification,
        the same inequality) is a second bound, and the smaller of the two is returned; for b = 1 it is exact.
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
        variances = self._entries / noise_multiplier / noise_multiplier * (1 + 4 * UNIT)
        with np.errstate(over="ignore"):
            plain = gaussian_delta(math.sqrt(min(float(variances.max()), 1e300)), epsilon)
        if self._counts.sum() == 1 or plain <= _NEGLIGIBLE:
            return Evaluation(plain, {"points": 0})
        points = min(self._options.max_points, budget.fitting(_BYTES_PER_POINT))
        law = None
        if points < _FEWEST_POINTS:
            budget.make_do()
        else:
            law = LognormalSum.make(
                variances, self._counts, side="upper",
                loss=self._options.discretisation_loss, max_points=int(points),
            )  # fmt: skip
        found = independent_delta(law, epsilon, direction)
        if found is not None and found.points > points / 2 and points < self._options.max_points:
            budget.make_do()
        if found is None or found.value >= plain:
            return Evaluation(plain, {"points": 0})
        return Evaluation(found.value, {"points": found.points, "step": found.step, "tilt": found.tilt})


def independent_delta(law: LognormalSum | None, epsilon: float, direction: Direction) -> OptionValue | None:
    """δ(ε) of the average of the log-normals, bounded on the side of the law; None where the lattice cannot tell."""
    if law is None or epsilon > _LARGEST_EPSILON:
        return None
    b, gamma = law.total + law.fixed, math.exp(epsilon)
    # Moving the strike by its own rounding error keeps the side.
    margin = 4 * UNIT * (1 + epsilon) * (1 if law.side == "upper" else -1)
    if direction == "remove":
        option, scale = law.option("call", gamma * b * (1 - margin)), (1 + margin) / b
    else:
        option, scale = law.option("put", b / gamma * (1 + margin)), gamma / b * (1 + margin)
    return OptionValue(min(1.0, option.value * scale), option.step, option.points, option.tilt)


def uncorrelated_diagonal(mechanism: Mechanism) -> Array | None:
    """The diagonal of the mechanism's Gram matrix, or None where that is not diagonal.

    Where a Toeplitz strategy only reaches from one batch of a bin to the next, the b × b matrix is not made: any b will
    do.
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


def grouped(diagonal: Array, side: Side) -> tuple[Array, np.ndarray]:
    """The distinct entries and how often each occurs; many are rounded to the sound side, in a few steps."""
    entries, counts = np.unique(diagonal, return_counts=True)
    if len(entries) <= _FEW_GROUPS:
        return entries, counts
    low, high = float(entries[0]), float(entries[-1])
    width = max((high - low) / _MOST_GROUPS[side], _CLOSE * high)
    place = np.minimum((entries - low) / width, _MOST_GROUPS[side] - 1).astype(np.int64)
    begin = np.flatnonzero(np.diff(place, prepend=-1))
    extreme = np.maximum if side == "upper" else np.minimum
    return extreme.reduceat(entries, begin), np.add.reduceat(counts, begin)
