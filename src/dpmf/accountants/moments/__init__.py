"""The moments accountant: small ε, any memory, both directions, in a fraction of a second.

At small ε the likelihood ratio A, a mean of b correlated log-normal variables, is nearly a function of the mean of
their exponents alone. That mean is one normal variable z, which is integrated. Given z, the first moments of A are
sums over pairs, triples and quadruples of the Gram matrix, and A is at least the geometric mean of its terms, a
function of z. What four moments and a least value say about an option is the expectation of a polynomial above it.
Nothing of the Gram matrix is replaced, so irregular memory is no harder than any other (docs/theory/moments.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from dpmf import validation
from dpmf.accountants.chain._spreads import Option
from dpmf.accountants.moments._given_mean import GivenMean, Shape, scaled
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, Proof
from dpmf.kernels.moments import option_above, polynomial_above
from dpmf.loss.gaussian import gaussian_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.recent import Recent


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide tightness and time. Any positive values give sound bounds.

    Attributes:
      largest_batches: mechanisms with more batches are left to others: a node costs b³ operations.
      many_batches: beyond so many batches nodes are twice as far apart, and rough bounds are worth their while.
      rough: how many times farther apart the nodes of rough bounds are.
      largest_variance: above this G/σ² moments say nothing, and the closed form without amplification answers.
      negligible: it also does below this δ.
      usual_delta: the δ that matters where no target says so.
      left_over: nodes that can add no more than this part of the bound are lumped together.
      deep: how many deviations of A given z from the strike an option may be sure to pay; they are tried in turn.
      least_certified: smaller values of δ have no certificate, because the nodes of spreads are not made for them.
      kept: of how many noise multipliers the moments are remembered.
    """

    largest_batches: int = 1024
    many_batches: int = 300
    rough: float = 3.0
    largest_variance: float = 6.0
    negligible: float = 1e-100
    usual_delta: float = 1e-6
    left_over: float = 1e-4
    deep: tuple[float, ...] = (5.0, 10.0, 20.0)
    least_certified: float = 1e-15
    kept: int = 2


_TUNING = _Tuning()
_LEAST_VARIANCE = 1e-40  # of smaller G/σ² products of six underflow


