"""Which code a number depends on.

A result is kept under its cell *and* the code that made it: the package's version and a hash of the modules of dpmf
that the cell's accountant is made of, found by following its imports, plus the quantity's own source. So a change of
one accountant makes its own cells stale and no others; a change of the documentation, of a comment, of a docstring or
of the formatting makes none stale, because what is hashed is the syntax tree without docstrings.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import dpmf
from dpmf.accountants import ACCOUNTANTS
from dpmf_experiments.spec import Cell

# What every cell goes through. The front door (`dpmf.api`) is hashed alone: its imports lead to every accountant.
_SHARED = ("dpmf.calibration", "dpmf.mechanism", "dpmf.strategies.closed_form", "dpmf.lower_bounds")
_ALONE = ("dpmf.api",)
_OPTIMISED = ("dpmf.strategies.optimised", "dpmf.strategies.banded_inverse")
_OPTIMISED_NAMES = ("bandmf", "bandinvmf", "blt")
# Quantities that ask an accountant for something else than its answer.
_EXTRA = {"hazard": ("conditional",), "divergence": ("renyi",)}


def _tree_hash(source: str) -> str:
    """Of the code without docstrings, comments and formatting."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0] = ast.Pass()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _file(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _imports(source: str) -> set[str]:
    """Modules of dpmf that are imported anywhere in the source; packages stand for themselves only."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("dpmf.") and _is_module(name)}


@cache
def _is_module(name: str) -> bool:
    try:
        path = _file(name)
    except ModuleNotFoundError:
        return False
    return path is not None and path.name != "__init__.py"


@cache
def _module(name: str) -> tuple[str, frozenset[str]]:
    path = _file(name)
    assert path is not None
    source = path.read_text(encoding="utf-8")
    return _tree_hash(source), frozenset(_imports(source))


@cache
def _closure(roots: tuple[str, ...]) -> tuple[str, ...]:
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(_module(name)[1])
    return tuple(sorted(seen))


@cache
def _combined(roots: tuple[str, ...], quantity: str) -> str:
    from dpmf_experiments import quantities

    parts = [f"{name}={_module(name)[0]}" for name in (*_closure(roots), *_ALONE)]
    parts.append(_tree_hash(inspect.getsource(quantities.QUANTITIES[quantity])))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _accountants(plain: dict[str, Any]) -> set[str]:
    return {plain["name"]}.union(*(_accountants(member) for member in plain.get("members", ())))


def code_version(cell: Cell) -> str:
    """The version of the code that would compute the cell now, such as ``0.1.0+3f2a...``."""
    parameters = cell.parameters
    names = set(_EXTRA.get(cell.quantity, ()))
    if "accountant" in parameters:
        names |= _accountants(parameters["accountant"])
    roots = {ACCOUNTANTS[name].__module__ for name in names if name in ACCOUNTANTS}
    roots |= set(_SHARED)
    if parameters.get("mechanism", {}).get("strategy") in _OPTIMISED_NAMES:
        roots |= set(_OPTIMISED)
    return f"{dpmf.__version__}+{_combined(tuple(sorted(roots)), cell.quantity)}"


def package_version() -> str:
    """The version of all of dpmf's code, in the same form."""
    root = Path(dpmf.__file__).parent
    files = sorted(root.rglob("*.py"))
    parts = [f"{path.relative_to(root)}={_tree_hash(path.read_text(encoding='utf-8'))}" for path in files]
    return f"{dpmf.__version__}+{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"
