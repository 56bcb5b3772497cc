"""The own-bin accountant: never below the truth by quadrature or by sampling, and close to it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import knobs
import numpy as np
import oracles
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import (
    DIRECTIONS,
    FOUR_BINS_DELTA,
    log_uniform,
    mechanisms,
    random_matrix,
    random_settings,
    signal_to_noise,
)

import dpmf
from dpmf import budget, lower_bounds, strategies
from dpmf.accountants import Gaussian, MonteCarlo, OwnBin, own_bin
from dpmf.accountants.own_bin import _Law
from dpmf.accountants.own_bin._given_bin import GivenBin, Shared, circulant_above
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism

TRUTH = json.loads(paths.TRUE_SIGMA.read_text())
SAMPLED = {
    "dpsgd N=100 k=1": Mechanism(strategies.dpsgd(), BallsInBins(1, 100)),
    "bsr4 N=100 k=1": Mechanism(strategies.bsr(4), BallsInBins(1, 100)),
    "bsr64 N=100 k=1": Mechanism(strategies.bsr(64), BallsInBins(1, 100)),
    "bisr64 N=100 k=1": Mechanism(strategies.bisr(64), BallsInBins(1, 100)),
    "bsr4 N=1000 k=10": Mechanism(strategies.bsr(4), BallsInBins(10, 100)),
    "bisr4 N=1000 k=10": Mechanism(strategies.bisr(4), BallsInBins(10, 100)),
}
IRREGULAR = Mechanism(strategies.matrix(random_matrix(16, 5)), BallsInBins(2, 8))


# --- never below the truth -------------------------------------------------------------------------------------------


@random_settings(60)
@given(
    mechanisms(), log_uniform(0.2, 30), st.floats(0.0, 5.0), log_uniform(0.05, 3.0), st.sampled_from([1e-9, 1e-4]),
    st.sampled_from(DIRECTIONS),
)  # fmt: skip
def test_never_below_the_truth(
    mechanism: Mechanism, sigma: float, epsilon: float, spacing: float, target: float, direction: str
) -> None:
    truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction)
    prepared = OwnBin(spacing=spacing).prepare(mechanism)
    assert prepared.delta(sigma, epsilon, direction, target).value >= truth * (1 - 1e-7)
    assert prepared.delta(sigma, epsilon, direction).value >= truth * (1 - 1e-7)


@random_settings(20)
@given(
    mechanisms(), log_uniform(0.2, 30), st.lists(st.floats(0.0, 8.0), min_size=3, max_size=6),
    st.sampled_from(DIRECTIONS),
)  # fmt: skip
def test_profiles_are_never_below_the_truth(
    mechanism: Mechanism, sigma: float, epsilons: list[float], direction: str
) -> None:
    """Many ε at a time, in any order and with some of them equal: nodes end where the ones before lead to expect."""
    found = OwnBin().prepare(mechanism).deltas(sigma, epsilons, direction)
    for epsilon, value in zip(epsilons, found, strict=True):
        assert value >= oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction) * (1 - 1e-7)


def test_profiles_are_as_close_as_single_bounds() -> None:
    prepared = OwnBin().prepare(SAMPLED["bisr4 N=1000 k=10"])
    epsilons = [0.0, 1e-4, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    alone = np.array([prepared.delta(5.0, epsilon, "remove").value for epsilon in epsilons])
    together = np.array(prepared.deltas(5.0, epsilons[::-1], "remove")[::-1])
    assert np.all(together <= 1.01 * alone)


def test_never_below_the_truth_for_four_bins() -> None:
    mechanism = Mechanism(strategies.matrix(random_matrix(8, 0)), BallsInBins(2, 4))
    sigma, epsilon = math.sqrt(float(mechanism.gram.max()) / 0.6), 0.2
    sampled, error = sampled_delta(signal_to_noise(mechanism, sigma), epsilon, 0)
    assert abs(sampled - FOUR_BINS_DELTA) < 4 * error < 0.03 * FOUR_BINS_DELTA
    for spacing in (0.05, 0.3, 2.0):
        found = OwnBin(spacing=spacing).prepare(mechanism).delta(sigma, epsilon, "remove").value
        assert found >= FOUR_BINS_DELTA * (1 - 1e-7)


def call(s: np.ndarray, strike: float, circulant: bool, spacing: float) -> float:
    """The bound itself, which closed forms do not replace where it is large."""
    law = _Law(s, circulant, spacing)
    return law.call(strike, 7.0)[0] if law.usable else 1.0


def put(s: np.ndarray, strike: float, circulant: bool) -> float:
    law = _Law(s, circulant, 1.0)
    return law.put(strike)[0] if law.usable else 1.0


@random_settings(60)
@given(st.integers(0, 10**6), st.integers(2, 3), log_uniform(1e-2, 8.0), st.floats(0.0, 5.0), st.integers(1, 12))
def test_the_add_direction_is_never_below_the_truth_from_smaller_epsilons(
    seed: int, b: int, size: float, far: float, smaller: int
) -> None:
    """As far into the tail as δ of about 1e-7, where what is extrapolated decides."""
    s = np.random.default_rng(seed).random((b, b + 2)) ** 3
    s = s @ s.T
    s *= size / s.max()
    epsilon = far * math.sqrt(size)
    truth = oracles.delta(s, epsilon, "add")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_bin, "_TUNING", replace(own_bin._TUNING, smaller=smaller, close=0.0))
        for circulant in (False, True):
            found = put(circulant_above(s) if circulant else s, math.exp(epsilon), circulant)
            assert found >= truth * (1 - 1e-6)


def test_smaller_epsilons_help_in_the_add_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory whose many modes four moments see little of (docs/tightness.md); the truth is from samples."""
    mechanism = Mechanism(strategies.power(0.3, 0.98), BallsInBins(5, 242))
    found = OwnBin().prepare(mechanism).delta(2.12, 0.94, "add", 1e-5).value
    assert 2.1e-6 < found < 1e-5
    monkeypatch.setattr(own_bin, "_TUNING", replace(own_bin._TUNING, close=math.inf))
    assert OwnBin().prepare(mechanism).delta(2.12, 0.94, "add", 1e-5).value > 3e-5


