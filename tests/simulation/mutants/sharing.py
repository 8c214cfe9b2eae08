"""Bugs planted into claims, leases and their fence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broker.jobs import slots, workload
from broker.jobs.displacement import Displacement
from broker.jobs.displacing import Holder
from broker.jobs.job_limits import JobLimits
from broker.jobs.slots import JobQueue
from broker.jobs.workload import SharedWorkload
from broker.state import claims, database
from broker.state.base import FENCE
from broker.state.claims import Claims
from broker.state.database import SqliteDatabase
from broker.types import Job, JobStatus

Patches = Sequence[Any]


def writes_are_not_fenced() -> Patches:
    """Let a controller write for a job that another one has taken over."""
    return (patch.object(database, "check_claim", lambda store: None),)


def a_claim_without_a_new_epoch() -> Patches:
    """Take a job over in the epoch of the process before."""
    return (_rewrite("epoch = epoch + 1", "epoch = epoch"),)


def a_claim_that_a_crash_takes_back() -> Patches:
    """Commit a claim without syncing it, so that its epoch may be given out twice."""
    before = SqliteDatabase.claiming
    return (patch.object(SqliteDatabase, "claiming", lambda self, *, is_durable: before(self, is_durable=False)),)


def a_claim_of_what_is_not_free() -> Patches:
    """Take a job from a process with a lease."""
    is_free = claims.write_is_free()
    return (
        _rewrite(f"AND {is_free}", "AND ?1 IS NOT NULL", "SELECT job_id FROM claims WHERE job_id IN"),
        _rewrite(f"SELECT job_id FROM claims WHERE NOT {is_free}", "SELECT -1 WHERE ?1 IS NULL", "SELECT id FROM ("),
        patch.object(workload, "SHARE_S", math.inf),  # otherwise jobs change hands so often that none waits
    )


def a_fence_of_the_epoch_seen_now() -> Patches:
    """Compare with the epoch in the store at the time of the write, which is always equal."""

    def check(store: Any) -> None:
        fence = FENCE.get()
        if fence is not None:
            row = store.row("SELECT epoch FROM claims WHERE job_id = ?", (fence.job_id,))
            assert row is None or row["epoch"] >= fence.epoch

    return (patch.object(database, "check_claim", check),)


def a_fence_that_is_lifted_after_a_first_check() -> Patches:
    """Check the claim when it is taken up, and not again."""
    checked: set[tuple[int, int, int]] = set()
    before = database.check_claim

    def check(store: Any) -> None:
        fence = FENCE.get()
        if fence is not None and (key := (id(store), fence.job_id, fence.epoch)) not in checked:
            before(store)
            checked.add(key)

    return (patch.object(database, "check_claim", check),)


def a_fence_of_another_job() -> Patches:
    """Fence all jobs by the claim of the housekeeping."""

    @contextmanager
    def hold(job_id: int, epoch: int) -> Iterator[None]:
        token = FENCE.set(None)
        try:
            yield
        finally:
            FENCE.reset(token)

    return (patch("broker.jobs.workload.hold_claim", hold),)


def a_lease_that_never_ends() -> Patches:
    """Leave the jobs of a dead process with it."""
    return (patch.object(claims, "LEASE_S", 1e9),)


def a_lease_that_is_too_long() -> Patches:
    """Take jobs over later than promised."""
    return (patch.object(claims, "LEASE_S", 25.0),)


def a_lease_that_the_dead_extend() -> Patches:
    """Extend all leases with one's own."""
    return (
        _rewrite(
            "DELETE FROM controllers WHERE until_s < ?", "UPDATE controllers SET until_s = max(until_s, ? + 3600.0)"
        ),
    )


def claims_that_are_never_looked_for() -> Patches:
    """Claim jobs only once, at the start."""
    before = SharedWorkload._claim

    def claim(self: Any) -> None:
        if not getattr(self, "has_claimed", False):
            before(self)
            self.has_claimed = bool(self._epochs)

    return (patch.object(SharedWorkload, "_claim", claim),)


def a_claim_that_is_only_released_after_a_drive() -> Patches:
    """Keep the claim of a surplus job whose release failed: its process neither drives nor releases it."""
    return (patch.object(SharedWorkload, "_release_idle", lambda self: None),)


def an_epoch_that_begins_again() -> Patches:
    """Forget the epoch of a job that is given up."""
    return (_rewrite("SET holder = '' WHERE job_id = ?", "SET holder = '', epoch = 0 WHERE job_id = ?"),)


