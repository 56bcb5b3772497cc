"""Calibration: the figures to meet, the truth to stay above, the sound side of the root, results, bad input."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from functools import cache
from typing import Any

import numpy as np
import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpmf
from dpmf import budget, strategies
from dpmf.accountants import Renyi
from dpmf.accountants.protocol import Evaluation, PreparedAccountant
from dpmf.batching import BallsInBins
from dpmf.calibration import calibrate_one_way, least_noise, likely_noise, noise_near
from dpmf.errors import CalibrationError
from dpmf.formatting import upper
from dpmf.mechanism import Mechanism

DIRECTIONS = ("remove", "add")
RELATIONS = ("both", *DIRECTIONS)
CHEAP = Renyi(work_budget=1e6)
TRUE_SIGMA = json.loads(paths.TRUE_SIGMA.read_text())


@cache
def mechanism(strategy: str, p: int, k: int, b: int) -> Mechanism:
    made = strategies.dpsgd() if strategy == "dpsgd" else getattr(strategies, strategy)(p)
    return Mechanism(made, BallsInBins(k, b))


SMALL = {
    "dpsgd": mechanism("dpsgd", 1, 1, 20),
    "bsr k=1": mechanism("bsr", 3, 1, 12),
    "bsr k=3": mechanism("bsr", 3, 3, 12),
    "bisr k=2": mechanism("bisr", 2, 2, 10),
    "one bin": mechanism("bsr", 2, 4, 1),
}


# --- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "p", "epsilon", "most", "truth"),
    [
        ("bsr", 4, 1.0, 1.38, 1.168),
        ("bsr", 4, 2.0, 1.02, 0.905),
        ("bsr", 4, 8.0, 0.54, 0.506),
        ("dpsgd", 1, 1.0, 1.075, 0.873),
    ],
)
def test_figures_for_one_epoch_of_a_hundred_batches(strategy, p, epsilon, most, truth):
    found = dpmf.calibrate(mechanism(strategy, p, 1, 100), target_epsilon=epsilon, target_delta=1e-5)
    assert truth < found.noise_multiplier <= most
    assert found.delta <= 1e-5
    assert found.binding in found.details


def parsed(row: dict[str, Any]) -> Mechanism:
    name, n, k = row["mechanism"].split()
    epochs = int(k.removeprefix("k="))
    batches = int(n.removeprefix("N=")) // epochs
    family = name.rstrip("0123456789")
    return mechanism(family, int(name.removeprefix(family) or 1), epochs, batches)


@pytest.mark.parametrize("row", TRUE_SIGMA, ids=lambda r: f"{r['mechanism']} ε={r['epsilon']:g} δ={r['delta']:g}")
def test_below_the_true_noise_multiplier_no_bound_meets_the_target(row):
    """The bound is monotone in σ, so that one evaluation just below the truth shows that the calibrated σ is above.

    A relative error e of the simulated δ is one of about e/20 in σ; five standard errors and a last digit are granted.
    """
    accountant = Renyi(work_budget=1e7)
    prepared = accountant.prepare(parsed(row))
    for direction in DIRECTIONS:
        if f"sigma_{direction}" in row:
            error = 5 * row[f"rel_se_delta_{direction}"] / 20 + 1e-4
            sigma = row[f"sigma_{direction}"] * (1 - error)
            assert prepared.delta(sigma, row["epsilon"], direction).value > row["delta"]


# --- the search ----------------------------------------------------------------------------------------------------


def shaped(root: float, shape: str) -> Callable[[float], float]:
    """Decreasing δ(σ) with δ(root) = 1e-5."""
    return {
        "power": lambda s: 1e-5 * (root / s) ** 3,
        "gaussian": lambda s: min(1.0, 1e-5 * math.exp(min(10 * ((root / s) ** 2 - 1), 100))),
        "step": lambda s: 1.0 if s < root else 0.0,
        "flat then steep": lambda s: 1.0 if s < root / 2 else 1e-5 * (root / s) ** 40,
        "underflow": lambda s: 1e-5 * min(root / s, 1.1) ** 300 if s < 2 * root else 0.0,
    }[shape]


@pytest.mark.parametrize("shape", ["power", "gaussian", "step", "flat then steep", "underflow"])
@pytest.mark.parametrize("start", [1e-3, 0.9, 1.0, 40.0])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
def test_least_noise_ends_on_the_sound_side(shape, start, tolerance):
    root = 1.2345
    delta = shaped(root, shape)
    seen = {}

    def evaluate(sigma: float) -> Evaluation:
        seen[sigma] = delta(sigma)
        return Evaluation(seen[sigma], {"sigma": sigma})

    found = least_noise(evaluate, 1e-5, start, tolerance)
    assert found is not None
    sigma, evaluation = found
    assert seen[sigma] == evaluation.value <= 1e-5
    assert evaluation.details["sigma"] == sigma
    assert root * (1 - 1e-12) <= sigma <= root * (1 + tolerance)


@pytest.mark.parametrize("rough", [1.0, 1.25, 1.4, 30.0, 0.5, None])
@pytest.mark.parametrize("shape", ["power", "gaussian", "step", "flat then steep", "underflow"])
@pytest.mark.parametrize("start", [0.01, 1.2, 40.0])
def test_rough_bounds_decide_where_to_look_and_nothing_else(shape, start, rough):
    """They are said to be 1.25 times too large, and may not be, or there are none."""
    root, asked = 1.2345, []
    delta = shaped(root, shape)

    def evaluate(sigma: float) -> Evaluation:
        asked.append(sigma)
        return Evaluation(delta(sigma), {"fine": True})

    def roughly(sigma: float) -> Evaluation | None:
        return None if rough is None else Evaluation(min(1.0, rough * delta(sigma) + 1e-300), {"fine": False})

    found = least_noise(evaluate, 1e-5, start, 1e-4, rough=roughly, roughness=1.25)
    assert found is not None
    assert found[1].value <= 1e-5
    if rough != 0.5:  # which would be no bounds
        assert root * (1 - 1e-12) <= found[0] <= root * (1 + 1e-4)
    if rough in (1.0, 1.25, 1.4) and shape in ("power", "gaussian"):
        assert len(asked) <= 5


def test_a_rough_bound_is_an_answer_where_time_is_short():
    def evaluate(sigma: float) -> Evaluation:
        raise budget.OutOfTime

    found = least_noise(
        evaluate, 1e-5, 8.0, 1e-4, rough=lambda sigma: Evaluation(1e-5 * (1.25 / sigma) ** 7), roughness=1.25
    )
    assert found is not None
    assert 1.25 <= found[0] < 1.5


class Made(PreparedAccountant):
    """Bounds that are known functions of σ, rough ones where a factor is given."""

    def __init__(self, deltas: dict[str, Callable[[float], float]], rough: float | None, cheap: bool = False) -> None:
        self.name, self._deltas, self._rough, self.cheap = "made", deltas, rough, cheap
        self.roughness = rough or 1.0
        self.met: dict[str, set[float]] = {way: set() for way in DIRECTIONS}

    def delta(self, noise_multiplier, epsilon, direction, target_delta=None):
        value = min(1.0, self._deltas[direction](noise_multiplier))
        if value <= target_delta:
            self.met[direction].add(noise_multiplier)
        return Evaluation(value)

    def rough_delta(self, noise_multiplier, epsilon, direction, target_delta=None):
        if self._rough is None:
            return None
        value = min(1.0, self._rough * self._deltas[direction](noise_multiplier))
        if value <= target_delta:
            self.met[direction].add(noise_multiplier)
        return Evaluation(value)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("near", [0.6, 0.97, 1.0, 1.04, 2.0])
@pytest.mark.parametrize("slope", [5.0, 25.0, 90.0])
def test_noise_near_an_estimate_meets_the_target(near, slope, quick):
    """The root is at σ = 1 in the remove direction, which decides, and the first bound is useless."""
    deltas = {"remove": lambda s: 1e-5 * s**-slope, "add": lambda s: 1.0}
    useless, good = Made({way: lambda s: 1.0 for way in DIRECTIONS}, None, cheap=True), Made(deltas, 1.2)
    sigma, place, finished = noise_near([useless, good], 1.0, 1e-5, near, 0.003, quick=quick)
    assert finished
    assert place == 1
    assert sigma in good.met["remove"]
    root = 1.2 ** (1 / slope) if quick else 1.0
    assert root <= sigma <= root * (1 + 0.003 + 0.003)
    with pytest.raises(CalibrationError, match=r"near 0\.6 was found"):
        noise_near([useless], 1.0, 1e-5, 0.6, 0.003, quick=quick)


def test_a_bound_alone_is_searched_from_its_likely_root():
    """Far above its root the bound is not monotone; a search down from a closed form's answer would end there."""
    made = Made(dict.fromkeys(DIRECTIONS, lambda s: 1e-5 * s**-20.0 if s < 1.5 else 2e-5 if s < 2 else 0.0), None)
    known = calibrate_one_way([made], 1.0, 1e-5, "remove", 3.0, 1e-3)
    assert known.noise_multiplier >= 2
    found = calibrate_one_way([made], 1.0, 1e-5, "remove", 0.9, 1e-3, known)
    assert 1 <= found.noise_multiplier <= 1.001


