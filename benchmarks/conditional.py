"""Conditional composition: seconds per noise multiplier, and what keeping the σ-independent terms saves.

    python -m benchmarks conditional

"first" is the first δ(σ, ε) of a prepared accountant, "next" the best of three further σ; "terms" the σ-independent
part of the first (Gram prefixes, variational weights), which a calibration pays once. A small run beforehand takes the
compilation out. σ is such that δ(1) = 1e-5.
"""

from __future__ import annotations

import time

from dpmf.accountants.conditional import Conditional, PreparedConditional
from dpmf.accountants.protocol import Direction
from dpmf.batching import BallsInBins
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Strategy
from dpmf.strategies.closed_form import bisr, bsr, dpsgd

EPSILON, DELTA = 1.0, 1e-5
AMGM, VARIATIONAL = Conditional(family="am-gm"), Conditional()
ROWS: list[tuple[str, Strategy, int, int, Conditional, Direction, float]] = [
    ("DP-SGD N=100 b=100", dpsgd(), 1, 100, VARIATIONAL, "remove", 1.104),
    ("BSR4 N=100 b=100", bsr(4), 1, 100, VARIATIONAL, "remove", 3.228),
    ("BSR4 N=1000 b=100", bsr(4), 10, 100, VARIATIONAL, "remove", 11.31),
    ("BSR4 N=1000 b=100", bsr(4), 10, 100, VARIATIONAL, "add", 11.27),
    ("BSR4 N=1000 b=100", bsr(4), 10, 100, Conditional(option=2), "remove", 11.34),
    ("BISR4 N=1000 b=100", bisr(4), 10, 100, VARIATIONAL, "remove", 13.68),
    ("DP-SGD N=1000 b=1000", dpsgd(), 1, 1000, VARIATIONAL, "remove", 0.742),
    ("BSR4 N=10000 b=100", bsr(4), 100, 100, AMGM, "remove", 37.26),
    ("BISR4 N=10000 b=100", bisr(4), 100, 100, AMGM, "remove", 44.58),
]


def evaluate(prepared: PreparedConditional, sigma: float, direction: Direction) -> tuple[float, float]:
    """δ and the seconds it took."""
    start = time.perf_counter()
    delta = prepared.delta(sigma, EPSILON, direction, DELTA).value
    return delta, time.perf_counter() - start


def main() -> None:
    directions: tuple[Direction, ...] = ("remove", "add")
    for options in (AMGM, VARIATIONAL, Conditional(option=2)):
        warm = options.prepare(Mechanism(bsr(2), BallsInBins(2, 3)))
        for direction in directions:
            evaluate(warm, 2.0, direction)
    print(f"conditional composition, ε = {EPSILON:g}, seconds per σ")
    print(
        f"{'mechanism':22} {'bounds':9} {'direction':9} {'σ':>6} {'δ':>9} {'first':>7} {'terms':>7} {'next':>7}  saved"
    )
    for name, strategy, epochs, b, options, direction, sigma in ROWS:
        mechanism = Mechanism(strategy, BallsInBins(epochs, b))
        _ = mechanism.gram  # any accountant needs it
        prepared = options.prepare(mechanism)
        start = time.perf_counter()
        _ = prepared.reverse_hazards(direction).live_steps
        terms = time.perf_counter() - start
        delta, rest = evaluate(prepared, sigma, direction)
        following = min(evaluate(prepared, sigma * (1 + 0.01 * k), direction)[1] for k in (1, 2, 3))
        bounds = "am-gm" if options.family == "am-gm" else f"option {options.option}"
        print(
            f"{name:22} {bounds:9} {direction:9} {sigma:6.3f} {delta:9.2e} {terms + rest:7.2f} {terms:7.2f} "
            f"{following:7.2f} {1 - following / (terms + rest):6.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
