"""The cascade accountant: any bandwidth and any number of batches, remove direction.

E f(A) is convex as a function of the Gram matrix where f'', f''', f'''' ≥ 0 (docs/theory/cascade.md). So a Gram matrix
that lies below an average of rotations of one tree-structured matrix has an E f(A) below that of the tree, whose law
takes log b steps. f(a) = a^α gives Rényi orders; f(a) = 4/27·η⁻²·((a − γ + η)_+)³ ≥ (a − γ)_+ bounds δ(ε) itself, and
where all indices share a factor there are payoffs that lose less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from dpmf import validation
from dpmf.accountants.cascade._payoffs import Majorant, SmoothedCall, cubic_bound, smoothed_bound
from dpmf.accountants.cascade._tree import MARGIN, Tree, candidates, lag_majorant
from dpmf.accountants.cascade._tree_law import Fineness, Measure, TreeMoments, grid_steps, tree_law
from dpmf.accountants.combined.least import Least, Part
from dpmf.accountants.protocol import Accountant, Direction, Evaluation, PreparedAccountant, Proof
from dpmf.accountants.renyi.orders import IntegerOrders
from dpmf.loss.gaussian import gaussian_delta, gaussian_loss_delta
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT
from dpmf.recent import Recent


@dataclass(frozen=True)
class _Tuning:
    """Numbers that decide tightness and time, and where the closed forms answer. Any values give sound bounds.

    Attributes:
      largest_epsilon: beyond this ε the closed forms answer.
      least_variance: below this G/σ² they do,
      largest_variance: and above this one.
      negligible: they also do below this δ.
      usual_delta: the δ that matters where no target says so.
      cut: the part of a bound that may come from what the grids leave out.
      most_decades: what is left out is not made smaller than this power of ten.
      laws_kept: how many laws are remembered.
      least_shared: a factor shared by all indices is integrated exactly if it has this share of the variance of A.
      renyi_work: elementary updates allowed for the moments of a tree.
    """

    largest_epsilon: float = 100.0
    least_variance: float = 1e-9
    largest_variance: float = 25.0
    negligible: float = 1e-100
    usual_delta: float = 1e-6
    cut: float = 0.02
    most_decades: int = 120
    laws_kept: int = 4
    least_shared: float = 0.003
    renyi_work: float = 1e8


_TUNING = _Tuning()


@dataclass(frozen=True)
class Cascade(Accountant):
    """Options of the cascade accountant.

    Attributes:
      discretisation_loss: the part of the noise multiplier that the grids may cost, roughly; steps follow its root.
        Values above 1 are treated as 1.
    """

    name: ClassVar[str] = "cascade"
    summary: ClassVar[str] = "averages of trees that dominate the noise; any bandwidth, any b; remove direction, fast"
    rests_on: ClassVar[str] = "convexity of E f(A) in the Gram matrix, Kahane's inequality: averages of trees dominate"

    discretisation_loss: float = 0.002

    def __post_init__(self) -> None:
        validation.positive("discretisation_loss", self.discretisation_loss)

    def prepare(self, mechanism: Mechanism) -> PreparedAccountant:
        """Fit the trees.

        **Formal guarantees.** Every bound of the result is at least the true δ(ε) of the dominating pair. For some
        weights w ≥ 0 and a tree of blocks of the ring, the average over all rotations of the tree's covariance is at
        least G in every entry (`candidates`). Both are Gram matrices, so E f(A) of G is at most that of the average
        for convex f (Kahane's inequality); the latter is at most the average of E f(A) over the rotations where
        f'', f''', f'''' ≥ 0 (E f(A) is convex in the Gram matrix), and a rotation only renames the indices, so that is
        E f(A) of the tree. With two trees the average is over both, and so is E f(A). Laws and moments of a tree are
        computed from above (`GridLaw`, `TreeMoments`).
        The add direction has closed forms only: (1 − γa)_+ is convex, but has no such third derivative. They are those
        of the average of rotations, which is at least G (Kahane's inequality again).
        """
        return Least(self.name, mechanism, [Part(self.name, lambda: self._bounds(mechanism), quick=True)])

    def _bounds(self, mechanism: Mechanism) -> list[PreparedAccountant]:
        trees, pairs = candidates(lag_majorant(mechanism), mechanism.batching.batches_per_epoch)
        best = min(trees, key=lambda tree: tree.mean_entry())
        moments = TreeMoments(best)
        orders = moments.orders_within(_TUNING.renyi_work)
        return [
            *(_TreeBound(mechanism, self, average) for average in (*((tree,) for tree in trees), *pairs)),
            IntegerOrders(self.name, mechanism, moments, lambda: orders, cheap=True),
            _ClosedForms(mechanism, best),
        ]


class _TreeBound(PreparedAccountant):
    """The bound of one tree, or of an average over several that have the same weight on the whole ring."""

    name = "cascade"
    cheap = True

    def __init__(self, mechanism: Mechanism, options: Cascade, trees: tuple[Tree, ...]) -> None:
        self.mechanism = mechanism
        self._loss, self._trees = min(options.discretisation_loss, 1.0), trees
        self._b, self._variance = trees[0].b, max(tree.variance for tree in trees)
        shared = float(trees[0].weights[0])
        # A factor shared by all, if it is not negligible, is integrated exactly instead of being part of the law.
        self._shared = shared if shared > _TUNING.least_shared * trees[0].mean_entry() else 0.0
        self._rest = tuple(tree.without_shared() for tree in trees) if self._shared else trees
        self._laws: Recent[tuple[float, float], Measure] = Recent(_TUNING.laws_kept)

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        """A bound on δ(ε); what is cut off is to be small beside the target, or beside the bound if that is smaller.

        **Formal guarantees.** The payoff is a cubic above the call (`cubic_bound`), or, where S = τ + S° has a shared
        factor, a majorant of the call smoothed by that factor, with the rotations being those of S° (`Majorant`). Both
        have non-negative second, third and fourth derivatives. E of it is bounded by the grid law and by the moments
        of its rest. Errors of positions and weights are part of the law; γ is moved by its own.
        """
        variance = self._variance / noise_multiplier**2
        inside = _TUNING.least_variance <= variance <= _TUNING.largest_variance and epsilon <= _TUNING.largest_epsilon
        if direction == "add" or not inside:
            return Evaluation(1.0)
        plain = gaussian_delta(math.sqrt(variance) * (1 + MARGIN), epsilon)  # no amplification
        if plain <= _TUNING.negligible:
            return Evaluation(plain)
        gamma = _strike(epsilon)
        # What may be cut off: in decades that many ε and targets share, so that one law serves all of them.
        wanted = min(target_delta or _TUNING.usual_delta, plain)
        decades = 4 * math.ceil(-0.25 * math.log10(3e-5 * (gamma - 0.95) ** 2 * wanted))
        # Nodes may be too large for their cubes: a bound that is not a number is none.
        with np.errstate(over="ignore", invalid="ignore"):
            while True:
                law = self._law(noise_multiplier, 10.0**-decades)
                if self._shared:
                    bound = smoothed_bound(law, self._call(noise_multiplier, gamma))
                else:
                    bound = cubic_bound(law, gamma)
                if bound.cut <= _TUNING.cut * bound.value or decades > _TUNING.most_decades:
                    break
                decades += max(4, decades // 8 * 4)
        if not bound.value < plain:
            return Evaluation(plain)
        details = {"tree": self._trees[0].first, "trees": len(self._trees), "threshold": bound.start}
        return Evaluation(float(bound.value), details)

    def unreachable(self, epsilon: float, delta: float, direction: Direction) -> str | None:
        return "the cascade bounds the remove direction only" if direction == "add" else None

    def certificate(self, noise_multiplier: float, epsilon: float, direction: Direction) -> Proof | None:
        """What it takes to check the bound without dpmf: the trees, the steps of their grids, and the payoff."""
        found = self.delta(noise_multiplier, epsilon, direction)
        if "threshold" not in found.details:
            return None
        start = float(found.details["threshold"])
        payoff = {"kind": "cubic", "threshold": start}
        if self._shared:
            majorant = Majorant.of(self._call(noise_multiplier, _strike(epsilon)), start)
            payoff = {"kind": "smoothed", "start": start, "cubic": float(majorant.coefficients[3])}
        trees = []
        for tree, scaled in zip(self._trees, self._scaled(noise_multiplier), strict=True):
            steps = grid_steps(scaled, Fineness(self._loss, 1.0))
            trees.append(
                {
                    "blocks": tree.first,
                    "weights": tree.weights.tolist(),
                    "step": steps[0],
                    "refinements": [round(coarse / fine) for fine, coarse in pairwise(steps)],
                }
            )
        return Proof(found.value, "cascade", {"trees": trees, "payoff": payoff})

    def _call(self, noise_multiplier: float, gamma: float) -> SmoothedCall:
        """The call, smoothed by the factor that all indices share."""
        return SmoothedCall(gamma, self._shared / noise_multiplier / noise_multiplier * (1 + 8 * UNIT))

    def _scaled(self, noise_multiplier: float) -> list[Tree]:
        """The trees of the law, divided by σ²."""
        return [tree.scaled(1 / noise_multiplier / noise_multiplier * (1 + 8 * UNIT)) for tree in self._rest]

    def _law(self, noise_multiplier: float, spare: float) -> Measure:
        def make() -> Measure:
            trees = self._scaled(noise_multiplier)
            return Measure.average([tree_law(tree, Fineness(self._loss, spare)) for tree in trees], self._b)

        return self._laws.get((noise_multiplier, spare), make)


def _strike(epsilon: float) -> float:
    """At most e^ε."""
    return math.exp(epsilon) * (1 - 4 * UNIT)


class _ClosedForms(PreparedAccountant):
    """Of the average of rotations, in both directions: no amplification, and for add the geometric mean."""

    name = "cascade"
    cheap = True

    def __init__(self, mechanism: Mechanism, tree: Tree) -> None:
        self.mechanism = mechanism
        self._largest, self._mean = (v * (1 + MARGIN) for v in (tree.variance, tree.mean_entry()))

    def delta(
        self, noise_multiplier: float, epsilon: float, direction: Direction, target_delta: float | None = None
    ) -> Evaluation:
        with np.errstate(over="ignore"):
            largest, mean = (min(v / noise_multiplier / noise_multiplier, 1e300) for v in (self._largest, self._mean))
        plain = gaussian_delta(math.sqrt(largest), epsilon)
        if direction == "add" and plain > _TUNING.negligible:
            # The mean of the loss is raised by more than its variance, as it must (see `gaussian_loss_delta`).
            plain = min(plain, gaussian_loss_delta(largest / 2 * (1 + 10 * MARGIN), mean, epsilon))
        return Evaluation(plain, {"form": "closed"})
