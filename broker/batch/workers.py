"""Decide which worker jobs of a map to submit. Pure: a killed command that runs again decides the same.

jobs of worker 1     others    a shard is left    submit
none                 any       yes                map-k7wq2/1/1
1: RUNNING           any       yes                -
1: SUCCEEDED         live      yes                -              the others hold all remaining shards
1: SUCCEEDED         ended     yes                map-k7wq2/1/2  one of them ended without finishing its shard
1: SUCCEEDED         cancelled yes                -              later, by the user, since this command began
1: FAILED            any       yes                -              unless it failed before this command began
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from broker.frozen import frozen
from broker.types import Job, JobStatus

ROUNDS_MAX = 1000
NEVER_S = float("-inf")


@frozen
class Submission:
    """A worker's job to submit: calls with the same `request_id` create one job."""

    name: str
    request_id: str


@frozen
class MapWorkers:
    """The newest job of each worker, and the jobs to submit. `job_ids`: all jobs of the map, also ended ones."""

    newest: tuple[Job, ...]
    job_ids: tuple[int, ...]
    submissions: tuple[Submission, ...]

    @property
    def live(self) -> tuple[Job, ...]:
        """The worker jobs that have not ended."""
        return tuple(job for job in self.newest if not job.status.is_terminal)


def plan_workers(
    group: str, workers: int, find_job: Callable[[str], Job | None], *, left: int, retries_from: int
) -> MapWorkers:
    """Look up the jobs of each worker by request id, and decide which to submit for `left` shards.

    A failed job gets a successor if its id is below `retries_from`: it had ended before this command began.
    """
    newest, job_ids, wanted = list[Job](), list[int](), list[tuple[Submission, Job | None]]()
    for worker in count(1):
        job: Job | None = None
        number = 1
        while number <= ROUNDS_MAX and (found := find_job(f"{group}/{worker}/{number}")):
            job, number = found, number + 1
            job_ids.append(found.id)
        if job is not None:
            newest.append(job)
        elif worker > workers:  # an earlier command may have had more workers
            break
        if worker <= workers and number <= ROUNDS_MAX:
            wanted.append((Submission(name=f"{group}-{worker}", request_id=f"{group}/{worker}/{number}"), job))
    live = sum(not job.status.is_terminal for job in newest)
    cancelled = [job for job in newest if job.status is JobStatus.CANCELLED and job.id >= retries_from]
    cancelled_s = max((job.ended_s or 0.0 for job in cancelled), default=NEVER_S)
    due = [each for each, job in wanted if _is_due(job, live=live, retries_from=retries_from, cancelled_s=cancelled_s)]
    return MapWorkers(
        newest=tuple(newest), job_ids=tuple(job_ids), submissions=tuple(due[: max(0, min(workers, left) - live)])
    )


def _is_due(job: Job | None, *, live: int, retries_from: int, cancelled_s: float) -> bool:
    if job is None:
        return live > 0 or cancelled_s == NEVER_S
    if job.status is JobStatus.SUCCEEDED:
        return not live and (job.ended_s or 0.0) >= cancelled_s
    return job.status.is_terminal and job.id < retries_from


def list_problems(jobs: Sequence[Job]) -> Sequence[str]:
    """Describe the workers that ended without success."""
    return [
        f"job {job.id} ended with status {job.status.value}" + (f": {job.failure}" if job.failure else "")
        for job in jobs
        if job.status.is_terminal and job.status is not JobStatus.SUCCEEDED
    ]
