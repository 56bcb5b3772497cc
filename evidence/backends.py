"""Where cells run: this machine's cores by joblib, or a Dask cluster. Both hand back records in any order.

A cell that raises becomes a record of its error. So does one whose process dies again when it is tried alone.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence

from dpmf import store
from dpmf.errors import missing_extra
from evidence.fingerprint import code_version, strategies
from evidence.quantities import QUANTITIES
from evidence.spec import Cell
from evidence.store import Record

_RETRIES = 3  # of a cell on a cluster whose worker went away
_WAIT = 10.0  # seconds for a cluster to answer


def compute(cell: Cell) -> Record:
    """Run one cell; an error becomes part of the record."""
    _keep_apart()
    began = time.perf_counter()
    result = error = None
    try:
        result = QUANTITIES[cell.quantity](**cell.parameters)
    except Exception as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        error = f"{type(problem).__name__}: {problem} ({os.path.basename(where.filename)}:{where.lineno})"
    return Record(cell, code_version(cell), result, error, time.perf_counter() - began)


def _keep_apart() -> None:
    """From now on this process reads and writes coefficients in a store that only this code of the strategies uses.

    Elsewhere they stay what an earlier optimiser found, and a number is kept with the code that made it.
    """
    own = f"evidence-{strategies()}"
    if store.directory().name != own:
        os.environ["DPMF_CACHE_DIR"] = str(store.directory() / own)


def _died(cell: Cell, problem: BaseException) -> Record:
    """The record of a cell whose process was killed: out of memory, or a crash in compiled code."""
    return Record(cell, code_version(cell), None, f"{type(problem).__name__}: its process died", 0.0)


_parent: int | None = None


def _compute_in_worker(cell: Cell, parent: int) -> Record:
    """As `compute`; from the first cell on, the worker watches that the run it works for is still there."""
    global _parent
    if _parent is None:
        _parent = parent
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    return compute(cell)


def _leave_with(parent: int) -> None:
    """End this process soon after `parent`: a run that is killed leaves no workers behind to compete with the next."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def on_cores(cells: Sequence[Cell], jobs: int) -> Iterator[Record]:
    """On `jobs` processes of this machine (−1: one for each core), by joblib."""
    try:
        import joblib
        from joblib.externals.loky.process_executor import TerminatedWorkerError
    except ImportError:
        raise missing_extra("joblib", "experiments", "running experiments") from None
    jobs = joblib.cpu_count() if jobs == -1 else jobs
    rest = dict.fromkeys(cells)
    if jobs > 1:
        task = joblib.delayed(_compute_in_worker)
        pool = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch=jobs)
        # Workers that have grown large are replaced by joblib, which is none of the user's business.
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given to the executor")
        try:
            for record in pool(task(cell, os.getpid()) for cell in cells):
                del rest[record.cell]
                yield record
        except TerminatedWorkerError:
            pass  # whose fault it was nobody knows: the rest runs one at a time
    yield from _one_at_a_time(list(rest))


def _one_at_a_time(cells: Sequence[Cell]) -> Iterator[Record]:
    """In one process, which is replaced when it dies."""
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    waiting = list(cells)
    while waiting:
        executor = ProcessPoolExecutor(max_workers=1)
        try:
            while waiting:
                cell = waiting.pop(0)
                try:
                    yield executor.submit(_compute_in_worker, cell, os.getpid()).result()
                except TerminatedWorkerError as problem:
                    yield _died(cell, problem)
                    break
        finally:
            executor.shutdown(kill_workers=True)


def on_dask(cells: Sequence[Cell], address: str) -> Iterator[Record]:
    """On the Dask cluster at `address`, whose workers must have the same version of this package."""
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise missing_extra("dask and distributed", "experiments", "running on a cluster") from None
    try:
        client = Client(address, timeout=_WAIT)
    except (OSError, TimeoutError, ValueError, TypeError):
        raise ValueError(f"dask must be the address of a running cluster, nothing answers at {address!r}") from None
    with client:
        _check_workers(client, cells)
        futures = {
            client.submit(compute, cell, key=f"dpmf-{abs(hash(cell))}-{i}", retries=_RETRIES, pure=False): cell
            for i, cell in enumerate(cells)
        }
        for future in as_completed(list(futures)):
            if future.status == "finished":
                yield future.result()
            else:
                problem = future.exception()
                yield _died(futures[future], problem)
            future.release()


def _check_workers(client: object, cells: Sequence[Cell]) -> None:
    """Refuse a cluster without workers, or whose workers run other code: their numbers would be kept as ours."""
    workers = client.scheduler_info()["workers"]  # type: ignore[attr-defined]
    if not workers:
        client.wait_for_workers(1, timeout=30)  # type: ignore[attr-defined]
    if not cells:
        return
    try:
        versions = client.run(code_version, cells[0])  # type: ignore[attr-defined]
    except Exception as error:
        raise ValueError(f"dask: the workers cannot run this package ({type(error).__name__}: {error})") from None
    if set(versions.values()) != {code_version(cells[0])}:
        raise ValueError("dask: the workers run another version of dpmf than this one, install the same on both")
