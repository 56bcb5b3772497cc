"""Every fault that the soundness campaign or the fuzzer found, once fixed."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from pathlib import Path

import command_line
import numpy as np
import pytest

import dpmf
from dpmf.accountants import Cascade, Chain, Conditional, Gaussian, MonteCarlo, Renyi
from dpmf.accountants.chain._lines import LineModel
from dpmf.accountants.chain._spreads import Resolution
from dpmf.accountants.lattice._grid import TiltedMoments
from dpmf.accountants.lattice.lognormal_sum import _FourierError
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.lower_bounds._families import LowerBounds
from soundness.problems import signal_to_noise
from soundness.truth import gaussian_delta, true_delta


def test_chain_with_few_frequencies_gives_up_where_no_smoothing_is_enough() -> None:
    """The smoothing grew until its square left the range of double (campaign, seed 0)."""
    entries = np.array(
        [
            [0.00626, 0, 0, 0, 0, 0],
            [0.10122, 0.00626, 0, 0, 0, 0],
            [0.05074, 0.07674, 0.03026, 0, 0, 0],
            [0, 0.09428, 0, 0.00626, 0, 0],
            [0.07120, 0.09384, 0.11242, 0.10123, 0.12435, 0],
            [0.07463, 0, 0.00174, 0.02216, 0.06416, 0.08096],
        ]
    )
    mechanism = dpmf.Mechanism(dpmf.strategies.matrix(entries), dpmf.BallsInBins(3, 2))
    sigma, delta = 11.883440381289912, 1.332474745799933e-07
    accountant = Chain(discretisation_loss=0.1, max_frequencies=64)
    found = dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=delta, accountant=accountant, direction="remove")
    s = signal_to_noise(mechanism.strategy, 6, 2, sigma)
    assert true_delta(s, found.epsilon, "remove").low <= delta


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_chain_of_steps_that_hardly_move_needs_no_dense_nodes(direction: str) -> None:
    """Nodes as dense as steps of correlation 0.99999 took minutes for three batches (campaign, seed 0)."""
    root = np.array([[0.0, 0.0, 0.0], [0.2, 0.3, 0.0], [2.8, 0.3, 0.16]])
    mechanism = dpmf.Mechanism(dpmf.strategies.matrix(root), dpmf.BallsInBins(1, 3))
    s = signal_to_noise(mechanism.strategy, 3, 3, 1.0)
    still = LineModel(np.zeros(3), np.array([2.6, 0.2, 0.1]), np.array([0.99999, 0.99999]), np.array([0.1, 0.0, 0.0]))
    law = still.law(6.0 if direction == "remove" else 1.5, 1 if direction == "remove" else -1, Resolution(), 1e-9)
    assert len(law.walk.nodes) < 200
    found = dpmf.delta(mechanism, noise_multiplier=1.0, epsilon=0.7, accountant=Chain(), direction=direction).delta
    truth = true_delta(s, 0.7, direction)
    assert truth.low <= found <= 1.3 * truth.high


@pytest.mark.parametrize("accountant", [Cascade, Chain])
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_huge_discretisation_loss_is_a_loose_bound(accountant, direction) -> None:
    """Steps of hundreds of deviations left the range of double: an ArithmeticError (cascade), warnings (chain)."""
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.BallsInBins(2, 3))
    fine, coarse = (
        dpmf.delta(mechanism, noise_multiplier=2.0, epsilon=1.0, accountant=accountant(loss), direction=direction).delta
        for loss in (0.01, 1e6)
    )
    assert fine * (1 - 1e-9) <= coarse <= 1


@pytest.mark.parametrize("accountant", [Gaussian(), Conditional(), Renyi(work_budget=1e5)], ids=lambda a: a.name)
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_huge_epsilon_is_answered_with_a_small_delta(accountant, direction) -> None:
    """Squares beyond the range of double: δ = 1 (Gaussian), an OverflowError (conditional), warnings (Rényi)."""
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(2, 2))
    for epsilon in (1e10, 1e200, 1e300):
        found = dpmf.delta(
            mechanism, noise_multiplier=1.0, epsilon=epsilon, accountant=accountant, direction=direction
        ).delta
        assert 0 <= found <= 1e-29


ONE_BIN = np.diag([0.05, 0, 0])
HEAVY_BIN = np.array([[299.75, 0, 0, 0, 0], [0] * 5, [0, 0, 26.324, 0, 0], [0] * 5, [101.379, 0, 451.499, 0, 325.39]])


@pytest.mark.parametrize(
    ("entries", "b", "sigma", "epsilon", "delta"),
    [(ONE_BIN, 3, 0.006741041363126806, 25.85, 1.515e-12), (HEAVY_BIN, 2, 0.0949285782558, 0.013, 0.0019)],
)
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_conditional_composition_of_a_loss_that_hardly_varies(entries, b, sigma, epsilon, delta, direction) -> None:
    """Zero columns and little noise: the lattice of losses was finer than rounding, a cell had no width (seed 0)."""
    mechanism = dpmf.Mechanism(dpmf.strategies.matrix(entries), dpmf.BallsInBins.from_iterations(len(entries), b))
    s = signal_to_noise(mechanism.strategy, len(entries), b, sigma)
    for accountant in (Conditional(), Conditional(option=2), Conditional(temperatures=(0.5,), optimise_bad_event=True)):
        prepared = accountant.prepare(mechanism)
        truth = true_delta(s, epsilon, direction)
        assert truth.low <= prepared.delta(sigma, epsilon, direction).value <= 1
        assert truth.low <= prepared.delta(sigma, epsilon, direction, delta).value <= 1
        found = prepared.epsilon(sigma, delta, direction).value
        assert found == np.inf or true_delta(s, found, direction).low <= delta


@pytest.mark.parametrize(
    ("epochs", "batches", "named"),
    [(10**12, 1, "epochs"), (1, 10**9, "batches_per_epoch"), (3, 10**8, "epochs"), (10**30, 2, "epochs")],
)
def test_sizes_are_refused_before_memory_is_taken(epochs: int, batches: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must be at most"):
        dpmf.BallsInBins(epochs, batches)


def test_a_figure_database_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between its first statements left a database that no later run would open."""
    from evidence import store

    path = tmp_path / "figures.sqlite"
    with monkeypatch.context() as broken:
        broken.setattr(store, "_TABLE", "CREATE NONSENSE")
        with pytest.raises(ValueError, match="cannot be used"):
            store.Store.open(path, create=True)
    with store.Store.open(path, create=True) as opened:
        assert list(opened) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MonteCarlo(samples=10**23), "samples must be at most 10000000000"),
        (lambda: Renyi(max_order=10**400), "max_order must be at most 1000000000000"),
        (lambda: Conditional(temperatures=b"1"), "temperatures must be positive numbers"),
        (lambda: Conditional(temperatures="12"), "temperatures must be positive numbers"),
        (lambda: dpmf.BallsInBins(10**400, 3, 6), "epochs must be at most 100000000, got 1000"),
    ],
)
def test_what_the_fuzzer_got_through(call, message: str) -> None:
    """Accepted, hung, or refused with hundreds of digits."""
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "wrong", [("--samples", "0"), ("--seed", "-1"), ("--max-order", "1"), ("--work-budget", "nan")]
)
def test_compare_refuses_wrong_options_of_accountants_it_does_not_ask(wrong: tuple[str, str]) -> None:
    options = ("--strategy", "bsr", "--bandwidth", "2", "--epochs", "2", "--batches-per-epoch", "3", "--delta", "1e-3")
    done = command_line.run("compare", *options, "--epsilon", "1", "--accountant", "gaussian", *wrong)
    assert done.returncode == 2
    assert wrong[0] in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_figure_database_with_another_table_is_one_line(tmp_path: Path) -> None:
    """SQLite's own exception came through."""
    from evidence.store import Store

    path = tmp_path / "figures.sqlite"
    Store.open(path, create=True).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE results RENAME COLUMN finished TO ended")
    with Store.open(path) as store, pytest.raises(ValueError, match="is damaged: no such column"):
        list(store)


