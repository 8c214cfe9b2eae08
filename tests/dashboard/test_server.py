"""The server over HTTP: who may read, who may act, and what a page contains."""

from __future__ import annotations

import http.client
import math
import re
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from broker.types import JobStatus
from broker.types.outcomes import EventKind, make_event
from tests.dashboard.conftest import HOSTILE, Served, Story

PAGES = [
    "/", "/jobs", "/jobs?status=failed&name=s",
    "/clusters", "/places", "/cost", "/cost?by=job", "/cost?by=cloud", "/jobs/1", "/jobs/2", "/jobs/4", "/clouds",
    "/services", "/services/chat", "/plan", "/jobs/4/plan", "/jobs/4/plan?change=use_spot%3Dfalse",
]  # fmt: skip


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str


class Browser:
    """A client that keeps the cookie and follows no redirect."""

    def __init__(self, served: Served, *, is_logged_in: bool = True) -> None:
        self.host = urlsplit(served.base).netloc
        self.cookie = ""
        if is_logged_in:
            self.cookie = self.get(served.link).headers["Set-Cookie"].partition(";")[0]

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path.removeprefix(f"http://{self.host}"), **headers)

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> Answer:
        connection = http.client.HTTPConnection(self.host, timeout=300)
        given = {"Cookie": self.cookie} | {name.replace("_", "-"): value for name, value in headers.items()}
        if body:
            given["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, body or None, given)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return Answer(answer.status, answer.headers, text)


def test_the_link_works_once_and_everything_else_requires_the_cookie(served: Served) -> None:
    stranger = Browser(served, is_logged_in=False)
    assert [stranger.get(path).status for path in (*PAGES, "/metrics", "/changes", "/static/style.css")] == [401] * (
        len(PAGES) + 3
    )
    assert stranger.get("/login?token=guess").status == 403
    first = stranger.get(served.link)
    assert first.status == 303
    cookie = first.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert stranger.get(served.link).status == 403
    stranger.cookie = cookie.partition(";")[0]
    assert stranger.get("/").status == 200


def test_another_host_name_is_refused(served: Served) -> None:
    browser = Browser(served)
    port = browser.host.partition(":")[2]
    assert browser.get("/", Host=f"evil.example:{port}").status == 403
    assert browser.get("/", Host=f"localhost:{port}").status == 200


@pytest.mark.parametrize("path", PAGES)
def test_every_page_has_a_strict_policy_and_no_inline_script(path: str, served: Served) -> None:
    answer = Browser(served).get(path)
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert re.findall(r"<script(?! src=\"/static/live\.js\" defer></script>)[^>]*>", answer.text) == []
    assert " style=" not in answer.text and "\x1b" not in answer.text


def test_hostile_names_and_logs_are_shown_as_text(served: Served) -> None:
    shown = HOSTILE.partition("\x1b")[0].replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;")
    browser = Browser(served)
    for path in ("/", "/jobs/1", "/jobs/2", "/plan", "/jobs/2/plan", "/services/chat"):
        assert shown in browser.get(path).text, path


def test_a_job_is_cancelled_by_the_form_of_its_page_and_by_nothing_else(served: Served, story: Story) -> None:
    browser = Browser(served)
    ticket = re.search(r'name="ticket" value="([^"]+)"', browser.get("/jobs/1").text)
    assert ticket
    body, origin = f"ticket={ticket[1]}", served.base
    assert browser.ask("POST", "/jobs/1/cancel", body).status == 403  # no Origin
    assert browser.ask("POST", "/jobs/1/cancel", body, Origin="http://evil.example").status == 403
    assert browser.ask("POST", "/jobs/1/cancel", "ticket=guess", Origin=origin).status == 403
    assert not story.store.jobs.is_cancel_requested(1)
    done = browser.ask("POST", "/jobs/1/cancel", body, Origin=origin)
    assert (done.status, done.headers["Location"]) == (303, "/jobs/1")
    assert story.store.jobs.is_cancel_requested(1)


def test_a_failed_job_is_retried_and_shown(served: Served, story: Story) -> None:
    browser = Browser(served)
    ticket = re.search(r'name="ticket" value="([^"]+)"', browser.get("/jobs/2").text)
    assert ticket and "Retry job 2" in browser.get("/jobs/2").text
    done = browser.ask("POST", "/jobs/2/retry", f"ticket={ticket[1]}", Origin=served.base)
    assert done.status == 303, done.text
    again = story.store.jobs.get(int(done.headers["Location"].rpartition("/")[2]))
    assert again is not None and again.resumes == 2 and again.status is JobStatus.PENDING


def test_an_unknown_job_is_an_error_with_a_hint(served: Served) -> None:
    answer = Browser(served).get("/jobs/77")
    assert answer.status == 404 and "unknown managed job `77`" in answer.text and "broker jobs queue" in answer.text


def test_files_beside_the_static_ones_are_not_served(served: Served) -> None:
    browser = Browser(served)
    for path in ("/static/..%2fserver.py", "/static/server.py", "/static/", "/static/%2e%2e/server.py"):
        assert browser.get(path).status == 404, path


def test_an_event_between_a_page_and_its_stream_is_sent(
    served: Served, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.dashboard.changes.REFRESH_S", math.inf)
    browser = Browser(served)
    newest = re.search(r'data-newest="(\d+)"', browser.get("/").text)
    assert newest
    story.add_event(1, make_event(EventKind.NOTE, text="news"))
    connection = http.client.HTTPConnection(browser.host, timeout=300)
    connection.request("GET", f"/changes?after={newest[1]}", headers={"Cookie": browser.cookie})
    answer = connection.getresponse()
    while not (line := answer.readline().decode()).startswith("id: "):
        assert line
    connection.close()
    assert int(line.removeprefix("id: ")) == story.store.events.get_newest_id() > int(newest[1])


def test_an_event_reaches_an_open_stream_and_a_reconnect_misses_none(served: Served, story: Story) -> None:
    browser = Browser(served)

    def follow(last: str | None) -> int:
        """Read the stream up to the first message."""
        connection = http.client.HTTPConnection(browser.host, timeout=300)
        headers = {"Cookie": browser.cookie} | ({"Last-Event-ID": last} if last else {})
        connection.request("GET", "/changes", headers=headers)
        answer = connection.getresponse()
        while not (line := answer.readline().decode()).startswith("id: "):
            if line == ": connected\n" and last is None:
                story.add_event(1, make_event(EventKind.NOTE, text="news"))
        connection.close()
        return int(line.removeprefix("id: "))

    known = story.store.events.get_newest_id()
    assert follow(None) == known + 1
    assert follow(str(known)) == known + 1  # it happened while the page was away


def test_the_scrape_token_admits_to_the_metrics_only(served: Served, story: Story) -> None:
    file = story.context.config.home / "metrics-token"
    assert file.stat().st_mode & 0o777 == 0o600
    stranger = Browser(served, is_logged_in=False)
    bearer = f"Bearer {file.read_text()}"
    answer = stranger.get("/metrics", Authorization=bearer)
    assert answer.status == 200 and "broker_spend_usd_total" in answer.text
    assert stranger.get("/metrics", Authorization="Bearer guess").status == 401
    assert stranger.get("/metrics", Authorization=bearer, Host="evil.example").status == 403
    for path in ("/", "/jobs/1", "/changes"):
        assert stranger.get(path, Authorization=bearer).status == 401, path
    assert stranger.ask("POST", "/jobs/1/cancel", "ticket=t", Authorization=bearer, Origin=served.base).status == 401
