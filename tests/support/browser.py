"""Controls Debian's headless Chromium with playwright, and records the errors of the open page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Visit:
    """An open page, its errors and warnings (``complaints``), and the URLs that it has requested (``requests``)."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def visiting(url: str, *, theme: str = "light", width: int = 1440, offline: bool = False) -> Iterator[Visit]:
    """Open a page. Skips the test if the browser or playwright is missing."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(
            color_scheme=theme, viewport={"width": width, "height": 1000}, offline=offline, reduced_motion="reduce"
        )
        visit = Visit(context.new_page())
        visit.page.on("console", lambda said: said.type in ("error", "warning") and visit.complaints.append(said.text))
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.goto(url)
        try:
            yield visit
        finally:
            browser.close()