def test_last_bins_that_share_nothing_leave_the_circulant_matrix() -> None:
    """No number v > 0 can be split off the Gram matrix, but off the circulant one above it."""
    coefficients = [1.0, 0.34, 0.6, 0.68, 0.07, 0.4, 0.2, 0.92, 0.05, 0.54, 0.84, 0.45]
    mechanism = Mechanism(strategies.coefficients(coefficients), BallsInBins(1, 107))
    assert Shared.of(mechanism.gram_upper() / 1.3**2) is None
    found = OwnBin().prepare(mechanism).delta(1.3, 3.4, "remove", 1e-5)
    assert found.details == {"bins": 1}
    assert found.slack == math.inf  # what the circulant matrix costs is not known
    assert 6e-6 < found.value < 1e-5


@random_settings(40)
@given(st.integers(0, 10**6), st.integers(2, 3), log_uniform(1e-3, 8.0), st.floats(0.0, 4.0), log_uniform(0.05, 1.0))
def test_the_bound_itself_is_never_below_the_truth(
    seed: int, b: int, size: float, epsilon: float, spacing: float
) -> None:
    """For random covariances, as they are and made circulant, also where the closed form is smaller."""
    rng = np.random.default_rng(seed)
    loads = rng.random((b, b + 2)) ** 3
    s = loads @ loads.T
    s *= size / s.max()
    truth = oracles.delta(s, epsilon, "remove")
    assert call(s, math.exp(epsilon), False, spacing) >= truth * (1 - 1e-7)
    assert call(circulant_above(s), math.exp(epsilon), True, spacing) >= truth * (1 - 1e-7)
    truth = oracles.delta(s, epsilon, "add")
    assert put(s, math.exp(epsilon), False) >= truth * (1 - 1e-7)
    assert put(circulant_above(s), math.exp(epsilon), True) >= truth * (1 - 1e-7)


