"""The chance of meeting the deadline over time: on the job page, and the same in `jobs why --json`."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest

from broker.app.deadline_chances import POINTS_MAX, ChancePoint, Moment, list_chances
from broker.app.forecasts import forecast_job
from broker.app.jobs import explain
from broker.dashboard import pages
from broker.dashboard.chances import KEPT_S, ExpectationCache, JobExpectation, show_chances
from broker.dashboard.model import read_job
from broker.optimizer.explain import show_chance
from broker.task.loader import load_tasks_text
from broker.types import JobStatus, Outcome, OutcomeKind, Progress
from tests.dashboard.conftest import Story, make_decision
from tests.dashboard.test_model import read_json

LATE = """
name: late
resources: {infra: local}
goal: {work: 10h, deadline: 14h}
run: "true"
"""


@pytest.fixture
def frozen(story: Story, monkeypatch: pytest.MonkeyPatch) -> Story:
    monkeypatch.setattr("broker.clock.SystemClock.now_s", lambda clock: story.now_s)
    return story


def add_late(story: Story) -> int:
    """Add a job of 10 hours, submitted 7 hours ago, that has saved 40 % and lost an attempt an hour ago."""
    (task,) = load_tasks_text(LATE, "task.yaml")
    job_id = story.store.jobs.add("late", task).id
    submitted_s = story.now_s - 7 * 3600
    story.store.write("UPDATE jobs SET submitted_s = ? WHERE id = ?", (submitted_s, job_id))
    story.add_attempt(job_id, 1, begin_s=submitted_s + 600, end_s=story.now_s - 3600)
    story.store.jobs.set_progress(job_id, Progress(step=50, total=100, checkpoint_step=40))
    story.add_attempt(job_id, 2, begin_s=story.now_s - 1800, end_s=None)
    story.store.jobs.set_progress(job_id, Progress(step=45, total=100, checkpoint_step=40))
    story.store.jobs.set_status(job_id, JobStatus.RUNNING)
    return job_id


def read_points(story: Story, job_id: int) -> tuple[ChancePoint, ...]:
    job = story.store.jobs.get(job_id)
    assert job is not None
    return list_chances(story.context, explain(story.context, job))


def test_each_point_has_what_was_left_then(frozen: Story) -> None:
    points = read_points(frozen, add_late(frozen))
    assert [each.moment for each in points] == [
        Moment.SUBMITTED, Moment.STARTED, Moment.LOST, Moment.STARTED, Moment.NOW,
    ]  # fmt: skip
    assert [each.work_left_hours for each in points] == pytest.approx([10, 10, 6, 6, 6])
    assert [each.time_left_hours for each in points] == pytest.approx([14, 14 - 1 / 6, 8, 7.5, 7])
    assert all(0 <= each.chance <= 1 for each in points)


def test_a_job_that_became_late_had_its_chance_before(frozen: Story) -> None:
    job_id = add_late(frozen)
    first = read_points(frozen, job_id)[0]
    frozen.store.write("UPDATE jobs SET submitted_s = ? WHERE id = ?", (frozen.now_s - 10 * 3600, job_id))
    points = read_points(frozen, job_id)
    assert points[0].chance == first.chance > 0.5
    assert points[-1].time_left_hours == pytest.approx(4) and points[-1].chance < 0.05


def test_a_job_that_runs_on_demand_is_in_time_without_another_start(frozen: Story) -> None:
    """Six hours are left, machines work, and a start takes five minutes: three minutes to spare are enough."""
    job_id = add_late(frozen)
    submitted_s = frozen.now_s - 8 * 3600 + 180
    frozen.store.write("UPDATE jobs SET submitted_s = ? WHERE id = ?", (submitted_s, job_id))
    job = frozen.store.jobs.get(job_id)
    assert job is not None
    newest = job.attempts[-1]
    placement = replace(newest.placement, is_spot=False)
    for resumed_s, chance, hours_left in ((None, 1.0, 6.0), (newest.started_s + 60, 1.0, 6.0)):
        frozen.store.jobs.put_attempt(replace(newest, placement=placement, resumed_s=resumed_s))
        found = frozen.store.jobs.get(job_id)
        assert found is not None
        told = forecast_job(frozen.context, found, paid_usd=2.0)
        assert told is not None
        assert told.deadline_chance == chance == read_points(frozen, job_id)[-1].chance
        assert told.hours_left.p50 == pytest.approx(hours_left)
    lost = replace(newest, placement=placement, lost_s=frozen.now_s - 1, outcome=Outcome(kind=OutcomeKind.NODE_LOST))
    frozen.store.jobs.put_attempt(lost)
    assert read_points(frozen, job_id)[-1].chance < 0.05, "it must start again"


def test_a_decision_counts_with_the_work_that_it_knew(frozen: Story) -> None:
    job_id = add_late(frozen)
    frozen.add_event(job_id, make_decision("stay", work_left_hours=7.5, expected_usd={}))
    (decided,) = [each for each in read_points(frozen, job_id) if each.moment is Moment.DECIDED]
    assert decided.work_left_hours == pytest.approx(7.5)


def test_the_last_point_is_the_forecast_and_the_page_shows_what_json_prints(
    frozen: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = add_late(frozen)
    told = read_json(capsys, "jobs", "why", str(job_id))
    points = read_points(frozen, job_id)
    assert [each["chance"] for each in told["deadline_chances"]] == [each.chance for each in points]  # type: ignore[index]
    assert told["deadline_chances"][-1]["chance"] == told["forecast"]["deadline_chance"]  # type: ignore[index]
    job = frozen.store.jobs.get(job_id)
    assert job is not None
    shown = pages.show_job(replace(read_job(frozen.context, job), chances=points), []).show("t")
    assert "staying on spot to the end</span>" in shown  # the colours are explained
    assert "Chance of the deadline over time" in shown and shown.count("<tr>") >= len(points)
    for each in points:
        assert f'<td class="number">{escape(show_chance(each.chance))}</td>' in shown


def test_jobs_without_a_deadline_and_silent_programs_have_no_curve(frozen: Story) -> None:
    assert read_points(frozen, 1) == ()
    silent = frozen.add_planned()  # its program reports no steps
    assert [each.moment for each in read_points(frozen, silent)] == [Moment.SUBMITTED]
    assert show_chances(()) == ""


def test_a_long_history_keeps_its_first_and_newest_points(frozen: Story) -> None:
    job_id = add_late(frozen)
    for _ in range(POINTS_MAX + 20):
        frozen.add_event(job_id, make_decision("stay", work_left_hours=6.0, expected_usd={}))
    points = read_points(frozen, job_id)
    assert len(points) == POINTS_MAX
    assert points[0].moment is Moment.SUBMITTED and points[-1].moment is Moment.NOW


def test_a_live_job_is_read_again_after_a_minute_and_an_ended_one_is_not() -> None:
    cache = ExpectationCache()
    cache.put(1, JobExpectation(), now_s=0.0, is_ended=False)
    assert cache.get(1, now_s=KEPT_S - 1, is_ended=False) == JobExpectation()
    assert cache.get(1, now_s=KEPT_S, is_ended=False) is None
    assert cache.get(1, now_s=1.0, is_ended=True) is None  # it has ended since
    cache.put(1, JobExpectation(), now_s=0.0, is_ended=True)
    assert cache.get(1, now_s=9 * KEPT_S, is_ended=True) == JobExpectation()
