"""The chain's computation repeated in ball arithmetic: bounds in double precision lie above the upper end of the ball.

What is repeated is the very computation (the same nodes, tables, tilt, frequencies and smoothing), so that the slack of
the discretisation hides no rounding error. Balls of 300 bits are as good as exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from balls import cdf, density
from flint import acb, acb_mat, arb, arb_mat, ctx

from dpmf import strategies
from dpmf.accountants.chain import _inversion, _spreads
from dpmf.accountants.chain._blocks import SeparatorModel
from dpmf.accountants.chain._bound import ChainBound
from dpmf.accountants.chain._lines import LineModel, StationaryModel
from dpmf.batching import BallsInBins
from dpmf.kernels.chain import block_transforms, multiply_terms, trace_of_power
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT

Terms = list[list[acb]]  # class of nugget × row


@pytest.fixture(autouse=True)
def many_digits() -> Iterator[None]:
    before = ctx.prec
    ctx.prec = 300
    yield
    ctx.prec = before


@pytest.fixture(autouse=True)
def whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins take whole steps; what cutting long jumps short does is tested beside the other parts of the chain."""
    monkeypatch.setattr(_spreads, "_TUNING", replace(_spreads._TUNING, cut=1e-300, moved=1e-300))


def spread(nodes: Sequence[float], mean: arb, deviation: arb, slope: float) -> tuple[list[arb], arb]:
    """The exact weights of N(mean, deviation²) on nodes, and the weight left at −∞."""
    places = [arb(x) for x in nodes]
    z = [(x - mean) / deviation for x in places]
    below = [cdf(one) for one in z]
    s = arb(slope)
    gain = (s * mean + (s * deviation) ** 2 / 2).exp()
    tilted = [gain * cdf(one - s * deviation) for one in z]  # E[e^(slope·X); X < node]
    weights = [arb(0) for _ in nodes]
    for j in range(len(nodes) - 1):
        p, q = places[j], places[j + 1]
        mass = below[j + 1] - below[j]
        if slope == 0:
            first = mean * mass + deviation * (density(z[j]) - density(z[j + 1]))
            upper = (first - p * mass) / (q - p)
        else:
            upper = (tilted[j + 1] - tilted[j] - (s * p).exp() * mass) / ((s * q).exp() - (s * p).exp())
        weights[j] += mass - upper
        weights[j + 1] += upper
    weights[-1] += cdf(-z[-1])
    if slope == 0:
        weights[0] += below[0]
        return weights, arb(0)
    kept = tilted[0] / (s * places[0]).exp()
    weights[0] += kept
    return weights, below[0]  # the bound does not take off what is on the first node


class Table:
    """The exact twin of a `TermTable`, for an exact strike."""

    def __init__(self, table: _spreads.TermTable, nuggets: Sequence[float], strike: arb, terms: int) -> None:
        self.step, self.first, self.count = table._step, table._first, table._count
        self.strike, self.shift = strike, strike / terms
        self.nuggets = []
        for variance in nuggets:
            if variance == 0:
                self.nuggets.append(([arb(1)], 0, arb(0), arb(0)))
                continue
            root = max(math.sqrt(variance), self.step / _spreads._TUNING.narrowest)
            half = math.ceil((_spreads._TUNING.nugget_reach * root + root**2) / self.step) + 1
            exact = arb(root)
            nodes = [self.step * m for m in range(-half, half + 1)]
            weights, left = spread(nodes, -exact * exact / 2, exact, 1.0)
            self.nuggets.append((weights, half, left, cdf(exact / 2 - arb(nodes[-1]) / exact)))

    def value(self, row: int) -> arb:
        return (arb(self.step) * (self.first + row)).exp()

    def rows(self, function: Callable[[arb], object], zero: object) -> list[list]:
        """For each class: the mean of a function of a = min(e^y·N, K), on a = 0 and on every row of the table."""
        found = []
        for weights, half, left, _ in self.nuggets:
            values = [function(self.value(row)) for row in range(-half, self.count + half)]
            rows = [
                left * zero + sum((w * v for w, v in zip(weights, values[r:], strict=False)), arb(0))
                for r in range(self.count)
            ]
            found.append([zero, *rows])
        return found

    def transforms(self, s: acb) -> Terms:
        def cut(a: arb) -> arb:
            return a if a < self.strike else self.strike

        return self.rows(lambda a: (s * (cut(a) - self.shift)).exp(), (-s * self.shift).exp())

    def excess(self) -> list[list[arb]]:
        """E(a − K)_+ on every row, and what the nugget's grid leaves out."""
        found = self.rows(lambda a: a - self.strike if a > self.strike else arb(0), arb(0))
        for (_, _, _, tail), rows in zip(self.nuggets, found, strict=True):
            for row in range(self.count):
                rows[row + 1] += tail * self.value(row)
        return found

    def locate(self, y: arb) -> tuple[int, arb, arb]:
        """Row, share of the next one, and how much of e^y is above the table."""
        low, high = arb(self.step) * self.first, arb(self.step) * (self.first + self.count - 1)
        if y < low:
            return 0, (y - low).exp(), arb(0)
        if y >= high:
            return self.count - 1, arb(1), y.exp() - high.exp()
        row = int(float(((y - low) / self.step).floor().mid()))
        lower, upper = self.value(row), self.value(row + 1)
        return row + 1, (y.exp() - lower) / (upper - lower), arb(0)


