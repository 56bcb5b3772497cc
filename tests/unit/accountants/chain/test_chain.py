"""The chain accountant: never below the exact δ(ε), close to it from above, and an answer for every Gram matrix."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import oracles
import paths
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpmf import strategies
from dpmf.accountants.chain import Chain, _spreads
from dpmf.accountants.chain._block_fits import separators
from dpmf.accountants.chain._blocks import SeparatorModel
from dpmf.accountants.chain._bound import ChainBound
from dpmf.accountants.chain._geometric import exact_chain
from dpmf.accountants.chain._inversion import invert_puts, invert_tilted
from dpmf.accountants.chain._lines import LineModel, chain_covariance
from dpmf.accountants.chain._majorants import candidates, cost_of, line_chain, raised, ring_chain, shared_factor
from dpmf.accountants.chain._spreads import Band, Option, Resolution, TermTable, Transition, hat_weights
from dpmf.accountants.lattice import Lattice
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.batching import BallsInBins
from dpmf.kernels.chain import block_transforms, multiply_terms, trace_of_power
from dpmf.mechanism import Mechanism

DIRECTIONS = ("remove", "add")
TRUTH = json.loads(paths.TRUE_SIGMA.read_text())


def mechanism_of(gram_root: np.ndarray, epochs: int = 1) -> Mechanism:
    n = len(gram_root)
    return Mechanism(strategies.matrix(gram_root), BallsInBins(epochs, n // epochs))


def own_delta(model, sigma: float, epsilon: float, direction: str) -> float:
    """δ(ε) of the majorant itself, by quadrature."""
    return oracles.delta(model.covariance() / sigma**2, epsilon, direction)


# --- spreads, tables, kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", [0.04, 0.3, 1.0])
@pytest.mark.parametrize("slope", [0.0, 0.4, 2.0])
def test_spreads_keep_mass_and_mean(slope, deviation):
    nodes = -9.0 + 0.3 * np.arange(81)
    means = np.array([-1.0, 0.0, 0.77, 2.5])
    weights, left = hat_weights(nodes, means, deviation, slope)
    np.testing.assert_allclose(weights.sum(axis=1) + left, 1.0, rtol=1e-9)
    if slope:
        expected = np.exp(slope * means + (slope * deviation) ** 2 / 2)
        np.testing.assert_allclose(weights @ np.exp(slope * nodes), expected, rtol=1e-9)
    else:
        np.testing.assert_allclose(weights @ nodes, means, atol=1e-9)


def test_spreads_have_relative_accuracy_in_the_tails():
    from scipy.integrate import quad

    nodes = 0.25 * np.arange(-40, 41)
    weights, _ = hat_weights(nodes, np.zeros(1), 1.0, 0.0)
    for j in (5, 12, 40, 70):

        def density(x: float, centre: float = nodes[j]) -> float:
            return (1 - abs(x - centre) / 0.25) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

        halves = [
            quad(density, *ends, epsrel=1e-12)[0] for ends in ((nodes[j - 1], nodes[j]), (nodes[j], nodes[j + 1]))
        ]
        assert weights[0, j] == pytest.approx(sum(halves), rel=1e-9)
        assert weights[0, j] >= sum(halves) * (1 - 1e-13)


def test_kernels_against_numpy():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(2, 6, 2, 3))
    as_complex = table[:, :, 0] + 1j * table[:, :, 1]
    rows, shares = rng.integers(0, 5, size=(4, 2, 3)), rng.uniform(size=(4, 2, 3))
    kinds, weights = np.array([0, 1, 0]), rng.uniform(size=2)
    term = (1 - shares[..., None]) * as_complex[kinds, rows] + shares[..., None] * as_complex[kinds, rows + 1]
    out = np.empty((4, 2, 3))
    no_floor = np.full(3, -np.inf)
    block_transforms(table, kinds, rows, shares, weights, no_floor, out)
    expected = np.einsum("q,jqk->jk", weights, term.prod(axis=2))
    np.testing.assert_allclose(out[:, 0] + 1j * out[:, 1], expected, rtol=1e-12)

    values = rng.normal(size=(4, 2, 3))
    before = values[:, 0] + 1j * values[:, 1]
    multiply_terms(values, table[0], rows[:, 0, 0].copy(), shares[:, 0, 0].copy(), no_floor)
    np.testing.assert_allclose(values[:, 0] + 1j * values[:, 1], before * term[:, 0, 0], rtol=1e-12)

    for exponent in (1, 2, 3, 7, 20):
        matrix = rng.normal(size=(2, 5, 5)) / 3
        expected = np.trace(np.linalg.matrix_power(matrix[0] + 1j * matrix[1], exponent))
        assert trace_of_power(matrix.copy(), exponent, -math.inf) == pytest.approx(expected, rel=1e-10)


def test_table_of_terms_is_mean_preserving():
    table = TermTable(-2.0, 1.5, 0.05, np.array([0.0, 0.09]), 100.0, 10)
    y = np.array([-6.0, -1.234, 0.4])
    row, share = table.locate(y)
    tiny = 1e-40
    transform = table.transforms(np.array([1j * tiny]))
    for kind in (0, 1):
        imaginary = transform[kind, :, 1, 0]
        mean = ((1 - share) * imaginary[row] + share * imaginary[row + 1]) / tiny + 10
        np.testing.assert_allclose(mean, np.exp(y), rtol=1e-9, atol=1e-9)


def _call_on_a_normal(strike: float) -> float:
    z = (strike - 100) / 10
    return 10 * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * 0.5 * math.erfc(z / math.sqrt(2)))


@pytest.mark.parametrize("strike", [110.0, 140.0, 180.0])
@pytest.mark.parametrize("others", [(), (1.0, 4.0)], ids=["one strike", "three strikes"])
@pytest.mark.parametrize("sign", [1, -1], ids=["call", "put"])
def test_inversions_of_a_gaussian_sum(strike, others, sign):
    """T ~ N(100, 100): all inversions are above the closed form, and close to it, at every strike of a pass."""

    def transform(s: np.ndarray) -> np.ndarray:
        return np.exp(s * (100 - top) + 50 * s**2)

    top = strike if sign > 0 else 200 - strike
    gap = np.array([0.0, *others])
    # The normal law is symmetric: a put at 100 − x is worth what a call at 100 + x is.
    expected = np.array([_call_on_a_normal(100 + sign * (top - g - 100)) for g in gap])
    law = SimpleNamespace(option=Option(top, sign, 100, 1e-6), surplus=0.0, rounding=1e-13, transform=transform)
    tilted = invert_tilted(law, top - gap, (strike - 100) / 100, loss=0.005, most=4000)
    assert all(one is not None for one in tilted)
    values = np.array([one.value for one in tilted if one is not None])
    assert np.all((expected <= values) & (values <= expected * 1.03))
    if strike < 150 and sign > 0:
        law.rounding = 1e-15
        by_parity = invert_puts(law, top - gap, loss=0.01, most=4096)
        values = np.array([one.value for one in by_parity if one is not None])
        assert len(values) == len(gap)
        assert np.all((expected <= values) & (values <= expected * 1.03))


# --- majorants -----------------------------------------------------------------------------------------------------

GRAMS = {
    "bsr4 ring": (strategies.bsr(4), BallsInBins(5, 40)),
    "bisr4 ring": (strategies.bisr(4), BallsInBins(5, 40)),
    "bsr16 line": (strategies.bsr(16), BallsInBins(1, 40)),
    "bsr3 odd ring": (strategies.bsr(3), BallsInBins(2, 37)),
    "dpsgd": (strategies.dpsgd(), BallsInBins(1, 20)),
}


@pytest.mark.parametrize("name", GRAMS)
def test_majorants_dominate(name):
    gram = Mechanism(*GRAMS[name]).gram
    models = [ring_chain(gram, 0.0), ring_chain(gram, 3.0), shared_factor(gram)]
    if name.endswith("line"):
        models.append(line_chain(gram, 0.0))
    for model in models:
        assert np.all(model.covariance() >= gram)
        assert np.linalg.eigvalsh(model.covariance()).min() >= -1e-9
    for model in (separators(gram, 0.0), separators(gram, 3.0)):
        if model is not None:
            # On a ring that is cut to whole blocks, a window of the indices is what must be dominated.
            kept = model.size
            assert len(gram) - 8 < kept <= len(gram)
            for start in range(0, len(gram), 3):
                window = (start + np.arange(kept)) % len(gram)
                assert np.all(model.covariance() >= gram[np.ix_(window, window)])


@pytest.mark.parametrize("first", [0.25, 1.0])
def test_geometric_memory_is_a_chain(first):
    coefficients = 0.25 * 0.9 ** np.arange(60)
    coefficients[0] = first
    gram = Mechanism(strategies.coefficients(coefficients), BallsInBins(1, 60)).gram
    model = exact_chain(gram, raised)
    assert model is not None
    assert not model.loads.any()
    assert np.all(model.covariance() >= gram)
    np.testing.assert_allclose(model.covariance(), gram, rtol=1e-8)
    lines = [found for name, found in candidates(gram, 3.0) if name == "line 3"]
    np.testing.assert_array_equal(lines[0].covariance(), model.covariance())


@pytest.mark.parametrize("strategy", [strategies.power(0.5), strategies.bisr(8), strategies.bsr(4)], ids=str)
def test_other_memory_is_not_taken_for_a_chain(strategy):
    for epochs in (1, 3):
        assert exact_chain(Mechanism(strategy, BallsInBins(epochs, 40)).gram, raised) is None


def test_chain_covariance_and_repair():
    deviations, correlations = np.array([1.0, 2.0, 0.5]), np.array([0.5, 0.8])
    expected = [[1.0, 1.0, 0.2], [1.0, 4.0, 0.8], [0.2, 0.8, 0.25]]
    np.testing.assert_allclose(chain_covariance(deviations, correlations), expected)
    gram = np.array([[2.0, 1.5, 0.9], [1.5, 3.0, 1.0], [0.9, 1.0, 1.0]])
    model = raised(LineModel(np.zeros(3), deviations, correlations, np.zeros(3)), gram)
    assert np.all(model.covariance() >= gram)


# --- soundness -----------------------------------------------------------------------------------------------------


@st.composite
def small_mechanisms(draw: st.DrawFn) -> Mechanism:
    b = draw(st.integers(1, 3))
    n = b * draw(st.integers(1, 2))
    entries = st.one_of(st.just(0.0), st.floats(0.05, 1.5))
    full = np.zeros((n, n))
    full[np.tril_indices(n)] = draw(st.lists(entries, min_size=n * (n + 1) // 2, max_size=n * (n + 1) // 2))
    full[0, 0] = draw(st.floats(0.1, 1.5))
    return Mechanism(strategies.matrix(full), BallsInBins(n // b, b))


@given(small_mechanisms(), st.floats(math.log(0.25), math.log(8)), st.sampled_from([0.0, 0.05, 0.5, 1.0, 3.0]))
@settings(deadline=None, max_examples=12, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
def test_never_below_quadrature(mechanism, log_sigma, epsilon):
    sigma = math.exp(log_sigma)
    truth = oracles.gram(mechanism.strategy.matrix(mechanism.batching.iterations), len(mechanism.gram)) / sigma**2
    prepared = Chain(discretisation_loss=0.02).prepare(mechanism)
    for direction in DIRECTIONS:
        exact = oracles.delta(truth, epsilon, direction)
        for member in prepared.bounds():
            bounds = [member.delta(sigma, epsilon, direction)]
            if member is prepared.bounds()[0]:
                bounds.append(member.delta(sigma, epsilon, direction, 1e-5))
                bounds.append(member.rough_delta(sigma, epsilon, direction, 1e-5))
            for found in bounds:
                assert exact * (1 - 1e-7) - 1e-16 <= found.value <= 1.0, (direction, found)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "epsilon"), [(3.0, 0.1), (1.0, 1.0), (0.6, 3.0)])
def test_refinement_decreases_to_the_majorants_own_value(sigma, epsilon, direction):
    mechanism = mechanism_of(np.array([[0.9, 0, 0], [0.5, 1.0, 0], [0.3, 0.4, 0.8]]))
    member = Chain().prepare(mechanism).bounds()[0]
    exact = own_delta(member.model, sigma, epsilon, direction)
    values = [
        Chain(discretisation_loss=loss).prepare(mechanism).bounds()[0].delta(sigma, epsilon, direction).value
        for loss in (0.08, 0.02, 0.005)
    ]
    assert all(fine <= coarse * 1.002 for coarse, fine in itertools.pairwise(values))
    assert exact <= values[-1] <= exact * 1.1


def test_spreads_alone_are_above_the_exact_transform():
    """E e^(−θT) of the discretised law, a convex decreasing payoff, is at least the exact one (by Monte Carlo)."""
    model = LineModel(np.array([0.3, 0.3]), np.array([0.4, 0.5]), np.array([0.7]), np.array([0.05, 0.0]))
    rng = np.random.default_rng(0)
    u = rng.multivariate_normal(np.zeros(2), model.covariance(), size=400_000) - np.diagonal(model.covariance()) / 2
    total = np.exp(u).sum(axis=1)
    law = model.law(60.0, -1, Resolution(), 1e-9)
    for theta in (0.5, 2.0):
        exact = np.exp(-theta * total)
        found = law.transform(np.array([-theta + 0j]))[0].real * math.exp(-60 * theta)
        error = exact.std() / math.sqrt(len(exact))
        assert exact.mean() - 4 * error <= found <= exact.mean() * 1.01 + 4 * error


# --- against what is known -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "epsilon"), [(1.5, 0.25), (0.9, 1.0), (0.5, 1.5)])
def test_uncorrelated_noise_agrees_with_the_lattice(sigma, epsilon, direction):
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, 100))
    chain = Chain().prepare(mechanism).delta(sigma, epsilon, direction).value
    lattice = Lattice().prepare(mechanism).delta(sigma, epsilon, direction).value
    assert lattice * 0.98 <= chain <= lattice * 1.2


FIGURES = {0.25: 1.05, 1: 1.03, 4: 1.02, 8: 1.02}


@cache
def long_run(bsr: bool) -> PreparedAccountant:
    return Chain().prepare(Mechanism(strategies.bsr(4) if bsr else strategies.bisr(4), BallsInBins(10, 100)))


@pytest.mark.parametrize(
    ("name", "epsilon"),
    [("bsr4 N=1000 k=10", 0.25), ("bsr4 N=1000 k=10", 4), ("bisr4 N=1000 k=10", 1), ("bisr4 N=1000 k=10", 8)],
)
def test_reference_sigmas_are_approached_from_above(name, epsilon):
    """At σ_true the bound is above δ, within Monte Carlo error; a few percent more noise meets it."""
    prepared = long_run(name.startswith("bsr"))
    (row,) = (r for r in TRUTH if (r["mechanism"], r["delta"], r["epsilon"]) == (name, 1e-5, epsilon))
    for direction in DIRECTIONS if epsilon == 1 else ("remove",):
        true, error = row[f"sigma_{direction}"], row[f"rel_se_delta_{direction}"]
        factor = FIGURES[epsilon] if direction == "remove" else 1.04
        for member in prepared.bounds():
            assert member.delta(true, epsilon, direction, 1e-5).value >= 1e-5 * (1 - 4 * error)
        enough = [member.delta(true * factor, epsilon, direction, 1e-5).value for member in prepared.bounds()]
        assert min(enough) <= 1e-5


# --- every Gram matrix gets an answer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(strategies.dpsgd(), BallsInBins(1, 1)),
        Mechanism(strategies.bsr(2), BallsInBins(3, 2)),
        Mechanism(strategies.bsr(30), BallsInBins(3, 12)),
        Mechanism(strategies.bisr(3), BallsInBins.from_iterations(25, 10)),
        mechanism_of(np.array([[1.0, 0, 0, 0], [0, 0, 0, 0], [3.0, 0, 0.01, 0], [0, 0, 0, 0]])),
        mechanism_of(np.tril(np.ones((8, 8)))),
    ],
    ids=["one bin", "two bins", "wide band", "cut-off epoch", "zero columns", "all ones"],
)
def test_any_gram_matrix_gets_an_answer(mechanism):
    prepared = Chain(discretisation_loss=0.05).prepare(mechanism)
    for direction in DIRECTIONS:
        largest = 1.0
        for epsilon in (0.0, 0.5, 2.0):
            value = prepared.delta(2.0, epsilon, direction).value
            assert 0.0 <= value <= largest * (1 + 1e-9)
            largest = value


@pytest.mark.parametrize("strategy", [strategies.dpsgd(), strategies.bsr(3), strategies.bisr(3)], ids=str)
def test_extremes(strategy):
    prepared = Chain(discretisation_loss=0.05).prepare(Mechanism(strategy, BallsInBins(2, 12)))
    for sigma in (1e-3, 0.05, 0.4, 30.0, 1e6):
        for epsilon in (0.0, 1.0, 50.0):
            for direction in DIRECTIONS:
                value = prepared.delta(sigma, epsilon, direction).value
                assert 0.0 <= value <= 1.0
    assert prepared.delta(1e-3, 1.0, "remove").value > 0.99
    assert prepared.delta(1e6, 1.0, "remove").value < 1e-9


def test_small_deltas():
    """δ down to 10⁻¹²: the plain Gaussian mechanism (all means equal) is known in closed form."""
    full = np.zeros((3, 3))
    full[2] = 1.0
    mechanism = mechanism_of(full)
    (member, *_) = Chain().prepare(mechanism).bounds()
    for sigma, epsilon in ((6.0, 0.9), (3.0, 2.0)):
        exact = oracles.gaussian_delta(1 / sigma**2, epsilon)
        for direction in DIRECTIONS:
            assert exact * (1 - 1e-9) <= member.delta(sigma, epsilon, direction).value <= 1.5 * exact


def test_options_are_checked():
    with pytest.raises(ValueError, match="discretisation_loss must be positive"):
        Chain(discretisation_loss=0.0)
    with pytest.raises(ValueError, match="max_frequencies must be at least 64"):
        Chain(max_frequencies=3)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("blocks", "closed"), [(3, True), (3, False), (2, True), (1, False)])
def test_separators_against_quadrature(blocks, closed, direction):
    """Rings and lines of so few blocks that quadrature can tell: the spreads alone are above, and close."""
    length = 3 if blocks == 1 else 1
    left, right, inner = np.linspace(0.8, 0.3, length), np.linspace(0.2, 0.7, length), np.full(length, 0.4)
    model = SeparatorModel(left, right, inner, np.full(length, 0.1), blocks, closed)
    keep = model.covariance()
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, model.size))
    member = ChainBound(mechanism, model, family="separators", largest=float(keep.max()))
    for sigma, epsilon in ((2.0, 0.3), (0.8, 1.5)):
        exact = own_delta(model, sigma, epsilon, direction)
        assert exact <= member.delta(sigma, epsilon, direction).value <= exact * 1.06


@pytest.mark.parametrize("sign", [1, -1])
def test_steps_without_long_jumps(sign):
    """What the trimmed step does to any payoff of its kind is above what the whole step does, and the band is exact."""
    nodes, top = -3.0 + 0.05 * np.arange(200), 0.8
    whole = Transition.of(nodes, nodes, 0.98, top, sign)
    trimmed = whole.trimmed(nodes, nodes, top, Option(20.0, sign, 10, 1e-3))
    assert np.count_nonzero(trimmed.matrix) < whole.matrix.size / 2
    for load in (0.1, 0.5, top):
        a = np.exp(load * nodes - load**2 / 2)
        for strike in (0.5, 2.0):
            payoff = np.maximum(sign * (a - strike), 0.0)
            added = (trimmed.above - whole.above) if sign > 0 else (trimmed.lost - whole.lost) * strike
            assert np.all(trimmed.matrix @ payoff + added >= (whole.matrix @ payoff) * (1 - 1e-14))
    band = Band.of(trimmed.matrix)
    values = np.random.default_rng(0).normal(size=(2, len(nodes), 5))
    np.testing.assert_allclose(band.apply(values), trimmed.matrix @ values, rtol=1e-12, atol=1e-14)
    assert band.summands >= np.count_nonzero(trimmed.matrix, axis=1).max()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_long_jumps_are_worth_is_added(direction, monkeypatch):
    """Far more is cut than ever is: the bound with what is added for it stays above the one that cuts nothing."""
    model = LineModel(np.full(3, 0.5), np.full(3, 0.8), np.full(2, 0.9), np.zeros(3))
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, 3))
    values = []
    for cut, moved in ((1e-300, 1e-300), (0.3, 1e-300), (0.3, 0.2)):
        monkeypatch.setattr(_spreads, "_TUNING", replace(_spreads._TUNING, cut=cut, moved=moved))
        member = ChainBound(mechanism, model, family="line", largest=float(model.variances().max()))
        values.append(member.delta(1.0, 0.5, direction).value)
    assert values[0] * (1 - 1e-9) <= values[1] < 1.5 * values[0]
    assert values[1] < values[2] < 1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rough_profiles_are_bounds_too(direction):
    mechanism = Mechanism(strategies.bisr(3), BallsInBins(2, 12))
    for member in Chain().prepare(mechanism).bounds():
        epsilons = [0.0, 0.5, 1.5]
        fine, rough = (
            member.deltas(1.5, epsilons, direction),
            [(member.rough_delta(1.5, e, direction) or member.delta(1.5, e, direction)).value for e in epsilons],
        )
        for least, value in zip(fine, rough, strict=True):
            assert least * (1 - 1e-3) <= value <= 1.5 * least + 1e-13


def test_long_memory_over_epochs_need_not_dominate_a_ring():
    """BandInvMF wraps around, but its Gram matrix is far from circulant: the line is closer."""
    gram = Mechanism(strategies.bandinvmf(4), BallsInBins(10, 40)).gram
    gram = np.maximum(gram, gram.T)
    ((name, model),) = candidates(gram, 0.0)
    assert name == "line 0"
    assert np.all(model.covariance() >= gram)
    assert cost_of(model, gram, 0.0) < cost_of(ring_chain(gram, 0.0), gram, 0.0)
