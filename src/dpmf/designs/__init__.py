"""Design: choose the mechanism, not only its noise.

From the shape of the run, the target (ε, δ), what the model does with noise (the workload) and how many copies of the
model the noise may keep, `design` finds the mechanism with the least error. Coefficients are optimised for every
candidate with a sampled noise multiplier; the most promising candidates then get a guaranteed one, until no other
candidate can win or time is up. What is finished is kept in the cache directory, so that a design goes on where it was
interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpmf import api, lower_bounds, progress, validation
from dpmf._version import __version__
from dpmf.batching import BallsInBins, Batching, Poisson, batches_from_size
from dpmf.designs._candidates import BATCHINGS, Candidate, candidates
from dpmf.errors import ArgumentError, CalibrationError
from dpmf.mechanism import Mechanism
from dpmf.strategies import cache
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.buffered import BufferedStrategy
from dpmf.strategies.streaming import how_to_stream
from dpmf.workloads import Workload, error, prefix

__all__ = ["BATCHINGS", "Design", "Option", "design"]

DEFAULT_SECONDS = 240.0
_TOLERANCE = 1e-3  # of calibration: the error is not needed more accurately
_SAMPLING = 0.985  # a sampled error may be this much too large, and a candidate above the best one still be better
_CERTIFIED_AT_MOST = 12
_FIRST_SHARE = 0.6  # the part of the time left that one calibration may take
_LOWER_SECONDS = 10.0
_VERSION = 1  # to be raised whenever accountants give other numbers at the same version of dpmf


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
        elif batching.fixed:
            batches = "one assignment to bins"
        else:
            often = "every epoch" if batching.rethrow_every == 1 else f"every {batching.rethrow_every} epochs"
            batches = f"new bins {often}" + (f", {batching.gap} steps without data between" if batching.gap else "")
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
        return f"dpmf.strategies.coefficients({column.tolist()})"

    def _optimised_code(self) -> str:
        strategy: Any = self.mechanism.strategy
        size = {} if strategy.family == "toeplitz" else {"bandwidth": strategy.size}
        options = "".join(f", {name}={value}" for name, value in size.items())
        target = f"({strategy.epsilon!r}, {strategy.delta!r})"
        return (
            f"dpmf.strategies.optimised(batching, workload, {target}, family={strategy.family!r}{options})"
        )

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
        """The best error cannot be more than this many times that of any option here, whatever the accountant.

        It is infinite where some option has no lower bound on its noise multiplier. It compares the options with the
        coefficients given: other coefficients are not covered.

        **Formal guarantees.** No accountant of the same dominating pair can go below the lower bounds.
        """
        least = min(option.lower_error for option in (self.best, *self.others))
        return self.best.error / least if least > 0 else math.inf

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
        if "buffered" in strategy:
            lines[1:1] = ["import dpmf.strategies.buffered"]
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
            "problems": list(self.problems),
            "code": self.code(),
        }


def workload_code(workload: Workload) -> str:
    """Python that makes a workload; a name to fill in where its numbers are the user's."""
    from dpmf.workloads import Damped, Momentum, Scheduled

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


def design(
    *,
    epochs: int,
    batches_per_epoch: int | None = None,
    target_epsilon: float,
    target_delta: float,
    workload: Workload | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    batchings: Sequence[str] | None = None,
    bandwidths: Sequence[int] | None = None,
    copies: int | None = None,
    time_budget: float | None = DEFAULT_SECONDS,
    workers: int = 1,
) -> Design:
    """Find the mechanism with the least error at (ε, δ), among strategies, bandwidths and batchings.

    Args:
      epochs: k.
      batches_per_epoch: b; or give `dataset_size` and `batch_size` in its place.
      target_epsilon: ε > 0.
      target_delta: δ, strictly between 0 and 1.
      workload: how noise adds up in the model; by default prefix sums.
      dataset_size: the number of records.
      batch_size: the number of records in a batch, on average.
      batchings: names out of `BATCHINGS`; by default all of them.
      bandwidths: the bandwidths to consider; by default powers of two up to 64, and free coefficients.
      copies: how many copies of the model the noise may keep between steps; by default any number.
      time_budget: seconds after which the best answer found so far is returned. Work that is finished is kept in the
        cache directory, and the next call goes on from there.
      workers: how many processes to use. With more than one, a script needs the usual ``if __name__ == "__main__"``.

    Returns:
      A `Design`.

    **Formal guarantees.** The noise multiplier of `best` has those of `dpmf.calibrate`. Other options say whether
    theirs is certified. The search itself guarantees nothing about mechanisms that it did not consider.
    """
    if batches_per_epoch is None:
        if dataset_size is None or batch_size is None:
            raise ArgumentError("batches_per_epoch", "must be given, or dataset_size and batch_size in its place")
        batches_per_epoch = batches_from_size(dataset_size, batch_size)
    shape = BallsInBins(epochs, batches_per_epoch)
    epsilon = validation.positive("target_epsilon", target_epsilon)
    delta = validation.probability("target_delta", target_delta)
    chosen = prefix() if workload is None else workload
    if not isinstance(chosen, Workload):
        raise validation.wrong("workload", "a dpmf workload", workload)
    seconds = math.inf if time_budget is None else validation.positive("time_budget", time_budget)
    workers = validation.integer("workers", workers, at_least=1, at_most=64)
    todo = candidates(
        shape.epochs, shape.batches_per_epoch, batchings=batchings, bandwidths=bandwidths, copies=copies
    )
    with _crew(workers) as run:
        return _Search(todo, chosen, (epsilon, delta), copies, seconds, run).result()


