"""Tuning knobs with other values: tests show that bounds hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

FACTORS = (0.4, 2.5)


def perturbed(tuning: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a frozen dataclass of knobs, each with one knob made smaller or larger, and what was changed."""
    for field in fields(tuning):
        value = getattr(tuning, field.name)
        for factor in FACTORS:
            changed = _scaled(value, factor)
            yield f"{field.name}={changed}", replace(tuning, **{field.name: changed})


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(_scaled(item, factor) for item in value)
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor
