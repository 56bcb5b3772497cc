"""What a design answers: options with their noise multipliers and errors, the best one, and how to train with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

import numpy as np

from dpmf.batching import BallsInBins, Poisson
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.buffered import BufferedStrategy
from dpmf.workloads import Damped, Momentum, Scheduled, Workload


@dataclass(frozen=True)
class Option:
    """One mechanism with its noise multiplier and error.

    Attributes:
      mechanism: the strategy and the batching.
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      error: root mean square over all iterations, gaps included.
      certified: whether σ is guaranteed; otherwise it is a sampled estimate, and not to be used.
      lower: a certified lower bound on σ for this mechanism, where there is one.
      copies: how many copies of the model the noise keeps between steps.
      method: how the noise is streamed.
    """

    mechanism: Mechanism
    noise_multiplier: float
    error: float
    certified: bool
    lower: float | None
    copies: int
    method: str

    @property
    def lower_error(self) -> float:
        """The error that σ = `lower` would give; 0 where there is no lower bound."""
        return 0.0 if self.lower is None else self.error * self.lower / self.noise_multiplier

    @property
    def needs(self) -> str:
        """What training has to do for this mechanism, in words."""
        batching = self.mechanism.batching
        if isinstance(batching, Poisson):
            batches = "Poisson samples" if batching.period == 1 else f"Poisson samples of {batching.period} groups"
        elif batching.fixed or not isinstance(batching, BallsInBins):
            batches = "one assignment to bins"
        else:
            often = "every epoch" if batching.rethrow_every == 1 else f"every {batching.rethrow_every} epochs"
            batches = f"new bins {often}" + (f", {batching.gap} rows of noise between" if batching.gap else "")
            batches += f", {batching.stride} groups of records" if batching.stride > 1 else ""
        return batches + ("; earlier noise drawn again" if self.method == "regeneration" else "")

    def strategy_code(self) -> str:
        """Python that makes the strategy."""
        strategy, n = self.mechanism.strategy, self.mechanism.batching.iterations
        if isinstance(strategy, BufferedStrategy):
            decay, scale = (tuple(values.tolist()) for values in strategy.buffers(n))
            return f"dpmf.strategies.buffered.GivenBuffers(decay={decay}, scale={scale})"
        assert isinstance(strategy, ToeplitzStrategy)
        column = np.trim_zeros(strategy.strategy_coef(n), "b")
        if len(column) == 1:
            return "dpmf.strategies.dpsgd()"
        if strategy.given_by_inverse or len(column) > 64:
            return self._optimised_code()
        numbers = fill(", ".join(map(repr, column.tolist())), 100, initial_indent="    ", subsequent_indent="    ")
        return f"dpmf.strategies.coefficients([\n{numbers},\n])"

    def _optimised_code(self) -> str:
        strategy: Any = self.mechanism.strategy
        size = {} if strategy.family == "toeplitz" else {"bandwidth": strategy.size}
        options = "".join(f", {name}={value}" for name, value in size.items())
        target = f"({strategy.epsilon!r}, {strategy.delta!r})"
        return f"dpmf.strategies.optimised(batching, workload, {target}, family={strategy.family!r}{options})"

    def batching_code(self) -> str:
        """Python that makes the batching."""
        batching = self.mechanism.batching
        k, b = batching.epochs, batching.batches_per_epoch
        if isinstance(batching, Poisson):
            return f"dpmf.batching.Poisson({k}, {b}, period={batching.period})"
        assert isinstance(batching, BallsInBins)
        if batching.throws == 1:
            return f"dpmf.BallsInBins({k}, {b})"
        more = f", stride={batching.stride}" if batching.stride > 1 else ""
        return f"dpmf.BallsInBins({k}, {b}, rethrow_every={batching.rethrow_every}, gap={batching.gap}{more})"

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        strategy, batching = self.mechanism.strategy, self.mechanism.batching
        assert isinstance(strategy, ToeplitzStrategy)
        n = batching.iterations
        return {
            "error": self.error,
            "noise_multiplier": self.noise_multiplier,
            "certified": self.certified,
            "lower": self.lower,
            "strategy": strategy.name,
            "coefficients": np.trim_zeros(strategy.strategy_coef(n), "b").tolist(),
            "make_strategy": self.strategy_code(),
            "batching": batching.name,
            "make_batching": self.batching_code(),
            "iterations": n,
            "copies": self.copies,
            "method": self.method,
            "needs": self.needs,
        }


@dataclass(frozen=True)
class Design:
    """The mechanism with the least guaranteed error, and those that it was compared with.

    Attributes:
      best: the option with the least error among those with a guaranteed noise multiplier.
      others: the other options, least error first; those that are not certified are estimates by sampling.
      baseline: independent noise (DP-SGD) with its best batching among those considered; None if it was not considered.
      workload: what the error was measured on.
      target_epsilon, target_delta: the guarantee.
      complete: whether every option that could still win got a guaranteed noise multiplier.
      problems: options that were left out, and why.
    """

    best: Option
    others: tuple[Option, ...]
    baseline: Option | None
    workload: Workload
    target_epsilon: float
    target_delta: float
    complete: bool
    problems: tuple[str, ...] = field(default=())

    @property
    def at_most_above_optimal(self) -> float:
        """The best error cannot be more than this many times that of any option with a lower bound here.

        Whatever the accountant: lower bounds on noise multipliers say so. It is infinite where no option has one. It
        compares the options with the coefficients given: other coefficients are not covered.

        **Formal guarantees.** No accountant of the same dominating pair can go below the lower bounds.
        """
        lowest = [option.lower_error for option in (self.best, *self.others) if option.lower is not None]
        return max(1.0, self.best.error / min(lowest)) if lowest and min(lowest) > 0 else math.inf

    @property
    def gain(self) -> float | None:
        """How many times the error of `baseline` the best one is."""
        return None if self.baseline is None else self.best.error / self.baseline.error

    def code(self) -> str:
        """The lines of Python that train with the best option."""
        lines = ["import dpmf", "from dpmf.training import make_private", ""]
        strategy = self.best.strategy_code()
        lines.append(f"batching = {self.best.batching_code()}")
        if "workload" in strategy:
            lines.append(f"workload = {workload_code(self.workload)}")
        lines += [
            f"strategy = {strategy}",
            "mechanism = dpmf.Mechanism(strategy, batching)",
            "private = make_private(",
            "    model, optimizer, dataset, mechanism,",
            f"    target_epsilon={self.target_epsilon!r}, target_delta={self.target_delta!r}, max_grad_norm=1.0,",
            ")",
        ]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        bound = self.at_most_above_optimal
        return {
            "target_epsilon": self.target_epsilon,
            "target_delta": self.target_delta,
            "workload": self.workload.name,
            "complete": self.complete,
            "best": self.best.to_dict(),
            "others": [option.to_dict() for option in self.others],
            "baseline": None if self.baseline is None else self.baseline.to_dict(),
            "gain": self.gain,
            "at_most_above_optimal": bound if math.isfinite(bound) else None,
            "with_lower": sum(option.lower is not None for option in (self.best, *self.others)),
            "problems": list(self.problems),
            "code": self.code(),
        }


def workload_code(workload: Workload) -> str:
    """Python that makes a workload; a name to fill in where its numbers are the user's."""
    if isinstance(workload, Damped):
        given = math.isfinite(workload.memory)
        return f"dpmf.workloads.damped({workload.memory!r})" if given else "dpmf.workloads.prefix()"
    if isinstance(workload, Momentum):
        return f"dpmf.workloads.momentum({workload.beta!r}, weight_decay={workload.decay!r})"
    if isinstance(workload, Scheduled):
        rates = repr(workload.shape) if workload.data is None else "learning_rates"
        memory = f", memory={workload.memory!r}" if math.isfinite(workload.memory) else ""
        return f"dpmf.workloads.schedule({rates}, warm_up={workload.warm_up!r}, beta={workload.beta!r}{memory})"
    return "dpmf.workloads.matrix(your_matrix)"
