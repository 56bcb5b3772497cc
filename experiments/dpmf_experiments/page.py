"""docs/results.md, made from results and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dpmf_experiments.claims import CLAIMS, Claim
from dpmf_experiments.figures import catalogue
from dpmf_experiments.findings import AGREES, DIFFERS, FINDINGS, PARTLY, Numbers
from dpmf_experiments.settings import COARSE, FULL
from dpmf_experiments.spec import Cell, FigureSpec
from dpmf_experiments.store import Record

_INTRODUCTION = """\
# Results: the paper's figures, reproduced

Every figure of the paper's experiments on accounting, computed with dpmf's public API, with two additions: dpmf's own
tight accountant and the certified lower bound, below which no accountant can go. "The truth" is the lattice for DP-SGD
(good to 0.1 %) and the importance-sampled Monte Carlo estimate otherwise (good to about half a percent of σ).

`make figures` sets itself up, computes everything, draws it and writes this page, in about half an hour on two cores.
It can be interrupted, or killed, at any moment and goes on where it stopped. Parts of it:

```console
$ dpmf-experiments list
$ dpmf-experiments run fig-main --only bsr4 --jobs 4
$ dpmf-experiments run fig-main --dask tcp://scheduler:8786
$ dpmf-experiments status
$ dpmf-experiments plot fig-main --output pictures
```

The numbers behind this page are in `docs/data/results.json`; `dpmf-experiments plot --data docs/data/results.json` and
`dpmf-experiments report --data docs/data/results.json` make the pictures and the page from them. Each figure is also
there as PDF, for print. Which code made them is said at the end. There are fewer ε and samples than in the paper;
`make figures GRID=--full` has as many, and takes hours. "The paper's orders" are its (p, α) ∈ {1, 2} × {2..25} ∪
{4} × {2..7}, each direction at its own best order.

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
    made: dict[str, Counter[str]] = {}
    for record in records:
        by = record.cell.parameters.get("accountant", {})
        members = "+".join(sorted({member["name"] for member in by.get("members", [by])} if by else []))
        made.setdefault(f"{record.cell.quantity}{' by ' + members if members else ''}", Counter())[record.code] += 1
    rows = [
        f"| {what} | {sum(codes.values())} | {', '.join(f'`{code}`' for code in sorted(codes))} |"
        for what, codes in sorted(made.items())
    ]
    machines = ", ".join(sorted({r.result["machine"] for r in records if r.result and "machine" in r.result}))
    measured = f"Seconds in the figures of runtime were measured on: {machines}. " if machines else ""
    command = f"make figures{' GRID=--full' if full else ''}"
    gaps = f" of {wanted}" if len(records) < wanted else ""
    return (
        f"## What made these numbers\n\n`{command}`: {len(records)}{gaps} cells, {_minutes(records)} minutes of "
        f"computing in all, digest of the results `{_digest(records)}`. {measured}A cell's code is the version of dpmf "
        "and a hash of the modules that its number depends on; a cell with another code than the one there is now is "
        "`stale` in `dpmf-experiments status`, and computed again by the next run.\n\n"
        "| what | cells | code |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def _minutes(records: Iterable[Record]) -> str:
    return f"{sum(float(f'{record.seconds:.3g}') for record in records) / 60:.0f}"


def _digest(records: Iterable[Record]) -> str:
    lines = sorted(json.dumps([r.cell.quantity, r.cell.text, r.code, r.result], sort_keys=True) for r in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


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
        'verdicts are computed from the data, by rules in `dpmf_experiments/claims.py`; "close" means within 10 % of '
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
        f"## {figure.title}\n\nThe paper's {figure.paper}; `{name}`, [PDF](figures/{name}.pdf).\n\n{said}\n\n"
        f"![{figure.title}](figures/{name}.png)\n"
    )
