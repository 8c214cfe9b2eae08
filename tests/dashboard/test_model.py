"""Every number on a page equals that of `--json`."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from broker.cli.dashboard import list_lines
from broker.cli.main import main
from broker.dashboard import pages
from broker.dashboard.content import SAVED_S, OverviewPage
from broker.dashboard.model import SCANNED_MAX, find_starts, list_attention, list_places, read_job, read_overview
from broker.dashboard.progress import read_losses, to_x, to_y
from broker.formatting import format_usd
from broker.state.clusters import BillRows
from broker.state.limits import Limit, LimitScope
from broker.types import EventKind, Goal, JobStatus
from broker.types.outcomes import make_event
from tests.dashboard.conftest import HOSTILE, TASK, Story


def read_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    with pytest.raises(SystemExit, match=r"^0$"):
        main((*arguments, "--json"))
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def frozen(story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    """The story at one moment, so that two readers see the same cost."""
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: story.now_s)
    return story


def test_overview_equals_the_commands(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    overview = read_overview(frozen.context)
    jobs = {each["id"]: each for each in read_json(capsys, "jobs", "queue")}  # type: ignore[attr-defined]
    is_ended = {job_id: each["ended_s"] is not None for job_id, each in jobs.items()}
    assert [row.line.id for row in overview.jobs] == sorted(jobs, key=lambda job_id: (is_ended[job_id], -job_id))
    for row in overview.jobs:
        assert row.spent_usd == pytest.approx(jobs[row.line.id]["spent_usd"])
        assert row.line.status.value == jobs[row.line.id]["status"]
        assert row.line.step == (jobs[row.line.id]["progress"] or {}).get("step")
    assert overview.spent_usd == pytest.approx(read_json(capsys, "cost")["usd"])  # type: ignore[index]
    assert overview.usd_hour == 4.0  # two nodes of a job and two of a cluster
    (cluster,) = overview.clusters
    status = read_json(capsys, "status")
    assert overview.cluster_usd == {
        each["name"]: pytest.approx(each["spent_usd"])
        for each in status["clusters"]  # type: ignore[index]
        if each["name"] == cluster.name
    }


def test_savings_of_the_month_equal_the_report(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    overview = read_overview(frozen.context)
    told = read_json(capsys, "report")
    assert overview.month_usd == pytest.approx(told["usd"])  # type: ignore[index]
    assert overview.month_ondemand_usd == pytest.approx(told["ondemand_usd"])  # type: ignore[index]
    assert overview.month_saved_usd > 1.0  # spot nodes of 1 USD an hour that cost 3 on-demand
    assert f"{format_usd(overview.month_saved_usd)} USD" in pages.show_overview(overview)


def test_budgets_of_jobs_and_limits_of_users_are_shown(frozen: Story) -> None:
    assert all(row.budget_usd is None for row in read_overview(frozen.context).jobs)
    task = replace(TASK, goal=Goal(budget_usd=50.0))
    bounded = frozen.store.jobs.add("bounded", task).id
    frozen.store.limits.put(Limit(scope=LimitScope.USER, name=HOSTILE, usd_month=200.0, gpus=None))
    overview = read_overview(frozen.context)
    assert {row.line.id: row.budget_usd for row in overview.jobs}[bounded] == 50.0
    (use,) = overview.limits
    assert (use.limit.usd_month, use.used.usd) == (200.0, 0.0)
    shown = pages.show_overview(overview)
    assert "0.00 of 50.00" in shown and ">200.00</td>" in shown and "<script" not in shown


def test_top_prints_the_same_overview_as_json(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    data = read_json(capsys, "top")
    overview = read_overview(frozen.context)
    assert data["today_usd"] == pytest.approx(overview.today_usd)  # type: ignore[index]
    assert [each["id"] for each in data["jobs"]] == [row.line.id for row in overview.jobs]  # type: ignore[index]
    lines = list_lines(overview)
    assert all(len(line) <= 80 for line in lines)
    assert any(line.split()[:3] == ["1", "train", "RUNNING"] for line in lines)


def test_job_page_shows_what_why_prints(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    told = read_json(capsys, "jobs", "why", "1")
    job = frozen.store.jobs.get(1)
    assert job is not None
    page = read_job(frozen.context, job)
    summary = told["summary"]  # type: ignore[index]
    assert [row.lost_steps for row in page.attempts] == [10, 0]
    assert sum(row.lost_steps for row in page.attempts) == summary["steps_lost"]
    assert sum(row.usd for row in page.attempts) == pytest.approx(summary["paid_usd"])
    shown = pages.show_job(page, ["a line"]).show("t")
    for text in (f"{format_usd(summary['paid_usd'])} USD", f"{format_usd(summary['ondemand_usd'])} USD", "31 of 100"):
        assert text in shown


def test_attempts_on_the_same_nodes_share_their_cost(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    job_id = frozen.add_job("in place")
    frozen.add_attempt(job_id, 1, begin_s=frozen.now_s - 7200, end_s=None)
    (first,) = frozen.store.jobs.list_attempts(job_id)
    frozen.store.jobs.put_attempt(replace(first, ended_s=frozen.now_s - 5400, usd=1.0))
    frozen.store.jobs.put_attempt(replace(first, number=2, started_s=frozen.now_s - 5400))
    job = frozen.store.jobs.get(job_id)
    assert job is not None
    assert [row.usd for row in read_job(frozen.context, job).attempts] == pytest.approx([1.0, 3.0])
    told: Any = read_json(capsys, "jobs", "why", str(job_id))
    assert [each["usd"] for each in told["attempts"]] == pytest.approx([1.0, 3.0])
    assert told["summary"]["paid_usd"] == pytest.approx(4.0)
    assert told["summary"]["ondemand_usd"] == pytest.approx(12.0)  # 3 USD instead of 1


def test_a_damaged_job_does_not_hide_the_one_that_needs_it(frozen: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = frozen.add_job("prepare")
    job = frozen.store.jobs.add("after", TASK, needs=(needed,))
    assert any("depends on job" in reason for reason in read_job(frozen.context, job).reasons)
    frozen.store.write("UPDATE jobs SET task = '{' WHERE id = ?", (needed,))
    notes = list[str]()
    monkeypatch.setattr(frozen.context, "note", notes.append)
    assert f"Job {job.id} (after) is waiting" in read_job(frozen.context, job).reasons[0]
    assert f"row `{needed}` of `jobs`" in notes[0]


def test_waiting_and_failed_jobs_require_attention(frozen: Story) -> None:
    assert [row.job_id for row in read_overview(frozen.context).attention] == [2]
    frozen.add_event(1, make_event(EventKind.LATE, hours_left=1.0, slack_hours=-2.0))
    assert [row.job_id for row in read_overview(frozen.context).attention] == [1, 2]  # live jobs first
    frozen.add_event(1, make_event(EventKind.STARTED, attempt=2))
    assert [row.job_id for row in read_overview(frozen.context).attention] == [2]


def test_a_failed_service_requires_attention(frozen: Story, capsys: pytest.CaptureFixture[str]) -> None:
    frozen.add_service()
    assert read_overview(frozen.context).failed_services == {}
    service = frozen.store.services.list()[0]
    frozen.store.services.set_failure(service.name, f"no offer fits: {HOSTILE}")
    overview = read_overview(frozen.context)
    told: Any = read_json(capsys, "top")
    assert told["failed_services"] == overview.failed_services == {"chat": f"no offer fits: {HOSTILE}"}
    shown = pages.show_overview(overview)
    assert 'href="/services/chat"' in shown and "no offer fits: &lt;script" in shown
    lines = list_lines(overview)
    assert any(line.startswith("chat") and line.isprintable() and len(line) <= 80 for line in lines)


def test_today_counts_from_midnight_and_the_month_from_its_first_day(frozen: Story) -> None:
    midnight_s, month_s = find_starts(frozen.now_s)
    assert time.localtime(midnight_s)[3:6] == (0, 0, 0) and time.localtime(month_s)[2] == 1

    def spend_usd(begin_s: float) -> float:
        return frozen.store.bills.sum_spend(midnight_s=begin_s, month_s=begin_s, now_s=frozen.now_s).month_usd

    # The story itself begins before midnight where the test runs shortly after it.
    today, with_evening = spend_usd(midnight_s), spend_usd(midnight_s - 7200)
    hours = (frozen.now_s - midnight_s) / 2 / 3600
    frozen.add_cluster("old", begin_s=midnight_s - 7200, end_s=midnight_s + 3600 * hours)
    frozen.add_cluster("older", begin_s=midnight_s - 7200, end_s=midnight_s - 3600)
    assert spend_usd(midnight_s) - today == pytest.approx(2 * hours)
    assert spend_usd(midnight_s - 7200) - with_evening == pytest.approx(2 * (2.0 + hours) + 2 * 1.0)


def test_preemptions_of_a_place_are_counted(frozen: Story) -> None:
    (place,) = list_places(frozen.store)
    assert (place.stays, place.preemptions) == (2, 1)
    assert place.hazard_per_hour == pytest.approx(1 / place.hours)


def test_ten_thousand_jobs_make_a_small_page(story: Story) -> None:
    with story.store.transaction():
        for number in range(10_000):
            story.store.write(
                "INSERT INTO jobs (name, status, task, secret_names, submitted_s, is_terminal) "
                "VALUES (?, ?, '{}', '[]', ?, ?)",
                (f"job {number}", ("RUNNING" if number % 3 else "SUCCEEDED"), story.now_s, number % 3 == 0),
            )
    overview = read_overview(story.context)
    assert overview.job_count == 10_003 and len(overview.jobs) == 50
    assert overview.counts[JobStatus.RUNNING.value] == 6_667
    assert len(pages.lay_out("Overview", pages.show_overview(overview))) < 100_000
    assert SCANNED_MAX < 10_003


def test_savings_between_two_sums_follow_the_spending(frozen: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page sums what machines would have cost on-demand every few seconds only; its figures stay consistent."""
    page, sums = OverviewPage(), 0
    read = BillRows.ondemand_since_usd

    def count(bills: BillRows, since_s: float, *, now_s: float) -> float:
        nonlocal sums
        sums += 1
        return read(bills, since_s, now_s=now_s)

    monkeypatch.setattr(BillRows, "ondemand_since_usd", count)
    shown = [page.make(frozen.context)]
    began_s = frozen.now_s
    for passed_s in (SAVED_S / 2, SAVED_S):
        frozen.now_s = began_s + passed_s
        shown.append(page.make(frozen.context))
    assert sums == 2
    for each in shown:
        figures = dict(
            re.findall(r"<dt>(This month|This month on-demand|Saved this month)</dt><dd>([0-9.,]+) USD</dd>", each)
        )
        month, ondemand, saved = (
            float(figures[name].replace(",", "")) for name in ("This month", "This month on-demand", "Saved this month")
        )
        assert ondemand == pytest.approx(month + saved, abs=0.011)
    assert shown[2] == pages.show_overview(read_overview(frozen.context))


