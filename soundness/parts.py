"""The parts of the campaign, and which of them a problem belongs to."""

from __future__ import annotations

from soundness.batchings import draw_batching_problem
from soundness.bridges import check_bridge
from soundness.cases import Finding, check_problem
from soundness.designs import check_design
from soundness.problems import Problem, draw_problem
from soundness.texts import check_text

# Of forty-one problems in a row. Fixed bins are every accountant's own ground; a design takes seconds.
_SHARES = {"fixed bins": 24, "batchings": 11, "bridges": 2, "printed text": 3, "designs": 1}
PARTS = tuple(_SHARES)
_ORDER = tuple(sorted(((i + 0.5) / n, part) for part, n in _SHARES.items() for i in range(n)))


def part_of(index: int) -> str:
    """The part that the problem of an index belongs to; any stretch of problems holds its share of each."""
    return _ORDER[index % len(_ORDER)][1]


def check(seed: int, index: int, light: bool = False, part: str | None = None) -> tuple[Problem, list[Finding]]:
    """The problem of an index, and every answer about it.

    Args:
      seed: of the campaign.
      index: of the problem.
      light: ask what takes long less often.
      part: the part to draw the problem from, by default that of the index.
    """
    part = part or part_of(index)
    if part == "bridges":
        return check_bridge(seed, index)
    if part == "designs":
        return check_design(seed, index)
    if part == "printed text":
        return check_text(seed, index)
    problem = draw_problem(seed, index) if part == "fixed bins" else draw_batching_problem(seed, index)
    return problem, check_problem(problem, seed, light)