def mean_of(load: arb, nodes: Sequence[float], weights: list[arb]) -> arb:
    """E e^(load·z − load²/2) of a spread factor z."""
    values = ((load * arb(x) - load * load / 2).exp() for x in nodes)
    return sum((w * value for w, value in zip(weights, values, strict=True)), arb(0))


def exponent(factors: Iterable[tuple[arb, float]]) -> arb:
    """y = Σ load·factor − Σ load²/2."""
    return sum((load * arb(x) - load * load / 2 for load, x in factors), arb(0))


def interpolated(rows: list, place: tuple[int, arb, arb]) -> object:
    row, share, _ = place
    return (1 - share) * rows[row] + share * rows[row + 1]


class LineTwin:
    """The exact twin of a `LineLaw` or `StationaryLaw`: the same nodes, for an exact strike."""

    def __init__(self, law, model, strike: arb, sign: int) -> None:
        stationary = isinstance(model, StationaryModel)
        walk = law if stationary else law.walk
        n = model.size
        if stationary:
            loads = [arb(model.shared).sqrt() if len(law.static.nodes) > 1 else arb(0)] * n
            deviations = [arb(model.smooth).sqrt()] * n
            correlations = [model.correlation] * (n - 1)
            kinds, nuggets = [0] * n, [model.nugget]
            table, nodes, top = law.table, list(law.nodes), math.sqrt(model.smooth)
        else:
            loads, deviations = [arb(x) for x in model.loads], [arb(x) for x in model.deviations]
            octave = 256.0
            levels = [math.floor(math.log2(1 - r * r) * octave * (1 + 1e-12)) for r in model.correlations]
            correlations = [math.sqrt(max(0.0, 1 - 2.0 ** (level / octave))) for level in levels]
            variances, classes = _spreads.classes_of(model.nuggets)
            kinds, nuggets = classes.tolist(), variances.tolist()
            table, nodes, top = walk.table, list(walk.nodes), float(model.deviations.max())
        self.sign, self.strike, self.n = sign, strike, n
        static = list(law.static.nodes)
        load = max(float(one.mid()) for one in loads)
        self.z, lost_z = (
            spread(static, arb(0), arb(1), 0.0 if sign > 0 else load) if len(static) > 1 else ([arb(1)], arb(0))
        )
        slope = 0.0 if sign > 0 else top
        self.start, lost_x = spread(nodes, arb(0), arb(1), slope)
        self.steps, lost = [], []
        for rho in correlations:
            deviation = (1 - arb(rho) ** 2).sqrt()
            found = [spread(nodes, arb(rho) * arb(x), deviation, slope) for x in nodes]
            self.steps.append(arb_mat([weights for weights, _ in found]))
            lost.append([left for _, left in found])
        self.table = Table(table, nuggets, strike, n)
        self.kinds = kinds
        pairs = list(zip(loads, deviations, strict=True))
        self.places = [
            [[self.table.locate(exponent(((load, z), (own, x)))) for x in nodes] for z in static] for load, own in pairs
        ]
        self.surplus = self._surplus(loads, static, nodes, top, correlations, lost, lost_z + lost_x)

    def _surplus(self, loads, static, nodes, top, correlations, lost, at_start) -> arb:
        law = arb_mat([self.start])
        if self.sign < 0:
            total = at_start
            for step, left in zip(self.steps, lost, strict=True):
                total += sum((law[0, j] * left[j] for j in range(len(left))), arb(0))
                law = law * step
            return total * self.strike
        excess, kappa, last = self.table.excess(), arb(top), arb(nodes[-1])
        means = [mean_of(load, static, self.z) for load in loads]
        total = sum(means, arb(0)) * cdf(kappa - last)
        if len(static) > 1:
            total += sum((cdf(load - arb(static[-1])) for load in loads), arb(0))
        for i in range(self.n):
            for q, weight in enumerate(self.z):
                for j in range(len(nodes)):
                    place = self.places[i][q][j]
                    total += weight * law[0, j] * (interpolated(excess[self.kinds[i]], place) + place[2])
            if i < self.n - 1:
                rho = arb(correlations[i])
                variance = 1 - rho * rho
                for j, x in enumerate(nodes):
                    above = (kappa * rho * arb(x) + kappa**2 * (variance - 1) / 2).exp()
                    above *= cdf((rho * arb(x) + kappa * variance - last) / variance.sqrt())
                    total += sum(means[i + 1 :], arb(0)) * law[0, j] * above
                law = law * self.steps[i]
        return total

    def transform(self, s: acb) -> acb:
        tables = self.table.transforms(s)
        total, nodes = acb(0), len(self.start)
        for q, weight in enumerate(self.z):
            values = [acb(1)] * nodes
            for i in range(self.n - 1, -1, -1):
                rows = tables[self.kinds[i]]
                values = [v * interpolated(rows, self.places[i][q][j]) for j, v in enumerate(values)]
                if i > 0:
                    column = acb_mat(self.steps[i - 1]) * acb_mat([[v] for v in values])
                    values = [column[j, 0] for j in range(nodes)]
            total += weight * sum((w * v for w, v in zip(self.start, values, strict=True)), acb(0))
        return total


