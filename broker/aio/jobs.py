"""Managed jobs for asyncio: the functions of `broker.jobs` as coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from broker.aio.running import Notes, call_server, is_remote, list_remote_lines, open_context, use_in_thread
from broker.aio.schedules import due_times, pause_schedule, remove_schedule, resume_schedule, schedule, schedules
from broker.app import jobs
from broker.app.container import Context
from broker.app.jobs import Explanation, JobTarget
from broker.app.launching import prepare
from broker.app.planning import TaskLike, read_task, read_tasks
from broker.app.verbs import jobs as verbs
from broker.app.verbs.launching import launch_jobs
from broker.errors import RunFailedError, UsageError
from broker.types import Job, JobStatus, Plan, Secret, Task

__all__ = [
    "cancel",
    "due_times",
    "launch",
    "launch_pipeline",
    "logs",
    "pause_schedule",
    "queue",
    "remove_schedule",
    "resume_schedule",
    "retry",
    "retry_group",
    "schedule",
    "schedules",
    "wait",
    "why",
]


async def launch(
    task: TaskLike,
    *,
    name: str | None = None,
    request_id: str | None = None,
    hedge: int = 2,
    home: Path | None = None,
    on_note: Notes | None = None,
) -> Job:
    """Submit a task as a managed job, which recovers from preemptions, and return at once; a daemon runs it.

    This starts billing without confirmation: see `broker.plan` for the price, and set `goal: {budget: 100}` in the
    task for a limit. Calls with the same `request_id` create one job. Raises TaskError, UsageError for a pipeline or
    a task without `run`, NoOfferError, and CloudError if its nodes would have no access to its buckets.
    """
    (job,) = await _submit([read_task(task)], name, request_id, hedge, home, on_note)
    return job


async def launch_pipeline(
    task: TaskLike,
    *,
    name: str | None = None,
    request_id: str | None = None,
    hedge: int = 2,
    home: Path | None = None,
    on_note: Notes | None = None,
) -> tuple[Job, ...]:
    """Submit all tasks of a file, each as a job that waits for the jobs it needs; otherwise the same as `launch`."""
    return await _submit(read_tasks(task), name, request_id, hedge, home, on_note)


async def _submit(
    tasks: Sequence[Task],
    name: str | None,
    request_id: str | None,
    hedge: int,
    home: Path | None,
    on_note: Notes | None,
) -> tuple[Job, ...]:
    def submit(context: Context) -> tuple[Job, ...]:
        from broker.app.forecasts import submit as submit_forecast

        jobs.check_names(name, request_id)
        ready = prepare(context, tasks, JobTarget(context=context))
        found = submit_forecast(context, ready.tasks, ready.plans, name=name, request_id=request_id, hedge=hedge)
        context.ensure_daemon()
        return tuple(found)

    if is_remote(home):
        return await call_server(
            home, on_note, launch_jobs, tasks=tuple(tasks), name=name, request_id=request_id, hedge=hedge,
            is_dryrun=False, show=_accept, confirm=_accept, on_submitted=_ignore,
        )  # fmt: skip
    return await use_in_thread(home, on_note, submit)


def _accept(plans: Sequence[Plan]) -> None:
    pass


def _ignore(submitted: tuple[Job, ...]) -> None:
    pass


async def wait(
    job: int | str,
    *,
    status: JobStatus = JobStatus.SUCCEEDED,
    timeout_s: float | None = None,
    home: Path | None = None,
) -> Job:
    """Wait until a job, by id or name, reaches a status; return it.

    Raises JobEndedError if it ends in another status, WaitTimeoutError after `timeout_s` seconds.
    """
    if timeout_s is not None and timeout_s <= 0:
        raise UsageError(f"`timeout_s` must be positive, not {timeout_s:g}")
    if is_remote(home):
        known = (await call_server(home, None, verbs.show_job, job=str(job))).job.id  # a name may get a newer job
        view = await call_server(
            home, None, verbs.wait_for_job, job=str(known), status=status, timeout_s=timeout_s or 0.0
        )
        if view.job.status is not status:
            raise jobs.explain_ended(view.job)
        return view.job
    with open_context(home) as context:
        found = await jobs.wait_for(context, jobs.find_job(context, job).id, status, timeout_s=timeout_s or 0.0)
        if found.status is not status:
            raise jobs.explain_ended(found)
        return found


async def queue(*, home: Path | None = None, on_note: Notes | None = None) -> tuple[Job, ...]:
    """Return all managed jobs, oldest first; restart a dead daemon."""

    def list_jobs(context: Context) -> tuple[Job, ...]:
        found = context.store.jobs.list(on_damage=context.warn)
        context.restart_daemon_if_needed()
        return tuple(found)

    if is_remote(home):
        return tuple(view.job for view in await call_server(home, on_note, verbs.list_jobs))
    return await use_in_thread(home, on_note, list_jobs)


async def cancel(*wanted: int | str, home: Path | None = None, on_note: Notes | None = None) -> tuple[Job, ...]:
    """Cancel jobs, by id, name or pipeline, and have their clusters terminated; return those that were live.

    Raises UsageError if one is unknown, before any is cancelled.
    """

    def end(context: Context) -> tuple[Job, ...]:
        found = jobs.find_jobs(context, wanted)
        live = tuple(job for job in found if context.store.jobs.request_cancel(job.id))
        if live:
            context.ensure_daemon()
        return live

    if is_remote(home):
        done = await call_server(home, on_note, verbs.cancel_jobs, names=tuple(map(str, wanted)))
        if done.missing:
            raise done.missing[0]
        ids = {each.job_id for each in done.jobs if each.is_live}
        return tuple(view.job for view in await call_server(home, on_note, verbs.list_jobs) if view.job.id in ids)
    return await use_in_thread(home, on_note, end)


async def retry(
    job: int | str,
    *,
    secrets: dict[str, str] | None = None,
    request_id: str | None = None,
    home: Path | None = None,
    on_note: Notes | None = None,
) -> Job:
    """Submit an ended job again, resuming from its checkpoints. Pass its `secrets`, which were erased when it ended."""

    def submit(context: Context) -> Job:
        return jobs.retry(context, jobs.find_job(context, job), secrets=secrets or {}, request_id=request_id)

    if is_remote(home):
        given = {key: Secret(value=value) for key, value in (secrets or {}).items()}
        return await call_server(home, on_note, verbs.retry_job, job=str(job), secrets=given, request_id=request_id)
    return await use_in_thread(home, on_note, submit)


async def retry_group(
    group: str,
    *,
    secrets: dict[str, str] | None = None,
    request_id: str | None = None,
    home: Path | None = None,
    on_note: Notes | None = None,
) -> tuple[Job, ...]:
    """Submit all tasks of an ended job group again, as a new group: they start together, from their checkpoints.

    `group` is its name, or that of its header for the newest one. Raises UsageError if a task has not ended, or if the
    group has succeeded.
    """

    def submit(context: Context) -> tuple[Job, ...]:
        return jobs.retry_group(context, group, secrets=secrets or {}, request_id=request_id)

    if is_remote(home):
        given = {key: Secret(value=value) for key, value in (secrets or {}).items()}
        return await call_server(home, on_note, verbs.retry_group, job=group, secrets=given, request_id=request_id)
    return await use_in_thread(home, on_note, submit)


async def logs(job: int | str, *, follow: bool = True, home: Path | None = None) -> AsyncIterator[str]:
    """Yield the output of a job across recoveries, line by line; by default until it ends.

    Raises RunFailedError after the last line of a job that did not succeed.
    """
    if is_remote(home):
        known = (await call_server(home, None, verbs.show_job, job=str(job))).job.id
        async for line in list_remote_lines(home, verbs.follow_log, job=str(known), is_following=follow):
            yield line
        ended = (await call_server(home, None, verbs.show_job, job=str(known))).job
        if follow and ended.status is not JobStatus.SUCCEEDED:
            raise RunFailedError(f"job {known} ended with status {ended.status.value}", returncode=1)
        return
    with open_context(home) as context:
        job_id = jobs.find_job(context, job).id
        if not follow:
            for line in (line for chunk in jobs.read_chunks(context, job_id) for line in chunk.lines):
                yield line
            return
        async for line in jobs.follow_job(context, job_id):
            yield line
        found = jobs.find_job(context, job_id)
        if found.status is not JobStatus.SUCCEEDED:
            raise RunFailedError(f"job {job_id} ended with status {found.status.value}", returncode=1)


async def why(job: int | str, *, home: Path | None = None) -> Explanation:
    """Explain the status of a job: its events, attempts, steps, recoveries and cost."""
    if is_remote(home):
        view = await call_server(home, None, verbs.explain_job, job=str(job))
        return Explanation(job=view.job, events=view.events, summary=view.summary, paid_usd=view.paid_usd)
    with open_context(home) as context:
        return jobs.explain(context, jobs.find_job(context, job))
