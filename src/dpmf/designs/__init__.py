"""Design: choose the mechanism, not only its noise.

From the shape of the run, the target (ε, δ), what the model does with noise (the workload) and how many copies of the
model the noise may keep, `design` finds the mechanism with the least error. Coefficients are optimised for every
candidate with a sampled noise multiplier; the most promising candidates then get a guaranteed one, until no other
candidate can win or time is up. What is finished is kept in the cache directory, so that a design goes on where it was
interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpmf import validation
from dpmf.batching import BallsInBins, batches_from_size
from dpmf.designs._candidates import BATCHINGS, candidates
from dpmf.designs._crew import crew
from dpmf.designs._search import Search
from dpmf.designs.result import Design, Option
from dpmf.errors import ArgumentError
from dpmf.workloads import Workload, prefix

__all__ = ["BATCHINGS", "Design", "Option", "design"]

DEFAULT_SECONDS = 240.0


def design(
    *,
    epochs: int,
    batches_per_epoch: int | None = None,
    target_epsilon: float,
    target_delta: float,
    workload: Workload | None = None,
    dataset_size: int | None = None,
    batch_size: int | None = None,
    batchings: Sequence[str] | None = None,
    bandwidths: Sequence[int] | None = None,
    copies: int | None = None,
    time_budget: float | None = DEFAULT_SECONDS,
    workers: int = 1,
) -> Design:
    """Find the mechanism with the least error at (ε, δ), among strategies, bandwidths and batchings.

    Args:
      epochs: k.
      batches_per_epoch: b; or give `dataset_size` and `batch_size` in its place.
      target_epsilon: ε > 0.
      target_delta: δ, strictly between 0 and 1.
      workload: how noise adds up in the model; by default prefix sums.
      dataset_size: the number of records, which is not protected then, or a public constant near it.
      batch_size: the number of records in a batch, on average.
      batchings: names out of `BATCHINGS`; by default all of them.
      bandwidths: the bandwidths to consider; by default powers of two up to 64, and free coefficients.
      copies: how many copies of the model the noise may keep between steps; by default any number.
      time_budget: seconds after which the best answer found so far is returned. Work that is finished is kept in the
        cache directory, and the next call goes on from there.
      workers: how many processes to use. With more than one, a script needs the usual ``if __name__ == "__main__"``.

    Returns:
      A `Design`.

    **Formal guarantees.** The noise multiplier of `best` has those of `dpmf.calibrate`; so has one from the cache
    directory, where its bound is evaluated once more before it is used. Other options say whether theirs is certified.
    The search itself guarantees nothing about mechanisms that it did not consider.
    """
    if batches_per_epoch is None:
        if dataset_size is None or batch_size is None:
            raise ArgumentError("batches_per_epoch", "must be given, or dataset_size and batch_size in its place")
        batches_per_epoch = batches_from_size(dataset_size, batch_size)
    shape = BallsInBins(epochs, batches_per_epoch)
    epsilon = validation.positive("target_epsilon", target_epsilon)
    delta = validation.probability("target_delta", target_delta)
    chosen = prefix() if workload is None else workload
    if not isinstance(chosen, Workload):
        raise validation.wrong("workload", "a dpmf workload", workload)
    seconds = math.inf if time_budget is None else validation.positive("time_budget", time_budget)
    workers = validation.integer("workers", workers, at_least=1, at_most=64)
    todo = candidates(shape.epochs, shape.batches_per_epoch, batchings=batchings, bandwidths=bandwidths, copies=copies)
    with crew(workers) as hands:
        return Search(todo, chosen, (epsilon, delta), copies, seconds, hands).result()
