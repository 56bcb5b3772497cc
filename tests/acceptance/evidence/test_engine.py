"""The store that forgets nothing, the engine that fills it, and the fingerprints that tell whose results are stale."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from evidence_cells import SMALL, cell, command, environment, in_process
from waiting import until

import dpmf
from dpmf import store
from dpmf.errors import MissingExtraError
from evidence import backends, engine, fingerprint, quantities
from evidence.results import settings
from evidence.spec import Cell, MechanismSpec, accountant
from evidence.store import Record, Store, export, read_export

# --- the code version ------------------------------------------------------------------------------------------------


def _hash(text: str) -> str:
    return fingerprint._digest({"f": text})


def test_comments_docstrings_and_formatting_are_not_code() -> None:
    one = _hash('def f(x):\n    """Says."""\n    return x + 1\n')
    assert one == _hash('def f( x ):\n    """Says more."""\n    # why\n    return (x + 1)\n')
    assert one != _hash('def f(x):\n    """Says."""\n    return x + 2\n')


def test_a_cell_depends_on_its_own_accountant_only() -> None:
    closure = fingerprint.closure(("dpmf.accountants.renyi", "dpmf.calibration"))
    assert "dpmf.kernels.renyi" in closure
    assert "dpmf.batching" in closure
    assert "dpmf.accountants.chain" not in closure
    assert "dpmf.accountants.chain" in fingerprint.closure(("dpmf.accountants.combined.best",))


def test_code_versions_differ_by_accountant_and_quantity() -> None:
    versions = {
        fingerprint.code_version(one)
        for one in (
            settings.sigma_cell(SMALL, accountant("renyi"), 1.0),
            settings.sigma_cell(SMALL, accountant("chain"), 1.0),
            settings.lower_cell(SMALL, 1.0),
            cell(),
        )
    }
    assert len(versions) == 4
    assert all(version.startswith(dpmf.__version__) for version in versions)


# --- the store -------------------------------------------------------------------------------------------------------


def test_results_come_back_and_stale_ones_are_told_apart(tmp_path: Path) -> None:
    one, other, third = cell(1.0), cell(2.0), cell(3.0)
    with Store.open(tmp_path / "db.sqlite", create=True) as store:
        store.save(Record(one, "0.0+old", {"divergence": 9.0}, None, 0.1))
        store.save(Record(one, fingerprint.code_version(one), {"divergence": 1.0}, None, 0.1))
        store.save(Record(other, "0.0+old", {"divergence": 2.0}, None, 0.1))
    with Store.open(tmp_path / "db.sqlite") as store:
        assert store.standing([one, other, third]) == {one: "done", other: "stale", third: "missing"}
        found = store.results([one, other, third])
        assert {k: v.result for k, v in found.items()} == {one: {"divergence": 1.0}, other: {"divergence": 2.0}}


def filled(path: Path, number: int = 4) -> dict[Cell, Record]:
    """A database, closed again, and what is in it."""
    records = [Record(cell(float(s)), "0.1+x", {"divergence": s / 3}, None, 0.25 * s) for s in range(1, number)]
    records.append(Record(cell(float(number)), "0.1+x", None, "ValueError: no (x.py:1)", 0.5))
    with Store.open(path, create=True) as store:
        for record in records:
            store.save(record)
    return {record.cell: record for record in records}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("result", '{"divergence": 0.3333333}'),
        ("result", "{"),
        ("result", None),
        ("result", b"\xff\xfe"),
        ("parameters", cell(9.0).text),
        ("quantity", "gram"),
        ("code", "0.1+y"),
        ("state", "failed"),
        ("error", "ValueError: no (x.py:1)"),
        ("seconds", 1e9),
        ("finished", "2001-01-01 00:00:00"),
        ("checksum", None),
        ("checksum", "0" * 64),
    ],
)
def test_a_row_that_was_changed_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: object
) -> None:
    # The store is tested, not the processes: a new one for a single cell is nearly all imports.
    monkeypatch.setattr(backends, "on_cores", lambda todo, jobs: (backends.compute(one) for one in todo))
    written = filled(path := tmp_path / "db.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE results SET {column} = ? WHERE parameters = ?", (value, cell(1.0).text))
    connection.close()
    with Store.open(path) as store:
        assert {record.cell: record for record in store} == {k: v for k, v in written.items() if k != cell(1.0)}
        assert store.damaged() == 1
        assert store.results([cell(1.0), cell(9.0)]) == {}
        assert store.standing([cell(1.0)]) == {cell(1.0): "missing"}
    told = in_process("progress", "fig-gram", "--database", str(path), cwd=tmp_path)
    assert "1 damaged results" in told.stderr
    assert told.stderr.count("\n") == 1
    with Store.open(path, create=True) as store:
        tally = engine.run(store, [cell(1.0)], jobs=1)  # computed again, and the damage is gone
        assert (tally.done, tally.damaged) == (1, 1)
        assert store.damaged() == 0


def test_whatever_happens_to_the_file_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """One bit after the other: a row comes back as it was, or not at all, or the file is refused."""
    written = filled(path := tmp_path / "db.sqlite", 12)
    whole = path.read_bytes()
    generator = np.random.default_rng(1)
    refused = fewer = 0
    for bit in generator.choice(8 * len(whole), size=400, replace=False):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        try:
            with Store.open(path) as store:
                found = list(store)
        except ValueError:
            refused += 1
            continue
        assert all(written[record.cell] == record for record in found)
        fewer += len(found) < len(written)
    assert refused > 0
    assert fewer > 0


FORMAT_1 = """
CREATE TABLE results (quantity TEXT NOT NULL, parameters TEXT NOT NULL, code TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('done', 'failed')), result TEXT, error TEXT, seconds REAL NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (quantity, parameters, code))
"""


def format_1(path: Path) -> None:
    """A database as it was before there were checksums, with one row that cannot be right."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id=0x64706d66")
        connection.execute("PRAGMA user_version=1")
        connection.execute(FORMAT_1)
        for sigma, state, result, error in (
            (1.0, "done", '{"divergence": 0.5}', None), (2.0, "failed", None, "ValueError: no (x.py:1)"),
            (3.0, "done", '{"divergence": 0.', None),
        ):  # fmt: skip
            row = ("divergence", cell(sigma).text, "0.1+x", state, result, error, 0.5)
            connection.execute(
                "INSERT INTO results (quantity, parameters, code, state, result, error, seconds) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)", row,
            )  # fmt: skip
    connection.close()


