"""The Rényi accountant: integer moments of the likelihood ratio, turned into (ε, δ).

Remove: E_Q[A^α] by dynamic programming over the indices (Lemma "renyi-dynamic_program" of the paper, read with its
errata). It is exact for a cyclically p-banded Gram matrix and an upper bound otherwise: G is replaced by the entrywise
larger G^(p) + τ. Add: the inequality of arithmetic and geometric means, in closed form for every real order. Each
direction is converted at its own best order (`orders`).

The cost grows like α^(2p) on a ring (several epochs) and like α^(p+1) on a line (one epoch). A work budget decides how
far the orders go for each bandwidth, and the smallest bound over all (p, α) is kept. The theory is in
docs/theory/renyi.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpmf import budget, validation
from dpmf.accountants.combined.least import Least, Part
from dpmf.accountants.protocol import Accountant, Direction, PreparedAccountant
from dpmf.accountants.renyi._moments import tables_of
from dpmf.accountants.renyi.orders import IntegerOrders, MomentTable, RealOrders
from dpmf.gram.bands import cyclic_bandwidth
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide which truncations are tried, and for how long. Any values give sound bounds.

    Attributes:
      bandwidths: the truncation bandwidths that are tried.
      widest: the largest bandwidth tried, exact or not.
      updates_per_second: about how many elementary updates the dynamic program makes per second.
      part_of_time: the part of a time budget that one noise multiplier may take.
      dense_batches: batches per epoch up to which moments are worth their time.
      grams_held: the number of b × b arrays that exist at a time while bands are cut out.
    """

    bandwidths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    widest: int = 32
    updates_per_second: float = 5e8
    part_of_time: float = 0.1
    dense_batches: int = 5000
    grams_held: int = 7


_TUNING = _Tuning()


