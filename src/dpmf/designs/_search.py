"""The search behind `design`: estimates for all candidates, guarantees for those that can win, within a time budget."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dpmf import api, budget, lower_bounds, progress
from dpmf._version import __version__
from dpmf.batching import Poisson
from dpmf.designs._candidates import Candidate
from dpmf.designs.result import Design, Option
from dpmf.errors import CalibrationError
from dpmf.mechanism import Mechanism
from dpmf.strategies import cache
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.streaming import how_to_stream
from dpmf.workloads import Workload, error

_COARSE = 0.01  # of calibration, where there is little time
_TOLERANCE = 1e-3  # of calibration: the error is not needed more accurately
_SAMPLING = 0.985  # a sampled error may be this much too large, and a candidate above the best one still be better
_CERTIFIED_AT_MOST = 12
_FAR_ABOVE = 1.15  # a guarantee this many times the sampled noise multiplier, for lack of time, is no use
_LITTLE_TIME = 200.0  # seconds with which not every candidate is estimated at first
_FIRST_SHARE = 0.6  # the part of the time left that one calibration may take
_LOWER_SECONDS = 10.0
_VERSION = 1  # to be raised whenever accountants give other numbers at the same version of dpmf

# What runs tasks: it takes a function and its arguments, and yields (argument, result) as they come.
Run: TypeAlias = Callable[[Callable[..., Any], Sequence[Any]], Iterator[tuple[Any, Any]]]


@contextlib.contextmanager
def crew(workers: int) -> Iterator[Run]:
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


class Search:
    """A search for the best option, within a number of seconds."""

    def __init__(
        self,
        todo: list[Candidate],
        workload: Workload,
        target: tuple[float, float],
        copies: int | None,
        seconds: float,
        run: Run,
    ) -> None:
        self._todo, self._workload, self._target, self._copies, self._run = todo, workload, target, copies, run
        self._ends = time.time() + seconds
        self._options: dict[Candidate, Option] = {}
        self._problems: list[str] = []
        self._failed: set[Candidate] = set()

    def result(self) -> Design:
        """An answer that is quick to certify, then estimates for all, then guarantees for those that can win.

        With little time, only the most promising candidates are estimated, so that one of them can be certified.
        """
        quick = [c for c in self._todo if c.separate]
        slow = [c for c in self._todo if not c.separate]
        self._work(_certified, quick[:4], 1.0)
        if not any(option.certified for option in self._options.values()) and slow:
            self._work(_certified, [c for c in slow if c.family == "dpsgd"][:1] or slow[:1], 1.0)
        first = [c for c in slow if c.promising] if self._ends - time.time() < _LITTLE_TIME else slow
        self._work(_estimated, first, 0.5)
        complete = self._certify(first)
        if time.time() < self._ends:
            self._work(_certified, quick, 1.0)
            self._work(_estimated, slow, 0.5)
            complete = self._certify(slow) and complete
        return self._answer(complete)

    def _work(self, function: Callable[[_Task], Option | str], todo: Sequence[Candidate], share: float) -> None:
        """Do some work for each candidate, as far as there is time."""
        tasks = [
            _Task(c, self._workload, self._target, self._ends, share)
            for c in todo
            if c not in self._failed and (c not in self._options or not self._options[c].certified)
        ]
        for task, found in self._run(function, tasks):
            if isinstance(found, str):
                self._problems.append(found)
                if time.time() < self._ends:
                    self._failed.add(task.candidate)  # more time would not help
            elif self._copies is not None and found.copies > self._copies:
                self._problems.append(f"{found.mechanism.name} keeps {found.copies} copies of the model")
                self._failed.add(task.candidate)
            else:
                self._options[task.candidate] = found
                certain = [option.error for option in self._options.values() if option.certified]
                best = f", least guaranteed error {min(certain):.4g}" if certain else ""
                progress.say(f"{len(self._options)} of {len(self._todo)} mechanisms{best}")

    def _certify(self, slow: list[Candidate]) -> bool:
        """Certify options in the order of their sampled errors until none is left that could win."""
        for _ in range(_CERTIFIED_AT_MOST):
            best = min((o.error for o in self._options.values() if o.certified), default=math.inf)
            open_ones = [c for c, option in self._options.items() if not option.certified and c not in self._failed]
            left = [c for c in open_ones if self._options[c].error * _SAMPLING < best]
            left.sort(key=lambda c: self._options[c].error)
            if not left:
                return all(c in self._options or c in self._failed for c in slow)
            if time.time() >= self._ends:
                return False
            little = self._ends - time.time() < _LITTLE_TIME
            self._work(_certified, left[:2], 0.9 if little else _FIRST_SHARE)
        return False

    def _answer(self, complete: bool) -> Design:
        options = sorted(self._options.values(), key=lambda option: (not option.certified, option.error))
        if not options or not options[0].certified:
            raise CalibrationError(
                "no mechanism got a guaranteed noise multiplier in the time given; " + "; ".join(self._problems[:3])
            )
        baseline = next((o for o in options if o.certified and o.mechanism.strategy.name == "DP-SGD"), None)
        best = options.pop(0)
        complete = complete and not any(not o.certified and o.error * _SAMPLING < best.error for o in options)
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
        estimate = getattr(mechanism.strategy, "estimate", lambda: None)()
        near = None if estimate is None or not math.isfinite(estimate.noise_multiplier) else estimate.noise_multiplier
        sigma, lower = _calibrated(mechanism, task.target, seconds, near)
    except (ValueError, RuntimeError, np.linalg.LinAlgError) as reason:
        return f"{task.candidate.family}, {task.candidate.batching.name}: {reason}"
    return _option(mechanism, task.workload, sigma, lower, certified=True)


def _calibrated(
    mechanism: Mechanism, target: tuple[float, float], seconds: float, near: float | None
) -> tuple[float, float | None]:
    """A guaranteed noise multiplier and a lower bound, from the cache directory if they are there."""
    epsilon, delta = target
    strategy, batching = mechanism.strategy, mechanism.batching
    assert isinstance(strategy, ToeplitzStrategy)
    column = np.ascontiguousarray(strategy.strategy_coef(batching.iterations), dtype="<f8")
    tolerance = _TOLERANCE if seconds > _LITTLE_TIME else _COARSE
    key: dict[str, cache.Parameter] = {
        "column": hashlib.sha256(column.tobytes()).hexdigest(), "inverse": str(strategy.given_by_inverse),
        "batching": repr(batching), "epsilon": epsilon.hex(), "delta": delta.hex(), "tolerance": tolerance.hex(),
    }  # fmt: skip

    def compute() -> cache.Values:
        found = api.calibrate(
            mechanism, target_epsilon=epsilon, target_delta=delta, relative_tolerance=tolerance,
            time_budget=seconds if math.isfinite(seconds) else None, near=near,
        )  # fmt: skip
        if any(details.get("budget_exhausted") for details in found.details.values()):
            raise _Unfinished(found.noise_multiplier)
        return {"noise_multiplier": np.array([found.noise_multiplier]), "lower": np.array([_lower(mechanism, target)])}

    try:
        values = cache.remember("certified", key, f"dpmf {__version__}.{_VERSION}", None, compute)
    except _Unfinished as early:
        if near is not None and early.noise_multiplier > _FAR_ABOVE * near:
            raise CalibrationError("there was no time to certify it") from None
        return early.noise_multiplier, None  # a guarantee all the same, but not the last word
    lower = float(values["lower"][0])
    return float(values["noise_multiplier"][0]), lower if lower > 0 else None


class _Unfinished(Exception):
    """Calibration ended early, with a noise multiplier that is guaranteed and larger than it need be."""

    def __init__(self, noise_multiplier: float) -> None:
        super().__init__()
        self.noise_multiplier = noise_multiplier


def _lower(mechanism: Mechanism, target: tuple[float, float]) -> float:
    """A lower bound on σ, from one throw; 0 for Poisson samples, for which there is none."""
    if isinstance(mechanism.batching, Poisson):
        return 0.0
    with budget.time_limit(_LOWER_SECONDS):
        return lower_bounds.lower_noise_multiplier(mechanism.throw, *target)


def _option(mechanism: Mechanism, workload: Workload, sigma: float, lower: float | None, *, certified: bool) -> Option:
    streaming = how_to_stream(mechanism.strategy, mechanism.batching.iterations)
    size = error(mechanism, sigma, workload).root_mean_square
    return Option(mechanism, sigma, size, certified, lower, streaming.copies, streaming.method)
