"""A claim of docs/accountants.md: the cells it rests on, and how they are said, tabulated and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpmf.report import LOOKS as STYLES
from evidence.spec import AccountantSpec, Cell, MechanismSpec, accountant

DELTA = 1e-5
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
RENYI, CONDITIONAL, LATTICE, BEST = (accountant(name) for name in ("renyi", "conditional", "lattice", "best"))
SAMPLER = accountant("monte-carlo", samples=100_000)

Found = Mapping[str, Mapping[str, Any]]  # the results of a claim's cells, by their names in the claim

LOOKS = {
    "renyi": STYLES[0],
    "conditional": STYLES[1],
    "lattice": STYLES[2],
    "best": STYLES[3],
    "pld-accounting": STYLES[4],
    "random-allocation": STYLES[5],
    "monte-carlo": STYLES[6],
}


@dataclass(frozen=True)
class Claim:
    """One claim of the page. `cells` names its cells; what is made from them gets their results by these names."""

    name: str
    cells: Mapping[str, Cell]
    finding: Callable[[Found], str]
    table: Callable[[Found], str]
    draw: Callable[[Found], Any]
    caption: str

    def block(self, found: Found) -> str:
        """The part of the page that is made from the numbers."""
        picture = f"![{self.caption}](pictures/{self.name}.png)"
        return f"{self.finding(found)}\n\n{self.table(found)}\n\n{picture}"


def calibrated(mechanism: MechanismSpec, which: AccountantSpec, epsilon: float, direction: str = "both") -> Cell:
    """The noise multiplier that meets (ε, δ)."""
    tolerance = 1e-3 if which.name == "conditional" else 1e-4
    return Cell.of(
        "sigma", mechanism=mechanism, accountant=which, epsilon=epsilon, delta=DELTA, direction=direction,
        tolerance=tolerance,
    )  # fmt: skip


def ratio(value: float | None, truth: float) -> float | None:
    return None if value is None else value / truth


def more(value: float, truth: float) -> str:
    """How much more than the truth, in percent."""
    return f"{100 * (value / truth - 1):.1f} %"


def times(value: float, truth: float) -> str:
    return f"{value / truth:.2f} times"
