"""The process that computes views: a request in (one line of JSON), views out (a line each), again and again.

It ends when its standard input is closed, even in the middle of a computation, so that no server leaves one behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from typing import IO, Any

MEMORY = 4 * 2**30
SECONDS_EACH = 20.0  # for one noise multiplier


def limit_memory() -> None:
    """What is beyond the limit raises MemoryError here instead of taking the machine down."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def answers(line: str) -> Any:
    """The messages for one request: views, or one error in words."""
    from dpmf.web.pictures import drawn
    from dpmf.web.request import Request
    from dpmf.web.view import views

    try:
        request = Request.from_dict(json.loads(line))
        for view in views(
            request.mechanism(),
            request.epsilon,
            request.delta,
            request.direction,
            max_order=request.max_order,
            noise_multiplier=request.noise_multiplier,
            time_budget=SECONDS_EACH,
        ):
            # Drawn here: the server then needs neither the time nor the memory.
            yield {"view": view.to_dict(), "pictures": drawn(view)}
    except MemoryError:
        yield {"error": "this setting takes more memory than the page allows"}
    except (ValueError, ImportError) as error:
        yield {"error": " ".join(str(error).split())}
    except Exception as error:
        # A defect must not take the page down with it; the message is for the report of it.
        yield {"error": f"dpmf failed on this setting ({type(error).__name__}: {' '.join(str(error).split())})"}


def _read(lines: IO[str], requests: queue.Queue[str]) -> None:
    for line in lines:
        requests.put(line)
    os._exit(0)


def main() -> None:
    limit_memory()
    # Whatever libraries print must not get between the messages.
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, requests), daemon=True).start()
    import dpmf.web.view  # noqa: F401 - before the first request, not during it

    print(json.dumps({"ready": True}), file=out, flush=True)
    while True:
        for message in answers(requests.get()):
            print(json.dumps(message), file=out, flush=True)
        print(json.dumps({"end": True}), file=out, flush=True)


if __name__ == "__main__":
    main()
