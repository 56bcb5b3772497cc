"""From a target to the noise multiplier, with a line that says so while it takes long."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from dpmf import api, progress, validation
from dpmf.accountants.protocol import PreparedAccountant
from dpmf.accountants.registry import resolve
from dpmf.cut import Cut
from dpmf.errors import ArgumentError
from dpmf.formatting import given
from dpmf.mechanism import Mechanism
from dpmf.paper import Statement, statement
from dpmf.results import Calibration, PrivacyBound
from dpmf.run import Run

_USUAL_DELTA = 1e-5
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
    ways: int = 1,
    says: bool = True,
) -> tuple[float, Calibration | None, tuple[float, float] | None]:
    """The noise multiplier, how it was calibrated, and the (ε, δ) that was proved for it.

    Args:
      mechanism: strategy and batching.
      target_epsilon, target_delta: the target, or None for both if the noise multiplier is given.
      noise_multiplier: the noise multiplier, or None if a target is given.
      accountant: the accountant that calibrates. One that only estimates is refused before it begins.
      cut: how batches are cut to a largest size. Calibration is to what the cost of that leaves of δ.
      ways: into how many parts δ is divided, of which the whole run has one.
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
    delta = whole / ways if cut is None else cut.left(epsilon, whole / ways)
    with saying(f"calibrating the noise for ε = {target_epsilon}, δ = {target_delta}", says):
        found = api.calibrate(mechanism, target_epsilon=epsilon, target_delta=delta, accountant=accountant)
    if not isinstance(found, Calibration):
        raise ArgumentError("accountant", f"must be one that proves its bound, {found.accountant} only estimates it")
    return found.noise_multiplier, found, (epsilon, whole)


@dataclass(eq=False)
class Guarantee:
    """What holds of a run, and who proves it.

    Attributes:
      run: everything that the guarantee depends on.
      accountant: who is asked.
      calibration: how σ was found, if it was calibrated.
      proved: the (ε, δ) of the whole run that calibration has proved.
    """

    run: Run
    accountant: api.AnyAccountant
    calibration: Calibration | None
    proved: tuple[float, float] | None
    _known: dict[tuple[float, int | None], PrivacyBound] = field(default_factory=dict)

    def epsilon(self, delta: float, made: int) -> float:
        """The ε at which the whole run is (ε, delta)-DP; at a named stopping point, the ex-post ε of stopping there.

        Args:
          delta: δ.
          made: how many steps have been made; before the first one the answer is 0.
        """
        delta = validation.probability("delta", delta)
        return self.bound(delta, made if made in self.run.stops else None).epsilon if made else 0.0

    def bound(self, delta: float, stop: int | None = None) -> PrivacyBound:
        """The same as a bound, whatever has been made. What calibration has proved is answered at once."""
        proved = None
        if stop is None and self.calibration is not None and self.proved is not None and delta >= self.proved[1]:
            cut, (epsilon, whole) = self.run.cut, self.proved
            charge = 0.0 if cut is None else cut.charge(epsilon)
            details = {way: {**told, "cut": charge} for way, told in self.calibration.details.items()}
            proved = replace(
                self.calibration, delta=self.calibration.delta + charge, target_delta=whole, details=details
            )
            if delta == whole:
                return proved
        if (delta, stop) not in self._known:
            try:
                self._known[delta, stop] = self._asked(delta, stop)
            except ArgumentError:  # cut batches leave nothing of δ, but more was proved before
                if proved is None:
                    raise
                return proved
        found = self._known[delta, stop]
        return proved if proved is not None and proved.epsilon <= found.epsilon else found

    def _asked(self, delta: float, stop: int | None) -> PrivacyBound:
        prepared = isinstance(self.accountant, PreparedAccountant) and stop is not None
        accountant = api.DEFAULT_ACCOUNTANT if prepared else self.accountant  # it was prepared for the whole
        with saying("computing the ε of the whole run"):
            answer = api.epsilon(self.run, delta=delta, accountant=accountant, stop=stop)
        if not isinstance(answer, PrivacyBound):
            raise ArgumentError("accountant", f"must be one that proves its bound, {answer.accountant} estimates it")
        if answer.epsilon == math.inf:
            raise ArgumentError("delta", f"must be larger: no finite ε was found at {given(delta)}")
        return answer

    def statement(self, delta: float | None = None, assumptions: Sequence[str] = ()) -> Statement:
        """What holds of the whole run, at a δ: by default that of the target, or 10⁻⁵ without one."""
        default = _USUAL_DELTA if self.proved is None else self.proved[1]
        asked = default if delta is None else validation.probability("delta", delta)
        if self.run.stops:
            return statement(self.run, delta=asked, accountant=self.accountant, assumptions=assumptions)
        return statement(self.run, self.bound(asked), assumptions=assumptions)


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
