"""One job of a group: whose loss restarts it, and the addresses that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import TransientError
from broker.jobs.group_member import RESEND_S, GroupMember
from broker.state.store import Store
from broker.types import Attempt, Cluster, GroupRole, JobStatus, OnLoss, Outcome, OutcomeKind, Task
from tests.state.samples import ATTEMPT, CLUSTER, NODE, Hands
from tests.state.test_durability import FULL, Recording

PREEMPTED = Outcome(kind=OutcomeKind.PREEMPTED)


class Gang:
    """A gang that receives addresses, or fails to."""

    def __init__(self) -> None:
        self.sent = 0
        self.error: Exception | None = None

    async def send_peers(self, cluster: Cluster, run_id: int, peers: Mapping[str, object]) -> None:
        if self.error is not None:
            raise self.error
        self.sent += 1


class Group:
    """A store with three jobs of one group."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.gang = Hands(), Gang()
        self.store = Store(folder / "state.db", clock=self.clock)
        role = GroupRole(name="rl", is_primary=True, on_loss=OnLoss.RESTART_GROUP, termination_delay_s=0.0)
        task = Task(group=role)
        self.ids = [self.store.jobs.add(name, task, pipeline="rl-x").id for name in ("mine", "early", "late")]
        unused: Any = None
        self.member = GroupMember(self.store, self.gang, self.clock, unused)  # type: ignore[arg-type]

    def put(self, index: int, number: int, **fields: Any) -> Attempt:
        attempt = replace(
            ATTEMPT, job_id=self.ids[index], number=number, cluster=f"c{index}", ready_s=1.0, released_s=2.0, **fields
        )
        self.store.jobs.put_attempt(attempt)
        return attempt

    def follow(self, attempt: Attempt) -> None:
        job = self.member._store.jobs.get(self.ids[0])
        assert job is not None
        unused: Any = None
        cluster = replace(CLUSTER, nodes=(NODE,))
        asyncio.run(self.member.follow(job, attempt, cluster, unused))


def test_the_cause_of_a_restart_is_a_loss_of_the_present_generation(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.put(0, 1, generation=2)
    group.put(1, 1, generation=1, lost_s=10.0, outcome=PREEMPTED, ended_s=11.0)
    group.put(2, 1, generation=2, lost_s=20.0, outcome=PREEMPTED, ended_s=21.0)
    job = group.store.jobs.get(group.ids[0])
    assert job is not None and group.member.name_cause(job) == "late"


def test_the_release_of_the_program_is_one_durable_commit(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.put(1, 1, generation=1)
    group.put(2, 1, generation=1)
    attempt = replace(group.put(0, 1, generation=1), released_s=None)
    group.store.jobs.put_attempt(attempt)
    group.store.close()
    store = Recording(tmp_path / "state.db")
    group.member = GroupMember(store, group.gang, group.clock, group.member._placement)  # type: ignore[arg-type]
    group.follow(attempt)
    assert store.commits == [FULL]
    job = store.jobs.get(group.ids[0])
    assert job is not None and job.status is JobStatus.RUNNING and job.attempts[0].released_s is not None


def test_addresses_that_a_node_did_not_take_are_sent_again_and_a_bug_is_raised(tmp_path: Path) -> None:
    group = Group(tmp_path)
    attempt = group.put(0, 1, generation=1)
    group.gang.error = TransientError("no answer")
    group.follow(attempt)
    group.gang.error = None
    group.follow(attempt)
    assert group.gang.sent == 0, "it has just been tried"
    group.clock.time_s += RESEND_S
    group.follow(attempt)
    group.follow(attempt)
    assert group.gang.sent == 1
    group.gang.error = RuntimeError("a bug")
    group.put(1, 1, generation=1)
    with pytest.raises(RuntimeError, match="a bug"):
        group.follow(replace(attempt, number=2))
