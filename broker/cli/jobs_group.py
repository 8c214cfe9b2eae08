"""Show the jobs of a pipeline or job group together: merged logs, events and history."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import typer

from broker.app.clusters import LogChunk
from broker.app.verbs.jobs import follow_log, list_events, show_job
from broker.cli.context import make_session
from broker.cli.render import print_line, print_note
from broker.errors import RunFailedError
from broker.state.events import EventRow
from broker.types import Job, JobStatus


def follow_members(members: Sequence[Job], *, is_following: bool = True, as_json: bool = False) -> None:
    """Print the logs of all jobs as they grow, each line after its task's name. Raises RunFailedError if one failed."""
    lock = threading.Lock()

    def follow(member: Job) -> None:
        def show(chunk: LogChunk) -> None:
            with lock:
                for line in chunk.lines:
                    data = {"job": member.id, "task": member.name, "line": line}
                    print_line(json.dumps(data) if as_json else f"({member.name}) {line}")

        make_session().call(follow_log, job=str(member.id), on_chunk=show, is_following=is_following)

    pool = ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="log")
    try:
        for _ in pool.map(follow, members):
            pass
    except KeyboardInterrupt:
        print_note(f"\ndetached; the jobs continue; reattach with `broker jobs logs {members[0].pipeline}`")
        pool.shutdown(wait=False, cancel_futures=True)
        raise typer.Exit(130) from None
    if is_following:
        _print_ends(members)


def _print_ends(members: Sequence[Job]) -> None:
    session = make_session()
    ended = [session.call(show_job, job=str(member.id)).job for member in members]
    for job in ended:
        why = f": {job.failure}" if job.failure else ""
        print_note(f"Job {job.id} ({job.name}) ended with status {job.status.value}{why}")
    failed = [job for job in ended if job.status is not JobStatus.SUCCEEDED and is_needed(job)]
    if failed:
        raise RunFailedError(f"job {failed[0].id} ended with status {failed[0].status.value}", returncode=1)


def is_needed(job: Job) -> bool:
    """Return whether the job's group or pipeline cannot succeed without it."""
    return job.task.group is None or job.task.group.is_required


def gather_events(members: Sequence[Job]) -> list[tuple[EventRow, str]]:
    """Return the events of all jobs in the order of their times, each with the name of its task."""
    session = make_session()
    found = [(each, member.name) for member in members for each in session.call(list_events, job=str(member.id))]
    return sorted(found, key=lambda pair: (pair[0].time_s, pair[0].id))
