"""The pages in a real browser: no console error, no violation of the policy, live without a reload.

Requires Chromium (Debian: chromium); without it, these tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from broker.types.outcomes import EventKind, make_event
from tests.dashboard.conftest import Served, Story

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
PAGES = [
    "/", "/clusters", "/places", "/cost", "/cost?by=job", "/jobs/1", "/jobs/2", "/jobs/4", "/jobs/77", "/clouds",
    "/services", "/services/chat", "/plan", "/jobs/4/plan", "/jobs/4/plan?change=use_spot%3Dfalse",
]  # fmt: skip
# No request leaves this machine: updates, sign-in and the field trials of Chromium are off.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND,EXCLUDE 127.0.0.1",
]  # fmt: skip
WIDTHS = {"desk": 1280, "phone": 360}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A logged-in tab that records what a developer's console would show."""

    def __init__(self, chromium: Any, served: Served, *, width: int = 1280, has_script: bool = True) -> None:
        self.context = chromium.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=has_script, color_scheme="dark"
        )
        self.context.set_default_timeout(300_000)  # a hang fails; a busy machine does not
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(served.link)
        self.base = served.base

    def open(self, path: str) -> None:
        self.page.goto(self.base + path)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_quiet_and_fits_the_screen(width: str, chromium: Any, served: Served) -> None:
    tab = Tab(chromium, served, width=WIDTHS[width])
    for path in PAGES:
        tab.open(path)
        assert tab.page.title().endswith("broker")  # a hostile name did not change it
        wide = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{path} scrolls sideways by {wide} px"
    assert [each for each in tab.complaints if "404" not in each] == []
    tab.context.close()


def test_an_event_appears_without_a_reload(chromium: Any, served: Served, story: Story) -> None:
    tab = Tab(chromium, served)
    tab.open("/jobs/1")
    tab.page.evaluate("window.wasLoadedOnce = true")
    story.tell(1, make_event(EventKind.NOTE, text="something new happened"))
    tab.page.get_by_text("something new happened").wait_for()
    assert tab.page.evaluate("window.wasLoadedOnce")
    tab.context.close()


def test_pages_can_be_read_and_a_job_cancelled_without_javascript(chromium: Any, served: Served, story: Story) -> None:
    tab = Tab(chromium, served, has_script=False)
    tab.page.get_by_role("link", name="1", exact=True).first.click()
    tab.page.get_by_role("heading", name="Job 1: train").wait_for()
    tab.page.get_by_role("button", name="Cancel job 1").click()
    tab.page.get_by_role("heading", name="Job 1: train").wait_for()
    assert story.store.jobs.is_cancel_requested(1)
    tab.context.close()


def test_the_keyboard_alone_reaches_a_job(chromium: Any, served: Served) -> None:
    tab = Tab(chromium, served)
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to content"
    for _ in range(30):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.getAttribute('href')") == "/jobs/1":
            break
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("heading", name="Job 1: train").wait_for()
    tab.context.close()
