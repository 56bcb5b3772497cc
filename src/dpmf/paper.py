"""A paragraph for a paper: what was run, what is guaranteed, and by whom, with numbers rounded to the sound side."""

from __future__ import annotations

from dpmf import validation
from dpmf._version import __version__
from dpmf.accountants.registry import ACCOUNTANTS
from dpmf.attacks import TradeOff
from dpmf.batching import AnyBatching, BallsInBins, Poisson
from dpmf.formatting import given, upper
from dpmf.mechanism import Mechanism, mechanism_of_a_question
from dpmf.results import Calibration, Estimate, PrivacyBound

_RELATIONS = {
    "both": "one record is added or removed (both directions)",
    "remove": "one record is removed (this direction only)",
    "add": "one record is added (this direction only)",
}


def statement(mechanism: Mechanism, bound: PrivacyBound | Estimate, tradeoff: TradeOff | None = None) -> str:
    """A paragraph of plain text that states a guarantee completely, to paste into a paper.

    Args:
      mechanism: what was run.
      bound: the guarantee, from `dpmf.calibrate`, `dpmf.epsilon` or `dpmf.delta`; an estimate is refused.
      tradeoff: also state μ and true-positive rates, from `dpmf.tradeoff` at the same noise multiplier.

    Returns:
      The mechanism, how records get into batches, the noise multiplier, the neighbouring relation, (ε, δ), the
      accountant with the theorem it rests on, and the version of dpmf.

    **Formal guarantees.** Whoever reads the numbers back gets a true statement: ε, δ, μ and rates are rounded up. A
    noise multiplier is printed in full where it was given, and rounded up where it was calibrated, which is more noise.
    """
    mechanism_of_a_question(mechanism)
    if isinstance(bound, Estimate) or not isinstance(bound, PrivacyBound):
        raise validation.wrong("bound", "a guarantee, not an estimate", type(bound).__name__)
    if tradeoff is not None and tradeoff.noise_multiplier != bound.noise_multiplier:
        raise validation.wrong("tradeoff", f"at the noise multiplier {bound.noise_multiplier!r}", tradeoff)
    sigma = (upper if isinstance(bound, Calibration) else given)(bound.noise_multiplier)
    delta = bound.target_delta if isinstance(bound, Calibration) else bound.delta
    name = bound.details.get(bound.binding, {}).get("accountant", bound.accountant)  # `best` says whose bound won
    accountant = ACCOUNTANTS.get(name)
    rests = "" if accountant is None or accountant.role != "bound" else f" ({accountant.rests_on})"
    text = (
        f"We run the matrix mechanism with the strategy {mechanism.strategy.name} for {mechanism.batching.iterations} "
        f"iterations, with noise multiplier {sigma} for clipping norm 1 and the strategy as given. "
        f"{_batching(mechanism.batching)} The mechanism is ({upper(bound.epsilon, 4)}, {upper(delta, 4)})-"
        f"differentially private where {_RELATIONS[bound.direction]}. This is a proved upper bound, not an estimate, "
        f"by the accountant '{name}'{rests} of dpmf {__version__}."
    )
    if tradeoff is not None:
        rates = ", ".join(f"{upper(100 * t, 3)} % at {100 * a:g} %" for a, t in tradeoff.attacks.items())
        text += (
            f" It is {upper(tradeoff.mu, 4)}-Gaussian differentially private up to {given(tradeoff.slack)}, and no "
            f"membership-inference attack has a true-positive rate above {rates} false positives."
        )
    return text


def _batching(batching: AnyBatching) -> str:
    """How records get into batches, in a sentence."""
    k, b = batching.epochs, batching.batches_per_epoch
    if isinstance(batching, Poisson):
        groups = f" of its group (of {batching.period} groups that take turns)" if batching.period > 1 else ""
        share = f"{batching.period}/{b}" if batching.period > 1 else f"1/{b}"
        return f"Each record takes part in each iteration{groups} with probability {share}, independently."
    stride, gap = (batching.stride, batching.gap) if isinstance(batching, BallsInBins) else (1, None)
    quiet = f"; {gap} iterations without records lie between two assignments" if gap else ""
    if b == stride:  # nothing is left to chance
        return f"Each record takes part {'in every iteration' if b == 1 else f'every {b} iterations'}{quiet}."
    bins = f"one of {b} batches"
    if stride > 1:
        bins = f"one of the {b // stride} (of {b}) batches of its group, which are {stride} iterations apart,"
    text = f"Each record is assigned to {bins} uniformly and independently of the others"
    if batching.throws == 1:
        kept = f", and keeps it over all {k} epochs (balls in bins)" if k > 1 else " (balls in bins, one epoch)"
        return f"{text}{kept}."
    often = "every epoch" if batching.throws == k else f"every {k // batching.throws} epochs"
    return f"{text}, anew in {often} ({k} epochs){quiet}."
