"""docs/tightness.md says what its data says, and the command behind it can be interrupted and narrowed down."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import paths
import pytest

DOCS = paths.DOCS


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("make_tightness")


def run(maker: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make_tightness.py", *arguments])
    return maker.main()


@pytest.fixture
def scratch(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command, away from the committed data and page, on two mechanisms with made-up numbers."""
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in maker.BLOCKS))
    monkeypatch.setattr(maker, "DATA", tmp_path / "data" / "numbers.json")
    monkeypatch.setattr(maker, "PAGE", page)
    monkeypatch.setattr(maker, "ROWS", maker.ROWS[:2])
    numbers = {maker.TRUTH: {"sigma": 2.0, "error": 0.001}, "best": {"sigma": 2.1, "winner": "chain"}}
    computed: list[str] = []

    def computation(row, column: str, epsilon: float):
        def compute() -> dict[str, object]:
            computed.append(maker.key_of(row, column, epsilon))
            return numbers.get(column, {"sigma": 2.5})

        return compute

    monkeypatch.setattr(maker, "computation", computation)
    monkeypatch.setattr(maker, "computed", computed, raising=False)
    return maker


def test_the_page_says_what_the_data_says(maker: ModuleType) -> None:
    data = json.loads(maker.DATA.read_text())
    made = dict(re.findall(r"<!-- ([\w-]+) -->\n(.*?)\n<!-- end -->", maker.PAGE.read_text(), flags=re.DOTALL))
    assert made == {name: block(data) for name, block in maker.BLOCKS.items()}
    assert set(data) <= set(maker.cells())


def test_no_bound_is_below_the_truth_and_no_lower_bound_above(maker: ModuleType) -> None:
    data = json.loads(maker.DATA.read_text())
    seen = 0
    for row in maker.ROWS:
        for epsilon in maker.EPSILONS:
            for column in maker.COLUMNS:
                ratio = maker.ratio_of(data, row, column, epsilon)
                if ratio is not None:
                    slack = 5 * data[maker.key_of(row, maker.TRUTH, epsilon)]["error"]
                    assert ratio <= 1 + slack if column == "lower" else ratio >= 1 - slack, (row.name, epsilon, column)
                    seen += 1
    assert seen >= 10


def test_only_some_cells_and_then_the_rest(scratch: ModuleType, monkeypatch, capsys) -> None:
    assert run(scratch, monkeypatch, "--only", "k=1, ε=1, ") == 0
    assert len(scratch.computed) == 7
    assert "not computed yet" in capsys.readouterr().out
    assert run(scratch, monkeypatch) == 0
    assert len(scratch.computed) == len(set(scratch.computed)) == len(scratch.cells())
    assert run(scratch, monkeypatch, "--fresh", "--only", ", chain") == 0
    assert len(scratch.computed) == len(scratch.cells()) + 8
    page = scratch.PAGE.read_text()
    assert "| 1.050 |" in page
    assert "(1.050 instead of 1.005)" in page
    assert "`chain` (8)" in page


def test_an_interrupted_run_keeps_what_it_has(scratch: ModuleType, monkeypatch, capsys) -> None:
    inner = scratch.computation

    def stopping(row, column: str, epsilon: float):
        def compute() -> dict[str, object]:
            if len(scratch.computed) == 5:
                raise KeyboardInterrupt
            return inner(row, column, epsilon)()

        return compute

    monkeypatch.setattr(scratch, "computation", stopping)
    run(scratch, monkeypatch)
    assert "5 of" in capsys.readouterr().err
    assert len(scratch.load()) == 5


def test_a_name_that_fits_nothing_is_refused(scratch: ModuleType, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(scratch, monkeypatch, "--only", "nonsense")
    assert stopped.value.code == 2
    assert "nonsense" in capsys.readouterr().err
