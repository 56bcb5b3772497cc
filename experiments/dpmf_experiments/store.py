"""Results on disk: one SQLite file, written as each cell finishes.

One process writes (a lock beside the file sees to it), in write-ahead mode and with every commit flushed: a kill at
any moment loses nothing that was finished. Results of older code are kept, not overwritten.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpmf_experiments.fingerprint import code_version
from dpmf_experiments.spec import Cell

SCHEMA = 1
_APPLICATION = 0x64706D66  # "dpmf"
_TABLE = """
CREATE TABLE results (
    quantity TEXT NOT NULL,
    parameters TEXT NOT NULL,
    code TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('done', 'failed')),
    result TEXT,
    error TEXT,
    seconds REAL NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (quantity, parameters, code)
)
"""


@dataclass(frozen=True)
class Record:
    """What became of a cell: a result, or the error that there was instead."""

    cell: Cell
    code: str
    result: dict[str, Any] | None
    error: str | None
    seconds: float

    @property
    def state(self) -> str:
        return "done" if self.error is None else "failed"


class Store:
    """A database of results. `Store.open` refuses, in one line, a file that is not one."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Store:
        if path.is_dir():
            raise ValueError(f"database must be a file, got the directory {str(path)!r}")
        if not path.exists():
            if not create:
                raise ValueError(f"database must exist, got {str(path)!r}: `dpmf-experiments run` makes one")
            if not path.parent.is_dir():
                raise ValueError(f"database must be in an existing directory, got {str(path)!r}")
        try:
            connection = sqlite3.connect(path, timeout=30)
            try:
                cls._check(connection, path, create)
            except BaseException:
                connection.close()
                raise
        except sqlite3.DatabaseError as error:
            reason = str(error)
            if "not a database" in reason:
                raise ValueError(f"database must be one of dpmf-experiments, {str(path)!r} is not a database") from None
            raise ValueError(f"database {str(path)!r} cannot be used: {reason}") from None
        return cls(path, connection)

    @staticmethod
    def _check(connection: sqlite3.Connection, path: Path, writing: bool) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not tables and application == 0 and writing:
            connection.execute("PRAGMA journal_mode=WAL")
            with connection:
                # Begun by hand: Python would commit each by itself, and a kill between two leave half a database.
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"PRAGMA application_id={_APPLICATION}")
                connection.execute(f"PRAGMA user_version={SCHEMA}")
                connection.execute(_TABLE)
        elif application != _APPLICATION:
            raise ValueError(f"database must be one of dpmf-experiments, {str(path)!r} is of another program")
        elif version != SCHEMA:
            raise ValueError(
                f"database {str(path)!r} has format {version}, this version of dpmf-experiments reads format {SCHEMA}: "
                "name another file with --database"
            )
        if writing:
            connection.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Refuse a second run on the same database: it would compute everything twice."""
        lock = self.path.with_name(self.path.name + ".lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"database {str(self.path)!r} is in use by another run") from None
            yield  # the lock goes with the process, however it ends
        finally:
            os.close(handle)

    def save(self, record: Record) -> None:
        result = None if record.result is None else json.dumps(record.result, ensure_ascii=False)
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO results (quantity, parameters, code, state, result, error, seconds) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    record.cell.quantity, record.cell.text, record.code, record.state, result, record.error,
                    record.seconds,
                ),
            )  # fmt: skip

    def __iter__(self) -> Iterator[Record]:
        """All records, the newest of a cell last."""
        try:
            rows = self._connection.execute(
                "SELECT quantity, parameters, code, result, error, seconds FROM results ORDER BY finished, rowid"
            ).fetchall()
        except sqlite3.DatabaseError as damage:
            raise ValueError(f"database {str(self.path)!r} is damaged: {damage}") from None
        for quantity, text, code, result, error, seconds in rows:
            parsed = None if result is None else json.loads(result)
            yield Record(Cell(quantity, text), code, parsed, error, seconds)

    def standing(self, cells: Iterable[Cell]) -> dict[Cell, str]:
        """For each cell: "done" or "failed" with the code there is now, "stale" with older code only, or "missing"."""
        known: dict[Cell, dict[str, str]] = {}
        for record in self:
            known.setdefault(record.cell, {})[record.code] = record.state
        return {
            cell: known[cell].get(code_version(cell), "stale") if cell in known else "missing"
            for cell in dict.fromkeys(cells)
        }

    def results(self, cells: Iterable[Cell]) -> dict[Cell, Record]:
        """The result of each cell that has one: with the code there is now or else the newest."""
        wanted = set(cells)
        found: dict[Cell, Record] = {}
        for record in self:
            if record.cell not in wanted or record.result is None:
                continue
            if record.cell not in found or found[record.cell].code != code_version(record.cell):
                found[record.cell] = record
        return found


def export(records: Iterable[Record]) -> str:
    """Records as JSON, one line each, in an order of their own: small differences stay small."""
    lines = sorted(
        json.dumps(
            {
                "quantity": r.cell.quantity,
                "parameters": r.cell.parameters,
                "code": r.code,
                "seconds": float(f"{r.seconds:.3g}"),
                "result": r.result,
            },
            ensure_ascii=False,
        )
        for r in records
    )
    return "[\n" + ",\n".join(lines) + "\n]\n"


def read_export(path: Path) -> dict[Cell, Record]:
    """What `export` wrote."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {
            (cell := Cell.of(row["quantity"], **row["parameters"])): Record(
                cell, row["code"], row["result"], None, row["seconds"]
            )
            for row in rows
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data must be numbers exported by dpmf-experiments, got {str(path)!r} ({error})") from None
