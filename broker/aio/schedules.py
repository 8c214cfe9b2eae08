"""Schedules of managed jobs for asyncio; `broker.aio.jobs` exports them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from broker.aio.running import Notes, call_server, is_remote, use_in_thread
from broker.app.planning import TaskLike, read_task
from broker.app.schedules import ScheduleView
from broker.app.verbs import schedules as verbs
from broker.app.verbs.launching import schedule_job
from broker.errors import UsageError
from broker.types import DueTime, JobSchedule, Plan


async def schedule(
    task: TaskLike,
    *,
    name: str | None = None,
    request_id: str | None = None,
    hedge: int = 2,
    home: Path | None = None,
    on_note: Notes | None = None,
) -> JobSchedule:
    """Store the `schedule` of a task, which a daemon or a server starts as a job at each due time.

    Each job starts billing without confirmation. `name` defaults to the task's. Calls with the same `request_id` store
    one schedule. Raises UsageError for a task without a schedule or a name, and for a name that is taken; otherwise the
    errors of `launch`.
    """
    found = read_task(task)
    wanted = name or found.name
    if wanted is None:
        raise UsageError("a schedule requires a name", hints=["pass `name`, or add `name:` to the task"])

    def accept(plans: Sequence[Plan]) -> None:
        pass

    if is_remote(home):
        made = await call_server(
            home, on_note, schedule_job, task=found, schedule=wanted, request_id=request_id, hedge=hedge,
            is_dryrun=False, show=accept, confirm=accept,
        )  # fmt: skip
    else:
        made = await use_in_thread(
            home,
            on_note,
            lambda context: schedule_job(
                context, task=found, schedule=wanted, request_id=request_id, hedge=hedge, is_dryrun=False,
                show=accept, confirm=accept,
            ),
        )  # fmt: skip
    assert made is not None, "only a dry run stores nothing"
    return made


async def schedules(*, home: Path | None = None, on_note: Notes | None = None) -> tuple[ScheduleView, ...]:
    """Return all schedules by name, each with its newest due time and job; restart a dead daemon."""
    if is_remote(home):
        return await call_server(home, on_note, verbs.list_schedules)
    return await use_in_thread(home, on_note, verbs.list_schedules)


async def due_times(schedule: str, *, home: Path | None = None, on_note: Notes | None = None) -> tuple[DueTime, ...]:
    """Return the newest due times of a schedule with their outcomes, oldest first. Raises UsageError."""
    if is_remote(home):
        return await call_server(home, on_note, verbs.list_due_times, schedule=schedule)
    return await use_in_thread(home, on_note, lambda context: verbs.list_due_times(context, schedule=schedule))


async def pause_schedule(schedule: str, *, home: Path | None = None, on_note: Notes | None = None) -> JobSchedule:
    """Start no jobs of a schedule until it is resumed. Raises UsageError."""
    if is_remote(home):
        return await call_server(home, on_note, verbs.pause_schedule, schedule=schedule)
    return await use_in_thread(home, on_note, lambda context: verbs.pause_schedule(context, schedule=schedule))


async def resume_schedule(schedule: str, *, home: Path | None = None, on_note: Notes | None = None) -> JobSchedule:
    """Start the jobs of a schedule again, from the next due time on. Raises UsageError."""
    if is_remote(home):
        return await call_server(home, on_note, verbs.resume_schedule, schedule=schedule)
    return await use_in_thread(home, on_note, lambda context: verbs.resume_schedule(context, schedule=schedule))


async def remove_schedule(schedule: str, *, home: Path | None = None, on_note: Notes | None = None) -> JobSchedule:
    """Delete a schedule; the jobs that it has started continue. Raises UsageError."""
    if is_remote(home):
        return await call_server(home, on_note, verbs.remove_schedule, schedule=schedule)
    return await use_in_thread(home, on_note, lambda context: verbs.remove_schedule(context, schedule=schedule))
