"""The cascade accountant: its theorem seen in numbers, trees that dominate, laws from above, never below the truth."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import oracles
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import log_uniform, mechanisms, random_settings
from scipy.optimize import linprog
from scipy.special import ndtr

import dpmf
from dpmf import strategies
from dpmf.accountants import Cascade, Lattice, MonteCarlo, Renyi
from dpmf.accountants.cascade import _tree, _TreeBound
from dpmf.accountants.cascade._payoffs import Majorant, SmoothedCall, cubic_bound, smoothed_bound
from dpmf.accountants.cascade._tree import Tree, dominating_pair, dominating_tree, lag_majorant, levels_of, split
from dpmf.accountants.cascade._tree_law import (
    Fineness,
    GridLaw,
    Measure,
    TooManyNodesError,
    TreeMoments,
    lognormal,
    one,
    tree_law,
)
from dpmf.batching import BallsInBins
from dpmf.kernels.cascade import add_on_geometric_grid
from dpmf.mechanism import Mechanism

TRUTH = json.loads(paths.TRUE_SIGMA.read_text())


def tree_of(b: int, first: int, weights: object) -> Tree:
    levels = levels_of(b, first)
    values = np.resize(np.asarray(weights, dtype=float), len(levels))
    return Tree(b, first, tuple(levels), values)


def covariance(tree: Tree) -> np.ndarray:
    """The b × b matrix S of one rotation."""
    owners = [np.zeros(tree.b, dtype=np.int64)]
    parts = tree.first
    for _ in tree.levels[1:]:
        sizes = [part for size in np.bincount(owners[-1]) for part in split(int(size), parts)]
        owners.append(np.repeat(np.arange(len(sizes)), sizes))
        parts = 2
    same = (owner[:, None] == owner[None, :] for owner in owners)
    return sum((w * s for w, s in zip(tree.weights, same, strict=True)), np.zeros((tree.b, tree.b)))


def rotations(matrix: np.ndarray) -> np.ndarray:
    return np.array([np.roll(matrix, (s, s), axis=(0, 1)) for s in range(len(matrix))])


trees = st.builds(
    tree_of, st.integers(1, 24), st.integers(2, 7), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6)
)  # fmt: skip


# --- the theorem ----------------------------------------------------------------------------------------------------

_STEP = 0.08
_AXIS = np.arange(-10.0, 20.0, _STEP)
_GRID = np.stack(np.meshgrid(_AXIS, _AXIS, indexing="ij"), axis=-1)
_DENSITY = np.exp(-0.5 * (_GRID**2).sum(axis=-1)) * _STEP**2 / (2 * math.pi)


def expectation(f, s: np.ndarray) -> float:
    """E f(A_S) for two indices."""
    u = _GRID @ np.linalg.cholesky(s).T
    return float((_DENSITY * f(np.exp(u - np.diagonal(s) / 2).mean(axis=-1))).sum())


SMOOTHED = Majorant.of(SmoothedCall(1.8, 0.1), 1.0)
PAYOFFS = {
    "square": lambda a: a**2,
    "cube": lambda a: a**3,
    "fourth power": lambda a: a**4,
    "cubic hinge at 0.5": lambda a: np.maximum(a - 0.5, 0) ** 3,
    "cubic hinge at 1.2": lambda a: np.maximum(a - 1.2, 0) ** 3,
    "cubic hinge at 3": lambda a: np.maximum(a - 3, 0) ** 3,
    "smoothed call": lambda a: SMOOTHED(a.ravel()).reshape(a.shape),
}
LINES = [
    (np.array([[0.5, 0.2], [0.2, 0.5]]), np.array([[0.0, 0.3], [0.3, 0.0]])),
    (np.array([[0.5, 0.2], [0.2, 0.5]]), np.array([[0.4, 0.0], [0.0, 0.0]])),
    (np.array([[0.6, 0.3], [0.3, 0.4]]), np.array([[0.3, -0.2], [-0.2, 0.1]])),
    (np.array([[0.7, 0.1], [0.1, 0.7]]), np.array([[-0.2, 0.2], [0.2, -0.2]])),
]


@pytest.mark.parametrize("payoff", PAYOFFS)
@pytest.mark.parametrize("line", range(len(LINES)))
def test_expectations_are_convex_in_the_gram_matrix(payoff: str, line: int) -> None:
    start, direction = LINES[line]
    values = [expectation(PAYOFFS[payoff], start + t * direction) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert np.all(np.diff(values, 2) > 0)


def test_the_second_derivative_is_the_one_derived() -> None:
    s, d = LINES[2]
    t = 1e-3
    values = [expectation(lambda a: a**5, s + x * d) for x in (-t, 0.0, t)]
    numeric = (values[0] - 2 * values[1] + values[2]) / t**2
    u = _GRID @ np.linalg.cholesky(s).T
    a = np.exp(u - np.diagonal(s) / 2) / 2
    total, da = a.sum(axis=-1), a @ d
    form = (a * da).sum(axis=-1)
    squares = np.einsum("...i,ij,...j->...", a, d**2, a)
    derived = 0.5 * 20 * total**3 * squares + 60 * total**2 * (a * da**2).sum(axis=-1) + 0.25 * 120 * total * form**2
    assert numeric == pytest.approx(float((_DENSITY * derived).sum()), rel=1e-4)


def test_the_option_itself_is_not_convex_in_the_gram_matrix() -> None:
    """Why there is a cubic: one index, at the money."""
    values = [oracles.gaussian_delta(s, 0.0) for s in (0.1, 0.2, 0.3)]
    assert np.diff(values, 2)[0] < 0


@given(st.floats(0, 50), st.floats(1, 20), log_uniform(1e-3, 30))
def test_the_cubic_is_above_the_option(a: float, gamma: float, width: float) -> None:
    cubic = 4 / 27 / width**2 * max(a - gamma + width, 0.0) ** 3
    assert cubic >= max(a - gamma, 0.0) * (1 - 1e-12) - 1e-12
    touching = gamma + width / 2
    assert 4 / 27 / width**2 * (touching - gamma + width) ** 3 == pytest.approx(touching - gamma)


def test_no_mixture_of_hinges_beats_one() -> None:
    """All that the theorem allows: linear + quadratic + cubic hinges, the latter with weights ≥ 0."""
    b, gamma = 100, math.exp(0.5)
    law = tree_law(tree_of(b, 3, [0.01, 0.02, 0.05, 0.05, 0.1, 0.1, 0.3]), Fineness(0.01, 1e-12))
    a, weights = np.append(0.0, law.nodes / b), np.append(law.zero, law.weights)
    hinges = np.concatenate((np.linspace(0, 1, 10), np.linspace(1.02, 1.5 * gamma, 120)))
    where = np.unique(np.concatenate((a, np.linspace(0, 3 * gamma, 500))))

    def table(x: np.ndarray) -> np.ndarray:
        return np.column_stack((np.ones_like(x), x, x**2, np.maximum(x[:, None] - hinges, 0) ** 3))

    # Above 0 and above a − γ, at all these points.
    scale = np.abs(table(where)).max(axis=0)
    above = np.tile(table(where) / scale, (2, 1))
    floor = np.concatenate((np.zeros(len(where)), where - gamma))
    bounds = [(None, None)] * 2 + [(0, None)] * (1 + len(hinges))
    cost = weights @ table(a) / scale
    found = linprog(cost / cost.max(), A_ub=-above, b_ub=-floor, bounds=bounds, method="highs")
    assert found.status == 0
    assert found.fun * cost.max() > 0.97 * cubic_bound(Measure.average([law], b), gamma).value


CALLS = [SmoothedCall(g, v) for g, v in ((1.0, 0.01), (1.3, 0.003), (1.3, 1e-6), (2.7, 0.1), (2.7, 2.0), (50.0, 1.0))]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_smoothed_calls(call: SmoothedCall) -> None:
    """f(1) is the Gaussian mechanism's δ, and the derivatives are those of f."""
    value, error = call.value(np.array([1.0]))
    exact = oracles.gaussian_delta(call.variance, math.log(call.gamma))
    assert abs(value[0] - exact) <= error[0] + 1e-13 * exact + 1e-16
    a = call.gamma * math.exp(-0.7 * math.sqrt(call.variance))
    width = 1e-3 * call.gamma * math.sqrt(call.variance)
    first, second, third = call.derivatives(a)[0]
    before, after = (call.derivatives(a + x)[0] for x in (-width, width))
    assert float(np.diff(call.value(np.array([a - width, a + width]))[0])[0]) / (2 * width) == pytest.approx(
        first, 1e-4
    )
    assert (after[0] - before[0]) / (2 * width) == pytest.approx(second, rel=1e-4)
    assert (after[1] - before[1]) / (2 * width) == pytest.approx(third, rel=1e-3, abs=1e-3 * second / call.gamma)


