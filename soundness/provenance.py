"""Which code a result was measured with: fingerprints of what the code does, not of its comments or dates.

Every part of the campaign records these, and goes on with a journal only where they are the same.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import dpmf

ROOT = Path(__file__).parent.parent
PACKAGE = Path(dpmf.__file__).parent  # what is imported, wherever that is
# Rooms of the package that no bound depends on.
_NO_BOUNDS = ("cli", "integrations", "training", "web", "report.py", "verification.py")


def fingerprint(paths: Iterable[Path]) -> str:
    """Twelve hexadecimal digits of the syntax trees of these files and of all files in these directories.

    Comments, docstrings and layout do not count. Fields that are empty are left out, so that versions of Python that
    add fields to their trees agree.
    """
    digest = hashlib.sha256()
    files = {
        file.relative_to(path.parent).as_posix(): file
        for path in paths
        for file in (path.rglob("*.py") if path.is_dir() else (path,))
    }
    for name, file in sorted(files.items()):
        if file == PACKAGE / "_version.py":
            continue
        digest.update(name.encode() + b"\0")
        for token in _tokens(ast.parse(file.read_bytes())):
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
def present() -> Mapping[str, str]:
    """The version, and fingerprints of what bounds depend on ("accounting") and of the whole package."""
    accounting = [path for path in PACKAGE.iterdir() if path.name not in _NO_BOUNDS and path.suffix in ("", ".py")]
    return {"version": dpmf.__version__, "accounting": fingerprint(accounting), "package": fingerprint([PACKAGE])}


@cache
def harness(*names: str) -> str:
    """The fingerprint of the files that measure, named from the root of the repository."""
    return fingerprint(ROOT / name for name in names)


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words."""
    return [f"{key} {then.get(key)!r}, now {now.get(key)!r}" for key in now if then.get(key) != now[key]]
