"""Bugs planted into storage: transactions and their durability, records, money, time, shared lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broker.clock import Stopwatch
from broker.errors import CloudError
from broker.jobs import acquisition
from broker.jobs.job_limits import JobLimits
from broker.provision import collection, lifecycle
from broker.provision.collection import Collector
from broker.provision.launcher import Launcher
from broker.provision.lifecycle import Provisioner
from broker.provision.listing import Lister
from broker.state.clusters import IntentRows
from broker.state.database import SqliteDatabase
from broker.state.store import Store
from broker.types import Cluster, Job, NodeState

Patches = Sequence[Any]


# -- what a power cut leaves --------------------------------------------------------------------------------------


def intents_not_durable() -> Patches:
    """Commit intents without waiting for the disk, as progress is."""
    open_intent = Launcher._open_intent

    def open_loosely(self: Any, *arguments: Any, **named: Any) -> Any:
        with self._store.transaction(is_durable=False):
            return open_intent(self, *arguments, **named)

    note_account = IntentRows.note_account

    def note_loosely(self: Any, *arguments: Any) -> None:
        with self._database.transaction(is_durable=False):
            note_account(self, *arguments)

    return (
        patch.object(Launcher, "_open_intent", open_loosely),
        patch.object(IntentRows, "note_account", note_loosely),
    )


def synchronous_never_back_to_full() -> Patches:
    """Leave `synchronous` lowered for all commits that follow on a connection after the first that needs no sync."""
    transaction = SqliteDatabase.transaction

    @contextmanager
    def loosen(self: Any, *, is_durable: bool = True) -> Iterator[None]:
        with transaction(self, is_durable=is_durable and self._is_durable):
            yield

    return (patch.object(SqliteDatabase, "transaction", loosen),)


# -- records ------------------------------------------------------------------------------------------------------

_ENDING: ContextVar[tuple[Store, str] | None] = ContextVar("ending", default=None)


def record_deleted_before_nodes_are_gone() -> Patches:
    down, confirm = Provisioner.down, lifecycle.confirm_gone

    async def note_and_down(self: Any, name: str) -> None:
        token = _ENDING.set((self._store, name))
        try:
            await down(self, name)
        finally:
            _ENDING.reset(token)

    async def delete_and_confirm(*arguments: Any, **named: Any) -> Any:
        if ending := _ENDING.get():
            ending[0].clusters.delete(ending[1])
        return await confirm(*arguments, **named)

    return (
        patch.object(Provisioner, "down", note_and_down),
        patch.object(lifecycle, "confirm_gone", delete_and_confirm),
    )


def no_epoch_fence_before_create() -> Patches:
    """Read the intent without checking which broker leads."""

    def is_open(self: Any, token: str) -> bool:
        return bool(self._database.rows("SELECT 1 FROM intents WHERE token = ? AND outcome IS NULL", (token,)))

    return (patch.object(IntentRows, "is_open", is_open),)


def collector_ends_a_replacement_under_way() -> Patches:
    """Collect nodes requested alongside a working gang as if for a place that a search did not need."""
    find = Collector._find_orphans

    def find_all(self: Any) -> Any:
        clusters = {each.name for each in self._store.clusters.list() if each.status is lifecycle.ClusterStatus.UP}
        intents = [each.request for each in self._store.intents.list_open()]
        return [each for each in intents if each.cluster in clusters and each.token not in self._surplus.tokens]

    assert find is not find_all
    return (patch.object(Collector, "_find_orphans", find_all),)


def collector_ignores_age() -> Patches:
    return (patch.object(collection, "GRACE_S", -1e9),)


# -- money and time -----------------------------------------------------------------------------------------------


def budget_per_attempt() -> Patches:
    """Forget what earlier attempts have cost."""

    def find(self: Any, job: Job) -> str:
        budget_usd = job.task.goal.budget_usd if job.task.goal else None
        live = job.attempts[-1].number if job.attempts and job.attempts[-1].ended_s is None else job.next_attempt
        spent_usd = self._store.bills.spend_usd(cluster=job.name_cluster(live), now_s=self._clock.now_s())
        return "" if budget_usd is None or spent_usd < budget_usd else "the budget is used up"

    return (
        patch.object(JobLimits, "_find_overspending", find),
        patch.object(acquisition, "cut_to_rest", lambda job, **_: job.task),
    )


def stopwatch_counts_suspended_time() -> Patches:
    def observe(self: Any, now_s: float) -> float:
        self._observed_s = now_s if self._observed_s is None else self._observed_s
        return now_s - float(self._observed_s)

    return (patch.object(Stopwatch, "observe", observe),)


# -- lists --------------------------------------------------------------------------------------------------------


def lister_shares_an_older_list() -> Patches:
    """Return a list under way to every caller that asks meanwhile."""

    async def share(self: Any, cloud: Any) -> Any:
        shared = self._shared[cloud.name]
        if shared.running is None or shared.running.done():
            shared.running = lifecycle.asyncio.ensure_future(self._query(cloud, after=None))
            shared.running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await lifecycle.asyncio.shield(shared.running)

    return (patch.object(Lister, "_share", share),)


def failed_list_is_a_loss() -> Patches:
    """Conclude from a failed list that a cloud has none of our nodes."""
    refresh = Provisioner.refresh

    async def refresh_or_lose(self: Any, cluster: Cluster, **named: Any) -> Cluster:
        try:
            return await refresh(self, cluster, **named)
        except CloudError:
            now_s = self._clock.now_s()
            gone = (replace(node, state=NodeState.TERMINATED, ended_s=now_s) for node in cluster.nodes)
            return replace(cluster, nodes=tuple(gone))

    return (patch.object(Provisioner, "refresh", refresh_or_lose),)
