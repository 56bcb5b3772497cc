"""The Rényi accountant: integer moments of the likelihood ratio, turned into (ε, δ).

Remove: E_Q[A^α] by dynamic programming over the indices (Lemma "renyi-dynamic_program" of the paper, read with its
errata), exact for a cyclically p-banded Gram matrix, an upper bound otherwise: G is replaced by the entrywise larger
G^(p) + τ. Add: the arithmetic–geometric mean bound, closed form for every real order. Each direction is converted by
Proposition 12 of Canonne, Kamath & Steinke (2020) at its own best order.

Cost grows like α^(2p) on a ring (several epochs), α^(p+1) on a line (one epoch): a work budget decides how far the
orders go for each bandwidth, and the smallest bound over all (p, α) is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.optimize import minimize_scalar

from dpmf import budget, validation
from dpmf.accountants.least import Least, Part
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant
from dpmf.accountants.renyi._moments import LineMoments, MomentTable, RingMoments, UncorrelatedMoments
from dpmf.gram.bands import circulant_majorant, cyclic_bandwidth, truncate
from dpmf.mechanism import Mechanism
from dpmf.numerics import Array

_MOST_ORDERS = 2000
_BANDWIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_WIDEST = 32
_LARGEST_REAL_ORDER = 1e12
_LARGEST_EPSILON = 1e150  # δ falls with ε, so a bound here serves beyond; products with orders stay in range
_UPDATES_PER_SECOND = 5e8
_DENSE_BATCHES = 5000  # batches per epoch up to which moments are worth their time
_GRAMS_HELD = 7  # b × b arrays at a time, while bands are cut out


def log_conversion_factor(order: np.ndarray | float) -> np.ndarray | float:
    """log[(1 − 1/α)^α / (α − 1)]: δ ≤ e^((α−1)(ρ−ε)) times its exponential, ρ ≥ R_α (Prop. 12 of CKS 2020)."""
    return order * np.log1p(-1.0 / np.asarray(order)) - np.log(np.asarray(order) - 1.0)


def _best_real_order(score: Callable[[float], float], max_order: int | None) -> float:
    """The real order in (1, max_order] with the least (quasi-convex) score; any order would be valid."""
    top = math.log((max_order or _LARGEST_REAL_ORDER) - 1)
    with np.errstate(over="ignore", invalid="ignore"):  # its parabolas through scores beyond 10¹⁵⁴
        found = minimize_scalar(
            lambda x: score(1 + math.exp(x)), bounds=(-12.0, top), method="bounded", options={"xatol": 1e-7}
        )
    order = 1 + math.exp(float(found.x))
    return max_order if max_order and score(max_order) < score(order) else order


def _capped(log_delta: float) -> float:
    """e^log_delta rounded up: at most 1, which bounds every δ, and never 0, which bounds none (nor does NaN)."""
    if math.isnan(log_delta):
        return 1.0
    return min(1.0, max(math.exp(min(log_delta, 0.0)) * (1 + 1e-15), math.ulp(0.0)))


def _at_least_zero(epsilon: float) -> float:
    """ε rounded up; NaN, from numbers beyond double range, proves nothing."""
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon * (1 + 1e-15))


@dataclass(frozen=True)
class Renyi(Accountant):
    """Options of the Rényi accountant.

    Attributes:
      max_order: the largest order α tried; None leaves it to the work budget.
      work_budget: elementary updates allowed for one σ, shared by the bandwidths tried (10⁹ take about a second).
      bandwidth: use this truncation bandwidth only, instead of trying several.
    """

    name: ClassVar[str] = "renyi"
    summary: ClassVar[str] = "Rényi moments by dynamic programming; tight at large ε"
    rests_on: ClassVar[str] = (
        "moments by dynamic programming (remove), means (add); conversion of Canonne, Kamath & Steinke 2020, Prop. 12"
    )

    max_order: int | None = None
    work_budget: float = 3e9
    bandwidth: int | None = None

    def __post_init__(self) -> None:
        if self.max_order is not None:
            validation.integer("max_order", self.max_order, at_least=2, at_most=int(_LARGEST_REAL_ORDER))
        if self.bandwidth is not None:
            validation.integer("bandwidth", self.bandwidth, at_least=1)
        validation.positive("work_budget", self.work_budget)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Truncate the Gram matrix at each bandwidth worth trying.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) (or ε(δ)) of the dominating pair:
        * entrywise larger Gram matrices have larger integer moments (the moment is a sum of exponentials of
          non-negative combinations of the entries), so truncation, the circulant majorant and the upward rounding of
          G by its own relative error (2N + 4)·2⁻⁵² are on the safe side;
        * leaving m indices of a ring out in a random rotation is Jensen's inequality for x ↦ x^α;
        * the dynamic program adds positive numbers only; underflow is rounded up, rounding error is added back;
        * any order gives a valid bound, so stopping early or a coarse search for the best order costs tightness only.
        """
        return Least(self.name, mechanism, [Part(self.name, lambda: self._bounds(mechanism))])

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        return self if mechanism.batching.batches_per_epoch <= _DENSE_BATCHES else None

    def _bounds(self, mechanism: Mechanism) -> list[PreparedAccountant]:
        b = mechanism.batching.batches_per_epoch
        budget.claim(_GRAMS_HELD * 8.0 * b * b)
        gram = mechanism.gram_upper()
        # The widest first: it is the tightest that can afford the orders a target needs, others then rarely win.
        tables = [table for p in reversed(_widths(gram, self.bandwidth)) for table in _tables(gram, p)]
        add = AddOrders(float(np.trace(gram)) / len(gram), float(gram.sum()) / len(gram) ** 2)
        bounds: list[PreparedAccountant] = [
            MomentOrders(mechanism, add, self.max_order, table, self._affordable(table, len(tables)))
            for table in tables
        ]
        if self.bandwidth is None:
            bounds.append(_UnamplifiedRenyi(mechanism, gram, add, self.max_order))
        return bounds

    def _affordable(self, table: MomentTable, tables: int) -> Callable[[], int]:
        """The largest order for one σ; with a time budget, no σ may take more than a tenth of what is left of it."""
        known: dict[float, int] = {}

        def orders() -> int:
            deadline = budget.current()
            ends = math.inf if deadline is None else deadline.ends
            if ends not in known:
                work = min(self.work_budget, _UPDATES_PER_SECOND * budget.seconds_left() / 10)
                known[ends] = self.orders_within(table, work / tables)
            return known[ends]

        return orders

    def divergences(self, mechanism: Mechanism, noise_multiplier: float, order: int) -> Array:
        """Upper bounds on R_α(P‖Q) (the remove direction) for α = 2..order, all orders from one dynamic program.

        **Formal guarantees.** Those of `prepare`: each truncation is an upper bound at every order, and the least of
        them is returned. Orders are computed whatever the work budget says, so it may take long.
        """
        sigma = validation.positive("noise_multiplier", noise_multiplier)
        order = validation.integer("order", order, at_least=2)
        gram = mechanism.gram_upper()
        found = [
            table.log_moments(sigma, order)[2 : order + 1]
            for p in _widths(gram, self.bandwidth)
            for table in _tables(gram, p)
        ]
        return np.asarray(np.min(found, axis=0) / np.arange(1, order))

    def orders_within(self, table: MomentTable, budget: float) -> int:
        """The largest order that fits the budget; 2 always does, or nothing could be answered."""
        most = min(self.max_order or _MOST_ORDERS, table.largest_order)
        if table.work(most) <= budget:
            return most
        low, high = 2, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if table.work(middle) <= budget else (low, middle)
        return low


