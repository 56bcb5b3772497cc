"""Linear algebra on one thread: the products of our bounds are small, and threads that share one mostly wait.

Two calibrations at once on two cores, each product on two threads, took twenty times as long as either alone. The sums
are also added up in one order, so that a bound does not depend on the number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

_lock = Lock()
_inside = 0  # how many have asked for one thread and have not left
_before: Any = None  # what the first of them found


@cache
def _libraries() -> Any:
    """The libraries of linear algebra that numpy and scipy have loaded."""
    import scipy.linalg  # noqa: F401 - loads its own
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _anybody_may_set_it() -> None:
    """Else only the thread that first set the number of threads may set it again."""
    from threadpoolctl import OpenBLASController

    OpenBLASController.clear_controlling_thread()


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for every product made inside.

    The setting is one of the whole process: the first to come sets it, and the last to leave takes it back.
    """
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = _libraries().limit(limits=1, user_api="blas")
            _anybody_may_set_it()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _before.restore_original_limits()
                _anybody_may_set_it()
