"""The Rényi accountant: moments against enumeration, the errata of the paper, extreme scales, both directions."""

from __future__ import annotations

import itertools
import math
import warnings
from decimal import Decimal
from fractions import Fraction
from functools import cache

import numpy as np
import oracles
import pytest
from scipy.optimize import brentq

import dpmf
from dpmf import strategies
from dpmf.accountants import Renyi
from dpmf.accountants.renyi._moments import LineMoments, RingMoments, UncorrelatedMoments
from dpmf.accountants.renyi.orders import IntegerOrders, MomentTable, RealOrders, log_conversion_factor
from dpmf.batching import BallsInBins
from dpmf.gram.bands import circulant_majorant, truncate
from dpmf.gram.means import gram_matrix
from dpmf.mechanism import Mechanism

DIRECTIONS = ("remove", "add")


def random_matrix(n: int, seed: int, zeros: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.tril(rng.random((n, n)) * (rng.random((n, n)) >= zeros)) + 0.1 * np.eye(n)


# label: (strategy, b, N); p is the bandwidth of C.
CASES: dict[str, tuple[strategies.Strategy, int, int]] = {
    "one bin": (strategies.bsr(2), 1, 3),
    "dpsgd k=1": (strategies.dpsgd(), 5, 5),
    "dpsgd k=3": (strategies.dpsgd(), 4, 12),
    "dpsgd cut off": (strategies.dpsgd(), 4, 10),  # unequal diagonal
    "bsr2 k=1": (strategies.bsr(2), 5, 5),
    "bsr2 k=2": (strategies.bsr(2), 5, 10),
    "bsr2 k=3": (strategies.bsr(2), 6, 18),
    "bsr2 b=2": (strategies.bsr(2), 2, 4),
    "bsr2 b=3": (strategies.bsr(2), 3, 9),
    "bsr3 k=1": (strategies.bsr(3), 6, 6),
    "bsr3 k=2, b<2p": (strategies.bsr(3), 5, 10),
    "bsr3 k=3, b=3p-4": (strategies.bsr(3), 5, 15),
    "bsr3 k=2, b=2p": (strategies.bsr(3), 6, 12),
    "bsr3 cut off": (strategies.bsr(3), 5, 12),
    "bsr3 k=2, b=3p-2": (strategies.bsr(3), 7, 14),
    "bsr4 k=2, b<2p": (strategies.bsr(4), 6, 12),
    "bsr9, p>b": (strategies.bsr(9), 4, 12),
    "bsr9 k=1, p>b": (strategies.bsr(9), 5, 5),
    "bisr2 k=1": (strategies.bisr(2), 5, 5),
    "bisr3 k=2": (strategies.bisr(3), 5, 10),
    "bisr4 k=3": (strategies.bisr(4), 4, 12),
    "random k=1": (strategies.matrix(random_matrix(5, 1)), 5, 5),
    "random k=2": (strategies.matrix(random_matrix(10, 2)), 5, 10),
    "random cut off": (strategies.matrix(random_matrix(8, 3)), 3, 8),
    "sparse k=2": (strategies.matrix(random_matrix(12, 4, zeros=0.7)), 6, 12),
    "sparse k=1": (strategies.matrix(random_matrix(7, 5, zeros=0.7)), 7, 7),
    "bsr5 k=2": (strategies.bsr(5), 10, 20),
    "bsr6 k=1": (strategies.bsr(6), 11, 11),
}
SIGMAS = (0.35, 1.3, 20.0)


@cache
def mechanism(label: str) -> Mechanism:
    strategy, b, n = CASES[label]
    return Mechanism(strategy, BallsInBins.from_iterations(n, b))


@cache
def exact_gram(label: str) -> list[list[Fraction]]:
    strategy, b, n = CASES[label]
    return oracles.exact_gram(strategy.matrix(n), b)


def top_order(b: int) -> int:
    return {1: 12, 2: 12, 3: 9, 4: 7, 5: 5, 6: 4, 7: 4}.get(b, 3)


@cache
def truth(label: str, sigma: float, order: int) -> Decimal:
    return oracles.log_moment(exact_gram(label), sigma, order)


def tables_at(gram: np.ndarray, p: int) -> list[MomentTable]:
    """Every table that applies to this truncation: where nothing wraps, a ring must agree with the line."""
    majorant, b = truncate(gram, p), len(gram)
    if majorant.p == 1:
        return [UncorrelatedMoments(majorant, b)]
    ring: list[MomentTable] = [RingMoments(majorant, b)]
    return ring if majorant.wraps else [*ring, LineMoments(majorant, b)]


def divergences(bounds, sigma: float, order: int) -> list[np.ndarray]:
    """R_α for α = 2..order, from each bound that has a table of moments."""
    found = [m.log_moments(sigma, order)[2 : order + 1] for m in bounds if isinstance(m, IntegerOrders)]
    return [moments / np.arange(1, order) for moments in found]


# --- the oracle itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["bsr2 k=2", "bsr9, p>b", "random cut off", "dpsgd k=1"])
def test_enumeration_by_multisets_and_by_tuples_agree(label):
    gram = np.array([[float(x) for x in row] for row in exact_gram(label)])
    for sigma, order in itertools.product(SIGMAS, (1, 2, 3, 5)):
        by_tuples = oracles.log_moment_by_tuples(gram / sigma**2, order)
        assert by_tuples == pytest.approx(float(truth(label, sigma, order)), rel=1e-12, abs=1e-13)


def test_enumeration_is_the_moment_of_the_likelihood_ratio():
    """E_Q[A^α] by Gauss–Hermite quadrature over u ~ N(0, S): multisets are not taken on trust either."""
    gram = np.array([[1.3, 0.4], [0.4, 0.8]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    factor = np.linalg.cholesky(gram)
    z = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), axis=-1).reshape(-1, 2)
    ratio = np.exp(z @ factor.T - np.diag(gram) / 2).mean(axis=1)
    for order in (1, 2, 3, 4):
        moment = (np.outer(weights, weights).ravel() * ratio**order).sum()
        assert math.log(moment) == pytest.approx(
            float(oracles.log_moment(oracles.rational(gram), 1.0, order)), rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize(("p", "wraps"), [(2, False), (2, True), (3, False), (3, True)])
def test_the_log_domain_twin_against_enumeration(p, wraps):
    gram = gram_matrix(strategies.bsr(p), BallsInBins(3 if wraps else 1, 6))
    found = oracles.log_moments_banded(gram, p, 5)
    for order in range(6):
        expected = float(oracles.log_moment(oracles.rational(gram), 1.0, order))
        assert found[order] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_series_twin_against_enumeration():
    found = oracles.log_moments_of_equal_independent(0.7, 6, 6)
    for order in range(7):
        expected = float(oracles.log_moment(oracles.rational(0.7 * np.eye(6)), 1.0, order))
        assert found[order] == pytest.approx(expected, rel=1e-14, abs=1e-14)


# --- moments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("label", CASES)
def test_moments_against_enumeration(label, sigma):
    """For every bandwidth: what the truncated matrix gives, never below the truth, equal to it where nothing is cut."""
    gram = mechanism(label).gram
    b, top = len(gram), top_order(len(gram))
    for p in range(1, b // 2 + 3):
        inside, tau = oracles.truncated(gram, p)
        majorised = [[x + Fraction(tau) for x in row] for row in oracles.rational(inside)]
        expected = [
            float(oracles.log_moment(majorised, sigma, m) if tau else truth(label, sigma, m)) for m in range(top + 1)
        ]
        for table in tables_at(gram, p):
            values = table.log_moments(sigma, top)
            assert table.details["exact"] == (tau == 0)
            np.testing.assert_allclose(values, expected, rtol=1e-10, atol=1e-12)
            for order in range(2, top + 1):
                exact = truth(label, sigma, order)
                assert Decimal(float(values[order])) >= exact * (1 - Decimal("1e-13"))
                if tau == 0:
                    assert float(values[order]) == pytest.approx(float(exact), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("label", CASES)
def test_divergences_of_the_accountant_against_enumeration(label):
    """Through the public door: exact where a bandwidth is affordable, above the truth with any other."""
    checked = mechanism(label)
    b = checked.batching.batches_per_epoch
    top = top_order(b)
    for sigma in SIGMAS:
        expected = np.array([float(truth(label, sigma, m)) / (m - 1) for m in range(2, top + 1)])
        for bandwidth in (None, 1, 2, b, 10 * b):
            prepared = Renyi(max_order=top, bandwidth=bandwidth).prepare(checked)
            found = divergences(prepared.bounds(), sigma, top)
            assert found
            for values in found:
                assert len(values) == top - 1
                assert np.all(values >= expected * (1 - 1e-13))
            if bandwidth not in (1, 2):
                np.testing.assert_allclose(np.min(found, axis=0), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("label", CASES)
def test_gram_rounding_is_added_back(label):
    """Against the Gram matrix in rational arithmetic, without any tolerance."""
    checked, top = mechanism(label), top_order(CASES[label][1])
    for member in Renyi(max_order=top).prepare(checked).bounds():
        if isinstance(member, IntegerOrders):
            values = member.log_moments(1.3, top)
            for order in range(2, top + 1):
                assert Decimal(float(values[order])) >= truth(label, 1.3, order)


@pytest.mark.parametrize("order", [2, 7, 40, 200])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_gaussian_mechanism_in_closed_form(k, order):
    """b = 1: R_α = αG/(2σ²) in both directions."""
    checked = Mechanism(strategies.bsr(3), BallsInBins(k, 1))
    entry = float(oracles.gram(oracles.bsr_matrix(3, k), 1)[0, 0])
    for sigma in (0.2, 1.0, 7.0):
        closed = order * entry / (2 * sigma**2)
        bounds = Renyi(max_order=order).prepare(checked).bounds()
        assert {type(member) for member in bounds} == {IntegerOrders, RealOrders}
        for values in divergences(bounds, sigma, order):
            assert values[-1] == pytest.approx(closed, rel=1e-12)
        for direction in DIRECTIONS:
            assert bounds[-1].divergence(sigma, order, direction) == pytest.approx(closed, rel=1e-12)


def test_gaussian_mechanism_end_to_end():
    """δ of the accountant is the conversion at its best order, above the exact δ of the Gaussian mechanism."""
    checked = Mechanism(strategies.dpsgd(), BallsInBins(1, 1))
    for sigma, epsilon in itertools.product((0.5, 1.0, 4.0), (0.1, 1.0, 5.0)):
        orders = 1 + np.geomspace(1e-4, 1e5, 200_000)
        best = np.min((orders - 1) * (orders / (2 * sigma**2) - epsilon) + log_conversion_factor(orders))
        for direction in DIRECTIONS:
            found = dpmf.delta(
                checked, noise_multiplier=sigma, epsilon=epsilon, direction=direction, accountant="renyi"
            ).delta
            assert found == pytest.approx(min(1.0, math.exp(best)), rel=1e-4)
            assert found >= oracles.gaussian_delta(1 / sigma**2, epsilon)


@pytest.mark.parametrize("order", [1.001, 1.5, 2, 3, 10.5, 200])
def test_conversion_factor(order):
    assert math.exp(log_conversion_factor(order)) == pytest.approx(oracles.conversion(0, order, 0), rel=1e-9)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize(("p", "b", "k"), [(2, 6, 3), (2, 5, 2), (3, 7, 2), (4, 8, 2)])
def test_leaving_out_indices_of_a_ring(p, b, k, sigma):
    """b − p + 1 indices on a line: what enumeration gives for them, and above the whole ring."""
    gram = gram_matrix(strategies.bsr(p), BallsInBins(k, b))
    first = circulant_majorant(gram)
    for width in range(2, p + 1):
        line = LineMoments.from_ring(first, width)
        kept = b - width + 1
        tau = max((first[d] for d in range(b) if min(d, b - d) >= width), default=0.0)
        matrix = np.array(
            [[max(first[abs(i - j)], tau) if abs(i - j) < width else tau for j in range(kept)] for i in range(kept)]
        )
        top = 5
        values = line.log_moments(sigma, top)
        assert not line.details["exact"]
        assert line.details["left_out"] == width - 1
        for order in range(2, top + 1):
            kept_alone = float(oracles.log_moment(oracles.rational(matrix), sigma, order))
            assert values[order] == pytest.approx(kept_alone, rel=1e-10, abs=1e-12)
            whole = oracles.log_moment(oracles.rational(gram), sigma, order)
            assert Decimal(float(values[order])) >= whole


@pytest.mark.parametrize(("strategy", "k", "b"), [
    (strategies.bsr(4), 10, 100), (strategies.bsr(4), 1, 1000), (strategies.bisr(4), 3, 60), (strategies.bsr(7), 2, 40),
])  # fmt: skip
def test_second_and_third_moments_in_closed_form(strategy, k, b):
    """E[A²] = Σ e^(S_ij)/b² and E[A³] = tr(E³)/b³, E_ij = e^(S_ij), for any number of bins."""
    checked = Mechanism(strategy, BallsInBins(k, b))
    for sigma in (0.5, 2.0, 30.0):
        e = np.exp(checked.gram / sigma**2)
        expected = np.array([math.log(e.sum() / b**2), math.log(np.trace(e @ e @ e) / b**3) / 2])
        found = divergences(Renyi(max_order=3).prepare(checked).bounds(), sigma, 3)
        assert np.all(np.array(found) >= expected * (1 - 1e-12))
        if strategy.bandwidth(b) < b:
            np.testing.assert_allclose(np.min(found, axis=0), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("p", "k", "b", "order"), [(3, 2, 12, 7), (3, 1, 25, 20), (4, 1, 15, 9)])
def test_wider_bands_against_the_log_domain(p, k, b, order):
    gram = gram_matrix(strategies.bsr(p), BallsInBins(k, b))
    for sigma in (0.4, 2.0):
        expected = oracles.log_moments_banded(gram / sigma**2, p, order)
        for table in tables_at(gram, p):
            np.testing.assert_allclose(table.log_moments(sigma, order), np.maximum(expected, 0), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("label", ["bsr3 k=1", "bsr3 k=2, b=2p", "bisr2 k=1", "dpsgd k=3"])
def test_the_work_budget_is_kept(label):
    """Orders grow with the budget, and stay within it as long as it allows the second order at all."""
    most = []
    for budget in (1e3, 1e5, 1e7):
        bounds = Renyi(work_budget=budget).prepare(mechanism(label)).bounds()
        members = [member for member in bounds if isinstance(member, IntegerOrders)]
        for member in members:
            order = member.most_orders()
            assert member.table.work(order) <= budget / len(members) or order == 2
        most.append([member.most_orders() for member in members])
    assert all(a <= b for first, second in itertools.pairwise(most) for a, b in zip(first, second, strict=True))


def test_all_orders_come_from_one_run():
    """Moments up to 16 contain those up to any lower order."""
    gram = mechanism("bsr3 k=2, b=3p-2").gram
    for p in (1, 2, 3):
        for table in tables_at(gram, p):
            most = table.log_moments(0.9, 16)
            for order in (2, 5, 11):
                np.testing.assert_allclose(table.log_moments(0.9, order), most[: order + 1], rtol=1e-12, atol=1e-13)


def test_one_epoch_needs_no_ring():
    for bandwidth in (2, 3):
        prepared = Renyi(bandwidth=bandwidth).prepare(Mechanism(strategies.bsr(3), BallsInBins(1, 30)))
        (member,) = prepared.bounds()
        assert isinstance(member.table, LineMoments)


# --- the errata: each printed formula fails where ours does not ------------------------------------------------------


def log_add(*values: float) -> float:
    top = max(values)
    return top if top == -math.inf else top + math.log(sum(math.exp(v - top) for v in values))


def algorithm_as_printed(gram, p, sigma, order, *, transition="right", collection="right", closing="right") -> float:
    """Algorithm "remove" of the paper for a cyclically p-banded G (τ = 0); each line right or as printed."""
    b = len(gram)
    s = gram / sigma**2
    total = -math.inf
    for prefix in itertools.product(range(order + 1), repeat=p - 1):
        if sum(prefix) > order:
            continue
        weight = sum(s[i, i] * x * (x - 1) / 2 - math.lgamma(x + 1) for i, x in enumerate(prefix))
        weight += sum(s[i, j] * prefix[i] * prefix[j] for i in range(p - 1) for j in range(i))
        states = {(sum(prefix), prefix): weight}
        for k in range(p - 1, b):
            new: dict[tuple[int, tuple[int, ...]], float] = {}
            for (m, r), log_w in states.items():
                cross = 2 * sum(s[k, k - len(r) + i] * x for i, x in enumerate(r))
                for t in range(order - m + 1):
                    change = (s[k, k] * t * (t - 1) + cross * t) / 2 - math.lgamma(t + 1)
                    key = (m + t, (*r, t)[1:] if p > 1 else ())
                    old = new.get(key, -math.inf)
                    new[key] = log_add(log_w, old + change) if transition == "printed" else log_add(log_w + change, old)
            states = new
        subtotal = -math.inf
        for (m, r), log_w in states.items():
            if m != order:
                continue
            closed = 0.0
            for i, j in itertools.product(range(p - 1), repeat=2):
                far = b - 1 - j
                if closing == "printed" or far - i >= p:
                    closed += s[i, far] * prefix[i] * r[-1 - j]
            values = (subtotal, log_w, closed) if collection == "printed" else (subtotal, log_w + closed)
            subtotal = log_add(*values)
        total = log_add(total, subtotal)
    return (total + math.lgamma(order + 1) - order * math.log(b)) / (order - 1)


def ours(label: str, sigma: float, order: int) -> float:
    members = Renyi(max_order=order).prepare(mechanism(label)).bounds()
    return min(values[-1] for values in divergences(members, sigma, order))


def enumerated(label: str, sigma: float, order: int) -> float:
    return float(truth(label, sigma, order)) / (order - 1)


ERRATA = [("bsr2 k=3", 1.5, 4), ("bsr2 k=2", 1.0, 3), ("bsr3 k=2, b=3p-2", 1.0, 3), ("bsr3 k=2, b=3p-2", 1.5, 5)]


@pytest.mark.parametrize(("label", "sigma", "order"), ERRATA)
def test_erratum_1_both_log_sum_exp_lines(label, sigma, order):
    """As printed the result is below the truth: unsound. Each of the two lines alone is wrong as well."""
    exact, gram = enumerated(label, sigma, order), mechanism(label).gram
    p = CASES[label][0].bandwidth(10)
    assert ours(label, sigma, order) == pytest.approx(exact, rel=1e-10)
    assert algorithm_as_printed(gram, p, sigma, order) == pytest.approx(exact, rel=1e-10)
    assert algorithm_as_printed(gram, p, sigma, order, transition="printed", collection="printed") < 0.9 * exact
    assert algorithm_as_printed(gram, p, sigma, order, transition="printed") < 0.9 * exact
    assert algorithm_as_printed(gram, p, sigma, order, collection="printed") < exact * (1 - 1e-3)


@pytest.mark.parametrize("label", ["bsr3 k=2, b<2p", "bsr3 k=3, b=3p-4", "bsr4 k=2, b<2p", "bsr2 b=2"])
def test_erratum_2_closing_the_cycle_counts_pairs_twice(label):
    """b ≤ 3p − 4: as printed, some pairs are both linear and wrapped; an upper bound, but not the divergence."""
    gram, sigma, order = mechanism(label).gram, 1.2, 4
    b = len(gram)
    p = min(CASES[label][0].bandwidth(10), b // 2 + 1)
    assert b <= 3 * p - 4
    exact = enumerated(label, sigma, order)
    assert ours(label, sigma, order) == pytest.approx(exact, rel=1e-10)
    assert algorithm_as_printed(gram, p, sigma, order, closing="printed") > exact * (1 + 1e-3)


@pytest.mark.parametrize("label", ["bsr3 k=2, b=3p-2", "bsr2 k=2"])
def test_erratum_2_does_not_bite_on_long_rings(label):
    gram = mechanism(label).gram
    p = CASES[label][0].bandwidth(10)
    assert len(gram) >= 3 * p - 3
    printed = algorithm_as_printed(gram, p, 1.2, 4, closing="printed")
    assert printed == pytest.approx(enumerated(label, 1.2, 4), rel=1e-10)


@pytest.mark.parametrize("label", ["bsr2 k=2", "dpsgd k=1", "random k=2"])
def test_erratum_3_signs(label):
    """1/(α−1)·log Σ − α log b/(α−1): the lemma adds the second term, the proofs divide by 1−α, the appendix by 1."""
    sigma, order = 1.1, 4
    b = CASES[label][1]
    exact = enumerated(label, sigma, order)
    log_sum = float(truth(label, sigma, order)) + order * math.log(b)
    assert ours(label, sigma, order) == pytest.approx(exact, rel=1e-10)
    as_in_the_lemma = log_sum / (order - 1) - order * math.log(b) / (1 - order)
    as_in_the_proofs = (log_sum - order * math.log(b)) / (1 - order)
    as_in_the_appendix = log_sum
    assert as_in_the_lemma > exact + 1
    assert as_in_the_proofs < 0  # no divergence is negative
    assert as_in_the_appendix > exact + 1


def test_erratum_3_no_signal_no_divergence():
    """Infinite noise has divergence 0; the lemma as printed gives 2α log b/(α−1)."""
    checked = mechanism("bsr2 k=2")
    for values in divergences(Renyi(max_order=6).prepare(checked).bounds(), 1e9, 6):
        assert np.all(values < 1e-11)


def dpsgd_100() -> Mechanism:
    return Mechanism(strategies.dpsgd(), BallsInBins(1, 100))


def test_erratum_6_each_direction_at_its_own_order():
    """DP-SGD, N = 100, ε = 1: σ ≤ 1.075; 1.201 with one order for both directions."""
    orders = []
    for way in DIRECTIONS:
        found = dpmf.calibrate(dpsgd_100(), target_epsilon=1.0, target_delta=1e-5, accountant="renyi", direction=way)
        assert found.noise_multiplier <= 1.075
        orders.append(found.details[way]["order"])
    assert abs(orders[0] - orders[1]) > 1

    def shared_order_excess(sigma: float) -> float:
        moments = np.array(oracles.log_moments_of_equal_independent(1 / sigma**2, 100, 60))
        best = math.inf
        for order in range(2, 61):
            remove = moments[order] / (order - 1)
            add = (1 / 2 + (order - 1) / 200) / sigma**2
            best = min(best, oracles.conversion(max(remove, add), order, 1.0))
        return math.log(best / 1e-5)

    assert brentq(shared_order_excess, 1.0, 1.5, xtol=1e-4) == pytest.approx(1.201, abs=2e-3)


@pytest.mark.parametrize(("max_order", "least"), [(25, 0.3048), (7, 1.44)])
@pytest.mark.parametrize("direction", ["both", *DIRECTIONS])
def test_erratum_7_what_a_largest_order_cannot_certify(max_order, least, direction):
    checked = mechanism("bsr2 k=3")
    accountant = Renyi(max_order=max_order)
    with pytest.raises(dpmf.CalibrationError, match=rf"orders up to {max_order} cannot certify epsilon") as caught:
        dpmf.calibrate(
            checked, target_epsilon=least - 0.01, target_delta=1e-5, accountant=accountant, direction=direction
        )
    assert f"below {least}" in str(caught.value)
    assert "\n" not in str(caught.value)
    met = dpmf.calibrate(
        checked, target_epsilon=least + 0.02, target_delta=1e-5, accountant=accountant, direction=direction
    )
    assert math.isfinite(met.noise_multiplier)
    assert met.delta <= 1e-5


# --- scale ---------------------------------------------------------------------------------------------------------

EXTREME = (1e-3, 1e-2, 0.3, 2.0, 1e3, 1e6)


@pytest.mark.parametrize("sigma", EXTREME)
@pytest.mark.parametrize(("strategy", "k"), [(strategies.bsr(2), 1), (strategies.bisr(3), 1), (strategies.bsr(2), 4)])
def test_many_bins_and_orders_against_the_log_domain(strategy, k, sigma):
    """b = 60 and orders to 60 on a line, to 12 on a ring; logarithms throughout in the twin."""
    b, order = 60, 60 if k == 1 else 12
    gram = gram_matrix(strategy, BallsInBins(k, b))
    inside, tau = oracles.truncated(gram, 2)
    table = tables_at(gram, 2)[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = table.log_moments(sigma, order)
    m = np.arange(order + 1)
    expected = oracles.log_moments_banded(inside / sigma**2, 2, order) + tau / sigma**2 * m * (m - 1) / 2
    np.testing.assert_allclose(values, np.maximum(expected, 0), rtol=1e-10, atol=1e-9)
    assert np.all(values >= expected - 1e-11 * (1 + np.abs(expected)))


def test_a_thousand_bins_against_the_log_domain():
    """Order 83 is the most that fits double range at b = 1000 in the kernel's scale."""
    gram = gram_matrix(strategies.bsr(2), BallsInBins(1, 1000))
    table = LineMoments(truncate(gram, 2), 1000)
    order = table.largest_order
    assert order >= 80
    values = table.log_moments(0.45, order)
    np.testing.assert_allclose(values, oracles.log_moments_banded(gram / 0.45**2, 2, order), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sigma", EXTREME)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_thousand_bins_between_simple_bounds(p, sigma):
    """E[A^m] lies between its largest terms and the Gaussian mechanism with the largest entry of G."""
    gram = gram_matrix(strategies.bsr(p), BallsInBins(1, 1000))
    table = LineMoments(truncate(gram, p), 1000)
    order = {2: 83, 3: 40, 4: 20}[p]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = table.log_moments(sigma, order)
    m = np.arange(order + 1)
    pairs = gram.max() / sigma**2 * m * (m - 1) / 2
    assert np.all(np.isfinite(values))
    assert np.all(values <= pairs * (1 + 1e-12) + 1e-9)
    # All counts on one of the 990 indices in the middle, whose entries are the largest.
    least = (pairs + math.log(990) - m * math.log(1000))[1:]
    assert np.all(values[1:] >= least - 1e-9 * (1 + pairs[1:]))
    assert np.all(np.diff(values, 2) >= -1e-9 * (1 + values[2:]))  # log-moments are convex in the order


@pytest.mark.parametrize("sigma", [1e-3, 1e-2, 0.1, 0.4, 1.0, 30.0, 1e3, 1e6])
def test_a_thousand_orders_for_dpsgd(sigma):
    """p = 1, α ≤ 1000, b = 1000 against 50-digit arithmetic."""
    gram = gram_matrix(strategies.dpsgd(), BallsInBins(1, 1000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = UncorrelatedMoments(truncate(gram, 1), 1000).log_moments(sigma, 1000)
    expected = np.array(oracles.log_moments_of_equal_independent(1 / sigma**2, 1000, 1000))
    np.testing.assert_allclose(values, expected, rtol=1e-10, atol=1e-7)
    assert np.all(values >= expected * (1 - 1e-15))


@pytest.mark.parametrize("sigma", [0.1, 1.0, 10.0])
def test_unequal_independent_bins(sigma):
    """A cut-off epoch: two values on the diagonal."""
    gram = gram_matrix(strategies.dpsgd(), BallsInBins(3, 4, 10))
    values = UncorrelatedMoments(truncate(gram, 1), 4).log_moments(sigma, 30)
    for order in (2, 5, 17, 30):
        expected = oracles.log_moment(oracles.rational(gram), sigma, order)
        assert float(values[order]) == pytest.approx(float(expected), rel=1e-11, abs=1e-11)
        assert Decimal(float(values[order])) >= expected


@pytest.mark.parametrize("sigma", [1e-60, 1e-3, 1e-2, 1e3, 1e6, 1e60])
@pytest.mark.parametrize("label", ["one bin", "dpsgd k=1", "bsr3 k=1", "bsr3 k=2, b=2p", "bisr2 k=1"])
def test_extreme_noise_multipliers(label, sigma):
    """No crash, no NaN, no warning; bounds that are trivially right at both ends."""
    accountant = Renyi(work_budget=1e5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for direction in DIRECTIONS:
            at = {"noise_multiplier": sigma, "accountant": accountant, "direction": direction}
            delta = dpmf.delta(mechanism(label), epsilon=1.0, **at).delta
            epsilon = dpmf.epsilon(mechanism(label), delta=1e-5, **at).epsilon
            assert 0 < delta <= 1  # every δ is positive, even one below the smallest double
            if sigma < 1:
                assert delta == 1
                assert 0.2 / sigma**2 < epsilon < 20 / sigma**2
            else:
                assert delta < 1e-30
                assert 0 <= epsilon < 0.1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sigma", [1e-300, 1e-170, 1e-160, 1e-154, 1e155, 1e200])
@pytest.mark.parametrize("label", ["dpsgd k=1", "bsr3 k=2, b=2p"])
def test_beyond_double_range(label, sigma, direction):
    """σ² does not fit a double: a right answer, or one line that names the argument."""
    at = {"noise_multiplier": sigma, "accountant": Renyi(work_budget=1e5), "direction": direction}
    message = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            delta = dpmf.delta(mechanism(label), epsilon=1.0, **at).delta
            epsilon = dpmf.epsilon(mechanism(label), delta=1e-5, **at).epsilon
        except ValueError as error:
            message = str(error)
    if message:
        assert "noise_multiplier" in message
        assert "\n" not in message
    else:
        assert delta == 1 if sigma < 1 else 0 < delta < 1e-30
        assert epsilon > 1e300 if sigma < 1 else 0 <= epsilon < 0.1


# --- the accountant as a whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("label", ["dpsgd k=3", "bsr2 k=1", "bsr3 k=2, b=2p", "bisr2 k=1", "random k=2"])
def test_epsilon_and_delta_are_inverse(label, direction):
    checked = mechanism(label)
    for sigma, delta in itertools.product((0.7, 3.0), (1e-3, 1e-7)):
        at = {"noise_multiplier": sigma, "direction": direction, "accountant": Renyi(work_budget=1e7)}
        epsilon = dpmf.epsilon(checked, delta=delta, **at).epsilon
        assert dpmf.delta(checked, epsilon=epsilon, **at).delta <= delta * (1 + 1e-9)
        assert dpmf.delta(checked, epsilon=epsilon * (1 - 1e-3), **at).delta > delta


@pytest.mark.parametrize(
    ("strategy", "k", "b"), [(strategies.bsr(3), 1, 20), (strategies.bsr(3), 3, 20), (strategies.bisr(2), 2, 16)]
)
def test_answers_do_not_depend_on_the_questions_before(strategy, k, b):
    """A prepared accountant may remember, but δ(σ, ε) is one number: the same fresh, in a profile, in any order."""
    checked = Mechanism(strategy, BallsInBins(k, b))
    accountant = Renyi(work_budget=1e7)
    questions = list(itertools.product((0.8, 2.0, 6.0), (0.1, 0.5, 1.0, 3.0, 9.0)))
    fresh = {q: accountant.prepare(checked).delta(*q, "remove").value for q in questions}
    for arrangement in (questions, questions[::-1]):
        prepared = accountant.prepare(checked)
        for q in arrangement:
            assert prepared.delta(*q, "remove").value == pytest.approx(fresh[q], rel=1e-9)


@pytest.mark.parametrize("label", ["dpsgd k=3", "bsr3 k=1", "bsr3 k=2, b=2p", "bisr2 k=1"])
def test_profile_is_delta_at_every_point(label):
    checked, accountant = mechanism(label), Renyi(work_budget=1e7)
    grid = [0.0, 0.3, 1.0, 2.5, 7.0]
    for direction in DIRECTIONS:
        profile = dpmf.profile(checked, noise_multiplier=1.4, epsilons=grid, accountant=accountant, direction=direction)
        np.testing.assert_array_equal(profile.epsilons, grid)
        for epsilon, found in zip(grid, profile.by_direction[direction], strict=True):
            alone = dpmf.delta(
                checked, noise_multiplier=1.4, epsilon=epsilon, accountant=accountant, direction=direction
            )
            assert found == pytest.approx(alone.delta, rel=1e-9)
        assert np.all(np.diff(profile.deltas) <= 0)


@pytest.mark.parametrize("label", ["dpsgd k=3", "bsr3 k=1", "bsr3 k=2, b=2p", "random k=2"])
def test_more_orders_never_hurt(label):
    checked = mechanism(label)
    # Its own bound of adding a record: `dpmf.delta` would answer with that of removing one where it is smaller.
    deltas = [Renyi(max_order=order).prepare(checked).delta(2.0, 1.0, "add").value for order in (2, 3, 5, 9, 14)]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(deltas))
    assert deltas[-1] < deltas[0]


def test_add_is_the_closed_form_at_the_best_real_order():
    checked = mechanism("random k=2")
    gram = np.array([[float(x) for x in row] for row in exact_gram("random k=2")])
    b, sigma, epsilon = len(gram), 3.0, 1.5
    constant, slope = np.trace(gram) / (2 * b), gram.sum() / (2 * b * b)
    orders = 1 + np.geomspace(1e-4, 1e5, 400_000)
    divergence = (constant + (orders - 1) * slope) / sigma**2
    best = np.min((orders - 1) * (divergence - epsilon) + log_conversion_factor(orders))
    found = dpmf.delta(checked, noise_multiplier=sigma, epsilon=epsilon, direction="add", accountant="renyi")
    assert found.delta == pytest.approx(math.exp(best), rel=1e-6)
    assert found.delta >= math.exp(best) * (1 - 1e-9)


def test_details_say_how_the_bound_came_about():
    found = dpmf.delta(mechanism("bsr3 k=1"), noise_multiplier=1.0, epsilon=4.0, accountant="renyi")
    assert found.accountant == "renyi"
    assert set(found.details) == {"remove", "add"}
    remove = found.details["remove"]
    assert remove == {"value": remove["value"], "order": 5, "bandwidth": 3, "exact": True}
    assert found.delta == max(found.details[d]["value"] for d in DIRECTIONS)
    assert found.details[found.binding]["value"] == found.delta


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_order": 1}, "max_order"),
        ({"max_order": 0}, "max_order"),
        ({"max_order": -5}, "max_order"),
        ({"max_order": 2.5}, "max_order"),
        ({"max_order": math.nan}, "max_order"),
        ({"max_order": True}, "max_order"),
        ({"max_order": "8"}, "max_order"),
        ({"work_budget": 0}, "work_budget"),
        ({"work_budget": -1.0}, "work_budget"),
        ({"work_budget": math.nan}, "work_budget"),
        ({"work_budget": math.inf}, "work_budget"),
        ({"work_budget": "fast"}, "work_budget"),
        ({"bandwidth": 0}, "bandwidth"),
        ({"bandwidth": 1.5}, "bandwidth"),
        ({"bandwidth": False}, "bandwidth"),
    ],
)
def test_bad_options(options, name):
    with pytest.raises(ValueError, match=f"^{name} must be") as caught:
        Renyi(**options)
    assert "\n" not in str(caught.value)
