"""Garbage collection: unrecorded nodes with our tag, dead clusters, surplus gangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.errors import FencedError, TransientError
from broker.provision.adoption import Adopter
from broker.provision.bring_up import lock_name
from broker.provision.collection import (
    GRACE_S,
    SWEEP_EVERY_S,
    UP_S_MAX,
    Collector,
    ResourceSweeper,
    _sum_concurrently,
)
from broker.state.store import Store
from broker.types import (
    Cluster,
    ClusterStatus,
    IntentEnd,
    JobStatus,
    Node,
    NodeList,
    NodeRequest,
    NodeState,
    Placement,
    Task,
)
from tests.simulation.world import make_offer
from tests.state.samples import START_S, Hands

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)
NODE = Node(
    id="n", cloud="simulated", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING,
    token="t", created_s=START_S - 1000.0,
)  # fmt: skip


class Cloud:
    """A cloud that lists the given nodes and records terminate calls."""

    name = "simulated"
    settle_s = 20.0

    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes
        self.ended: list[str] = []
        self.failure: Exception | None = None

    async def list_nodes(self, owner: str) -> NodeList:
        assert owner == "me"
        if self.failure:
            raise self.failure
        return NodeList(nodes=self.nodes)

    async def terminate_nodes(self, nodes: Sequence[Any]) -> None:
        self.ended += [getattr(node, "id", node) for node in nodes]


class Stage:
    def __init__(self, folder: Path) -> None:
        self.clock = Hands()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.cloud = Cloud()
        self.downed: list[str] = []
        self.terminated: list[str] = []
        self.returning: set[str] = set()
        self.failure: Exception | None = None
        self.collector = Collector(
            {"simulated": self.cloud},  # type: ignore[dict-item]
            self.store,
            clock=self.clock,
            owner="me",
            down=self.down,
            terminate=self.terminate,
            surplus=SimpleNamespace(tokens=self.returning),  # type: ignore[arg-type]
            adopter=Adopter({}, self.store, clock=self.clock, owner="me"),
        )
        self.store.meta.mark_adopted("simulated")

    async def down(self, name: str) -> None:
        if self.failure:
            raise self.failure
        self.downed.append(name)

    async def terminate(self, request: NodeRequest) -> None:
        if self.failure:
            raise self.failure
        self.terminated.append(request.token)

    def collect(self) -> int:
        return asyncio.run(self.collector.collect())

    def find(self) -> tuple[list[str], list[str]]:
        lost = asyncio.run(self.collector.find())
        return [node.id for node in lost.nodes], list(lost.names)

    def put_cluster(self, name: str, status: ClusterStatus = ClusterStatus.UP, **fields: Any) -> None:
        created_s = fields.pop("created_s", self.clock.now_s())
        self.store.clusters.put(
            Cluster(name=name, status=status, placement=PLACEMENT, attempt=1, created_s=created_s, **fields)
        )

    def put_intent(self, cluster: str, token: str, *, cloud: str = "simulated") -> None:
        placement = replace(PLACEMENT, offer=replace(PLACEMENT.offer, cloud=cloud))
        self.store.intents.put(NodeRequest(owner="me", cluster=cluster, attempt=1, token=token, placement=placement))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_an_unrecorded_node_is_terminated_billed_and_reported(stage: Stage) -> None:
    stage.cloud.nodes = (NODE,)
    assert stage.find() == (["n"], [])
    assert stage.collect() == 1 and stage.cloud.ended == ["n"]
    assert [bill.node for bill in stage.store.bills.list()] == ["n"]
    assert [(event.kind, event.cluster) for event in stage.store.events.list()] == [("collected", "c")]


def test_the_bill_of_a_collected_node_ends_with_it(stage: Stage) -> None:
    stage.cloud.nodes = (NODE,)
    stage.collect()
    stage.cloud.nodes = (replace(NODE, state=NodeState.TERMINATED, ended_s=START_S + 60.0),)
    stage.clock.time_s += 3600.0
    stage.collect()
    assert [bill.ended_s for bill in stage.store.bills.list()] == [START_S + 60.0]


def test_the_request_for_a_replacement_is_released_only_once_no_process_can_be_working_on_it(stage: Stage) -> None:
    nodes = tuple(
        replace(NODE, id=name, rank=rank, state=state)
        for rank, (name, state) in enumerate((("a", NodeState.RUNNING), ("b", NodeState.TERMINATED)))
    )
    stage.put_cluster("c", nodes=nodes)
    stage.put_intent("c", "t")
    stage.clock.time_s += UP_S_MAX - 1.0
    assert stage.collect() == 0
    stage.clock.time_s += 2.0
    assert stage.collect() == 1 and stage.terminated == ["t"]


@pytest.mark.parametrize(
    "kept",
    [
        replace(NODE, owner="somebody else"),
        replace(NODE, state=NodeState.TERMINATED),
        replace(NODE, created_s=START_S - GRACE_S - 20.0),
    ],
)
def test_foreign_ended_and_very_young_nodes_are_left_alone(stage: Stage, kept: Node) -> None:
    stage.cloud.nodes = (kept,)
    assert stage.find() == ([], []) and stage.collect() == 0 and stage.cloud.ended == []


def test_before_adoption_only_nodes_that_this_store_requested_are_terminated(stage: Stage) -> None:
    stage.store.meta.forget_adoptions()
    stage.put_intent("c", "t")
    stage.store.intents.close("t", IntentEnd.REFUSED)
    stage.cloud.nodes = (NODE, replace(NODE, id="m", token="of another life"))
    assert stage.find() == (["n"], [])
    assert stage.collect() == 1 and stage.cloud.ended == ["n"]


@pytest.mark.parametrize("state", [NodeState.PENDING, NodeState.STOPPED])
def test_an_unrecorded_node_is_terminated_in_any_live_state_right_after_the_grace_period(
    stage: Stage, state: NodeState
) -> None:
    stage.cloud.nodes = (replace(NODE, state=state, created_s=START_S - GRACE_S - 20.0 - 0.5),)
    assert stage.collect() == 1


def test_nodes_of_a_record_or_an_open_intent_are_left_alone(stage: Stage) -> None:
    other = replace(NODE, id="m", token="s")
    stage.cloud.nodes = (NODE, other)
    stage.put_cluster("c", nodes=(NODE,), job_id=None)
    assert stage.find() == (["m"], [])
    stage.put_intent("d", "s")
    assert stage.find() == ([], [])
    stage.store.intents.close("s", IntentEnd.REFUSED)
    assert stage.find() == (["m"], [])


def test_a_failing_list_does_not_stop_the_collection_of_clusters(stage: Stage) -> None:
    stage.cloud.failure = TransientError("no answer")
    stage.put_cluster("c", ClusterStatus.TERMINATING)
    assert stage.collect() == 1 and stage.downed == ["c"]
    lost = asyncio.run(stage.collector.find())
    assert lost.names == ("c",) and list(lost.failures) == ["simulated"], "what was not searched is named"


def test_clusters_of_ended_jobs_and_interrupted_ups_and_downs_are_collected(stage: Stage) -> None:
    live, ended = (stage.store.jobs.add(name, Task()).id for name in "ab")
    stage.store.jobs.set_status(ended, JobStatus.SUCCEEDED)
    stage.put_cluster("of-a-live-job", job_id=live)
    stage.put_cluster("of-an-ended-job", job_id=ended)
    stage.put_cluster("mine")
    stage.put_cluster("going", ClusterStatus.TERMINATING)
    stage.put_cluster("coming", ClusterStatus.INIT, created_s=START_S - UP_S_MAX)
    stage.put_cluster("cut-short", ClusterStatus.INIT, created_s=START_S - UP_S_MAX - 1.0)
    stage.put_cluster("job-coming", ClusterStatus.INIT, created_s=START_S - UP_S_MAX - 1.0, job_id=live)
    expected = ["cut-short", "going", "of-an-ended-job"]
    assert stage.find() == ([], expected)
    assert stage.collect() == 3 and stage.downed == expected


def test_an_old_open_intent_without_a_cluster_is_an_interrupted_up(stage: Stage) -> None:
    stage.put_intent("no-record", "t1")
    stage.put_intent("coming", "t2")
    stage.put_cluster("coming", ClusterStatus.INIT, created_s=START_S)
    stage.put_intent("up", "t3")
    stage.put_cluster("up")
    stage.put_intent("of-a-job", "t4")
    stage.put_cluster("of-a-job", ClusterStatus.INIT, job_id=stage.store.jobs.add("j", Task()).id)
    stage.clock.time_s += UP_S_MAX
    assert stage.find()[1] == []
    stage.clock.time_s += 1.0
    assert stage.find()[1] == ["coming", "no-record"]


def test_a_search_that_has_waited_for_capacity_for_hours_is_not_taken_for_an_interrupted_one(stage: Stage) -> None:
    stage.put_cluster("waiting", ClusterStatus.INIT, created_s=START_S - 10 * UP_S_MAX)
    stage.put_intent("waiting", "t1")
    assert stage.find()[1] == [], "it has just requested nodes again"
    stage.clock.time_s += UP_S_MAX + 1.0
    with lock_name(stage.store.path.parent / "locks", "waiting"):
        assert stage.find()[1] == [], "a repeated command continues with the request of one that was killed"
    assert stage.find()[1] == ["waiting"]


def test_a_cluster_that_this_process_brings_up_is_spared(stage: Stage) -> None:
    stage.put_cluster("a", ClusterStatus.INIT, created_s=START_S - 2 * UP_S_MAX)
    with stage.collector.spare("a"):
        with stage.collector.spare("a"):
            assert stage.find()[1] == []
        assert stage.find()[1] == [], "the outer one still does"
    assert stage.find()[1] == ["a"]


@pytest.mark.parametrize("status", [ClusterStatus.UP, ClusterStatus.STOPPED])
def test_a_surplus_gang_is_released(stage: Stage, status: ClusterStatus) -> None:
    stage.put_cluster("c", status)
    stage.put_intent("c", "t")
    stage.put_intent("c", "elsewhere", cloud="one that is not set up here")
    with stage.collector.spare_gang("c"):
        assert stage.collect() == 0, "its node is being replaced"
    stage.returning.add("t")
    assert stage.collect() == 0, "this process is working on it"
    stage.returning.clear()
    stage.cloud.nodes = (NODE,)
    assert stage.find() == (["n"], []), "its open intent no longer protects it"
    stage.cloud.nodes = ()
    assert stage.collect() == 1 and stage.terminated == ["t"]


def test_a_failed_termination_is_not_counted_and_blocks_no_other(stage: Stage) -> None:
    stage.failure = TransientError("not now")
    stage.cloud.nodes = (NODE,)
    stage.put_cluster("going", ClusterStatus.TERMINATING)
    stage.put_cluster("up")
    stage.put_intent("up", "t2")
    assert stage.collect() == 1 and (stage.downed, stage.terminated) == ([], [])


def test_gangs_are_released_concurrently(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gang whose end takes minutes to confirm must not delay the others."""
    stage.put_cluster("c")
    stage.put_cluster("going", ClusterStatus.TERMINATING)
    for token in ("t1", "t2"):
        stage.put_intent("c", token)
    met: list[object] = []

    async def meet(what: object) -> None:
        met.append(what)
        while len(met) < 3:
            await asyncio.sleep(0)

    monkeypatch.setattr(stage.collector, "_terminate", meet)
    monkeypatch.setattr(stage.collector, "_down", meet)
    assert asyncio.run(asyncio.wait_for(stage.collector.collect(), 60)) == 3


