"""The page under many clients: what the server and its processes take, `python -m benchmarks.clients [NUMBER]`.

Each client is a web socket that asks for the page, as a browser is one; they ask for ten different views. Memory is
read from /proc, so this runs on Linux only. Needs the extra [web] and websocket-client (which selenium brings).
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def resident(pid: int | str) -> float:
    """Resident memory of a process, in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def children(pid: int) -> list[str]:
    return [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]


def connect(url: str, query: str) -> object:
    import websocket
    from streamlit.proto.BackMsg_pb2 import BackMsg

    client = websocket.create_connection(url.replace("http", "ws") + "/_stcore/stream", origin=url, timeout=120)
    message = BackMsg()
    message.rerun_script.query_string = query
    client.send_binary(message.SerializeToString())
    return client


def wait_for(client: object, words: str) -> None:
    """Read what the server sends until it has these words."""
    from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

    while True:
        message = ForwardMsg()
        message.ParseFromString(client.recv())  # type: ignore[attr-defined]
        if words in str(message):
            return


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=10):
            return True
    except OSError:
        return False


def main(number: int = 50) -> None:
    command = [sys.executable, "-m", "dpmf.cli", "explore", "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        assert found is not None
        url = found[0]
        while not healthy(url):
            time.sleep(0.1)
        first = connect(url, "strategy=dpsgd&batches_per_epoch=3")
        wait_for(first, "finished in")
        before = resident(server.pid)
        began = time.perf_counter()
        clients = [connect(url, f"strategy=dpsgd&batches_per_epoch={3 + i % 10}") for i in range(number)]

        def follow(i: int) -> tuple[float, float]:
            wait_for(clients[i], f"DP-SGD, k=1, b={3 + i % 10}")
            shown = time.perf_counter() - began
            wait_for(clients[i], "finished in")
            return shown, time.perf_counter() - began

        with ThreadPoolExecutor(number) as threads:  # all at once: a client that does not read is dropped
            times = list(threads.map(follow, range(number)))
        shown, done = (max(column) for column in zip(*times, strict=True))
        workers = children(server.pid)
        print(f"{number} clients, 10 different views")
        print(f"every client has its page after {shown:.1f} s, its finished view after {done:.1f} s")
        print(f"server: {before:.0f} MiB with one client, {resident(server.pid):.0f} MiB with all")
        print(f"{len(workers)} worker processes: {', '.join(f'{resident(pid):.0f}' for pid in workers)} MiB")
        print(f"the server {'answers' if healthy(url) else 'DOES NOT ANSWER'}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
