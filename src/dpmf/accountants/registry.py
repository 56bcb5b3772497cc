"""The accountants by name. To add one, write its module and add its class to the list below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from dpmf import validation
from dpmf.accountants.baselines import PLDAccounting, RandomAllocation
from dpmf.accountants.cascade import Cascade
from dpmf.accountants.chain import Chain
from dpmf.accountants.combined.auto import Auto
from dpmf.accountants.combined.best import Best
from dpmf.accountants.conditional import Conditional
from dpmf.accountants.gaussian import Gaussian
from dpmf.accountants.lattice import Lattice
from dpmf.accountants.moments import Moments
from dpmf.accountants.monte_carlo import MonteCarlo
from dpmf.accountants.own_bin import OwnBin
from dpmf.accountants.protocol import Accountant, Role, suited
from dpmf.accountants.renyi import Renyi
from dpmf.batching import Poisson
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism

ACCOUNTANTS: dict[str, type[Accountant]] = {
    cls.name: cls
    for cls in (
        Best,
        Auto,
        Chain,
        OwnBin,
        Moments,
        Cascade,
        Lattice,
        Renyi,
        Conditional,
        Gaussian,
        MonteCarlo,
        RandomAllocation,
        PLDAccounting,
    )
}


_SLOW_PROFILES = ("conditional", "renyi")  # the chain is tighter and faster at many ε of one throw


def resolve(accountant: str | Accountant) -> Accountant:
    """The accountant itself, or the one of that name with default options."""
    if isinstance(accountant, Accountant):
        return accountant
    return ACCOUNTANTS[validation.choice("accountant", accountant, tuple(ACCOUNTANTS))]()


def covering(accountant: str | Accountant, mechanism: Mechanism) -> Accountant:
    """The accountant itself; where records are thrown into bins several times, one that composes its bounds.

    **Formal guarantees.** Those of the accountant, and of `Composed` where there are several throws.
    """
    chosen = resolve(accountant)
    if mechanism.batching.fixed:
        return chosen
    from dpmf.accountants.composed import Composed  # it imports dp_accounting, which takes a while

    if isinstance(mechanism.batching, Poisson) and chosen.role != "combined":
        raise validation.wrong("accountant", '"best" or "auto" for Poisson samples', chosen.name)
    return Composed(chosen)


def suitable(mechanism: Mechanism, *roles: Role) -> list[Accountant]:
    """The accountants that suit a mechanism, with default options, in the order of the registry.

    Where there are several throws, those that bound one throw at many ε in little time. Poisson samples have a bound of
    their own, which `best` asks.

    Args:
      mechanism: the mechanism that they are to be used with.
      roles: which kinds of accountants to consider; all of them where none is named.
    """
    considered = [cls() for cls in ACCOUNTANTS.values() if not roles or cls.role in roles]
    if mechanism.batching.fixed:
        return suited(considered, mechanism)
    if isinstance(mechanism.batching, Poisson):
        return [accountant for accountant in considered if accountant.role == "combined"]
    quick = [a for a in considered if a.role in ("bound", "combined") and a.name not in _SLOW_PROFILES]
    return suited(quick, mechanism.throw)


def least_of(accountants: Sequence[Accountant]) -> Accountant:
    """The least of the bounds among the accountants; `best` where none of them is a bound by itself."""
    bounds = tuple(accountant for accountant in accountants if accountant.role == "bound")
    return Best(accountants=bounds) if bounds else Best()


def with_options(accountant: Accountant, options: Mapping[str, Any]) -> Accountant:
    """The accountant with the options that are not None replaced; an error where it does not have one of them.

    `best` and `auto` hand options of the Rényi accountant on to their own.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(accountant, Best | Auto):
        own = {item.name for item in fields(accountant)} - {"renyi", "accountants"}
        inner = {name: given.pop(name) for name in list(given) if name not in own}
        if inner:
            accountant = replace(accountant, renyi=with_options(accountant.renyi, inner))  # type: ignore[arg-type]
    known = {item.name for item in fields(accountant)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise ArgumentError(name, f"applies to other accountants than {accountant.name}")
    return replace(accountant, **given)  # type: ignore[type-var]
