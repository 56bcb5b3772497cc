"""The lattice accountant against closed forms, quadrature, direct convolution, sampling and the reference σ."""

from __future__ import annotations

import itertools
import json
import math
import warnings

import numpy as np
import oracles
import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from dpmf import api
from dpmf.accountants.lattice import Lattice, uncorrelated_diagonal
from dpmf.accountants.lattice._weights import call_from_above, cell_weights, hat_weights
from dpmf.accountants.lattice.lognormal_sum import LognormalSum, grouped
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.batching import BallsInBins
from dpmf.calibration import calibrate_one_way
from dpmf.lower_bounds import lower_delta
from dpmf.mechanism import Mechanism
from dpmf.strategies import bsr, dpsgd, matrix

REFERENCE = [cell for cell in json.loads(paths.TRUE_SIGMA.read_text()) if cell["mechanism"] == "dpsgd N=100 k=1"]


def dpsgd_mechanism(b: int, epochs: int = 1, iterations: int | None = None) -> Mechanism:
    return Mechanism(dpsgd(), BallsInBins(epochs, b, iterations))


def upper(variances: object, epsilon: float, direction: str, loss: float = 0.0005) -> float:
    entries, counts = np.unique(np.asarray(variances, dtype=float), return_counts=True)
    law = LognormalSum.make(entries, counts, side="upper", loss=loss, max_points=2**17)
    assert law is not None
    found = law.delta(epsilon, direction)
    assert found is not None
    return found.value


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sigma", [0.2, 1.0, 7.0, 300.0])
def test_one_batch_is_the_gaussian_mechanism(sigma: float, direction: str) -> None:
    prepared = Lattice().prepare(dpsgd_mechanism(1, epochs=3))
    for epsilon in (0.0, 0.01, 0.5, 2.0, 10.0):
        exact = oracles.gaussian_delta(3 / sigma**2, epsilon)
        found = prepared.delta(sigma, epsilon, direction).value
        if exact > 1e-200:
            assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-9) + 1e-13 * math.exp(-epsilon)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("variances", [(1.0, 1.0), (9.0, 2.0), (0.01, 0.01), (0.3, 0.3, 0.3), (2.0, 0.5, 1.0)])
def test_two_or_three_batches_against_quadrature(variances: tuple[float, ...], direction: str) -> None:
    checked = 0
    for epsilon in (0.0, 0.02, 0.1, 0.4, 1.0, 2.0, 4.0):
        exact = oracles.delta(np.diag(variances), epsilon, direction)
        if exact < 1e-12:
            continue
        found = upper(variances, epsilon, direction)
        assert exact * (1 - 1e-7) <= found <= exact * 1.02
        checked += 1
    assert checked >= 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.02, 8.0), min_size=2, max_size=3),
    st.floats(0.0, 5.0),
    st.sampled_from(DIRECTIONS),
    st.sampled_from([0.0005, 0.01, 0.3]),
)
def test_never_below_the_truth(variances: list[float], epsilon: float, direction: str, loss: float) -> None:
    exact = oracles.delta(np.diag(variances), epsilon, direction)
    if exact > 1e-12:
        assert upper(variances, epsilon, direction, loss) >= exact * (1 - 1e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("b", "sigma", "epsilon"), [(7, 0.8, 0.5), (7, 0.8, 3.0), (40, 2.0, 0.3), (150, 1.0, 0.8)])
def test_refinement_decreases_to_a_limit(b: int, sigma: float, epsilon: float, direction: str) -> None:
    values = [upper([1 / sigma**2] * b, epsilon, direction, loss) for loss in (0.08, 0.02, 0.005, 0.00125, 0.0003)]
    assert all(fine <= coarse * (1 + 1e-9) for coarse, fine in itertools.pairwise(values))
    # Second order: four times the work divides what is left by four.
    assert values[-2] - values[-1] <= 0.5 * (values[-3] - values[-2]) + 1e-4 * values[-1]
    assert values[-1] >= lower_delta(np.eye(b), sigma, epsilon, direction) * (1 - 1e-12)


