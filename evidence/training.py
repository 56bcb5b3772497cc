"""docs/training.md: is every noise multiplier that runs were trained with proved by the code there is now?

The runs on CIFAR-10 and on digits take a GPU or hours, and did not record their code. What a guarantee needs of the
code is that it proves the noise multiplier: more noise than needed keeps the guarantee. So each cell here is one
mechanism that was trained, with the σ of its runs beside the σ that is proved for it now.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evidence.say import bound, table
from evidence.spec import AccountantSpec, Cell, MechanismSpec, accountant

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
MECHANISMS, RUNS = DATA / "cifar10-study-mechanisms.json", DATA / "cifar10-study-runs.csv"
FIRST = DATA / "cifar10-results.csv"
# Of the first table; its Monte Carlo σ are estimates, and nothing is claimed about them.
EPOCHS, BATCHES, DELTA = 10, 97, 1e-5
STRATEGIES: dict[str, tuple[str, int | None]] = {"dpsgd": ("dpsgd", None), "bsr4": ("bsr", 4), "bisr4": ("bisr", 4)}
PROVED = ("best", "renyi")
TITLES = {
    "main": "CIFAR-10, 10 epochs of 97",
    "second": "CIFAR-10, 5 epochs of 194",
    "digits": "digits",
    "accountants": "what the accountant is worth",
}
Results = Mapping[Cell, Mapping[str, Any]]


@dataclass(frozen=True)
class Trained:
    """A mechanism that was trained at an ε. Nothing is claimed of a σ that the page calls an estimate."""

    setting: str
    name: str
    cell: Cell
    claimed: bool

    def holds(self, result: Mapping[str, Any]) -> bool:
        """Whether the code that made the result proves what the page says of the runs."""
        return bool(result["holds"]) or not self.claimed


def _study(found: Mapping[str, Any]) -> Trained:
    """Of a mechanism in the study's file."""
    setting, name, kind, b = found["setting"], found["name"], found["batching"], found["batches"]
    known = STRATEGIES | {"bisr16": ("bisr", 16)}
    strategy, width = known.get(name.partition("-")[0], ("coefficients", None))
    given = tuple(found["coefficients"]) if strategy == "coefficients" else ()
    more, by = {}, accountant("best")
    if period := found.get("period"):
        kind, width = "cyclic-poisson", period
        if b % period:  # our own batching asks for a divisor
            kind, by, more = "poisson", AccountantSpec("dp_accounting"), {"period": period}
    mechanism = MechanismSpec(strategy, found["epochs"], b, width, kind, coefficients=given)
    cell = Cell.of("trained", setting=setting, name=name, mechanism=mechanism, accountant=by, epsilon=found["epsilon"],
                   delta=found["delta"], sigma=found["sigma"], **more)  # fmt: skip
    return Trained(setting, name, cell, not found["sigma_from"].startswith("sampled"))


def _first(strategy: str, by: str, epsilon: float, sigma: float) -> Trained:
    """Of the first table."""
    name, width = STRATEGIES[strategy]
    mechanism = MechanismSpec(name, EPOCHS, BATCHES, width)
    cell = Cell.of("trained", setting="accountants", name=strategy, mechanism=mechanism, accountant=accountant(by),
                   epsilon=epsilon, delta=DELTA, sigma=sigma)  # fmt: skip
    return Trained("accountants", strategy, cell, claimed=True)


@cache
def everything(full: bool = False) -> tuple[Trained, ...]:
    """What was trained; with `full` also the mechanisms of the study's file without any runs."""
    with RUNS.open() as file:
        trained = {(row["setting"].partition("/")[0], row["mechanism"], float(row["epsilon"])) for row in
                   csv.DictReader(file)}  # fmt: skip
    with FIRST.open() as file:
        first = {(row["strategy"], row["accountant"], float(row["epsilon"]), float(row["sigma"])) for row in
                 csv.DictReader(file) if row["accountant"] in PROVED}  # fmt: skip
    study = [_study(found) for found in json.loads(MECHANISMS.read_text(encoding="utf-8"))
             if full or (found["setting"], found["name"], found["epsilon"]) in trained]  # fmt: skip
    return (*study, *(_first(*row) for row in sorted(first)))


def cells(full: bool = False) -> list[Cell]:
    return [row.cell for row in everything(full)]


def tabulated(results: Results) -> str:
    """By setting, how many σ are proved and by how much they differ; then each one that is not."""
    lines, told = [], []
    for setting, title in TITLES.items():
        rows = [row for row in everything() if row.setting == setting]
        there = [(row, results[row.cell]) for row in rows if row.cell in results]
        gains = [100 * (found["sigma"] / found["trained"] - 1) for _, found in there if found["sigma"] is not None]
        between = f"{_percent(min(gains))} to {_percent(max(gains))}" if gains else ""
        proved = sum(found["holds"] for _, found in there)
        unclaimed = sum(not row.claimed for row in rows)
        lines.append([title, str(len(rows)), str(len(there)), str(proved), str(unclaimed), between])
        told += [_told(row, found) for row, found in there if not found["holds"]]
    head = [
        "runs",
        "mechanisms and ε",
        "computed",
        "σ of the runs is proved",
        "estimates",
        "σ proved now, beside theirs",
    ]
    return "\n".join([table(head, lines), *(["", *told] if told else [])])


def _percent(value: float) -> str:
    return f"{value:+.2f} %"


def _told(row: Trained, found: Mapping[str, Any]) -> str:
    asked = row.cell.parameters
    what = f"{TITLES[row.setting]}, {row.name}, ε = {asked['epsilon']:g}"
    claim = "" if row.claimed else " (an estimate)"
    return (
        f"* {what}: trained with σ = {found['trained']:g}{claim}, at which ε = {bound(found['epsilon'])} is proved; "
        f"proved for the ε asked for is σ = {bound(found['sigma'], 6)}."
    )


def held(rows: Iterable[Trained], results: Results) -> int:
    """How many of them are proved by what made the results, as far as the page claims it."""
    return sum(row.cell in results and row.holds(results[row.cell]) for row in rows)
