"""Recovery and autostop of the task, and the alternative of each placement, also for rows that schema 10 recorded.

`schema_10.sql` is a state file of the last schema in which each alternative had its own recovery. Job 1 runs on its
second alternative, job 2 on its only one, job 3 has an open intent on its second one, and the task of job 4 is damaged.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.errors import DamagedRowError
from broker.state.schema import MIGRATIONS
from broker.state.store import Store
from broker.types import Autostop, Cluster, JobRecovery, Task

HERE = Path(__file__).parent
RECOVERY = JobRecovery(
    strategy="eager_next_region",
    max_restarts_on_errors=3,
    recover_on_exit_codes=(75,),
    stall_timeout_s=600.0,
    nodes_min=1,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((HERE / "schema_10.sql").read_text())
        assert connection.execute("PRAGMA user_version").fetchone() == (10,)
    return Store(path, clock=SystemClock())


def get_task(store: Store, job_id: int) -> Task:
    job = store.jobs.get(job_id)
    assert job is not None
    return job.task


def get_cluster(store: Store, name: str) -> Cluster:
    cluster = store.clusters.get(name)
    assert cluster is not None
    return cluster


def test_the_first_requested_recovery_becomes_the_tasks(store: Store) -> None:
    assert get_task(store, 1).recovery == RECOVERY
    assert get_task(store, 2).recovery == JobRecovery()


def test_autostop_is_that_of_the_first_alternative(store: Store) -> None:
    assert get_task(store, 1).autostop is None
    assert get_cluster(store, "dev").autostop == Autostop(idle_minutes=10)


def test_running_placements_carry_their_planned_alternative(store: Store) -> None:
    job = store.jobs.get(1)
    assert job is not None
    (attempt,) = job.attempts
    cluster = get_cluster(store, attempt.cluster)
    assert attempt.placement == cluster.placement and cluster.placement.alternative == 1
    assert cluster.placement.get_resources(job.task).container == "ubuntu:22.04"
    other = store.jobs.get(2)
    assert other is not None and other.attempts[0].placement.alternative == 0


def test_an_intent_that_is_open_is_of_the_same_placement_as_its_cluster(store: Store) -> None:
    (intent,) = store.intents.list_open()
    assert intent.request.placement.alternative == 1
    assert intent.request.placement == get_cluster(store, intent.request.cluster).placement


def test_a_damaged_row_stays_damaged_and_hides_no_other(store: Store) -> None:
    with pytest.raises(DamagedRowError):
        store.jobs.get(4)
    damaged: list[DamagedRowError] = []
    assert [job.id for job in store.jobs.list(on_damage=damaged.append)] == [1, 2, 3]
    assert [error.key for error in damaged] == ["4"]


def test_a_stored_task_keeps_the_migrated_values(store: Store) -> None:
    """The second open finds the newest schema, and changes nothing."""
    path, first = store.path, store.jobs.list(on_damage=lambda error: None)
    store.close()
    again = Store(path, clock=SystemClock())
    assert again.jobs.list(on_damage=lambda error: None) == first
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
