"""Conditional composition: against a direct implementation on vectors, simulation, quadrature, and reference values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from types import ModuleType

import balls
import knobs
import numpy as np
import oracles
import paths
import pytest
from scipy.special import logsumexp, ndtr

from dpmf.accountants import conditional
from dpmf.accountants.conditional import DEFAULT_TEMPERATURES, Conditional, _balance, _reverse_hazard
from dpmf.accountants.conditional._reverse_hazard import Family, ReverseHazards
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.strategies import bisr, bsr, coefficients, dpsgd
from dpmf.strategies.base import DenseStrategy

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

DIRECTIONS = ("remove", "add")
TEMPERATURES = (0.1, 1.0, 10.0)
FAMILIES = {
    "am-gm": Family(True, (), False),
    "option 2": Family(True, TEMPERATURES, True),
    "option 3": Family(True, TEMPERATURES, False),
    "finite": Family(False, TEMPERATURES, False),
}
STRATEGIES = {"dpsgd": dpsgd(), "bsr3": bsr(3), "bisr2": bisr(2)}


class Dense(DenseStrategy):
    """Any matrix, for cases no formula gives."""

    def __init__(self, values: object) -> None:
        self.values = np.asarray(values, dtype=np.float64)

    name = "dense"

    def matrix(self, iterations: int) -> np.ndarray:
        return self.values[:iterations, :iterations]

    def rows(self, iterations: int, chunk: int) -> Iterator[tuple[int, np.ndarray]]:
        for start in range(0, iterations, chunk):
            yield start, self.matrix(iterations)[start : start + chunk]


def mechanism(strategy, b: int, iterations: int) -> Mechanism:
    return Mechanism(strategy, BallsInBins.from_iterations(iterations, b))


def mean_table(mech: Mechanism) -> np.ndarray:
    """N × b from the definition."""
    n = mech.batching.iterations
    return oracles.mixture_means(mech.strategy.matrix(n), mech.batching.batches_per_epoch)


# --- Algorithm 2 on vectors of length n, with the right readings ----------------------------------------------------


def slow_entries(
    means: np.ndarray, sigma: float, bad_event: float, direction: str, family: Family, printed: bool = False
) -> Iterator[tuple[int, np.ndarray, dict[int, float]]]:
    """(step, its components by ascending mean, {position: bound on its reverse hazard}), from full vectors.

    `printed` takes R̃ as Algorithm 2 prints it, components i..b only.
    """
    steps, b = means.shape
    plans = []
    for n in range(steps):
        order = np.argsort(means[n], kind="stable")
        prefix = means[:n].T[order]
        bounded = {}
        for i in range(b):
            if means[n, order[i]] > means[n].min():
                same = [j for j in range(i) if np.array_equal(prefix[j], prefix[i])]
                bounded[i] = (len(same), [j for j in range(i) if j not in same])
        plans.append((n, order, prefix, bounded))
    live_steps = sum(any(other for _, other in bounded.values()) for *_, bounded in plans)
    for n, order, prefix, bounded in plans:
        live = sum(bool(other) for _, other in bounded.values())
        hazards = {}
        for i, (same, other) in bounded.items():
            tau = 0.0
            if other:
                centres = {"add": np.zeros((1, n)), "remove": prefix[i:] if printed else prefix}[direction]
                terms = [
                    [
                        tail_terms(prefix[i], prefix[other], centre, sigma, psi)
                        for psi in distributions(prefix[i], prefix[other], centre, family)
                    ]
                    for centre in centres
                ]
                share = 1 / b if direction == "remove" else 1.0
                tau = threshold(terms, share, bad_event / live_steps / live)
            hazards[i] = 1 / (1 + same + len(other) * math.exp(min(tau, 500.0)))
        yield n, order, hazards


def distributions(own: np.ndarray, others: np.ndarray, centre: np.ndarray, family: Family) -> list[np.ndarray]:
    start = centre if family.by_component else own
    distances = ((others - start) ** 2).sum(axis=1)
    out = [np.full(len(others), 1 / len(others))] if family.uniform else []
    for t in family.temperatures:
        weights = np.exp(-(distances - distances.min()) / t)
        out.append(weights / weights.sum())
    return out


def tail_terms(own, others, centre, sigma: float, psi: np.ndarray) -> tuple[float, float]:
    """ν and ξ of E_ψ L_ij − KL(ψ ‖ uniform) under N(centre, σ²I)."""
    slope = psi @ others - own
    constant = 0.5 * (own @ own - psi @ (others**2).sum(axis=1))
    positive = psi[psi > 0]
    divergence = float(positive @ np.log(positive * len(psi)))
    return float(centre @ slope + constant) / sigma**2 - divergence, float(np.linalg.norm(slope)) / sigma


def threshold(terms: list[list[tuple[float, float]]], share: float, level: float) -> float:
    nu, xi = np.moveaxis(np.array(terms), -1, 0)

    def bound(tau: float) -> float:
        return share * float(ndtr((tau - nu) / np.maximum(xi, 1e-300)).min(axis=1).sum())

    low, high = -1.0, 1.0
    while bound(low) > level:
        low *= 2
    while bound(high) <= level and high < 600:
        high *= 2
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if bound(middle) <= level else (low, middle)
    return low


def weights_from(hazards: dict[int, float], b: int) -> np.ndarray:
    """Mixture weights by position; what is left goes to the lowest tie group, written at position 0."""
    weights, remaining = np.zeros(b), 1.0
    for i in range(b - 1, -1, -1):
        if i in hazards:
            weights[i] = remaining * hazards[i]
            remaining -= weights[i]
    weights[0] += remaining
    return weights


def steps_of(hazards: ReverseHazards, sigma: float, bad_event: float) -> list[tuple[tuple[float, ...], np.ndarray]]:
    """The mixtures as a sorted list; equal steps come with their count."""
    mixtures = hazards.mixtures(sigma, bad_event)
    out = []
    for n in range(len(mixtures)):
        part = slice(mixtures.starts[n], mixtures.starts[n + 1])
        out += [(tuple(mixtures.means[part]), mixtures.weights[part])] * int(mixtures.counts[n])
    return out


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("sigma", [0.7, 4.0])
def test_mixtures_equal_the_slow_twin(
    name: str, family: str, direction: str, sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reverse_hazard, "_TUNING", replace(_reverse_hazard._TUNING, lift=0.0))
    mech = mechanism(STRATEGIES[name], b=4, iterations=7)
    means = mean_table(mech)
    fast = steps_of(ReverseHazards(mech, direction, FAMILIES[family]), sigma, 1e-3)
    slow = []
    for n, order, hazards in slow_entries(means, sigma, 1e-3, direction, FAMILIES[family]):
        weights = weights_from(hazards, 4)
        values = means[n, order]
        distinct = tuple(np.unique(values[weights > 0]))
        slow.append((distinct, np.array([weights[values == v].sum() for v in distinct])))
    assert len(fast) == len(slow)
    for theirs in slow:
        rivals = [w for m, w in fast if len(m) == len(theirs[0]) and np.allclose(m, theirs[0], rtol=1e-12, atol=1e-14)]
        mine = min(rivals, key=lambda w: float(np.abs(w - theirs[1]).max()))
        assert mine == pytest.approx(theirs[1], rel=2e-4, abs=1e-9)
        # Interpolating Φ and rounding may only make the mixture larger.
        assert np.all(np.cumsum(mine) <= np.cumsum(theirs[1]) + 1e-12)


@pytest.mark.parametrize("family", ["am-gm", "option 3"])
def test_lifting_the_lowest_means_dominates(family: str) -> None:
    """Raised means and fewer tail bounds: every step's upper tails are at least the posterior's share of them."""
    mech = mechanism(bisr(2), b=30, iterations=60)
    lifted = ReverseHazards(mech, "remove", FAMILIES[family])
    entries = sum(len(terms.tops) for terms in lifted.blocks())
    assert entries < sum(int((row > row.min()).sum()) for row in mean_table(mech))
    for terms, row in zip([t for b in lifted.blocks() for t in b.bases], mean_table(mech), strict=True):
        assert terms >= row.min()
        assert np.maximum(row, terms).sum() <= row.sum() * (1 + 1.001e-4)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_raised_hazards_dominate_and_repeat(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many steps hazards go up to a grid: never down, hardly up, and some steps become equal."""
    hazards = ReverseHazards(mechanism(bsr(2), 10, 200), direction, FAMILIES["am-gm"])
    plain = steps_of(hazards, 8.0, 1e-5)
    monkeypatch.setattr(_reverse_hazard, "_TUNING", replace(_reverse_hazard._TUNING, many_steps=0, grain=1e-2))
    assert len(hazards.mixtures(8.0, 1e-5)) < len(plain)
    mixtures = hazards.mixtures(8.0, 1e-5)
    assert mixtures.total == len(plain)
    tails = sorted(tuple(np.round(1 - np.cumsum(w)[:-1], 15)) for m, w in plain if len(m) == 3)
    raised = sorted(tuple(1 - np.cumsum(w)[:-1]) for m, w in steps_of(hazards, 8.0, 1e-5) if len(m) == 3)
    assert len(tails) == len(raised)
    for old, new in zip(np.sort(np.array(tails), axis=0), np.sort(np.array(raised), axis=0), strict=True):
        assert np.all(new >= old - 1e-12)
        assert np.all(new <= old * 1.021)


