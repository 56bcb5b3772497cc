"""The certified lower bounds against closed forms, quadrature and the reference σ."""

from __future__ import annotations

import json
import warnings
from types import ModuleType

import knobs
import numpy as np
import oracles
import paths
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpmf import lower_bounds
from dpmf.accountants.lattice import Lattice
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.batching import BallsInBins
from dpmf.calibration import calibrate_one_way
from dpmf.lower_bounds import _families, _half_spaces, _windows, lower_delta, lower_epsilon, lower_noise_multiplier
from dpmf.lower_bounds._families import LowerBounds
from dpmf.mechanism import Mechanism
from dpmf.strategies import bisr, bsr, dpsgd

REFERENCE = json.loads(paths.TRUE_SIGMA.read_text())


def mechanism_of(name: str) -> Mechanism:
    """The mechanism of a reference cell: "bsr4 N=100 k=1"."""
    kind, iterations, epochs = name.split()
    family, width = kind.rstrip("0123456789"), int(kind.strip("dpsgbir") or 0)
    strategy = {"dpsgd": lambda p: dpsgd(), "bsr": bsr, "bisr": bisr}[family](width)
    return Mechanism(strategy, BallsInBins.from_iterations(int(iterations[2:]), int(iterations[2:]) // int(epochs[2:])))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_batch_is_exact(direction: str) -> None:
    for sigma, epsilon in [(0.3, 4.0), (1.0, 0.0), (1.0, 1.0), (5.0, 0.2), (40.0, 0.001)]:
        exact = oracles.gaussian_delta(2 / sigma**2, epsilon)
        found = lower_delta(np.array([[2.0]]), sigma, epsilon, direction)
        assert exact * (1 - 1e-9) - 1e-13 <= found <= exact * (1 + 1e-9)


@st.composite
def gram_matrices(draw: st.DrawFn) -> np.ndarray:
    b = draw(st.integers(2, 3))
    entry = st.one_of(st.just(0.0), st.floats(0.01, 1.5))
    means = np.array([[draw(entry) for _ in range(3)] for _ in range(b)]) + 0.05 * np.eye(b, 3)
    return means @ means.T


@settings(max_examples=50, deadline=None)
@given(gram_matrices(), st.floats(0.8, 4.0), st.floats(0.0, 4.0), st.sampled_from(DIRECTIONS))
def test_never_above_the_truth(gram: np.ndarray, sigma: float, epsilon: float, direction: str) -> None:
    exact = oracles.delta(gram / sigma**2, epsilon, direction)
    if exact > 1e-12:
        assert lower_delta(gram, sigma, epsilon, direction) <= exact * (1 + 1e-7)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.05, 8.0), min_size=2, max_size=3), st.floats(0.0, 4.0), st.sampled_from(DIRECTIONS))
@example([5.0, 0.125], 1.0, "add")  # very unequal variances: the smaller one was once left out
def test_tight_for_uncorrelated_noise(variances: list[float], epsilon: float, direction: str) -> None:
    exact = oracles.delta(np.diag(variances), epsilon, direction)
    if exact > 1e-12:
        found = lower_delta(np.diag(variances), 1.0, epsilon, direction)
        assert 0.96 * exact <= found <= exact * (1 + 1e-7)


def test_families_on_correlated_pairs() -> None:
    """Nearly equal means: half-spaces are tight; a shared part: so is the composition with an independent rest."""
    close = np.array([[1.0, 0.98], [0.98, 1.0]])
    shared = np.array([[1.0, 0.3, 0.3], [0.3, 1.0, 0.3], [0.3, 0.3, 1.0]])
    for direction in DIRECTIONS:
        for epsilon in (0.1, 1.0, 3.0):
            exact = oracles.delta(close, epsilon, direction)
            assert 0.9 * exact <= lower_delta(close, 1.0, epsilon, direction) <= exact * (1 + 1e-7)
        exact = oracles.delta(shared, 1.5, direction)
        assert 0.9 * exact <= lower_delta(shared, 1.0, 1.5, direction) <= exact * (1 + 1e-7)


