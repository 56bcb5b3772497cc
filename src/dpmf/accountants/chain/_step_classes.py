"""The steps of a chain of many different steps in few classes, each of which needs one transition matrix.

Innovation variances are rounded down to the least one of their class. That raises correlations, which is sound, and by
how much only decides how tight the bound is: few steps may be rounded far, many steps hardly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpmf.numerics import Array

_SAFE = 1 - 1e-10  # more than the rounding errors of an innovation variance that moves, and of its correlation


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide how far steps are rounded. All positive values give sound bounds.

    Attributes:
      rounded: the part by which innovation variances are rounded down, on average.
      usual_spacing: the spacing of nodes, in deviations of a step, beyond which they may be rounded farther.
      most_rounded: the factor by which, at most.
      halvings: how often what one class may lose is halved until all of them lose little enough.
    """

    rounded: float = 1.2e-3
    usual_spacing: float = 0.25
    most_rounded: float = 4.0
    halvings: int = 24


_TUNING = _Tuning()


def step_classes(variances: Array, smooth: Array, spacing: float) -> tuple[Array, np.ndarray]:
    """Innovation variances rounded down to few values: the values, and the class of each variance.

    Args:
      variances: the innovation variances, all positive.
      smooth: products of the chain's deviations before and after each step.
      spacing: the spacing of the chain's nodes.

    **Formal guarantees.** No value is above any variance of its class.
    """
    # What a part of an innovation is worth: covariances across the step last as long as the chain remembers.
    worth = smooth / variances
    coarse = spacing**2 / float(np.median(variances)) / _TUNING.usual_spacing**2
    return _rounded_down(variances, worth, _TUNING.rounded * max(1.0, min(coarse, _TUNING.most_rounded)))


def _rounded_down(variances: Array, weights: Array, loss: float) -> tuple[Array, np.ndarray]:
    """As few classes as a greedy search finds that lose at most this part, on average over the weights."""
    order = np.argsort(variances, kind="stable")
    logs = np.log(variances[order])
    shares = (weights[order] + 1e-300) / (weights + 1e-300).sum()
    most, firsts = loss, list(range(len(variances)))
    for _ in range(int(_TUNING.halvings)):
        firsts, lost = _classes(logs.tolist(), shares.tolist(), most)
        if lost <= loss:
            break
        most /= 2
    kinds = np.empty(len(variances), dtype=np.int64)
    kinds[order] = np.searchsorted(firsts, np.arange(len(variances)), side="right") - 1
    return np.asarray(variances[order][firsts] * _SAFE), kinds


def _classes(logs: list[float], shares: list[float], most: float) -> tuple[list[int], float]:
    """Where classes begin, of which each loses at most so much, and what all of them lose."""
    firsts, start, own, lost = [0], logs[0], 0.0, 0.0
    for place, (log, share) in enumerate(zip(logs, shares, strict=True)):
        if own + share * (log - start) > most:
            firsts.append(place)
            start, own = log, 0.0
        own += share * (log - start)
        lost += share * (log - start)
    return firsts, lost