def test_an_older_database_gets_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    format_1(path := tmp_path / "db.sqlite")
    for times in range(2):
        with Store.open(path) as store:
            assert [(record.cell, record.result) for record in store] == [
                (cell(1.0), {"divergence": 0.5}), (cell(2.0), None),
            ]  # fmt: skip
            assert store.damaged() == 1
        said = capsys.readouterr().err
        assert said.count("\n") == (1 if times == 0 else 0)
        assert ("brought from format 1 to 2, 2 results have checksums now" in said) == (times == 0)


def test_an_older_database_in_use_is_left_alone(tmp_path: Path) -> None:
    format_1(path := tmp_path / "db.sqlite")
    before = path.read_bytes()
    other = Store(path, sqlite3.connect(path))
    with other, other.only_writer(), pytest.raises(ValueError, match="in use by another run"):
        Store.open(path)
    assert path.read_bytes() == before


def test_a_package_that_is_not_there_is_one_line_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = MissingExtraError("this needs other: pip install '.[other]' in a clone of dpmf")

    def compute(one: Cell, parent: int) -> Record:
        code = fingerprint.code_version(one)
        return Record(one, code, None, f"{type(lacking).__name__}: {lacking} (x.py:1)", 0.1)

    cells = [cell(1.0), cell(2.0)]
    with Store.open(tmp_path / "db.sqlite", create=True) as store:
        with monkeypatch.context() as patched:
            patched.setattr(backends, "on_cores", lambda todo, jobs: (compute(one, 0) for one in todo))
            tally = engine.run(store, cells, jobs=1)
        assert tally.absent == {str(lacking): 2}
        assert (tally.done, tally.failed) == (0, 0)
        assert set(store.standing(cells).values()) == {"absent"}
        assert engine.run(store, cells, jobs=1).done == 2  # it is there now


def test_export_and_back(tmp_path: Path) -> None:
    records = [Record(cell(s), "0.1+x", {"divergence": s}, None, 0.25) for s in (2.0, 1.0)]
    path = tmp_path / "numbers.json"
    path.write_text(export(records))
    assert read_export(path) == {record.cell: record for record in records}
    assert export(reversed(records)) == path.read_text()


def test_a_second_run_on_the_same_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite"
    with (
        Store.open(path, create=True) as one,
        Store.open(path, create=True) as two,
        one.only_writer(),
        pytest.raises(ValueError, match="in use by another run"),
        two.only_writer(),
    ):
        pass


# --- the engine ------------------------------------------------------------------------------------------------------


