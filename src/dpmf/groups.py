"""Group privacy: what the guarantee for one record says about a person who has several (docs/theory/batch-sizes.md)."""

from __future__ import annotations

from functools import partial

import numpy as np

from dpmf import api, validation
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.accountants.registry import resolve
from dpmf.errors import ArgumentError
from dpmf.loss.gaussian import gaussian_delta, gaussian_epsilon
from dpmf.mechanism import Mechanism, mechanism_of_a_question
from dpmf.numerics import FLOOR, UNIT, Array
from dpmf.results import PrivacyBound

MOST = 64  # records of one person
_STEPS = 64  # steps of the grid between 0 and ε, at least


def group_privacy(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    group_size: int,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: api.AnyAccountant = api.DEFAULT_ACCOUNTANT,
    time_budget: float | None = None,
) -> PrivacyBound:
    """An upper bound on δ(ε), or on ε at δ, for adding or removing a group of records at once.

    Args:
      mechanism: the strategy and the batching.
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
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
    of sensitivity g·Δ, with Δ the sensitivity without amplification. Sums and products are rounded up.
    """
    mechanism_of_a_question(mechanism)
    sigma = mechanism.checked_noise(noise_multiplier)
    g = validation.integer("group_size", group_size, at_least=1, at_most=MOST)
    name = accountant.name if isinstance(accountant, PreparedAccountant) else resolve(accountant).name
    if not isinstance(accountant, PreparedAccountant) and resolve(accountant).role == "estimate":
        raise ArgumentError("accountant", f"must be one that proves its bound, {name} only estimates it")
    if (epsilon is None) == (delta is None):
        raise ArgumentError("epsilon", "must be given if delta is not, and must not be given with it")
    # Coefficients and norms of the strategy are rounded; the sensitivity is raised by what that can make of it.
    whole = g * mechanism.sensitivity / sigma * (1 + mechanism.gram_error + 4 * UNIT)
    ask = partial(_table, mechanism, sigma, g, accountant, time_budget)
    best = "sensitivity"
    if epsilon is not None:
        eps = validation.non_negative("epsilon", epsilon)
        bound, steps = gaussian_delta(whole, eps), ask(eps)[1][-1]
        if steps < bound:
            bound, best = float(steps), "steps"
    else:
        bound = validation.probability("delta", delta)
        eps = gaussian_epsilon(whole, bound)
        # Record by record, look first up to where g equal parts would be enough if δ did not grow, and then farther.
        top = g * api.epsilon(mechanism, noise_multiplier=sigma, delta=bound, accountant=accountant).epsilon
        while top < eps:
            grid, deltas = ask(top)
            enough = np.flatnonzero(deltas <= bound)
            if len(enough):
                eps, best = float(grid[enough[0]]), "steps"
            top *= 1.5
    return PrivacyBound(
        noise_multiplier=sigma, epsilon=eps, delta=bound, direction="both", binding="both",
        accountant=name,
        details={"group_size": g, "bound": best},
    )  # fmt: skip


def _table(
    mechanism: Mechanism, sigma: float, g: int, accountant: api.AnyAccountant, seconds: float | None, epsilon: float
) -> tuple[Array, Array]:
    """Multiples of a step from 0 to ε, and bounds on δ there for groups of g records.

    The best sum for g records is the best one for g − 1 up to some multiple, plus a last term. Parts of the grid's
    points add up to the points only up to rounding, so that one record is asked about at slightly smaller ones.
    """
    grid = np.linspace(0.0, epsilon, g * -(-_STEPS // g) + 1 if epsilon > 0 else 1)
    profile = api.profile(
        mechanism, noise_multiplier=sigma, epsilons=grid * (1 - 16 * UNIT * g), accountant=accountant,
        time_budget=seconds,
    )  # fmt: skip
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
