"""What the hand-over to dp_accounting costs: ε from its loss distribution over ε from dpmf (or from a closed form).

`python -m benchmarks loss_distribution` prints the table of docs/ecosystem.md; names of rows choose among them:
`python -m benchmarks.loss_distribution gaussian`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import dpmf
from dpmf.integrations.dp_accounting import BallsInBinsMatrixDpEvent, BallsInBinsPLDAccountant
from dpmf.loss.gaussian import gaussian_epsilon
from dpmf.strategies import bisr, bsr, dpsgd

DELTAS = (1e-3, 1e-5, 1e-7)
HEADER = (
    "| mechanism | σ | runs | reference | loss at δ = 10⁻³ | at 10⁻⁵ | at 10⁻⁷ |\n|---|---:|---:|---|---:|---:|---:|"
)


@dataclass(frozen=True)
class Row:
    event: BallsInBinsMatrixDpEvent
    runs: int
    reference: str

    def exact(self) -> Callable[[float], float]:
        sigma, mechanism = self.event.noise_multiplier, self.event.mechanism
        if self.reference == "closed form":
            return lambda delta: gaussian_epsilon(math.sqrt(self.runs) / sigma, delta)
        if self.reference == "direct":
            return lambda delta: dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=delta).epsilon
        fine = BallsInBinsPLDAccountant(relative_tolerance=1e-4).compose(self.event, self.runs)
        return fine.get_epsilon

    def text(self) -> str:
        exact = self.exact()
        accountant = BallsInBinsPLDAccountant().compose(self.event, self.runs)
        losses = [f"{100 * (accountant.get_epsilon(delta) / exact(delta) - 1):.2f} %" for delta in DELTAS]
        cells = (self.event.mechanism.name, f"{self.event.noise_multiplier:g}", str(self.runs), self.reference, *losses)
        return "| " + " | ".join(cells) + " |"


ROWS = {
    "gaussian": Row(BallsInBinsMatrixDpEvent(dpsgd(), 1, 1, 1.0), 1, "closed form"),
    "gaussian-10": Row(BallsInBinsMatrixDpEvent(dpsgd(), 1, 1, 1.0), 10, "closed form"),
    "gaussian-100": Row(BallsInBinsMatrixDpEvent(dpsgd(), 1, 1, 1.0), 100, "closed form"),
    "dpsgd": Row(BallsInBinsMatrixDpEvent(dpsgd(), 10, 100, 2.76), 1, "direct"),
    "dpsgd-1000": Row(BallsInBinsMatrixDpEvent(dpsgd(), 1, 1000, 0.6), 1, "direct"),
    "dpsgd-10": Row(BallsInBinsMatrixDpEvent(dpsgd(), 1, 100, 1.0), 10, "finer lattice"),
    "bsr": Row(BallsInBinsMatrixDpEvent(bsr(4), 1, 100, 1.2), 1, "direct"),
    "bisr": Row(BallsInBinsMatrixDpEvent(bisr(4), 10, 100, 5.0), 1, "direct"),
}


def main(names: list[str] | None = None) -> None:
    print(HEADER)
    for name in names or ROWS:
        begin = time.process_time()
        print(ROWS[name].text(), flush=True)
        print(f"{name}: {time.process_time() - begin:.1f} s of one core", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
