"""What a cell can ask for. Each function takes the cell's parameters and returns plain values, ready for JSON.

A target that an accountant cannot meet is a result (``None`` and the reason), not a failure.
Seconds are those of the processor, on one thread, so that other work on the machine hardly matters.
"""

from __future__ import annotations

import base64
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import logsumexp

import dpmf
from dpmf import calibration
from dpmf import lower_bounds as lower
from dpmf.accountants import Accountant, Chain, Conditional, Renyi
from dpmf.accountants.combined.least import Least
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.accountants.registry import covering
from evidence.machine import machine as this_machine
from evidence.spec import accountant_of, mechanism_of

Plain = Mapping[str, Any]
Result = dict[str, Any]


@lru_cache(maxsize=8)
def _mechanism(items: tuple[tuple[str, Any], ...]) -> dpmf.Mechanism:
    return mechanism_of(dict(items))


def _named(mechanism: Plain) -> dpmf.Mechanism:
    """The mechanism, kept for the next cell of the same worker: Gram matrices and optimised strategies take time."""
    return _mechanism(tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(mechanism.items())))


def sigma(
    *, mechanism: Plain, accountant: Plain, epsilon: float, delta: float, direction: str = "both",
    tolerance: float = 1e-3,
) -> Result:  # fmt: skip
    """The noise multiplier that meets (ε, δ); for "add" by the accountant's own bound of adding a record."""
    _compile(accountant["name"])
    began = time.process_time()
    target, which = _named(mechanism), accountant_of(accountant)
    try:
        if direction == "add" and (adding := Least.of(covering(which, target).prepare(target), "add")).kind == "bound":
            # `dpmf.calibrate` may answer with the bound of removing one, which is to be compared with it here.
            start = calibration.likely_noise(target, epsilon, delta)
            value, bound = adding.least_noise(epsilon, delta, "add", start, tolerance)
            own = {"sigma": value, "binding": "add", "accountant": bound.details.get("accountant", which.name)}
            return {**own, "seconds": time.process_time() - began}
        found = dpmf.calibrate(
            target,
            target_epsilon=epsilon,
            target_delta=delta,
            accountant=which,
            direction=direction,
            relative_tolerance=tolerance,
        )
    except dpmf.CalibrationError as error:
        return {"sigma": None, "problem": str(error), "seconds": time.process_time() - began}
    how = found.details[found.binding]
    return {
        "sigma": found.noise_multiplier,
        "binding": found.binding,
        "accountant": how.get("accountant", found.accountant),
        "seconds": time.process_time() - began,
    }


_CLOSE = 1.002  # σ proved over σ of the runs, up to which a finer bound is worth a try


def trained(
    *, setting: str, name: str, mechanism: Plain, accountant: Plain, epsilon: float, delta: float, sigma: float,
    period: int = 1,
) -> Result:  # fmt: skip
    """The σ that is proved for a mechanism, beside the one that runs of it were trained with.

    The runs keep their guarantee if theirs is no less. A calibration ends a little above the least σ that can be
    proved, so if theirs is less by a hair, δ is bounded there, by finer accountants if need be. If that is not enough,
    the ε that holds is found.
    """
    began = time.process_time()
    if accountant["name"] == "dp_accounting":
        now, at = _poisson_pld(mechanism, period, epsilon, delta, sigma)
        by = "dp_accounting"
    else:
        _compile(accountant["name"])
        target, which = _named(mechanism), accountant_of(accountant)
        now = dpmf.calibrate(target, target_epsilon=epsilon, target_delta=delta, accountant=which).noise_multiplier
        at, by = epsilon, accountant["name"]
        if now > sigma:
            at, by = _proved_at(target, which, epsilon, delta, sigma, close=now <= _CLOSE * sigma)
    return {
        "sigma": now,
        "trained": sigma,
        "holds": at <= epsilon,
        "epsilon": at if math.isfinite(at) else None,  # proved at the σ of the runs
        "by": by,
        "seconds": time.process_time() - began,
    }


def _proved_at(
    mechanism: dpmf.Mechanism, which: Accountant, epsilon: float, delta: float, sigma: float, *, close: bool
) -> tuple[float, str]:
    """The ε that is proved at σ, no less than the one given, and by whom."""
    batching = mechanism.batching
    sampled = isinstance(batching, dpmf.Poisson)
    for finer in ((which,) if sampled else (which, Chain(discretisation_loss=1e-3))) if close else ():
        if dpmf.delta(mechanism, noise_multiplier=sigma, epsilon=epsilon, accountant=finer).delta <= delta:
            return epsilon, finer.name if finer is which else "chain, finer"
    if close and isinstance(batching, dpmf.Poisson) and batching.period == 1:
        plain = {"epochs": batching.epochs, "batches": batching.batches_per_epoch}
        if _poisson_pld(plain, 1, epsilon, delta, sigma)[1] <= epsilon:
            return epsilon, "dp_accounting"
    return dpmf.epsilon(mechanism, noise_multiplier=sigma, delta=delta, accountant=which).epsilon, which.name