def _rewrite(old: str, new: str, start: str = "") -> Any:
    """Change a part of the statements of `Claims`."""

    def change(sql: str) -> str:
        return sql.replace(old, new) if sql.startswith(start) else sql

    before = Claims.__init__

    def begin(self: Claims, store: Any) -> None:
        before(self, store)
        self._database = _Rewriting(self._database, change)

    return patch.object(Claims, "__init__", begin)


class _Rewriting:
    def __init__(self, store: Any, change: Callable[[str], str]) -> None:
        self._store, self._change = store, change

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        return self._store.execute(self._change(sql), parameters)

    def rows(self, sql: str, parameters: Any = ()) -> Any:
        return self._store.rows(self._change(sql), parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def slots_that_are_not_counted() -> Patches:
    """Take a slot without counting those of running jobs."""
    return (patch.object(JobQueue, "_list_units_with_slots", lambda self, live, projects: {}),)


def a_displacement_of_any_priority() -> Patches:
    """Take the slot of a job of any priority."""
    return (_patch_holders(lambda each: replace(each, priority=-1001)),)


def a_displacement_without_a_checkpoint() -> Patches:
    """Take the slot of a job that has saved nothing."""
    return (_patch_holders(lambda each: replace(each, is_preemptible=True)),)


def a_displaced_job_that_keeps_its_slot() -> Patches:
    """Forget the request once the machines are gone, so that the job starts again in the slot."""

    def keep(self: JobQueue, job: Job) -> float:
        self._store.queue.end_displacement(job.id)
        return 0.0

    return (patch.object(JobQueue, "_return_slot", keep),)


def a_displaced_job_that_does_not_resume() -> Patches:
    """End a displaced job where it should return its slot."""

    def end(self: JobQueue, job: Job) -> float:
        self._store.jobs.set_status(job.id, JobStatus.CANCELLED)
        return 0.0

    return (patch.object(JobQueue, "_return_slot", end),)


def a_request_for_a_slot_that_is_not_answered() -> Patches:
    """Let a displaced job run on."""

    async def ignore(*_: Any) -> bool:
        return False

    return (patch.object(Displacement, "step", ignore),)


def slots_of_a_project_that_are_not_counted() -> Patches:
    """Start jobs of a project beyond its own limit."""
    before = slots.list_startable

    def ignore(ordered: Any, held: Any, *, total: int | None, by_project: Any) -> frozenset[str]:
        return before(ordered, held, total=total, by_project={})

    return (patch.object(slots, "list_startable", ignore),)


def a_max_duration_that_is_forgotten() -> Patches:
    """Let a job run on after its `max_duration`."""
    return (patch.object(JobLimits, "_measure_used_s", lambda self, job, begin_s=None: 0.0),)


def a_max_duration_that_ends_early() -> Patches:
    """Count twice the time that has passed."""
    before = JobLimits._measure_used_s
    return (
        patch.object(
            JobLimits, "_measure_used_s", lambda self, job, begin_s=None: 2 * before(self, job, begin_s=begin_s)
        ),
    )


def _patch_holders(change: Callable[[Holder], Holder]) -> Any:
    before = JobQueue._list_holders
    return patch.object(JobQueue, "_list_holders", lambda self: [change(each) for each in before(self)])


# Each with the invariants that may fail, and the first seed of the hunt: some only show in few histories.
MUTANTS: tuple[tuple[Callable[[], Patches], str, int], ...] = (
    (writes_are_not_fenced, "C1", 31),
    (a_claim_without_a_new_epoch, "C1 C2", 0),
    (a_claim_that_a_crash_takes_back, "C1 C2", 0),
    (a_claim_of_what_is_not_free, "C1 C3", 0),
    (a_fence_of_the_epoch_seen_now, "C1", 31),
    (a_fence_that_is_lifted_after_a_first_check, "C1", 31),
    (a_fence_of_another_job, "C1", 31),
    (a_lease_that_never_ends, "C3", 0),
    (a_lease_that_is_too_long, "C3", 0),
    (a_lease_that_the_dead_extend, "C3", 0),
    (claims_that_are_never_looked_for, "C3", 0),
    (a_claim_that_is_only_released_after_a_drive, "L2", 302515),
    (an_epoch_that_begins_again, "C1 C2", 0),
    (slots_that_are_not_counted, "Q1", 0),
    (a_displacement_of_any_priority, "Q2", 0),
    (a_displacement_without_a_checkpoint, "Q2", 0),
    (a_displaced_job_that_keeps_its_slot, "Q1 Q3", 4),
    (a_displaced_job_that_does_not_resume, "S7", 0),
    (a_request_for_a_slot_that_is_not_answered, "Q3", 0),
    (slots_of_a_project_that_are_not_counted, "Q1", 0),
    (a_max_duration_that_is_forgotten, "M1", 3),
    (a_max_duration_that_ends_early, "M2 S14", 0),
)
