"""The house is as CONTRIBUTING.md says: who may know whom, no circle of imports, and every module imports alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import house
import paths
import pytest

from evidence.source import modules

SOURCE = paths.ROOT / "src"
HOUSE = house.rooms((paths.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
MODULES = sorted(modules(SOURCE))

PRELOADED = (
    "numpy", "scipy.fft", "scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats", "numba", "rich", "typer",
    "dp_accounting", "opacus", "streamlit",
)  # fmt: skip
# One process imports the packages of others that most modules need, and forks once for each module: the child has
# nothing of dpmf in it, as a fresh interpreter would, and does not spend seconds on numpy and numba again.
IMPORT_EACH = """
import contextlib, importlib, io, json, os, sys
for package in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(package)
assert not [name for name in sys.modules if name.partition(".")[0] == "dpmf"]
sys.dont_write_bytecode = False  # what one child has compiled, the next ones read
failed = {}
for module in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                importlib.import_module(module)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}"[:4000].encode() or b"?")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        words = said.read().decode(errors="replace")
    os.wait()
    if words:
        failed[module] = words
print(json.dumps(failed))
"""


def imported_alone(modules: list[str], place: Path, preloaded: Sequence[str] = ()) -> dict[str, str]:
    """Those of the modules that cannot be imported when no other module of the package has been, and why."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_EACH, *preloaded], input=json.dumps(modules),
        env={**os.environ, **one_thread, "PYTHONPATH": str(place)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    failed: dict[str, str] = json.loads(done.stdout)
    return failed


def test_every_module_imports_alone() -> None:
    failed = imported_alone(MODULES, SOURCE, PRELOADED)
    absent = [name for name, words in failed.items() if words.startswith("ModuleNotFoundError: No module named 'dpmf")]
    assert not absent
    # An optional package that is not installed is not this module's fault, and other tests need it anyway.
    assert {n: w for n, w in failed.items() if not w.startswith("ModuleNotFoundError")} == {}


def test_the_table_is_what_the_source_does() -> None:
    assert house.complaints(SOURCE, HOUSE) == []


def test_no_module_imports_itself_through_others() -> None:
    assert house.cycle(SOURCE) == []


def test_every_accountant_with_parts_has_tests_of_its_name() -> None:
    """And the folder of accountants stays small enough to be read at a glance."""
    entries = [path for path in (SOURCE / "dpmf" / "accountants").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 15
    packages = {path.name for path in entries if path.is_dir()}
    tested = {path.name for path in (paths.TESTS / "unit" / "accountants").iterdir() if path.is_dir()}
    assert packages <= tested


# --- and the tests above would notice --------------------------------------------------------------------------------

TABLE = """
| room | modules | holds | may know | packages |
|---|---|---|---|---|
| ground | `ground` | | | `numpy` |
| walls | `walls`, `_frame` | | ground | |
| roof | `roof` | | all above, `walls._beam` | |
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package that is as its table says."""
    files = {
        "__init__.py": "",
        "ground.py": "import numpy\n",
        "_frame.py": "",
        "walls/__init__.py": "from dpmf import _frame, ground\nfrom dpmf.walls import _beam\n",
        "walls/_beam.py": "def lazily():\n    from dpmf.ground import numpy\n",
        "roof.py": "import json\nfrom dpmf.walls import _beam\nfrom dpmf.walls._beam import lazily\n",
    }
    for name, text in files.items():
        path = tmp_path / "dpmf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def rows(text: str = TABLE) -> list[house.Room]:
    return house.rooms(text + "| door | `dpmf` | | | |\n")


def test_a_tree_as_the_table_says_has_nothing_to_complain_about(tree: Path) -> None:
    assert house.complaints(tree, rows()) == []
    assert house.cycle(tree) == []
    assert imported_alone(sorted(modules(tree)), tree) == {}


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("ground.py", "from dpmf import walls", "dpmf.ground:2 imports dpmf.walls, but ground may not know walls"),
        ("ground.py", "def f():\n    import dpmf.roof", "dpmf.ground:3 imports dpmf.roof, but ground may not know"),
        ("ground.py", "import scipy.special", "dpmf.ground:2 imports scipy, a package that ground may not use"),
        ("roof.py", "from dpmf import _other", "imports dpmf, but roof may not know door"),
        ("walls/_beam.py", "import numpy", "dpmf.walls._beam:3 imports numpy, a package that walls may not use"),
        ("_frame.py", "from dpmf.walls import _beam", "imports dpmf.walls._beam, which is private to dpmf.walls"),
        ("cellar.py", "", "dpmf.cellar is in no room"),
    ],
)  # fmt: skip
def test_a_forbidden_import_is_noticed(tree: Path, file: str, line: str, said: str) -> None:
    path = tree / "dpmf" / file
    path.write_text((path.read_text() if path.exists() else "") + line + "\n")
    found = house.complaints(tree, rows())
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("changed", "into", "said"),
    [
        (
            "| ground | `ground` | | |",
            "| ground | `ground` | | roof |",
            "ground may know roof, which is not",
        ),
        ("`ground` |", "`ground`, `attic` |", "ground has attic, which is no module"),
    ],
)
def test_a_table_that_cannot_be_is_noticed(tree: Path, changed: str, into: str, said: str) -> None:
    found = house.complaints(tree, rows(TABLE.replace(changed, into)))
    assert len(found) == 1
    assert said in found[0]


def test_a_circle_is_noticed(tree: Path) -> None:
    (tree / "dpmf" / "ground.py").write_text("def lazily():\n    from dpmf import roof\n")
    assert set(house.cycle(tree)) >= {"dpmf.ground", "dpmf.roof"}


def test_a_module_that_needs_another_to_be_imported_first_is_noticed(tree: Path) -> None:
    (tree / "dpmf" / "ground.py").write_text("import sys\nsys.modules['dpmf.roof']\n")
    failed = imported_alone(["dpmf", "dpmf.ground"], tree)
    assert set(failed) == {"dpmf.ground"}
    assert "KeyError" in failed["dpmf.ground"]


WAY = """
import contextlib, io, json, sys
import dpmf.cli

found = set()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & 2 and not code.co_filename.startswith("<"):
        found.add(frame.f_globals.get("__name__", ""))

def run():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        dpmf.cli.main()

run()  # imports what it needs
sys.setprofile(note)
run()
sys.setprofile(None)
print(json.dumps(sorted(name for name in found if name.partition(".")[0] == "dpmf")))
"""


def test_the_way_of_a_number_is_as_described():
    """At most 25 modules from the command to the number; the page names them all, and those that serve on the way."""
    page = (paths.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## The way of a number\n")[2].partition("\n## ")[0]
    command = next(line.split() for line in section.splitlines() if line.startswith("    dpmf "))
    table = [name for line in section.splitlines() if line.startswith("|") for name in line.split("`")[1::2]]
    named = {f"dpmf.{name}" for name in table}
    services = {
        name if name == "dpmf" else f"dpmf.{name}" for name in section.partition("Services:")[2].split("`")[1::2]
    }
    assert len(named) == len(table) <= 25
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WAY, *command[1:]],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = set(json.loads(done.stdout.splitlines()[-1]))
    assert found - services == named
