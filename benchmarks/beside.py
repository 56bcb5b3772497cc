"""Tightness and seconds beside the peers, in one run: one question, ε at a noise multiplier, put to everybody.

    python -m benchmarks beside

σ is the true one for ε₀ at δ = 1e-5 (lattice for DP-SGD, importance-sampled Monte Carlo otherwise). An accountant that
answers ε₁ ≥ ε₀ wastes noise: it asks for σ where σ_true(ε₁) is enough, so its tightness is σ_true(ε₀)/σ_true(ε₁).
Seconds are those of the processor for that one answer, both directions unless noted, compilation not counted.
random-allocation runs in an environment of its own. Poisson sampling (dp_accounting's PLD) is another mechanism: a
reference line, not a bound for balls-in-bins. jax-privacy's Monte Carlo gives an estimate, remove only; what its own
rule asks for to make (ε, 1e-5) of it is the row below, with the time extrapolated from the samples drawn.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq

import dpmf
from benchmarks import _page, peers
from dpmf.accountants import (
    Accountant,
    Auto,
    Best,
    Cascade,
    Chain,
    Conditional,
    Gaussian,
    Lattice,
    Moments,
    MonteCarlo,
    OwnBin,
    PLDAccounting,
    Renyi,
)

DELTA = 1e-5
EPSILONS = (0.5, 4.0)
TRUTH = MonteCarlo(samples=100_000, seed=11)
JAX_SAMPLES = 20_000

PEER = """
import json, sys, time
from random_allocation.comparisons.definitions import PrivacyParams, SchemeConfig, Verbosity
from random_allocation.random_allocation_scheme import combined
config = SchemeConfig(allocation_direct_alpha_orders=list(range(2, 26)), verbosity=Verbosity.NONE)
answer = []
for sigma in json.loads(sys.argv[1])["sigmas"]:
    both = (combined.allocation_epsilon_combined_remove, combined.allocation_epsilon_combined_add)
    began = time.process_time()
    parameters = PrivacyParams(num_steps=json.loads(sys.argv[1])["steps"], sigma=sigma, delta=1e-5)
    value = max(float(way(parameters, config)) for way in both)
    answer.append([value, time.process_time() - began])
