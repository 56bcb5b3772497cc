"""Conditional composition repeated in ball arithmetic: the bound in double precision is never below the exact one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import balls
import numpy as np
import oracles
import pytest
from flint import arb, arb_poly, ctx
from scipy.special import ndtri

from dpmf.accountants.conditional._reverse_hazard import Family, ReverseHazards
from dpmf.batching import BallsInBins
from dpmf.kernels.pld import Lattice, loss_nodes
from dpmf.loss._window import TUNING, choose_window
from dpmf.loss.distribution import compose
from dpmf.mechanism import Mechanism
from dpmf.strategies import bsr, coefficients, dpsgd

DIRECTIONS = ("remove", "add")
TEMPERATURE = 2.0
BITS = 160
COARSE = replace(TUNING, interval=0.05, growth=0.0)

Ball = arb
Step = tuple[list[Ball], list[Ball]]


@pytest.fixture(autouse=True)
def _precision():
    before, ctx.prec = ctx.prec, BITS
    yield
    ctx.prec = before


# --- the tail bounds, in balls -------------------------------------------------------------------------------------


def dot(u: Sequence[Ball], v: Sequence[Ball]) -> Ball:
    return sum((x * y for x, y in zip(u, v, strict=True)), arb(0))


def normal_terms(own, others, centre, sigma: Ball) -> list[tuple[Ball, Ball]]:
    """ν and ξ for the uniform ψ and for a softmax of the distances from `own`."""
    size, found = len(others), []
    distances = [dot(d, d) for d in ([x - y for x, y in zip(other, own, strict=True)] for other in others)]
    raw = [[arb(1)] * size, [(-d / arb(TEMPERATURE)).exp() for d in distances]]
    for weights in raw:
        total = sum(weights, arb(0))
        psi = [w / total for w in weights]
        mean = [sum((p * other[t] for p, other in zip(psi, others, strict=True)), arb(0)) for t in range(len(own))]
        slope = [x - y for x, y in zip(mean, own, strict=True)]
        half = (dot(own, own) - sum((p * dot(o, o) for p, o in zip(psi, others, strict=True)), arb(0))) / 2
        divergence = sum((p * (p * size).log() for p in psi), arb(0))
        found.append(((dot(centre, slope) + half) / sigma**2 - divergence, dot(slope, slope).sqrt() / sigma))
    return found


def threshold(terms: list[list[tuple[Ball, Ball]]], level: Ball) -> Ball:
    """About the largest τ with mean_k min_ψ Φ((τ − ν)/ξ) ≤ level; the bound holds at the one returned."""

    def within(tau: Ball) -> bool:
        total = arb(0)
        for family in terms:
            total += min((balls.upper_tail((nu - tau) / xi) for nu, xi in family), key=lambda v: float(v.mid()))
        return bool(total / len(terms) <= level)

    low, high = arb(-1), arb(1)
    while not within(low):
        low = low * 2
    while within(high) and high < 600:
        high = high * 2
    for _ in range(90):
        middle = ((low + high) / 2).mid()
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def ball_steps(means: list[list[Ball]], sigma: Ball, bad_event: Ball, direction: str) -> list[Step]:
    """Means and weights of the dominating mixture of each step; `means` has a row per step."""
    b, plans = len(means[0]), []
    for n, row in enumerate(means):
        order = sorted(range(b), key=lambda j, row=row: float(row[j].mid()))
        prefix = [[means[t][j] for t in range(n)] for j in order]
        values = [row[j] for j in order]
        entries = {}
        for i in range(b):
            if float(values[i].mid()) > float(values[0].mid()):
                others = [j for j in range(i) if any(bool(x != y) for x, y in zip(prefix[j], prefix[i], strict=True))]
                entries[i] = (i - len(others), others)
        plans.append((values, prefix, entries))
    live_steps = sum(any(others for _, others in entries.values()) for _, _, entries in plans)
    found = []
    for values, prefix, entries in plans:
        live = sum(bool(others) for _, others in entries.values())
        weights, remaining = [arb(0)] * b, arb(1)
        for i in sorted(entries, reverse=True):
            same, others = entries[i]
            rest = arb(1 + same)
            if others:
                centres = prefix if direction == "remove" else [[arb(0)] * len(prefix[0])]
                terms = [normal_terms(prefix[i], [prefix[j] for j in others], c, sigma) for c in centres]
                rest += len(others) * threshold(terms, bad_event / live_steps / live).exp()
            weights[i] = remaining / rest
            remaining -= weights[i]
        weights[0] += remaining
        kept = [(m / sigma, w) for m, w in zip(values, weights, strict=True) if not w.is_zero()]
        found.append(([m for m, _ in kept], [w for _, w in kept]))
    return found


# --- connecting the dots and composing, in balls -------------------------------------------------------------------


def root(step: Step, target: Ball) -> Ball | None:
    """The x at which the loss log Σ w e^(mx − m²/2) is the target; None where it stays above."""
    means, weights = step
    at_zero = sum((w for m, w in zip(means, weights, strict=True) if m.is_zero()), arb(0))
    if at_zero.log() >= target if not at_zero.is_zero() else False:
        return None

    def loss(x: Ball) -> tuple[Ball, Ball]:
        terms = [w * (m * x - m * m / 2).exp() for m, w in zip(means, weights, strict=True)]
        total = sum(terms, arb(0))
        return total.log(), dot(terms, means) / total

    single = [
        (target - w.log()) / m + m / 2 for m, w in zip(means, weights, strict=True) if not m.is_zero()
    ]  # each component alone bounds the root from the right
    x = min(single, key=lambda v: float(v.mid())).mid()
    for _ in range(400):
        value, slope = loss(x)
        step_size = ((value - target) / slope).mid()
        x = (x - step_size).mid()
        if abs(float(step_size)) < 1e-25:
            break
    return x


def ball_pmf(step: Step, nodes: Sequence[int], h: Ball, direction: str) -> tuple[dict[int, Ball], Ball]:
    """Masses on the lattice and at infinity, with exact P- and Q-measures of all cells."""
    means, weights = step
    total = sum(weights, arb(0))
    first, second = [], []
    for node in nodes:
        x = root(step, h * node if direction == "remove" else -h * node)
        if direction == "remove":
            p = (
                total
                if x is None
                else sum((w * balls.upper_tail(x - m) for m, w in zip(means, weights, strict=True)), arb(0))
            )
            first.append(p)
            second.append(arb(1) if x is None else balls.upper_tail(x))
        else:
            p = (
                arb(0)
                if x is None
                else sum((w * balls.upper_tail(m - x) for m, w in zip(means, weights, strict=True)), arb(0))
            )
            first.append(arb(0) if x is None else balls.upper_tail(-x))
            second.append(p)
    masses = dict.fromkeys(nodes, arb(0))
    masses[nodes[0]] += (total if direction == "remove" else arb(1)) - first[0]
    for k in range(len(nodes) - 1):
        p, q = first[k] - first[k + 1], second[k] - second[k + 1]
        up = (p - (h * nodes[k]).exp() * q) / (1 - (h * (nodes[k] - nodes[k + 1])).exp())
        masses[nodes[k + 1]] += up
        masses[nodes[k]] += p - up
    return masses, first[-1]


def ball_delta(pmfs: list[tuple[dict[int, Ball], Ball]], h: Ball, epsilon: Ball) -> Ball:
    product, lowest, finite = arb_poly([1]), 0, arb(1)
    for masses, infinity in pmfs:
        start = min(masses)
        product *= arb_poly([masses.get(start + k, arb(0)) for k in range(max(masses) - start + 1)])
        lowest += start
        finite *= 1 - infinity
    value = 1 - finite
    for k in range(product.degree() + 1):
        loss = h * (lowest + k)
        if loss > epsilon:
            value += product[k] * (1 - (epsilon - loss).exp())
    return value


# --- the comparison ------------------------------------------------------------------------------------------------

MECHANISMS = {
    "bsr2": Mechanism(bsr(2), BallsInBins(1, 3)),
    "one live step": Mechanism(dpsgd(), BallsInBins(1, 2)),
    "two epochs": Mechanism(coefficients([1.0, 0.7, 0.1]), BallsInBins(2, 2)),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(
    ("sigma", "epsilon", "bad_event"), [(0.7, 0.5, 0.9), (1.5, 1.0, 1e-3), (1.5, 4.0, 1e-8), (1.0, 10.0, 5e-15)]
)
def test_above_the_same_computation_in_balls(
    name: str, direction: str, sigma: float, epsilon: float, bad_event: float
) -> None:
    mechanism = MECHANISMS[name]
    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    table = [[Fraction(0)] * b for _ in range(n)]
    matrix = np.abs(mechanism.strategy.matrix(n))
    for t in range(n):
        for column in range(n):
            table[t][column % b] += Fraction(float(matrix[t, column]))
    means = [[balls.exact(value) for value in row] for row in table]
    steps = ball_steps(means, balls.exact(sigma), balls.exact(bad_event), direction)

    hazards = ReverseHazards(mechanism, direction, Family(True, (TEMPERATURE,), False))
    mixtures = hazards.mixtures(sigma, bad_event)
    floor = 1e-3 * bad_event
    found = compose(mixtures, sigma, direction, epsilon=epsilon, floor=floor, tuning=COARSE).delta(epsilon)

    # The same lattice for every step: the exact computation has no cuts, so it may only be smaller.
    window = choose_window(mixtures.simplified(), sigma, direction == "add", epsilon, None, floor, COARSE)
    lattice = Lattice(window.interval, 0.0, window.widest, window.tail, -float(ndtri(window.tail)), COARSE.low_reach)
    pmfs = []
    for step in steps:
        m, w = (np.array([float(v.mid()) for v in part]) for part in step)
        nodes = loss_nodes(m, w, np.log(w), direction == "add", lattice)
        pmfs.append(ball_pmf(step, [int(k) for k in nodes], balls.exact(window.interval), direction))
    exact = ball_delta(pmfs, balls.exact(window.interval), balls.exact(epsilon))
    assert exact.rel_accuracy_bits() > 40
    assert balls.exact(found) >= exact.upper()
    if bad_event < 0.5:  # levels of tail bounds are cut to one half
        assert found <= float(exact.mid()) * 1.02 + floor
    # Together with the bad event, an upper bound on the truth.
    assert found + bad_event >= oracles.delta(mechanism.gram / sigma**2, epsilon, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["bsr2", "one live step"])
def test_upper_tails_of_the_weights_are_not_below_the_exact_ones(name: str, direction: str) -> None:
    """Also for a bad event above one half, where quantiles are positive and a spread rounded up raises a threshold."""
    mechanism = MECHANISMS[name]
    n, b = mechanism.batching.iterations, mechanism.batching.batches_per_epoch
    means = [[balls.exact(float(v)) for v in row] for row in oracles.mixture_means(mechanism.strategy.matrix(n), b)]
    for bad_event in (1e-12, 1e-3, 0.999):
        exact = ball_steps(means, balls.exact(0.9), balls.exact(bad_event), direction)
        hazards = ReverseHazards(mechanism, direction, Family(True, (TEMPERATURE,), False))
        for (_, weights), (_, found) in zip(exact, hazards.steps(0.9, bad_event), strict=True):
            assert len(weights) == len(found)
            for k in range(1, len(weights)):
                tail = math.fsum(found[k:])
                assert balls.exact(tail) * balls.exact(1 + 1e-15) >= sum(weights[k:], arb(0)).upper()
