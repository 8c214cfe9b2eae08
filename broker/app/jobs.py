"""Operations on managed jobs: submitting, finding, retrying, waiting, following logs and explaining."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.app.clusters import LogChunk
from broker.app.container import Context
from broker.app.limits import LaunchSize
from broker.app.planning import apply_checkpoint_default, plan_launch
from broker.errors import JobEndedError, UsageError, WaitTimeoutError
from broker.formatting import strip_control
from broker.frozen import frozen
from broker.pipelines.groups import keep_together
from broker.state.people import Owned
from broker.task.reading import suggest
from broker.types import Attempt, Job, JobStatus, Plan, Secret, Task

if TYPE_CHECKING:
    from broker.jobs.summary import RunSummary
    from broker.state.events import EventRow

POLL_S = 0.3
LOG_BYTES_MAX = 1 << 20  # read at once: a log may have gigabytes, and a server sends it to many users
ID = re.compile(r"[0-9]{1,18}")  # of a job; the store holds no larger number
# IDs by which broker finds jobs that it has submitted itself (the tasks of a pipeline add `/` and a number)
OWN_REQUEST = re.compile(r"(service|schedule|map-[a-z0-9]+|sweep-[0-9a-f]+)(/.*)?")


@frozen
class JobTarget:
    """The launch target for managed jobs: a single job, or the tasks of a pipeline."""

    context: Context

    def apply_defaults(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """Fill in checkpoint folders and unattended times. Raises UsageError for a task without `run`."""
        from broker.jobs.allowance import apply_unattended_default, read_unattended_s

        if idle := next((task for task in tasks if not (task.run or "").strip()), None):
            name = idle.name or "(no name)"
            raise UsageError(
                f"task {name} has no `run:`; a managed job requires one, because it ends when its program ends",
                hints=["add `run:` to the task", "or start a cluster without a program: `broker launch TASK.yaml`"],
            )
        tasks = apply_checkpoint_default(self.context.config.home, tasks)
        return apply_unattended_default(tasks, read_unattended_s(self.context.config))

    def place(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """Keep, for a job group, the placements in the region that is cheapest for all of its tasks."""
        return keep_together(plans)

    def check(self, plans: Sequence[Plan]) -> bool:
        """Check that checkpoints outlive the nodes, and note how long the nodes may run unattended."""
        from broker.jobs.allowance import describe_allowances
        from broker.jobs.checkpoints import check_checkpoints
        from broker.jobs.kinds import describe_ranks

        for sentence in (*check_checkpoints(plans), *describe_ranks(plans), *describe_allowances(plans)):
            self.context.note(sentence)
        return True

    def list_allowances_s(self, tasks: Sequence[Task]) -> Sequence[float]:
        """Return the unattended seconds of each task, for which bucket access must last."""
        from broker.jobs.allowance import get_unattended_s

        return [get_unattended_s(task) for task in tasks]

    def mount(self, task: Task) -> Task:
        """Return the task unchanged: each attempt mounts the buckets itself."""
        return task


def check_names(name: str | None, request_id: str | None) -> None:
    """Raise UsageError for an invalid job name or request ID."""
    from broker.task.allowed import JOB_NAME, REQUEST_ID
    from broker.task.checking import check_flag

    check_flag("--name", name, JOB_NAME)
    check_flag("--request-id", request_id, REQUEST_ID)
    if request_id is not None and OWN_REQUEST.fullmatch(request_id):
        raise UsageError(
            f"`--request-id` must not be `{request_id}`: replicas, schedules, maps and sweeps use such IDs",
            hints=["choose another one, such as `nightly-2026-11-23`"],
        )


def find_job(context: Context, wanted: str | int) -> Job:
    """Find a job by ID, or the newest job with a name. Raises UsageError if there is none."""
    text = str(wanted)
    if ID.fullmatch(text) and (job := context.store.jobs.get(int(text))):
        return job
    jobs = context.store.jobs.list(on_damage=context.warn)
    named = [each for each in jobs if each.name == text]
    if not named:
        near = suggest(text, {each.name for each in jobs})
        raise UsageError(f"unknown managed job `{text}`", hints=[near or "list jobs with `broker jobs queue`"])
    return named[-1]


def find_jobs(context: Context, wanted: Sequence[str | int]) -> Sequence[Job]:
    """Find jobs by ID or name, and all jobs of pipelines. Raises UsageError for the first unknown name."""
    known = context.store.jobs.list(on_damage=context.warn)
    return [job for text in wanted for job in list_members(known, str(text)) or [find_job(context, text)]]


def list_members(known: Sequence[Job], text: str) -> Sequence[Job]:
    """Return the jobs of a pipeline or job group: the one with this name, or the newest with this name in its header.

    Empty if a job has this ID or name, because the `broker jobs` commands then refer to that job.
    """
    if members := [each for each in known if each.pipeline and each.pipeline == text]:
        return members
    if text.isdigit() or any(each.name == text for each in known):
        return []
    named = [each.pipeline for each in known if each.pipeline and each.task.pipeline == text]
    return [each for each in known if named and each.pipeline == named[-1]]


def retry(context: Context, job: Job, *, secrets: Mapping[str, str], request_id: str | None) -> Job:
    """Resubmit an ended job, which resumes from its checkpoints; check access first. Raises UsageError."""
    from broker.jobs.submission import retry_job

    check_names(None, request_id)
    context.check_owner(Owned.JOB, str(job.id))
    given = {name: Secret(value=value) for name, value in secrets.items()}
    again = retry_job(
        context.store, job, secrets=given, request_id=request_id, check=lambda task: _check_again(context, [task])[0],
        on_added=context.own_jobs,
    )  # fmt: skip
    context.check_owner(Owned.JOB, str(again.id))  # a request ID of another user finds that user's job
    context.ensure_daemon()
    return again


def retry_group(
    context: Context, wanted: str, *, secrets: Mapping[str, str], request_id: str | None
) -> tuple[Job, ...]:
    """Resubmit all jobs of an ended job group as a new group; otherwise like `retry`. Raises UsageError."""
    from broker.jobs.submission import retry_group as submit

    check_names(None, request_id)
    members = _find_group(context, wanted)
    for each in members:
        context.check_owner(Owned.JOB, str(each.id))
    given = {name: Secret(value=value) for name, value in secrets.items()}
    again = submit(
        context.store, members, secrets=given, request_id=request_id, check=lambda tasks: _check_again(context, tasks),
        on_added=context.own_jobs,
    )  # fmt: skip
    for each in again:
        context.check_owner(Owned.JOB, str(each.id))
    context.ensure_daemon()
    return tuple(again)


def _find_group(context: Context, wanted: str) -> Sequence[Job]:
    """Find the jobs of a group by its name. Raises UsageError for a job or a pipeline, and for an unknown name."""
    members = list_members(context.store.jobs.list(on_damage=context.warn), wanted)
    if not members:
        job = find_job(context, wanted)
        raise UsageError(f"`{wanted}` is a job, not a job group", hints=[f"`broker jobs retry {job.id}`"])
    if members[0].task.group is None:
        failed = next(
            (each for each in members if each.status.is_terminal and each.status is not JobStatus.SUCCEEDED), None
        )
        hint = f"`broker jobs retry {failed.id}`" if failed else "`broker jobs launch` starts a new one"
        raise UsageError(f"`{wanted}` is a pipeline, whose jobs are retried one by one", hints=[hint])
    return members


def _check_again(context: Context, tasks: Sequence[Task]) -> Sequence[Task]:
    """Apply the administrator's policy, which may have changed; check limits and access to buckets as a launch does.

    Raises before anything is paid for.
    """
    from broker.jobs.allowance import get_unattended_s
    from broker.jobs.replanning import drop_limits

    # Without limits: a job may be retried after its deadline.
    tasks = [context.resolve(task) for task in tasks]
    plans = keep_together([plan_launch(context, drop_limits(task)) for task in tasks])
    for sentence in context.grants.check(plans, allowances_s=[get_unattended_s(task) for task in tasks]):
        context.note(sentence)
    context.admit([plan.choice for plan in plans], LaunchSize())
    return tasks


def read_status(text: str) -> JobStatus:
    """Read the name of a status. Raises UsageError."""
    try:
        return JobStatus(text.upper())
    except ValueError:
        known = ", ".join(each.value for each in JobStatus)
        raise UsageError(f"unknown job status `{text}`", hints=[f"valid statuses: {known}"]) from None


async def wait_for(context: Context, job_id: int, status: JobStatus, *, timeout_s: float = 0.0) -> Job:
    """Wait until a job reaches a status or ends; a `timeout_s` of 0 waits forever. Raises WaitTimeoutError."""
    start_s = context.clock.now_s()
    while True:
        job = context.store.jobs.get(job_id)
        assert job is not None
        if job.status is status or job.status.is_terminal:
            return job
        if timeout_s and context.clock.now_s() - start_s >= timeout_s:
            raise WaitTimeoutError(
                f"timed out after {timeout_s:g} s: job {job_id} is {job.status.value}, not {status.value}"
            )
        context.ensure_daemon()
        await context.clock.sleep(POLL_S)


def explain_ended(job: Job) -> JobEndedError:
    """Make the error for a job that ended with a status other than the one waited for."""
    reason = f": {job.failure}" if job.failure else ""
    return JobEndedError(f"job {job.id} ended with status {job.status.value}{reason}")


async def follow_job(context: Context, job_id: int) -> AsyncIterator[str]:
    """Yield the lines of a job's log as it grows, across recoveries, until the job ends."""
    async for chunk in follow_chunks(context, job_id):
        for line in chunk.lines:
            yield line


