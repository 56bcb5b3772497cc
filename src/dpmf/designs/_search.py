"""The search behind `design`: estimates of all candidates, guarantees for those that can win, within a time budget.

Work is done in steps, each for one candidate, and what is best done next is decided anew whenever a process is free:

| step | what it gives | how long it takes |
|---|---|---|
| exact | σ of mechanisms whose iterations share no noise, guaranteed and nearly exact | a second or two |
| estimate | coefficients, and a sampled σ | about a second |
| quick | a σ near the sampled one that rough bounds guarantee, about a percent too large | seconds |
| fine | the same from fine bounds, and a lower bound on σ | up to a minute |

Results are kept in the store, so that a search that was interrupted goes on where it was. What is read there
is a hint: σ is used after the bound that found it has met the target there once more, and a lower bound after it has
missed it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from dpmf import api, budget, lower_bounds, progress, store
from dpmf.batching import Poisson
from dpmf.designs._candidates import Candidate
from dpmf.designs._crew import Crew
from dpmf.designs.result import Design, Option
from dpmf.errors import CalibrationError
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import ToeplitzStrategy
from dpmf.strategies.streaming import how_to_stream
from dpmf.workloads import Workload, error

Step: TypeAlias = Literal["exact", "estimate", "quick", "fine"]

_TOLERANCES = {"exact": 1e-3, "quick": 1e-2, "fine": 3e-3}  # relative, of noise multipliers
_ABOVE_SAMPLED = 1.02  # guaranteed noise multipliers are sought from this many times the sampled one on
_SAMPLING = 0.985  # a sampled error may be this much too large, and a candidate above the best one still be better
_ROUGH = 0.97  # fine bounds may make the error of a quick guarantee smaller by this factor
_CLEARLY = 0.92  # slow guarantees come before further estimates where they promise to gain this factor
_ALIKE = 0.99  # by how much the looseness of bounds may differ between candidates of one kind
_SHARE = 0.6  # the part of the time left that one slow guarantee may take
_LOWER_SECONDS = 10.0
_USUAL_SECONDS = {"exact": 2.0, "estimate": 1.5, "quick": 6.0, "fine": 15.0}  # before there are any to learn from


@dataclass(frozen=True)
class _Task:
    """One step for one candidate, and the moment at which it has to end."""

    step: Step
    candidate: Candidate
    workload: Workload
    target: tuple[float, float]
    ends: float


class Search:
    """A search for the best option, within a number of seconds."""

    def __init__(
        self,
        todo: list[Candidate],
        workload: Workload,
        target: tuple[float, float],
        copies: int | None,
        seconds: float,
        crew: Crew,
    ) -> None:
        self._todo, self._workload, self._target, self._copies, self._crew = todo, workload, target, copies, crew
        self._ends = time.time() + seconds
        self._options: dict[Candidate, Option] = {}
        self._sampled: dict[Candidate, float] = {}
        self._done: dict[Candidate, set[str]] = {candidate: set() for candidate in todo}
        self._problems: dict[Candidate, str] = {}
        self._unfinished: set[Candidate] = set()
        self._took: dict[str, list[float]] = {}

    def result(self) -> Design:
        """Do one step after the other until nothing can gain any more or time is up."""
        while True:
            while self._crew.free and time.time() < self._ends:
                chosen = next(self._steps(), None)
                if chosen is None:
                    break
                step, candidate = chosen
                self._done[candidate].add(step)
                self._crew.start(_work, _Task(step, candidate, self._workload, self._target, self._until(*chosen)))
            if not self._crew.busy:
                return self._answer()
            self._take(*self._crew.next())

    def _until(self, step: Step, candidate: Candidate) -> float:
        """A slow step may take a part of the time that is left, so that others get their turn."""
        now = time.time()
        slow = step in ("quick", "fine") and candidate.batching.throws > 1 and self._best < math.inf
        return now + (_SHARE if slow else 1.0) * (self._ends - now)

    @property
    def _best(self) -> float:
        return min((option.error for option in self._options.values() if option.certified), default=math.inf)

    def _steps(self) -> Iterator[tuple[Step, Candidate]]:
        """What is left to do, the most useful first."""
        exact = [c for c in self._todo if c.exact]
        rest = [c for c in self._todo if not c.exact]
        fixed = [c for c in rest if c.batching.throws == 1]
        thrown = [c for c in rest if c.batching.throws > 1]
        promising = [c for c in rest if c.promising]
        yield from self._open("exact", exact)
        yield from self._open("estimate", promising)
        yield from self._open("quick", self._winners(fixed))
        yield from self._open("quick", [c for c in self._winners(thrown) if self._sampled[c] < _CLEARLY * self._best])
        yield from self._open("estimate", rest)
        yield from self._open("fine", self._refined(fixed))
        yield from self._open("quick", self._winners(thrown))
        yield from self._open("fine", self._refined(rest))

    def _open(self, step: Step, candidates: list[Candidate]) -> Iterator[tuple[Step, Candidate]]:
        yield from ((step, c) for c in candidates if step not in self._done[c])

    def _winners(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates without a guarantee that may have the least error, the least expected error first."""
        expected = {c: self._expected(c) for c in candidates if c in self._sampled and not self._options[c].certified}
        return sorted((c for c in expected if expected[c] < self._best), key=lambda c: expected[c])

    def _expected(self, candidate: Candidate) -> float:
        """The least error that a guarantee is expected to have.

        It is above the sampled error by about as much as the least among candidates whose bounds are no looser.
        """
        seen = [
            self._options[c].error / self._sampled[c]
            for c in self._sampled
            if self._options[c].certified and candidate.at_least_as_loose_as(c)
        ]
        return self._sampled[candidate] * (_ALIKE * min(seen) if seen else _SAMPLING)

    def _refined(self, candidates: list[Candidate]) -> list[Candidate]:
        """Candidates with a guarantee from rough bounds that fine ones may make the best, the best first."""
        quick = [
            c for c in candidates if "quick" in self._done[c] and c in self._options and self._options[c].certified
        ]
        quick = [c for c in quick if self._options[c].error * _ROUGH < self._best]
        return sorted(quick, key=lambda c: self._options[c].error)

    def _take(self, task: _Task, found: _Found) -> None:
        """Keep what a step has found, and say so."""
        candidate = task.candidate
        self._took.setdefault(task.step, []).append(found.seconds)
        if found.unfinished:
            self._unfinished.add(candidate)
        if found.option is None:
            self._problems[candidate] = found.problem
        elif self._copies is not None and found.option.copies > self._copies:
            self._problems[candidate] = f"{found.option.mechanism.name} keeps {found.option.copies} copies of the model"
            self._done[candidate] |= {"quick", "fine"}
        else:
            known = self._options.get(candidate)
            if known is None or not known.certified or (found.option.certified and found.option.error < known.error):
                self._options[candidate] = found.option
            elif found.option.lower is not None:
                self._options[candidate] = replace(known, lower=found.option.lower)
            if not found.option.certified:
                self._sampled[candidate] = found.option.error
        self._say()

    def _say(self) -> None:
        """Tell how far the search is: mechanisms, the best error, about how many seconds are left."""
        best = self._best
        reached = f", least guaranteed error {best:.4g}" if best < math.inf else ""
        left = [step for step, _ in dict.fromkeys(self._steps())]
        seconds = 0.0
        for step in left:
            took = self._took.get(step, [_USUAL_SECONDS[step]])
            seconds += sum(took) / len(took) / self._crew.size
        seconds = min(seconds, max(0.0, self._ends - time.time()))
        known = len(self._options)
        progress.say(f"{known} of {len(self._todo)} mechanisms{reached}, about {math.ceil(seconds)} s left")

    def _answer(self) -> Design:
        options = sorted(self._options.values(), key=lambda option: (not option.certified, option.error))
        problems = tuple(self._problems.values())
        if not options or not options[0].certified:
            raise CalibrationError(
                "no mechanism got a guaranteed noise multiplier in the time given; " + "; ".join(problems[:3])
            )
        baseline = next((o for o in options if o.certified and o.mechanism.strategy.name == "DP-SGD"), None)
        best = options.pop(0)
        left = next(self._steps(), None) is not None or self._winners(list(self._sampled))
        complete = not left and not self._unfinished
        return Design(
            best, tuple(sorted(options, key=lambda option: option.error)), baseline, self._workload, *self._target,
            complete, problems,
        )  # fmt: skip