# --- the bad event, simulated ---------------------------------------------------------------------------------------


def bad_event_frequency(
    means: np.ndarray, sigma: float, direction: str, entries: list, samples: int, seed: int
) -> float:
    """How often, over draws of all outcomes, some reverse hazard exceeds its bound at some step."""
    rng = np.random.default_rng(seed)
    steps, b = means.shape
    outcome = sigma * rng.standard_normal((samples, steps))
    if direction == "remove":
        outcome += means[:, rng.integers(b, size=samples)].T
    bad = np.zeros(samples, dtype=bool)
    log_likelihood = np.zeros((samples, b))
    for n, order, hazards in entries:
        ordered = log_likelihood[:, order]
        for i, bound in hazards.items():
            posterior = np.exp(ordered[:, i] - logsumexp(ordered[:, : i + 1], axis=1))
            bad |= posterior > bound * (1 + 1e-9)
        log_likelihood += (outcome[:, [n]] * means[n] - means[n] ** 2 / 2) / sigma**2
    return float(bad.mean())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_bad_event_keeps_its_budget(name: str, direction: str) -> None:
    means = mean_table(mechanism(STRATEGIES[name], b=6, iterations=12))
    for sigma in (1.0, 5.0):
        entries = list(slow_entries(means, sigma, 0.05, direction, FAMILIES["option 3"]))
        frequency = bad_event_frequency(means, sigma, direction, entries, 50_000, seed=3)
        assert 0 < frequency <= 0.05


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_posterior_is_dominated_outside_the_budget(direction: str) -> None:
    """The same of the package's own mixtures, step by step: P(mean ≥ v | outcomes) ≤ the mixture's weight at ≥ v."""
    mech = mechanism(bsr(3), b=6, iterations=10)
    means, sigma, samples = mean_table(mech), 2.0, 50_000
    fast = iter(steps_of(ReverseHazards(mech, direction, FAMILIES["option 3"]), sigma, 0.05))
    rng = np.random.default_rng(11)
    outcome = sigma * rng.standard_normal((samples, len(means)))
    if direction == "remove":
        outcome += means[:, rng.integers(6, size=samples)].T
    bad = np.zeros(samples, dtype=bool)
    log_likelihood = np.zeros((samples, 6))
    for n, row in enumerate(means):
        posterior = np.exp(log_likelihood - logsumexp(log_likelihood, axis=1, keepdims=True))
        values, weights = next(fast)  # no step repeats here, so they come in order
        for k in range(1, len(values)):
            bad |= posterior[:, row >= values[k] - 1e-12].sum(axis=1) > weights[k:].sum() * (1 + 1e-9)
        log_likelihood += (outcome[:, [n]] * row - row**2 / 2) / sigma**2
    assert bad.mean() <= 0.05


