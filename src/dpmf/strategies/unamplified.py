"""Strategies found by numerical optimisation: BandMF, BLT, BandInvMF.

They are optimised for a number of iterations and (BLT, BandInvMF) for how often and how far apart a record takes part.
`Mechanism` fills that in from the batching, through `for_batching`; it can also be given by hand. Without it, they are
optimised for the iterations asked for and a single participation. Results are kept on disk (see `store`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from dpmf import errors, store, validation
from dpmf.numerics import Array
from dpmf.strategies.base import InverseToeplitzStrategy, ToeplitzStrategy, pad_or_cut
from dpmf.strategies.buffered import BufferedStrategy, fault_in

if TYPE_CHECKING:
    from dpmf.batching import AnyBatching

_ERRORS = ("max", "mean")
_MAX_BUFFERS = 15  # jax-privacy refuses more: the optimisation is no longer stable


@dataclass(frozen=True)
class _Optimised(ToeplitzStrategy):
    """What optimised strategies share: the number of iterations they are optimised for."""

    iterations: int | None = field(default=None, kw_only=True)

    def for_batching(self, batching: AnyBatching) -> _Optimised:
        return replace(self, iterations=self.iterations or batching.iterations)

    def check_iterations(self, iterations: int) -> None:
        if self.iterations is not None and iterations > self.iterations:
            raise validation.wrong(
                "iterations", f"at most {self.iterations}, what {self.name} is optimised for", iterations
            )

    def _horizon(self, iterations: int) -> int:
        """Return the number of iterations to optimise for, if this many are asked for."""
        self.check_iterations(iterations)
        return iterations if self.iterations is None else self.iterations


@dataclass(frozen=True)
class _OptimisedForSchedule(_Optimised):
    """What strategies share that are optimised for the participation schedule, too."""

    min_sep: int | None = field(default=None, kw_only=True)
    max_participations: int | None = field(default=None, kw_only=True)

    def for_batching(self, batching: AnyBatching) -> _OptimisedForSchedule:
        filled = replace(self, iterations=self.iterations or batching.iterations)
        if self.min_sep is None and self.max_participations is None:
            filled = replace(filled, min_sep=batching.batches_per_epoch, max_participations=batching.epochs)
        return filled

    def _problem(self, iterations: int) -> tuple[int, int, int]:
        """Return (n, min_sep, participations), the same for equal problems, so that they share a file of the store."""
        n = self._horizon(iterations)
        most = 1 if self.min_sep is None else -(-n // self.min_sep)
        k = most if self.max_participations is None else min(self.max_participations, most)
        return n, (n if k == 1 or self.min_sep is None else self.min_sep), k


@dataclass(frozen=True)
class BandMF(_Optimised):
    """The banded Toeplitz C with the least mean squared error of the prefix sums (McKenna 2024), by jax-privacy.

    The error is that of a single participation. For k participations at least p iterations apart it is k times as
    large, so the optimum is the same. C is kept as the library gives it: its first column has norm one.
    """

    p: int

    @property
    def name(self) -> str:
        return f"BandMF(p={self.p})"

    def strategy_coef(self, iterations: int) -> Array:
        n = self._horizon(iterations)
        bands = min(self.p, n)
        if bands == 1:
            return pad_or_cut(np.ones(1), iterations)  # there is nothing to choose

        def compute() -> store.Values:
            with _jax_double("BandMF"):
                from jax_privacy.matrix_factorization import toeplitz

                return {"strategy_coef": np.array(toeplitz.optimize_banded_toeplitz(n, bands), dtype=np.float64)}

        found = _remember("bandmf", self.name, "strategy_coef", n, bands, {"bands": bands}, compute)
        # What is left below zero is rounding.
        return pad_or_cut(np.maximum(found["strategy_coef"], 0.0), iterations)


@dataclass(frozen=True)
class BLT(_OptimisedForSchedule, BufferedStrategy):
    """The buffered linear Toeplitz C with d buffers that has the least error (Dvijotham et al. 2024), by jax-privacy.

    Minimises the largest (or mean) squared error of the prefix sums times the squared sensitivity for the participation
    schedule.
    """

    d: int | None
    error: str

    @property
    def name(self) -> str:
        return f"BLT(d={'auto' if self.d is None else self.d}{_suffix(self.error, 'max')})"

    def buffers(self, iterations: int) -> tuple[Array, Array]:
        n, min_sep, k = self._problem(iterations)
        if n == 1:
            return np.zeros(0), np.zeros(0)

        def compute() -> store.Values:
            bounds = {} if self.d is None else {"min_buffers": self.d, "max_buffers": self.d}
            with _jax_double("BLT"):
                from jax_privacy.matrix_factorization import buffered_toeplitz

                try:
                    blt = buffered_toeplitz.optimize(
                        n=n, min_sep=min_sep, max_participations=k, error=self.error, **bounds
                    )
                except RuntimeError as error:
                    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                    raise RuntimeError(
                        f"{self.name} could not be optimised for {n} iterations: {reason}; try fewer buffers"
                    ) from error
                decay = np.array(blt.buf_decay, dtype=np.float64)
                scale = np.array(blt.output_scale, dtype=np.float64)
            return {"buf_decay": decay, "output_scale": scale}

        parameters: dict[str, store.Parameter] = {
            "min_sep": min_sep, "participations": k, "buffers": self.d, "error": self.error
        }  # fmt: skip
        found = _remember("blt", self.name, "buf_decay", n, self.d or _MAX_BUFFERS, parameters, compute)
        return found["buf_decay"], found["output_scale"]


@dataclass(frozen=True)
class BandInvMF(_OptimisedForSchedule, InverseToeplitzStrategy):
    """The C with banded Toeplitz inverse that has the least error (Kalinin et al. 2025), optimised here.

    Minimises the mean (``error="mean"``) or largest squared error of the prefix sums times the squared sensitivity of a
    record that takes part every `min_sep` iterations, at most `max_participations` times. The mean error is the one
    that gives jax-privacy's C⁻¹ = 1, −0.587, −0.169, −0.028 for 100 iterations, 4 bands, min_sep 10 and 10
    participations (the largest error gives 1, −0.585, −0.164, −0.072).
    All entries of C are in [0, 1].
    """

    p: int
    error: str

    @property
    def name(self) -> str:
        return f"BandInvMF(p={self.p}{_suffix(self.error, 'mean')})"

    def noising_coef(self, iterations: int) -> Array:
        n, min_sep, k = self._problem(iterations)
        bands = min(self.p, n)
        if bands == 1:
            return pad_or_cut(np.ones(1), iterations)

        def compute() -> store.Values:
            from dpmf.strategies.banded_inverse import optimise_noising_coef

            return {"noising_coef": optimise_noising_coef(n, bands, min_sep, k, self.error)}

        parameters: dict[str, store.Parameter] = {
            "min_sep": min_sep, "participations": k, "bands": bands, "error": self.error
        }  # fmt: skip
        found = _remember("bandinvmf", self.name, "noising_coef", n, bands, parameters, compute)
        return pad_or_cut(found["noising_coef"], iterations)


def bandmf(bandwidth: int, *, iterations: int | None = None) -> BandMF:
    """Return the optimised banded Toeplitz strategy (needs jax-privacy).

    Args:
      bandwidth: the bandwidth p of C.
      iterations: the number of iterations to optimise for; by default those of the mechanism.
    """
    p = validation.integer("bandwidth", bandwidth, at_least=1)
    return BandMF(p, iterations=_optional("iterations", iterations))


def blt(
    buffers: int | None = None,
    error: str = "max",
    *,
    iterations: int | None = None,
    min_sep: int | None = None,
    max_participations: int | None = None,
) -> BLT:
    """Return the optimised buffered linear Toeplitz strategy (needs jax-privacy).

    Args:
      buffers: the number of buffers d; by default the optimiser takes as many as help.
      error: which squared error of the prefix sums to minimise, "max" or "mean".
      iterations: the number of iterations to optimise for; by default those of the mechanism.
      min_sep: the least number of iterations between two participations of a record; by default the batches per epoch.
      max_participations: how often a record takes part at most; by default once per epoch.
    """
    if buffers is not None:
        buffers = validation.integer("buffers", buffers, at_least=1, at_most=_MAX_BUFFERS)
    error = validation.choice("error", error, _ERRORS)
    n, b, k = _schedule(iterations, min_sep, max_participations)
    return BLT(buffers, error, iterations=n, min_sep=b, max_participations=k)


def bandinvmf(
    bandwidth: int,
    error: str = "mean",
    *,
    iterations: int | None = None,
    min_sep: int | None = None,
    max_participations: int | None = None,
) -> BandInvMF:
    """Return the optimised strategy whose inverse is banded Toeplitz.

    Args:
      bandwidth: the bandwidth p of C⁻¹.
      error: which squared error of the prefix sums to minimise, "max" or "mean".
      iterations: the number of iterations to optimise for; by default those of the mechanism.
      min_sep: the least number of iterations between two participations of a record; by default the batches per epoch.
      max_participations: how often a record takes part at most; by default once per epoch.
    """
    p = validation.integer("bandwidth", bandwidth, at_least=1)
    error = validation.choice("error", error, _ERRORS)
    n, b, k = _schedule(iterations, min_sep, max_participations)
    return BandInvMF(p, error, iterations=n, min_sep=b, max_participations=k)


def _optional(name: str, value: int | None) -> int | None:
    return None if value is None else validation.integer(name, value, at_least=1)


def _schedule(
    iterations: int | None, min_sep: int | None, max_participations: int | None
) -> tuple[int | None, int | None, int | None]:
    k = _optional("max_participations", max_participations)
    if k is not None and k > 1 and min_sep is None:
        raise errors.ArgumentError(
            "min_sep", f"must be given with max_participations > 1, got max_participations = {k} alone"
        )
    return _optional("iterations", iterations), _optional("min_sep", min_sep), k


def _suffix(error: str, usual: str) -> str:
    return "" if error == usual else f", {error} error"


def _remember(
    kind: str, name: str, kept: str, n: int, most: int, parameters: dict[str, store.Parameter],
    compute: Callable[[], store.Values],
) -> store.Values:  # fmt: skip
    """Call `store.remember` for what `fault_in` finds no fault in. What jax-privacy has computed does not import it."""

    def checked() -> store.Values:
        values = compute()
        if fault := fault_in(values, kept, n, most):
            raise RuntimeError(f"the optimiser failed for {name}: it gave {fault}")
        return values

    return store.remember(
        kind, {"n": n, **parameters}, f"{name} for N={n}", checked,
        lambda values: fault_in(values, kept, n, most) is None,
    )  # fmt: skip


@contextlib.contextmanager
def _jax_double(purpose: str) -> Iterator[None]:
    """Make jax use double precision inside the block only, and keep its warnings off the progress line."""
    try:
        import jax
        import jax_privacy.matrix_factorization  # noqa: F401 - so that a broken installation is told apart here
    except ImportError:
        raise errors.missing_extra("jax-privacy", "jax", purpose) from None
    chatter = logging.getLogger("absl")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with jax.enable_x64():
            yield
    finally:
        chatter.setLevel(level)
