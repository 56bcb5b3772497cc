"""The Rényi accountant: how its time grows with p, α, b and N, and beside random-allocation's RDP for DP-SGD."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

import dpmf
from benchmarks import peers
from dpmf.accountants import Renyi

PEER = """
import json, sys, time
from random_allocation.random_allocation_scheme.direct import allocation_RDP_remove
answer = []
for order in json.loads(sys.argv[1])["orders"]:
    allocation_RDP_remove(order, 1.0, 1000)  # compiles, and enumerates the partitions
    began = time.perf_counter()
    value = allocation_RDP_remove(order, 1.1, 1000)
    answer.append([order, value, time.perf_counter() - began])
print(json.dumps(answer))
"""


def best_of(run: Callable[[], object], times: int = 3) -> float:
    run()
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        durations.append(time.perf_counter() - began)
    return min(durations)


def all_orders(strategy: dpmf.strategies.Strategy, epochs: int, b: int, p: int, order: int) -> float:
    """Seconds for the moments of all orders up to `order`, Gram matrix not counted."""
    mechanism = dpmf.Mechanism(strategy, dpmf.BallsInBins(epochs, b))
    prepared = Renyi(bandwidth=p, max_order=order, work_budget=1e15).prepare(mechanism)
    member = prepared.bounds()[-1]  # of a ring: the exact one, not the cut one
    sigma = math.sqrt(float(mechanism.gram.max())) * 1.5
    nudge = iter(np.linspace(1, 1.001, 20))
    return best_of(lambda: member.log_moments(sigma * next(nudge), order))  # type: ignore[attr-defined]


def growth() -> Table:
    table = Table("what grows", "p", "α", "b", "N", "k", "seconds", title="Rényi: all orders up to α at one σ")
    rows = [("p (line)", p, 12, 100, 1) for p in (1, 2, 3, 4, 5)]
    rows += [("p (ring)", p, 8, 100, 10) for p in (1, 2, 3, 4, 5)]
    rows += [("α (line, p = 4)", 4, order, 100, 1) for order in (8, 16, 32)]
    rows += [("α (ring, p = 4)", 4, order, 100, 10) for order in (8, 12, 16)]
    rows += [("α (p = 1)", 1, order, 1000, 1) for order in (100, 300, 1000)]
    rows += [("b (ring, p = 2)", 2, 16, b, 10) for b in (100, 1000, 10000)]
    for what, p, order, b, k in rows:
        strategy = dpmf.strategies.bsr(p) if p > 1 else dpmf.strategies.dpsgd()
        table.add_row(
            what, str(p), str(order), str(b), str(k * b), str(k), f"{all_orders(strategy, k, b, p, order):.4f}"
        )
    return table


def gram() -> Table:
    table = Table("b", "N", "seconds", title="Gram matrix of a Toeplitz strategy (BISR, p = 4): O(bN)")
    for b, n in ((100, 1000), (100, 10_000), (100, 100_000), (1000, 100_000), (1000, 1_000_000)):
        batching = dpmf.BallsInBins(n // b, b)
        seconds = best_of(lambda a=batching: dpmf.Mechanism(dpmf.strategies.bisr(4), a).gram, times=1)
        table.add_row(str(b), str(n), f"{seconds:.3f}")
    return table


def beside_random_allocation() -> Table:
    table = Table(
        "α", "dpmf, all orders ≤ α (s)", "random-allocation, order α only (s)", "ratio", "relative difference of R_α",
        title="Rényi divergence of DP-SGD, b = 1000, remove, σ = 1.1",
    )  # fmt: skip
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 1000))
    for order, peer_value, peer_seconds in peers.run("random-allocation", PEER, {"orders": [5, 10, 20, 30, 40, 50]}):
        member = Renyi(max_order=order).prepare(mechanism).bounds()[0]
        seconds = all_orders(dpmf.strategies.dpsgd(), 1, 1000, 1, order)
        ours = float(member.divergences(1.1, order)[-1])  # type: ignore[attr-defined]
        ratios = (f"{peer_seconds / seconds:.2f}", f"{ours / peer_value - 1:.1e}")
        table.add_row(str(order), f"{seconds:.5f}", f"{peer_seconds:.5f}", *ratios)
    return table


def main() -> None:
    console = Console(width=110)
    for make in (growth, gram, beside_random_allocation):
        console.print(make())


if __name__ == "__main__":
    main()
