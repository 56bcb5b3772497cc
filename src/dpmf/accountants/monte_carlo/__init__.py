"""Monte Carlo accountant: δ(ε) as an average over sampled privacy losses. An estimate, not a bound.

With L the privacy loss, δ(ε) is the mean of (1 − e^{ε−L})_+ under P (remove) or Q (add). Two answers can be had:

* the sample mean, by default with importance sampling, and its standard error;
* with `failure_probability` p, a Chernoff upper confidence limit: the largest q whose binary relative entropy
  KL(sample mean ‖ q) is at most log(1/p)/samples. It is below the truth with probability at most p.

Neither is a differential privacy guarantee by itself; for one that holds surely take a deterministic accountant.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy.special import ndtri

from dpmf import budget, validation
from dpmf.accountants.monte_carlo._sampling import BACKENDS, Backend, Draws, LossSampler, Plan
from dpmf.accountants.protocol import DIRECTIONS, Accountant, Direction, Evaluation, PreparedAccountant, Role
from dpmf.formatting import given, lower, upper
from dpmf.mechanism import Mechanism

_MAX_STORED = 20_000_000  # samples whose losses are kept for further ε (16 bytes each); more are drawn again
_MOST_SAMPLES = 10**10  # this many samples already take hours
_CONFIDENCE = 0.99  # of the interval reported with an estimate
_TRUSTED = 30.0  # effective samples below which the normal approximation is not used for that interval
_MAX_EPSILON = 1e6
_GRAMS_HELD, _HELD = 4, 64 * 2**20  # b × b arrays, and bytes of samples on their way, at a time


def relative_entropy(a: float, b: float) -> float:
    """KL(Bernoulli(a) ‖ Bernoulli(b)) in nats, for 0 ≤ a ≤ 1 and 0 < b < 1."""
    left = a * math.log(a / b) if a > 0 else 0.0
    right = (1 - a) * (math.log1p(-a) - math.log1p(-b)) if a < 1 else 0.0
    return max(0.0, left + right)


def chernoff_upper_bound(mean: float, samples: int, failure_probability: float) -> float:
    """An upper confidence limit for the mean of variables in [0, 1] whose sample mean is `mean`.

    **Formal guarantees.** For independent variables in [0, 1], identically distributed or not, the result is below the
    average of their expectations with probability at most `failure_probability` (Hoeffding 1963, theorem 1). Bisection
    ends on the larger side.
    """
    mean = validation.non_negative("mean", mean)
    level = -math.log(validation.probability("failure_probability", failure_probability))
    level /= validation.integer("samples", samples, at_least=1)
    if mean >= 1:
        return 1.0
    if mean == 0:
        return -math.expm1(-level)
    low, high = mean, 1.0
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if relative_entropy(mean, middle) > level:
            high = middle
        else:
            low = middle
    return high


def minimum_samples(delta: float, failure_probability: float) -> int:
    """s_min: the least number of samples with which a bound of `delta` is possible at all.

    That is the case where no sampled loss exceeds ε, when the bound is 1 − p^{1/s} (about log(1/p)/s): without
    importance sampling the number grows as 1/δ, however private the mechanism is.

    **Formal guarantees.** With fewer samples from the target itself `chernoff_upper_bound` exceeds `delta` whatever
    they are (up to rounding). With this many it may still exceed it: see `samples_needed`.
    """
    delta = validation.probability("delta", delta)
    p = validation.probability("failure_probability", failure_probability)
    return math.ceil(math.log(p) / math.log1p(-delta))


def samples_needed(
    delta: float, failure_probability: float, true_delta: float, success_probability: float = 0.9
) -> int:
    """How many samples show `delta` for a mechanism whose δ(ε) is `true_delta` < `delta`.

    **Formal guarantees.** With that many samples from the target, `chernoff_upper_bound` with `failure_probability` is
    at most `delta` with probability at least `success_probability`. Chernoff's inequality bounds both tails, so
    somewhat fewer may do.
    """
    delta = validation.probability("delta", delta)
    true_delta = validation.non_negative("true_delta", true_delta)
    if true_delta >= delta:
        raise ValueError(f"true_delta must be less than delta = {delta:g}, got {true_delta:g}")
    fails = -math.log(validation.probability("failure_probability", failure_probability))
    misses = -math.log1p(-validation.probability("success_probability", success_probability))
    if true_delta == 0:
        return minimum_samples(delta, failure_probability)
    # A sample mean of at most `low` gives the bound; the mean is above it with probability e^{−s·KL(low ‖ true)}.
    low, high = true_delta, delta
    for _ in range(60):
        middle = 0.5 * (low + high)
        enough = fails * relative_entropy(middle, true_delta) >= misses * relative_entropy(middle, delta)
        low, high = (low, middle) if enough else (middle, high)
    entropies = relative_entropy(high, delta), relative_entropy(high, true_delta)
    if not min(entropies) > 0:
        raise ValueError(f"true_delta must be further below delta = {delta!r}, got {true_delta!r}")
    return math.ceil(max(fails / entropies[0], misses / entropies[1]))


def _describe(kind: str, failure_probability: float | None) -> str:
    return kind if failure_probability is None else f"{kind}, fails with probability {given(failure_probability)}"


@dataclass(frozen=True)
class MonteCarloEstimate:
    """δ(ε) as seen in a sample: not a guarantee.

    Attributes:
      value: the estimate, or the upper confidence limit where `failure_probability` is given.
      standard_error: of the estimate (not of the confidence limit).
      interval: a two-sided 99 % confidence interval for δ(ε). Normal approximation; where too few samples contributed
        to trust it, from 0 to a limit by Chernoff's inequality.
      samples: how many were drawn.
      seed: of the random numbers.
      direction: "remove" or "add".
      kind: "estimate", or "high-probability bound".
      noise_multiplier: σ for clipping norm 1 and the strategy as given (not column-normalised).
      epsilon: the ε of δ(ε).
      failure_probability: the probability p with which `value` is too small, for a high-probability bound.
    """

    value: float
    standard_error: float
    interval: tuple[float, float]
    samples: int
    seed: int
    direction: str
    kind: str
    noise_multiplier: float
    epsilon: float
    failure_probability: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain Python values, ready for JSON."""
        return asdict(self) | {"interval": list(self.interval)}

    def __str__(self) -> str:
        low, high = self.interval
        p = self.failure_probability
        return (
            f"δ({given(self.epsilon)}) {'≈' if p is None else '≤'} {upper(self.value, 4)} at noise multiplier "
            f"{given(self.noise_multiplier)}: {_describe(self.kind, p)}, standard error {self.standard_error:.2g}, "
            f"{_CONFIDENCE:.0%} interval [{lower(low, 4)}, {upper(high, 4)}] "
            f"[monte-carlo, {self.direction}, {self.samples} samples, seed {self.seed}]"
        )