class SeparatorTwin:
    """The exact twin of a `SeparatorLaw` on a ring."""

    def __init__(self, law, model, strike: arb, sign: int) -> None:
        self.sign, self.strike, self.model = sign, strike, model
        outer, inner = list(law.outer.nodes), list(law.inner.nodes)
        slope = float(max(model.left.max(), model.right.max())) if sign < 0 else 0.0
        self.outer, lost_outer = spread(outer, arb(0), arb(1), slope)
        self.inner, lost_inner = spread(inner, arb(0), arb(1), float(model.inner.max()) if sign < 0 else 0.0)
        variances, classes = _spreads.classes_of(model.nuggets)
        self.table, self.kinds = Table(law.table, variances.tolist(), strike, model.size), classes.tolist()
        loads = [tuple(arb(v) for v in row) for row in zip(model.left, model.right, model.inner, strict=True)]
        places = [(x, y, z) for x in outer for y in outer for z in inner]
        found = iter([self.table.locate(exponent(zip(row, at, strict=True))) for row in loads] for at in places)
        self.places = [[[next(found) for _ in inner] for _ in outer] for _ in outer]
        if sign < 0:
            self.surplus = ((model.blocks + 1) * lost_outer + model.blocks * lost_inner) * strike
            return
        excess, total = self.table.excess(), arb(0)
        for i, parts in enumerate(loads):
            mean, beyond = arb(1), arb(0)
            factors = ((outer, self.outer), (outer, self.outer), (inner, self.inner))
            for load, (nodes, weights) in zip(parts, factors, strict=True):
                mean *= mean_of(load, nodes, weights)
                beyond += cdf(load - arb(nodes[-1]))
            total += mean * beyond
            for a, wa in enumerate(self.outer):
                for c, wc in enumerate(self.outer):
                    for q, wq in enumerate(self.inner):
                        place = self.places[a][c][q][i]
                        total += wa * wc * wq * (interpolated(excess[self.kinds[i]], place) + place[2])
        self.surplus = total * model.blocks

    def transform(self, s: acb) -> acb:
        tables, n = self.table.transforms(s), len(self.outer)
        matrix = acb_mat(n, n)
        for a in range(n):
            for c in range(n):
                total = acb(0)
                for q, weight in enumerate(self.inner):
                    product = acb(weight)
                    for i, place in enumerate(self.places[a][c][q]):
                        product *= interpolated(tables[self.kinds[i]], place)
                    total += product
                matrix[a, c] = total * self.outer[c]
        power = matrix
        for _ in range(self.model.blocks - 1):
            power = power * matrix
        return sum((power[a, a] for a in range(n)), acb(0))


