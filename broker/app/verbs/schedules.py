"""Verbs on the schedules of managed jobs: list, show, pause, resume and remove. `schedule_job` launches one."""

from __future__ import annotations

from broker.app import schedules
from broker.app.container import Context
from broker.app.schedules import ScheduleView
from broker.types import DueTime, JobSchedule


def list_schedules(context: Context) -> tuple[ScheduleView, ...]:
    """List all schedules by name, each with its newest due time and job."""
    context.restart_daemon_if_needed()
    return tuple(schedules.list_schedules(context))


def list_due_times(context: Context, *, schedule: str, newest: int = schedules.NEWEST) -> tuple[DueTime, ...]:
    """List the outcomes of the `newest` due times of a schedule, oldest first. Raises UsageError."""
    context.restart_daemon_if_needed()
    return tuple(context.store.schedules.list_due_times(schedules.find_schedule(context, schedule), newest=newest))


def pause_schedule(context: Context, *, schedule: str) -> JobSchedule:
    """Start no jobs until the schedule is resumed."""
    return schedules.pause_schedule(context, schedule)


def resume_schedule(context: Context, *, schedule: str) -> JobSchedule:
    """Start jobs again from the next due time."""
    found = schedules.resume_schedule(context, schedule)
    context.ensure_daemon()
    return found


def remove_schedule(context: Context, *, schedule: str) -> JobSchedule:
    """Delete a schedule; the jobs that it has started continue."""
    return schedules.remove_schedule(context, schedule)