@dataclass(frozen=True)
class MonteCarlo(Accountant):
    """Options of the Monte Carlo accountant.

    Attributes:
      samples: how many privacy losses are drawn for each σ and direction.
      seed: of the random numbers. One seed is used for every σ, so that estimates vary smoothly with σ.
      importance: draw half of the samples from proposals that favour large losses (several, weighted by the balance
        heuristic), which makes δ far below 1/samples visible. False: all samples from P (remove) or Q (add), as in the
        paper.
      failure_probability: None for the plain estimate, p for an upper confidence limit that fails with probability p.
        Importance sampling costs it up to a factor of two in samples, but where σ is large enough for the weights to
        have a small bound (mostly: the add direction) it can show δ far below 1/samples.
      backend: "numpy" or "torch" (needs PyTorch).
      device: the PyTorch device, such as "cuda"; the CPU if None.
      progress: show a progress bar, if standard error is a terminal.

    **Formal guarantees.** None without `failure_probability`. The estimate is unbiased and its standard error is
    estimated from the same samples; where few samples contribute, both are unreliable together. With
    `failure_probability` see `PreparedMonteCarlo`.
    """

    role: ClassVar[Role] = "estimate"

    samples: int = 1_000_000
    seed: int = 0
    importance: bool = True
    failure_probability: float | None = None
    backend: str = "numpy"
    device: str | None = None
    progress: bool = False

    name: ClassVar[str] = "monte-carlo"
    summary: ClassVar[str] = "sampled privacy losses: an estimate, not a bound"
    rests_on: ClassVar[str] = (
        "an average over samples: no theorem without a failure probability, then Hoeffding 1963, Thm 1"
    )

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "samples", validation.integer("samples", self.samples, at_least=1, at_most=_MOST_SAMPLES)
        )
        object.__setattr__(self, "seed", validation.integer("seed", self.seed, at_least=0))
        if self.failure_probability is not None:
            p = validation.probability("failure_probability", self.failure_probability)
            object.__setattr__(self, "failure_probability", p)
        validation.choice("backend", self.backend, BACKENDS)
        for option in ("importance", "progress"):
            validation.flag(option, getattr(self, option))
        if self.device is not None and (self.backend == "numpy" or not isinstance(self.device, str)):
            requirement = "None for the numpy backend" if self.backend == "numpy" else "a string or None"
            raise ValueError(f"device must be {requirement}, got {self.device!r}")

    def prepare(self, mechanism: Mechanism) -> PreparedMonteCarlo:
        return PreparedMonteCarlo(self, mechanism)


