"""Moments of A given what is seen around the record's own bin (docs/theory/own_bin.md).

Let u ~ N(0, S), a_j = e^(u_j − S_jj/2), A the mean of the a_j. All bins share one normal variable: S = v + C with a
number v > 0. For the bin i, u_j = √v·z + l_j·τ + w_j with independent standard normal z and τ, where τ is a weighted
sum of what is seen around i. Weighted with a_i, which is the law if the record is in bin i, and given τ,
A = e^(√v·z + v/2)·Σ α_j·ξ_j with α_j = e^(l_j·τ − l_j²/2 + D_ij)/b and ξ_j = e^(w_j − D_jj/2), D the covariance of w.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpmf import budget
from dpmf.accountants.moments._given_mean import Graphs, Shape, complete_graph
from dpmf.numerics import UNIT, Array

_LEAST_SHARED = 1e-7  # the least v, relative to the largest entry, that is worth while
_LEAST = 1e-40  # of smaller entries, products of six underflow
_NEGLIGIBLE = 0.03  # the part of a fourth moment that is not worth another product of matrices
_LEAST_KNOTS = 1e-3  # closer ones could not be told apart
_SHRUNK = (1.0, 0.9, 0.5, 0.1)  # parts of the largest v that are tried in turn


def raised_part(b: int) -> float:
    """By which part of its largest entry the diagonal of b × b numbers is raised, against rounding errors."""
    return 1e-9 * max(1.0, (b / 512) ** 2)


def circulant_above(gram: Array) -> Array:
    """The least circulant matrix that is at least `gram` in every entry, positive semidefinite.

    **Formal guarantees.** Every entry is the largest one of `gram` at the same distance on the ring. Where the result
    has a negative eigenvalue, the diagonal is raised by it, with room for the errors of the transform.
    """
    b = len(gram)
    lags = np.array([np.diagonal(gram, d).max() for d in range(b)])
    lags[1:] = np.maximum(lags[1:], lags[:0:-1])
    lags[0] += max(-float(np.fft.fft(lags).real.min()), 0.0) + 1e-13 * b * float(lags.max())
    places = np.arange(b)
    found: Array = lags[(places[:, None] - places) % b]
    return found


@dataclass(frozen=True)
class Shared:
    """S with its diagonal raised, split into what all bins share and the rest.

    Attributes:
      s: the matrix, at least the one given in every entry.
      variance: v, such that S − v is positive semidefinite.
      raised: by how much the diagonal was raised.
    """

    s: Array
    variance: float
    raised: float

    @classmethod
    def of(cls, s: Array, circulant: bool = False) -> Shared | None:
        """The split with about the largest v; None where there is none worth while.

        **Formal guarantees.** If Cholesky's algorithm does not break down for a matrix M of size b, its least
        eigenvalue is at least −2(b + 1)·u·tr M (Rump 2006). It is run for S − v with half of what the diagonal is
        raised by, and an eighth covers that.
        """
        b = len(s)
        budget.claim(8.0 * 12 * b * b)
        raised = raised_part(b) * float(s.max())
        if not 4 * (b + 2) * UNIT * float(np.trace(s)) < raised / 8 or float(s.max()) < _LEAST:
            return None
        half, whole = s.copy(), s.copy()
        half[np.diag_indices(b)] += raised / 2
        whole[np.diag_indices(b)] += raised
        try:
            total = b / float(half[0].sum()) if circulant else float(np.linalg.solve(half, np.ones(b)).sum())
        except np.linalg.LinAlgError:
            return None
        if not 0 < total < math.inf:
            return None
        for shrunk in _SHRUNK:
            variance = shrunk * (1 - 1e-6) / total
            if variance < _LEAST_SHARED * float(s.max()):
                return None
            try:
                np.linalg.cholesky(half - variance)
            except np.linalg.LinAlgError:
                continue
            return cls(whole, variance, raised)
        return None


class GivenBin:
    """Moments of A given τ, for a record in one bin; without a record, and without τ, where no bin is given.

    **Formal guarantees.** With h ≥ 0 and C = S − v, l = Ch/√(hᵀCh) makes D = C − llᵀ positive semidefinite. The C used
    for l has its diagonal raised by a quarter less (it is still positive semidefinite, see `Shared.of`), and that
    quarter covers what rounding of l does to D. Where it does not, or l_i is not positive, all l_j are 0 and nothing
    is said by τ.
    Given τ, moments are sums over graphs as in `GivenMean`, with D for C, and with errors that are found in the same
    way.

    Attributes:
      own: l_i, the load of the bin itself.
      largest: the largest |l_j|.
    """

    def __init__(self, shared: Shared, bin_index: int | None) -> None:
        s, b = shared.s, len(shared.s)
        budget.claim(8.0 * 8 * b * b)
        rest = s - shared.variance
        self.loads: Array = np.zeros(b)
        self.own = 0.0
        if bin_index is not None:
            self._look(rest, bin_index, shared.raised)
        self.largest = float(np.abs(self.loads).max()) * (1 + 1e-12)
        rest -= np.outer(self.loads, self.loads)
        self._tilt: Array = np.zeros(b) if bin_index is None else rest[bin_index].copy()
        self._remember(rest, 6 * UNIT * (float(s.max()) + shared.variance + self.largest**2))

    def _remember(self, rest: Array, error: float) -> None:
        """Keep what all moments need of the covariance that is left, which has this error."""
        self._b = len(rest)
        self._at_knots: dict[float, float] = {}
        self._f = np.expm1(rest)
        sizes = np.abs(self._f)
        largest = float(sizes.max())
        self._error = (1 + largest) * error + 4 * UNIT * largest
        self._step = max(math.sqrt(float((sizes * sizes).mean())), self._error)
        self._largest = largest + self._error + self._step  # with room for what is added to bound errors

    def _look(self, rest: Array, bin_index: int, raised: float) -> None:
        """Choose τ for a bin: the loads l."""
        b = len(rest)
        toward = np.exp(2 * np.minimum(rest[bin_index] - rest.min(), 25.0))
        product = rest @ toward - raised / 4 * toward
        size = np.abs(rest) @ toward
        square = float(toward @ product)
        if not square > 1e-6 * float(toward @ size):
            return
        root = math.sqrt(square)
        loads = product / root
        off = float(size.max()) + float(toward @ size) / square * float(np.abs(product).max())
        perturbed = 2.2 * float(np.linalg.norm(loads)) * math.sqrt(b) * (b + 8) * UNIT * off / root
        if loads[bin_index] > 0 and perturbed < raised / 4:
            self.loads, self.own = loads, float(loads[bin_index])

    def at(self, tau: float) -> Shape:
        """What is known of Σ α_j·ξ_j given τ."""
        return self._of(self._terms(tau), abs(tau))

    def anywhere(self, circulant: bool) -> Shape:
        """What is known of Σ ξ_j/b where no bin was given; of a circulant matrix, the fourth moment is computed."""
        return self._of(self._terms(0.0), 0.0, circulant)

    def below(self, low: float, centre: float, high: float, knots: float) -> Shape:
        """The same at `centre`, for a sum that is at most Σ α_j·ξ_j between `low` and `high`, with other loads there.

        They are those between 0 and 2·l_i that come closest. A term with l_j < 0 is kept at its value at `high`; one
        with l_j > 2·l_i leaves its value at `low` with the load 2·l_i. The complete graph of four vertices is bounded
        at multiples of `knots` only.
        """
        least, most = np.minimum(self.loads, 0.0), np.maximum(self.loads - 2 * self.own, 0.0)
        moved = np.exp(least * (high - centre) + most * (low - centre))
        return self._of(self._terms(centre) * moved, max(abs(low), abs(high)), between=(centre, knots))

    def means(self, nodes: Sequence[float]) -> list[float]:
        """About E[Σ α_j·ξ_j | τ] at some τ."""
        return [float(self._terms(tau).mean()) for tau in nodes]

    def _terms(self, tau: float) -> Array:
        found: Array = np.exp(np.minimum(self.loads * tau - self.loads**2 / 2 + self._tilt, 600.0))
        return found

    def _of(self, terms: Array, size: float, alike: bool = False, between: tuple[float, float] | None = None) -> Shape:
        """Moments for some terms; all vertices are alike where the matrix is circulant and the terms are equal.

        With `between`, a τ and a distance of knots, no term is larger than the one at this τ.
        """
        budget.check()
        b, f = self._b, self._f
        sizes = np.abs(f)
        sizes += self._error
        weights = terms / terms.sum()
        halves = f * np.sqrt(weights)
        graphs = Graphs.of(f, weights, halves @ halves.T)  # half the work of (f·W)·f
        near = sizes @ weights
        # Errors as those of `GivenMean`, with cruder sums: they are some 1e-13 of these.
        relative = (self._error / self._step * 1.01 + (10 * b + 128) * UNIT) * (1 + 1e-9)
        two, three, four = (relative * x for x in at_most(weights, near + self._step, self._largest))
        # The bounds of `complete_graph`, after one that takes no product of matrices: the largest edge for one more.
        twice = (sizes * sizes) @ weights
        complete = float(near.max()) * self._largest * float(weights @ (twice * twice)) * (1 + 1e-9)
        if complete > _NEGLIGIBLE * graphs.four and between is not None:
            complete = min(complete, self._complete_between(*between, float(terms.sum())))
        elif complete > _NEGLIGIBLE * graphs.four:
            complete = min(complete, complete_graph(sizes, weights, None, _NEGLIGIBLE * graphs.four))
        if alike:
            complete = min(complete, self._complete_from_one(relative, float((near + self._step).max())))
        variance = graphs.two + two
        deviation = math.sqrt(max(variance, 1e-300))
        exponent = self.largest * (size + self.largest) + float(np.abs(self._tilt).max())
        return Shape(
            mean=float(terms.sum()) / b,
            deviation=deviation,
            lowest=-1 / deviation * (1 + 1e-12),
            skewness=graphs.three / deviation**3,
            kurtosis=(graphs.four + four + complete) / deviation**4,
            errors=np.array([(b + 8) * UNIT / deviation, 2 * two / variance + 1e-12, three / deviation**3 + 1e-12]),
            error=(2 * b + 64) * UNIT * (1 + exponent),
        )

    def _complete_between(self, tau: float, knots: float, total: float) -> float:
        """The sum over the complete graph of four vertices, for terms with this total that are at most those at τ.

        **Formal guarantees.** With terms e^(l_j·τ + c_j) for weights the sum over |f| is one of exponentials of τ with
        positive factors, so its logarithm is convex: between two knots it is at most the chord. That of an upper bound
        at the knots is at least that. Smaller terms have a smaller sum, and dividing by the fourth power of the total
        makes weights of terms.
        """
        knots = max(knots, _LEAST_KNOTS)
        left = math.floor(tau / knots)
        part = tau / knots - left
        chord = (1 - part) * self._log_complete(left * knots) + part * self._log_complete((left + 1) * knots)
        exponent = chord - 4 * math.log(total)
        return math.exp(exponent) * (1 + 1e-9) if exponent < 700 else math.inf

    def _log_complete(self, tau: float) -> float:
        """The logarithm of a bound on the sum over the complete graph of four vertices, with the terms at τ."""
        found = self._at_knots.get(tau)
        if found is None:
            exponents = self.loads * tau - self.loads**2 / 2 + self._tilt
            peak = float(exponents.max())
            terms = np.exp(exponents - peak)
            total = float(terms.sum())
            bound = complete_graph(np.abs(self._f) + self._error, terms / total)
            found = self._at_knots[tau] = math.log(max(bound, 1e-300)) + 4 * (peak + math.log(total))
        return found

    def _complete_from_one(self, relative: float, near: float) -> float:
        """The sum over the complete graph of four vertices, all weights being 1/b and all vertices alike.

        **Formal guarantees.** One vertex may be any, and the three others add up to tr (diag(f_0)·f)³/b³. The error is
        at most `relative` times the same sum with |f| + `step` for f, as for the other graphs; there, three edges form
        a star, of at most near³, and the other three are at most `_largest`.
        """
        product = self._f[0][:, None] * self._f
        exact = float(((product @ product) * product.T).sum()) / self._b**3
        return exact + relative * near**3 * self._largest**3


def at_most(weights: Array, near: Array, largest: float) -> tuple[float, float, float]:
    """Bounds on the sums of `Graphs` from sums of rows and the largest entry.

    **Formal guarantees.** For entries that are not negative. With near_i = Σ w_j·f_ij, stars are sums of powers of
    near_i, and a path of three edges is at most a star, because near_i·near_j is at most the mean of their squares. In
    all other graphs, each edge beyond those of a path is at most `largest`. Counts are those of `graph_sums`.
    """
    edge, forks, stars = (float(weights @ near**power) for power in (1, 2, 3))
    return edge, (3 + largest) * forks, 3 * edge**2 + (16 + 15 * largest + 6 * largest**2) * stars
