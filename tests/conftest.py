"""What all tests share: no test reads or writes the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from dpmf.strategies import cache

# The same examples in every run, so that a red one says something about the change.
settings.register_profile("dpmf", derandomize=True, deadline=None)
settings.load_profile("dpmf")


@pytest.fixture(scope="session", autouse=True)
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One strategy cache for the run, so that each strategy is optimised once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPMF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for one test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("DPMF_CACHE_DIR", str(directory))
    cache.forget()
    yield directory
    cache.forget()
