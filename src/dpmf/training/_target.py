"""From a target to the noise multiplier, with a line that says so while it takes long."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator

from dpmf import api, progress, validation
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.accountants.registry import resolve
from dpmf.errors import ArgumentError
from dpmf.mechanism import Mechanism
from dpmf.results import Calibration, PrivacyBound
from dpmf.training._overflow import Cut

_SILENCE = 1.0  # seconds before the first line
_PAUSE = 5.0  # seconds between two lines


def noise_for(
    mechanism: Mechanism,
    target_epsilon: float | None,
    target_delta: float | None,
    noise_multiplier: float | None,
    accountant: api.AnyAccountant,
    *,
    cut: Cut | None = None,
    says: bool = True,
) -> tuple[float, Calibration | None, tuple[float, float] | None]:
    """The noise multiplier, how it was calibrated, and the (ε, δ) that was proved for it.

    Args:
      mechanism: strategy and batching.
      target_epsilon, target_delta: the target, or None for both if the noise multiplier is given.
      noise_multiplier: the noise multiplier, or None if a target is given.
      accountant: the accountant that calibrates. One that only estimates is refused before it begins.
      cut: how batches are cut to a largest size. Calibration is to what the cost of that leaves of δ.
      says: whether to say on stderr what takes long.
    """
    if (kind := _estimates(accountant)) is not None:
        raise ArgumentError("accountant", f"must be one that proves its bound, {kind} only estimates it")
    if noise_multiplier is not None:
        if target_epsilon is not None or target_delta is not None:
            raise ArgumentError(
                "noise_multiplier", "must not be given with target_epsilon or target_delta: give the noise or a target"
            )
        return validation.positive("noise_multiplier", noise_multiplier), None, None
    if target_epsilon is None:
        raise ArgumentError("target_epsilon", "must be given with target_delta, or noise_multiplier instead of both")
    if target_delta is None:
        raise ArgumentError("target_delta", "must be given with target_epsilon")
    epsilon = validation.positive("target_epsilon", target_epsilon)
    whole = validation.probability("target_delta", target_delta)
    delta = whole if cut is None else cut.left(epsilon, whole)
    with saying(f"calibrating the noise for ε = {target_epsilon}, δ = {target_delta}", says):
        found = api.calibrate(mechanism, target_epsilon=epsilon, target_delta=delta, accountant=accountant)
    if not isinstance(found, Calibration):
        raise ArgumentError("accountant", f"must be one that proves its bound, {found.accountant} only estimates it")
    return found.noise_multiplier, found, (epsilon, whole)


def whole_epsilon(
    mechanism: Mechanism,
    sigma: float,
    delta: float,
    accountant: api.AnyAccountant,
    cut: Cut | None,
    proved: tuple[float, float] | None,
) -> float:
    """The ε at which all steps of a run are (ε, delta)-DP, with the cost of batches that are cut.

    Args:
      mechanism, sigma, accountant: the run, and who bounds it.
      delta: δ.
      cut: how batches are cut.
      proved: the (ε, δ) that calibration has proved, which is the answer at its δ, and an upper bound beyond.
    """
    if proved is not None and delta == proved[1]:
        return proved[0]
    known = proved[0] if proved is not None and delta > proved[1] else math.inf

    def uncut(left: float) -> float:
        answer = api.epsilon(mechanism, noise_multiplier=sigma, delta=left, accountant=accountant)
        if not isinstance(answer, PrivacyBound):
            raise ArgumentError("accountant", f"must be one that proves its bound, {answer.accountant} estimates it")
        return answer.epsilon

    with saying("computing the ε of the whole run"):
        return min(uncut(delta) if cut is None else cut.epsilon(delta, uncut, known), known)


def _estimates(accountant: api.AnyAccountant) -> str | None:
    """The name of an accountant that only estimates; None for the others."""
    if isinstance(accountant, PreparedAccountant):
        return None  # what it answers says what it is
    chosen = resolve(accountant)
    return chosen.name if chosen.role == "estimate" else None


@contextlib.contextmanager
def saying(what: str, says: bool = True) -> Iterator[None]:
    """Say on stderr what is being done, if it takes longer than a second, what it is at, and how long it took."""
    start = time.monotonic()
    said = [start + _SILENCE - _PAUSE]

    def line(more: str = "...") -> None:
        said[0] = time.monotonic()
        print(f"dpmf: {what} {more}", file=sys.stderr, flush=True)

    def listener(stage: str) -> None:
        if time.monotonic() - said[0] > _PAUSE:
            line(f"({stage}) ...")

    first = threading.Timer(_SILENCE, line)
    first.daemon = True
    if not says:
        yield
        return
    first.start()
    try:
        with progress.listening(listener):
            yield
    finally:
        first.cancel()
        if said[0] > start:
            line(f"took {time.monotonic() - start:.0f} s")
