"""Who is asked about a problem, with which options, and how much: so that no accountant is left out for its price.

Shares follow from what an answer costs and from how many cases of each accountant a campaign should hold. Problems are
not picked by independent draws but evenly: any stretch of them holds its share of every accountant.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dpmf.accountants import (
    ACCOUNTANTS,
    Accountant,
    Auto,
    Best,
    Cascade,
    Chain,
    Conditional,
    Gaussian,
    Lattice,
    Moments,
    OwnBin,
    Renyi,
)
from dpmf.batching import Poisson
from soundness.problems import Problem

# Accountants that give estimates, and accountants of other packages.
NOT_OURS = tuple(name for name, cls in ACCOUNTANTS.items() if cls.role in ("estimate", "baseline"))
_FEW = 8  # bins up to which the slow accountants are asked now and then
_GOLDEN = (math.sqrt(5) - 1) / 2


# --- options -------------------------------------------------------------------------------------------------------


def _renyi(rng: np.random.Generator, bins: int) -> Renyi:
    return Renyi(
        max_order=None if rng.random() < 0.6 else int(rng.integers(2, 64)),
        work_budget=float(rng.choice([1e4, 1e5, 5e5])),
        bandwidth=None if rng.random() < 0.6 else int(rng.integers(1, 4)),
    )


def _conditional(rng: np.random.Generator, bins: int) -> Conditional:
    return Conditional(
        family=str(rng.choice(["variational", "variational", "am-gm"])),
        option=int(rng.integers(1, 4)),
        temperatures=(math.inf, 0.1, 1.0, 10.0) if rng.random() < 0.7 else (float(rng.choice([0.01, 0.5, 30.0])),),
        bad_event_share=float(rng.choice([0.5, 0.5, 0.01, 0.9])),
        optimise_bad_event=bool(rng.random() < 0.1),
    )


def _chain(rng: np.random.Generator, bins: int) -> Chain:
    if bins > 4:  # else minutes
        return Chain(discretisation_loss=float(rng.choice([0.1, 0.2])), max_frequencies=int(rng.choice([64, 256])))
    return Chain(
        discretisation_loss=float(rng.choice([0.005, 0.02, 0.1, 3.0])), max_frequencies=int(rng.choice([64, 256, 2048]))
    )


def _lattice(rng: np.random.Generator, bins: int) -> Lattice:
    return Lattice(
        discretisation_loss=float(rng.choice([0.0005, 0.005, 0.1])), max_points=int(rng.choice([64, 2**10, 2**17]))
    )


def _cascade(rng: np.random.Generator, bins: int) -> Cascade:
    return Cascade(discretisation_loss=float(rng.choice([0.002, 0.02, 0.2, 5.0])))


def _moments(rng: np.random.Generator, bins: int) -> Moments:
    return Moments(spacing=float(rng.choice([0.07, 0.07, 0.3, 3.0])))


def _own_bin(rng: np.random.Generator, bins: int) -> OwnBin:
    return OwnBin(spacing=float(rng.choice([0.12, 0.12, 0.3, 1.0, 3.0])))


def _best(rng: np.random.Generator, bins: int) -> Best:
    renyi = Renyi(work_budget=float(rng.choice([1e4, 1e5])))
    if rng.random() < 0.7:
        return Best(renyi=renyi)
    moments, own_bin = _moments(rng, bins), _own_bin(rng, bins)
    others: list[Accountant] = [
        _chain(rng, bins), _conditional(rng, bins), _cascade(rng, bins), moments, own_bin, renyi,
    ]  # fmt: skip
    chosen = [others[k] for k in rng.permutation(6)[: int(rng.integers(1, 6))]]
    return Best(accountants=(*chosen, Gaussian()))


def _auto(rng: np.random.Generator, bins: int) -> Auto:
    return Auto(
        tolerance=float(rng.choice([0.02, 0.1, 0.5])),
        time_budget=None if rng.random() < 0.5 else float(np.exp(rng.uniform(1, 8))),  # in looks at the clock
        renyi=Renyi(work_budget=float(rng.choice([1e4, 1e5]))),
    )


# Drawers of options; an accountant that is not here is asked with its defaults.
OPTIONS: dict[str, Callable[[np.random.Generator, int], Accountant]] = {
    "renyi": _renyi, "conditional": _conditional, "chain": _chain, "lattice": _lattice, "best": _best,
    "cascade": _cascade, "moments": _moments, "own-bin": _own_bin, "auto": _auto,
}  # fmt: skip


# --- how much ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much an accountant is asked.

    Attributes:
      shares: the part of the problems, by their number of bins: 1, 2, 3, 4, a few, many.
      epsilons: how many of a problem's ε, in each direction.
      target: how often for a bound with a target in mind, the way calibration asks.
      epsilon, calibrate, profile, cut_short: how often these questions are asked too (`cases`).
      light: what shares are multiplied with in the campaign of the tests.
    """

    shares: tuple[float, float, float, float, float, float]
    epsilons: int = 3
    target: float = 0.2
    epsilon: float = 0.2
    calibrate: float = 0.05
    profile: float = 0.1
    cut_short: float = 0.1
    light: float = 1.0

    def share(self, bins: int, light: bool) -> float:
        found = self.shares[bins - 1] if bins <= 4 else self.shares[4 if bins <= _FEW else 5]
        return found * self.light if light else found


