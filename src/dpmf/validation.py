"""Argument checks, which the public functions make once.

Every message has the same grammar: the argument, what it must be, and what it was. NaN fails every check.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from collections.abc import Collection
from typing import Any

from dpmf.errors import ArgumentError


def wrong(name: str, requirement: str, value: object) -> ArgumentError:
    """Return the error that says, in one line, that an argument is not what it must be.

    Args:
      name: the argument.
      requirement: what it must be, to follow "must be".
      value: what it was.
    """
    shown = " ".join(repr(value).split())
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ArgumentError(name, f"must be {requirement}, got {shown}")


def real(name: str, value: Any) -> float:
    """Return the value as a finite float. Booleans are refused: they are never meant as numbers here."""
    given = value
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        with contextlib.suppress(ValueError):
            value = value.item()  # 0-d numpy arrays and numpy scalars
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong(name, "a real number", given)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of double
        raise wrong(name, "finite", value) from None
    if not math.isfinite(number):
        raise wrong(name, "finite", number)
    return number


def positive(name: str, value: Any) -> float:
    """Return the value as a finite float above 0."""
    number = real(name, value)
    if number <= 0:
        raise wrong(name, "positive", number)
    return number


def non_negative(name: str, value: Any) -> float:
    """Return the value as a finite float that is at least 0."""
    number = real(name, value)
    if number < 0:
        raise wrong(name, "non-negative", number)
    return number


def probability(name: str, value: Any) -> float:
    """Return the value as a float strictly between 0 and 1."""
    number = real(name, value)
    if not 0 < number < 1:
        raise wrong(name, "strictly between 0 and 1", number)
    return number


def integer(name: str, value: Any, *, at_least: int, at_most: int | None = None) -> int:
    """Return the value as an int within the limits."""
    if isinstance(value, bool):
        raise wrong(name, "an integer", value)
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong(name, "an integer", value) from None
    if number < at_least:
        raise wrong(name, f"at least {at_least}", number)
    if at_most is not None and number > at_most:
        raise wrong(name, f"at most {at_most}", number)
    return number


def flag(name: str, value: Any) -> bool:
    """Return the value if it is a boolean."""
    if not isinstance(value, bool):
        raise wrong(name, "True or False", value)
    return value


def choice(name: str, value: Any, options: Collection[str]) -> str:
    """Return the value if it is one of the options."""
    if not isinstance(value, str) or value not in options:
        raise wrong(name, "one of " + ", ".join(options), value)
    return value
