"""What is shown for one mechanism and target, computed step by step; each step gives a fuller view."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpmf import api, validation
from dpmf.accountants.protocol import RELATIONS, Accountant, PreparedAccountant
from dpmf.accountants.registry import covering, least_of, resolve, suitable, with_options
from dpmf.attacks import tradeoff
from dpmf.batching import Poisson
from dpmf.designs.baseline import error_beside
from dpmf.lower_bounds import lower_delta, lower_noise_multiplier
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.web.request import Request
from dpmf.workloads import damped, prefix

# The order in which accountants are asked, so that numbers appear early.
_AT_ONCE = ("gaussian", "lattice", "cascade", "moments")  # within a second
_CHEAP_FIRST = (*_AT_ONCE, "own-bin", "renyi")
_DEAR_LAST = ("conditional",)
CURVE_POINTS = 9
HEAT_MAP_CELLS = 128
TRADEOFF_POINTS = 101
_MEMORY = 100.0  # iterations after which the model forgets, which predicts training well (docs/training.md)


def compared(mechanism: Mechanism) -> list[str]:
    """Return the accountants of a view: dpmf's own deterministic ones that suit the mechanism, the cheap ones first."""
    order = {name: i for i, name in enumerate((*_CHEAP_FIRST, "", *_DEAR_LAST))}
    names = [a.name for a in suitable(mechanism, "bound")] or [api.DEFAULT_ACCOUNTANT]
    return sorted(names, key=lambda name: order.get(name, order[""]))


@dataclass(frozen=True)
class Row:
    """The noise multiplier that one accountant asks for, or the reason why there is none."""

    accountant: str
    noise_multiplier: float | None = None
    binding: str = ""
    seconds: float = 0.0
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class View:
    """Everything that is shown. Numbers that are not computed yet are None or empty until the view is `complete`."""

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
    errors: tuple[tuple[str, float, float], ...] = ()  # workload, error, the same relative to DP-SGD's best batching
    gram: tuple[tuple[float, ...], ...] = ()
    batches: int = 0
    attacks: tuple[tuple[str, str], ...] = ()  # what any attack can achieve: names and values
    tradeoff: Mapping[str, tuple[float, ...]] | None = None  # type II errors at equally spaced type I errors
    done: int = 0
    steps: int = 1
    doing: str = ""
    complete: bool = False

    @property
    def best(self) -> Row | None:
        """The row with the smallest noise multiplier."""
        found = [row for row in self.rows if row.noise_multiplier is not None]
        return min(found, key=lambda row: row.noise_multiplier or math.inf) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> View:
        """Read what `to_dict` wrote."""
        changed = dict(values)
        changed["rows"] = tuple(Row(**row) for row in values["rows"])
        changed["epsilons"] = tuple(values["epsilons"])
        changed["lower_curve"] = tuple(values["lower_curve"])
        changed["errors"] = tuple((name, error, relative) for name, error, relative in values["errors"])
        changed["gram"] = tuple(tuple(row) for row in values["gram"])
        changed["attacks"] = tuple((name, value) for name, value in values["attacks"])
        changed["tradeoff"] = {way: tuple(curve) for way, curve in (values["tradeoff"] or {}).items()} or None
        changed["curves"] = {name: tuple(curve) for name, curve in (values["curves"] or {}).items()}
        return cls(**changed)


