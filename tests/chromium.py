"""A real browser for tests and screenshots: Chromium as installed, or Playwright's own."""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")
SIZES = {"report": (1280, 900), "report-phone": (390, 844)}
SCREENSHOT_HEIGHT = {"report": 1500, "report-phone": 1500}


@contextmanager
def chromium():
    """A running browser. Without one the test is skipped, but fails where COTERIE_BROWSER=required."""
    required = os.environ.get("COTERIE_BROWSER") == "required"
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        give_up("Playwright is not installed: pip install 'coterie[dev]'", required)
    with sync_playwright() as play:
        try:
            found = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = play.chromium.launch(executable_path=found, args=list(FLAGS))
        except Error as reason:
            give_up(f"no Chromium: apt-get install chromium, or playwright install chromium ({reason})", required)
        try:
            yield browser
        finally:
            browser.close()


def give_up(reason, required):
    if required:
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def opened(browser, address, size=(1280, 900), scheme="light", offline=True):
    """The page and what it did: console messages and errors, and every request beyond the page itself."""
    context = browser.new_context(viewport=dict(zip(("width", "height"), size)), color_scheme=scheme, offline=offline)
    page = context.new_page()
    page.said, page.asked = [], []
    page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: page.said.append(f"error: {error}"))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("#clients h2")
    yield page
    context.close()


def unfold(page):
    """Open the bar of choices, which is one line on a narrow screen."""
    if page.locator("#chosen").count() and page.locator("#chosen").is_visible():
        page.locator("#chosen").click()


def screenshots(browser, report, folder):
    """The top of the page on a desktop and on a phone, as README shows it: report.png and report-phone.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        with opened(browser, report.resolve().as_uri(), (size[0], SCREENSHOT_HEIGHT[name])) as page:
            page.screenshot(path=folder / f"{name}.png")
    return [folder / f"{name}.png" for name in SIZES]


if __name__ == "__main__":  # python tests/chromium.py demo/report.html docs
    with chromium() as one:
        print(*screenshots(one, Path(sys.argv[1]), Path(sys.argv[2])))
