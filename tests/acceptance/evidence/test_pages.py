"""The pages say what their data says, name the code that made them, and can be made piece by piece."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import dp_accounting.pld
import paths
import pytest
from evidence_cells import in_process

import dpmf
from evidence import backends, concepts, fingerprint, pages, quantities, spec, tightness, training
from evidence.accountants import CLAIMS
from evidence.spec import Cell
from evidence.store import Record, export, read_export

DOCS = paths.DOCS
TRACKED_PAGES = ["results", "tightness", "accountants"]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(paths.ROOT)


def committed(name: str) -> dict[Cell, Record]:
    return read_export(DOCS / "data" / f"{name}.json")


def results(name: str) -> dict[Cell, dict]:
    return {cell: record.result or {} for cell, record in committed(name).items()}


# --- what is committed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACKED_PAGES)
def test_a_page_says_what_the_data_says(name: str) -> None:
    page = pages.PAGES[name]
    assert page.write is not None
    shown = page.path.read_text(encoding="utf-8")
    assert page.write(shown, committed(name), False) == shown


@pytest.mark.parametrize("name", TRACKED_PAGES)
def test_the_data_is_for_the_cells_that_the_command_computes(name: str) -> None:
    page = pages.PAGES[name]
    assert set(committed(name)) <= set(page.cells())
    assert all(cell.quantity in quantities.QUANTITIES for cell in page.cells())


def test_every_claim_has_its_block_and_all_its_cells() -> None:
    page = pages.PAGES["accountants"].path.read_text(encoding="utf-8")
    made = dict(re.findall(r"<!-- ([\w-]+) -->\n(.*?)\n<!-- end -->", page, flags=re.DOTALL))
    found = results("accountants")
    blocks = {name: claim.block({k: found[c] for k, c in claim.cells.items()}) for name, claim in CLAIMS.items()}
    assert {name: text for name, text in made.items() if name != "code"} == blocks
    assert {cell for claim in CLAIMS.values() for cell in claim.cells.values()} == set(found)


def test_no_other_table_has_measured_numbers() -> None:
    page = pages.PAGES["accountants"].path.read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", "", page, flags=re.DOTALL)
    tables = [line for line in by_hand.splitlines() if line.startswith("|")]
    assert tables
    assert not [line for line in tables if re.search(r"\d\.\d", line)]


def test_a_cell_computed_again_is_the_same() -> None:
    """A cheap one of each kind: the data is not from another version of the code."""
    found = results("accountants")
    for name, key, quantity in (
        ("directions", "lattice remove, ε=0.25", "sigma"),
        ("directions", "renyi add, ε=0.25", "sigma"),
        ("small-epsilon", "renyi, ε=8", "sigma"),
        ("small-epsilon", "conditional, ε=1", "sigma"),
        ("baselines", "lattice, σ=1", "epsilon"),
        ("sampling", "remove, importance, 1000", "delta"),
    ):
        cell = CLAIMS[name].cells[key]
        again = quantities.QUANTITIES[cell.quantity](**cell.parameters)
        assert again[quantity] == pytest.approx(found[cell][quantity], rel=2e-3), (name, key)


def test_no_bound_is_below_the_truth_and_no_lower_bound_above() -> None:
    found = results("tightness")
    asked = [(row, epsilon) for row in tightness.ROWS for epsilon in tightness.EPSILONS]
    asked += [(draw.row, draw.epsilon) for draw in tightness.draws()]
    seen = 0
    for row, epsilon in asked:
        for column in tightness.COLUMNS:
            ratio = tightness.ratio_of(found, row, column, epsilon)
            if ratio is not None:
                slack = 5 * found[tightness.cell_of(row, tightness.TRUTH, epsilon)]["error"]
                assert ratio <= 1 + slack if column == "lower" else ratio >= 1 - slack, (row.name, epsilon, column)
                seen += 1
    assert seen >= 10


def test_mechanisms_drawn_at_random_are_always_the_same_and_can_be_built() -> None:
    first = tightness.draws()
    tightness.draws.cache_clear()
    assert tightness.draws() == first
    assert len({draw.row.name for draw in first}) == tightness.DRAWS
    for draw in first:
        mechanism = spec.mechanism_of(draw.row.mechanism.plain())
        assert mechanism.batching.batches_per_epoch == draw.row.mechanism.batches
        assert 0.25 <= draw.epsilon <= 8


def test_pictures_are_the_ones_that_were_recorded() -> None:
    for page, drawings in concepts.DRAWINGS.items():
        found = {cell.parameters["name"]: result for cell, result in results(page).items()}
        assert set(found) == set(drawings)
        for name, result in found.items():
            assert result["sha256"] == sha256((DOCS / "pictures" / f"{name}.png").read_bytes()).hexdigest(), name


# --- which code made them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TRACKED_PAGES, "benchmarks", "concepts", "explore"])
def test_a_page_names_every_code_that_made_it(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    codes = {record.code for record in committed(name).values()}
    assert codes
    assert all(f"`{code}`" in page for code in codes)


def test_status_lists_every_page_with_numbers() -> None:
    done = in_process("status", cwd=paths.ROOT)
    assert done.returncode == 0, done.stderr
    with_data = {f"docs/{path.stem.partition('-')[0]}.md" for path in (DOCS / "data").iterdir()}
    with_data = with_data - {"docs/cifar10.md"} | {"docs/training.md"}
    assert {line.split()[0] for line in done.stdout.splitlines() if line.startswith("docs/")} == with_data
    assert f"{dpmf.__version__}+{fingerprint.accounting()}" in done.stdout


def test_a_page_is_stale_once_its_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell by the code there is now, one by other code, the rest missing."""
    monkeypatch.chdir(tmp_path)
    page = pages.PAGES["tightness"]
    (now, other, *_), wanted = page.cells(), len(page.cells())
    assert pages.standing(page).verdict == "incomplete"
    page.data.parent.mkdir(parents=True)
    current = Record(now, fingerprint.code_version(now), {"sigma": 1.0}, None, 0.1)
    page.data.write_text(export([current]))
    assert pages.standing(page).verdict == "incomplete"
    page.data.write_text(export([current, Record(other, "0.0+older", {"sigma": 1.0}, None, 0.1)]))
    found = pages.standing(page)
    assert (found.current, found.stale, found.missing) == (1, 1, wanted - 2)
    assert found.verdict == "stale"
    assert found.codes == {fingerprint.code_version(now): 1, "0.0+older": 1}


