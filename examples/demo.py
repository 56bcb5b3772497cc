"""What `make demo` runs: noise multipliers for three mechanisms at several ε, and what the best one gains in error."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

import dpmf
import dpmf.designs.shown
from dpmf import designs, report
from dpmf.formatting import given, upper

EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
MECHANISMS = {
    "independent noise": dpmf.strategies.dpsgd(),
    "correlated noise, banded": dpmf.strategies.bsr(bandwidth=4),
    "correlated noise, banded inverse": dpmf.strategies.bisr(bandwidth=4),
}
# What is proved, beside what sampling suggests the truth to be.
ACCOUNTANTS = (dpmf.accountants.Best(), dpmf.accountants.MonteCarlo(samples=20_000))


def main(directory: Path, epsilons: Sequence[float], batches: dpmf.BallsInBins, seconds: float) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    print(
        f"Noise multipliers that guarantee (ε, {given(DELTA)})-DP over {batches.epochs} epochs of "
        f"{batches.batches_per_epoch} balls-in-bins batches.\nFor clipping norm 1, the strategy as given. "
        "The first column is proved; the second is a sampled estimate of the truth, good to about a percent.\n",
        flush=True,
    )
    mechanisms = [dpmf.Mechanism(strategy, batches) for strategy in MECHANISMS.values()]
    calibrated = partial(report.compare, accountants=ACCOUNTANTS, epsilons=epsilons, delta=DELTA)
    comparisons: list[report.Comparison] = []
    terminal = Console(stderr=True)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of each process
    context = multiprocessing.get_context("spawn")
    # One process for each mechanism. An interrupt ends this one, and leaving the block ends the others.
    with context.Pool(len(mechanisms), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        coming = pool.imap(calibrated, mechanisms)
        for words in MECHANISMS:
            with terminal.status(f"calibrating: {words} ({len(comparisons)} of {len(MECHANISMS)} mechanisms done) ..."):
                comparisons.append(next(coming))
            print(f"{words}:")
            report.print_comparison(comparisons[-1])
            print(flush=True)
    picture = directory / "noise-multipliers.png"
    report.comparison_figure(comparisons).savefig(picture, dpi=150)
    print(f"picture: {picture}\n", flush=True)
    show_gain(directory, epsilons[-1], batches, seconds)


def show_gain(directory: Path, epsilon: float, batches: dpmf.BallsInBins, seconds: float) -> None:
    """Noise multipliers alone do not say which mechanism is best. Show the error in a model that forgets slowly."""
    workload = dpmf.workloads.damped(memory=batches.batches_per_epoch)
    print(
        f"A larger noise multiplier may cause less error, because correlated noise cancels. The error that counts is "
        f"the noise in the model ({workload.name}):\n",
        flush=True,
    )
    with Console(stderr=True).status("choosing the mechanism with the least error ..."):
        found = dpmf.design(
            epochs=batches.epochs,
            batches_per_epoch=batches.batches_per_epoch,
            target_epsilon=epsilon,
            target_delta=DELTA,
            workload=workload,
            batchings=("fixed", "cyclic", "poisson", "cyclic-poisson"),
            bandwidths=(1, 4, 10),
            time_budget=seconds,
            workers=2,
        )
    designs.shown.print_design(found)
    picture = directory / "errors.png"
    designs.shown.design_figure(found).savefig(picture, dpi=150)
    print(f"\npicture: {picture}")
    if found.baseline is not None and found.gain is not None:
        print(
            f"What you gain: at the same guarantee, the noise in the model is {upper(found.best.error, 4)} in place of "
            f"{upper(found.baseline.error, 4)}, {100 * (1 - found.gain):.0f} % less than with independent noise."
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("demo-output"), help="where the picture goes")
    parser.add_argument("epsilons", nargs="*", type=float, metavar="ε", help="1, 2, 4 and 8 if none is given")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batches-per-epoch", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0, help="time to look for the best mechanism")
    options = parser.parse_args()
    try:
        bins = dpmf.BallsInBins(options.epochs, options.batches_per_epoch)
        main(options.directory, options.epsilons or EPSILONS, bins, options.seconds)
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