def _poisson_pld(mechanism: Plain, period: int, epsilon: float, delta: float, sigma: float) -> tuple[float, float]:
    """σ for (ε, δ), and ε at `sigma`, by dp_accounting: cyclic Poisson sampling of any period, C of no more bands."""
    from dp_accounting import dp_event, mechanism_calibration, pld

    column = mechanism.get("coefficients", [1.0])
    if len(column) > period:
        raise ValueError(f"period must be at least the bandwidth of C, {len(column)}, got {period}")
    norm = math.hypot(*column) * (1 + 1e-12)
    steps, rate = math.ceil(mechanism["epochs"] * mechanism["batches"] / period), period / mechanism["batches"]

    def event(noise: float) -> Any:
        return dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise / norm)), steps
        )

    found = mechanism_calibration.calibrate_dp_mechanism(
        pld.PLDAccountant, event, epsilon, delta,
        mechanism_calibration.ExplicitBracketInterval(sigma / 2, 2 * sigma), tol=1e-5 * sigma,
    )  # fmt: skip
    there = epsilon if found <= sigma else float(pld.PLDAccountant().compose(event(sigma)).get_epsilon(delta))
    return float(found), there


def sigma_sampled(*, mechanism: Plain, accountant: Plain, epsilon: float, delta: float) -> Result:
    """The σ at which Monte Carlo's estimate of δ is the target, and its standard error relative to σ."""
    target, which = _named(mechanism), accountant_of(accountant)
    found = dpmf.calibrate(target, target_epsilon=epsilon, target_delta=delta, accountant=which)
    value, way = found.noise_multiplier, found.binding

    def estimate(noise: float) -> Plain:
        bound = dpmf.delta(target, noise_multiplier=noise, epsilon=epsilon, accountant=which, direction=way)
        return dict(bound.details[way])

    here, beside = estimate(value), estimate(1.01 * value)
    slope = math.log(here["estimate"] / beside["estimate"]) / math.log(1.01)
    return {"sigma": value, "binding": way, "error": here["standard_error"] / here["estimate"] / slope}


def sigma_lower(*, mechanism: Plain, epsilon: float, delta: float, tolerance: float = 1e-3) -> Result:
    """The noise multiplier that no accountant can go below."""
    return {"sigma": lower.lower_noise_multiplier(_named(mechanism), epsilon, delta, relative_tolerance=tolerance)}


def epsilon(*, mechanism: Plain, accountant: Plain, sigma: float, delta: float, direction: str = "both") -> Result:
    """ε at a noise multiplier; `None` where none was found."""
    _compile(accountant["name"])
    began = time.process_time()
    found = dpmf.epsilon(
        _named(mechanism),
        noise_multiplier=sigma,
        delta=delta,
        accountant=accountant_of(accountant),
        direction=direction,
    )
    value = found.epsilon if math.isfinite(found.epsilon) else None
    return {"epsilon": value, "sigma": sigma, "seconds": time.process_time() - began}


def estimate(
    *, mechanism: Plain, accountant: Plain, sigma: float, epsilon: float, direction: str
) -> Result:  # fmt: skip
    """δ(ε) in one direction by Monte Carlo: the limit that it claims, its estimate and the standard error of that."""
    found = dpmf.delta(
        _named(mechanism), noise_multiplier=sigma, epsilon=epsilon, accountant=accountant_of(accountant),
        direction=direction,
    )  # fmt: skip
    how = found.details[direction]
    return {"delta": found.delta, "estimate": how["estimate"], "standard_error": how["standard_error"]}


def profile(
    *, mechanism: Plain, accountant: Plain, sigma: float, epsilons: Sequence[float], direction: str = "both"
) -> Result:
    """δ over a grid of ε."""
    found = dpmf.profile(
        _named(mechanism),
        noise_multiplier=sigma,
        epsilons=epsilons,
        accountant=accountant_of(accountant),
        direction=direction,
    )
    return {"epsilons": list(epsilons), "deltas": found.deltas.tolist()}


def profile_lower(*, mechanism: Plain, sigma: float, epsilons: Sequence[float], direction: str = "both") -> Result:
    """The δ that no accountant can go below, over a grid of ε."""
    target = _named(mechanism)
    return {
        "epsilons": list(epsilons),
        "deltas": [lower.lower_delta(target, sigma, epsilon, direction) for epsilon in epsilons],
    }


