"""What the page can be asked for: the fields, their limits, and words for whatever is wrong with what was typed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dpmf import errors, validation
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism

STRATEGIES = ("dpsgd", "bsr", "bisr", "bandmf", "bandinvmf", "blt", "coefficients")
BANDED = ("bsr", "bisr", "bandmf", "bandinvmf")
_OPTIMISED_BY_JAX = ("bandmf", "blt")
DIRECTIONS = ("both", "remove", "add")

# No setting within these takes more memory than a worker is allowed; time has a limit of its own.
MOST_EPOCHS = 1000
MOST_BATCHES = 2000
MOST_ITERATIONS = 100_000
MOST_BANDWIDTH = 1024
MOST_BUFFERS = 15
MOST_COEFFICIENTS = 2000
MOST_ORDER = 512
LONGEST_TEXT = 50_000
EPSILONS = (0.01, 50.0)
DELTAS = (1e-15, 0.5)
NOISE = (1e-3, 1e6)

_SEPARATOR = re.compile(r"[\s,;]+")
_INTEGER = re.compile(r"[+-]?\d{1,15}")


@dataclass(frozen=True)
class Request:
    """One setting of the page; every field is within its limits."""

    strategy: str
    epochs: int
    batches_per_epoch: int
    epsilon: float
    delta: float
    bandwidth: int | None = None
    buffers: int | None = None
    coefficients: tuple[float, ...] = ()
    direction: str = "both"
    max_order: int | None = None
    noise_multiplier: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Request:
        return cls(**{**values, "coefficients": tuple(values.get("coefficients", ()))})

    def mechanism(self) -> Mechanism:
        from dpmf import strategies

        chosen = strategies.build(
            self.strategy, bandwidth=self.bandwidth, buffers=self.buffers, file=self.coefficients or None
        )
        return Mechanism(chosen, BallsInBins(self.epochs, self.batches_per_epoch))


def parse(fields: Mapping[str, str]) -> tuple[Request | None, dict[str, str]]:
    """The request that was typed, or None and what is wrong, by field. Fields that do not apply are not looked at."""
    problems: dict[str, str] = {}
    values: dict[str, Any] = {}

    def take(name: str, read: Callable[[str, str], Any]) -> None:
        text = str(fields.get(name, "")).strip()
        try:
            values[name] = read(name, text)
        except ValueError as error:
            problems[name] = str(error)

    take("strategy", lambda name, text: validation.choice(name, text, STRATEGIES))
    strategy = values.get("strategy")
    if strategy in BANDED:
        take("bandwidth", _integer(1, MOST_BANDWIDTH))
    if strategy == "blt":
        take("buffers", _optional(_integer(1, MOST_BUFFERS)))
    if strategy == "coefficients":
        take("coefficients", _coefficients)
    take("epochs", _integer(1, MOST_EPOCHS))
    take("batches_per_epoch", _integer(1, MOST_BATCHES))
    take("epsilon", _real(*EPSILONS))
    take("delta", _real(*DELTAS))
    take("direction", lambda name, text: validation.choice(name, text or "both", DIRECTIONS))
    take("max_order", _optional(_integer(2, MOST_ORDER)))
    take("noise_multiplier", _optional(_real(*NOISE)))
    if "epochs" in values and "batches_per_epoch" in values:
        iterations = values["epochs"] * values["batches_per_epoch"]
        if iterations > MOST_ITERATIONS:
            problems["epochs"] = (
                f"epochs × batches must be at most {MOST_ITERATIONS} on this page, got {iterations}; "
                "the command line has no such limit"
            )
    if problems:
        return None, problems
    request = Request(**values)
    if strategy in _OPTIMISED_BY_JAX and importlib.util.find_spec("jax_privacy") is None:
        return None, {"strategy": str(errors.missing_extra("jax-privacy", "jax", f"the optimiser of {strategy}"))}
    try:
        request.mechanism()
    except ValueError as error:
        return None, {"coefficients" if strategy == "coefficients" else "strategy": str(error)}
    return request, {}


def _integer(least: int, most: int) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {_shown(text)}")
        if not least <= int(text) <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {_shown(text)}")
        return int(text)

    return read


def _real(least: float, most: float) -> Callable[[str, str], float]:
    def read(name: str, text: str) -> float:
        number = _number(text)
        if number is None:
            raise ValueError(f"{name} must be a number such as 2 or 1e-5, got {_shown(text)}")
        if not least <= number <= most:  # NaN is not
            raise ValueError(f"{name} must be from {least:g} to {most:g}, got {_shown(text)}")
        return number

    return read


def _optional(read: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    return lambda name, text: read(name, text) if text else None


def _coefficients(name: str, text: str) -> tuple[float, ...]:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{name} must be at most {LONGEST_TEXT} characters, got {len(text)}")
    words = [word for word in _SEPARATOR.split(text) if word]
    if not words:
        raise ValueError(f"{name} must be numbers separated by commas or blanks, got nothing")
    if len(words) > MOST_COEFFICIENTS:
        raise ValueError(f"{name} must be at most {MOST_COEFFICIENTS} numbers, got {len(words)}")
    numbers = []
    for word in words:
        number = _number(word)
        if number is None:
            raise ValueError(f"{name} must be numbers separated by commas or blanks, got {_shown(word)}")
        if not 0 <= number <= 1e6:
            raise ValueError(f"{name} must be from 0 to 1e6, got {_shown(word)}")
        numbers.append(number)
    return tuple(numbers)


def _number(text: str) -> float | None:
    if "_" in text:  # Python reads 1_0 as ten
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _shown(text: str) -> str:
    if not text:
        return "nothing"
    return repr(text if len(text) <= 40 else text[:37] + "...")
