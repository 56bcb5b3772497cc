"""Which code a number was made by: a fingerprint of what code does, not of its comments, docstrings or layout.

A number is kept together with the version of dpmf and the fingerprint of the modules that it depends on. For a cell
these are found by following the imports of its accountant, so that a change of one accountant makes its own cells
stale and no others. Measurements of everything at once (benchmarks, pictures, the soundness campaign) depend on all
modules that a bound can depend on.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import dpmf
from dpmf.accountants import ACCOUNTANTS
from evidence import source
from evidence.spec import Cell

PACKAGE = Path(dpmf.__file__).parent  # of what is imported, wherever that is
NOT_RECORDED = "not recorded"  # the code of numbers that are older than the habit of writing it down

# Rooms of the package that no bound depends on.
_NO_BOUNDS = ("cli", "integrations", "training", "web", "report.py", "verification.py", "workloads", "designs")
# What every cell goes through. The front door (`dpmf.api`) is hashed alone: its imports lead to every accountant.
_SHARED = ("dpmf.calibration", "dpmf.mechanism", "dpmf.strategies.closed_form", "dpmf.lower_bounds")
_ALONE = ("dpmf.api",)
# Packages whose own file computes nothing and only leads to others.
_DOORS = ("dpmf", "dpmf.accountants", "dpmf.strategies")
_OPTIMISED = ("dpmf.strategies.unamplified", "dpmf.strategies.banded_inverse")
_OPTIMISED_NAMES = ("bandmf", "bandinvmf", "blt")
# Quantities that ask an accountant for something else than its answer.
_EXTRA = {"hazard": ("conditional",), "divergence": ("renyi",)}


# --- of files --------------------------------------------------------------------------------------------------------


def of_files(paths: Iterable[Path]) -> str:
    """Twelve hexadecimal digits of the syntax trees of these files and of all files in these directories."""
    files = {
        file.relative_to(path.parent).as_posix(): file
        for path in paths
        for file in (path.rglob("*.py") if path.is_dir() else (path,))
    }
    return _digest({name: file.read_text(encoding="utf-8") for name, file in files.items() if not _is_version(file)})


def _is_version(file: Path) -> bool:
    return file == PACKAGE / "_version.py"


def _digest(sources: dict[str, str]) -> str:
    """Of the syntax trees of named pieces of source.

    Fields that are empty are left out, so that versions of Python that add fields to their trees agree.
    """
    digest = hashlib.sha256()
    for name, text in sorted(sources.items()):
        digest.update(name.encode() + b"\0")
        for token in _tokens(ast.parse(text)):
            digest.update(token.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:12]


def _tokens(node: object) -> Iterator[str]:
    if isinstance(node, ast.AST):
        yield "(" + type(node).__name__
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                value = [part for part in value if not _is_text(part)]
            if value not in (None, []):
                yield name
                yield from _tokens(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for part in node:
            yield from _tokens(part)
        yield "]"
    else:
        yield repr(node)


def _is_text(node: object) -> bool:
    """A docstring, or another string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def accounting() -> str:
    """The fingerprint of everything that a bound can depend on."""
    return of_files(path for path in PACKAGE.iterdir() if path.name not in _NO_BOUNDS and path.suffix in ("", ".py"))


@cache
def strategies() -> str:
    """The fingerprint of what optimises strategies."""
    return of_files([PACKAGE / "strategies"])


@cache
def package() -> str:
    """The fingerprint of the whole package."""
    return of_files([PACKAGE])


# --- of cells --------------------------------------------------------------------------------------------------------


@cache
def _known() -> dict[str, Path]:
    return source.modules(PACKAGE.parent)


@cache
def _imported(module: str) -> frozenset[str]:
    """The modules of dpmf that the module imports."""
    names = {item.imported for item in source.imports(module, _known())}
    return frozenset(name for name in names if name in _known() and name not in _DOORS)


@cache
def closure(roots: tuple[str, ...]) -> tuple[str, ...]:
    """These modules and everything they import, directly or not."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(_imported(name))
    return tuple(sorted(seen))


@cache
def _module(name: str) -> str:
    return of_files([_known()[name]])


@cache
def _combined(roots: tuple[str, ...], quantity: str) -> str:
    from evidence import quantities

    parts = [f"{name}={_module(name)}" for name in (*closure(roots), *_ALONE)]
    parts.append(_digest({quantity: inspect.getsource(quantities.QUANTITIES[quantity])}))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _accountants(plain: dict[str, Any]) -> set[str]:
    return {plain["name"]}.union(*(_accountants(member) for member in plain.get("members", ())))


def code_version(cell: Cell) -> str:
    """The version of the code that would compute the cell now, such as ``0.1.0+3f2a...``."""
    from evidence import quantities

    if cell.quantity not in quantities.QUANTITIES:  # measured as a whole, by a command of its own
        return f"{dpmf.__version__}+{accounting()}"
    parameters = cell.parameters
    names = set(_EXTRA.get(cell.quantity, ()))
    if "accountant" in parameters:
        names |= _accountants(parameters["accountant"])
    roots = {ACCOUNTANTS[name].__module__ for name in names if name in ACCOUNTANTS}
    roots |= set(_SHARED)
    if parameters.get("mechanism", {}).get("strategy") in _OPTIMISED_NAMES:
        roots |= set(_OPTIMISED)
    if cell.quantity == "design" or "batching" in parameters.get("mechanism", {}):
        roots.add("dpmf.accountants.composed")
    if cell.quantity == "design":
        roots.add("dpmf.designs")
    return f"{dpmf.__version__}+{_combined(tuple(sorted(roots)), cell.quantity)}"
