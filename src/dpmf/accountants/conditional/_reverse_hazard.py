"""Per-step dominating mixtures for conditional composition, from the prefix Gram matrix alone.

Notation, at step n: μ_j = m_j[1..n−1] the prefixes of the mixture means, components sorted by m_j[n]; R the law of the
outcome ("remove": R = 1/b Σ_k N(μ_k, σ²I), k = 1..b; "add": R = N(0, σ²I)). Given y ~ R, component i has reverse hazard

    P(z = i | z ≤ i, y) = 1/(1 + (i−1) e^{L_i}),   L_i = log 1/(i−1) Σ_{j<i} e^{L_ij},   L_ij = log N(y|μ_j)/N(y|μ_i).

**Formal guarantees** (proofs: docs/theory/conditional.md). Of the i−1 lower components let c have μ_j = μ_i (then
L_ij = 0) and m not. Then (i−1) e^{L_i} = c + m e^{L'}, L' the same average over the m others. For every distribution ψ
on these, Jensen gives L' ≥ E_ψ L_ij − KL(ψ ‖ uniform), an affine function of y; under y ~ N(ρ, σ²I) it is normal with
mean ν = (⟨ρ, E_ψ μ_j − μ_i⟩ + (|μ_i|² − E_ψ|μ_j|²)/2)/σ² − KL and standard deviation ξ = |μ_i − E_ψ μ_j|/σ. So
Pr_R[L' ≤ τ] ≤ mean over R's components k of min over ψ of Φ((τ − ν_k)/ξ), where ψ may depend on k and on τ (neither is
random). τ is chosen with the right-hand side at most β_i; outside an event of probability Σ β_i all reverse hazards are
at most 1/(1 + c + m e^τ), hence the posterior over components is stochastically dominated by the weights made of these
hazards, and (as means are ≥ 0 and sorted) the step's pair by that mixture against N(0, σ²), in both directions.

Components in the lowest tie group of m_:[n] need no tail bound: their order among themselves is immaterial and no
component lies below them. Where m = 0 the hazard 1/(1 + c) is exact. δ_E is split over the remaining components only,
equally over steps and then equally within a step.

The means are sums over epochs. They are raised by the rounding error of these sums and from then on taken as exact:
larger means have a larger Gram matrix, and Gram domination says that this is safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

from dpmf import budget
from dpmf.accountants.protocol import Direction
from dpmf.kernels import announce_compilation
from dpmf.loss.mixtures import Mixtures
from dpmf.mechanism import Mechanism
from dpmf.numerics import UNIT, Array

if TYPE_CHECKING:  # numba takes half a second to import: not before it is needed
    from dpmf.kernels.conditional import Terms

_COPIES = 6  # of the mixtures, until they are composed
_BLOCKS_HELD = 6  # blocks of terms at a time, where memory is limited: stored ones, new ones, thresholds
_PHI_TABLE = ndtr(-np.arange(38 * 128 + 1) / 128)
_LEVEL_ERROR = 1e-9  # proof constant: levels are reduced by more than the relative errors of Φ and its inverse


@dataclass(frozen=True)
class _Tuning:
    """What is stored, and which approximations upwards are made. Any values give sound bounds.

    Attributes:
      cache_bytes: the terms of the tail bounds are stored up to this size, and computed again for each σ beyond it.
      block_bytes: the size of the terms that are computed at a time.
      lift: the smallest means of a step are raised to a common value, by at most this share of the step's sum.
      many_steps: with more steps than this, reverse hazards are raised to a geometric grid.
      grain: the spacing of that grid in log; of 10,000 steps in 100 epochs only 2,000 then differ.
    """

    cache_bytes: int = 2**30
    block_bytes: int = 64 * 2**20
    lift: float = 1e-4
    many_steps: int = 1000
    grain: float = 2.5e-4


_TUNING = _Tuning()


@dataclass(frozen=True)
class Family:
    """Variational distributions: the uniform one or not, and softmax weights at finite temperatures.

    `by_component` measures the softmax's distances from R's component (option 2) instead of from μ_i (option 3).
    """

    uniform: bool
    temperatures: tuple[float, ...]
    by_component: bool

    @property
    def size(self) -> int:
        return len(self.temperatures) + self.uniform


class ReverseHazards:
    """Dominating mixtures of every step of one mechanism, for any σ and δ_E, in one direction.

    The terms that do not depend on σ are computed on first use and stored if they fit.
    """

    def __init__(self, mechanism: Mechanism, direction: Direction, family: Family) -> None:
        self._mechanism = mechanism
        self._remove = direction == "remove"
        self._family = family
        self._blocks: list[Terms] | None = None
        self._live_steps: int | None = None
        norms = np.diag(mechanism.gram)
        self._scale = max(float(norms.max()), np.finfo(np.float64).tiny)

    def _sizes(self) -> tuple[int, int]:
        """R's components, and for how many of them the family differs."""
        references = self._mechanism.batching.batches_per_epoch if self._remove else 1
        return references, references if self._family.by_component else 1

    def _compute(self) -> Iterator[Terms]:
        from dpmf.kernels.conditional import Terms, prefix_terms

        b = self._mechanism.batching.batches_per_epoch
        references, distinct = self._sizes()
        family = self._family
        per_entry = 4 * family.size * (references + 2 * distinct) + 24
        gram, labels, done = np.zeros((b, b)), np.zeros(b, dtype=np.int64), 0
        temperatures = np.array(family.temperatures)
        announce_compilation(prefix_terms)
        # A mean is a sum of at most k non-negative terms, one per epoch.
        raised = 1 + (self._mechanism.batching.epochs + 4) * UNIT
        for _, computed in self._mechanism.mean_rows():
            rows = computed * raised
            bases = _lowest_groups(rows)
            entries = (rows > bases[:, None]).sum(axis=1)
            at = 0
            while at < len(rows):
                size = min(_TUNING.block_bytes, budget.fitting(_BLOCKS_HELD))
                fitting = np.searchsorted(np.cumsum(entries[at:]), size // per_entry)
                stop = at + max(1, int(fitting))
                block = np.ascontiguousarray(rows[at:stop])
                starts = np.concatenate(([0], np.cumsum(entries[at:stop]))).astype(np.int64)
                count = int(starts[-1])
                terms = Terms(
                    starts=starts,
                    bases=bases[at:stop],
                    tops=np.zeros(count),
                    same=np.zeros(count, dtype=np.int64),
                    other=np.zeros(count, dtype=np.int64),
                    shifts=np.zeros((count, family.size, references), dtype=np.float32),
                    spreads=np.zeros((count, family.size, distinct), dtype=np.float32),
                    divergences=np.zeros((count, family.size, distinct), dtype=np.float32),
                )
                kind = (family.uniform, temperatures, family.by_component)
                budget.check()
                prefix_terms(block, done, gram, labels, self._scale, *kind, self._remove, terms)
                done += len(block)
                at = stop
                yield terms

    def blocks(self) -> Iterator[Terms]:
        """All blocks of steps in order, from memory where they fit."""
        if self._blocks is not None:
            yield from self._blocks
            return
        kept: list[Terms] | None = []
        size = live = 0
        for terms in self._compute():
            size += terms.shifts.nbytes + terms.spreads.nbytes + terms.divergences.nbytes + 24 * len(terms.tops)
            live += int(np.count_nonzero(_live_per_step(terms)))
            if kept is not None:
                kept.append(terms)
                if size > min(_TUNING.cache_bytes, budget.fitting(_BLOCKS_HELD)):
                    kept = None
            yield terms
        self._blocks, self._live_steps = kept, live

    @property
    def live_steps(self) -> int:
        """The number of steps that need a share of δ_E."""
        if self._live_steps is None:
            for _ in self.blocks():
                pass
        assert self._live_steps is not None
        return self._live_steps

    def mixtures(self, noise_multiplier: float, bad_event: float) -> Mixtures:
        """Mixtures that dominate every step outside an event of probability at most `bad_event`."""
        collected: dict[tuple[bytes, bytes], int] = {}
        size = 0
        for means, weights in self.steps(noise_multiplier, bad_event):
            key = (means.tobytes(), weights.tobytes())
            if key not in collected:
                size += 16 * len(means) + 400
                budget.claim(_COPIES * size)
            collected[key] = collected.get(key, 0) + 1
        return Mixtures.from_unique(collected)

    def steps(self, noise_multiplier: float, bad_event: float) -> Iterator[tuple[Array, Array]]:
        """Means (ascending) and weights of the dominating mixture, step by step in their order.

        The last weight of a step bounds the reverse hazard of its largest mean.

        **Formal guarantees.** Those of this module: all of them dominate at once, outside an event of probability at
        most `bad_event`.
        """
        from dpmf.kernels.conditional import mixture_thresholds, mixture_weights, single_thresholds

        share = bad_event * (1 - _LEVEL_ERROR) / max(self.live_steps, 1)
        precision = self._scale / noise_multiplier**2
        references, _ = self._sizes()
        grain = _TUNING.grain if self._mechanism.batching.iterations > _TUNING.many_steps else 0.0
        announce_compilation(mixture_thresholds)
        for terms in self.blocks():
            budget.check()
            count = len(terms.tops)
            per_step = _live_per_step(terms)
            # At most ½, where quantiles are not positive: a spread that is rounded up then lowers the threshold.
            levels = np.repeat(np.minimum(share / np.maximum(per_step, 1), 0.5), np.diff(terms.starts))
            z_single = ndtri(levels)
            thresholds = np.empty(count)
            if references > 1:
                z_joint = ndtri(np.minimum(references * levels, 1.0))
                mixture_thresholds(terms, precision, levels, z_single, z_joint, _PHI_TABLE, thresholds)
            else:
                single_thresholds(terms, precision, z_single, thresholds)
            steps = len(terms.bases)
            means, weights = np.empty(count + steps), np.empty(count + steps)
            ends = np.empty(steps, dtype=np.int64)
            mixture_weights(thresholds, terms, grain, self._remove, means, weights, ends)
            first = 0
            for end in ends.tolist():
                yield means[first:end], weights[first:end]
                first = end


def _live_per_step(terms: Terms) -> np.ndarray:
    """How many entries of each step need a tail bound."""
    live = np.concatenate(([0], np.cumsum(terms.other > 0)))
    return np.asarray(live[terms.starts[1:]] - live[terms.starts[:-1]])


def _lowest_groups(rows: Array) -> Array:
    """Per step, the mean up to which components form its lowest tie group.

    Raising a component's mean is sound (it dominates), so the smallest means are raised to a common value, as long as
    that adds no more than the share `lift` to their sum: strategies with long memories have many tiny means, each of
    which would cost a tail bound and a part of the budget.
    """
    ordered = np.sort(rows, axis=1)
    sums = np.cumsum(ordered, axis=1)
    raised = np.arange(1, rows.shape[1] + 1) * ordered - sums
    last = (raised <= _TUNING.lift * sums[:, -1:]).sum(axis=1) - 1
    return np.asarray(np.take_along_axis(ordered, np.maximum(last, 0)[:, None], axis=1)[:, 0])
