"""Upper confidence limits from samples, by Chernoff's inequality (docs/theory/monte_carlo.md, section 3)."""

from __future__ import annotations

import math

from dpmf import validation

_MANY = 1e300  # numbers of samples that are larger than this are not told apart


def relative_entropy(a: float, b: float) -> float:
    """KL(Bernoulli(a) ‖ Bernoulli(b)) in nats, for 0 ≤ a ≤ 1 and 0 < b < 1."""
    left = a * math.log(a / b) if a > 0 else 0.0
    right = (1 - a) * (math.log1p(-a) - math.log1p(-b)) if a < 1 else 0.0
    return max(0.0, left + right)


def chernoff_upper_bound(mean: float, samples: int, failure_probability: float) -> float:
    """An upper confidence limit for the mean of variables in [0, 1].

    Args:
      mean: the sample mean.
      samples: the number of samples.
      failure_probability: the probability with which the limit may be too small.

    **Formal guarantees.** For independent variables in [0, 1], identically distributed or not, the result is below the
    average of their expectations with probability at most `failure_probability` (Hoeffding 1963, theorem 1). Bisection
    ends on the larger side.
    """
    mean = validation.non_negative("mean", mean)
    level = -math.log(validation.probability("failure_probability", failure_probability))
    level /= validation.integer("samples", samples, at_least=1)
    if mean >= 1:
        return 1.0
    if mean == 0:
        return -math.expm1(-level)
    low, high = mean, 1.0
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if relative_entropy(mean, middle) > level:
            high = middle
        else:
            low = middle
    return high


def minimum_samples(delta: float, failure_probability: float) -> int:
    """The least number of samples with which an upper confidence limit of `delta` is possible at all.

    It is reached if no sampled loss exceeds ε. The limit is then 1 − p^{1/s} for s samples, about log(1/p)/s: without
    importance sampling the number of samples grows as 1/δ, however private the mechanism is.

    Args:
      delta: the bound wanted, strictly between 0 and 1.
      failure_probability: p, the probability with which the bound may be too small.

    **Formal guarantees.** With fewer samples from the target itself `chernoff_upper_bound` exceeds `delta` whatever
    they are (up to rounding). With this many it may still exceed it.
    """
    delta = validation.probability("delta", delta)
    p = validation.probability("failure_probability", failure_probability)
    return math.ceil(min(math.log(p) / math.log1p(-delta), _MANY))


def samples_for(delta: float, failure_probability: float, closeness: float = 2.0) -> int:
    """The number of samples with which a mean that is `closeness` times smaller than `delta` has the limit `delta`.

    With KL(a ‖ b) for the binary relative entropy it is log(1/p) / KL(δ/closeness ‖ δ), which grows as 1/δ.

    Args:
      delta: the limit wanted. From 1 on, every number of samples will do.
      failure_probability: p, the probability with which the limit may be too small.
      closeness: how many times smaller than `delta` the sample mean is; more than 1.

    **Formal guarantees.** None is needed: the limit is valid for any number of samples that does not depend on them.
    """
    if delta >= 1:
        return 1
    p = validation.probability("failure_probability", failure_probability)
    divergence = relative_entropy(delta / closeness, delta)
    return max(math.ceil(-math.log(p) / max(divergence, 1 / _MANY)), minimum_samples(delta, p))
