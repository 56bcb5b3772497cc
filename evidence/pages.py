"""The pages that are made from numbers: which cells each consists of, how it is written, and whether it is stale.

Numbers are committed beside the pages, in ``docs/data/<page>.json``: one line for each cell, with the code that made
it. A run keeps them in a database (`store`) until they are exported there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import dpmf
from evidence import batchings, fingerprint, mechanisms, tightness, training
from evidence.pictures import write_png
from evidence.say import made_by, with_block
from evidence.spec import Cell
from evidence.store import Record, read_export

DOCS = Path("docs")  # of the checkout that the command is run in
Records = Mapping[Cell, Record]


@dataclass(frozen=True)
class Page:
    """A page, the command that makes it, and its cells in named sets (figures, claims).

    A page without `sets` is measured as a whole by a command of its own: its cells are those that its data has.
    """

    name: str
    command: str
    sets: Callable[[bool], Mapping[str, Sequence[Cell]]] | None = None
    write: Callable[[str, Records, bool], str] | None = None  # the page as it was, the records, full → the page
    draw: Callable[[Records, Path], list[Path]] | None = None

    @property
    def path(self) -> Path:
        return DOCS / f"{self.name}.md"

    @property
    def data(self) -> Path:
        return DOCS / "data" / f"{self.name}.json"

    def cells(self, full: bool = False) -> list[Cell]:
        """Its cells, each once."""
        if self.sets is None:
            return list(self.committed())
        return list(dict.fromkeys(cell for cells in self.sets(full).values() for cell in cells))

    def committed(self) -> dict[Cell, Record]:
        """What is committed of it; nothing before the first export."""
        return read_export(self.data) if self.data.exists() else {}


def _of(records: Records, cells: Iterable[Cell]) -> list[Record]:
    return [records[cell] for cell in cells if cell in records]


def _results(records: Records) -> dict[Cell, dict[str, Any]]:
    return {cell: record.result for cell, record in records.items() if record.result is not None}


# --- docs/results.md -------------------------------------------------------------------------------------------------


def _figures(full: bool) -> dict[str, Sequence[Cell]]:
    from evidence.results.figures import catalogue

    return {name: list(figure.cells()) for name, figure in catalogue(full).items()}


def _results_page(_: str, records: Records, full: bool) -> str:
    from evidence.results.figures import catalogue
    from evidence.results.page import page

    return page(list(catalogue(full).values()), records)


# --- docs/tightness.md -----------------------------------------------------------------------------------------------


def _tightness_page(before: str, records: Records, full: bool) -> str:
    for name, block in tightness.BLOCKS.items():
        before = with_block(before, name, block(_results(records)))
    wanted = tightness.cells()
    return with_block(before, "code", made_by(_of(records, wanted), PAGES["tightness"].command, len(wanted)))


# --- docs/batchings.md and docs/mechanisms.md ------------------------------------------------------------------------


def _tabulated(name: str, module: ModuleType) -> Page:
    """A page with one table and one picture of its own module."""

    def write(before: str, records: Records, full: bool) -> str:
        before = with_block(before, "table", module.tabulated(_results(records)))
        wanted = module.cells()
        return with_block(before, "code", made_by(_of(records, wanted), PAGES[name].command, len(wanted)))

    def draw(records: Records, directory: Path) -> list[Path]:
        return list(module.drawn(_results(records), directory))

    return Page(name, f"python -m evidence make {name}", lambda full: {name: module.cells()}, write, draw)


# --- docs/accountants.md ---------------------------------------------------------------------------------------------


def _claims(full: bool) -> dict[str, Sequence[Cell]]:
    from evidence.accountants import CLAIMS

    return {claim.name: list(claim.cells.values()) for claim in CLAIMS.values()}


def _found(claim: Any, records: Records) -> dict[str, dict[str, Any]] | None:
    """The results of a claim by name; None unless all are there."""
    results = _results(records)
    if not all(cell in results for cell in claim.cells.values()):
        return None
    return {key: results[cell] for key, cell in claim.cells.items()}


def _accountants_page(before: str, records: Records, full: bool) -> str:
    """A claim of which cells are missing keeps its words, table and picture."""
    from evidence.accountants import CLAIMS

    for name, claim in CLAIMS.items():
        if (found := _found(claim, records)) is not None:
            before = with_block(before, name, claim.block(found))
    wanted = PAGES["accountants"].cells()
    return with_block(before, "code", made_by(_of(records, wanted), PAGES["accountants"].command, len(wanted)))


def _accountants_pictures(records: Records, directory: Path) -> list[Path]:
    from evidence.accountants import CLAIMS

    written = []
    for name, claim in CLAIMS.items():
        if (found := _found(claim, records)) is not None:
            written.append(directory / f"{name}.png")
            write_png(written[-1], claim.draw(found), dpi=130)
    return written


# --- docs/training.md ------------------------------------------------------------------------------------------------


def _training_page(before: str, records: Records, full: bool) -> str:
    """The tables of accuracies are written by the examples; what is proved of their noise stands beside them."""
    before = with_block(before, "proved", training.tabulated(_results(records)))
    wanted = training.cells(full)
    return with_block(before, "code", made_by(_of(records, wanted), PAGES["training"].command, len(wanted)))


# --- all of them -----------------------------------------------------------------------------------------------------

PAGES = {
    page.name: page
    for page in (
        Page("results", "make figures", _figures, _results_page),
        Page(
            "tightness",
            "python -m evidence make tightness",
            lambda full: {"tightness": tightness.cells()},
            _tightness_page,
            lambda records, directory: tightness.drawn(_results(records), directory),
        ),
        _tabulated("batchings", batchings),
        _tabulated("mechanisms", mechanisms),
        Page("accountants", "python -m evidence make accountants", _claims, _accountants_page, _accountants_pictures),
        Page(
            "training",
            "python -m evidence make training",
            lambda full: {"training": training.cells(full)},
            _training_page,
        ),
        Page("benchmarks", "make benchmark"),
        Page("concepts", "python -m evidence pictures"),
        Page("explore", "python -m evidence pictures explore"),
    )
}


@dataclass(frozen=True)
class Standing:
    """How a page stands: how many of its cells were made by which code, and whether that is the code there is now."""

    page: str
    command: str
    codes: Counter[str]
    current: int = 0
    stale: int = 0
    missing: int = 0

    @property
    def verdict(self) -> str:
        return "stale" if self.stale else "incomplete" if self.missing else "as the code is now"


def standing(page: Page) -> Standing:
    """The page's committed numbers beside the code there is now."""
    records = page.committed()
    cells = page.cells()
    current = sum(cell in records and records[cell].code == fingerprint.code_version(cell) for cell in cells)
    there = sum(cell in records for cell in cells)
    codes = Counter(records[cell].code for cell in cells if cell in records)
    return Standing(page.path.as_posix(), page.command, codes, current, there - current, len(cells) - there)