@pytest.mark.parametrize("share", [1.0, 0.98, 0.9, 0.5])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_payoffs_above_smoothed_calls(call: SmoothedCall, share: float) -> None:
    start = call.inflection() * share
    payoff = Majorant.of(call, start)
    a = np.concatenate((np.linspace(1e-3, 3, 4001), np.geomspace(3, 200, 500))) * call.gamma
    assert np.all(payoff(a) >= call.value(a)[0])
    powers = payoff.powers
    assert np.all(powers >= 0)
    assert np.all(powers[1] * a + powers[2] * a**2 + powers[3] * a**3 >= payoff(a) * (1 - 1e-12))
    # f'' is convex and increasing up to the inflection point, and goes on with a steeper slope.
    second = np.array([call.derivatives(x)[0][1] for x in np.linspace(0.2 * start, start, 400)])
    assert np.all(np.diff(second) >= 0)
    assert np.all(np.diff(second, 2) >= -1e-12 * second.max())
    assert 6 * payoff.coefficients[3] >= call.derivatives(start)[0][2]


def test_with_little_smoothing_the_payoff_is_the_cubic() -> None:
    payoff = Majorant.of(SmoothedCall(1.5, 1e-8), 1.1)
    assert payoff.coefficients[3] == pytest.approx(4 / 27 / 0.4**2, rel=1e-3)


