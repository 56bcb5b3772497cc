"""Computations repeated in ball arithmetic: bounds in double precision lie above the upper end of the ball.

What is repeated is the very computation, grid by grid, so that the slack of a discretisation hides no rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from balls import cdf, density
from flint import arb, arb_poly, ctx
from scipy.special import erfcx, log_ndtr, ndtr

from dpmf import strategies
from dpmf.accountants import Cascade, Gaussian, Lattice
from dpmf.accountants.cascade import _tree_law
from dpmf.accountants.cascade._payoffs import Majorant, SmoothedCall, cubic_bound
from dpmf.accountants.cascade._tree import Tree, levels_of
from dpmf.accountants.cascade._tree_law import Fineness, GridLaw, Measure, TreeMoments
from dpmf.accountants.lattice import lognormal_sum
from dpmf.accountants.lattice._weights import position_error
from dpmf.accountants.lattice.lognormal_sum import LognormalSum
from dpmf.accountants.renyi import orders
from dpmf.batching import BallsInBins
from dpmf.loss.gaussian import gaussian_delta, gaussian_loss_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import FLOOR


@pytest.fixture(autouse=True)
def many_digits() -> Iterator[None]:
    before = ctx.prec
    ctx.prec = 400
    yield
    ctx.prec = before


def loss_delta(mean: arb, variance: arb, epsilon: float) -> arb:
    """E(1 − e^(ε − Y))_+ for Y ~ N(mean, variance)."""
    s = variance.sqrt()
    y = (arb(epsilon) - mean) / s
    return cdf(-y) - (s * (y + s / 2)).exp() * cdf(-y - s)


def call(variance: arb, strike: arb) -> arb:
    """E(a − K)_+ for a log-normal a of mean 1."""
    root = variance.sqrt()
    d = (-strike.log() + variance / 2) / root
    return cdf(d) - strike * cdf(d - root)


def certainly(larger: float, smaller: arb) -> bool:
    return bool(arb(larger) >= smaller)


# --- assumptions -----------------------------------------------------------------------------------------------------


def test_assumptions_about_special_functions() -> None:
    ctx.prec = 200
    for x in np.linspace(-37.4, 37.4, 1501).tolist():
        assert abs(arb(float(ndtr(x))) / cdf(arb(x)) - 1) < (8 * 2.0**-53 * (1 + x * x) if x < 0 else 1e-14)
        assert abs(arb(float(log_ndtr(x))) - cdf(arb(x)).log()) < 32 * 2.0**-53 * (1 + x * x)
        if x > 0:
            assert abs(arb(float(erfcx(x))) / ((arb(x) ** 2).exp() * arb(x).erfc()) - 1) < 1e-14


# --- Gaussian closed forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_gaussian_accountant(b: int, direction: str) -> None:
    mechanism = Mechanism(strategies.bsr(2), BallsInBins(2, b))
    matrix = mechanism.strategy.matrix(2 * b)
    means = [[sum((arb(matrix[n, i + j * b]) for j in range(2)), arb(0)) for n in range(2 * b)] for i in range(b)]
    gram = [[sum((x * y for x, y in zip(m, n, strict=True)), arb(0)) for n in means] for m in means]
    prepared = Gaussian().prepare(mechanism)
    least = 1.0
    for sigma in (0.3, 0.7, 2.0, 30.0):
        square = arb(sigma) ** 2
        largest = max((gram[i][i] for i in range(b)), key=lambda x: float(x.mid())) / square
        mean = sum((gram[i][i] for i in range(b)), arb(0)) / (2 * b) / square
        variance = sum((x for row in gram for x in row), arb(0)) / b**2 / square
        for epsilon in (0.0, 0.3, 1.0, 4.0, 8.0, 12.0):
            exact = loss_delta(*((largest / 2, largest) if direction == "remove" else (mean, variance)), epsilon)
            if exact > 1e-200:
                found = prepared.delta(sigma, epsilon, direction).value
                assert certainly(found, exact)
                assert found <= float(exact.mid()) * (1 + 1e-9)
                least = min(least, found)
    assert least < 1e-14


@pytest.mark.parametrize("seed", range(4))
def test_gaussian_closed_forms_on_both_sides(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        mu, position = float(10 ** rng.uniform(-8, 3)), float(rng.uniform(-10, 36))
        epsilon = mu * (position + mu / 2)
        exact = loss_delta(arb(mu) ** 2 / 2, arb(mu) ** 2, epsilon)
        assert certainly(gaussian_delta(mu, epsilon), exact)
        assert arb(gaussian_delta(mu, epsilon, "lower")) <= exact
        mean = float(10 ** rng.uniform(-6, 3))
        exact = loss_delta(arb(mean), arb(mu), mean + math.sqrt(mu) * position)
        assert certainly(gaussian_loss_delta(mean, mu, mean + math.sqrt(mu) * position), exact)


# --- the lattice ----------------------------------------------------------------------------------------------------


def hats(s: float, step: float, first: int, last: int) -> list[arb]:
    """Exact weights: a is cut to [h·first, h·last] and spread onto the nodes, which is a second difference of calls."""
    h, variance = arb(step), arb(s)
    # E(min(max(a, h·first), h·last) − h·j)_+ for the nodes j = first − 1, ..., last + 1.
    top = call(variance, h * last)
    values = [
        (call(variance, h * j) if j > first else call(variance, h * max(first, 1)) if first else arb(1)) - top
        for j in range(first, last + 1)
    ]
    slopes = [(values[k + 1] - values[k]) / h for k in range(last - first)]
    slopes[0] = slopes[0] if first else (values[1] - values[0]) / h
    return [slopes[0] + 1, *(y - x for x, y in pairwise(slopes)), -slopes[-1]]


def lattice_in_balls(law: LognormalSum, grid: lognormal_sum.Grid) -> arb:
    """The option on the spread sum, by exact convolution, and what was cut off."""
    slip = position_error(float(law.variances.max()), grid.step, grid.last)
    step = grid.step * (1 - grid.sign * slip)  # as `_from_above` has it
    product, cut = arb_poly([1]), arb(0)
    for s, count in zip(law.variances.tolist(), law.counts.tolist(), strict=True):
        product *= arb_poly(hats(s, step, grid.first, grid.last)) ** count
        if grid.sign > 0:
            cut += count * call(arb(s), arb(step) * grid.last)
        elif grid.first:
            z = ((arb(step) * grid.first).log() + arb(s) / 2) / arb(s).sqrt()
            cut += count * cdf(z) * step * grid.strike_index
    distance = grid.strike_index - law.total * grid.first
    payoffs = (
        grid.sign * (k - distance) * step * weight
        for k, weight in enumerate(product.coeffs())
        if grid.sign * (k - distance) > 0
    )
    return sum(payoffs, arb(0)) + cut


@pytest.mark.parametrize(
    ("variances", "counts", "strikes"),
    [
        ([1.0], [2], [2.5, 12.0, 400.0]),
        ([0.04], [3], [3.1, 4.5, 9.0]),
        ([0.3, 2.0], [2, 1], [3.5, 40.0]),
        ([1.0], [3], [0.9, 0.2, 0.02]),
        ([0.01], [2], [1.7, 1.05]),
    ],
)
def test_the_lattice(
    variances: list[float], counts: list[int], strikes: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    law = LognormalSum.make(np.array(variances), np.array(counts), side="upper", loss=0.01, max_points=2**12)
    assert law is not None
    chosen: list[lognormal_sum.Grid] = []

    def noted(*arguments: object, **options: object) -> object:
        chosen.append(choose(*arguments, **options))
        return chosen[-1]

    choose = lognormal_sum.choose
    monkeypatch.setattr(lognormal_sum, "choose", noted)
    for strike in strikes:
        found = law.option("call" if strike > sum(counts) else "put", strike).value
        exact = lattice_in_balls(law, chosen[-1])
        assert certainly(found, exact)
        assert found <= float(exact.mid()) * (1 + 1e-3)  # the folding costs something


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_lattice_down_to_small_deltas(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, 3))
    prepared = Lattice(discretisation_loss=0.02).prepare(mechanism)
    least = 1.0
    chosen: list[tuple[LognormalSum, lognormal_sum.Grid]] = []
    original = LognormalSum._from_above

    def noted(self: LognormalSum, grid: lognormal_sum.Grid) -> float:
        chosen.append((self, grid))
        return original(self, grid)

    monkeypatch.setattr(LognormalSum, "_from_above", noted)
    for sigma, epsilon in ((1.0, 0.5), (1.0, 2.0), (1.0, 5.0), (2.0, 3.4), (2.0, 1.0)):
        found = prepared.delta(sigma, epsilon, direction).value
        scale = arb(1) / 3 if direction == "remove" else arb(epsilon).exp() / 3
        exact = lattice_in_balls(*chosen[-1]) * scale
        assert certainly(found, exact)
        least = min(least, found)
    assert least < 1e-14


# --- the cascade ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BallLaw:
    """What a `GridLaw` stands for, without any rounding: weights of the nodes first, first + 1, ..., of 0, the rest."""

    step: float
    first: int
    weights: list[arb]
    zero: arb
    rest: list[arb]

    def node(self, k: int) -> arb:
        return (arb(self.step) * k).exp()

    def moments(self) -> list[arb]:
        found = [
            sum((w * self.node(self.first + k) ** j for k, w in enumerate(self.weights)), arb(0)) for j in range(4)
        ]
        return [found[0] + self.zero, *found[1:]]

    def refined(self, factor: int) -> BallLaw:
        weights = [arb(0)] * ((len(self.weights) - 1) * factor + 1)
        weights[::factor] = self.weights
        return BallLaw(self.step / factor, self.first * factor, weights, self.zero, self.rest)

    def plus(self, other: BallLaw) -> BallLaw:
        out: dict[int, arb] = {}

        def add(place: int, weight: arb) -> None:
            out[place] = out.get(place, arb(0)) + weight

        places: dict[int, tuple[int, arb]] = {}
        for i, x in enumerate(self.weights, self.first):
            for j, y in enumerate(other.weights, other.first):
                if abs(i - j) not in places:
                    excess = (1 + (arb(self.step) * -abs(i - j)).exp()).log() / self.step
                    up = math.floor(float(excess.mid()))
                    place = arb(self.step) * up
                    share = ((arb(self.step) * -abs(i - j)).exp() - place.expm1()) / (
                        place.exp() * arb(self.step).expm1()
                    )
                    places[abs(i - j)] = up, share
                up, share = places[abs(i - j)]
                add(max(i, j) + up, x * y * (1 - share))
                add(max(i, j) + up + 1, x * y * share)
        for i, x in enumerate(self.weights, self.first):
            add(i, x * other.zero)
        for j, y in enumerate(other.weights, other.first):
            add(j, y * self.zero)
        mine, theirs = self.moments(), other.moments()
        rest = [
            sum(
                (
                    math.comb(j, i) * (theirs[j - i] * self.rest[i] + other.rest[j - i] * (mine[i] + self.rest[i]))
                    for i in range(j + 1)
                ),
                arb(0),
            )
            for j in range(4)
        ]
        first = min(out)
        weights = [out.get(k, arb(0)) for k in range(first, max(out) + 1)]
        return BallLaw(self.step, first, weights, self.zero * other.zero, rest)

    def times(self, factor: BallLaw) -> BallLaw:
        mine, theirs = self.moments(), factor.moments()
        rest = [theirs[j] * self.rest[j] + factor.rest[j] * (mine[j] + self.rest[j]) for j in range(4)]
        zero = self.zero * theirs[0] + (mine[0] - self.zero) * factor.zero
        product = arb_poly(self.weights) * arb_poly(factor.weights)
        weights = [*product.coeffs(), *[arb(0)] * (len(self.weights) + len(factor.weights))]
        weights = weights[: len(self.weights) + len(factor.weights) - 1]
        return BallLaw(self.step, self.first + factor.first, weights, zero, rest)

    def kept(self, first: int, length: int) -> BallLaw:
        """Trimmed to so many nodes."""
        begin = first - self.first
        gone = [(self.first + k, w) for k, w in enumerate(self.weights) if k >= begin + length]
        low = [(self.first + k, w) for k, w in enumerate(self.weights) if k < begin]
        shares = [(w, self.node(k) / self.node(first)) for k, w in low]
        weights = list(self.weights[begin : begin + length])
        weights[0] += sum((w * share for w, share in shares), arb(0))
        zero = self.zero + sum((w * (1 - share) for w, share in shares), arb(0))
        rest = [self.rest[j] + sum((w * self.node(k) ** j for k, w in gone), arb(0)) for j in range(4)]
        return BallLaw(self.step, first, weights, zero, rest)

    @classmethod
    def lognormal(cls, variance: float, step: float, first: int, length: int) -> BallLaw:
        """Hat weights on these nodes and 0, as second differences of calls; moments beyond in closed form."""
        v, root = arb(variance), arb(variance).sqrt()
        nodes = [arb(0), *((arb(step) * k).exp() for k in range(first, first + length))]
        last = (nodes[-1].log() + v / 2) / root
        rest = [(v * j * (j - 1) / 2).exp() * cdf(j * root - last) for j in range(4)]
        # E(X − K; X below the last node)_+.
        values = [arb(1) - rest[1]]
        values += [call(v, node) - (rest[1] - node * rest[0]) for node in nodes[1:]]
        slopes = [(values[k + 1] - values[k]) / (nodes[k + 1] - nodes[k]) for k in range(length)]
        weights = [y - x for x, y in zip(slopes, [*slopes[1:], arb(0)], strict=True)]
        return cls(step, first, weights, 1 - rest[0] + slopes[0], rest)


class Twins:
    """Repeats every operation on grid laws in balls, with the same grids and cuts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._known: list[tuple[GridLaw, BallLaw]] = []
        plus, times, trimmed, refined = GridLaw.plus, GridLaw.times, GridLaw.trimmed, GridLaw.refined
        lognormal, one = _tree_law.lognormal, _tree_law.one

        def note(law: GridLaw, twin: BallLaw) -> GridLaw:
            law = replace(law)  # an object of its own
            self._known.append((law, twin))
            return law

        def new_lognormal(variance: float, step: float, spare: float, most: int) -> GridLaw:
            law = lognormal(variance, step, spare, most)
            return note(law, BallLaw.lognormal(variance, step, law.first, len(law.weights)))

        monkeypatch.setattr(GridLaw, "plus", lambda x, y: note(plus(x, y), self.of(x).plus(self.of(y))))
        monkeypatch.setattr(GridLaw, "times", lambda x, y: note(times(x, y), self.of(x).times(self.of(y))))
        monkeypatch.setattr(GridLaw, "refined", lambda x, n: note(refined(x, n), self.of(x).refined(n)))
        monkeypatch.setattr(
            GridLaw,
            "trimmed",
            lambda x, *a: note(y := trimmed(x, *a), self.of(x).kept(y.first, len(y.weights))),
        )
        monkeypatch.setattr(_tree_law, "lognormal", new_lognormal)
        monkeypatch.setattr(
            _tree_law, "one", lambda step: note(one(step), BallLaw(step, 0, [arb(1)], arb(0), [arb(0)] * 4))
        )

    def of(self, law: GridLaw) -> BallLaw:
        return next(twin for known, twin in self._known if known is law)