@dataclass(frozen=True)
class _Found:
    """What a step found.

    Attributes:
      option: the mechanism with its error; None where there is none.
      problem: why there is none.
      unfinished: whether time ran out before the step came to its end.
      seconds: how long it took.
    """

    option: Option | None = None
    problem: str = ""
    unfinished: bool = False
    seconds: float = 0.0


def _work(task: _Task) -> _Found:
    """Do one step."""
    start = time.time()
    name = f"{task.candidate.family}, {task.candidate.batching.name}"
    late = _Found(problem=f"{name}: there was no time for it", unfinished=True)
    if start >= task.ends:
        return late
    # Lines on stderr from several processes would run into each other, and the search itself says how far it is.
    quiet = nullcontext() if progress.heard() else progress.listening(lambda what: None)
    try:
        with quiet:
            found = _STEPS[task.step](task)
    except budget.OutOfTime:
        found = late
    except (ValueError, RuntimeError, np.linalg.LinAlgError) as reason:
        found = _Found(problem=f"{name}: {reason}", unfinished=time.time() >= task.ends)
    return replace(found, seconds=time.time() - start)


def _mechanism(task: _Task) -> tuple[Mechanism, float | None]:
    """The mechanism, and its sampled noise multiplier where there is one."""
    mechanism = Mechanism(task.candidate.strategy(task.workload, task.target), task.candidate.batching)
    estimate = getattr(mechanism.strategy, "estimate", lambda: None)()
    sampled = None if estimate is None or not math.isfinite(estimate.noise_multiplier) else estimate.noise_multiplier
    return mechanism, sampled


