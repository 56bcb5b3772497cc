"""Between two nodes: the inequality in balls, solutions against an integrator, integrals against quadrature."""

from __future__ import annotations

import math
from itertools import pairwise

import balls
import numpy as np
import pytest
from flint import acb, arb, ctx
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import log_uniform, random_settings
from scipy.integrate import quad, solve_bvp

from dpmf.accountants.own_bin import _between_nodes
from dpmf.accountants.own_bin._between_nodes import Curve, Curves, _mills


@pytest.fixture(autouse=True)
def many_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctx, "prec", 400)


def exact_payoff(sum_of_terms: arb, strike: arb, root: arb) -> arb:
    """Ψ in balls."""
    d = (sum_of_terms / strike).log() / root + root / 2
    return balls.cdf(d) - strike / sum_of_terms * balls.cdf(d - root)


@pytest.mark.parametrize("x", [-30.0, -3.0, 0.0, 2.0, 25.0])
def test_the_ratio_of_density_and_probability(x: float) -> None:
    exact = (-(balls.exact(x) ** 2) / 2).exp() / (2 * arb.pi()).sqrt() / balls.cdf(balls.exact(x))
    assert abs(float(_mills(np.array([x]))[0]) / float(exact.mid()) - 1) < 3e-13


@random_settings(150)
@given(st.integers(0, 10**6), log_uniform(1e-6, 3.0), log_uniform(0.05, 3.0), st.floats(-0.9, 1.5))
def test_the_payoff_satisfies_the_inequality(seed: int, root: float, size: float, part: float) -> None:
    """P'' + 2αP' + βP ≥ 0 by differences in balls, for random terms and loads, whatever α is."""
    rng = np.random.default_rng(seed)
    loads = size * rng.uniform(-0.6, 1.0, int(rng.integers(1, 6)))
    low, high = float(loads.min()), float(loads.max())
    curves = Curves(root)
    chosen = curves.least(low, high)
    h = arb(2) ** -60
    for alpha, beta in ((chosen.alpha, chosen.beta), (part * size, curves.beta(part * size, low, high))):
        for _ in range(4):
            heights = [balls.exact(float(x)) for x in np.exp(rng.normal(size=len(loads)) * rng.choice([0.5, 3.0]))]
            k = sum(heights, arb(0)) * balls.exact(float(np.exp(rng.uniform(-8, 8) * root)))

            def at(x: arb, heights: list[arb] = heights, k: arb = k) -> arb:
                terms = [
                    height * (balls.exact(float(load)) * x).exp() for height, load in zip(heights, loads, strict=True)
                ]
                return exact_payoff(sum(terms, arb(0)), k, balls.exact(root))

            left, here, right = at(-h), at(arb(0)), at(h)
            first, second = (right - left) / (2 * h), (left - 2 * here + right) / (h * h)
            total = second + 2 * balls.exact(alpha) * first + balls.exact(beta) * here
            assert total >= -balls.exact(1e-9) * (abs(second) + abs(first) + here)


def test_no_smaller_number_would_do() -> None:
    """β is about the largest that is needed: somewhere the left-hand side is nearly 0."""
    root, low, high = 0.5, -0.4, 1.1
    curves = Curves(root)
    x = np.linspace(-20, 20, 40001)
    mills = _mills(x)
    inverse = 1 / (mills / _mills(x + root) - 1)
    for alpha in (-0.2, 0.0, 0.3, 1.0):
        needed = max(
            float((inverse * (-2 * alpha * m - m * m * (mills / root - 1))).max()) for m in np.linspace(low, high, 301)
        )
        found = curves.beta(alpha, low, high)
        assert max(needed, 0.0) * (1 - 1e-9) <= found <= 1.1 * max(needed, alpha * alpha) + 1e-12


CURVES = [Curve(0.0, 0.45), Curve(0.3, 0.2), Curve(-0.2, 0.6), Curve(1.1, 0.3), Curve(0.5, 0.25 + 1e-8)]


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_weights_are_integrals_of_solutions(curve: Curve) -> None:
    nodes = np.array([-3.0, -1.0, 0.5, 0.9, 2.4])
    found = curve.weights(nodes)
    for k in range(len(nodes)):
        total = 0.0
        for left, right in ((k - 1, k), (k, k + 1)):
            if not 0 <= left < right < len(nodes):
                continue
            ends = [float(left == k), float(right == k)]
            x = np.linspace(nodes[left], nodes[right], 20)
            solved = solve_bvp(
                lambda _, y: np.array([y[1], -2 * curve.alpha * y[1] - curve.beta * y[0]]),
                lambda a, b, ends=ends: np.array([a[0] - ends[0], b[0] - ends[1]]),
                x, np.ones((2, len(x))), tol=1e-10, max_nodes=10**5,
            )  # fmt: skip
            assert solved.status == 0
            total += quad(
                lambda y, solved=solved: float(solved.sol(y)[0]) * math.exp(-y * y / 2) / math.sqrt(2 * math.pi),
                nodes[left], nodes[right], epsabs=0, epsrel=1e-10, limit=200,
            )[0]  # fmt: skip
        assert found[k] == pytest.approx(total, rel=1e-6)


