"""The soundness campaign: random mechanisms, every accountant and option, against truths that do not use the package.

`python -m soundness` runs it and writes docs/soundness.md: `parts` says which part a problem belongs to, `problems` and
`batchings` draw, `truth` knows, `plans` says who is asked, `cases` asks accountants, `designs`, `bridges` and `texts`
ask what stands on them, `campaign` runs, `journal` resumes, `provenance` knows which code it was, `summary`
writes. `fuzz` throws hostile input at the package, `faults` kills it at random moments.
"""

from __future__ import annotations

from soundness.cases import Finding, check_problem
from soundness.parts import check
from soundness.problems import Problem, draw_problem
from soundness.truth import Truth, true_delta

__all__ = ["Finding", "Problem", "Truth", "check", "check_problem", "draw_problem", "true_delta"]
