"""Slow, obviously right twins of what the package computes, shared by all test files.

Nothing in here imports the package: means and Gram matrices come from the definition, moments from enumeration in exact
or 50-digit arithmetic, privacy profiles of a few bins from quadrature. S is always G/σ², b × b and non-negative.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
from scipy.special import ndtr

PRECISE = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN)

# --- the dominating pair -----------------------------------------------------------------------------------------


def toeplitz(coefficients: object, n: int) -> np.ndarray:
    """The n × n lower-triangular Toeplitz matrix with this first column (zeros after it)."""
    column = list(np.asarray(coefficients, dtype=float))[:n]
    matrix = np.zeros((n, n))
    for lag, value in enumerate(column):
        for j in range(n - lag):
            matrix[j + lag, j] = value
    return matrix


def square_root_coefficients(n: int, power: float) -> np.ndarray:
    """The first n coefficients of (1 − x)^power, from the generalised binomial theorem."""
    out = [1.0]
    for j in range(1, n):
        out.append(out[-1] * (j - 1 - power) / j)
    return np.array(out)


def bsr_matrix(p: int, n: int) -> np.ndarray:
    return toeplitz(square_root_coefficients(min(p, n), -0.5), n)


def bisr_matrix(p: int, n: int) -> np.ndarray:
    return np.linalg.inv(toeplitz(square_root_coefficients(min(p, n), 0.5), n))


def mixture_means(matrix: np.ndarray, b: int) -> np.ndarray:
    """N × b; column i is Σ_j |C|[:, i + jb], over all i + jb < N: a cut-off last epoch just has fewer terms."""
    n = len(matrix)
    means = np.zeros((n, b))
    for i in range(b):
        for column in range(i, n, b):
            means[:, i] += np.abs(matrix[:, column])
    return means


def gram(matrix: np.ndarray, b: int) -> np.ndarray:
    means = mixture_means(matrix, b)
    return np.array([[math.fsum(means[:, i] * means[:, j]) for j in range(b)] for i in range(b)])


def exact_gram(matrix: np.ndarray, b: int) -> list[list[Fraction]]:
    """The Gram matrix of the doubles in C, in rational arithmetic."""
    n = len(matrix)
    rows = [[Fraction(float(abs(x))) for x in row] for row in matrix]
    means = [[sum((row[c] for c in range(i, n, b)), Fraction(0)) for row in rows] for i in range(b)]
    return [[sum((x * y for x, y in zip(u, v, strict=True)), Fraction(0)) for v in means] for u in means]


def rational(matrix: np.ndarray) -> list[list[Fraction]]:
    return [[Fraction(float(x)) for x in row] for row in matrix]


def cyclic_distance(i: int, j: int, b: int) -> int:
    return min((i - j) % b, (j - i) % b)


def truncated(matrix: np.ndarray, p: int) -> tuple[np.ndarray, float]:
    """(G^(p), τ): τ is the largest entry at cyclic distance ≥ p, G^(p) = max(G − τ, 0) inside and 0 outside."""
    b = len(matrix)
    outside = [matrix[i, j] for i in range(b) for j in range(b) if cyclic_distance(i, j, b) >= p]
    tau = max(outside, default=0.0)
    inside = np.zeros((b, b))
    for i in range(b):
        for j in range(b):
            if cyclic_distance(i, j, b) < p:
                inside[i, j] = max(matrix[i, j] - tau, 0.0)
    return inside, tau


# --- moments -----------------------------------------------------------------------------------------------------


def _counts(total: int, length: int) -> Iterator[tuple[int, ...]]:
    if length == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _counts(total - first, length - 1):
            yield (first, *rest)


def _decimal(x: Fraction) -> Decimal:
    return Decimal(x.numerator) / Decimal(x.denominator)


def log_moment(gram_matrix: list[list[Fraction]], sigma: float, order: int) -> Decimal:
    """log E_Q[A^order] by enumeration of all multisets of indices, to 50 digits."""
    b = len(gram_matrix)
    variance = Fraction(sigma) ** 2
    with localcontext(PRECISE):
        s = [[_decimal(entry / variance) for entry in row] for row in gram_matrix]
        total = Decimal(0)
        for counts in _counts(order, b):
            exponent = Decimal(0)
            ways = math.factorial(order)
            for i, r in enumerate(counts):
                ways //= math.factorial(r)
                exponent += s[i][i] * r * (r - 1) / 2
                for j in range(i):
                    exponent += s[i][j] * (r * counts[j])
            total += ways * exponent.exp()
        return (total / Decimal(b) ** order).ln()


def log_moment_by_tuples(s: np.ndarray, order: int) -> float:
    """The same as the paper writes it: a sum over all b^order tuples of indices, in doubles."""
    b = len(s)
    exponents = []
    for indices in itertools.product(range(b), repeat=order):
        pairs = (s[x, y] for k, x in enumerate(indices) for y in indices[:k])
        exponents.append(math.fsum(pairs))
    top = max(exponents)
    return top + math.log(math.fsum(math.exp(e - top) for e in exponents)) - order * math.log(b)


def renyi_divergence(gram_matrix: list[list[Fraction]], sigma: float, order: int) -> float:
    """R_order(P‖Q)."""
    return float(log_moment(gram_matrix, sigma, order)) / (order - 1)


def log_moments_of_equal_independent(entry: float, b: int, order: int) -> list[float]:
    """log E_Q[A^m], m = 0..order, for S = entry·I, b + 1 ≥ order, to 50 digits: the b-th power of one series."""
    assert b + 1 >= order
    with localcontext(PRECISE):
        s = Decimal(entry)
        factorial = [Decimal(math.factorial(t)) for t in range(order + 1)]
        series = [(s * t * (t - 1) / 2).exp() / factorial[t] for t in range(order + 1)]
        power = [Decimal(1)]
        for m in range(1, order + 1):
            # From f·(f^b)' = b·f'·f^b; (b+1)k ≥ m keeps every term non-negative.
            terms = (((b + 1) * k - m) * series[k] * power[m - k] for k in range(1, m + 1))
            power.append(sum(terms, Decimal(0)) / m)
        return [float((power[m] * factorial[m]).ln() - m * Decimal(b).ln()) for m in range(order + 1)]


def log_moments_banded(s: np.ndarray, p: int, order: int) -> np.ndarray:
    """log E_Q[A^m], m = 0..order, for a cyclically p-banded S (2 ≤ p ≤ ⌊b/2⌋ + 1), in logarithms throughout.

    For every choice of the first p − 1 counts, one index after the other; the state is (last p − 1 counts, total).
    """
    b = len(s)
    log_factorial = np.array([math.lgamma(t + 1.0) for t in range(order + 1)])
    result = np.full(order + 1, -np.inf)
    wraps = any(s[i, j] != 0 for i in range(b) for j in range(b) if abs(i - j) >= p)
    prefixes = list(itertools.product(range(order + 1), repeat=p - 1)) if wraps else [None]
    for prefix in prefixes:
        first = 0
        start = np.full((order + 1,) * p, -np.inf)
        if prefix is None:
            start[(0,) * p] = 0.0
        else:
            if sum(prefix) > order:
                continue
            first = p - 1
            weight = sum(
                s[i, i] * r * (r - 1) / 2 + sum(s[i, j] * r * prefix[j] for j in range(i)) - log_factorial[r]
                for i, r in enumerate(prefix)
            )
            start[(0,) * (p - 1) + (sum(prefix),)] = weight
        states = start  # axes: counts of k−p+1, …, k−1, then the total
        for k in range(first, b):
            new = np.full_like(states, -np.inf)
            for t in range(order + 1):
                change = s[k, k] * t * (t - 1) / 2 - log_factorial[t]
                if prefix is not None:
                    change += sum(s[k, j] * t * r for j, r in enumerate(prefix))
                shifted = states[..., : order + 1 - t] + change
                for distance in range(1, p):
                    if k - distance >= first:
                        shape = [1] * p
                        shape[p - 1 - distance] = order + 1
                        shifted = shifted + (s[k, k - distance] * t * np.arange(order + 1)).reshape(shape)
                top = np.maximum(shifted.max(axis=0), -1e300)  # the oldest count is summed over
                with np.errstate(divide="ignore"):
                    summed = top + np.log(np.exp(shifted - top).sum(axis=0))
                new[..., t, t:] = summed
            states = new
        flat = states.reshape(-1, order + 1)
        for m in range(order + 1):
            result[m] = np.logaddexp(result[m], np.logaddexp.reduce(flat[:, m]))
    return result + log_factorial - np.arange(order + 1) * math.log(b)


# --- privacy profiles ----------------------------------------------------------------------------------------------


def conversion(divergence: float, order: float, epsilon: float) -> float:
    """δ from R_order ≤ divergence (Canonne, Kamath & Steinke 2020, Prop. 12), as printed there."""
    return math.exp(min((order - 1) * (divergence - epsilon), 700.0)) / (order - 1) * (1 - 1 / order) ** order


def gaussian_delta(s: float, epsilon: float) -> float:
    """δ(ε) of the Gaussian mechanism, s = (sensitivity/σ)²: the same in both directions."""
    if s == 0:
        return max(0.0, 1 - math.exp(epsilon))
    root = math.sqrt(s)
    upper, lower = ndtr(root / 2 - epsilon / root), ndtr(-root / 2 - epsilon / root)
    return float(upper - math.exp(epsilon) * lower)


def delta(s: np.ndarray, epsilon: float, direction: str, tolerance: float = 1e-6) -> float:
    """δ(ε) of the dominating pair for b ≤ 3, any rank, to about 1e-9 relative for δ ≥ 1e-12.

    u ~ N(0, S) is split into d·z + V·y, z and y independent standard normals, d ∝ S·1 ≥ 0. Given y, A increases in z,
    so that {A > threshold} is {z > z*(y)} and the inner integral is a normal distribution function:

        remove  ∫ 1/b Σ_i φ(y − V_i)·Φ(d_i − z*) − γ·φ(y)·Φ(−z*) dy,     V_i = row i of V, A(z*) = γ
        add     ∫ φ(y)·Φ(z*) − γ/b Σ_i φ(y − V_i)·Φ(z* − d_i) dy,        A(z*) = 1/γ

    The outer integrand is analytic and decays like a Gaussian: the trapezoidal rule converges exponentially. The step
    is halved until the rule agrees with the one of twice the step to `tolerance`; the error left is about its square.

    What was computed is remembered: tests that change one knob after the other ask for the same truth each time.
    """
    s = np.ascontiguousarray(s, dtype=float)
    return _delta(s.tobytes(), len(s), epsilon, direction, tolerance)


@functools.lru_cache(maxsize=4096)
def _delta(entries: bytes, b: int, epsilon: float, direction: str, tolerance: float) -> float:
    s = np.frombuffer(entries).reshape(b, b)
    total = s.sum()
    if total == 0:
        return max(0.0, 1 - math.exp(epsilon))
    d = s.sum(axis=1) / math.sqrt(total)
    values, vectors = np.linalg.eigh(s - np.outer(d, d))
    keep = values > 1e-13 * np.trace(s)
    v = vectors[:, keep] * np.sqrt(values[keep])
    sign = 1.0 if direction == "remove" else -1.0
    target = math.log(b) + sign * epsilon
    step = 0.5 / max(1.0, float(np.abs(v).max(initial=0.0)))
    previous = math.nan
    while True:
        axes = [
            np.arange(math.floor((min(c.min(), 0) - 10) / step), math.ceil((max(c.max(), 0) + 10) / step) + 1) * step
            for c in v.T
        ]
        result = _profile_sum(s, d, v, axes, target, math.exp(epsilon), sign) * step ** v.shape[1]
        if v.shape[1] == 0 or abs(result - previous) <= tolerance * abs(result) + 1e-22:
            return min(1.0, max(0.0, result))
        previous, step = result, step / 2
        if math.prod(len(a) for a in axes) > 2e7:
            raise ArithmeticError(f"quadrature does not converge for S = {s.tolist()}, ε = {epsilon}")


def _profile_sum(s, d, v, axes, target, gamma, sign) -> float:
    """Σ over the grid of the outer integrand, in blocks along the first axis."""
    blocks = np.array_split(axes[0], max(1, math.prod(len(a) for a in axes) // 200_000)) if axes else [None]
    total = 0.0
    for block in blocks:
        grid = (
            np.stack(np.meshgrid(block, *axes[1:], indexing="ij"), axis=-1).reshape(-1, len(axes))
            if axes
            else (np.zeros((1, 0)))
        )
        z = _threshold(grid @ v.T - np.diag(s) / 2, d, target)
        density = np.exp(-0.5 * (grid**2).sum(axis=1)) / (2 * math.pi) ** (len(axes) / 2)
        own = density * ndtr(-sign * z)
        mixed = np.zeros_like(own)
        for i in range(len(s)):
            shifted = np.exp(-0.5 * ((grid - v[i]) ** 2).sum(axis=1)) / (2 * math.pi) ** (len(axes) / 2)
            mixed += shifted * ndtr(sign * (d[i] - z)) / len(s)
        values = mixed - gamma * own if sign > 0 else own - gamma * mixed
        total += float(values.sum())
    return total


def _threshold(offset: np.ndarray, d: np.ndarray, target: float) -> np.ndarray:
    """The z with log Σ_i exp(offset_i + d_i z) = target, by Newton's method from the right (convex and increasing)."""
    moving = d > 0
    fixed = np.logaddexp.reduce(offset[:, ~moving], axis=1) if (~moving).any() else np.full(len(offset), -np.inf)
    z = np.min((target - offset[:, moving]) / d[moving], axis=1)
    for _ in range(200):
        terms = offset + d * z[:, None]
        top = terms.max(axis=1)
        weights = np.exp(terms - top[:, None])
        norm = weights.sum(axis=1)
        excess = top + np.log(norm) - target
        change = np.where(fixed < target, excess * norm / (weights @ d), 0.0)
        z = z - change
        if np.all(np.abs(change) <= 1e-15 * (1 + np.abs(z))):
            break
    return np.where(fixed < target, z, -np.inf)