def test_against_direct_convolution() -> None:
    """The slow twin: the lattice law convolved term by term, its payoffs summed as they stand."""
    s, b, epsilon = 0.7, 6, 0.6
    strike = b * math.exp(epsilon)
    law = LognormalSum.make(np.array([s]), np.array([b]), side="upper", loss=0.01, max_points=2**14)
    assert law is not None
    found = law.option("call", strike)
    weight, _ = hat_weights(s, found.step, 0, round(strike / found.step))
    total = np.ones(1)
    for _ in range(b):
        total = np.convolve(total, weight)
    node = found.step * np.arange(len(total))
    direct = float((total * np.maximum(node - strike, 0)).sum()) + b * call_from_above(s, strike)
    assert found.value == pytest.approx(direct, rel=2e-3)  # the lattice may end before the strike


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_against_sampling(direction: str) -> None:
    b, sigma, epsilon = 30, 1.2, 0.4
    rng = np.random.default_rng(7)
    ratio = np.exp(rng.standard_normal((200_000, b)) / sigma - 0.5 / sigma**2).mean(axis=1)
    gain = ratio - math.exp(epsilon) if direction == "remove" else 1 - math.exp(epsilon) * ratio
    sample = np.maximum(gain, 0)
    error = 5 * sample.std() / math.sqrt(len(sample))
    found = upper([sigma**-2] * b, epsilon, direction)
    assert sample.mean() - error <= found <= (sample.mean() + error) * 1.01


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", REFERENCE, ids=lambda cell: f"{cell['epsilon']}-{cell['delta']}")
def test_reference_noise_multipliers(cell: dict[str, float], direction: str) -> None:
    """Within 0.5 % above the sampled truth, and δ there not below the target beyond the sampling error."""
    if f"sigma_{direction}" not in cell:
        pytest.skip("no reference for this cell")
    mechanism, truth = dpsgd_mechanism(100), cell[f"sigma_{direction}"]
    found = api.calibrate(
        mechanism, target_epsilon=cell["epsilon"], target_delta=cell["delta"], accountant="lattice", direction=direction
    )
    assert found.noise_multiplier <= 1.005 * truth
    at_truth = Lattice().prepare(mechanism).delta(truth, cell["epsilon"], direction).value
    assert at_truth >= cell["delta"] * (1 - 5 * cell[f"rel_se_delta_{direction}"])


def test_small_deltas_and_large_b_stay_tight() -> None:
    """Nothing but the certified lower bound knows the truth here: the two are within a few percent of δ."""
    for b, sigma, epsilon in [(100, 1.374, 1.0), (100, 2.634, 0.25), (1000, 0.5215, 8.0), (3, 1.0, 6.2)]:
        value = upper([sigma**-2] * b, epsilon, "remove")
        assert 1e-13 < value < 1e-11
        assert lower_delta(np.eye(b), sigma, epsilon, "remove") >= 0.96 * value
    mechanism = dpsgd_mechanism(100_000)
    sigma, found, _ = calibrate_one_way([Lattice().prepare(mechanism)], 0.25, 1e-5, "remove", 1.0, 1e-3)
    assert 0.49 < sigma < 0.4915
    assert lower_delta(mechanism, sigma, 0.25, "remove") >= 0.98 * found.value


@pytest.mark.parametrize(("epsilon", "sigma"), [(250.0, 0.04), (300.0, 0.04), (400.0, 0.035)])
def test_puts_on_tiny_strikes_are_not_negligible(epsilon: float, sigma: float) -> None:
    """At a large ε the put of "add" is below its strike b·e^(−ε), which is tiny: δ is their quotient."""
    variances, counts = np.array([1 / sigma**2]), np.array([100])
    above, below = (
        LognormalSum.make(variances, counts, side=side, loss=5e-4, max_points=2**17) for side in ("upper", "lower")
    )
    assert above is not None
    assert below is not None
    upper, lower = above.delta(epsilon, "add"), below.delta(epsilon, "add")
    assert upper is not None
    assert lower is not None
    assert lower.value <= upper.value <= 1.05 * lower.value


def test_cut_off_last_epoch_has_two_variances() -> None:
    mechanism = dpsgd_mechanism(5, epochs=3, iterations=12)
    assert uncorrelated_diagonal(mechanism).tolist() == [3, 3, 2, 2, 2]
    assert np.array_equal(np.diag(uncorrelated_diagonal(mechanism)), mechanism.gram)
    prepared = Lattice().prepare(mechanism)
    value = prepared.delta(3.0, 0.3, "remove").value
    assert value == pytest.approx(upper(np.array([3, 3, 2, 2, 2]) / 9, 0.3, "remove"), rel=1e-6)
    assert upper([2 / 9] * 5, 0.3, "remove") < value < upper([3 / 9] * 5, 0.3, "remove")


