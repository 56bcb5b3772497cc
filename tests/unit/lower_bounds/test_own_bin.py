"""Moments around the own bin, from below: against quadrature and enumeration, and the sampled σ."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import knobs
import numpy as np
import oracles
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import FOUR_BINS_DELTA, log_uniform, mechanisms, random_matrix, random_settings, signal_to_noise
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import norm

from dpmf import strategies
from dpmf.accountants import OwnBin
from dpmf.accountants.own_bin._given_bin import GivenBin, Shared, raised_part
from dpmf.batching import BallsInBins
from dpmf.lower_bounds import _own_bin
from dpmf.lower_bounds._own_bin import OwnBins
from dpmf.mechanism import Mechanism

GRAM = np.array([[1.0, 0.6, 0.2], [0.6, 1.1, 0.5], [0.2, 0.5, 0.9]])
TRUTH = json.loads(paths.TRUE_SIGMA.read_text())


def bins_of(gram: np.ndarray, error: float = 1e-15) -> OwnBins:
    found = OwnBins.of(gram, error)
    assert found is not None
    return found


# --- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [0.01, 0.8, 3.0])
@pytest.mark.parametrize("spacing", [0.05, 0.3, 1.0, 20.0])
def test_cells_have_their_means_and_probabilities(spacing: float, own: float) -> None:
    edges, centres, weights = _own_bin._cells(own, spacing)
    assert edges[0] == pytest.approx(own + _own_bin._TUNING.ends[0])
    assert edges[-1] == pytest.approx(own + _own_bin._TUNING.ends[1])
    for low, high, centre, weight in zip(edges[:-1], edges[1:], centres, weights, strict=True):
        assert high - low < 1 + 1e-12  # wider ones would be too much for the quadrature
        mass = quad(norm.pdf, low, high, epsabs=0, epsrel=1e-13)[0]
        mean = quad(lambda t: t * norm.pdf(t), low, high, epsabs=1e-300, epsrel=1e-13)[0] / mass
        assert abs(mean - centre) < _own_bin._SLIP
        exact = mass * math.exp(own * centre - own * own / 2)
        assert exact * (1 - 3e-9) < weight < exact
    assert _own_bin._cells(20.0, spacing)[1:] == ([], [])


def test_terms_are_below_in_all_of_a_cell() -> None:
    """Terms have loads between 0 and 2·l_i, and are nowhere above the true ones."""
    unequal = np.random.default_rng(3).random((6, 6)) ** 3 + np.diag([0.3, 2.0, 0.3, 0.3, 0.3, 0.3])
    distances = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    ring = 2.0 ** -np.minimum(distances, 6 - distances)
    seen = set()
    for s, index in [(s, index) for s in (unequal @ unequal.T / 3, ring) for index in range(6)]:
        shared = Shared.of(s)
        assert shared is not None
        given = GivenBin(shared, index)
        low, centre, high = given.own - 0.3, given.own + 0.1, given.own + 0.4
        loads = np.clip(given.loads, 0.0, 2 * given.own)
        seen |= {float(np.sign(x)) for x in given.loads - loads}
        start = np.where(given.loads < 0, given._terms(high), given._terms(low) * np.exp(loads * (centre - low)))
        start = np.where(given.loads == loads, given._terms(centre), start)
        for tau in np.linspace(low, high, 7):
            assert np.all(start * np.exp(loads * (tau - centre)) <= given._terms(tau) * (1 + 1e-12))
        assert given.below(low, centre, high, 0.5).mean == pytest.approx(float(start.mean()), rel=1e-12)
        assert given.means([centre])[0] == pytest.approx(given.at(centre).mean, rel=1e-12)
    assert seen == {-1.0, 0.0, 1.0}


def test_one_bin_by_quadrature() -> None:
    """Two bins: given τ only one normal variable is left, and Jensen's inequality over a cell loses little."""
    s, epsilon = np.array([[1.2, 0.3], [0.3, 0.9]]), 0.7
    strike = math.exp(epsilon)
    x = np.linspace(-8, 8, 2001)
    weights = norm.pdf(x) * (x[1] - x[0])
    exact = []
    for i in range(2):  # u_i = S_ii + √S_ii·x along one axis, what is left of the other u along the other
        j = 1 - i
        own = s[i, i] + math.sqrt(s[i, i]) * x
        other = (s[i, j] / s[i, i] * own)[:, None] + math.sqrt(s[j, j] - s[i, j] ** 2 / s[i, i]) * x
        ratio = (np.exp(own - s[i, i] / 2)[:, None] + np.exp(other - s[j, j] / 2)) / 2
        exact.append(float(weights @ np.maximum(1 - strike / ratio, 0.0) @ weights))
    shared = Shared.of(s * (1 - 1e-8))
    assert shared is not None
    for i in range(2):
        found = _own_bin._of_bin(GivenBin(shared, i), shared.variance, strike, 0.1)
        assert 0.9 * exact[i] < found < exact[i]
    assert float(np.mean(exact)) == pytest.approx(oracles.delta(s, epsilon, "remove"), rel=1e-5)


