"""The moments accountant: sums over graphs against enumeration, polynomials above options, never below the truth."""

from __future__ import annotations

import json
import math
from itertools import combinations, product

import balls
import knobs
import numpy as np
import oracles
import paths
import pytest
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import DIRECTIONS, log_uniform, mechanisms, random_settings, signal_to_noise
from scipy.optimize import linprog

import dpmf
from dpmf import strategies
from dpmf.accountants import Moments
from dpmf.accountants.moments._given_mean import GivenMean, Graphs, Shape, complete_graph
from dpmf.batching import BallsInBins
from dpmf.kernels.moments import diamond_sum, option_above
from dpmf.mechanism import Mechanism

TRUTH = json.loads(paths.TRUE_SIGMA.read_text())


def covariance(seed: int, b: int, size: float) -> np.ndarray:
    """A random covariance of non-negative entries."""
    loads = np.random.default_rng(seed).random((b, b + 2)) ** 3
    matrix = loads @ loads.T
    return size * matrix / matrix.max()


# --- moments given the geometric mean ------------------------------------------------------------------------------


def exact_moments(s: np.ndarray, z: float) -> tuple[arb, list[arb], arb]:
    """E[A | z], moments of A/E[A | z] around 1 up to order four, and the geometric mean, by enumeration in balls."""
    b = len(s)
    matrix = [[balls.exact(float(x)) for x in row] for row in s]
    rows = [sum(row, arb(0)) for row in matrix]
    root = (sum(rows, arb(0)) / b**2).sqrt()
    loads = [row / (b * root) for row in rows]
    rest = [[matrix[i][j] - loads[i] * loads[j] for j in range(b)] for i in range(b)]
    node = balls.exact(z)
    terms = [(load * node - load * load / 2).exp() for load in loads]
    mean, central = balls.moments_of_sum(rest, terms)
    half = sum((matrix[i][i] for i in range(b)), arb(0)) / (2 * b)
    return mean, central, (root * node - half).exp()


@pytest.mark.parametrize(("size", "z"), [(1.5, 0.7), (0.3, -4.0), (1e-3, 3.0), (1e-8, 0.0)])
def test_moments_contain_those_of_an_enumeration_in_balls(
    size: float, z: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctx, "prec", 300)
    s = covariance(3, 4, size)
    shape = GivenMean(s).at(z)
    mean, central, geometric = exact_moments(s, z)
    fourth = balls.within(shape, mean, central)
    assert float(fourth) >= 0.5 * shape.kurtosis or size == 1e-8
    assert (geometric / mean - 1) / balls.exact(shape.deviation) >= shape.lowest
    # The errors that are allowed for are small beside what they are errors of.
    assert shape.errors.max() < (1e-6 if size > 1e-4 else 1.0)


def random_graph(seed: int, lowest: float) -> tuple[np.ndarray, np.ndarray]:
    """A random symmetric f and random weights."""
    rng = np.random.default_rng(seed)
    b = int(rng.integers(2, 7))
    f = rng.uniform(lowest, 1.0, (b, b)) * rng.choice([0.1, 3.0])
    return (f + f.T) / 2, rng.dirichlet(np.ones(b))


def complete_sum(f: np.ndarray, weights: np.ndarray) -> float:
    """The sum over the complete graph of four vertices, by enumeration."""
    return sum(
        math.prod(weights[list(chosen)]) * math.prod(f[i, j] for i, j in combinations(chosen, 2))
        for chosen in product(range(len(f)), repeat=4)
    )