@pytest.mark.parametrize("columns", [[[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0 - 1e-9], [1.0 - 1e-9, 1.0]]])
def test_bins_that_are_all_the_same(columns: list[list[float]]) -> None:
    s = np.array(columns)
    for epsilon in (0.0, 1.0, 3.0):
        assert call(s, math.exp(epsilon), False, 0.12) >= oracles.gaussian_delta(1 - 1e-9, epsilon) * (1 - 1e-6)
    same = Mechanism(strategies.matrix(np.tril(np.ones((1, 1)))), BallsInBins(1, 1))
    assert OwnBin().prepare(same).delta(1.0, 1.0, "remove").value == pytest.approx(oracles.gaussian_delta(1.0, 1.0))


@pytest.mark.parametrize("seed", range(8))
def test_bounds_are_sound_for_any_tuning(seed: int) -> None:
    regular = Mechanism(strategies.coefficients([1.0, 0.1, 0.6]), BallsInBins(2, 3))
    cut_off = Mechanism(strategies.coefficients([1.0, 0.7, 0.2]), BallsInBins(2, 3, 5))
    with knobs.changed("dpmf.accountants.own_bin", seed):
        for mechanism in (regular, cut_off):
            for sigma, epsilon in ((2.0, 0.5), (6.0, 0.1), (1.0, 2.0)):
                for direction in DIRECTIONS:
                    truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction)
                    assert OwnBin().prepare(mechanism).delta(sigma, epsilon, direction).value >= truth * (1 - 1e-7)


@pytest.mark.parametrize(("knob", "tuning"), list(knobs.perturbed(own_bin._TUNING)), ids=lambda value: str(value)[:40])
def test_bounds_are_sound_for_any_single_knob(knob: str, tuning: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_bin, "_TUNING", tuning)
    mechanism = Mechanism(strategies.coefficients([1.0, 0.7, 0.2]), BallsInBins(2, 3, 5))
    for sigma, epsilon in ((2.0, 0.5), (1.0, 2.0)):
        for direction in DIRECTIONS:
            truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction)
            assert OwnBin().prepare(mechanism).delta(sigma, epsilon, direction).value >= truth * (1 - 1e-7), knob


def sampled_delta(s: np.ndarray, epsilon: float, seed: int) -> tuple[float, float]:
    """E(1 − e^ε/A)_+ with the record in a random bin, from samples, and its standard error."""
    rng = np.random.default_rng(seed)
    b, size = len(s), 200_000
    values, vectors = np.linalg.eigh(s)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    u = rng.normal(size=(size, b)) @ root.T + s[rng.integers(b, size=size)]
    exponents = u - np.diag(s) / 2
    gains = np.maximum(-np.expm1(epsilon + math.log(b) - np.logaddexp.reduce(exponents, axis=1)), 0.0)
    return float(gains.mean()), float(gains.std()) / math.sqrt(size)


@pytest.mark.parametrize(("sigma", "epsilon"), [(6.0, 0.2), (3.0, 0.5), (1.5, 2.0)])
def test_many_bins_one_by_one_are_close_to_samples(sigma: float, epsilon: float) -> None:
    """A matrix that is not circulant: every bin is asked by itself."""
    prepared = OwnBin().prepare(IRREGULAR)
    truth, error = sampled_delta(signal_to_noise(IRREGULAR, sigma), epsilon, 1)
    found = prepared.delta(sigma, epsilon, "remove", truth)
    assert found.value >= truth - 4 * error
    assert found.value <= 1.5 * truth + 4 * error
    assert found.details["bins"] in (0, 8)
    circulant = call(circulant_above(IRREGULAR.gram_upper()) / sigma**2, math.exp(epsilon), True, 0.12)
    assert circulant >= truth - 4 * error


def shrunk(cells: float) -> own_bin._Tuning:
    return replace(own_bin._TUNING, cost=cells, pooled=1, every=9, widest=9.0)


