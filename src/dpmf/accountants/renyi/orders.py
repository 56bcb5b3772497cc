"""From moments of the likelihood ratio to (ε, δ): the conversion, and the search for its best order.

If log E[A^α] = (α − 1)·R_α is at most M, Proposition 12 of Canonne, Kamath & Steinke (2020) gives, for all α > 1,
    log δ(ε) ≤ M − (α − 1)·ε + c(α),    c(α) = α·log(1 − 1/α) − log(α − 1).
Orders are integers where moments come from a table (`IntegerOrders`), and real numbers where a divergence has a closed
form (`RealOrders`). See docs/theory/renyi.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import minimize_scalar

from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant
from dpmf.kernels import announce_compilation
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array

Score: TypeAlias = Callable[[Any, Any], Any]
"""A function of the order and of a bound on the log-moment, to be made small: log δ or ε."""


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide which orders are tried. Any values give sound bounds.

    Attributes:
      most_orders: the largest integer order.
      first_order: where the search for the best integer order starts.
      largest_real_order: the largest real order.
      least_log_order: the logarithm of the least α − 1 among the real orders.
      order_tolerance: relative tolerance of α − 1 in the search for the best real order.
      largest_epsilon: δ falls with ε, so that the bound here serves beyond; products with orders stay in range.
    """

    most_orders: int = 2000
    first_order: int = 6
    largest_real_order: float = 1e12
    least_log_order: float = -12.0
    order_tolerance: float = 1e-7
    largest_epsilon: float = 1e150


_TUNING = _Tuning()


def log_conversion_factor(order: Array | float) -> Array:
    """c(α) = log[(1 − 1/α)^α / (α − 1)], not rounded to either side."""
    return np.asarray(_converted(np.asarray(order, dtype=np.float64), 0.0, 0.0)[0])


def _converted(order: Any, log_moment: Any, rest: Any) -> tuple[Any, Any]:
    """M + c(α) + rest, and a bound on its rounding error (docs/theory/floating-point.md, "Rényi moments").

    The error is 16u times the sum of the absolute values, and that of log(1 − 1/α), which is u/(α − 1) more.
    """
    first, second = order * np.log1p(-1.0 / order), np.log(order - 1.0)
    size = np.abs(log_moment) + np.abs(first) + np.abs(second) + np.abs(rest) + order / (order - 1.0)
    return log_moment + first - second + rest, 16 * UNIT * size


def _log_delta(epsilon: float) -> Score:
    """An upper bound on log δ(ε) as a function of the order and of M."""
    epsilon = min(epsilon, _TUNING.largest_epsilon)

    def score(order: Any, log_moment: Any) -> Any:
        value, error = _converted(order, log_moment, -(order - 1) * epsilon)
        return value + error

    return score


def _epsilon(delta: float) -> Score:
    """An upper bound on ε(δ) as a function of the order and of M."""

    def score(order: Any, log_moment: Any) -> Any:
        value, error = _converted(order, log_moment, -math.log(delta))
        return (value + error) / (order - 1)

    return score


def log_factorials(order: int) -> Array:
    """log m! for m = 0..order, from exact integers: the relative error is at most 4u."""
    return _log_factorials(1 << order.bit_length())[: order + 1]


@lru_cache(maxsize=4)
def _log_factorials(number: int) -> Array:
    return np.array([0.0, *map(math.log, accumulate(range(1, number + 1), mul))])


@dataclass(frozen=True, eq=False)
class LogSeries:
    """A power series with c_0 = 1 and positive coefficients.

    As an exponential generating function, Σ E[T^m]·x^m/m!, it stands for a sum T of independent variables: series
    multiply where variables are added.

    Attributes:
      logs: the logarithms of the coefficients.
      slopes: a running error bound: logs[m] is off by at most m·slopes[m], and slopes do not fall with m
        (docs/theory/floating-point.md, "Rényi moments").
    """

    logs: Array
    slopes: Array

    @classmethod
    def exponential(cls, order: int) -> LogSeries:
        """T = 1, from which all others are made."""
        from dpmf.kernels.renyi import log_convolve

        announce_compilation(log_convolve)
        return cls(-log_factorials(order), np.zeros(order + 1))._with_errors(4 * UNIT * log_factorials(order))

    def weighted(self, variance: float) -> LogSeries:
        """T times an independent log-normal of mean 1: c_m is multiplied by e^(variance·m(m−1)/2).

        The variance may have a relative error of 4u.
        """
        m = np.arange(len(self.logs), dtype=np.float64)
        pairs = variance * (m * (m - 1) / 2)
        logs = self.logs + pairs
        return LogSeries(logs, self.slopes)._with_errors(UNIT * (8 * pairs + np.abs(logs)))

    def times(self, other: LogSeries) -> LogSeries:
        """The product of two series."""
        from dpmf.kernels.renyi import log_convolve

        logs, largest = log_convolve(self.logs, other.logs)
        rounding = 2 * UNIT * (np.abs(largest) + np.abs(logs) + 2 * np.arange(len(logs)) + 6)
        return LogSeries(logs, np.maximum(self.slopes, other.slopes))._with_errors(rounding)

    def _with_errors(self, errors: Array) -> LogSeries:
        """The same series with further errors of its logarithms; that of c_0 is exact."""
        further = errors[1:] / np.arange(1, len(errors)) * (1 + 8 * UNIT)
        return LogSeries(self.logs, np.maximum.accumulate(self.slopes + np.append(0.0, further)))

    def log_moments(self, b: int) -> Array:
        """Upper bounds on log E[(T/b)^m]."""
        m, factorials = np.arange(len(self.logs)), log_factorials(len(self.logs) - 1)
        rounding = 8 * UNIT * (np.abs(self.logs) + factorials + m * math.log(b))
        return self.logs + factorials - m * math.log(b) + m * self.slopes + rounding


