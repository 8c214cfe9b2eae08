"""A node with a broken GPU is replaced before the first step, and its GPUs are not used again."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.local import LocalCloud
from broker.config import Config
from broker.jobs.controller import JobController
from broker.jobs.node_health import NODES_MAX, REMEMBERED_S, ROW, NodeHealth, UnhealthyNodes
from broker.optimizer import network
from broker.provision.lifecycle import Provisioner
from broker.runtime.gang import Gang
from broker.runtime.transports.local import LocalTransport
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    Estimate,
    Job,
    JobRecovery,
    JobStatus,
    Node,
    NodeFault,
    NodeState,
    Offer,
    OutcomeKind,
    Placement,
    Plan,
    Resources,
    RunStatus,
    SlowNetwork,
    Task,
)
from tests.agent.fake_gpus import FakeGpus, make_fake_gpus
from tests.simulation.virtual import VirtualClock
from tests.simulation.world import Report
from tests.tiers import long, spread

OFFER = Offer(
    cloud="local",
    region="local",
    zone="local-a",
    instance_type="gpus",
    vcpus=1,
    memory_gib=1,
    ondemand_usd_hour=1.0,
    spot_usd_hour=0.3,
    accelerator="A100-80GB",
    accelerator_count=2,
)
RECOVERY = JobRecovery(checks_health=True)


def make_placement(node_count: int = 1, *, accelerator_count: float = 2) -> Placement:
    return Placement(offer=replace(OFFER, accelerator_count=accelerator_count), is_spot=False, node_count=node_count)


class Bed:
    """A controller with real nodes of the local cloud."""

    def __init__(self, folder: Path) -> None:
        self.clock = SystemClock()
        self.config = Config(home=folder, owner="me")
        self.store = Store(self.config.database, clock=self.clock)
        self.cloud = LocalCloud(folder / "nodes", clock=self.clock)
        self.provisioner = Provisioner({"local": self.cloud}, self.store, clock=self.clock, owner="me")

    def plan(self, task: Task, avoid: object = None) -> Plan:
        estimate = Estimate(placement=make_placement(task.num_nodes))
        return Plan(task=task, estimates=(estimate,), rejections=(), prices_as_of="2026-11-01", reason="cheapest")

    def run(self, task: Task, look: Callable[[Job], None] = lambda job: None) -> Job:
        job_id = self.store.jobs.add("train", task).id
        gang = Gang(LocalTransport(), clock=self.clock)
        controller = JobController(
            job_id,
            store=self.store,
            provisioner=self.provisioner,
            gang=gang,
            planner=self.plan,
            clock=self.clock,
            config=self.config,
        )

        async def run_to_end() -> None:
            while not math.isinf(wait_s := await controller.step()):
                await asyncio.sleep(min(wait_s, 0.2))
                look(self.get_job(job_id))

        asyncio.run(run_to_end())
        return self.get_job(job_id)

    def get_job(self, job_id: int) -> Job:
        job = self.store.jobs.get(job_id)
        assert job is not None
        return job

    def describe(self, job: Job) -> list[str]:
        return [each.message for each in self.store.events.list(job_id=job.id)]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    bed = Bed(tmp_path / "home")
    yield bed
    bed.store.close()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    fake = make_fake_gpus(tmp_path / "gpus")
    monkeypatch.setenv("PATH", str(fake.folder), prepend=":")
    return fake


def make_task(gpus: FakeGpus, *, num_nodes: int = 1, recovery: JobRecovery = RECOVERY) -> Task:
    run = 'echo "$(basename "$(dirname "$HOME")")" >> ' + str(gpus.folder / "starts")
    return Task(
        name="t", run=run, num_nodes=num_nodes, envs=gpus.envs, recovery=recovery, resources=(Resources(cloud="local"),)
    )


@pytest.mark.parametrize("fault", spread(["missing", "ecc", "xid", "slow"], every=4))
def test_job_leaves_a_node_with_a_fault_and_finishes(bed: Bed, gpus: FakeGpus, fault: str) -> None:
    gpus.plant(fault)
    job = bed.run(make_task(gpus))
    assert job.status is JobStatus.SUCCEEDED
    kinds = [attempt.outcome.kind for attempt in job.attempts if attempt.outcome]
    assert kinds == [OutcomeKind.UNHEALTHY, OutcomeKind.SUCCEEDED]
    starts = (gpus.folder / "starts").read_text().split()
    assert len(starts) == 1 and starts[0] != gpus.read_sick(), "the program never ran on the node with the fault"
    (said,) = [each for each in bed.describe(job) if "is unhealthy" in each]
    assert said.startswith(f"node 0 ({gpus.read_sick()}) is unhealthy: ") and "replacing it" in said


@pytest.mark.long
def test_job_leaves_a_node_with_a_slow_network_and_finishes(
    bed: Bed, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stated speed of these nodes is far below what this machine does, even if it is busy."""
    monkeypatch.setitem(network._BY_CLOUD, "local", [("gpus", 0.05)])
    network.find_network_gbs.cache_clear()
    gpus.plant("network")
    job = bed.run(make_task(gpus, num_nodes=3))
    network.find_network_gbs.cache_clear()
    assert job.status is JobStatus.SUCCEEDED
    kinds = [attempt.outcome.kind for attempt in job.attempts if attempt.outcome]
    assert kinds == [OutcomeKind.UNHEALTHY, OutcomeKind.SUCCEEDED]
    starts = (gpus.folder / "starts").read_text().split()
    assert len(starts) == 3 and gpus.read_sick() not in starts
    (said,) = [each for each in bed.describe(job) if "is unhealthy" in each]
    assert f"({gpus.read_sick()}) is unhealthy: the network to ranks " in said and "not using its GPUs" in said


