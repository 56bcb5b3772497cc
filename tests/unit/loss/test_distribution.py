"""Privacy-loss distributions of Gaussian mixtures: against dp_accounting, closed forms and quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.stats import norm

from dpmf.kernels.pld import Lattice, connect_the_dots, invert_loss, loss_and_slope, loss_nodes
from dpmf.loss.distribution import LossDistribution, Mixtures, compose, to_dp_accounting
from dpmf.loss.gaussian import gaussian_delta

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

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
    ours = compose(Mixtures.from_steps([(means, weights)]), sigma, direction, interval=1e-2, tilt=0.0, growth=0.0)
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
    steps = Mixtures.from_steps([(a, u)] * 3 + [(c, v)] * 2)
    assert steps.counts.tolist() == [3, 2]
    ours = compose(steps, sigma, direction, interval=interval, tilt=0.0, growth=0.0)
    handed_over = ours.to_pmf()
    for epsilon in EPSILONS:
        reference = theirs.get_delta_for_epsilon(epsilon)
        assert ours.delta(epsilon) == pytest.approx(reference, abs=1e-12)
        assert handed_over.get_delta_for_epsilon(epsilon) == pytest.approx(reference, abs=1e-12)


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
    mixtures = Mixtures.from_steps(steps)
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
    bound = compose(Mixtures.from_steps(steps), 1.0, direction, epsilon=epsilon, floor=1e-100).delta(epsilon)
    assert exact <= bound <= exact * 1.02 + 1e-100


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("tilt", [None, 0.0, 3.0])
def test_one_composition_bounds_the_profile_everywhere(direction: str, tilt: float | None) -> None:
    """Also far from where it was meant to be sharp: a tilted window has no mass below its bottom."""
    means, weights = MIXTURES["four"]
    for options in ({"epsilon": 1.5}, {"delta": 1e-9}):
        loss = compose(Mixtures.from_steps([(means, weights)]), 0.7, direction, tilt=tilt, **options)
        for epsilon in np.linspace(-2, 6, 33):
            exact = exact_delta(means, weights, 0.7, float(epsilon), direction)
            assert loss.delta(float(epsilon)) >= exact - 1e-15


def test_counts_equal_repetitions() -> None:
    means, weights = MIXTURES["four"]
    counted = compose(Mixtures.from_steps([(means, weights)] * 40), 3.0, "remove", epsilon=1.0)
    single = Mixtures.from_steps([(np.array(means) * (1 + 1e-13 * i), weights) for i in range(40)])
    assert len(single) == 40
    assert counted.delta(1.0) == pytest.approx(compose(single, 3.0, "remove", epsilon=1.0).delta(1.0), rel=1e-6)


def test_steps_are_merged_and_lossless_ones_go_away() -> None:
    steps = Mixtures.from_steps([([1.0, 0.0, 1.0], [0.25, 0.5, 0.25]), ([0.0], [1.0]), ([3.0], [1.0]), ([4.0], [1.0])])
    assert steps.total == 4
    simple = steps.simplified()
    assert simple.total == 2
    assert simple.means.tolist() == pytest.approx([5.0, 0.0, 1.0])
    nothing = compose(Mixtures.from_steps([([0.0], [1.0])] * 3), 1.0, "add", epsilon=0.5)
    assert nothing.delta(0.0) == 0.0
    assert nothing.delta(-1.0) == pytest.approx(1 - math.exp(-1))


def test_inversion_of_the_loss() -> None:
    means, weights = np.array([0.0, 0.7, 2.5]), np.array([0.9, 0.09, 0.01])
    logs = np.log(weights)
    for x in (-6.0, -1.0, 0.0, 0.4, 3.0, 9.0):
        target = loss_and_slope(x, means, logs)[0]
        assert invert_loss(target, x + 5.0, means, logs) == pytest.approx(x, abs=1e-7 if x < -3 else 1e-12)
    assert invert_loss(math.log(0.9) - 1e-6, 1.0, means, logs) == -math.inf


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


def test_hand_over_to_dp_accounting() -> None:
    means, weights = MIXTURES["four"]
    mixtures = Mixtures.from_steps([(means, weights)] * 6)
    remove = compose(mixtures, 2.0, "remove", interval=5e-3, tilt=0.0)
    add = compose(mixtures, 2.0, "add", interval=5e-3, tilt=0.0)
    pld = to_dp_accounting(remove, add)
    for epsilon in (0.0, 0.5, 1.0):
        expected = max(remove.delta(epsilon), add.delta(epsilon))
        assert pld.get_delta_for_epsilon(epsilon) == pytest.approx(expected, rel=1e-6)
    twice = pld.compose(pld)
    assert twice.get_delta_for_epsilon(1.0) > pld.get_delta_for_epsilon(1.0)
    with pytest.raises(ValueError, match="interval"):
        to_dp_accounting(remove, compose(mixtures, 2.0, "add", interval=1e-2, tilt=0.0))
    with pytest.raises(ValueError, match="tilt must be 0"):
        compose(mixtures, 2.0, "remove", epsilon=1.0).to_pmf()


@pytest.mark.parametrize("sigma", [1e-3, 1e6])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_tiny_and_huge_noise(sigma: float, direction: str) -> None:
    loss = compose(
        Mixtures.from_steps([MIXTURES["no zero"]] * 3 + [MIXTURES["four"]] * 2), sigma, direction, epsilon=1.0
    )
    assert isinstance(loss, LossDistribution)
    delta = loss.delta(1.0)
    assert delta == pytest.approx(1.0) if sigma < 1 else 0 <= delta < 1e-15


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([([-1.0], [1.0])], "means must be finite and non-negative"),
        ([([math.nan], [1.0])], "means must be finite and non-negative"),
        ([([1.0], [0.5])], "weights must be non-negative with sum one"),
        ([([1.0, 2.0], [1.5, -0.5])], "weights must be non-negative with sum one"),
        ([([1.0, 2.0], [1.0])], r"steps\[0\] must be means and weights of one length"),
        ([([], [])], r"steps\[0\] must be means and weights of one length"),
    ],
)
def test_bad_steps(steps: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixtures.from_steps(steps)


def test_bad_options() -> None:
    steps = Mixtures.from_steps([MIXTURES["four"]])
    for sigma in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="sigma must be"):
            compose(steps, sigma, "remove", epsilon=1.0)
    with pytest.raises(ValueError, match="direction must be one of remove, add"):
        compose(steps, 1.0, "replace", epsilon=1.0)
    with pytest.raises(ValueError, match="interval must be positive"):
        compose(steps, 1.0, "remove", epsilon=1.0, interval=-1.0)