# --- trees ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [2, 3, 5, 15])
@pytest.mark.parametrize("b", [1, 2, 3, 7, 16, 100, 101, 1000, 99_999])
def test_levels_are_partitions_into_two_sizes(b: int, first: int) -> None:
    levels = levels_of(b, first)
    assert [sum(size * count for size, count in level.sizes()) for level in levels] == [b] * len(levels)
    assert levels[0].sizes() == [(b, 1)]
    assert levels[-1].sizes() == [(1, b)]
    assert len(levels) <= 2 + math.ceil(math.log2(b))


@random_settings(60)
@given(trees)
def test_lags_are_the_average_over_rotations(tree: Tree) -> None:
    average = rotations(covariance(tree)).mean(axis=0)
    b = tree.b
    expected = tree.lags(np.arange(b))
    i = np.arange(b)
    np.testing.assert_allclose(average, expected[(i[None, :] - i[:, None]) % b], atol=1e-12)
    assert np.linalg.eigvalsh(covariance(tree)).min() > -1e-10


@random_settings(60)
@given(mechanisms(most_bins=14), st.integers(2, 7), st.sampled_from([0.0, 3.0]))
def test_some_average_of_rotations_is_above_every_gram_matrix(
    mechanism: Mechanism, first: int, emphasis: float
) -> None:
    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    tree = dominating_tree(lag_majorant(mechanism), b, first, emphasis)
    average = rotations(covariance(tree)).mean(axis=0)
    assert np.all(average >= oracles.gram(mechanism.strategy.matrix(n), b) * (1 - 1e-14))
    assert np.all(tree.weights >= 0)