def test_a_fenced_collector_terminates_nothing_more(stage: Stage) -> None:
    """Another daemon leads: writes are refused, and nodes that are terminated here may be in use there."""
    stage.failure = FencedError("another daemon leads")
    stage.put_cluster("up")
    stage.put_intent("up", "t1")
    with pytest.raises(FencedError):
        stage.collect()
    stage.store.intents.close("t1", IntentEnd.REFUSED)
    stage.put_cluster("going", ClusterStatus.TERMINATING)
    with pytest.raises(FencedError):
        stage.collect()
    stage.cloud.failure, stage.failure = stage.failure, None
    with pytest.raises(FencedError):
        stage.collect()
    assert (stage.downed, stage.terminated) == ([], [])


# -- what clusters leave behind besides nodes -----------------------------------------------------------------------


class Sweeping(Cloud):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[frozenset[str]] = []

    async def sweep(self, owner: str, keep: frozenset[str]) -> int:
        self.kept.append(keep)
        if self.failure:
            raise self.failure
        return 2


def test_resources_are_swept_after_a_cluster_has_gone_and_once_an_hour(stage: Stage) -> None:
    cloud = Sweeping()
    clouds: Any = {"plain": Cloud(), "simulated": cloud}
    sweeper = ResourceSweeper(clouds, stage.store, clock=stage.clock, owner="me")

    def sweep() -> int:
        return asyncio.run(sweeper.sweep())

    stage.put_cluster("a")
    stage.put_intent("b", "t")
    assert sweep() == 2 and cloud.kept == [{"a", "b"}]
    assert sweep() == 0, "no cluster has gone"
    stage.put_cluster("c")
    assert sweep() == 0
    stage.store.clusters.delete("a")
    assert sweep() == 2 and cloud.kept[-1] == {"b", "c"}
    stage.clock.time_s += SWEEP_EVERY_S - 1.0
    assert sweep() == 0
    stage.clock.time_s += 1.0
    assert sweep() == 2
    stage.store.intents.close("t", IntentEnd.TERMINATED)
    cloud.failure = TransientError("not now")
    assert sweep() == 0 and len(cloud.kept) == 4
    cloud.failure = None
    assert sweep() == 2 and cloud.kept[-1] == {"c"}, "a failed sweep is repeated at the next occasion"


def test_the_first_error_is_raised_and_the_other_coroutines_are_cancelled() -> None:
    ended: list[str] = []

    async def wait() -> int:
        try:
            await asyncio.sleep(3600.0)
        finally:
            ended.append("cancelled")
        return 1

    async def fail() -> int:
        await asyncio.sleep(0)
        raise FencedError("another broker leads")

    with pytest.raises(FencedError):
        asyncio.run(_sum_concurrently([wait(), fail()]))
    assert ended == ["cancelled"]
    assert asyncio.run(_sum_concurrently([])) == 0