def test_printed_reference_distribution_breaks_its_budget() -> None:
    """Errata 4: R̃ over k = i..b is no distribution; the bad event then has several times its probability."""
    means = mean_table(mechanism(dpsgd(), b=8, iterations=8))
    frequencies = {}
    for printed in (False, True):
        entries = list(slow_entries(means, 3.0, 0.02, "remove", FAMILIES["am-gm"], printed))
        frequencies[printed] = bad_event_frequency(means, 3.0, "remove", entries, 50_000, seed=5)
    assert frequencies[False] <= 0.02
    assert frequencies[True] > 1.5 * 0.02


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("name", "b", "iterations"), [("dpsgd", 2, 2), ("bsr3", 2, 5), ("bsr3", 3, 3), ("bisr2", 3, 7)]
)
def test_bounds_exceed_quadrature(name: str, b: int, iterations: int, direction: str) -> None:
    mech = mechanism(STRATEGIES[name], b, iterations)
    prepared = Conditional().prepare(mech)
    epsilons = (0.0, 0.3, 1.0, 3.0)
    for sigma in (0.8, 3.0):
        truth = [oracles.delta(mech.gram / sigma**2, e, direction) for e in epsilons]
        profile = prepared.deltas(sigma, epsilons, direction)
        for epsilon, exact, bound in zip(epsilons, truth, profile, strict=True):
            assert bound >= exact
            assert prepared.delta(sigma, epsilon, direction).value >= exact
            assert prepared.delta(sigma, epsilon, direction, 1e-3).value >= exact
        epsilon = prepared.epsilon(sigma, 1e-4, direction).value
        assert oracles.delta(mech.gram / sigma**2, epsilon, direction) <= 1e-4


