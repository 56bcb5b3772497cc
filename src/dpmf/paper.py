"""A statement of what holds: what was run, what is guaranteed, on which assumptions, and by whom.

It is one paragraph for a paper, with numbers rounded to the sound side, and one JSON object. Whatever else says in
words what was run and what is guaranteed (`dpmf verify`, `dpmf tradeoff`) takes its words from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpmf import api, validation
from dpmf._version import __version__
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.accountants.registry import ACCOUNTANTS
from dpmf.attacks import TradeOff
from dpmf.batching import AnyBatching, BallsInBins, Poisson
from dpmf.errors import ArgumentError
from dpmf.formatting import given, upper
from dpmf.mechanism import Mechanism
from dpmf.results import Calibration, Estimate, PrivacyBound
from dpmf.run import Run, only_mechanism

DELTA = 1e-5  # where ε is stated if no δ is given
EXACT = "exact arithmetic"
ASSUMPTIONS = (
    "What the others contribute to a step depends, bit by bit, on them and on what was released before only.",
    "Batches and noise are drawn from a secret that nobody else knows, and are as good as random.",
    "The numbers of this statement are public and were chosen without looking at the data.",
)


@dataclass(frozen=True)
class Statement:
    """What holds of a run: `str` is one paragraph for a paper, `to_dict` one JSON object.

    Attributes:
      run: everything that the guarantee depends on.
      bound: ε and δ of the whole run.
      tradeoff: what any attack can achieve, where it was asked for.
      ex_post: ε of those who stop at one of the stopping points that were named in advance, by step.
      assumptions: what is assumed, in sentences.

    **Formal guarantees.** Whoever reads the numbers back gets a true statement: ε, δ, μ and rates are rounded up. A
    noise multiplier is printed in full where it was given, and rounded up where it was calibrated, which is more noise.
    """

    run: Run
    bound: PrivacyBound
    tradeoff: TradeOff | None = None
    ex_post: Mapping[int, float] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @property
    def delta(self) -> float:
        """δ of the whole run."""
        return self.bound.target_delta if isinstance(self.bound, Calibration) else self.bound.delta

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; numbers are full doubles."""
        name, rests_on = _proof(self.bound)
        more = {"delta": self.delta, "accountant": name, "rests_on": rests_on, "assumptions": list(self.assumptions)}
        return self.run.to_dict() | self.bound.to_dict() | more | {
            "relation": relation(self.run, self.bound.direction),
            "ex_post": {str(step): epsilon for step, epsilon in self.ex_post.items()},
            "tradeoff": None if self.tradeoff is None else self.tradeoff.to_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        mechanism, bound = self.run.mechanism, self.bound
        sigma = (upper if isinstance(bound, Calibration) else given)(bound.noise_multiplier)
        name, rests_on = _proof(bound)
        text = (
            f"We run the matrix mechanism with the strategy {mechanism.strategy.name} for "
            f"{mechanism.batching.iterations} iterations, with noise multiplier {sigma} for clipping norm 1 and the "
            f"strategy as given. {described(self.run)} The mechanism is ({upper(bound.epsilon, 4)}, "
            f"{upper(self.delta, 4)})-differentially private where {relation(self.run, bound.direction)}. This is a "
            f"proved upper bound, not an estimate, by the accountant '{name}'{rests_on and f' ({rests_on})'} of dpmf "
            f"{__version__}."
        )
        if self.tradeoff is not None:
            found = self.tradeoff
            rates = ", ".join(f"{upper(100 * t, 3)} % at {100 * a:g} %" for a, t in found.attacks.items())
            text += (
                f" It is {upper(found.mu, 4)}-Gaussian differentially private up to {given(found.slack)}, and no "
                f"membership-inference attack has a true-positive rate above {rates} false positives."
            )
        if self.ex_post:
            points = ", ".join(f"{upper(epsilon, 4)} after step {step}" for step, epsilon in self.ex_post.items())
            text += (
                " Stopping points were named in advance, and δ is divided over them and the end. Whoever stops at one, "
                f"judging by what was released, has the ex-post guarantee of another ε at the same δ: {points}."
            )
        return f"{text} Assumptions: {' '.join(self.assumptions)}"


def statement(
    run: Mechanism | Run,
    bound: PrivacyBound | Estimate | None = None,
    tradeoff: TradeOff | None = None,
    *,
    delta: float = DELTA,
    accountant: api.AnyAccountant = api.DEFAULT_ACCOUNTANT,
    assumptions: Sequence[str] = (),
) -> Statement:
    """A complete statement of a guarantee: a paragraph of plain text to paste into a paper, and a JSON object.

    Args:
      run: what was run; a mechanism is a run without a cut, at the noise multiplier of the bound.
      bound: the guarantee, from `dpmf.calibrate`, `dpmf.epsilon` or `dpmf.delta` of this run; an estimate is refused.
        Without it, and where stopping points are named, ε of the run is asked for.
      tradeoff: also state μ and true-positive rates, from `dpmf.tradeoff` of the same run.
      delta: where ε is asked for.
      accountant: who is asked for ε.
      assumptions: what else is assumed, in full sentences.

    Returns:
      The mechanism, how records get into batches, the noise multiplier, clip, divisor and cut, the neighbouring
      relation, (ε, δ), the accountant with the theorem it rests on, the version of dpmf, and what is assumed.

    **Formal guarantees.** Those of the bound, which is about this run: a bound or a curve without what the run's cut
    costs, or of another noise multiplier, is refused.
    """
    if isinstance(run, Run) and (bound is None or run.stops):
        bound = api.epsilon(run, delta=delta, accountant=accountant)
    if isinstance(bound, Estimate) or not isinstance(bound, PrivacyBound):
        raise validation.wrong("bound", "a guarantee, not an estimate", type(bound).__name__)
    whole, said = as_run(run, bound.noise_multiplier), bound.details.values()
    if bound.noise_multiplier != whole.noise_multiplier or any("ex_post" in one for one in said):
        raise validation.wrong("bound", f"of the whole run at noise multiplier {whole.noise_multiplier!r}", bound)
    if tradeoff is not None and tradeoff.noise_multiplier != bound.noise_multiplier:
        raise validation.wrong("tradeoff", f"at the noise multiplier {bound.noise_multiplier!r}", tradeoff)
    if whole.cut is not None and whole.cut.probability:
        if not said or not all("cut" in one for one in said):
            raise ArgumentError("bound", "must be asked about the run, not its mechanism: batches are cut")
        if tradeoff is not None and tradeoff.largest_mu < math.inf:
            raise ArgumentError("tradeoff", "must be asked about the run, not its mechanism: batches are cut")
    if isinstance(accountant, PreparedAccountant):  # for the whole run only
        accountant = api.DEFAULT_ACCOUNTANT
    named = {stop: api.epsilon(whole, delta=delta, stop=stop, accountant=accountant).epsilon for stop in whole.stops}
    return Statement(whole, bound, tradeoff, named, (*ASSUMPTIONS, *assumptions))


def as_run(asked: Mechanism | Run, noise_multiplier: float) -> Run:
    """A run, or the one that a mechanism with a noise multiplier stands for."""
    if isinstance(asked, Run):
        return asked
    return Run(only_mechanism(asked, " or a dpmf.Run"), noise_multiplier, precision=EXACT)


def relation(run: Run, direction: str) -> str:
    """How two data sets may differ, in words, to follow "where"."""
    ways = {"both": "both directions", "remove": "for removing it only", "add": "for adding it only"}
    return f"{run.relation} ({ways[direction]})"


def described(run: Run) -> str:
    """How records get into batches, and what is done with them, in sentences."""
    divided = "" if run.divisor is None else f"; sums are divided by {given(run.divisor)}"
    cut = (
        f" Batches are cut to {run.max_batch_size} of at most {run.records} {run.unit}s, and the guarantee includes "
        "what that costs."
    )
    return (
        f"{_batching(run.mechanism.batching, run.unit)} What a {run.unit} contributes to a step is clipped to norm "
        f"{given(run.clip_norm)}; clipping, sums and noise are computed in {run.precision}{divided}."
    ) + (cut if run.max_batch_size is not None else "")


def _proof(bound: PrivacyBound) -> tuple[str, str]:
    """The accountant whose bound it is (`best` says whose won), and the theorem that it rests on."""
    name = bound.details.get(bound.binding, {}).get("accountant", bound.accountant)
    accountant = ACCOUNTANTS.get(name)
    return name, "" if accountant is None or accountant.role != "bound" else accountant.rests_on


def _batching(batching: AnyBatching, unit: str) -> str:
    """How records get into batches, in a sentence."""
    k, b = batching.epochs, batching.batches_per_epoch
    if isinstance(batching, Poisson):
        groups = f" of its group (of {batching.period} groups that take turns)" if batching.period > 1 else ""
        share = f"{batching.period}/{b}" if batching.period > 1 else f"1/{b}"
        return f"Each {unit} takes part in each iteration{groups} with probability {share}, independently."
    stride, gap = (batching.stride, batching.gap) if isinstance(batching, BallsInBins) else (1, None)
    quiet = f"; {gap} iterations without {unit}s lie between two assignments" if gap else ""
    if b == stride:  # nothing is left to chance
        return f"Each {unit} takes part {'in every iteration' if b == 1 else f'every {b} iterations'}{quiet}."
    bins = f"one of {b} batches"
    if stride > 1:
        bins = f"one of the {b // stride} (of {b}) batches of its group, which are {stride} iterations apart,"
    text = f"Each {unit} is assigned to {bins} uniformly and independently of the others"
    if batching.throws == 1:
        kept = f", and keeps it over all {k} epochs (balls in bins)" if k > 1 else " (balls in bins, one epoch)"
        return f"{text}{kept}."
    often = "every epoch" if batching.throws == k else f"every {k // batching.throws} epochs"
    return f"{text}, anew in {often} ({k} epochs){quiet}."
