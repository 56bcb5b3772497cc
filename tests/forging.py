"""Files of the store with other numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Values = Mapping[str, Sequence[float]]


def values_in(path: Path) -> dict[str, list[float]]:
    """What a file says."""
    kept = json.loads(path.read_text())["hint"]
    return {name: [float.fromhex(number) for number in numbers] for name, numbers in kept.items()}


def forge(path: Path, change: Callable[[dict[str, list[float]]], Values]) -> None:
    """Put other numbers into a file."""
    entry = json.loads(path.read_text())
    changed = change(values_in(path))
    entry["hint"] = {name: [float(number).hex() for number in numbers] for name, numbers in changed.items()}
    path.write_text(json.dumps(entry))