# --- docs/training.md: runs hold while their noise is proved ----------------------------------------------------------


def test_every_trained_mechanism_is_asked_about() -> None:
    rows, study = training.everything(), training.MECHANISMS.read_text()
    assert {row.setting for row in rows} == set(training.TITLES)
    assert len({row.cell for row in rows}) == len(rows)
    assert set(rows) < set(training.everything(full=True))
    assert {row.setting for row in rows if not row.claimed} == {"second"}
    by_name = {(m["setting"], m["name"], m["epsilon"]): m for m in json.loads(study)}
    for row in training.everything(full=True):
        asked = row.cell.parameters
        if asked["accountant"]["name"] == "dp_accounting":
            assert asked["mechanism"]["batches"] % asked["period"]
            continue
        mechanism = spec.mechanism_of(asked["mechanism"])
        found = by_name.get((row.setting, row.name, asked["epsilon"]))
        if found is None:
            assert row.setting == "accountants"
            continue
        assert mechanism.batching.epochs == found["epochs"]
        assert (getattr(mechanism.batching, "gap", 0) or 0) == found.get("gap", 0)
        if "inverse" in found:  # the noise was made with these digits
            column = mechanism.strategy.noising_coef(mechanism.batching.iterations)
            assert column[: len(found["inverse"])] == pytest.approx(found["inverse"], rel=1e-8)
        elif row.name != "blt4-fixed":
            column = mechanism.strategy.strategy_coef(mechanism.batching.iterations)
            assert column[: len(found["coefficients"])] == pytest.approx(found["coefficients"], rel=1e-8)


@pytest.mark.parametrize("name", ["dpsgd", "poisson", "dp_accounting"])
def test_runs_hold_while_their_noise_is_proved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their distributions on a coarser grid, which is as sound and takes a tenth of the time.
    coarser = functools.partial(dp_accounting.pld.PLDAccountant, value_discretization_interval=1e-3)
    monkeypatch.setattr(dp_accounting.pld, "PLDAccountant", coarser)
    kind = "fixed" if name == "dpsgd" else "poisson"
    mechanism = spec.MechanismSpec("dpsgd", 2, 10, batching=kind).plain()
    by = {"name": "dp_accounting" if name == "dp_accounting" else "best"}
    asked = {"setting": "s", "name": "n", "mechanism": mechanism, "accountant": by, "epsilon": 1.0, "delta": 1e-4}

    def found(sigma: float) -> dict:
        return quantities.trained(**asked, sigma=sigma)

    proved = found(2.0)["sigma"]
    more, hair, less = found(1.05 * proved), found(proved * (1 - 1e-9)), found(0.9 * proved)
    assert more["holds"]
    assert more["epsilon"] == 1.0
    assert more["sigma"] == pytest.approx(proved, rel=1e-4)
    assert less["epsilon"] > 1.0
    assert not less["holds"]
    assert hair["epsilon"] == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(ValueError, match="period must be at least the bandwidth"):
        quantities._poisson_pld({"epochs": 1, "batches": 10, "coefficients": [1.0, 0.5]}, 1, 1.0, 1e-4, 1.0)


