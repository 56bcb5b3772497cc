"""How much noise each family of majorants asks for, over what is needed: σ/σ_true at δ = 10⁻⁵, remove direction.

σ_true is by importance-sampled Monte Carlo (standard error up to 0.3 %). `cost` is the first-order cost by which
families are screened, relative to that of G itself; `s` is CPU time of one calibration, the fit not included.
`python -m benchmarks majorants` measures all mechanisms, `python -m benchmarks.majorants BSR16 BSR64` some.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import dpmf
from dpmf import strategies
from dpmf.accountants.chain._bound import ChainBound
from dpmf.accountants.chain._majorants import candidates, cost_of
from dpmf.accountants.chain._overlap_fits import overlaps
from dpmf.accountants.monte_carlo import MonteCarlo
from dpmf.batching import BallsInBins
from dpmf.calibration import calibrate_one_way
from dpmf.mechanism import Mechanism

DELTA = 1e-5
EMPHASES = (0.0, 3.0)
EPSILONS = (0.25, 1.0, 4.0)
MECHANISMS = {
    "BSR4 b=100 k=10": (strategies.bsr(4), BallsInBins(10, 100)),
    "BISR4 b=100 k=10": (strategies.bisr(4), BallsInBins(10, 100)),
    "BSR8 b=100 k=10": (strategies.bsr(8), BallsInBins(10, 100)),
    "BSR16 b=200 k=5": (strategies.bsr(16), BallsInBins(5, 200)),
    "BISR16 b=200 k=5": (strategies.bisr(16), BallsInBins(5, 200)),
    "BSR64 b=250 k=4": (strategies.bsr(64), BallsInBins(4, 250)),
    "BISR64 b=250 k=4": (strategies.bisr(64), BallsInBins(4, 250)),
}


def measure(mechanism: Mechanism, samples: int = 50_000) -> list[tuple[str, list[str]]]:
    """A line per candidate: its name and, per ε, its cost, σ/σ_true and CPU time."""
    gram = mechanism.gram
    sampler = MonteCarlo(samples=samples, seed=1)
    truth = {}
    for epsilon in EPSILONS:
        found = dpmf.calibrate(
            mechanism, target_epsilon=epsilon, target_delta=DELTA, accountant=sampler, direction="remove",
            relative_tolerance=1e-3,
        )  # fmt: skip
        truth[epsilon] = found.noise_multiplier
    lines = []
    for emphasis in EMPHASES:
        own = float((np.exp(emphasis * gram / gram.max()) * gram).sum()) / len(gram)
        fitted = candidates(gram, emphasis)
        if emphasis == EMPHASES[0] and gram[0, -1] == 0:  # their fits hardly depend on it
            fitted += [("overlaps", model) for model in overlaps(gram, 1.0)]
        for name, model in fitted:
            member = ChainBound(mechanism, model, family=name, largest=float(gram.max()))
            cells = [f"{cost_of(model, gram, emphasis) / own:.3f}"]
            for epsilon, true in truth.items():
                begin = time.process_time()
                sigma, _, _ = calibrate_one_way([member], epsilon, DELTA, "remove", true * 1.05, 2e-3)
                cells.append(f"{sigma / true:.3f} ({time.process_time() - begin:.1f} s)")
            lines.append((name, cells))
    return lines


def main(names: list[str] | None = None) -> None:
    print("| mechanism | family, emphasis | cost | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |")
    print("|---" * (3 + len(EPSILONS)) + "|")
    for label in [label for label in MECHANISMS if not names or label.split()[0] in names]:
        for name, cells in measure(Mechanism(*MECHANISMS[label])):
            print(f"| {label} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
