"""Noise and error beside the peers for four ways to make batches, at equal (ε, δ); opake in an environment of its own.

    python -m benchmarks batchings

Everybody is asked for the least σ at (ε, 10⁻⁵), k = 10 and b = 100. What the noise does to the model is σ times the
root mean square of the row norms of A·C⁻¹, for prefix sums A and everybody's own C: σ alone cannot be compared between
different C. "Guarantee" is "proved", or the probability with which a bound by sampling fails. b-min-sep sampling (a
record rests for the bandwidth of C after each use) has no proved bound anywhere: what is proved beside it is dpmf's
design. opake stops at an ε at most half a percent below the one asked for, and is told where to look, which
spares it time: within a tenth of dpmf's σ. Seconds are those of the processor for the whole calibration, on one thread.

A question to opake takes minutes, so opake is asked first, has ten minutes of the processor for each, and every answer
is kept as it comes in benchmarks-output/batchings.jsonl: the same command goes on after an interrupt or a kill, and
asks only what is missing. What opake answered is also kept in docs/data/benchmarks.json, whatever our own code has
become since; our own answers are those of the code there is. `python -m benchmarks.batchings opake` asks opake only,
and `python -m benchmarks.batchings ours` leaves opake alone: a row that has no answer yet says so.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import dpmf
from benchmarks import _page, peers
from benchmarks._journal import PLACE, Answer, Journal
from evidence import fingerprint
from evidence.machine import machine

DELTA = 1e-5
EPOCHS, BINS = 10, 100
# ε, and the bandwidth of optimised banded matrices under cyclic Poisson and b-min-sep sampling: of the divisors of b
# from 2 to 50, the one with the least error under cyclic Poisson sampling by dpmf.
BANDWIDTHS = {1.0: 5, 4.0: 20, 8.0: 25}
DESIGN_SECONDS = 240.0
SECONDS = 600.0  # of the processor, for one question to opake
TOLERANCE = 5e-3  # relative, of opake's ε
WITHIN = 1.1  # the factor around dpmf's σ within which opake looks for its own, for the same mechanism
WITHIN_OTHER = 1.6  # the same for b-min-sep sampling, around dpmf's σ for cyclic Poisson sampling
JOURNAL = PLACE / "batchings.jsonl"

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
    calibration.epsilon_budget(asked["epsilon"], delta=asked["delta"]), process, *asked["between"],
    tolerance=asked["tolerance"],
)
took = time.process_time() - began
print(json.dumps({
    "sigma": found.param, "seconds": took, "failure": found.mc_failure_probability, "column": column,
    "sampled": kind == "b-min-sep" or (kind == "fixed" and asked["strategy"] != "dpsgd"),
}))
"""


Made = Callable[[], dpmf.Mechanism]


@dataclass(frozen=True)
class Question:
    """A row of the table. Coefficients are optimised when the answer is asked for."""

    batching: str
    who: str
    epsilon: float
    ask: Callable[[], Answer]
    asked: dict[str, Any]  # what the answer depends on, besides who answers
    by: str
    limit: float | None = None  # seconds of the processor


def opake(asked: dict[str, Any], made: Made) -> Answer:
    """σ by opake, which is looked for around dpmf's for a mechanism like it, and its C."""
    near, _ = _calibrated(made(), asked["epsilon"])
    between = [near / asked["within"], near * asked["within"]]
    said = peers.run("opake", OPAKE, asked | {"between": between}, SECONDS)
    guarantee = f"fails with probability {said['failure']:.0e}" if said["sampled"] else "proved"
    column = np.trim_zeros(np.array(said["column"]), "b").tolist()
    return {"sigma": said["sigma"], "seconds": said["seconds"], "guarantee": guarantee, "column": column,
            "machine": machine().rpartition(", Python")[0]}  # fmt: skip


