"""The pages in a real browser: no console error, no violation of the policy, live without a reload.

Requires Chromium (Debian: chromium); without it, these tests are skipped.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from broker.types.outcomes import EventKind, make_event
from tests.dashboard.conftest import Served, Story
from tests.tiers import spread

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
PAGES = [
    "/", "/jobs", "/jobs?status=failed&name=s",
    "/clusters", "/places", "/cost", "/cost?by=job", "/jobs/1", "/jobs/2", "/jobs/4", "/jobs/77", "/clouds",
    "/services", "/services/chat", "/plan", "/jobs/4/plan", "/jobs/4/plan?change=use_spot%3Dfalse",
]  # fmt: skip
# No request leaves this machine: updates, sign-in and the field trials of Chromium are off.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND,EXCLUDE 127.0.0.1",
]  # fmt: skip
# Stands for the daemon in the middle of a commit.
WRITER = """
import sqlite3, sys
store = sqlite3.connect(sys.argv[1], isolation_level=None)
store.execute("BEGIN IMMEDIATE")
data = '{"text": "never committed"}'
store.execute("INSERT INTO events (time_s, kind, data, job_id) VALUES (1, 'note', ?, 1)", (data,))
print("writing", flush=True)
sys.stdin.read()
"""
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

    def __init__(
        self, chromium: Any, served: Served, *, width: int = 1280, has_script: bool = True, scheme: str = "dark"
    ) -> None:
        self.context = chromium.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=has_script, color_scheme=scheme
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

    def open_another(self, path: str) -> Any:
        """Open a second page with the same cookie."""
        page = self.context.new_page()
        page.goto(self.base + path)
        return page


@pytest.mark.parametrize("width", ["phone", pytest.param("desk", marks=pytest.mark.long)])
def test_every_page_is_quiet_and_fits_the_screen(width: str, chromium: Any, served: Served) -> None:
    tab = Tab(chromium, served, width=WIDTHS[width])
    for path in PAGES:
        tab.open(path)
        assert tab.page.title().endswith("broker")  # a hostile name did not change it
        wide = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{path} scrolls sideways by {wide} px"
        cards = "[...document.querySelectorAll('.figures div')].filter(e => e.scrollWidth > e.clientWidth)"
        assert tab.page.evaluate(f"{cards}.map(e => e.textContent)") == [], path
    assert [each for each in tab.complaints if "404" not in each] == []
    tab.context.close()


def test_an_event_appears_without_a_reload(chromium: Any, served: Served, story: Story) -> None:
    tab = Tab(chromium, served)
    tab.open("/jobs/1")
    tab.page.evaluate("window.wasLoadedOnce = true")
    story.add_event(1, make_event(EventKind.NOTE, text="something new happened"))
    tab.page.get_by_text("something new happened").wait_for()
    assert tab.page.evaluate("window.wasLoadedOnce")
    assert tab.page.get_by_role("alert").count() == 0
    served.close()  # an outdated page must not look current
    tab.page.get_by_role("alert").filter(has_text="not up to date").wait_for()
    assert "As of 20" in tab.page.content()
    tab.context.close()


@pytest.mark.long
def test_a_failed_load_is_noted_until_the_next_one(chromium: Any, served: Served, story: Story) -> None:
    tab = Tab(chromium, served)
    tab.open("/jobs/1")
    tab.page.route("**/jobs/1", lambda route: route.abort())
    story.add_event(1, make_event(EventKind.NOTE, text="a change that cannot be loaded"))
    tab.page.get_by_role("alert").filter(has_text="not up to date").wait_for()
    tab.page.unroute("**/jobs/1")
    story.add_event(1, make_event(EventKind.NOTE, text="a change that is loaded"))
    tab.page.get_by_text("a change that is loaded").wait_for()
    tab.page.get_by_role("alert").wait_for(state="detached")
    tab.context.close()


# A load that has its answer waits for the second change; `gate` opens then.
SLOW_LOAD = """
let open;
const gate = new Promise((resolve) => { open = resolve; });
const RealSource = window.EventSource, realFetch = window.fetch;
window.changes = window.loads = 0;
window.EventSource = class extends RealSource {
  constructor(url) {
    super(url);
    this.addEventListener("message", () => { window.changes += 1; if (window.changes > 1) open(); });
  }
};
window.fetch = async (...given) => {
  const answer = await realFetch(...given), text = await answer.text();
  document.body.dataset.loads = window.loads += 1;
  await gate;
  return new Response(text, { status: answer.status });
};
"""


def test_a_change_during_a_load_is_not_lost(
    chromium: Any, served: Served, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.dashboard.changes.REFRESH_S", math.inf)
    tab = Tab(chromium, served)
    tab.page.add_init_script(SLOW_LOAD)
    tab.open("/jobs/1")
    story.add_event(1, make_event(EventKind.NOTE, text="the first change"))
    tab.page.locator("body[data-loads='1']").wait_for()
    story.add_event(1, make_event(EventKind.NOTE, text="the second change"))
    tab.page.get_by_text("the second change").wait_for()
    tab.context.close()


HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.mark.long
def test_tabs_in_the_background_leave_their_connections_to_others(chromium: Any, served: Served, story: Story) -> None:
    """Chromium opens six connections to one server; each open stream of changes takes one."""
    tab = Tab(chromium, served)
    tab.open("/jobs/1")
    others: list[Any] = []
    for path in ("/", "/jobs", "/clusters", "/places", "/cost", "/services", "/plan"):
        (others[-1] if others else tab.page).evaluate(HIDE, True)
        others.append(tab.open_another(path))
    story.add_event(1, make_event(EventKind.NOTE, text="while it was hidden"))
    tab.page.evaluate(HIDE, False)
    tab.page.get_by_text("while it was hidden").wait_for()
    story.add_event(1, make_event(EventKind.NOTE, text="after it was shown"))
    tab.page.get_by_text("after it was shown").wait_for()
    assert tab.complaints == []
    tab.context.close()


def test_pages_can_be_read_and_a_job_cancelled_without_javascript(chromium: Any, served: Served, story: Story) -> None:
    tab = Tab(chromium, served, has_script=False)
    tab.page.get_by_role("link", name="1", exact=True).first.click()
    tab.page.get_by_role("heading", name="Job 1: train").wait_for()
    tab.page.get_by_role("button", name="Cancel job 1").click()
    tab.page.get_by_role("heading", name="Job 1: train").wait_for()
    assert story.store.jobs.is_cancel_requested(1)
    tab.context.close()


def tab_to(tab: Tab, expression: str, wanted: object) -> None:
    """Press the tab key until this expression about the focused element has the wanted value."""
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate(f"document.activeElement.{expression}") == wanted:
            return
    raise AssertionError(f"the tab key does not reach {wanted}")


def test_the_keyboard_alone_reaches_a_job_and_cancels_it(chromium: Any, served: Served, story: Story) -> None:
    tab = Tab(chromium, served)
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to content"
    tab_to(tab, "getAttribute('href')", "/jobs/1")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("heading", name="Job 1: train").wait_for()
    tab_to(tab, "textContent", "Cancel job 1")
    with tab.page.expect_navigation():
        tab.page.keyboard.press("Enter")
    assert story.store.jobs.is_cancel_requested(1)
    tab.context.close()


def test_a_change_moves_neither_the_focus_nor_what_is_open(chromium: Any, served: Served, story: Story) -> None:
    tab = Tab(chromium, served)
    tab.open("/jobs/4")
    tab.page.locator("summary").first.click()
    tab.page.get_by_role("link", name="Complete log").first.focus()
    tab.page.evaluate("window.before = document.querySelector('main')")
    story.add_event(4, make_event(EventKind.NOTE, text="something new happened"))
    tab.page.get_by_text("something new happened").wait_for()
    assert tab.page.evaluate("window.before !== document.querySelector('main')")
    assert tab.page.evaluate("document.activeElement.textContent") == "Complete log"
    assert tab.page.locator("details").first.evaluate("(each) => each.open")
    tab.context.close()


@pytest.mark.long
def test_the_keyboard_alone_plans_a_change(chromium: Any, served: Served) -> None:
    tab = Tab(chromium, served)
    tab.open("/jobs/4/plan")
    tab_to(tab, "id", "change")
    tab.page.keyboard.type("use_spot=false")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_text("Comparison with the changed task").wait_for(state="attached")
    tab.context.close()


FOCUSABLE = "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"


@pytest.mark.long
def test_the_tab_key_visits_every_control_of_every_page(chromium: Any, served: Served) -> None:
    tab = Tab(chromium, served)
    tab.page.route("**/static/live.js", lambda route: route.abort())  # it replaces the elements that are counted
    for path in PAGES:
        tab.open(path)
        count = tab.page.evaluate(
            "(what) => { window.left = new Set([...document.querySelectorAll(what)].filter(e => e.checkVisibility()));"
            " document.addEventListener('focusin', (e) => window.left.delete(e.target)); return window.left.size; }",
            FOCUSABLE,
        )
        assert count
        for _ in range(count + 2):
            tab.page.keyboard.press("Tab")
        assert tab.page.evaluate("[...window.left].map((e) => e.outerHTML.slice(0, 100))") == [], path
    tab.context.close()


@pytest.mark.parametrize("scheme", spread(["dark", "light"], every=0, more=2))
def test_axe_finds_nothing_serious_on_any_page(scheme: str, chromium: Any, served: Served) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    tab = Tab(chromium, served, width=360 if scheme == "dark" else 1280, scheme=scheme)
    serious = []
    for path in PAGES:
        tab.open(path)
        for each in axe.Axe().run(tab.page).response["violations"]:
            if each["impact"] in ("serious", "critical"):
                serious.append((path, each["id"], [node["html"][:200] for node in each["nodes"]]))
    assert serious == []
    tab.page.evaluate("document.querySelector('main').append(document.createElement('input'))")
    planted = axe.Axe().run(tab.page).response["violations"]
    assert "label" in [each["id"] for each in planted]  # an input without a label is found
    tab.context.close()


@pytest.mark.long
def test_foreign_text_makes_no_element_on_any_page(chromium: Any, served: Served) -> None:
    tab = Tab(chromium, served)
    for path in PAGES:
        tab.open(path)
        inline = tab.page.evaluate("[...document.scripts].filter(each => !each.src).length")
        text = tab.page.evaluate("document.body.textContent")
        assert inline == 0 and "\x1b" not in text, path
    tab.context.close()


def test_an_open_page_outlives_a_daemon_that_is_killed_while_it_writes(
    chromium: Any, served: Served, story: Story
) -> None:
    tab = Tab(chromium, served)
    tab.open("/jobs/1")
    tab.page.evaluate("window.wasLoadedOnce = true")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(story.context.config.database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        other = tab.open_another("/jobs/1")  # read while the writer holds its lock
        assert "never committed" not in other.content() and "the newest event" in other.content()
        writer.kill()
    story.add_event(1, make_event(EventKind.NOTE, text="the daemon is back"))
    tab.page.get_by_text("the daemon is back").wait_for()
    assert tab.page.evaluate("window.wasLoadedOnce") and "never committed" not in tab.page.content()
    tab.context.close()
