"""The command line, ``dpmf-experiments``. A wrong argument is one line on stderr and exit status 2."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from dpmf_experiments.spec import Cell, FigureSpec
    from dpmf_experiments.store import Record, Store

DATABASE = Path("dpmf-experiments.sqlite")
DATA = Path("docs/data/results.json")
PICTURES = Path("docs/figures")
PAGE = Path("docs/results.md")

app = typer.Typer(
    name="dpmf-experiments",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="The figures of the paper: computed, kept and drawn. Interrupt it at any moment; it goes on where it stopped.",
)

Names = Annotated[list[str] | None, typer.Argument(metavar="[FIGURE]...", help="Figures; all of them if none.")]
Only = Annotated[str | None, typer.Option(help="Only cells with this text in their name, such as bsr4 or monte-carlo.")]
Database = Annotated[Path, typer.Option(help="Where results are kept.")]
Full = Annotated[bool, typer.Option("--full", help="The paper's own grids: hours instead of minutes.")]
Data = Annotated[Path | None, typer.Option(help="Exported numbers (.json) instead of the database.")]


def _figures(names: Sequence[str] | None, full: bool) -> "list[FigureSpec]":
    from dpmf_experiments.figures import catalogue

    known = catalogue(full)
    for name in names or ():
        if name not in known:
            raise ValueError(f"figure must be one of {', '.join(known)}, got {name!r}")
    return [known[name] for name in dict.fromkeys(names or known)]


def _cells(figures: "Sequence[FigureSpec]", only: str | None) -> "list[Cell]":
    cells = list(dict.fromkeys(cell for figure in figures for cell in figure.cells()))
    if only is None:
        return cells
    found = [cell for cell in cells if only.lower() in cell.name.lower()]
    if not found:
        raise ValueError(f"only must be part of a cell's name (`dpmf-experiments list --cells`), got {only!r}")
    return found


@app.command("list")
def list_(
    names: Names = None,
    cells: Annotated[bool, typer.Option("--cells", help="Name every cell.")] = False,
    only: Only = None,
    full: Full = False,
) -> None:
    """The figures, and how many cells each has."""
    figures = _figures(names, full)
    wanted = set(_cells(figures, only))
    for figure in figures:
        chosen = [cell for cell in figure.cells() if cell in wanted]
        if chosen:
            print(f"{figure.name:20} {len(chosen):4} cells  {figure.title}")
        for cell in chosen if cells else ():
            print(f"    {cell.name}")


@app.command()
def run(
    names: Names = None,
    only: Only = None,
    jobs: Annotated[int, typer.Option(help="Processes; -1: one for each core.")] = -1,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Dask cluster at this address.")
    ] = None,
    database: Database = DATABASE,
    full: Full = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try cells again that failed.")] = False,
) -> None:
    """Compute what is missing. Each result is kept as soon as it is there."""
    from dpmf_experiments import engine
    from dpmf_experiments.store import Store

    if jobs < 1 and jobs != -1:
        raise ValueError(f"jobs must be at least 1, or -1 for one on each core, got {jobs}")
    cells = _cells(_figures(names, full), only)
    # One thread for each process: as many processes as cores are all that helps, and seconds mean the same everywhere.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    with Store.open(database, create=True) as store:
        tally = engine.run(store, cells, jobs=jobs, dask=dask, retry_failed=retry_failed)
    if tally.damaged:
        _note(f"{tally.damaged} damaged results in {database}, which did not match their checksum, were dropped")
    for remedy, number in tally.absent.items():
        _note(f"{number} cells left out: {remedy}")
    failed = f", {tally.failed} failed (see: dpmf-experiments status --failed)" if tally.failed else ""
    print(f"{tally.done} cells computed in {tally.seconds:.0f} s of work, {tally.known} known already{failed}")


@app.command()
def status(
    names: Names = None,
    only: Only = None,
    database: Database = DATABASE,
    full: Full = False,
    failed: Annotated[bool, typer.Option("--failed", help="Show the errors of cells that failed.")] = False,
) -> None:
    """How far each figure is. Stale: computed by older code; absent: for want of a package."""
    from dpmf_experiments.store import Store

    figures = _figures(names, full)
    with Store.open(database) as store:
        _tell_of_damage(store)
        states = ("done", "stale", "failed", "absent", "missing")
        print(f"{'figure':20} " + " ".join(f"{state:>8}" for state in states))
        for figure in figures:
            standing = list(store.standing(_cells([figure], None)).values())
            print(f"{figure.name:20} " + " ".join(f"{standing.count(state):8}" for state in states))
        if failed:
            wanted = set(_cells(figures, only))
            for record in store:
                if record.error is not None and record.cell in wanted:
                    print(f"{record.cell.name}\n    {record.error}")


def _results(figures: "Sequence[FigureSpec]", database: Path, data: Path | None) -> "dict[Cell, Record]":
    """From the export where one is named, else from the database."""
    from dpmf_experiments.store import Store, read_export

    cells = _cells(figures, None)
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
    output: Annotated[Path, typer.Option(help="Directory for the pictures.")] = PICTURES,
    full: Full = False,
) -> None:
    """Draw figures (PDF and PNG) from the results there are."""
    figures = _figures(names, full)
    _directory(output)
    results = _results(figures, database, data)
    from dpmf_experiments import draw

    for figure in figures:
        cells = list(figure.cells())
        there = {cell: results[cell].result or {} for cell in cells if cell in results}
        if not there:
            print(f"{figure.name}: nothing computed yet, not drawn", file=sys.stderr)
            continue
        paths = draw.write(draw.picture(figure, there), output, figure.name)
        missing = len(cells) - len(there)
        gaps = f" ({missing} of {len(cells)} cells missing)" if missing else ""
        print(f"{figure.name}: {', '.join(str(path) for path in paths)}{gaps}")


@app.command()
def export(
    database: Database = DATABASE,
    output: Annotated[Path, typer.Option(help="The file (.json).")] = DATA,
    full: Full = False,
) -> None:
    """Write all numbers as JSON, to be kept beside the pictures."""
    from dpmf.files import write_atomically
    from dpmf.report import checked_output
    from dpmf_experiments.store import export as as_json

    checked_output(output, (".json",))
    records = _results(_figures(None, full), database, None)
    write_atomically(output, as_json(records.values()).encode())
    print(f"{len(records)} cells in {output}")


@app.command()
def report(
    database: Database = DATABASE,
    data: Data = None,
    output: Annotated[Path, typer.Option(help="The page (.md).")] = PAGE,
    full: Full = False,
) -> None:
    """Write the page that shows all figures and compares them with the paper's claims."""
    from dpmf.files import write_atomically
    from dpmf.report import checked_output
    from dpmf_experiments.page import page

    checked_output(output, (".md",))
    figures = _figures(None, full)
    records = _results(figures, database, data)
    missing = list(dict.fromkeys(cell for figure in figures for cell in figure.cells() if cell not in records))
    if missing:
        print(f"{len(missing)} cells are missing, and the page says so: {missing[0].name}, ...", file=sys.stderr)
    write_atomically(output, page(figures, records).encode())
    print(f"{len(figures)} figures in {output}")


def _note(message: str) -> None:
    print(f"dpmf-experiments: {message}", file=sys.stderr)


def _tell_of_damage(store: "Store") -> None:
    if number := store.damaged():
        _note(f"{number} damaged results in {store.path}, which do not match their checksum, are left out: run again")


def _fail(message: str, status: int = 2) -> NoReturn:
    print(f"dpmf-experiments: {' '.join(message.split())}", file=sys.stderr)
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
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
