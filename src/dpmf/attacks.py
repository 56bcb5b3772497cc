"""What any attack can achieve: the certified trade-off curve of a mechanism, and the numbers that are read off it.

An attack decides from the output whether one record took part. With Q for the output without the record and P for that
with it, an attack that says yes on a set S has the false-positive rate Q(S) and the true-positive rate P(S). Every
bound on δ(ε) bounds them: P(S) ≤ e^ε·Q(S) + δ_remove(ε), and 1 − Q(S) ≤ e^ε·(1 − P(S)) + δ_add(ε). So each bound is a
straight line above the curve of the largest true-positive rate, and the least of all lines is what is certified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtri

from dpmf import validation
from dpmf.accountants.combined.least import Least
from dpmf.accountants.composed.pair import Pairs
from dpmf.accountants.protocol import DIRECTIONS, RELATIONS, Accountant, Direction, directions_of
from dpmf.accountants.registry import covering, resolve
from dpmf.accountants.renyi import Renyi
from dpmf.api import DEFAULT_ACCOUNTANT
from dpmf.cut import Cut
from dpmf.errors import ArgumentError
from dpmf.formatting import given, upper
from dpmf.loss.profile_points import Profile, ProfilePoints
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array
from dpmf.run import Run, asked_about, only_mechanism

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
ORDERS = (2, 3, 4, 8, 16, 32)
SLACK = 1e-9
_ROUNDING = 16 * UNIT  # proof constant: every line has fewer roundings than this, relative to positive terms
_QUANTILES = 1e-12  # proof constant: the error of a difference of two normal quantiles


@dataclass(frozen=True)
class _Tuning:
    """Where δ(ε) is evaluated. Any values give sound curves.

    Attributes:
      spacing: the lattice of ε, as a part of the μ of the mechanism without amplification.
      largest_spacing: the coarsest lattice.
      share, rough_share: the relative loss of ε that straight lines between points may cost.
      roughness: by about which factor the μ of rough curves is larger.
      reach: points reach to where δ is this part of the slack, where it can be evaluated that far out.
      composed_reach: the same for composed distributions, whose transforms have rounding errors.
      orders: the largest Rényi order that is tried.
    """

    spacing: float = 1e-4
    largest_spacing: float = 1e-3
    share: float = 0.002
    rough_share: float = 0.03
    roughness: float = 1.002
    reach: float = 1e-3
    composed_reach: float = 0.25
    orders: int = 64


_TUNING = _Tuning()


@dataclass(frozen=True, eq=False)
class Lines:
    """Straight lines that the true-positive rate of no attack exceeds, steep ones first.

    Attributes:
      slopes, intercepts: at the false-positive rate α, line j is at intercepts[j] + slopes[j]·α.
    """

    slopes: Array
    intercepts: Array

    def least(self, alpha: float) -> float:
        """The least of all lines, at most 1, rounded up."""
        return min(1.0, float(np.min(self.intercepts + self.slopes * alpha)) * (1 + _ROUNDING))

    def corners(self) -> tuple[Array, Array]:
        """Points between which the least of all lines is at most the chord: where lines meet, from 0 to 1.

        **Formal guarantees.** Between two neighbouring points one and the same line is at most the values at both.
        Rounding may move a point along the lines; the value there is the larger of the two lines that meet.
        """
        kept: list[int] = []
        places: list[float] = []  # where each line takes over from the one before
        for new in range(len(self.slopes)):
            while kept:
                fall, rise = self.slopes[kept[-1]] - self.slopes[new], self.intercepts[new] - self.intercepts[kept[-1]]
                place = math.inf if fall <= 0 else max(float(rise / fall), 0.0)
                if place > places[-1]:
                    break
                kept.pop()
                places.pop()
            if not kept:
                kept, places = [new], [0.0]
            elif place < 1:
                kept.append(new)
                places.append(place)
        alphas = np.array([*places, 1.0])
        slopes, intercepts = self.slopes[kept], self.intercepts[kept]
        ends = (intercepts + slopes * alphas[1:]) * (1 + _ROUNDING)
        starts = (intercepts + slopes * alphas[:-1]) * (1 + _ROUNDING)
        return alphas, np.minimum(1.0, np.maximum(np.append(starts, 0.0), np.append(0.0, ends)))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TradeOff:
    """A certified trade-off curve, and what is read off it. `str` prints a table.

    Attributes:
      noise_multiplier: σ for clipping norm 1 and the strategy as given.
      direction: "remove": attacks that look for the record and may find it by mistake; "add": attacks that look for
        its absence; "both": the better of the two.
      accountant: the name of the accountant whose bounds these are.
      mu: the mechanism is μ-Gaussian-DP up to `slack`: no attack has a true-positive rate above Φ(Φ⁻¹(α) + μ) + slack
        at any false-positive rate α.
      slack: see `mu`. With amplification no small μ holds without it: far out, where δ is astronomically small, the
        mechanism is as bad as without amplification.
      largest_mu: the μ without amplification, which holds with a slack of 0; infinite where batches are cut: no μ
        holds then with a slack below what the cut costs.
      attacks: upper bounds on the true-positive rate, by false-positive rate.
      epsilons: upper bounds on ε, by δ.
      renyi: upper bounds on the Rényi divergence, by order, where there are any.
    """

    noise_multiplier: float
    direction: str
    accountant: str
    mu: float
    slack: float
    largest_mu: float
    attacks: Mapping[float, float]
    epsilons: Mapping[float, float]
    renyi: Mapping[int, float]
    points: Mapping[str, tuple[Array, Array]] = field(repr=False)
    lines: Mapping[str, Lines] = field(repr=False)

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """An upper bound on the true-positive rate of every attack with this false-positive rate.

        **Formal guarantees.** Each line holds for every attack (see the module), so the least of them does; for "both"
        the larger of the two curves is returned. All roundings are upwards.
        """
        alpha = validation.non_negative("false_positive_rate", false_positive_rate)
        if alpha > 1:
            raise validation.wrong("false_positive_rate", "at most 1", alpha)
        return max(lines.least(alpha) for lines in self.lines.values())

    def type_two_error(self, type_one_error: float) -> float:
        """A lower bound on the type II error (false-negative rate) of every attack with this type I error."""
        return max(0.0, (1 - self.true_positive_rate(type_one_error)) * (1 - _ROUNDING))

    def epsilon(self, delta: float) -> float:
        """An upper bound on the ε at which the mechanism is (ε, δ)-DP, from the same points; infinite where none is.

        **Formal guarantees.** δ is convex in e^ε, so it is at most the chord between two points that bound it.
        """
        target = validation.probability("delta", delta)
        return max(_epsilon(*self.points[way], target) for way in directions_of(self.direction))

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain Python values, ready for JSON."""
        names = ("noise_multiplier", "direction", "accountant", "slack")
        curve = {way: [list(map(float, side)) for side in lines.corners()] for way, lines in self.lines.items()}
        return {name: getattr(self, name) for name in names} | {
            "largest_mu": _finite(self.largest_mu),
            "mu": _finite(self.mu),
            "true_positive_rates": {given(a): value for a, value in self.attacks.items()},
            "epsilons": {given(d): _finite(value) for d, value in self.epsilons.items()},
            "renyi_divergences": {str(order): value for order, value in self.renyi.items()},
            "corners": curve,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for a table; bounds are rounded up."""
        found = [(f"μ (Gaussian DP, up to {given(self.slack)})", upper(self.mu, 4))]
        found += [(f"true positives at {100 * a:g} % false positives, at most", f"{upper(100 * t, 4)} %")
                  for a, t in self.attacks.items()]  # fmt: skip
        found += [(f"ε at δ = {given(d)}", upper(value, 4)) for d, value in self.epsilons.items()]
        return found + [(f"Rényi divergence of order {order}", upper(value, 4)) for order, value in self.renyi.items()]

    def markdown(self) -> list[str]:
        """The lines of a section with the same table."""
        head = ["## What any attack can achieve", "", "| | at most |", "|---|---:|"]
        return [*head, *(f"| {name.removesuffix(', at most')} | {value} |" for name, value in self.rows()), ""]

    def __str__(self) -> str:
        head = f"any attack, at noise multiplier {given(self.noise_multiplier)} [{self.accountant}, {self.direction}]"
        return "\n".join([head, *(f"  {name}: {value}" for name, value in self.rows())])

    __repr__ = __str__


def tradeoff(
    mechanism: Mechanism | Run,
    *,
    noise_multiplier: float | None = None,
    accountant: str | Accountant = DEFAULT_ACCOUNTANT,
    direction: str = "both",
    slack: float = SLACK,
    deltas: Sequence[float] = DELTAS,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    renyi: bool = False,
) -> TradeOff:
    """The certified trade-off curve of a mechanism run with a noise multiplier.

    Args:
      mechanism: the strategy and the batching, or a `Run`, whose cut of batches is counted.
      noise_multiplier: σ for clipping norm 1 and the strategy as given; left out for a run.
      accountant: where the bounds on δ(ε) come from; one that samples is refused.
      direction: which attacks: "remove", "add" or "both" (see `TradeOff`).
      slack: up to which probability μ holds.
      deltas: the δ at which ε is reported.
      false_positive_rates: where the true-positive rate is reported.
      renyi: whether to report Rényi divergences, which exist for fixed bins whose batches are not cut, and take a while
        for correlated noise.

    Returns:
      The curve, μ, true-positive rates, ε at several δ, and Rényi divergences.

    **Formal guarantees.** Every bound on δ(ε) is a line that no attack exceeds, so the least of the lines bounds the
    true-positive rate at every false-positive rate. Φ(Φ⁻¹(α) + μ) is concave in α, so it lies above the chords between
    the corners of that curve where it does at the corners: μ holds for all α, not only those that were tried. The μ
    without amplification holds as well (fixing every random choice leaves a Gaussian mechanism, and hockey-stick
    divergences are jointly convex); the smaller one is reported. Where a run cuts its batches, every bound on δ(ε) is
    charged for that, by η where a record is removed and by e^ε·η where one is added, before it is made a line, and all
    numbers are read off these lines: the μ without amplification and Rényi divergences do not survive a cut.
    """
    uncut, sigma, cut = asked_about(mechanism, noise_multiplier)
    return Curves(uncut, accountant, direction, slack, deltas, false_positive_rates, cut).at(sigma, renyi=renyi)


class Curves:
    """Trade-off curves of a mechanism at several noise multipliers. Arguments are those of `tradeoff`."""

    def __init__(
        self,
        mechanism: Mechanism,
        accountant: str | Accountant,
        direction: str,
        slack: float,
        deltas: Sequence[float] = DELTAS,
        false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
        cut: Cut | None = None,
    ) -> None:
        self._mechanism, self._direction, self._cut = only_mechanism(mechanism), direction, cut
        self._ways = directions_of(validation.choice("direction", direction, RELATIONS))
        self._slack = validation.non_negative("slack", slack)
        self._accountant = resolve(accountant)
        self._deltas, self._rates = list(map(_delta, deltas)), list(map(_rate, false_positive_rates))
        self._prepared = Least.of(covering(self._accountant, mechanism).prepare(mechanism))
        if self._prepared.kind != "bound":
            raise ArgumentError(
                "accountant", f"must be one that gives guaranteed bounds, {self._prepared.name} does not"
            )
        self._pairs = Pairs(self._prepared) if mechanism.batching.fixed else None
        self.roughness = _TUNING.roughness if self._pairs else 1.0

    def at(self, sigma: float, *, rough: bool = False, renyi: bool = False) -> TradeOff:
        """The curve at a noise multiplier; a rough one is as sound, has fewer points, and costs less."""
        found = self._points(sigma, rough)
        lines: dict[str, Lines] = {way: _lines(found[way], found[_other(way)]) for way in self._ways}
        largest = self._mechanism.sensitivity / sigma * (1 + self._mechanism.gram_error + _ROUNDING)
        if self._cut is not None:
            largest, renyi = math.inf, False
        return TradeOff(
            noise_multiplier=sigma,
            direction=self._direction,
            accountant=self._accountant.name,
            mu=min(largest, max(_gaussian(one, self._slack) for one in lines.values())),
            slack=self._slack,
            largest_mu=largest,
            attacks={a: max(one.least(a) for one in lines.values()) for a in self._rates},
            epsilons={d: max(_epsilon(*found[way], d) for way in self._ways) for d in self._deltas},
            renyi=_divergences(self._mechanism, sigma, self._ways) if renyi else {},
            points={way: found[way] for way in DIRECTIONS},
            lines=lines,
        )

    def _points(self, sigma: float, rough: bool) -> dict[Direction, tuple[Array, Array]]:
        """ε and bounds on δ(ε), by direction, both monotone."""
        scale = min(max(_TUNING.spacing * self._mechanism.sensitivity / sigma, 1e-60), _TUNING.largest_spacing)
        interval = 2.0 ** round(math.log2(scale))
        tail = max(_TUNING.reach * self._slack, 1e-14)
        if self._pairs is not None:
            found = self._pairs.points(sigma, interval, rough=rough, tail=tail)
        else:
            profiles: dict[str, Profile] = {way: partial(_composed, self._prepared, sigma, way) for way in DIRECTIONS}
            far = max(_TUNING.composed_reach * self._slack, 1e-10)
            largest: dict[str, float] = {way: self._prepared.epsilon(sigma, far, way).value for way in DIRECTIONS}
            found = ProfilePoints(interval, profiles, largest, tail)
        found.refine(_TUNING.rough_share if rough else _TUNING.share)
        points: dict[Direction, tuple[Array, Array]] = {}
        for way in DIRECTIONS:
            places = sorted(found.values[way])
            bounds = np.array([found.values[way][place] for place in places])
            epsilons = interval * np.array(places, dtype=np.float64)
            if self._cut is not None:
                charges = [self._cut.charge(float(epsilon), way) for epsilon in epsilons]
                bounds = (bounds + np.array(charges)) * (1 + _ROUNDING)
            points[way] = epsilons, np.minimum.accumulate(np.minimum(bounds, 1.0))
        return points


def _rate(value: float) -> float:
    return validation.probability("false_positive_rates", value)


def _delta(value: float) -> float:
    return validation.probability("deltas", value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _other(way: Direction) -> Direction:
    return "add" if way == "remove" else "remove"


def _composed(prepared: Least, sigma: float, way: Direction, epsilons: Sequence[float], rough: bool) -> Sequence[float]:
    """Bounds at many ε by an accountant that gets all of them from one distribution."""
    return prepared.deltas(sigma, list(epsilons), way)


def _lines(same: tuple[Array, Array], other: tuple[Array, Array]) -> Lines:
    """Lines above the true-positive rate: of the attack's own direction, slopes e^ε ≥ 1, and of the other, e^(−ε)."""
    (steep, deltas), (flat, others) = same, other
    keep = steep < 700  # e^ε must be a number
    slopes = np.concatenate((np.exp(steep[keep])[::-1], np.exp(-flat), [0.0])) * (1 + _ROUNDING)
    intercepts = np.concatenate((deltas[keep][::-1], -np.expm1(-flat) + np.exp(-flat) * others, [1.0]))
    return Lines(slopes, intercepts * (1 + _ROUNDING))


def _gaussian(lines: Lines, slack: float) -> float:
    """The least μ whose curve, raised by the slack, lies above the least of the lines everywhere."""
    alphas, rates = lines.corners()
    wanted = np.minimum(rates - slack + 4 * UNIT, 1.0)
    matter = (wanted > 0) & (alphas < 1)  # at α = 1 every curve is 1
    with np.errstate(divide="ignore", invalid="ignore"):
        mus = ndtri(wanted[matter]) - ndtri(alphas[matter])
    return max(0.0, float(np.max(mus, initial=0.0)) * (1 + _QUANTILES) + _QUANTILES)


def _epsilon(epsilons: Array, deltas: Array, target: float) -> float:
    """The ε at which chords between points, in e^ε, fall to the target; rounded up."""
    place = int(np.searchsorted(-deltas, -target))  # the first with δ ≤ target
    if place == len(deltas):
        return math.inf
    if place == 0 or deltas[place - 1] == deltas[place]:
        return float(epsilons[place])
    share = (deltas[place - 1] - target) / (deltas[place - 1] - deltas[place])
    step = math.log1p(float(share) * math.expm1(float(epsilons[place] - epsilons[place - 1])))
    return min(float(epsilons[place]), float(epsilons[place - 1] + step) * (1 + _QUANTILES))


def _divergences(mechanism: Mechanism, sigma: float, ways: Sequence[Direction]) -> dict[int, float]:
    """Bounds on Rényi divergences at the orders that can be afforded; none but for fixed bins."""
    if not mechanism.batching.fixed:
        return {}
    curves = [Renyi().curve(mechanism, sigma, ORDERS, way) for way in ways]
    return {order: max(curve[order] for curve in curves) for order in ORDERS}