@functools.cache
def _calibrated(mechanism: dpmf.Mechanism, epsilon: float) -> tuple[float, float]:
    """σ by dpmf, and the seconds that it took."""
    small = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(1, 10))  # compiles
    dpmf.calibrate(small, target_epsilon=1.0, target_delta=DELTA)
    _column(mechanism)  # coefficients that are optimised are optimised before
    began = time.process_time()
    found = dpmf.calibrate(mechanism, target_epsilon=epsilon, target_delta=DELTA)
    return found.noise_multiplier, time.process_time() - began


def ours(made: Made, epsilon: float) -> Answer:
    mechanism = made()
    sigma, took = _calibrated(mechanism, epsilon)
    return {"sigma": sigma, "seconds": took, "guarantee": "proved", "column": _column(mechanism).tolist()}


def designed(epsilon: float) -> Answer:
    """The mechanism that dpmf itself chooses, among all its batchings."""
    began = time.process_time()
    found = dpmf.design(
        epochs=EPOCHS, batches_per_epoch=BINS, target_epsilon=epsilon, target_delta=DELTA, time_budget=DESIGN_SECONDS
    )
    took, best = time.process_time() - began, found.best
    return {"sigma": best.noise_multiplier, "seconds": took, "guarantee": "proved", "error": best.error,
            "note": best.mechanism.name}  # fmt: skip


def poisson_pld(made: Made, bands: int, epsilon: float) -> Answer:
    """Cyclic Poisson sampling by dp_accounting, as jax-privacy accounts for its banded matrices."""
    from dp_accounting import dp_event, mechanism_calibration, pld

    column = _column(made())
    norm = float(np.linalg.norm(column))

    def event(sigma: float) -> Any:
        sampled = dp_event.PoissonSampledDpEvent(bands / BINS, dp_event.GaussianDpEvent(sigma / norm))
        return dp_event.SelfComposedDpEvent(sampled, math.ceil(EPOCHS * BINS / bands))

    began = time.process_time()
    sigma = mechanism_calibration.calibrate_dp_mechanism(
        lambda: pld.PLDAccountant(value_discretization_interval=1e-3), event, epsilon, DELTA,
        mechanism_calibration.ExplicitBracketInterval(0.1, 100.0), tol=1e-3,
    )  # fmt: skip
    return {"sigma": sigma, "seconds": time.process_time() - began, "guarantee": "proved", "column": column.tolist()}


def questions(epsilon: float) -> list[Question]:
    s, bins, again = dpmf.strategies, dpmf.BallsInBins(EPOCHS, BINS), dpmf.reshuffled(EPOCHS, BINS)
    p = BANDWIDTHS[epsilon]
    cyclic, banded = functools.partial(_cyclic, p), f"BandMF(p={p})"
    same: list[tuple[str, str, Made, str, int]] = [
        ("fixed", "DP-SGD", lambda: dpmf.Mechanism(s.dpsgd(), bins), "dpsgd", 1),
        ("fixed", "BSR(p=4)", lambda: dpmf.Mechanism(s.bsr(4), bins), "bsr", 4),
        ("reshuffled", "DP-SGD", lambda: dpmf.Mechanism(s.dpsgd(), again), "dpsgd", 1),
        ("cyclic Poisson", banded, cyclic, "bandmf", p),
    ]
    asked = []
    for batching, name, made, strategy, bands in same:
        asked.append(_of_us(batching, f"dpmf, {name}", epsilon, functools.partial(ours, made, epsilon)))
        if batching == "cyclic Poisson":
            pld = functools.partial(poisson_pld, made, bands, epsilon)
            asked.append(_of_us(batching, f"dp_accounting, {name}", epsilon, pld))
        asked.append(_of_opake(batching, name, epsilon, made, strategy, bands))
    asked.append(_of_opake("b-min-sep", banded, epsilon, cyclic, "bandmf", p))
    asked.append(_of_us("any", "dpmf, its design", epsilon, functools.partial(designed, epsilon)))
    return asked


def _setting(epsilon: float) -> dict[str, Any]:
    return {"epsilon": epsilon, "delta": DELTA, "epochs": EPOCHS, "bins": BINS}