@pytest.mark.parametrize("seed", range(6))
def test_sums_over_graphs_are_those_of_all_tuples(seed: int) -> None:
    """The n-th moment around the mean: Σ w·Π(1 + f over pairs), with every vertex that has no edge taken away."""
    f, weights = random_graph(seed, -0.9)
    b = len(f)
    raw = [
        sum(
            math.prod(weights[list(chosen)]) * math.prod(1 + f[i, j] for i, j in combinations(chosen, 2))
            for chosen in product(range(b), repeat=n)
        )
        for n in range(5)
    ]
    central = [sum(math.comb(n, k) * raw[k] * (-1) ** (n - k) for k in range(n + 1)) for n in range(5)]
    for found in (Graphs.of(f, weights), Graphs.of(f, weights, f @ np.diag(weights) @ f)):
        assert found.two == pytest.approx(central[2], rel=1e-9, abs=1e-12)
        assert found.three == pytest.approx(central[3], rel=1e-9, abs=1e-12)
        assert found.four + complete_sum(f, weights) == pytest.approx(central[4], rel=1e-9, abs=1e-12)
    diamonds = sum(
        weights[i] * weights[j] * weights[k] * weights[m] * f[i, j] * f[i, k] * f[k, j] * f[i, m] * f[m, j]
        for i, j, k, m in product(range(b), repeat=4)
    )
    assert diamond_sum(f, f @ np.diag(weights) @ f, weights) == pytest.approx(diamonds, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_complete_graph_is_bounded(seed: int) -> None:
    f, weights = random_graph(seed, 0.0)
    exact = complete_sum(f, weights)
    known = (f * weights) @ f
    plain = float(f.max()) * float(diamond_sum(f, known, weights))  # is enough where it need not be smaller
    assert complete_graph(f, weights, known, enough=plain) == pytest.approx(plain)
    assert complete_graph(f, weights, known) == pytest.approx(complete_graph(f, weights))
    assert exact <= complete_graph(f, weights) <= 30 * exact


# --- polynomials above options -------------------------------------------------------------------------------------


def shape_of(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float, float, float]:
    """Values with mean 0 and variance 1, and their least, third and fourth moments."""
    values = values - weights @ values
    values = values / math.sqrt(float(weights @ values**2))
    return values, float(values.min()), float(weights @ values**3), float(weights @ values**4)


@random_settings(80)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6, unique=True),
    st.integers(0, 10**6),
    st.floats(-6.0, 12.0),
    st.sampled_from([1, -1]),
    st.floats(0.0, 1.0),
)
def test_no_law_with_these_moments_is_worth_more(
    places: list[float], seed: int, strike: float, sign: int, room: float
) -> None:
    rng = np.random.default_rng(seed)
    raw = np.array(places) ** 3 + 1e-3 * np.arange(len(places))
    values, lowest, skewness, kurtosis = shape_of(raw, weights := rng.dirichlet(np.ones(len(places)) * 0.3 + 0.05))
    exact = float(weights @ np.maximum(sign * (values - strike), 0.0))
    bound = option_above(sign, strike, lowest - room, skewness, kurtosis, np.full(3, 1e-12))
    assert bound >= exact * (1 - 1e-12)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("skewness", "kurtosis", "lowest"), [(0.6, 3.7, -4.8), (1.7, 8.2, -3.1), (0.0, 3.0, -20.0)])
def test_it_is_the_least_that_four_moments_allow(skewness: float, kurtosis: float, lowest: float, sign: int) -> None:
    """A linear programme over polynomials that are above the option at many points: a lower bound, and close."""
    grid = np.unique(np.concatenate([np.linspace(lowest, 8, 700), np.geomspace(8, 500, 300)]))
    powers = np.vander(grid / 4, 5, increasing=True)
    size = 1 + np.abs(powers).max(axis=1, keepdims=True)
    cost = np.array([1, 0, 1, skewness, kurtosis]) / 4.0 ** np.arange(5)
    for strike in (-2.5, -1.0, 0.0, 1.0, 3.0, 6.0):
        payoff = np.maximum(sign * (grid - strike), 0.0)
        least = linprog(cost, A_ub=-powers / size, b_ub=-payoff / size[:, 0], bounds=(None, None), method="highs").fun
        assert least * (1 - 1e-3) <= option_above(sign, strike, lowest, skewness, kurtosis, np.zeros(3)) <= 1.03 * least


