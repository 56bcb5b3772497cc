"""The Monte Carlo accountant against closed forms, quadrature, the reference σ, and its own promises by simulation."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tracemalloc
import warnings
from dataclasses import replace
from types import SimpleNamespace

import knobs
import numpy as np
import oracles
import paths
import pytest
from scipy.stats import binom

import dpmf
from dpmf.accountants import monte_carlo
from dpmf.accountants.monte_carlo import MonteCarlo, MonteCarloEstimate, _sampling
from dpmf.accountants.monte_carlo.limits import chernoff_upper_bound, minimum_samples, relative_entropy, samples_for
from dpmf.accountants.protocol import DIRECTIONS
from dpmf.batching import BallsInBins
from dpmf.errors import MissingExtraError
from dpmf.mechanism import Mechanism
from dpmf.results import PrivacyBound
from dpmf.strategies.closed_form import bisr, bsr, dpsgd

REFERENCE = json.loads(paths.TRUE_SIGMA.read_text())

GRAMS = {
    "independent": np.eye(2),
    "correlated": np.array([[1.0, 0.6], [0.6, 1.0]]),
    "unequal": np.array([[2.0, 0.3], [0.3, 0.5]]),
    "identical means": np.ones((3, 3)),
    "rank two": np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 2.0]]),
    "a zero mean": np.diag([1.0, 0.0, 1.5]),
}


def prepared(gram: object, **options: object) -> monte_carlo.PreparedMonteCarlo:
    """The accountant for a Gram matrix, whichever mechanism it may belong to."""
    return MonteCarlo(**options).prepare(SimpleNamespace(gram=np.asarray(gram, dtype=float)))  # type: ignore[arg-type]


def mechanism(name: str) -> Mechanism:
    """The mechanism that the reference calls e.g. ``bsr4 N=1000 k=10``."""
    kind, n, k = name.split()
    epochs, iterations = int(k[2:]), int(n[2:])
    make = {"dpsgd": lambda _: dpsgd(), "bsr": bsr, "bisr": bisr}[kind.rstrip("0123456789")]
    digits = kind.lstrip("abcdefghijklmnopqrstuvwxyz")
    return Mechanism(make(int(digits or 0)), BallsInBins(epochs, iterations // epochs))


# --- the estimate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("sigma", "epsilon"), [(2.0, 0.1), (1.0, 1.0), (0.5, 8.0), (3.0, 1.5), (1.0, 5.0), (0.3, 22.0)]
)
def test_one_bin_is_the_gaussian_mechanism(sigma: float, epsilon: float, direction: str) -> None:
    exact = oracles.gaussian_delta(sigma**-2, epsilon)
    found = prepared([[1.0]], samples=40_000).estimate_delta(sigma, epsilon, direction)
    assert abs(found.value - exact) <= 4.5 * found.standard_error
    assert found.standard_error <= 0.05 * exact


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", GRAMS)
def test_few_bins_against_quadrature(name: str, direction: str) -> None:
    gram = GRAMS[name]
    accountant = prepared(gram, samples=40_000)
    for sigma, epsilon in [(1.0, 0.3), (2.0, 0.5), (2.0, 1.5), (0.6, 3.0)]:
        exact = oracles.delta(gram / sigma**2, epsilon, direction)
        found = accountant.estimate_delta(sigma, epsilon, direction)
        assert abs(found.value - exact) <= 4.5 * found.standard_error + 1e-14, (sigma, epsilon)
        if exact > 1e-9:
            assert found.standard_error <= 0.06 * exact, (sigma, epsilon)


CASES = [
    row
    for row in REFERENCE
    if (row["delta"] == 1e-8 and row["mechanism"] in ("dpsgd N=100 k=1", "bsr4 N=100 k=1", "bsr64 N=100 k=1"))
    or (row["mechanism"], row["epsilon"], row["delta"])
    in (("bsr4 N=1000 k=10", 1, 1e-5), ("bisr4 N=1000 k=10", 4, 1e-5))
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("row", CASES, ids=lambda row: f"{row['mechanism']} eps={row['epsilon']} delta={row['delta']}")
def test_agrees_with_the_reference_sigma(row: dict[str, float], direction: str) -> None:
    """The σ at which the estimate meets δ is within half a percent of the reference, whose error is about that."""
    accountant = MonteCarlo(samples=40_000).prepare(mechanism(str(row["mechanism"])))
    sigma = row[f"sigma_{direction}"]
    below, above = (accountant.estimate_delta(s, row["epsilon"], direction) for s in (0.995 * sigma, 1.005 * sigma))
    assert below.value + 2 * below.standard_error > row["delta"] > above.value - 2 * above.standard_error
    # A tenth is asked for at a million samples; this is little more at a twenty-fifth of them.
    assert max(below.standard_error, above.standard_error) <= 0.15 * row["delta"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_importance_sampling_and_plain_sampling_agree(direction: str) -> None:
    mech = Mechanism(bsr(4), BallsInBins(2, 12))
    plain = MonteCarlo(samples=60_000, importance=False).prepare(mech)
    weighted = MonteCarlo(samples=60_000, seed=1).prepare(mech)
    for sigma, epsilons in ((0.5, (0.0, 1.0, 5.0)), (1.5, (0.0, 0.3, 1.0)), (4.0, (0.0, 0.1, 0.3))):
        for epsilon in epsilons:
            one, other = (a.estimate_delta(sigma, epsilon, direction) for a in (plain, weighted))
            assert abs(one.value - other.value) <= 4 * math.hypot(one.standard_error, other.standard_error)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_against_samples_of_the_whole_output(direction: str) -> None:
    """The slow twin: draws of all N coordinates, densities of P and Q as they are defined."""
    n, b, sigma, epsilon, samples = 12, 4, 1.3, 0.4, 60_000
    means = oracles.mixture_means(oracles.bsr_matrix(3, n), b).T
    rng = np.random.default_rng(5)
    x = sigma * rng.standard_normal((samples, n))
    if direction == "remove":
        x += means[rng.integers(b, size=samples)]
    log_q = -(x**2).sum(axis=1) / (2 * sigma**2)
    log_p = np.logaddexp.reduce([-((x - m) ** 2).sum(axis=1) / (2 * sigma**2) for m in means], axis=0) - math.log(b)
    loss = log_p - log_q if direction == "remove" else log_q - log_p
    values = -np.expm1(np.minimum(epsilon - loss, 0.0))
    found = (
        MonteCarlo(samples=60_000)
        .prepare(Mechanism(bsr(3), BallsInBins(3, b)))
        .estimate_delta(sigma, epsilon, direction)
    )
    error = math.hypot(found.standard_error, values.std() / math.sqrt(samples))
    assert abs(found.value - values.mean()) <= 4 * error


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sigma", [0.05, 0.4, 2.0, 50.0])
def test_weights_average_to_one_and_keep_their_bound(sigma: float, direction: str) -> None:
    """Σ of target/mixture is one on average: a wrong normalisation of any proposal would show."""
    sampler = MonteCarlo().prepare(Mechanism(bisr(3), BallsInBins(2, 15)))._sampler
    plan = sampler.plan(sigma, direction, 22_000, importance=True)
    total, spread = 0.0, 0.0
    for stratum, count in enumerate(plan.counts):
        loss, weight = sampler._chunk(plan, stratum, count, np.random.SeedSequence(7, spawn_key=(stratum,)))
        total += weight.sum()
        spread += count * weight.var()
        for epsilon in (0.0, 0.1, 1.0, 5.0):
            assert weight[loss >= epsilon].max(initial=0.0) <= sampler.weight_bound(plan, epsilon)
    assert sampler.weight_bound(plan, 0.0) <= 2.01
    assert abs(total / plan.samples - 1) <= 4 * math.sqrt(spread) / plan.samples + 1e-9


def test_standard_error_is_honest() -> None:
    """Over many seeds the estimates spread as much as each of them says."""
    gram = mechanism("bsr4 N=20 k=1").gram
    found = [prepared(gram, samples=2000, seed=seed).estimate_delta(2.0, 0.5, "remove") for seed in range(100)]
    exact = prepared(gram, samples=200_000, seed=1000).estimate_delta(2.0, 0.5, "remove")
    scores = [(f.value - exact.value) / f.standard_error for f in found]
    assert 0.75 < np.std(scores) < 1.3
    assert abs(np.mean(scores)) < 0.4
    assert sum(f.interval[0] <= exact.value <= f.interval[1] for f in found) >= 95


def test_few_contributing_samples_widen_the_interval() -> None:
    found = prepared([[1.0]], samples=1000, importance=False).estimate_delta(1.0, 8.0, "add")
    assert found.value == 0
    assert found.standard_error == 0
    assert found.interval == (0.0, pytest.approx(-math.expm1(math.log(0.005) / 1000)))


# --- the high-probability bound ----------------------------------------------------------------------------------


def test_chernoff_bound_covers_exactly() -> None:
    """For binomial counts the failure probability is a finite sum: it is at most p for every true mean."""
    for samples in (1, 7, 60):
        for p in (0.3, 0.05, 1e-3):
            bounds = np.array([chernoff_upper_bound(k / samples, samples, p) for k in range(samples + 1)])
            assert np.all(np.diff(bounds) >= 0)
            assert np.all(bounds >= np.arange(samples + 1) / samples)
            for mean in np.linspace(0.001, 0.999, 67):
                assert binom.pmf(np.arange(samples + 1), samples, mean)[bounds < mean].sum() <= p * (1 + 1e-9)


def test_chernoff_bound_solves_its_equation() -> None:
    for mean in (1e-12, 1e-6, 0.01, 0.5, 0.99):
        for samples in (10, 10**4, 10**9):
            bound = chernoff_upper_bound(mean, samples, 0.01)
            assert mean < bound <= 1
            if bound < 1:
                assert relative_entropy(mean, bound) == pytest.approx(math.log(100) / samples, rel=1e-5)
    assert chernoff_upper_bound(0.0, 100, 0.01) == pytest.approx(1 - 0.01**0.01)
    assert chernoff_upper_bound(1.0, 100, 0.01) == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("importance", [True, False])
def test_bound_fails_no_more_often_than_it_says(direction: str, importance: bool) -> None:
    gram, sigma, epsilon, p, runs = GRAMS["unequal"], 1.1, 0.8, 0.1, 300
    exact = oracles.delta(gram / sigma**2, epsilon, direction)
    options = {"samples": 150, "importance": importance, "failure_probability": p}
    bounds = np.array([prepared(gram, seed=s, **options).delta(sigma, epsilon, direction).value for s in range(runs)])
    assert (bounds < exact).mean() <= p + 3 * math.sqrt(p * (1 - p) / runs)
    assert np.median(bounds) < 3 * exact
    assert bounds.min() < bounds.max()


def test_bound_on_epsilon_fails_no_more_often_than_it_says() -> None:
    sigma, delta, p, runs = 1.0, 0.05, 0.2, 200
    low, high = 0.0, 10.0
    while high - low > 1e-9:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if oracles.gaussian_delta(sigma**-2, middle) > delta else (low, middle)
    found = [
        prepared([[1.0]], samples=300, seed=s, failure_probability=p).epsilon(sigma, delta, "remove").value
        for s in range(runs)
    ]
    assert np.mean(np.array(found) < high) <= p + 3 * math.sqrt(p * (1 - p) / runs)


def test_bounded_weights_show_a_delta_below_one_over_samples() -> None:
    row = next(
        r for r in REFERENCE if r["mechanism"] == "bsr64 N=100 k=1" and r["delta"] == 1e-8 and r["epsilon"] == 0.25
    )
    options = {"samples": 40_000, "failure_probability": 1e-3}
    weighted, plain = (
        MonteCarlo(importance=importance, **options)
        .prepare(mechanism("bsr64 N=100 k=1"))
        .delta(row["sigma_add"], 0.25, "add")
        .value
        for importance in (True, False)
    )
    assert 1e-8 < weighted < 1e-6
    assert plain > 1e-4


def test_bound_is_never_below_the_estimate_and_tightens_with_samples() -> None:
    gram = mechanism("bsr4 N=20 k=1").gram
    for importance in (True, False):
        excess = []
        for samples in (300, 3000, 30_000):
            found = prepared(gram, samples=samples, importance=importance, failure_probability=0.01)
            evaluation = found.delta(1.5, 0.3, "remove")
            assert evaluation.value > evaluation.details["estimate"]
            excess.append(evaluation.value / evaluation.details["estimate"] - 1)
        assert excess[0] > excess[1] > excess[2]


@pytest.mark.parametrize(("delta", "p"), [(1e-5, 1e-5), (1e-3, 0.01), (0.5, 0.1), (1e-9, 0.5)])
def test_minimum_samples_is_the_least(delta: float, p: float) -> None:
    least = minimum_samples(delta, p)
    assert chernoff_upper_bound(0.0, least, p) <= delta * (1 + 1e-12)
    assert least == 1 or chernoff_upper_bound(0.0, least - 1, p) > delta


@pytest.mark.parametrize(("delta", "p", "closeness"), [(1e-5, 1e-6, 2.0), (0.3, 0.01, 1.1), (1e-11, 0.5, 2.0)])
def test_samples_for_a_limit_are_as_many_as_it_takes(delta: float, p: float, closeness: float) -> None:
    enough = samples_for(delta, p, closeness)
    assert chernoff_upper_bound(delta / closeness, enough, p) <= delta * (1 + 1e-6)
    assert chernoff_upper_bound(delta / closeness, math.floor(enough * 0.99) - 1, p) > delta
    assert samples_for(1.0, p) == 1
    assert samples_for(5e-324, p) >= minimum_samples(5e-324, p) >= 10**250


def test_the_number_of_samples_follows_from_the_target_and_the_failure_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit of δ that fails with probability p takes about log(1/p)/δ samples, and an answer from fewer is no use."""
    usual = dataclasses.replace(monte_carlo._TUNING, usual=5_000, leading=2_000)
    monkeypatch.setattr(monte_carlo, "_TUNING", usual)
    mech = mechanism("bsr4 N=20 k=2")
    accountant = MonteCarlo(failure_probability=0.01)
    found = dpmf.calibrate(mech, target_epsilon=1.0, target_delta=1e-3, accountant=accountant, direction="remove")
    proved = dpmf.calibrate(mech, target_epsilon=1.0, target_delta=1e-3, accountant="chain", direction="remove")
    assert found.kind == "high-probability bound"
    assert samples_for(1e-3, 0.01) < found.details["remove"]["samples"] <= samples_for(5e-4, 0.01)
    assert found.noise_multiplier <= 1.1 * proved.noise_multiplier
    for few in (100, 5000):
        options = {"accountant": MonteCarlo(samples=few, failure_probability=0.01)}
        with pytest.raises(ValueError, match="samples must be at least 9209, better 60"):
            dpmf.calibrate(mech, target_epsilon=1.0, target_delta=1e-3, **options)
        with pytest.raises(ValueError, match="samples must be at least 9209"):
            dpmf.epsilon(mech, noise_multiplier=2.0, delta=1e-3, **options)
    with pytest.raises(ValueError, match=r"samples must be given where .* takes more than 200000000: [1-9]\d{10}"):
        dpmf.calibrate(mech, target_epsilon=1.0, target_delta=1e-9, accountant=accountant)