def option_of(twin, contour, eta: float, count: int, sign: int, route: str) -> arb:
    """The inversion, without any rounding: the sum over frequencies, what is left out of it, and known aliases."""
    theta, h, smoothing = arb(contour.theta), arb(contour.spacing), arb(eta)
    total = arb(0)
    for k in range(count):
        s = acb(theta, h * k)
        term = twin.transform(s * sign) * (smoothing**2 * s * s / 2).exp() / (s * s)
        total += term.real * (h / arb.pi()) / (2 if k == 0 else 1)
    omega = h * count
    first = (smoothing**2 * (theta**2 - omega**2) / 2).exp() / (theta**2 + omega**2)
    moment = twin.transform(acb(theta * sign)).real
    total += h / arb.pi() * moment * first / (1 - (-(smoothing**2) * omega * h).exp())
    if route == "tilted":
        return total
    tiny = arb("1e-40")
    at_zero = twin.transform(acb(0, tiny))
    mass, drift = at_zero.real, at_zero.imag / tiny
    period = 2 * arb.pi() / h
    for m in range(1, _inversion._TUNING.aliases + 1):
        total -= (-theta * period * m).exp() * (mass * m * period + sign * drift)
    return total + drift if route == "parity" else total


LOSS, MOST = 0.2, 128  # of coarse laws with few frequencies, so that the balls take seconds
TIGHT = 1.005
LOADS, DEVIATIONS = np.array([0.35, 0.2, 0.3]), np.array([0.5, 0.4, 0.6])
LINE = LineModel(LOADS, DEVIATIONS, np.array([0.8, 0.5]), np.array([0.04, 0.1, 0.02]))
STATIONARY = StationaryModel(3, 0.05, 0.3, 0.7, 0.1)
SEPARATORS = SeparatorModel(np.array([0.5]), np.array([0.3]), np.array([0.2]), np.array([0.05]), 3, True)
CASES = [
    (LINE, "remove", 1.0, 1.0, "puts"),
    (LINE, "remove", 0.5, 5.0, "tilted"),
    (LINE, "remove", 0.9, 4.0, "calls"),
    (LINE, "remove", 12.0, 0.3, "tilted"),
    (LINE, "add", 1.0, 0.8, "tilted"),
    (LINE, "add", 6.0, 0.64, "tilted"),
    (STATIONARY, "remove", 1.0, 1.0, "puts"),
    (STATIONARY, "remove", 6.0, 0.7, "tilted"),
    (STATIONARY, "remove", 2.5, 1.5, "calls"),
    (STATIONARY, "add", 1.5, 1.0, "tilted"),
    (SEPARATORS, "remove", 2.0, 1.5, "puts"),
    (SEPARATORS, "remove", 12.0, 0.3, "tilted"),
    (SEPARATORS, "add", 6.0, 0.62, "tilted"),
]


@pytest.mark.parametrize(("model", "direction", "sigma", "epsilon", "expected"), CASES)
def test_bounds_are_above_the_same_computation_in_balls(model, direction, sigma, epsilon, expected, monkeypatch):
    totals, laws, routes = [], [], []
    total, law, invert = _inversion._Contour.total, type(model).law, ChainBound._invert

    def recorded_total(self, moments, sign, eta, gap, rounding, deviation):
        found = total(self, moments, sign, eta, gap, rounding, deviation)
        totals.append((float(found[0][0]), self, eta, len(moments), sign))
        return found

    def recorded_law(self, *args):
        laws.append((law(self, *args), self))
        return laws[-1][0]

    def recorded_invert(self, made, tilt, route, *args, **options):
        totals.clear()
        route = replace(route, name="calls") if expected == "calls" else route  # which few bins hardly ever need
        routes.append(route.name)
        return invert(self, made, tilt, route, *args, **options)

    monkeypatch.setattr(_inversion._Contour, "total", recorded_total)
    monkeypatch.setattr(type(model), "law", recorded_law)
    monkeypatch.setattr(ChainBound, "_invert", recorded_invert)
    mechanism = Mechanism(strategies.dpsgd(), BallsInBins(1, model.size))
    bound = ChainBound(mechanism, model, family="model", largest=9.0, discretisation_loss=LOSS, max_frequencies=MOST)
    found = bound.delta(sigma, epsilon, direction)
    assert (found.details["family"], routes[-1]) == ("model", expected)
    _, contour, eta, count, sign = min(totals, key=lambda one: one[0])
    assert found.details["frequencies"] >= count
    made, scaled = laws[-1]
    payoff = 1 if direction == "remove" else -1
    strike = model.size * (payoff * arb(epsilon)).exp()
    twin = (SeparatorTwin if isinstance(model, SeparatorModel) else LineTwin)(made, scaled, strike, payoff)
    route = "parity" if routes[-1] == "puts" and payoff > 0 else routes[-1]
    exact = option_of(twin, contour, eta, count, sign, route) + twin.surplus
    exact *= (arb(epsilon).exp() if payoff < 0 else 1) / arb(model.size)
    assert exact.rad() < 1e-20 * exact.mid()
    assert arb(found.value) > exact
    assert arb(found.value) < exact * TIGHT + arb("1e-17")


