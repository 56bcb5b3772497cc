"""Cascades: an average of rotations of trees lies above G, and bounds E f(A) where f'', f''', f'''' ≥ 0 (remove only).

A tree cuts the ring of b indices into `blocks` arcs, halves these, and so on; its covariance is the sum, over levels,
of a weight shared by all pairs in one block. Laws are weights on nodes e^(step·k), doubles, from above.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from flint import arb

from dpmf_check.balls import DENSITY, ROOT_TWO, TINY, UNIT, number, numbers, only, require, spread, tail, up
from dpmf_check.gram import Gram


class Tree:
    """Levels as size of blocks → how many there are; the grid gets coarser by a factor from each level to the next."""

    def __init__(self, given: Any, b: int) -> None:
        self.first, weights, self.step, finer = only("tree", given, "blocks", "weights", "step", "refinements")
        self.b, self.levels, parts = b, [Counter({b: 1})], number("blocks", self.first, 2, 10**6, True)
        while max(self.levels[-1]) > 1:
            self.levels.append(Counter())
            for size, count in self.levels[-2].items():
                for part in self.split(size, parts):
                    self.levels[-1][part] += count
            parts = 2
        self.weights = numbers("weights", weights, len(self.levels))
        self.finer = [number("refinement", x, 1, 2**20, True) for x in finer]
        require(number("step", self.step, 1e-6, 10.0) and len(finer) == len(weights) - 1, "refinements are missing")

    @staticmethod
    def split(size: int, parts: int) -> list[int]:
        """Sizes as equal as can be; none is empty."""
        return [q for q in (size // parts + (i < size % parts) for i in range(parts)) if q > 0]

    def lag(self, d: int) -> arb:
        """The covariance at distance d, averaged over the rotations of the ring."""
        pairs = (sum(n * (max(q - d, 0) + max(q - self.b + d, 0)) for q, n in level.items()) for level in self.levels)
        return sum((weight * each for weight, each in zip(self.weights, pairs, strict=True)), arb(0)) / self.b

    def law(self, variances: list[arb]) -> tuple[int, np.ndarray, arb]:
        """First node and weights of T = Σ a_i, and Σ E[X³; X beyond its nodes] over all factors X."""
        last, below, beyond = len(variances) - 1, {1: (0, np.ones(1))}, arb(0)
        for k in range(last, -1, -1):
            step = arb(self.step) * math.prod(self.finer[:k])
            start, factor, rest = _lognormal(variances[k], step) if variances[k] > 0 else (0, np.ones(1), arb(0))
            beyond += rest * sum(self.levels[k].values())
            ratio, found = 1 if k == last else self.finer[k], {}
            for size, (first, coarse) in below.items():
                below[size] = first * ratio, np.zeros((len(coarse) - 1) * ratio + 1)
                below[size][1][::ratio] = coarse
            for size in self.levels[k]:
                head, *others = self.split(size, 1 if k == last else 2 if k else self.first)
                first, law = below[head]
                for part in others:
                    first, law = _sum(first, law, *below[part], step)
                product = np.convolve(law, factor)
                found[size] = first + start, product * (1 + 2 * (len(product) + 8) * UNIT) + TINY
            below = found
        return *below[self.b], beyond


def _sum(first: int, own: np.ndarray, second: int, others: np.ndarray, h: arb) -> tuple[int, np.ndarray]:
    """The sum of two independent variables: e^i + e^j lies a few nodes above the larger, and is spread there."""
    n, m, ahead, begin = len(own), len(others), second - first, min(0, second - first)
    out = np.zeros(max(n, m + ahead) - begin + math.ceil(math.log(2) / float(h)) + 4)
    for apart in range(ahead - n + 1, ahead + m):  # node of the other less own node
        ratio = (-h * abs(apart)).exp()
        nodes = math.floor(math.log1p(float(ratio)) / float(h))
        nodes += not 1 + ratio <= (h * (nodes + 1)).exp()  # never too few: payoffs increase
        share = (1 + ratio - (h * nodes).exp()) / ((h * (nodes + 1)).exp() - (h * nodes).exp())
        low, high, place = max(0, ahead - apart), min(n, m + ahead - apart), nodes - begin + max(apart, 0)
        product = own[low:high] * others[low + apart - ahead : high + apart - ahead]
        out[place + low : place + high] += product * up(1 - share)
        out[place + low + 1 : place + high + 1] += product * up(share)
    return first + begin, out * (1 + 8 * (n + m + 8) * UNIT) + TINY


def _lognormal(variance: arb, step: arb) -> tuple[int, np.ndarray, arb]:
    """X = e^(rz − r²/2), r² = variance: first node, weights (what is at 0 moved up to the first), E[X³; X beyond]."""
    root, r, h = variance.sqrt(), up(variance.sqrt()), float(step)
    low, high = min(-1, math.floor((-9 * r - r * r / 2) / h)), max(1, math.ceil((13 + 3 * r) * r / h))
    weights, zero, _ = spread([step * k for k in range(low, high + 1)], -variance / 2, root, arb(1))
    rest = (3 * variance).exp() * tail((step * high + variance / 2) / root - 3 * root)
    return low, np.array([weights[0] + zero * (1 + 4 * UNIT), *weights[1:]]), rest


def cascade(proof: Any, gram: Gram, sigma: arb, epsilon: arb, remove: bool) -> arb:
    """δ(ε) ≤ E g(A), averaged over the trees, for a payoff g above the call, 0 ≤ g(a) ≤ Σ p_j·a^j, j ≤ 3."""
    given, payoff = only("proof", proof, "trees", "payoff")
    trees, total, smoothed = [Tree(tree, gram.b) for tree in given], arb(0), payoff["kind"] == "smoothed"
    for d in range(gram.b // 2 + 1):
        average = sum((tree.lag(d) for tree in trees), arb(0)) / len(trees)
        require(gram.ring[d] <= average, f"domination fails at distance {d}")
    shared = trees[0].weights[0]
    alike = all(tree.weights[0] == shared for tree in trees) or not smoothed
    require(remove and alike, "a cascade is for remove only, and a smoothed one needs trees that share one factor")
    value, powers = _smoothed(payoff, epsilon.exp(), shared / sigma**2) if smoothed else _cubic(payoff, epsilon.exp())
    for tree in trees:
        variances = [w / sigma**2 if k > 0 or not smoothed else arb(0) for k, w in enumerate(tree.weights)]
        first, law, beyond = tree.law(variances)
        places = ((arb(tree.step) * (first + k)).exp() / gram.b for k in range(len(law)))
        total += sum((w * value(a) for w, a in zip(law.tolist(), places, strict=True)), arb(0))
        total += beyond * powers * (3 * sum(variances, arb(0))).exp()  # at least E[g(A); some factor beyond its nodes]
    return total / len(trees)


def _cubic(payoff: Any, gamma: arb) -> tuple[Callable[[arb], arb], arb]:
    """4/27·(γ − κ)⁻²·((a − κ)_+)³ ≥ (a − γ)_+, and the sum of the coefficients of a polynomial above it."""
    kind, threshold = only("payoff", payoff, "kind", "threshold")
    kappa = arb(number("threshold", threshold, -1e100))
    require(kind == "cubic" and kappa < gamma, "the payoff is unknown, or its threshold too large")
    factor = 4 / (27 * (gamma - kappa) ** 2)
    return lambda a: factor * (a - kappa).nonnegative_part() ** 3, factor * (1 + abs(kappa)) ** 3


def _smoothed(payoff: Any, gamma: arb, variance: arb) -> tuple[Callable[[arb], arb], arb]:
    """f(a) = E(Xa − γ)_+ up to `start`, beyond it f's Taylor polynomial of degree 2 there plus `cubic`·t³; Σ p_j."""
    _, start, cubic = only("payoff", payoff, "kind", "start", "cubic")
    begin, c, root = arb(number("start", start, 1e-100)), arb(number("cubic", cubic)), variance.sqrt()

    def call(a: arb) -> tuple[arb, arb, arb, arb]:
        """f and its first, second and third derivative."""
        d = (a / gamma).log() / root + root / 2
        first, second = (-d / ROOT_TWO).erfc() / 2, (-d * d / 2).exp() * DENSITY / (a * root)
        return a * first - gamma * ((root - d) / ROOT_TWO).erfc() / 2, first, second, -second / a * (1 + d / root)

    def polynomial(t: arb) -> arb:
        return base + t * (first + t * (second / 2 + t * c))

    base, first, second, third = call(begin)
    inflection, t = gamma * (-variance * (4 + (1 + 4 / variance).sqrt()) / 2).exp(), arb(((gamma - begin) / 1000).mid())
    complaint = "the cubic part of the payoff is too small, or starts too late"
    require(begin <= inflection and 6 * c >= third.max(call((begin + t).min(inflection))[3]), complaint)
    while t < 60 * gamma:  # in every cell f is below its chord, and the polynomial above its tangent at the left end
        slope, following = first + t * (second + 3 * c * t), arb((t * 1.001).mid())
        require(polynomial(t) >= call(begin + t)[0], complaint)
        require(polynomial(t) + slope * (following - t) >= call(begin + following)[0], complaint)
        t = following
    require(c * t**3 >= begin + t, complaint)  # f(a) ≤ a, and a/t³ falls
    return lambda a: call(a)[0] if a <= begin else polynomial(a - begin).max(call(a)[0]), first + second / 2 + c
