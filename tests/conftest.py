"""What all tests share: one thread for each process, and no test reads or writes the user's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Every core has a test process of its own. Threads that help with small matrices would double the processor time. This
# comes before numpy, which asks once; the processes that tests start inherit it.
for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

from dpmf.strategies import cache  # noqa: E402

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
