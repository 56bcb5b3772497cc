"""What a user can ask of a view: the fields, their limits, and messages for what was typed wrongly."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dpmf import errors, validation
from dpmf.batching import NAMES, Batching, build
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Strategy

# The strategies of the page. It reads no files, so `matrix` is not among them.
STRATEGIES = ("dpsgd", "bsr", "bisr", "bandmf", "bandinvmf", "blt", "coefficients")
BANDED = ("bsr", "bisr", "bandmf", "bandinvmf")
_OPTIMISED_BY_JAX = ("bandmf", "blt")
DIRECTIONS = ("both", "remove", "add")

# No setting within these limits takes more memory than a worker is allowed to use; time has a limit of its own.
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
    """A mechanism, a target and the options of a view, in the words of the command line."""

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
    iterations: int | None = None
    file: str | None = None
    normalized: bool = False
    batching: str = "fixed"
    rethrow_every: int | None = None
    stride: int | None = None
    gap: int | None = None
    decay: float | None = None
    exponent: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Request:
        """Read what `to_dict` wrote."""
        return cls(**{**values, "coefficients": tuple(values.get("coefficients", ()))})

    def mechanism(self) -> Mechanism:
        """Build the mechanism."""
        return Mechanism(self._strategy(), self.batches())

    def batches(self) -> Batching:
        """Build the batching."""
        cyclic = self.batching.startswith("cyclic") and self.stride is None
        width = self._strategy().bandwidth(self.batches_per_epoch) if cyclic else 1
        return build(
            self.batching, self.epochs, self.batches_per_epoch, bandwidth=width, iterations=self.iterations,
            rethrow_every=self.rethrow_every, stride=self.stride, gap=self.gap,
        )  # fmt: skip

    def _strategy(self) -> Strategy:
        from dpmf import strategies

        return strategies.build(
            self.strategy,
            bandwidth=self.bandwidth,
            buffers=self.buffers,
            file=self.coefficients or self.file,
            decay=self.decay,
            exponent=self.exponent,
            normalized=self.normalized,
        )


def parse(fields: Mapping[str, str]) -> tuple[Request | None, dict[str, str]]:
    """Check what was typed. Fields that do not apply to the strategy are ignored.

    Args:
      fields: the text of each field of the page, by name.

    Returns:
      The request and no messages, or None and a message for each field that is wrong.
    """
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
        take("bandwidth", number(1, MOST_BANDWIDTH, whole=True))
    if strategy == "blt":
        take("buffers", optional(number(1, MOST_BUFFERS, whole=True)))
    if strategy == "coefficients":
        take("coefficients", _coefficients)
    take("epochs", number(1, MOST_EPOCHS, whole=True))
    take("batches_per_epoch", number(1, MOST_BATCHES, whole=True))
    take("batching", lambda name, text: validation.choice(name, text or "fixed", NAMES))
    kind = values.get("batching")
    if kind in ("reshuffled", "cyclic"):
        take("rethrow_every", optional(number(1, MOST_EPOCHS, whole=True)))
    if kind in ("reshuffled", "cyclic", "cyclic-poisson"):
        take("stride", optional(number(1, MOST_BATCHES, whole=True)))
    take("epsilon", number(*EPSILONS))
    take("delta", number(*DELTAS))
    take("direction", lambda name, text: validation.choice(name, text or "both", DIRECTIONS))
    take("max_order", optional(number(2, MOST_ORDER, whole=True)))
    take("noise_multiplier", optional(number(*NOISE)))
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
        field = getattr(error, "argument", "")
        rest = "coefficients" if strategy == "coefficients" else "strategy"
        return None, {field if field in ("batching", "rethrow_every", "stride") else rest: str(error)}
    return request, {}


def number(least: float, most: float, whole: bool = False) -> Callable[[str, str], Any]:
    """Return a function that reads a number between two limits."""
    kind = f"a whole number from {least:g} to {most:g}" if whole else "a number such as 2 or 1e-5"

    def read(name: str, text: str) -> float:
        number = _real(text) if not whole else int(text) if _INTEGER.fullmatch(text) else None
        if number is None:
            raise ArgumentError(name, f"must be {kind}, got {_shown(text)}")
        if not least <= number <= most:  # this refuses NaN, too
            raise ArgumentError(name, f"must be from {least:g} to {most:g}, got {_shown(text)}")
        return number

    return read


def optional(read: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    return lambda name, text: read(name, text) if text else None


def _coefficients(name: str, text: str) -> tuple[float, ...]:
    if len(text) > LONGEST_TEXT:
        raise ArgumentError(name, f"must be at most {LONGEST_TEXT} characters, got {len(text)}")
    words = [word for word in _SEPARATOR.split(text) if word]
    if len(words) > MOST_COEFFICIENTS:
        raise ArgumentError(name, f"must be at most {MOST_COEFFICIENTS} numbers, got {len(words)}")
    numbers = []
    for word in words or [""]:
        number = _real(word)
        if number is None:
            raise ArgumentError(name, f"must be numbers separated by commas or blanks, got {_shown(word)}")
        if not 0 <= number <= 1e6:
            raise ArgumentError(name, f"must be from 0 to 1e6, got {_shown(word)}")
        numbers.append(number)
    return tuple(numbers)


def _real(text: str) -> float | None:
    if "_" in text:  # Python would read 1_0 as ten
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _shown(text: str) -> str:
    if not text:
        return "nothing"
    return repr(text if len(text) <= 40 else text[:37] + "...")
