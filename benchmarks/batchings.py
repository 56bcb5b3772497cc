"""Noise and error beside the peers for four ways to make batches, at equal (ε, δ); opake in an environment of its own.

    python -m benchmarks batchings

Everybody is asked for the least σ at (ε, 10⁻⁵), k = 10 and b = 100. What the noise does to the model is σ times the
root mean square of the row norms of A·C⁻¹, for prefix sums A and everybody's own C: σ alone cannot be compared between
different C. "Guarantee" is "proved", or the probability with which a bound by sampling fails. b-min-sep sampling (a
record rests for the bandwidth of C after each use) has no proved bound anywhere: what is proved beside it is dpmf's
design. opake's answers come within half a percent of ε, and those that take longer than five minutes are left
out. Seconds are those of the processor for the whole calibration, on one thread.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import dpmf
from benchmarks import _page, peers

DELTA = 1e-5
EPSILONS = (1.0, 4.0, 8.0)
EPOCHS, BINS = 10, 100
BANDWIDTHS = (4, 10, 20)  # of optimised banded matrices, under cyclic Poisson and b-min-sep sampling
DESIGN_SECONDS = 240.0
SECONDS = 300.0  # after which opake's answer to a question is left out

OPAKE = """
import json, math, sys, time
from opake.accounting import calibration
from opake.dpftrl import noise
from opake.dpftrl.accounting import amplification as ftrl, mechanisms
from opake.dpsgd import accounting as sgd

asked = json.loads(sys.argv[1])
n, b, kind = asked["epochs"] * asked["bins"], asked["bins"], asked["kind"]
strategies = {
    "dpsgd": lambda: noise.identity_strategy(),
    "bsr": lambda: noise.bsr_strategy(bandwidth=asked["bands"], alpha=1.0, beta=0.0),
    "bandmf": lambda: noise.band_mf_strategy(bands=asked["bands"]),
}
strategy = strategies[asked["strategy"]]()

def process(sigma):
    if kind == "reshuffled":
        return sgd.k_out_of_t(sgd.gaussian(sigma), k=asked["epochs"], t=n, allocation="block")
    correlated = mechanisms.mf_gaussian(sigma, strategy)
    if kind == "fixed":
        return ftrl.balls_in_bins(correlated, num_bins=b, n_steps=n)
    if kind == "cyclic Poisson":
        return ftrl.poisson(correlated, sample_rate=asked["bands"] / b, n_steps=n)
    return ftrl.b_min_sep(correlated, n_steps=n, p0=1 / b)

column = [1.0] if asked["strategy"] == "dpsgd" else strategy.coefficients(n_steps=n).tolist()
began = time.process_time()
found = calibration.calibrate(
    calibration.epsilon_budget(asked["epsilon"], delta=asked["delta"]), process, *asked["between"], tolerance=5e-3
)
took = time.process_time() - began
print(json.dumps({
    "sigma": found.param, "seconds": took, "failure": found.mc_failure_probability, "column": column,
    "sampled": kind == "b-min-sep" or (kind == "fixed" and asked["strategy"] != "dpsgd"),
}))
"""


def opake(kind: str, strategy: str, bands: int, *, mechanism: dpmf.Mechanism, epsilon: float) -> dict[str, Any]:
    """σ by opake, which is looked for within a factor of 1.6 around dpmf's for a mechanism like it, and its C."""
    near, _ = _calibrated(mechanism, epsilon)
    asked = {"kind": kind, "strategy": strategy, "bands": bands, "epsilon": epsilon, "delta": DELTA, "epochs": EPOCHS,
             "bins": BINS, "between": [near / 1.6, near * 1.6]}  # fmt: skip
    answer = peers.run("opake", OPAKE, asked, SECONDS)
    guarantee = f"fails with probability {answer['failure']:.0e}" if answer["sampled"] else "proved"
    column = np.trim_zeros(np.array(answer["column"]), "b")
    return {"sigma": answer["sigma"], "seconds": answer["seconds"], "guarantee": guarantee, "column": column}


@functools.cache
def _calibrated(mechanism: dpmf.Mechanism, epsilon: float) -> tuple[float, float]:
    """σ by dpmf, and the seconds that it took."""
    small = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 10))  # compiles
    dpmf.calibrate(small, target_epsilon=1.0, target_delta=DELTA)
    _column(mechanism)  # coefficients that are optimised are optimised before
    began = time.process_time()
    found = dpmf.calibrate(mechanism, target_epsilon=epsilon, target_delta=DELTA)
    return found.noise_multiplier, time.process_time() - began


def ours(*, mechanism: dpmf.Mechanism, epsilon: float) -> dict[str, Any]:
    sigma, took = _calibrated(mechanism, epsilon)
    return {"sigma": sigma, "seconds": took, "guarantee": "proved", "column": _column(mechanism)}


def designed(epsilon: float) -> dict[str, Any]:
    """The mechanism that dpmf itself chooses, among all its batchings."""
    began = time.process_time()
    found = dpmf.design(
        epochs=EPOCHS, batches_per_epoch=BINS, target_epsilon=epsilon, target_delta=DELTA, time_budget=DESIGN_SECONDS
    )
    took, best = time.process_time() - began, found.best
    return {"sigma": best.noise_multiplier, "seconds": took, "guarantee": "proved", "error": best.error,
            "note": best.mechanism.name}  # fmt: skip