@long
def test_healthy_nodes_of_the_gang_are_kept(bed: Bed, gpus: FakeGpus) -> None:
    gpus.plant("ecc")
    job = bed.run(make_task(gpus, num_nodes=2))
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 2
    assert job.attempts[0].cluster == job.attempts[1].cluster, "the next attempt reuses the other node"


def test_check_can_be_switched_off(bed: Bed, gpus: FakeGpus) -> None:
    gpus.plant("ecc")
    job = bed.run(make_task(gpus, recovery=JobRecovery(checks_health=False)))
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 1
    assert not (gpus.folder / "sick").is_symlink(), "nvidia-smi was not asked"


@pytest.mark.long
def test_slow_node_is_named_while_the_job_continues(bed: Bed, gpus: FakeGpus) -> None:
    run = """
    for step in $(seq 1 4000); do
      [ -e "$BROKER_CHECKPOINT_DIR/stop" ] && break
      echo "{\\"step\\": $step, \\"own_s\\": $((SKYPILOT_NODE_RANK * 3 + 1))}" >> "$BROKER_PROGRESS_FILE"; sleep 0.3
    done"""
    task = replace(make_task(gpus, num_nodes=2), run=run)

    def stop(job: Job) -> None:
        if any(" is slow: " in each for each in bed.describe(job)):
            folder = bed.config.checkpoints / job.folder
            (folder / "stop").touch()

    job = bed.run(task, look=stop)
    assert job.status is JobStatus.SUCCEEDED and len(job.attempts) == 1
    (said,) = [each for each in bed.describe(job) if " is slow: " in each]
    assert said.startswith("node 1 (") and said.endswith("is slow: 4 s for its own part of a step, 1 s on the others")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[tuple[Store, VirtualClock]]:
    clock = VirtualClock()
    store = Store(tmp_path / "state.db", clock=clock)
    yield store, clock
    store.close()


def make_cluster(*ids: str, accelerator_count: float = 2, handle: str = "user@host") -> Cluster:
    nodes = tuple(
        Node(id=id, cloud="aws", owner="me", cluster="c", attempt=1, rank=rank, state=NodeState.RUNNING, handle=handle)
        for rank, id in enumerate(ids)
    )
    placement = make_placement(len(ids), accelerator_count=accelerator_count)
    return Cluster(name="c", status=ClusterStatus.UP, placement=placement, attempt=1, nodes=nodes)


