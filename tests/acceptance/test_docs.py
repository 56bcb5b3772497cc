"""What the pages in docs/ show is run, and what they say in numbers is in the data they are made from."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import paths
import pytest

DOCS = paths.DOCS
PAGES = sorted(DOCS.rglob("*.md"))
LARGEST_PICTURE = 120 * 1024


def load(name: str) -> ModuleType:
    """A script in docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


runner = load("run_pages")
# Pages about parts that may be left out of an installation.
NEEDS = {
    "howto/compose.md": "dpmf.integrations",
    "howto/train-pytorch.md": "dpmf.training",
    "howto/train-jax.md": "dpmf.training",
}
COMMANDS = [c for page in PAGES for block in runner.blocks(page.read_text()) for c in block.commands]


def test_there_is_something_to_test() -> None:
    assert DOCS / "accountants.md" in PAGES
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [
        ("σ = 1.331", "σ = 1.330", True),
        ("σ = 1.331", "σ = 1.230", False),
        ("σ = 1.331 ", "ε = 1.331", False),
        ("a 1 2", "a 1", False),
        ("0.0", "0.0", True),
        ("┃ ε │ 1 │", "ε 1", True),
        ("1.6e-05", "1.6e-06", False),
        ("True", "False", False),
    ],
)
def test_outputs_are_compared(printed: str, shown: str, same: bool) -> None:
    assert runner.same_output(printed, shown) is same


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_code_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path, monkeypatch) -> None:
    needs = NEEDS.get(page.relative_to(DOCS).as_posix())
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    monkeypatch.chdir(tmp_path)
    run = runner.run_command
    # A search for a design takes as long as it may: here two seconds will do.
    shorter = partial(re.sub, r"--time-budget \d+", "--time-budget 2 --batching poisson --workers 1")
    monkeypatch.setattr(runner, "run_command", lambda command: run(shorter(command)))
    printed = runner.outputs(page)
    for block, said in printed:
        if block.output is not None:
            assert runner.same_output(said, block.output), f"{page.name} shows\n{block.output}\nbut it is\n{said}"
    assert "".join(said for _, said in printed).strip() or not printed


def test_outputs_can_be_written_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\nand\n\n```\nnot run\n```\n")
    printed = runner.outputs(page)
    assert [said for _, said in printed] == ["2\n"]
    assert not runner.same_output("2\n", printed[0][0].output)
    assert runner.rewritten(page.read_text(), printed) == page.read_text().replace("\n3\n", "\n2\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    without_formulas = re.sub(r"\$[^$]*\$", "", page.read_text())
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", without_formulas):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_pictures_are_small_and_all_shown() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for picture in (DOCS / "pictures").iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size <= LARGEST_PICTURE, picture.name
        shown = picture.name.replace("-phone", "")  # the site shows narrow screens the narrow twin of a picture
        assert f"pictures/{shown}" in pages
