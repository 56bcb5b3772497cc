"""What all tests share: one thread for each process, and no test reads or writes the user's cache."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Every core has a test process of its own. Threads that help with small matrices would double the processor time. This
# comes before numpy, which asks once; the processes that tests start inherit it.
for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
if sys.platform == "linux":  # processes that train together need no name to be looked up to find each other
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from dpmf import store  # noqa: E402

# The same examples in every run, so that a red one says something about the change.
settings.register_profile("dpmf", derandomize=True, deadline=None)
settings.load_profile("dpmf")


def pytest_configure(config: pytest.Config) -> None:
    """One strategy cache for the run, so that each strategy is optimised once, and compiled JAX for each process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:  # the process that starts the others, or the only one
        place = tempfile.mkdtemp(prefix="dpmf-tests-")
        config.add_cleanup(lambda: shutil.rmtree(place, ignore_errors=True))
        os.environ["DPMF_CACHE_DIR"] = str(Path(place, "strategies"))
    # JAX does not write its files atomically, so that processes cannot share them.
    own = Path(os.environ["DPMF_CACHE_DIR"]).with_name(f"jax-{worker}")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(own)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for one test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("DPMF_CACHE_DIR", str(directory))
    store.forget()
    yield directory
    store.forget()


@pytest.fixture(scope="module")
def coarse_lower_bounds() -> Iterator[None]:
    """Lower bounds are computed coarsely: for tests that ask where they are shown, and not how close they come.

    Any tuning gives sound bounds, and those of the API and of what shows them still have to be the same.
    """
    from dpmf import lower_bounds
    from dpmf.lower_bounds import _families, _windows

    with pytest.MonkeyPatch.context() as patch:
        for module, coarse in (
            (lower_bounds, {"epsilon_tolerance": 0.1}),
            (_families, {"shared_cells": 3, "loss": 0.2}),
            (_windows, {"most_combinations": 2e4}),  # millions by default, for every bound
        ):
            patch.setattr(module, "_TUNING", dataclasses.replace(module._TUNING, **coarse))
        yield