def test_noise_near_has_an_answer_as_soon_as_one_holds():
    """Time ends after the first noise multiplier that meets the target: it is the answer, marked as unfinished."""

    def late(sigma):
        if sigma < 1.09:
            raise budget.OutOfTime
        return 1e-5 * sigma**-20.0

    made = Made(dict.fromkeys(DIRECTIONS, late), None)
    found = noise_near([made], 1.0, 1e-5, 1.1, 0.003, quick=True)
    assert found == (1.1, 0, False)


def test_noise_near_is_that_of_calibrate():
    found = dpmf.calibrate(
        SMALL["bsr k=3"], target_epsilon=2.0, target_delta=1e-5, accountant="chain", relative_tolerance=1e-3
    )
    for quick, more in ((True, 1.04), (False, 1.01)):
        sigma, place, finished = dpmf.api.noise_near(
            SMALL["bsr k=3"], 0.95 * found.noise_multiplier, target_epsilon=2.0, target_delta=1e-5,
            relative_tolerance=3e-3, quick=quick,
        )  # fmt: skip
        assert finished
        assert 0.97 * found.noise_multiplier <= sigma <= more * found.noise_multiplier
        assert dpmf.api.meets(SMALL["bsr k=3"], sigma, 2.0, 1e-5, place, quick=quick)
        assert not dpmf.api.meets(SMALL["bsr k=3"], 0.95 * sigma, 2.0, 1e-5, place, quick=quick)


