"""What accountants answer with: frozen values that print well and go to JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np


def _plain(value: Any) -> Any:
    """The JSON form of a field: numpy scalars become Python numbers, infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _frozen(details: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({k: _frozen(v) if isinstance(v, Mapping) else v for k, v in details.items()})


def _thawed(value: Any) -> Any:
    return {k: _thawed(v) for k, v in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class _Answer:
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

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain Python values, ready for JSON."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    def __reduce__(self) -> tuple[Any, ...]:  # a mappingproxy does not pickle
        values = [getattr(self, item.name) for item in fields(self)]
        return type(self), tuple(_thawed(v) for v in values)

    def __hash__(self) -> int:
        return hash((self.noise_multiplier, self.epsilon, self.delta, self.direction, self.accountant))

    def _numbers(self) -> str:
        return f"({self.epsilon:.6g}, {self.delta:.6g})-DP at noise multiplier {self.noise_multiplier:.6g}"


@dataclass(frozen=True)
class PrivacyBound(_Answer):
    """The mechanism run with `noise_multiplier` is (`epsilon`, `delta`)-DP, says `accountant`.

    Attributes:
      noise_multiplier: σ for clipping norm 1 and the strategy as given (not column-normalised).
      epsilon: the ε of the guarantee.
      delta: an upper bound on δ(ε).
      direction: the neighbouring relation covered: "remove", "add" or "both".
      binding: the direction that determined the numbers.
      accountant: the name of the accountant that proved the bound.
      details: how the bound came about (orders, bandwidths, ...), for the curious.
      lower: a certified lower bound on the quantity that was asked for, where one is known.
    """

    __hash__ = _Answer.__hash__

    def __str__(self) -> str:
        return f"{self._numbers()} [{self.accountant}, {self.direction}, binding: {self.binding}]"


@dataclass(frozen=True)
class Calibration(PrivacyBound):
    """The smallest noise multiplier found whose bound meets the target.

    `epsilon` is the target ε and `delta` ≤ `target_delta` is the bound on δ(ε) evaluated *at* `noise_multiplier`:
    the number returned was itself checked, it is not an extrapolated root.
    """

    target_epsilon: float = math.nan
    target_delta: float = math.nan

    __hash__ = _Answer.__hash__


@dataclass(frozen=True)
class Estimate(_Answer):
    """An estimate, by sampling, of what a `PrivacyBound` would guarantee. It guarantees nothing by itself.

    `kind` says what it is: an estimate, or a bound that fails with some probability. Its fields are a `PrivacyBound`'s.
    """

    kind: str = "estimate"

    __hash__ = _Answer.__hash__

    def __str__(self) -> str:
        return f"{self.kind}: {self._numbers()} [{self.accountant}, {self.direction}, binding: {self.binding}]"


@dataclass(frozen=True)
class CalibrationEstimate(Estimate):
    """The smallest noise multiplier found whose *estimate* meets the target."""

    target_epsilon: float = math.nan
    target_delta: float = math.nan

    __hash__ = _Answer.__hash__


@dataclass(frozen=True, eq=False)
class PrivacyProfile:
    """δ(ε) over a grid of ε, one array per direction covered, and their maximum in `deltas`.

    `kind` is "bound" for upper bounds; otherwise it says what the numbers are instead. `lower` holds certified lower
    bounds where they were asked for; `budget_exhausted` says that a budget ended before every point was done.
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

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain Python values, ready for JSON."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}