# What runs tasks: it takes a function and its arguments, and yields (argument, result) as they come.
_Run = Callable[[Callable[..., Any], Sequence[Any]], Iterator[tuple[Any, Any]]]


@contextlib.contextmanager
def _crew(workers: int) -> Iterator[_Run]:
    """Something that runs tasks, in this process or in several."""
    if workers == 1:
        yield lambda function, tasks: ((task, function(task)) for task in tasks)
        return
    import multiprocessing
    import signal

    ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=ignore[0], initargs=ignore[1]) as pool:

        def run(function: Callable[..., Any], tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
            return pool.imap_unordered(_Numbered(function), tasks)

        yield run


@dataclass(frozen=True)
class _Numbered:
    """A function that returns its argument, too."""

    function: Callable[..., Any]

    def __call__(self, task: Any) -> tuple[Any, Any]:
        return task, self.function(task)


@dataclass(frozen=True)
class _Task:
    """One piece of work: a candidate, and how many seconds its guarantee may take (0 for an estimate only)."""

    candidate: Candidate
    workload: Workload
    target: tuple[float, float]
    ends: float
    share: float


class _Search:
    """A search for the best option, within a number of seconds."""

    def __init__(
        self,
        todo: list[Candidate],
        workload: Workload,
        target: tuple[float, float],
        copies: int | None,
        seconds: float,
        run: _Run,
    ) -> None:
        self._todo, self._workload, self._target, self._copies, self._run = todo, workload, target, copies, run
        self._ends = time.time() + seconds
        self._options: dict[Candidate, Option] = {}
        self._problems: list[str] = []

    def result(self) -> Design:
        quick = [c for c in self._todo if c.separate]
        slow = [c for c in self._todo if not c.separate]
        self._work(_certified, quick, 1.0)
        if not any(option.certified for option in self._options.values()) and slow:
            self._work(_certified, [c for c in slow if c.family == "dpsgd"][:1] or slow[:1], 1.0)
        self._work(_estimated, slow, 0.5)
        complete = self._certify(slow)
        return self._answer(complete)

    def _work(self, function: Callable[[_Task], Option | str], todo: Sequence[Candidate], share: float) -> None:
        """Do some work for each candidate, as far as there is time."""
        tasks = [
            _Task(c, self._workload, self._target, self._ends, share)
            for c in todo
            if c not in self._options or not self._options[c].certified
        ]
        for task, found in self._run(function, tasks):
            if isinstance(found, str):
                self._problems.append(found)
            elif self._copies is not None and found.copies > self._copies:
                self._problems.append(f"{found.mechanism.name} keeps {found.copies} copies of the model")
            else:
                self._options[task.candidate] = found
                certain = [option.error for option in self._options.values() if option.certified]
                best = f", least guaranteed error {min(certain):.4g}" if certain else ""
                progress.say(f"{len(self._options)} of {len(self._todo)} mechanisms{best}")

    def _certify(self, slow: list[Candidate]) -> bool:
        """Certify options in the order of their sampled errors until none is left that could win."""
        for _ in range(_CERTIFIED_AT_MOST):
            best = min((o.error for o in self._options.values() if o.certified), default=math.inf)
            left = [
                c
                for c, option in self._options.items()
                if not option.certified and option.error * _SAMPLING < best
            ]
            left.sort(key=lambda c: self._options[c].error)
            if not left:
                return all(c in self._options for c in slow)
            if time.time() >= self._ends:
                return False
            self._work(_certified, left[:2], _FIRST_SHARE)
            if not any(self._options[c].certified for c in left[:2]):
                return False
        return False

    def _answer(self, complete: bool) -> Design:
        options = sorted(self._options.values(), key=lambda option: (not option.certified, option.error))
        if not options or not options[0].certified:
            raise CalibrationError(
                "no mechanism got a guaranteed noise multiplier in the time given; " + "; ".join(self._problems[:3])
            )
        baseline = next((o for o in options if o.certified and o.mechanism.strategy.name == "DP-SGD"), None)
        best = options.pop(0)
        return Design(
            best, tuple(sorted(options, key=lambda option: option.error)), baseline, self._workload, *self._target,
            complete, tuple(self._problems),
        )  # fmt: skip


def _estimated(task: _Task) -> Option | str:
    """The option with a sampled noise multiplier, or why there is none."""
    if time.time() >= task.ends:
        return f"{task.candidate.family}, {task.candidate.batching.name}: there was no time for it"
    try:
        mechanism = Mechanism(task.candidate.strategy(task.workload, task.target), task.candidate.batching)
        estimate = getattr(mechanism.strategy, "estimate", lambda: None)()
    except (ValueError, RuntimeError, np.linalg.LinAlgError) as reason:
        return f"{task.candidate.family}, {task.candidate.batching.name}: {reason}"
    if estimate is None or not math.isfinite(estimate.noise_multiplier):
        return _certified(task)
    return _option(mechanism, task.workload, estimate.noise_multiplier, None, certified=False)


def _certified(task: _Task) -> Option | str:
    """The option with a guaranteed noise multiplier, and a lower bound on it."""
    seconds = max(1.0, task.share * (task.ends - time.time()))
    try:
        mechanism = Mechanism(task.candidate.strategy(task.workload, task.target), task.candidate.batching)
        sigma, lower = _calibrated(mechanism, task.target, seconds)
    except (ValueError, RuntimeError, np.linalg.LinAlgError) as reason:
        return f"{task.candidate.family}, {task.candidate.batching.name}: {reason}"
    return _option(mechanism, task.workload, sigma, lower, certified=True)


def _calibrated(mechanism: Mechanism, target: tuple[float, float], seconds: float) -> tuple[float, float | None]:
    """A guaranteed noise multiplier and a lower bound, from the cache directory if they are there."""
    epsilon, delta = target
    strategy, batching = mechanism.strategy, mechanism.batching
    assert isinstance(strategy, ToeplitzStrategy)
    column = np.ascontiguousarray(strategy.strategy_coef(batching.iterations), dtype="<f8")
    key: dict[str, cache.Parameter] = {
        "column": hashlib.sha256(column.tobytes()).hexdigest(), "inverse": str(strategy.given_by_inverse),
        "batching": repr(batching), "epsilon": epsilon.hex(), "delta": delta.hex(),
    }  # fmt: skip

    def compute() -> cache.Values:
        found = api.calibrate(
            mechanism, target_epsilon=epsilon, target_delta=delta, relative_tolerance=_TOLERANCE,
            time_budget=seconds if math.isfinite(seconds) else None,
        )  # fmt: skip
        if any(details.get("budget_exhausted") for details in found.details.values()):
            raise _Unfinished(found.noise_multiplier)
        return {"noise_multiplier": np.array([found.noise_multiplier]), "lower": np.array([_lower(mechanism, target)])}

    try:
        values = cache.remember("certified", key, f"dpmf {__version__}.{_VERSION}", None, compute)
    except _Unfinished as early:
        return early.noise_multiplier, None  # a guarantee all the same, but not the last word
    lower = float(values["lower"][0])
    return float(values["noise_multiplier"][0]), lower if lower > 0 else None


class _Unfinished(Exception):
    """Calibration ended early, with a noise multiplier that is guaranteed and larger than it need be."""

    def __init__(self, noise_multiplier: float) -> None:
        super().__init__()
        self.noise_multiplier = noise_multiplier


def _lower(mechanism: Mechanism, target: tuple[float, float]) -> float:
    from dpmf import budget

    with budget.time_limit(_LOWER_SECONDS):
        return lower_bounds.lower_noise_multiplier(mechanism, *target)


def _option(
    mechanism: Mechanism, workload: Workload, sigma: float, lower: float | None, *, certified: bool
) -> Option:
    streaming = how_to_stream(mechanism.strategy, mechanism.batching.iterations)
    size = error(mechanism, sigma, workload).root_mean_square
    return Option(mechanism, sigma, size, certified, lower, streaming.copies, streaming.method)
