"""The command line, ``python -m evidence``. A wrong argument is one line on stderr and exit status 2."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from evidence.pages import Page
    from evidence.spec import Cell
    from evidence.store import Record, Store

DATABASE = Path("evidence.sqlite")
FIGURES, PICTURES = Path("docs/figures"), Path("docs/pictures")

app = typer.Typer(
    name="evidence",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="The measured numbers of the documentation: computed, kept, drawn and written. Run it from the root of a "
    "checkout; interrupt it at any moment, and it goes on where it stopped.",
)

_PAGES = "results, tightness, batchings, mechanisms, accountants, training"
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="Pages (results, tightness, batchings, mechanisms, accountants, training), figures, claims; all if none.",
    ),
]
PageNames = Annotated[list[str], typer.Argument(metavar="PAGE...", help=f"Pages: {_PAGES}.")]
PageName = Annotated[str, typer.Argument(metavar="PAGE", help=f"A page: {_PAGES}.")]
Only = Annotated[str | None, typer.Option(help="Only cells with this text in their name, such as bsr4 or monte-carlo.")]
Database = Annotated[Path, typer.Option(help="Where results are kept.")]
Full = Annotated[
    bool,
    typer.Option(
        "--full", help="The paper's own grids for its figures: hours, not minutes. Mechanisms that were not trained."
    ),
]
Data = Annotated[Path | None, typer.Option(help="Exported numbers (.json) instead of the database.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Compute again even what this code has computed.")]
Jobs = Annotated[int, typer.Option(help="Processes; -1: one for each core.")]


def _sets(names: Sequence[str] | None, full: bool) -> "dict[str, Sequence[Cell]]":
    """The sets of cells with these names; the name of a page stands for all of its sets."""
    from evidence.pages import PAGES

    by_page = {page.name: dict(page.sets(full)) for page in PAGES.values() if page.sets is not None}
    known = {name: cells for sets in by_page.values() for name, cells in sets.items()}
    chosen: dict[str, Sequence[Cell]] = {}
    for name in names or by_page:
        if name not in by_page and name not in known:
            raise ValueError(f"name must be one of {', '.join(dict.fromkeys([*by_page, *known]))}, got {name!r}")
        chosen |= by_page.get(name) or {name: known[name]}
    return chosen


def _page(name: str) -> "Page":
    from evidence.pages import PAGES

    known = [page.name for page in PAGES.values() if page.sets is not None]
    if name not in known:
        raise ValueError(f"page must be one of {', '.join(known)}, got {name!r}")
    return PAGES[name]


def _cells(sets: "dict[str, Sequence[Cell]]", only: str | None) -> "list[Cell]":
    cells = list(dict.fromkeys(cell for some in sets.values() for cell in some))
    if only is None:
        return cells
    found = [cell for cell in cells if only.lower() in cell.name.lower()]
    if not found:
        raise ValueError(f"only must be part of a cell's name (`python -m evidence list --cells`), got {only!r}")
    return found


@app.command()
def status(
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 if any is stale or incomplete.")] = False,
) -> None:
    """Every page with measured numbers: the code that made it, the code now, and whether it is stale."""
    import dpmf
    from evidence import fingerprint
    from evidence.pages import standings

    print(f"The code that bounds depend on is now {dpmf.__version__}+{fingerprint.accounting()}.")
    print("A cell's own code covers the modules that its number depends on, and can be older than that.\n")
    print(f"{'page':22} {'cells':>6} {'as now':>7} {'stale':>6} {'missing':>8}  verdict")
    found = standings()
    for page in found:
        total = page.current + page.stale + page.missing
        print(f"{page.page:22} {total:6} {page.current:7} {page.stale:6} {page.missing:8}  {page.verdict}")
        made = ", ".join(f"{code} ({count})" for code, count in page.codes.most_common(3))
        others = f" and {len(page.codes) - 3} others" if len(page.codes) > 3 else ""
        print(f"    made by `{page.command}` with code {made or 'none'}{others}")
    if check and any(page.stale or page.missing for page in found):
        raise typer.Exit(1)


@app.command("list")
def list_(
    names: Names = None,
    cells: Annotated[bool, typer.Option("--cells", help="Name every cell.")] = False,
    only: Only = None,
    full: Full = False,
) -> None:
    """The figures and claims, and how many cells each has."""
    sets = _sets(names, full)
    wanted = set(_cells(sets, only))
    for name, its in sets.items():
        chosen = [cell for cell in its if cell in wanted]
        if chosen:
            print(f"{name:20} {len(chosen):4} cells")
        for cell in chosen if cells else ():
            print(f"    {cell.name}")


@app.command()
def run(
    names: Names = None,
    only: Only = None,
    jobs: Jobs = -1,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Dask cluster at this address.")
    ] = None,
    database: Database = DATABASE,
    full: Full = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try cells again that failed.")] = False,
    fresh: Fresh = False,
) -> None:
    """Compute what is missing or stale. Each result is kept as soon as it is there."""
    from evidence import engine
    from evidence.pages import PAGES
    from evidence.store import Store

    if jobs < 1 and jobs != -1:
        raise ValueError(f"jobs must be at least 1, or -1 for one on each core, got {jobs}")
    cells = _cells(_sets(names, full), only)
    # One thread for each process: as many processes as cores are all that helps, and seconds mean the same everywhere.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    with Store.open(database, create=True) as store:
        for page in PAGES.values():
            if page.sets is not None:  # all of it, so that an export after a run of some cells has the others, too
                store.adopt(page.committed().values())
        tally = engine.run(store, cells, jobs=jobs, dask=dask, retry_failed=retry_failed, fresh=fresh)
    if tally.damaged:
        _note(f"{tally.damaged} damaged results in {database}, which did not match their checksum, were dropped")
    for remedy, number in tally.absent.items():
        _note(f"{number} cells left out: {remedy}")
    failed = f", {tally.failed} failed (see: python -m evidence progress --failed)" if tally.failed else ""
    print(f"{tally.done} cells computed in {tally.seconds:.0f} s of work, {tally.known} known already{failed}")


@app.command()
def progress(
    names: Names = None,
    only: Only = None,
    database: Database = DATABASE,
    full: Full = False,
    failed: Annotated[bool, typer.Option("--failed", help="Show the errors of cells that failed.")] = False,
) -> None:
    """How far a run is, from its database. Stale: computed by older code; absent: for want of a package."""
    from evidence.store import Store

    sets = _sets(names, full)
    with Store.open(database) as store:
        _tell_of_damage(store)
        states = ("done", "stale", "failed", "absent", "missing")
        print(f"{'figure or claim':20} " + " ".join(f"{state:>8}" for state in states))
        for name, cells in sets.items():
            standing = list(store.standing(cells).values())
            print(f"{name:20} " + " ".join(f"{standing.count(state):8}" for state in states))
        if failed:
            wanted = set(_cells(sets, only))
            for record in store:
                if record.error is not None and record.cell in wanted:
                    print(f"{record.cell.name}\n    {record.error}")


def _results(cells: "Sequence[Cell]", database: Path, data: Path | None) -> "dict[Cell, Record]":
    """From the export where one is named, else from the database."""
    from evidence.store import Store, read_export

    if data is not None:
        if not data.is_file():
            raise ValueError(f"data must be a file, got {str(data)!r}")
        found = read_export(data)
        return {cell: found[cell] for cell in cells if cell in found}
    with Store.open(database) as store:
        _tell_of_damage(store)
        return store.results(cells)


def _directory(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ValueError(f"output must be a directory, got the file {str(path)!r}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output {str(path)!r} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"output must be a writable directory, got {str(path)!r}")
    return path


@app.command()
def plot(
    names: Names = None,
    database: Database = DATABASE,
    data: Data = None,
    output: Annotated[Path, typer.Option(help="Directory for the pictures.")] = FIGURES,
    kind: Annotated[str, typer.Option("--format", help="png, or pdf for print.")] = "png",
    full: Full = False,
) -> None:
    """Draw figures of the paper from the results there are."""
    from evidence.results.figures import catalogue

    known = catalogue(full)
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"figure must be one of {', '.join(known)}, got {unknown[0]!r}")
    if kind not in ("png", "pdf"):
        raise ValueError(f"format must be one of png, pdf, got {kind!r}")
    figures = [known[name] for name in dict.fromkeys(names or known)]
    _directory(output)
    results = _results([cell for figure in figures for cell in figure.cells()], database, data)
    from evidence.results import draw

    for figure in figures:
        cells = list(figure.cells())
        there = {cell: results[cell].result or {} for cell in cells if cell in results}
        if not there:
            print(f"{figure.name}: nothing computed yet, not drawn", file=sys.stderr)
            continue
        path = draw.write(draw.picture(figure, there), output, figure.name, kind)
        missing = len(cells) - len(there)
        gaps = f" ({missing} of {len(cells)} cells missing)" if missing else ""
        print(f"{figure.name}: {path}{gaps}")


@app.command()
def export(
    name: PageName,
    database: Database = DATABASE,
    output: Annotated[Path | None, typer.Option(help="The file (.json); docs/data/PAGE.json if none.")] = None,
    full: Full = False,
) -> None:
    """Write the numbers of a page as JSON, to be committed beside it."""
    from dpmf.files import write_atomically
    from dpmf.report import checked_output
    from evidence.store import export as as_json

    page = _page(name)
    output = page.data if output is None else output
    checked_output(output, (".json",))
    records = _results(page.cells(full), database, None)
    write_atomically(output, as_json(records.values()).encode())
    print(f"{len(records)} cells in {output}")


@app.command()
def report(
    name: PageName,
    database: Database = DATABASE,
    data: Data = None,
    output: Annotated[Path | None, typer.Option(help="The page (.md); docs/PAGE.md if none.")] = None,
    pictures: Annotated[Path, typer.Option(help="Directory for the page's own pictures.")] = PICTURES,
    full: Full = False,
) -> None:
    """Write a page and its pictures from the numbers there are."""
    from dpmf.files import write_atomically
    from dpmf.report import checked_output

    page = _page(name)
    output = page.path if output is None else output
    checked_output(output, (".md",))
    cells = page.cells(full)
    records = _results(cells, database, data)
    missing = [cell for cell in cells if cell not in records]
    if missing:
        print(f"{len(missing)} cells are missing, and the page says so: {missing[0].name}, ...", file=sys.stderr)
    assert page.write is not None
    before = page.path.read_text(encoding="utf-8") if page.path.exists() else ""
    write_atomically(output, page.write(before, records, full).encode())
    drawn = page.draw(records, _directory(pictures)) if page.draw is not None else []
    beside = f", {len(drawn)} pictures in {pictures}" if drawn else ""
    print(f"{len(records)} cells in {output}{beside}")


@app.command()
def make(
    names: PageNames, only: Only = None, jobs: Jobs = -1, database: Database = DATABASE, fresh: Fresh = False
) -> None:
    """Compute what is missing of these pages, export it, and write the pages and their pictures."""
    pages = [_page(name) for name in names]
    run(names, only=only, jobs=jobs, database=database, fresh=fresh)
    for page in pages:
        export(page.name, database=database)
        report(page.name, database=database)


@app.command()
def pictures(
    names: Annotated[list[str] | None, typer.Argument(metavar="[PICTURE]...", help="All of them if none.")] = None,
) -> None:
    """Draw the pictures of docs/concepts.md and docs/explore.md, and record which code drew them."""
    from dpmf.files import write_atomically
    from evidence.concepts import DRAWINGS, drawn, drawn_by
    from evidence.pages import PAGES
    from evidence.say import with_block
    from evidence.store import export as as_json

    known = [name for drawings in DRAWINGS.values() for name in drawings]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"picture must be one of {', '.join(known)}, got {unknown[0]!r}")
    for page_name, drawings in DRAWINGS.items():
        page = PAGES[page_name]
        records = page.committed()
        for name in drawings:
            if not names or name in names:
                record = drawn(page_name, name, _directory(PICTURES))
                records[record.cell] = record
                print(f"wrote {PICTURES / name}.png", flush=True)
        write_atomically(page.data, as_json(records.values()).encode())
        before = page.path.read_text(encoding="utf-8")
        write_atomically(page.path, with_block(before, "code", drawn_by(records.values())).encode())


def _note(message: str) -> None:
    print(f"evidence: {message}", file=sys.stderr)


def _tell_of_damage(store: "Store") -> None:
    if number := store.damaged():
        _note(f"{number} damaged results in {store.path}, which do not match their checksum, are left out: run again")


def _fail(message: str, status: int = 2) -> NoReturn:
    print(f"evidence: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Entry point: every foreseeable failure is one line on stderr and exit status 2."""
    try:
        status = app(standalone_mode=False)
    except (ValueError, ImportError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        _fail("interrupted; what was finished is kept, run it again to go on", 130)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own usage errors
            _fail(error.format_message())
        if type(error).__name__ == "Abort":
            _fail("interrupted; what was finished is kept, run it again to go on", 130)
        raise
    if status == 130:  # how the command line answers an interrupt
        _fail("interrupted; what was finished is kept, run it again to go on", 130)
    sys.exit(status if isinstance(status, int) else 0)