def soundness() -> Standing:
    """The same for docs/soundness.md, whose parts are kept by the campaign itself."""
    data = json.loads((DOCS / "data" / "soundness.json").read_text(encoding="utf-8"))
    codes: Counter[str] = Counter()
    current = 0
    for part in data.values():
        code = part.get("code", {})
        made = f"{code['version']}+{code['accounting']}" if code else fingerprint.NOT_RECORDED
        codes[made] += 1
        current += made == f"{dpmf.__version__}+{fingerprint.accounting()}"
    return Standing((DOCS / "soundness.md").as_posix(), "make soundness fuzz faults", codes, current,
                    len(data) - current)  # fmt: skip


def _training() -> Standing:
    """How docs/training.md stands: its runs hold as long as the code there is now proves their noise multipliers."""
    page = PAGES["training"]
    plain, records = standing(page), page.committed()
    now = {
        cell: record.result
        for cell, record in records.items()
        if record.result is not None and record.code == fingerprint.code_version(cell)
    }
    current = training.held(training.everything(), now)
    return replace(plain, current=current, stale=plain.current + plain.stale - current)


def standings() -> list[Standing]:
    """Every page that shows measured numbers or pictures of them."""
    if not (DOCS / "data").is_dir():
        raise ValueError("the pages must be there: run this from the root of a checkout of dpmf")
    return [*(standing(page) for page in PAGES.values() if page.name != "training"), soundness(), _training()]