@pytest.mark.parametrize(
    ("strategy", "epochs", "batches", "iterations"),
    [
        (strategies.bsr(4), 10, 100, None),
        (strategies.bisr(64), 4, 250, None),
        (strategies.bsr(64), 1, 100, None),
        (strategies.bisr(3), 3, 7, 20),
    ],
)
def test_lag_majorants_are_the_largest_entries(strategy, epochs: int, batches: int, iterations: int | None) -> None:
    mechanism = Mechanism(strategy, BallsInBins(epochs, batches, iterations))
    lags = lag_majorant(mechanism)
    i = np.arange(batches)
    largest = np.array([mechanism.gram[i, (i + d) % batches].max() for d in range(batches // 2 + 1)])
    assert np.all(lags >= largest)
    np.testing.assert_allclose(lags, np.maximum.accumulate(largest[::-1])[::-1], rtol=1e-10, atol=1e-10 * lags[0])


def test_lags_in_groups_are_dominated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lags = lag_majorant(Mechanism(strategies.bisr(8), BallsInBins(4, 3000)))
    single = dominating_tree(lags, 3000, 3, 0.0)
    monkeypatch.setattr(_tree, "_TUNING", replace(_tree._TUNING, single_lags=100, group=0.01))
    grouped = dominating_tree(lags, 3000, 3, 0.0)
    assert np.all(grouped.lags(np.arange(len(lags))) >= lags)
    assert single.mean_entry() <= grouped.mean_entry() <= 1.02 * single.mean_entry()
    far, largest, number = _tree.in_groups(lags, 3000)
    assert number.sum() == 3000
    assert far[-1] == 1500
    assert np.all(largest >= lags[far])
    assert len(far) < len(lags)


@random_settings(40)
@given(mechanisms(most_bins=14), st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([(2, 3), (3, 2), (2, 5)]))
def test_averages_over_two_trees_are_above_every_gram_matrix(
    mechanism: Mechanism, shared: float, firsts: tuple[int, int]
) -> None:
    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    pair = dominating_pair(lag_majorant(mechanism), b, firsts, 0.0, shared)
    if pair is None:
        return
    average = np.mean([rotations(covariance(tree)).mean(axis=0) for tree in pair], axis=0)
    assert np.all(average >= oracles.gram(mechanism.strategy.matrix(n), b) * (1 - 1e-14))
    assert pair[0].weights[0] == pair[1].weights[0] >= shared * mechanism.gram.max() * (1 - 1e-9)
    assert all(np.all(tree.weights >= 0) for tree in pair)


@random_settings(12)
@given(mechanisms(most_bins=3), log_uniform(0.5, 5), log_uniform(0.05, 4), st.sampled_from([0.0, 0.1]))
def test_bounds_of_two_trees_are_not_below_quadrature(
    mechanism: Mechanism, sigma: float, epsilon: float, shared: float
) -> None:
    b = mechanism.batching.batches_per_epoch
    pair = dominating_pair(lag_majorant(mechanism), b, (2, 3), 0.0, shared)
    exact = oracles.delta(mechanism.gram / sigma**2, epsilon, "remove")
    if pair is not None and exact > 1e-14:
        found = _TreeBound(mechanism, Cascade(), pair).delta(sigma, epsilon, "remove").value
        assert found >= exact * (1 - 1e-6)


def test_two_trees_dominate_smooth_lags_more_closely() -> None:
    mechanism = Mechanism(strategies.bisr(16), BallsInBins(5, 200))
    lags = lag_majorant(mechanism)
    pair = dominating_pair(lags, 200, (2, 3), 0.0, 0.0)
    assert pair is not None
    single = min(dominating_tree(lags, 200, first, 0.0).cost(lags, 0.0) for first in (2, 3))
    assert sum(tree.cost(lags, 0.0) for tree in pair) / 2 < 1.03 < 1.06 < single
    target = {"target_epsilon": 0.25, "target_delta": 1e-5, "direction": "remove", "accountant": "cascade"}
    found = dpmf.calibrate(mechanism, **target)
    assert found.details["remove"]["trees"] == 2
    assert 14.3 < found.noise_multiplier < 15.0  # the sampled truth is 14.42 ± 0.02


def test_a_tree_is_fitted_closely_where_lags_are_convex() -> None:
    lags = lag_majorant(Mechanism(strategies.bisr(64), BallsInBins(4, 250)))
    assert 1 <= dominating_tree(lags, 250, 2, 0.0).cost(lags, 0.0) < 1.04


@random_settings(25)
@given(st.integers(1, 6), st.integers(2, 5), st.lists(st.floats(0.0, 0.7), min_size=1, max_size=4), st.floats(0.5, 4))
def test_moments_of_a_tree(b: int, first: int, weights: list[float], sigma: float) -> None:
    tree = tree_of(b, first, weights)
    found = TreeMoments(tree).log_moments(sigma, 5)
    for order in (2, 3, 5):
        exact = float(oracles.log_moment(oracles.rational(covariance(tree)), sigma, order))
        assert exact - 1e-13 <= found[order] <= exact + 1e-10 * (1 + exact)


def test_moments_of_a_large_tree_of_single_indices() -> None:
    """Without shared weights a tree is DP-SGD."""
    levels = levels_of(1000, 3)
    tree = Tree(1000, 3, tuple(levels), np.eye(len(levels))[-1] * 0.8)
    exact = oracles.log_moments_of_equal_independent(0.8, 1000, 40)
    np.testing.assert_allclose(TreeMoments(tree).log_moments(1.0, 40), exact, rtol=1e-9, atol=1e-9)


# --- laws on geometric grids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [-9, -2, 0, 1, 7])
def test_the_kernel_adds_every_pair(ahead: int) -> None:
    rng = np.random.default_rng(ahead + 10)
    left, right, step = rng.random(6), rng.random(5), 0.21
    apart = step * np.arange(30)
    steps = np.floor(np.log1p(np.exp(-apart)) / step).astype(np.int64)
    shares = rng.random(30)
    out = np.zeros(30)
    add_on_geometric_grid(left, right, ahead, steps, shares, out)
    expected = np.zeros(30)
    for i in range(6):
        for j in range(5):
            k = abs(j + ahead - i)
            place = max(i, j + ahead) + steps[k] - max(0, ahead)
            expected[place] += left[i] * right[j] * (1 - shares[k])
            expected[place + 1] += left[i] * right[j] * shares[k]
    np.testing.assert_allclose(out, expected, rtol=1e-13)


def call(law: GridLaw, strike: float) -> float:
    return float((law.weights * np.maximum(law.nodes - strike, 0)).sum()) + law.rest[1]


@pytest.mark.parametrize("step", [0.3, 0.05, 0.004])
@pytest.mark.parametrize("variance", [1e-8, 1e-3, 0.2, 2.0, 12.0])
def test_lognormals_are_spread_upwards(variance: float, step: float) -> None:
    law = lognormal(variance, step, 1e-9, 10**5)
    moments = law.moments() + law.rest
    exact = np.exp(variance * np.array([0.0, 0.0, 1.0, 3.0]))
    assert np.all(moments >= exact * (1 - 1e-13))
    np.testing.assert_allclose(moments[:2], 1.0, rtol=1e-10)
    assert moments[2] <= exact[2] * (1 + step**2 + step * math.sqrt(variance))
    assert law.rest[3] <= 1e-8
    root = math.sqrt(variance)
    for strike in np.exp(root * np.array([-2.0, -0.3, 0.0, 0.9, 2.5])):
        z = (math.log(strike) + variance / 2) / root
        assert call(law, strike) >= float(ndtr(root - z) - strike * ndtr(-z)) * (1 - 1e-9)


def test_sums_products_and_trims_keep_mass_and_mean() -> None:
    x, y = lognormal(0.3, 0.05, 1e-9, 10**4), lognormal(0.9, 0.05, 1e-9, 10**4)
    big = x.plus(x).plus(x).plus(x).plus(x)
    for law, mean, least in (
        (x.plus(y), 2.0, math.exp(0.3) + math.exp(0.9) + 2),
        (big.plus(y), 6.0, 5 * math.exp(0.3) + 20 + math.exp(0.9) + 10),
        (y.plus(big), 6.0, 5 * math.exp(0.3) + 20 + math.exp(0.9) + 10),
        (x.times(y), 1.0, math.exp(1.2)),
        (x.times(y).trimmed(1e-2, 1.0, 1e-3), 1.0, math.exp(1.2)),
        (x.refined(4), 1.0, math.exp(0.3)),
        (x.times(one(0.05)), 1.0, math.exp(0.3)),
    ):
        moments = law.moments() + law.rest
        np.testing.assert_allclose(moments[:2], (1.0, mean), rtol=1e-9)
        assert least * (1 - 1e-12) <= moments[2] <= least * 1.01


@pytest.mark.parametrize("spare", [1e-14, 1e-4, 1e-1], ids=["nothing cut", "some cut", "much cut"])
@pytest.mark.parametrize("weights", [[0.3, 0.2, 0.4], [0.0, 1.5, 0.1], [0.05, 0.05, 0.02], [2.0, 1.0, 3.0]], ids=str)
@pytest.mark.parametrize("b", [1, 2, 3])
def test_options_on_a_tree_are_not_below_quadrature(b: int, weights: list[float], spare: float) -> None:
    tree = tree_of(b, 2, weights[::-1])
    law = tree_law(tree, Fineness(1e-3, spare))
    for epsilon in (0.05, 0.5, 2.0):
        exact = oracles.delta(covariance(tree), epsilon, "remove")
        gamma = math.exp(epsilon)
        found = call(law, gamma * b) / b
        if spare < 1e-10 and exact > 1e-9:
            assert exact * (1 - 1e-6) <= found <= exact * 1.03
        shared, rest = float(tree.weights[0]), tree.without_shared()
        bounds = [cubic_bound(Measure.average([law], b), gamma)]
        if shared > 0:
            left = Measure.average([tree_law(rest, Fineness(1e-3, spare))], b)
            bounds.append(smoothed_bound(left, SmoothedCall(gamma, shared)))
        for bound in bounds:
            assert bound.value >= exact * (1 - 1e-6)
            assert bound.start < gamma
            assert 0 <= bound.cut <= bound.value


@pytest.mark.parametrize("b", [2, 3, 10])
def test_cubes_are_bounded_whatever_is_cut_off(b: int) -> None:
    """With κ = 0 the cubic bound is a third moment: the part on the grid and the part that was cut add up to it."""
    tree = tree_of(b, 2, [0.2, 0.3, 0.4])
    exact = math.exp(float(TreeMoments(tree).log_moments(1.0, 3)[3])) * b**3
    for spare in (1e-14, 1e-6, 1e-3, 1e-1, 1.0):
        law = tree_law(tree, Fineness(1e-3, spare))
        assert exact * (1 - 1e-9) <= law.moments()[3] + law.rest[3] <= exact * (1.01 if spare < 1e-5 else 10)


def test_finer_grids_come_closer_from_above() -> None:
    tree = tree_of(50, 3, [0.02, 0.03, 0.1, 0.1, 0.1, 0.2])
    laws = [Measure.average([tree_law(tree, Fineness(loss, 1e-16))], 50) for loss in (4e-2, 4e-3, 4e-4)]
    found = [cubic_bound(law, math.exp(0.5)).value for law in laws]
    assert found[0] > found[1] > found[2] > 0.98 * found[1]


def test_too_fine_a_grid_is_made_coarser() -> None:
    with pytest.raises(TooManyNodesError):
        lognormal(1.0, 1e-6, 1e-9, 6000)
    law = tree_law(tree_of(4, 2, [0.3]), Fineness(1e-9, 1e-12))
    assert 100 < len(law.weights) <= 6000


# --- the accountant ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.25, 1.0, 4.0, 8.0])
@pytest.mark.parametrize(
    ("name", "strategy", "epochs", "most"),
    [
        ("bsr4 N=1000 k=10", strategies.bsr(4), 10, 1.11),
        ("bisr4 N=1000 k=10", strategies.bisr(4), 10, 1.09),
        ("bsr4 N=100 k=1", strategies.bsr(4), 1, 1.13),
        ("bsr64 N=100 k=1", strategies.bsr(64), 1, 1.22),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_true_noise_from_above(name: str, strategy, epochs: int, most: float, epsilon: float) -> None:
    truth = next(c for c in TRUTH if (c["mechanism"], c["epsilon"], c["delta"]) == (name, epsilon, 1e-5))
    mechanism = Mechanism(strategy, BallsInBins(epochs, 100))
    found = dpmf.calibrate(
        mechanism, target_epsilon=epsilon, target_delta=1e-5, accountant="cascade", direction="remove"
    ).noise_multiplier
    # A few standard errors of the reference δ are worth less than a percent of σ.
    assert 0.995 < found / truth["sigma_remove"] < most


@random_settings(8)
@given(mechanisms(most_bins=12), log_uniform(0.5, 6), log_uniform(0.05, 4))
def test_not_below_monte_carlo(mechanism: Mechanism, sigma: float, epsilon: float) -> None:
    options = {"noise_multiplier": sigma, "epsilon": epsilon, "direction": "remove"}
    sampled = dpmf.delta(mechanism, accountant=MonteCarlo(samples=4000, seed=7), **options).details["remove"]
    bound = dpmf.delta(mechanism, accountant="cascade", **options).delta
    assert bound >= sampled["estimate"] - 6 * sampled["standard_error"]


@pytest.mark.parametrize("delta", [1e-3, 1e-12])
def test_orders_for_any_bandwidth(delta: float) -> None:
    """Where the band is wide, the moments of a tree beat those of a band that is cut down to what can be afforded."""
    mechanism = Mechanism(strategies.bsr(64), BallsInBins(4, 250))
    target = {"target_epsilon": 2.0, "target_delta": delta, "direction": "remove"}
    prepared = Cascade().prepare(mechanism)
    orders = next(m for m in prepared.bounds() if hasattr(m, "log_moments"))
    banded = dpmf.calibrate(mechanism, accountant=Renyi(work_budget=1e7), **target).noise_multiplier
    assert orders.delta(banded, 2.0, "remove").value < delta
    whole = dpmf.calibrate(mechanism, accountant="cascade", **target).noise_multiplier
    assert prepared.delta(whole, 2.0, "remove").value <= delta
    assert whole < banded


def test_uncorrelated_noise_is_a_tree_of_single_indices() -> None:
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, 1000))
    options = {"noise_multiplier": 0.6, "epsilon": 0.2, "direction": "remove"}
    exact = dpmf.delta(mechanism, accountant=Lattice(), **options).delta
    found = Cascade().prepare(mechanism).delta(0.6, 0.2, "remove").value
    assert exact < found < 4 * exact


def test_small_and_smaller_deltas() -> None:
    prepared = Cascade().prepare(Mechanism(strategies.bsr(8), BallsInBins(3, 60)))
    found = [prepared.delta(30.0, epsilon, "remove").value for epsilon in (0.05, 0.15, 0.25, 0.3)]
    assert np.all(np.diff(np.log(found)) < -1)
    assert 1e-60 < found[-1] < 1e-20


@random_settings(5)
@given(mechanisms(most_bins=9), log_uniform(0.4, 5), log_uniform(0.05, 5), st.floats(1.02, 2.0))
def test_more_noise_or_larger_epsilon_never_cost_delta(
    mechanism: Mechanism, sigma: float, epsilon: float, factor: float
) -> None:
    prepared = Cascade().prepare(mechanism)

    def bound(s: float, e: float) -> float:
        return prepared.delta(s, e, "remove").value

    base = bound(sigma, epsilon) * 1.01  # grids change with σ
    assert bound(sigma * factor, epsilon) <= base + 1e-200
    assert bound(sigma, epsilon * factor) <= base + 1e-200


@pytest.mark.parametrize("sigma", [1e-6, 1e-2, 1e4, 1e12])
@pytest.mark.parametrize("b", [1, 2, 30])
def test_extremes(b: int, sigma: float) -> None:
    mechanism = Mechanism(strategies.bsr(3), BallsInBins(2, b))
    with np.errstate(all="raise", under="ignore"):
        for direction in ("remove", "add"):
            found = dpmf.delta(
                mechanism, noise_multiplier=sigma, epsilon=1.0, accountant="cascade", direction=direction
            )
            assert 0 <= found.delta <= 1
            assert (found.delta > 0.5) == (sigma < 1)
    assert dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=1e-5, accountant="cascade").epsilon >= 0


def test_the_add_direction_has_closed_forms_only() -> None:
    mechanism = Mechanism(strategies.bsr(4), BallsInBins(2, 20))
    prepared = Cascade().prepare(mechanism)
    reasons = [member.unreachable(1.0, 1e-5, "add") for member in prepared.bounds()]
    assert "remove direction only" in str(reasons[0])
    assert prepared.unreachable(1.0, 1e-5, "add") is None
    found = dpmf.delta(mechanism, noise_multiplier=3.0, epsilon=1.0, accountant="cascade", direction="add").delta
    assert (
        found >= dpmf.delta(mechanism, noise_multiplier=3.0, epsilon=1.0, accountant="gaussian", direction="add").delta
    )


@pytest.mark.parametrize("loss", [0, -1.0, math.nan, math.inf, "fine", None])
def test_bad_options_are_refused(loss: object) -> None:
    with pytest.raises(ValueError, match="discretisation_loss must be"):
        Cascade(discretisation_loss=loss)  # type: ignore[arg-type]
