"""The memory for the last few results."""

from __future__ import annotations

import pytest

from dpmf.recent import Recent


def test_only_what_was_used_last_is_kept() -> None:
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name.upper()

    known: Recent[str, str] = Recent(2)
    assert [known.get(name, lambda name=name: make(name)) for name in "abacab"] == list("ABACAB")  # type: ignore[misc]
    assert made == list("abcb")  # b was used before a when c needed its place


def test_what_fails_is_not_kept() -> None:
    known: Recent[str, float] = Recent(2)
    with pytest.raises(ZeroDivisionError):
        known.get("a", lambda: 1 / 0)
    assert known.get("a", lambda: 1.0) == 1.0