REFERENCE = {  # the reference notes' better numbers (errata 5 and 8), δ = 1e-5
    "dpsgd N=100 k=1": (dpsgd(), {0.25: 2.036, 0.5: 1.420, 1: 1.103, 2: 0.903, 4: 0.742, 8: 0.611}),
    "bsr4 N=100 k=1": (bsr(4), {0.25: 6.002, 0.5: 4.285, 1: 3.228, 2: 2.531, 4: 2.039, 8: 1.660}),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_noise_multipliers_of_the_reference(name: str) -> None:
    """At most half a percent above the reference, and never below the truth."""
    strategy, cells = REFERENCE[name]
    prepared = Conditional().prepare(mechanism(strategy, 100, 100))
    truth = json.loads(paths.TRUE_SIGMA.read_text())
    for epsilon, sigma in cells.items():
        for direction in DIRECTIONS:
            assert prepared.delta(1.005 * sigma, epsilon, direction, 1e-5).value <= 1e-5
    rows = [row for row in truth if row["mechanism"] == name]
    assert rows
    for row in rows:
        for direction in DIRECTIONS:
            if f"sigma_{direction}" in row:
                sigma = 0.985 * row[f"sigma_{direction}"]
                assert prepared.delta(sigma, row["epsilon"], direction, row["delta"]).value > row["delta"]


def test_identical_components_are_pulled_out_the_sound_way() -> None:
    """Errata 5: leaving them out of ψ instead needs σ = 5.05 here, and putting them in 1.118."""
    prepared = Conditional().prepare(mechanism(dpsgd(), 100, 100))
    assert prepared.delta(1.108, 1.0, "remove", 1e-5).value <= 1e-5


def test_budget_is_split_over_the_components_that_matter() -> None:
    """Errata 8: of DP-SGD's b components one is above the lowest tie group; the first step needs no budget."""
    hazards = ReverseHazards(mechanism(dpsgd(), 10, 20), "remove", FAMILIES["am-gm"])
    counts = [int(k) for terms in hazards.blocks() for k in np.diff(terms.starts)]
    assert counts == [1] * 20
    assert hazards.live_steps == 19


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("strategy", "b", "iterations"), [(bsr(3), 1, 6), (dpsgd(), 1, 1), (Dense(np.ones((3, 3))), 3, 3)]
)
def test_one_mean_is_the_gaussian_mechanism(strategy, b: int, iterations: int, direction: str) -> None:
    """b = 1, N = 1, and (all rows of ones, every mean the same) no bad event at all."""
    mech = mechanism(strategy, b, iterations)
    prepared = Conditional().prepare(mech)
    for sigma in (0.5, 2.0):
        s = mech.gram[0, 0] / sigma**2
        for epsilon in (0.0, 0.7, 3.0):
            exact = oracles.gaussian_delta(s, epsilon)
            for bound in (
                prepared.delta(sigma, epsilon, direction),
                prepared.delta(sigma, epsilon, direction, 1e-5),
            ):
                assert bound.value == pytest.approx(exact, rel=1e-9)
                assert bound.details["bad_event"] == 0
        epsilon = prepared.epsilon(sigma, 1e-5, direction).value
        assert oracles.gaussian_delta(s, epsilon) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ties_and_repeated_columns(direction: str) -> None:
    """Ties above the lowest group and components that agree for a while; b = 3, so quadrature knows the answer."""
    matrix = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0.5, 0, 1, 1]])
    mech = mechanism(Dense(matrix), 3, 4)
    for options in (Conditional(), Conditional(option=2), Conditional(family="am-gm")):
        bound = options.prepare(mech).delta(2.0, 0.5, direction).value
        assert oracles.delta(mech.gram / 4, 0.5, direction) <= bound < 1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_tiny_and_huge_noise(name: str, direction: str) -> None:
    prepared = Conditional().prepare(mechanism(STRATEGIES[name], 5, 10))
    assert prepared.delta(1e-3, 1.0, direction).value == pytest.approx(1.0)
    assert prepared.delta(1e-3, 1.0, direction, 1e-5).value == pytest.approx(1.0)
    assert prepared.epsilon(1e-3, 1e-5, direction).value > 1e5
    assert prepared.delta(1e6, 1.0, direction).value < 1e-20
    assert prepared.delta(1e6, 1.0, direction, 1e-5).value == pytest.approx(5e-6)
    assert prepared.epsilon(1e6, 1e-5, direction).value < 1e-5
    assert 0 < prepared.delta(1e6, 0.0, direction).value < 1e-5
    assert prepared.delta(1e-12, 1.0, direction).value == 1.0
    assert prepared.epsilon(1e-12, 1e-5, direction).value == math.inf
    assert prepared.delta(1e150, 1.0, direction).value < 1e-20