@pytest.mark.parametrize(
    "batching", [dpmf.BallsInBins(1, 8), dpmf.batching.reshuffled(2, 4), dpmf.batching.Poisson(2, 4)]
)
def test_whether_a_noise_multiplier_meets_a_target(batching):
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), batching)
    sigma = dpmf.calibrate(mechanism, target_epsilon=2.0, target_delta=1e-5).noise_multiplier
    assert dpmf.api.meets(mechanism, sigma, 2.0, 1e-5)
    assert not dpmf.api.meets(mechanism, 0.99 * sigma, 2.0, 1e-5)
    with budget.time_limit(0), pytest.raises(budget.OutOfTime):
        dpmf.api.meets(mechanism, 0.99 * sigma, 2.0, 1e-5)


@pytest.mark.parametrize("start", [0.3, 0.98, 1.0, 4.0])
@pytest.mark.parametrize("bend", [0.0, 0.2, -0.2])
def test_a_search_along_a_line_is_short_and_ends_on_the_sound_side(start, bend):
    """Where evaluations say how far they are from the target on a nearly straight line, few of them do."""
    asked = []

    def excess(sigma, shift=0.0):
        x = math.log(sigma) - shift
        return -20.0 * x * (1 + bend * x)

    def evaluate(sigma):
        asked.append(sigma)
        return Evaluation(1e-5 * math.exp(max(min(excess(sigma), 11.0), -700.0)), excess=excess(sigma))

    def roughly(sigma):
        return Evaluation(1e-5 * math.exp(min(excess(sigma, 0.03), 11.0)), excess=excess(sigma, 0.03))

    found = least_noise(evaluate, 1e-5, start, 1e-3, rough=roughly, roughness=1.2)
    assert found is not None
    assert found[1].value <= 1e-5
    assert 1.0 <= found[0] <= 1.0012
    assert len(asked) <= 5


