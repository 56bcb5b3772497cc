"""When training draws batches anew, and which rows of C⁻¹Z each step adds.

Training counts *steps*: one batch and one update of the model each. A mechanism counts *iterations*, the rows of C.
They are the same except where bins are thrown anew. The iterations of a gap use no record, so what they release is
noise alone, and the first step after a gap adds a weighted sum of this noise together with its own. The model then is a
function of the mechanism's outputs, which is all that the guarantee needs, and no optimizer has to make steps that
follow nothing but noise.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpmf import validation
from dpmf.batching import AnyBatching, BallsInBins, Poisson


@dataclass(frozen=True)
class Schedule:
    """The steps of a training run.

    Attributes:
      steps: how many there are.
      per_epoch: b, the number of steps in an epoch.
      per_draw: the number of steps after which every record draws anew.
      groups: into how many groups the records are split; a record of group r may take part in the steps r, r + groups,
        r + 2·groups, ... of an epoch.
      gap: the number of iterations without records between two draws.
    """

    steps: int
    per_epoch: int
    per_draw: int
    groups: int
    gap: int

    @classmethod
    def of(cls, batching: AnyBatching) -> Schedule:
        """The schedule of balls in bins or of Poisson sampling."""
        b = batching.batches_per_epoch
        if isinstance(batching, Poisson):
            return cls(batching.iterations, b, batching.period, batching.period, 0)
        if not isinstance(batching, BallsInBins):
            raise validation.wrong("batching", "a BallsInBins or a Poisson", batching)
        per_draw = (batching.rethrow_every or batching.epochs) * b
        return cls(batching.steps, b, per_draw, batching.stride, batching.gap or 0)

    def rows(self, step: int) -> range:
        """The rows of C⁻¹Z that a step adds: those of the gap before it, if there is one, and its own."""
        draw, place = divmod(step, self.per_draw)
        own = step + draw * self.gap
        return range(own - (self.gap if draw and not place else 0), own + 1)
