"""A real browser without a window, for the tests of the page and of the site."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
_FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-sync disable-background-networking "
    "disable-component-update hide-scrollbars window-size=1400,1500"
)


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A Chromium driven by selenium; the test is skipped where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver on this machine (Debian: apt install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*_FLAGS.split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def resize(browser: Any, width: int) -> None:
    """Show the page as on a screen that is so many pixels wide."""
    size = {"width": width, "height": 1500, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
