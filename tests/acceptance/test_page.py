"""The page: what can be asked of it, the processes behind it, and the real thing in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import dpmf
from dpmf import formatting
from dpmf import lower_bounds as lower
from dpmf.web import recipe
from dpmf.web import request as limits
from dpmf.web.pool import Pool, Snapshot
from dpmf.web.request import Request, parse
from dpmf.web.view import Row, View, views

GOOD = {
    "strategy": "bsr",
    "bandwidth": "4",
    "epochs": "2",
    "batches_per_epoch": "30",
    "epsilon": "2",
    "delta": "1e-5",
}


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that is sure to come; the limit is for hangs only."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


# --- what was typed --------------------------------------------------------------------------------------------------


def test_what_was_typed_becomes_a_request() -> None:
    request, problems = parse({**GOOD, "epsilon": " 2.5 ", "max_order": "", "noise_multiplier": "3"})
    assert problems == {}
    assert request == Request("bsr", 2, 30, 2.5, 1e-5, bandwidth=4, noise_multiplier=3.0)
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    assert request.mechanism().name == "BSR(p=4), k=2, b=30"


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("strategy", "nonsense", "one of dpsgd"),
        ("strategy", "../../etc/passwd", "one of dpsgd"),
        ("bandwidth", "0", "from 1 to 1024"),
        ("bandwidth", "4.5", "whole number"),
        ("bandwidth", "", "got nothing"),
        ("epochs", "1e9", "whole number"),
        ("epochs", "1000000000", "from 1 to 1000"),
        ("epochs", "9" * 5000, "whole number"),
        ("epochs", "-3", "from 1 to 1000"),
        ("epochs", "1_0", "whole number"),
        ("batches_per_epoch", "2001", "from 1 to 2000"),
        ("batches_per_epoch", "٣", "from 1 to 2000"),
        ("epsilon", "0", "from 0.01 to 50"),
        ("epsilon", "nan", "from 0.01 to 50"),
        ("epsilon", "inf", "from 0.01 to 50"),
        ("epsilon", "two", "a number such as"),
        ("epsilon", "1_0", "a number such as"),
        ("delta", "1", "from 1e-15 to 0.5"),
        ("delta", "1e-400", "from 1e-15 to 0.5"),
        ("direction", "sideways", "one of both"),
        ("max_order", "1", "from 2 to 512"),
        ("max_order", "100000", "from 2 to 512"),
        ("noise_multiplier", "0", "from 0.001 to 1e+06"),
    ],
)
def test_whatever_is_wrong_is_said_at_its_field(field: str, text: str, words: str) -> None:
    if text == "٣":  # a digit, but not one of ours: read as three or refused, never a crash
        request, _ = parse({**GOOD, field: text})
        assert request is None or request.batches_per_epoch == 3
        return
    request, problems = parse({**GOOD, field: text})
    assert request is None
    assert list(problems) == [field]
    assert words in problems[field]
    assert problems[field].startswith(field)
    assert "\n" not in problems[field]
    assert len(problems[field]) < 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got nothing"),
        ("1, x", "'x'"),
        ("1, -1", "from 0 to 1e6"),
        ("1, nan", "from 0 to 1e6"),
        ("0, 1", "start with a positive"),
        ("1 " * 2001, "at most 2000 numbers"),
        ("1" * 50_001, "at most 50000 characters"),
        ("/etc/passwd", "'/etc/passwd'"),
    ],
)
def test_coefficients_are_numbers_and_never_a_file(text: str, words: str) -> None:
    request, problems = parse({**GOOD, "strategy": "coefficients", "coefficients": text})
    assert request is None
    assert words in problems["coefficients"]


def test_the_product_of_epochs_and_batches_is_bounded() -> None:
    request, problems = parse({**GOOD, "epochs": "1000", "batches_per_epoch": "2000"})
    assert request is None
    assert f"at most {limits.MOST_ITERATIONS}" in problems["epochs"]


# --- the view --------------------------------------------------------------------------------------------------------


def last_view(request: Request, **options: object) -> View:
    *_, last = views(request.mechanism(), request, **options)
    return last


def test_a_view_has_the_numbers_of_the_api() -> None:
    request = Request("coefficients", 2, 10, 2.0, 1e-5, coefficients=(1.0, 0.5))
    mechanism = request.mechanism()
    view = last_view(request, accountants=("gaussian", "renyi", "lattice"))
    for row in view.rows[:2]:
        again = dpmf.calibrate(mechanism, target_epsilon=2.0, target_delta=1e-5, accountant=row.accountant)
        assert row.noise_multiplier == again.noise_multiplier
        curve = dpmf.profile(
            mechanism, noise_multiplier=view.curve_noise, epsilons=view.epsilons, accountant=row.accountant
        )
        assert view.curves[row.accountant] == pytest.approx(tuple(curve.deltas), rel=1e-9)
    assert view.rows[2].noise_multiplier is None
    assert "uncorrelated" in view.rows[2].problem
    assert view.best.accountant == "renyi"
    assert view.curve_noise == view.best.noise_multiplier
    assert view.lower == lower.lower_noise_multiplier(mechanism, 2.0, 1e-5)
    assert view.lower < view.best.noise_multiplier
    for i, epsilon in enumerate(view.epsilons):
        assert view.lower_curve[i] == lower.lower_delta(mechanism, view.curve_noise, epsilon)
        assert view.lower_curve[i] <= min(curve[i] for curve in view.curves.values())
    np.testing.assert_array_equal(view.gram, mechanism.gram)
    assert view.complete
    assert View.from_dict(json.loads(json.dumps(view.to_dict()))) == view


def test_views_grow_and_say_what_is_next() -> None:
    request = Request("dpsgd", 1, 10, 2.0, 1e-5, noise_multiplier=2.0)
    grown = list(views(request.mechanism(), request, accountants=("gaussian", "lattice")))
    assert [v.done for v in grown] == sorted(v.done for v in grown)
    assert all(v.doing and not v.complete and v.done < v.steps for v in grown[:-1])
    assert grown[-1].complete
    assert grown[-1].done == grown[-1].steps
    assert grown[-1].curve_noise == 2.0


def test_a_calibration_that_ran_out_of_time_says_so() -> None:
    request = Request("bsr", 1, 10, 2.0, 1e-5, bandwidth=2)
    view = last_view(request, accountants=("renyi", "chain"), time_budget=1e-9)
    closed = dpmf.calibrate(request.mechanism(), target_epsilon=2.0, target_delta=1e-5, accountant="gaussian")
    for row in view.rows:
        assert row.noise_multiplier <= closed.noise_multiplier * 1.001
        assert "time ran out" in row.note
    assert all(row.note == "" for row in last_view(request, accountants=("gaussian",), time_budget=60.0).rows)


def test_a_large_gram_matrix_is_shown_by_blocks() -> None:
    request = Request("bsr", 1, 300, 2.0, 1e-5, bandwidth=8)
    mechanism = request.mechanism()
    view = next(v for v in views(mechanism, request) if v.gram)
    assert np.shape(view.gram) == (128, 128)
    assert view.batches == 300
    assert np.max(view.gram) == mechanism.gram.max()
    assert np.min(view.gram) == 0


@pytest.mark.parametrize(
    "request_",
    [
        Request("coefficients", 2, 6, 2.0, 1e-5, coefficients=(1.0, 0.25), max_order=16),
        Request("dpsgd", 1, 12, 2.0, 1e-5, direction="remove", noise_multiplier=3.0),
    ],
    ids=["coefficients", "dpsgd"],
)
def test_the_lines_given_reproduce_the_view(request_: Request, tmp_path: Path, capsys) -> None:
    names = ("gaussian", "renyi")
    view = last_view(request_, accountants=names)
    exec(compile(recipe.python(request_, names, view.curve_noise), "recipe", "exec"), {})
    printed = capsys.readouterr().out
    for row in view.rows:
        assert str(row.noise_multiplier) in printed
    assert str(view.lower) in printed
    shell = recipe.shell(request_, names).replace("dpmf ", f"{sys.executable} -m dpmf.cli ").splitlines()
    shell = [line for line in shell if " report " not in line]  # test_html_report runs that one
    shell[-1] += " --json"
    done = subprocess.run(["bash", "-c", "\n".join(shell)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    cells = {c["accountant"]: c["noise_multiplier"] for c in json.loads(done.stdout)["cells"]}
    assert cells == {row.accountant: row.noise_multiplier for row in view.rows}


# --- the processes ---------------------------------------------------------------------------------------------------

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


# --- the server ------------------------------------------------------------------------------------------------------

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
        until(lambda: self.get("/_stcore/health") == 200)

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


def test_the_port_must_be_free(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dpmf.cli", "explore", "--port", str(server.port), "--no-browser"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("dpmf: --port must be free")
    assert done.stderr.count("\n") == 1


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpmf.web import serve

    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(dpmf.MissingExtraError, match=r"pip install 'dpmf\[web\]'"):
        serve.serve(0, browser=False)


# --- the browser -----------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@pytest.fixture
def browser(tmp_path: Path):
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver on this machine (Debian: apt install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-background-networking", "disable-component-update", "window-size=1400,1500"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


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


def test_set_the_inputs_and_read_the_numbers_back(server: Server, browser) -> None:
    browser.get(f"{server.url}/?strategy=dpsgd&batches_per_epoch=25")
    until(lambda: "DP-SGD, k=1, b=25" in shown(browser))
    # Bad input: in words, beside the field, and nothing breaks.
    typed(browser, "Epochs k", "many")
    until(lambda: "epochs must be a whole number from 1 to 1000, got 'many'" in shown(browser))
    until(lambda: "Nothing is computed" in shown(browser))  # it comes after the words beside the field
    typed(browser, "Epochs k", "2")
    typed(browser, "Target ε", "1.5")
    typed(browser, "Target δ", "1e-6")
    until(lambda: "finished in" in shown(browser) and "epsilon=1.5" in shown(browser), 240)
    text = shown(browser)
    assert "DP-SGD, k=2, b=25" in text
    mechanism = dpmf.Mechanism(dpmf.strategies.dpsgd(), dpmf.BallsInBins(epochs=2, batches_per_epoch=25))
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
    assert [p.get_attribute("alt")[:4] for p in pictures] == ["delt", "Gram"]
    assert all(p.get_property("naturalWidth") > 100 for p in pictures)
    assert "dpmf report --strategy dpsgd --epochs 2 --batches-per-epoch 25 --epsilon 1.5 --delta 1e-06" in text
    assert "batches_per_epoch=25" in browser.current_url  # the view can be linked to
    # Coefficients are typed in; a path is not a number.
    picked(browser, "Strategy", "Coefficients")
    typed(browser, "First column of C", "/etc/passwd")
    until(lambda: "coefficients must be numbers separated by commas or blanks, got '/etc/passwd'" in shown(browser))
    assert server.get("/_stcore/health") == 200
