"""The pages of a server in a real browser: login, a job, logout. Requires Chromium, as those of the dashboard."""

from __future__ import annotations

from typing import Any

import pytest

from broker.state.people import Owned
from tests.dashboard.test_browser import chromium, pytestmark
from tests.server.conftest import Hosted
from tests.server.test_pages import ADMIN_PAGES, PAGES, TASK

__all__ = ["chromium", "pytestmark"]


def test_a_user_logs_in_cancels_a_job_and_logs_out(chromium: Any, hosted: Hosted) -> None:
    store = hosted.context.store
    job_id = store.jobs.add("mine", TASK).id
    store.owners.put(Owned.JOB, str(job_id), "user")
    page = chromium.new_context().new_page()
    page.set_default_timeout(300_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(hosted.listening.url)
    page.get_by_label("Token").fill(hosted.tokens["user"])
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Overview").wait_for()
    page.goto(f"{hosted.listening.url}/jobs/{job_id}")
    page.get_by_role("button", name=f"Cancel job {job_id}").click()
    page.get_by_role("heading", name=f"Job {job_id}: mine").wait_for()
    assert store.jobs.is_cancel_requested(job_id)
    page.get_by_role("link", name="user", exact=True).click()
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Token").wait_for()
    assert complaints == []


@pytest.mark.long
def test_axe_finds_nothing_serious_on_the_pages_of_a_server(chromium: Any, hosted: Hosted) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    context = chromium.new_context(viewport={"width": 360, "height": 800})
    page = context.new_page()
    page.set_default_timeout(300_000)
    page.goto(hosted.listening.url)
    serious = []
    for path in ("/login", "", "/login", *PAGES, *ADMIN_PAGES):
        if path:
            page.goto(hosted.listening.url + path)
        else:
            page.get_by_label("Token").fill(hosted.tokens["admin"])
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("heading", name="Overview").wait_for()
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{path} scrolls sideways by {wide} px"
        violations = axe.Axe().run(page).response["violations"]
        serious += [(path, each["id"]) for each in violations if each["impact"] in ("serious", "critical")]
    assert serious == []
