"""Results on disk: one SQLite file, written as each cell finishes.

One process writes (a lock beside the file sees to it), in write-ahead mode and with every commit flushed: a kill at
any moment loses nothing that was finished. Results of older code are kept, not overwritten.

Every row has a checksum over all its other columns. A row that does not match its own (a flipped bit, a file edited by
hand) is never read: its cell counts as missing, and the next run computes it again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpmf.errors import MissingExtraError
from evidence.fingerprint import code_version
from evidence.spec import Cell

SCHEMA = 2  # 1 had no checksums
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
    checksum TEXT,
    PRIMARY KEY (quantity, parameters, code)
)
"""
_COLUMNS = ("quantity", "parameters", "code", "state", "result", "error", "seconds", "finished")


def checksum(row: Sequence[object]) -> str | None:
    """Over the columns of a row, in the order of `_COLUMNS`; none if there is something in it that JSON cannot say."""
    try:
        return hashlib.sha256(json.dumps(list(row), ensure_ascii=True).encode()).hexdigest()
    except (TypeError, ValueError):
        return None


def _as_text(raw: bytes) -> str:
    """Text as it was written; what is no text any more is changed, and so does not match its checksum."""
    return raw.decode(errors="replace")


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
        """Failed for want of a package is "absent": nothing is wrong with the cell."""
        return "done" if self.error is None else "absent" if self.lacks else "failed"

    @property
    def lacks(self) -> str:
        """What to install, if that is why there is no result."""
        kind, _, words = (self.error or "").partition(": ")
        return words.rpartition(" (")[0] if kind == MissingExtraError.__name__ else ""


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
                raise ValueError(f"database must exist, got {str(path)!r}: `python -m evidence run` makes one")
            if not path.parent.is_dir():
                raise ValueError(f"database must be in an existing directory, got {str(path)!r}")
        try:
            connection = sqlite3.connect(path, timeout=30)
            connection.text_factory = _as_text
            store = cls(path, connection)
            try:
                if cls._check(connection, path, create) != SCHEMA:
                    store._add_checksums()
            except BaseException:
                connection.close()
                raise
        except sqlite3.DatabaseError as error:
            reason = str(error)
            if "not a database" in reason:
                raise ValueError(f"database must be one of evidence, {str(path)!r} is not a database") from None
            raise ValueError(f"database {str(path)!r} cannot be used: {reason}") from None
        return store

    @staticmethod
    def _check(connection: sqlite3.Connection, path: Path, writing: bool) -> int:
        """The format of the database, which is made where there is none; refuse what is not one of ours."""
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
            version = SCHEMA
        elif application != _APPLICATION:
            raise ValueError(f"database must be one of evidence, {str(path)!r} is of another program")
        elif version not in (1, SCHEMA):
            raise ValueError(
                f"database {str(path)!r} has format {version}, this version reads format {SCHEMA}: "
                "name another file with --database"
            )
        if writing:
            connection.execute("PRAGMA synchronous=FULL")
        return int(version)

    def _add_checksums(self) -> None:
        """Bring a database of format 1 to this one, all at once or not at all.

        What it holds is taken as it is, except where it cannot be a result: such rows get no checksum.
        """
        connection = self._connection
        with self.only_writer(), connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA:
                return  # another process was quicker
            damage = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(damage)
            connection.execute("ALTER TABLE results ADD COLUMN checksum TEXT")
            rows = connection.execute(f"SELECT rowid, {', '.join(_COLUMNS)} FROM results").fetchall()
            good = [(checksum(row), place) for place, *row in rows if _plausible(row)]
            connection.executemany("UPDATE results SET checksum = ? WHERE rowid = ?", good)
            connection.execute(f"PRAGMA user_version={SCHEMA}")
        print(
            f"database {str(self.path)!r}: brought from format 1 to {SCHEMA}, {len(good)} results have checksums now",
            file=sys.stderr,
        )

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
        finished = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        row = (
            record.cell.quantity, record.cell.text, record.code, "done" if record.error is None else "failed", result,
            record.error, float(record.seconds), finished,
        )  # fmt: skip
        with self._connection:
            self._connection.execute(
                f"INSERT OR REPLACE INTO results ({', '.join(_COLUMNS)}, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, checksum(row)),
            )

    def adopt(self, records: Iterable[Record]) -> None:
        """Take in results from elsewhere, such as those that are committed, as older than anything computed here."""
        rows = [
            (r.cell.quantity, r.cell.text, r.code, "done", json.dumps(r.result, ensure_ascii=False), None,
             float(r.seconds), "1970-01-01 00:00:00")
            for r in records
        ]  # fmt: skip
        with self._connection:
            self._connection.executemany(
                f"INSERT OR IGNORE INTO results ({', '.join(_COLUMNS)}, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*row, checksum(row)) for row in rows],
            )

    def _rows(self) -> tuple[list[list[Any]], list[int]]:
        """The rows that match their checksum, the newest last, and the places of those that do not."""
        try:
            rows = self._connection.execute(
                f"SELECT rowid, checksum, {', '.join(_COLUMNS)} FROM results ORDER BY finished, rowid"
            ).fetchall()
        except sqlite3.DatabaseError as damage:
            raise ValueError(f"database {str(self.path)!r} is damaged: {damage}") from None
        good, bad = [], []
        for place, kept, *row in rows:
            if kept is not None and kept == checksum(row):
                good.append(row)
            else:
                bad.append(place)
        return good, bad

    def __iter__(self) -> Iterator[Record]:
        """All records that are as they were written, the newest of a cell last."""
        for quantity, text, code, _, result, error, seconds, _ in self._rows()[0]:
            parsed = None if result is None else json.loads(result)
            yield Record(Cell(quantity, text), code, parsed, error, seconds)

    def damaged(self) -> int:
        """How many rows do not match their checksum: they are not read."""
        return len(self._rows()[1])

    def forget_damaged(self) -> int:
        """Remove those rows, and say how many they were; to be called by the only writer."""
        bad = self._rows()[1]
        with self._connection:
            self._connection.executemany("DELETE FROM results WHERE rowid = ?", [(place,) for place in bad])
        return len(bad)

    def standing(self, cells: Iterable[Cell]) -> dict[Cell, str]:
        """For each cell: "done", "failed" or "absent" by the code there is now, "stale" by older code, or "missing"."""
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


def _plausible(row: Sequence[Any]) -> bool:
    """Whether a row without a checksum can be as it was written: JSON where that belongs, a result or else an error."""
    _, parameters, _, state, result, error, seconds, _ = row
    try:
        fits = isinstance(json.loads(parameters), dict) and (result is None or isinstance(json.loads(result), dict))
    except (TypeError, ValueError):
        return False
    return fits and isinstance(seconds, float) and (state == "done") == (error is None) == (result is not None)


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
        raise ValueError(f"data must be numbers exported by evidence, got {str(path)!r} ({error})") from None