def _widths(gram: Array, only: int | None) -> list[int]:
    """The truncation bandwidths worth trying."""
    exact = max(1, cyclic_bandwidth(gram))
    return [only] if only else sorted({p for p in _BANDWIDTHS if p < exact} | {min(exact, _WIDEST)})


def _tables(gram: Array, p: int) -> list[MomentTable]:
    """The moments of G truncated at bandwidth p: of a ring also those of the line left when it is cut.

    The line affords more orders for the same work. They are bounds of their own, with orders of their own: one table
    that changes from ring to line would not be convex in the order, and its answers would depend on where a search
    for the best order starts.
    """
    b = len(gram)
    majorant = truncate(gram, p)
    if majorant.p == 1:
        return [UncorrelatedMoments(majorant, b)]
    if not majorant.wraps:
        return [LineMoments(majorant, b)]
    ring = RingMoments(majorant, b)
    if b < 4 * majorant.p:  # leaving out p − 1 indices would cost too much
        return [ring]
    return [LineMoments.from_ring(circulant_majorant(gram), majorant.p), ring]


@dataclass(frozen=True)
class AddOrders:
    """The add direction at every real order: means over the diagonal and over all entries of G."""

    diagonal: float
    entries: float

    def divergence(self, noise_multiplier: float, order: float) -> float:
        """R_α(Q‖P) ≤ tr G/(2bσ²) + (α−1)·ΣG/(2b²σ²): the geometric mean of the a_i is below their mean A."""
        return (self.diagonal + (order - 1) * self.entries) / 2 / noise_multiplier**2