def test_month_begins_with_its_own_first_day() -> None:
    now_s = time.mktime((2026, 7, 15, 12, 30, 5, 0, 0, -1))
    midnight_s, month_s = find_starts(now_s)
    assert time.localtime(midnight_s)[:6] == (2026, 7, 15, 0, 0, 0)
    assert time.localtime(month_s)[:6] == (2026, 7, 1, 0, 0, 0)


def test_live_jobs_are_those_that_have_not_ended(frozen: Story) -> None:
    overview = replace(
        read_overview(frozen.context), counts={"RUNNING": 2, "PENDING": 1, "SUCCEEDED": 5, "FAILED": 3},
        month_usd=10.0, month_ondemand_usd=25.0,
    )  # fmt: skip
    assert (overview.job_count, overview.live_count, overview.running_count) == (11, 3, 2)
    assert overview.month_saved_usd == 15.0


@pytest.mark.parametrize("status", [JobStatus.FAILED, JobStatus.FAILED_SETUP])
def test_job_that_failed_requires_attention_for_a_day(frozen: Story, status: JobStatus) -> None:
    line = next(each for each in frozen.store.jobs.list_lines() if each.ended_s is not None)
    failed = replace(line, status=status, ended_s=1_000_000.0)

    def is_listed(hours: float) -> bool:
        return bool([*list_attention(frozen.store, [failed], 1_000_000.0 + hours * 3600.0)])

    assert is_listed(0.5) and is_listed(23.9) and not is_listed(24.1)


def test_places_are_listed_most_preempted_first() -> None:
    stays = [
        SimpleNamespace(place=("aws", region, None, "m"), stays=4, hours=hours, preemptions=preemptions)
        for region, hours, preemptions in (("calm", 90.0, 0), ("worst", 10.0, 5), ("short", 1.0, 0))
    ]
    rows = list_places(SimpleNamespace(history=SimpleNamespace(sum_stays=lambda: stays)))  # type: ignore[arg-type]
    assert [row.region for row in rows] == ["worst", "calm", "short"]
    assert rows[0].hazard_per_hour == 0.5


def test_charts_grow_upwards_and_to_the_right() -> None:
    assert to_y(1.0) < to_y(0.5) < to_y(0.0) and to_x(0.0) < to_x(1.0)
    assert read_losses(["step 1  loss 2.0", "step 2  loss 1.5", "step 2  loss 1.5"]) == [
        [(1, 2.0), (2, 1.5)], [(2, 1.5)],
    ]  # fmt: skip
