"""Estimate the duration of a start that restores `setup` from an archive, from starts of the job or earlier ones.

`checkpoint: {restart: ...}` and the job's first start include `setup`. A start that finds an archive is expected to
take as long as earlier such starts. Before the first one: as long as the start that kept the archive, less its `setup`,
plus the time to read the archive. Example: a start of 700 s, of which `setup` took 600 s, and 5 GiB: 100 s + 54 s.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.frozen import frozen
from broker.jobs.kinds import Kind, find_kind
from broker.jobs.setup_archives import KEPT_DAYS
from broker.state.events import EventRow
from broker.state.store import Store
from broker.types import Attempt, EventKind, Job, OutcomeKind, Placement, Task

KINDS = (EventKind.SETUP_KEPT, EventKind.SETUP_RESTORED)
STARTS_SEEN = 3  # the longest of this many counts, as for starts that run `setup`
READ_BYTES_S = 100e6  # for an archive, as the agent assumes before it keeps one (decision 331)
JOBS_MAX = 20  # number of earlier jobs that are read, the newest first

# A cloud and a kind of machine: the part of an archive's key that a placement determines.
System = tuple[str, Kind]


@frozen
class RestoredStart:
    """Seconds of a start with an archive, from the request to the first new step, and its applicable machines."""

    start_s: float
    systems: frozenset[System]

    def fits(self, placement: Placement) -> bool:
        """Return whether a start there is expected to find the archive: the same cloud and kind of machine."""
        return find_system(placement) in self.systems


def find_system(placement: Placement) -> System:
    """Return the cloud and the kind of machine of a placement."""
    return placement.offer.cloud, find_kind(placement)


def expect_restored_start(job: Job, events: Sequence[EventRow]) -> RestoredStart | None:
    """Return the expected start from the job's archive; None without one, or if its next start runs `setup`. Pure.

    `events` are those of `KINDS` of this job, oldest first. A later start of the same machines that ran `setup` again
    shows that the archive is not used, and a failure of the program makes `setup` run.
    """
    last = job.attempts[-1] if job.attempts else None
    if last is not None and last.outcome is not None and last.outcome.kind is OutcomeKind.PROGRAM_FAILED:
        return None
    by_number = {each.number: each for each in job.attempts}
    reported = [(by_number[number], each) for each in events if (number := _read_number(each)) in by_number]
    if not reported:
        return None
    restored = {each.number for each, event in reported if event.kind is EventKind.SETUP_RESTORED}
    systems = frozenset(find_system(each.placement) for each, _ in reported)
    newest = max(each.number for each, _ in reported)
    starts = measure_starts(job.attempts)
    if any(number > newest and find_system(by_number[number].placement) in systems for number in starts):
        return None
    seen = [starts[number] for number in sorted(restored) if number in starts]
    if seen:
        return RestoredStart(start_s=max(seen[-STARTS_SEEN:]), systems=systems)
    kept = [(each, event) for each, event in reported if event.kind is EventKind.SETUP_KEPT and each.number in starts]
    if not kept:
        return None
    attempt, event = kept[-1]
    setup_s, size_gib = (_read_figure(event, name) for name in ("setup_s", "size_gib"))
    start_s = max(starts[attempt.number] - setup_s, 0.0) + size_gib * 2**30 / READ_BYTES_S
    return RestoredStart(start_s=min(start_s, starts[attempt.number]), systems=systems)


def measure_starts(attempts: Sequence[Attempt]) -> dict[int, float]:
    """Return the seconds of each start on new machines, up to the first new step, by attempt number."""
    found, clusters = dict[int, float](), set[str]()
    for each in attempts:
        if each.resumed_s is not None and each.cluster not in clusters:  # otherwise its machines were already set up
            found[each.number] = max(each.resumed_s - each.started_s, 0.0)
        clusters.add(each.cluster)
    return found


def find_restored_start(store: Store, task: Task, *, now_s: float, job: Job | None = None) -> RestoredStart | None:
    """Return the expected start from an archive of this task.

    It is estimated from the job's own starts, otherwise from those of earlier jobs.

    None without `cache_setup`. An earlier job counts while its archive is kept, if it had the same `setup`, variables
    and number of nodes; only the nodes know whether its files were the same.
    """
    if not task.recovery.caches_setup or not task.setup:
        return None
    if job is not None and any(each.resumed_s is not None for each in job.attempts):
        return expect_restored_start(job, store.events.list_kinds(KINDS, job_id=job.id))
    since_s = now_s - KEPT_DAYS * 86400
    by_job = dict[int, list[EventRow]]()
    for event in store.events.list_kinds(KINDS, since_s=since_s):
        if event.job_id is not None:
            by_job.setdefault(event.job_id, []).append(event)
    for job_id in sorted(by_job, reverse=True)[:JOBS_MAX]:
        earlier = store.jobs.get(job_id)
        if earlier is None or not _is_alike(earlier.task, task):
            continue
        if (found := expect_restored_start(earlier, by_job[job_id])) is not None:
            return found
    return None


def _is_alike(one: Task, other: Task) -> bool:
    """Return whether two tasks may share an archive, judged by their text."""

    def read(task: Task) -> tuple[object, ...]:
        return task.setup, dict(task.envs), task.num_nodes, task.recovery.caches_setup, task.checkpoint.to

    return read(one) == read(other)


def _read_number(event: EventRow) -> int:
    number = event.data.get("number")
    return number if isinstance(number, int) else 0


def _read_figure(event: EventRow, name: str) -> float:
    value = event.data.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
