"""A headless Chromium for tests of pages, where the machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def browser(width: int = 1280, height: int = 800, *, dark: bool = False) -> Iterator[Any]:
    """A driver with a window of that size; the test is skipped where Chromium or its driver is missing."""
    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if binary is None or driver is None:
        pytest.skip("Chromium and chromedriver are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for flag in _FLAGS:
        options.add_argument(flag)
    page = selenium.Chrome(options=options, service=selenium.chrome.service.Service(driver))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        if dark:
            feature = {"name": "prefers-color-scheme", "value": "dark"}
            page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        yield page
    finally:
        page.quit()