@dataclass(frozen=True)
class Moments(Accountant):
    """Options of the moments accountant.

    Attributes:
      spacing: the distance of the nodes of z, in standard deviations; a bound loses about spacing²/12 of σ by it.
        From 300 batches on it is doubled.
    """

    name: ClassVar[str] = "moments"
    summary: ClassVar[str] = "four moments given the geometric mean; any memory, both directions, tight at small ε"
    rests_on: ClassVar[str] = "exact conditional moments, polynomials above options, arithmetic and geometric means"

    spacing: float = 0.07

    def __post_init__(self) -> None:
        validation.positive("spacing", self.spacing)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Nothing is computed before the first question.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) of the dominating pair. G is
        replaced by G' ≥ G, which is positive semidefinite although entries are known up to rounding only: entries are
        raised by their error, and the diagonal by the largest sum of such errors in a row (Kahane's inequality). Given
        z, the expectation of the payoff is at most that of a polynomial above it (`option_above`), with moments from
        `GivenMean`. As a function of z it is convex and increasing for calls, and for puts convex and decreasing in
        e^(κz), κ the largest load: z is spread onto nodes from above (`Option.spread`).
        """
        b = mechanism.batching.batches_per_epoch
        if self.suits(mechanism) is None:
            raise ValueError(
                f"accountant moments must be given at most {_TUNING.largest_batches} batches per epoch, got {b}"
            )
        return _PreparedMoments(mechanism, self)

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        return self if mechanism.batching.batches_per_epoch <= _TUNING.largest_batches else None


@dataclass(frozen=True)
class _Found:
    """A bound on δ(ε), and how it was found.

    Attributes:
      value: the bound.
      likely: about the δ(ε) that it bounds.
      strike: that of the option on A.
      nodes: all nodes of z, from where the payoff is large to where it is small.
      deep: how many of them come before the first one whose moments were asked for.
      asked: how many were asked; those that are left are lumped into the last of these.
    """

    value: float
    likely: float
    strike: float
    nodes: list[float]
    deep: int
    asked: int


class _PreparedMoments(PreparedAccountant):
    name = "moments"

    def __init__(self, mechanism: Mechanism, options: Moments) -> None:
        self.mechanism = mechanism
        self._b = mechanism.batching.batches_per_epoch
        many = self._b > _TUNING.many_batches
        self._spacing = min(options.spacing, 1.0) * (2 if many else 1)
        self.cheap, self.roughness = not many, 1.25 if many else 1.0
        self._given: Recent[float, GivenMean] = Recent(_TUNING.kept)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        """A bound on δ(ε), see `_bound`."""
        return self._bound(self._spacing, noise_multiplier, epsilon, direction, target_delta)

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        """A bound from few nodes, where a node takes long."""
        if self.cheap:
            return None
        spacing = self._spacing * _TUNING.rough
        return replace(self._bound(spacing, noise_multiplier, epsilon, direction, target_delta), slack=math.inf)

    def _bound(
        self, spacing: float, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None
    ) -> Evaluation:
        """A bound on δ(ε) from nodes at a distance, or that of the Gaussian mechanism where it is smaller."""
        plain, enough = self._plain(noise_multiplier, epsilon)
        if enough:
            return Evaluation(plain, {"nodes": 0})
        aimed = min(target_delta or _TUNING.usual_delta, plain)
        found = self._found(self._given_mean(noise_multiplier), spacing, epsilon, direction, aimed)
        if not found.value < plain:  # a bound that is not a number is none
            return Evaluation(plain, {"nodes": found.asked})
        return Evaluation(found.value, {"nodes": found.asked}, slack=found.value / max(found.likely, 1e-300))

    def certificate(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Proof | None:
        """What it takes to check the bound without dpmf: the nodes of z, and the polynomials at those asked.

        The bound may be smaller than that of `delta`: moments are sharper, and aimed at the value itself.
        """
        plain, enough = self._plain(noise_multiplier, epsilon)
        if enough:
            return None
        given = GivenMean(scaled(self.mechanism, self._gram, noise_multiplier), sharp=True)
        aimed = min(_TUNING.usual_delta, plain)
        found = self._found(given, self._spacing, epsilon, direction, aimed)
        while found.value < aimed / 10 and aimed > _TUNING.least_certified:  # nodes were too few for so small a value
            aimed = found.value
            found = self._found(given, self._spacing, epsilon, direction, aimed)
        if not _TUNING.least_certified < found.value < plain:
            return None
        sign = 1 if direction == "remove" else -1
        asked = found.nodes[found.deep : found.deep + found.asked]
        nodes = {"low": min(found.nodes), "spacing": abs(found.nodes[1] - found.nodes[0]), "count": len(found.nodes)}
        polynomials = [_polynomial(given.at(node), found.strike, sign) for node in asked]
        return Proof(found.value, "moments", {"nodes": nodes, "deep": found.deep, "polynomials": polynomials})

    def _plain(self, noise_multiplier: float, epsilon: float) -> tuple[float, bool]:
        """δ(ε) of the Gaussian mechanism without amplification, and whether that is all that is to be said."""
        largest = float(self._gram.max()) / noise_multiplier / noise_multiplier
        plain = gaussian_delta(math.sqrt(min(largest, 1e300)) * (1 + 1e-9), epsilon)
        outside = largest > _TUNING.largest_variance or largest < _LEAST_VARIANCE
        return plain, not plain > _TUNING.negligible or outside or self._b == 1

    def _found(self, given: GivenMean, spacing: float, epsilon: float, direction: Direction, aimed: float) -> _Found:
        """A bound on δ(ε) from nodes at a distance.

        **Formal guarantees.** See `prepare`. Weights of the nodes are rounded up; nodes on the side where the payoff
        falls are lumped into the last one asked, where it is at least as large. The relative error of A given z moves
        the strike.
        """
        sign = 1 if direction == "remove" else -1
        # The option that δ(ε) is: E(A − e^ε)_+ or e^ε·E(e^−ε − A)_+.
        strike, unit = (math.exp(epsilon), 1.0) if sign > 0 else (math.exp(-epsilon), math.exp(epsilon))
        strike *= 1 - 4 * sign * UNIT
        aimed /= unit
        option = Option(self._b * strike, sign, self._b, min(1.0, aimed / (1.0 if sign > 0 else strike)))
        top = float(given.loads.max()) * (1 + 1e-12)
        spread = option.spread(top, spacing)
        if sign > 0:
            total = float(spread.beyond(given.loads * (1 + 1e-12)).mean()) * (1 + 1e-9)
        else:
            total = spread.lost * strike
        inward = slice(None, None, -sign)  # from where the payoff is large to where it is small
        nodes, weights = spread.nodes[inward].tolist(), spread.weights[inward]
        later = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
        forward, first, other = self._deep(given, nodes, weights, strike, sign, aimed)
        total += float(weights[:first] @ (forward[:first] + other)) * (1 + 1e-9)
        asked, likely = 0, total
        for node, weight, rest in zip(nodes[first:], weights[first:].tolist(), later[first:].tolist(), strict=True):
            shape = given.at(node)
            value = _option(shape, strike, sign)
            total += weight * value
            likely += weight * _likely(shape, strike, sign)
            asked += 1
            if value * rest <= _TUNING.left_over * total:
                total += value * rest
                break
        return _Found(float(total * unit * (1 + 1e-9)), likely * unit, strike, nodes, first, asked)

    def _deep(
        self, given: GivenMean, nodes: list[float], weights: Array, strike: float, sign: int, aimed: float
    ) -> tuple[Array, int, float]:
        """Nodes at which the option is nearly sure to pay: what it is worth there without asking for moments.

        **Formal guarantees.** (A − K)_+ = (A − K) + (K − A)_+, and a put falls with z: at every node before the one
        that was asked, the put is worth at most what it is worth there. For puts, the same with signs changed.

        Returns:
          Bounds on E[±(A − K) | z] at all nodes, how many of them need nothing else, and what is to be added to those.
        """
        means, errors = given.means(nodes)
        forward = np.maximum(sign * (means * (1 + 2 * sign * errors) - strike) + 4 * UNIT * (means + strike), 0.0)
        kink = int(np.argmax(sign * (means - strike) <= 0))
        deviation = given.at(nodes[kink]).deviation
        for distance in _TUNING.deep:
            first = int(np.count_nonzero(sign * (means - strike) >= distance * deviation * means)) - 1
            if first <= 0:
                break
            other = _option(given.at(nodes[first]), strike, -sign)
            if other * float(weights[:first].sum()) <= _TUNING.left_over * aimed:
                return forward, first, other
        return forward, 0, 0.0

    @cached_property
    def _gram(self) -> Array:
        return self.mechanism.gram_upper()

    def _given_mean(self, noise_multiplier: float) -> GivenMean:
        return self._given.get(
            noise_multiplier, lambda: GivenMean(scaled(self.mechanism, self._gram, noise_multiplier))
        )


def _option(shape: Shape, strike: float, sign: int) -> float:
    """A bound on E(A − strike)_+ or E(strike − A)_+ given z, at least 0.

    **Formal guarantees.** The exact A is at most (1 + error) and at least (1 − error) times the one whose moments the
    shape has: the strike is moved, and the value raised, by that much.
    """
    value = option_above(sign, _place(shape, strike, sign), *shape.known)
    return max(float(value), 0.0) * shape.deviation * shape.mean * (1 + 1e-9)


def _place(shape: Shape, strike: float, sign: int) -> float:
    """The strike in units of y, moved to the side where the option is worth more by as much as it may err."""
    moved = strike * (1 - 2 * sign * shape.error) / shape.mean - 1
    place = moved / shape.deviation
    return place - sign * 1e-14 * (1 + abs(place)) - sign * 4 * UNIT / shape.deviation


def _polynomial(shape: Shape, strike: float, sign: int) -> dict[str, list[float]]:
    """The polynomial of `_option`, in units of A/mean − 1, as docs/certificates.md describes it."""
    place = _place(shape, strike, sign)
    _, family, one, two = polynomial_above(sign, place, *shape.known)
    if family < 0:
        return {"zeros": []}
    points = (place - one, place + two) if family == 0 else (place + one, place + two)
    return {"contacts" if family == 0 else "zeros": [point * shape.deviation for point in points]}


def _likely(shape: Shape, strike: float, sign: int) -> float:
    """About the expectation that `_option` bounds, by Edgeworth's expansion: it says whether others can do better."""
    place = (strike / shape.mean - 1) / shape.deviation
    density = math.exp(-place * place / 2) / math.sqrt(2 * math.pi)
    normal = density - sign * place * math.erfc(sign * place / math.sqrt(2)) / 2
    return max(normal + shape.skewness / 6 * place * density, 0.0) * shape.deviation * shape.mean