print(json.dumps(answer))
"""


def mechanisms() -> dict[str, dpmf.Mechanism]:
    s, bins = dpmf.strategies, dpmf.BallsInBins
    return {
        "DP-SGD, N = b = 100": dpmf.Mechanism(s.dpsgd(), bins(1, 100)),
        "DP-SGD, N = b = 1000": dpmf.Mechanism(s.dpsgd(), bins(1, 1000)),
        "BSR(p=4), N = b = 100": dpmf.Mechanism(s.bsr(4), bins(1, 100)),
        "BSR(p=4), N = 1000, b = 100": dpmf.Mechanism(s.bsr(4), bins(10, 100)),
    }


def own(mechanism: dpmf.Mechanism) -> dict[str, Accountant]:
    uncorrelated = _uncorrelated(mechanism)
    samples = 100_000 if mechanism.batching.batches_per_epoch < 1000 else 20_000
    tight: dict[str, Accountant] = {"lattice": Lattice()} if uncorrelated else {"chain": Chain()}
    found: dict[str, Accountant] = tight | {
        "best (default)": Best(),
        "auto": Auto(),
        "cascade": Cascade(),
        "moments": Moments(),
        "own-bin": OwnBin(),
        "renyi": Renyi(),
        "conditional": Conditional(),
        "gaussian": Gaussian(),
        f"monte-carlo, {samples:,} samples (estimate)": MonteCarlo(samples=samples),
    }
    refused = {name for name in ("moments", "own-bin") if found[name].suits(mechanism) is None}  # too many batches
    return {name: accountant for name, accountant in found.items() if name not in refused}


def _uncorrelated(mechanism: dpmf.Mechanism) -> bool:
    return isinstance(mechanism.strategy, type(dpmf.strategies.dpsgd()))


def true_sigma(mechanism: dpmf.Mechanism, epsilon: float) -> float:
    if not 0 < epsilon < math.inf:
        return math.nan
    accountant = Lattice() if _uncorrelated(mechanism) else TRUTH
    return dpmf.calibrate(
        mechanism, target_epsilon=epsilon, target_delta=DELTA, accountant=accountant, relative_tolerance=1e-3
    ).noise_multiplier


def answers(ask: Callable[[float], float], sigmas: list[float]) -> list[tuple[float, float]]:
    """(ε, seconds) for each σ."""
    found = []
    for sigma in sigmas:
        began = time.process_time()
        value = ask(sigma)
        found.append((value, time.process_time() - began))
    return found


def poisson(epochs: int, b: int) -> Callable[[float], float]:
    from dp_accounting import dp_event, pld

    def ask(sigma: float) -> float:
        event = dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(1 / b, dp_event.GaussianDpEvent(sigma)), epochs * b
        )
        return float(pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(DELTA))

    return ask


def jax_monte_carlo(mechanism: dpmf.Mechanism, samples: int) -> Callable[[float], float]:
    from jax_privacy import batch_selection
    from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    column = np.trim_zeros(mechanism.strategy.strategy_coef(n), "b")  # type: ignore[attr-defined]
    selection = batch_selection.BallsInBinsSampling(iterations=n, cycle_length=b)

    def ask(sigma: float) -> float:
        losses, _ = sample_generation.get_privacy_loss_sample(selection, sigma, column, seed=1, num_samples=samples)

        def excess(epsilon: float) -> float:
            return float(delta_calculation.delta_from_epsilon_and_samples(epsilon, losses)) - DELTA

        return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, float(np.max(losses))))

    return ask


def jax_samples_needed() -> int:
    from jax_privacy.experimental.monte_carlo import delta_calculation

    return int(delta_calculation.minimum_samples_to_calibrate(0.5 * DELTA, DELTA))


Answers = list[tuple[float, float]]


def questions(mechanism: dpmf.Mechanism, sigmas: list[float]) -> dict[str, tuple[str, Callable[[], Answers]]]:
    """By accountant: whose it is, and how to get its answers."""
    epochs, b = mechanism.batching.epochs, mechanism.batching.batches_per_epoch

    def with_dpmf(accountant: Accountant) -> Callable[[], Answers]:
        def ask(sigma: float) -> float:
            return dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=DELTA, accountant=accountant).epsilon

        def run() -> Answers:
            small = dpmf.Mechanism(mechanism.strategy, dpmf.BallsInBins(epochs, 10))  # compiles
            dpmf.epsilon(small, noise_multiplier=2.0, delta=DELTA, accountant=accountant)
            return answers(ask, sigmas)

        return run

    asked = {name: ("dpmf", with_dpmf(accountant)) for name, accountant in own(mechanism).items()}
    if _uncorrelated(mechanism):
        if b < 1000:  # there it takes most of a minute for each ε
            asked["PLD-accounting"] = ("peer", with_dpmf(PLDAccounting()))
        asked["PLD-accounting, loss discretization 0.1"] = ("peer", with_dpmf(PLDAccounting(loss_discretization=0.1)))
        asked["random-allocation"] = (
            "peer",
            lambda: [(e, s) for e, s in peers.run("random-allocation", PEER, {"sigmas": sigmas, "steps": b})],
        )
        asked["Poisson PLD (reference)"] = ("reference", lambda: answers(poisson(epochs, b), sigmas))
    asked[f"jax-privacy Monte Carlo, {JAX_SAMPLES:,} samples (estimate)"] = (
        "peer", lambda: answers(jax_monte_carlo(mechanism, JAX_SAMPLES), sigmas)
    )  # fmt: skip
    return asked


def measure() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for title, mechanism in mechanisms().items():
        sigmas = [true_sigma(mechanism, e) for e in EPSILONS]
        _ = mechanism.gram  # any accountant needs it
        for name, (kind, run) in questions(mechanism, sigmas).items():
            try:
                found = run()
            except ImportError as error:
                print(f"{title}: {name} is left out: {error}", file=sys.stderr)
                continue
            wasted = [s / true_sigma(mechanism, e) for s, (e, _) in zip(sigmas, found, strict=True)]
            row = {"mechanism": title, "accountant": name, "kind": kind, "sigmas": sigmas}
            seconds = [took for _, took in found]
            rows.append(row | {"epsilons": [e for e, _ in found], "tightness": wasted, "seconds": seconds})
            if name.startswith("jax"):
                needed = jax_samples_needed()
                rule = f"jax-privacy Monte Carlo, the {needed:,} samples of its own rule (extrapolated)"
                scaled = [took * needed / JAX_SAMPLES for took in seconds]
                empty = [None, None]
                rows.append(row | {"accountant": rule, "epsilons": empty, "tightness": empty, "seconds": scaled})
            print(title, name, [f"{w:.3f}" for w in wasted], [f"{s:.3g}" for s in seconds], flush=True)
    return rows


def versions() -> dict[str, str]:
    """Of everybody in the tables."""
    found = {}
    for name in ("jax-privacy", "PLD-accounting", "dp-accounting"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(ImportError):
        found["random-allocation"] = peers.version("random-allocation")
    return found


def main() -> None:
    with _page.measured("beside") as found:
        found |= {"peers": versions(), "rows": (rows := measure())}
    console = Console(width=120)
    for title in mechanisms():
        table = Table(
            "accountant", *(f"σ/σ_true, ε={e:g}" for e in EPSILONS), *(f"s, ε={e:g}" for e in EPSILONS), title=title
        )
        for row in (r for r in rows if r["mechanism"] == title):
            table.add_row(row["accountant"], *map(_page.number, row["tightness"]), *map(_page.time, row["seconds"]))
        console.print(table)


if __name__ == "__main__":
    main()
