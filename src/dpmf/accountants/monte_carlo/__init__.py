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
from dpmf.accountants.monte_carlo._sampling import BACKENDS, LARGEST_WEIGHT, Backend, Draws, LossSampler, Plan
from dpmf.accountants.monte_carlo.limits import chernoff_upper_bound, minimum_samples, samples_for
from dpmf.accountants.protocol import DIRECTIONS, Accountant, Direction, Evaluation, PreparedAccountant, Role
from dpmf.errors import ArgumentError
from dpmf.formatting import given, lower, upper
from dpmf.mechanism import Mechanism

_MOST_SAMPLES = 10**10  # this many samples already take hours
_CONFIDENCE = 0.99  # of the interval reported with an estimate
_MAX_EPSILON = 1e6
_GRAMS_HELD, _HELD = 4, 64 * 2**20  # b × b arrays in memory at a time, and bytes of samples that are being drawn


@dataclass(frozen=True)
class _Tuning:
    """What is stored, how intervals are made and how many samples are drawn. Any values give valid limits.

    Attributes:
      stored: samples whose losses are stored for further ε (16 bytes each); more are drawn again.
      trusted: with fewer effective samples than this, the interval is not by the normal approximation.
      usual: how many samples are drawn where neither the options nor a target say.
      leading: how many samples lead the search for a noise multiplier to where the confidence limit is needed.
      closeness: where their number follows from a target δ, samples are so many that the confidence limit meets the
        target if the sample mean is this many times smaller.
      most: more samples than this are drawn only if the options ask for them.
    """

    stored: int = 20_000_000
    trusted: float = 30.0
    usual: int = 1_000_000
    leading: int = 200_000
    closeness: float = 2.0
    most: int = 200_000_000


_TUNING = _Tuning()


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
      samples: how many privacy losses are drawn for each σ and direction. None: a million; with a failure probability
        and a target δ (calibration, or ε for a given δ) as many as it takes for a limit near that δ (`samples_for`).
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

    samples: int | None = None
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
        if self.samples is not None:
            samples = validation.integer("samples", self.samples, at_least=1, at_most=_MOST_SAMPLES)
            object.__setattr__(self, "samples", samples)
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

    samples: int
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
        self._stored: dict[Direction, tuple[tuple[float, int], Plan, list[Draws]]] = {}

    @cached_property
    def _sampler(self) -> LossSampler:
        budget.claim(_GRAMS_HELD * 8.0 * len(self.mechanism.gram) ** 2 + _HELD)
        return LossSampler(self.mechanism.gram, self._backend)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        samples = self._samples(noise_multiplier, epsilon, direction, target_delta)
        [summary] = self._summaries(noise_multiplier, [epsilon], direction, samples)
        return self._evaluation(self._value(summary), summary)

    def rough_delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation | None:
        """About what `delta` would be, from few samples, where it takes many. It leads searches and bounds nothing."""
        samples = self._samples(noise_multiplier, epsilon, direction, target_delta)
        if self.options.samples is not None or samples <= _TUNING.usual:
            return None
        [summary] = self._summaries(noise_multiplier, [epsilon], direction, _TUNING.leading)
        return Evaluation(min(1.0, _TUNING.closeness * summary.mean))

    def deltas(self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction) -> list[float]:
        samples = self._samples(noise_multiplier, 0.0, direction, None)
        return [self._value(summary) for summary in self._summaries(noise_multiplier, epsilons, direction, samples)]

    def epsilon(self, noise_multiplier: float, delta: float, direction: Direction) -> Evaluation:
        """The least ε ≥ 0 found with δ(ε) at most `delta`; infinity where none was found up to ε = 10⁶.

        The samples are gone through for many ε at a time, as they may have to be drawn anew for each pass.
        """
        samples = self._samples(noise_multiplier, 0.0, direction, delta)
        grid = [0.0, *np.geomspace(1e-6, _MAX_EPSILON, 25).tolist()]
        low = -math.inf
        while True:
            summaries = self._summaries(noise_multiplier, grid, direction, samples)
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
        [summary] = self._summaries(sigma, [epsilon], way, self._samples(sigma, epsilon, way, None))
        margin = float(ndtri(0.5 + 0.5 * _CONFIDENCE)) * summary.standard_error
        low, high = max(0.0, summary.mean - margin), min(1.0, summary.mean + margin)
        if summary.effective < _TUNING.trusted:
            low, high = 0.0, max(high, self._upper(summary, 0.5 * (1 - _CONFIDENCE)))
        return MonteCarloEstimate(
            value=self._value(summary),
            standard_error=summary.standard_error,
            interval=(min(low, high), high),
            samples=summary.samples,
            seed=self.options.seed,
            direction=way,
            kind=self.kind,
            noise_multiplier=sigma,
            epsilon=epsilon,
            failure_probability=self.options.failure_probability,
        )

    def _samples(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None
    ) -> int:
        """How many samples to draw; an error where they are too few for the target.

        The number depends on nothing that is random, so the limit from that many samples is as valid as any.
        """
        p, samples = self.options.failure_probability, self.options.samples
        if p is None or target_delta is None:
            return _TUNING.usual if samples is None else samples
        limit = f"a limit of δ = {given(target_delta)} that fails with probability {given(p)}"
        if samples is None:
            plan = self._sampler.plan(noise_multiplier, direction, _TUNING.usual, self.options.importance)
            target = target_delta / self._sampler.weight_bound(plan, epsilon)
            enough = samples_for(target, p, _TUNING.closeness)
            if enough > _TUNING.most:
                raise ArgumentError("samples", f"must be given where {limit} takes more than {_TUNING.most}: {enough}")
            return max(enough, _TUNING.usual)
        # At a σ far too large, where weights are small, fewer would do; but such an answer is of no use.
        target = target_delta / (LARGEST_WEIGHT if self.options.importance and direction == "remove" else 1.0)
        least, enough = minimum_samples(target, p), samples_for(target, p, _TUNING.closeness)
        if samples < least:
            raise ArgumentError("samples", f"must be at least {least}, better {enough}, for {limit}, got {samples}")
        return samples

    def _upper(self, summary: _Summary, failure_probability: float) -> float:
        scaled = min(1.0, summary.mean / summary.weight_bound)
        bound = chernoff_upper_bound(scaled, summary.samples, failure_probability)
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
            "samples": summary.samples,
            "seed": self.options.seed,
        }
        return Evaluation(value, details)

    def _summaries(
        self, noise_multiplier: float, epsilons: Sequence[float], direction: Direction, samples: int
    ) -> list[_Summary]:
        """One pass over the samples for all of `epsilons`."""
        plan, draws = self._draws(noise_multiplier, direction, samples)
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
            _Summary(samples, float(m), float(e), float(n), self._sampler.weight_bound(plan, epsilon))
            for m, e, n, epsilon in zip(means, errors, effective, epsilons, strict=True)
        ]

    def _draws(self, noise_multiplier: float, direction: Direction, samples: int) -> tuple[Plan, Iterable[Draws]]:
        """The samples for one σ: those kept from the last call if it was for the same, else drawn now."""
        if direction in self._stored:
            known, plan, kept = self._stored[direction]
            if known == (noise_multiplier, samples):
                return plan, kept
        plan = self._sampler.plan(noise_multiplier, direction, samples, self.options.importance)
        if samples > min(_TUNING.stored, budget.fitting(32)):
            return plan, self._drawn(plan)
        self._stored.pop(direction, None)  # before the new ones need the memory
        kept = list(self._drawn(plan))
        self._stored[direction] = (noise_multiplier, samples), plan, kept
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