def cubic_in_balls(law: BallLaw, b: int, kappa: float, gamma: float) -> arb:
    total, shift = law.zero * max(-kappa, 0.0) ** 3, arb(max(-kappa, 0.0))
    for k, weight in enumerate(law.weights, law.first):
        width = law.node(k) / b - kappa
        if width > 0:
            total += weight * width**3
    total += sum((math.comb(3, j) * shift ** (3 - j) * law.rest[j] / arb(b) ** j for j in range(4)), arb(0))
    return total * 4 / 27 / (arb(gamma) - kappa) ** 2


@pytest.mark.parametrize("spare", [1e-20, 1e-4])
@pytest.mark.parametrize(
    ("b", "weights"), [(1, [0.3]), (2, [0.2, 0.4]), (3, [0.0, 0.5]), (3, [2.0, 1.0]), (4, [0.01, 0.02, 0.03])]
)
def test_the_law_of_a_tree(b: int, weights: list[float], spare: float, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(monkeypatch)
    levels = levels_of(b, 2)
    tree = Tree(b, 2, tuple(levels), np.resize(weights, len(levels)))
    law = _tree_law.tree_law(tree, Fineness(0.1, spare))
    twin = twins.of(law)
    assert 0 < law.error < 1e-9
    assert 0 < law.slip < 1e-11
    measure = Measure.average([law], b)
    for epsilon in (0.1, 1.0, 3.0, 6.0):
        gamma = math.exp(epsilon)
        found = cubic_bound(measure, gamma)
        exact = cubic_in_balls(twin, b, found.start, gamma)
        assert certainly(found.value, exact)
        assert found.value <= float(exact.mid()) * (1 + 1e-9) + 1e-200
    # Weights and moments, one by one, are not below the exact ones beyond the error that the law carries.
    assert len(twin.weights) == len(law.weights)
    for found, exact in zip([*law.rest, law.zero], [*twin.rest, twin.zero], strict=True):
        assert certainly(float(found) * (1 + law.error + 8 * law.slip) + 1e-280, exact)


def test_a_cascade_down_to_small_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """One index per level: the accountant's own bound, repeated with the threshold that it chose."""
    twins = Twins(monkeypatch)
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, 2))
    laws: list[GridLaw] = []
    original = Measure.average.__func__  # type: ignore[attr-defined]

    def noted(cls: type[Measure], found: Sequence[GridLaw], b: int) -> Measure:
        laws[:] = found
        return original(cls, found, b)

    monkeypatch.setattr(Measure, "average", classmethod(noted))
    prepared = Cascade(discretisation_loss=0.2).prepare(mechanism)
    bound = prepared.bounds()[0]
    least = 1.0
    for sigma, epsilon in ((1.0, 0.5), (1.0, 2.0), (2.0, 2.0), (2.0, 3.3)):
        found = bound.delta(sigma, epsilon, "remove", 1e-14)
        if "threshold" not in found.details:
            continue
        exact = cubic_in_balls(twins.of(laws[0]), 2, found.details["threshold"], 1.0)
        kappa = found.details["threshold"]
        exact = exact * (1 - arb(kappa)) ** 2 / (arb(epsilon).exp() - kappa) ** 2
        assert certainly(found.value, exact)
        least = min(least, found.value)
    assert least < 1e-14


