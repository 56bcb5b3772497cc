"""The accountants, by name. To add one: write its file, and add its class to the list below."""

from __future__ import annotations

from dataclasses import replace

from dpmf import validation
from dpmf.accountants.base import (
    DIRECTIONS,
    RELATIONS,
    Accountant,
    Direction,
    Evaluation,
    Portfolio,
    PreparedAccountant,
)
from dpmf.accountants.baselines import PLDAccounting, RandomAllocation
from dpmf.accountants.best import Best
from dpmf.accountants.conditional import Conditional
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.lattice import Lattice
from dpmf.accountants.monte_carlo import MonteCarlo
from dpmf.accountants.renyi import Renyi
from dpmf.mechanism import Mechanism

ACCOUNTANTS: dict[str, type[Accountant]] = {
    cls.name: cls for cls in (Best, Renyi, Conditional, Lattice, Gaussian, MonteCarlo, RandomAllocation, PLDAccounting)
}


def resolve(accountant: str | Accountant) -> Accountant:
    """The accountant itself, or the one of that name with default options."""
    if isinstance(accountant, Accountant):
        return accountant
    return ACCOUNTANTS[validation.choice("accountant", accountant, tuple(ACCOUNTANTS))]()


def suitable(mechanism: Mechanism) -> list[Accountant]:
    """Every accountant that can be used with the mechanism here, `best` last; Monte Carlo with few enough samples."""
    found = []
    for name, cls in ACCOUNTANTS.items():
        accountant = MonteCarlo(samples=100_000) if cls is MonteCarlo else cls()
        try:
            accountant.prepare(mechanism)
        except (ValueError, ImportError):  # correlated noise, an optional package that is not there
            continue
        found.append((name == Best.name, accountant))
    return [accountant for _, accountant in sorted(found, key=lambda pair: pair[0])]


def with_renyi_options(accountant: Accountant, max_order: int | None, work_budget: float | None) -> Accountant:
    """The accountant with these options of its Rényi part replaced; an error where it has none."""
    options = {name: v for name, v in (("max_order", max_order), ("work_budget", work_budget)) if v is not None}
    if not options:
        return accountant
    if isinstance(accountant, Renyi):
        return replace(accountant, **options)  # type: ignore[arg-type]
    if isinstance(accountant, Best):
        return replace(accountant, renyi=replace(accountant.renyi, **options))  # type: ignore[arg-type]
    raise ValueError(f"{next(iter(options))} applies to the accountants renyi and best, not to {accountant.name}")


__all__ = [
    "ACCOUNTANTS",
    "DIRECTIONS",
    "RELATIONS",
    "Accountant",
    "Best",
    "Conditional",
    "Direction",
    "Evaluation",
    "Gaussian",
    "Lattice",
    "MonteCarlo",
    "PLDAccounting",
    "Portfolio",
    "PreparedAccountant",
    "RandomAllocation",
    "Renyi",
    "resolve",
    "suitable",
    "with_renyi_options",
]
