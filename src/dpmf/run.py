"""A run: everything that the guarantee of a training run depends on, as one value.

Mechanism and noise multiplier say what is added. A run also says to what gradients are clipped, by what sums are
divided, whether batches are cut, what is protected, and where one may stop. What is asked about a run (`dpmf.epsilon`,
`dpmf.tradeoff`, `dpmf.statement` and so on) is answered with all of that; a mechanism with a noise multiplier is a run
without a cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dpmf import validation
from dpmf._version import __version__
from dpmf.batching import AnyBatching, BallsInBins, Poisson
from dpmf.cut import Cut
from dpmf.errors import ArgumentError
from dpmf.formatting import given
from dpmf.gram.means import raised_column
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.explicit import coefficients

UNITS = ("record", "user")


@dataclass(frozen=True)
class Run:
    """A training run, finished or not.

    Attributes:
      mechanism: strategy and batching.
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      clip_norm: the norm to which what a record (or user) contributes to a step is clipped.
      divisor: what sums of clipped gradients are divided by; None if they are not.
      max_batch_size: the number of records (or users) to which larger batches are cut; None if none is.
      records: a public number: an upper bound on that of records (or users) where batches are cut.
      public: whether the number of records plays no part in what is released, because constants take its place.
      unit: what is protected, a "record" or a "user" with all of its records.
      precision: in which gradients are clipped and added up, and noise is drawn.
      stops: the steps, named in advance, at which one may stop and look at less than the whole run's ε.
    """

    mechanism: Mechanism
    noise_multiplier: float
    clip_norm: float = 1.0
    divisor: float | None = None
    max_batch_size: int | None = None
    records: int | None = None
    public: bool = True
    unit: str = "record"
    precision: str = "float32"
    stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise validation.wrong("mechanism", "a dpmf.Mechanism", self.mechanism)
        for name in ("noise_multiplier", "clip_norm", "divisor", "max_batch_size", "records"):
            value = getattr(self, name)
            if name in ("max_batch_size", "records"):
                value = value if value is None else validation.integer(name, value, at_least=1)
            elif name != "divisor" or value is not None:
                value = validation.positive(name, value)
            object.__setattr__(self, name, value)
        if self.max_batch_size is not None and self.records is None:
            raise ArgumentError("records", "must be given with max_batch_size, as an upper bound on their number")
        validation.flag("public", self.public)
        validation.choice("unit", self.unit, UNITS)
        object.__setattr__(self, "stops", checked_stops(self.stops, self.steps))

    @cached_property
    def cut(self) -> Cut | None:
        """How batches are cut, with what that costs in δ; None if they are not."""
        if self.max_batch_size is None or self.records is None:
            return None
        return Cut(self.mechanism.batching, self.records, self.max_batch_size)

    @property
    def steps(self) -> int:
        """The number of steps. Iterations of a gap have none."""
        return self.mechanism.batching.steps

    @property
    def relation(self) -> str:
        """How two data sets may differ that the guarantee compares, in words.

        To add or to remove a record changes their number. That is covered where the number plays no part: where
        constants take its place, and where no record's group depends on which others there are.
        """
        batching = self.mechanism.batching
        groups = batching.period if isinstance(batching, Poisson) else getattr(batching, "stride", 1)
        if self.public and groups == 1:
            return f"one {self.unit} is added or removed"
        return f"the place of one {self.unit} is left empty"

    def until(self, step: int) -> Run:
        """The run of the first steps, as many as were begun together: the same bins, epochs or throws.

        **Formal guarantees.** C is lower triangular, so that the first rows of its noisy product are a mechanism of
        their own, with the first rows and columns of C; coefficients are those of all iterations, raised by their error
        (`raised_column`), whatever the strategy would be for fewer. A C that is not Toeplitz is not split.
        """
        strategy, batching = self.mechanism.strategy, _first_batches(self.mechanism.batching, step)
        if batching.iterations >= self.mechanism.batching.iterations or not isinstance(strategy, ToeplitzStrategy):
            return replace(self, stops=())
        column = raised_column(strategy, self.mechanism.batching.iterations)[: batching.iterations]
        return replace(self, mechanism=Mechanism(coefficients(column), batching), stops=())

    def stopped(self, stop: int | None, delta: float) -> tuple[Run, float]:
        """What those look at who stop at a step that was named in advance, and the share of δ for it.

        Args:
          stop: the step, or None for the end, which is one of the stopping points.
          delta: δ for all of them together.
        """
        if stop is not None and stop not in self.stops:
            named = ", ".join(map(str, self.stops)) or "none was"
            raise validation.wrong("stop", f"one of the stopping points that were named in advance ({named})", stop)
        share = math.nextafter(delta / (len(self.stops) + 1), 0.0) if self.stops else delta
        return self if stop is None else self.until(stop), share

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            **self.mechanism.description,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
            "divisor": self.divisor,
            "max_batch_size": self.max_batch_size,
            "records": self.records,
            "relation": self.relation,
            "unit": self.unit,
            "precision": self.precision,
            "steps": self.steps,
            "stops": list(self.stops),
            "code": f"dpmf {__version__}",
        }


def checked_stops(stops: Sequence[int], steps: int) -> tuple[int, ...]:
    """Stopping points in increasing order, each of them before the last step."""
    if not isinstance(stops, Sequence):
        raise validation.wrong("stops", "a sequence of steps", stops)
    return tuple(sorted({validation.integer("stops", t, at_least=1, at_most=max(steps - 1, 0)) for t in stops}))


def asked_about(asked: Mechanism | Run, noise_multiplier: float | None) -> tuple[Mechanism, float, Cut | None]:
    """The mechanism, the noise multiplier and the cut that a public function is asked about.

    Args:
      asked: a run, or a mechanism, which is a run without a cut.
      noise_multiplier: σ of a mechanism; None for a run.
    """
    if not isinstance(asked, Run):
        if noise_multiplier is None and isinstance(asked, Mechanism):
            raise ArgumentError("noise_multiplier", "must be given with a mechanism; only a dpmf.Run has its own")
        return only_mechanism(asked, " or a dpmf.Run"), asked.checked_noise(noise_multiplier), None
    if noise_multiplier is not None:
        own = f"must be left out for a run, which has its own, {given(asked.noise_multiplier)}"
        raise ArgumentError("noise_multiplier", f"{own}; got {noise_multiplier!r}")
    cut = asked.cut if asked.cut is not None and asked.cut.probability else None  # 0: no batch is ever so large
    return asked.mechanism, asked.mechanism.checked_noise(asked.noise_multiplier), cut


def only_mechanism(asked: object, otherwise: str = "") -> Mechanism:
    """A mechanism, or an error that says what else it may be; a run has its noise multiplier already."""
    if not isinstance(asked, Mechanism):
        other = " (a run has its noise multiplier already)" if isinstance(asked, Run) else otherwise
        raise validation.wrong("mechanism", f"a dpmf.Mechanism{other}", asked)
    return asked


def _first_batches(batching: AnyBatching, steps: int) -> AnyBatching:
    b = batching.batches_per_epoch
    if batching.fixed:
        return BallsInBins.from_iterations(max(steps, b), b)
    epochs = math.ceil(steps / b)
    if isinstance(batching, Poisson):
        return replace(batching, epochs=epochs)
    assert isinstance(batching, BallsInBins)
    m = batching.rethrow_every or 1
    throws = math.ceil(epochs / m)
    return BallsInBins(
        throws * m,
        b,
        rethrow_every=batching.rethrow_every,
        stride=batching.stride,
        gap=batching.gap if throws > 1 else None,
    )
