"""The add direction given the radius of the slowest wave on the ring (docs/theory/own_bin.md).

Of a circulant C the two modes of the largest period are w_j = ρ·R·cos(2πj/b + φ), with the radius R of a pair of normal
variables and an angle φ. Given R, four moments say more about what is left.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from dpmf import budget
from dpmf.accountants.moments._given_mean import Shape
from dpmf.accountants.own_bin._between_nodes import Curve
from dpmf.accountants.own_bin._given_bin import GivenBin, Shared
from dpmf.numerics import UNIT, Array

FAR = 9.0  # deviations beyond which the payoff is not followed, but counted with a constant
_STRIPS = 0.5, 4.0  # the least and the largest imaginary part of angles that bounds what an angle can change
_LEAST_BATCHES = 32


class GivenRadius(GivenBin):
    """Moments of Σ ξ_j/b given R at the angle 0, for a circulant matrix, without a record.

    **Formal guarantees.** The modes of the largest period have the eigenvalue λ₁ of C, with which the covariance of
    w_j is (2λ₁/b)·cos(2π(i − j)/b). ρ² is 2/b times λ₁ less half of what the diagonal of S was raised by, which covers
    the error of the transform. So D = C − ρ²·cos(2π(i − j)/b) has an eigenvalue there that is positive, and elsewhere
    those of C.
    """

    def __init__(self, shared: Shared) -> None:
        s, b = shared.s, len(shared.s)
        budget.claim(8.0 * 8 * b * b)
        rest = s - shared.variance
        square = 2 / b * (float(np.fft.fft(rest[0]).real[1]) - shared.raised / 2)
        self.wave = math.sqrt(max(square, 0.0))
        waves = np.cos(2 * math.pi / b * np.arange(b))
        self.loads = self.wave * waves
        self.own, self.largest = 0.0, self.wave * (1 + 1e-12)
        places = np.arange(b)
        rest -= self.wave**2 * waves[np.abs(places[:, None] - places)]
        self._tilt = np.zeros(b)
        self._remember(rest, 32 * UNIT * (float(s.max()) + shared.variance + self.wave**2))

    @property
    def usable(self) -> bool:
        """Whether there is a wave, and the errors of its cosines are small beside others."""
        return self.wave > 1e-9 and self._b >= _LEAST_BATCHES

    def _terms(self, tau: float) -> Array:
        found: Array = np.exp(np.minimum(self.loads * tau - self.wave**2 / 2, 600.0))
        return found

    def angle_matters(self, radius: float, shape: Shape, rare: float) -> bool:
        """Whether another angle could change E p(y) by more than `rare`·Σ|c_n|/deviationⁿ, for a quartic p = Σ c_n·yⁿ.

        **Formal guarantees.** E p(y) is an entire function of the angle with period 2π/b: turning the ring by one bin
        changes nothing. Its k-th Fourier coefficient is at most e^(−kbs) times its largest absolute value where the
        angle has the imaginary part ±s. There |B| ≤ g·B(0) with g = e^(ρR(1 + cosh s)), and |E p| is at most
        Σ|c_n|/deviationⁿ·E(1 + gB/E B)⁴ ≤ 128·g⁴·(1 + E y⁴·deviation⁴) times that sum. All coefficients but the first
        count four times at most, with a factor of 1/(1 − e^(−bs)) < 520/512.
        """
        size = 4 * self.largest * radius
        strip = min(math.asinh(self._b / max(size, 1e-9)), _STRIPS[1])  # where the power below is least
        if strip < _STRIPS[0]:
            return True
        power = size * (1 + math.cosh(strip)) - strip * self._b
        return not power + math.log(520 * (1 + shape.kurtosis * shape.deviation**4)) < math.log(rare)


def falling_curve(wave: float, root: float) -> tuple[Curve, float]:
    """An equation for the payoff of the add direction plus a number, and the number.

    **Formal guarantees.** With x = d − √v and q = K·B·Φ(x), P'' = q·(m²·λ(x)/√v − m₂) ≥ −q·ρ², because loads are at
    most ρ. P/q rises with x and is at least √v·(x + λ(x)), at x = −t at least 2√v/(t + √(t² + 8)) (Sampford's
    inequality). So P'' + βP ≥ 0 with β = ρ²·(t + √(t² + 8))/(2√v) if x ≥ −t. For smaller x, q = e^(−√v·x − v/2)·Φ(x)
    is at most its value at −t > −∞, for √v < t: there βη covers ρ²·q.
    """
    beta = wave * wave * (FAR + math.sqrt(FAR * FAR + 8)) / (2 * root) * (1 + 1e-9)
    most = math.exp(root * FAR - root * root / 2) * float(ndtr(-FAR)) * (1 + 1e-9)
    return Curve(0.0, beta), wave * wave * most / beta
