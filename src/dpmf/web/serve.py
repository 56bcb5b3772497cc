"""The server of the page: Streamlit on 127.0.0.1 only, without telemetry, uploads or file watching."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
import urllib.request
import webbrowser
from pathlib import Path

from dpmf import errors, validation
from dpmf.web.pool import TIME_LIMIT, WORKERS, Pool

ADDRESS = "127.0.0.1"

# These are passed as flags, which take precedence over the environment and over configuration files.
OPTIONS: dict[str, object] = {
    "server.address": ADDRESS,
    "server.allowedHosts": [ADDRESS, "localhost"],
    "server.corsAllowedOrigins": [],
    "server.enableCORS": True,
    "server.enableXsrfProtection": True,
    "server.enableStaticServing": False,
    "server.enableAgentApi": False,
    "server.fileWatcherType": "none",
    "server.headless": True,
    "server.maxUploadSize": 0,
    "server.maxMessageSize": 20,
    "server.maxWidgetStateSize": 1,
    "server.disconnectedSessionTTL": 20,
    "browser.serverAddress": ADDRESS,
    "browser.gatherUsageStats": False,
    "client.showErrorDetails": "none",
    "client.showErrorLinks": False,
    "client.toolbarMode": "viewer",
    "global.developmentMode": False,
    "logger.hideWelcomeMessage": True,
    "logger.level": "error",
    "runner.magicEnabled": False,
}


_making = threading.Lock()
_made: list[Pool] = []


def shared_pool(workers: int = WORKERS, time_limit: float = TIME_LIMIT) -> Pool:
    """Return the one pool of this server. The first call makes it, with the settings given."""
    with _making:  # many sessions may begin at once
        if not _made:
            _made.append(Pool(workers=workers, time_limit=time_limit))
        return _made[0]


def free_port(port: int) -> int:
    """Return the port if it is free, or any free port for 0."""
    validation.integer("port", port, at_least=0, at_most=65535)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise errors.ArgumentError("port", f"must be free, but {port} is not ({error.strerror})") from None
        return int(probe.getsockname()[1])


def _announce_when_ready(url: str, browser: bool) -> None:
    """Print the address once the server answers there, so that whoever reads it can open it."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=1):
                break
        except OSError:
            time.sleep(0.05)
    print(f"dpmf explore: {url} (stop with Ctrl-C)", flush=True)
    if browser:
        webbrowser.open(url)


def serve(port: int, browser: bool, workers: int = WORKERS, time_limit: float = TIME_LIMIT) -> None:
    """Serve the page until interrupted.

    Args:
      port: the port on 127.0.0.1; 0 takes a free one.
      browser: whether to open a browser.
      workers: the number of processes that compute, shared by all tabs.
      time_limit: seconds after which a view is shown as far as it got.
    """
    if importlib.util.find_spec("streamlit") is None:
        raise errors.missing_extra("streamlit", "web", "dpmf explore")
    port = free_port(port)
    workers = validation.integer("workers", workers, at_least=1, at_most=64)
    time_limit = validation.positive("time_limit", time_limit)
    from streamlit import config, net_util
    from streamlit.web import bootstrap

    # Streamlit would ask a server on the internet for this machine's address, to compare it with a foreign Origin.
    net_util.get_external_ip = lambda: None
    # Older versions of Streamlit do not know all options.
    known = config._config_options_template
    options = {name: value for name, value in {**OPTIONS, "server.port": port}.items() if name in known}
    flags = {name.replace(".", "_"): value for name, value in options.items()}
    bootstrap.load_config_options(flags)
    for name, value in options.items():  # refuse to serve with settings other than these
        if config.get_option(name) != value:
            raise ValueError(f"the page needs Streamlit's {name} to be {value!r}, it is {config.get_option(name)!r}")
    url = f"http://{ADDRESS}:{port}"
    threading.Thread(target=_announce_when_ready, args=(url, browser), daemon=True).start()
    pool = shared_pool(workers, time_limit)  # its processes start while the page is loaded
    bootstrap.run(str(Path(__file__).parent / "script" / "page.py"), False, [], flags)
    pool.close()
