"""The page served for real: who can connect, what cannot be read, many clients, and a real browser."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, resize
from waiting import until

import dpmf
from dpmf import cli, formatting

pytest.importorskip("streamlit", reason="the page needs the extra [web]")


class Server:
    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dpmf.cli", "explore", "--port", "0", "--no-browser"],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, "HOME": str(directory)},
            )
        until(lambda: "http://" in self.log.read_text() or self.process.poll() is not None)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.log.read_text())
        assert found, self.log.read_text()
        self.port, self.url = int(found[1]), found[0]
        assert self.get("/_stcore/health") == 200  # the address is printed when the server answers, not before

    def get(self, path: str, method: str = "GET", data: bytes | None = None, **headers: str) -> int:
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                self.body = answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            self.body = error.read()
            return error.code
        except OSError:
            return 0

    def memory(self) -> int:
        """Resident bytes of the server itself."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def children(self) -> list[str]:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [pid for task in tasks for pid in (task / "children").read_text().split()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    yield running
    children = running.children() if sys.platform == "linux" else []
    running.process.terminate()
    running.process.wait(timeout=30)
    until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in children), 30)
    assert (
        str(Path("dpmf", "web")) not in running.log.read_text()
    )  # Streamlit logs clients that hang up; nothing of ours


def test_only_this_machine_can_connect(server: Server) -> None:
    if sys.platform == "linux":
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
        ]
        listening = [w[1] for w in lines if w[3] == "0A" and w[1].endswith(f":{server.port:04X}")]
        assert listening == [f"0100007F:{server.port:04X}"]
    with socket.socket(socket.AF_INET6) as other:
        assert other.connect_ex(("::1", server.port)) != 0


@pytest.mark.parametrize(
    "path",
    [
        "/app/static/page.py",
        "/app/static/../page.py",
        "/app/static/%2e%2e/%2e%2e/etc/passwd",
        "/static/..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "/media/..%2f..%2fetc/passwd",
        "/component/x/..%2f..%2fetc/passwd",
        "/_stcore/component/x/etc/passwd",
        "//etc/passwd",
        "/page.py",
    ],
)
def test_there_is_no_way_to_read_a_file(server: Server, path: str) -> None:
    status = server.get(path)
    # An unknown address may be answered with the empty page itself, as browsers expect; with nothing else.
    assert status in (400, 403, 404) or b'<div id="root">' in server.body
    assert b"root:" not in server.body.replace(b"#root:", b"")
    assert b"import" not in server.body or b'<div id="root">' in server.body


def test_nothing_can_be_uploaded(server: Server) -> None:
    boundary = "x"
    data = f'--{boundary}\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\nhello\r\n--{boundary}--\r\n'
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    assert server.get("/_stcore/upload_file/session/file", "PUT", data.encode(), **kind) >= 400


def connected(server: Server, query: str = "", **headers: str):
    """A client as the browser is one: a web socket that asks for the page."""
    websocket = pytest.importorskip("websocket")
    from streamlit.proto.BackMsg_pb2 import BackMsg

    found = websocket.create_connection(
        f"ws://127.0.0.1:{server.port}/_stcore/stream",
        header=headers or None,
        origin=None if headers else server.url,
        suppress_origin=bool(headers),
        timeout=60,
    )
    message = BackMsg()
    message.rerun_script.query_string = query
    found.send_binary(message.SerializeToString())
    return found


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Origin": "http://evil.example:80"}])
def test_other_pages_cannot_connect(server: Server, headers: dict[str, str]) -> None:
    websocket = pytest.importorskip("websocket")
    with pytest.raises(websocket.WebSocketBadStatusException):
        connected(server, **headers)


def test_other_names_for_this_machine_cannot_connect(server: Server) -> None:
    """A name that an attacker lets point to 127.0.0.1."""
    websocket = pytest.importorskip("websocket")
    with pytest.raises(websocket.WebSocketBadStatusException):
        websocket.create_connection(
            f"ws://127.0.0.1:{server.port}/_stcore/stream",
            host="evil.example",
            origin=server.url,
            timeout=30,
        )


@pytest.mark.skipif(sys.platform != "linux", reason="memory and processes are read from /proc")
def test_fifty_clients_share_two_processes_and_bounded_memory(server: Server) -> None:
    from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

    first = connected(server)
    before = server.memory()
    clients = [connected(server, f"strategy=dpsgd&batches_per_epoch={3 + i % 10}") for i in range(50)]
    for i, client in enumerate(clients):
        while True:  # until the page says which mechanism it shows
            message = ForwardMsg()
            message.ParseFromString(client.recv())
            if f"DP-SGD, k=1, b={3 + i % 10}" in str(message):
                break
    assert server.get("/_stcore/health") == 200
    assert server.memory() - before < 400 * 2**20
    assert len(server.children()) <= 2
    for client in (first, *clients):
        client.close()