@random_settings(40)
@given(
    st.integers(0, 10**6), st.integers(2, 3), log_uniform(0.05, 6.0), st.floats(0.0, 4.0), st.sampled_from([1e-3, 9.0])
)
def test_wide_cells_and_foreign_polynomials_are_never_below_the_truth(
    seed: int, b: int, size: float, epsilon: float, cost: float
) -> None:
    """With as few nodes as the loads allow, and the polynomials of the first bin for all."""
    loads = np.random.default_rng(seed).random((b, b + 2)) ** 3
    s = loads @ loads.T
    s *= size / s.max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_bin, "_TUNING", shrunk(cost))
        assert call(s, math.exp(epsilon), False, 1.0) >= oracles.delta(s, epsilon, "remove") * (1 - 1e-7)


@pytest.mark.parametrize("spacing", [0.05, 0.12, 1.0])
def test_no_cell_is_too_wide(spacing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_bin, "_TUNING", shrunk(9.0))
    for scale in (0.1, 1.0, 6.0):
        s = scale * signal_to_noise(IRREGULAR, math.sqrt(float(IRREGULAR.gram.max())))
        for circulant in (False, True):
            law = _Law(circulant_above(s) if circulant else s, circulant, spacing)
            nodes = law._nodes(math.e, 7.0)
            assert nodes[0] <= -7.0 and len(nodes) > 3  # noqa: PT018
            assert nodes[-1] >= 7.0
            assert all(np.diff(nodes).max() * one.curve.frequency < 3 for one in law.bins)
            assert np.all(np.diff(nodes) > 0)


def test_bins_that_share_polynomials_lose_little(monkeypatch: pytest.MonkeyPatch) -> None:
    s = signal_to_noise(SAMPLED["bsr64 N=100 k=1"], 1.6)[::5, ::5]
    few, many = (replace(own_bin._TUNING, pooled=pooled) for pooled in (4, 20))
    values = []
    for tuning in (few, many):
        monkeypatch.setattr(own_bin, "_TUNING", tuning)
        values.append(call(s, math.exp(2.0), False, 0.12))
    assert values[1] * (1 - 1e-12) <= values[0] <= 1.02 * values[1]


# --- and close to it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLED)
def test_never_below_the_sampled_truth(name: str) -> None:
    rows = [row for row in TRUTH if row["mechanism"] == name]
    assert rows
    prepared = OwnBin().prepare(SAMPLED[name])
    for row in rows:
        found = prepared.delta(row["sigma_remove"], row["epsilon"], "remove", row["delta"]).value
        assert found >= row["delta"] * (1 - 4 * row["rel_se_delta_remove"])


def test_every_mechanism_of_the_table_is_here() -> None:
    assert set(SAMPLED) == {row["mechanism"] for row in TRUTH}


@pytest.mark.parametrize(
    ("mechanism", "epsilon", "truth", "most"),
    [
        (SAMPLED["bsr4 N=1000 k=10"], 1.0, 3.7009, 1.04),
        (SAMPLED["bsr4 N=1000 k=10"], 4.0, 2.2036, 1.025),
        (SAMPLED["bsr4 N=1000 k=10"], 0.25, 9.4416, 1.02),
        (SAMPLED["bisr4 N=1000 k=10"], 2.0, 3.1301, 1.04),
        (Mechanism(strategies.bsr(16), BallsInBins(5, 200)), 1.0, 3.196, 1.03),  # docs/tightness.md
        (SAMPLED["bsr64 N=100 k=1"], 4.0, 0.9796, 1.015),  # all bins are asked by themselves
    ],
)
def test_calibrated_noise_is_close_to_the_truth(
    mechanism: Mechanism, epsilon: float, truth: float, most: float
) -> None:
    found = dpmf.calibrate(
        mechanism, target_epsilon=epsilon, target_delta=1e-5, accountant="own-bin", direction="remove"
    ).noise_multiplier  # fmt: skip
    assert 0.998 * truth <= found <= most * truth


