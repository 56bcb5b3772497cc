"""The error of a mechanism beside that of independent noise (DP-SGD) with its best batching, at the same guarantee."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dpmf import api, store
from dpmf.batching import BallsInBins, Batching, Poisson, reshuffled
from dpmf.mechanism import Mechanism
from dpmf.strategies.closed_form import dpsgd
from dpmf.workloads import IterateError, Workload, error

_TOLERANCE = 1e-3


class ErrorBeside(NamedTuple):
    """The error of a mechanism, and what independent noise would make of it.

    Attributes:
      workload: its name.
      error: root mean square over iterations, largest and last, at clipping norm 1.
      baseline: DP-SGD with the batching that needs the least noise.
      relative: the root mean square error divided by that of the baseline; below 1 is better than DP-SGD.
    """

    workload: str
    error: IterateError
    baseline: Mechanism
    relative: float

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        return {
            "workload": self.workload,
            "error": self.error._asdict(),
            "baseline": self.baseline.name,
            "relative_error": self.relative,
        }


def error_beside(
    mechanism: Mechanism, noise_multiplier: float, workload: Workload, target_epsilon: float, target_delta: float
) -> ErrorBeside:
    """Compare the error of a mechanism with that of DP-SGD with its best batching, at (ε, δ).

    Args:
      mechanism: the strategy and the batching.
      noise_multiplier: σ, which gives the mechanism the guarantee.
      workload: how noise adds up in the model.
      target_epsilon: ε.
      target_delta: δ.
    """
    own = error(mechanism, noise_multiplier, workload)
    batching = mechanism.batching
    epochs, batches = batching.epochs, batching.batches_per_epoch
    ways: list[Batching] = [Poisson(epochs, batches)]
    ways.append(reshuffled(epochs, batches) if epochs > 1 else BallsInBins(1, batches))
    others = [Mechanism(dpsgd(), way) for way in ways]
    sigmas = [independent_noise(other, target_epsilon, target_delta) for other in others]
    best = int(np.argmin(sigmas))
    beside = error(others[best], sigmas[best], workload)
    return ErrorBeside(workload.name, own, others[best], own.root_mean_square / beside.root_mean_square)


def independent_noise(mechanism: Mechanism, target_epsilon: float, target_delta: float) -> float:
    """A guaranteed noise multiplier of DP-SGD, from the store if one is there that meets the target."""
    accountant = "best" if isinstance(mechanism.batching, Poisson) else "lattice"

    def compute() -> store.Values:
        found = api.calibrate(
            mechanism, target_epsilon=target_epsilon, target_delta=target_delta, accountant=accountant,
            relative_tolerance=_TOLERANCE,
        )  # fmt: skip
        return {"noise_multiplier": np.array([found.noise_multiplier])}

    def holds(values: store.Values) -> bool:
        return api.meets(mechanism, values["noise_multiplier"][0], target_epsilon, target_delta)

    key: dict[str, store.Parameter] = {
        "batching": repr(mechanism.batching), "epsilon": float(target_epsilon).hex(), "delta": float(target_delta).hex()
    }  # fmt: skip
    return float(store.remember("independent", key, None, compute, holds)["noise_multiplier"][0])
