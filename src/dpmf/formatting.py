"""Numbers for people to read: a bound is never rounded to its unsafe side.

`upper` is for upper bounds on δ and ε and for noise multipliers to use, `lower` is for lower bounds, and `given` is for
numbers that somebody chose.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

DIGITS = 6


def upper(value: float, digits: int = DIGITS) -> str:
    """Round up to the smallest decimal of so many significant digits that is, read back, at least `value`.

    Args:
      value: an upper bound, or a noise multiplier to use; it may be infinite.
      digits: significant digits, at most 15. Trailing zeros are not printed.

    Returns:
      The number as text, in the notation of Python's ``g`` format.

    **Formal guarantees.** ``float(text) >= value``, and the text exceeds `value` by less than one unit of its last
    digit. A value whose shortest decimal has no more digits than asked for is printed as that decimal.
    """
    return _rounded(value, digits, ROUND_CEILING)


def lower(value: float, digits: int = DIGITS) -> str:
    """Round down to the largest decimal of so many significant digits that is, read back, at most `value`.

    The arguments, the notation and the guarantees are those of `upper`, with the order reversed.
    """
    return _rounded(value, digits, ROUND_FLOOR)


def given(value: float) -> str:
    """Print an input with as many digits as it takes to read the same number back: ``2``, ``0.25``, ``1e-05``."""
    return repr(float(value)).removesuffix(".0")


def _rounded(value: float, digits: int, rounding: str) -> str:
    value = float(value)
    if value == 0:
        return "0"  # and not "-0"
    if not math.isfinite(value):
        return str(value)
    # Rounding is monotone, so the order of the decimals is also that of the doubles that they are read back as.
    number = Context(prec=digits, rounding=rounding).create_decimal(repr(value)).normalize()
    if -5 < number.adjusted() < digits:
        return f"{number:f}"
    mantissa, exponent = f"{number:e}".split("e")
    return f"{mantissa}e{int(exponent):+03d}"