def test_many_variances_are_rounded_up() -> None:
    rng = np.random.default_rng(3)
    norms = np.sort(rng.uniform(0.5, 1.5, 90))
    mechanism = Mechanism(matrix(np.diag(norms)), BallsInBins(1, 90))
    entries, counts = grouped(norms**2, "upper")
    assert len(entries) <= 64
    assert counts.sum() == 90
    assert np.all(np.repeat(entries, counts) >= norms**2)
    low_entries, low_counts = grouped(norms**2, "lower")
    assert np.all(np.repeat(low_entries, low_counts) <= norms**2)
    for direction in DIRECTIONS:
        value = Lattice().prepare(mechanism).delta(1.5, 0.3, direction).value
        exact = upper(norms**2 / 1.5**2, 0.3, direction)
        assert exact * 0.999 <= value <= 1.2 * exact
        assert 0.5 * exact <= lower_delta(mechanism, 1.5, 0.3, direction) <= exact


def test_correlated_noise_is_refused() -> None:
    mechanism = Mechanism(bsr(4), BallsInBins(1, 10))
    assert uncorrelated_diagonal(mechanism) is None
    with pytest.raises(ValueError, match=r"uncorrelated noise .*, got BSR"):
        Lattice().prepare(mechanism)
    with pytest.raises(ValueError, match="uncorrelated"):
        Lattice().prepare(Mechanism(matrix(oracles.bsr_matrix(2, 6)), BallsInBins(1, 6)))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="discretisation_loss must be positive"):
        Lattice(discretisation_loss=0.0)
    with pytest.raises(ValueError, match="max_points must be at least 64"):
        Lattice(max_points=3)


@pytest.mark.parametrize("b", [1, 2, 60, 5000])
def test_extremes_give_probabilities_without_warnings(b: int) -> None:
    prepared = Lattice(discretisation_loss=0.02, max_points=4096).prepare(dpsgd_mechanism(b))
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        for direction in DIRECTIONS:
            for sigma in (1e-8, 1e-3, 0.03, 0.3, 1.0, 10.0, 1e3, 1e6, 1e9):
                values = [
                    prepared.delta(sigma, epsilon, direction).value
                    for epsilon in (0.0, 1e-6, 0.01, 0.3, 2.0, 8.0, 50.0, 1000.0)
                ]
                assert all(0 <= value <= 1 for value in values)
                # Monotone up to the discretisation, and up to what no one can tell from 0.
                assert all(y <= 1.1 * x + 1e-50 for x, y in itertools.pairwise(values))
                assert values[-2] < 1e-12 or sigma < 0.3


@pytest.mark.parametrize(("s", "step", "first", "last"), [(1.0, 0.1, 0, 60), (0.04, 0.02, 20, 90), (9.0, 3.0, 0, 40)])
def test_weights_are_second_differences_of_calls(s: float, step: float, first: int, last: int) -> None:
    node, root = step * np.arange(first, last + 1), math.sqrt(s)
    weight, below = hat_weights(s, step, first, last)
    z = (np.log(np.maximum(node, 1e-300)) + s / 2) / root
    capped = np.append(np.where(node > 0, ndtr(root - z) - node * ndtr(-z), 1.0), np.nan)
    slope = np.diff(capped)[:-1] / step
    assert weight[1:-1] == pytest.approx(np.diff(slope), abs=1e-13)
    assert weight.sum() == pytest.approx(1, abs=1e-11)
    floor = node[0] * ndtr(z[0]) - ndtr(z[0] - root) if first else 0.0
    assert (weight * node).sum() == pytest.approx(1 + floor - call_from_above(s, node[-1]), abs=1e-10)
    assert below == pytest.approx(float(ndtr(z[0])) if first else 0.0, rel=1e-11)
    mass, moment, error = cell_weights(s, step, first, last)
    assert mass.sum() == pytest.approx(1, abs=1e-11)
    assert moment.sum() == pytest.approx(1, abs=1e-11)
    assert 0 < error < 1e-11


@pytest.mark.parametrize(
    "diagonal", [[1.0, 0.0], [1.0, 1e-3], [1.0, 1e-8, 0.5], [1.0, *[1e-4] * 9], [1.0] * 5 + [0.0] * 5]
)
@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
def test_very_unequal_diagonals(diagonal: list[float], sigma: float) -> None:
    """Found by the soundness tests: a bin that hardly matters used to ask for petabytes."""
    mechanism = Mechanism(matrix(np.diag(np.sqrt(diagonal))), BallsInBins(1, len(diagonal)))
    for direction in ("remove", "add"):
        upper = api.delta(
            mechanism, noise_multiplier=sigma, epsilon=0.1, accountant="lattice", direction=direction
        ).delta
        lower = lower_delta(mechanism, sigma, 0.1, direction)
        assert lower <= upper
        # Variances far below the largest are moved up (or dropped, from below), which add feels most.
        assert upper <= (1.2 if direction == "remove" else 30) * lower + 1e-12