def test_cells_that_are_too_wide_say_nothing() -> None:
    assert np.isinf(Curve(0.0, 4.0).weights(np.array([0.0, 1.6]))).all()
    assert np.isfinite(Curve(0.0, 4.0).weights(np.array([0.0, 1.4]))).all()
    assert np.isfinite(Curve(2.0, 1.0).weights(np.array([0.0, 5.0]))).all()
    assert not Curves.usable(11.0)


@random_settings(60)
@given(st.integers(0, 10**6), log_uniform(0.05, 2.0), log_uniform(0.1, 2.0))
def test_values_at_nodes_bound_the_integral(seed: int, root: float, size: float) -> None:
    """∫ Ψ(Σ e^(l_j·x + c_j))·φ(x) dx by quadrature."""
    rng = np.random.default_rng(seed)
    loads, offsets = size * rng.uniform(-0.6, 1.0, 4), rng.normal(size=4)
    strike = float(np.exp(offsets).sum() * math.exp(rng.uniform(0, 4)))
    curve = Curves(root).least(float(loads.min()), float(loads.max()))
    width = min(1.2, 2.5 / max(curve.frequency, 1e-9))
    nodes = np.arange(-4.0, 6.0, width)

    def payoff(x: float) -> float:
        log_ratio = math.log(float(np.exp(loads * x + offsets).sum()) / strike)
        d = log_ratio / root + root / 2
        return 0.5 * (math.erfc(-d / 2**0.5) - math.exp(-log_ratio) * math.erfc((root - d) / 2**0.5))

    exact = sum(
        quad(lambda x: payoff(x) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi), a, b, epsabs=0, epsrel=1e-9)[0]
        for a, b in pairwise(nodes.tolist())
    )
    assert float(curve.weights(nodes) @ [payoff(x) for x in nodes]) >= exact * (1 - 1e-7)


def exact_weights(curve: Curve, nodes: np.ndarray, radial: bool) -> list[arb]:
    """The weights as integrals in balls, with the exact numbers of the equation."""
    alpha = balls.exact(curve.alpha)
    change = balls.exact(curve.beta) - alpha * alpha
    rate, alpha = acb(abs(change).sqrt()), acb(alpha)
    weights = [arb(0)] * len(nodes)
    for k, (left, right) in enumerate(pairwise(acb(balls.exact(x)) for x in nodes.tolist())):
        width = right - left
        for end in (0, 1):

            def integrand(t: acb, _: bool, left: acb = left, width: acb = width, end: int = end) -> acb:
                x, near = left + t, (t if end else width - t)
                solution = (rate * near).sin() / (rate * width).sin() if change > 0 else (
                    (rate * near).sinh() / (rate * width).sinh()
                )  # fmt: skip
                measure = (-x * x / 2 + alpha * (end * width - t)).exp()
                return solution * measure * (x if radial else 1 / acb(2 * arb.pi()).sqrt())

            weights[k + end] += acb.integral(integrand, 0, width, rel_tol=2.0**-60, abs_tol=arb(2) ** -1300).real
    return weights


EXTREME_CURVES = [*CURVES, Curve(3.4, 0.5), Curve(-1.0, 6.0), Curve(0.0, 1e-9)]


@pytest.mark.parametrize("curve", EXTREME_CURVES, ids=str)
@pytest.mark.parametrize("width", [1e-3, 0.12, 1.0, 2.5, 5.0])
def test_weights_are_at_least_the_integrals_and_close(
    curve: Curve, width: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ordinary and at extreme nodes, up to the widest cells that are allowed."""
    monkeypatch.setattr(ctx, "prec", 120)
    width = min(width, 3.0 / max(curve.frequency, 1e-9) * (1 - 1e-12))
    for first in (-40.0, -37.05, -20.0, -5.3, -0.7, 0.0, 3.1, 12.0, 20.0, 30.0, 40.0 - width):
        nodes = np.array([first, first + width, first + 1.3 * width])
        for radial in (False, True) if first >= 0 else (False,):
            found = curve.weights(nodes, radial=radial).tolist()
            for value, truth in zip(found, exact_weights(curve, nodes, radial), strict=True):
                assert balls.exact(value) >= truth, (first, radial)
                assert balls.exact(value) <= truth * (1 + 1e-8) + 1e-240, (first, radial)


@pytest.mark.parametrize("change", [0.5, 8.0, 60.0, 1e6])
def test_weights_bound_the_integrals_however_few_the_panels(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What too few panels miss is added."""
    monkeypatch.setattr(ctx, "prec", 120)
    monkeypatch.setattr(_between_nodes, "_CHANGE", change)
    curve = Curve(0.3, 0.2)
    for nodes in (np.array([-37.0, -34.5, -33.0]), np.array([-1.0, 1.5, 6.5]), np.array([20.0, 22.5])):
        for value, truth in zip(curve.weights(nodes).tolist(), exact_weights(curve, nodes, False), strict=True):
            assert balls.exact(value) >= truth


def test_cells_in_which_numbers_would_overflow_say_nothing() -> None:
    assert np.isinf(Curve(100.0, 1.0).weights(np.array([0.0, 10.0, 10.1]))).all()
