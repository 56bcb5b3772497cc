"""What a user installs: a wheel made from the sdist, light to import, typed, with its command and its completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import paths
import pytest
import yaml

import dpmf
from dpmf.accountants import ACCOUNTANTS

ROOT = paths.ROOT
HEAVY = (
    "dp_accounting", "jax", "jax_privacy", "matplotlib", "numba", "numpy", "opacus", "pandas", "rich", "scipy",
    "sklearn", "streamlit", "torch", "typer",
)  # fmt: skip


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "_DPMF", "COMP_"))}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**clean, **environment}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel built from it; nothing is downloaded."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel in it, and the libraries of this one behind it."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    binaries = home / "bin"
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", archives["wheel"])
    (site,) = home.glob("lib/python*/site-packages")
    # Searched after the environment's own folder, so that the dpmf found is the one just installed.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return binaries


def test_the_wheel_has_every_module_the_types_and_the_licence(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= names
    assert "dpmf/py.typed" in names
    extra = {name for name in names - modules if not name.startswith(f"dpmf-{dpmf.__version__}.dist-info/")}
    assert all(name.startswith("dpmf/") for name in extra)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_what_make_needs(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "CITATION.cff",
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
    ):
        assert name in names
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "checker", "evidence", "soundness"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                assert str(path.relative_to(ROOT)) in names


def test_the_metadata_says_what_pyproject_says(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        prefix = f"dpmf-{dpmf.__version__}.dist-info/"
        metadata = Parser().parsestr(wheel.read(prefix + "METADATA").decode())
        entry_points = wheel.read(prefix + "entry_points.txt").decode()
    assert metadata["Version"] == dpmf.__version__
    assert [line for line in entry_points.splitlines() if "=" in line] == ["dpmf = dpmf.cli:main"]
    extras = set(metadata.get_all("Provides-Extra"))
    assert {"jax", "torch", "web", "docs", "experiments"} <= extras
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in needed if re.search(r"jax|torch|opacus|streamlit|dask", line)]


def test_the_version_is_written_once() -> None:
    version = re.escape(dpmf.__version__)
    holders = [
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *ROOT.glob("*.yml")]
        if re.search(rf"[\"' =]{version}[\"'\s]", path.read_text())
    ]
    assert holders == ["src/dpmf/_version.py"]
    assert re.search(rf"^## {version}\b", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def test_the_citation_file_is_whole() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert all(citation[field] for field in ("message", "title", "authors", "license"))
    assert "version" not in citation  # it would be a second place for it
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference)


@pytest.mark.parametrize(
    "statement",
    ["import dpmf", "import dpmf; dir(dpmf); dpmf.__version__", "import dpmf.integrations", "import dpmf._version"],
)
def test_importing_imports_nothing_heavy(statement: str, installed: Path) -> None:
    found = run(
        installed / "python", "-c", f"{statement}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "allowed"),
    [("--help", {"typer", "rich"}), ("--version", {"typer", "rich"})],
)
def test_the_command_starts_without_numerics(words: str, allowed: set[str], installed: Path) -> None:
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr))\n"
        f"sys.argv = ['dpmf', {words!r}]\n"
        "from dpmf.cli import main; main()"
    )
    found = run(installed / "python", "-c", code).stderr.strip().splitlines()[-1]
    assert set(re.findall(r"'(\w+)'", found)) <= allowed


def test_the_installed_package_works(installed: Path) -> None:
    where = run(installed / "python", "-c", "import dpmf; print(dpmf.__file__); print(dpmf.__version__)").stdout.split()
    assert Path(where[0]).is_relative_to(installed.parent)
    assert where[1] == dpmf.__version__
    assert run(installed / "dpmf", "--version").stdout.strip() == f"dpmf {dpmf.__version__}"
    line = "--strategy dpsgd --epochs 1 --batches-per-epoch 100 --noise-multiplier 1 --epsilon 1 --json"
    options = line.split()
    assert '"delta"' in run(installed / "dpmf", "delta", *options).stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dpmf ca", {"calibrate"}),
        ("dpmf calibrate --strat", {"--strategy"}),
        ("dpmf calibrate --strategy bi", {"bisr"}),
        ("dpmf delta --accountant g", {name for name in ACCOUNTANTS if name.startswith("g")}),
        ("dpmf delta --direction re", {"remove"}),
    ],
)
def test_the_shell_completes(line: str, expected: set[str], installed: Path) -> None:
    words = {"_DPMF_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert set(run(installed / "dpmf", **words).stdout.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_shown(shell: str, installed: Path) -> None:
    script = run(installed / "dpmf", _DPMF_COMPLETE=f"source_{shell}").stdout
    assert f"_DPMF_COMPLETE=complete_{shell}" in script