PLANS: Mapping[str, Plan] = {
    "gaussian": Plan((1, 1, 1, 1, 1, 1), 2, epsilon=0.5),
    "renyi": Plan((1, 1, 1, 1, 1, 1), 4, epsilon=0.5),
    "conditional": Plan((0.5, 1, 1, 1, 1, 0.6), 2, target=0.8, calibrate=0.02, profile=0.05, light=0.4),
    "cascade": Plan((0.5, 1, 1, 1, 1, 0.6), 2, light=0.2),
    "moments": Plan((0.5, 1, 1, 1, 1, 0.6), 2, light=0.2),
    "own-bin": Plan((0.5, 1, 1, 1, 1, 0.6), 2, light=0.2),
    "lattice": Plan((0.5, 1, 1, 1, 1, 1), 6, light=0.3),
    "chain": Plan((0.5, 1, 1, 1, 1, 0.5), 2, calibrate=0.02, light=0.25),
    "best": Plan((0.4, 0.5, 0.4, 0.3, 0.3, 0.1), 2, calibrate=0.01, profile=0.02, light=0.2),
    "auto": Plan((0.5, 0.3, 0.3, 0.3, 0.3, 0.2), 1, epsilon=0.4, calibrate=0.01, profile=0.02, light=0.1),
    "lower": Plan((0.2, 0.4, 0.4, 0.4, 0.4, 0.3), 2, epsilon=0.1, calibrate=0.05, light=0.12),
}
# Where throws are composed: one composition answers for all ε and both directions.
COMPOSED: Mapping[str, Plan] = {
    "gaussian": Plan((1, 1, 1, 1, 1, 1), 6, target=0.05, calibrate=0.1, light=0.5),
    "renyi": Plan((0.5, 0.5, 0.5, 0.5, 0.5, 0.5), 6, target=0.05, light=0.3),
    "lattice": Plan((0.2, 0.35, 0.35, 0.35, 0.35, 0.35), 6, target=0.02, light=0.2),
    "conditional": Plan((0.1, 0.15, 0.15, 0.15, 0.15, 0.15), 6, target=0, calibrate=0, cut_short=0.05, light=0.1),
    "cascade": Plan((0.05, 0.08, 0.08, 0.08, 0.08, 0.08), 6, target=0, calibrate=0, cut_short=0.05, light=0.1),
    "moments": Plan((0.05, 0.08, 0.08, 0.08, 0.08, 0.08), 6, target=0, calibrate=0, cut_short=0.05, light=0.1),
    "own-bin": Plan((0.05, 0.08, 0.08, 0.08, 0.08, 0.08), 6, target=0, calibrate=0, cut_short=0.05, light=0.1),
    "chain": Plan((0.05, 0.12, 0.12, 0.12, 0.12, 0.12), 6, target=0, calibrate=0, cut_short=0.05, light=0.1),
    "best": Plan((0.05, 0.08, 0.08, 0.08, 0.08, 0.08), 6, target=0, calibrate=0, cut_short=0.05, light=0.1),
    "auto": Plan((0.05, 0.06, 0.06, 0.06, 0.06, 0.06), 6, target=0, calibrate=0, cut_short=0.05, light=0.1),
    "lower": Plan((0.5, 0.5, 0.5, 0.5, 0.5, 0.5), 2, light=0.3),
}
# Poisson samples have one bound, which these two ask.
SAMPLED: Mapping[str, Plan] = {
    "best": Plan((1, 1, 1, 1, 1, 1), 6, calibrate=0.1),
    "auto": Plan((0.3, 0.3, 0.3, 0.3, 0.3, 0.3), 3, calibrate=0),
    "lower": COMPOSED["lower"],
}
# An accountant that is not here.
_OTHER = Plan((0.2, 0.2, 0.2, 0.2, 0.05, 0), 1)


def _picked(name: str, problem: Problem, seed: int, light: bool) -> Plan | None:
    """The plan, where this problem is among those that the accountant is asked about."""
    batching = problem.mechanism.batching
    table = PLANS if batching.fixed else SAMPLED if isinstance(batching, Poisson) else COMPOSED
    if table is SAMPLED and name not in table:
        return None
    plan = table.get(name, _OTHER)
    start = np.random.default_rng([seed, 1, zlib.crc32(name.encode())]).random()
    place = (start + problem.index * _GOLDEN) % 1.0
    if place >= plan.share(problem.mechanism.batching.batches_per_epoch, light):
        return None
    # What costs next to nothing fills the campaign of the tests.
    return replace(plan, epsilons=len(problem.epsilons)) if light and plan.light == 1 else plan


def accountants_for(
    problem: Problem, seed: int, light: bool = False
) -> Iterator[tuple[Accountant, Plan, np.random.Generator]]:
    """The accountants asked about a problem, with options drawn for it, and what each draws further choices from.

    Each has a stream of its own, so that a new accountant does not change what the others are asked.
    """
    bins = problem.mechanism.batching.batches_per_epoch
    for name, cls in ACCOUNTANTS.items():
        plan = None if name in NOT_OURS else _picked(name, problem, seed, light)
        if plan is not None:
            rng = np.random.default_rng([seed, problem.index, 1, zlib.crc32(name.encode())])
            yield OPTIONS[name](rng, bins) if name in OPTIONS else cls(), plan, rng


def lower_plan(problem: Problem, seed: int, light: bool = False) -> Plan | None:
    """How much the lower bounds are asked, if they are."""
    return _picked("lower", problem, seed, light)


__all__ = ["NOT_OURS", "OPTIONS", "PLANS", "Plan", "accountants_for", "lower_plan"]