def test_gpus_are_refused_until_they_may_be_repaired(memory: tuple[Store, VirtualClock]) -> None:
    store, clock = memory
    job_id = store.jobs.add("t", Task(run="true")).id
    nodes, cluster = UnhealthyNodes(store, clock), make_cluster("i-1", "i-2")
    fault = NodeFault(rank=1, reason="an ECC error", serials=("GPU-x", "1320"))
    for _ in range(2):  # each poll reports it again
        nodes.record(cluster, fault, job_id=job_id)
    assert nodes.list_refused() == ["1320", "GPU-x"]
    assert (nodes.explain(cluster, [1]), nodes.explain(cluster, [0])) == ("an ECC error", "")
    (event,) = store.events.list(job_id=job_id)
    assert event.message == (
        "node 1 (i-2) is unhealthy: an ECC error; replacing it, and not using its GPUs for 14 days"
    )
    clock.run(lambda: clock.sleep(REMEMBERED_S + 1))
    assert nodes.list_refused() == [] and nodes.explain(cluster, [1]) == ""


def test_memory_is_bounded_and_damage_empties_it(memory: tuple[Store, VirtualClock]) -> None:
    store, clock = memory
    job_id = store.jobs.add("t", Task(run="true")).id
    nodes = UnhealthyNodes(store, clock)
    for count in range(NODES_MAX + 5):
        nodes.record(make_cluster(f"i-{count}"), NodeFault(rank=0, reason="x", serials=(f"G{count}",)), job_id=job_id)
    assert len(nodes.list_refused()) == NODES_MAX and "G0" not in nodes.list_refused()
    for damage in ("", "{", "3", '[{"node": "i-1"}]', "[3]"):
        store.meta.put(ROW, damage)
        assert nodes.list_refused() == []


@pytest.mark.parametrize(
    ("count", "handle", "asked", "is_checked"),
    [
        (8, "user@host", None, True),
        (8, "user@host", False, False),
        (0, "user@host", None, False),
        (0, "user@host", True, False),
        (8, "/home/me/nodes/n", None, False),
        (8, "/home/me/nodes/n", True, True),
    ],
)
def test_check_is_for_gpus_of_clouds_unless_the_task_says_otherwise(
    memory: tuple[Store, VirtualClock], count: int, handle: str, asked: bool | None, is_checked: bool
) -> None:
    store, clock = memory
    provisioner = Provisioner({}, store, clock=clock, owner="me")
    health = NodeHealth(store, UnhealthyNodes(store, clock), provisioner, clock)
    job = store.jobs.add("t", Task(run="true", recovery=JobRecovery(checks_health=asked)))
    envs = health.make_envs(job, make_cluster("i-1", accelerator_count=count, handle=handle))
    assert ("BROKER_HEALTH" in envs) is is_checked
    if is_checked:
        assert json.loads(envs["BROKER_HEALTH"]) == {"gpus": 8, "refused": []}


def test_gang_gets_the_speed_that_the_plan_assumes(memory: tuple[Store, VirtualClock]) -> None:
    store, clock = memory
    health = NodeHealth(store, UnhealthyNodes(store, clock), Provisioner({}, store, clock=clock, owner="me"), clock)
    job = store.jobs.add("t", Task(run="true"))
    cluster = make_cluster("i-1", "i-2", accelerator_count=8)
    offer = replace(cluster.placement.offer, cloud="aws", instance_type="p4d.24xlarge")
    cluster = replace(cluster, placement=replace(cluster.placement, offer=offer))
    order = json.loads(health.make_envs(job, cluster)["BROKER_HEALTH"])
    assert order["network_gbs"] == pytest.approx(400 / 8 * 0.8), "as the forecast of the throughput counts it"


def test_slow_network_is_reported_once_for_each_attempt(memory: tuple[Store, VirtualClock]) -> None:
    store, clock = memory
    health = NodeHealth(store, UnhealthyNodes(store, clock), Provisioner({}, store, clock=clock, owner="me"), clock)
    job = store.jobs.add("t", Task(run="true"))
    job = replace(
        job, attempts=(Attempt(job_id=job.id, number=1, cluster="c", placement=make_placement(2), started_s=0.0),)
    )
    found = SlowNetwork(backend="nccl", expected_gbs=40.0, gang_gbs=3.0, pair=(0, 1), pair_gbs=2.5)
    report = Report(status=RunStatus.RUNNING, returncode=None, unreachable=(), progress=None, network=found)
    for _ in range(2):
        asyncio.run(health.observe(job, make_cluster("i-1", "i-2"), report))
    (event,) = store.events.list(job_id=job.id)
    assert event.message == (
        "the network between the nodes is slower than expected: an all-reduce reaches 24 Gbit/s, "
        "nodes 0 and 1 reach 20 Gbit/s, not 320 (nccl)"
    )
