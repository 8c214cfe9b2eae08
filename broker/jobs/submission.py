"""Submit tasks to the store as managed jobs: one task, a pipeline, or a retry of an ended job or job group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker.errors import UsageError
from broker.pipelines.ordering import find_needs, name_tasks, order_indexes
from broker.provision.launch import HEDGE
from broker.state.store import Store
from broker.types import Job, JobStatus, Secret, Task


def submit_tasks(
    store: Store, tasks: Sequence[Task], *, name: str | None = None, request_id: str | None = None, hedge: int = HEDGE
) -> Sequence[Job]:
    """Submit all tasks or none, in an order that can run; with the same `request_id`, nothing is submitted twice.

    Several tasks form a pipeline: each waits for the tasks in its `needs`, or by default for the preceding one. Those
    of a job group start together.
    Raises UsageError for circular dependencies, or a dependency on an unknown task.
    """
    if len(tasks) == 1:
        return [store.jobs.add(name or tasks[0].name or "job", tasks[0], request_id, hedge=hedge)]
    needs = _find_needs(tasks)
    names = name_tasks(tasks)
    jobs: dict[int, Job] = {}
    with store.transaction():
        base = name or tasks[0].pipeline or "pipeline"
        pipeline = f"{base}-{store.draw_uid()}"  # the name of a folder, so it must be unique
        for index in order_indexes(tasks):
            jobs[index] = store.jobs.add(
                names[index],
                tasks[index],
                f"{request_id}/{index}" if request_id else None,
                needs=[jobs[other].id for other in needs[index]],
                pipeline=pipeline,
                hedge=hedge,
            )
    return [jobs[index] for index in sorted(jobs)]


def list_request_ids(request_id: str, count: int) -> Sequence[str]:
    """Return the request ID of each job of a launch with `count` tasks."""
    return [request_id] if count == 1 else [f"{request_id}/{index}" for index in range(count)]


def _find_needs(tasks: Sequence[Task]) -> Sequence[Sequence[int]]:
    if all(task.group is not None for task in tasks):
        return [[] for _ in tasks]  # they start together
    if any(task.needs for task in tasks):
        return [list(indexes) for indexes in find_needs(tasks)]
    return [[index - 1] if index else [] for index in range(len(tasks))]


def retry_job(
    store: Store,
    job: Job,
    *,
    secrets: Mapping[str, Secret],
    request_id: str | None = None,
    check: Callable[[Task], Task] = lambda task: task,
    on_added: Callable[[Sequence[Job]], None] = lambda jobs: None,
) -> Job:
    """Submit a new job with the old one's task, checkpoints and attempt numbers; the same `request_id` creates one job.

    It needs the newest retries of the jobs that the old one needed: a failed pipeline is retried task by task.

    `check` receives the task with its secrets before submission, and returns the task to submit, or raises. `on_added`
    is called in the transaction that adds the job. Raises UsageError.
    """
    if submitted := store.jobs.find_request(request_id):
        return submitted
    if job.task.group is not None:
        raise _refuse_member(job, store.jobs.list_pipeline(job.pipeline))
    if not job.status.is_terminal:
        raise UsageError(
            f"job {job.id} is {job.status.value}, not ended", hints=[f"`broker jobs cancel {job.id}` first"]
        )
    if job.status is JobStatus.SUCCEEDED:
        raise UsageError(f"job {job.id} has already succeeded", hints=["`broker jobs launch` starts a new one"])
    _check_newest_job(store, job)
    _check_secrets([job], secrets, str(job.id))
    task = check(_add_secrets(job.task, secrets))
    with store.transaction():
        if submitted := store.jobs.find_request(request_id):
            return submitted
        _check_newest_job(store, job)  # another command may have retried it during the check
        again = store.jobs.add(
            job.name,
            task,
            request_id,
            needs=_find_newest(store, job.needs),
            pipeline=job.pipeline,
            resumes=job,
            hedge=job.hedge,
        )
        on_added([again])
    return again


def retry_group(
    store: Store,
    members: Sequence[Job],
    *,
    secrets: Mapping[str, Secret],
    request_id: str | None = None,
    check: Callable[[Sequence[Task]], Sequence[Task]] = lambda tasks: tasks,
    on_added: Callable[[Sequence[Job]], None] = lambda jobs: None,
) -> Sequence[Job]:
    """Submit all jobs of an ended job group as a new group, which starts together; each resumes from its checkpoints.

    The new group has its own name, so generations, losses and ends of the old group do not count in it. The same
    `request_id` creates one group. `check` and `on_added` are as in `retry_job`, for all tasks. Raises UsageError.
    """
    name = members[0].pipeline
    if submitted := _find_group_request(store, request_id):
        return submitted
    _check_group_ended(members)
    _check_newest_group(store, members)
    _check_secrets(members, secrets, name)
    tasks = check([_add_secrets(member.task, secrets) for member in members])
    with store.transaction():
        if submitted := _find_group_request(store, request_id):
            return submitted
        _check_newest_group(store, members)  # another command may have retried it during the check
        group = f"{name.rpartition('-')[0] or name}-{store.draw_uid()}"
        added = [
            store.jobs.add(
                member.name,
                task,
                f"{request_id}/{index}" if request_id else None,
                pipeline=group,
                resumes=member,
                hedge=member.hedge,
            )
            for index, (member, task) in enumerate(zip(members, tasks, strict=True))
        ]
        on_added(added)
    return added


def _find_group_request(store: Store, request_id: str | None) -> Sequence[Job]:
    first = store.jobs.find_request(f"{request_id}/0") if request_id else None
    return store.jobs.list_pipeline(first.pipeline) if first else ()


def _check_group_ended(members: Sequence[Job]) -> None:
    """Raise UsageError unless all jobs of the group have ended, and not all its primary tasks succeeded."""
    name = members[0].pipeline
    if live := next((each for each in members if not each.status.is_terminal), None):
        raise UsageError(
            f"job {live.id} ({live.name}) of group {name} is {live.status.value}, not ended",
            hints=[f"`broker jobs cancel {name}` first"],
        )
    if _has_succeeded(members):
        raise UsageError(f"group {name} has already succeeded", hints=["`broker jobs launch` starts a new one"])


def _has_succeeded(members: Sequence[Job]) -> bool:
    primaries = [each for each in members if each.task.group is not None and each.task.group.is_primary]
    return all(each.status is JobStatus.SUCCEEDED for each in primaries)


def _check_newest_job(store: Store, job: Job) -> None:
    """Raise UsageError if another job already continues from the checkpoints of this one."""
    if other := _find_successor(store, job):
        verb = "retry" if other.status.is_terminal else "logs"
        raise UsageError(
            f"job {other.id} already continues from the checkpoints of job {job.id}",
            hints=[f"`broker jobs {verb} {other.id}`"],
        )


def _check_newest_group(store: Store, members: Sequence[Job]) -> None:
    """Raise UsageError if another group already continues from the checkpoints of this one."""
    if other := _find_successor(store, members[0]):
        is_live = any(not each.status.is_terminal for each in store.jobs.list_pipeline(other.pipeline))
        verb = "logs" if is_live else "retry"
        raise UsageError(
            f"group {other.pipeline} already continues from the checkpoints of group {members[0].pipeline}",
            hints=[f"`broker jobs {verb} {other.pipeline}`"],
        )


def _refuse_member(job: Job, members: Sequence[Job]) -> UsageError:
    """Make the error for the retry of one job of a group, with the command that applies to the state of the group."""
    name = job.pipeline
    if any(not each.status.is_terminal for each in members):
        hint = f"cancel the group with `broker jobs cancel {name}`, then restart it with `broker jobs retry {name}`"
    elif _has_succeeded(members):
        hint = "the group has succeeded; `broker jobs launch` starts a new one"
    else:
        hint = f"restart all its tasks from their checkpoints: `broker jobs retry {name}`"
    return UsageError(f"job {job.id} belongs to group {name}, whose tasks start together", hints=[hint])


def _find_successor(store: Store, job: Job) -> Job | None:
    """Return the first later job that continues from the checkpoints of `job`; None if there is none."""
    root = job.resumes or job.id
    return next((each for each in store.jobs.list() if each.id > job.id and (each.resumes or each.id) == root), None)


def _find_newest(store: Store, job_ids: Sequence[int]) -> Sequence[int]:
    """Return for each of these jobs the newest one that continues from its checkpoints; itself if none does."""
    if not job_ids:
        return ()
    roots = {each.id: each.resumes or each.id for each in store.jobs.list()}
    newest = {root: job_id for job_id, root in sorted(roots.items())}
    return [newest.get(roots.get(job_id, job_id), job_id) for job_id in job_ids]


def _check_secrets(jobs: Sequence[Job], secrets: Mapping[str, Secret], name: str) -> None:
    """Raise UsageError if a secret is missing: a job's secrets are erased when it ends."""
    missing = sorted({secret for job in jobs for secret in job.task.secrets} - set(secrets))
    if missing:
        flags = " ".join(f"--secret {each}" for each in missing)
        whose = f"job {name}" if name.isdigit() else f"group {name}"
        raise UsageError(f"{whose} needs its secrets again", hints=[f"`broker jobs retry {name} {flags}`"])


def _add_secrets(task: Task, secrets: Mapping[str, Secret]) -> Task:
    return replace(task, secrets={name: secrets[name] for name in task.secrets})