def test_a_tilt_beyond_the_root_of_the_largest_number() -> None:
    """The product of the two ends of a bisection overflowed, and it went on for ever."""
    tilt, log_bound = TiltedMoments(np.array([1000.0]), np.array([7]), -1, 1.19e-166).saddle(1.19e-166)
    assert 0 < tilt < math.inf
    assert math.isfinite(log_bound)
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 7))
    found = dpmf.delta(mechanism, noise_multiplier=1000**-0.5, epsilon=384.0, direction="add", with_lower=True)
    assert 0 <= found.lower <= found.delta <= 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.05, 300.0), (0.04, 400.0), (0.033, 490.0)])
def test_strikes_whose_squares_are_no_double(sigma: float, epsilon: float, direction: str) -> None:
    """Variances in units of T became NaN (a crash), and norms of payoffs infinite (a loose bound)."""
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 8))
    found = dpmf.delta(
        mechanism,
        noise_multiplier=sigma,
        epsilon=epsilon,
        accountant=dpmf.accountants.Lattice(),
        direction=direction,
        with_lower=True,
    )
    assert 0 <= found.lower <= found.delta < 1
    if direction == "remove":  # one term decides, and its δ is in closed form
        alone = gaussian_delta(sigma**-2, epsilon + math.log(8))
        assert found.delta == pytest.approx(alone, rel=1e-3)
        assert found.lower == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 2.0), (0.1, 50.0)])
def test_the_allowance_for_rounding_counts(sigma, epsilon, direction, monkeypatch) -> None:
    """It is in units of the strike, as everything it is added to or taken from."""
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 8))
    prepared = dpmf.accountants.Lattice().prepare(mechanism)

    def bounds() -> tuple[float, float]:
        upper = prepared.delta(sigma, epsilon, direction).value
        return upper, LowerBounds.of(mechanism.gram)._independent(
            np.array([sigma**-2]), np.array([8]), epsilon, direction
        )

    above, below = bounds()
    monkeypatch.setattr(_FourierError, "of_factors", lambda *_: 1e-6)
    looser, lower = bounds()
    assert looser > above * (1 + 1e-9)
    assert lower < below * (1 - 1e-9)


@pytest.mark.filterwarnings("error")
def test_lower_bounds_with_little_noise_and_unequal_columns() -> None:
    """The same, as the campaign met it (with six bins): auto asked for ε where it is about 470."""
    strategy = dpmf.strategies.coefficients(np.ones(2))
    mechanism = dpmf.Mechanism(strategy, dpmf.BallsInBins(1, 2))
    found = dpmf.epsilon(mechanism, noise_multiplier=0.0575, delta=6e-12, direction="remove", with_lower=True)
    assert 0 < found.lower <= found.epsilon < math.inf