def test_the_port_must_be_free(server: Server, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["dpmf", "explore", "--port", str(server.port), "--no-browser"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("dpmf: --port must be free")
    assert said.count("\n") == 1


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpmf.web import serve

    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(dpmf.MissingExtraError, match=r"pip install '\.\[web\]' in a clone of dpmf"):
        serve.serve(0, browser=False)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def typed(browser, label: str, text: str) -> None:
    from selenium.webdriver.common.keys import Keys

    def there() -> bool:
        return bool(browser.find_elements("css selector", f'[aria-label="{label}"]'))

    until(there)
    field = browser.find_element("css selector", f'[aria-label="{label}"]')
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(text)
    field.send_keys(Keys.CONTROL, Keys.ENTER) if field.tag_name == "textarea" else field.send_keys(Keys.ENTER)


def picked(browser, label: str, option: str) -> None:
    from selenium.webdriver.common.keys import Keys

    selector = f'[data-testid="stSelectbox"] input[aria-label*="{label}"]'
    until(lambda: bool(browser.find_elements("css selector", selector)))
    box = browser.find_element("css selector", selector)
    box.send_keys(option)
    box.send_keys(Keys.ENTER)


def shown(browser) -> str:
    return str(browser.execute_script("return document.body.innerText"))


def table(browser) -> list[list[str]]:
    """The cells of the first table."""
    rows = browser.execute_script(
        "return [...document.querySelector('table')?.querySelectorAll('tbody tr') ?? []]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )
    return [list(map(str, row)) for row in rows]


def test_a_design_for_a_run_then_one_mechanism_for_experts(server: Server, browser) -> None:
    browser.get(f"{server.url}/?dataset_size=60&batch_size=10&epochs=1&epsilon=4")
    until(lambda: "Train with the best design" in shown(browser))  # the first answer; the search goes on
    text = shown(browser)
    assert "60 records, 1 epoch of 6 batches: 6 iterations. Guarantee: (4, 1e-05)-DP" in text
    until(lambda: any("baseline" in row[0] for row in table(browser)))
    usual = next(row for row in table(browser) if "baseline" in row[0])
    found = dpmf.design(
        epochs=1, batches_per_epoch=6, target_epsilon=4.0, target_delta=1e-5, bandwidths=[1], batchings=["fixed"],
        workload=dpmf.workloads.damped(100.0), time_budget=30.0,
    )  # fmt: skip
    assert usual[1:4] == [formatting.upper(found.best.error, 4), "1.000",
                          formatting.upper(found.best.noise_multiplier, 5)]  # fmt: skip
    command = "dpmf design --dataset-size 60 --batch-size 10 --epochs 1 --epsilon 4.0"
    until(lambda: "private = make_private(" in shown(browser) and command in shown(browser))
    resize(browser, 390)
    wider = (
        "return [...document.querySelectorAll('table')].map((table) => table.parentElement)"
        ".filter((place) => place.scrollWidth > place.clientWidth)"
    )
    assert table(browser)
    assert browser.execute_script(wider) == []
    resize(browser, 1400)
    typed(browser, "Batch size", "70")
    until(lambda: "batch_size must be at most the dataset size, got 70" in shown(browser))
    browser.find_elements("css selector", '[data-testid="stRadio"] label')[-1].click()
    until(lambda: "BSR(p=4), k=1, b=100" in shown(browser))


def test_set_the_inputs_and_read_the_numbers_back(server: Server, browser) -> None:
    browser.get(f"{server.url}/?strategy=dpsgd&batches_per_epoch=4")
    until(lambda: "DP-SGD, k=1, b=4" in shown(browser))
    # Bad input: in words, beside the field, and nothing breaks.
    typed(browser, "Epochs k", "many")
    until(lambda: "epochs must be a whole number from 1 to 1000, got 'many'" in shown(browser))
    until(lambda: "Nothing is computed" in shown(browser))  # it comes after the words beside the field
    typed(browser, "Epochs k", "2")
    typed(browser, "Target ε", "1.5")
    typed(browser, "Target δ", "1e-6")
    until(lambda: "finished in" in shown(browser) and "epsilon=1.5" in shown(browser), 240)
    text = shown(browser)
    assert "DP-SGD, k=2, b=4" in text
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(epochs=2, batches_per_epoch=4))
    target = {"target_epsilon": 1.5, "target_delta": 1e-6}
    rows = {
        cells[0].text: cells[1].text
        for row in browser.find_elements("css selector", "table tbody tr")
        if (cells := row.find_elements("tag name", "td"))
    }
    for name in ("gaussian", "lattice", "renyi"):
        found = dpmf.calibrate(mechanism, **target, accountant=name)
        assert rows[name] == formatting.upper(found.noise_multiplier)
    found = dpmf.calibrate(mechanism, **target, with_lower=True)
    assert rows["lower bound"] == formatting.lower(found.lower)
    metrics = [m.text for m in browser.find_elements("css selector", '[data-testid="stMetricValue"]')]
    assert metrics == [formatting.upper(found.noise_multiplier), formatting.lower(found.lower)]
    pictures = browser.find_elements("css selector", 'img[src^="data:image/svg+xml"]')
    assert [p.get_attribute("alt")[:4] for p in pictures] == ["delt", "Gram", "type"]
    curve = dpmf.tradeoff(mechanism, noise_multiplier=found.noise_multiplier)
    assert rows["μ (Gaussian DP, up to 1e-09)"] == formatting.upper(curve.mu, 4)
    assert all(p.get_property("naturalWidth") > 100 for p in pictures)
    assert "dpmf report --strategy dpsgd --epochs 2 --batches-per-epoch 4 --epsilon 1.5 --delta 1e-06" in text
    assert "batches_per_epoch=4" in browser.current_url  # the view can be linked to
    # Coefficients are typed in; a path is not a number.
    picked(browser, "Strategy", "Coefficients")
    typed(browser, "First column of C", "/etc/passwd")
    until(lambda: "coefficients must be numbers separated by commas or blanks, got '/etc/passwd'" in shown(browser))
    assert server.get("/_stcore/health") == 200
