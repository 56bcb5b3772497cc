"""Tuning is not free: the guarantee of a hyper-parameter search that releases the best of a random number of runs.

Random stopping (Papernot & Steinke 2022): draw K from a fixed distribution, run the mechanism K times with settings
drawn at random, and release the best run. With Q and Q' for the output of one run on neighbouring data, s for the
probability under Q of a better run than y, and f for the generating function of K, the best run has the density
f'(1 − s)·Q(y). If Q' is (ε̂, δ̂)-indistinguishable from Q, then s' ≤ e^ε̂·s + δ̂: the second density is bounded from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from dpmf import validation
from dpmf.attacks import TradeOff
from dpmf.errors import ArgumentError
from dpmf.formatting import given, upper
from dpmf.numerics import Array

_PIECES = 200  # of an exponential distribution that is replaced by a larger one
_CLOSENESS = 50  # values of ε̂ that are tried, about
_ROUNDING = 1e-9  # relative; far more than the rounding of the sums, logarithms and roots below


@dataclass(frozen=True)
class TunedBound:
    """The release of the best of K runs is (`epsilon`, `delta`)-DP, whatever was tuned.

    Attributes:
      epsilon: ε of the whole search.
      delta: δ of the whole search.
      base_epsilon: ε of a single run at the same δ, for comparison.
      mean: the expected number of runs.
      shape: of the distribution of their number, as in dp_accounting's `RepeatAndSelectDpEvent`.
      noise_multiplier: σ of every run.
    """

    epsilon: float
    delta: float
    base_epsilon: float
    mean: float
    shape: float
    noise_multiplier: float

    def to_dict(self) -> dict[str, float | str | None]:
        """Return a dictionary of plain Python values, ready for JSON; the shape by its name."""
        reached = self.epsilon if math.isfinite(self.epsilon) else None
        return {**asdict(self), "epsilon": reached, "shape": _name(self.shape)}

    def __str__(self) -> str:
        return (
            f"the best of {given(self.mean)} runs on average ({_name(self.shape)}) is ({upper(self.epsilon)}, "
            f"{given(self.delta)})-DP at noise multiplier {given(self.noise_multiplier)}; one run is "
            f"({upper(self.base_epsilon)}, {given(self.delta)})-DP"
        )


def total_epsilon(tradeoff: TradeOff, *, delta: float, mean: float, shape: float = math.inf) -> TunedBound:
    """ε of a search that runs a mechanism a random number of times and releases the best run.

    Args:
      tradeoff: of one run, from `dpmf.tradeoff`; both directions are used.
      delta: δ of the whole search.
      mean: the expected number of runs; more than 1, unless it is Poisson.
      shape: infinity for a Poisson number, 1 for a geometric one, 0 for a logarithmic one, η > −1 for a truncated
        negative binomial one: the names of dp_accounting's `RepeatAndSelectDpEvent`.

    Returns:
      The bound; its ε is infinite where the curve does not reach far enough for so small a δ.

    **Formal guarantees.** Write h for bounds on the privacy profile of one run in both directions, and let ε̂ ≥ 0 with
    δ̂ ≥ δ(ε̂) be arbitrary; the best of many is taken. Ties are broken by coins that are not released.
    * Truncated negative binomial: f'(1 − s) = E[K]·(γ/(γ + (1 − γ)s))^(1+η), so the ratio of f' at s and at e^ε̂·s + δ̂
      is at most W = (e^ε̂ + (1 − γ)δ̂/γ)^(1+η), and f' ≤ E[K]. Hence δ_total(ε + log W) ≤ E[K]·δ(ε).
    * Poisson of mean m: f'(1 − s) = m·e^(−ms). With c = e^ε̂ − 1 and x = Q/Q', the integrand of δ_total(ε₁) is at most
      the supremum over s of m·e^(−ms)·(x − e^(ε₁ − mδ̂ − mcs))_+, which is m·F(x) for a convex F whose slope is the
      distribution function of e^(ε₁ − mδ̂ + ε̂ − cT), T exponential of mean 1. So δ_total(ε₁) ≤ m·E[h(e^(ε₁ − mδ̂ + ε̂ −
      cT))]. T is replaced by the upper ends of pieces, and h by 1 at negative exponents.
    Between points δ is at most the chord in e^ε. Settings of the runs may depend on anything but the data.
    """
    if not isinstance(tradeoff, TradeOff):
        raise validation.wrong("tradeoff", "a dpmf.TradeOff", tradeoff)
    target = validation.probability("delta", delta)
    runs = validation.positive("mean", mean)
    if not (shape == math.inf or (isinstance(shape, int | float) and -1 < shape < math.inf)):
        raise validation.wrong("shape", "more than −1, or infinity", shape)
    profile = _Profile(tradeoff)
    places = np.unique(np.concatenate([points[0] for points in tradeoff.points.values()]))
    closeness = places[:: math.ceil(len(places) / _CLOSENESS)]
    slack = np.array([profile.delta(float(e)) for e in closeness])
    if shape == math.inf:
        found = min(_poisson(profile, target, runs, float(e), float(d)) for e, d in zip(closeness, slack, strict=True))
    else:
        if runs <= 1:
            raise ArgumentError("mean", f"must be more than 1 for {_name(shape)}, got {given(runs)}")
        gamma = _stopping(runs, shape)
        penalty = (1 + shape) * np.log(np.exp(np.minimum(closeness, 700.0)) + (1 - gamma) / gamma * slack)
        found = profile.epsilon(target / runs * (1 - _ROUNDING)) + float(np.min(penalty))
    return TunedBound(
        epsilon=found * (1 + _ROUNDING), delta=target, base_epsilon=profile.epsilon(target), mean=runs,
        shape=float(shape), noise_multiplier=tradeoff.noise_multiplier,
    )  # fmt: skip


class _Profile:
    """Bounds on δ(ε) in both directions at every ε ≥ 0, from the points of a trade-off curve."""

    def __init__(self, tradeoff: TradeOff) -> None:
        self._points = list(tradeoff.points.values())

    def delta(self, epsilon: float) -> float:
        return float(self.deltas(np.array([epsilon]))[0])

    def deltas(self, epsilons: Array) -> Array:
        """The larger of the chords of both directions; 1 where ε is negative."""
        found = np.zeros(len(epsilons))
        for places, bounds in self._points:
            right = np.clip(np.searchsorted(places, epsilons, side="right"), 1, len(places) - 1)
            low, high = places[right - 1], places[right]
            inside = np.minimum(np.maximum(epsilons, low), high)
            share = np.expm1(inside - low) / np.expm1(high - low)
            found = np.maximum(found, bounds[right - 1] + share * (bounds[right] - bounds[right - 1]))
        return np.where(epsilons < 0, 1.0, np.minimum(found * (1 + _ROUNDING), 1.0))

    def epsilon(self, target: float) -> float:
        return _least(lambda e: self.delta(e) <= target, max(float(places[-1]) for places, _ in self._points))


def _least(meets: Callable[[float], bool], top: float) -> float:
    """The least number in [0, top] that meets a condition, by bisection that ends on its right; infinity without."""
    if meets(0.0):
        return 0.0
    if not meets(top):
        return math.inf
    low, high = 0.0, top
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _poisson(profile: _Profile, target: float, mean: float, closeness: float, slack: float) -> float:
    """ε₁ of a Poisson number of runs, for one (ε̂, δ̂)."""
    change = math.expm1(min(closeness, 700.0))
    # The upper ends of pieces of equal probability, but for the last.
    ends: Array = np.asarray(-np.log1p(-np.arange(1, _PIECES) / _PIECES), dtype=np.float64)
    # What is left is cut into pieces of equal length; beyond the last one h is at most 1.
    tail: Array = np.asarray(math.log(_PIECES) + np.arange(1, 60) * 0.5, dtype=np.float64)
    weights = np.exp(-(tail - 0.5)) - np.exp(-tail)
    rest = math.exp(-float(tail[-1]))

    def meets(epsilon: float) -> bool:
        shift = epsilon - mean * slack + closeness
        body = float(np.sum(profile.deltas(shift - change * ends))) / _PIECES
        far = float(np.sum(weights * profile.deltas(shift - change * tail))) + rest
        return mean * (body + far) * (1 + _ROUNDING) <= target

    return _least(meets, 4 * (closeness + mean * slack) + 1000.0 * change + 400.0)


def _stopping(mean: float, shape: float) -> float:
    """γ of the truncated negative binomial distribution with this mean, rounded down."""

    def expected(gamma: float) -> float:
        if abs(shape) < 1e-12:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return shape * (1 - gamma) / gamma / -math.expm1(shape * math.log(gamma))

    low, high = 1e-300, 1 - 1e-12
    while high - low > 1e-14 * high:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if expected(middle) > mean else (low, middle)
        if math.sqrt(low * high) in (low, high):
            break
    return low * (1 - _ROUNDING)


def _name(shape: float) -> str:
    named = {math.inf: "Poisson", 1.0: "geometric", 0.0: "logarithmic"}
    return named.get(float(shape), f"negative binomial of shape {given(shape)}")