@dataclass(frozen=True)
class _Summary:
    """What the samples say about δ at one ε."""

    mean: float
    standard_error: float
    effective: float  # the number of equal contributions with the same relative error
    weight_bound: float


class PreparedMonteCarlo(PreparedAccountant):
    """The Monte Carlo accountant for one mechanism.

    **Formal guarantees.** Without `failure_probability`: none, the values are unbiased estimates of δ(ε) (cut off at
    1) and what follows from them.

    With `failure_probability` p, the value for a given (σ, ε, direction) is below δ(ε) with probability at most p over
    the random numbers, taken to be ideal, rounding apart. Let R bound the weights of the samples that contribute
    (`LossSampler.weight_bound`; 1 without importance sampling). The samples are independent, (1 − e^{ε−L})_+·weight/R
    lies in [0, 1], and the average of the expectations over all samples is δ/R exactly, as weight = target/Σ_j α_j q_j
    with the true shares α_j. So `chernoff_upper_bound` applies to their mean, though the strata are not identically
    distributed, and R times its result bounds δ(ε). Three consequences:

    * Both directions: the larger of the two values fails with probability at most p, not 2p; it is too small only if
      the value of the direction with the larger δ(ε) is.
    * An ε found by `epsilon` is too small with probability at most p: for given samples the value falls as ε
      grows (the mean does, and so does R; thinning a Bernoulli variable brings relative entropies down, so a smaller R
      means a smaller value). An answer too small is thus a failure at every ε between it and the right one.
    * A σ found by calibration is *not* covered: it depends on the samples, and the value need not be monotone in σ.
      Check it with another seed. A profile holds at each ε with probability 1 − p, not at all of them at once.
    """

    name = MonteCarlo.name

    def __init__(self, options: MonteCarlo, mechanism: Mechanism) -> None:
        self.options = options
        self.mechanism = mechanism
        self.kind = "estimate" if options.failure_probability is None else "high-probability bound"
        self._backend = Backend(options.backend, options.device)
        self._stored: dict[Direction, tuple[float, Plan, list[Draws]]] = {}

    @cached_property
    def _sampler(self) -> LossSampler:
        budget.claim(_GRAMS_HELD * 8.0 * len(self.mechanism.gram) ** 2 + _HELD)
        return LossSampler(self.mechanism.gram, self._backend)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        [summary] = self._summaries(noise_multiplier, [epsilon], direction)
        return self._evaluation(self._value(summary), summary)

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        return [self._value(summary) for summary in self._summaries(noise_multiplier, epsilons, direction)]

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        """The least ε ≥ 0 found with δ(ε) at most `delta`; infinity where none was found up to ε = 10⁶.

        The samples are gone through for many ε at a time, as they may have to be drawn anew for each pass.
        """
        grid = [0.0, *np.geomspace(1e-6, _MAX_EPSILON, 25).tolist()]
        low = -math.inf
        while True:
            summaries = self._summaries(noise_multiplier, grid, direction)
            found = next((i for i, summary in enumerate(summaries) if self._value(summary) <= delta), None)
            if found is None:
                return self._evaluation(math.inf, summaries[-1])
            low, high = grid[found - 1] if found else low, grid[found]
            if high - low <= 1e-6 * high or high == 0:
                return self._evaluation(high, summaries[found])
            grid = [*np.linspace(low, high, 9)[1:-1].tolist(), high]

    def estimate_delta(self, noise_multiplier: float, epsilon: float, direction: str) -> MonteCarloEstimate:
        """δ(ε) in one direction, with standard error and confidence interval.

        **Formal guarantees.** Those of this class: none for an estimate. The interval is approximate.
        """
        sigma = validation.positive("noise_multiplier", noise_multiplier)
        epsilon = validation.non_negative("epsilon", epsilon)
        validation.choice("direction", direction, DIRECTIONS)
        way: Direction = "remove" if direction == "remove" else "add"
        [summary] = self._summaries(sigma, [epsilon], way)
        margin = float(ndtri(0.5 + 0.5 * _CONFIDENCE)) * summary.standard_error
        low, high = max(0.0, summary.mean - margin), min(1.0, summary.mean + margin)
        if summary.effective < _TRUSTED:
            low, high = 0.0, max(high, self._upper(summary, 0.5 * (1 - _CONFIDENCE)))
        return MonteCarloEstimate(
            value=self._value(summary),
            standard_error=summary.standard_error,
            interval=(min(low, high), high),
            samples=self.options.samples,
            seed=self.options.seed,
            direction=way,
            kind=self.kind,
            noise_multiplier=sigma,
            epsilon=epsilon,
            failure_probability=self.options.failure_probability,
        )

    def _upper(self, summary: _Summary, failure_probability: float) -> float:
        scaled = min(1.0, summary.mean / summary.weight_bound)
        bound = chernoff_upper_bound(scaled, self.options.samples, failure_probability)
        return min(1.0, summary.weight_bound * bound)

    def _value(self, summary: _Summary) -> float:
        p = self.options.failure_probability
        return min(1.0, summary.mean) if p is None else self._upper(summary, p)

    def _evaluation(self, value: float, summary: _Summary) -> Evaluation:
        details = {
            "kind": _describe(self.kind, self.options.failure_probability),
            "estimate": min(1.0, summary.mean),
            "standard_error": summary.standard_error,
            "effective_samples": summary.effective,
            "samples": self.options.samples,
            "seed": self.options.seed,
        }
        return Evaluation(value, details)

    def _summaries(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[_Summary]:
        """One pass over the samples for all of `epsilons`."""
        plan, draws = self._draws(noise_multiplier, direction)
        counts = np.array(plan.counts, dtype=np.float64)[:, None]
        sums = np.zeros((len(counts), len(epsilons)))
        squares = np.zeros_like(sums)
        for chunk in draws:
            largest = chunk.loss.max(initial=0.0)
            for k, epsilon in enumerate(epsilons):
                if epsilon < largest:
                    values = -np.expm1(np.minimum(epsilon - chunk.loss, 0.0)) * chunk.weight
                    sums[chunk.stratum, k] += values.sum()
                    squares[chunk.stratum, k] += (values * values).sum()
        # The variance of a stratified mean. A stratum of one sample shows no spread: its square stands in for it.
        spread = np.where(counts > 1, squares - sums**2 / counts, squares) * counts / np.maximum(counts - 1, 1)
        means = sums.sum(axis=0) / plan.samples
        errors = np.sqrt(np.maximum(spread, 0.0).sum(axis=0)) / plan.samples
        totals, powers = sums.sum(axis=0), squares.sum(axis=0)
        effective = np.divide(totals**2, powers, out=np.zeros_like(totals), where=powers > 0)
        return [
            _Summary(float(m), float(e), float(n), self._sampler.weight_bound(plan, epsilon))
            for m, e, n, epsilon in zip(means, errors, effective, epsilons, strict=True)
        ]

    def _draws(self, noise_multiplier: float, direction: Direction) -> tuple[Plan, Iterable[Draws]]:
        """The samples for one σ: those kept from the last call if it was for the same, else drawn now."""
        options = self.options
        if direction in self._stored:
            sigma, plan, kept = self._stored[direction]
            if sigma == noise_multiplier:
                return plan, kept
        plan = self._sampler.plan(noise_multiplier, direction, options.samples, options.importance)
        if options.samples > min(_MAX_STORED, budget.fitting(32)):
            return plan, self._drawn(plan)
        self._stored.pop(direction, None)  # before the new ones need the memory
        kept = list(self._drawn(plan))
        self._stored[direction] = noise_multiplier, plan, kept
        return plan, kept

    def _drawn(self, plan: Plan) -> Iterator[Draws]:
        with _progress(self.options.progress, plan) as advance:
            for chunk in self._sampler.draw(plan, self.options.seed):
                budget.check()
                advance(chunk.drawn)
                yield chunk


@contextmanager
def _progress(wanted: bool, plan: Plan) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if it is wanted and there is someone to see it."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda drawn: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"sampling losses ({plan.direction})", total=plan.samples)
        yield lambda drawn: bar.advance(task, drawn)