def test_training_is_as_the_code_is_now_if_every_noise_multiplier_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page, rows = pages.PAGES["training"], training.everything()
    page.data.parent.mkdir(parents=True)

    def written(holds: Callable[[training.Trained], bool], code: str = "") -> pages.Standing:
        page.data.write_text(
            export(
                Record(
                    row.cell,
                    code or fingerprint.code_version(row.cell),
                    {"sigma": 1.01, "trained": 1.0, "holds": holds(row), "epsilon": 1.1},
                    None,
                    0.1,
                )
                for row in rows
            )
        )
        return pages._training()

    assert pages._training().verdict == "incomplete"
    assert written(lambda row: True).verdict == "as the code is now"
    assert written(lambda row: row.claimed).verdict == "as the code is now"  # estimates are said to be estimates
    first = rows[0]
    found = written(lambda row: row != first)
    assert (found.verdict, found.stale, found.current) == ("stale", 1, len(rows) - 1)
    assert f"{first.name}, ε = 1: trained with σ = 1, at which ε = 1.1 is proved" in training.tabulated(
        {cell: record.result or {} for cell, record in page.committed().items()}
    )
    assert written(lambda row: True, "0.0+older").stale == len(rows)


# --- made piece by piece ---------------------------------------------------------------------------------------------

Computed = list[Cell]


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Computed:
    """The cells computed so far, for two mechanisms, with made-up numbers, away from the committed data and page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tightness, "ROWS", tightness.ROWS[:2])
    few = tightness.draws()[:2]
    monkeypatch.setattr(tightness, "draws", lambda: few)
    (tmp_path / "docs" / "data").mkdir(parents=True)
    blocks = [*tightness.BLOCKS, "code"]
    (tmp_path / "docs" / "tightness.md").write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in blocks))
    done: Computed = []
    monkeypatch.setattr(backends, "on_cores", made_up(done))
    return done


def made_up(done: Computed, stop_after: int | None = None) -> Callable[[Sequence[Cell], int], Iterator[Record]]:
    numbers = {tightness.TRUTH: {"sigma": 2.0, "error": 0.001}, "best": {"sigma": 2.1, "accountant": "chain"}}

    def on_cores(cells: Sequence[Cell], jobs: int) -> Iterator[Record]:
        for cell in cells:
            if len(done) == stop_after:
                raise KeyboardInterrupt
            done.append(cell)
            result = numbers.get(cell.parameters.get("accountant", {}).get("name"), {"sigma": 2.5})
            yield Record(cell, fingerprint.code_version(cell), result, None, 0.1)

    return on_cores


def test_only_some_cells_and_then_the_rest(computed: Computed, tmp_path: Path) -> None:
    def make(*words: str) -> str:
        done = in_process("make", "tightness", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "docs" / "tightness.md").read_text(encoding="utf-8")

    some = make("--only", "k=1 chain delta=1e-05 direction=both epsilon=1 ")
    assert len(computed) == 1
    assert "60 are not computed yet" not in some
    assert "not computed yet" in some
    make()
    wanted = len(tightness.cells())
    assert len(computed) == len(set(computed)) == wanted
    page = make("--fresh", "--only", " chain ")
    assert len(computed) == wanted + 8
    assert "| 1.050 |" in page
    assert "(1.050 at ε = " in page
    assert "`chain` (8)" in page


def test_what_is_committed_is_not_computed_again(computed: Computed, tmp_path: Path) -> None:
    """A checkout without a database: the numbers of the code there is now are taken from its data."""
    assert in_process("make", "tightness", cwd=tmp_path).returncode == 0
    before = list(computed)
    (tmp_path / "evidence.sqlite").unlink()
    again = in_process("make", "tightness", cwd=tmp_path)
    assert f"0 cells computed in 0 s of work, {len(before)} known already" in again.stdout
    assert computed == before


def test_a_run_of_some_cells_keeps_the_others_that_are_committed(computed: Computed, tmp_path: Path) -> None:
    """Also where their code is older: a page is never made from fewer numbers than it was."""
    data = tmp_path / "docs" / "data" / "tightness.json"
    older = [Record(cell, "0.0+older", {"sigma": 3.0, "error": 0.001}, None, 0.1) for cell in tightness.cells()]
    data.write_text(export(older))
    assert in_process("make", "tightness", "--only", "k=1 chain ", cwd=tmp_path).returncode == 0
    assert len(computed) == 4
    after = read_export(data)
    assert set(after) == set(tightness.cells())
    assert {cell for cell, record in after.items() if record.code != "0.0+older"} == set(computed)


def test_an_interrupted_run_goes_on_where_it_stopped(
    computed: Computed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "on_cores", made_up(computed, stop_after=5))
    stopped = in_process("make", "tightness", cwd=tmp_path)
    assert stopped.returncode == 130
    assert "interrupted; what was finished is kept" in stopped.stderr
    monkeypatch.setattr(backends, "on_cores", made_up(computed))
    assert "5 known already" in in_process("make", "tightness", cwd=tmp_path).stdout
    assert len(computed) == len(set(computed)) == len(tightness.cells())


def test_a_name_that_fits_nothing_is_refused(computed: Computed, tmp_path: Path) -> None:
    done = in_process("make", "tightness", "--only", "nonsense", cwd=tmp_path)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert not computed
