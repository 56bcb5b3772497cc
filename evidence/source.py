"""What the source of a package says about itself, without importing it: its modules, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """`importer` imports the module `imported` in line `where`."""

    importer: str
    imported: str
    where: int


def modules(source: Path) -> dict[str, Path]:
    """Every module below the directory `source` by its dotted name; a package has the name of its directory."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, known: Mapping[str, Path]) -> Iterator[Import]:
    """Everything the module imports, inside functions too; what only a type checker reads is left out.

    Args:
      module: the importing module, one of `known`.
      known: the modules of the package, from `modules`. ``from a import b`` is an import of ``a.b`` if that is one of
        them, and of ``a`` otherwise.
    """

    def visit(node: ast.AST) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            start = str(node.module)
            if node.level:
                base = module.split(".") if known[module].name == "__init__.py" else module.split(".")[:-1]
                start = ".".join([*base[: len(base) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                inside = f"{start}.{alias.name}"
                yield Import(module, inside if inside in known else start, node.lineno)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(known[module].read_text(encoding="utf-8")))
