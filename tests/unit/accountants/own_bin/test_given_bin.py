"""Moments given what is seen around a bin, against enumeration in balls; what is left is a covariance."""

from __future__ import annotations

import math

import balls
import numpy as np
import pytest
from flint import arb, ctx

from dpmf import strategies
from dpmf.accountants.moments._given_mean import Graphs, complete_graph
from dpmf.accountants.own_bin._given_bin import GivenBin, Shared, at_most, circulant_above
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism


@pytest.fixture(autouse=True)
def many_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctx, "prec", 300)


def covariance(seed: int, b: int, size: float) -> np.ndarray:
    """A random covariance of non-negative entries."""
    loads = np.random.default_rng(seed).random((b, b + 2)) ** 3
    matrix = loads @ loads.T
    return size * matrix / matrix.max()


def banded(b: int, size: float) -> np.ndarray:
    """The Gram matrix of a banded strategy: bins far away share little with one bin, and the loads have both signs."""
    gram = Mechanism(strategies.bsr(3), BallsInBins(3, b)).gram_upper()
    return size * gram / gram.max()


def shared_of(s: np.ndarray) -> Shared:
    found = Shared.of(s)
    assert found is not None
    return found


def exact_rest(shared: Shared, loads: np.ndarray) -> list[list[arb]]:
    """D = S − v − llᵀ without rounding."""
    v, exact = balls.exact(shared.variance), [balls.exact(float(x)) for x in loads]
    return [
        [balls.exact(float(x)) - v - exact[i] * exact[j] for j, x in enumerate(row)] for i, row in enumerate(shared.s)
    ]


def pivots(matrix: list[list[arb]]) -> list[arb]:
    """Those of Gaussian elimination: all are positive if and only if a symmetric matrix is positive definite."""
    left, found = [list(row) for row in matrix], []
    for k, row in enumerate(left):
        found.append(row[k])
        for below in left[k + 1 :]:
            factor = below[k] / row[k]
            below[k:] = [x - factor * y for x, y in zip(below[k:], row[k:], strict=True)]
    return found


# --- the split -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_circulant_matrix_above(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = int(rng.integers(2, 12))
    gram = covariance(seed, b, 10.0 ** rng.uniform(-3, 3)) * (rng.random() < 0.7) + np.diag(rng.random(b))
    found = circulant_above(gram)
    assert np.all(found >= gram)
    for shift in range(b):
        assert np.array_equal(np.roll(found, (shift, shift), (0, 1)), found)
    assert np.array_equal(found, found.T)
    exact = [[balls.exact(float(x)) for x in row] for row in found]
    assert all(pivot > 0 for pivot in pivots(exact))
    # Every entry is one of those given, but for the diagonal.
    assert np.all(np.isin(found[~np.eye(b, dtype=bool)], gram))


def test_a_circulant_matrix_stays_nearly_as_it_is() -> None:
    gram = circulant_above(banded(12, 2.0))
    np.testing.assert_allclose(circulant_above(gram), gram, rtol=1e-10)


def test_a_negative_eigenvalue_is_raised() -> None:
    gram = np.eye(4)
    gram[0, 1] = gram[1, 0] = 0.9  # on the whole ring: 1 + 2·0.9·cos(π) < 0
    found = circulant_above(gram)
    assert found[0, 0] == pytest.approx(1.8)
    assert np.linalg.eigvalsh(found).min() >= 0


