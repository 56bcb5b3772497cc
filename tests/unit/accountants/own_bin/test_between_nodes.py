"""Between two nodes: the inequality in balls, solutions against an integrator, integrals against quadrature."""

from __future__ import annotations

import math
from itertools import pairwise

import balls
import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st
from random_mechanisms import log_uniform, random_settings
from scipy.integrate import quad, solve_bvp

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