# --- the bound -----------------------------------------------------------------------------------------------------


@random_settings(40)
@given(mechanisms(), log_uniform(0.3, 30), st.floats(0.0, 3.0), st.sampled_from(DIRECTIONS), st.floats(0.02, 2.0))
def test_never_below_the_truth(
    mechanism: Mechanism, sigma: float, epsilon: float, direction: str, spacing: float
) -> None:
    truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction)
    bound = Moments(spacing=spacing).prepare(mechanism).delta(sigma, epsilon, direction).value
    assert bound >= truth * (1 - 1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_sound_for_any_tuning(seed: int) -> None:
    mechanism = Mechanism(strategies.coefficients([1.0, 0.1, 0.6]), BallsInBins(2, 3))
    with knobs.changed("dpmf.accountants.moments", seed):
        for direction in DIRECTIONS:
            for sigma, epsilon in ((2.0, 0.5), (6.0, 0.1), (1.0, 2.0)):
                truth = oracles.delta(signal_to_noise(mechanism, sigma), epsilon, direction)
                assert Moments().prepare(mechanism).delta(sigma, epsilon, direction).value >= truth * (1 - 1e-7)


def test_irregular_memory_is_no_harder_than_any_other() -> None:
    """Sampled truth: 7.475 ± 0.1 % (docs/tightness.md). Majorants of this Gram matrix need 28 % more."""
    irregular = Mechanism(strategies.coefficients([1.0, 0.1, 0.6, 0.05, 0.4, 0.02, 0.3]), BallsInBins(5, 100))
    found = dpmf.calibrate(irregular, target_epsilon=0.25, target_delta=1e-5, accountant="moments")
    assert 7.46 < found.noise_multiplier < 1.03 * 7.475


@pytest.mark.parametrize("row", [row for row in TRUTH if row["mechanism"] == "bsr4 N=1000 k=10" and row["epsilon"] < 2])
def test_never_below_the_sampled_truth_and_close_at_small_epsilon(row: dict[str, float]) -> None:
    prepared = Moments().prepare(Mechanism(strategies.bsr(4), BallsInBins(10, 100)))
    for direction in DIRECTIONS:
        sigma = row[f"sigma_{direction}"]
        found = prepared.delta(sigma, row["epsilon"], direction, row["delta"]).value
        assert found >= row["delta"] * (1 - 4 * row[f"rel_se_delta_{direction}"])
        if row["epsilon"] < 0.3 and row["delta"] > 1e-6:
            assert found <= 2 * row["delta"]


def test_too_many_batches_are_refused_and_left_to_others() -> None:
    many = Mechanism(strategies.bsr(2), BallsInBins(1, 1025))
    assert Moments().suits(many) is None
    with pytest.raises(ValueError, match="at most 1024 batches per epoch, got 1025"):
        Moments().prepare(many)


def test_moments_are_shared_by_all_questions_about_one_noise_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    compute = GivenMean._at

    def counted(self: GivenMean, z: float) -> Shape:
        asked.append(z)
        return compute(self, z)

    monkeypatch.setattr(GivenMean, "_at", counted)
    prepared = Moments().prepare(Mechanism(strategies.bsr(3), BallsInBins(2, 10)))
    first = prepared.delta(5.0, 0.5, "remove", 1e-5).value
    once = len(asked)
    assert prepared.deltas(5.0, [0.5, 0.52], "remove")[1] < first
    assert len(asked) < 1.2 * once
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_so_much_noise_that_moments_underflow(direction: str) -> None:
    """Products of small covariances are zero in floating point: the closed form answers."""
    mechanism = Mechanism(strategies.bsr(2), BallsInBins(2, 3))
    for sigma in (1e60, 1e80, 1e120):
        assert 0 < Moments().prepare(mechanism).delta(sigma, 0.0, direction).value < 1e-50
