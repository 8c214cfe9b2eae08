"""Bugs planted into claims, leases and their fence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broker.jobs import workload
from broker.jobs.displacing import Holder
from broker.jobs.slots import JobQueue
from broker.jobs.workload import SharedWorkload
from broker.state import claims, database
from broker.state.base import FENCE
from broker.state.claims import Claims
from broker.state.database import SqliteDatabase

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
    is_free = "holder NOT IN (SELECT name FROM controllers WHERE until_s > ?)"
    return (
        _rewrite(f"AND {is_free}", "AND ? IS NOT NULL", "SELECT job_id FROM claims WHERE job_id IN"),
        _rewrite(f"SELECT job_id FROM claims WHERE NOT {is_free}", "SELECT -1 WHERE ? IS NULL", "SELECT id FROM ("),
        patch.object(workload, "SHARE_S", math.inf),  # else jobs change hands so often that none waits
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


def a_share_that_is_never_exceeded() -> Patches:
    """Leave free jobs to a process that holds a lease, although it was just lost."""
    return (patch.object(workload, "SHARE_S", math.inf),)


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


# Each with the invariants that may fail, and the first seed of the hunt: some only show in few histories.
def slots_that_are_not_counted() -> Patches:
    """Take a slot without counting those of running jobs."""
    return (patch.object(JobQueue, "_list_units_with_slots", lambda self, live, projects: {}),)


def a_displacement_of_any_priority() -> Patches:
    """Take the slot of a job of any priority."""
    return (_patch_holders(lambda each: replace(each, priority=-1001)),)


def a_displacement_without_a_checkpoint() -> Patches:
    """Take the slot of a job that has saved nothing."""
    return (_patch_holders(lambda each: replace(each, is_preemptible=True)),)


def _patch_holders(change: Callable[[Holder], Holder]) -> Any:
    before = JobQueue._list_holders
    return patch.object(JobQueue, "_list_holders", lambda self: [change(each) for each in before(self)])


MUTANTS: tuple[tuple[Callable[[], Patches], str, int], ...] = (
    (writes_are_not_fenced, "C1", 8),
    (a_claim_without_a_new_epoch, "C1 C2", 0),
    (a_claim_that_a_crash_takes_back, "C1 C2", 90),
    (a_claim_of_what_is_not_free, "C1 C3", 0),
    (a_fence_of_the_epoch_seen_now, "C1", 8),
    (a_fence_that_is_lifted_after_a_first_check, "C1", 8),
    (a_fence_of_another_job, "C1", 8),
    (a_lease_that_never_ends, "C3", 0),
    (a_lease_that_is_too_long, "C3", 0),
    (a_lease_that_the_dead_extend, "C3", 0),
    (claims_that_are_never_looked_for, "C3", 0),
    (a_share_that_is_never_exceeded, "C3", 230),
    (an_epoch_that_begins_again, "C1 C2", 0),
    (slots_that_are_not_counted, "Q1", 0),
    (a_displacement_of_any_priority, "Q2", 0),
    (a_displacement_without_a_checkpoint, "Q2", 0),
)