def test_bounds_fall_with_epsilon_and_with_noise() -> None:
    """Up to a percent: nodes and polynomials are not the same ones."""
    prepared = OwnBin().prepare(Mechanism(strategies.bsr(4), BallsInBins(4, 50)))
    falling = [prepared.delta(2.0, epsilon, "remove", 1e-5).value for epsilon in np.linspace(0.1, 4.0, 12)]
    assert all(later <= 1.01 * earlier for earlier, later in pairwise(falling))
    falling = [prepared.delta(sigma, 1.0, "remove", 1e-5).value for sigma in np.geomspace(1.5, 6.0, 10).tolist()]
    assert all(later <= 1.01 * earlier for earlier, later in pairwise(falling))


def test_finer_nodes_are_no_worse() -> None:
    prepared = [OwnBin(spacing=spacing).prepare(SAMPLED["bsr4 N=1000 k=10"]) for spacing in (0.06, 0.12, 0.4)]
    values = [one.delta(3.8, 1.0, "remove", 1e-5).value for one in prepared]
    assert all(fine <= 1.01 * coarse for fine, coarse in pairwise(values))


# --- what it is asked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bsr4 N=1000 k=10", "bisr4 N=1000 k=10", "bsr64 N=100 k=1"])
def test_the_add_direction_is_close_to_the_sampled_truth(name: str) -> None:
    prepared = OwnBin().prepare(SAMPLED[name])
    for row in TRUTH:
        if row["mechanism"] == name and row.get("sigma_add"):
            found = prepared.delta(row["sigma_add"], row["epsilon"], "add", row["delta"]).value
            assert row["delta"] * (1 - 4 * row["rel_se_delta_add"]) <= found
            assert found <= 1.2 * row["delta"] or name.startswith("bsr64") or row["epsilon"] > 0.25


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bounds_are_at_most_the_closed_form(direction: str) -> None:
    mechanism = Mechanism(strategies.matrix(random_matrix(6, 5)), BallsInBins(2, 3))
    prepared, closed = OwnBin().prepare(mechanism), Gaussian().prepare(mechanism)
    for sigma in (1e-200, 1e-3, 0.3, 2.0, 50.0, 1e4, 1e30, 1e90, 1e200):
        for epsilon in (0.0, 0.3, 30.0):
            found = prepared.delta(sigma, epsilon, direction).value
            assert 0 <= found <= closed.delta(sigma, epsilon, direction).value


@pytest.mark.parametrize("sigma", [1e4, 1e20, 1e60, 1e90, 1e120])
def test_so_much_noise_that_moments_underflow(sigma: float) -> None:
    """By Jensen's inequality δ(0) = E(A − 1)_+ is at least that of the mean of the exponents."""
    mechanism = Mechanism(strategies.bsr(2), BallsInBins(2, 3))
    variance = float(mechanism.gram.sum()) / 9 / sigma / sigma
    found = OwnBin().prepare(mechanism).delta(sigma, 0.0, "remove").value
    assert found >= 0.999 * math.sqrt(variance / (2 * math.pi)) - variance


def test_many_batches_are_left_to_others_unless_memory_is_long_and_too_many_are_refused() -> None:
    for p, b, suited in [(2, 512, True), (2, 513, False), (32, 513, True), (32, 800, True), (32, 801, False)]:
        mechanism = Mechanism(strategies.bsr(p), BallsInBins(1, b))
        assert OwnBin().suits(mechanism) == (OwnBin() if suited else None)
    many = Mechanism(strategies.bsr(2), BallsInBins(1, 2001))
    refusal = r"^accountant own-bin must be given at most 2000 batches per epoch, got 2001$"
    with pytest.raises(ValueError, match=refusal):
        OwnBin().prepare(many)


