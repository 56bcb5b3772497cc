"""Hostile arguments of the Python functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from soundness.judge import Outcome, fault, judged

Rng = np.random.Generator


class _Strange:
    def __repr__(self) -> str:
        return "strange\nobject"


def strange_value(rng: Rng) -> Any:
    pool: list[Any] = [
        None, True, False, "", "1", b"1", 1j, float("nan"), float("inf"), -float("inf"), -1, 0, -0.0, 1, 3, 0.5, 1e-12,
        1e308, 5e-324, 10**400, -(10**400), 2**63, np.float64(0.25), np.int32(3), np.float32("nan"), np.array(1.0),
        np.array([1.0]), np.array([]), [], [1], (), {}, {"a": 1}, object(), _Strange(), int, lambda: 1, "best", "renyi",
        "add", np.bool_(True), 10**9, np.datetime64("now"), range(3), 1e70, 1e-300,
    ]  # fmt: skip
    return pool[int(rng.integers(len(pool)))]


def python_call(rng: Rng, index: int, directory: Path) -> Outcome:
    """The public functions with one or two arguments replaced by something strange."""
    import dpmf
    from dpmf import accountants, strategies

    bins = [dpmf.BallsInBins(2, 3), dpmf.reshuffled(2, 3), dpmf.BallsInBins(2, 4, stride=2)][int(rng.integers(3))]
    mechanism = dpmf.Mechanism(strategies.bsr(2), bins)
    cheap = accountants.Renyi(work_budget=1e4, max_order=8)
    asked = {"mechanism": mechanism, "accountant": cheap}
    budgets = {"time_budget": 100.0, "memory_budget": 1e9}
    conditional = {"family": "am-gm", "option": 1, "temperatures": (1.0,), "bad_event_share": 0.5}
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "delta": (
            dpmf.delta,
            {**asked, **budgets, "noise_multiplier": 2.0, "epsilon": 1.0, "direction": "add"},
        ),
        "epsilon": (dpmf.epsilon, {**asked, "noise_multiplier": 2.0, "delta": 1e-3, "direction": "both"}),
        "calibrate": (
            dpmf.calibrate,
            {**asked, **budgets, "target_epsilon": 1.0, "target_delta": 1e-2, "relative_tolerance": 0.01},
        ),
        "profile": (dpmf.profile, {**asked, "noise_multiplier": 2.0, "epsilons": [1.0, 2.0]}),
        "BallsInBins": (dpmf.BallsInBins, {"epochs": 2, "batches_per_epoch": 3, "iterations": 6}),
        "thrown anew": (
            dpmf.BallsInBins,
            {"epochs": 4, "batches_per_epoch": 6, "rethrow_every": 2, "stride": 3, "gap": 1},
        ),
        "reshuffled": (dpmf.reshuffled, {"epochs": 2, "batches_per_epoch": 4, "stride": 2, "gap": 1}),
        "Poisson": (dpmf.batching.Poisson, {"epochs": 2, "batches_per_epoch": 4, "period": 2}),
        "Mechanism": (dpmf.Mechanism, {"strategy": strategies.bsr(2), "batching": dpmf.BallsInBins(2, 3)}),
        "coefficients": (strategies.coefficients, {"source": [1.0, 0.5]}),
        "matrix": (strategies.matrix, {"source": [[1.0]]}),
        "bsr": (strategies.bsr, {"bandwidth": 2}),
        "bisr": (strategies.bisr, {"bandwidth": 2}),
        "Renyi": (accountants.Renyi, {"max_order": 4, "work_budget": 1e4, "bandwidth": 1}),
        "Conditional": (accountants.Conditional, {**conditional, "optimise_bad_event": False}),
        "Chain": (accountants.Chain, {"discretisation_loss": 0.01, "max_frequencies": 128}),
        "Cascade": (accountants.Cascade, {"discretisation_loss": 0.01}),
        "Auto": (accountants.Auto, {"tolerance": 0.1, "time_budget": 100.0, "renyi": cheap}),
        "Best": (accountants.Best, {"renyi": cheap, "accountants": (cheap,)}),
        "Lattice": (accountants.Lattice, {"discretisation_loss": 0.01, "max_points": 128}),
        "MonteCarlo": (accountants.MonteCarlo, {"samples": 10, "seed": 0, "importance": True}),
    }
    name = str(rng.choice(list(calls)))
    function, arguments = calls[name]
    spoilt = {str(rng.choice(list(arguments))): strange_value(rng) for _ in range(int(rng.integers(1, 3)))}
    shown = f"{name}({', '.join(f'{k}={type(v).__name__}' for k, v in spoilt.items())})"

    def accept(answer: Any) -> str | None:
        bad = [f"{k}={v!r}" for k, v in spoilt.items() if _never_valid(name, k, v)]
        if bad:
            return f"{name} accepted {bad}"
        for field in ("delta", "epsilon", "noise_multiplier"):
            value = getattr(answer, field, 0.0)
            if isinstance(value, float) and (math.isnan(value) or value < 0 or (field == "delta" and value > 1)):
                return f"{name}: {field} = {value}"
        return None

    found = judged(lambda: function(**arguments | spoilt), (), accept)
    return fault(f"{shown}: {found.text}") if found.verdict == "fault" else found


def _never_valid(name: str, argument: str, value: Any) -> bool:
    """Whether no argument of dpmf may be this: NaN, booleans, text for numbers, objects."""
    if argument in ("importance", "optimise_bad_event") and isinstance(value, bool):
        return False
    if value is None:
        return argument in (
            "noise_multiplier",
            "epsilon",
            "delta",
            "mechanism",
            "epochs",
            "batches_per_epoch",
            "strategy",
        )
    if isinstance(value, float | np.floating) and (math.isnan(value) or math.isinf(value)):
        return True
    if isinstance(value, bool | np.bool_ | complex | bytes | dict | _Strange | np.datetime64):
        return True
    if isinstance(value, str):
        return argument not in ("accountant", "direction", "family")
    # A bandwidth above N is as N.
    return isinstance(value, int) and abs(value) > 2**200 and argument != "bandwidth"
