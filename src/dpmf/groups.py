"""Group privacy: what the guarantee for one record says about a person who has several (docs/theory/batch-sizes.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dpmf import api, validation
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.accountants.registry import resolve
from dpmf.errors import ArgumentError
from dpmf.formatting import given
from dpmf.loss.gaussian import gaussian_delta, gaussian_epsilon
from dpmf.mechanism import Mechanism
from dpmf.numerics import FLOOR, UNIT, Array
from dpmf.results import PrivacyBound, PrivacyProfile
from dpmf.run import Run, asked_about

MOST = 64  # records of one person
_STEPS = 64  # steps of the grid between 0 and ε, at least


def group_privacy(
    mechanism: Mechanism | Run,
    *,
    noise_multiplier: float | None = None,
    group_size: int,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: api.AnyAccountant = api.DEFAULT_ACCOUNTANT,
    time_budget: float | None = None,
) -> PrivacyBound:
    """An upper bound on δ(ε), or on ε at δ, for adding or removing a group of records at once.

    Args:
      mechanism: the strategy and the batching, or a `Run`, whose cut of batches is counted.
      noise_multiplier: σ for clipping norm 1 and the strategy as given; left out for a run.
      group_size: g, the number of records of one person.
      epsilon: ε ≥ 0, to ask for δ.
      delta: δ, to ask for ε instead.
      accountant: the accountant that bounds δ(ε) for one record. One that only estimates is refused.
      time_budget: seconds for each profile of one record; there may be several where ε is asked for.

    Returns:
      A `PrivacyBound` for groups. Its `details` say which of two bounds is the smaller one: "steps" goes from one data
      set to the other record by record, "sensitivity" is the Gaussian mechanism of g times the sensitivity.

    **Formal guarantees.** With δ(ε) the bound for one record in both directions, δ_g(ε) is at most
    Σ_j e^(ε_1 + … + ε_(j−1))·δ(ε_j) for any parts ε_1 + … + ε_g = ε; the parts are multiples of a grid's step (equal
    ones among them), at which the accountant's bound was evaluated. It is also at most that of the Gaussian mechanism
    of sensitivity g·Δ, with Δ the sensitivity without amplification, unless batches are cut: then δ(ε) is charged for
    that, and the sum is the only bound. Sums and products are rounded up.
    """
    uncut, sigma, cut = asked_about(mechanism, noise_multiplier)
    g = validation.integer("group_size", group_size, at_least=1, at_most=MOST)
    name = accountant.name if isinstance(accountant, PreparedAccountant) else resolve(accountant).name
    if not isinstance(accountant, PreparedAccountant) and resolve(accountant).role == "estimate":
        raise ArgumentError("accountant", f"must be one that proves its bound, {name} only estimates it")
    if (epsilon is None) == (delta is None):
        raise ArgumentError("epsilon", "must be given if delta is not, and must not be given with it")
    # Coefficients and norms of the strategy are rounded; the sensitivity is raised by what that can make of it.
    whole = g * uncut.sensitivity / sigma * (1 + uncut.gram_error + 4 * UNIT)
    about: dict[str, Any] = {"noise_multiplier": noise_multiplier, "accountant": accountant}
    ask = partial(_table, partial(api.profile, mechanism, time_budget=time_budget, **about), g)
    best = "sensitivity"
    if epsilon is not None:
        eps = validation.non_negative("epsilon", epsilon)
        bound, steps = gaussian_delta(whole, eps), ask(eps)[1][-1]
        if steps < bound or cut is not None:
            bound, best = float(steps), "steps"
    else:
        bound = validation.probability("delta", delta)
        # A sum for g records has a term e^ε·η, so that no larger ε is of any use where batches are cut.
        eps = gaussian_epsilon(whole, bound) if cut is None else math.log(bound / cut.probability)
        # Record by record, look first up to where g equal parts would be enough if δ did not grow, and then farther.
        top = g * api.epsilon(mechanism, delta=bound, **about).epsilon
        while top < eps:
            grid, deltas = ask(top)
            enough = np.flatnonzero(deltas <= bound)
            if len(enough):
                eps, best = float(grid[enough[0]]), "steps"
            top *= 1.5
        if cut is not None and best != "steps":
            size = f"cut batches (max_batch_size = {cut.max_batch_size}) cost too much of it for groups of {g}"
            raise ArgumentError("delta", f"must be larger for this run, in which {size}, got {given(bound)}")
    return PrivacyBound(
        noise_multiplier=sigma, epsilon=eps, delta=bound, direction="both", binding="both",
        accountant=name,
        details={"group_size": g, "bound": best},
    )  # fmt: skip


def _table(profile_at: Callable[..., PrivacyProfile], g: int, epsilon: float) -> tuple[Array, Array]:
    """Multiples of a step from 0 to ε, and bounds on δ there for groups of g records.

    The best sum for g records is the best one for g − 1 up to some multiple, plus a last term. Parts of the grid's
    points add up to the points only up to rounding, so that one record is asked about at slightly smaller ones.
    """
    grid = np.linspace(0.0, epsilon, g * -(-_STEPS // g) + 1 if epsilon > 0 else 1)
    profile = profile_at(epsilons=grid * (1 - 16 * UNIT * g))
    if profile.kind != "bound":  # of an accountant that was prepared already
        raise ArgumentError("accountant", f"must be one that proves its bound, {profile.accountant} only estimates it")
    one = np.minimum.accumulate(np.asarray(profile.deltas))  # δ(ε) does not grow
    with np.errstate(over="ignore"):
        factors = np.exp(grid) * (1 + 8 * UNIT)
    one, total = np.maximum(one, FLOOR), np.maximum(one, FLOOR)
    for _ in range(g - 1):
        sums = [(total[: j + 1] + factors[: j + 1] * one[j::-1]).min() for j in range(len(grid))]
        total = np.minimum(np.array(sums) * (1 + 4 * UNIT), 1.0)
    return grid, total
