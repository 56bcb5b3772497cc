"""Conditional composition: seconds per noise multiplier, and what keeping the σ-independent terms saves.

    python -m benchmarks conditional

"first" is the first δ(σ, ε) of a prepared accountant, "next" the mean over further σ; "terms" the σ-independent part of
the first (Gram prefixes, variational weights), which a calibration pays once. A small run beforehand takes the
compilation out. σ meets ε = 1, δ = 1e-5.
"""

from __future__ import annotations

import time

from dpmf.accountants.base import Direction
from dpmf.accountants.conditional import Conditional, PreparedConditional
from dpmf.allocation import BallsInBins
from dpmf.calibration import least_noise
from dpmf.mechanism import Mechanism
from dpmf.strategies.base import Strategy
from dpmf.strategies.closed_form import bisr, bsr, dpsgd

EPSILON, DELTA = 1.0, 1e-5
AMGM, VARIATIONAL = Conditional(family="am-gm"), Conditional()
ROWS: list[tuple[str, Strategy, int, int, Conditional, Direction]] = [
    ("DP-SGD N=100 b=100", dpsgd(), 1, 100, VARIATIONAL, "remove"),
    ("BSR4 N=100 b=100", bsr(4), 1, 100, VARIATIONAL, "remove"),
    ("BSR4 N=1000 b=100", bsr(4), 10, 100, VARIATIONAL, "remove"),
    ("BSR4 N=1000 b=100", bsr(4), 10, 100, VARIATIONAL, "add"),
    ("BSR4 N=1000 b=100", bsr(4), 10, 100, Conditional(option=2), "remove"),
    ("BISR4 N=1000 b=100", bisr(4), 10, 100, VARIATIONAL, "remove"),
    ("DP-SGD N=1000 b=1000", dpsgd(), 1, 1000, VARIATIONAL, "remove"),
    ("BSR4 N=10000 b=100", bsr(4), 100, 100, AMGM, "remove"),
    ("BISR4 N=10000 b=100", bisr(4), 100, 100, AMGM, "remove"),
]


def seconds(prepared: PreparedConditional, sigma: float, direction: Direction) -> float:
    start = time.perf_counter()
    prepared.delta_for_target(sigma, EPSILON, DELTA, direction)
    return time.perf_counter() - start


def main() -> None:
    for options in (AMGM, VARIATIONAL, Conditional(option=2)):
        warm = options.prepare(Mechanism(bsr(2), BallsInBins(2, 3)))
        for direction in ("remove", "add"):
            warm.delta_for_target(2.0, EPSILON, DELTA, direction)
    print(
        f"{'mechanism':22} {'bounds':14} {'direction':9} {'sigma':>8} {'first s':>8} {'terms s':>8} {'next s':>7} saved"
    )
    for name, strategy, epochs, b, options, direction in ROWS:
        mechanism = Mechanism(strategy, BallsInBins(epochs, b))
        prepared = options.prepare(mechanism)
        prepared.mechanism.gram  # noqa: B018  (another accountant would have needed it too)
        found = least_noise(
            lambda s, p=prepared, d=direction: p.delta_for_target(s, EPSILON, DELTA, d),  # type: ignore[misc]
            DELTA,
            float(mechanism.gram[0, 0]) ** 0.5,
            1e-3,
        )
        assert found is not None
        sigma = found[0]
        fresh = options.prepare(mechanism)
        start = time.perf_counter()
        _ = fresh.reverse_hazards(direction).live_steps
        terms = time.perf_counter() - start
        first = terms + seconds(fresh, sigma, direction)
        following = sum(seconds(fresh, sigma * (1 + 0.01 * k), direction) for k in (1, 2, 3)) / 3
        bounds = "am-gm" if options.family == "am-gm" else f"option {options.option}"
        print(
            f"{name:22} {bounds:14} {direction:9} {sigma:8.4f} {first:8.2f} {terms:8.2f} {following:7.2f} "
            f"{1 - following / first:5.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
