"""`broker jobs schedules`: list, pause, resume and remove schedules; and how `broker jobs launch` stores one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from broker.app.session import Session
from broker.cli import options
from broker.cli.completion import complete_schedules
from broker.cli.context import make_session
from broker.cli.render import print_json, print_line, print_note, print_table
from broker.errors import UsageError
from broker.formatting import format_count, to_plain
from broker.task.due_times import find_zone
from broker.types import DueOutcome, DueTime, JobSchedule, Plan, ScheduleSpec, Task

if TYPE_CHECKING:
    from broker.app.schedules import ScheduleView

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
ScheduleName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the schedule.", show_default=False, autocompletion=complete_schedules),
]
NEWEST = 50


@app.callback()
def schedules(
    context: typer.Context,
    as_json: options.AsJson = False,
    output: options.Output = options.Format.TABLE,
) -> None:
    """List, pause, resume and remove schedules of managed jobs.

    Without a command, list all schedules.
    """
    if context.invoked_subcommand is not None:
        return
    from broker.app.verbs.schedules import list_schedules

    found = make_session().call(list_schedules)
    if as_json or output is options.Format.JSON:
        print_json([describe_view(each) for each in found])
        return
    if not found:
        print_line("No schedules; store one with `broker jobs launch TASK.yaml` and `schedule:` in the task")
        return
    rows = [
        [
            each.schedule.name, each.schedule.spec.cron, _show_next(each.schedule),
            "-" if each.last_job is None else f"{each.last_job.id} {each.last_job.status.value}",
            "-" if each.last_due is None else _show_due(each.last_due, each.schedule.spec),
        ]
        for each in found
    ]  # fmt: skip
    print_table(["NAME", "CRON", "NEXT DUE", "LAST JOB", "LAST DUE TIME"], rows, firm=("CRON", "NEXT DUE"))


@app.command()
def history(
    name: ScheduleName,
    newest: Annotated[int, typer.Option("--newest", metavar="N", min=1, help="Number of due times.")] = NEWEST,
    as_json: options.AsJson = False,
) -> None:
    """List the outcome of each due time, oldest first."""
    from broker.app.verbs.schedules import list_due_times, list_schedules

    session = make_session()
    found = session.call(list_due_times, schedule=name, newest=newest)
    if as_json:
        print_json([to_plain(each) for each in found])
        return
    if not found:
        print_line("No due time has passed yet")
        return
    spec = next(each.schedule.spec for each in session.call(list_schedules) if each.schedule.name == name)
    rows = [
        [
            show_time(each.due_s, spec), each.outcome.value, "-" if each.job_id is None else str(each.job_id),
            _explain(each, spec),
        ]
        for each in found
    ]  # fmt: skip
    print_table(["DUE", "OUTCOME", "JOB", "REASON"], rows, firm=("DUE", "OUTCOME"))


@app.command()
def pause(name: ScheduleName, as_json: options.AsJson = False) -> None:
    """Pause a schedule: it starts no jobs until it is resumed.

    Due times that pass in the meantime are skipped. Running jobs continue.
    """
    from broker.app.verbs.schedules import pause_schedule

    _print_schedule(make_session().call(pause_schedule, schedule=name), "Paused", as_json=as_json)


@app.command()
def resume(name: ScheduleName, as_json: options.AsJson = False) -> None:
    """Resume a schedule, starting with its next due time."""
    from broker.app.verbs.schedules import resume_schedule

    _print_schedule(make_session().call(resume_schedule, schedule=name), "Resumed", as_json=as_json)


@app.command()
def remove(name: ScheduleName, as_json: options.AsJson = False) -> None:
    """Delete a schedule; the jobs that it has started continue."""
    from broker.app.verbs.schedules import remove_schedule

    _print_schedule(make_session().call(remove_schedule, schedule=name), "Removed", as_json=as_json)


def _print_schedule(schedule: JobSchedule, verb: str, *, as_json: bool) -> None:
    if as_json:
        print_json(to_plain(schedule))
        return
    is_live = verb == "Resumed" and schedule.next_s is not None
    print_line(f"{verb} schedule {schedule.name}" + (f", next due {_show_next(schedule)}" if is_live else ""))


def store_schedule(
    session: Session,
    task: Task,
    *,
    name: str | None,
    request_id: str | None,
    hedge: int,
    is_dryrun: bool,
    show: Callable[[Sequence[Plan]], None],
    confirm: Callable[[Sequence[Plan]], None],
    as_json: bool,
) -> None:
    """Store a task's schedule, and print when its first job is due. Raises UsageError for a task without a name."""
    from broker.app.verbs.launching import schedule_job
    from broker.cli.launch import show_upload
    from broker.task.due_times import find_next

    wanted = name or task.name
    assert task.schedule is not None
    if wanted is None:
        raise UsageError("a schedule requires a name", hints=["add `name:` to the task, or pass `--name NAME`"])
    found = session.call(
        schedule_job, task=task, schedule=wanted, request_id=request_id, hedge=hedge, is_dryrun=is_dryrun,
        show=show, confirm=confirm, track_upload=show_upload,
    )  # fmt: skip
    if found is None:
        next_s = find_next(task.schedule, session.clock.now_s())
        if not as_json and next_s is not None:
            print_line(f"Schedule {wanted} would be due next at {show_time(next_s, task.schedule)}")
    elif as_json:
        print_json(to_plain(found))
    else:
        print_line(f"Stored schedule {found.name}, next due {_show_next(found)}")
        print_note(f"see `broker jobs schedules`, and end it with `broker jobs schedules remove {found.name}`")


def describe_view(view: ScheduleView) -> dict[str, object]:
    """Return a schedule with its newest due time and job as JSON-ready data, without the task."""
    job = view.last_job
    shown = None if job is None else {"id": job.id, "status": job.status.value, "ended_s": job.ended_s}
    last_due = None if view.last_due is None else to_plain(view.last_due)
    return {**to_plain(view.schedule), "last_due": last_due, "last_job": shown}


def _show_next(schedule: JobSchedule) -> str:
    if schedule.is_paused:
        return "paused"
    return "ended" if schedule.next_s is None else show_time(schedule.next_s, schedule.spec)


def show_time(time_s: float, spec: ScheduleSpec) -> str:
    """Format a point in time in the time zone of a schedule, or in UTC if this machine does not know the zone."""
    from datetime import UTC

    zone = UTC if spec.timezone == "UTC" else find_zone(spec.timezone) or UTC
    return datetime.fromtimestamp(time_s, zone).strftime("%Y-%m-%d %H:%M %Z")


def _show_due(due: DueTime, spec: ScheduleSpec) -> str:
    reason = _explain(due, spec)
    return f"{due.outcome.value}, {show_time(due.due_s, spec)}" + (f": {reason}" if reason != "-" else "")


def _explain(due: DueTime, spec: ScheduleSpec) -> str:
    if due.outcome is DueOutcome.MISSED:
        last = "" if due.last_s in (None, due.due_s) else f" up to {show_time(due.last_s or 0.0, spec)}"
        return f"{format_count(due.count, 'due time')}{last}: {due.detail}"
    return due.detail or "-"
