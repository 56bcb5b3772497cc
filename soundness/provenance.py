"""Which code a result was measured with: fingerprints of what the code does, not of its comments or dates.

Every part of the campaign records these, and goes on with a journal only where they are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import dpmf
from evidence import fingerprint

ROOT = Path(__file__).parent.parent


@cache
def present() -> Mapping[str, str]:
    """The version, and fingerprints of what bounds depend on ("accounting") and of the whole package."""
    return {"version": dpmf.__version__, "accounting": fingerprint.accounting(), "package": fingerprint.package()}


@cache
def harness(*names: str) -> str:
    """The fingerprint of the files that measure, named from the root of the repository."""
    return fingerprint.of_files(ROOT / name for name in names)


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words."""
    return [f"{key} {then.get(key)!r}, now {now.get(key)!r}" for key in now if then.get(key) != now[key]]