def test_failures_are_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    cells = [cell(1.0), cell(1.0, order=5), cell(2.0), cell(3.0)]
    with Store.open(tmp_path / "db.sqlite", create=True) as store:
        tally = engine.run(store, cells, jobs=2)
        assert (tally.done, tally.failed, tally.known) == (3, 1, 0)
        [failed] = [record for record in store if record.error]
        assert failed.error is not None
        assert failed.error.startswith("ValueError: order must be 2 or 3, got 5")
        # Known the second time; tried again only when asked for, in the one process that there is without others.
        again = engine.run(store, cells, jobs=1)
        assert (again.done, again.failed, again.known) == (0, 0, 4)
        retried = engine.run(store, cells, jobs=1, retry_failed=True)
        assert (retried.done, retried.failed, retried.known) == (0, 1, 3)


def test_coefficients_are_found_by_the_code_that_is_recorded(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another optimiser left in the user's store, or in that of other code, is not read."""
    mechanism = MechanismSpec("bandinvmf", 2, 10, 2)
    one = Cell.of("divergence", mechanism=mechanism, order=2, sigma=3.0, bandwidth=1)
    for code in ("one", "other"):
        monkeypatch.setattr(backends, "strategies", lambda code=code: code)
        monkeypatch.setenv("DPMF_CACHE_DIR", str(cache_dir))
        for _ in range(2):
            assert backends.compute(one).error is None
            store.forget()
            quantities._mechanism.cache_clear()
    files = sorted(path.relative_to(cache_dir).parent.as_posix() for path in cache_dir.rglob("*.json"))
    assert files == ["evidence-one", "evidence-other"]


def deadly(one: Cell, parent: int) -> Record:
    if one.parameters["sigma"] == 2.0:
        os.kill(os.getpid(), signal.SIGKILL)
    return backends.compute(one)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_process_that_dies_takes_only_its_own_cell_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(backends, "_compute_in_worker", deadly)
    cells = [cell(float(s)) for s in (1, 2, 3, 4)]
    with Store.open(tmp_path / "db.sqlite", create=True) as store:
        tally = engine.run(store, cells, jobs=jobs)
        assert (tally.done, tally.failed) == (3, 1)
        [failed] = [record for record in store if record.error]
        assert failed.cell == cells[1]
        assert "its process died" in str(failed.error)


def rows(path: Path) -> dict[tuple[str, str], int]:
    """Cells and the place they have in the table, read by another process than the one that writes."""
    if not path.exists():
        return {}
    with sqlite3.connect(path, timeout=10) as connection:
        try:
            found = connection.execute("SELECT parameters, code, rowid FROM results").fetchall()
        except sqlite3.OperationalError:  # no table yet
            return {}
    return {(text, code): row for text, code, row in found}


def test_killed_and_restarted_nothing_is_lost_or_computed_twice(tmp_path: Path) -> None:
    database = tmp_path / "db.sqlite"
    words = ["run", "fig-truncation", "--only", "order=2", "--jobs", "2", "--database", str(database)]
    started = subprocess.Popen(
        [sys.executable, "-m", "evidence", *words], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    until(lambda: len(rows(database)) >= 3 or started.poll() is not None)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = rows(database)
    assert 3 <= len(kept) < 45, "killed too late to say anything"
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = rows(database)
    assert len(after) == 45
    assert {key: after[key] for key in kept} == kept  # neither lost nor written again
    assert f"{45 - len(kept)} cells computed" in done.stdout
    assert f"{len(kept)} known already" in done.stdout


def test_a_cluster_whose_worker_is_killed_still_delivers(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    parameters = {"mechanism": MechanismSpec("dpsgd", 2, 50), "sigma": 5.0, "step": 60, "samples": 60_000}
    cells = [Cell.of("ternary-loss", **parameters, seed=s, low=-1.0, high=1.0, bins=4) for s in range(10)]
    cells.append(cell(1.0, order=5))  # fails, on a cluster as anywhere
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with (
        distributed.LocalCluster(**options, silence_logs=50) as cluster,
        Store.open(tmp_path / "db.sqlite", create=True) as store,
    ):
        victim = next(iter(cluster.workers.values())).pid

        def kill() -> None:
            until(lambda: len(rows(store.path)) >= 2)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        tally = engine.run(store, cells, dask=cluster.scheduler_address)
        killer.join()
        assert (tally.done, tally.failed) == (10, 1)
        assert set(store.standing(cells).values()) == {"done", "failed"}
        here = quantities.ternary_loss(**cells[3].parameters)
        assert store.results(cells)[cells[3]].result == here  # the same number wherever it is computed


def test_time_left_is_guessed_from_similar_cells(tmp_path: Path) -> None:
    with Store.open(tmp_path / "db.sqlite", create=True) as store:
        store.save(Record(cell(1.0), "x", {}, None, 4.0))
        store.save(Record(settings.lower_cell(SMALL, 1.0), "x", {}, None, 50.0))
        guesses = engine.expected_seconds(store, [cell(2.0), settings.lower_cell(SMALL, 2.0)])
    assert list(guesses.values()) == [4.0, 50.0]
