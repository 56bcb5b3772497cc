"""The tuning numbers of the lattice, cascade and Rényi accountants decide tightness and time, never soundness."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, replace

import knobs
import numpy as np
import oracles
import pytest

from dpmf import strategies
from dpmf.accountants import Accountant, Cascade, Lattice, Renyi
from dpmf.batching import BallsInBins
from dpmf.lower_bounds import lower_delta
from dpmf.mechanism import Mechanism

CASES = [(1.0, 0.5), (1.0, 3.0), (4.0, 0.1)]
UNCORRELATED = Mechanism(strategies.matrix(np.diag([1.0, 0.7, 1.3])), BallsInBins(1, 3))
SHORT = Mechanism(strategies.bsr(2), BallsInBins(2, 3))
# Long enough for pairs of trees, for truncation and for cutting a ring: compared with certified lower bounds.
LONG = Mechanism(strategies.bsr(4), BallsInBins(2, 40))
LONG_UNCORRELATED = Mechanism(strategies.matrix(np.diag(np.linspace(0.5, 1.5, 20))), BallsInBins(1, 20))
TESTED: list[tuple[Accountant, Mechanism, Mechanism]] = [
    (Lattice(), UNCORRELATED, LONG_UNCORRELATED),
    (Cascade(), SHORT, LONG),
    (Renyi(work_budget=1e6), SHORT, LONG),
]


def redraw(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every knob of an accountant smaller or larger, at random."""
    rng = np.random.default_rng(seed)
    package = importlib.import_module(f"dpmf.accountants.{name}")
    inside = (importlib.import_module(m.name) for m in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    tuned = [module for module in (package, *inside) if hasattr(module, "_TUNING")]
    assert len(tuned) >= 3
    for module in tuned:
        changes = [tuning for _, tuning in knobs.perturbed(module._TUNING)]
        drawn = {
            field.name: getattr(changes[2 * k + rng.integers(2)], field.name)
            for k, field in enumerate(fields(module._TUNING))
        }
        monkeypatch.setattr(module, "_TUNING", replace(module._TUNING, **drawn))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("accountant", "short", "long"), TESTED, ids=lambda value: getattr(value, "name", ""))
def test_bounds_are_sound_for_any_tuning(
    accountant: Accountant, short: Mechanism, long: Mechanism, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = {
        (case, direction): lower_delta(long, *case, direction) for case in CASES[:2] for direction in ("remove", "add")
    }
    redraw(accountant.name, seed, monkeypatch)
    with np.errstate(over="ignore", invalid="ignore"):
        prepared, other = accountant.prepare(short), accountant.prepare(long)
        for sigma, epsilon in CASES:
            for direction in ("remove", "add"):
                exact = oracles.delta(short.gram / sigma**2, epsilon, direction)
                found = prepared.delta(sigma, epsilon, direction).value
                assert exact * (1 - 1e-6) <= found <= 1
                if exact < 1e-3:
                    assert prepared.epsilon(sigma, exact, direction).value >= epsilon * (1 - 1e-6)
                if ((sigma, epsilon), direction) in lower:
                    assert other.delta(sigma, epsilon, direction).value >= lower[(sigma, epsilon), direction]


@pytest.mark.parametrize("seed", range(6))
def test_lower_bounds_on_the_lattice_are_sound_for_any_tuning(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    redraw("lattice", seed, monkeypatch)
    for sigma, epsilon in CASES:
        for direction in ("remove", "add"):
            exact = oracles.delta(UNCORRELATED.gram / sigma**2, epsilon, direction)
            # Answers are kept with a mechanism, but not with a matrix.
            assert lower_delta(np.asarray(UNCORRELATED.gram), sigma, epsilon, direction) <= exact * (1 + 1e-6)
