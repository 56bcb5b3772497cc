"""Two closed forms: no amplification (remove), and the geometric mean (add).

Remove: max G on every entry dominates G, and leaves the Gaussian mechanism of sensitivity √max G. Add: the mean A of
the a_i is at least their geometric mean, whose logarithm is Gaussian, so δ(ε) = E(1 − e^ε·A)_+ has a closed bound. It
is never looser than a Rényi conversion of the same inequality.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, Proof
from dpmf.loss.gaussian import gaussian_delta, gaussian_loss_delta
from dpmf.mechanism import Mechanism


@dataclass(frozen=True)
class Gaussian(Accountant):
    """No options: everything is in closed form."""

    name: ClassVar[str] = "gaussian"
    summary: ClassVar[str] = "closed forms: no amplification (remove), geometric mean (add); instant"
    rests_on: ClassVar[str] = "Kahane's inequality (remove); arithmetic and geometric means (add); closed forms"

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """**Formal guarantees.** Remove rests on Gram domination (Kahane's inequality), add on the inequality of
        arithmetic and geometric means, pointwise. G is raised by its rounding error. The mean of the loss is raised by
        three times as much as its variance: δ grows with the variance only if the mean grows along (see
        `gaussian_loss_delta`), and the mean is at least half the variance. The closed forms are rounded up."""
        return _PreparedGaussian(mechanism)


class _PreparedGaussian(PreparedAccountant):
    name = "gaussian"
    cheap = True

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        sums, b = mechanism.gram_sums, mechanism.batching.batches_per_epoch
        error = mechanism.gram_error
        # No entry of a Gram matrix exceeds the largest on its diagonal.
        self._sensitivity = math.sqrt(float(sums.diagonal.max())) * (1 + error)
        # Mean and variance of the loss, both multiplied by σ².
        self._mean = float(sums.diagonal.sum()) / (2 * b) * (1 + 3 * error)
        self._variance = sums.total / b**2 * (1 + error)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        if direction == "remove":
            return Evaluation(gaussian_delta(self._sensitivity / noise_multiplier, epsilon))
        square = noise_multiplier**2
        return Evaluation(gaussian_loss_delta(self._mean / square, self._variance / square, epsilon))

    def certificate(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Proof:
        """What it takes to check the bound without dpmf."""
        form = "largest entry" if direction == "remove" else "geometric mean"
        return Proof(self.delta(noise_multiplier, epsilon, direction).value, "gaussian", {"form": form})
