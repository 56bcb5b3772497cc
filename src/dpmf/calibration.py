"""The least noise multiplier with which one of several bounds meets a target.

All bounds are compared at one noise multiplier, roughly, and only the smallest are followed to their roots. No choice
made here decides whether a bound holds: the noise multiplier returned was evaluated, and its bound met the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from dpmf import budget
from dpmf.accountants.protocol import Direction, Evaluation, PreparedAccountant
from dpmf.batching import BallsInBins
from dpmf.errors import CalibrationError
from dpmf.formatting import given
from dpmf.mechanism import Mechanism
from dpmf.search import LARGEST_RATIO, least_noise

LITTLE_HOPE = 1.04  # a rough bound that exceeds its roughness times the target by this factor is taken to miss it
_CRUDE = 0.1  # bounds are compared at a σ that is found to this relative tolerance
_STRIDE = 0.5  # the largest first step in log σ
_FAR_APART = 20.0  # evaluations farther from the target than this, in logarithms together, say little about slopes
_USUAL_STEEPNESS = 6.0  # −d log δ/d log σ that is assumed before two evaluations show it
_SOME_HOPE = 1.01  # the same once another bound's root is known: its estimate must promise an improvement
_CLEARLY = 1.3  # an estimate below the target by more than this factor is taken to meet it
_QUESTIONS = 9  # at most so many noise multipliers are tried near a given one
_JUMP = 1.5  # from one of them to the next, at most by this factor
_SLOPES = (4.0, 200.0)  # the least and the largest −d log δ/d log σ that is believed
_ASKED = 2  # how many of the bounds, the most promising first, are asked at one of them
_AHEAD = 1.5  # a bound without a rough version that all others exceed by this factor is followed to its root at once
_OWN_SLOPE = 10.0  # a step of at least so many tolerances shows the slope
_BEHIND = (0.3, 0.4)  # the logarithm of how far ahead a bound must be: at its root, and per logarithm of δ from there
_FAR = 2.5  # other bounds of an accountant whose bound is this many times the least are not compared
_HOPELESS = 1.25  # an accountant that misses the target by this factor, where a bound closer to the truth just meets
# it, is not asked for its other bounds
_CLOSE = 2.0  # σ is close to the root where the bound is below the target by at most this factor


class LeastNoise(NamedTuple):
    """The least noise multiplier found that meets a target, the bound evaluated there, and whose bound it is."""

    noise_multiplier: float
    evaluation: Evaluation
    bound: PreparedAccountant


def likely_noise(mechanism: Mechanism, epsilon: float, delta: float) -> float:
    """About the noise multiplier of several throws, where a search may begin; the sensitivity for other mechanisms.

    It is that of a Gaussian loss whose variance per throw is the mean of e^(G_ij/σ²) − 1, as it is where that is small.
    """
    throws = mechanism.batching.throws
    if not isinstance(mechanism.batching, BallsInBins) or throws == 1:
        return mechanism.sensitivity
    lags = mechanism.throw.lags
    b = len(lags)
    counts = np.where(np.arange(b) > 0, 2.0, 1.0) * (b - np.arange(b)) / b**2

    def evaluate(sigma: float) -> Evaluation:
        variance = throws * float(counts @ np.expm1(np.minimum(lags / sigma**2, 600.0)))
        mu = min(math.sqrt(variance + (mechanism.shared_sensitivity / sigma) ** 2), 1e100)
        low, high = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
        beyond = math.exp(min(epsilon, 700.0)) * math.erfc(high / 2**0.5)
        return Evaluation(max(0.5 * (math.erfc(-low / 2**0.5) - beyond), 0.0))

    found = least_noise(evaluate, delta, mechanism.throw.sensitivity, 0.01)
    return mechanism.sensitivity if found is None else found[0]


def calibrate_one_way(
    members: Sequence[PreparedAccountant],
    epsilon: float,
    delta: float,
    direction: Direction,
    start: float,
    relative_tolerance: float,
    best: LeastNoise | None = None,
    enough: float = 0.0,
    coarse_tolerance: float = 0.0,
) -> LeastNoise:
    """The least noise multiplier with which one of several bounds meets (ε, δ) in one direction.

    Args:
      members: the bounds, the likely winner first.
      epsilon: the target ε.
      delta: the target δ.
      direction: "remove" or "add".
      start: the noise multiplier at which to look first.
      relative_tolerance: how close to the root of the best bound the search ends.
      best: what other bounds have reached already.
      enough: a noise multiplier that is as good as any smaller one. The first member that meets the target there is
        searched to `coarse_tolerance` only.
      coarse_tolerance: see `enough`.

    Returns:
      The least noise multiplier found. Where the time budget ends the search, that is the least found until then.

    Raises:
      CalibrationError: no member meets the target.
      OutOfTime: the time budget ended before any noise multiplier was found.
    """
    reasons = [member.unreachable(epsilon, delta, direction) for member in members]
    able = [member for member, reason in zip(members, reasons, strict=True) if reason is None]
    contest = _Contest(able, epsilon, delta, direction, best)

    def run() -> None:
        if best is None or not enough > 0:
            contest.run(start, relative_tolerance)
        elif best[0] > enough:
            contest.run_to(enough, relative_tolerance, coarse_tolerance)

    if not budget.finished(run) and contest.best is None:
        raise budget.OutOfTime
    if contest.best is None:
        if not able:
            raise CalibrationError(str(reasons[-1]))
        target = f"epsilon = {given(epsilon)}, delta = {given(delta)}"
        raise CalibrationError(f"no noise multiplier up to {LARGEST_RATIO * start:.3g} meets {target}")
    return contest.best


def noise_near(
    members: Sequence[PreparedAccountant],
    epsilon: float,
    delta: float,
    near: float,
    relative_tolerance: float,
    *,
    quick: bool,
) -> tuple[float, int, bool]:
    """A noise multiplier near a given one with which the bounds meet (ε, δ).

    The search looks where the slope of log δ seen so far puts the root, and ends as soon as little is left to gain:
    an estimate of σ that is right to a few percent leads to an answer in two or three questions.

    Args:
      members: the bounds. Those that are neither cheap nor have a rough version are asked last.
      epsilon: the target ε.
      delta: the target δ.
      near: the noise multiplier at which to look first.
      relative_tolerance: how much smaller the answer might be.
      quick: rough bounds suffice, where there are any.

    Returns:
      The noise multiplier, the place among the bounds of the one that met the target there, and whether the search came
      to its end before the time budget did.

    Raises:
      CalibrationError: no noise multiplier that was tried meets the target.

    **Formal guarantees.** A bound on removing a record was evaluated at the noise multiplier returned and met the
    target. It bounds adding one, too (docs/theory/gram-domination.md, "Removing decides").
    """
    search = _Nearby(members, epsilon, delta, quick)
    finished = budget.finished(lambda: search.run(near, relative_tolerance))
    if search.met is None:
        raise CalibrationError(f"no noise multiplier near {given(near)} was found to meet the target")
    return search.met, members.index(search.met_by), finished


class _Nearby:
    """The search of `noise_near`.

    `met` is the least noise multiplier found that meets the target, by the bound `met_by`.
    """

    def __init__(self, members: Sequence[PreparedAccountant], epsilon: float, delta: float, quick: bool) -> None:
        self._members, self._epsilon, self._delta, self._quick = members, epsilon, delta, quick
        self._order: dict[Direction, list[PreparedAccountant]] = {}
        self._rough: dict[tuple[int, float, Direction], Evaluation | None] = {}
        self.met: float | None = None
        self.met_by = members[0]
        self._missed = 0.0

    def run(self, sigma: float, tolerance: float) -> None:
        slope = 2 * math.log(1 / self._delta)
        before: tuple[float, float] | None = None
        for _ in range(_QUESTIONS):
            value = self._least(sigma, "remove")
            if value <= self._delta:
                self.met = sigma
            else:
                self._missed = sigma
            if before is not None and 0 < value < 1 and 0 < before[1] < 1:
                seen = math.log(before[1] / value) / math.log(sigma / before[0])
                slope = min(max(seen, _SLOPES[0]), _SLOPES[1])
            before = sigma, value
            factor = max(value, 1e-300) / self._delta
            root = sigma * min(max(math.exp(math.log(factor) / slope), 1 / _JUMP), _JUMP)
            if self.met is not None and self.met <= (1 + tolerance) * max(root, self._missed):
                return
            sigma = max(root * (1 + tolerance / 2), self._missed * (1 + tolerance / 2))
            if self.met is not None:
                sigma = min(sigma, self.met * (1 - tolerance / 4))

    def _least(self, sigma: float, way: Direction) -> float:
        """The least bound among the most promising ones, or the first that meets the target."""
        if way not in self._order:
            guesses = {member: self._guess(member, sigma, way) for member in self._members}
            self._order[way] = sorted(guesses, key=lambda member: guesses[member])[:_ASKED]
        least = 1.0
        for member in self._order[way]:
            budget.check()
            rough = self._roughly(member, sigma, way) if self._quick else None
            least = min(least, (rough or member.delta(sigma, self._epsilon, way, self._delta)).value)
            if least <= self._delta:
                self.met_by = member
                break
        return least

    def _guess(self, member: PreparedAccountant, sigma: float, way: Direction) -> float:
        """About how large a bound is; infinite where it would take long to tell."""
        rough = self._roughly(member, sigma, way)
        if rough is not None:
            return rough.value / (1.0 if self._quick else member.roughness)
        return member.delta(sigma, self._epsilon, way, self._delta).value if member.cheap else math.inf

    def _roughly(self, member: PreparedAccountant, sigma: float, way: Direction) -> Evaluation | None:
        key = id(member), sigma, way
        if key not in self._rough:
            budget.check()
            self._rough[key] = member.rough_delta(sigma, self._epsilon, way, self._delta)
        return self._rough[key]


class _Contest:
    """The comparison of several bounds for one target, and what they have answered so far."""

    def __init__(
        self,
        members: Sequence[PreparedAccountant],
        epsilon: float,
        delta: float,
        direction: Direction,
        best: LeastNoise | None,
    ) -> None:
        self._members, self._epsilon, self._delta, self._direction = members, epsilon, delta, direction
        self.best = best
        self._asked: dict[tuple[int, float], Evaluation] = {}
        self._rough: dict[tuple[int, float], Evaluation | None] = {}

    def run(self, start: float, tolerance: float) -> None:
        alone = len(self._members) == 1
        only = (
            len(self._members) > 1 and not self._members[0].cheap and all(member.cheap for member in self._members[1:])
        )
        crude = tolerance if alone or only else max(tolerance, _CRUDE)
        outside = self.best is not None
        for place in range(len(self._members)):
            if self.best is None:
                self._search(place, start, crude, _STRIDE)
        if self.best is None or (alone and not outside):
            return
        if alone and start < self.best[0]:  # the start is where its root is likely, closed forms are far above it
            self._search(0, start, tolerance, _STRIDE)
            return
        if only and not outside:  # the others are closed forms, which are asked at once
            for place in range(1, len(self._members)):
                lower = self.best[0] * (1 - tolerance)
                if self._evaluate(place, lower).value <= self._delta:
                    self._search(place, lower, tolerance, _STRIDE)
            return
        common, bounds = self._compare(crude, self.best[0] * (1 - tolerance) if outside else self.best[0])
        self._follow(common, bounds, tolerance)

    def run_to(self, enough: float, tolerance: float, coarse: float) -> None:
        """Search downwards from a known answer until σ is at most `enough`."""
        bounds: dict[int, float] = {}
        for place in range(len(self._members)):
            bounds[place] = self._estimate(place, enough)
            if bounds[place] <= self._delta * LITTLE_HOPE:
                bounds[place] = self._evaluate(place, enough).value
            if bounds[place] <= self._delta:
                self._search(place, enough, max(coarse, tolerance), self._stride(place, enough, tolerance))
                return
        if bounds:
            self._follow(enough, bounds, tolerance)

    def _follow(self, common: float, bounds: dict[int, float], tolerance: float) -> None:
        """Search for the roots of the smallest bounds, the smallest bound first."""
        assert self.best is not None
        order = sorted(bounds, key=lambda place: bounds[place])
        # A bound that misses the target at one σ misses it at smaller ones. Of two bounds that miss it, the larger one
        # may still have the smaller root because slopes differ; the farther away the root, the larger that margin is.
        least = bounds[order[0]]
        reach = self._delta if least <= self._delta else least * math.exp(0.05 + 0.7 * self._excess(least))
        # Bounds with rough versions that are far above one that meets the target are so at its root, too. Others may
        # have quite other slopes.
        ahead = least * math.exp(_BEHIND[0] + _BEHIND[1] * self._excess(least)) if least <= self._delta else math.inf
        for place in order:
            if bounds[place] > reach:
                return
            if bounds[place] > ahead and self._members[place].roughness > 1:
                continue
            # The winner of the comparison starts from `common`, where it is known; the others have to beat its answer.
            near = self.best[0] * (1 - tolerance)
            if place == order[0] and bounds[place] <= self._delta:
                near = common
            elif not self._meets(place, near):
                continue
            self._search(place, near, tolerance, self._stride(place, near, tolerance))

    def _meets(self, place: int, sigma: float) -> bool:
        """Whether a bound meets the target. Far from the target, the rough estimate alone decides."""
        estimate = self._estimate(place, sigma)
        if not self._delta / _CLEARLY <= estimate <= self._delta * _SOME_HOPE:
            return estimate <= self._delta
        return self._evaluate(place, sigma).value <= self._delta

    def _compare(self, crude: float, common: float) -> tuple[float, dict[int, float]]:
        """Estimates of all bounds at one σ, which is moved until it is close to the root of the smallest bound."""
        places = list(range(len(self._members)))
        while True:
            bounds: dict[int, float] = {}
            for place in places:
                bounds[place] = math.inf if self._hopeless(place, bounds) else self._estimate(place, common)
            least = min(bounds, key=lambda place: bounds[place])
            if bounds[least] * _CLOSE > self._delta:
                return common, bounds
            second = min((bounds[place] for place in places if place != least), default=1.0)
            if self._members[least].roughness == 1 and second >= _AHEAD * bounds[least]:
                return common, bounds
            self._search(least, common, crude, self._stride(least, common, crude / 4))
            assert self.best is not None
            if self.best[0] >= common * (1 - crude / 4):
                return common, bounds
            common = self.best[0]
            # A bound that misses the target at one σ misses it at smaller ones.
            places = [place for place in places if bounds[place] <= self._delta]

    def _hopeless(self, place: int, bounds: dict[int, float]) -> bool:
        """Whether a bound of the same accountant was so far from the target that this one need not be asked."""
        if self.best is None or self._members[place].roughness == 1:
            return False
        limit = _FAR * min(bounds.values(), default=1.0)
        if self.best.evaluation.slack <= _HOPELESS:
            limit = min(limit, _HOPELESS * self._delta)
        kin = (value for other, value in bounds.items() if self._members[other].name == self._members[place].name)
        return any(limit < value < math.inf for value in kin)

    def _excess(self, value: float) -> float:
        """|log of a bound over the target|."""
        return abs(math.log(max(value, 1e-300) / self._delta))

    def _stride(self, place: int, sigma: float, least: float) -> float:
        """A first step of log σ that should lead just past the root."""
        ahead = self._excess(self._estimate(place, sigma)) / self._steepness()
        return min(_STRIDE, 1.2 * ahead + 2 * least)

    def _evaluate(self, place: int, sigma: float) -> Evaluation:
        if (place, sigma) not in self._asked:
            budget.check()
            ask = partial(self._members[place].delta, sigma, self._epsilon, self._direction, self._delta)
            # Where memory does not suffice, the bound is 1: a bound that needs less may still win.
            self._asked[place, sigma] = budget.attempt(ask, Evaluation(1.0))
        return self._asked[place, sigma]

    def _roughly(self, place: int, sigma: float) -> Evaluation | None:
        if (place, sigma) not in self._rough:
            budget.check()
            ask = partial(self._members[place].rough_delta, sigma, self._epsilon, self._direction, self._delta)
            self._rough[place, sigma] = budget.attempt(ask, None)
        return self._rough[place, sigma]

    def _estimate(self, place: int, sigma: float) -> float:
        """An estimate of the bound, from its rough version where there is one and the bound itself is not known."""
        rough = None if (place, sigma) in self._asked else self._roughly(place, sigma)
        if rough is None:
            return self._evaluate(place, sigma).value
        return rough.value / self._members[place].roughness

    def _search(self, place: int, near: float, tolerance: float, step: float) -> None:
        """Search for the root of a bound: with rough bounds first, with fine bounds near the answer."""
        tolerance = max(tolerance, self._members[place].resolution)
        close = (place, near) in self._asked
        rough_holds = self._members[place].kind == "bound"  # few samples give no confidence limit
        slope = self._seen_slope(place)
        if slope is None and close and self._members[place].roughness == 1:
            # That of another bound leads to a second point, from which on its own is seen: not if it is here already.
            other = self._seen_slope()
            if other and self._excess(self._asked[place, near].value) > _OWN_SLOPE * tolerance * other:
                slope = other

        def evaluate(sigma: float) -> Evaluation:
            rough = self._roughly(place, sigma) if tolerance >= _CRUDE and rough_holds else None
            return self._evaluate(place, sigma) if rough is None else rough

        found = least_noise(
            evaluate, self._delta, near, tolerance, step,
            rough=None if close else lambda sigma: self._roughly(place, sigma),
            roughness=self._members[place].roughness, rough_holds=rough_holds, seen_slope=slope,
        )  # fmt: skip
        if found is not None and (self.best is None or found[0] < self.best[0]):
            self.best = LeastNoise(*found, self._members[place])

    def _steepness(self) -> float:
        return max(0.5, self._seen_slope() or _USUAL_STEEPNESS)

    def _seen_slope(self, of: int | None = None) -> float | None:
        """−d log δ/d log σ between the two evaluations of one bound, both rough or neither, closest to the target.

        It is that of any bound, or of one alone; None where no two evaluations are near the target.
        """
        closest, slope = math.inf, None
        rough = {place: found for place, found in self._rough.items() if found is not None}
        pairs = (pair for known in (self._asked, rough) for pair in product(known.items(), repeat=2))
        for ((place, sigma), one), ((other, farther), two) in pairs:
            away = self._excess(one.value) + self._excess(two.value)
            if place == other and of in (None, place) and sigma < farther and two.value < one.value and away < closest:
                closest = away
                slope = math.log(one.value / max(two.value, 1e-300)) / math.log(farther / sigma)
        return None if slope is None or closest > _FAR_APART else slope