@pytest.mark.parametrize("variance", [3e-12, 1e-8, 1e-4, 0.1, 2.0])
@pytest.mark.parametrize("gamma", [1.0, 1.3, 20.0])
def test_payoffs_above_smoothed_calls(gamma: float, variance: float) -> None:
    """Not below those of the lemma, but for underflow: without bounds on their errors they were, for small τ."""
    smooth = SmoothedCall(gamma, variance)
    v, g = arb(variance), arb(gamma)
    root = v.sqrt()

    def f(a: arb) -> arb:
        d = ((a / g).log() + v / 2) / root
        return a * cdf(d) - g * cdf(d - root)

    for share in (1.0, 1 - 0.3 * math.sqrt(variance), 0.9):
        start = smooth.inflection() * share
        payoff = Majorant.of(smooth, start)
        a = arb(start)
        d = ((a / g).log() + v / 2) / root
        second = density(d) / (a * root)
        third = -second / a * (1 + d / root)
        exact = [f(a), cdf(d), second / 2]
        for found, wanted in zip(payoff.coefficients, exact, strict=False):
            assert certainly(float(found) + FLOOR, wanted)
        assert certainly(float(payoff.coefficients[3]), third / 6)
        for t in np.geomspace(1e-6, 50, 60).tolist():
            polynomial = exact[0] + exact[1] * t + exact[2] * arb(t) ** 2
            assert certainly(float(payoff.coefficients[3]), (f(a + t) - polynomial) / arb(t) ** 3)
        below = start * np.array([1e-3, 0.5, 0.9, 0.999, 1.0])
        for x, value in zip(below.tolist(), payoff(below).tolist(), strict=True):
            assert certainly(value + FLOOR, f(arb(x)))