class _OneOrderPerDirection(PreparedAccountant):
    """Shared by all truncations: the add direction, in closed form."""

    name = "renyi"

    def __init__(self, mechanism: Mechanism, add: AddOrders, max_order: int | None) -> None:
        self.mechanism = mechanism
        self._add = add
        self._max_order = max_order

    def _add_divergence(self, noise_multiplier: float, order: float) -> float:
        return self._add.divergence(noise_multiplier, order)

    def _delta_at_real_order(self, divergence: Callable[[float], float], epsilon: float) -> Evaluation:
        epsilon = min(epsilon, _LARGEST_EPSILON)

        def log_delta(order: float) -> float:
            return float((order - 1) * (divergence(order) - epsilon) + log_conversion_factor(order))

        order = _best_real_order(log_delta, self._max_order)
        return Evaluation(_capped(log_delta(order)), {"order": order})

    def _epsilon_at_real_order(self, divergence: Callable[[float], float], delta: float) -> Evaluation:
        def epsilon(order: float) -> float:
            return float(divergence(order) + (log_conversion_factor(order) - math.log(delta)) / (order - 1))

        order = _best_real_order(epsilon, self._max_order)
        return Evaluation(_at_least_zero(epsilon(order)), {"order": order})

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        """With a largest order α, even infinite noise (ρ = 0) leaves δ at the conversion's own value."""
        most = self._largest_order(direction)
        if most is None:
            return None
        orders = np.arange(2, most + 1)
        factors = np.asarray(log_conversion_factor(orders))
        if np.min(factors - (orders - 1) * min(epsilon, _LARGEST_EPSILON)) < math.log(delta):
            return None
        least = float(np.min((factors - math.log(delta)) / (orders - 1)))
        return f"orders up to {most} cannot certify epsilon below {least:.4g} at delta = {delta:g}, whatever the noise"

    def _largest_order(self, direction: Direction) -> int | None:
        return self._max_order


class _UnamplifiedRenyi(_OneOrderPerDirection):
    """Bandwidth 0: G ≤ max G, the Gaussian mechanism without amplification, at every real order."""

    def __init__(self, mechanism: Mechanism, gram: Array, add: AddOrders, max_order: int | None) -> None:
        super().__init__(mechanism, add, max_order)
        self._largest = float(gram.max())

    def _divergence(self, noise_multiplier: float, direction: Direction) -> Callable[[float], float]:
        if direction == "add":
            return lambda order: self._add_divergence(noise_multiplier, order)
        return lambda order: order * self._largest / (2 * noise_multiplier**2)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        found = self._delta_at_real_order(self._divergence(noise_multiplier, direction), epsilon)
        return Evaluation(found.value, {**found.details, "bandwidth": 0, "exact": False})

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        found = self._epsilon_at_real_order(self._divergence(noise_multiplier, direction), delta)
        return Evaluation(found.value, {**found.details, "bandwidth": 0, "exact": False})


class MomentOrders(_OneOrderPerDirection):
    """One table of moments (a truncation of G, say): all orders up to `most_orders`, grown only as far as needed."""

    def __init__(
        self,
        mechanism: Mechanism,
        add: AddOrders,
        max_order: int | None,
        table: MomentTable,
        most_orders: Callable[[], int],
    ) -> None:
        super().__init__(mechanism, add, max_order)
        self._table = table
        self._most_orders = most_orders
        self._latest: tuple[float, Array] = (math.nan, np.empty(0))
        self._likely_order = 6  # where the search for the best order starts; moves with what was found last

    @property
    def _most(self) -> int:
        return self._most_orders()

    def _largest_order(self, direction: Direction) -> int | None:
        return self._most if direction == "remove" else self._max_order

    def log_moments(self, noise_multiplier: float, order: int) -> Array:
        """Upper bounds on log E_Q[A^m] for m = 0..order (or more, where they are known already)."""
        sigma, known = self._latest
        if sigma != noise_multiplier or len(known) <= order:
            known = self._table.log_moments(noise_multiplier, order)
            self._latest = (noise_multiplier, known)
        return known

    def divergences(self, noise_multiplier: float, order: int) -> Array:
        """Upper bounds on R_α(P‖Q) for α = 2..order."""
        moments = self.log_moments(noise_multiplier, order)[2 : order + 1]
        return moments / np.arange(1, order)

    def _best_order(self, noise_multiplier: float, score: Callable[[Array, Array], Array]) -> tuple[int, float]:
        """The order with the least score.

        log δ(α) is convex in α and ε(α) quasi-convex (log-moments are convex, and so is the conversion factor), so once
        the best order lies well inside the range, larger orders cannot win.
        """
        most = min(self._likely_order + self._likely_order // 4 + 2, self._most)
        while True:
            orders = np.arange(2, most + 1, dtype=np.float64)
            scores = score(orders, self.log_moments(noise_multiplier, most)[2 : most + 1])
            best = int(np.argmin(scores))
            if most >= self._most or best < len(scores) - 1:
                self._likely_order = best + 2
                return best + 2, float(scores[best])
            most = min(self._most, 2 * most)

    def _details(self, order: float) -> dict[str, object]:
        return {"order": order, **self._table.details}

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        if direction == "add":
            return self._delta_at_real_order(lambda a: self._add_divergence(noise_multiplier, a), epsilon)

        def log_delta(orders: Array, moments: Array) -> Array:
            return np.asarray(moments - (orders - 1) * min(epsilon, _LARGEST_EPSILON) + log_conversion_factor(orders))

        order, value = self._best_order(noise_multiplier, log_delta)
        return Evaluation(_capped(value), self._details(order))

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        if direction == "add":
            return self._epsilon_at_real_order(lambda a: self._add_divergence(noise_multiplier, a), delta)

        def epsilon(orders: Array, moments: Array) -> Array:
            return np.asarray((moments + log_conversion_factor(orders) - math.log(delta)) / (orders - 1))

        order, value = self._best_order(noise_multiplier, epsilon)
        return Evaluation(_at_least_zero(value), self._details(order))
