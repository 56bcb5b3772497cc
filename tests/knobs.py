"""Tuning numbers, changed at random: they may make bounds looser or slower, never wrong.

Modules keep the numbers that decide tightness and speed, but not soundness, in a frozen dataclass `_Tuning` with one
instance `_TUNING`; constants that a proof needs stand apart and are not changed here. A test asks for changes of one
number at a time (`perturbed`), or draws a few changes of all numbers of a package at once (`changed`), and compares
bounds with an oracle:

    @pytest.mark.parametrize("seed", range(8))
    def test_bounds_are_sound_for_any_tuning(seed):
        with knobs.changed("dpmf.accountants.chain", seed):
            assert bound() >= truth
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest


def tuned_modules(package: str) -> list[ModuleType]:
    """The modules of a package that have tuning numbers, and the package itself if it has."""
    found = [importlib.import_module(package)]
    names = (module.name for module in pkgutil.walk_packages(getattr(found[0], "__path__", ()), f"{package}."))
    return [module for module in (*found, *map(importlib.import_module, names)) if hasattr(module, "_TUNING")]


def another(value: Any, rng: np.random.Generator, factor: float = 2.0) -> Any:
    """A value of the same kind: every number is multiplied by a random factor in [1/factor, factor].

    Numbers of one tuple share a factor, so that they stay in order; whole numbers stay whole and positive.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: another(old, rng, factor) for name, old in fields.items()})
    if isinstance(value, tuple) and not any(isinstance(item, tuple) for item in value):
        by = factor ** rng.uniform(-1.0, 1.0)
        return tuple(_times(item, by) for item in value)
    if isinstance(value, tuple):
        return tuple(another(item, rng, factor) for item in value)
    return _times(value, factor ** rng.uniform(-1.0, 1.0))


def _times(value: float, by: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a tuning number, or a tuple of them, was expected, not {value!r}")
    return max(1, round(value * by)) if isinstance(value, int) and value > 0 else type(value)(value * by)


@contextmanager
def changed(package: str, seed: int, factor: float = 2.0) -> Iterator[None]:
    """All tuning numbers of a package are changed inside, to a random draw.

    Args:
      package: the name of a package or module whose modules have tuning numbers.
      seed: of the random draw; what is computed before must not be used inside (prepare accountants inside).
      factor: how many times larger or smaller numbers may become.
    """
    rng = np.random.default_rng(seed)
    modules = tuned_modules(package)
    assert modules, f"{package} has no tuning numbers"
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "_TUNING", another(module._TUNING, rng, factor))
        yield


FACTORS = (0.4, 2.5)


def perturbed(tuning: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a frozen dataclass of knobs, each with one knob made smaller or larger, and what was changed.

    A knob that is None, which leaves a choice to the code, stays.
    """
    for field in dataclasses.fields(tuning):
        value = getattr(tuning, field.name)
        for factor in FACTORS if value is not None else ():
            other = _scaled(value, factor)
            yield f"{field.name}={other}", dataclasses.replace(tuning, **{field.name: other})


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(_scaled(item, factor) for item in value)
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor
