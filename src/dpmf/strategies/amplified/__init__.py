"""Strategies optimised for the noise multiplier that amplification leaves: least error × σ for one batching and target.

The published optimisers (`unamplified`) minimise error × sensitivity. With amplification by batching the noise
multiplier is not proportional to the sensitivity, and the best C is another one. Here σ is estimated by sampling while
the coefficients are sought (`_losses`, `_search`); accountants then bound the σ of the result like that of any other
strategy. Results are kept on disk (see `store`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dpmf import store, validation
from dpmf.errors import ArgumentError
from dpmf.numerics import Array
from dpmf.strategies.amplified import _families
from dpmf.strategies.amplified._search import Throw, search
from dpmf.strategies.base import InverseToeplitzStrategy, ToeplitzStrategy, pad_or_cut
from dpmf.strategies.buffered import BufferedStrategy, fault_in
from dpmf.strategies.settling import Loss, loss_of_noising, settled_loss

if TYPE_CHECKING:
    from dpmf.batching import Batching
    from dpmf.workloads import Workload

FAMILIES = ("toeplitz", "banded", "power", "geometric", "inverse", "blt")
_MAX_BINS = 2048  # of more bins only so many are sampled; the best coefficients hardly depend on their number
_MAX_BUFFERS = 15
_SHORT = np.array([0.45, 1.2])  # of (1 − λx)^(−a): a, and −log(1 − λ)
_BANDED = ("banded", "power", "geometric")
_NAMES = {"toeplitz": "Toeplitz", "inverse": "banded inverse", "blt": "BLT"}


class SampledError(NamedTuple):
    """What the search expects: an estimate of σ by sampling, and the root mean square error with it. No guarantee.

    Both are NaN where bins are so far apart that error × norm was minimised, without an estimate of σ. What was read
    from disk is not sampled again.
    """

    noise_multiplier: float
    root_mean_square: float


@dataclass(frozen=True)
class _Amplified(ToeplitzStrategy):
    """What strategies optimised here share.

    Attributes:
      batching: what σ was estimated for.
      workload: what the error was measured on.
      epsilon, delta: the target.
      family: one of `FAMILIES`.
      size: the bandwidth, or the number of buffers.
    """

    batching: Batching
    workload: Workload
    epsilon: float
    delta: float
    family: str
    size: int

    _kept: ClassVar[str] = "strategy_coef"  # what the store has of C, see `fault_in`

    @property
    def name(self) -> str:
        size = f"{'d' if self.family == 'blt' else 'p'}={self.size}"
        return f"optimised {_NAMES.get(self.family, self.family)}" + (
            "" if self.size == self.batching.iterations else f"({size})"
        )

    def check_iterations(self, iterations: int) -> None:
        if iterations > self.batching.iterations:
            raise validation.wrong(
                "iterations", f"at most {self.batching.iterations}, what {self.name} is optimised for", iterations
            )

    def _values(self, iterations: int) -> store.Values:
        self.check_iterations(iterations)
        return self._found()

    def _found(self) -> store.Values:
        parameters: dict[str, store.Parameter] = {
            "batching": repr(self.batching), "workload": self.workload.key, "epsilon": self.epsilon.hex(),
            "delta": self.delta.hex(), "family": self.family, "size": self.size,
        }  # fmt: skip
        what = self.name.removeprefix("optimised ")
        label = f"{what} for {self.batching.name}, {self.workload.name}, ε = {self.epsilon:g}"

        def holds(values: store.Values) -> bool:
            possible = not min(SampledError(*values["estimate"])) <= 0  # it may be NaN
            return possible and fault_in(values, self._kept, self.batching.iterations, self.size) is None

        return store.remember("optimised", parameters, label, self._search, holds)

    def estimate(self) -> SampledError:
        """Return what the search expects of the strategy, by sampling."""
        return SampledError(*self._found()["estimate"].tolist())

    def _search(self) -> store.Values:
        n, loss = self._loss()
        throw = _throw(self.batching)
        target = self.epsilon, self.delta
        start = None
        family = _family(self.family, n, self.size)
        if isinstance(family, _families.Banded) and self.size > 2:
            # Two parameters lead close to the best coefficients. From memory as long as the band, the search may end at
            # independent noise where short memory is best, so that it begins twice.
            power = _families.Power(n, self.size)
            ends = [search(power, throw, loss, target, begin, quick=True) for begin in (power.start, _SHORT)]
            best = min(ends, key=lambda end: math.inf if math.isnan(end.error) else end.error)
            start = family.parameters_of(power.columns(best.parameters).strategy)
        found = search(family, throw, loss, target, start)
        values: store.Values = {"estimate": np.array([found.noise_multiplier, found.error])}
        if isinstance(family, _families.Buffered) and self.family == "blt":
            values["buf_decay"], values["output_scale"] = family.parts(found.parameters)
        elif isinstance(family, _families.BandedInverse):
            values["noising_coef"] = family.noising(found.parameters)
        else:
            values["strategy_coef"] = np.trim_zeros(family.columns(found.parameters).strategy, "b")
        return values

    def _loss(self) -> tuple[int, Loss]:
        """The number of coefficients that the error depends on, and the mean squared error as a function of them."""
        batching, steps = self.batching, self.batching.steps
        per_throw = steps // batching.throws
        kept = getattr(self.workload, "kept", None)
        if steps < batching.iterations and kept is not None:  # damped sums, with gaps between throws
            local = self.workload.loss(per_throw)
            return per_throw, settled_loss(local, kept, per_throw, batching.throws, self.size)
        # Other workloads are taken as if there were no gaps, which only guides the search.
        return steps, loss_of_noising(self.workload.loss(steps))


@dataclass(frozen=True)
class AmplifiedToeplitz(_Amplified):
    """Toeplitz C with free coefficients, banded or not, or a series with two parameters, cut off after p."""

    def strategy_coef(self, iterations: int) -> Array:
        return pad_or_cut(self._values(iterations)["strategy_coef"], iterations)


@dataclass(frozen=True)
class AmplifiedInverse(_Amplified, InverseToeplitzStrategy):
    """Toeplitz C with a banded inverse."""

    _kept = "noising_coef"

    def noising_coef(self, iterations: int) -> Array:
        return pad_or_cut(self._values(iterations)["noising_coef"], iterations)


@dataclass(frozen=True)
class AmplifiedBuffers(_Amplified, BufferedStrategy):
    """Buffered linear Toeplitz C."""

    _kept = "buf_decay"

    def buffers(self, iterations: int) -> tuple[Array, Array]:
        values = self._values(iterations)
        return values["buf_decay"], values["output_scale"]


def optimised(
    batching: Batching,
    workload: Workload,
    target: tuple[float, float],
    *,
    bandwidth: int | None = None,
    buffers: int | None = None,
    family: str | None = None,
) -> AmplifiedToeplitz | AmplifiedInverse | AmplifiedBuffers:
    """Return the Toeplitz strategy with the least error × σ, where σ is what the target takes with this batching.

    Args:
      batching: how records are assigned to batches. Where bins are thrown anew, C must be banded.
      workload: what the error is measured on, as root mean square over all iterations.
      target: (ε, δ).
      bandwidth: the bandwidth of C, or of C⁻¹ for family "inverse".
      buffers: the number of buffers of a BLT.
      family: "toeplitz" (any coefficients), "banded", "power" (the series (1 − λx)^(−a), cut off after `bandwidth`
        coefficients), "geometric" (1, s, sr, sr², ..., cut off likewise), "inverse" (banded C⁻¹) or "blt"; by default
        what `bandwidth` or `buffers` suggest.

    All coefficients of C are non-negative. The search estimates σ by sampling; `dpmf.calibrate` finds one that is
    guaranteed.
    """
    if family is None:
        family = "blt" if buffers is not None else "toeplitz" if bandwidth is None else "banded"
    validation.choice("family", family, FAMILIES)
    if not hasattr(batching, "throws"):
        raise validation.wrong("batching", "a BallsInBins or a Poisson", batching)
    if not hasattr(workload, "loss"):
        raise validation.wrong("workload", "a dpmf workload", workload)
    epsilon, delta = _target(target)
    size = _size(family, bandwidth, buffers, batching)
    if batching.throws > 1:
        batching = _composed(batching, family, size)
    workload.check_iterations(batching.steps)
    fields = batching, workload, epsilon, delta, family, size
    if family == "inverse":
        return AmplifiedInverse(*fields)
    return AmplifiedBuffers(*fields) if family == "blt" else AmplifiedToeplitz(*fields)


def _family(name: str, iterations: int, size: int) -> _families.Family:
    if name == "blt":
        return _families.Buffered(iterations, size)
    if name == "geometric":
        return _families.Buffered(iterations, 1, size)
    if name == "inverse":
        return _families.BandedInverse(iterations, size)
    return _families.Power(iterations, size) if name == "power" else _families.Banded(iterations, size)


def _target(target: Any) -> tuple[float, float]:
    try:
        epsilon, delta = target
    except (TypeError, ValueError):
        raise validation.wrong("target", "a pair (ε, δ)", target) from None
    return validation.positive("target", epsilon), validation.probability("target", delta)


def _size(family: str, bandwidth: int | None, buffers: int | None, batching: Batching) -> int:
    if family == "blt":
        if bandwidth is not None:
            raise ArgumentError("bandwidth", "does not apply to family blt, which takes buffers")
        return validation.integer("buffers", 3 if buffers is None else buffers, at_least=1, at_most=_MAX_BUFFERS)
    if buffers is not None:
        raise ArgumentError("buffers", f"applies only to family blt, not to {family}")
    if bandwidth is None:
        if family in ("banded", "geometric", "inverse"):
            raise ArgumentError("bandwidth", f"must be given for family {family}")
        return batching.iterations
    if family == "toeplitz":
        raise ArgumentError("bandwidth", "does not apply to family toeplitz; family banded takes it")
    return min(validation.integer("bandwidth", bandwidth, at_least=1), batching.iterations)


def _composed(batching: Batching, family: str, size: int) -> Batching:
    """Refuse what is not covered where a record is assigned anew, and fill in the gap."""
    if family not in _BANDED or size > batching.batches_per_epoch:
        raise ArgumentError(
            "family", f"must be {', '.join(_BANDED)}, with a bandwidth of at most {batching.batches_per_epoch}, where "
            f"records are assigned anew ({batching.name}), got {family}",
        )  # fmt: skip
    period = getattr(batching, "period", None)
    if period is not None and size > period:
        raise ArgumentError("bandwidth", f"must be at most the period {period} of {batching.name}, got {size}")
    if hasattr(batching, "with_gap"):
        batching = batching.with_gap(size - 1)
        gap = batching.gap or 0
        # The bins of one record are a stride apart, also across throws: one of at least p needs no gap.
        if gap < size - 1 and batching.stride < size:
            raise ArgumentError("bandwidth", f"must be at most gap + 1 = {gap + 1}, got {size}")
    return batching


def _throw(batching: Batching) -> Throw:
    """What the Gram matrix of one throw is made from. For Poisson samples it is the norm of one column."""
    b, n = batching.batches_per_epoch, batching.iterations
    if hasattr(batching, "period"):
        return Throw(bins=1, stride=1, epochs=1, distance=n, rows=None, throws=batching.throws)
    bins = b // batching.stride
    rows = n if batching.fixed and bins <= _MAX_BINS else None
    epochs = batching.epochs // batching.throws
    return Throw(min(bins, _MAX_BINS), batching.stride, epochs, b, rows, batching.throws)
