"""The server of the page: Streamlit, on 127.0.0.1 and nowhere else, without telemetry, uploads or file watching."""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
import threading
import time
import urllib.request
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from dpmf import errors, validation

if TYPE_CHECKING:
    from dpmf.web.pool import Pool

ADDRESS = "127.0.0.1"
_TIME_LIMIT, _WORKERS = "DPMF_EXPLORE_TIME_LIMIT", "DPMF_EXPLORE_WORKERS"

# Given as flags, which win over the environment and over configuration files.
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


@functools.cache
def _pool() -> Pool:
    from dpmf.web.pool import Pool

    return Pool(workers=int(os.environ[_WORKERS]), time_limit=float(os.environ[_TIME_LIMIT]))


def shared_pool() -> Pool:
    """The one pool of this server."""
    with _making:  # many sessions may begin at once
        return _pool()


def free_port(port: int) -> int:
    """The port, if nobody has it; any free one for 0."""
    validation.integer("port", port, at_least=0, at_most=65535)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise ValueError(f"port must be free, but {port} is not ({error.strerror})") from None
        return int(probe.getsockname()[1])


def _open_when_ready(url: str) -> None:
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=1):
                break
        except OSError:
            time.sleep(0.1)
    webbrowser.open(url)


def serve(port: int, browser: bool, workers: int = 2, time_limit: float = 180.0) -> None:
    """Serve the page until interrupted."""
    if importlib.util.find_spec("streamlit") is None:
        raise errors.missing_extra("streamlit", "web", "dpmf explore")
    port = free_port(port)
    os.environ[_WORKERS] = str(validation.integer("workers", workers, at_least=1, at_most=64))
    os.environ[_TIME_LIMIT] = str(validation.positive("time_limit", time_limit))
    from streamlit import config, net_util
    from streamlit.web import bootstrap

    # Streamlit would ask a server on the internet for this machine's address to compare it with a foreign Origin.
    net_util.get_external_ip = lambda: None
    # Older versions do not know all of them.
    known = config._config_options_template
    options = {name: value for name, value in {**OPTIONS, "server.port": port}.items() if name in known}
    flags = {name.replace(".", "_"): value for name, value in options.items()}
    bootstrap.load_config_options(flags)
    for name, value in options.items():  # bind nothing that is not what was asked for
        if config.get_option(name) != value:
            raise ValueError(f"the page needs Streamlit's {name} to be {value!r}, it is {config.get_option(name)!r}")
    url = f"http://{ADDRESS}:{port}"
    print(f"dpmf explore: {url} (stop with Ctrl-C)", flush=True)
    if browser:
        threading.Thread(target=_open_when_ready, args=(url,), daemon=True).start()
    shared_pool()  # its processes get ready meanwhile
    bootstrap.run(str(Path(__file__).parent / "script" / "page.py"), False, [], flags)
    shared_pool().close()
