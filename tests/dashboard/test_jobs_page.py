"""The list of all jobs: what it finds, its pages, and the complete log of a job."""

from __future__ import annotations

from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from broker.dashboard import content, jobs_page, model
from broker.dashboard.chances import JobExpectation
from broker.dashboard.jobs_page import JobFilter, read_jobs, show_list
from broker.dashboard.model import NEWEST, read_overview
from broker.types import JobStatus
from tests.dashboard.conftest import HOSTILE, Served, Story


def list_ids(story: Story, choice: JobFilter, name: str = "", before: int | None = None) -> list[int]:
    return [row.line.id for row in read_jobs(story.context, choice=choice, name=name, before=before).rows]


def test_jobs_are_found_by_status_and_name(story: Story) -> None:
    waiting = story.add_job("Sweep-7")
    assert list_ids(story, JobFilter.ALL) == [waiting, 3, 2, 1]
    assert list_ids(story, JobFilter.LIVE) == [waiting, 1]
    assert list_ids(story, JobFilter.RUNNING) == [1]
    assert list_ids(story, JobFilter.WAITING) == [waiting]
    assert list_ids(story, JobFilter.FAILED) == [2]
    assert list_ids(story, JobFilter.SUCCEEDED) == [3]
    assert list_ids(story, JobFilter.CANCELLED) == []
    assert list_ids(story, JobFilter.ALL, "sweep") == [waiting]
    assert list_ids(story, JobFilter.ALL, "<SCRIPT>") == [2]
    (row,) = read_jobs(story.context, choice=JobFilter.RUNNING).rows
    assert row.line == next(each.line for each in read_overview(story.context).jobs if each.line.id == 1)
    shown = show_list(read_jobs(story.context, choice=JobFilter.ALL, name=f'"{HOSTILE}'))
    assert "0 jobs" in shown and "<script" not in shown and 'value="&quot;&lt;script' in shown


def test_pages_hold_each_job_once(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_page, "ROWS", 2)
    found = read_jobs(story.context, choice=JobFilter.ALL)
    shown = show_list(found)
    assert (found.count, found.next_before) == (3, 2)
    assert "before=2" in shown and "First page" not in shown
    last = read_jobs(story.context, choice=JobFilter.ALL, before=found.next_before)
    assert [row.line.id for row in (*found.rows, *last.rows)] == [3, 2, 1]
    assert last.next_before is None and "First page" in show_list(last) and "Next page" not in show_list(last)


def test_a_live_job_is_not_hidden_by_newer_ones_that_ended(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SCANNED_MAX", NEWEST)
    with story.store.transaction():
        for number in range(NEWEST + 1):
            story.store.jobs.set_status(story.add_job(f"short-{number}"), JobStatus.SUCCEEDED)
    rows = read_overview(story.context).jobs
    assert rows[0].line.id == 1 and len(rows) == NEWEST
    assert [row.line.id for row in rows[1:]] == sorted((row.line.id for row in rows[1:]), reverse=True)


def test_the_page_of_a_job_reads_only_the_end_of_a_long_log(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    log = story.context.config.logs / "jobs" / "1.log"
    log.write_text("".join(f"step {step}/900  loss 2.5\n" for step in range(100, 900)))
    whole = content.make_job(story.context, 1, JobExpectation()).show("")
    monkeypatch.setattr(content, "LOG_BYTES_MAX", 100)
    cut = content.make_job(story.context, 1, JobExpectation()).show("")
    assert "first part are left out" in cut and "first part are left out" not in whole
    assert "The newest 200 lines" in cut and "step 899/900" in cut and "step 895/900" not in cut
    assert 'href="/jobs/1/log"' in cut


def test_the_complete_log_is_plain_text(served: Served, story: Story) -> None:
    log = story.context.config.logs / "jobs" / "1.log"
    log.write_text("line\n" * 1000 + HOSTILE)
    opener = build_opener(HTTPCookieProcessor())
    opener.open(served.link, timeout=300).read()
    answer = opener.open(f"{served.base}/jobs/1/log", timeout=300)
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.read().decode() == log.read_text()
    assert opener.open(f"{served.base}/jobs/3/log", timeout=300).read() == b""