# --- never above the truth -------------------------------------------------------------------------------------------


@random_settings(60)
@given(mechanisms(), log_uniform(0.2, 30), st.floats(0.0, 5.0))
def test_between_nothing_and_the_truth(mechanism: Mechanism, sigma: float, epsilon: float) -> None:
    bins = OwnBins.of(mechanism.gram, mechanism.gram_error)
    if bins is not None:
        truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, "remove")
        assert 0.0 <= bins.delta(sigma, epsilon) <= truth * (1 + 1e-7) + 1e-15


def test_any_knobs_and_any_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    closest = 0.0
    for change, tuning in knobs.perturbed(_own_bin._Tuning(most_terms=4)):
        for _ in range(3):
            means = rng.random((3, 4)) ** 2
            gram, epsilon = means @ means.T / rng.uniform(0.2, 3.0), rng.uniform(0.0, 3.0)
            monkeypatch.setattr(_own_bin, "_TUNING", tuning)
            bins = OwnBins.of(gram, 1e-15)
            if bins is not None:
                truth = oracles.delta(gram, epsilon, "remove")
                found = bins.delta(1.0, epsilon)
                assert found <= truth, change
                closest = max(closest, found / truth)
    assert closest > 0.9


def test_four_bins_with_terms_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = Mechanism(strategies.matrix(random_matrix(8, 0)), BallsInBins(2, 4))
    sigma = math.sqrt(float(mechanism.gram.max()) / 0.6)
    upper = OwnBin().prepare(mechanism)
    values = []
    for terms in (1, 2, 3, 4):
        monkeypatch.setattr(_own_bin, "_TUNING", _own_bin._Tuning(most_terms=terms))
        values.append(bins_of(mechanism.gram, mechanism.gram_error).delta(sigma, 0.2))
    assert values == sorted(values)
    assert 0.8 * FOUR_BINS_DELTA < values[-1] <= FOUR_BINS_DELTA <= upper.delta(sigma, 0.2, "remove").value