async def follow_chunks(context: Context, job_id: int, *, offset: int = 0) -> AsyncIterator[LogChunk]:
    """Yield the lines after `offset` bytes of a job's log, as `follow_job` does."""
    while True:
        job = context.store.jobs.get(job_id)
        assert job is not None
        if not job.status.is_terminal:
            context.ensure_daemon()  # restart it if it died
        for chunk in read_chunks(context, job_id, offset=offset):  # also what is written while the caller handles them
            offset = chunk.offset
            yield chunk
        if job.status.is_terminal:
            return
        await context.clock.sleep(POLL_S)


def read_chunks(context: Context, job_id: int, *, offset: int = 0) -> Iterator[LogChunk]:
    """Yield the complete lines after `offset` bytes of a job's log, to its present end, a part at a time."""
    while True:
        lines, end = read_log(context, job_id, offset)
        if end == offset:
            return
        offset = end
        yield LogChunk(lines=tuple(lines), offset=offset)


def read_log(context: Context, job_id: int, offset: int = 0) -> tuple[Sequence[str], int]:
    """Read complete lines of a job's log after `offset`, up to `LOG_BYTES_MAX`; return them and the next offset.

    The offset stays the same if there is no further line. A longer line is returned in parts.
    """
    path = context.config.logs / "jobs" / f"{job_id}.log"
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read(LOG_BYTES_MAX)
    is_part = len(chunk) == LOG_BYTES_MAX and b"\n" not in chunk
    complete = chunk if is_part else chunk[: chunk.rfind(b"\n") + 1]
    return [strip_control(line) for line in complete.decode(errors="replace").splitlines()], offset + len(complete)


