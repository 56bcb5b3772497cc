"""How the cost of each accountant grows with N, b, p, α and 1/δ: exponents fitted to seconds of one core.

    python -m benchmarks growth

One δ(ε) from scratch at one σ (remove), compiled. The exponent is the least-squares slope of log seconds over log x;
for Rényi in p, where growth is exponential, the factor for each further band is given instead.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import dpmf
from benchmarks import _page
from dpmf.accountants import Accountant, Chain, Conditional, Lattice, MonteCarlo, Renyi
from dpmf.accountants.monte_carlo import minimum_samples

EPSILON = 1.0


def bsr(p: int, epochs: int, b: int) -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.bsr(p), dpmf.BallsInBins(epochs, b))


def dpsgd(epochs: int, b: int) -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(epochs, b))


def seconds(mechanism: dpmf.Mechanism, accountant: Accountant) -> float:
    """The best of a few runs where it is quick, of one otherwise; σ is such that δ is neither 0 nor 1."""
    _ = mechanism.gram
    sigma = 1.2 * mechanism.sensitivity
    best, spent = math.inf, 0.0
    while spent < 0.05:
        began = time.process_time()
        accountant.prepare(mechanism).delta_one_way(sigma, EPSILON, "remove")
        took = max(time.process_time() - began, 1e-7)
        best, spent = min(best, took), spent + took
    return best


def renyi(p: int, order: int) -> Renyi:
    return Renyi(bandwidth=p, max_order=order, work_budget=1e15)


def sweeps() -> dict[tuple[str, str], list[tuple[float, dpmf.Mechanism, Accountant]]]:
    """(accountant, what grows) → points."""
    few = MonteCarlo(samples=20_000)
    am_gm = Conditional(family="am-gm")
    iterations, batches = (200, 400, 800), (25, 50, 100)
    found: dict[tuple[str, str], list[tuple[float, dpmf.Mechanism, Accountant]]] = {}
    for name, accountant, make in (
        ("renyi, p = 4, α ≤ 8", renyi(4, 8), lambda k, b: bsr(4, k, b)),
        ("conditional, AM-GM", am_gm, lambda k, b: bsr(4, k, b)),
        ("chain", Chain(), lambda k, b: bsr(4, k, b)),
        ("monte-carlo, 20,000 samples", few, lambda k, b: bsr(4, k, b)),
        ("lattice", Lattice(), dpsgd),
    ):
        found[name, "N"] = [(n, make(n // 100, 100), accountant) for n in iterations]
        found[name, "b"] = [(b, make(4, b), accountant) for b in batches]
    for name, accountant in (("conditional, AM-GM", am_gm), ("chain", Chain()), ("monte-carlo, 20,000 samples", few)):
        found[name, "p"] = [(p, bsr(p, 1, 100), accountant) for p in (2, 4, 8)]
    found["renyi, α ≤ 8", "p"] = [(p, bsr(p, 4, 100), renyi(p, 8)) for p in (2, 3, 4, 5)]
    found["renyi, p = 4", "α"] = [(a, bsr(4, 1, 100), renyi(4, a)) for a in (6, 9, 12, 16)]
    found["renyi, p = 1", "α"] = [(a, dpsgd(1, 1000), renyi(1, a)) for a in (100, 200, 400, 800)]
    found["monte-carlo, s_min(δ) samples", "1/δ"] = [
        (1 / d, bsr(4, 1, 100), MonteCarlo(samples=minimum_samples(d, 0.01), importance=False))
        for d in (1e-3, 1e-4, 1e-5)
    ]
    return found


def measure() -> list[dict[str, Any]]:
    rows = []
    for (name, grows), points in sweeps().items():
        xs, took = [], []
        warm = dpsgd(2, 10) if name == "lattice" else bsr(2, 2, 10)
        first = points[0][2]
        seconds(warm, MonteCarlo(samples=100) if isinstance(first, MonteCarlo) else first)  # compiles
        for x, mechanism, accountant in points:
            if grows == "α":  # all orders, whatever the target needs
                sigma = 1.2 * mechanism.sensitivity
                began = time.process_time()
                accountant.divergences(mechanism, sigma, int(x))  # type: ignore[attr-defined]
                took.append(max(time.process_time() - began, 1e-7))
            else:
                took.append(seconds(mechanism, accountant))
            xs.append(x)
        exponent = float(np.polyfit(np.log(xs), np.log(took), 1)[0])
        factor = float(np.exp(np.polyfit(xs, np.log(took), 1)[0]))
        row = {"accountant": name, "grows": grows, "x": xs, "seconds": took, "exponent": exponent, "factor": factor}
        print(name, grows, [f"{s:.3g}" for s in took], f"{exponent:.2f}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    rows = measure()
    _page.keep("growth", rows)
    table = Table(
        "accountant", "what grows", "range", "seconds", "growth", title="Growth of the cost of one evaluation"
    )
    for row in rows:
        table.add_row(*_page.growth_row(row))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
