"""What is shown for one mechanism and target, computed step by step: each step gives a fuller view."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpmf import api, validation
from dpmf.accountants.protocol import RELATIONS, Accountant, PreparedAccountant, directions_of
from dpmf.accountants.registry import ACCOUNTANTS, resolve, with_options
from dpmf.lower_bounds import LowerBounds, lower_noise_multiplier
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array

# Those made of others, those that sample, and those by others are not compared here.
_LEFT_OUT = ("best", "auto", "monte-carlo", "random-allocation", "pld-accounting")
_CHEAP_FIRST = ("gaussian", "lattice", "renyi", "cascade")
_DEAR_LAST = ("conditional",)
CURVE_POINTS = 9
HEAT_MAP_CELLS = 128


def compared() -> tuple[str, ...]:
    """The accountants of a view: dpmf's own deterministic ones, the cheap ones first."""
    names = [name for name in ACCOUNTANTS if name not in _LEFT_OUT]
    order = {**{n: i for i, n in enumerate(_CHEAP_FIRST)}, **dict.fromkeys(_DEAR_LAST, 100)}
    return tuple(sorted(names, key=lambda name: order.get(name, 50)))


@dataclass(frozen=True)
class Row:
    """The noise multiplier one accountant asks for, or why there is none (yet)."""

    accountant: str
    noise_multiplier: float | None = None
    binding: str = ""
    seconds: float = 0.0
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class View:
    """All that is shown. Numbers that are not there yet are None or empty; `complete` says that nothing is missing."""

    mechanism: str
    epsilon: float
    delta: float
    direction: str
    rows: tuple[Row, ...]
    lower: float | None = None
    curve_noise: float | None = None
    epsilons: tuple[float, ...] = ()
    curves: Mapping[str, tuple[float, ...]] | None = None
    lower_curve: tuple[float, ...] = ()
    gram: tuple[tuple[float, ...], ...] = ()
    batches: int = 0
    done: int = 0
    steps: int = 1
    doing: str = ""
    complete: bool = False

    @property
    def best(self) -> Row | None:
        """The row with the smallest noise multiplier found."""
        found = [row for row in self.rows if row.noise_multiplier is not None]
        return min(found, key=lambda row: row.noise_multiplier or math.inf) if found else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> View:
        changed = dict(values)
        changed["rows"] = tuple(Row(**row) for row in values["rows"])
        changed["epsilons"] = tuple(values["epsilons"])
        changed["lower_curve"] = tuple(values["lower_curve"])
        changed["gram"] = tuple(tuple(row) for row in values["gram"])
        changed["curves"] = {name: tuple(curve) for name, curve in (values["curves"] or {}).items()}
        return cls(**changed)