def read_log_end(context: Context, job_id: int, *, bytes_max: int) -> tuple[Sequence[str], bool]:
    """Read the complete lines in the last `bytes_max` of a job's log; return whether earlier ones were left out."""
    path = context.config.logs / "jobs" / f"{job_id}.log"
    begin = max(0, path.stat().st_size - bytes_max) if path.exists() else 0
    lines = [line for chunk in read_chunks(context, job_id, offset=begin) for line in chunk.lines]
    return lines[1:] if begin else lines, begin > 0


@frozen
class Explanation:
    """A job with its history: its events, the time that recoveries took, and its cost."""

    job: Job
    events: tuple[EventRow, ...]
    summary: RunSummary
    paid_usd: float


def explain(context: Context, job: Job) -> Explanation:
    """Gather the events, the summary and the cost of a job; its attempts have their costs up to now."""
    from broker.jobs.summary import summarize

    bills, now_s = context.store.bills, context.clock.now_s()
    paid = bills.spend_usd(job_id=job.id, now_s=now_s)
    ondemand_usd = bills.ondemand_since_usd(0.0, now_s=now_s, job_id=job.id)
    steps = context.store.jobs.list_steps(job.id)
    attempts = price_attempts(context, job.attempts, now_s)
    return Explanation(
        job=replace(job, attempts=attempts),
        events=tuple(context.store.events.list(job_id=job.id)),
        summary=summarize(job, attempts, steps, paid_usd=paid, ondemand_usd=ondemand_usd, now_s=now_s),
        paid_usd=paid,
    )


def price_attempts(context: Context, attempts: Sequence[Attempt], now_s: float) -> tuple[Attempt, ...]:
    """Return the attempts with their costs up to now.

    Attempts that restarted in place share the bills of a cluster. All but the newest of them have the cost that was
    recorded when they ended, and the newest has the rest.
    """
    newest = {each.cluster: each.number for each in attempts}
    earlier: dict[str, float] = defaultdict(float)
    found = []
    for each in attempts:
        usd = each.usd
        if newest[each.cluster] == each.number:
            spent = context.store.bills.spend_usd(cluster=each.cluster, now_s=now_s)
            usd = max(0.0, spent - earlier[each.cluster])
        earlier[each.cluster] += usd
        found.append(replace(each, usd=usd))
    return tuple(found)
