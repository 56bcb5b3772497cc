"""DP-SGD accountants by others, for comparison: random-allocation (2025) and PLD-accounting (2026).

Both cover independent noise only, that is a diagonal Gram matrix. k epochs of the same bins with noise σ are equivalent
to one epoch with σ/√k. Where the last epoch is cut off, every diagonal entry is replaced by the largest one (Gram
matrices that are entrywise larger dominate). The packages are optional, and never part of `best`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from dpmf import validation
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, Role
from dpmf.errors import missing_extra
from dpmf.mechanism import Mechanism


class _Baseline(PreparedAccountant):
    """A peer's bound for b steps of the Gaussian mechanism with one participation."""

    def __init__(self, name: str, mechanism: Mechanism) -> None:
        gram = mechanism.gram
        if np.count_nonzero(gram) > np.count_nonzero(np.diagonal(gram)):
            raise ValueError(f"accountant {name} covers uncorrelated noise only, not {mechanism.strategy.name}")
        self.name = name
        self.mechanism = mechanism
        self._b = len(gram)
        self._sensitivity = math.sqrt(float(np.max(np.diagonal(gram))))

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        value = self._peer_delta(noise_multiplier / self._sensitivity, epsilon, direction)
        return Evaluation(min(1.0, max(0.0, value)))

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        return Evaluation(max(0.0, self._peer_epsilon(noise_multiplier / self._sensitivity, delta, direction)))

    @abstractmethod
    def _peer_delta(self, sigma: float, epsilon: float, direction: Direction) -> float: ...

    @abstractmethod
    def _peer_epsilon(self, sigma: float, delta: float, direction: Direction) -> float: ...


class _Peer(Accountant):
    """An accountant of another package, for uncorrelated noise."""

    role: ClassVar[Role] = "baseline"

    def suits(self, mechanism: Mechanism) -> Accountant | None:
        try:
            self.prepare(mechanism)
        except (ValueError, ImportError):  # correlated noise, or a package that is not installed
            return None
        return self


@dataclass(frozen=True)
class RandomAllocation(_Peer):
    """Feldman & Shenfeld (2025): the best of the bounds in the random-allocation package.

    Attributes:
      max_order: the largest Rényi order given to it; its time grows exponentially with it.
    """

    name: ClassVar[str] = "random-allocation"
    summary: ClassVar[str] = "Feldman & Shenfeld 2025, DP-SGD only (optional package)"
    rests_on: ClassVar[str] = "what its package proves (Feldman & Shenfeld 2025)"

    max_order: int = 25

    def __post_init__(self) -> None:
        validation.integer("max_order", self.max_order, at_least=2, at_most=60)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """**Formal guarantees.** Those of random-allocation's "combined" bounds; dpmf adds no approximation."""
        return _PreparedRandomAllocation(mechanism, self.max_order)


class _PreparedRandomAllocation(_Baseline):
    def __init__(self, mechanism: Mechanism, max_order: int) -> None:
        super().__init__(RandomAllocation.name, mechanism)
        try:
            from random_allocation.comparisons.definitions import PrivacyParams, SchemeConfig, Verbosity
            from random_allocation.random_allocation_scheme import combined
        except ImportError:
            raise missing_extra("random-allocation", "random-allocation", "this baseline") from None
        self._parameters: Callable[..., Any] = PrivacyParams
        orders = list(range(2, max_order + 1))
        self._config = SchemeConfig(allocation_direct_alpha_orders=orders, verbosity=Verbosity.NONE)
        self._combined = combined

    def _call(self, quantity: str, direction: Direction, **target: float) -> float:
        bound = getattr(self._combined, f"allocation_{quantity}_combined_{direction}")
        return float(bound(self._parameters(num_steps=self._b, **target), self._config))

    def _peer_delta(self, sigma: float, epsilon: float, direction: Direction) -> float:
        return self._call("delta", direction, sigma=sigma, epsilon=epsilon)

    def _peer_epsilon(self, sigma: float, delta: float, direction: Direction) -> float:
        return self._call("epsilon", direction, sigma=sigma, delta=delta)


@dataclass(frozen=True)
class PLDAccounting(_Peer):
    """Shenfeld & Feldman (2026): the privacy-loss distribution of random allocation, by the PLD-accounting package.

    Attributes:
      loss_discretization: the step of its grid of losses; a smaller one is tighter and slower.
    """

    name: ClassVar[str] = "pld-accounting"
    summary: ClassVar[str] = "Shenfeld & Feldman 2026, DP-SGD only (optional package)"
    rests_on: ClassVar[str] = "what its package proves (Shenfeld & Feldman 2026)"

    loss_discretization: float | None = None

    def __post_init__(self) -> None:
        if self.loss_discretization is not None:
            validation.positive("loss_discretization", self.loss_discretization)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """**Formal guarantees.** Those of PLD-accounting's dominating distribution. It covers both directions at once,
        so that what is reported for one direction bounds the other too."""
        return _PreparedPLDAccounting(mechanism, self.loss_discretization)


class _PreparedPLDAccounting(_Baseline):
    def __init__(self, mechanism: Mechanism, loss_discretization: float | None) -> None:
        super().__init__(PLDAccounting.name, mechanism)
        try:
            import PLD_accounting
        except ImportError:
            raise missing_extra("PLD-accounting", "pld", "this baseline") from None
        options = {} if loss_discretization is None else {"loss_discretization": loss_discretization}
        config = PLD_accounting.AllocationSchemeConfig(**options)

        @lru_cache(maxsize=4)
        def distribution(sigma: float) -> Any:
            parameters = PLD_accounting.PrivacyParams(sigma=sigma, num_steps=self._b)
            return PLD_accounting.gaussian_allocation_pld(params=parameters, config=config)

        self._distribution = distribution

    def _peer_delta(self, sigma: float, epsilon: float, direction: Direction) -> float:
        return float(self._distribution(sigma).get_delta_for_epsilon(epsilon))

    def _peer_epsilon(self, sigma: float, delta: float, direction: Direction) -> float:
        return float(self._distribution(sigma).get_epsilon_for_delta(delta))
