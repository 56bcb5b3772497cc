"""A few worker processes shared by everybody who looks at the page.

Every client watches one request at a time. Equal requests are computed once, and the last 64 finished views are kept. A
request that nobody watches any more is cancelled by ending its process. A request that reaches the time limit is ended,
too, and keeps its last view. The numbers of clients, processes and kept views are bounded, and so are the time and
memory of a process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dpmf.web.ranking import DesignRequest, Ranking
from dpmf.web.request import Request
from dpmf.web.view import View

Asked: TypeAlias = Request | DesignRequest
Shown: TypeAlias = View | Ranking

WORKERS = 2
TIME_LIMIT = 180.0
MOST_CLIENTS = 200
KEPT_VIEWS = 64
LEASE = 10.0  # seconds after which a silent client is forgotten
_JOBS_PER_PROCESS = 50  # then a fresh process takes over, and memory that libraries keep is freed
_TICK = 0.1


@dataclass(frozen=True)
class Snapshot:
    """The state of a request: "waiting", "running", "done", "stopped" (by the time limit), "failed" or "busy"."""

    state: str
    view: Shown | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)
    ahead: int = 0
    seconds: float = 0.0
    message: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ("done", "stopped", "failed", "busy")


@dataclass(eq=False)
class _Job:
    request: Asked
    state: str = "waiting"
    view: Shown | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)
    began: float = 0.0
    message: str = ""
    cancelled: bool = False
    process: subprocess.Popen[str] | None = field(default=None, repr=False)


def _read(request: Asked, values: Mapping[str, Any]) -> Shown:
    return Ranking.from_dict(values) if isinstance(request, DesignRequest) else View.from_dict(values)


class Pool:
    """The shared processes. A client calls `watch` again and again; `close` ends all processes.

    Args:
      workers: the number of processes.
      time_limit: seconds after which a computation is stopped.
      most_clients: the number of clients beyond which new ones are refused.
      kept_views: the number of finished views that are kept.
      lease: seconds after which a client that does not call `watch` is forgotten.
      command: the command that starts a worker.
    """

    def __init__(
        self,
        workers: int = WORKERS,
        time_limit: float = TIME_LIMIT,
        most_clients: int = MOST_CLIENTS,
        kept_views: int = KEPT_VIEWS,
        lease: float = LEASE,
        command: Sequence[str] = (sys.executable, "-m", "dpmf.web.worker"),
    ) -> None:
        self._command = list(command)
        self.time_limit, self.most_clients, self.kept_views, self.lease = time_limit, most_clients, kept_views, lease
        self.started = 0  # the number of computations begun
        self._lock = threading.Condition()
        self._clients: dict[str, tuple[Asked, float]] = {}
        self._jobs: OrderedDict[Asked, _Job] = OrderedDict()  # waiting or running, oldest first
        self._kept: OrderedDict[Asked, Snapshot] = OrderedDict()
        self._processes: set[subprocess.Popen[str]] = set()
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        self._threads.append(threading.Thread(target=self._supervise, daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def watch(self, client: str, request: Asked) -> Snapshot:
        """Return the state of the request, which replaces any earlier request of this client."""
        with self._lock:
            if client not in self._clients and len(self._clients) >= self.most_clients:
                return Snapshot("busy", message="too many people are looking at this page; try again in a minute")
            previous = self._clients.get(client)
            self._clients[client] = (request, time.monotonic())
            if previous is not None and previous[0] != request:
                self._drop_unwatched()
            kept = self._kept.get(request)
            if kept is not None:
                self._kept.move_to_end(request)
                return kept
            job = self._jobs.get(request)
            if job is None:
                job = self._jobs[request] = _Job(request)
                self._lock.notify_all()
            if job.state == "waiting":
                return Snapshot("waiting", ahead=[*self._jobs.values()].index(job))
            return Snapshot("running", job.view, job.pictures, seconds=time.monotonic() - job.began)

    def leave(self, client: str) -> None:
        """Forget a client, and end its computation unless others watch it."""
        with self._lock:
            self._clients.pop(client, None)
            self._drop_unwatched()

    def sizes(self) -> dict[str, int]:
        """Return the numbers of clients, unfinished requests, kept views and processes."""
        with self._lock:
            return {
                "clients": len(self._clients),
                "jobs": len(self._jobs),
                "kept": len(self._kept),
                "processes": len(self._processes),
            }

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
            self._lock.notify_all()

    # Methods below: `_drop_unwatched` and `_keep` are called with the lock held, the others without.

    def _drop_unwatched(self) -> None:
        watched = {request for request, _ in self._clients.values()}
        for request, job in list(self._jobs.items()):
            if request not in watched:
                job.cancelled = True
                del self._jobs[request]
                if job.process is not None:
                    job.process.kill()

    def _supervise(self) -> None:
        while True:
            time.sleep(_TICK)
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                for client, (_, seen) in list(self._clients.items()):
                    if now - seen > self.lease:
                        del self._clients[client]
                self._drop_unwatched()
                for job in self._jobs.values():
                    if job.process is not None and job.state == "running" and now - job.began > self.time_limit:
                        job.state = "stopped"
                        job.process.kill()

    def _serve(self) -> None:
        process: subprocess.Popen[str] | None = None
        served, ready = 0, False
        while True:
            if process is None or process.poll() is not None or served >= _JOBS_PER_PROCESS:
                self._end(process)
                process, served = self._start(), 0
                # Wait here until the worker is ready, so that this does not count as time of a request.
                ready = process.stdout is not None and bool(process.stdout.readline())
            with self._lock:
                while not self._closed and not (free := [j for j in self._jobs.values() if j.state == "waiting"]):
                    self._lock.wait(1.0)
                if self._closed:
                    return
                job = free[0]
                job.state, job.began, job.process = "running", time.monotonic(), process
                self.started += 1
            served += 1
            ended = ready and self._converse(process, job)
            with self._lock:
                job.process = None
                if not job.cancelled:
                    del self._jobs[job.request]
                    self._keep(job, ended)
                spoilt = job.cancelled or job.state == "stopped" or not ended
            if spoilt:  # poll() is no test for this: a process that was killed may look alive for a moment
                self._end(process)
                process = None

    def _converse(self, process: subprocess.Popen[str], job: _Job) -> bool:
        """Send the request and read the answers. Return whether the worker lived until the last one."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job.request.to_dict()) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                message: dict[str, Any] = json.loads(line)
                if "end" in message:
                    return True
                with self._lock:
                    if "view" in message:
                        job.view, job.pictures = _read(job.request, message["view"]), message["pictures"]
                    else:
                        job.message = message["error"]
        except (OSError, ValueError):  # the process was killed in the middle of a line
            pass
        return False

    def _keep(self, job: _Job, ended: bool) -> None:
        if job.message:
            state, words = "failed", job.message
        elif job.state == "stopped":
            state, words = "stopped", f"stopped after {self.time_limit:g} seconds; what was found until then is shown"
        elif ended:
            state, words = "done", ""
        else:
            state, words = "failed", "the process that computed this died, perhaps for lack of memory"
        seconds = time.monotonic() - job.began
        found = Snapshot(state, job.view, job.pictures, seconds=seconds, message=words)
        self._kept[job.request] = found
        while len(self._kept) > self.kept_views:
            self._kept.popitem(last=False)

    def _start(self) -> subprocess.Popen[str]:
        one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, **one_thread},
        )
        with self._lock:
            self._processes.add(process)
            if self._closed:
                process.kill()
        return process

    def _end(self, process: subprocess.Popen[str] | None) -> None:
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # closing a pipe writes what was still to be sent
                    pipe.close()
        with self._lock:
            self._processes.discard(process)
