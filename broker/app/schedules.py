"""Schedules of managed jobs: store and show them, and launch a job when it is due."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from broker.app import forecasts, jobs
from broker.app.admin_policy import govern
from broker.app.container import Context
from broker.app.launching import Callbacks, prepare
from broker.app.limits import LaunchSize, admit
from broker.app.planning import check_plans, check_programs, plan_launch
from broker.errors import UsageError
from broker.frozen import frozen
from broker.state.people import Owned
from broker.task.due_times import find_next
from broker.types import DueTime, Job, JobSchedule, Payee, Plan, Task

log = logging.getLogger(__name__)

NEWEST = 50  # number of due times shown


@frozen
class ScheduleView:
    """A schedule, its newest due time, and the newest job that it has started."""

    schedule: JobSchedule
    last_due: DueTime | None = None
    last_job: Job | None = None


class RunLauncher:
    """Launch the job of a due time as its owner would: with a new plan, and within the current limits."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def plan(self, schedule: JobSchedule, task: Task) -> Plan:
        """Plan the task and check what a launch checks without the network. Raises BrokerError to refuse the run."""
        self._context.check_notify([task])
        self._context.market.renew()  # the daemon may have read the prices when the schedule was last due
        forecasts.score_own_forecasts(self._context)
        payee = Payee(user=schedule.user, project=schedule.project)
        task = govern(self._context.config.home, task, payee, note=log.info)  # the policy may have changed since
        plan = plan_launch(self._context, task)
        check_plans([plan], home=self._context.market.home, is_launch=True, note=lambda text: None)
        check_programs(self._context, [plan])
        return plan

    def submit(self, schedule: JobSchedule, task: Task, plan: Plan, *, request_id: str) -> Job:
        """Submit the job, within the caller's transaction. Raises LimitError before anything is written."""
        store = self._context.store
        commitment = None
        if schedule.user:
            commitment = admit(store, [plan.choice], LaunchSize(), user=schedule.user, project=schedule.project)
        (job,) = forecasts.submit(
            self._context, [plan.task], [plan], name=schedule.name, request_id=request_id, hedge=schedule.hedge
        )
        if commitment is not None:
            store.owners.put(Owned.JOB, str(job.id), schedule.user)
            store.commitments.bind(commitment, [str(job.id)])
            store.commitments.settle(commitment)
        return job


def add_schedule(
    context: Context,
    task: Task,
    *,
    name: str,
    request_id: str | None,
    hedge: int,
    is_dryrun: bool = False,
    callbacks: Callbacks | None = None,
) -> JobSchedule | None:
    """Check a task as a launch does, and store its schedule; None after a dry run.

    Raises UsageError for a task without `schedule`, for a schedule without remaining due times, and for a name that is
    taken; otherwise as `prepare`.
    """
    jobs.check_names(name, request_id)
    spec = task.schedule
    if spec is None:
        raise UsageError("the task has no `schedule:`", hints=['add one, for example `schedule: "0 2 * * *"`'])
    if (known := context.store.schedules.find_request(request_id)) is not None:
        context.check_owner(Owned.SCHEDULE, known.name)
        return known
    next_s = find_next(spec, context.store.read_time_s())
    if next_s is None:
        raise UsageError(f"`schedule` has no remaining due time until {spec.until}", hints=["choose a later `until`"])
    if not is_dryrun and context.store.schedules.get(name) is not None:
        raise UsageError(
            f"schedule `{name}` already exists",
            hints=[f"remove it first: `broker jobs schedules remove {name}`", "or choose another name: `--name`"],
        )
    target = jobs.JobTarget(context=context)
    ready = prepare(context, [replace(task, schedule=None)], target, callbacks=callbacks, is_dryrun=is_dryrun)
    if is_dryrun:
        return None
    added = context.store.schedules.add(
        name, ready.tasks[0], spec, next_s=next_s, request_id=request_id, hedge=hedge, payee=context.payee
    )
    context.check_owner(Owned.SCHEDULE, added.name)  # another user's, with this ID, added while the price was read
    return added


def find_schedule(context: Context, name: str) -> JobSchedule:
    """Find a schedule by its name. Raises UsageError."""
    found = context.store.schedules.get(name)
    if found is None:
        from broker.task.reading import suggest

        near = suggest(name, [each.name for each in context.store.schedules.list(on_damage=context.warn)])
        raise UsageError(f"unknown schedule `{name}`", hints=[near or "list them with `broker jobs schedules`"])
    return found


def view_schedule(context: Context, schedule: JobSchedule) -> ScheduleView:
    """Return a schedule with its newest due time and job."""
    due_times = context.store.schedules.list_due_times(schedule, newest=NEWEST)
    job_ids = [each.job_id for each in due_times if each.job_id is not None]
    return ScheduleView(
        schedule=schedule,
        last_due=due_times[-1] if due_times else None,
        last_job=context.store.jobs.get(job_ids[-1]) if job_ids else None,
    )


def list_schedules(context: Context) -> Sequence[ScheduleView]:
    """List all schedules by name."""
    return [view_schedule(context, each) for each in context.store.schedules.list(on_damage=context.warn)]


def pause_schedule(context: Context, name: str) -> JobSchedule:
    """Stop starting jobs; due times before `resume_schedule` are skipped. Raises UsageError."""
    context.store.schedules.pause(find_schedule(context, name))
    return find_schedule(context, name)


def resume_schedule(context: Context, name: str) -> JobSchedule:
    """Start jobs again from the next due time; a schedule that is not paused is unchanged. Raises UsageError."""
    with context.store.transaction():
        schedule = find_schedule(context, name)
        if schedule.is_paused:
            next_s = find_next(schedule.spec, context.store.read_time_s())
            context.store.schedules.resume(schedule, next_s)
    return find_schedule(context, name)


def remove_schedule(context: Context, name: str) -> JobSchedule:
    """Delete a schedule; the jobs that it has started continue. Raises UsageError."""
    schedule = find_schedule(context, name)
    context.store.schedules.remove(schedule)
    return schedule
