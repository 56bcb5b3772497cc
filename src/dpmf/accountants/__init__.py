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
from dpmf.accountants.renyi import Renyi

ACCOUNTANTS: dict[str, type[Accountant]] = {cls.name: cls for cls in (Renyi,)}


def resolve(accountant: str | Accountant) -> Accountant:
    """The accountant itself, or the one of that name with default options."""
    if isinstance(accountant, Accountant):
        return accountant
    return ACCOUNTANTS[validation.choice("accountant", accountant, tuple(ACCOUNTANTS))]()


def with_renyi_options(accountant: Accountant, max_order: int | None, work_budget: float | None) -> Accountant:
    """The accountant with these options of its Rényi part replaced; an error where it has none."""
    options = {name: v for name, v in (("max_order", max_order), ("work_budget", work_budget)) if v is not None}
    if not options:
        return accountant
    if not isinstance(accountant, Renyi):
        raise ValueError(f"{next(iter(options))} applies to the renyi accountant only, not to {accountant.name}")
    return replace(accountant, **options)  # type: ignore[arg-type]


__all__ = [
    "ACCOUNTANTS",
    "DIRECTIONS",
    "RELATIONS",
    "Accountant",
    "Direction",
    "Evaluation",
    "Portfolio",
    "PreparedAccountant",
    "Renyi",
    "resolve",
    "with_renyi_options",
]
