"""What the pages in docs/ show is run, and what they say in numbers is in the data they are made from."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LARGEST_PICTURE = 120 * 1024


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


COMMANDS = [
    line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("dpmf ")
]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_there_is_something_to_test() -> None:
    assert DOCS / "accountants.md" in PAGES
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_one_after_the_other(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    assert capsys.readouterr().out.strip() or not blocks(page, "python")


@pytest.mark.parametrize("command", COMMANDS)
def test_shell_commands_run(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dpmf.cli", *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_pictures_are_small_and_all_shown() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for picture in (DOCS / "pictures").iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size <= LARGEST_PICTURE, picture.name
        assert f"pictures/{picture.name}" in pages


def test_every_claim_says_what_the_data_says(maker: ModuleType) -> None:
    data = json.loads(maker.DATA.read_text())
    page = maker.PAGE.read_text()
    assert set(data) == set(maker.CLAIMS)
    made = dict(re.findall(r"<!-- ([\w-]+) -->\n(.*?)\n<!-- end -->", page, flags=re.DOTALL))
    assert made == {name: claim.block(data[name]) for name, claim in maker.CLAIMS.items()}


def test_no_other_table_has_measured_numbers(maker: ModuleType) -> None:
    by_hand = re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", "", maker.PAGE.read_text(), flags=re.DOTALL)
    tables = [line for line in by_hand.splitlines() if line.startswith("|")]
    assert tables
    assert not [line for line in tables if re.search(r"\d\.\d", line)]


def test_the_data_is_for_the_cells_that_the_command_computes(maker: ModuleType) -> None:
    data = json.loads(maker.DATA.read_text())
    for name, claim in maker.CLAIMS.items():
        assert set(data[name]) == set(claim.cells()), name


def test_a_cell_computed_again_is_the_same(maker: ModuleType) -> None:
    """A cheap one of each kind: the data is not from another version of the code."""
    data = json.loads(maker.DATA.read_text())
    for name, key, quantity in (
        ("directions", "lattice remove, ε=0.25", "sigma"),
        ("directions", "renyi add, ε=0.25", "sigma"),
        ("small-epsilon", "renyi, ε=8", "sigma"),
        ("small-epsilon", "conditional, ε=1", "sigma"),
        ("baselines", "lattice, σ=1", "epsilon"),
        ("sampling", "remove, importance, 1000", "delta"),
    ):
        again = maker.CLAIMS[name].cells()[key]()
        assert again[quantity] == pytest.approx(data[name][key][quantity], rel=2e-3), (name, key)


def test_an_interrupted_run_goes_on_where_it_stopped(maker: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(maker, "DATA", tmp_path / "data" / "numbers.json")
    computed = []

    def cell(key: str):
        def compute() -> dict[str, object]:
            if key == "c" and computed.count("c") == 0:
                computed.append(key)
                raise KeyboardInterrupt
            computed.append(key)
            return {"sigma": 1.0}

        return compute

    claim = maker.Claim("x", lambda: {key: cell(key) for key in "abcd"}, str, str, str, "")
    with pytest.raises(KeyboardInterrupt):
        maker.fill(claim, maker.load())
    assert set(maker.load()["x"]) == {"a", "b"}
    assert maker.fill(claim, maker.load())
    assert computed == ["a", "b", "c", "c", "d"]


def test_unknown_names_are_refused(maker: ModuleType, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["make_pictures.py", "nonsense"])
    with pytest.raises(SystemExit) as stopped:
        maker.main()
    assert stopped.value.code == 2
    assert "nonsense" in capsys.readouterr().err
