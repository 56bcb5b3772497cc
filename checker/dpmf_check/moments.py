"""Moments: given z, the mean of the exponents u_i in its own deviations, A has known moments and a known least value.

With S = G/σ², v the mean of all its entries, λ_i the mean of row i over √v, C = S − λλᵀ and f = e^C − 1,
A = Σ α_i·ξ_i given z, α_i = e^(λ_i·z − λ_i²/2)/b, E Πξ = Π(1 + f). Moments of x = A/Σα − 1 are sums of products of f
over graphs, and a polynomial above an option has an expectation above it. docs/certificates.md has the proofs.
"""

from typing import Any

import numpy as np
from flint import arb, arb_poly

from dpmf_check.balls import UNIT, grid, number, numbers, only, require, spread, tail, up
from dpmf_check.gram import Gram

_LEAST = 1e-30  # sums are of products of at most four weights and six of f, none of them smaller: none underflows


class GivenMean:
    """The law of A given z: loads, and f in doubles; `sizes` + a relative rounding error is at least |f|."""

    def __init__(self, gram: Gram, sigma: arb) -> None:
        self.b = b = gram.b
        rows, f = [arb(0)] * b, np.zeros((b, b))
        for i in range(b):
            for j in range(i, b):
                rows[i] += gram.full[i][j]
                rows[j] += gram.full[i][j] if j > i else 0
        rows = [row / (b * sigma**2) for row in rows]
        self.root = (sum(rows, arb(0)) / b).sqrt()
        self.loads = [row / self.root for row in rows]
        self.half = sum(gram.diagonal, arb(0)) / (2 * b * sigma**2)
        for i in range(b):
            for j in range(i, b):
                value = (gram.full[i][j] / sigma**2 - self.loads[i] * self.loads[j]).expm1()
                require(value.rad() < 1e-46 and abs(value) < 1e6, "the noise is too small for moments")
                f[i, j] = f[j, i] = float(value.mid())
        self.f, self.sizes = f, np.abs(f) + _LEAST
        self.error = 2 * (8 * b + 128) * UNIT  # more than twice the roundings on the way to a sum over graphs

    def terms(self, z: float) -> list[arb]:
        """The terms α, whose sum is E[A | z]."""
        return [(load * z - load * load / 2).exp() / self.b for load in self.loads]

    def at(self, z: float) -> tuple[arb, arb, list[arb]]:
        """E[A | z], the least x (by arithmetic and geometric means), E x² and E x³, and a bound on E x⁴."""
        terms = self.terms(z)
        mean = sum(terms, arb(0))
        weights = np.array([float((term / mean).mid()) for term in terms])
        require(weights.min() > 1e3 * _LEAST, "a node is too far out")
        sums = zip(_graphs(self.f, weights), _graphs(self.sizes, weights), strict=True)
        moments = [arb(value, self.error * size) for value, size in sums]
        moments[2] += _complete(self.sizes, weights) * (1 + self.error)
        return mean, (self.root * z - self.half).exp() / mean - 1, moments


def _graphs(f: np.ndarray, w: np.ndarray) -> list[float]:
    """Sums over graphs without isolated vertices on two, three and four vertices, without the complete one of four."""
    near, pairs = f @ w, (f * w) @ f
    loaded, corners, squares = w * near, w * ((f * pairs) @ w), pairs * pairs
    edge, path, star = w @ near, loaded @ (f @ loaded), loaded @ (near * near)
    cycle, diamond = w @ (squares @ w), w @ ((f * squares) @ w)
    four = 3 * edge * edge + 12 * path + 4 * star + 3 * cycle + 12 * (corners @ near) + 6 * diamond
    return [float(edge), float(3 * (loaded @ near) + corners.sum()), float(four)]


def _complete(f: np.ndarray, w: np.ndarray) -> float:
    """At least Σ w_a·w_c·f_ac·gᵀfg with g_k = w_k·f_ak·f_kc, as gᵀfg ≤ max f·(Σg)², and gᵀfg ≤ max(fw)·Σ g²/w."""
    pairs, squares = (f * w) @ f, f * f
    plain, radius = w @ ((f * pairs * pairs) @ w), w @ ((f * ((squares * w) @ squares)) @ w)
    return float(min(f.max() * plain, (f @ w).max() * radius))