@pytest.mark.parametrize("circulant", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_without_the_shared_noise_is_a_covariance(seed: int, circulant: bool) -> None:
    b = 3 + seed
    s = covariance(seed, b, 10.0 ** (seed - 4.0)) if seed % 2 else banded(b, 10.0 ** (seed - 4.0))
    if circulant:
        s = circulant_above(s)
    found = Shared.of(s, circulant)
    assert found is not None
    assert np.all(found.s >= s)
    assert np.all(found.s <= s + 1.01e-9 * s.max() * np.eye(b))
    v = balls.exact(found.variance)
    assert all(pivot > 0 for pivot in pivots([[balls.exact(float(x)) - v for x in row] for row in found.s]))
    # It is about the largest v: 1/(1ᵀS⁻¹1).
    assert found.variance >= 0.89 / float(np.linalg.solve(found.s, np.ones(b)).sum())


def test_matrices_that_share_nothing_or_all() -> None:
    assert Shared.of(np.eye(5)) is not None
    assert Shared.of(np.diag([1.0, 1.0, 0.0])) is None  # a bin that nothing is seen of
    assert Shared.of(np.zeros((3, 3))) is None
    assert Shared.of(np.full((3, 3), math.nan)) is None
    assert Shared.of(1e-50 * np.eye(3)) is None  # products of so small entries are not numbers any more
    for matrix in (np.ones((4, 4)), np.outer([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])):
        found = Shared.of(matrix)
        if found is not None:
            v = balls.exact(found.variance)
            assert all(pivot > 0 for pivot in pivots([[balls.exact(float(x)) - v for x in row] for row in found.s]))


# --- moments given τ -----------------------------------------------------------------------------------------------


def exact_terms(shared: Shared, given: GivenBin, index: int, tau: float) -> list[arb]:
    """The α_j, times b."""
    rest, node = exact_rest(shared, given.loads), balls.exact(tau)
    loads = [balls.exact(float(x)) for x in given.loads]
    return [(load * node - load * load / 2 + rest[index][j]).exp() for j, load in enumerate(loads)]


MATRICES = {
    "random": covariance(3, 4, 1.5),
    "random, small": covariance(4, 4, 1e-3),
    "tiny": covariance(4, 4, 1e-8),
    "banded": banded(4, 0.8),
    "banded, large": banded(4, 6.0),
    "independent": np.diag([1.0, 0.5, 2.0]),
}


@pytest.mark.parametrize("tau", [-4.0, 0.7, 5.0])
@pytest.mark.parametrize("name", MATRICES)
def test_moments_contain_those_of_an_enumeration_in_balls(name: str, tau: float) -> None:
    s = MATRICES[name]
    shared = shared_of(s)
    for index in (0, len(s) - 1):
        given = GivenBin(shared, index)
        rest = exact_rest(shared, given.loads)
        shape, terms = given.at(tau), exact_terms(shared, given, index, tau)
        mean, central = balls.moments_of_sum(rest, terms)
        fourth = balls.within(shape, mean, central)
        close = name not in ("tiny", "independent")  # where nothing is left to vary, errors are all there is
        assert float(fourth) >= 0.3 * shape.kurtosis or not close
        # No sum of positive terms is smaller.
        assert shape.lowest == pytest.approx(-1 / shape.deviation)
        assert shape.lowest <= -1 / shape.deviation
        # The errors that are allowed for are small beside what they are errors of.
        assert shape.errors.max() < (1e-3 if close else 1.0)


def complete_sum(given: GivenBin, terms: np.ndarray) -> float:
    """The sum over the complete graph of four vertices of |f|, by enumeration, with weights proportional to terms."""
    f, w = np.abs(given._f), terms / terms.sum()
    return float(np.einsum("a,b,c,d,ab,ac,ad,bc,bd,cd->", w, w, w, w, f, f, f, f, f, f))


@pytest.mark.parametrize("knots", [0.0, 0.05, 0.7, 3.0, 50.0])
@pytest.mark.parametrize("name", ["random", "random, small", "banded", "banded, large"])
def test_the_complete_graph_between_knots_is_at_most_the_chord(name: str, knots: float) -> None:
    """At any τ, and for terms that are smaller; with knots close to each other it is what is found at τ itself."""
    shared = shared_of(MATRICES[name])
    for index in (0, 3):
        given = GivenBin(shared, index)
        for tau in (-3.3, -0.2, 0.0, 1.4, 6.0):
            terms = given._terms(tau)
            found = given._complete_between(tau, knots, float(terms.sum()))
            assert found >= complete_sum(given, terms) * (1 - 1e-12)
            smaller = terms * np.random.default_rng(index).random(len(terms))
            assert given._complete_between(tau, knots, float(smaller.sum())) >= complete_sum(given, smaller)
            if knots <= 0.05:
                bound = complete_graph(np.abs(given._f) + given._error, terms / terms.sum())
                assert found == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("knots", [0.1, 1.5])
@pytest.mark.parametrize("name", MATRICES)
def test_moments_below_contain_those_of_an_enumeration_in_balls(name: str, knots: float) -> None:
    """In cells so narrow that hardly anything is lowered, and in wide ones, where the terms are those that are used."""
    s = MATRICES[name]
    shared = shared_of(s)
    for index, tau, width in ((0, 0.7, 1e-9), (len(s) - 1, 5.0, 1e-9), (0, -2.0, 0.8), (1, 3.0, 0.8)):
        given = GivenBin(shared, index)
        rest, exact = exact_rest(shared, given.loads), exact_terms(shared, given, index, tau)
        lowered = []
        for load, term in zip(given.loads.tolist(), exact, strict=True):
            by = min(load, 0.0) * width - max(load - 2 * given.own, 0.0) * width
            lowered.append(term * balls.exact(by).exp())
        shape = given.below(tau - width, tau, tau + width, knots)
        mean, central = balls.moments_of_sum(rest, lowered)
        balls.within(shape, mean, central)


@pytest.mark.parametrize("size", [1e-3, 0.5, 3.0, 11.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_fourth_moment_of_a_circulant_matrix_is_computed(seed: int, size: float) -> None:
    """By enumeration in balls; without τ and without a record."""
    s = circulant_above(covariance(seed, 3 + seed, size))
    shared = Shared.of(s, circulant=True)
    assert shared is not None
    given = GivenBin(shared, None)
    rest = exact_rest(shared, given.loads)
    mean, central = balls.moments_of_sum(rest, [arb(1)] * len(s))
    for circulant in (False, True):
        shape = given.anywhere(circulant)
        fourth = balls.within(shape, mean, central)
    assert float(fourth) >= (1 - 1e-4) * shape.kurtosis


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_given_tau_is_a_covariance(seed: int) -> None:
    """In exact arithmetic, with the very loads and v that are used."""
    b, size = 2 + seed, 10.0 ** (seed % 4 - 2)
    for s in (covariance(seed, b, size), banded(b, size), circulant_above(covariance(seed, b, size))):
        shared = shared_of(s)
        for index in range(b):
            given = GivenBin(shared, index)
            assert all(pivot > 0 for pivot in pivots(exact_rest(shared, given.loads)))
            assert given.own == given.loads[index] >= 0
            assert given.largest >= np.abs(given.loads).max()


@pytest.mark.parametrize("seed", range(6))
def test_sums_over_graphs_are_at_most_what_rows_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = int(rng.integers(1, 9))
    f = 10.0 ** rng.uniform(-2, 1) * rng.random((b, b)) ** rng.integers(1, 6)
    f, weights = np.maximum(f, f.T), rng.random(b) ** 3
    weights /= weights.sum()
    found, near = Graphs.of(f, weights), f @ weights
    bounds = at_most(weights, near, float(f.max()))
    for exact, bound in zip((found.two, found.three, found.four), bounds, strict=True):
        assert exact <= bound * (1 + 1e-12)
    same = Graphs.of(np.full((b, b), 0.7), weights)  # all edges alike: nothing is lost
    assert at_most(weights, np.full(b, 0.7), 0.7) == pytest.approx((same.two, same.three, same.four))


def test_bins_that_nothing_is_to_be_said_about_have_no_loads() -> None:
    shared = Shared(np.full((3, 3), 1.0) + 1e-9 * np.eye(3), 1.0, 1e-9)
    given = GivenBin(shared, 0)
    if given.own == 0:
        assert not given.loads.any()
    assert all(pivot > 0 for pivot in pivots(exact_rest(shared, given.loads)))
