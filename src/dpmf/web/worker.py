"""The process that computes views. It reads requests and writes views, each as one line of JSON.

It ends when its standard input is closed, even in the middle of a computation, so no server leaves one behind.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import sys
import threading
from typing import IO, Any

MEMORY = 4 * 2**30
SECONDS_EACH = 45.0  # the time budget of each calibration


def limit_memory() -> None:
    """Make an allocation beyond the limit raise MemoryError here, instead of exhausting the machine's memory."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system can do this
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def answers(line: str) -> Any:
    """Yield the messages for one request: views, or one error message."""
    from dpmf.web.pictures import illustrated
    from dpmf.web.ranking import DesignRequest, rankings
    from dpmf.web.request import Request
    from dpmf.web.view import views

    try:
        asked = json.loads(line)
        if asked.get("kind") == "design":
            for ranking in rankings(DesignRequest.from_dict(asked)):
                yield {"view": ranking.to_dict(), "pictures": {}}
            return
        request = Request.from_dict(asked)
        grown = views(request.mechanism(), request, time_budget=SECONDS_EACH, with_attacks=True)
        # The pictures are drawn here, so that the server needs neither the time nor the memory.
        for view, pictures in illustrated(grown):
            yield {"view": view.to_dict(), "pictures": pictures}
    except MemoryError:
        yield {"error": "this setting takes more memory than the page allows"}
    except (ValueError, ImportError) as error:
        yield {"error": " ".join(str(error).split())}
    except Exception as error:
        # A defect of dpmf must not end the page; the message is for a bug report.
        yield {"error": f"dpmf failed on this setting ({type(error).__name__}: {' '.join(str(error).split())})"}


def _read(lines: IO[str], requests: queue.Queue[str]) -> None:
    for line in lines:
        requests.put(line)
    os._exit(0)


def _warm_up(requests: queue.Queue[str]) -> None:
    """Import and compile what answers to a user need, until the first request is there."""
    from dpmf.api import calibrate
    from dpmf.batching import BallsInBins
    from dpmf.mechanism import Mechanism
    from dpmf.strategies import bsr, dpsgd

    tiny = Mechanism(dpsgd(), BallsInBins(1, 4))
    calibrate(tiny, target_epsilon=2.0, target_delta=1e-3, relative_tolerance=0.1, with_lower=True)
    _ = Mechanism(bsr(2), BallsInBins(1, 4)).gram
    for slow in ("scipy.signal", "dpmf.web.pictures", "matplotlib.figure", "matplotlib.backends.backend_svg"):
        if not requests.empty():
            return
        with contextlib.suppress(ImportError):  # whoever needs it says so
            importlib.import_module(slow)


def main() -> None:
    """Answer requests until standard input is closed."""
    limit_memory()
    # What libraries print must not come between the messages, so it goes to stderr.
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, requests), daemon=True).start()
    import dpmf.web.ranking
    import dpmf.web.view  # noqa: F401 - so that the first request does not wait for them

    print(json.dumps({"ready": True}), file=out, flush=True)
    if requests.empty():
        _warm_up(requests)
    while True:
        for message in answers(requests.get()):
            print(json.dumps(message), file=out, flush=True)
        print(json.dumps({"end": True}), file=out, flush=True)


if __name__ == "__main__":
    main()