# How much of the sampled truth is certified; what is left is the open gap, in the middle of the range of ε. Each ε is
# asked of three mechanisms: docs/tightness.md has the others.
TIGHTNESS = {
    "dpsgd N=100 k=1": {1: 0.998, 8: 0.998},
    "bsr4 N=100 k=1": {0.25: 0.96, 4: 0.98},
    "bsr4 N=1000 k=10": {1: 0.965, 8: 0.99},
    "bsr64 N=100 k=1": {0.25: 0.99, 4: 0.98},
    "bisr64 N=100 k=1": {1: 0.98, 8: 0.98},
    "bisr4 N=1000 k=10": {0.25: 0.98, 4: 0.96},
}
# Where the slower bounds are asked, too: each strategy at ε = 1 or 4, and either of them for both kinds.
SLOWER = {
    "dpsgd N=100 k=1": (1, 4), "bsr4 N=100 k=1": (1,), "bsr4 N=1000 k=10": (4,),
    "bsr64 N=100 k=1": (4,), "bisr64 N=100 k=1": (1,), "bisr4 N=1000 k=10": (1,),
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHTNESS)
def test_reference_noise_multipliers(name: str) -> None:
    """One pass per cell and direction: the bound misses the target well below the truth, and never above it."""
    bounds = LowerBounds.of(mechanism_of(name))
    for cell in REFERENCE:
        if cell["mechanism"] != name:
            continue
        epsilon, delta = cell["epsilon"], cell["delta"]
        for direction in DIRECTIONS:
            truth = cell.get(f"sigma_{direction}")
            if truth is None:
                continue
            error = 5 * cell[f"rel_se_delta_{direction}"] + 0.01
            found = max(bounds._values(truth, epsilon, direction))
            if epsilon in SLOWER[name] and delta == 1e-5:
                found = max(found, bounds.delta(truth, epsilon, direction))
            assert found <= delta * (1 + error)
        if delta == 1e-5 and epsilon in TIGHTNESS[name]:
            sigma = cell["sigma_remove"] * TIGHTNESS[name][epsilon]
            quick = bounds.exceeds(delta, sigma, epsilon, "remove")
            assert quick or bounds.refined(delta, sigma, epsilon, "remove")


def test_noise_multiplier_is_certified_and_close() -> None:
    mechanism = Mechanism(dpsgd(), BallsInBins(2, 50))
    prepared = Lattice().prepare(mechanism)
    for direction in DIRECTIONS:
        found = lower_noise_multiplier(mechanism, 0.7, 1e-6, direction)
        assert lower_delta(mechanism, found, 0.7, direction) > 1e-6
        sufficient, _, _ = calibrate_one_way([prepared], 0.7, 1e-6, direction, 1.0, 1e-4)
        assert found < sufficient < 1.002 * found
    both = lower_noise_multiplier(mechanism, 0.7, 1e-6)
    assert both == max(lower_noise_multiplier(mechanism, 0.7, 1e-6, direction) for direction in DIRECTIONS)


def test_epsilon_is_certified_and_close() -> None:
    mechanism = Mechanism(dpsgd(), BallsInBins(1, 100))
    found = lower_epsilon(mechanism, 1.0, 1e-5)
    assert lower_delta(mechanism, 1.0, found) > 1e-5
    assert 0.609 < found < 0.6215  # PLD_accounting certifies 0.609, the truth is about 0.621
    assert found <= Lattice().prepare(mechanism).epsilon(1.0, 1e-5, "remove").value <= 1.005 * found
    assert lower_epsilon(mechanism, 1e4, 1e-5) == 0.0
    assert lower_epsilon(np.array([[1.0]]), 1.0, 1e-5) == pytest.approx(4.377, abs=2e-3)


def test_large_epoch_needs_no_matrix() -> None:
    mechanism = Mechanism(dpsgd(), BallsInBins(1, 50_000))
    value = lower_delta(mechanism, 0.6, 0.2, "remove")
    assert value >= 0.98 * Lattice().prepare(mechanism).delta(0.6, 0.2, "remove").value


def test_targets_that_cannot_be_missed() -> None:
    assert lower_noise_multiplier(np.zeros((3, 3)), 1.0, 1e-5) == 0.0
    assert lower_delta(np.zeros((3, 3)), 1.0, 0.0) == 0.0
    assert lower_noise_multiplier(np.eye(4), 1.0, 1 - 1e-9) == pytest.approx(0.08, rel=0.2)


