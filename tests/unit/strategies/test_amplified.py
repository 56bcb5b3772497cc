"""Strategies optimised for the amplified noise multiplier: gradients, estimates beside closed forms, what is gained."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dpmf import store, strategies, workloads
from dpmf.batching import BallsInBins, Poisson, reshuffled
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.strategies.amplified import _families, _search
from dpmf.strategies.amplified._families import Family
from dpmf.strategies.amplified._losses import Sampler
from dpmf.strategies.amplified._search import Throw
from dpmf.strategies.settling import loss_of_noising

TARGET = (2.0, 1e-5)
N = 40
FAMILIES: list[Family] = [
    _families.Banded(N, 6),
    _families.Banded(N, N),
    _families.Power(N, N),
    _families.Buffered(N, 3),
    _families.Buffered(N, 1, 7),
    _families.BandedInverse(N, 5),
    _families.BandedInverse(N, 38),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPMF_CACHE_DIR", str(tmp_path))
    store.forget()


def slow_gram(column: Array, throw: Throw) -> Array:
    """Means of all bins, one participation at a time."""
    rows = throw.rows or 4 * len(column) + throw.epochs * throw.distance
    means = np.zeros((throw.bins, rows))
    for i in range(throw.bins):
        for epoch in range(throw.epochs):
            for j, c in enumerate(column):
                t = i * throw.stride + epoch * throw.distance + j
                if t < rows:
                    means[i, t] += c
    return means @ means.T


@pytest.mark.parametrize("throw", [Throw(8, 1, 1, 8, None, 5), Throw(8, 1, 5, 8, N, 1), Throw(4, 2, 5, 8, N, 1)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_the_objective_and_its_gradient(family: Family, throw: Throw, monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.optimize

    rng = np.random.default_rng(0)
    weights = rng.random((throw.bins, throw.bins))
    weights = weights @ weights.T
    x = family.start + 0.1 * rng.random(len(family.start))
    columns = family.columns(x)
    assert columns.strategy.min() >= 0
    np.testing.assert_allclose(np.convolve(columns.strategy, columns.noising)[:N], np.eye(1, N)[0], atol=1e-12)
    workload = workloads.damped(10)
    gram = slow_gram(columns.strategy, throw)
    np.testing.assert_allclose(throw.gram(columns.strategy), gram, rtol=1e-12)

    seen: list[object] = []

    def note(objective: object, x: Array, **_: object) -> object:
        seen.append(objective)
        return type("Result", (), {"x": x, "jac": 0 * x})

    monkeypatch.setattr(scipy.optimize, "minimize", note)
    _search._minimise(family, throw, loss_of_noising(workload.loss(N)), weights, x)
    (objective,) = seen
    assert callable(objective)
    value, gradient = objective(x)
    dense = workload.matrix(N) @ np.linalg.inv(strategies.coefficients(columns.strategy).matrix(N))
    assert value == pytest.approx(math.log(np.sum(dense**2) / N * np.sum(weights * gram)))
    step = rng.normal(size=len(x))
    difference = (objective(x + 1e-6 * step)[0] - objective(x - 1e-6 * step)[0]) / 2e-6
    assert difference == pytest.approx(float(gradient @ step), rel=1e-5)


@pytest.mark.parametrize("throws", [1, 4])
def test_the_estimate_and_how_it_changes(throws: int) -> None:
    """σ is what the lattice says for independent noise, and changes with G like the estimate at a changed G."""
    bins = 10
    sampler = Sampler(bins, throws, 2.0, 1e-5, 20_000)
    exact = {1: 1.0449, 4: 1.4637}[throws]  # dpmf.calibrate of reshuffled DP-SGD with the lattice
    assert sampler.sensitivities(np.eye(bins), 1.0).noise_multiplier == pytest.approx(exact, rel=0.02)

    throw = Throw(bins, 1, 1, bins, None, throws)
    column, change = np.array([1.0, 0.5, 0.3]), np.array([0.0, 0.05, -0.02])
    gram, more, less = (throw.gram(column + sign * change) for sign in (0, 1, -1))
    found = sampler.sensitivities(gram, 1.0)
    slope = float(np.sum(found.weights * (more - less)) / np.sum(found.weights * gram))
    sigmas = [sampler.sensitivities(g, found.noise_multiplier).noise_multiplier for g in (more, less)]
    assert 2 * math.log(sigmas[0] / sigmas[1]) == pytest.approx(slope, rel=0.1)


def test_less_error_than_without_amplification_in_mind() -> None:
    """Both measured with the same sampled σ: the optimised bands, those of BSR, and independent noise."""
    batching, workload = reshuffled(5, 20, gap=3), workloads.damped(20)
    found = strategies.optimised(batching, workload, TARGET, bandwidth=4)
    n = batching.iterations
    sampler = Sampler(20, 5, *TARGET, 20_000)
    throw = Throw(20, 1, 1, 20, None, 5)

    def error(column: Array) -> float:
        sigma = sampler.sensitivities(throw.gram(column), 1.0).noise_multiplier
        noising = strategies.coefficients(column).noising_coef(n)
        return sigma * math.sqrt(float(workload.squared_rows(noising).mean()))

    best = error(found.strategy_coef(4))
    assert best == pytest.approx(found.estimate().root_mean_square, rel=0.02)
    assert best < 0.97 * error(np.ones(1))
    assert best < 0.97 * error(strategies.bsr(4).strategy_coef(4))


def test_far_bins_minimise_error_times_norm() -> None:
    """Where the iterations of a record share no noise, σ is proportional to the norm of a column."""
    workload = workloads.prefix()
    columns = [
        strategies.optimised(batching, workload, TARGET, bandwidth=4).strategy_coef(100)
        for batching in (Poisson(5, 20, 4), Poisson(5, 20, 20))
    ]
    np.testing.assert_array_equal(*columns)

    def error(column: Array) -> float:
        noising = strategies.coefficients(column).noising_coef(100)
        return float(np.linalg.norm(column) * math.sqrt(workload.squared_rows(noising).mean()))

    rng = np.random.default_rng(0)
    for _ in range(20):
        other = columns[0] * np.exp(0.05 * rng.normal(size=100))
        assert error(columns[0]) <= error(other)
    spread = strategies.optimised(reshuffled(5, 20, stride=4), workload, TARGET, bandwidth=4)
    assert spread.batching.iterations == 112
    assert math.isnan(spread.estimate().noise_multiplier)


@pytest.mark.parametrize(
    "options", [{"family": "inverse", "bandwidth": 3}, {"buffers": 2}, {"family": "power"}, {}], ids=str
)
def test_families_with_fixed_bins(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    batching = BallsInBins(3, 10)
    make = lambda: strategies.optimised(batching, workloads.prefix(), TARGET, **options)  # type: ignore[arg-type]  # noqa: E731
    found = make()
    mechanism = Mechanism(found, batching)
    column = found.strategy_coef(30)
    assert column.min() >= 0
    assert found.estimate().root_mean_square < 0.95 * 2.6 * math.sqrt(15.5)  # independent noise takes σ ≈ 2.6 here
    assert mechanism.gram.shape == (10, 10)
    store.forget()
    monkeypatch.setattr(_search, "_minimise", None)  # the second one comes from the disk
    np.testing.assert_array_equal(make().strategy_coef(30), column)
    assert make() == found
    with pytest.raises(ValueError, match="iterations must be at most 30"):
        found.strategy_coef(31)


@pytest.mark.parametrize(
    ("batching", "options", "words"),
    [
        (BallsInBins(2, 9), {"family": "fast"}, "family must be one of toeplitz, banded"),
        (BallsInBins(2, 9), {"buffers": 0}, "buffers must be at least 1"),
        (BallsInBins(2, 9), {"buffers": 2, "bandwidth": 3}, "bandwidth does not apply to family blt"),
        (BallsInBins(2, 9), {"family": "inverse"}, "bandwidth must be given for family inverse"),
        (BallsInBins(2, 9), {"family": "toeplitz", "bandwidth": 2}, "bandwidth does not apply to family toeplitz"),
        (BallsInBins(2, 9), {"family": "banded", "buffers": 2}, "buffers applies only to family blt"),
        (reshuffled(2, 9), {}, "family must be banded, power, geometric, with a bandwidth of at most 9"),
        (reshuffled(2, 9, gap=1), {"bandwidth": 3}, r"bandwidth must be at most gap \+ 1 = 2, got 3"),
        (Poisson(2, 9, 3), {"bandwidth": 4}, "bandwidth must be at most the period 3"),
        ("fixed", {}, "batching must be a BallsInBins or a Poisson"),
    ],
)
def test_refusals(batching: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategies.optimised(batching, workloads.prefix(), TARGET, **options)  # type: ignore[arg-type]


def test_refused_targets_and_workloads() -> None:
    with pytest.raises(ValueError, match="target must be strictly between 0 and 1"):
        strategies.optimised(BallsInBins(2, 9), workloads.prefix(), (1.0, 2.0))
    with pytest.raises(ValueError, match=r"target must be a pair \(ε, δ\), got 1.0"):
        strategies.optimised(BallsInBins(2, 9), workloads.prefix(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="schedule must have one learning rate for each of the 18 iterations"):
        strategies.optimised(BallsInBins(2, 9), workloads.schedule([1.0]), TARGET)


def test_power_series() -> None:
    np.testing.assert_allclose(strategies.power(0.5).strategy_coef(9), strategies.bsr(9).strategy_coef(9))
    np.testing.assert_allclose(strategies.lcgd(0.5).strategy_coef(9), 0.5 ** np.arange(9))
    np.testing.assert_allclose(strategies.power(1.0, 0.5, 3).strategy_coef(5), [1, 0.5, 0.25, 0, 0])
    assert strategies.build("power", exponent=0.4, decay=0.9, bandwidth=3).name == "power(a=0.4, λ=0.9, p=3)"
    assert strategies.build("lcgd", decay=0.9).name == "λCGD(λ=0.9)"
    for words, make in (
        ("exponent must be at most 1, got 2.0", lambda: strategies.power(2)),
        ("decay must be at most 1, got 1.5", lambda: strategies.lcgd(1.5)),
        ("decay must be given for strategy lcgd", lambda: strategies.build("lcgd")),
    ):
        with pytest.raises(ValueError, match=words):
            make()


@pytest.mark.parametrize("bandwidth", [4, 16])
def test_bands_for_poisson_samples_are_no_worse_than_the_square_root(bandwidth: int) -> None:
    """Where iterations of a record share no noise, the least error × norm is sought, and must be found."""
    batching, workload = Poisson(10, 100, 20), workloads.prefix()
    found = strategies.optimised(batching, workload, (8.0, 1e-5), bandwidth=bandwidth)

    def size(strategy: strategies.base.ToeplitzStrategy) -> float:
        norm = np.linalg.norm(strategy.strategy_coef(1000))
        return math.sqrt(workload.loss(1000)(strategy.noising_coef(1000))[0]) * float(norm)

    assert size(found) < 0.97 * size(strategies.bsr(bandwidth))


FAR = Throw(1, 1, 1, 1000, None, 10)  # iterations of a record share no noise: the least error × norm is sought


def least(family: Family, workload: workloads.ToeplitzWorkload) -> tuple[Array, float]:
    """The coefficients that the search finds, and their error × norm."""
    loss = loss_of_noising(workload.loss(family.iterations))
    columns = family.columns(_search.search(family, FAR, loss, (8.0, 1e-5)).parameters)
    return columns.strategy, math.sqrt(loss(*columns)[0]) * float(np.linalg.norm(columns.strategy))


def log_size(workload: workloads.ToeplitzWorkload, n: int, column: Array) -> float:
    """log(error² × norm²), from its definition."""
    noising = strategies.coefficients(column).noising_coef(n)
    return math.log(float(workload.squared_rows(noising).mean())) + 2 * math.log(float(np.linalg.norm(column)))


@pytest.mark.parametrize(("bandwidth", "error"), [(2, 15.920), (4, 11.431), (5, 10.308), (6, 9.487), (11, 7.294)])
def test_the_least_error_of_bands_for_poisson_samples(bandwidth: int, error: float) -> None:
    """Ends of a search that are no minima, of which one machine finds these and another those, are not taken."""
    strategy, found = least(_families.Banded(1000, bandwidth), workloads.prefix())
    assert found == pytest.approx(error, rel=1e-4)
    assert found < 0.97 * math.exp(
        log_size(workloads.prefix(), 1000, strategies.bsr(bandwidth).strategy_coef(1000)) / 2
    )
    if bandwidth == 4:
        np.testing.assert_allclose(strategy[:4], [1, 0.858, 0.798, 0.728], atol=2e-3)
        assert not strategy[4:].any()


@pytest.mark.parametrize("workload", [workloads.prefix(), workloads.momentum(0.9), workloads.damped(10)], ids=str)
@pytest.mark.parametrize("bandwidth", [2, 3, 4, 5, 7, 14, 24])
def test_nothing_is_gained_beside_the_coefficients_found(bandwidth: int, workload: workloads.ToeplitzWorkload) -> None:
    """The slope of error × norm is zero by differences in the coefficients themselves, and points near by are worse."""
    n = 300
    strategy, _ = least(_families.Banded(n, bandwidth), workload)
    best = log_size(workload, n, strategy)
    for place in range(1, bandwidth):
        change = 1e-4 * np.eye(1, n, place)[0]
        slope = (log_size(workload, n, strategy + change) - log_size(workload, n, strategy - change)) / 2e-4
        assert slope == pytest.approx(0, abs=2e-3)
    rng = np.random.default_rng(0)
    for size in (0.01, 0.1, 0.5):
        for _ in range(10):
            assert log_size(workload, n, strategy * np.exp(size * rng.normal(size=n) * (np.arange(n) > 0))) > best


@pytest.mark.parametrize("workload", [workloads.prefix(), workloads.momentum(0.9)], ids=str)
@pytest.mark.parametrize("bandwidth", [3, 4, 5])
def test_a_search_without_slopes_finds_nothing_better(bandwidth: int, workload: workloads.ToeplitzWorkload) -> None:
    """The twin: simplices in the coefficients, from several starts."""
    from scipy.optimize import minimize

    n = 100
    strategy, _ = least(_families.Banded(n, bandwidth), workload)

    def size(free: Array) -> float:
        return (
            1e3
            if free.min() < 0 or free.max() > 1.5
            else log_size(workload, n, np.pad([1.0, *free], (0, n - bandwidth)))
        )

    rng = np.random.default_rng(0)
    ends = [
        minimize(
            size, rng.uniform(0.2, 0.9) ** np.arange(1, bandwidth), method="Nelder-Mead", options={"maxiter": 600}
        ).fun
        for _ in range(4)
    ]
    assert log_size(workload, n, strategy) == pytest.approx(min(ends), abs=1e-4)


@pytest.mark.parametrize("bandwidth", [4, 5, 12, 40])
def test_the_minimum_does_not_depend_on_the_start_or_on_last_digits(bandwidth: int) -> None:
    """As on another processor: other starts, and an objective with other last digits."""
    family, workload = _families.Banded(1000, bandwidth), workloads.prefix()
    exact = loss_of_noising(workload.loss(1000))
    rng = np.random.default_rng(0)

    def rough(*columns: Array) -> tuple[float, Array, Array]:
        value, *slopes = exact(*columns)
        first, second = (slope * (1 + 1e-13 * rng.normal(size=len(slope))) for slope in slopes)
        return value * (1 + 1e-13 * rng.normal()), first, second

    _, error = least(family, workload)
    for size in (1e-12, 1e-6, 1e-3, 0.1):
        start = family.start + size * rng.normal(size=len(family.start))
        columns = family.columns(_search.search(family, FAR, rough, (8.0, 1e-5), start).parameters)
        assert math.sqrt(exact(*columns)[0]) * np.linalg.norm(columns.strategy) == pytest.approx(error, rel=1e-5)


def test_the_search_starts_again_where_its_end_is_no_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line search that gives up at once, as after values that are not finite, is not the end."""
    import scipy.optimize

    calls: list[float] = []
    minimize = scipy.optimize.minimize

    def gives_up(objective: object, x: Array, *, options: dict[str, float], **others: object) -> object:
        calls.append(1)
        return minimize(objective, x, options=options | {"maxiter": 2}, **others)

    _, error = least(_families.Banded(1000, 4), workloads.prefix())
    monkeypatch.setattr(scipy.optimize, "minimize", gives_up)
    assert least(_families.Banded(1000, 4), workloads.prefix())[1] == pytest.approx(error, rel=1e-6)
    assert len(calls) > 4