def gram(*, mechanism: Plain, decades: float = 4.0) -> Result:
    """The Gram matrix as a picture: log₁₀(G/max G) in 255 shades over so many decades, 0 for zero."""
    matrix = _named(mechanism).gram
    relative = matrix / matrix.max()
    with np.errstate(divide="ignore"):
        shades = np.round(255 * np.clip(1 + np.log10(relative) / decades, 0, 1))
    shades[(relative > 0) & (shades < 1)] = 1
    b = len(matrix)
    i = np.arange(b)
    apart = np.abs(i[:, None] - i)
    distance = np.minimum(apart, b - apart)
    levels = sorted({d for d in (0, 1, 4, 16, 64, b // 2) if d <= b // 2})
    return {
        "image": base64.b64encode(zlib.compress(shades.astype(np.uint8).tobytes(), 9)).decode(),
        "size": b,
        "decades": decades,
        "largest": float(matrix.max()),
        "by_distance": {str(d): float(relative[distance == d].mean()) for d in levels},
        "zeros": float(np.mean(matrix == 0)),
    }


@lru_cache
def _compile(name: str) -> None:
    """Have the kernels of an accountant compiled before anything is timed, once in a process."""
    if name != "monte-carlo":  # it has none
        _warm(accountant_of({"name": name}))


def _warm(accountant: Accountant) -> None:
    strategy = dpmf.strategies.bsr(2)
    for epochs in (1, 2):
        small = dpmf.Mechanism(strategy, dpmf.BallsInBins(epochs, 10))
        try:
            dpmf.delta(small, noise_multiplier=3.0, epsilon=1.0, accountant=accountant)
        except ValueError:  # an accountant of uncorrelated noise
            small = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(epochs, 10))
            dpmf.delta(small, noise_multiplier=3.0, epsilon=1.0, accountant=accountant)


def seconds(
    *, mechanism: Plain, accountant: Plain, sigma: float, epsilon: float, direction: str = "remove", unit: str = ""
) -> Result:
    """Seconds for one δ(ε) from scratch, and for another σ after that, with the same prepared accountant.

    The Gram matrix is part of it, but not the σ itself where that is given in units of the mechanism's sensitivity.
    """
    few = {"samples": 100} if accountant["name"] == "monte-carlo" else {}
    _warm(accountant_of({"name": accountant["name"], "options": {**accountant.get("options", {}), **few}}))
    if unit == "sensitivity":
        sigma *= mechanism_of(mechanism).sensitivity

    def from_scratch() -> tuple[float, PreparedAccountant, float]:
        target = mechanism_of(mechanism)
        began = time.process_time()
        prepared = accountant_of(accountant).prepare(target)
        value = prepared.delta(sigma, epsilon, _one_way(direction)).value
        return time.process_time() - began, prepared, value

    first, prepared, first_delta = from_scratch()
    if first < 5:  # it may have had a kernel to compile
        first = min(first, from_scratch()[0])
    began = time.process_time()
    prepared.delta(1.01 * sigma, epsilon, _one_way(direction))
    after = time.process_time() - began
    return {"first": first, "next": after, "delta": first_delta, "machine": this_machine()}


def _one_way(direction: str) -> Any:
    return direction


def renyi_seconds(*, mechanism: Plain, order: int, sigma: float) -> Result:
    """Seconds for the Rényi divergences of all orders up to `order`, exact for uncorrelated noise."""
    target = _named(mechanism)
    options = Renyi(bandwidth=1)
    value = options.divergences(target, sigma, order)[-1]  # compiles, too
    began = time.process_time()
    repeats = 0
    while time.process_time() - began < 0.1:
        repeats += 1
        options.divergences(target, sigma * (1 + 1e-6 * repeats), order)
    took = (time.process_time() - began) / repeats
    return {"seconds": took, "divergence": float(value), "machine": this_machine()}


def peer_renyi_seconds(*, mechanism: Plain, order: int, sigma: float) -> Result:
    """The same for one order by the random-allocation package, after its compilation and enumeration."""
    try:
        from random_allocation.random_allocation_scheme.direct import allocation_RDP_remove
    except ImportError:
        raise dpmf.MissingExtraError(
            "this baseline needs random-allocation: pip install '.[random-allocation,experiments]' into an "
            "environment of its own"
        ) from None
    batches = mechanism["batches"]
    began = time.process_time()
    allocation_RDP_remove(order, 1.01 * sigma, batches)
    first = time.process_time() - began
    began = time.process_time()
    value = allocation_RDP_remove(order, sigma, batches)
    took = time.process_time() - began
    return {"seconds": took, "first": first, "divergence": float(value), "machine": this_machine()}


def divergence(*, mechanism: Plain, order: int, sigma: float, bandwidth: int | None) -> Result:
    """R_α (remove) of order 2 or 3 after truncation at `bandwidth`, by enumeration; `None` leaves G as it is.

    Entries outside the cyclic band are raised to τ, the largest of them; inside the band none is below τ.
    """
    exact = _named(mechanism).gram
    b = len(exact)
    matrix = exact
    if bandwidth is not None:
        apart = np.abs(np.arange(b)[:, None] - np.arange(b))
        outside = np.minimum(apart, b - apart) >= bandwidth
        level = float(exact[outside].max()) if outside.any() else 0.0
        matrix = np.where(outside, level, np.maximum(exact, level))
    scaled = matrix / sigma**2
    if order == 2:
        moment = float(logsumexp(scaled))
    elif order == 3:
        moment = float(logsumexp([logsumexp(scaled + row[:, None] + row) for row in scaled]))
    else:
        raise ValueError(f"order must be 2 or 3, got {order}")
    return {"divergence": (moment - order * math.log(b)) / (order - 1)}


def hazard(
    *, mechanism: Plain, sigma: float, bad_event: float, option: int, temperatures: Sequence[str | float]
) -> Result:
    """The bound on the reverse hazard of the largest component, step by step (remove)."""
    options = Conditional(option=option, temperatures=[float(t) for t in temperatures])
    hazards = options.prepare(_named(mechanism)).reverse_hazards("remove")
    values = [float(f"{weights[-1]:.5g}") for _, weights in hazards.steps(sigma, bad_event)]
    return {"steps": list(range(1, len(values) + 1)), "hazards": values}


def ternary_loss(
    *, mechanism: Plain, sigma: float, step: int, samples: int, seed: int, low: float, high: float, bins: int
) -> Result:
    """Histogram of L_b = log(mean_{j<b} N(y|μ_j) / N(y|μ_b)), y ~ R (remove): what the tail bounds are about."""
    rows = np.concatenate([block for _, block in _named(mechanism).mean_rows()])
    order = np.argsort(rows[step - 1], kind="stable")
    means = rows[: step - 1, order].T  # one row for each component, sorted by its mean in this step
    b = len(means)
    generator = np.random.default_rng(seed)
    half_norms = 0.5 * (means**2).sum(axis=1)
    losses = []
    for start in range(0, samples, 5000):
        count = min(5000, samples - start)
        outcomes = means[generator.integers(b, size=count)] + sigma * generator.standard_normal((count, means.shape[1]))
        logs = (outcomes @ means.T - half_norms) / sigma**2
        losses.append(logsumexp(logs[:, :-1], axis=1) - math.log(b - 1) - logs[:, -1])
    found = np.concatenate(losses)
    counts, edges = np.histogram(found, bins=bins, range=(low, high))
    return {
        "edges": [float(f"{e:.6g}") for e in edges],
        "density": [float(f"{c / samples / (high - low) * bins:.5g}") for c in counts],
        "mean": float(found.mean()),
        "deviation": float(found.std()),
        "tail": float(np.quantile(found, 1e-3)),
        "inside": float(np.mean((found >= low) & (found <= high))),
    }


def design(
    *, epochs: int, batches: int, memory: float | None, epsilon: float, delta: float, seconds: float, accountant: Plain
) -> Result:  # fmt: skip
    """The best design within some seconds, and the least error of each kind of mechanism with a guaranteed σ."""
    workload = dpmf.workloads.prefix() if memory is None else dpmf.workloads.damped(memory)
    found = dpmf.design(
        epochs=epochs, batches_per_epoch=batches, target_epsilon=epsilon, target_delta=delta, workload=workload,
        time_budget=seconds,
    )  # fmt: skip
    usual = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.Poisson(epochs, batches))
    noise = dpmf.calibrate(
        usual, target_epsilon=epsilon, target_delta=delta, accountant=accountant_of(accountant)
    ).noise_multiplier
    errors = {"poisson": dpmf.workloads.error(usual, noise, workload).root_mean_square, "best": found.best.error}
    for option in (found.best, *found.others):
        batching = option.mechanism.batching
        correlated = option.mechanism.strategy != dpmf.strategies.dpsgd()
        sampled = isinstance(batching, dpmf.Poisson) and correlated
        kind = "cyclic-poisson" if sampled else "fixed" if batching.fixed and correlated else ""
        if kind and option.certified:
            errors[kind] = min(option.error, errors.get(kind, math.inf))
    best = found.best
    return {
        "errors": errors,
        "sigma": best.noise_multiplier,
        "strategy": best.mechanism.strategy.name,
        "batching": best.mechanism.batching.kind or "fixed bins",
        "copies": best.copies,
        "complete": found.complete,
        "at_most_above_optimal": found.at_most_above_optimal if math.isfinite(found.at_most_above_optimal) else None,
    }


QUANTITIES: dict[str, Callable[..., Result]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        sigma, trained, sigma_sampled, sigma_lower, epsilon, estimate, profile, profile_lower, gram, seconds,
        renyi_seconds, peer_renyi_seconds, divergence, hazard, ternary_loss, design,
    )
}  # fmt: skip
