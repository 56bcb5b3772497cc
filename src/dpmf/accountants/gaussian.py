"""Two closed forms: no amplification (remove), and the geometric mean (add).

Remove: max G on every entry dominates G, and leaves the Gaussian mechanism of sensitivity √max G. Add: the mean A of
the a_i is at least their geometric mean, whose logarithm is Gaussian, so δ(ε) = E(1 − e^ε·A)_+ has a closed bound. It
is never looser than a Rényi conversion of the same inequality.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from scipy.special import log_ndtr

from dpmf.accountants.base import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.mechanism import Mechanism


@dataclass(frozen=True)
class Gaussian(Accountant):
    """No options: everything is in closed form."""

    name: ClassVar[str] = "gaussian"
    summary: ClassVar[str] = "closed forms: no amplification (remove), geometric mean (add); instant"
    rests_on: ClassVar[str] = "Kahane's inequality (remove); arithmetic and geometric means (add); closed forms"

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """**Formal guarantees.** Remove rests on Gram domination (Kahane's inequality), add on the inequality of
        arithmetic and geometric means, pointwise. G is raised by its rounding error; so is every closed form."""
        return _PreparedGaussian(mechanism)


class _PreparedGaussian(PreparedAccountant):
    name = "gaussian"

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        sums, b = mechanism.gram_sums, mechanism.allocation.batches_per_epoch
        up = 1 + (mechanism.allocation.iterations + 2 * b + 8) * 2.0**-51
        # No entry of a Gram matrix exceeds the largest on its diagonal.
        largest, mean = float(sums.diagonal.max()), float(sums.diagonal.sum()) / (2 * b)
        variance = sums.total / b**2
        # (mean, variance) of the bound on the privacy loss, times σ².
        self._law = {"remove": (largest / 2 * up, largest * up), "add": (mean * up, variance * up)}

    def delta_one_way(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Evaluation:
        mean, variance = (value / noise_multiplier**2 for value in self._law[direction])
        return Evaluation(gaussian_loss_delta(mean, variance, epsilon))


def gaussian_loss_delta(mean: float, variance: float, epsilon: float) -> float:
    """E(1 − e^(ε−Y))_+ for a privacy loss Y ~ N(mean, variance), raised by its rounding error.

    **Formal guarantees.** The two terms of Φ(x) − e^(ε−mean+variance/2)·Φ(x−s), x = (mean−ε)/s, are compared as
    logarithms; with their relative errors at most 10⁻¹³·(1 + |logarithms|), what is added covers the difference.
    """
    s = math.sqrt(variance)
    epsilon = min(epsilon, mean + 1e100 * s)  # δ falls with ε; beyond, squares leave the range of double
    x = (mean - epsilon) / s
    first, second = float(log_ndtr(x)), epsilon - mean + variance / 2 + float(log_ndtr(x - s))
    size = 1e-13 * (1 + abs(first) + abs(second) + epsilon + mean + variance)
    top = math.exp(min(first, 0.0))
    return min(1.0, max(0.0, -top * math.expm1(min(second - first, 0.0))) + top * size + 1e-300)
