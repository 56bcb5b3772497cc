"""Runs the cells that are missing, and keeps each result the moment it is there."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from evidence import backends
from evidence.spec import Cell
from evidence.store import Record, Store


@dataclass
class Tally:
    """How a run went."""

    known: int = 0
    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    damaged: int = 0  # rows of the database that did not match their checksum
    absent: dict[str, int] = field(default_factory=dict)  # how many cells lack a package, by what there is to do


def missing(store: Store, cells: Sequence[Cell], *, retry_failed: bool) -> list[Cell]:
    """The cells without a result by the code there is now; those that failed only when asked for.

    For want of a package is another matter: that is tried in every run, for it may be there now.
    """
    wanted = ("missing", "stale", "absent", "failed") if retry_failed else ("missing", "stale", "absent")
    return [cell for cell, state in store.standing(cells).items() if state in wanted]


def expected_seconds(store: Store, cells: Sequence[Cell]) -> dict[Cell, float]:
    """A guess at how long each cell takes, from what similar ones took: for the time left, nothing else."""
    took: dict[tuple[str, ...], list[float]] = {}
    for record in store:
        for key in _kinds(record.cell):
            took.setdefault(key, []).append(record.seconds)
    guesses = {}
    for cell in cells:
        known = next((took[key] for key in _kinds(cell) if key in took), [1.0])
        guesses[cell] = max(0.01, statistics.median(known))
    return guesses


def _kinds(cell: Cell) -> list[tuple[str, ...]]:
    """What a cell is like, from very to a little."""
    parameters = cell.parameters
    mechanism, accountant = str(parameters.get("mechanism")), str(parameters.get("accountant"))
    return [(cell.quantity, mechanism, accountant), (cell.quantity, accountant), (cell.quantity,), ()]


def run(
    store: Store, cells: Sequence[Cell], *, jobs: int = -1, dask: str | None = None, retry_failed: bool = False,
    fresh: bool = False,
) -> Tally:  # fmt: skip
    """Compute what is missing, or all with `fresh`. Killed at any moment, the next run goes on from there."""
    with store.only_writer():
        damaged = store.forget_damaged()
        todo = list(dict.fromkeys(cells)) if fresh else missing(store, cells, retry_failed=retry_failed)
        tally = Tally(known=len(dict.fromkeys(cells)) - len(todo), damaged=damaged)
        if not todo:
            return tally
        weights = expected_seconds(store, todo)
        source = backends.on_dask(todo, dask) if dask is not None else backends.on_cores(todo, jobs)
        with closing(source):  # type: ignore[type-var]
            for record in _with_bar(source, weights):
                store.save(record)
                tally.seconds += record.seconds
                if record.state == "done":
                    tally.done += 1
                elif record.state == "absent":
                    tally.absent[record.lacks] = tally.absent.get(record.lacks, 0) + 1
                else:
                    tally.failed += 1
    return tally


def _with_bar(records: Iterator[Record], weights: dict[Cell, float]) -> Iterator[Record]:
    """The same, with a progress bar on standard error if someone is there to see it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[count]}/{task.fields[of]} cells"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[latest]}", style="dim"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600) as bar:
        task = bar.add_task("", total=sum(weights.values()), count=0, of=len(weights), latest="")
        for count, record in enumerate(records, start=1):
            yield record
            if record.state == "failed":
                console.print(
                    f"failed: {record.cell.name}: {record.error}", highlight=False, markup=False, soft_wrap=True
                )
            bar.update(task, advance=weights.get(record.cell, 0.0), count=count, latest=record.cell.name[:60])
