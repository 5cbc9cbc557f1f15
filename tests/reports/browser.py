"""A real browser for tests: the Chromium of this machine, driven by playwright."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What a page in a test may do: nothing outside this machine
ARGUMENTS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]


def find_chromium() -> str | None:
    """Return the path of a browser, if there is one on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a browser, or skip the test with the reason."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = find_chromium()
    if path is None:
        pytest.skip("needs a browser on the PATH, one of " + ", ".join(NAMES) + ": apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class OpenPage:
    """A page that is open in a browser, and what it complained about."""

    def __init__(self, browser: Any, address: str | Path, **options: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **options}
        )
        self.page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.goto(address.as_uri() if isinstance(address, Path) else address)
        self.wait()

    def wait(self) -> None:
        """Wait until every figure is drawn."""
        self.page.wait_for_selector("html[data-drawn=true]", state="attached", timeout=60_000)

    def ask(self, code: str) -> Any:
        """Return the value of an expression in the page."""
        return self.page.evaluate(code)

    def until(self, code: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true; the page's own policy forbids playwright's way of doing so."""
        end = time.monotonic() + seconds
        while not self.ask(code):
            assert time.monotonic() < end, f"not within {seconds} s: {code}"
            time.sleep(0.1)

    def close(self) -> None:
        """Close the page and all that belongs to it."""
        self.page.context.close()
