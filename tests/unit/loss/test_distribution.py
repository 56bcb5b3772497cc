"""Privacy-loss distributions of Gaussian mixtures: against dp_accounting, closed forms and quadrature."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import knobs
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import norm

from dpmf.kernels.pld import Lattice, connect_the_dots, invert_loss, loss_and_slope, loss_nodes
from dpmf.loss import distribution
from dpmf.loss._window import TUNING, Tuning, Window
from dpmf.loss.distribution import LossDistribution, compose
from dpmf.loss.gaussian import gaussian_delta
from dpmf.loss.mixtures import Mixtures
from dpmf.numerics import UNIT

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

PLAIN = Tuning(interval=1e-2, tilt=0.0, growth=0.0)
EPSILONS = (0.0, 0.01, 0.0234, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0)
MIXTURES = {
    "four": ([0.0, 0.4, 0.8, 1.0], [0.7, 0.1, 0.15, 0.05]),
    "subsampled": ([0.0, 1.0], [0.99, 0.01]),
    "no zero": ([0.3, 0.5, 2.0], [0.2, 0.5, 0.3]),
    "single": ([1.3], [1.0]),
}


def exact_delta(means, weights, sigma: float, epsilon: float, direction: str) -> float:
    """δ(ε) of one step from the definition: one root, then distribution functions."""
    means, weights = np.asarray(means), np.asarray(weights)

    def loss(x: float) -> float:
        return float(np.logaddexp.reduce(np.log(weights) + means * (x - means / 2) / sigma**2))

    target = epsilon if direction == "remove" else -epsilon
    if loss(-1e4 * sigma) >= target:  # a component at zero keeps the loss above its log weight
        return -math.expm1(epsilon) if direction == "remove" else 0.0
    x = brentq(lambda x: loss(x) - target, -1e4 * sigma, 1e4 * sigma, xtol=1e-14, rtol=1e-14)
    if direction == "remove":
        return float(weights @ norm.sf((x - means) / sigma) - math.exp(epsilon) * norm.sf(x / sigma))
    return float(norm.cdf(x / sigma) - math.exp(epsilon) * (weights @ norm.cdf((x - means) / sigma)))


def mixtures_of(steps) -> Mixtures:
    """Mixtures from (means, weights) pairs: sorted, equal means merged, equal steps counted."""
    collected: dict[tuple[bytes, bytes], int] = {}
    for means, weights in steps:
        distinct, where = np.unique(np.asarray(means, dtype=float), return_inverse=True)
        key = (distinct.tobytes(), np.bincount(where, weights=weights).tobytes())
        collected[key] = collected.get(key, 0) + 1
    return Mixtures.from_unique(collected)


def pmf_of(pld, direction: str):
    return pld._pmf_remove if direction == "remove" else pld._pmf_add


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_single_steps_agree_with_dp_accounting(name: str, sigma: float, direction: str) -> None:
    means, weights = MIXTURES[name]
    theirs = pmf_of(
        privacy_loss_distribution.from_mixture_gaussian_mechanism(
            sigma, means, weights, value_discretization_interval=1e-2
        ),
        direction,
    )
    ours = compose(mixtures_of([(means, weights)]), sigma, direction, tuning=PLAIN)
    for epsilon in EPSILONS:
        assert ours.delta(epsilon) == pytest.approx(theirs.get_delta_for_epsilon(epsilon), abs=1e-12)
        exact = exact_delta(means, weights, sigma, epsilon, direction)
        assert exact - 1e-14 <= ours.delta(epsilon) <= exact + 1e-4


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_small_compositions_agree_with_dp_accounting(direction: str) -> None:
    sigma, interval = 2.0, 1e-2
    (a, u), (c, v) = MIXTURES["four"], MIXTURES["subsampled"]
    make = privacy_loss_distribution.from_mixture_gaussian_mechanism
    first = make(sigma, a, u, value_discretization_interval=interval)
    second = make(sigma, c, v, value_discretization_interval=interval)
    theirs = pmf_of(first.self_compose(3).compose(second.self_compose(2)), direction)
    steps = mixtures_of([(a, u)] * 3 + [(c, v)] * 2)
    assert steps.counts.tolist() == [3, 2]
    ours = compose(steps, sigma, direction, tuning=PLAIN)
    for epsilon in EPSILONS:
        reference = theirs.get_delta_for_epsilon(epsilon)
        assert ours.delta(epsilon) == pytest.approx(reference, abs=1e-12)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_many_different_steps(direction: str) -> None:
    """Tilted, on a sparse lattice of its own, against dp_accounting on a fine one."""
    rng = np.random.default_rng(7)
    sigma = 1.5
    steps = []
    for _ in range(8):
        weights = rng.dirichlet([5.0, 1.0, 0.5])
        steps.append(([0.0, *np.sort(rng.uniform(0.2, 1.5, 2))], weights))
    theirs = privacy_loss_distribution.identity(value_discretization_interval=5e-3)
    for means, weights in steps:
        theirs = theirs.compose(
            privacy_loss_distribution.from_mixture_gaussian_mechanism(
                sigma, means, weights, value_discretization_interval=5e-3
            )
        )
    reference = pmf_of(theirs, direction)
    mixtures = mixtures_of(steps)
    for epsilon in (0.5, 2.0, 4.0):
        ours = compose(mixtures, sigma, direction, epsilon=epsilon)
        truth = reference.get_delta_for_epsilon(epsilon)
        if truth > 1e-11:  # below, the reference is rounding noise
            assert truth * (1 - 1e-4) - 1e-12 <= ours.delta(epsilon) <= truth * 1.01
    by_delta = compose(mixtures, sigma, direction, delta=1e-6).epsilon(1e-6)
    assert by_delta == pytest.approx(reference.get_epsilon_for_delta(1e-6), rel=2e-3)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 10.0, 20.0])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_gaussians_compose_to_a_gaussian(direction: str, epsilon: float) -> None:
    """A known answer down to δ = 1e-80: errors are relative to δ. Two nearly equal components stop the shortcut."""
    steps = [([0.5, 0.5 * (1 + 1e-12)], [0.5, 0.5])] * 7 + [([0.3, 0.3 * (1 + 1e-12)], [0.5, 0.5])] * 5
    exact = gaussian_delta(math.sqrt(7 * 0.25 + 5 * 0.09), epsilon)
    bound = compose(mixtures_of(steps), 1.0, direction, epsilon=epsilon, floor=1e-100).delta(epsilon)
    assert exact <= bound <= exact * 1.02 + 1e-100


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("tilt", [None, 0.0, 3.0])
def test_one_composition_bounds_the_profile_everywhere(direction: str, tilt: float | None) -> None:
    """Also far from where it was meant to be sharp: a tilted window has no mass below its bottom."""
    means, weights = MIXTURES["four"]
    for options in ({"epsilon": 1.5}, {"delta": 1e-9}):
        loss = compose(mixtures_of([(means, weights)]), 0.7, direction, tuning=replace(TUNING, tilt=tilt), **options)
        for epsilon in np.linspace(-2, 6, 33):
            exact = exact_delta(means, weights, 0.7, float(epsilon), direction)
            assert loss.delta(float(epsilon)) >= exact - 1e-15


def test_counts_equal_repetitions() -> None:
    means, weights = MIXTURES["four"]
    counted = compose(mixtures_of([(means, weights)] * 40), 3.0, "remove", epsilon=1.0)
    single = mixtures_of([(np.array(means) * (1 + 1e-13 * i), weights) for i in range(40)])
    assert len(single) == 40
    assert counted.delta(1.0) == pytest.approx(compose(single, 3.0, "remove", epsilon=1.0).delta(1.0), rel=1e-6)


def test_steps_are_merged_and_lossless_ones_go_away() -> None:
    steps = mixtures_of([([1.0, 0.0, 1.0], [0.25, 0.5, 0.25]), ([0.0], [1.0]), ([3.0], [1.0]), ([4.0], [1.0])])
    assert steps.total == 4
    simple = steps.simplified()
    assert simple.total == 2
    assert simple.means.tolist() == pytest.approx([5.0, 0.0, 1.0])
    nothing = compose(mixtures_of([([0.0], [1.0])] * 3), 1.0, "add", epsilon=0.5)
    assert nothing.delta(0.0) == 0.0
    assert nothing.delta(-1.0) == pytest.approx(1 - math.exp(-1))


def test_inversion_of_the_loss() -> None:
    means, weights = np.array([0.0, 0.7, 2.5]), np.array([0.9, 0.09, 0.01])
    logs = np.log(weights)
    for x in (-6.0, -1.0, 0.0, 0.4, 3.0, 9.0):
        target = loss_and_slope(x, means, logs)[0]
        assert invert_loss(target, x + 5.0, means, logs)[0] == pytest.approx(x, abs=1e-7 if x < -3 else 1e-12)
    assert invert_loss(math.log(0.9) - 1e-6, 1.0, means, logs)[0] == -math.inf


@pytest.mark.parametrize("add", [False, True])
def test_connect_the_dots_keeps_both_measures(add: bool) -> None:
    """Masses sum to one under the first distribution and, times e^(−loss), to one under the second."""
    means, weights = np.array([0.0, 0.5, 1.5]), np.array([0.6, 0.3, 0.1])
    nodes = loss_nodes(means, weights, np.log(weights), add, Lattice(0.01, 0.0, 1.0, 1e-15, 8.0, 8.0))
    masses, infinity = connect_the_dots(nodes, 0.01, means, weights, np.log(weights), add)
    assert np.all(np.diff(nodes) == 1)
    assert np.all(masses >= 0)
    assert masses.sum() + infinity == pytest.approx(1.0, abs=1e-11)
    assert masses @ np.exp(-0.01 * nodes) == pytest.approx(1.0, abs=1e-9)
    sparse = loss_nodes(means, weights, np.log(weights), add, Lattice(0.01, 0.05, 1.0, 1e-15, 8.0, 8.0))
    assert len(sparse) < len(nodes) / 2
    assert set(sparse.tolist()) <= set(nodes.tolist())


@pytest.mark.parametrize("sigma", [1e-3, 1e6])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_tiny_and_huge_noise(sigma: float, direction: str) -> None:
    loss = compose(mixtures_of([MIXTURES["no zero"]] * 3 + [MIXTURES["four"]] * 2), sigma, direction, epsilon=1.0)
    assert isinstance(loss, LossDistribution)
    delta = loss.delta(1.0)
    assert delta == pytest.approx(1.0) if sigma < 1 else 0 <= delta < 1e-15


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_bounds_hold_for_other_knobs(direction: str) -> None:
    """Every tuning knob may be changed: two Gaussians in disguise, whose composition has a closed form."""
    mixtures = mixtures_of([([0.5, 0.5 * (1 + 1e-12)], [0.5, 0.5])] * 3 + [([1.0, 1 + 1e-12], [0.5, 0.5])])
    for change, tuning in knobs.perturbed(TUNING):
        for where in ({"epsilon": 2.0}, {"delta": 1e-6}):
            found = compose(mixtures, 1.0, direction, tuning=tuning, **where)
            for epsilon in (0.1, 2.0, 4.0):
                assert found.delta(epsilon) >= gaussian_delta(math.sqrt(1.75), epsilon, "lower"), change


@pytest.mark.parametrize("excess", [1e-3, 1e-9, 0.0])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_infinite_losses_count_with_all_the_mass_of_other_steps(direction: str, excess: float) -> None:
    """Weights may exceed one (remove), and masses are rounded up: the product of the very masses, in fractions."""
    count, sigma, length = 1000, 20.0, 2**14
    weights = [0.6 + (excess if direction == "remove" else 0.0), 0.4]
    mixtures = mixtures_of([([0.0, 1.0], weights)] * count)
    window = Window(1e-3, -length // 2, length, 0.0, np.array([30.0, 60.0, 90.0]), 1e-4, 1e-2)
    lattice = Lattice(window.interval, TUNING.growth, window.widest, window.tail, -ndtri(window.tail), TUNING.low_reach)
    means = mixtures.means / sigma * (1 + 4 * UNIT)
    add = direction == "add"
    nodes = loss_nodes(means, mixtures.weights, np.log(mixtures.weights), add, lattice)
    masses, infinite = connect_the_dots(nodes, window.interval, means, mixtures.weights, np.log(mixtures.weights), add)
    finite = sum(map(Fraction, masses.tolist()))
    truth = (finite + Fraction(infinite)) ** count - finite**count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution, "choose_window", lambda *_: window)
        found = compose(mixtures, sigma, direction, epsilon=1.0).infinity_mass
    assert truth <= Fraction(found)
    assert found <= float(truth) * math.exp(count * (infinite + excess)) + 1e-20
