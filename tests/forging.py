"""Files of the cache with other numbers, and the checksum that goes with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dpmf.strategies import cache

Values = Mapping[str, Sequence[float]]


def values_in(path: Path) -> dict[str, list[float]]:
    """What a file says."""
    kept = json.loads(path.read_text())["values"]
    return {name: [float.fromhex(number) for number in numbers] for name, numbers in kept.items()}


def forge(path: Path, change: Callable[[dict[str, list[float]]], Values]) -> None:
    """Put other numbers into a file."""
    record = json.loads(path.read_text())
    changed = change(values_in(path))
    record["values"] = {name: [float(number).hex() for number in numbers] for name, numbers in changed.items()}
    record["checksum"] = cache._digest([record["key"], record["values"]])
    path.write_text(json.dumps(record))
