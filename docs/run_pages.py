"""Runs the code of the pages, as their reader would: from top to bottom, in one namespace and one directory.

    python docs/run_pages.py                     check every page: what it shows is what comes out
    python docs/run_pages.py start.md            only these
    python docs/run_pages.py --write             put what comes out into the pages

A ``python`` or ``bash`` block (its lines that begin with ``dpmf`` or ``python -m evidence``) is run; a ``text`` block
right after it is what it prints. Blocks without a language are not run. The tests do the same with every page.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))  # where `evidence` is
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n*(?:^```text\n(.*?)^```)?", flags=re.DOTALL | re.MULTILINE)

COMMANDS = {"dpmf ": "dpmf.cli", "python -m evidence ": "evidence.cli"}

# Numbers in the pages are rounded, and bounds get better with time; a difference beyond this should be looked at.
TOLERANCE = 0.03
NUMBER = re.compile(r"(-?\d+\.?\d*(?:[eE][-+]?\d+)?)")


@dataclass(frozen=True)
class Block:
    """A block of code in a page, and the output that the page shows for it."""

    language: str
    code: str
    output: str | None

    @property
    def runs(self) -> bool:
        return self.language in ("python", "bash")

    @property
    def commands(self) -> list[str]:
        return [line for line in self.code.splitlines() if self.language == "bash" and line.startswith(tuple(COMMANDS))]


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def blocks(text: str) -> list[Block]:
    return [Block(language, code, output or None) for language, code, output in BLOCK.findall(text)]


def same_output(printed: str, shown: str) -> bool:
    """The same words, the same numbers to within a few percent, whatever the spaces and lines of tables."""
    pieces = [NUMBER.split(re.sub(r"[\s─-╿]+", " ", text).strip()) for text in (printed, shown)]
    if len(pieces[0]) != len(pieces[1]):
        return False
    for i, (new, old) in enumerate(zip(*pieces, strict=True)):
        if i % 2 == 0 and new.strip() != old.strip():
            return False
        if i % 2 == 1 and abs(float(new) - float(old)) > TOLERANCE * abs(float(old)):
            return False
    return True


def run_command(command: str) -> None:
    """In this process: an interpreter for each would take longer than the commands."""
    name = next(name for name in COMMANDS if command.startswith(name))
    words = shlex.split(command.removeprefix(name))
    if words[0] == "explore":
        raise ValueError("dpmf explore runs for ever: put it into a block without a language")
    if status := importlib.import_module(COMMANDS[name]).app(words, standalone_mode=False):
        raise ValueError(f"{command} ended with status {status}")


def outputs(page: Path) -> list[tuple[Block, str]]:
    """What each block of the page prints, run in the current directory."""
    names: dict[str, object] = {"__name__": page.name}
    found = []
    for block in blocks(page.read_text()):
        if not block.runs:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if block.language == "python":
                exec(compile(block.code, page.name, "exec"), names)
            for command in block.commands:
                run_command(command)
        found.append((block, said.getvalue()))
    return found


def rewritten(text: str, printed: list[tuple[Block, str]]) -> str:
    """The page with the outputs it shows replaced by what was printed."""
    after = iter(printed)

    def replace(found: re.Match[str]) -> str:
        if not Block(found[1], found[2], found[3]).runs:
            return found[0]
        _, said = next(after)
        return found[0] if found[3] is None else found[0].replace(f"```text\n{found[3]}", f"```text\n{said}")

    return BLOCK.sub(replace, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the code of the pages.")
    parser.add_argument("names", nargs="*", metavar="page", help="pages, relative to docs/ (all if none)")
    parser.add_argument("--write", action="store_true", help="put what comes out into the pages")
    options = parser.parse_args()
    chosen = [DOCS / name for name in options.names] or pages()
    if missing := [str(page) for page in chosen if not page.is_file()]:
        parser.error(f"no such page: {', '.join(missing)}")
    wrong = 0
    for page in chosen:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as directory:
            before = os.getcwd()
            os.chdir(directory)
            try:
                printed = outputs(page)
            finally:
                os.chdir(before)
        for block, said in printed:
            if block.output is not None and not same_output(said, block.output):
                wrong += 1
                print(f"{page.name} shows\n{block.output}but it is\n{said}")
        if options.write:
            page.write_text(rewritten(page.read_text(), printed))
        print(f"{page.relative_to(DOCS)}: {len(printed)} blocks, {time.process_time() - began:.1f} s of processor time")
    return 0 if options.write or not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