def _estimated(task: _Task) -> _Found:
    mechanism, sampled = _mechanism(task)
    if sampled is None:
        return _certified(replace(task, step="exact"))
    return _Found(_option(mechanism, task.workload, sampled, None, certified=False))


def _certified(task: _Task) -> _Found:
    """The option with a guaranteed noise multiplier, from the store if one is there that meets the target."""
    mechanism, sampled = _mechanism(task)
    epsilon, delta = task.target
    strategy, batching = mechanism.strategy, mechanism.batching
    assert isinstance(strategy, ToeplitzStrategy)
    column = np.ascontiguousarray(strategy.strategy_coef(batching.iterations), dtype="<f8")
    key: dict[str, store.Parameter] = {
        "column": hashlib.sha256(column.tobytes()).hexdigest(), "inverse": str(strategy.given_by_inverse),
        "batching": repr(batching), "epsilon": epsilon.hex(), "delta": delta.hex(), "step": task.step,
    }  # fmt: skip

    def compute() -> store.Values:
        sigma, place, finished = _noise(mechanism, sampled, task)
        if not finished:
            raise _Unfinished(sigma)
        lower = 0.0 if task.step == "quick" else _lower(mechanism, task)
        return {"noise_multiplier": np.array([sigma]), "lower": np.array([lower]), "place": np.array(place)}

    def holds(values: store.Values) -> bool:
        sigma, lower = values["noise_multiplier"][0], values["lower"][0]
        with budget.time_limit(task.ends - time.time()):
            met = api.meets(mechanism, sigma, epsilon, delta, *map(int, values["place"]), quick=task.step == "quick")
            with budget.time_limit(_LOWER_SECONDS):
                met = met and (not lower or lower_bounds.lower_delta(mechanism, lower, epsilon) > delta)
            if not met:
                budget.check()  # a bound that time did not allow says nothing about what was read
        return met

    try:
        values = store.remember("certified", key, None, compute, holds)
    except _Unfinished as early:  # it is a guarantee all the same, but not the last word
        return _Found(_option(mechanism, task.workload, early.noise_multiplier, None, certified=True), unfinished=True)
    sigma, lower = (float(values[name][0]) for name in ("noise_multiplier", "lower"))
    return _Found(_option(mechanism, task.workload, sigma, lower or None, certified=True))


_STEPS: dict[Step, Callable[[_Task], _Found]] = {
    "exact": _certified, "estimate": _estimated, "quick": _certified, "fine": _certified
}  # fmt: skip


def _noise(mechanism: Mechanism, sampled: float | None, task: _Task) -> tuple[float, list[int], bool]:
    """A guaranteed noise multiplier, which bound to ask for a check, and whether the search came to its end."""
    epsilon, delta = task.target
    seconds = task.ends - time.time() if math.isfinite(task.ends) else None
    tolerance = _TOLERANCES[task.step]
    if sampled is not None and task.step != "exact":
        sigma, place, finished = api.noise_near(
            mechanism, _ABOVE_SAMPLED * sampled, target_epsilon=epsilon, target_delta=delta,
            relative_tolerance=tolerance, quick=task.step == "quick", time_budget=seconds,
        )  # fmt: skip
        return sigma, [place], finished
    found = api.calibrate(
        mechanism, target_epsilon=epsilon, target_delta=delta, relative_tolerance=tolerance, time_budget=seconds,
        near=sampled,
    )  # fmt: skip
    finished = not any(details.get("budget_exhausted") for details in found.details.values())
    return found.noise_multiplier, [], finished


class _Unfinished(Exception):
    """Calibration ended early, with a noise multiplier that is guaranteed and larger than it need be."""

    def __init__(self, noise_multiplier: float) -> None:
        super().__init__()
        self.noise_multiplier = noise_multiplier


def _lower(mechanism: Mechanism, task: _Task) -> float:
    """A lower bound on σ; 0 for Poisson samples, for which there is none."""
    if isinstance(mechanism.batching, Poisson):
        return 0.0
    with budget.time_limit(_LOWER_SECONDS):
        return lower_bounds.lower_noise_multiplier(mechanism, *task.target)


def _option(mechanism: Mechanism, workload: Workload, sigma: float, lower: float | None, *, certified: bool) -> Option:
    streaming = how_to_stream(mechanism.strategy, mechanism.batching.iterations)
    size = error(mechanism, sigma, workload).root_mean_square
    return Option(mechanism, sigma, size, certified, lower, streaming.copies, streaming.method)