def _of_us(batching: str, who: str, epsilon: float, ask: Callable[[], Answer]) -> Question:
    asked = {"batching": batching, "who": who} | _setting(epsilon)
    return Question(batching, who, epsilon, ask, asked, f"dpmf {dpmf.__version__}+{fingerprint.package()}")


def _of_opake(batching: str, name: str, epsilon: float, made: Made, strategy: str, bands: int) -> Question:
    within = WITHIN_OTHER if batching == "b-min-sep" else WITHIN
    asked = {"kind": batching, "strategy": strategy, "bands": bands, "tolerance": TOLERANCE, "within": within}
    asked |= _setting(epsilon)
    ask = functools.partial(opake, asked, made)
    return Question(batching, f"opake, {name}", epsilon, ask, asked, f"opake {peers.OPAKE_VERSION}", SECONDS)


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


def answer(question: Question, journal: Journal, asking: bool = True) -> Answer:
    """From the journal, or asked for and written down; what took too long is an answer, too."""
    found = journal.find(question.asked, question.by)
    if found is not None and found.get("limit", math.inf) >= (question.limit or 0.0):
        return found
    if not asking:
        return {"guarantee": "not asked yet"}
    try:
        found = question.ask()
    except peers.NoAnswerError:
        found = {"guarantee": f"no answer within {question.limit:g} s", "limit": question.limit}
    journal.add(question.asked, question.by, found)
    return found


def measure(journal: Journal, *, whom: str = "all") -> list[dict[str, Any]]:
    """The rows, in the order of the table. opake is asked first, or alone ("opake"), or not at all ("ours")."""
    asked = [question for epsilon in BANDWIDTHS for question in questions(epsilon)]
    asked = [question for question in asked if whom != "opake" or question.limit is not None]
    rows: dict[int, dict[str, Any]] = {}
    for place, question in sorted(enumerate(asked), key=lambda item: item[1].limit is None):
        about = {"batching": question.batching, "who": question.who, "epsilon": question.epsilon}
        try:
            found = answer(question, journal, whom != "ours" or question.limit is None)
        except ImportError as missing:
            print(f"{question.batching}: {question.who} is left out: {missing}", file=sys.stderr)
            continue
        if "column" in found:
            found = {"error": error(found["column"], found["sigma"])} | found
        if question.limit is None:
            found.pop("column", None)
        elif len(found) > 1:  # an answer: enough to know it again
            found = found | {"asked": question.asked, "by": question.by}
        rows[place] = about | found
        said = f"σ = {found['sigma']:.5g}, {found['seconds']:.0f} s" if "sigma" in found else found["guarantee"]
        print(f"ε = {question.epsilon:g}, {question.batching}: {question.who}: {said}", flush=True)
    return [rows[place] for place in sorted(rows)]


def known() -> Journal:
    """What is in the journal, and what opake answered according to the page's data."""
    journal = Journal(JOURNAL)
    for row in _page.load().get("batchings", {}).get("rows", []):
        if "asked" in row and journal.find(row["asked"], row["by"]) is None:
            apart = {"batching", "who", "epsilon", "error", "asked", "by"}
            journal.learn(row["asked"], row["by"], {key: v for key, v in row.items() if key not in apart})
    return journal


def main(whom: str = "all") -> None:
    if whom == "opake":
        measure(known(), whom=whom)
        return
    with _page.measured("batchings") as found:
        found |= {"rows": (rows := measure(known(), whom=whom))}
        if any("asked" in row for row in rows):
            found["peers"] = {"opake": peers.OPAKE_VERSION}
    table = Table("batching", "who", "ε", "σ", "error", "guarantee", "seconds")
    for row in rows:
        numbers = (f"{row[key]:.4g}" if key in row else "" for key in ("epsilon", "sigma", "error"))
        seconds = f"{row['seconds']:.3g}" if "seconds" in row else ""
        table.add_row(row["batching"], row["who"], *numbers, row["guarantee"], seconds)
    Console(width=130).print(table)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["opake"], ["ours"]):
        sys.exit(f"benchmarks.batchings: opake, ours or nothing, got {' '.join(sys.argv[1:])}")
    main(*sys.argv[1:])