class MomentTable(ABC):
    """Upper bounds on log E_Q[A^m] for all m up to an order.

    Attributes:
      tau: a constant that every entry of the Gram matrix exceeds that of the table's own matrix by, at most.
      details: what a result says about the table.
      largest_order: the largest order that the table can be asked for.
    """

    largest_order: int = 10**9

    def __init__(self, tau: float, details: Mapping[str, object]) -> None:
        self.tau, self.details = tau, dict(details)

    @abstractmethod
    def work(self, order: int) -> float:
        """Elementary updates for all moments up to `order`."""

    @abstractmethod
    def _log_moments(self, noise_multiplier: float, order: int) -> Array:
        """The log-moments without τ, rounding error included."""

    def log_moments(self, noise_multiplier: float, order: int) -> Array:
        """Upper bounds for m = 0..order.

        **Formal guarantees.** G ≤ G' + τ gives E[A_G^m] ≤ e^(τ·m(m−1)/(2σ²))·E[A_G'^m]. E[A⁰] = E[A] = 1, and E[A^m] is
        at least 1 by Jensen's inequality.
        """
        m = np.arange(order + 1, dtype=np.float64)
        shared = self.tau / noise_multiplier / noise_multiplier * (m * (m - 1) / 2)
        moments = np.maximum(self._log_moments(noise_multiplier, order), 0.0) + shared
        moments[:2] = 0.0
        return moments * (1 + 8 * UNIT)

    def orders_within(self, work: float, max_order: int | None = None) -> int:
        """The largest order that takes so much work; 2 always does, or nothing could be answered."""
        most = min(max_order or _TUNING.most_orders, self.largest_order)
        if self.work(most) <= work:
            return most
        low, high = 2, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.work(middle) <= work else (low, middle)
        return low


class _Orders(PreparedAccountant):
    """The conversion at the best order of a direction.

    **Formal guarantees.** The conversion is a bound at every order, so a coarse search for the best one costs
    tightness only. Its rounding error is added; a value that is not a number counts as no bound.
    """

    def __init__(self, name: str, mechanism: Mechanism, details: Mapping[str, object]) -> None:
        self.name, self.mechanism = name, mechanism
        self._details = dict(details)

    @abstractmethod
    def _best(self, noise_multiplier: float, direction: Direction, score: Score) -> tuple[float, float]:
        """The best order for a direction, and its score."""

    @abstractmethod
    def _largest_order(self) -> int | None:
        """The largest order; None where there is no limit."""

    def _for(self, direction: Direction) -> _Orders | None:
        """The orders that answer for a direction; None where there are none."""
        return self

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        orders = self._for(direction)
        if orders is None:
            return Evaluation(1.0)
        order, log_delta = orders._best(noise_multiplier, direction, _log_delta(epsilon))
        # Not a number is no bound; and no δ is 0, not even one that underflows.
        value = 1.0 if math.isnan(log_delta) else math.exp(min(log_delta, 0.0)) * (1 + 8 * UNIT)
        return Evaluation(min(1.0, max(value, math.ulp(0.0))), {"order": order, **orders._details})

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        orders = self._for(direction)
        if orders is None:
            return Evaluation(math.inf)
        order, epsilon = orders._best(noise_multiplier, direction, _epsilon(delta))
        value = math.inf if math.isnan(epsilon) else max(0.0, epsilon * (1 + 8 * UNIT))
        return Evaluation(value, {"order": order, **orders._details})

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        """With a largest order, even infinite noise (M = 0) leaves δ at the conversion's own value."""
        answering = self._for(direction)
        if answering is None:
            return f"these moments do not bound the {direction} direction"
        most = answering._largest_order()
        if most is None:
            return None
        orders = np.unique(np.append(np.arange(2.0, min(most, 2000) + 1), np.geomspace(2, most, 2000).round()))
        if np.min(_log_delta(epsilon)(orders, 0.0)) < math.log(delta):
            return None
        least = float(np.min(_epsilon(delta)(orders, 0.0)))
        return f"orders up to {most} cannot certify epsilon below {least:.4g} at delta = {delta:g}, whatever the noise"