def test_a_few_bins_say_about_what_all_of_them_say(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = Mechanism(strategies.bsr(4), BallsInBins(5, 24))
    sigma = math.sqrt(float(mechanism.gram.max()) / 0.8)
    bins = bins_of(mechanism.gram, mechanism.gram_error)
    assert bins.about(sigma, 1.0) == pytest.approx(bins.delta(sigma, 1.0), rel=0.1)
    for asked in (1, 24, 100):
        monkeypatch.setattr(_own_bin, "_TUNING", replace(_own_bin._TUNING, sampled_bins=asked))
        assert bins.about(sigma, 1.0) == pytest.approx(bins.delta(sigma, 1.0), rel=1e-8 if asked >= 24 else 0.3)
    assert bins.about(1e-3, 1.0) == bins.about(1.0, 1e4) == 0.0


def test_terms_far_away_matter_at_moderate_epsilon() -> None:
    """δ is 1e-5 at a sampled σ of 2.099 ± 0.1 % (docs/tightness.md); a few of 242 bins, all of whose terms count."""
    mechanism = Mechanism(strategies.power(0.3, 0.98), BallsInBins(5, 242))
    bins = bins_of(mechanism.gram, mechanism.gram_error)
    assert bins.about(0.972 * 2.099, 0.94) > 1e-5
    assert bins.about(2.099, 0.94) < 1e-5


def test_one_term_is_a_single_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no other term A is replaced by a_i/b, which has a closed form."""
    monkeypatch.setattr(_own_bin, "_TUNING", _own_bin._Tuning(most_terms=1))
    s, jump = np.diag([2.25, 2.25]) + 0.01, 0.4 + math.log(2)
    root = math.sqrt(2.26)
    exact = float(ndtr(root / 2 - jump / root) - math.exp(jump) * ndtr(-root / 2 - jump / root))
    assert bins_of(s).delta(1.0, 0.4) <= exact
    monkeypatch.setattr(_own_bin, "_TUNING", _own_bin._Tuning())
    assert bins_of(s).delta(1.0, 0.4) > exact


@pytest.mark.parametrize("epsilon", [4.0, 8.0])
@pytest.mark.parametrize(("name", "made"), [("bsr64", strategies.bsr(64)), ("bisr64", strategies.bisr(64))])
def test_sampled_noise_multipliers(name: str, made: strategies.Strategy, epsilon: float) -> None:
    """At the sampled σ and 2 % below it."""
    cells = [cell for cell in TRUTH if (cell["mechanism"], cell["delta"]) == (f"{name} N=100 k=1", 1e-5)]
    (cell,) = (cell for cell in cells if cell["epsilon"] == epsilon)
    mechanism, truth = Mechanism(made, BallsInBins(1, 100)), cell["sigma_remove"]
    bins = bins_of(mechanism.gram, mechanism.gram_error)
    error = 5 * cell["rel_se_delta_remove"] + 0.01
    assert bins.delta(truth, epsilon) <= 1e-5 * (1 + error)
    assert bins.delta(0.98 * truth, epsilon) > 1e-5


# --- rounding, and where there is nothing to say ----------------------------------------------------------------------


def test_the_matrix_is_below_the_given_one() -> None:
    for error in (0.0, 1e-12, 1e-6):
        gram = np.where(np.eye(3, dtype=bool), GRAM * np.diag([1.0, 1e-3, 1.0]), 1e-4 * GRAM)
        bins = bins_of(gram, error)
        shared = Shared.of(bins.gram)
        assert shared is not None
        assert np.all(shared.s <= gram * (1 - error))
        assert np.all(shared.s >= gram * (1 - 1.1 * error - 3e3 * raised_part(len(gram))))


def test_nothing_is_said_out_of_range() -> None:
    assert OwnBins.of(np.array([[1.0]]), 0.0) is None
    assert OwnBins.of(np.diag([1.0, 1e-9]), 0.0) is None
    assert OwnBins.of(np.diag([1.0, 0.0]), 0.0) is None
    bins = bins_of(GRAM)
    assert bins.delta(1e-3, 1.0) == bins.delta(1e-200, 1.0) == bins.delta(1e200, 1.0) == bins.delta(1.0, 1e4) == 0.0
    assert bins_of(np.eye(3)).delta(1.0, 1.0) >= 0.0


def test_bins_that_share_nothing_are_made_to_share_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a v > 0 entries off the diagonal are lowered; δ is 1e-5 at a sampled σ of 1.281 (docs/tightness.md)."""
    coefficients = [1.0, 0.34, 0.6, 0.68, 0.07, 0.4, 0.2, 0.92, 0.05, 0.54, 0.84, 0.45]
    bins = bins_of(Mechanism(strategies.coefficients(coefficients), BallsInBins(1, 107)).gram)
    assert Shared.of(bins.gram) is None
    assert 3e-6 < bins.delta(1.281, 3.4) < 1e-5
    monkeypatch.setattr(_own_bin, "_TUNING", replace(_own_bin._TUNING, shrunk=(0.0,)))
    assert bins.delta(1.281, 3.4) == 0


@pytest.mark.parametrize("seed", range(6))
def test_singular_matrices_are_never_above_the_truth(seed: int) -> None:
    """Of rank one or two, so that nothing is left when something is taken off all entries."""
    rng = np.random.default_rng(seed)
    loads = rng.random((3, 1 + seed % 2)) + 0.2
    gram = loads @ loads.T
    for part in (0.0, 0.01, 0.3, 1.0, 2.0):
        lowered = _own_bin._shrunk(gram, part)
        assert np.all(lowered <= gram)
        assert np.array_equal(np.diagonal(lowered), np.diagonal(gram))
        assert np.linalg.eigvalsh(lowered).min() >= -1e-12
    for sigma, epsilon in ((1.0, 0.3), (0.6, 1.5), (2.0, 0.1)):
        truth = oracles.delta(gram / sigma**2, epsilon, "remove")
        assert bins_of(gram).delta(sigma, epsilon) <= truth * (1 + 1e-7)