def test_profiles_fall_in_epsilon_and_in_sigma() -> None:
    prepared = Conditional().prepare(mechanism(bsr(4), 20, 20))
    for direction in DIRECTIONS:
        profile = prepared.deltas(2.0, np.linspace(0, 4, 9).tolist(), direction)
        assert profile == sorted(profile, reverse=True)
        by_sigma = [prepared.delta(s, 1.0, direction, 1e-5).value for s in np.linspace(1.5, 4, 11)]
        assert by_sigma == sorted(by_sigma, reverse=True)
        epsilon = prepared.epsilon(2.5, 1e-5, direction).value
        assert prepared.delta(2.5, epsilon, direction, 1e-5).value == pytest.approx(1e-5, rel=5e-3)


# --- options --------------------------------------------------------------------------------------------------------


def test_richer_families_are_tighter() -> None:
    mech = mechanism(bsr(4), 10, 40)
    amgm, option1, option2, option3, tuned = (
        options.prepare(mech).delta(3.0, 2.0, "remove", 1e-5).value
        for options in (
            Conditional(family="am-gm"),
            Conditional(option=1),
            Conditional(option=2),
            Conditional(),
            Conditional(optimise_bad_event=True),
        )
    )
    assert amgm == option1
    assert max(option2, option3) < amgm
    assert tuned <= option3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_terms_are_reused_or_recomputed_alike(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mech = mechanism(bsr(4), 8, 24)
    kept = ReverseHazards(mech, direction, FAMILIES["option 3"])
    first = kept.mixtures(2.0, 1e-6)
    assert next(kept.blocks()) is next(kept.blocks())
    monkeypatch.setattr(_reverse_hazard, "_TUNING", replace(_reverse_hazard._TUNING, cache_bytes=0, block_bytes=2000))
    streamed = ReverseHazards(mech, direction, FAMILIES["option 3"])
    again = streamed.mixtures(2.0, 1e-6)
    assert len(list(streamed.blocks())) > 3
    assert next(streamed.blocks()) is not next(streamed.blocks())
    assert np.array_equal(first.means, again.means)
    assert np.array_equal(first.weights, again.weights)


def test_steps_that_repeat_are_counted() -> None:
    """From the second on all rows of means are (1, 1): one Gaussian step, three times."""
    matrix = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [0.5, 1, 0.5, 0], [1, 0.5, 0, 0.5]])
    mech = mechanism(Dense(matrix), 2, 4)
    mixtures = ReverseHazards(mech, "remove", FAMILIES["am-gm"]).mixtures(1.0, 1e-3)
    assert mixtures.counts.tolist() == [1, 3]
    bound = Conditional().prepare(mech).delta(2.0, 1.0, "remove")
    assert bound.details["bad_event"] == 0
    assert bound.value == pytest.approx(oracles.delta(mech.gram / 4, 1.0, "remove"), rel=5e-3)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("module", [conditional, _balance, _reverse_hazard])
