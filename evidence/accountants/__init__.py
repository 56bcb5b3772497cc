"""docs/accountants.md: the claims of the page, each with its cells, its words, its table and its picture."""

from __future__ import annotations

from evidence.accountants.claim import Claim
from evidence.accountants.comparisons import baselines, directions, sampling
from evidence.accountants.curves import epochs, long_memory, small_epsilon, uncorrelated
from evidence.accountants.renyi import budget, truncation

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (directions, uncorrelated, baselines, budget, small_epsilon, epochs, sampling, truncation, long_memory)
}
