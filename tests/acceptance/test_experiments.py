"""The figures: specs, the engine that forgets nothing, the command line, the pictures."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import paths
import pytest

import dpmf
from dpmf.accountants import Renyi
from dpmf.errors import MissingExtraError
from evidence import backends, draw, engine, figures, fingerprint, page, quantities, settings
from evidence.spec import Cell, Line, MechanismSpec, accountant, accountant_of, mechanism_of
from evidence.store import Record, Store, export, read_export

SMALL = MechanismSpec("bsr", 2, 10, 2)


def cell(sigma: float = 1.0, order: int = 2) -> Cell:
    """A cheap one."""
    return Cell.of("divergence", mechanism=SMALL, order=order, sigma=sigma, bandwidth=1)


def command(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evidence.cli", *words],
        capture_output=True, text=True, timeout=120, env=environment(), **options,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """Processes of their own find the packages where this one does."""
    places = [str(Path(dpmf.__file__).parent.parent), str(Path(engine.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


# --- specs -----------------------------------------------------------------------------------------------------------

PANELS = {
    "fig-gram": ("BandMF, p = 64", "BSR, p = 64", "BISR, p = 64", "BandInvMF, p = 4"),
    "fig-main": (
        "DP-SGD, N = 100, k = 1", "DP-SGD, N = 1000, k = 1", "DP-SGD, N = 1000, k = 10", "BSR, N = 100, k = 1, p = 4",
        "BSR, N = 100, k = 1, p = 64", "BSR, N = 1000, k = 10, p = 4",
    ),
    "fig-additional": (
        "BISR, N = 100, k = 1, p = 4", "BISR, N = 100, k = 1, p = 64", "BISR, N = 1000, k = 10, p = 4",
        "BLT, N = 100, k = 1", "BandMF, N = 100, k = 1, p = 64", "BandInvMF, N = 100, k = 1, p = 4",
    ),
    "fig-limits": 6,
    "fig-runtime": 4,
    "fig-truncation": 3,
    "fig-directions": 6,
    "fig-feldman-2025": 2,
    "fig-feldman-2026": 2,
    "fig-feldman-runtime": 2,
    "fig-families": 4,
    "fig-temperatures": 8,
    "fig-histograms": ("step 100", "step 200", "step 300", "step 101", "step 201", "step 301"),
}  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
def test_every_figure_of_the_paper_is_there(full: bool) -> None:
    found = figures.catalogue(full)
    assert set(found) == set(PANELS)
    for name, wanted in PANELS.items():
        titles = tuple(panel.title for panel in found[name].panels)
        assert titles == wanted if isinstance(wanted, tuple) else len(titles) == wanted
        rows, columns = found[name].shape
        assert rows * columns == len(titles)


SIGMA_FIGURES = ["fig-main", "fig-additional", "fig-limits", "fig-directions", "fig-feldman-2025", "fig-feldman-2026"]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", SIGMA_FIGURES)
def test_panels_also_show_the_tight_accountant_and_the_lower_bound(name: str, full: bool) -> None:
    """At every ε of the grid, for every mechanism."""
    epsilons = (settings.FULL if full else settings.COARSE).epsilons
    for panel in figures.catalogue(full)[name].panels:
        looks = {line.look: line for line in panel.lines}
        tight = {"tight-remove", "tight-add"} if name == "fig-directions" else {"tight", "monte-carlo"}
        for look in {*tight, "lower"}:
            assert looks[look].x == epsilons, (panel.title, look)


@pytest.mark.parametrize("full", [False, True])
def test_limits_are_drawn_for_every_mechanism(full: bool) -> None:
    for panel in figures.catalogue(full)["fig-limits"].panels:
        assert sum(line.look.startswith("limit-") for line in panel.lines) >= 2, panel.title


def test_other_figures_show_the_tight_accountant_where_there_is_something_to_show() -> None:
    found = figures.catalogue()
    for panel in (
        *found["fig-runtime"].panels,
        *found["fig-feldman-runtime"].panels,
        *found["fig-temperatures"].panels[:4],
    ):
        assert "tight" in {line.look for line in panel.lines}, panel.title
    for panel in found["fig-temperatures"].panels[:4]:
        assert "lower" in {line.look for line in panel.lines}, panel.title


@pytest.mark.parametrize("full", [False, True])
def test_every_cell_can_be_built(full: bool) -> None:
    for figure in figures.catalogue(full).values():
        for one in figure.cells():
            assert one.quantity in quantities.QUANTITIES
            parameters = one.parameters
            assert Cell.of(one.quantity, **parameters) == one  # canonical: what JSON gives back is the same cell
            assert parameters["mechanism"]["strategy"] in dpmf.strategies.NAMES
            if "accountant" in parameters and one.quantity != "seconds":
                accountant_of(parameters["accountant"])
        for panel in figure.panels:
            for line in panel.lines:
                assert isinstance(line.x, str) or len(line.x) == len(line.cells)


def test_figures_share_cells() -> None:
    main, feldman = (set(figures.catalogue()[name].cells()) for name in ("fig-main", "fig-feldman-2026"))
    assert len(main & feldman) > 40


def test_names_say_what_people_look_for() -> None:
    one = settings.sigma_cell(settings.BSR_4, accountant("monte-carlo", samples=1000), 0.5)
    assert one.name == "sigma bsr4 N=100 k=1 monte-carlo(samples=1000) delta=1e-05 direction=both epsilon=0.5"


# --- quantities, against the public API and by enumeration -----------------------------------------------------------


def test_sigma_is_what_calibrate_says() -> None:
    one = settings.sigma_cell(SMALL, accountant("renyi", max_order=12), 2.0, "remove")
    found = quantities.sigma(**one.parameters)
    wanted = dpmf.calibrate(
        mechanism_of(SMALL.plain()), target_epsilon=2.0, target_delta=1e-5, accountant=Renyi(max_order=12),
        direction="remove", relative_tolerance=1e-3,
    )  # fmt: skip
    assert found["sigma"] == wanted.noise_multiplier


def test_a_target_out_of_reach_is_a_result() -> None:
    found = quantities.sigma(**settings.sigma_cell(SMALL, accountant("renyi", max_order=2), 0.1).parameters)
    assert found["sigma"] is None
    assert "orders up to 2" in found["problem"]


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("bandwidth", [1, 2, 3])
@pytest.mark.parametrize("epochs", [1, 3])
def test_divergences_are_those_of_the_accountant(order: int, bandwidth: int, epochs: int) -> None:
    """Enumeration here, dynamic programming there."""
    mechanism = MechanismSpec("bsr", epochs, 12, 3)
    found = quantities.divergence(mechanism=mechanism.plain(), order=order, sigma=1.5, bandwidth=bandwidth)
    wanted = Renyi(bandwidth=bandwidth).divergences(mechanism_of(mechanism.plain()), 1.5, order)[-1]
    assert found["divergence"] == pytest.approx(wanted, rel=1e-9)


def test_seconds_are_of_the_evaluation_they_say() -> None:
    plain, which = SMALL.plain(), accountant("renyi", max_order=6).plain()
    mechanism = mechanism_of(plain)
    for unit, sigma in (("", 1.2), ("sensitivity", 1.2 * mechanism.sensitivity)):
        found = quantities.seconds(mechanism=plain, accountant=which, sigma=1.2, epsilon=1.0, unit=unit)
        wanted = dpmf.delta(
            mechanism, noise_multiplier=sigma, epsilon=1.0, accountant=Renyi(max_order=6), direction="remove"
        )
        assert found["delta"] == wanted.delta
        assert "cores" in found["machine"]


def test_lower_profiles_are_below_the_upper_ones() -> None:
    options = {"mechanism": SMALL.plain(), "sigma": 4.0, "epsilons": [0.25, 0.5, 1.0], "direction": "remove"}
    low = quantities.profile_lower(**options)
    high = quantities.profile(**options, accountant=settings.CHAIN.plain())
    assert low["epsilons"] == high["epsilons"]
    assert all(0 < a <= b for a, b in zip(low["deltas"], high["deltas"], strict=True))


def test_hazards_start_uniform_and_grow_over_the_epochs() -> None:
    found = quantities.hazard(mechanism=SMALL.plain(), sigma=4.0, bad_event=1e-5, option=1, temperatures=["inf"])
    assert len(found["hazards"]) == 20
    assert found["hazards"][0] == pytest.approx(1 / 10, rel=1e-4)
    assert found["hazards"][-1] > found["hazards"][0]


def test_histogram_of_the_ternary_loss() -> None:
    """At the second step of DP-SGD only one component has moved: μ_1 = e_1, all others 0. L_b is known exactly."""
    parameters = {"mechanism": MechanismSpec("dpsgd", 2, 4).plain(), "sigma": 1.0, "step": 2, "samples": 40_000}
    found = quantities.ternary_loss(**parameters, seed=3, low=-5, high=5, bins=50)
    generator = np.random.default_rng(0)
    y = (generator.random(200_000) < 0.25) + generator.standard_normal(200_000)
    # The component whose mean is 1 at step 2 comes last; of the three below it, one has mean 1 at step 1.
    wanted = np.log((2 + np.exp(y - 0.5)) / 3)
    assert found["mean"] == pytest.approx(wanted.mean(), abs=0.01)
    assert found["deviation"] == pytest.approx(wanted.std(), rel=0.03)
    assert sum(found["density"]) * 0.2 == pytest.approx(found["inside"], rel=1e-3)


def test_the_gram_picture_is_the_gram_matrix() -> None:
    found = quantities.gram(mechanism=SMALL.plain())
    spec = figures.catalogue()["fig-gram"].panels[0]
    assert spec.kind == "image"
    matrix = mechanism_of(SMALL.plain()).gram
    assert found["largest"] == matrix.max()
    assert found["zeros"] == pytest.approx(np.mean(matrix == 0))


# --- the code version ------------------------------------------------------------------------------------------------


def test_comments_docstrings_and_formatting_are_not_code() -> None:
    one = fingerprint._tree_hash('def f(x):\n    """Says."""\n    return x + 1\n')
    assert one == fingerprint._tree_hash('def f( x ):\n    """Says more."""\n    # why\n    return (x + 1)\n')
    assert one != fingerprint._tree_hash('def f(x):\n    """Says."""\n    return x + 2\n')


def test_a_cell_depends_on_its_own_accountant_only() -> None:
    closure = fingerprint._closure(("dpmf.accountants.renyi", "dpmf.calibration"))
    assert "dpmf.kernels.renyi" in closure
    assert "dpmf.batching" in closure
    assert "dpmf.accountants.chain" not in closure
    assert "dpmf.accountants.chain" in fingerprint._closure(("dpmf.accountants.combined.best",))


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
def test_a_row_that_was_changed_is_never_read(tmp_path: Path, column: str, value: object) -> None:
    written = filled(path := tmp_path / "db.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE results SET {column} = ? WHERE parameters = ?", (value, cell(1.0).text))
    connection.close()
    with Store.open(path) as store:
        assert {record.cell: record for record in store} == {k: v for k, v in written.items() if k != cell(1.0)}
        assert store.damaged() == 1
        assert store.results([cell(1.0), cell(9.0)]) == {}
        assert store.standing([cell(1.0)]) == {cell(1.0): "missing"}
    told = command("status", "fig-gram", "--database", str(path))
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
    lacking = MissingExtraError("this needs other: pip install 'dpmf[other]'")

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


@pytest.mark.parametrize("jobs", [1, 2])
def test_failures_are_recorded_and_the_rest_goes_on(tmp_path: Path, jobs: int) -> None:
    cells = [cell(1.0), cell(1.0, order=5), cell(2.0), cell(3.0)]
    with Store.open(tmp_path / "db.sqlite", create=True) as store:
        tally = engine.run(store, cells, jobs=jobs)
        assert (tally.done, tally.failed, tally.known) == (3, 1, 0)
        [failed] = [record for record in store if record.error]
        assert failed.error is not None
        assert failed.error.startswith("ValueError: order must be 2 or 3, got 5")
        # Known the second time; tried again only when asked for.
        again = engine.run(store, cells, jobs=1)
        assert (again.done, again.failed, again.known) == (0, 0, 4)
        retried = engine.run(store, cells, jobs=1, retry_failed=True)
        assert (retried.done, retried.failed, retried.known) == (0, 1, 3)


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


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def test_killed_and_restarted_nothing_is_lost_or_computed_twice(tmp_path: Path) -> None:
    database = tmp_path / "db.sqlite"
    words = ["run", "fig-truncation", "--only", "order=2", "--jobs", "2", "--database", str(database)]
    started = subprocess.Popen(
        [sys.executable, "-m", "evidence.cli", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    wait_for(lambda: len(rows(database)) >= 3 or started.poll() is not None)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = rows(database)
    assert 3 <= len(kept) < 45, "killed too late to say anything"
    done = command(*words)
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
            wait_for(lambda: len(rows(store.path)) >= 2)
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


# --- pictures --------------------------------------------------------------------------------------------------------


def test_points_leave_out_what_is_missing() -> None:
    one, other, third = cell(1.0), cell(2.0), cell(3.0)
    line = Line("", "renyi", (one, other, third), (1.0, 2.0, 3.0), "sigma")
    assert line.points({one: {"sigma": 4.0}, other: {"sigma": None}}) == [(1.0, 4.0)]
    over = Line("", "renyi", (one,), (1.0,), "sigma", over=other)
    assert over.points({one: {"sigma": 4.0}, other: {"sigma": 8.0}}) == [(1.0, 0.5)]
    assert over.points({one: {"sigma": 4.0}}) == []


def test_looks_differ_in_grey() -> None:
    """In every panel any two lines differ in dashes or marker, not in colour alone."""
    for figure in figures.catalogue(full=True).values():
        for panel in figure.panels:
            if panel.kind == "lines":
                looks = [draw.look_of(line) for line in panel.lines]
                shapes = {(str(look["linestyle"]), look["marker"]) for look in looks}
                assert len(shapes) == len(looks), (figure.name, panel.title)


def test_a_look_means_one_thing_in_a_figure() -> None:
    """One legend serves several panels; only lattice and chain, each where it applies, share a look."""
    for figure in figures.catalogue(full=True).values():
        meaning: dict[tuple[object, object], str] = {}
        for line in (line for panel in figure.panels if panel.kind == "lines" for line in panel.lines):
            look = draw.look_of(line)
            label = line.label.replace("lattice", "chain")
            shape = str(look["linestyle"]), look["marker"]
            assert meaning.setdefault(shape, label) == label, (figure.name, label)


def test_plot_from_a_tiny_database(tmp_path: Path) -> None:
    database, output = tmp_path / "db.sqlite", tmp_path / "pictures"
    ran = command("run", "fig-truncation", "--only", "bisr64 N=1000 k=10", "--jobs", "1", "--database", str(database))
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""  # no bar where nobody looks
    done = command("plot", "fig-truncation", "fig-gram", "--database", str(database), "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "cells missing" in done.stdout
    assert "fig-gram: nothing computed yet" in done.stderr
    assert (output / "fig-truncation.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "fig-truncation.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in output.iterdir()) == ["fig-truncation.pdf", "fig-truncation.png"]
    status = command("status", "fig-truncation", "--database", str(database))
    assert status.stdout.splitlines()[1].split()[:2] == ["fig-truncation", ran.stdout.split()[0]]


# --- the command line ------------------------------------------------------------------------------------------------


def other_database(path: Path, application: int, version: int) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id={application}")
        connection.execute(f"PRAGMA user_version={version}")
        connection.execute("CREATE TABLE results (x)")


WRONG = {
    "unknown figure": (["run", "fig-nonsense"], "figure must be one of fig-gram, fig-main"),
    "unknown text": (["run", "fig-gram", "--only", "nonsense"], "only must be part of a cell's name"),
    "no jobs": (["run", "fig-gram", "--jobs", "0"], "jobs must be at least 1"),
    "no database": (["status"], "database must exist"),
    "no directory": (["run", "fig-gram", "--database", "none/db.sqlite"], "must be in an existing directory"),
    "a directory": (["run", "fig-gram", "--database", "here"], "must be a file, got the directory"),
    "not a database": (["run", "fig-gram", "--database", "text.sqlite"], "is not a database"),
    "another program's": (["run", "fig-gram", "--database", "other.sqlite"], "is of another program"),
    "another version's": (["run", "fig-gram", "--database", "newer.sqlite"], "has format 99"),
    "another version's, read": (["plot", "--database", "newer.sqlite"], "has format 99"),
    "no cluster": (
        ["run", "fig-truncation", "--dask", "tcp://127.0.0.1:9", "--database", "db.sqlite"],
        "nothing answers at 'tcp://127.0.0.1:9'",
    ),
    "no address": (["run", "fig-truncation", "--dask", "nonsense", "--database", "db.sqlite"], "nothing answers at"),
    "pictures into a file": (["plot", "--output", "text.sqlite"], "output must be a directory"),
    "pictures below a file": (["plot", "--output", "text.sqlite/x"], "cannot be made"),
    "no data": (["plot", "--data", "none.json"], "data must be a file"),
    "not data": (["plot", "--data", "text.sqlite"], "data must be numbers exported by dpmf-experiments"),
    "unknown kind of page": (["report", "--output", "page.html"], "output must end in .md"),
    "unknown option": (["run", "--nonsense"], "No such option"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_one_line_and_nothing_is_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evidence.cli import main

    (tmp_path / "text.sqlite").write_text("once upon a time " * 100)
    (tmp_path / "here").mkdir()
    other_database(tmp_path / "other.sqlite", 0, 0)
    other_database(tmp_path / "newer.sqlite", 0x64706D66, 99)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    words, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dpmf-experiments", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2, error
    assert message in error
    assert error.count("\n") == 1
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}.items()


def test_list_names_every_figure() -> None:
    done = command("list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(figures.catalogue())
    cells = command("list", "fig-main", "--cells", "--only", "bsr4")
    assert all("bsr4" in line for line in cells.stdout.splitlines()[1:])
    assert len(cells.stdout.splitlines()) - 1 == 72


# --- what is committed -----------------------------------------------------------------------------------------------

DOCS = paths.DOCS


@pytest.fixture(scope="module")
def committed() -> dict[Cell, Record]:
    return read_export(DOCS / "data" / "results.json")


def test_the_data_is_of_the_cells_of_the_figures(committed: dict[Cell, Record]) -> None:
    wanted = {one for figure in figures.catalogue().values() for one in figure.cells()}
    assert set(committed) <= wanted
    missing = wanted - set(committed)
    assert bool(missing) == ("cells are missing" in (DOCS / "results.md").read_text())


def test_a_page_with_missing_cells_says_so_and_one_without_draws_conclusions(committed: dict[Cell, Record]) -> None:
    without = {one: record for one, record in committed.items() if one.quantity != "gram"}
    made = page.page(list(figures.catalogue().values()), without)
    assert "Not finished: 4 of 4 cells are missing" in made
    assert "| Gram matrices are cyclically banded, and decay rapidly for banded inverses | **not computed** |" in made
    assert "| agrees |" in made


def test_the_page_is_made_from_the_data(committed: dict[Cell, Record]) -> None:
    assert page.page(list(figures.catalogue().values()), committed) == (DOCS / "results.md").read_text()


def test_the_page_says_which_code_made_it(committed: dict[Cell, Record]) -> None:
    made = page.page(list(figures.catalogue().values()), committed)
    assert "`make figures`" in made
    assert all(f"`{record.code}`" in made for record in committed.values())
    one = next(iter(committed))
    other = {**committed, one: replace(committed[one], result={**(committed[one].result or {}), "sigma": 1.25})}
    assert page._digest(other.values()) != page._digest(committed.values())


def test_every_figure_is_there_as_pixels_and_for_print() -> None:
    wanted = {f"{name}{suffix}" for name in figures.catalogue() for suffix in (".png", ".pdf")}
    found = {path.name: path.stat().st_size for path in (DOCS / "figures").iterdir()}
    assert set(found) == wanted
    assert sum(found.values()) < 6 * 2**20


def test_no_bound_of_dpmf_is_below_the_certified_lower_bound(committed: dict[Cell, Record]) -> None:
    """Across all figures: upper bounds are above the lower bound at the same target, and the estimates near it."""
    lower = {}
    for one, record in committed.items():
        if one.quantity == "sigma-lower":
            parameters = one.parameters
            lower[str(parameters["mechanism"]), parameters["epsilon"]] = record.result["sigma"]  # type: ignore[index]
    checked = 0
    for one, record in committed.items():
        parameters = one.parameters
        if one.quantity == "sigma" and parameters["direction"] == "both" and record.result["sigma"]:  # type: ignore[index]
            least = lower[str(parameters["mechanism"]), parameters["epsilon"]]
            slack = 0.99 if parameters["accountant"]["name"] == "monte-carlo" else 1.0
            assert record.result["sigma"] >= slack * least, one.name  # type: ignore[index]
            checked += 1
    assert checked > 200


def test_a_number_computed_again_is_the_same(committed: dict[Cell, Record]) -> None:
    """A cheap one of several kinds: the data is not from another version of the code."""
    for one in (
        settings.sigma_cell(settings.DPSGD_100, settings.tight(settings.DPSGD_100), 1.0),
        settings.sigma_cell(settings.DPSGD_1000, settings.RENYI, 2.0),
        settings.sigma_cell(settings.BSR_4, settings.PAPER_RENYI, 4.0),
        settings.lower_cell(settings.DPSGD_100, 1.0),
    ):
        again = quantities.QUANTITIES[one.quantity](**one.parameters)
        assert again["sigma"] == pytest.approx(committed[one].result["sigma"], rel=3e-3), one.name  # type: ignore[index]