def test_extremes_without_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_windows, "_TUNING", _windows._Tuning(most_combinations=2e3, most_cells=12))
    chain = 0.5 ** np.abs(np.subtract.outer(np.arange(12), np.arange(12)))
    for gram in (chain, np.eye(3), 1e-200 * np.eye(2), 1e200 * np.eye(2)):
        bounds = LowerBounds.of(gram)
        with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
            warnings.simplefilter("error")
            for direction in DIRECTIONS:
                for sigma in (1e-8, 0.1, 1.0, 1e5):
                    values = [bounds.delta(sigma, epsilon, direction) for epsilon in (0.0, 0.3, 60.0, 900.0)]
                    assert all(0 <= value <= 1 for value in values)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="square Gram matrix, got shape"):
        lower_delta(np.ones((2, 3)), 1.0, 1.0)
    with pytest.raises(ValueError, match="finite, non-negative and symmetric"):
        lower_delta(np.array([[1.0, -0.1], [-0.1, 1.0]]), 1.0, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier must be positive"):
        lower_delta(np.eye(2), 0.0, 1.0)
    with pytest.raises(ValueError, match="direction must be one of"):
        lower_delta(np.eye(2), 1.0, 1.0, "sideways")
    with pytest.raises(ValueError, match="delta must be strictly between"):
        lower_epsilon(np.eye(2), 1.0, 2.0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("module", [lower_bounds, _families, _half_spaces])
def test_bounds_hold_for_other_knobs(module: ModuleType, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tuning knob may be changed: bounds stay below the truth, and searches end on the sound side."""
    mechanism = Mechanism(bsr(2), BallsInBins(2, 3))
    truth = oracles.delta(mechanism.gram, 0.5, direction)
    if module is lower_bounds:  # so that the slower bounds are asked for three batches, too
        monkeypatch.setattr(_families, "_TUNING", _families._Tuning(windows=(3,)))
    # Millions by default, for every knob; test_windows.py changes the knobs of these bounds themselves.
    monkeypatch.setattr(_windows, "_TUNING", _windows._Tuning(most_combinations=2e3))
    for change, tuning in knobs.perturbed(module._TUNING):
        if direction == "add" and "refined" in change:
            continue
        monkeypatch.setattr(module, "_TUNING", tuning)
        fresh = Mechanism(bsr(2), BallsInBins(2, 3))
        for bounds in (_families.LowerBounds.of(fresh), _families.LowerBounds.closed_forms(fresh)):
            assert 0 <= bounds.delta(1.0, 0.5, direction) <= truth, change
        if module is lower_bounds:
            sigma = lower_noise_multiplier(fresh, 0.5, 1e-3, direction, 0.05)
            assert oracles.delta(mechanism.gram / sigma**2, 0.5, direction) >= 1e-3, change
            epsilon = lower_epsilon(fresh, 2.0, 1e-3, direction)
            assert oracles.delta(mechanism.gram / 4.0, epsilon, direction) >= 1e-3, change


# --- the search for where a slow bound reaches its target ------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.0, 1e-9, 0.3, 0.97, 1.0, 1.03, 3.0, 1e9])
def test_climbing_ends_where_the_bound_was_seen_to_exceed(factor: float) -> None:
    """However wrong the guess is that says where to begin: only values of the slow function count."""
    asked = []

    def value(sigma: float) -> float:
        asked.append(sigma)
        return 1e-5 * (2.0 / sigma) ** 22

    found = list(lower_bounds._climbing(value, lambda sigma: factor * value(sigma), 1.8, 1e-5, 1e-4))
    assert all(value(sigma) > 1e-5 for sigma in found)
    if factor < 10:
        assert 2.0 * (1 - 1.5e-3) < max(found) < 2.0
    asked.clear()
    assert 2.0 * (1 - 1.5e-3) < max(lower_bounds._climbing(value, None, 1.8, 1e-5, 1e-4)) < 2.0
    alone = len(asked)
    assert alone <= lower_bounds._TUNING.refined_tries
    assert not list(lower_bounds._climbing(value, None, 2.1, 1e-5, 1e-4))


def test_a_good_guess_spares_most_of_the_slow_evaluations() -> None:
    asked = []

    def curve(sigma: float) -> float:
        return 1e-5 * (2.0 / sigma) ** (20 + 5 * sigma / 2)

    def value(sigma: float) -> float:
        asked.append(sigma)
        return curve(sigma)

    found = list(lower_bounds._climbing(value, lambda sigma: 1.001 * curve(sigma), 1.8, 1e-5, 1e-4))
    assert len(asked) == 1
    assert 2.0 * (1 - 1e-3) < found[0] < 2.0