def test_a_coarse_search_ends_at_a_limit_and_not_at_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monte_carlo, "_TUNING", dataclasses.replace(monte_carlo._TUNING, usual=5_000, leading=2_000))
    accountant = MonteCarlo(failure_probability=0.01)
    found = dpmf.calibrate(
        mechanism("bsr4 N=20 k=2"), target_epsilon=1.0, target_delta=1e-3, accountant=accountant,
        direction="remove", relative_tolerance=0.2,
    )  # fmt: skip
    assert found.details["remove"]["estimate"] < found.delta <= 1e-3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_limits_hold_for_other_knobs(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tuning knob may be changed: estimates stay unbiased and limits above the truth."""
    gram = GRAMS["correlated"]
    truth = oracles.delta(gram, 0.5, direction)
    for change, tuning in knobs.perturbed(_sampling._TUNING):
        monkeypatch.setattr(_sampling, "_TUNING", tuning)
        found = prepared(gram, samples=20_000, failure_probability=1e-4).delta(1.0, 0.5, direction)
        assert found.value >= truth, change
        assert abs(found.details["estimate"] - truth) <= 5 * found.details["standard_error"], change


# --- the protocol ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure_probability", [None, 0.01])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_epsilon_inverts_delta(direction: str, failure_probability: float | None) -> None:
    accountant = prepared(mechanism("bsr4 N=20 k=1").gram, samples=20_000, failure_probability=failure_probability)
    for target in (0.1, 1e-3):
        found = accountant.epsilon(1.2, target, direction)
        assert accountant.delta(1.2, found.value, direction).value <= target
        assert accountant.delta(1.2, found.value * (1 - 2e-6), direction).value > target
    assert accountant.epsilon(1.2, 0.9, direction).value == 0


def test_losses_too_many_to_store_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mech = mechanism("bsr4 N=20 k=1")
    stored = MonteCarlo(samples=3000).prepare(mech)
    expected = stored.epsilon(1.2, 1e-4, "remove"), stored.deltas(1.2, [0.0, 0.5, 2.0], "remove")
    monkeypatch.setattr(monte_carlo, "_TUNING", replace(monte_carlo._TUNING, stored=2999))
    streamed = MonteCarlo(samples=3000).prepare(mech)
    passes = []
    draw = streamed._sampler.draw
    monkeypatch.setattr(streamed._sampler, "draw", lambda *args: passes.append(1) or draw(*args))
    assert (streamed.epsilon(1.2, 1e-4, "remove"), len(passes)) == (expected[0], pytest.approx(8, abs=2))
    assert streamed.deltas(1.2, [0.0, 0.5, 2.0], "remove") == expected[1]


def test_one_set_of_losses_serves_every_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    accountant = MonteCarlo(samples=2000).prepare(mechanism("bsr4 N=20 k=1"))
    passes = []
    draw = accountant._sampler.draw
    monkeypatch.setattr(accountant._sampler, "draw", lambda *args: passes.append(1) or draw(*args))
    profile = accountant.deltas(1.2, [0.0, 0.5, 1.0], "add")
    assert profile == [accountant.delta(1.2, e, "add").value for e in (0.0, 0.5, 1.0)]
    assert profile == sorted(profile, reverse=True)
    accountant.epsilon(1.2, 1e-3, "add")
    assert len(passes) == 1


@pytest.mark.parametrize("importance", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_common_random_numbers_make_delta_fall_with_sigma(direction: str, importance: bool) -> None:
    accountant = prepared(mechanism("bsr4 N=100 k=1").gram, samples=4000, importance=importance)
    deltas = [accountant.delta(s, 0.25, direction).value for s in np.geomspace(1.5, 1.6, 12)]
    assert np.all(np.diff(deltas) < 0)


def test_seeds() -> None:
    gram = mechanism("bsr4 N=20 k=1").gram
    values = [prepared(gram, samples=5000, seed=s).delta(1.2, 0.5, "remove").value for s in (3, 3, 4)]
    assert values[0] == values[1] != values[2]
    accountant = prepared(gram, samples=5000, seed=3)
    accountant.delta(7.0, 0.5, "remove")
    accountant.delta(1.2, 0.5, "add")
    assert accountant.delta(1.2, 0.5, "remove").value == values[0]


def test_no_random_stream_is_used_twice() -> None:
    sampler = prepared(mechanism("bsr4 N=100 k=1").gram)._sampler
    losses = []
    for direction in DIRECTIONS:
        plan = sampler.plan(1.0, direction, 3 * sampler.rows, importance=False)
        chunks = list(sampler.draw(plan, 0))
        assert [chunk.drawn for chunk in chunks] == [sampler.rows] * 3
        plan = sampler.plan(1.0, direction, 400, importance=True)
        chunks += sampler.draw(plan, 1)
        losses += [chunk.loss for chunk in chunks]
    found = np.concatenate(losses)
    assert len(np.unique(found)) == len(found)


def test_the_answer_says_that_it_is_an_estimate() -> None:
    gram = mechanism("bsr4 N=20 k=1").gram
    estimate = prepared(gram, samples=5000)
    assert estimate.kind == "estimate"
    found = estimate.estimate_delta(1.2, 0.5, "remove")
    assert type(found) is MonteCarloEstimate
    assert not isinstance(found, PrivacyBound)
    assert found.kind == "estimate"
    assert "≈" in str(found)
    assert "estimate" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["interval"] == list(found.interval)
    assert found.interval[0] < found.value < found.interval[1]
    evaluation = estimate.delta(1.2, 0.5, "remove")
    assert evaluation.value == found.value
    assert evaluation.details["kind"] == "estimate"
    assert evaluation.details["standard_error"] == found.standard_error
    assert evaluation.details["samples"] == 5000

    bound = prepared(gram, samples=5000, failure_probability=1e-3)
    assert bound.kind == "high-probability bound"
    found = bound.estimate_delta(1.2, 0.5, "remove")
    assert found.value > found.interval[0]
    assert "high-probability bound, fails with probability 0.001" in str(found)
    evaluation = bound.delta(1.2, 0.5, "remove")
    assert evaluation.details["kind"] == "high-probability bound, fails with probability 0.001"


def test_memory_does_not_grow_with_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monte_carlo, "_TUNING", replace(monte_carlo._TUNING, stored=0))
    gram = mechanism("bsr4 N=100 k=1").gram
    peaks = []
    for samples in (40_000, 160_000):
        accountant = prepared(gram, samples=samples)
        tracemalloc.start()
        accountant.delta(4.0, 0.25, "remove")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 64 * 2**20
    assert peaks[1] < 1.2 * peaks[0]


def test_no_progress_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    prepared([[1.0]], samples=100, progress=True).delta(1.0, 1.0, "add")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with_bar = prepared([[1.0]], samples=100, progress=True).delta(1.0, 1.0, "add")
    assert "sampling losses (add)" in capsys.readouterr().err
    assert with_bar == prepared([[1.0]], samples=100).delta(1.0, 1.0, "add")


# --- the edges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("options", [{}, {"importance": False}, {"failure_probability": 1e-3}])
def test_extreme_noise_multipliers(options: dict[str, object], direction: str) -> None:
    grams = [
        mechanism("bisr4 N=20 k=2").gram,
        [[1.0]],
        np.ones((3, 3)),
        np.diag([1.0, 0.0]),
        1e300 * np.eye(2),
        1e-300 * np.eye(2),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gram in grams:
            accountant = prepared(gram, samples=2000, **options)
            scale = math.sqrt(np.max(gram))
            some_mean_is_zero = not np.all(np.diagonal(gram))  # then half of P is Q
            for sigma in (1e-200, 1e-3):
                deltas = accountant.deltas(sigma * scale, [0.0, 1.0, 100.0], direction)
                if some_mean_is_zero:
                    assert deltas == pytest.approx([0.5] * 3 if direction == "remove" else [0.5, 0.0, 0.0], abs=0.1)
                else:
                    assert deltas == [1.0, 1.0, 1.0]
                    assert accountant.epsilon(1e-200 * scale, 0.01, direction).value == math.inf
            for sigma in (1e6, 1e12, 1e200):
                zero, one = accountant.deltas(sigma * scale, [0.0, 1.0], direction)
                allowed = 0.01 if options.get("failure_probability") else 0.0
                assert 0 < zero <= 1e-5 + allowed
                assert 0 <= one <= allowed
                assert accountant.epsilon(sigma * scale, 0.1, direction).value == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_small_losses_keep_their_accuracy(direction: str) -> None:
    """At ε = 0 the δ of a tiny shift is its total variation distance, proportional to 1/σ."""
    gram = mechanism("bsr4 N=20 k=1").gram
    accountant = prepared(gram, samples=20_000)
    scaled = [sigma * accountant.delta(sigma, 0.0, direction).value for sigma in (1e4, 1e7, 1e10, 1e15, 1e30)]
    exact = math.sqrt(gram.mean() / (2 * math.pi))
    assert scaled == pytest.approx([exact] * 5, rel=0.02)
    assert scaled == pytest.approx([scaled[-1]] * 5, rel=1e-3)


def test_no_sensitivity_no_loss() -> None:
    accountant = prepared(np.zeros((3, 3)), samples=500)
    for direction in DIRECTIONS:
        assert accountant.delta(1.0, 0.0, direction).value == 0
        assert accountant.epsilon(1.0, 1e-9, direction).value == 0


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 40])
def test_any_number_of_samples(samples: int) -> None:
    for direction in DIRECTIONS:
        for importance in (True, False):
            accountant = prepared(GRAMS["correlated"], samples=samples, importance=importance)
            plan = accountant._sampler.plan(1.0, direction, samples, importance)
            assert plan.samples == samples
            assert min(plan.counts) >= 1
            found = accountant.estimate_delta(1.0, 0.5, direction)
            assert 0 <= found.interval[0] <= found.value <= found.interval[1] <= 1
            assert math.isfinite(found.standard_error)


def test_one_iteration() -> None:
    found = MonteCarlo(samples=20_000).prepare(Mechanism(dpsgd(), BallsInBins(1, 1))).estimate_delta(1.0, 1.0, "remove")
    assert found.value == pytest.approx(oracles.gaussian_delta(1.0, 1.0), rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"samples": -5}, "samples must be at least 1, got -5"),
        ({"samples": 1e6}, "samples must be an integer"),
        ({"samples": math.nan}, "samples must be an integer, got nan"),
        ({"samples": True}, "samples must be an integer"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"failure_probability": 0}, "failure_probability must be strictly between 0 and 1"),
        ({"failure_probability": 1.0}, "failure_probability must be strictly between 0 and 1"),
        ({"failure_probability": math.nan}, "failure_probability must be finite"),
        ({"failure_probability": "0.1"}, "failure_probability must be a real number"),
        ({"backend": "jax"}, "backend must be one of numpy, torch, got 'jax'"),
        ({"backend": None}, "backend must be one of numpy, torch"),
        ({"device": "cuda"}, "device must be None for the numpy backend, got 'cuda'"),
        ({"backend": "torch", "device": 3}, "device must be a string or None, got 3"),
        ({"importance": math.nan}, "importance must be True or False, got nan"),
        ({"progress": "yes"}, "progress must be True or False, got 'yes'"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        MonteCarlo(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_bad_arguments() -> None:
    accountant = prepared([[1.0]], samples=10)
    for arguments, message in [
        ((0.0, 1.0, "add"), "noise_multiplier must be positive"),
        ((math.nan, 1.0, "add"), "noise_multiplier must be finite"),
        ((1.0, -1.0, "add"), "epsilon must be non-negative"),
        ((1.0, 1.0, "both"), "direction must be one of remove, add, got 'both'"),
    ]:
        with pytest.raises(ValueError, match=message):
            accountant.estimate_delta(*arguments)
    with pytest.raises(ValueError, match="delta must be strictly between 0 and 1"):
        minimum_samples(0.0, 0.1)
    with pytest.raises(ValueError, match="failure_probability must be"):
        minimum_samples(0.1, math.nan)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        chernoff_upper_bound(0.1, 0, 0.1)


def test_torch_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"needs torch: pip install '\.\[torch\]' in a clone"):
        prepared([[1.0]], backend="torch")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_torch_backend(direction: str) -> None:
    pytest.importorskip("torch")
    gram = mechanism("bsr4 N=100 k=1").gram
    options = {"samples": 50_000, "backend": "torch"}
    one, same = (prepared(gram, **options).estimate_delta(4.2, 0.25, direction) for _ in range(2))
    other = prepared(gram, samples=50_000).estimate_delta(4.2, 0.25, direction)
    assert one == same
    assert abs(one.value - other.value) <= 4 * math.hypot(one.standard_error, other.standard_error)
    with pytest.raises(ValueError, match="device must be one PyTorch can use, got 'nowhere'"):
        prepared(gram, device="nowhere", **options)