def test_where_a_search_over_throws_begins():
    """It is near the answer where the loss of a throw is small, and the sensitivity where there is one throw."""
    several = Mechanism(strategies.dpsgd(), dpmf.reshuffled(10, 97))
    assert 1.2 < likely_noise(several, 1.0, 1e-5) < 1.6
    once = Mechanism(strategies.bsr(4), BallsInBins(2, 10))
    assert likely_noise(once, 1.0, 1e-5) == once.sensitivity


def test_least_noise_gives_up_where_nothing_helps():
    assert least_noise(lambda sigma: Evaluation(0.5), 1e-5, 1.0, 1e-4) is None


def test_least_noise_where_everything_meets_the_target():
    found = least_noise(lambda sigma: Evaluation(1e-9), 1e-5, 1.0, 1e-4)
    assert found is not None
    assert 0 < found[0] < 1e-10


def test_least_noise_is_sound_even_if_the_bound_is_not_monotone():
    """Whatever the function does, what is returned was evaluated and met the target."""

    def wild(sigma: float) -> Evaluation:
        return Evaluation(1e-5 * math.exp(3 * math.sin(40 * sigma) + 8 * (1 - sigma)))

    found = least_noise(wild, 1e-5, 0.3, 1e-4)
    assert found is not None
    assert found[1].value <= 1e-5
    assert wild(found[0]).value <= 1e-5


@pytest.mark.parametrize("epsilon", [0.7, 4.0])
@pytest.mark.parametrize("direction", RELATIONS)
@pytest.mark.parametrize("label", SMALL)
def test_the_noise_found_meets_the_target_and_little_less_does_not(label, direction, epsilon):
    target = {"target_epsilon": epsilon, "target_delta": 1e-6, "direction": direction, "accountant": CHEAP}
    found = dpmf.calibrate(SMALL[label], **target)

    def delta(sigma: float) -> float:
        return dpmf.delta(
            SMALL[label], noise_multiplier=sigma, epsilon=epsilon, direction=direction, accountant=CHEAP
        ).delta

    # Evaluated afresh: the answer must not depend on what the search asked before.
    assert delta(found.noise_multiplier) <= found.delta * (1 + 1e-9)
    assert found.delta <= 1e-6
    assert delta(found.noise_multiplier * (1 - 2e-3)) > 1e-6
    assert (found.epsilon, found.target_epsilon, found.target_delta) == (epsilon, epsilon, 1e-6)
    assert found.direction == direction
    assert set(found.details) == (set(DIRECTIONS) if direction == "both" else {direction})


@pytest.mark.parametrize("label", SMALL)
def test_both_is_the_larger_of_the_two(label):
    sigma = {
        direction: dpmf.calibrate(
            SMALL[label], target_epsilon=1.5, target_delta=1e-6, direction=direction, accountant=CHEAP
        ).noise_multiplier
        for direction in RELATIONS
    }
    assert sigma["both"] == pytest.approx(max(sigma["remove"], sigma["add"]), rel=3e-4)


