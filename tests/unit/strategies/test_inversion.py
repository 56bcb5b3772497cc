"""Inverses and their error bounds, against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from flint import arb, ctx, fmpq, fmpq_mat
from hypothesis import given
from hypothesis import strategies as st

from dpmf import strategies
from dpmf.batching import BallsInBins
from dpmf.gram.means import folded_column
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array
from dpmf.strategies import inversion
from dpmf.strategies.base import Strategy, ToeplitzStrategy
from dpmf.strategies.buffered import GivenBuffers
from dpmf.strategies.streaming import make_plan

N = 60


def exact_inverse(coefficients: Array, n: int) -> list[Fraction]:
    """The first n coefficients of 1/f."""
    d = [Fraction(float(x)) for x in coefficients]
    out = [1 / d[0]]
    for t in range(1, n):
        out.append(-sum((d[j] * out[t - j] for j in range(1, min(t, len(d) - 1) + 1)), Fraction(0)) / d[0])
    return out


def rational(matrix: Array) -> fmpq_mat:
    return fmpq_mat(len(matrix), len(matrix), [fmpq(*float(x).as_integer_ratio()) for x in matrix.ravel()])


BY_INVERSE: dict[str, ToeplitzStrategy] = {
    "bisr2": strategies.bisr(2),
    "bisr4": strategies.bisr(4),
    "bisr60": strategies.bisr(60),
    "bandinvmf": strategies.bandinvmf(4, iterations=N, min_sep=10),
    "normalized": strategies.bisr(4).normalized(),
}


@pytest.mark.parametrize("name", BY_INVERSE)
def test_what_is_accounted_covers_the_exact_inverse(name: str) -> None:
    """Of strategies given by C⁻¹: the mixture means are above those of the matrix that runs, by next to nothing."""
    strategy, batching = BY_INVERSE[name], BallsInBins(3, 20)
    exact = exact_inverse(strategy.noising_coef(N), N)
    error = strategy.coef_error(N)
    assert 0 < error < 1e-11
    for computed, true in zip(strategy.strategy_coef(N), exact, strict=True):
        assert abs(Fraction(float(computed)) - true) <= Fraction(error) * true
    mean = [sum(exact[s] for s in range(t, -1, -20)) for t in range(N)]
    for found, true in zip(folded_column(strategy, batching), mean, strict=True):
        assert true * (1 - Fraction(1, 10**14)) <= Fraction(float(found)) <= true * (1 + Fraction(1, 10**11))
    mechanism = Mechanism(strategy, batching)
    gram = [[sum(mean[t - i] * mean[t - j] for t in range(max(i, j), N)) for j in range(20)] for i in range(20)]
    for i in range(20):
        for j in range(20):
            assert Fraction(float(mechanism.gram_lower()[i, j])) <= gram[i][j]
            assert gram[i][j] <= Fraction(float(mechanism.gram_upper()[i, j]))


def test_strategies_given_by_c_are_accounted_as_given() -> None:
    for strategy in (strategies.dpsgd(), strategies.bsr(4), strategies.coefficients([1, 0.5]), strategies.bisr(1)):
        assert strategy.coef_error(N) == 0
        column = strategy.strategy_coef(N)
        np.testing.assert_array_equal(folded_column(strategy, BallsInBins(1, N)), column)


@given(
    decay=st.lists(st.floats(-0.99, 1.0), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
    sign=st.sampled_from([1.0, -1.0]),
)
def test_what_is_accounted_covers_a_blt(decay: list[float], weights: list[float], sign: float) -> None:
    scale = weights[: len(decay)]
    scale[-1] *= sign
    strategy = GivenBuffers(tuple(decay), tuple(scale))
    exact = [Fraction(1)] + [
        sum((Fraction(s) * Fraction(r) ** t for r, s in zip(decay, scale, strict=True)), Fraction(0)) for t in range(29)
    ]
    if min(exact) < Fraction(-1, 10**13):
        return
    found = folded_column(strategy, BallsInBins(1, 30))
    for value, true in zip(found, exact, strict=True):
        assert Fraction(float(value)) >= abs(true)
        assert value <= float(abs(true)) + 1e-13


def positive_definite(entries: fmpq_mat) -> bool:
    """By elimination without pivots, in exact arithmetic."""
    rows = [[Fraction(int(x.p), int(x.q)) for x in row] for row in entries.tolist()]
    for k in range(len(rows)):
        if rows[k][k] < 0 or (rows[k][k] == 0 and any(rows[k])):
            return False
        for i in range(k + 1, len(rows)):
            factor = rows[i][k] / rows[k][k] if rows[k][k] else 0
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    return True


RNG = np.random.default_rng(3)
BY_C: dict[str, Strategy] = {
    "bsr": strategies.bsr(4),
    "prefix sums": strategies.coefficients(np.ones(12)),
    "coefficients": strategies.coefficients([2.0, 1.5, 0.25]),
    "blt": GivenBuffers((0.9, 0.5), (0.3, 0.1)),
    "matrix": strategies.matrix(np.tril(RNG.random((12, 12))) + np.eye(12)),
    "each": strategies.bsr(3).normalized("each"),
}


@pytest.mark.parametrize("name", BY_C)
def test_noise_from_a_computed_inverse_covers_c(name: str) -> None:
    """The covariance of C·D·Z is at least the identity, with the doubles D that training uses, in exact arithmetic."""
    strategy, n = BY_C[name], 12
    noising = inversion.covering_inverse(strategy, n)
    product = rational(strategy.matrix(n)) * rational(noising)
    identity = fmpq_mat(n, n, [int(i == j) for i in range(n) for j in range(n)])
    assert positive_definite(product * product.transpose() - identity)
    np.testing.assert_allclose(noising, strategy.inverse(n), rtol=1e-12)
    np.testing.assert_array_equal(make_plan(strategy, n, 0).weights, noising)


def test_the_plain_inverse_does_not_always_cover() -> None:
    """So that the test above is not vacuous."""
    plain = 0
    for seed in range(10):
        c = np.tril(np.random.default_rng(seed).random((6, 6))) + np.eye(6)
        product = rational(c) * rational(strategies.matrix(c).inverse(6))
        identity = fmpq_mat(6, 6, [int(i == j) for i in range(6) for j in range(6)])
        plain += positive_definite(product * product.transpose() - identity)
    assert plain < 10


def test_convolution_covers_c() -> None:
    """C of ones is applied as 1, −1; a computed C⁻¹ is enlarged, a given one is used as it is."""
    plan = make_plan(strategies.coefficients(np.ones(30)), 30)
    assert (plan.method, plan.copies) == ("convolution", 1)
    assert 1 < plan.weights[0, 0] < 1 + 1e-13
    given_inverse = make_plan(strategies.bisr(3), 30)
    assert given_inverse.method == "convolution"
    np.testing.assert_array_equal(given_inverse.weights[0], strategies.bisr(3).noising_coef(30)[:3])


def test_an_ill_conditioned_c_still_runs_by_back_substitution() -> None:
    strategy = strategies.coefficients([1.0, 1000.0])
    assert make_plan(strategy, 20).method == "back-substitution"
    with pytest.raises(ValueError, match="strategy must be well enough conditioned"):
        make_plan(strategy, 20, 0)


def test_long_inverses_in_ball_arithmetic() -> None:
    """1000 coefficients of BISR(4) in Arb: the bound on the relative error holds."""
    n, strategy = 1000, strategies.bisr(4)
    error = strategy.coef_error(n)
    with ctx.workprec(400):
        d = [arb(float(x)) for x in strategy.noising_coef(4)]
        exact = [arb(1)]
        for t in range(1, n):
            exact.append(-sum((d[j] * exact[t - j] for j in range(1, min(t, 3) + 1)), arb(0)))
        for computed, true in zip(strategy.strategy_coef(n), exact, strict=True):
            assert abs(arb(float(computed)) - true) <= arb(error) * true
