"""Which majorants the chain accountant tries for a Gram matrix: every family that applies is fitted, the best are kept.

Fits cost tenths of a second to seconds, once per mechanism; laws are worked out again for every σ. So candidates are
compared by a first-order cost before any law is made: δ changes by Σ W_ij (S'−S)_ij for small overshoots, with
W_ij = E[a_i a_j; A ≈ e^ε], for which e^(emphasis·g_ij/g_0) stands in. Emphasis 0 is right for small ε, 3 for large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from dpmf import budget
from dpmf.accountants.chain._laws import LineModel
from dpmf.accountants.chain._majorants import line_chain, ring_chain, shared_factor
from dpmf.accountants.chain._renewal import RenewalModel
from dpmf.accountants.chain._renewal_fit import block_lengths, renewal_blocks
from dpmf.accountants.chain._separators import SeparatorModel, separators
from dpmf.gram.bands import cyclic_bandwidth
from dpmf.numerics import Array

Model: TypeAlias = LineModel | SeparatorModel | RenewalModel
Candidate: TypeAlias = tuple[str, Model]

EMPHASES = (0.0, 3.0)
_STEEP = 6.0
_CLOSE = 0.06  # a second candidate is kept if its cost is at most this much above the best one's
_NARROW = 3  # bandwidth below which separators are all that is needed


def models(gram: Array) -> list[Candidate]:
    """The majorants worth evaluating, the likely winner first; always at least one."""
    kept: list[Candidate] = []
    if len(gram) >= 3 and np.any(gram[~np.eye(len(gram), dtype=bool)] > 0):
        kept = budget.as_far_as_it_goes(_worth_keeping(gram))
    unique: list[Candidate] = []
    for name, model in kept:
        if not any(np.array_equal(model.variances(), other.variances()) for _, other in unique):
            unique.append((name, model))
    return [*unique, ("shared", shared_factor(gram))]


def _worth_keeping(gram: Array) -> Iterator[Candidate]:
    kept: list[Candidate] = []
    for emphasis in EMPHASES:
        found = _screened(candidates(gram, emphasis), gram, emphasis)
        kept += found
        yield from found
    if np.all(gram > 0) and _wraps(gram):
        # A ring costs next to nothing to fit, and rings for small and for large ε are often the same.
        steep = f"ring {_STEEP:g}", ring_chain(gram, _STEEP)
        yield from (named for named in _screened([*kept, steep], gram, _STEEP)[:1] if named is steep)


def candidates(gram: Array, emphasis: float) -> list[Candidate]:
    """Every family that applies, fitted."""
    found: list[tuple[str, Model | None]] = [("separators", separators(gram, emphasis))]
    width = cyclic_bandwidth(gram)
    if width > _NARROW:
        found.append(("renewal", renewal_blocks(gram, emphasis, block_lengths(width, len(gram)))))
    chains = [("ring", ring_chain(gram, emphasis))] if _wraps(gram) else []
    if not chains or np.all(gram > 0):
        # Over epochs of long memory nothing is zero, and the line need not dominate a whole ring: only G.
        chains.append(("line", line_chain(gram, emphasis)))
    found.append(min(chains, key=lambda named: cost_of(named[1], gram, emphasis)))
    return [(f"{name} {emphasis:g}", model) for name, model in found if model is not None]


def _wraps(gram: Array) -> bool:
    return bool(gram[0, -1] > 0.5 * gram[0, 1])


def cost_of(model: Model, gram: Array, emphasis: float) -> float:
    """Σ_j e^(emphasis·g_ij/g_0)·cov_ij, averaged over the rows; a model of fewer indices counts as if it had all."""
    weight = np.exp(emphasis * gram / gram.max())
    n = model.size
    covariance = model.covariance()
    # Left-out indices: any window of n indices has the same law, so the first will do for the weights.
    return float((weight[:n, :n] * covariance).sum() / n) * len(gram) / n


def _screened(found: list[Candidate], gram: Array, emphasis: float) -> list[Candidate]:
    costs = [cost_of(model, gram, emphasis) for _, model in found]
    order = np.argsort(costs, kind="stable")
    limit = costs[int(order[0])] * (1 + _CLOSE)
    return [found[k] for k in order[:2].tolist() if costs[k] <= limit]
