"""The memory for the last few results."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

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


def test_threads_share_what_is_made_and_never_lose_a_key() -> None:
    known: Recent[int, int] = Recent(2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: known.get(k % 5, lambda: k % 5), range(4000)))
    assert found == [k % 5 for k in range(4000)]


def test_what_goes_to_another_process_begins_with_nothing() -> None:
    known: Recent[str, int] = Recent(2)
    known.get("a", lambda: 1)
    for again in (pickle.loads(pickle.dumps(known)), copy.deepcopy(known)):
        assert again.get("a", lambda: 2) == 2
    assert known.get("a", lambda: 2) == 1