# --- Rényi moments --------------------------------------------------------------------------------------------------


def converted(order: float, moment: float, epsilon: float) -> arb:
    alpha = arb(order)
    return arb(moment) - (alpha - 1) * epsilon + alpha * (1 - 1 / alpha).log() - (alpha - 1).log()


@pytest.mark.parametrize("seed", range(3))
def test_the_exponent_of_the_conversion(seed: int) -> None:
    """Without a bound on its error about half of these were too small."""
    rng = np.random.default_rng(seed)
    log_delta: Callable[[float], orders.Score] = orders._log_delta
    for _ in range(300):
        order = 1 + float(10 ** rng.uniform(-5, 9)) if rng.random() < 0.5 else float(rng.integers(2, 2000))
        moment, epsilon = float(10 ** rng.uniform(-3, 5)), float(10 ** rng.uniform(-3, 3))
        exact = converted(order, moment, epsilon)
        assert certainly(float(log_delta(epsilon)(order, moment)), exact)
        delta = float(10 ** rng.uniform(-14, -1))
        enough = (converted(order, moment, 0.0) - arb(delta).log()) / (arb(order) - 1)
        assert certainly(float(orders._epsilon(delta)(order, moment)) * (1 + 2.0**-50), enough)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("b", [1, 2, 3, 7])
def test_power_series(b: int, sigma: float) -> None:
    """Moments of a tree, whose series are multiplied in balls."""
    levels = levels_of(b, 2)
    tree = Tree(b, 2, tuple(levels), np.resize([0.3, 0.2, 0.7], len(levels)))
    order = 40
    found = TreeMoments(tree).log_moments(sigma, order)
    below = {1: arb_poly([1 / arb.fac_ui(m) for m in range(order + 1)])}
    for number, level in reversed(list(enumerate(levels))):
        weight = arb(float(tree.weights[number])) / arb(sigma) ** 2
        above = {}
        for size, _ in level.sizes():
            product = arb_poly([1])
            for part in tree.parts(number, size):
                product *= below[part]
            coefficients = product.coeffs()[: order + 1]
            above[size] = arb_poly([(weight * (m * (m - 1) // 2)).exp() * c for m, c in enumerate(coefficients)])
        below = above
    for m in range(2, order + 1):
        exact = (below[b][m] * arb.fac_ui(m) / arb(b) ** m).log()
        assert certainly(float(found[m]), exact)
        assert found[m] <= float(exact.mid()) * (1 + 1e-10) + 1e-11