@pytest.mark.parametrize("tolerance", [3e-2, 1e-3, 1e-6])
def test_relative_tolerance(tolerance):
    target = {"target_epsilon": 2.0, "target_delta": 1e-6, "accountant": CHEAP}
    best = dpmf.calibrate(SMALL["bsr k=1"], relative_tolerance=1e-9, **target).noise_multiplier
    found = dpmf.calibrate(SMALL["bsr k=1"], relative_tolerance=tolerance, **target).noise_multiplier
    assert best * (1 - 1e-9) <= found <= best * (1 + 2 * tolerance)


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(
    st.sampled_from(sorted(SMALL)), st.sampled_from(DIRECTIONS), st.floats(-0.7, 2), st.floats(-18, -3),
    st.floats(1.05, 4), st.booleans(),
)  # fmt: skip
def test_a_weaker_target_needs_less_noise(label, direction, log_epsilon, log_delta, factor, in_epsilon):
    def sigma(epsilon: float, delta: float) -> float:
        return dpmf.calibrate(
            SMALL[label], target_epsilon=epsilon, target_delta=delta, direction=direction,
            accountant=Renyi(work_budget=1e5), relative_tolerance=1e-3,
        ).noise_multiplier  # fmt: skip

    epsilon, delta = math.exp(log_epsilon), math.exp(log_delta)
    weaker = (epsilon * factor, delta) if in_epsilon else (epsilon, delta * factor)
    assert sigma(*weaker) <= sigma(epsilon, delta) * (1 + 2e-3)


def test_a_scaled_strategy_scales_the_noise():
    base = dpmf.calibrate(SMALL["bsr k=1"], target_epsilon=2.0, target_delta=1e-6, accountant=CHEAP).noise_multiplier
    scaled = Mechanism(strategies.coefficients(1000 * strategies.bsr(3).strategy_coef(3)), SMALL["bsr k=1"].batching)
    found = dpmf.calibrate(scaled, target_epsilon=2.0, target_delta=1e-6, accountant=CHEAP).noise_multiplier
    assert found == pytest.approx(1000 * base, rel=3e-4)


@pytest.mark.parametrize("epsilon", [0.01, 30.0, 300.0])
@pytest.mark.parametrize("delta", [1e-15, 0.5])
def test_unusual_targets_are_met(epsilon, delta):
    for label in ("dpsgd", "bsr k=1"):
        found = dpmf.calibrate(SMALL[label], target_epsilon=epsilon, target_delta=delta, accountant=CHEAP)
        assert 0 < found.noise_multiplier < math.inf
        assert found.delta <= delta


def test_an_unreachable_target_is_an_error_of_its_own():
    with pytest.raises(dpmf.CalibrationError, match="cannot certify epsilon below"):
        dpmf.calibrate(SMALL["bsr k=3"], target_epsilon=0.05, target_delta=1e-5, accountant=Renyi(max_order=8))
    assert issubclass(dpmf.CalibrationError, ValueError)


# --- results -------------------------------------------------------------------------------------------------------


def results() -> dict[str, Any]:
    checked = SMALL["bsr k=1"]
    return {
        "calibrate": dpmf.calibrate(checked, target_epsilon=2.0, target_delta=1e-6, accountant=CHEAP),
        "delta": dpmf.delta(checked, noise_multiplier=1.0, epsilon=2.0, accountant=CHEAP),
        "epsilon": dpmf.epsilon(checked, noise_multiplier=1.0, delta=1e-6, accountant=CHEAP),
        "no epsilon": dpmf.epsilon(checked, noise_multiplier=1e-60, delta=1e-6, accountant=CHEAP),
        "profile": dpmf.profile(checked, noise_multiplier=1.0, accountant=CHEAP),
    }


@pytest.fixture(scope="module", name="results")
def _results() -> dict[str, Any]:
    return results()


RESULTS = ("calibrate", "delta", "epsilon", "no epsilon", "profile")


@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_frozen(results, kind):
    with pytest.raises(FrozenInstanceError):
        results[kind].noise_multiplier = 0.0
    if kind != "profile":
        with pytest.raises(TypeError):
            results[kind].details["remove"] = None


@pytest.mark.parametrize("kind", RESULTS)
def test_results_go_to_json_and_back(results, kind):
    plain = results[kind].to_dict()
    assert set(plain) == {item.name for item in fields(results[kind])}
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["noise_multiplier"] == results[kind].noise_multiplier
    assert plain["accountant"] == "renyi"


