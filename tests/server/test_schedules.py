"""Schedules through a server: whose they are, and whose limits each of their jobs counts towards when it is due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.verbs import schedules as verbs
from broker.app.verbs.launching import launch_jobs, schedule_job
from broker.errors import DeniedError, UsageError
from broker.jobs.scheduler import Scheduler
from broker.state.forecasts import ForecastRows
from broker.state.limits import Limit, LimitScope
from broker.state.people import Owned
from broker.types import DueOutcome, JobSchedule, Resources, ScheduleSpec, Task
from broker.types.forecasts import ForecastRecord
from tests.server.conftest import Hosted

TASK = Task(name="nightly", run="true", resources=(Resources(cloud="local"),), schedule=ScheduleSpec(cron="0 2 1 1 *"))


def accept(given: object) -> None:
    pass


def store_as(hosted: Hosted, user: str, name: str) -> JobSchedule:
    made = hosted.open(user).call(
        schedule_job, task=TASK, schedule=name, request_id=None, hedge=2, is_dryrun=False, show=accept, confirm=accept
    )
    assert made is not None
    return made


def step(hosted: Hosted, schedule: JobSchedule) -> None:
    """Step the scheduler as the daemon of the server does, after the due time."""
    context = Context(hosted.home)
    context.store.schedules.set_next(schedule, context.store.read_time_s() // 60 * 60)
    scheduler: Scheduler = context.scheduler
    scheduler.step()
    context.close()


@pytest.fixture(autouse=True)
def no_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.jobs.scheduling.find_due", find_due_once)


def find_due_once(spec: ScheduleSpec, next_s: float, now_s: float) -> object:
    """Take the stored due time as it is: the cron fields of these schedules match once a year."""
    from broker.task.due_times import DueNow

    later_s = now_s + 1e6
    return (
        DueNow(due_s=next_s, first_s=next_s, missed_count=0, last_missed_s=next_s, next_s=later_s)
        if (now_s >= next_s)
        else None
    )


def test_users_change_only_their_own_schedules(hosted: Hosted) -> None:
    made = store_as(hosted, "user", "mine")
    assert (made.user, made.next_s is not None) == ("user", True)
    for verb in (verbs.pause_schedule, verbs.resume_schedule, verbs.remove_schedule):
        with pytest.raises(DeniedError, match="schedule `mine` belongs to user"):
            hosted.open("other").call(verb, schedule="mine")
    with pytest.raises(DeniedError):
        store_as(hosted, "other", "mine")
    with pytest.raises(DeniedError):
        hosted.open("viewer").call(verbs.pause_schedule, schedule="mine")
    assert [each.schedule.name for each in hosted.open("viewer").call(verbs.list_schedules)] == ["mine"]
    assert hosted.open("user").call(verbs.pause_schedule, schedule="mine").is_paused
    hosted.open("admin").call(verbs.remove_schedule, schedule="mine")
    assert hosted.context.store.schedules.get("mine") is None


def test_job_of_a_due_time_belongs_to_the_owner_and_counts_towards_the_limits(hosted: Hosted) -> None:
    made = store_as(hosted, "user", "owned")
    store = hosted.context.store
    before = len(store.commitments.list())
    step(hosted, made)
    (due,) = store.schedules.list_due_times(made)
    assert due.outcome is DueOutcome.STARTED and due.job_id is not None
    assert store.owners.get(Owned.JOB, str(due.job_id)) == "user"
    commitment = store.commitments.list()[before]
    assert (commitment.user, commitment.names, commitment.is_pending) == ("user", (str(due.job_id),), False)
    store.jobs.request_cancel(due.job_id)
    hosted.open("user").call(verbs.remove_schedule, schedule="owned")


def test_forecasts_are_scored_at_each_submission_but_not_while_others_cannot_write(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twenty thousand ended jobs, it takes longer than a second."""
    depths: list[int] = []
    read = ForecastRows.list

    def note(self: ForecastRows) -> Mapping[int, ForecastRecord]:
        depths.append(self._database._depth)  # type: ignore[attr-defined]
        return read(self)

    made = store_as(hosted, "user", "scored")
    monkeypatch.setattr(ForecastRows, "list", note)
    step(hosted, made)
    assert depths == [0]
    (due,) = hosted.context.store.schedules.list_due_times(made)
    assert due.job_id is not None
    plain = replace(TASK, schedule=None)
    (job,) = hosted.open("user").call(
        launch_jobs, tasks=(plain,), name=None, request_id=None, hedge=2, is_dryrun=False, show=accept, confirm=accept,
        on_submitted=accept,
    )  # fmt: skip
    assert depths == [0, 0]
    for job_id in (due.job_id, job.id):
        hosted.context.store.jobs.request_cancel(job_id)
    hosted.open("user").call(verbs.remove_schedule, schedule="scored")


def test_limit_at_the_due_time_refuses_the_job_and_the_schedule_continues(hosted: Hosted) -> None:
    made = store_as(hosted, "user", "limited")
    store = hosted.context.store
    store.limits.put(Limit(scope=LimitScope.USER, name="user", usd_month=0.0, gpus=None))
    jobs_before = store.jobs.count()
    try:
        step(hosted, made)
    finally:
        store.limits.delete(LimitScope.USER, "user")
    (due,) = store.schedules.list_due_times(made)
    assert due.outcome is DueOutcome.REFUSED and "over the monthly budget of user user" in due.detail
    assert store.jobs.count() == jobs_before
    found = store.schedules.get("limited")
    assert found is not None and found.next_s is not None and not found.is_paused
    hosted.open("user").call(verbs.remove_schedule, schedule="limited")


def test_launch_of_a_task_with_a_schedule_is_refused_by_the_other_verbs(hosted: Hosted) -> None:
    with pytest.raises(UsageError, match="managed jobs only"):
        hosted.open("user").call(
            launch_jobs, tasks=(TASK,), name=None, request_id=None, hedge=2, is_dryrun=False, show=accept,
            confirm=accept, on_submitted=accept,
        )  # fmt: skip


def test_files_of_the_server_cannot_be_named(hosted: Hosted, tmp_path: Path) -> None:
    status, answer = hosted.ask(
        "/v1/schedule_job",
        {
            "task": {"run": "true", "workdir": "/etc", "schedule": {"cron": "0 2 * * *"}}, "schedule": "x",
            "request_id": None, "hedge": 2, "is_dryrun": False,
        },
        token=hosted.tokens["user"],
    )  # fmt: skip
    assert status == 422 and "was not uploaded" in answer["error"]["message"]