@pytest.mark.parametrize(("bandwidth", "sigma", "epsilon"), [(32, 2.0, 0.5), (32, 0.97, 2.0), (4, 0.7, 2.0)])
def test_many_batches(bandwidth: int, sigma: float, epsilon: float) -> None:
    """Beyond 512 batches the diagonal is raised by more, and nodes are farther apart: still close, and above."""
    mechanism = Mechanism(strategies.bsr(bandwidth), BallsInBins(1, 600))
    found = OwnBin().prepare(mechanism).delta(sigma, epsilon, "remove", 1e-5).value
    sampling = MonteCarlo(samples=50_000)
    sampled = dpmf.delta(
        mechanism, noise_multiplier=sigma, epsilon=epsilon, direction="remove", accountant=sampling
    ).delta
    assert lower_bounds.lower_delta(mechanism, sigma, epsilon, direction="remove") <= found
    assert 0.97 * sampled <= found <= 2.5 * sampled


@pytest.mark.parametrize("spacing", [0.0, -1.0, math.nan, math.inf, "wide"])
def test_a_spacing_that_is_none_is_refused(spacing: float) -> None:
    with pytest.raises((ValueError, TypeError), match="spacing"):
        OwnBin(spacing=spacing)


def test_moments_are_shared_by_all_questions_about_one_noise_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    compute = GivenBin.at

    def counted(self: GivenBin, tau: float) -> object:
        asked.append(tau)
        return compute(self, tau)

    monkeypatch.setattr(GivenBin, "at", counted)
    prepared = OwnBin().prepare(SAMPLED["bsr4 N=100 k=1"])
    first = prepared.delta(1.5, 0.5, "remove", 1e-5).value
    once = len(asked)
    assert prepared.delta(1.5, 0.52, "remove", 1e-5).value < first
    assert len(asked) == once == len(set(asked))


@pytest.mark.parametrize("steps", [2, 20, 200])
def test_cut_short_it_is_sound(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves with every look at it, so that the work ends in the middle, the same way on every machine."""
    mechanism = Mechanism(strategies.bsr(3), BallsInBins(2, 3))
    goal = {"target_epsilon": 1.0, "target_delta": 1e-5, "accountant": "own-bin", "direction": "remove"}
    full = dpmf.calibrate(mechanism, **goal)
    ticks = iter(range(10**9))
    monkeypatch.setattr(budget.time, "monotonic", lambda: float(next(ticks)))
    found = dpmf.calibrate(mechanism, **goal, time_budget=float(steps))
    assert found.noise_multiplier >= full.noise_multiplier * (1 - 2e-3)
    assert found.delta <= 1e-5
    assert any(how.get("budget_exhausted") for how in found.details.values())


def test_arrays_are_claimed_before_they_are_made() -> None:
    s = Mechanism(strategies.bsr(3), BallsInBins(2, 100)).gram_upper() / 9
    with budget.memory_limit(50 * 8.0 * 100), pytest.raises(budget.OutOfMemory):
        Shared.of(s)


def test_a_curve_is_bounded_as_closely_as_each_of_its_points() -> None:
    """Bounds at strikes that were asked before serve others: none is below a certified lower bound."""
    mechanism = Mechanism(strategies.bsr(4), BallsInBins(2, 20))
    epsilons = [0.5 * k for k in range(7)]
    alone = {e: OwnBin().prepare(mechanism).delta(1.4, e, "remove").value for e in epsilons}
    lower = {e: lower_bounds.lower_delta(mechanism, 1.4, e, "remove") for e in epsilons}
    for order in (epsilons, epsilons[::-1]):
        prepared = OwnBin().prepare(mechanism)
        for epsilon in order:
            bound = prepared.delta(1.4, epsilon, "remove").value
            assert lower[epsilon] <= bound <= 1.02 * alone[epsilon]


def test_tiny_deltas_are_aimed_at_without_a_target() -> None:
    prepared = OwnBin().prepare(Mechanism(strategies.bsr(4), BallsInBins(2, 20)))
    alone = prepared.delta(1.4, 6.0, "remove").value
    assert alone <= 1.25 * prepared.delta(1.4, 6.0, "remove", 1e-10).value < 1e-9
