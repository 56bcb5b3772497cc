"""The processes behind the page: computed once, cancelled, bounded, replaced when they die."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
from waiting import until

from dpmf.web.pool import Pool, Snapshot
from dpmf.web.ranking import DesignRequest
from dpmf.web.request import Request
from dpmf.web.view import Row, View

# Stands in for the worker: it takes `epochs` tenths of a second, or for ever at 999; it dies at 998.
FAKE = textwrap.dedent(
    """
    import json, sys, time
    print("ready", flush=True)
    view = json.loads(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        view["complete"] = False
        print(json.dumps({"view": view, "pictures": {}}), flush=True)
        if request["epochs"] == 998:
            sys.exit(1)
        time.sleep(3600 if request["epochs"] == 999 else request["epochs"] / 10)
        view["complete"] = True
        print(json.dumps({"view": view, "pictures": {"gram": "<svg/>"}}), flush=True)
        print(json.dumps({"end": True}), flush=True)
    """
)


@pytest.fixture
def pool_of() -> Iterator[Callable[..., Pool]]:
    made = []

    def make(**options: object) -> Pool:
        view = View("m", 1.0, 1e-5, "both", (Row("gaussian"),), doing="waiting", curves={}).to_dict()
        made.append(Pool(command=(sys.executable, "-c", FAKE, json.dumps(view)), **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def a_request(epochs: int, batches: int = 5) -> Request:
    return Request("dpsgd", epochs, batches, 1.0, 1e-5)


def finished(pool: Pool, client: str, request: Request) -> Snapshot:
    until(lambda: pool.watch(client, request).finished)
    return pool.watch(client, request)


def test_equal_requests_are_computed_once_and_kept(pool_of) -> None:
    pool = pool_of()
    for client in ("a", "b", "c"):
        pool.watch(client, a_request(2))
    for client in ("a", "b", "c"):
        found = finished(pool, client, a_request(2))
        assert found.state == "done"
        assert found.view.complete
        assert found.pictures == {"gram": "<svg/>"}
    assert pool.started == 1
    assert pool.watch("d", a_request(2)).state == "done"
    assert pool.started == 1


def test_a_changed_input_really_ends_the_computation(pool_of) -> None:
    pool = pool_of(workers=1)
    until(lambda: pool.watch("a", a_request(999)).view is not None)
    (process,) = pool._processes
    assert finished(pool, "a", a_request(1)).state == "done"  # with one worker: only if the other one was ended
    assert process.poll() is not None
    assert pool.sizes()["jobs"] == 0


def test_a_computation_others_watch_goes_on(pool_of) -> None:
    pool = pool_of(workers=2)
    until(lambda: pool.watch("a", a_request(999)).view is not None and pool.watch("b", a_request(999)).view is not None)
    finished(pool, "a", a_request(1))
    assert pool.watch("b", a_request(999)).state == "running"
    pool.leave("b")
    until(lambda: pool.sizes()["jobs"] == 0)


def test_a_client_that_went_away_is_forgotten_and_its_computation_ended(pool_of) -> None:
    pool = pool_of(workers=1, lease=0.3)
    pool.watch("a", a_request(999))
    until(lambda: pool.sizes() == {"clients": 0, "jobs": 0, "kept": 0, "processes": 1})
    assert finished(pool, "b", a_request(1)).state == "done"


def test_the_time_limit_keeps_what_there_was(pool_of) -> None:
    pool = pool_of(workers=1, time_limit=0.3)
    found = finished(pool, "a", a_request(999))
    assert found.state == "stopped"
    assert found.view is not None
    assert not found.view.complete
    assert "0.3 seconds" in found.message
    assert finished(pool, "a", a_request(1)).state == "done"


def test_a_worker_that_dies_is_replaced(pool_of) -> None:
    pool = pool_of(workers=1)
    assert "died" in finished(pool, "a", a_request(998)).message
    assert finished(pool, "a", a_request(1)).state == "done"


def test_everything_is_bounded(pool_of) -> None:
    pool = pool_of(workers=2, most_clients=5, kept_views=3)
    for batches in range(1, 8):
        assert finished(pool, "a", a_request(0, batches)).state == "done"
    assert pool.sizes()["kept"] == 3
    for client in "bcdef":
        pool.watch(client, a_request(0, 7))
    refused = pool.watch("g", a_request(0, 7))
    assert refused.state == "busy"
    assert refused.finished
    assert "try again" in refused.message
    assert pool.sizes()["clients"] == 5
    assert pool.sizes()["processes"] == 2


def test_the_worker_answers_errors_in_words() -> None:
    from dpmf.web.worker import answers

    impossible = Request("dpsgd", 1, 5, 1.0, 1e-5).to_dict()
    for broken in ({**impossible, "strategy": "matrix"}, {**impossible, "nonsense": 1}, {"epochs": 1}):
        (message,) = answers(json.dumps(broken))
        assert set(message) == {"error"}
        assert "\n" not in message["error"]


def test_the_worker_ends_with_its_server() -> None:
    worker = subprocess.Popen([sys.executable, "-m", "dpmf.web.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    slow = Request("bsr", 20, 1000, 0.1, 1e-5, bandwidth=64)
    worker.stdin.write((json.dumps(slow.to_dict()) + "\n").encode())
    worker.stdin.flush()
    assert b"ready" in worker.stdout.readline()
    assert b"view" in worker.stdout.readline()  # it is at work
    worker.stdin.close()
    assert worker.wait(timeout=60) == 0
    worker.stdout.close()


@pytest.mark.parametrize(
    "asked",
    [
        DesignRequest(1000, 100, 2, 4.0, 1e-5, memory=100.0).to_dict(),
        Request("bsr", 2, 10, 4.0, 1e-5, bandwidth=2).to_dict(),
    ],
    ids=["design", "experts"],
)
def test_the_first_answer_waits_for_no_slow_package(asked: dict[str, object], cache_dir) -> None:
    """Drawing and signal processing take longer to import than the first noise multiplier takes to compute."""
    script = """
        import json, sys
        from dpmf.web.worker import answers
        for message in answers(sys.argv[1]):
            if any(row["noise_multiplier"] for row in message["view"]["rows"]):
                break
        print(*[name for name in ("matplotlib", "scipy.signal", "jax", "torch") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), json.dumps(asked)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []
