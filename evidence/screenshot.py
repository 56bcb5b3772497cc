"""The picture of the page in docs/explore.md: starts the page, opens it in a headless Chromium, waits, takes a picture.

Needs the extra [web], selenium, chromium and chromedriver (Debian: apt install chromium chromium-driver).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

VIEW = "dataset_size=60000&batch_size=300&epochs=1&epsilon=8"
FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync window-size=1240,1330 hide-scrollbars"
)


def picture(url: str, profile: str) -> bytes:
    """The page at the address, once it says that it is finished."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in [*FLAGS.split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get(url)
        end = time.monotonic() + 300
        while "finished in" not in str(driver.execute_script("return document.body.innerText")):
            if time.monotonic() > end:
                raise ValueError("the page did not finish within five minutes")
            time.sleep(0.5)
        time.sleep(4.0)
        return driver.get_screenshot_as_png()
    finally:
        driver.quit()


def smaller(image: bytes) -> bytes:
    """The same picture in 256 colours."""
    from PIL import Image

    stream = io.BytesIO()
    Image.open(io.BytesIO(image)).convert("RGB").quantize(256).save(stream, format="png", optimize=True)
    return stream.getvalue()


def _wait_for(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise ValueError("the page did not start")


def screenshot() -> bytes:
    """The page with the view above, in few colours."""
    command = [sys.executable, "-m", "dpmf.cli", "explore", "--port", "0", "--no-browser", "--time-limit", "280"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        if found is None:
            raise ValueError("the page did not start")
        _wait_for(f"{found[0]}/_stcore/health")
        with tempfile.TemporaryDirectory() as profile:
            return smaller(picture(f"{found[0]}/?{VIEW}", profile))
    finally:
        server.terminate()
        server.wait()