def test_bounds_hold_for_other_knobs(module: ModuleType, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tuning knob may be changed: bounds stay above the truth."""
    mech = mechanism(bsr(3), 3, 6)
    exact = oracles.delta(mech.gram / 4, 0.5, direction)
    for change, tuning in knobs.perturbed(module._TUNING):
        monkeypatch.setattr(module, "_TUNING", tuning)
        prepared = Conditional(optimise_bad_event=True, temperatures=(math.inf, 1.0)).prepare(mech)
        assert prepared.delta(2.0, 0.5, direction).value >= exact, change
        assert prepared.delta(2.0, 0.5, direction, 1e-3).value >= exact, change


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": (1.0, 0.0)}, "temperatures must be positive, got 0.0"),
        ({"temperatures": (-1.0,)}, "temperatures must be positive, got -1.0"),
        ({"temperatures": (math.nan,)}, "temperatures must be finite, got nan"),
        ({"temperatures": ()}, "temperatures must be at least one positive number"),
        ({"temperatures": 3.0}, "temperatures must be positive numbers, got 3.0"),
        ({"temperatures": ("hot",)}, "temperatures must be a real number, got 'hot'"),
        ({"bad_event_share": 1.0}, "bad_event_share must be strictly between 0 and 1, got 1.0"),
        ({"bad_event_share": 0.0}, "bad_event_share must be strictly between 0 and 1, got 0.0"),
        ({"bad_event_share": math.nan}, "bad_event_share must be finite, got nan"),
        ({"family": "gm-am"}, "family must be one of variational, am-gm, got 'gm-am'"),
        ({"option": 4}, "option must be at most 3, got 4"),
        ({"option": 0}, "option must be at least 1, got 0"),
        ({"optimise_bad_event": "yes"}, "optimise_bad_event must be True or False, got 'yes'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Conditional(**options)


def test_options_are_values() -> None:
    assert Conditional() == Conditional(temperatures=list(DEFAULT_TEMPERATURES))
    assert hash(Conditional()) == hash(Conditional())
    assert Conditional().variational_family().size == 6


# --- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sums_over_many_epochs_are_rounded_up(direction: str) -> None:
    """c = (1, just below 2⁻⁵³, ...): every addition of the cumulative sums over epochs is lost in double precision."""
    n, sigma, epsilon = 200_000, 1000.0, 1.0
    small = math.nextafter(2.0**-53, 0.0)
    mech = mechanism(coefficients(np.concatenate(([1.0], np.full(n - 1, small)))), 1, n)
    q = Fraction(small)  # the t-th entry of the one mean is 1 + t·q
    squares = n + 2 * q * Fraction(n * (n - 1), 2) + q**2 * Fraction((n - 1) * n * (2 * n - 1), 6)
    truth = balls.gaussian_delta(balls.exact(squares).sqrt() / balls.exact(sigma), balls.exact(epsilon))
    prepared = Conditional().prepare(mech)
    found = prepared.delta(sigma, epsilon, direction, 1e-5).value
    assert truth.upper() <= balls.exact(found) <= truth.lower() * balls.exact(1 + 1e-7)
    assert balls.gaussian_delta(
        balls.exact(squares).sqrt() / balls.exact(sigma),
        balls.exact(prepared.epsilon(sigma, 1e-5, direction).value),
    ) <= balls.exact(1e-5)


def test_where_it_is_hopeless_it_says_so_early():
    """The rough bound is 1 where the bound proper misses the target by far, and there is none where it does not."""
    mechanism = Mechanism(bsr(4), BallsInBins(2, 8))
    bound = Conditional().prepare(mechanism)
    for sigma, hopeless in ((0.5, True), (1.0, True), (8.0, False)):
        for direction in ("remove", "add"):
            rough = bound.rough_delta(sigma, 1.0, direction, 1e-5)
            assert (rough is not None) == hopeless
            assert rough is None or (rough.value == 1 and bound.delta(sigma, 1.0, direction, 1e-5).value > 1e-4)