class RealOrders(_Orders):
    """Divergences of a Gaussian loss, R_α ≤ (c + (α − 1)·d)/(2σ²), at every real order.

    Args:
      name: the accountant's name.
      mechanism: the mechanism.
      coefficients: c and d for each direction that has them.
      max_order: the largest order, if there is one.
      details: what results say about the bound.
    """

    def __init__(
        self,
        name: str,
        mechanism: Mechanism,
        coefficients: Mapping[Direction, tuple[float, float]],
        max_order: int | None,
        details: Mapping[str, object],
    ) -> None:
        super().__init__(name, mechanism, details)
        self._coefficients, self._max_order = coefficients, max_order

    def divergence(self, noise_multiplier: float, order: float, direction: Direction) -> float:
        """An upper bound on the divergence of a direction."""
        constant, slope = self._coefficients[direction]
        return (constant + (order - 1) * slope) / 2 / noise_multiplier / noise_multiplier * (1 + 8 * UNIT)

    def _for(self, direction: Direction) -> _Orders | None:
        return self if direction in self._coefficients else None

    def _largest_order(self) -> int | None:
        return self._max_order

    def _best(self, noise_multiplier: float, direction: Direction, score: Score) -> tuple[float, float]:
        def scored(order: float) -> float:
            moment = (order - 1) * self.divergence(noise_multiplier, order, direction) * (1 + 2 * UNIT)
            return float(score(order, moment))

        top = math.log((self._max_order or _TUNING.largest_real_order) - 1)
        with np.errstate(over="ignore", invalid="ignore"):  # its parabolas through scores beyond 10¹⁵⁴
            found = minimize_scalar(
                lambda x: scored(1 + math.exp(x)), bounds=(_TUNING.least_log_order, top), method="bounded",
                options={"xatol": _TUNING.order_tolerance},
            )  # fmt: skip
            candidates = [1 + math.exp(float(found.x)), *([self._max_order] if self._max_order else [])]
            order = min(candidates, key=scored)
            return order, scored(order)


class IntegerOrders(_Orders):
    """The remove direction from one table of moments, which is grown only as far as needed.

    Args:
      name: the accountant's name.
      mechanism: the mechanism.
      table: the moments.
      most_orders: says up to which order the table may be computed.
      add: what answers the add direction; without it the bound there is 1.
      cheap: whether a table takes milliseconds.
    """

    def __init__(
        self,
        name: str,
        mechanism: Mechanism,
        table: MomentTable,
        most_orders: Callable[[], int],
        *,
        add: RealOrders | None = None,
        cheap: bool = False,
    ) -> None:
        super().__init__(name, mechanism, table.details)
        self.table, self.most_orders, self.cheap = table, most_orders, cheap
        self._add = add
        self._latest: tuple[float, Array] = (math.nan, np.empty(0))
        self._likely_order = _TUNING.first_order  # moves with what was found last

    def log_moments(self, noise_multiplier: float, order: int) -> Array:
        """Upper bounds on log E_Q[A^m] for m = 0..order (or more, where they are known already)."""
        sigma, known = self._latest
        if sigma != noise_multiplier or len(known) <= order:
            known = self.table.log_moments(noise_multiplier, order)
            self._latest = (noise_multiplier, known)
        return known

    def _for(self, direction: Direction) -> _Orders | None:
        return self if direction == "remove" else self._add

    def _largest_order(self) -> int | None:
        return self.most_orders()

    def _best(self, noise_multiplier: float, direction: Direction, score: Score) -> tuple[float, float]:
        """log δ(α) is convex in α and ε(α) quasi-convex (log-moments are convex, and so is the conversion factor), so
        that larger orders cannot win once the best one lies inside the range."""
        largest = self.most_orders()
        most = min(self._likely_order + self._likely_order // 4 + 2, largest)
        while True:
            orders = np.arange(2, most + 1, dtype=np.float64)
            scores = score(orders, self.log_moments(noise_multiplier, most)[2 : most + 1])
            best = int(np.argmin(scores))
            if most >= largest or best < len(scores) - 1:
                self._likely_order = best + 2
                return best + 2, float(scores[best])
            most = min(largest, 2 * most)