@dataclass(frozen=True)
class Renyi(Accountant):
    """Options of the Rényi accountant.

    Attributes:
      max_order: the largest order α tried; None leaves it to the work budget.
      work_budget: elementary updates allowed for one σ, shared by the bandwidths tried (10⁹ take about a second).
      bandwidth: use this truncation bandwidth only, instead of trying several.
    """

    name: ClassVar[str] = "renyi"
    summary: ClassVar[str] = "Rényi moments by dynamic programming; quick, and close to the truth at large ε only"
    rests_on: ClassVar[str] = (
        "moments by dynamic programming (remove), means (add); conversion of Canonne, Kamath & Steinke 2020, Prop. 12"
    )

    max_order: int | None = None
    work_budget: float = 3e9
    bandwidth: int | None = None

    def __post_init__(self) -> None:
        if self.max_order is not None:
            validation.integer("max_order", self.max_order, at_least=2, at_most=10**12)
        if self.bandwidth is not None:
            validation.integer("bandwidth", self.bandwidth, at_least=1)
        validation.positive("work_budget", self.work_budget)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Truncate the Gram matrix at each bandwidth worth trying.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) (or ε(δ)) of the dominating pair:
        * entrywise larger Gram matrices have larger integer moments (the moment is a sum of exponentials of
          non-negative combinations of the entries), so truncation, the circulant majorant and the upward rounding of
          G by its own relative error are on the safe side;
        * leaving some indices of a ring out in a random rotation is Jensen's inequality for x ↦ x^α;
        * the dynamic program adds positive numbers only; underflow is rounded up, rounding error is added back;
        * any order gives a valid bound, so stopping early or a coarse search for the best order costs tightness only.
        """
        return Least(self.name, mechanism, [Part(self.name, lambda: self._bounds(mechanism))])

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        return self if mechanism.batching.batches_per_epoch <= _TUNING.dense_batches else None

    def divergences(self, mechanism: Mechanism, noise_multiplier: float, order: int) -> Array:
        """Upper bounds on R_α(P‖Q) (the remove direction) for α = 2..order, all orders from one dynamic program.

        Args:
          mechanism: the mechanism.
          noise_multiplier: σ.
          order: the largest order.

        Returns:
          The bounds, R_2 first.

        **Formal guarantees.** Those of `prepare`: each truncation is an upper bound at every order, and the least of
        them is returned. Orders are computed whatever the work budget says, so it may take long.
        """
        sigma = validation.positive("noise_multiplier", noise_multiplier)
        order = validation.integer("order", order, at_least=2)
        found = [table.log_moments(sigma, order)[2 : order + 1] for table in self._tables(mechanism.gram_upper())]
        return np.asarray(np.min(found, axis=0) / np.arange(1, order))

    def curve(
        self, mechanism: Mechanism, noise_multiplier: float, orders: Sequence[int], direction: Direction
    ) -> dict[int, float]:
        """Upper bounds on the Rényi divergence of a direction at integer orders, as far as the work budget goes.

        **Formal guarantees.** Those of `prepare`. Orders beyond what the work budget affords get the closed forms,
        which are bounds at every order.
        """
        bounds = self._bounds(mechanism)
        found = dict.fromkeys(orders, math.inf)
        for bound in bounds:
            if isinstance(bound, RealOrders):
                for order in orders:
                    found[order] = min(found[order], bound.divergence(noise_multiplier, order, direction))
            elif direction == "remove" and isinstance(bound, IntegerOrders):
                affordable = [order for order in orders if order <= bound.most_orders()]
                moments = bound.log_moments(noise_multiplier, max(affordable)) if affordable else ()
                for order in affordable:
                    found[order] = min(found[order], float(moments[order]) / (order - 1) * (1 + 4 * UNIT))
        return found

    def _tables(self, gram: Array) -> list[MomentTable]:
        """The widest truncation first: it is the tightest that can afford the orders a target needs."""
        exact = max(1, cyclic_bandwidth(gram))
        widths = {p for p in _TUNING.bandwidths if p < exact} | {min(exact, _TUNING.widest)}
        chosen = [self.bandwidth] if self.bandwidth else sorted(widths, reverse=True)
        return [table for p in chosen for table in tables_of(gram, p)]

    def _bounds(self, mechanism: Mechanism) -> list[PreparedAccountant]:
        b = mechanism.batching.batches_per_epoch
        budget.claim(_TUNING.grams_held * 8.0 * b * b)
        gram = mechanism.gram_upper()
        tables = self._tables(gram)
        # R_α(Q‖P) ≤ tr G/(2bσ²) + (α − 1)·ΣG/(2b²σ²); the sums' rounding error is part of `gram_error`.
        closed: dict[Direction, tuple[float, float]] = {"add": (float(np.trace(gram)) / b, float(gram.sum()) / b**2)}
        if self.bandwidth is not None:  # no other bandwidth, not even 0
            add = RealOrders(self.name, mechanism, closed, self.max_order, {})
            return [self._orders(mechanism, table, len(tables), add) for table in tables]
        # Bandwidth 0: G ≤ max G, the Gaussian mechanism without amplification.
        closed["remove"] = float(gram.max()), float(gram.max())
        plain = RealOrders(self.name, mechanism, closed, self.max_order, {"bandwidth": 0, "exact": False})
        return [*(self._orders(mechanism, table, len(tables)) for table in tables), plain]

    def _orders(
        self, mechanism: Mechanism, table: MomentTable, tables: int, add: RealOrders | None = None
    ) -> IntegerOrders:
        """The orders of one of several tables: those that the work budget affords for one σ.

        With a time budget, no σ may take more than a small part of what is left of it.
        """
        known: dict[float, int] = {}

        def affordable() -> int:
            deadline = budget.current()
            ends = math.inf if deadline is None else deadline.ends
            if ends not in known:
                in_time = _TUNING.updates_per_second * _TUNING.part_of_time * budget.seconds_left()
                known[ends] = table.orders_within(min(self.work_budget, in_time) / tables, self.max_order)
            return known[ends]

        return IntegerOrders(self.name, mechanism, table, affordable, add=add)
