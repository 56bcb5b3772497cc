"""Numbers for people: printed bounds are never on the unsafe side, and close to the bound."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpmf import formatting

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
DIGITS = st.integers(1, 15)


def unit(text: str, digits: int) -> Decimal:
    """One unit of the last of `digits` digits of a number."""
    return Decimal(1).scaleb(Decimal(text).adjusted() - digits + 1)


@settings(max_examples=2000)
@given(value=NUMBERS, digits=DIGITS)
@example(value=5e-324, digits=6)
@example(value=2.2250738585072014e-308, digits=6)
@example(value=1.7976931348623157e308, digits=3)
@example(value=0.9999999999, digits=6)
@example(value=1e-5, digits=6)
@example(value=-0.0, digits=6)
def test_rounded_to_the_safe_side_by_less_than_one_unit(value: float, digits: int) -> None:
    above, below = formatting.upper(value, digits), formatting.lower(value, digits)
    assert float(below) <= value <= float(above)
    shortest = Decimal(repr(value))
    assert Decimal(below) <= shortest <= Decimal(above)
    for text in (above, below):
        assert len(Decimal(text).normalize().as_tuple().digits) <= digits
        assert abs(Decimal(text) - shortest) < unit(repr(value) if value else "1", digits)


@settings(max_examples=500)
@given(value=NUMBERS)
def test_a_number_that_was_given_is_read_back_as_it_was(value: float) -> None:
    assert float(formatting.given(value)) == value


@pytest.mark.parametrize(
    ("value", "above", "below", "given"),
    [
        (0.09614553598226512, "0.0961456", "0.0961455", "0.09614553598226512"),
        (2.0, "2", "2", "2"),
        (1e-5, "1e-05", "1e-05", "1e-05"),
        (9.9999996e-6, "1e-05", "9.99999e-06", "9.9999996e-06"),
        (123456.7, "123457", "123456", "123456.7"),
        (1234567.8, "1.23457e+06", "1.23456e+06", "1234567.8"),
        (0.000123456789, "0.000123457", "0.000123456", "0.000123456789"),
        (0.0, "0", "0", "0"),
        (-0.0, "0", "0", "-0"),
        (math.inf, "inf", "inf", "inf"),
        (math.nan, "nan", "nan", "nan"),
        (5e-324, "5e-324", "5e-324", "5e-324"),
        (-1.23456789, "-1.23456", "-1.23457", "-1.23456789"),
    ],
)
def test_examples(value: float, above: str, below: str, given: str) -> None:
    assert (formatting.upper(value), formatting.lower(value), formatting.given(value)) == (above, below, given)
