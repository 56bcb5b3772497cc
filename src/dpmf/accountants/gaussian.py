"""Two closed forms: no amplification (remove), and the geometric mean (add).

Remove: the matrix with max G in every entry dominates G and is the Gram matrix of the Gaussian mechanism with
sensitivity √max G. Add: the mean A of the a_i is at least their geometric mean, whose logarithm is Gaussian, so that
δ(ε) = E(1 − e^ε·A)_+ has a bound in closed form. It is never looser than a Rényi conversion of the same inequality.
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
        """Sum up the Gram matrix, which is not made for Toeplitz strategies.

        **Formal guarantees.** Remove rests on Gram domination (Kahane's inequality), add on the inequality of
        arithmetic and geometric means, pointwise. G is raised by its rounding error, and with it what σ is divided
        into. The mean of the loss is raised by three times as much as its variance: δ grows with the variance only if
        the mean grows by at least half as much (see `gaussian_loss_delta`), and the mean is at least half the
        variance. The closed forms are rounded up. Where records take part at random more than once, no pattern of
        taking part has a larger inner product with another than taking part always: all entries are raised to that
        (docs/theory/batchings.md), and both directions are those of the Gaussian mechanism.
        """
        return _PreparedGaussian(mechanism)


class _PreparedGaussian(PreparedAccountant):
    name = "gaussian"
    cheap = True

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self._composed = not mechanism.batching.fixed
        if self._composed:
            self._sensitivity = mechanism.sensitivity * (1 + 2 * mechanism.gram_error)
            return
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
        if direction == "remove" or self._composed:
            return Evaluation(gaussian_delta(self._sensitivity / noise_multiplier, epsilon))
        mean, variance = (min(v / noise_multiplier / noise_multiplier, 1e300) for v in (self._mean, self._variance))
        return Evaluation(gaussian_loss_delta(mean, variance, epsilon))

    def certificate(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Proof:
        """What it takes to check the bound without dpmf."""
        form = "largest entry" if direction == "remove" else "geometric mean"
        return Proof(self.delta(noise_multiplier, epsilon, direction).value, "gaussian", {"form": form})