def test_chernoff_is_above_its_ball():
    strike, tilts = 3 * arb(0.6).exp(), np.array([2.0, 5.0])
    model = LINE.scaled(0.25)
    law = model.law(float(strike.mid()), 1, _spreads.Resolution().scaled(6.0), 1e-12)
    twin = LineTwin(law, model, arb(law.option.strike), 1)
    for tilt in tilts.tolist():
        exact = twin.transform(acb(tilt)).real / (arb(1).exp() * arb(tilt)) + twin.surplus
        assert exact < arb(_inversion.chernoff(law, np.array([tilt]))) < exact * TIGHT


@pytest.mark.parametrize("sign", [1, -1])
def test_transforms_are_as_close_to_their_balls_as_they_say(sign):
    """|M̂(s) − M(s)| ≤ rounding·M(θ) + 4u|s|·E(|T − K| + 2K)e^(θ(T−K)), at high frequencies, too."""
    model = LINE.scaled(0.8)
    law = model.law(4.0, sign, _spreads.Resolution().scaled(6.0), 1e-9)
    twin = LineTwin(law, model, arb(4.0), sign)
    for theta, omega in ((0.5, 0.0), (0.5, 30.0), (3.0, 400.0)):
        computed = complex(law.transform(np.array([sign * (theta + 1j * omega)]))[0])
        exact = twin.transform(sign * acb(theta, omega))
        real, ahead, behind = (float(twin.transform(acb(sign * t)).real.mid()) for t in (theta, 1.5 * theta, theta / 2))
        deviation = (ahead + behind) / (math.e * theta / 2) + 8.0 * real
        # Weights are rounded up by up to 10⁻¹²: the computed measure is larger than the exact one.
        mass = 3e-11 * real
        error = float(abs(acb(computed.real, computed.imag) - exact).mid())
        assert error <= law.rounding * real + 4 * UNIT * abs(theta + 1j * omega) * deviation + mass


def test_what_would_underflow_is_raised_at_real_frequencies_only():
    floor = np.array([1e-290, -np.inf, 1e-290])
    values, table = np.zeros((1, 2, 3)), np.zeros((2, 2, 3))
    values[:, 0], table[:, 0] = [1e-200, 1e-200, np.nan], 1e-200
    multiply_terms(values, table, np.array([0]), np.array([0.5]), floor)
    np.testing.assert_array_equal(values[0, 0], [1e-290, 0.0, np.nan])
    matrix = np.zeros((2, 2, 2))
    matrix[0] = 1e-200
    assert trace_of_power(matrix.copy(), 3, 1e-290) == 1e-290
    assert trace_of_power(matrix.copy(), 3, -np.inf) == 0
    out = np.empty((1, 2, 3))
    places, shares = np.zeros((1, 1, 2), dtype=np.int64), np.full((1, 1, 2), 0.5)
    block_transforms(table[None], np.array([0, 0]), places, shares, np.ones(1), floor, out)
    np.testing.assert_array_equal(out[0, 0], [1e-290, 0.0, 1e-290])


def test_sums_over_nuggets_are_counted():
    """A table with many nodes per nugget: the stationary law once counted only the chain's nodes."""
    model = StationaryModel(50, 0.0, 1e-6, 0.5, 1.0)
    law = model.law(60.0, 1, _spreads.Resolution(1.0, 1.0, 0.01), 1e-6)
    assert law.table.summands > 1000
    assert law.rounding >= UNIT * 50 * law.table.summands
