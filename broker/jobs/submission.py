"""Submit tasks to the store as managed jobs: one task, a pipeline, or a retry of an ended job."""

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
    """Submit all tasks or none, in an order that can run; the same `request_id` submits nothing twice.

    Several tasks form a pipeline: each waits for the tasks in its `needs`, or by default for the preceding one. Those
    of a job group start together.
    Raises UsageError for circular needs or an unknown task in them.
    """
    if len(tasks) == 1:
        return [store.jobs.add(name or tasks[0].name or "job", tasks[0], request_id, hedge=hedge)]
    needs = _find_needs(tasks)
    names = name_tasks(tasks)
    jobs: dict[int, Job] = {}
    with store.transaction():
        base = name or tasks[0].pipeline or "pipeline"
        pipeline = f"{base}-{store.draw_uid()}"  # it names a folder, so it must be unique
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
    check: Callable[[Task], None] = lambda task: None,
) -> Job:
    """Submit a new job with the old one's task, checkpoints and attempt numbers; the same `request_id` creates one job.

    `check` gets the task with its secrets before submission and may raise to prevent it. Raises UsageError.
    """
    if submitted := store.jobs.find_request(request_id):
        return submitted
    if job.task.group is not None:
        raise UsageError(
            f"job {job.id} belongs to group {job.pipeline}, whose tasks start together",
            hints=["launch the file of the group again: `broker jobs launch GROUP.yaml`"],
        )
    if not job.status.is_terminal:
        raise UsageError(
            f"job {job.id} is {job.status.value}, not ended", hints=[f"`broker jobs cancel {job.id}` first"]
        )
    if job.status is JobStatus.SUCCEEDED:
        raise UsageError(f"job {job.id} has already succeeded", hints=["`broker jobs launch` starts a new one"])
    root = job.resumes or job.id
    for other in store.jobs.list():
        if other.id > job.id and (other.resumes or other.id) == root:
            raise UsageError(
                f"job {other.id} already continues from the checkpoints of job {job.id}",
                hints=[
                    f"`broker jobs retry {other.id}`" if other.status.is_terminal else f"`broker jobs logs {other.id}`"
                ],
            )
    missing = sorted(set(job.task.secrets) - set(secrets))
    if missing:  # a job's secrets are erased when it ends
        flags = " ".join(f"--secret {name}" for name in missing)
        raise UsageError(f"job {job.id} needs its secrets again", hints=[f"`broker jobs retry {job.id} {flags}`"])
    task = replace(job.task, secrets={name: secrets[name] for name in job.task.secrets})
    check(task)
    return store.jobs.add(
        job.name, task, request_id, needs=job.needs, pipeline=job.pipeline, resumes=job, hedge=job.hedge
    )
