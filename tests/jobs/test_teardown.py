"""A program is notified before teardown: once, with time to save, and no longer than it needs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.config import Config
from broker.errors import FencedError, TransientError
from broker.jobs.teardown import END_S, POLL_S, AttemptTeardown, find_grace_s
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    GroupRole,
    Job,
    JobStatus,
    Node,
    NodeState,
    Placement,
    RunStatus,
    StorageMount,
    Task,
)
from tests.simulation.world import OWNER, make_offer
from tests.state.samples import ATTEMPT, NODE, START_S, Hands


class Gang:
    """A gang whose program ends `ends_after_s` after the notification; `silent` ranks do not respond."""

    def __init__(self, clock: Hands, *, ends_after_s: float, silent: tuple[int, ...] = ()) -> None:
        self._clock, self._ends_after_s, self._silent = clock, ends_after_s, silent
        self.told: list[int] = []
        self.looks = 0
        self.flushes_s = 0.0  # files are on their way to a bucket until then
        self.error: Exception | None = None

    async def cancel(self, cluster: Cluster, run_id: int) -> None:
        self.told.append(run_id)
        if self.error:
            raise self.error

    async def poll(self, cluster: Cluster, run_id: int) -> Any:
        self.looks += 1
        has_ended = self._clock.time_s >= START_S + self._ends_after_s
        is_flushing = self._clock.time_s < START_S + self.flushes_s
        return SimpleNamespace(
            status=RunStatus.CANCELLED if has_ended else RunStatus.RUNNING,
            unreachable=self._silent,
            flush="files are on their way" if is_flushing else "",
        )


def end(folder: Path, gang: Gang, clock: Hands, *, grace_s: float, nodes: tuple[Node, ...]) -> float:
    """End the program; return the seconds that it took."""
    unused: Any = None
    teardown = AttemptTeardown(unused, unused, gang, clock, Config(home=folder, owner=OWNER))  # type: ignore[arg-type]
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=len(nodes))
    cluster = Cluster(
        name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes, created_s=START_S
    )  # fmt: skip
    attempt = Attempt(job_id=1, number=2, cluster="c", placement=placement, started_s=START_S)
    asyncio.run(teardown.end_program(attempt, cluster, grace_s=grace_s))
    return clock.time_s - START_S


def test_an_attempt_costs_what_its_cluster_cost_minus_earlier_attempts_on_it(tmp_path: Path) -> None:
    clock, unused = Hands(), SimpleNamespace()
    store = Store(tmp_path / "state.db", clock=clock)
    teardown = AttemptTeardown(store, unused, unused, clock, Config(home=tmp_path, owner=OWNER))  # type: ignore[arg-type]
    job_id = store.jobs.add("j", Task()).id
    elsewhere, first, second = (replace(ATTEMPT, job_id=job_id, number=number, cluster="c") for number in (1, 2, 3))
    store.jobs.put_attempt(replace(elsewhere, cluster="b", ended_s=START_S, usd=5.0))
    store.bills.record(replace(NODE, created_s=START_S))
    store.jobs.put_attempt(first)
    clock.time_s += 3600.0
    teardown.close(first)
    store.jobs.put_attempt(second)
    clock.time_s += 7200.0
    teardown.close(second)
    usd_hour = NODE.usd_hour
    costs = [attempt.usd for attempt in store.jobs.list_attempts(job_id)]
    assert costs == pytest.approx([5.0, usd_hour, 2 * usd_hour])


GANG = (NODE, replace(NODE, id="m", rank=1), replace(NODE, id="l", rank=2))
ONE_LOST = (*GANG[:2], replace(GANG[2], state=NodeState.TERMINATED))


@pytest.mark.parametrize(
    ("ends_after_s", "grace_s", "nodes", "silent", "expected_s"),
    [
        (10.0, 60.0, GANG, (), 10.0),
        (90.0, 60.0, GANG, (), 60.0),
        (90.0, 0.0, GANG, (), 0.0),
        (90.0, 60.0, GANG, (0, 1), 60.0),
        (90.0, 60.0, GANG, (0, 1, 2), 0.0),
        (90.0, 60.0, ONE_LOST, (0, 1), 0.0),
    ],
    ids=["it saves and ends", "it does not end", "no grace", "one answers", "none answers", "none that lives answers"],
)
def test_a_program_gets_its_grace_period_only_while_it_uses_it(
    tmp_path: Path,
    ends_after_s: float,
    grace_s: float,
    nodes: tuple[Node, ...],
    silent: tuple[int, ...],
    expected_s: float,
) -> None:
    clock = Hands()
    gang = Gang(clock, ends_after_s=ends_after_s, silent=silent)
    assert end(tmp_path, gang, clock, grace_s=grace_s, nodes=nodes) == expected_s
    assert gang.told == [2], "the run of the second attempt on the nodes of the first"
    assert gang.looks == (expected_s + POLL_S * (expected_s < grace_s)) / POLL_S


def test_files_on_their_way_to_a_bucket_are_waited_for_past_the_grace(tmp_path: Path) -> None:
    clock = Hands()
    gang = Gang(clock, ends_after_s=300.0)
    gang.flushes_s = 300.0
    assert end(tmp_path, gang, clock, grace_s=60.0, nodes=GANG) == 300.0


@pytest.mark.parametrize(
    ("task", "grace_s"),
    [
        (Task(), 0.0),
        (Task(storage_mounts=(StorageMount(target="/in", mode="copy"),)), 0.0),
        (
            Task(storage_mounts=(StorageMount(target="/in", mode="COPY"), StorageMount(target="/o", mode="mount"))),
            END_S,
        ),
        (Task(group=GroupRole(name="rl", is_primary=True)), 0.0),
        (Task(group=GroupRole(name="rl", is_primary=False)), END_S),
    ],
    ids=["nothing to save", "copied", "mounted", "primary", "auxiliary"],
)
def test_cancelled_program_gets_time_only_for_files_in_mounts_and_as_an_auxiliary_task(
    task: Task, grace_s: float
) -> None:
    assert find_grace_s(Job(id=1, name="j", status=JobStatus.RUNNING, submitted_s=0.0, task=task)) == grace_s


def test_only_an_answer_of_the_cloud_permits_teardown_of_an_unnotified_program(tmp_path: Path) -> None:
    """A replaced daemon must stop here, and a fault of ours must be seen: the nodes are not ended yet."""
    clock = Hands()
    gang = Gang(clock, ends_after_s=90.0)
    gang.error = TransientError("no answer")
    assert end(tmp_path, gang, clock, grace_s=60.0, nodes=GANG) == 0.0 and gang.looks == 0
    for error in (FencedError("another daemon leads"), RuntimeError("a fault of ours")):
        gang.error = error
        with pytest.raises(type(error)):
            end(tmp_path, gang, clock, grace_s=60.0, nodes=GANG)
