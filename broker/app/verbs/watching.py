"""Verbs that export or watch the history of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from broker.app.container import Context
from broker.app.jobs import explain_ended, find_job
from broker.frozen import frozen
from broker.jobs.node_samples import read_usages
from broker.state.events import EventRow
from broker.state.jobs import JobLine
from broker.types import Job, JobStatus, JobUsage

POLL_S = 1.0


@frozen
class JobChanges:
    """Changes since the last read: the changed jobs in their current state, by ID, and their new events, oldest first.

    `usage` is the current usage of the nodes of all watched jobs; empty from an older server.
    """

    lines: tuple[JobLine, ...]
    events: tuple[EventRow, ...]
    usage: Mapping[int, JobUsage] = field(default_factory=dict)


@frozen
class JobHistory:
    """A job with its events, at the time `now_s`."""

    job: Job
    events: tuple[EventRow, ...]
    now_s: float


class Watcher:
    """The watched jobs as last read. `look` returns changes since then."""

    def __init__(self, context: Context, wanted: int | None) -> None:
        self._context = context
        self._wanted = wanted
        self._newest = context.store.events.get_newest_id()
        self.lines: Mapping[int, JobLine] = {}

    @property
    def is_over(self) -> bool:
        """Whether all watched jobs have ended."""
        return all(line.status.is_terminal for line in self.lines.values())

    def read_changes(self) -> tuple[Sequence[JobLine], Sequence[EventRow]]:
        """Return the changed jobs, by ID, and their new events, oldest first."""
        store = self._context.store
        newest = store.events.get_newest_id()
        events = store.events.list(after=self._newest) if newest > self._newest else []
        found = self._read()
        changed = [line for job_id, line in sorted(found.items()) if line != self.lines.get(job_id)]
        self.lines, self._newest = found, newest
        return changed, [each for each in events if each.id <= newest and each.job_id in found]

    def _read(self) -> Mapping[int, JobLine]:
        """Read the wanted job, or every live job and those read before, which may have ended."""
        jobs = self._context.store.jobs
        live = {line.id: line for line in jobs.list_lines(0, on_damage=self._context.warn)}
        known = set(self.lines) if self._wanted is None else {self._wanted}
        if known - set(live):
            live = {line.id: line for line in jobs.list_lines(on_damage=self._context.warn)}
        return {
            job_id: line
            for job_id, line in live.items()
            if job_id in known or (self._wanted is None and not line.status.is_terminal)
        }


def watch_jobs(context: Context, *, job: str | None, on_change: Callable[[JobChanges], None]) -> None:
    """Pass changes of a job, or of all live jobs for None, to `on_change` about once a second until they end.

    Raises JobEndedError for a named job that ended with a status other than SUCCEEDED.
    """
    wanted = None if job is None else find_job(context, job).id
    watcher = Watcher(context, wanted)

    async def follow() -> None:
        while True:
            changed, events = watcher.read_changes()
            usage = read_usages(context.config.logs, list(watcher.lines.values()), now_s=context.clock.now_s())
            on_change(JobChanges(lines=tuple(changed), events=tuple(events), usage=usage))
            if watcher.is_over:
                return
            context.restart_daemon_if_needed()
            await context.clock.sleep(POLL_S)

    asyncio.run(follow())
    ended = None if wanted is None else context.store.jobs.get(wanted)
    if ended is not None and ended.status is not JobStatus.SUCCEEDED:
        raise explain_ended(ended)


def read_job_history(context: Context, *, job: str) -> JobHistory:
    """Read a job with all of its events. Raises UsageError."""
    found = find_job(context, job)
    events = tuple(context.store.events.list(job_id=found.id))
    return JobHistory(job=found, events=events, now_s=context.clock.now_s())
