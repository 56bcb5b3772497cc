"""Questions about a run: what cut batches cost, where one may stop, and statements.

The cost of a cut is compared with enumeration: integrals over the densities of all assignments of a few records to two
bins. Stopping early is compared with the worst rule to stop a Gaussian walk.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import oracles
import pytest
from scipy.special import ndtr

import dpmf
from dpmf import certificates, tuning
from dpmf.accountants.registry import resolve
from dpmf.errors import ArgumentError
from dpmf.verification import verify

POINTS = np.linspace(-9.0, 9.0, 121)
WIDTH = POINTS[1] - POINTS[0]
TWO_BINS = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 2))
SIGMA = 1.0
CASES = [
    (others, largest, first)
    for others, largest in (((-1.0,) * 3, 2), ((-1.0,) * 2, 2), ((1.0,) * 3, 2), ((-1.0, 1.0, -1.0), 3))
    for first in (True, False)
]


def density(others: tuple[float, ...], own: int, largest: int, first: bool) -> np.ndarray:
    """Masses of two bins' noisy sums over all assignments; each of `own` records contributes +1.

    `first` says whether these are the first of their bins, so that they push others out, or the last.
    """
    mine = (1.0,) * own
    records = (*mine, *others) if first else (*others, *mine)
    total = np.zeros((len(POINTS), len(POINTS)))
    for bins in itertools.product((0, 1), repeat=len(records)):
        sums = [sum([x for x, one in zip(records, bins, strict=True) if one == i][:largest]) for i in (0, 1)]
        each = [np.exp(-((POINTS - s) ** 2) / (2 * SIGMA**2)) / math.sqrt(2 * math.pi) / SIGMA for s in sums]
        total += np.outer(*each) / 2 ** len(bins)
    return total * WIDTH**2


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def run_of(others: tuple[float, ...], largest: int, **more: Any) -> dpmf.Run:
    return dpmf.Run(TWO_BINS, SIGMA, max_batch_size=largest, records=len(others) + 1, **more)


def test_what_is_answered_about_a_run_covers_its_cut() -> None:
    """δ, profiles and what attacks achieve, by enumeration, in both directions; the uncut answers do not."""
    exceeded = 0
    for others, largest, first in CASES:
        run = run_of(others, largest)
        with_it, without = (density(others, own, largest, first) for own in (1, 0))
        curve = dpmf.tradeoff(run, accountant="lattice")
        for way, p, q in (("remove", with_it, without), ("add", without, with_it)):
            grid = [0.0, 0.5, 1.5]
            found = dpmf.profile(run, epsilons=grid, accountant="lattice", direction=way)
            for epsilon, delta in zip(grid, found.deltas, strict=True):
                cut = hockey_stick(p, q, epsilon)
                one = dpmf.delta(run, epsilon=epsilon, accountant="lattice", direction=way)
                both = dpmf.delta(run, epsilon=epsilon, accountant="lattice")
                assert cut <= one.delta + 1e-6 <= both.delta + 2e-6
                assert delta == pytest.approx(one.delta, rel=1e-6)
                plain = dpmf.delta(
                    TWO_BINS, noise_multiplier=SIGMA, epsilon=epsilon, accountant="lattice", direction=way
                )
                assert plain.delta < one.delta == one.details[way]["value"]
                assert one.details[way]["cut"] == run.cut.charge(epsilon, way)  # type: ignore[union-attr]
                exceeded += cut > plain.delta + 1e-3
            order = np.argsort(-(p / q), axis=None)  # the best attacks look at the likelihood ratio
            false, true = np.cumsum(q.ravel()[order]), np.cumsum(p.ravel()[order])
            for place in range(0, len(false), 500):
                assert true[place] <= curve.lines[way].least(float(false[place])) + 1e-6
    assert exceeded


def test_groups_of_a_run_cover_its_cut() -> None:
    for others, largest, first in CASES:
        run = dpmf.Run(TWO_BINS, SIGMA, max_batch_size=largest, records=len(others) + 2)
        with_them, without = (density(others, own, largest, first) for own in (2, 0))
        for epsilon in (0.0, 1.0, 3.0):
            bound = dpmf.group_privacy(run, group_size=2, epsilon=epsilon, accountant="lattice").delta
            assert max(hockey_stick(with_them, without, epsilon), hockey_stick(without, with_them, epsilon)) <= bound


MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(2), dpmf.reshuffled(2, 5))
PLAIN = dpmf.Run(MECHANISM, 2.0)
CUT = dpmf.Run(MECHANISM, 2.0, max_batch_size=40, records=100)


def test_a_cut_never_makes_an_answer_smaller() -> None:
    quick = {"accountant": "gaussian"}
    assert CUT.cut is not None
    assert 0 < CUT.cut.probability < 1e-5
    for direction in ("remove", "add", "both"):
        charged, plain = (dpmf.epsilon(run, delta=1e-3, direction=direction, **quick).epsilon for run in (CUT, PLAIN))
        assert charged > plain
        left = 1e-3 - CUT.cut.charge(charged, direction)
        assert dpmf.delta(MECHANISM, noise_multiplier=2.0, epsilon=charged, direction=direction, **quick).delta <= left
        assert dpmf.delta(CUT, epsilon=charged, direction=direction, **quick).delta <= 1e-3
    charged_curve, curve = (dpmf.tradeoff(run, slack=1e-3, **quick) for run in (CUT, PLAIN))
    assert charged_curve.mu > curve.mu
    assert charged_curve.largest_mu == math.inf
    assert json.loads(json.dumps(charged_curve.to_dict(), allow_nan=False))["largest_mu"] is None
    assert not dpmf.tradeoff(dpmf.Run(TWO_BINS, 1.0, max_batch_size=9, records=10), renyi=True, **quick).renyi
    for rate, found in charged_curve.attacks.items():
        assert found > curve.attacks[rate]
    for shape in (0.0, math.inf):
        searches = [tuning.total_epsilon(c, delta=1e-2, mean=3.0, shape=shape).epsilon for c in (charged_curve, curve)]
        assert searches[0] > searches[1]
    groups = [dpmf.group_privacy(run, group_size=2, delta=1e-2, **quick).epsilon for run in (CUT, PLAIN)]
    assert groups[0] > groups[1]
    sampled = [dpmf.delta(run, epsilon=0.5, accountant="monte-carlo") for run in (
        dpmf.Run(TWO_BINS, 1.0, max_batch_size=9, records=10), dpmf.Run(TWO_BINS, 1.0)
    )]  # fmt: skip
    assert isinstance(sampled[0], dpmf.Estimate)
    assert sampled[0].delta > sampled[1].delta


def test_a_run_without_a_cut_is_its_mechanism() -> None:
    """To the last bit, and so is one whose batches can never be so large."""
    for run in (PLAIN, dpmf.Run(MECHANISM, 2.0, max_batch_size=101, records=100)):
        plain: dict[str, Any] = {"noise_multiplier": 2.0}
        for ask, about in (
            (dpmf.epsilon, {"delta": 1e-5}),
            (dpmf.delta, {"epsilon": 1.0, "direction": "add"}),
            (dpmf.group_privacy, {"group_size": 2, "delta": 1e-4}),
        ):
            assert ask(run, accountant="gaussian", **about) == ask(MECHANISM, accountant="gaussian", **about, **plain)
        curves = [dpmf.tradeoff(one, accountant="gaussian", **more) for one, more in ((run, {}), (MECHANISM, plain))]
        assert curves[0].to_dict() == curves[1].to_dict()
    prepared = resolve("gaussian").prepare(TWO_BINS)
    found = dpmf.delta(dpmf.Run(TWO_BINS, 2.0), epsilon=1.0, accountant=prepared)
    assert found == dpmf.delta(TWO_BINS, noise_multiplier=2.0, epsilon=1.0, accountant=prepared)


def test_lower_bounds_hold_with_a_cut() -> None:
    found = dpmf.delta(run_of((-1.0,) * 3, 2), epsilon=0.5, with_lower=True)
    assert found.lower is not None
    assert 0 < found.lower < found.delta


def test_verifying_a_run() -> None:
    run = dpmf.Run(TWO_BINS, 1.0, max_batch_size=9, records=10, clip_norm=0.5, divisor=5)
    charged, plain = (
        verify(one, epsilon=1.0, delta=0.5, samples=2000, noise_multiplier=sigma, tradeoff=True)
        for one, sigma in ((run, None), (TWO_BINS, 1.0))
    )
    assert charged.consistent
    assert not charged.calibrated
    assert charged.delta > plain.delta
    assert charged.lower == plain.lower
    page = charged.to_markdown()
    for words in (
        "where one record is added or removed (both directions)",
        "cut to 9 of at most 10 records",
        "norm 0.5",
    ):
        assert words in page


# --- stopping points


def test_the_worst_rule_to_stop_is_covered_by_the_division_and_by_nothing_less() -> None:
    """Two steps of one Gaussian mechanism each. Whoever stops after the first may choose so by looking at it."""
    run = dpmf.Run(dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(2, 1)), 1.0, stops=(1,))
    delta = 0.05
    first, whole = (dpmf.epsilon(run, delta=delta, stop=stop).epsilon for stop in (1, None))
    assert first == pytest.approx(_gaussian_epsilon(1.0, delta / 2), rel=1e-3)
    assert whole == pytest.approx(_gaussian_epsilon(2.0, delta / 2), rel=1e-3)
    grid = np.linspace(-9, 10, 4001)
    p, q = (np.exp(-((grid - mean) ** 2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0]) for mean in (1.0, 0.0))

    def worst(one: float, two: float) -> float:
        """sup over rules and sets S of P(S) − ∫_S e^(ε of where it stopped) dQ."""
        stopping = np.maximum(p - math.exp(one) * q, 0)
        threshold = two - (grid - 0.5) + 0.5  # the second output has more loss than what is left of ε
        going_on = p * ndtr(-(threshold - 1)) - math.exp(two) * q * ndtr(-threshold)
        return float(np.maximum(stopping, going_on).sum())

    assert worst(first, whole) <= delta
    assert worst(_gaussian_epsilon(1.0, delta), _gaussian_epsilon(2.0, delta)) > delta
    # The whole run has its plain guarantee however it stops, of which other questions are.
    assert dpmf.delta(run, epsilon=whole).delta <= delta / 2


def _gaussian_epsilon(s: float, delta: float) -> float:
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if oracles.gaussian_delta(s, middle) <= delta else (middle, high)
    return high


@pytest.mark.parametrize(
    ("batching", "step", "first"),
    [
        (dpmf.BallsInBins(4, 5), 7, dpmf.BallsInBins.from_iterations(7, 5)),
        (dpmf.BallsInBins(4, 5), 2, dpmf.BallsInBins(1, 5)),
        (dpmf.reshuffled(4, 5), 6, dpmf.reshuffled(2, 5, gap=2)),
        (dpmf.BallsInBins(4, 6, rethrow_every=2, stride=3), 7, dpmf.BallsInBins(2, 6, stride=3)),
        (dpmf.cyclic_poisson(4, 6, 3), 7, dpmf.cyclic_poisson(2, 6, 3)),
    ],
    ids=str,
)
def test_the_first_steps_of_a_run(batching: Any, step: int, first: Any) -> None:
    """Their C is the corner of the whole one, also where the strategy for fewer iterations would be another."""
    for strategy in (dpmf.strategies.bsr(3), dpmf.strategies.bsr(3).normalized()):
        run = dpmf.Run(dpmf.Mechanism(strategy, batching), 2.0, max_batch_size=30, records=60, stops=(step,))
        part = run.until(step)
        assert part.mechanism.batching == first
        assert (part.stops, part.max_batch_size, part.records) == ((), 30, 60)
        whole = run.mechanism.strategy.matrix(run.mechanism.batching.iterations)
        n = first.iterations
        assert np.all(part.mechanism.strategy.matrix(n) >= whole[:n, :n])
        np.testing.assert_allclose(part.mechanism.strategy.matrix(n), whole[:n, :n], rtol=1e-12)
        asked = "best" if isinstance(batching, dpmf.Poisson) else "gaussian"
        answers = [dpmf.epsilon(run, delta=0.3, stop=s, accountant=asked).epsilon for s in (step, None)]
        assert answers[0] < answers[1]


def test_a_matrix_without_structure_is_not_split() -> None:
    matrix = dpmf.strategies.matrix(np.tril(np.arange(1.0, 37.0).reshape(6, 6)))
    run = dpmf.Run(dpmf.Mechanism(matrix, dpmf.BallsInBins(2, 3)), 9.0, stops=(4,))
    assert run.until(4).mechanism == run.mechanism
    found = dpmf.epsilon(run, delta=1e-3, stop=4, accountant="gaussian")
    assert found.epsilon == dpmf.epsilon(run, delta=1e-3, accountant="gaussian").epsilon
    assert "for those who stop after step 4 (ex post)" in str(found)


# --- statements


def test_a_run_and_its_statement_go_through_json() -> None:
    run = dpmf.Run(
        MECHANISM, 3.0, clip_norm=0.5, divisor=20, max_batch_size=np.int64(60), records=100, unit="user", stops=[5]
    )  # type: ignore[arg-type]
    for found in (run.to_dict(), dpmf.statement(run, accountant="gaussian").to_dict()):
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["relation"].startswith("one user is added or removed")
        assert (found["noise_multiplier"], found["clip_norm"], found["divisor"]) == (3.0, 0.5, 20.0)
        assert (found["max_batch_size"], found["records"], found["steps"], found["stops"]) == (60, 100, 10, [5])
        assert found["code"] == f"dpmf {dpmf.__version__}"


def test_a_statement_says_what_holds() -> None:
    run = dpmf.Run(MECHANISM, 3.0, 0.5, divisor=20, max_batch_size=60, records=100, precision="bfloat16", stops=(5,))
    found = dpmf.statement(run, delta=1e-4, accountant="gaussian", assumptions=("The moon is made of cheese.",))
    assert isinstance(found, dpmf.Statement)
    assert found.bound == dpmf.epsilon(run, delta=1e-4, accountant="gaussian")
    assert found.ex_post == {5: dpmf.epsilon(run, delta=1e-4, stop=5, accountant="gaussian").epsilon}
    text = str(found)
    for words in (
        "noise multiplier 3 ", "clipped to norm 0.5", "computed in bfloat16; sums are divided by 20.",
        "cut to 60 of at most 100 records, and the guarantee includes what that costs", "added or removed",
        "ex-post guarantee of another ε at the same δ: ", " after step 5.", "The moon is made of cheese.",
    ):  # fmt: skip
        assert words in text
    assert "\n" not in text
    assert found.to_dict()["assumptions"][-1] == "The moon is made of cheese."
    assert dpmf.statement(dpmf.Run(MECHANISM, 3.0), accountant="gaussian").delta == 1e-5
    assert "exact arithmetic" in str(dpmf.statement(MECHANISM, dpmf.epsilon(PLAIN, delta=1e-5, accountant="gaussian")))
    private = dpmf.Run(MECHANISM, 3.0, public=False)
    assert "where the place of one record is left empty" in str(dpmf.statement(private, accountant="gaussian"))


def test_a_statement_without_what_the_cut_costs_is_refused() -> None:
    plain = dpmf.epsilon(PLAIN, delta=1e-3, accountant="gaussian")
    charged = dpmf.epsilon(CUT, delta=1e-3, accountant="gaussian")
    curves = [dpmf.tradeoff(run, accountant="gaussian") for run in (PLAIN, CUT)]
    assert "Gaussian differentially private" in str(dpmf.statement(CUT, charged, curves[1]))
    stopped = dpmf.epsilon(dpmf.Run(MECHANISM, 2.0, stops=(5,)), delta=1e-3, stop=5, accountant="gaussian")
    for message, about in (
        ("bound must be asked about the run", (CUT, plain)),
        ("tradeoff must be asked about the run", (CUT, charged, curves[0])),
        ("bound must be of the whole run", (PLAIN, stopped)),
        ("bound must be of the whole run", (MECHANISM, stopped)),
        ("bound must be of the whole run at noise multiplier 3", (dpmf.Run(MECHANISM, 3.0), plain)),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            dpmf.statement(*about)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: dpmf.epsilon(CUT, noise_multiplier=1.0, delta=1e-3), "noise_multiplier must be left out for a run"),
        (lambda: dpmf.tradeoff(MECHANISM), "noise_multiplier must be given with a mechanism"),
        (lambda: dpmf.delta("run", epsilon=1.0), "mechanism must be a dpmf.Mechanism or a dpmf.Run, got 'run'"),
        (lambda: dpmf.calibrate(CUT, target_epsilon=1.0, target_delta=1e-3), "mechanism must be a dpmf.Mechanism .a"),
        (lambda: dpmf.calibrate_to_mu(CUT, target_mu=1.0), "mechanism must be a dpmf.Mechanism .a run has"),
        (lambda: certificates.certificate(run_of((1.0,) * 3, 2), epsilon=1.0), "mechanism must be a run whose batches"),
        (lambda: dpmf.epsilon(CUT, delta=1e-9, accountant="gaussian"), "delta must be larger for this run"),
        (lambda: dpmf.group_privacy(CUT, group_size=9, delta=1e-4), "delta must be larger for this run"),
        (lambda: dpmf.epsilon(PLAIN, delta=1e-3, stop=5), "stop must be one of .* named in advance .none was., got 5"),
        (lambda: dpmf.epsilon(MECHANISM, delta=1e-3, stop=5), "stop applies only to a dpmf.Run"),
        (lambda: dpmf.Run(MECHANISM, 1.0, stops=(10,)), "stops must be at most 9, got 10"),
        (lambda: dpmf.Run(MECHANISM, 1.0, stops=(0,)), "stops must be at least 1, got 0"),
        (lambda: dpmf.Run(MECHANISM, 1.0, stops=5), "stops must be a sequence of steps, got 5"),  # type: ignore[arg-type]
        (lambda: dpmf.Run(MECHANISM, 0.0), "noise_multiplier must be positive"),
        (lambda: dpmf.Run(MECHANISM, 1.0, divisor=0.0), "divisor must be positive"),
        (lambda: dpmf.Run(MECHANISM, 1.0, max_batch_size=0, records=5), "max_batch_size must be at least 1"),
        (lambda: dpmf.Run(MECHANISM, 1.0, max_batch_size=5), "records must be given with max_batch_size"),
        (lambda: dpmf.Run(MECHANISM, 1.0, unit="person"), "unit must be one of record, user"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(ask: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        ask()
    assert "\n" not in str(caught.value)