def views(
    mechanism: Mechanism,
    request: Request,
    accountants: Sequence[str] | None = None,
    time_budget: float | None = None,
    with_attacks: bool = False,
) -> Iterator[View]:
    """Compute fuller and fuller views; the last one is complete.

    Args:
      mechanism: what the view is about.
      request: the target and the options. Its noise multiplier is the one that the curves are drawn for, by default the
        smallest of the calibrated ones.
      accountants: names of the accountants that are compared, by default those of `compared`.
      time_budget: seconds for each calibration, as in `dpmf.calibrate`; a row notes when the time ran out.
      with_attacks: whether to add what any attack can achieve at the noise multiplier of the curves.

    **Formal guarantees.** Each noise multiplier is that of `dpmf.calibrate` and each curve that of `dpmf.profile`, with
    the accountant it is shown for; `lower` and `lower_curve` are those of `dpmf.lower_bounds`, `attacks` and `tradeoff`
    those of `dpmf.tradeoff` with the accountant that needs the least noise.
    """
    epsilon = validation.positive("epsilon", request.epsilon)
    delta = validation.probability("delta", request.delta)
    direction = validation.choice("direction", request.direction, RELATIONS)
    if request.noise_multiplier is not None:
        validation.positive("noise_multiplier", request.noise_multiplier)
    chosen = [resolve(name) for name in (compared(mechanism) if accountants is None else accountants)]
    order = {"max_order": request.max_order}
    chosen = [with_options(a, order) if a.name == "renyi" else a for a in chosen]
    view = View(
        mechanism=mechanism.name,
        epsilon=epsilon,
        delta=delta,
        direction=direction,
        rows=tuple(Row(a.name) for a in chosen),
        curves={},
        steps=3 + 2 * len(chosen),
        doing="Gram matrix",
    )
    yield view
    if not isinstance(mechanism.batching, Poisson):
        gram = mechanism.throw.gram
        view = replace(view, gram=_pooled(gram), batches=len(gram))
    prepared: dict[str, PreparedAccountant] = {}
    for accountant in chosen:
        # The lower bound shows how far any accountant could get, but takes seconds: what is there at once comes first.
        if view.lower is None and accountant.name not in _AT_ONCE:
            view = _next(view, "certified lower bound")
            yield view
            view = replace(view, lower=lower_noise_multiplier(mechanism, epsilon, delta, direction))
        view = _next(view, f"noise multiplier of {accountant.name}")
        yield view
        row = _calibrated(mechanism, accountant, prepared, request, time_budget)
        if row.problem and accountants is None:  # it does not apply, and nobody asked for it
            view = replace(view, rows=tuple(old for old in view.rows if old.accountant != row.accountant))
        else:
            view = _with_row(view, row)
    if view.lower is None:
        view = _next(view, "certified lower bound")
        yield view
        view = replace(view, lower=lower_noise_multiplier(mechanism, epsilon, delta, direction))
    sigma = request.noise_multiplier or (view.best.noise_multiplier if view.best else None)
    if sigma is None:
        yield replace(view, done=view.steps, doing="", complete=True)
        return
    if view.best is not None:
        view = replace(view, errors=_errors(mechanism, view.best.noise_multiplier or sigma, epsilon, delta))
    grid = tuple(float(e) for e in np.linspace(0.0, 2 * epsilon, CURVE_POINTS))
    view = _next(view, "lower bound of δ(ε)", curve_noise=sigma, epsilons=grid)
    view = replace(view, steps=view.done + 1 + len(prepared) + with_attacks)
    yield view
    view = replace(view, lower_curve=tuple(lower_delta(mechanism, sigma, e, direction) for e in grid))
    took = {row.accountant: row.seconds for row in view.rows}
    for name in sorted(prepared, key=lambda name: took[name]):
        view = _next(view, f"δ(ε) of {name}")
        yield view
        curve = api.profile(
            mechanism, noise_multiplier=sigma, epsilons=grid, accountant=prepared[name], direction=direction
        )
        view = replace(view, curves={**(view.curves or {}), name: tuple(float(d) for d in curve.deltas)})
    if with_attacks:
        view = _next(view, "what any attack can achieve")
        yield view
        # The accountant that needs the least noise, and closed forms, which cost nothing.
        close = {"gaussian", view.best.accountant if view.best else ""}
        bounds = [a for a in chosen if a.name in prepared and a.name in close] or [
            a for a in chosen if a.name in prepared
        ]
        view = _attacked(view, mechanism, sigma, bounds, with_renyi="renyi" in prepared)
    yield replace(view, done=view.steps, doing="", complete=True)


def _errors(
    mechanism: Mechanism, noise_multiplier: float, epsilon: float, delta: float
) -> tuple[tuple[str, float, float], ...]:
    """The noise in the model for two workloads; nothing for a matrix that is too large to be inverted."""
    found = []
    for workload in (prefix(), damped(_MEMORY)):
        try:
            beside = error_beside(mechanism, noise_multiplier, workload, epsilon, delta)
        except ValueError:  # a dense matrix of many iterations, or a target that DP-SGD cannot be calibrated to
            continue
        found.append((beside.workload, beside.error.root_mean_square, beside.relative))
    return tuple(found)


def _attacked(view: View, mechanism: Mechanism, sigma: float, bounds: Sequence[Accountant], with_renyi: bool) -> View:
    """The view with the certified trade-off curve, and with Rényi divergences if there are any."""
    found = tradeoff(
        mechanism, noise_multiplier=sigma, direction=view.direction, accountant=least_of(bounds), renyi=with_renyi
    )
    places = np.linspace(0.0, 1.0, TRADEOFF_POINTS)
    curves = {way: tuple(max(0.0, 1 - lines.least(float(a))) for a in places) for way, lines in found.lines.items()}
    return replace(view, attacks=tuple(found.rows()), tradeoff=curves)


def _next(view: View, doing: str, **changes: Any) -> View:
    return replace(view, done=view.done + 1, doing=doing, **changes)


def _with_row(view: View, row: Row) -> View:
    return replace(view, rows=tuple(row if old.accountant == row.accountant else old for old in view.rows))


def _calibrated(
    mechanism: Mechanism,
    accountant: Accountant,
    prepared: dict[str, PreparedAccountant],
    request: Request,
    time_budget: float | None,
) -> Row:
    """Calibrate one accountant; keep it in `prepared` if its bounds are guarantees."""
    began = time.perf_counter()
    try:
        ready = covering(accountant, mechanism).prepare(mechanism)
        if ready.kind == "bound":
            prepared[accountant.name] = ready
        found = api.calibrate(
            mechanism,
            target_epsilon=request.epsilon,
            target_delta=request.delta,
            accountant=ready,
            direction=request.direction,
            time_budget=time_budget,
        )
    except (ValueError, ImportError) as error:  # an unsuitable mechanism or target, or a missing package
        return Row(accountant.name, seconds=time.perf_counter() - began, problem=" ".join(str(error).split()))
    late = any(how.get("budget_exhausted") for how in found.details.values())
    return Row(
        accountant=accountant.name,
        noise_multiplier=found.noise_multiplier,
        binding=found.binding,
        seconds=time.perf_counter() - began,
        note="time ran out; this is the best bound found until then" if late else "",
    )


def _pooled(gram: Array) -> tuple[tuple[float, ...], ...]:
    """Return the Gram matrix, or the largest entry of each of 128 × 128 blocks if it is larger than that."""
    b = len(gram)
    cells = min(b, HEAT_MAP_CELLS)
    edges = np.arange(cells) * b // cells
    pooled = np.maximum.reduceat(np.maximum.reduceat(gram, edges, axis=0), edges, axis=1)
    return tuple(tuple(float(x) for x in row) for row in pooled)
