"""The Gram matrix of the means m_i = Σ_j |C|[:, i + jb], in balls; closed forms; a lattice for a diagonal matrix."""

from functools import cached_property, reduce
from itertools import accumulate
from typing import Any

from flint import arb, arb_mat, arb_poly, arb_series, ctx

from dpmf_check.balls import ROOT_TWO, number, numbers, only, require, tail

MEANS = "m_i is the sum of the absolute columns i, i + b, i + 2b, ... of C"


class Gram:
    """G[i, j] = ⟨m_i, m_j⟩, b × b; for a Toeplitz C, mean i is the folded column f moved down by i and cut off at N."""

    def __init__(self, mechanism: Any) -> None:
        strategy, batching, means = only("mechanism", mechanism, "strategy", "batching", "means")
        kind, k, b, n = only("batching", batching, "kind", "epochs", "batches_per_epoch", "iterations")
        require(means == MEANS and kind == "balls in bins", "the means are not those of balls in bins")
        self.b, self.n = number("batches_per_epoch", b, 1, 10**6, True), number("iterations", n, b, 10**7, True)
        require((number("epochs", k, 1, 10**7, True) - 1) * b < n <= k * b, "epochs, batches and iterations differ")
        kind, given = only("strategy", strategy, "kind", "entries")
        self.toeplitz = kind == "toeplitz" and 0 < len(given) <= n
        require(self.toeplitz or (kind == "matrix" and len(given) == n), "the strategy is neither Toeplitz nor N × N")
        if self.toeplitz:
            f = [abs(x) for x in numbers("strategy", given, len(given), -1e100)] + [arb(0)] * (n - len(given))
            for t in range(b, n):
                f[t] += f[t - b]
            self.folded, product = f, arb_poly(f) * arb_poly(f[::-1])
            # The first entry of each diagonal is the largest: a sum of the most terms, none of them negative.
            self.lags = [product[n - 1 + d].nonnegative_part() for d in range(b)]
            self.diagonal = list(accumulate(x * x for x in f))[n - b :][::-1]
            return
        self.rows = [[arb(0)] * b for _ in range(n)]
        for t, row in enumerate(given):
            for column, value in enumerate(numbers("strategy", row, t + 1, -1e100)):
                self.rows[t][column % b] += abs(value)
        self.diagonal = [self.full[i][i] for i in range(b)]
        self.lags = [reduce(arb.max, (self.full[i][i + d] for i in range(b - d))) for d in range(b)]

    @cached_property
    def full(self) -> list[list[arb]]:
        """G[i][j] for i ≤ j."""
        require(self.b <= 2500, "there are too many batches for a Gram matrix")
        if not self.toeplitz:
            return (arb_mat(self.rows).transpose() * arb_mat(self.rows)).tolist()
        found, n = [[arb(0)] * self.b for _ in range(self.b)], self.n
        for d in range(self.b):
            sums = list(accumulate(x * y for x, y in zip(self.folded, self.folded[d:], strict=False)))
            for j in range(d, self.b):
                found[j - d][j] = sums[n - 1 - j]
        return found

    @cached_property
    def ring(self) -> list[arb]:
        """For each d < b a number that no entry at distance d around the ring exceeds."""
        return [self.lags[d].max(self.lags[-d]) for d in range(self.b)]

    def total(self) -> arb:
        """The sum of all entries: the squared norm of the sum of the means."""
        sums = [arb(0)] * self.b + list(accumulate(self.folded)) if self.toeplitz else []
        rows = ([sums[t + self.b], -sums[t]] for t in range(self.n)) if self.toeplitz else self.rows
        return sum((sum(row, arb(0)) ** 2 for row in rows), arb(0))


def gaussian(proof: Any, gram: Gram, sigma: arb, epsilon: arb, remove: bool) -> arb:
    """G ≤ max G in both directions; or, to add a record, the mean of the a_i is at least their geometric mean."""
    (form,) = only("proof", proof, "form")
    require(form == "largest entry" or (form == "geometric mean" and not remove), "the form is not for this direction")
    mean = variance = reduce(arb.max, gram.diagonal) / sigma**2  # no entry exceeds those on the diagonal
    if form == "geometric mean":
        mean, variance = sum(gram.diagonal, arb(0)) / (gram.b * sigma**2), gram.total() / (gram.b * sigma) ** 2
    mean /= 2
    y = (epsilon - mean) / variance.sqrt()  # E(1 − e^(ε−Y))_+ for Y ~ N(mean, variance)
    one, two = ((x / ROOT_TWO).erfc() / 2 for x in (y, y + variance.sqrt()))
    return one - (epsilon - mean + variance / 2).exp() * two


def lattice(proof: Any, gram: Gram, sigma: arb, epsilon: arb, remove: bool) -> arb:
    """Independent a_i, each spread onto {0, h, 2h, ...} in convex order: the put is a finite sum, a call by parity."""
    entries, step = only("proof", proof, "entries", "step")
    require(all(x == 0 for x in gram.lags[1:]), "the Gram matrix is not diagonal, as a lattice needs")
    groups = [(arb(number("entry", v, 1e-100)), number("count", c, 1, gram.b, True)) for v, c in entries]
    above = sorted((v for v, c in groups for _ in range(c)), key=float)
    require(len(above) == gram.b, "the entries are not as many as there are batches")
    for own, larger in zip(sorted(gram.diagonal, key=float), above, strict=True):
        require(own <= larger, "an entry of the Gram matrix exceeds its entry in the lattice")
    h, n, strike = arb(number("step", step, 1e-9)), gram.b, gram.b * (epsilon if remove else -epsilon).exp()
    size = int(float((strike / h).upper())) + 2
    ctx.cap, law = size, arb_series([1], size)
    for variance, count in groups:
        root, capped = variance.sqrt() / sigma, [arb(0)]
        for j in range(1, size + 1):
            z = (j * h).log() / root + root / 2
            capped.append(j * h * tail(z) + tail(root - z))
        # Weights are second differences of E min(a, jh); the put needs none beyond the strike.
        weights = [(2 * capped[j] - capped[j - 1] - capped[j + 1]) / h for j in range(1, size)]
        law *= arb_series([1 - capped[1] / h, *weights], size) ** count
    put = sum(((strike - j * h).nonnegative_part() * law[j] for j in range(size)), arb(0))
    return (n - strike + put) / n if remove else put * epsilon.exp() / n