def poisson_pld(*, mechanism: dpmf.Mechanism, bands: int, epsilon: float) -> dict[str, Any]:
    """Cyclic Poisson sampling by dp_accounting, as jax-privacy accounts for its banded matrices."""
    from dp_accounting import dp_event, mechanism_calibration, pld

    column = _column(mechanism)
    norm = float(np.linalg.norm(column))

    def event(sigma: float) -> Any:
        sampled = dp_event.PoissonSampledDpEvent(bands / BINS, dp_event.GaussianDpEvent(sigma / norm))
        return dp_event.SelfComposedDpEvent(sampled, math.ceil(EPOCHS * BINS / bands))

    began = time.process_time()
    sigma = mechanism_calibration.calibrate_dp_mechanism(
        lambda: pld.PLDAccountant(value_discretization_interval=1e-3), event, epsilon, DELTA,
        mechanism_calibration.ExplicitBracketInterval(0.1, 100.0), tol=1e-3,
    )  # fmt: skip
    return {"sigma": sigma, "seconds": time.process_time() - began, "guarantee": "proved", "column": column}


Asked = tuple[str, str, Callable[[], dict[str, Any]]]


Made = Callable[[], dpmf.Mechanism]


def questions(epsilon: float) -> list[Asked]:
    """(batching, who, how to get the answer). Coefficients are optimised when an answer is asked for."""
    s, bins, again = dpmf.strategies, dpmf.BallsInBins(EPOCHS, BINS), dpmf.reshuffled(EPOCHS, BINS)
    same: list[tuple[str, str, Made, tuple[str, int]]] = [
        ("fixed", "DP-SGD", lambda: dpmf.Mechanism(s.dpsgd(), bins), ("dpsgd", 1)),
        ("fixed", "BSR(p=4)", lambda: dpmf.Mechanism(s.bsr(4), bins), ("bsr", 4)),
        ("reshuffled", "DP-SGD", lambda: dpmf.Mechanism(s.dpsgd(), again), ("dpsgd", 1)),
    ]
    same += [("cyclic Poisson", f"BandMF(p={p})", functools.partial(_cyclic, p), ("bandmf", p)) for p in BANDWIDTHS]
    asked: list[Asked] = []
    for batching, name, made, (strategy, p) in same:
        asked.append((batching, f"dpmf, {name}", functools.partial(_asked, ours, made, epsilon)))
        if batching == "cyclic Poisson":
            pld = functools.partial(poisson_pld, bands=p)
            asked.append((batching, f"dp_accounting, {name}", functools.partial(_asked, pld, made, epsilon)))
        for kind in ("cyclic Poisson", "b-min-sep") if strategy == "bandmf" else (batching,):
            theirs = functools.partial(opake, kind, strategy, p)
            asked.append((kind, f"opake, {name}", functools.partial(_asked, theirs, made, epsilon)))
    asked.append(("any", "dpmf, its design", lambda: designed(epsilon)))
    return asked


def _asked(how: Callable[..., dict[str, Any]], made: Made, epsilon: float) -> dict[str, Any]:
    return how(mechanism=made(), epsilon=epsilon)


@functools.cache
def _cyclic(p: int) -> dpmf.Mechanism:
    return dpmf.Mechanism(dpmf.strategies.bandmf(p), dpmf.cyclic_poisson(EPOCHS, BINS, p))


def _column(mechanism: dpmf.Mechanism) -> Any:
    """The first column of C, without the zeros at its end."""
    return np.trim_zeros(mechanism.strategy.strategy_coef(mechanism.batching.iterations), "b")  # type: ignore[attr-defined]


def error(column: Any, sigma: float) -> float:
    """σ times the root mean square of the row norms of A·C⁻¹, for prefix sums and the first column of C."""
    mechanism = dpmf.Mechanism(dpmf.strategies.coefficients(column), dpmf.BallsInBins(EPOCHS, BINS))
    return float(dpmf.workloads.error(mechanism, sigma, dpmf.workloads.prefix()).root_mean_square)


def measure() -> list[dict[str, Any]]:
    rows = []
    for epsilon in EPSILONS:
        for batching, who, run in questions(epsilon):
            try:
                found = run()
            except ImportError as missing:
                print(f"{batching}: {who} is left out: {missing}", file=sys.stderr)
                continue
            column = found.pop("column", None)
            if column is not None:
                found["error"] = error(column, found["sigma"])
            rows.append({"batching": batching, "who": who, "epsilon": epsilon} | found)
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    with _page.measured("batchings") as found:
        found |= {"peers": {"opake": _version()}, "rows": (rows := measure())}
    table = Table("batching", "who", "ε", "σ", "error", "guarantee", "seconds")
    for row in rows:
        numbers = (f"{row[key]:.4g}" for key in ("epsilon", "sigma", "error"))
        table.add_row(row["batching"], row["who"], *numbers, row["guarantee"], f"{row['seconds']:.3g}")
    Console(width=130).print(table)


def _version() -> str:
    try:
        return peers.version("opake")
    except ImportError as missing:
        return f"left out ({missing})"


if __name__ == "__main__":
    main()
