"""The report of a month on a store with known bills, losses and forecasts."""

from __future__ import annotations

import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from broker.app.reporting import measure_hours, read_month, read_report
from broker.cli.main import main
from broker.dashboard.report import write_html, write_markdown
from broker.errors import UsageError
from broker.types import JobStatus
from tests.dashboard.conftest import HOSTILE, Story
from tests.dashboard.test_model import read_json

MID_S = time.mktime((2026, 3, 15, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def frozen(story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A job of 30 minutes lost and 45 minutes so far, on two nodes at 1 USD an hour instead of 3, in one month."""
    job_id = story.add_job(HOSTILE)
    story.add_attempt(job_id, 1, begin_s=MID_S, end_s=MID_S + 1800)
    story.store.jobs.set_status(job_id, JobStatus.RUNNING)
    story.add_attempt(job_id, 2, begin_s=MID_S + 1800, end_s=None)
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: MID_S + 4500)
    return story


def test_a_month_sums_what_was_bought_and_saved(frozen: Story) -> None:
    report = read_report(frozen.context, read_month("2026-03", now_s=MID_S))
    (bought,) = [each for each in report.bought if each.market == "spot"]
    assert bought.node_hours == pytest.approx(2 * 1.25) and bought.usd == pytest.approx(2.5)
    assert bought.ondemand_usd == pytest.approx(7.5)
    (line,) = [each for each in report.jobs if each.name == HOSTILE]
    assert (line.preemptions, line.usd) == (1, pytest.approx(2.5))
    assert line.lost_usd == pytest.approx(2.0 * 60 / 3600), "the second attempt's start; its program reports no steps"
    assert report.saved_usd == pytest.approx(report.ondemand_usd - report.usd) and report.saved_usd >= 5.0 - 1e-9


def test_attempt_that_is_preempted_before_its_program_starts_is_lost_money(frozen: Story) -> None:
    job = max(frozen.store.jobs.list(), key=lambda each: each.id)
    first, second = job.attempts
    lost = replace(second, running_s=None, lost_s=MID_S + 2700, ended_s=MID_S + 2700, outcome=first.outcome)
    frozen.store.jobs.put_attempt(lost)
    report = read_report(frozen.context, read_month("2026-03", now_s=MID_S))
    (line,) = [each for each in report.jobs if each.name == HOSTILE]
    assert line.preemptions == 2 and line.lost_usd == pytest.approx(2.0 * 900 / 3600)


def test_hours_are_cut_at_the_ends_of_the_month(frozen: Story) -> None:
    march, april = read_month("2026-03", now_s=MID_S), read_month("2026-04", now_s=MID_S)
    assert march.end_s == april.begin_s
    frozen.add_cluster("across", begin_s=march.end_s - 7200, end_s=march.end_s + 3600)
    bills = [each for each in frozen.store.bills.list() if each.cluster == "across"]
    now_s = march.end_s + 86400
    assert [measure_hours(each, march, now_s) for each in bills] == [2.0, 2.0]
    assert [measure_hours(each, april, now_s) for each in bills] == [1.0, 1.0]


def test_lost_steps_and_forecasts_are_those_of_the_jobs(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.add_planned()
    report = read_report(story.context, read_month(None, now_s=story.now_s))
    (planned,) = report.forecasts
    assert planned.forecast_usd == 1.6 and planned.ratio == pytest.approx(1.25)
    assert report.forecast_error_ratio == pytest.approx(0.25)
    lost = read_json(capsys, "jobs", "why", "1")["summary"]["steps_lost"]  # type: ignore[index]
    (first,) = [each for each in report.jobs if each.job_id == 1]
    assert first.steps_lost == lost == 10
    old, new = story.store.jobs.list_attempts(1)
    repeated_s = 10 / 40 * ((old.lost_s or 0.0) - (old.running_s or 0.0))
    started_s = (new.running_s or 0.0) - new.started_s
    assert first.lost_usd == pytest.approx(2.0 / 3600 * (repeated_s + started_s))


def test_the_files_hold_the_figures_and_foreign_text_is_inert(
    frozen: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = read_json(capsys, "report", "--month", "2026-03")
    report = read_report(frozen.context, read_month("2026-03", now_s=MID_S))
    assert told["usd"] == pytest.approx(report.usd) and told["preemptions"] == report.preemptions  # type: ignore[index]
    for name, text in (("r.html", write_html(report)), ("r.md", write_markdown(report))):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(("report", "--month", "2026-03", "-o", str(tmp_path / name)))
        assert (tmp_path / name).read_text() == text
        assert "\x1b" not in text and "<script" not in text.replace("\\<script", "")
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(write_html(report))
    assert "script" not in tags and tags.count("table") == 2


@pytest.mark.parametrize("month", ["2026-13", "March", "2026-1"])
def test_another_month_is_an_error(month: str) -> None:
    with pytest.raises(UsageError, match="YYYY-MM"):
        read_month(month, now_s=0.0)


def test_another_suffix_is_an_error_before_anything_is_written(frozen: Story, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(("report", "-o", str(tmp_path / "report.pdf")))
    assert list(tmp_path.glob("*.pdf")) == []
