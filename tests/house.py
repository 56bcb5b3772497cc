"""The house as CONTRIBUTING.md describes it: which modules belong to which room, and which rooms each may know.

`rooms` reads the table, and `complaints` compares it with what the source says about itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from evidence.source import Import, imports, modules


@dataclass(frozen=True)
class Room:
    """One line of the table."""

    name: str
    modules: tuple[str, ...]  # without the leading "dpmf."; a package stands for everything in it
    may_know: frozenset[str]  # rooms further up in the table, or single private modules of theirs
    packages: frozenset[str]  # packages of others that the room may import


def rooms(text: str) -> list[Room]:
    """The rows of the table with the columns room, modules, holds, may know, packages."""
    table = re.search(r"^\| room \| modules \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    if table is None:
        raise ValueError("CONTRIBUTING.md must have a table whose columns begin with room and modules")
    found: list[Room] = []
    for line in table[1].splitlines():
        name, modules, _, may_know, packages = (cell.strip() for cell in line.strip("|").split("|"))
        words = {word.strip(" `") for word in may_know.split(",") if word.strip()}
        if "all above" in words:
            words = words - {"all above"} | {room.name for room in found}
        found.append(
            Room(name, tuple(re.findall(r"`([\w.]+)`", modules)), frozenset(words),
                 frozenset(re.findall(r"`(\w+)`", packages)))
        )  # fmt: skip
    return found


def room_of(module: str, house: Sequence[Room]) -> Room | None:
    """The room whose table entry names the module, or else the nearest package that it is in."""
    inside = module.removeprefix("dpmf.")
    named = {name: room for room in house for name in room.modules}
    while inside not in named and "." in inside:
        inside = inside.rpartition(".")[0]
    return named.get(inside)


def _private_to(module: str) -> str | None:
    """The package that a private module belongs to; None for a public one."""
    parts = module.split(".")
    private = next((i for i, part in enumerate(parts) if part.startswith("_") and part != "__main__"), None)
    return None if private is None or private < 2 else ".".join(parts[:private])


def complaints(source: Path, house: Sequence[Room]) -> list[str]:
    """What in the source is not as the table says, in words; empty if all of it is."""
    known = modules(source)
    found = [f"{name} is in no room" for name in known if room_of(name, house) is None]
    above: set[str] = set()
    for room in house:
        beyond = {name for name in room.may_know if "." not in name} - above
        found += [f"{room.name} may know {name}, which is not further up in the table" for name in sorted(beyond)]
        found += [f"{room.name} has {name}, which is no module" for name in room.modules if not _exists(name, known)]
        above.add(room.name)
    for module in known:
        room = room_of(module, house)
        for item in imports(module, known) if room is not None else ():
            if problem := _objection(item, room, house, known):
                found.append(f"{module}:{item.where} {problem}")
    return found


def _exists(name: str, known: Mapping[str, Path]) -> bool:
    return name == "dpmf" or f"dpmf.{name}" in known


def _objection(item: Import, room: Room, house: Sequence[Room], known: Mapping[str, Path]) -> str | None:
    """Why the room may not have this import; None if it may."""
    top = item.imported.partition(".")[0]
    if top != "dpmf":
        standard = top in sys.stdlib_module_names
        return None if standard or top in room.packages else f"imports {top}, a package that {room.name} may not use"
    other = room_of(item.imported, house)
    if other is None:
        return None  # said already
    owner = _private_to(item.imported)
    if owner is not None and not f"{item.importer}.".startswith(f"{owner}."):
        named = item.imported.removeprefix("dpmf.") in room.may_know
        return None if named else f"imports {item.imported}, which is private to {owner}"
    if other.name != room.name and other.name not in room.may_know:
        return f"imports {item.imported}, but {room.name} may not know {other.name}"
    return None


def cycle(source: Path) -> list[str]:
    """Modules that import each other in a circle, inside functions too; empty if there is none."""
    known = modules(source)
    graph = {
        name: {item.imported for item in imports(name, known) if item.imported in known and item.imported != name}
        for name in known
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