def _curvature(first: arb, second: arb, room: arb) -> arb:
    """A γ ≥ 0, the least but for rounding, with first + second·u + γu² ≥ 0 for all u ≥ −room, for first > 0."""
    if second > 0 and second * room <= first:
        return arb(0)
    if second > 0 and second * room <= 2 * first:  # it is 0 at −room, and increases from there on
        return ((second * room - first) / (room * room)).nonnegative_part()
    return second * second / (4 * first)


def _put(polynomial: Any, strike: arb, lowest: arb, moments: list[arb]) -> arb:
    """E of a polynomial that is at least (strike − x)_+ for x ≥ lowest."""
    if polynomial == {"zeros": []}:
        require(strike <= lowest, "a polynomial is missing")
        return arb(0)
    kind = "zeros" if isinstance(polynomial, dict) and "zeros" in polynomial else "contacts"
    left, right = numbers(kind, only("a polynomial", polynomial, kind)[0], 2, -1e100)
    if kind == "zeros":  # γ(x − left)²(x − right)², equal to the put at `lowest` and above it right after
        room, one, two = strike - lowest, left - lowest, right - lowest
        above = room > 0 and left > strike and right > strike and 2 * room * (1 / one + 1 / two) <= 1
        first, second, third = arb(0), arb(0), room / (one * two) ** 2
    else:  # (x − right)²(first + second·(x − left) + γ(x − left)²), which touches strike − x at left and 0 at right
        below, beyond, d, above = strike - left, right - strike, right - left, left < strike < right
        require(above, "the contacts of a polynomial are not on both sides of the strike")
        first, second = below / d**2, (below - beyond) / d**3
        third = _curvature(first, second, left - lowest).max(_curvature(beyond / d**2, second, right - lowest))
    require(above, "a polynomial is not above the option")
    u = arb_poly([-left, 1])
    p = arb_poly([-right, 1]) ** 2 * (first + second * u + third * u * u)
    return p[0] + p[2] * moments[0] + p[3] * moments[1] + third * moments[2]


def moments(proof: Any, gram: Gram, sigma: arb, epsilon: arb, remove: bool) -> arb:
    """δ(ε) ≤ Σ weight·(a bound on the option given z): z is spread onto nodes, asked from where the payoff is large."""
    given, deep, polynomials = only("proof", proof, "nodes", "deep", "polynomials")
    (low, step, count), law = grid(given), GivenMean(gram, sigma)
    require(isinstance(polynomials, list) and 0 < len(polynomials) < count, "there are too many polynomials, or none")
    first, sign = number("deep", deep, 0, count - len(polynomials), True), 1 if remove else -1
    nodes, strike = [low + step * k for k in range(count)], (sign * epsilon).exp()
    # The option is convex and increasing in z, or convex and decreasing in e^(κz), κ at least the largest load.
    weights, lost, _ = spread(nodes, arb(0), arb(1), arb(0 if remove else max(map(up, law.loads))))
    beyond = sum((tail(nodes[-1] - load) for load in law.loads), arb(0)) / gram.b  # E[A; z > last]
    total, inward, value = beyond if remove else lost * strike, list(zip(weights, nodes, strict=True))[::-sign], arb(0)
    for k, polynomial in enumerate(polynomials):
        weight, z = inward[first + k]
        mean, lowest, known = law.at(z)
        place = strike / mean - 1
        put = mean * _put(polynomial, place, lowest, known)
        call = put - mean * place
        value, other = (call, put) if remove else (put, call)
        total += weight * value
        if k == 0:  # before: forwards and this node's bound on the other option, which is worth less there
            for heavy, far in inward[:first]:
                total += heavy * (sign * (sum(law.terms(far), arb(0)) - strike) + other)
    total += sum((weight for weight, _ in inward[first + len(polynomials) :]), arb(0)) * value
    return total if remove else total * epsilon.exp()
