"""A real browser for tests of pages: the system's Chromium, without a screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; without one, the test fails and says what to install."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.fail("there is no chromium: sh slurm/image/host-setup.sh installs it", pytrace=False)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def watched(page: Page) -> list[str]:
    """What the page says on its console, and what it asks of a network, from now on."""
    found: list[str] = []
    page.on("console", lambda message: found.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: found.append(f"error: {error}"))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else found.append(request.url)
    )
    return found
