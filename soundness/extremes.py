"""What happens at each end of every parameter: rows that are both a test and a line of docs/extremes.md.

`python -m soundness extremes` writes the page; tests/acceptance/test_extremes.py runs every row and compares the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import dpmf
from dpmf import BallsInBins, CalibrationError, Mechanism, strategies
from dpmf.accountants import Auto, Best, Cascade, Chain, Conditional, Lattice, Moments, MonteCarlo, OwnBin, Renyi
from soundness.truth import gaussian_delta

PAGE = Path(__file__).parent.parent / "docs" / "extremes.md"
QUICK = Renyi(work_budget=1e5)


@dataclass(frozen=True)
class Row:
    """A call, what happens in words, and the check of it: a pattern for a refusal, a predicate for an answer."""

    parameter: str
    end: str
    happens: str
    call: Callable[[], Any]
    check: str | Callable[[Any], bool]

    def verify(self) -> None:
        """Raise AssertionError unless it happens."""
        if isinstance(self.check, str):
            try:
                answer = self.call()
            except ValueError as error:
                message = str(error)
                assert re.search(self.check, message), f"{self.parameter} at {self.end}: {message}"
                assert "\n" not in message
                return
            raise AssertionError(f"{self.parameter} at {self.end} was accepted: {answer}")
        answer = self.call()
        assert self.check(answer), f"{self.parameter} at {self.end}: {answer}"


@cache
def small() -> Mechanism:
    return Mechanism(strategies.bsr(2), BallsInBins(2, 3))


@cache
def plain(epochs: int = 1, batches: int = 1) -> Mechanism:
    return Mechanism(strategies.dpsgd(), BallsInBins(epochs, batches))


def _delta(**changes: Any) -> float:
    arguments = {"mechanism": small(), "noise_multiplier": 2.0, "epsilon": 1.0, "accountant": QUICK} | changes
    return dpmf.delta(**arguments).delta


def _epsilon(**changes: Any) -> float:
    arguments = {"mechanism": small(), "noise_multiplier": 2.0, "delta": 1e-5, "accountant": QUICK} | changes
    return dpmf.epsilon(**arguments).epsilon


def _sigma(**changes: Any) -> float:
    arguments = {"mechanism": small(), "target_epsilon": 1.0, "target_delta": 1e-5, "accountant": QUICK} | changes
    return dpmf.calibrate(**arguments).noise_multiplier


def _profile(**changes: Any) -> list[float]:
    arguments = {"mechanism": small(), "noise_multiplier": 2.0, "epsilons": [1.0], "accountant": QUICK} | changes
    return dpmf.profile(**arguments).deltas.tolist()


def _run(**changes: Any) -> dpmf.Run:
    return dpmf.Run(small(), 2.0, **changes)


def _matrix(entries: object) -> Mechanism:
    array = np.asarray(entries, dtype=float)
    return Mechanism(strategies.matrix(array), BallsInBins(1, len(array)))


def _close(expected: Callable[[], float], relative: float) -> Callable[[float], bool]:
    return lambda found: abs(found - expected()) <= relative * expected()


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda found: low <= found <= high


def _reached(found: Any) -> bool:
    return 0 <= found.delta <= 1 and any("budget_exhausted" in str(how) for how in found.details.values())


REFUSED = "refused, in one line that names it"
ROWS: list[Row] = [
    Row("epsilon", "NaN", REFUSED, lambda: _delta(epsilon=math.nan), "epsilon must be finite"),
    Row("epsilon", "∞", REFUSED, lambda: _delta(epsilon=math.inf), "epsilon must be finite"),
    Row("epsilon", "−10⁻³⁰⁰", REFUSED, lambda: _delta(epsilon=-1e-300), "epsilon must be non-negative"),
    Row("epsilon", "0", "δ(0), a bound on the total variation", lambda: _delta(epsilon=0.0), _between(1e-3, 1)),
    Row("epsilon", "5·10⁻³²⁴", "treated as 0", lambda: _delta(epsilon=5e-324),
        _close(lambda: _delta(epsilon=0.0), 1e-9)),
    Row("epsilon", "10³⁰⁰", "δ below 10⁻¹⁰⁰, not below 0", lambda: _delta(epsilon=1e300), _between(0, 1e-100)),
    Row("epsilons", "none", REFUSED, lambda: _profile(epsilons=[]), "epsilons must be at least one number"),
    Row("epsilons", "one of them below 0", REFUSED,
        lambda: _profile(epsilons=[1.0, -1.0]), "epsilons must be non-negative"),
    Row("epsilons", "0 only", "δ(0)", lambda: _profile(epsilons=[0.0])[0], _close(lambda: _delta(epsilon=0.0), 1e-9)),
    Row("target_epsilon", "0", REFUSED, lambda: _sigma(target_epsilon=0.0), "target_epsilon must be positive"),
    Row("target_epsilon", "10⁻⁶", "a large finite σ", lambda: _sigma(target_epsilon=1e-6), _between(1e3, 1e12)),
    Row("target_epsilon", "10⁶", "a small positive σ", lambda: _sigma(target_epsilon=1e6), _between(1e-5, 1e-1)),
    Row("delta", "0", REFUSED, lambda: _epsilon(delta=0.0), "delta must be strictly between 0 and 1"),
    Row("delta", "1", REFUSED, lambda: _epsilon(delta=1.0), "delta must be strictly between 0 and 1"),
    Row("delta", "5·10⁻³²⁴", "a finite ε", lambda: _epsilon(delta=5e-324), _between(1, 1e4)),
    Row("delta", "1 − 10⁻¹⁶", "ε = 0", lambda: _epsilon(delta=1 - 1e-16), _between(0, 1e-6)),
    Row("target_delta", "10⁻³⁰⁰", "a finite σ", lambda: _sigma(target_delta=1e-300), _between(1, 1e5)),
    Row("target_delta", "1 − 10⁻¹²", "a tiny σ", lambda: _sigma(target_delta=1 - 1e-12), _between(1e-60, 1)),
    Row("noise_multiplier", "0", REFUSED, lambda: _delta(noise_multiplier=0.0), "noise_multiplier must be positive"),
    Row("noise_multiplier", "∞", REFUSED, lambda: _delta(noise_multiplier=math.inf), "noise_multiplier must be finite"),
    Row("noise_multiplier", "10⁻⁸⁰", "refused: its square leaves the range of double",
        lambda: _delta(noise_multiplier=1e-80), "noise_multiplier must be between"),
    Row("noise_multiplier", "10⁻⁶⁰", "δ = 1", lambda: _delta(noise_multiplier=1e-60), _between(1, 1)),
    Row("noise_multiplier", "10⁻⁶⁰, asked for ε", "ε is huge or infinite, never NaN",
        lambda: _epsilon(noise_multiplier=1e-60), _between(1e50, math.inf)),
    Row("noise_multiplier", "10⁶⁰", "δ below 10⁻¹⁰⁰", lambda: _delta(noise_multiplier=1e60), _between(0, 1e-100)),
    Row("epochs", "0", REFUSED, lambda: plain(0, 1), "epochs must be at least 1"),
    Row("epochs", "10¹²", "refused before memory is taken",
        lambda: plain(10**12, 1), "epochs must be at most 100000000"),
    Row("epochs", "10⁶ of one batch", "the Gaussian mechanism of sensitivity 10³",
        lambda: _delta(mechanism=plain(10**6, 1), noise_multiplier=1e3, accountant="gaussian"),
        _close(lambda: gaussian_delta(1.0, 1.0), 1e-6)),
    Row("batches_per_epoch", "0", REFUSED, lambda: plain(1, 0), "batches_per_epoch must be at least 1"),
    Row("batches_per_epoch", "1", "no amplification: the Gaussian mechanism",
        lambda: _delta(mechanism=plain(), noise_multiplier=1.0, accountant="best"),
        _close(lambda: gaussian_delta(1.0, 1.0), 1e-6)),
    Row("batches_per_epoch", "10⁵, DP-SGD", "answered by the lattice; no b × b matrix is made",
        lambda: _delta(mechanism=plain(1, 10**5), noise_multiplier=0.5, accountant="lattice"), _between(1e-12, 0.5)),
    Row("batches_per_epoch", "10⁹", "refused before memory is taken",
        lambda: plain(1, 10**9), "batches_per_epoch must be"),
    Row("iterations", "fewer than batches", REFUSED, lambda: BallsInBins(1, 5, 4), "batches_per_epoch must be at most"),
    Row("iterations", "more than epochs × batches", REFUSED,
        lambda: BallsInBins(2, 5, 11), "iterations must be in 6..10"),
    Row("iterations", "one into the last epoch", "answered, with less than the whole epoch",
        lambda: _delta(mechanism=Mechanism(strategies.bsr(2), BallsInBins(2, 3, 4))),
        lambda found: 0 < found <= _delta()),
    Row("rethrow_every", "0", REFUSED, lambda: BallsInBins(2, 3, rethrow_every=0), "rethrow_every must be"),
    Row("rethrow_every", "all epochs", "fixed bins",
        lambda: BallsInBins(2, 3, rethrow_every=2), lambda bins: bins == BallsInBins(2, 3)),
    Row("stride", "no divisor of the batches", REFUSED, lambda: BallsInBins(2, 3, stride=2), "stride must be"),
    Row("stride", "all batches", "every record has one bin: no amplification",
        lambda: dpmf.delta(Mechanism(strategies.dpsgd(), BallsInBins(2, 3, rethrow_every=1, stride=3)),
                           noise_multiplier=2.0, epsilon=1.0, direction="remove").delta,
        lambda delta: gaussian_delta(0.5, 1.0) <= delta <= 1.01 * gaussian_delta(0.5, 1.0)),
    Row("gap", "on fixed bins", REFUSED, lambda: BallsInBins(2, 3, gap=1), "gap applies only"),
    Row("gap", "shorter than the memory of the noise", "what throws share is accounted for",
        lambda: Mechanism(strategies.bsr(3), dpmf.reshuffled(2, 3, gap=0)).product_between_throws,
        lambda product: product > 0),
    Row("near", "0", REFUSED,
        lambda: dpmf.calibrate(small(), target_epsilon=1.0, target_delta=1e-5, near=0.0), "must be"),
    Row("bandwidth", "0", REFUSED, lambda: strategies.bsr(0), "bandwidth must be at least 1"),
    Row("bandwidth", "1", "DP-SGD", lambda: _delta(mechanism=Mechanism(strategies.bsr(1), BallsInBins(2, 3))),
        _close(lambda: _delta(mechanism=plain(2, 3)), 1e-9)),
    Row("bandwidth", "above N", "treated as N",
        lambda: _delta(mechanism=Mechanism(strategies.bsr(10**6), BallsInBins(2, 3))),
        _close(lambda: _delta(mechanism=Mechanism(strategies.bsr(6), BallsInBins(2, 3))), 1e-9)),
    Row("matrix", "all zeros", REFUSED,
        lambda: _matrix(np.zeros((2, 2))), "matrix must have an entry that is not zero"),
    Row("matrix", "zero columns", "bins that never show; answered",
        lambda: _delta(mechanism=_matrix(np.diag([1.0, 0, 0]))),
        _between(1e-9, 0.34)),
    Row("matrix", "entries of 10²⁰⁰", "refused: squares leave the range of double",
        lambda: _delta(mechanism=_matrix(np.eye(2) * 1e200)), "strategy must have entries of ordinary size"),
    Row("matrix", "entries of 10⁻²⁰⁰", "refused: underflow could hide sensitivity",
        lambda: _delta(mechanism=_matrix(np.eye(2) * 1e-200)), "strategy must have entries of ordinary size"),
    Row("matrix", "10⁵ × 10⁵", "refused before memory is taken",
        lambda: strategies.matrix(np.broadcast_to(0.0, (10**5, 10**5))), "matrix must be at most"),
    Row("coefficients", "one", "DP-SGD",
        lambda: _delta(mechanism=Mechanism(strategies.coefficients([1.0]), BallsInBins(2, 3))),
        _close(lambda: _delta(mechanism=plain(2, 3)), 1e-9)),
    Row("coefficients", "none", REFUSED, lambda: strategies.coefficients([]), "coefficients must be"),
    Row("coefficients", "0 first", REFUSED,
        lambda: strategies.coefficients([0.0, 1.0]), "coefficients must start with"),
    Row("buffers", "0", REFUSED, lambda: strategies.blt(0), "buffers must be at least 1"),
    Row("max_order", "1", REFUSED, lambda: Renyi(max_order=1), "max_order must be at least 2"),
    Row("max_order", "2", "a loose bound",
        lambda: _delta(accountant=Renyi(max_order=2)), lambda found: _delta() <= found <= 1),
    Row("work_budget", "0", REFUSED, lambda: Renyi(work_budget=0.0), "work_budget must be positive"),
    Row("work_budget", "10⁻³⁰⁰", "order 2 is always afforded",
        lambda: _delta(accountant=Renyi(work_budget=1e-300)), lambda found: _delta() <= found <= 1),
    Row("work_budget", "10³⁰⁰", "as many orders as are useful", lambda: _delta(accountant=Renyi(work_budget=1e300)),
        lambda found: 0 < found <= _delta() * (1 + 1e-9)),
    Row("bandwidth of `renyi`", "0", REFUSED, lambda: Renyi(bandwidth=0), "bandwidth must be at least 1"),
    Row("bandwidth of `renyi`", "above b", "treated as b",
        lambda: _delta(accountant=Renyi(bandwidth=10**6, max_order=4)),
        _close(lambda: _delta(accountant=Renyi(bandwidth=3, max_order=4)), 1e-9)),
    Row("family", "an unknown name", REFUSED, lambda: Conditional(family="best"), "family must be one of"),
    Row("option", "0", REFUSED, lambda: Conditional(option=0), "option must be at least 1"),
    Row("option", "4", REFUSED, lambda: Conditional(option=4), "option must be at most 3"),
    Row("optimise_bad_event", "neither True nor False", REFUSED,
        lambda: Conditional(optimise_bad_event=1), "optimise_bad_event must be True or False"),
    Row("bad_event_share", "0", REFUSED, lambda: Conditional(bad_event_share=0.0), "bad_event_share must be strictly"),
    Row("bad_event_share", "1", REFUSED, lambda: Conditional(bad_event_share=1.0), "bad_event_share must be strictly"),
    Row("bad_event_share", "10⁻³⁰", "a looser bound", lambda: _delta(accountant=Conditional(bad_event_share=1e-30)),
        lambda found: _delta(accountant=Conditional()) * 0.9 <= found <= 1),
    Row("temperatures", "none", REFUSED, lambda: Conditional(temperatures=()), "temperatures must be at least one"),
    Row("temperatures", "10⁻³⁰⁰", "a bound, perhaps 1", lambda: _delta(accountant=Conditional(temperatures=(1e-300,))),
        _between(1e-3, 1)),
    Row("max_frequencies", "63", REFUSED, lambda: Chain(max_frequencies=63), "max_frequencies must be at least 64"),
    Row("max_frequencies", "10⁴⁰⁰", REFUSED,
        lambda: Chain(max_frequencies=10**400), "max_frequencies must be at most"),
    Row("max_frequencies", "64", "a looser bound", lambda: _delta(accountant=Chain(max_frequencies=64)),
        lambda found: _delta(accountant=Chain()) * (1 - 1e-6) <= found <= 1),
    Row("discretisation_loss", "0", REFUSED,
        lambda: Chain(discretisation_loss=0.0), "discretisation_loss must be positive"),
    Row("discretisation_loss", "10⁶, `lattice`", "a loose bound",
        lambda: _delta(mechanism=plain(1, 4), accountant=Lattice(discretisation_loss=1e6)),
        lambda found: _delta(mechanism=plain(1, 4), accountant=Lattice()) <= found <= 1),
    Row("discretisation_loss", "10⁶, `cascade`", "treated as 1: a loose bound",
        lambda: _delta(accountant=Cascade(discretisation_loss=1e6)),
        lambda found: _delta(accountant=Cascade()) * (1 - 1e-9) <= found <= 1),
    Row("discretisation_loss", "10⁶, `chain`", "treated as 1: a loose bound",
        lambda: _delta(accountant=Chain(discretisation_loss=1e6)),
        lambda found: _delta(accountant=Chain()) * (1 - 1e-9) <= found <= 1),
    Row("spacing", "0", REFUSED, lambda: Moments(spacing=0.0), "spacing must be positive"),
    Row("spacing", "10⁶", "treated as 1: a loose bound",
        lambda: _delta(accountant=Moments(spacing=1e6)),
        lambda found: _delta(accountant=Moments()) * (1 - 1e-6) <= found <= 1),
    Row("spacing", "0, `own-bin`", REFUSED, lambda: OwnBin(spacing=0.0), "spacing must be positive"),
    Row("spacing", "10⁶, `own-bin`", "treated as 1: a loose bound",
        lambda: _delta(accountant=OwnBin(spacing=1e6)),
        lambda found: _delta(accountant=OwnBin()) * (1 - 1e-6) <= found <= 1),
    Row("max_points", "63", REFUSED, lambda: Lattice(max_points=63), "max_points must be at least 64"),
    Row("max_points", "2²³", REFUSED, lambda: Lattice(max_points=2**23), "max_points must be at most"),
    Row("tolerance", "0", REFUSED, lambda: Auto(tolerance=0.0), "tolerance must be positive"),
    Row("tolerance", "10⁶", "closed forms are good enough",
        lambda: _delta(accountant=Auto(tolerance=1e6)), _close(lambda: _delta(accountant="gaussian"), 1e-9)),
    Row("renyi", "another accountant", REFUSED, lambda: Best(renyi=Chain()), "renyi must be a Renyi accountant"),
    Row("accountants", "none", REFUSED, lambda: Best(accountants=()), "accountants must be one or several"),
    Row("accountants", "one that samples", REFUSED,
        lambda: _delta(accountant=Best(accountants=(MonteCarlo(samples=10),))), "accountants must be deterministic"),
    Row("samples", "0", REFUSED, lambda: MonteCarlo(samples=0), "samples must be at least 1"),
    Row("samples", "1", "an estimate in [0, 1]", lambda: _delta(accountant=MonteCarlo(samples=1)), _between(0, 1)),
    Row("seed", "−1", REFUSED, lambda: MonteCarlo(seed=-1), "seed must be at least 0"),
    Row("importance", "neither True nor False", REFUSED, lambda: MonteCarlo(importance=1), "importance must be True"),
    Row("progress", "neither True nor False", REFUSED, lambda: MonteCarlo(progress="yes"), "progress must be True"),
    Row("backend", "an unknown name", REFUSED, lambda: MonteCarlo(backend="tpu"), "backend must be one of"),
    Row("device", "one for numpy", REFUSED, lambda: MonteCarlo(device="cuda"), "device must be None for the numpy"),
    Row("failure_probability", "0", REFUSED,
        lambda: MonteCarlo(failure_probability=0.0), "failure_probability must be"),
    Row("failure_probability", "1", REFUSED,
        lambda: MonteCarlo(failure_probability=1.0), "failure_probability must be"),
    Row("failure_probability", "10⁻³⁰⁰", "a bound near 1 from few samples",
        lambda: _delta(accountant=MonteCarlo(samples=10, failure_probability=1e-300, importance=False)),
        _between(0.9, 1)),
    Row("relative_tolerance", "0", REFUSED,
        lambda: _sigma(relative_tolerance=0.0), "relative_tolerance must be strictly"),
    Row("relative_tolerance", "0.999", "a σ that still meets the target, not the least",
        lambda: _sigma(relative_tolerance=0.999), lambda found: found >= _sigma() * (1 - 1e-3)),
    Row("max_order and target", "orders that cannot certify it", "an error that says the least ε they can",
        lambda: _sigma(target_epsilon=0.1, accountant=Renyi(max_order=3)), "cannot certify epsilon below"),
    Row("time_budget", "0", REFUSED, lambda: _delta(time_budget=0.0), "time_budget must be positive"),
    Row("time_budget", "10⁻⁹ s", "the best sound bound reached, and details that say so",
        lambda: dpmf.delta(small(), noise_multiplier=2.0, epsilon=1.0, time_budget=1e-9), _reached),
    Row("memory_budget", "0", REFUSED, lambda: _delta(memory_budget=0.0), "memory_budget must be positive"),
    Row("memory_budget", "1 byte", "the best sound bound within it, and details that say so",
        lambda: dpmf.delta(small(), noise_multiplier=2.0, epsilon=1.0, memory_budget=1.0), _reached),
    Row("memory_budget", "10³⁰⁰ bytes", "the same as without a budget",
        lambda: _delta(memory_budget=1e300), _close(lambda: _delta(), 1e-9)),
    Row("with_lower", "neither True nor False", REFUSED,
        lambda: _delta(with_lower="no"), "with_lower must be True or False"),
    Row("stop", "a step that was not named", REFUSED, lambda: dpmf.epsilon(_run(stops=(1,)), delta=1e-5, stop=2),
        "stop must be one of the stopping points that were named in advance"),
    Row("stop", "of a mechanism", REFUSED, lambda: _epsilon(stop=1), "stop applies only to a dpmf.Run"),
    Row("stops", "the last step", REFUSED, lambda: _run(stops=(6,)), "stops must be at most 5"),
    Row("stops", "all steps before it", "ε at the first of them, at a sixth of δ",
        lambda: dpmf.epsilon(_run(stops=range(1, 6)), delta=1e-5, stop=1, accountant=QUICK).epsilon,
        _between(0.1, 100)),
    Row("max_batch_size", "1, where batches are larger", "δ = 1",
        lambda: dpmf.delta(_run(max_batch_size=1, records=9), epsilon=1.0, accountant=QUICK).delta, _between(1, 1)),
    Row("max_batch_size", "1, where batches are larger, asked for ε", REFUSED,
        lambda: dpmf.epsilon(_run(max_batch_size=1, records=9), delta=1e-5, accountant=QUICK), "delta must be larger"),
    Row("max_batch_size", "more than all records", "the same as without a cut",
        lambda: dpmf.delta(_run(max_batch_size=10, records=9), epsilon=1.0, accountant=QUICK).delta,
        _close(lambda: _delta(), 0.0)),
    Row("direction", "anything but both, remove, add", REFUSED,
        lambda: _delta(direction="up"), "direction must be one of"),
    Row("accountant", "an unknown name", REFUSED, lambda: _delta(accountant="guess"), "accountant must be one of"),
]  # fmt: skip

HEAD = """# At the ends

What happens at each end of every parameter. Every line is a test, in
[tests/acceptance/test_extremes.py](../tests/acceptance/test_extremes.py). `python -m soundness extremes` writes this
page from the same rows. Nowhere is an answer NaN, an ε negative or a δ outside [0, 1].

"""


def _quoted(parameter: str) -> str:
    return f"`{parameter}`" if "`" not in parameter else parameter.replace("bandwidth", "`bandwidth`")


def page() -> str:
    lines = ["| parameter | at | what happens |", "|---|---|---|"]
    lines += [f"| {_quoted(row.parameter)} | {row.end} | {row.happens} |" for row in ROWS]
    return HEAD + "\n".join(lines) + "\n"


def main(arguments: object = None) -> int:
    for row in ROWS:
        row.verify()
    PAGE.write_text(page())
    print(f"{len(ROWS)} rows hold; wrote {PAGE.name}")
    return 0


__all__ = ["PAGE", "ROWS", "CalibrationError", "Row", "page"]
