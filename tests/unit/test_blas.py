"""Linear algebra on one thread: while anybody asks for it, and as it was afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from threadpoolctl import OpenBLASController, threadpool_info, threadpool_limits

from dpmf import blas, budget


def threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def two_threads():
    import scipy.linalg  # noqa: F401 - loads its library

    before = threadpool_limits(2, user_api="blas")
    OpenBLASController.clear_controlling_thread()  # so that other threads may set it, as they may in a program
    if threads() != {2}:
        pytest.skip("the linear algebra of this machine cannot have two threads")
    yield
    before.restore_original_limits()


def test_one_thread_inside_and_as_before_outside() -> None:
    with blas.one_thread():
        assert threads() == {1}
        with blas.one_thread():
            assert threads() == {1}
        assert threads() == {1}
    assert threads() == {2}


def test_all_work_within_a_time_limit_has_one_thread() -> None:
    with budget.time_limit(None):
        assert threads() == {1}
    assert threads() == {2}


def test_an_error_inside_leaves_all_as_before() -> None:
    with pytest.raises(KeyError), blas.one_thread():
        raise KeyError
    assert threads() == {2}


def test_several_threads_leave_it_as_before_in_any_order() -> None:
    """The first to come is the first to leave, or the last."""
    for first_leaves_first in (True, False):
        came, leave = Barrier(2), Barrier(2)

        def first(came: Barrier = came, leave: Barrier = leave, at_once: bool = first_leaves_first) -> None:
            with blas.one_thread():
                came.wait(60)
                if not at_once:
                    leave.wait(60)
            if at_once:
                leave.wait(60)

        def second(came: Barrier = came, leave: Barrier = leave, at_once: bool = first_leaves_first) -> None:
            came.wait(60)
            with blas.one_thread():
                if at_once:
                    leave.wait(60)
                assert threads() == {1}
            if not at_once:
                leave.wait(60)

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(first), pool.submit(second)]:
                done.result()
        assert threads() == {2}


def test_a_bound_does_not_depend_on_the_number_of_threads() -> None:
    """Sums in another order differ in their last digits: seen at this bound before linear algebra had one thread."""
    program = (
        "import dpmf; m = dpmf.Mechanism(dpmf.strategies.bsr(16), dpmf.BallsInBins(1, 100));"
        "print(repr(dpmf.delta(m, noise_multiplier=0.6, epsilon=8.0, accountant='own-bin').delta))"
    )
    found = set()
    for number in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "OPENBLAS_NUM_THREADS": number},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.add(done.stdout)
    assert len(found) == 1
