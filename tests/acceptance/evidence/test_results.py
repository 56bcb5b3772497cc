"""The paper's figures: specs, quantities, pictures, the command line, and what is committed."""

from __future__ import annotations

import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import paths
import pytest
from evidence_cells import SMALL, cell, in_process

import dpmf
from dpmf.accountants import Renyi
from evidence import quantities, say
from evidence.results import draw, figures, page, settings
from evidence.spec import Cell, Line, MechanismSpec, accountant, accountant_of, mechanism_of
from evidence.store import Record, read_export

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
    one = ("--only", "bisr64 N=1000 k=10", "--jobs", "1")
    ran = in_process("run", "fig-truncation", *one, "--database", str(database), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""  # no bar where nobody looks
    for kind, begins in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        words = ("--database", str(database), "--output", str(output), "--format", kind)
        done = in_process("plot", "fig-truncation", "fig-gram", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "cells missing" in done.stdout
        assert "fig-gram: nothing computed yet" in done.stderr
        assert (output / f"fig-truncation.{kind}").read_bytes().startswith(begins)
    assert sorted(path.name for path in output.iterdir()) == [
        "fig-truncation-phone.png", "fig-truncation.pdf", "fig-truncation.png"
    ]  # fmt: skip
    progress = in_process("progress", "fig-truncation", "--database", str(database), cwd=tmp_path)
    assert progress.stdout.splitlines()[1].split()[:2] == ["fig-truncation", ran.stdout.split()[0]]


# --- the command line ------------------------------------------------------------------------------------------------


def other_database(path: Path, application: int, version: int) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id={application}")
        connection.execute(f"PRAGMA user_version={version}")
        connection.execute("CREATE TABLE results (x)")


WRONG = {
    "unknown name": (
        ["run", "fig-nonsense"],
        "name must be one of results, tightness, batchings, mechanisms",
    ),
    "unknown figure": (["plot", "fig-nonsense"], "figure must be one of fig-gram, fig-main"),
    "unknown page": (
        ["export", "nonsense"],
        "page must be one of results, tightness, batchings, mechanisms",
    ),
    "unknown picture": (["pictures", "nonsense"], "picture must be one of batches"),
    "unknown format": (["plot", "--format", "gif"], "format must be one of png, pdf"),
    "no checkout": (["status"], "run this from the root of a checkout"),
    "unknown text": (["run", "fig-gram", "--only", "nonsense"], "only must be part of a cell's name"),
    "no jobs": (["run", "fig-gram", "--jobs", "0"], "jobs must be at least 1"),
    "no database": (["progress"], "database must exist"),
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
    "not data": (["plot", "--data", "text.sqlite"], "data must be numbers exported by evidence"),
    "unknown kind of page": (["report", "results", "--output", "page.html"], "output must end in .md"),
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
    monkeypatch.setattr("evidence.backends._WAIT", 1.0)
    monkeypatch.setattr(sys, "argv", ["evidence", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2, error
    assert message in error
    assert error.count("\n") == 1
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}.items()


def test_list_names_every_figure(tmp_path: Path) -> None:
    done = in_process("list", "results", cwd=tmp_path)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(figures.catalogue())
    everything = in_process("list", cwd=tmp_path).stdout.split()
    assert {"fig-main", "tightness", "baselines"} <= set(everything)
    cells = in_process("list", "fig-main", "--cells", "--only", "bsr4", cwd=tmp_path)
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
    assert say.digest(other.values()) != say.digest(committed.values())


def test_every_figure_is_there_and_the_tree_is_small() -> None:
    found = {path.name: path.stat().st_size for path in (DOCS / "figures").iterdir()}
    wide = {name: size for name, size in found.items() if not name.endswith("-phone.png")}
    assert set(wide) == {f"{name}.png" for name in figures.catalogue()}
    assert set(found) == {*wide, *(name.replace(".png", "-phone.png") for name in wide)}  # all have several panels
    assert sum(wide.values()) < 2**20
    assert sum(found.values()) < 2**20 * 3 / 2


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