def views(
    mechanism: Mechanism,
    epsilon: float,
    delta: float,
    direction: str = "both",
    *,
    accountants: Sequence[str] | None = None,
    max_order: int | None = None,
    noise_multiplier: float | None = None,
    time_budget: float | None = None,
) -> Iterator[View]:
    """Fuller and fuller views; the last one is complete.

    `noise_multiplier` is the one the curves are drawn for: the smallest of the calibrated ones unless given.
    `time_budget` is for each calibration, as in `dpmf.calibrate`; a row says where it ran out.

    **Formal guarantees.** Each noise multiplier is that of `dpmf.calibrate` and each curve that of `dpmf.profile`, with
    the accountant it is shown for; `lower` and `lower_curve` are those of `dpmf.lower_bounds`.
    """
    epsilon = validation.positive("epsilon", epsilon)
    delta = validation.probability("delta", delta)
    validation.choice("direction", direction, RELATIONS)
    if noise_multiplier is not None:
        validation.positive("noise_multiplier", noise_multiplier)
    chosen = [_with_order(resolve(name), max_order) for name in (compared() if accountants is None else accountants)]
    view = View(mechanism.name, epsilon, delta, direction, tuple(Row(a.name) for a in chosen), curves={})
    view = replace(view, steps=3 + 2 * len(chosen), doing="Gram matrix")
    yield view
    gram = mechanism.gram
    view = _next(view, "certified lower bound", gram=_pooled(gram), batches=len(gram))
    yield view
    # Found first: cheap, and it tells what any accountant can hope for.
    view = replace(view, lower=lower_noise_multiplier(mechanism, epsilon, delta, direction))
    prepared: dict[str, PreparedAccountant] = {}
    for accountant in chosen:
        view = _next(view, f"noise multiplier of {accountant.name}")
        yield view
        view = _with_row(view, _calibrated(mechanism, accountant, prepared, (epsilon, delta), direction, time_budget))
    best = view.best
    sigma = noise_multiplier if noise_multiplier is not None else best.noise_multiplier if best else None
    if sigma is None:
        yield replace(view, done=view.steps, doing="", complete=True)
        return
    grid = tuple(float(e) for e in np.linspace(0.0, 2 * epsilon, CURVE_POINTS))
    view = _next(view, "lower bound of δ(ε)", curve_noise=sigma, epsilons=grid)
    view = replace(view, steps=view.done + 1 + len(prepared))
    yield view
    bounds = LowerBounds.of(mechanism)
    ways = directions_of(direction)
    view = replace(view, lower_curve=tuple(max(bounds.delta(sigma, e, way) for way in ways) for e in grid))
    took = {row.accountant: row.seconds for row in view.rows}
    for name in sorted(prepared, key=lambda name: took[name]):
        view = _next(view, f"δ(ε) of {name}")
        yield view
        curve = api.profile(
            mechanism, noise_multiplier=sigma, epsilons=grid, accountant=prepared[name], direction=direction
        )
        view = replace(view, curves={**(view.curves or {}), name: tuple(float(d) for d in curve.deltas)})
    yield replace(view, done=view.steps, doing="", complete=True)


def _with_order(accountant: Accountant, max_order: int | None) -> Accountant:
    return with_options(accountant, {"max_order": max_order}) if accountant.name == "renyi" else accountant


def _next(view: View, doing: str, **changes: Any) -> View:
    return replace(view, done=view.done + 1, doing=doing, **changes)


def _with_row(view: View, row: Row) -> View:
    return replace(view, rows=tuple(row if old.accountant == row.accountant else old for old in view.rows))


def _calibrated(
    mechanism: Mechanism,
    accountant: Accountant,
    prepared: dict[str, PreparedAccountant],
    target: tuple[float, float],
    direction: str,
    time_budget: float | None,
) -> Row:
    began = time.perf_counter()
    try:
        ready = accountant.prepare(mechanism)
        if ready.kind == "bound":
            prepared[accountant.name] = ready
        found = api.calibrate(
            mechanism,
            target_epsilon=target[0],
            target_delta=target[1],
            accountant=ready,
            direction=direction,
            time_budget=time_budget,
        )
    except (ValueError, ImportError) as error:  # correlated noise, a target out of reach, a package that is not there
        return Row(accountant.name, seconds=time.perf_counter() - began, problem=" ".join(str(error).split()))
    seconds = time.perf_counter() - began
    late = any(how.get("budget_exhausted") for how in found.details.values())
    note = "time ran out: the best bound by then" if late else ""
    return Row(accountant.name, found.noise_multiplier, found.binding, seconds, note=note)


def _pooled(gram: Array) -> tuple[tuple[float, ...], ...]:
    """The Gram matrix, or the largest entry of each of 128 × 128 blocks where it is larger than that."""
    b = len(gram)
    cells = min(b, HEAT_MAP_CELLS)
    edges = np.arange(cells) * b // cells
    pooled = np.maximum.reduceat(np.maximum.reduceat(gram, edges, axis=0), edges, axis=1)
    return tuple(tuple(float(x) for x in row) for row in pooled)
