"""docs/results.md, made from results and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evidence.results.claims import CLAIMS, Claim
from evidence.results.figures import catalogue
from evidence.results.findings import AGREES, DIFFERS, FINDINGS, PARTLY, Numbers
from evidence.results.settings import COARSE, FULL
from evidence.say import made_by
from evidence.spec import Cell, FigureSpec
from evidence.store import Record

_INTRODUCTION = """\
# Results: the paper's figures, reproduced

Every figure of the paper's experiments on accounting, computed with dpmf's public API, with two additions: dpmf's own
tight accountant and the certified lower bound, below which no accountant can go. "The truth" is the lattice for DP-SGD
(good to 0.1 %) and the importance-sampled Monte Carlo estimate otherwise (good to about half a percent of σ).

`make figures` sets itself up, computes everything, draws it and writes this page, in about half an hour on two cores.
It can be interrupted, or killed, at any moment and goes on where it stopped. Parts of it:

```console
$ python -m evidence list results
$ python -m evidence run fig-main --only bsr4 --jobs 4
$ python -m evidence run fig-main --dask tcp://scheduler:8786
$ python -m evidence progress
$ python -m evidence plot fig-main --output pictures
```

The numbers behind this page are in `docs/data/results.json`. `python -m evidence plot --data docs/data/results.json`
draws the pictures from them (for print with `--format pdf`), and `python -m evidence report results --data
docs/data/results.json` writes the page. Which code made the numbers is said at the end. There are fewer ε and samples
than in the paper; `make figures GRID=--full` has as many, and takes hours. "The paper's orders" are its (p, α) ∈ {1, 2}
× {2..25} ∪ {4} × {2..7}, each direction at its own best order.

Strategies are as given, not column-normalised; N iterations in k epochs of b = N/k batches; p is the bandwidth.
"""


_OPEN = "not computed"


def page(figures: Sequence[FigureSpec], records: Mapping[Cell, Record]) -> str:
    """The page as markdown. Where cells are missing, it says so instead of drawing conclusions."""
    full = list(figures) == list(catalogue(True).values())
    results = {cell: record.result for cell, record in records.items() if record.result is not None}
    numbers = Numbers(results, FULL if full else COARSE)
    complete = all(cell in results for figure in figures for cell in figure.cells())
    parts = [_INTRODUCTION, _claims(numbers, complete), *(_figure(figure, numbers) for figure in figures)]
    wanted = dict.fromkeys(cell for figure in figures for cell in figure.cells())
    return "\n".join([*parts, _provenance([records[cell] for cell in wanted if cell in records], len(wanted), full)])


def _provenance(records: Sequence[Record], wanted: int, full: bool) -> str:
    """Which command and which code the numbers are from."""
    command = f"make figures{' GRID=--full' if full else ''}"
    return f"## What made these numbers\n\n{made_by(records, command, wanted)}\n"


def _judged(claim: Claim, numbers: Numbers, complete: bool) -> tuple[str, str, str]:
    try:
        return claim.says, *claim.judge(numbers)
    except (LookupError, ValueError, StopIteration):
        if complete:
            raise
        return claim.says, _OPEN, "Its cells are missing in these numbers."


def _claims(numbers: Numbers, complete: bool) -> str:
    judged = [_judged(claim, numbers, complete) for claim in CLAIMS]
    counts = {verdict: sum(row[1] == verdict for row in judged) for verdict in (AGREES, PARTLY, DIFFERS, _OPEN)}
    rows = [
        f"| {says} | {'**' + verdict + '**' if verdict != AGREES else verdict} | {why} |"
        for says, verdict, why in judged
    ]
    rest = f" ({counts[_OPEN]} are not computed yet)" if counts[_OPEN] else ""
    head = (
        f"## Where this agrees with the paper, and where not\n\nOf {len(judged)} claims{rest} the data agrees with "
        f"{counts[AGREES]}, agrees in part with {counts[PARTLY]} and does not agree with {counts[DIFFERS]}. The "
        'verdicts are computed from the data, by rules in `evidence/results/claims.py`; "close" means within 10 % of '
        "the true σ.\n"
    )
    return "\n".join([head, "| the paper says | here | on what grounds |", "|---|---|---|", *rows, ""])


def _figure(figure: FigureSpec, numbers: Numbers) -> str:
    cells = list(figure.cells())
    missing = sum(cell not in numbers.results for cell in cells)
    if missing:
        said = f"Not finished: {missing} of {len(cells)} cells are missing; the picture shows the rest."
    else:
        said = FINDINGS[figure.name](numbers)
    name = figure.name
    return (
        f"## {figure.title}\n\nThe paper's {figure.paper}; `{name}`.\n\n{said}\n\n"
        f"![{figure.title}](figures/{name}.png)\n"
    )
