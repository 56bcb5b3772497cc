"""What the README shows is run, with a tenth of the batches: its shell commands and its Python blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import paths
import pytest
from command_line import run

README = (paths.ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def smaller(code: str) -> str:
    """The same with a tenth of the batches in an epoch, but ten at least, and one second for a search: it must run."""
    code = re.sub(r"--time-budget \d+", "--time-budget 1 --batching poisson --workers 1", code)
    return re.sub(
        r"(batches[-_]per[-_]epoch[ =]|dataset-size )(\d+)",
        lambda found: f"{found[1]}{max(10, int(found[2]) // 10)}",
        code,
    )


LINES = [line.removeprefix(".venv/bin/") for block in blocks("bash") for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("dpmf ") and line != "dpmf explore"]


def test_the_readme_has_what_is_tested() -> None:
    assert len(COMMANDS) >= 6
    assert len(blocks("python")) >= 1
    assert "dpmf explore" in LINES  # test_page.py opens it in a browser
    for command in ("make setup", "make demo", "make test"):
        assert command in README


def test_the_number_of_the_first_screen_is_that_of_the_data() -> None:
    from evidence import mechanisms
    from evidence.pages import PAGES

    results = {cell: record.result for cell, record in PAGES["mechanisms"].committed().items()}
    assert mechanisms.front_sentence(results) in README


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.split()[1])
def test_shell_commands(command: str, tmp_path: Path) -> None:
    words = shlex.split(smaller(command))
    done = run(*words[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for option in ("--output", "--plot"):
        if option in words:
            assert (tmp_path / words[words.index(option) + 1]).stat().st_size > 1000


@pytest.mark.parametrize("block", blocks("python"))
def test_python_block(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(smaller(block), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
