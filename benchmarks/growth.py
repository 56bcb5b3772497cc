"""How the cost of each accountant grows with N, b, k, p, τ, α and 1/δ: exponents fitted to seconds of one core.

    python -m benchmarks growth

One δ(ε) from scratch at one σ (remove), compiled, Gram matrix included; against 1/δ, one ε(δ). Whole calibrations by
`best` are timed too, and set beside the certified lower bound on the noise multiplier. Ranges span a decade and
a half or more; where the cost grows too fast for that, as far as it goes in seconds. The exponent is the least-squares
slope of log seconds over log x in the upper half of the range (on the log scale), so that fixed costs count little; for
Rényi in p, where growth is exponential, the factor for each further band is given instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import dpmf
from benchmarks import _page
from dpmf.accountants import Accountant, Best, Cascade, Chain, Conditional, Lattice, Moments, MonteCarlo, OwnBin, Renyi
from dpmf.accountants.monte_carlo.limits import minimum_samples

EPSILON = 1.0
ITERATIONS = (200, 800, 3200, 12_800, 51_200)
BATCHES = (10, 30, 100, 200, 400, 1000, 1600)
BANDWIDTHS = (2, 4, 8, 16, 32, 64)
WIDE = (2, 6, 20, 64, 200)  # bandwidths and times of decay of calibrations
CALIBRATED = 4.0  # their ε
DELTAS = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)


@dataclass(frozen=True)
class Job:
    """Something to be timed; it is made anew each time, so that nothing is known already."""

    strategy: dpmf.strategies.Strategy
    epochs: int
    batches: int
    accountant: Accountant
    delta: float | None = None  # ε at this δ instead of δ at ε
    orders: int | None = None  # all divergences up to this order instead
    calibrated: bool = False  # a calibration to δ, 10⁻⁵ by default, and a lower bound instead

    def mechanism(self) -> dpmf.Mechanism:
        return dpmf.Mechanism(self.strategy, dpmf.BallsInBins(self.epochs, self.batches))

    def once(self, sigma: float) -> tuple[float, float]:
        """Seconds for one evaluation at σ, and the noise multiplier: σ, or what a calibration found."""
        mechanism = self.mechanism()
        began = time.process_time()
        if self.calibrated:
            sigma = dpmf.calibrate(
                mechanism, target_epsilon=CALIBRATED, target_delta=self.delta or 1e-5, accountant=self.accountant
            ).noise_multiplier
        elif self.orders is not None:
            assert isinstance(self.accountant, Renyi)
            self.accountant.divergences(mechanism, sigma, self.orders)
        elif self.delta is not None:
            self.accountant.prepare(mechanism).epsilon(sigma, self.delta, "remove")
        else:
            self.accountant.prepare(mechanism).delta(sigma, EPSILON, "remove")
        return max(time.process_time() - began, 1e-7), sigma

    def lower(self) -> float:
        """The certified lower bound on the noise multiplier of a calibration, which no accountant has a part in."""
        found = dpmf.calibrate(
            self.mechanism(), target_epsilon=CALIBRATED, target_delta=self.delta or 1e-5, accountant="gaussian",
            with_lower=True,
        )  # fmt: skip
        return found.lower or math.nan

    def seconds(self) -> tuple[float, float]:
        """The best of a few runs where it is quick, of one otherwise, and the noise multiplier.

        σ is such that δ is neither 0 nor 1. Up to a few seconds (one, for calibrations) there is a second run at least:
        the first may have had a kernel to compile.
        """
        start = 1.2 * self.mechanism().sensitivity
        took, sigma = self.once(start)
        total, runs = took, 1
        while total < 0.1 or (runs == 1 and took < (1 if self.calibrated else 5)):
            again, sigma = self.once(start)
            took, total, runs = min(took, again), total + again, runs + 1
        return took, sigma


Sweep = list[tuple[float, Job]]


def renyi(p: int, order: int) -> Renyi:
    return Renyi(bandwidth=p, max_order=order, work_budget=1e15)


def sweeps() -> dict[tuple[str, str], Sweep]:
    """(accountant, what grows) → points."""
    s = dpmf.strategies
    bsr, dpsgd = s.bsr(4), s.dpsgd()
    few = MonteCarlo(samples=20_000)
    everybody: list[tuple[str, s.Strategy, Accountant]] = [
        ("chain", bsr, Chain()),
        ("moments", bsr, Moments()),
        ("own-bin", bsr, OwnBin()),
        ("cascade", bsr, Cascade()),
        ("lattice (DP-SGD)", dpsgd, Lattice()),
        ("renyi, p = 4, α ≤ 8", bsr, renyi(4, 8)),
        ("conditional, AM-GM", bsr, Conditional(family="am-gm")),
        ("monte-carlo, 20,000 samples", bsr, few),
    ]
    found: dict[tuple[str, str], Sweep] = {}
    for name, strategy, accountant in everybody:
        found[name, "N"] = [(n, Job(strategy, n // 100, 100, accountant)) for n in ITERATIONS]
    for name, strategy, accountant in everybody:
        jobs = [(b, Job(strategy, 4, b, accountant)) for b in BATCHES]
        found[name, "b"] = [(b, job) for b, job in jobs if accountant.suits(job.mechanism()) is not None]
    for name, strategy, accountant in everybody:
        if strategy is bsr and not isinstance(accountant, Renyi):
            found[name, "p"] = [(p, Job(s.bsr(p), 1, 100, accountant)) for p in BANDWIDTHS]
    found["renyi, α ≤ 8", "p"] = [(p, Job(s.bsr(p), 4, 100, renyi(p, 8))) for p in (2, 3, 4, 5, 6, 7, 8)]
    found["renyi, p = 1 (DP-SGD, b = 1000)", "α"] = [
        (a, Job(dpsgd, 1, 1000, renyi(1, a), orders=a)) for a in (25, 100, 400, 800, 1600, 3200)
    ]
    found["renyi, p = 2", "α"] = [
        (a, Job(s.bsr(2), 1, 100, renyi(2, a), orders=a)) for a in (8, 16, 32, 64, 128, 256, 512)
    ]
    found["renyi, p = 4", "α"] = [(a, Job(bsr, 1, 100, renyi(4, a), orders=a)) for a in (3, 6, 12, 24, 48, 96)]
    for name, strategy, accountant in everybody:
        if not isinstance(accountant, MonteCarlo):
            found[name.replace(", p = 4, α ≤ 8", ""), "1/δ"] = [
                (1 / d, Job(strategy, 1, 100, Renyi() if isinstance(accountant, Renyi) else accountant, delta=d))
                for d in DELTAS
            ]
    found["monte-carlo, s_min(δ) samples", "1/δ"] = [
        (1 / d, Job(bsr, 1, 100, MonteCarlo(samples=minimum_samples(d, 0.01), importance=False)))
        for d in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    ]
    name, best = "best, calibration", Best()

    def job(strategy: s.Strategy, epochs: int = 4, batches: int = 100, delta: float | None = None) -> Job:
        return Job(strategy, epochs, batches, best, delta, calibrated=True)

    found[name, "b"] = [(b, job(bsr, 4, b)) for b in (16, 50, 160, 500, 1600)]
    found[name, "k"] = [(k, job(bsr, k)) for k in (1, 3, 10, 30, 100)]
    found[name, "p"] = [(p, job(s.bsr(p), 2, 200)) for p in WIDE]
    found[name, "τ"] = [(tau, job(s.power(0.5, math.exp(-1 / tau)))) for tau in WIDE]
    found[name, "1/δ"] = [(1 / d, job(bsr, delta=d)) for d in DELTAS]
    return found


def _warm(job: Job) -> None:
    """Have the kernels compiled before anything is timed."""
    accountant = MonteCarlo(samples=100) if isinstance(job.accountant, MonteCarlo) else job.accountant
    strategy = job.strategy if job.strategy == dpmf.strategies.dpsgd() else dpmf.strategies.bsr(2)
    for epochs in (1, 2):
        Job(strategy, epochs, 10, accountant, job.delta, calibrated=job.calibrated).once(3.0)


def measure(progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    rows = []
    for (name, grows), sweep in sweeps().items():
        _warm(sweep[0][1])
        xs = [float(x) for x, _ in sweep]
        found = [job.seconds() for _, job in sweep]
        took = [seconds for seconds, _ in found]
        rows.append({"accountant": name, "grows": grows, "x": xs, "seconds": took})
        if sweep[0][1].calibrated:
            rows[-1]["ratio"] = [sigma / job.lower() for (_, sigma), (_, job) in zip(found, sweep, strict=True)]
        exponent = _page.fitted(list(zip(xs, took, strict=True)))[0]
        progress(f"{name}, {grows}: {' '.join(f'{s:.3g}' for s in took)}, exponent {exponent:.2f}")
    return rows


def main() -> None:
    with _page.measured("growth") as found:
        found["rows"] = rows = measure(lambda line: print(line, flush=True))
    table = Table(*_page.GROWTH_HEAD, title="Growth of the cost of one evaluation")
    for row in rows:
        table.add_row(*_page.growth_row(row))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
