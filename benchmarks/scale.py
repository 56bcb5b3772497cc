"""Scale and speed: 10⁵ batches and 10⁷ iterations, profiles and calibrations, in seconds and in processor time.

Each row runs in a process of its own, so that memory is its own too.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

import dpmf
from dpmf.accountants import Chain
from dpmf.formatting import lower, upper

STRATEGIES = {
    "dpsgd": dpmf.strategies.dpsgd(),
    "bsr4": dpmf.strategies.bsr(4),
    "bisr4": dpmf.strategies.bisr(4),
    "bsr64": dpmf.strategies.bsr(64),
    "bandinvmf4": dpmf.strategies.bandinvmf(4),
}
CALIBRATIONS = [
    ("dpsgd", 1, 1000, "best", 1.0),
    ("bsr4", 10, 100, "chain", 1.0),
    ("bisr4", 10, 100, "chain", 1.0),
    ("bandinvmf4", 10, 100, "chain", 8.0),
    ("bsr64", 1, 100, "chain", 8.0),
    ("bsr4", 10, 1000, "chain", 1.0),
    ("bisr4", 10, 1000, "chain", 1.0),
    ("bsr4", 100, 100_000, "best", 1.0),
    ("bisr4", 100, 100_000, "best", 1.0),
    ("bsr64", 100, 100_000, "best", 1.0),
    ("bsr4", 1, 100_000, "best", 1.0),
    ("bsr4", 100, 100_000, "auto", 1.0),
]
PROFILES = [("bsr4", 10, 100, 3.8), ("bisr4", 10, 100, 4.5), ("bsr4", 10, 1000, 3.8), ("bisr4", 10, 1000, 4.5)]


def _mechanism(name: str, epochs: int, b: int) -> dpmf.Mechanism:
    return dpmf.Mechanism(STRATEGIES[name], dpmf.BallsInBins(epochs, b))


def _calibrate(name: str, epochs: int, b: int, accountant: str, epsilon: float) -> dict[str, float]:
    found = dpmf.calibrate(
        _mechanism(name, epochs, b),
        target_epsilon=epsilon, target_delta=1e-5, accountant=accountant, with_lower=True,
    )  # fmt: skip
    return {"sigma": found.noise_multiplier, "lower": found.lower or 0.0}


def _profile(name: str, epochs: int, b: int, sigma: float) -> dict[str, float]:
    prepared = Chain().prepare(mechanism := _mechanism(name, epochs, b))
    found = dpmf.profile(mechanism, noise_multiplier=sigma, epsilons=np.linspace(0, 4, 41), accountant=prepared)
    return {"delta": float(found.deltas[10])}


KINDS: dict[str, Callable[..., dict[str, float]]] = {"calibrate": _calibrate, "profile": _profile}


def measured(kind: str, *arguments: object) -> dict[str, float]:
    """One row, in a process that first compiles what it needs."""
    request = json.dumps([kind, *arguments])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", request], capture_output=True, text=True, check=True
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _run(request: str) -> None:
    kind, *arguments = json.loads(request)
    _calibrate("bsr4", 2, 12, "chain", 1.0)
    began, used = time.perf_counter(), time.process_time()
    answer = KINDS[kind](*arguments)
    answer["seconds"], answer["cpu"] = time.perf_counter() - began, time.process_time() - used
    answer["gigabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps(answer))


def _cost(found: dict[str, float]) -> tuple[str, str]:
    return f"{found['seconds']:.1f}", f"{found['cpu']:.1f}"


def main() -> None:
    console = Console(width=120)
    table = Table("strategy", "k", "b", "accountant", "ε", "σ", "lower bound on σ", "s", "CPU s", "GB")
    table.title = "Calibration to (ε, 10⁻⁵), lower bound included"
    for row in CALIBRATIONS:
        found = measured("calibrate", *row)
        name, epochs, b, accountant, epsilon = row
        numbers = [upper(found["sigma"], 5), lower(found["lower"], 5)]
        table.add_row(
            name, str(epochs), str(b), accountant, f"{epsilon:g}", *numbers, *_cost(found), f"{found['gigabytes']:.2f}"
        )
    console.print(table)
    table = Table("strategy", "k", "b", "σ", "s", "CPU s", title="Chain profile, 41 points, both directions")
    for name, epochs, b, sigma in PROFILES:
        found = measured("profile", name, epochs, b, sigma)
        table.add_row(name, str(epochs), str(b), str(sigma), *_cost(found))
    console.print(table)


if __name__ == "__main__":
    _run(sys.argv[1]) if len(sys.argv) > 1 else main()
