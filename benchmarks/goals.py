"""Seconds beside their goals: calibrations, a profile, a loss distribution, the first answer of `dpmf explore`.

    python -m benchmarks goals

Seconds are those of the clock, with every core of the machine and after compilation: each row runs in a process of its
own, which asks something similar and small first. Run it on a machine that has nothing else to do. A second column has
the processor time of all threads, which other work on the machine disturbs less.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import dpmf
from benchmarks import _page

DELTA = 1e-5
IRREGULAR = "coefficients 1, .1, .6, .05, .4, .02, .3"


def two_exponentials(count: int) -> dpmf.strategies.Strategy:
    """The one of docs/tightness.md."""
    lags = np.arange(count)
    return dpmf.strategies.coefficients((0.9**lags + 0.99**lags) / 2)


STRATEGIES: dict[str, Callable[[int], dpmf.strategies.Strategy]] = {
    "BSR(4)": lambda n: dpmf.strategies.bsr(4),
    "BSR(8)": lambda n: dpmf.strategies.bsr(8),
    "BSR(64)": lambda n: dpmf.strategies.bsr(64),
    "BISR(16)": lambda n: dpmf.strategies.bisr(16),
    "(1 − 0.968x)^(−0.4)": lambda n: dpmf.strategies.power(0.4, 0.968),
    "(1 − 0.99x)^(−0.5)": lambda n: dpmf.strategies.power(0.5, 0.99),
    IRREGULAR: lambda n: dpmf.strategies.coefficients([1, 0.1, 0.6, 0.05, 0.4, 0.02, 0.3]),
    "eight equal coefficients": lambda n: dpmf.strategies.coefficients([1.0] * 8),
    "two exponentials": two_exponentials,
    "0.25·0.995ⁱ": lambda n: dpmf.strategies.coefficients(0.25 * 0.995 ** np.arange(n)),
}  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """Something that should not take longer than so many seconds."""

    what: str
    mechanism: str
    epochs: int
    batches: int
    epsilon: float
    seconds: float


def goals() -> list[Goal]:
    small = [
        ("(1 − 0.968x)^(−0.4)", 10, 100), ("(1 − 0.99x)^(−0.5)", 10, 100), ("BISR(16)", 10, 100), ("BSR(64)", 10, 100),
        (IRREGULAR, 5, 100), ("BSR(8)", 50, 20), ("eight equal coefficients", 4, 128), ("BSR(64)", 1, 100),
    ]  # fmt: skip
    found = [Goal("calibration", *one, epsilon, 5.0) for one in small for epsilon in (0.25, 1.0, 4.0, 8.0)]
    large = [("BSR(4)", 4, 1000), ("BISR(16)", 4, 1000), ("BSR(64)", 4, 1000), ("(1 − 0.99x)^(−0.5)", 4, 1000)]
    large += [
        ("0.25·0.995ⁱ", 1, 1000),
        ("two exponentials", 2, 500),
        ("BSR(4)", 1, 10**5),
        ("BISR(16)", 1, 10**5),
        ("BSR(64)", 1, 10**5),
    ]
    found += [Goal("calibration", *one, epsilon, 15.0) for one in large for epsilon in (1.0, 4.0)]
    for name in ("BSR(4)", "(1 − 0.968x)^(−0.4)", "BISR(16)"):
        found.append(Goal("profile of 41 points", name, 10, 100, 4.0, 2.0))
        found.append(Goal("loss distribution", name, 10, 100, 4.0, 5.0))
        found.append(Goal("first answer of explore", name, 10, 100, 4.0, 2.0))
    return found


def _ask(goal: Goal) -> dict[str, float]:
    """Seconds of the clock and of the processor."""
    mechanism = dpmf.Mechanism(
        STRATEGIES[goal.mechanism](goal.epochs * goal.batches), dpmf.BallsInBins(goal.epochs, goal.batches)
    )
    sigma = 0.0
    if goal.what in ("profile of 41 points", "loss distribution"):  # a noise multiplier of about the right size
        sigma = dpmf.calibrate(
            mechanism, target_epsilon=goal.epsilon, target_delta=DELTA, accountant="cascade"
        ).noise_multiplier
    began, worked = time.perf_counter(), time.process_time()
    if goal.what == "calibration":
        dpmf.calibrate(mechanism, target_epsilon=goal.epsilon, target_delta=DELTA)
    elif goal.what == "profile of 41 points":
        dpmf.profile(mechanism, noise_multiplier=sigma, epsilons=np.linspace(0, goal.epsilon, 41))
    elif goal.what == "loss distribution":
        from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent, loss_distribution

        loss_distribution(BallsInBinsMatrixDpEvent(mechanism.strategy, goal.epochs, goal.batches, sigma))
    else:
        _first_view(mechanism, goal)
    return {"clock": time.perf_counter() - began, "processor": time.process_time() - worked}


def _first_view(mechanism: dpmf.Mechanism, goal: Goal) -> None:
    """Until there is a view with a certified noise multiplier: what a worker of the page does before it sends one."""
    from dpmf.web.pictures import illustrated
    from dpmf.web.request import Request
    from dpmf.web.view import views

    request = Request("bsr", goal.epochs, goal.batches, goal.epsilon, DELTA)
    for view, _ in illustrated(views(mechanism, request)):
        if view.best is not None:
            return


def _run(asked: str) -> None:
    goal = Goal(**json.loads(asked))
    _ask(Goal(goal.what, "BSR(4)", 2, 12, goal.epsilon, goal.seconds))
    _ask(Goal(goal.what, goal.mechanism, 2, 24, goal.epsilon, goal.seconds))
    print(json.dumps(_ask(goal)))


def measured(goal: Goal) -> dict[str, float]:
    """One row, in a process that first compiles what it needs, with as many threads as there are cores."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.goals", json.dumps(vars(goal))],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    rows: list[dict[str, Any]] = []
    with _page.measured("goals") as found:
        for goal in goals():
            rows.append({**vars(goal), **measured(goal)})
            print("  ".join(_page.goal_row(rows[-1])), flush=True)
        found["rows"] = rows
    table = Table(*_page.GOALS_HEAD, title="Seconds beside their goals")
    for row in rows:
        table.add_row(*_page.goal_row(row))
    Console(width=140).print(table)


if __name__ == "__main__":
    _run(sys.argv[1])
