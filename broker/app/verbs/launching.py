"""Verbs that start work: clusters with a task, runs on a cluster, managed jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from broker.app import forecasts, jobs, launching, schedules
from broker.app.buckets import TrackUpload
from broker.app.clusters import find_up
from broker.app.container import Context
from broker.app.launching import Callbacks, ClusterTarget, prepare
from broker.app.limits import LaunchSize
from broker.frozen import frozen
from broker.state.people import Owned
from broker.types import Autostop, Job, JobSchedule, Plan, Task

Show = Callable[[Sequence[Plan]], None]


@frozen
class StartedCluster:
    """A cluster that is up; `run_id` is None for a task with nothing to run, and after a dry run."""

    cluster: str
    run_id: int | None = None


def name_target(context: Context, *, task: Task) -> str:
    """Return the default name of the cluster for a launch of the task."""
    return launching.name_cluster(task, context.config.owner)


def launch(
    context: Context,
    *,
    task: Task,
    cluster: str | None,
    autostop: Autostop | None,
    hedge: int,
    retry_until_up: bool,
    is_dryrun: bool,
    show: Show,
    confirm: Show,
    on_stage: Callable[[str], None],
    track_upload: TrackUpload = launching.ignore_upload,
) -> StartedCluster:
    """Plan, confirm and start a cluster with a task on it. `confirm` raises to refuse the price."""
    target = ClusterTarget.of(context, task, name=cluster, autostop=autostop)

    def show_and_prepare(plans: Sequence[Plan]) -> None:
        if not is_dryrun:
            context.prepare(plans[0])
        show(plans)

    callbacks = Callbacks(show=show_and_prepare, confirm=confirm, track_upload=track_upload)
    demand = LaunchSize(kind=Owned.CLUSTER, names=(target.name,))
    ready = prepare(context, [task], target, callbacks=callbacks, is_dryrun=is_dryrun, demand=demand)
    if is_dryrun:
        return StartedCluster(cluster=target.name)
    on_stage(f"starting `{target.name}`")
    starting = launching.start_cluster(
        context, target, ready, hedge=hedge, retry_until_up=retry_until_up, on_stage=on_stage
    )
    return StartedCluster(cluster=target.name, run_id=asyncio.run(context.run_paid(starting)))


def describe_interrupted(context: Context, *, cluster: str) -> tuple[str, ...]:
    """Describe what is still running after an interrupted launch, its cost, and the command that terminates it."""
    return tuple(launching.describe_interrupted(context, cluster))


def exec_task(context: Context, *, cluster: str, task: Task) -> int:
    """Start a task's `run` on a cluster that is up; return the run's ID."""
    return asyncio.run(launching.exec_task(context, find_up(context, cluster), task))


def launch_jobs(
    context: Context,
    *,
    tasks: tuple[Task, ...],
    name: str | None,
    request_id: str | None,
    hedge: int,
    is_dryrun: bool,
    show: Show,
    confirm: Show,
    on_submitted: Callable[[tuple[Job, ...]], None],
    track_upload: TrackUpload = launching.ignore_upload,
) -> tuple[Job, ...]:
    """Plan, confirm and submit managed jobs. `on_submitted` is called before the daemon starts."""
    jobs.check_names(name, request_id)
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    ready = prepare(context, tasks, jobs.JobTarget(context=context), callbacks=callbacks, is_dryrun=is_dryrun)
    if is_dryrun:
        return ()
    forecasts.score_own_forecasts(context)
    found = forecasts.submit(context, ready.tasks, ready.plans, name=name, request_id=request_id, hedge=hedge)
    submitted = tuple(found)
    # Called before the daemon starts: the jobs are already recorded, so repeating the launch would submit them twice.
    on_submitted(submitted)
    context.ensure_daemon()
    return submitted


def schedule_job(
    context: Context,
    *,
    task: Task,
    schedule: str,
    request_id: str | None,
    hedge: int,
    is_dryrun: bool,
    show: Show,
    confirm: Show,
    track_upload: TrackUpload = launching.ignore_upload,
) -> JobSchedule | None:
    """Plan, confirm and store a schedule under a name, instead of starting a job now; None after a dry run."""
    callbacks = Callbacks(show=show, confirm=confirm, track_upload=track_upload)
    found = schedules.add_schedule(
        context, task, name=schedule, request_id=request_id, hedge=hedge, is_dryrun=is_dryrun, callbacks=callbacks
    )
    if found is not None:
        context.ensure_daemon()
    return found