@pytest.mark.parametrize("kind", RESULTS)
def test_results_pickle(results, kind):
    copy = pickle.loads(pickle.dumps(results[kind]))
    assert type(copy) is type(results[kind])
    assert copy.to_dict() == results[kind].to_dict()


@pytest.mark.parametrize("kind", RESULTS[:4])
def test_results_print_in_one_line(results, kind):
    text = str(results[kind])
    assert "\n" not in text
    assert "renyi" in text
    assert upper(results[kind].noise_multiplier) in text


def test_profile_by_default_runs_down_to_tiny_deltas(results):
    profile = results["profile"]
    assert profile.epsilons[0] == 0
    assert np.all(np.diff(profile.epsilons) > 0)
    assert profile.deltas[-1] <= 1e-8 * (1 + 1e-9)
    assert len(profile.epsilons) == len(profile.deltas) == len(profile.by_direction["add"])


# --- bad input -----------------------------------------------------------------------------------------------------

NOT_A_NUMBER: list[Any] = [
    math.nan, math.inf, -math.inf, True, False, np.True_, "1", None, 1 + 0j, [1.0], (1.0,), {}, object(),
    np.array([1.0, 2.0]), np.eye(2), np.float64("nan"), np.float32("inf"), 10**400, -(10**400),
]  # fmt: skip
NOT_POSITIVE: list[Any] = [*NOT_A_NUMBER, 0, 0.0, -0.0, -1.0, -1e-300]
NEGATIVE: list[Any] = [*NOT_A_NUMBER, -1.0, -1e-300]
NO_PROBABILITY: list[Any] = [*NOT_A_NUMBER, 0.0, 1.0, 1, -0.1, 1.5]
NO_NAME: list[Any] = ["", "renyii", "Renyi", 5, None, Renyi, b"renyi", ["renyi"]]
NO_DIRECTION: list[Any] = ["", "Both", "up", None, 3, True, ["add"], np.array(["add", "remove"])]
NO_MECHANISM: list[Any] = [None, 3, "bsr", np.eye(2), strategies.bsr(2), BallsInBins(1, 2)]

GOOD: dict[str, dict[str, Any]] = {
    "delta": {"mechanism": SMALL["dpsgd"], "noise_multiplier": 1.0, "epsilon": 1.0},
    "epsilon": {"mechanism": SMALL["dpsgd"], "noise_multiplier": 1.0, "delta": 1e-5},
    "profile": {"mechanism": SMALL["dpsgd"], "noise_multiplier": 1.0, "epsilons": [1.0]},
    "calibrate": {"mechanism": SMALL["dpsgd"], "target_epsilon": 1.0, "target_delta": 1e-5},
}
BAD: dict[str, dict[str, list[Any]]] = {
    "delta": {"noise_multiplier": NOT_POSITIVE, "epsilon": NEGATIVE},
    "epsilon": {"noise_multiplier": NOT_POSITIVE, "delta": NO_PROBABILITY},
    "profile": {
        "noise_multiplier": NOT_POSITIVE,
        "epsilons": [
            [], [math.nan], [1.0, math.inf], [-1.0], [True], ["1"], "1", [None], [1j], [[1.0], [2.0, 3.0]], {},
            object(), np.array([]), np.array([True]), [10**400],
        ],
    },
    "calibrate": {
        "target_epsilon": NOT_POSITIVE,
        "target_delta": NO_PROBABILITY,
        "relative_tolerance": [*NOT_POSITIVE, 1.0, 3.0],
    },
}  # fmt: skip
for table in BAD.values():
    table |= {"mechanism": NO_MECHANISM, "accountant": NO_NAME, "direction": NO_DIRECTION}


def bad_calls() -> list[Any]:
    return [
        pytest.param(function, argument, value, id=f"{function}-{argument}-{n}")
        for function, arguments in BAD.items()
        for argument, values in arguments.items()
        for n, value in enumerate(values)
    ]


