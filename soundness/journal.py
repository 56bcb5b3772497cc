"""Journals: one line of JSON per piece of work, appended whole, so that a run that was killed goes on where it was."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from soundness import provenance

K = TypeVar("K", bound="int | str")
Row = dict[str, Any]

PLACE = Path("soundness-output")
_AHEAD = 16  # pieces that each process may be ahead of the slowest


class Journal:
    """An append-only file of JSON lines, the first of which says what they are about and which code they are of.

    A line cut off by a kill is dropped when the file is opened again. Lines of other code, or of another run, are
    never mixed with new ones: the file is refused. Only one process has it open.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], restart: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: dict[int | str, Row] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock()
            if restart:
                os.ftruncate(self._file, 0)
            whole = self._read(header)
        except BaseException:
            os.close(self._file)
            raise
        os.ftruncate(self._file, whole)
        os.lseek(self._file, 0, os.SEEK_END)
        if not whole:
            self._append(header)

    def _lock(self) -> None:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"--journal {self.path.name} is in use by another run") from None
            except OSError:  # a file system without locks
                pass

    def _read(self, header: Mapping[str, Any]) -> int:
        """Fill `rows`; the number of bytes up to the last whole line."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        if lines:
            different = provenance.changed(json.loads(lines[0]), header)
            if different:
                raise ValueError(
                    f"--journal {self.path.name} is of another run or of other code ({'; '.join(different)}), and the "
                    "two are not mixed: --restart begins anew"
                )
        self.rows = {row["index"]: row for row in map(json.loads, lines[1:])}
        return whole

    def _append(self, row: Mapping[str, Any]) -> None:
        os.write(self._file, json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def add(self, row: Row) -> None:
        self._append(row)
        self.rows[row["index"]] = row

    def close(self) -> None:
        os.close(self._file)


def worked(journal: Journal, keys: Iterable[K], task: Callable[[K], Row], jobs: int) -> Iterator[Row]:
    """The rows of these keys, in their order: from the journal, or computed in so many processes and written down.

    There may be endlessly many keys: whoever asks stops when there is enough.
    """
    if jobs == 1:
        for key in keys:
            if key not in journal.rows:
                journal.add(task(key))
            yield journal.rows[key]
        return
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the processes, one for each core
    context = multiprocessing.get_context("forkserver")
    function = task.func if isinstance(task, partial) else task
    context.set_forkserver_preload([function.__module__])  # imported once
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_worker) as pool:
        waiting: dict[Future[Row], K] = {}
        order: list[K] = []
        coming = iter(keys)
        try:
            while True:
                while len(order) < _AHEAD * jobs and (key := next(coming, None)) is not None:
                    order.append(key)
                    if key not in journal.rows:
                        waiting[pool.submit(task, key)] = key
                if not order:
                    return
                while order[0] not in journal.rows:
                    _collect(journal, waiting)
                while order and order[0] in journal.rows:
                    yield journal.rows[order.pop(0)]
        finally:
            pool.shutdown(cancel_futures=True)


def _collect(journal: Journal, waiting: dict[Future[Row], Any]) -> None:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        del waiting[future]
        journal.add(future.result())


def _worker() -> None:
    """An interrupt ends a worker without a word, and the end of the process that started it ends it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
