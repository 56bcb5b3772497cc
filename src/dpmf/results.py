"""The answers: frozen values that print well, hold full doubles, and can be written as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from dpmf.formatting import given, lower, upper


def _plain(value: Any) -> Any:
    """Return the JSON form of a field: numpy scalars become Python numbers, infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _frozen(value: Any) -> Any:
    return MappingProxyType({k: _frozen(v) for k, v in value.items()}) if isinstance(value, Mapping) else value


def _thawed(value: Any) -> Any:
    return {k: _thawed(v) for k, v in value.items()} if isinstance(value, Mapping) else value


class _Result:
    """What all results have in common."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class _Answer(_Result):
    """What bounds and estimates have in common."""

    noise_multiplier: float
    epsilon: float
    delta: float
    direction: str
    binding: str
    accountant: str
    details: Mapping[str, Any] = field(default_factory=dict)
    lower: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", _frozen(self.details))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "details": _thawed(self.details)}  # a read-only mapping cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, details=_frozen(state["details"]))

    def __hash__(self) -> int:
        return hash((self.noise_multiplier, self.epsilon, self.delta, self.direction, self.accountant))

    def __str__(self) -> str:
        calibrated = isinstance(self, Calibration | CalibrationEstimate)
        sigma = (upper if calibrated else given)(self.noise_multiplier)
        kind = f"{self.kind}: " if isinstance(self, Estimate) else ""
        below = "" if self.lower is None else f", lower bound {lower(self.lower)}"
        step = self.details.get(self.binding, {}).get("ex_post")
        stopped = "" if step is None else f" for those who stop after step {step} (ex post)"
        return (
            f"{kind}({upper(self.epsilon)}, {upper(self.delta)})-DP{stopped} at noise multiplier {sigma}{below} "
            f"[{self.accountant}, {self.direction}, binding: {self.binding}]"
        )


@dataclass(frozen=True, kw_only=True)
class PrivacyBound(_Answer):
    """The mechanism run with `noise_multiplier` is (`epsilon`, `delta`)-DP, as proved by `accountant`.

    Printed numbers are rounded to the safe side (see `dpmf.formatting`); the fields are full doubles.

    Attributes:
      noise_multiplier: σ for clipping norm 1 and the strategy as given (not column-normalised).
      epsilon: the ε of the guarantee.
      delta: an upper bound on δ(ε).
      direction: the neighbouring relation covered: "remove", "add" or "both".
      binding: the direction that determined the numbers.
      accountant: the name of the accountant that proved the bound.
      details: how the bound came about in each direction (order, bandwidth, ...).
      lower: a certified lower bound on the quantity that was asked for, where one is known.
    """

    __hash__ = _Answer.__hash__


@dataclass(frozen=True, kw_only=True)
class Calibration(PrivacyBound):
    """The smallest noise multiplier found whose bound meets the target.

    `epsilon` is the target ε and `delta` ≤ `target_delta` is the bound on δ(ε) evaluated *at* `noise_multiplier`:
    the number returned was itself checked, it is not an extrapolated root.
    """

    target_epsilon: float
    target_delta: float

    __hash__ = _Answer.__hash__


@dataclass(frozen=True, kw_only=True)
class Estimate(_Answer):
    """An estimate, by sampling, of what a `PrivacyBound` would guarantee. It guarantees nothing by itself.

    `kind` says whether it is an estimate or a bound that fails with some probability. The other fields are those of a
    `PrivacyBound`.
    """

    kind: str = "estimate"

    __hash__ = _Answer.__hash__


@dataclass(frozen=True, kw_only=True)
class CalibrationEstimate(Estimate):
    """The smallest noise multiplier found whose *estimate* meets the target."""

    target_epsilon: float
    target_delta: float

    __hash__ = _Answer.__hash__


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PrivacyProfile(_Result):
    """Upper bounds on δ(ε) over a grid of ε.

    Attributes:
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      epsilons: the grid.
      deltas: the bounds for all directions covered: the maximum over `by_direction`.
      by_direction: the bounds for each direction. Where both are covered, that of removing a record stands for both:
        ask for the other one alone to know it better, which is never larger.
      direction: the neighbouring relation covered: "remove", "add" or "both".
      accountant: the name of the accountant.
      kind: "bound" for upper bounds; otherwise it says what the numbers are instead.
      lower: certified lower bounds on δ(ε), where they were asked for.
      budget_exhausted: whether a budget ended before every point was done.
    """

    noise_multiplier: float
    epsilons: np.ndarray
    deltas: np.ndarray
    by_direction: Mapping[str, np.ndarray]
    direction: str
    accountant: str
    kind: str = "bound"
    lower: np.ndarray | None = None
    budget_exhausted: bool = False

    def __post_init__(self) -> None:
        for array in (self.epsilons, self.deltas, *self.by_direction.values(), self.lower):
            if array is not None:
                array.setflags(write=False)

    def __repr__(self) -> str:
        sigma, sign = given(self.noise_multiplier), "≤" if "bound" in self.kind else "≈"
        lines = [f"δ(ε) at noise multiplier {sigma} ({self.kind}) [{self.accountant}, {self.direction}]"]
        for i, (epsilon, delta) in enumerate(zip(self.epsilons, self.deltas, strict=True)):
            below = "" if self.lower is None else f", lower bound {lower(self.lower[i])}"
            lines.append(f"  δ({given(epsilon)}) {sign} {upper(delta)}{below}")
        return "\n".join(lines)
