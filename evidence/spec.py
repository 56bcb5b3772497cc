"""The vocabulary of figures: small immutable values that say what is computed and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import dpmf
from dpmf.accountants import ACCOUNTANTS, Accountant, Best
from dpmf.batching import build

TITLES = {
    "dpsgd": "DP-SGD",
    "bsr": "BSR",
    "bisr": "BISR",
    "bandmf": "BandMF",
    "bandinvmf": "BandInvMF",
    "blt": "BLT",
    "power": "(1 − λx)^(−a)",
    "coefficients": "coefficients",
    "exponentials": "mean of exponentials",
}


@dataclass(frozen=True)
class MechanismSpec:
    """A strategy by name, and the batches it is run on."""

    strategy: str
    epochs: int
    batches: int
    bandwidth: int | None = None
    batching: str = "fixed"
    decay: float | None = None  # λ and a of "power"
    exponent: float | None = None
    coefficients: tuple[float, ...] = ()  # of "coefficients"
    decays: tuple[float, ...] = ()  # of "exponentials", the mean of their powers

    @property
    def slug(self) -> str:
        """As people type it: ``bsr4 N=100 k=1``."""
        how = "" if self.batching == "fixed" else f" {self.batching}"
        name = f"{self.strategy}{self.bandwidth or ''}" + (f"({self.decay:g}, {self.exponent:g})" if self.decay else "")
        return f"{name} N={self.epochs * self.batches} k={self.epochs}{how}"

    @property
    def title(self) -> str:
        band = f", p = {self.bandwidth}" if self.bandwidth else ""
        return f"{TITLES[self.strategy]}, N = {self.epochs * self.batches}, k = {self.epochs}{band}"

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {"strategy": self.strategy, "epochs": self.epochs, "batches": self.batches}
        found |= {"bandwidth": self.bandwidth} if self.bandwidth else {}
        found |= {"decay": self.decay, "exponent": self.exponent} if self.decay else {}
        found |= {"coefficients": list(self.coefficients)} if self.coefficients else {}
        found |= {"decays": list(self.decays)} if self.decays else {}
        return found | ({"batching": self.batching} if self.batching != "fixed" else {})


def mechanism_of(plain: Mapping[str, Any]) -> dpmf.Mechanism:
    """The mechanism that a cell's parameters name."""
    if plain["strategy"] == "coefficients":
        strategy: dpmf.strategies.Strategy = dpmf.strategies.coefficients(plain["coefficients"])
    elif plain["strategy"] == "exponentials":
        places = np.arange(plain["epochs"] * plain["batches"])
        strategy = dpmf.strategies.coefficients(np.mean([decay**places for decay in plain["decays"]], axis=0))
    else:
        options: dict[str, Any] = {name: plain.get(name) for name in ("bandwidth", "decay", "exponent")}
        strategy = dpmf.strategies.build(plain["strategy"], **options)
    width = plain.get("bandwidth") or 1
    kind = plain.get("batching", "fixed")
    return dpmf.Mechanism(strategy, build(kind, plain["epochs"], plain["batches"], bandwidth=width))


@dataclass(frozen=True)
class AccountantSpec:
    """An accountant by name, with options; `members` makes it the best of these (then its name is "best")."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    members: tuple[AccountantSpec, ...] = ()

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name}
        if self.options:
            found["options"] = {key: list(v) if isinstance(v, tuple) else v for key, v in self.options}
        if self.members:
            found["members"] = [member.plain() for member in self.members]
        return found


def accountant(name: str, **options: Any) -> AccountantSpec:
    return AccountantSpec(name, tuple(sorted(options.items())))


def accountant_of(plain: Mapping[str, Any]) -> Accountant:
    """The accountant that a cell's parameters name. "inf" is how JSON spells an infinite temperature."""
    if "members" in plain:
        return Best(accountants=tuple(accountant_of(member) for member in plain["members"]))
    options = {
        key: [float(t) for t in value] if isinstance(value, list) else value
        for key, value in plain.get("options", {}).items()
    }
    return ACCOUNTANTS[plain["name"]](**options)


@dataclass(frozen=True)
class Cell:
    """One number (or small table) to compute: a quantity and all of its parameters, as canonical JSON."""

    quantity: str
    text: str

    @classmethod
    def of(cls, quantity: str, **parameters: Any) -> Cell:
        plain = {k: v.plain() if hasattr(v, "plain") else v for k, v in parameters.items()}
        return cls(quantity, json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False))

    @property
    def parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def name(self) -> str:
        """One line for people, and what ``--only`` looks into: ``sigma bsr4 N=100 k=1 renyi epsilon=1 delta=1e-05``."""
        parts = [self.quantity]
        for key, value in self.parameters.items():
            if key == "mechanism" and isinstance(value, dict):
                parts.insert(1, MechanismSpec(**value).slug)
            elif key == "accountant":
                parts.append(_accountant_name(value) if isinstance(value, dict) else value)
            else:
                parts.append(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}")
        return " ".join(parts)


def _accountant_name(plain: Mapping[str, Any]) -> str:
    if "members" in plain:
        return "+".join(_accountant_name(member) for member in plain["members"])
    options = ",".join(
        f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in plain.get("options", {}).items()
    )
    return str(plain["name"]) + (f"({options})" if options else "")


@dataclass(frozen=True)
class Line:
    """One line of a panel: for each cell an x and a y, each a number or the name of a field of the cell's result.

    `look` names the style (see `draw`), the same for the same thing in every figure. With `over`, y is divided by the
    same field of that cell.
    """

    label: str
    look: str
    cells: tuple[Cell, ...]
    x: str | tuple[float, ...]
    y: str
    over: Cell | None = None

    def all_cells(self) -> tuple[Cell, ...]:
        return self.cells if self.over is None else (*self.cells, self.over)

    def points(self, results: Mapping[Cell, Mapping[str, Any]]) -> list[tuple[float, float]]:
        """The (x, y) there are: a cell that is missing, or has no number there, is left out."""
        divisor: Any = 1.0
        if self.over is not None:
            if self.over not in results:
                return []
            divisor = results[self.over][self.y]
        found: list[tuple[float, float]] = []
        for i, cell in enumerate(self.cells):
            if cell not in results:
                continue
            result = results[cell]
            xs: Any = result[self.x] if isinstance(self.x, str) else self.x[i]
            ys = result[self.y]
            many = isinstance(ys, list)
            over = divisor if isinstance(divisor, list) else [divisor] * (len(ys) if many else 1)
            triples = zip(xs, ys, over, strict=True) if many else [(xs, ys, divisor)]
            found += [(x, y / d) for x, y, d in triples if x is not None and y is not None]
        return sorted(found)


@dataclass(frozen=True)
class Panel:
    """Lines on shared axes; `kind` is "lines", "image" (one cell, its field "image") or "histogram"."""

    title: str
    lines: tuple[Line, ...]
    x_label: str = "ε"
    y_label: str = "noise multiplier σ"
    log: str = "xy"
    kind: str = "lines"
    x_ticks: tuple[float, ...] = ()
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class FigureSpec:
    """A figure: its panels, and where the paper has it. `shape` is (rows, columns)."""

    name: str
    title: str
    paper: str
    panels: tuple[Panel, ...]
    shape: tuple[int, int]
    share_y: bool = False

    def cells(self) -> Iterator[Cell]:
        """Its cells, each once."""
        yield from dict.fromkeys(cell for panel in self.panels for line in panel.lines for cell in line.all_cells())