@pytest.mark.parametrize(("function", "argument", "value"), bad_calls())
def test_bad_input_gets_one_line_that_names_the_argument(function, argument, value):
    with pytest.raises(ValueError, match=rf"\b{argument}\b") as caught:
        getattr(dpmf, function)(**{**GOOD[function], argument: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("function", GOOD)
def test_the_same_calls_work_with_good_input(function):
    getattr(dpmf, function)(**GOOD[function])


@pytest.mark.parametrize("number", [1, np.float32(1.0), np.int64(1), np.array(1.0)])
def test_numbers_of_other_types_are_welcome(number):
    found = dpmf.delta(SMALL["dpsgd"], noise_multiplier=number, epsilon=number)
    assert type(found.noise_multiplier) is float
    assert type(found.epsilon) is float
    assert found == dpmf.delta(SMALL["dpsgd"], noise_multiplier=1.0, epsilon=1.0)


class _PowerLaw(PreparedAccountant):
    """δ = 10⁻⁵·(root/σ)^steepness; where `rough` is given, a rough bound is so many times larger."""

    def __init__(self, name: str, root: float, steepness: float, rough: float | None = None) -> None:
        self.name, self._root, self._steepness, self._rough = name, root, steepness, rough
        self.mechanism = SMALL["dpsgd"]
        self.roughness = 1.0 if rough is None else 1.25
        self.asked = 0

    def delta(self, noise_multiplier, epsilon, direction, target_delta=None):
        self.asked += 1
        return Evaluation(min(1.0, 1e-5 * (self._root / noise_multiplier) ** self._steepness))

    def rough_delta(self, noise_multiplier, epsilon, direction, target_delta=None):
        if self._rough is None:
            return None
        return Evaluation(min(1.0, self._rough * 1e-5 * (self._root / noise_multiplier) ** self._steepness))


@pytest.mark.parametrize("rough", [1.1, 1.25, 1.35])
@pytest.mark.parametrize("start", [0.3, 1.0, 4.0])
def test_members_with_rough_bounds_are_asked_little(start, rough):
    """The one with the smallest root wins; the others are not asked where that is plain from their rough bounds."""
    members = [_PowerLaw(str(root), root, 20.0, rough) for root in (1.02, 1.0, 1.05)]
    sigma, found, winner = calibrate_one_way(members, 1.0, 1e-5, "remove", start, 1e-4)
    assert winner is members[1]
    assert found.value <= 1e-5
    assert 1.0 <= sigma <= 1 + 1e-4
    assert members[1].asked <= 5
    assert members[0].asked + members[2].asked <= 1


@pytest.mark.parametrize("rough", [0.7, 3.0, 100.0])
def test_rough_bounds_that_are_not_as_they_say(rough):
    """A bound is found whatever they are; that it is close is only promised where they are alike."""
    members = [_PowerLaw("a", 1.0, 20.0, rough), _PowerLaw("b", 1.01, 20.0)]
    sigma, found, _ = calibrate_one_way(members, 1.0, 1e-5, "remove", 1.0, 1e-4)
    assert found.value <= 1e-5
    assert sigma <= 1.0101


@pytest.mark.parametrize("flat_root", [0.9, 0.994, 0.9995])
@pytest.mark.parametrize("start", [0.3, 1.0, 4.0])
def test_the_flatter_bound_wins_where_its_root_is_smaller(flat_root, start):
    """At every noise above both roots the steep bound is the smaller one, by far if it is far."""
    steep, flat = _PowerLaw("steep", 1.0, 35.0), _PowerLaw("flat", flat_root, 14.5)
    for members in ([steep, flat], [flat, steep]):
        sigma, _, winner = calibrate_one_way(members, 1.0, 1e-5, "remove", start, 1e-4)
        assert winner is flat
        assert flat_root <= sigma <= flat_root * (1 + 1e-4)


def test_where_the_smallest_bound_is_far_from_the_target_others_are_asked_after_all() -> None:
    """The search for the root of the smallest bound at much noise once ended at 1.73, and no other was asked."""
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(4), dpmf.BallsInBins(1, 100))
    found = dpmf.calibrate(mechanism, target_epsilon=2.0, target_delta=1e-5, accountant="chain", direction="remove")
    assert found.noise_multiplier < 0.93
